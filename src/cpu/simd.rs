//! Kernels of the fused attention: unpacking to levels, dense scores and sums on small tiles, integer scores, exponentials.
//!
//! Rows of queries and tiles are padded with zeros to a stride `dim` that eight divides. x86-64 with AVX2, FMA and F16C has forms
//! of its own, and others with AVX-512, chosen at run time; every other machine (aarch64 too) runs the plain loops, which the
//! tests hold the others to.
//! A sum runs over the tokens in order, one accumulator a channel, so a zero weight changes no bit.

pub(super) use plain::greatest;

use super::rows::Door;
use crate::trellis::Trellis;
use half::f16;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;
#[cfg(target_arch = "x86_64")]
mod softmax;
#[cfg(target_arch = "x86_64")]
mod trellis;
#[cfg(target_arch = "x86_64")]
mod weighted;

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
    /// Integer levels for sums: `levels[c] ~ wide_unit * wide[c]`.
    pub wide: [i16; 16],
    pub wide_unit: f32,
}

/// The greatest of the integer levels for sums; those of the uniform grid are whole, since 15 divides it.
pub(super) const WIDE: f32 = 1020.0;

/// Queries in eight bits for the integer scores, in the order of [`channel_at`].
pub(super) struct Bytes {
    pub rows: Vec<i8>,
    /// Step of each row.
    pub steps: Vec<f32>,
    /// Sum of each row.
    pub sums: Vec<i32>,
}

/// Calls a form for x86 and returns, where the machine has its level.
macro_rules! fast {
    ($level:ident, $($call:tt)*) => {
        #[cfg(target_arch = "x86_64")]
        if level() >= Level::$level {
            // SAFETY: the features that the function enables were found on this machine.
            return unsafe { $($call)* };
        }
    };
}

/// Instruction sets with forms of their own, each with those before it.
#[cfg(any(target_arch = "x86_64", test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Plain,
    Avx2,
    /// Foundation, BW, VL, VNNI and VBMI.
    Avx512,
}

/// What the machine has.
#[cfg(target_arch = "x86_64")]
fn level() -> Level {
    let has = if !(is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c"))
    {
        Level::Plain
    } else if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
    {
        Level::Avx512
    } else {
        Level::Avx2
    };
    #[cfg(test)]
    let has = has.min(tests::MOST.get());
    has
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
    #[cfg(target_arch = "x86_64")]
    if avx512::whole(grid.bits, channels) {
        fast!(Avx512, avx512::levels(grid, words, row_words, picks, channels, dim, out));
    }
    fast!(Avx2, avx2::levels(grid, words, row_words, picks, channels, dim, out));
    plain::levels(grid, words, row_words, picks, channels, dim, out);
}

/// Levels of the rows `picks` of trellis codes, `channels` of them a row.
pub(super) fn trellis_levels(
    grid: &Trellis,
    words: &[u32],
    row_words: usize,
    picks: &[u32],
    channels: usize,
    dim: usize,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if trellis::fits(grid.states_log2, grid.bits, channels)
        && let Ok(fixed) = (&grid.fixed[..]).try_into()
    {
        let table = (fixed, crate::trellis::UNIT, grid.bits);
        fast!(Avx512, trellis::vbmi(table, words, row_words, picks, channels, dim, out));
    }
    for (&pick, out) in picks.iter().zip(out.chunks_exact_mut(dim)) {
        trellis_row(grid, &words[pick as usize * row_words..][..row_words], &mut out[..channels]);
    }
}

fn trellis_row(grid: &Trellis, words: &[u32], out: &mut [f32]) {
    if out.len() % 8 == 0 {
        let shape = (grid.states_log2, grid.bits);
        fast!(Avx2, trellis::gathered(grid.levels(), shape, words, out));
    }
    grid.decode(words, out);
}

/// Half floats as f32.
pub(super) fn halves(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "{} half floats, room for {}", from.len(), to.len());
    fast!(Avx2, avx2::halves(from, to));
    f16::read(from, to);
}

/// Inner products of all query rows with `n` tile rows: `out[row * stride + token]`.
pub(super) fn scores(queries: &[f32], tile: &[f32], dim: usize, n: usize, stride: usize, out: &mut [f32]) {
    if dim % 16 == 0 {
        fast!(Avx512, avx512::scores(queries, tile, dim, n, stride, out));
    }
    fast!(Avx2, avx2::scores(queries, tile, dim, n, stride, out));
    plain::scores(queries, tile, dim, n, stride, out);
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
    if dim % 16 == 0 {
        fast!(Avx512, avx512::accumulate(weights, tile, dim, n, stride, sums));
    }
    fast!(Avx2, avx2::accumulate(weights, tile, dim, n, stride, sums));
    plain::accumulate(weights, tile, dim, n, stride, sums);
}

/// Whether sums of up to 64 tokens have an integer form on this machine, for this many bits and channels.
pub(super) fn sums_in_integers(bits: u8, channels: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return level() >= Level::Avx512 && bits == 4 && channels % 64 == 0;
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// [`accumulate`] of the levels of `picks` in integers, where there is such a form and the weights are finite; else false and nothing is
/// done.
pub(super) fn weighted_levels(
    grid: &Small,
    words: &[u32],
    row_words: usize,
    picks: &[u32],
    weights: &[f32],
    stride: usize,
    sums: &mut [f32],
) -> bool {
    fast!(Avx512, weighted::weighted_levels(grid, words, row_words, picks, weights, stride, sums));
    false
}

/// `(x f + bias) scale` in place for the factor f of each token; the greatest, NaN if one is.
pub(super) fn logits(x: &mut [f32], factors: &[f32], bias: f32, scale: f32) -> f32 {
    assert_eq!(x.len(), factors.len(), "{} scores, {} factors", x.len(), factors.len());
    fast!(Avx2, softmax::logits(x, factors, bias, scale));
    plain::logits(x, factors, bias, scale)
}

/// exp(x - top) in place; the sum, and the least.
pub(super) fn exponentials(x: &mut [f32], top: f32) -> (f32, f32) {
    fast!(Avx512, softmax::exponentials_512(x, top));
    fast!(Avx2, softmax::exponentials(x, top));
    plain::exponentials(x, top)
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
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx512 {
        // SAFETY: the features that the function enables were found on this machine.
        let done = unsafe { avx512::integer_scores(grid, queries, words, row_words, n, stride, out) };
        if done == n {
            return;
        }
        let (words, out) = (&words[done * row_words..], &mut out[done..]);
        fast!(Avx2, avx2::integer_scores(grid, queries, words, row_words, n - done, stride, out));
    }
    fast!(Avx2, avx2::integer_scores(grid, queries, words, row_words, n, stride, out));
    plain::integer_scores(grid, queries, words, row_words, n, stride, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use std::cell::Cell;

    thread_local! {
        /// The highest level that a test wants.
        pub(super) static MOST: Cell<Level> = const { Cell::new(Level::Avx512) };
    }

    /// Runs the forms of a kernel into a buffer, the plain one last.
    fn all(len: usize, kernel: impl Fn(&mut [f32])) -> [Vec<f32>; 3] {
        [Level::Avx512, Level::Avx2, Level::Plain].map(|most| {
            MOST.set(most);
            let mut out = vec![0.25; len];
            kernel(&mut out);
            MOST.set(Level::Avx512);
            out
        })
    }

    fn close(what: &str, [best, fast, plain]: [Vec<f32>; 3]) {
        for (i, (a, b)) in best.iter().chain(&fast).zip(plain.iter().chain(&plain)).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs().max(1.0), "{what}: {a} and {b} at {i}");
        }
    }

    fn same(what: &str, [best, fast, plain]: [Vec<f32>; 3]) {
        assert_eq!(best, plain, "AVX-512, {what}");
        assert_eq!(fast, plain, "AVX2, {what}");
    }

    #[test]
    fn forms_agree() {
        let mut rng = Rng::new(1, 2);
        let mut normals = |n: usize| (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
        for dim in [8, 24, 64, 80, 128, 256] {
            for (rows, n) in [(1, 1), (2, 3), (3, 32), (4, 7), (9, 32)] {
                let (q, tile, weights) = (normals(rows * dim), normals(n * dim), normals(rows * 32));
                let what = format!("{dim} channels, {rows} rows, {n} tokens");
                close(&what, all(rows * 32, |out| scores(&q, &tile, dim, n, 32, out)));
                close(&what, all(rows * dim, |out| accumulate(&weights, &tile, dim, n, 32, out)));
            }
        }
        for len in [1, 8, 13, 32] {
            let x: Vec<f32> = normals(len).iter().map(|x| 20.0 * x).collect();
            close(
                "exp",
                all(len + 2, |out| {
                    out[..len].copy_from_slice(&x);
                    let (sum, least) = exponentials(&mut out[..len], 30.0);
                    out[len..].copy_from_slice(&[sum.ln(), least]);
                }),
            );
            let factors: Vec<f32> = x.iter().map(|x| 0.1 * x + 1.0).collect();
            let logits = |x: &[f32]| {
                all(len + 1, |out| {
                    out[..len].copy_from_slice(x);
                    out[len] = logits(&mut out[..len], &factors, 0.3, 0.7);
                })
            };
            same("logits", logits(&x));
            let mut bad = x.clone();
            bad[len / 2] = f32::NAN;
            assert!(logits(&bad).iter().all(|out| out[len].is_nan()));
        }
        let mut x = [f32::NEG_INFINITY, 1.0, 0.0, -200.0, f32::NAN, 0.5, 0.0, 1.0];
        assert!(exponentials(&mut x, 1.0).0.is_nan() && x[4].is_nan());
        assert!(x[0] == 0.0 && x[3] == 0.0 && (x[1] - 1.0).abs() < 1e-6);
        let half: Vec<f16> = (0..0x7c00).map(f16::from_bits).collect();
        same("half floats", all(half.len(), |out| halves(&half, out)));
    }

    #[test]
    fn forms_of_levels_and_integer_scores_give_the_same_bits() {
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
                        wide: [0; 16],
                        wide_unit: 0.0,
                    };
                    let picks = [4, 0, 3];
                    let what = format!("{bits} bits, {channels} channels");
                    let levels = |out: &mut [f32]| levels(&grid, &words, w, &picks, channels, channels, out);
                    same(&what, all(3 * channels, levels));
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
                        let scores = |out: &mut [f32]| integer_scores(&grid, &queries, &words, w, n, 8, out);
                        same(&format!("{what}, {rows} rows"), all(rows * 8, scores));
                    }
                }
            }
        }
    }

    #[test]
    fn forms_of_trellis_levels_give_the_same_bits() {
        let mut rng = Rng::new(5, 6);
        for grid in crate::trellis::tests::all() {
            for channels in [16, 40, 64, 128, 192, 256, 576] {
                let (w, picks) = (grid.words(channels), [3, 0, 2]);
                let words: Vec<u32> = (0..4 * w).map(|_| rng.bits() as u32).collect();
                let levels =
                    |out: &mut [f32]| trellis_levels(&grid, &words, w, &picks, channels, channels, out);
                let what = format!("{} and {} bits, {channels}", grid.states_log2, grid.bits);
                same(&what, all(3 * channels, levels));
            }
        }
    }
}
