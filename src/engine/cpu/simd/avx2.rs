//! The AVX2 forms of the kernels, see the parent. Loads and stores go through arrays of a register's size, so that every slice is
//! bounds-checked by the language; what is unsafe here is only the move between such an array and a register.

use super::parts::accumulate;
use super::{Bytes, LaneBlock, Picked, Small};
use half::f16;
use std::arch::x86_64::*;

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: an array of 32 bytes is read, unaligned.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store(x: &mut [f32; 8], value: __m256) {
    // SAFETY: an array of 32 bytes is written, unaligned.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bytes(x: &[i8; 32]) -> __m256i {
    // SAFETY: an array of 32 bytes is read, unaligned.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_words(x: &[u32; 8]) -> __m256i {
    // SAFETY: an array of 32 bytes is read, unaligned.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

/// The 8 b bits of the codes `8 i..8 i + 8` of a row, low end first.
#[inline(always)]
fn eight(row: &[u8], b: usize, i: usize) -> u32 {
    // The last bytes of a row are read with those before them.
    let at = (b * i).min(row.len() - 4);
    u32::from_le_bytes(*row[at..].first_chunk().expect("four bytes")) >> (8 * (b * i - at))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn levels(grid: &Small, rows: Picked, out: &mut [f32]) {
    match grid.bits {
        1 => levels_of::<1>(grid, rows, out),
        2 => levels_of::<2>(grid, rows, out),
        3 => levels_of::<3>(grid, rows, out),
        _ => levels_of::<4>(grid, rows, out),
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn levels_of<const B: usize>(grid: &Small, rows: Picked, out: &mut [f32]) {
    let b = B as i32;
    let shifts = _mm256_setr_epi32(0, b, 2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b);
    let tables = grid.levels.as_chunks::<8>().0;
    let (low, high) = (load(&tables[0]), load(&tables[1]));
    for (row, out) in rows.to(out) {
        let row: &[u8] = bytemuck::cast_slice(row);
        let out = out.as_chunks_mut::<8>().0;
        if B == 4 {
            for (&word, out) in row.as_chunks::<4>().0.iter().zip(out) {
                let codes = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(word)), shifts);
                // The look-ups take the three low bits; the fourth in the place of the sign chooses one.
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                let (a, b) = (_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes));
                store(out, _mm256_blendv_ps(a, b, upper));
            }
        } else {
            for (i, out) in out.iter_mut().enumerate() {
                let codes = _mm256_srlv_epi32(_mm256_set1_epi32(eight(row, B, i) as i32), shifts);
                // The tables of narrower codes repeat.
                store(out, _mm256_permutevar8x32_ps(low, codes));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves(from: &[f16], to: &mut [f32]) {
    let (eights, rest) = from.as_chunks::<8>();
    let (out, out_rest) = to.as_chunks_mut::<8>();
    for (x, out) in eights.iter().zip(out) {
        // SAFETY: an array of 16 bytes is read, unaligned.
        let x = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        store(out, _mm256_cvtph_ps(x));
    }
    rest.iter().zip(out_rest).for_each(|(x, out)| *out = x.to_f32());
}

/// The four sums of four registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sums([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
    let x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let mut out = [0.0; 4];
    // SAFETY: an array of 16 bytes is written, unaligned.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), x) };
    out
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scores(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    let dim = tile.width;
    for (queries, out) in queries.chunks(4 * dim).zip(out.chunks_mut(4 * tile.stride)) {
        match queries.len() / dim {
            1 => scores_of::<1>(queries, tile, out),
            2 => scores_of::<2>(queries, tile, out),
            3 => scores_of::<3>(queries, tile, out),
            _ => scores_of::<4>(queries, tile, out),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scores_of<const R: usize>(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    let LaneBlock { rows: tile, width: dim, n, stride } = tile;
    let eights = dim / 8;
    let mut q: [&[[f32; 8]]; R] = [&[]; R];
    for (r, q) in q.iter_mut().enumerate() {
        *q = &queries[r * dim..][..dim].as_chunks().0[..eights];
    }
    let mut t = 0;
    while t < n {
        // An odd last token is taken twice.
        let u = (t + 1).min(n - 1);
        let a = &tile[t * dim..][..dim].as_chunks::<8>().0[..eights];
        let b = &tile[u * dim..][..dim].as_chunks::<8>().0[..eights];
        let mut x = [[_mm256_setzero_ps(); 4]; 2];
        for i in 0..eights {
            let (a, b) = (load(&a[i]), load(&b[i]));
            for r in 0..R {
                let q = load(&q[r][i]);
                x[0][r] = _mm256_fmadd_ps(q, a, x[0][r]);
                x[1][r] = _mm256_fmadd_ps(q, b, x[1][r]);
            }
        }
        let (x, y) = (sums(x[0]), sums(x[1]));
        for r in 0..R {
            out[r * stride + t] = x[r];
            out[r * stride + u] = y[r];
        }
        t += 2;
    }
}

accumulate!("avx2,fma,f16c", 8 x [2, 1], _mm256_setzero_ps(), |w, v, sum| _mm256_fmadd_ps(_mm256_set1_ps(w), v, sum));

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn integer_scores(grid: &Small, queries: &Bytes, codes: LaneBlock<u32>, out: &mut [f32]) {
    let rows = queries.steps.len();
    for first in (0..rows).step_by(4) {
        let out = &mut out[first * codes.stride..];
        for t in 0..codes.n {
            let words = codes.row(t).as_chunks::<8>().0;
            let sums = match grid.bits {
                2 => integer_row::<2, 4>(grid, queries, first, words),
                _ => integer_row::<4, 2>(grid, queries, first, words),
            };
            for (r, sum) in sums.into_iter().enumerate().take(rows - first) {
                let sum = sum as f32 - grid.middle * queries.sums[first + r] as f32;
                out[r * codes.stride + t] = queries.steps[first + r] * grid.unit * sum;
            }
        }
    }
}

/// Inner products of one row of codes with up to four queries from `first` on; further ones repeat the last.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn integer_row<const B: usize, const FIELDS: usize>(
    grid: &Small,
    queries: &Bytes,
    first: usize,
    words: &[[u32; 8]],
) -> [i32; 4] {
    let (places, last) = (words.len() * FIELDS, queries.steps.len() - 1);
    let q = queries.rows.as_chunks::<32>().0;
    let row = |r: usize| &q[(first + r).min(last) * places..][..places];
    let q: [&[[i8; 32]]; 4] = [row(0), row(1), row(2), row(3)];
    // A uniform grid is its own table: its codes are the levels, and they are not negative.
    let uniform = grid.middle != 0.0;
    // SAFETY: an array of 16 bytes is read, unaligned.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(grid.bytes.as_ptr().cast()) });
    let (mask, ones) = (_mm256_set1_epi8((1 << B) - 1), _mm256_set1_epi16(1));
    let mut wide = [_mm256_setzero_si256(); 4];
    // 16-bit sums hold the products of 256 channels of 4 bits.
    for (run, words) in words.chunks(4).enumerate() {
        let mut narrow = [_mm256_setzero_si256(); 4];
        for (i, words) in words.iter().enumerate() {
            let words = load_words(words);
            for field in 0..FIELDS {
                let codes =
                    _mm256_and_si256(_mm256_srl_epi16(words, _mm_cvtsi32_si128((B * field) as i32)), mask);
                let at = (4 * run + i) * FIELDS + field;
                if uniform {
                    for r in 0..4 {
                        let products = _mm256_maddubs_epi16(codes, load_bytes(&q[r][at]));
                        narrow[r] = _mm256_add_epi16(narrow[r], products);
                    }
                } else {
                    let level = _mm256_shuffle_epi8(table, codes);
                    let size = _mm256_abs_epi8(level);
                    for r in 0..4 {
                        // Two products of at most 127^2 fit 16 bits, four need not.
                        let products =
                            _mm256_maddubs_epi16(size, _mm256_sign_epi8(load_bytes(&q[r][at]), level));
                        wide[r] = _mm256_add_epi32(wide[r], _mm256_madd_epi16(products, ones));
                    }
                }
            }
        }
        for r in 0..4 {
            wide[r] = _mm256_add_epi32(wide[r], _mm256_madd_epi16(narrow[r], ones));
        }
    }
    let x = _mm256_hadd_epi32(_mm256_hadd_epi32(wide[0], wide[1]), _mm256_hadd_epi32(wide[2], wide[3]));
    let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    let mut out = [0; 4];
    // SAFETY: an array of 16 bytes is written, unaligned.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), x) };
    out
}
