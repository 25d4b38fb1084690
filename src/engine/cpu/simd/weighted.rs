//! Weighted sums of 4-bit levels in integers, with AVX-512: two tokens a product.
//!
//! The weights of a row are taken to 15 bits of the greatest in the block, levels to [`super::WIDE`] steps a side: of a block's share in the
//! sum that moves less than a hundredth of what the grid itself does. A block of [`MOST`] tokens cannot overflow 32 bits.

use super::{MOST_SUMMED as MOST, Picked, Small};
use std::arch::x86_64::*;

/// The greatest weight in integers.
const TOP: f32 = 32767.0;

/// Where the bytes of two tokens go, so that unpacking the low and the high halves of lanes leaves their bytes in order.
const INTERLEAVED: [u8; 64] = {
    let mut places = [0; 64];
    let mut i = 0;
    while i < 32 {
        let byte = (i / 8 * 4 + i % 4 + i % 8 / 4 * 16) as u8;
        places[2 * i] = byte;
        places[2 * i + 1] = 32 + byte;
        i += 1;
    }
    places
};

/// The lanes of two registers in turn, first halves and second halves.
const IN_TURN: [[i32; 16]; 2] = {
    let mut places = [[0; 16]; 2];
    let mut i = 0;
    while i < 16 {
        places[0][i] = (i / 2 + i % 2 * 16) as i32;
        places[1][i] = places[0][i] + 8;
        i += 1;
    }
    places
};

/// Weights of a row as pairs of 16 bits, and what one step of them stands for.
#[derive(Clone, Copy)]
struct WeightRow {
    pairs: [i32; MOST / 2],
    step: f32,
}

/// See [`super::weighted_levels`]; the weight of a token is `weights[row * stride + token]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn weighted_levels(
    grid: &Small,
    rows: Picked,
    weights: &[f32],
    stride: usize,
    sums: &mut [f32],
) -> bool {
    let Picked { words, row_words, picks, dim, .. } = rows;
    assert!(picks.len() <= MOST, "{} tokens at once", picks.len());
    let finite = |w: &[f32]| w.iter().fold(true, |all, w| all & w.is_finite());
    if !weights.chunks_exact(stride).all(|w| finite(&w[..picks.len()])) {
        return false;
    }
    for (weights, sums) in weights.chunks(4 * stride).zip(sums.chunks_mut(4 * dim)) {
        let mut rows = [WeightRow { pairs: [0; MOST / 2], step: 0.0 }; 4];
        for (row, weights) in rows.iter_mut().zip(weights.chunks_exact(stride)) {
            *row = whole(&weights[..picks.len()], grid.wide_unit);
        }
        for chunk in 0..dim / 64 {
            let tokens = (words, row_words, 8 * chunk);
            if sums.len() == 4 * dim {
                add::<4>(grid, tokens, picks, &rows, dim, &mut sums[64 * chunk..]);
            } else {
                for (row, sums) in rows.chunks_exact(1).zip(sums.chunks_exact_mut(dim)) {
                    add::<1>(grid, tokens, picks, row, dim, &mut sums[64 * chunk..]);
                }
            }
        }
    }
    true
}

/// Takes the weights of a row to integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn whole(weights: &[f32], unit: f32) -> WeightRow {
    let mut x = [0f32; MOST];
    x[..weights.len()].copy_from_slice(weights);
    let mut registers = [_mm512_setzero_ps(); MOST / 16];
    let mut top = _mm512_setzero_ps();
    for (register, x) in registers.iter_mut().zip(x.as_chunks::<16>().0) {
        *register = super::avx512::load(x);
        top = _mm512_max_ps(top, _mm512_abs_ps(*register));
    }
    let top = _mm512_reduce_max_ps(top);
    // The least weight has an inverse too.
    let top = top.max(TOP * f32::MIN_POSITIVE);
    let inverse = _mm512_set1_ps(TOP / top);
    let mut pairs = [0; MOST / 2];
    for (register, pairs) in registers.iter().zip(pairs.as_chunks_mut::<8>().0) {
        let steps = _mm512_cvtps_epi32(_mm512_mul_ps(*register, inverse));
        // SAFETY: an array of 32 bytes is written, unaligned.
        unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), _mm512_cvtsepi32_epi16(steps)) };
    }
    WeightRow { pairs, step: top / TOP * unit }
}

/// 64 channels of `R` query rows, the words `at..at + 8` of the tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn add<const R: usize>(
    grid: &Small,
    (words, row_words, at): (&[u32], usize, usize),
    picks: &[u32],
    rows: &[WeightRow],
    dim: usize,
    sums: &mut [f32],
) {
    // SAFETY: an array of 64 bytes is read, unaligned.
    let interleaved = unsafe { _mm512_loadu_si512(INTERLEAVED.as_ptr().cast()) };
    // SAFETY: an array of 32 bytes is read, unaligned.
    let table = _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(grid.wide.as_ptr().cast()) });
    let mut x = [[_mm512_setzero_si512(); 4]; R];
    for (i, pair) in picks.chunks(2).enumerate() {
        let (a, b) = (pair[0] as usize * row_words + at, pair[pair.len() - 1] as usize * row_words + at);
        let (a, b) = (&words[a..a + 8], &words[b..b + 8]);
        // SAFETY: a slice of 32 bytes is read, unaligned.
        let a = unsafe { _mm256_loadu_si256(a.as_ptr().cast()) };
        // SAFETY: as above.
        let b = unsafe { _mm256_loadu_si256(b.as_ptr().cast()) };
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
        // A byte of each token in 16 bits, then in 32: the look-up takes the low bits, the table repeats.
        let bytes = _mm512_permutexvar_epi8(interleaved, both);
        let second = _mm512_srli_epi16::<8>(bytes);
        let (low, high) = (_mm512_unpacklo_epi16(bytes, second), _mm512_unpackhi_epi16(bytes, second));
        let levels = [low, _mm512_srli_epi16::<4>(low), high, _mm512_srli_epi16::<4>(high)];
        for (c, codes) in levels.into_iter().enumerate() {
            let levels = _mm512_permutexvar_epi16(codes, table);
            for r in 0..R {
                x[r][c] = _mm512_dpwssd_epi32(x[r][c], levels, _mm512_set1_epi32(rows[r].pairs[i]));
            }
        }
    }
    // SAFETY: arrays of 64 bytes are read, unaligned.
    let turns = IN_TURN.map(|places| unsafe { _mm512_loadu_si512(places.as_ptr().cast()) });
    for r in 0..R {
        let step = _mm512_set1_ps(rows[r].step);
        let sums = sums[r * dim..][..64].as_chunks_mut::<16>().0;
        for (half, sums) in sums.chunks_exact_mut(2).enumerate() {
            for (turn, sums) in turns.iter().zip(sums) {
                let sum = _mm512_permutex2var_epi32(x[r][2 * half], *turn, x[r][2 * half + 1]);
                let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, super::avx512::load(sums));
                super::avx512::store(sums, sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::simd::BandPlace;
    use crate::math::rng::Rng;

    #[test]
    fn sums_are_those_of_the_levels_up_to_the_steps() {
        let mut rng = Rng::new(7, 8);
        let levels: [f32; 16] = std::array::from_fn(|c| (c as f32 - 7.0) * 0.3 + 0.01 * (c * c) as f32);
        let wide_unit = 2.7 / super::super::WIDE;
        let wide = levels.map(|x| (x / wide_unit).round() as i16);
        let grid =
            Small { bits: 4, levels, bytes: [0; 16], unit: 1.0, middle: 0.0, error: 0.0, wide, wide_unit };
        for (dim, rows, n) in [(64, 1, 1), (64, 4, 5), (128, 3, 64), (192, 9, 7), (128, 8, 64)] {
            if !super::super::sums_in_integers(4, dim) {
                return;
            }
            let row_words = dim / 8;
            let words: Vec<u32> = (0..70 * row_words).map(|_| rng.bits() as u32).collect();
            let picks: Vec<u32> = (0..n as u32).map(|i| i + i / 13).collect();
            let mut weights: Vec<f32> = (0..rows * 64).map(|_| (3.0 * rng.normal()).exp() as f32).collect();
            let mut sums = vec![0.5f32; rows * dim];
            let mut add = |weights: &[f32]| {
                let place = BandPlace { word: 0, words: row_words, channel: 0, channels: dim };
                let rows = Picked { words: &words, row_words, picks: &picks, dim, place };
                // SAFETY: the form was asked for above.
                let done = unsafe { weighted_levels(&grid, rows, weights, 64, &mut sums) };
                (done, sums.clone())
            };
            let (done, got) = add(&weights);
            assert!(done);
            for (r, got) in got.chunks_exact(dim).enumerate() {
                let weights = &weights[64 * r..][..n];
                let top = weights.iter().fold(0f32, |a, b| a.max(*b));
                let total: f32 = weights.iter().sum();
                let bound = 0.51 * (n as f32 * top / TOP * 2.7 + total * wide_unit) + 1e-5 * total;
                for (c, got) in got.iter().enumerate() {
                    let level = |pick: u32| {
                        let word = words[pick as usize * row_words + c / 8];
                        f64::from(levels[(word >> (4 * (c % 8))) as usize % 16])
                    };
                    let sum: f64 =
                        picks.iter().zip(weights).map(|(&pick, w)| f64::from(*w) * level(pick)).sum();
                    assert!((f64::from(*got) - 0.5 - sum).abs() <= f64::from(bound), "{got} for {sum} + 0.5");
                }
            }
            weights[64 * (rows - 1) + n - 1] = f32::INFINITY;
            let (done, same) = add(&weights);
            assert!(!done && same == got);
        }
    }
}
