//! Softmax steps of the fused attention in x86 registers: logits of a block, and exponentials, see the parent.

use super::avx2::{load, store, sums};
use super::parts::exp::{LN_2, LOW, TAYLOR};
use std::arch::x86_64::*;

/// See [`super::logits`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn logits(x: &mut [f32], factors: &[f32], bias: f32, scale: f32) -> f32 {
    let (eights, rest) = x.as_chunks_mut::<8>();
    let (factors, factors_rest) = factors.as_chunks::<8>();
    let (b, s) = (_mm256_set1_ps(bias), _mm256_set1_ps(scale));
    let mut tops = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut nans = _mm256_setzero_ps();
    for (x, f) in eights.iter_mut().zip(factors) {
        let y = _mm256_mul_ps(_mm256_add_ps(_mm256_mul_ps(load(x), load(f)), b), s);
        nans = _mm256_or_ps(nans, _mm256_cmp_ps::<_CMP_UNORD_Q>(y, y));
        tops = _mm256_max_ps(tops, y);
        store(x, y);
    }
    let mut all = [0.0; 8];
    store(&mut all, tops);
    let top = all.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let rest = super::plain::logits(rest, factors_rest, bias, scale);
    if _mm256_movemask_ps(nans) != 0 || rest.is_nan() { f32::NAN } else { top.max(rest) }
}

/// See [`super::exponentials`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn exponentials(x: &mut [f32], top: f32) -> (f32, f32) {
    let (eights, rest) = x.as_chunks_mut::<8>();
    let mut total = _mm256_setzero_ps();
    let mut least = _mm256_set1_ps(f32::INFINITY);
    for x in eights {
        let d = _mm256_sub_ps(load(x), _mm256_set1_ps(top));
        let visible = _mm256_cmp_ps::<_CMP_NLT_UQ>(d, _mm256_set1_ps(LOW));
        // The second operand is taken if one is NaN.
        let d = _mm256_max_ps(_mm256_set1_ps(LOW), d);
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            d,
            _mm256_set1_ps(std::f32::consts::LOG2_E),
        ));
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[0]), d);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[1]), r);
        let mut p = _mm256_set1_ps(TAYLOR[0]);
        for &c in &TAYLOR[1..] {
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
        }
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        let e = _mm256_and_ps(visible, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
        store(x, e);
        total = _mm256_add_ps(total, e);
        least = _mm256_min_ps(least, e);
    }
    let zero = _mm256_setzero_ps();
    let mut low = [0.0; 8];
    store(&mut low, least);
    let (rest, rest_least) = super::plain::exponentials(rest, top);
    let total = sums([total, zero, zero, zero])[0] + rest;
    (total, low.into_iter().fold(rest_least, f32::min))
}

/// The same with AVX-512; the last lanes are masked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn exponentials_512(x: &mut [f32], top: f32) -> (f32, f32) {
    let mut total = _mm512_setzero_ps();
    let mut least = _mm512_set1_ps(f32::INFINITY);
    for x in x.chunks_mut(16) {
        let lanes = u16::MAX >> (16 - x.len());
        // SAFETY: the mask lets through the elements of the slice.
        let value = unsafe { _mm512_maskz_loadu_ps(lanes, x.as_ptr()) };
        let d = _mm512_sub_ps(value, _mm512_set1_ps(top));
        let visible = _mm512_mask_cmp_ps_mask::<_CMP_NLT_UQ>(lanes, d, _mm512_set1_ps(LOW));
        // The second operand is taken if one is NaN.
        let d = _mm512_max_ps(_mm512_set1_ps(LOW), d);
        let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
            d,
            _mm512_set1_ps(std::f32::consts::LOG2_E),
        ));
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[0]), d);
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[1]), r);
        let mut p = _mm512_set1_ps(TAYLOR[0]);
        for &c in &TAYLOR[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
        }
        let e = _mm512_maskz_scalef_ps(visible, p, n);
        // SAFETY: as for the load.
        unsafe { _mm512_mask_storeu_ps(x.as_mut_ptr(), lanes, e) };
        total = _mm512_add_ps(total, e);
        least = _mm512_mask_min_ps(least, lanes, least, e);
    }
    (_mm512_reduce_add_ps(total), _mm512_reduce_min_ps(least))
}
