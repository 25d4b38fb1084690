//! Kernels of the fused attention: unpacking to levels, dense scores and sums on small tiles, integer scores, exponentials.
//!
//! Rows of queries and tiles are padded with zeros to a stride `dim` that eight divides. x86-64 with AVX2, FMA and F16C has forms
//! of its own, chosen at run time; every other machine (aarch64 too) runs the plain loops, which the tests hold the others to.
//! A sum runs over the tokens in order, one accumulator a channel, so a zero weight changes no bit.

use super::rows::Door;
use half::f16;

#[cfg(target_arch = "x86_64")]
mod avx2;

/// Levels of up to four bits; tables of fewer codes repeat.
pub(super) struct Small {
    pub bits: u8,
    /// Levels of codes.
    pub levels: [f32; 16],
    /// Integer levels for scores: `levels[c] ~ unit * (bytes[c] - middle)`.
    pub bytes: [i8; 16],
    pub unit: f32,
    pub middle: f32,
    /// Mean square of what the integer levels miss.
    pub error: f32,
}

/// Queries in eight bits for the integer scores, in the order in which [`codes`] meets their channels.
pub(super) struct Bytes {
    pub rows: Vec<i8>,
    /// Step of each row.
    pub steps: Vec<f32>,
    /// Sum of each row.
    pub sums: Vec<i32>,
}

/// Calls the AVX2 form and returns, where the machine has it.
macro_rules! fast {
    ($($call:tt)*) => {
        #[cfg(target_arch = "x86_64")]
        if available() {
            // SAFETY: the features that the function enables were found on this machine.
            return unsafe { avx2::$($call)* };
        }
    };
}

/// Whether the machine has the AVX2 forms.
#[cfg(target_arch = "x86_64")]
fn available() -> bool {
    #[cfg(test)]
    if tests::PLAIN.get() {
        return false;
    }
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Levels of the rows `picks` of packed words, `channels` of them (a multiple of eight) a row.
pub(super) fn levels(
    grid: &Small,
    words: &[u32],
    row_words: usize,
    picks: &[u32],
    channels: usize,
    dim: usize,
    out: &mut [f32],
) {
    assert_eq!(channels % 8, 0, "{channels} channels");
    fast!(levels(grid, words, row_words, picks, channels, dim, out));
    for (&pick, out) in picks.iter().zip(out.chunks_exact_mut(dim)) {
        let words = &words[pick as usize * row_words..][..row_words];
        for (i, out) in out[..channels].iter_mut().enumerate() {
            *out = grid.levels[usize::from(crate::bits::code_at(words, grid.bits, i))];
        }
    }
}

/// Half floats as f32.
pub(super) fn halves(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "{} half floats, room for {}", from.len(), to.len());
    fast!(halves(from, to));
    f16::read(from, to);
}

/// Inner products of all query rows with `n` tile rows: `out[row * stride + token]`.
pub(super) fn scores(queries: &[f32], tile: &[f32], dim: usize, n: usize, stride: usize, out: &mut [f32]) {
    fast!(scores(queries, tile, dim, n, stride, out));
    for (q, out) in queries.chunks_exact(dim).zip(out.chunks_exact_mut(stride)) {
        for (k, out) in tile.chunks_exact(dim).zip(&mut out[..n]) {
            *out = crate::rotation::dot(q, k);
        }
    }
}

/// Adds `n` tile rows to the sums of all query rows, weighted by `weights[row * stride + token]`.
pub(super) fn accumulate(
    weights: &[f32],
    tile: &[f32],
    dim: usize,
    n: usize,
    stride: usize,
    sums: &mut [f32],
) {
    fast!(accumulate(weights, tile, dim, n, stride, sums));
    for (sum, weights) in sums.chunks_exact_mut(dim).zip(weights.chunks_exact(stride)) {
        for (v, w) in tile.chunks_exact(dim).zip(&weights[..n]) {
            sum.iter_mut().zip(v).for_each(|(s, v)| *s += w * v);
        }
    }
}

/// exp(x - top) in place, and its sum.
pub(super) fn exponentials(x: &mut [f32], top: f32) -> f32 {
    fast!(exponentials(x, top));
    x.iter_mut().for_each(|x| *x = (*x - top).exp());
    x.iter().sum()
}

/// Whether integer scores have a form for this many bits and channels: 16-bit sums hold 512 channels.
pub(super) fn integer_form(bits: u8, channels: usize) -> bool {
    matches!(bits, 2 | 4) && channels % (256 / usize::from(bits)) == 0 && channels <= 512
}

/// The channel that stands at `place` of a row of [`Bytes`]: 32 bytes of codes are taken a field at a time.
pub(super) fn channel_at(bits: u8, place: usize) -> usize {
    let per_byte = 8 / usize::from(bits);
    let (chunk, field, byte) = (place / (32 * per_byte), place / 32 % per_byte, place % 32);
    (chunk * 32 + byte) * per_byte + field
}

/// Integer inner products times `grid.unit` and the steps of the queries, for tokens `first..first + n`.
pub(super) fn integer_scores(
    grid: &Small,
    queries: &Bytes,
    words: &[u32],
    row_words: usize,
    n: usize,
    stride: usize,
    out: &mut [f32],
) {
    fast!(integer_scores(grid, queries, words, row_words, n, stride, out));
    let channels = row_words * 32 / usize::from(grid.bits);
    for (r, out) in out.chunks_exact_mut(stride).take(queries.steps.len()).enumerate() {
        let q = &queries.rows[r * channels..][..channels];
        for (words, out) in words.chunks_exact(row_words).zip(&mut out[..n]) {
            let code = |place| crate::bits::code_at(words, grid.bits, channel_at(grid.bits, place));
            let level = |place| i32::from(grid.bytes[usize::from(code(place))]);
            let sum: i32 = q.iter().enumerate().map(|(i, &q)| i32::from(q) * level(i)).sum();
            *out = queries.steps[r] * grid.unit * (sum as f32 - grid.middle * queries.sums[r] as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use std::cell::Cell;

    thread_local! {
        /// Set where a test wants the plain loops.
        pub(super) static PLAIN: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs both forms of a kernel into a buffer.
    fn both(len: usize, kernel: impl Fn(&mut [f32])) -> [Vec<f32>; 2] {
        [false, true].map(|plain| {
            PLAIN.set(plain);
            let mut out = vec![0.25; len];
            kernel(&mut out);
            PLAIN.set(false);
            out
        })
    }

    fn close(what: &str, [fast, plain]: [Vec<f32>; 2]) {
        for (i, (a, b)) in fast.iter().zip(&plain).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs().max(1.0), "{what}: {a} and {b} at {i}");
        }
    }

    #[test]
    fn both_forms_agree() {
        let mut rng = Rng::new(1, 2);
        let mut normals = |n: usize| (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
        for dim in [8, 24, 64, 80, 128, 256] {
            for (rows, n) in [(1, 1), (2, 3), (3, 32), (4, 7), (9, 32)] {
                let (q, tile, weights) = (normals(rows * dim), normals(n * dim), normals(rows * 32));
                let what = format!("{dim} channels, {rows} rows, {n} tokens");
                close(&what, both(rows * 32, |out| scores(&q, &tile, dim, n, 32, out)));
                close(&what, both(rows * dim, |out| accumulate(&weights, &tile, dim, n, 32, out)));
            }
        }
        for len in [1, 8, 13, 32] {
            let x: Vec<f32> = normals(len).iter().map(|x| 20.0 * x).collect();
            close(
                "exp",
                both(len + 1, |out| {
                    out[..len].copy_from_slice(&x);
                    out[len] = exponentials(&mut out[..len], 30.0).ln();
                }),
            );
        }
        let mut x = [f32::NEG_INFINITY, 1.0, 0.0, -200.0, f32::NAN, 0.5, 0.0, 1.0];
        assert!(exponentials(&mut x, 1.0).is_nan() && x[4].is_nan());
        assert!(x[0] == 0.0 && x[3] == 0.0 && (x[1] - 1.0).abs() < 1e-6);
        let all: Vec<f16> = (0..0x7c00).map(f16::from_bits).collect();
        let [fast, plain] = both(all.len(), |out| halves(&all, out));
        assert_eq!(fast, plain);
    }

    #[test]
    fn both_forms_of_levels_and_integer_scores_give_the_same_bits() {
        let mut rng = Rng::new(3, 4);
        for bits in 1..=4u8 {
            for channels in [8, 32, 40, 64, 128, 512] {
                let (w, n) = (crate::bits::words(channels, bits), 5);
                let words: Vec<u32> = (0..n * w).map(|_| rng.bits() as u32).collect();
                for middle in [0.0, 7.5] {
                    let bytes = |c: usize| if middle == 0.0 { (17 * c as i32 - 127) as i8 } else { c as i8 };
                    let code = |c: usize| c % (1 << bits);
                    let grid = Small {
                        bits,
                        levels: std::array::from_fn(|c| code(c) as f32 - 1.25),
                        bytes: std::array::from_fn(|c| bytes(code(c))),
                        unit: 0.1,
                        middle,
                        error: 0.0,
                    };
                    let picks = [4, 0, 3];
                    let [fast, plain] =
                        both(3 * channels, |out| levels(&grid, &words, w, &picks, channels, channels, out));
                    assert_eq!(fast, plain, "{bits} bits, {channels} channels");
                    if !integer_form(bits, channels) {
                        continue;
                    }
                    for rows in [1, 3, 6] {
                        let q: Vec<i8> = (0..rows * channels)
                            .map(|_| (rng.bits() as u32 % 255) as u8 as i8)
                            .map(|q| q.max(-127))
                            .collect();
                        let sums =
                            q.chunks(channels).map(|q| q.iter().map(|&q| i32::from(q)).sum()).collect();
                        let queries = Bytes { rows: q, steps: vec![0.5; rows], sums };
                        let [fast, plain] =
                            both(rows * 8, |out| integer_scores(&grid, &queries, &words, w, n, 8, out));
                        assert_eq!(fast, plain, "{bits} bits, {channels} channels, {rows} rows");
                    }
                }
            }
        }
    }
}
