//! The NEON forms of the kernels for aarch64, see the parent; the integer scores also have one for the `dotprod` extension, which
//! Apple Silicon has. As for AVX2, what is unsafe is only the move between an array and registers, and one instruction that the
//! compiler has no stable name for.

use super::level::{Level, level};
use super::parts::{accumulate, exp, four};
use super::plain::greater;
use super::{Bytes, LaneBlock, Picked, Small};
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[f32; 4]) -> float32x4_t {
    // SAFETY: an array of 16 bytes is read, unaligned.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(x: &mut [f32; 4], value: float32x4_t) {
    // SAFETY: an array of 16 bytes is written, unaligned.
    unsafe { vst1q_f32(x.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_i8(x: &[i8; 16]) -> int8x16_t {
    // SAFETY: an array of 16 bytes is read, unaligned.
    unsafe { vld1q_s8(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_words(x: &[u32; 4]) -> uint8x16_t {
    // SAFETY: an array of 16 bytes is read, unaligned.
    vreinterpretq_u8_u32(unsafe { vld1q_u32(x.as_ptr()) })
}

/// Where sixteen codes begin: the byte, and minus the bit in it.
struct CodePlaces {
    bytes: [i8; 16],
    bits: [i8; 16],
}

const fn places(bits: usize) -> CodePlaces {
    let mut places = CodePlaces { bytes: [0; 16], bits: [0; 16] };
    let mut i = 0;
    while i < 16 {
        places.bytes[i] = (bits * i / 8) as i8;
        places.bits[i] = -((bits * i % 8) as i8);
        i += 1;
    }
    places
}

static PLACES: [CodePlaces; 4] = [places(1), places(2), places(3), places(4)];

#[target_feature(enable = "neon")]
pub(super) fn levels(grid: &Small, rows: Picked, out: &mut [f32]) {
    match grid.bits {
        1 => levels_of::<1>(grid, rows, out),
        2 => levels_of::<2>(grid, rows, out),
        3 => levels_of::<3>(grid, rows, out),
        _ => levels_of::<4>(grid, rows, out),
    }
}

/// 32 codes of B bits are B words, one register; the four bytes of their levels are looked up apart and woven by the store.
#[inline]
#[target_feature(enable = "neon")]
fn levels_of<const B: usize>(grid: &Small, rows: Picked, out: &mut [f32]) {
    // SAFETY: an array of 64 bytes is read.
    let table = unsafe { vld4q_u8(grid.levels.as_ptr().cast()) };
    let places = &PLACES[B - 1];
    let (bits, mask) = (load_i8(&places.bits), vdupq_n_u8((1 << B) - 1));
    let upper = vaddq_s8(bits, vdupq_n_s8(8));
    let first = vreinterpretq_u8_s8(load_i8(&places.bytes));
    for (row, out) in rows.to(out) {
        let (out, out_rest) = out.as_chunks_mut::<32>();
        let (words, words_rest) = row.split_at(out.len() * B);
        for (words, out) in words.as_chunks::<B>().0.iter().zip(out) {
            let mut four = [0; 4];
            four[..B].copy_from_slice(words);
            let bytes = load_words(&four);
            let mut at = first;
            for out in out.as_chunks_mut::<16>().0 {
                let mut codes = vshlq_u8(vqtbl1q_u8(bytes, at), bits);
                if 8 % B != 0 {
                    let next = vqtbl1q_u8(bytes, vaddq_u8(at, vdupq_n_u8(1)));
                    codes = vorrq_u8(codes, vshlq_u8(next, upper));
                }
                let codes = vandq_u8(codes, mask);
                let levels = uint8x16x4_t(
                    vqtbl1q_u8(table.0, codes),
                    vqtbl1q_u8(table.1, codes),
                    vqtbl1q_u8(table.2, codes),
                    vqtbl1q_u8(table.3, codes),
                );
                // SAFETY: an array of 64 bytes is written.
                unsafe { vst4q_u8(out.as_mut_ptr().cast(), levels) };
                at = vaddq_u8(at, vdupq_n_u8(2 * B as u8));
            }
        }
        super::plain::levels_row(grid, words_rest, out_rest);
    }
}

#[target_feature(enable = "neon")]
pub(super) fn halves(from: &[f16], to: &mut [f32]) {
    let (fours, rest) = from.as_chunks::<4>();
    let (out, out_rest) = to.as_chunks_mut::<4>();
    for (x, out) in fours.iter().zip(out) {
        // SAFETY: an array of 8 bytes is read, unaligned.
        let x = unsafe { vld1_u16(x.as_ptr().cast()) };
        store(out, vcvt_f32_f16(vreinterpret_f16_u16(x)));
    }
    rest.iter().zip(out_rest).for_each(|(x, out)| *out = x.to_f32());
}

#[target_feature(enable = "neon")]
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

/// `R` query rows, four tokens at a time.
#[inline]
#[target_feature(enable = "neon")]
fn scores_of<const R: usize>(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    let LaneBlock { width: dim, n, stride, .. } = tile;
    let q = four(queries, dim, 0, R);
    for t in (0..n).step_by(4) {
        let k = four(tile.rows, dim, t, n);
        let mut x = [[vdupq_n_f32(0.0); 4]; R];
        for i in 0..dim / 4 {
            let k = [load(&k[0][i]), load(&k[1][i]), load(&k[2][i]), load(&k[3][i])];
            for r in 0..R {
                let q = load(&q[r][i]);
                for u in 0..4 {
                    x[r][u] = vfmaq_f32(x[r][u], q, k[u]);
                }
            }
        }
        for (r, [a, b, c, d]) in x.into_iter().enumerate() {
            let mut sums = [0.0; 4];
            store(&mut sums, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            let tokens = (n - t).min(4);
            out[r * stride + t..][..tokens].copy_from_slice(&sums[..tokens]);
        }
    }
}

accumulate!("neon", 4 x [4, 2], vdupq_n_f32(0.0), |w, v, sum| vfmaq_n_f32(sum, v, w));

#[target_feature(enable = "neon")]
pub(super) fn integer_scores(grid: &Small, queries: &Bytes, codes: LaneBlock<u32>, out: &mut [f32]) {
    let rows = queries.steps.len();
    let dot = level() >= Level::Dot;
    for first in (0..rows).step_by(4) {
        let one = rows - first == 1;
        match (grid.bits, one, dot) {
            (2, true, true) => integer_scores_of::<2, 4, 1, true>(grid, queries, first, codes, out),
            (2, true, false) => integer_scores_of::<2, 4, 1, false>(grid, queries, first, codes, out),
            (2, false, true) => integer_scores_of::<2, 4, 4, true>(grid, queries, first, codes, out),
            (2, false, false) => integer_scores_of::<2, 4, 4, false>(grid, queries, first, codes, out),
            (_, true, true) => integer_scores_of::<4, 2, 1, true>(grid, queries, first, codes, out),
            (_, true, false) => integer_scores_of::<4, 2, 1, false>(grid, queries, first, codes, out),
            (_, false, true) => integer_scores_of::<4, 2, 4, true>(grid, queries, first, codes, out),
            (_, false, false) => integer_scores_of::<4, 2, 4, false>(grid, queries, first, codes, out),
        }
    }
}

/// Up to R queries from `first` on; where there are fewer, the last is taken again and not written.
#[inline]
#[target_feature(enable = "neon")]
fn integer_scores_of<const B: usize, const FIELDS: usize, const R: usize, const DOT: bool>(
    grid: &Small,
    queries: &Bytes,
    first: usize,
    codes: LaneBlock<u32>,
    out: &mut [f32],
) {
    let LaneBlock { width: words, n, stride, .. } = codes;
    let (channels, rows) = (words * 32 / B, queries.steps.len());
    let mut q: [&[[i8; 16]]; R] = [&[]; R];
    for (r, q) in q.iter_mut().enumerate() {
        *q = queries.rows[(first + r).min(rows - 1) * channels..][..channels].as_chunks().0;
    }
    // A uniform grid is its own table: its codes are the levels.
    let uniform = grid.middle != 0.0;
    let (table, mask) = (load_i8(&grid.bytes), vdupq_n_u8((1 << B) - 1));
    for t in 0..n {
        let mut x = [vdupq_n_s32(0); R];
        // A field of 32 bytes is two registers of each query.
        for (i, words) in codes.row(t).as_chunks::<8>().0.iter().enumerate() {
            let [low, high] = [
                load_words(words.first_chunk().expect("eight")),
                load_words(words.last_chunk().expect("eight")),
            ];
            for field in 0..FIELDS {
                let down = vdupq_n_s8(-((B * field) as i8));
                for (half, words) in [low, high].into_iter().enumerate() {
                    let codes = vandq_u8(vshlq_u8(words, down), mask);
                    let levels = if uniform { vreinterpretq_s8_u8(codes) } else { vqtbl1q_s8(table, codes) };
                    for r in 0..R {
                        let q = load_i8(&q[r][2 * (i * FIELDS + field) + half]);
                        x[r] = dot::<DOT>(x[r], levels, q);
                    }
                }
            }
        }
        for (r, x) in x.into_iter().enumerate().take(rows - first) {
            let sum = vaddvq_s32(x) as f32 - grid.middle * queries.sums[first + r] as f32;
            out[(first + r) * stride + t] = queries.steps[first + r] * grid.unit * sum;
        }
    }
}

/// Adds the products of sixteen bytes, none of them -128, to four sums.
#[inline]
#[target_feature(enable = "neon")]
fn dot<const DOT: bool>(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    if DOT {
        // SAFETY: DOT is set where the machine has the extension; the instruction touches these registers only.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                inout(vreg) sums,
                in(vreg) a,
                in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        return sums;
    }
    // Two products of at most 127^2 fit 16 bits.
    let products = vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b);
    vpadalq_s16(sums, products)
}

#[target_feature(enable = "neon")]
pub(super) fn logits(x: &mut [f32], factors: &[f32], bias: f32, scale: f32) -> f32 {
    let (fours, rest) = x.as_chunks_mut::<4>();
    let (factors, factors_rest) = factors.as_chunks::<4>();
    let (b, s) = (vdupq_n_f32(bias), vdupq_n_f32(scale));
    // The greater of a number and NaN is NaN here.
    let mut tops = vdupq_n_f32(f32::NEG_INFINITY);
    for (x, f) in fours.iter_mut().zip(factors) {
        let y = vmulq_f32(vaddq_f32(vmulq_f32(load(x), load(f)), b), s);
        tops = vmaxq_f32(tops, y);
        store(x, y);
    }
    greater(vmaxvq_f32(tops), super::plain::logits(rest, factors_rest, bias, scale))
}

/// See [`super::exponentials`].
#[target_feature(enable = "neon")]
pub(super) fn exponentials(x: &mut [f32], top: f32) -> (f32, f32) {
    let (fours, rest) = x.as_chunks_mut::<4>();
    let mut total = vdupq_n_f32(0.0);
    let mut least = vdupq_n_f32(f32::INFINITY);
    let low = vdupq_n_f32(exp::LOW);
    for x in fours {
        let d = vsubq_f32(load(x), vdupq_n_f32(top));
        let hidden = vcltq_f32(d, low);
        let d = vmaxq_f32(d, low);
        let n = vrndnq_f32(vmulq_n_f32(d, std::f32::consts::LOG2_E));
        let r = vfmsq_f32(d, n, vdupq_n_f32(exp::LN_2[0]));
        let r = vfmsq_f32(r, n, vdupq_n_f32(exp::LN_2[1]));
        let mut p = vdupq_n_f32(exp::TAYLOR[0]);
        for c in &exp::TAYLOR[1..] {
            p = vfmaq_f32(vdupq_n_f32(*c), p, r);
        }
        let power = vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)));
        let e = vreinterpretq_u32_f32(vmulq_f32(p, vreinterpretq_f32_s32(power)));
        let e = vreinterpretq_f32_u32(vbicq_u32(e, hidden));
        store(x, e);
        total = vaddq_f32(total, e);
        least = vminnmq_f32(least, e);
    }
    let (sum, smallest) = super::plain::exponentials(rest, top);
    (vaddvq_f32(total) + sum, vminnmvq_f32(least).min(smallest))
}
