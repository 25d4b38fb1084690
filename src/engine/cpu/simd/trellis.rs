//! Levels of trellis codes in x86 registers: windows of eight bits are cut out and looked up 64 at a time with AVX-512 VBMI, other
//! windows are gathered with AVX2. See [`crate::math::trellis`] for the windows.

use super::Picked;
use std::arch::x86_64::*;

/// Whether [`vbmi`] has a form for rings of this shape: whole runs of 64 coordinates in one register.
pub(super) fn fits(window: u8, bits: u8, channels: usize) -> bool {
    window == 8 && channels % 64 == 0 && channels > 0 && channels * usize::from(bits) <= 512
}

/// A byte for each place of a register.
#[repr(align(64))]
struct LaneBytes([u8; 64]);

/// The group of eight coordinates that each eight bytes hold, so that widening leaves them in order.
const GROUP: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Bytes of the ring that eight bytes need for their group: from the one before its own on.
const fn around(bits: u8) -> LaneBytes {
    let mut places = LaneBytes([0; 64]);
    let mut i = 0;
    while i < 64 {
        places.0[i] = (bits * GROUP[i / 8]).wrapping_add((i % 8) as u8).wrapping_sub(1);
        i += 1;
    }
    places
}

/// Bit at which the window of coordinate k of a group begins in these: `b (k + 1)`.
const fn begins(bits: u8) -> LaneBytes {
    let mut places = LaneBytes([0; 64]);
    let mut i = 0;
    while i < 64 {
        places.0[i] = bits * (i as u8 % 8 + 1);
        i += 1;
    }
    places
}

static AROUND: [LaneBytes; 4] = [around(1), around(2), around(3), around(4)];
static BEGINS: [LaneBytes; 4] = [begins(1), begins(2), begins(3), begins(4)];

#[inline]
#[target_feature(enable = "avx512f")]
fn places(x: &LaneBytes) -> __m512i {
    // SAFETY: an array of 64 bytes is read.
    unsafe { _mm512_loadu_si512(x.0.as_ptr().cast()) }
}

/// Levels of the rows `picks`, windows of eight bits; `fixed` holds 256 levels in `unit`s, odd under complement.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn vbmi((fixed, unit, bits): (&[i16; 256], f32, u8), rows: Picked, out: &mut [f32]) {
    let (channels, ring) = (rows.place.channels, rows.place.channels * usize::from(bits) / 8);
    assert!(fits(8, bits, channels) && ring <= 4 * rows.place.words, "{channels} channels of {bits} bits");
    let some = u64::MAX >> (64 - ring);
    // Low and high bytes of the first half of the table, two registers each.
    let (mut low, mut high) = ([_mm512_setzero_si512(); 2], [_mm512_setzero_si512(); 2]);
    for (i, half) in fixed[..128].as_chunks::<64>().0.iter().enumerate() {
        // SAFETY: the first half of an array of 128 bytes is read, unaligned.
        let a = unsafe { _mm512_loadu_si512(half.as_ptr().cast()) };
        // SAFETY: the second half is.
        let b = unsafe { _mm512_loadu_si512(half.as_ptr().add(32).cast()) };
        let join = |a, b| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
        low[i] = join(_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b));
        high[i] = join(
            _mm512_cvtepi16_epi8(_mm512_srli_epi16::<8>(a)),
            _mm512_cvtepi16_epi8(_mm512_srli_epi16::<8>(b)),
        );
    }
    let (around, begins) = (places(&AROUND[bits as usize - 1]), places(&BEGINS[bits as usize - 1]));
    // The byte before the first is the last of the ring.
    let first = _mm512_mask_set1_epi8(around, 1, ring as i8 - 1);
    let unit = _mm512_set1_ps(unit);
    for (row, out) in rows.to(out) {
        let row: &[u8] = bytemuck::cast_slice(row);
        // SAFETY: the `ring` bytes that the mask lets through are inside the row.
        let bytes = unsafe { _mm512_maskz_loadu_epi8(some, row.as_ptr().cast()) };
        for (i, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let place = _mm512_add_epi8(around, _mm512_set1_epi8((8 * bits as usize * i) as i8));
            let near = _mm512_permutexvar_epi8(if i == 0 { first } else { place }, bytes);
            let window = _mm512_multishift_epi64_epi8(begins, near);
            // T[!w] = -T[w]: the upper half is looked up by its complement.
            let sign = _mm512_movm_epi8(_mm512_movepi8_mask(window));
            let place = _mm512_xor_si512(window, sign);
            let l = _mm512_permutex2var_epi8(low[0], place, low[1]);
            let h = _mm512_permutex2var_epi8(high[0], place, high[1]);
            let sides = [
                (_mm512_unpacklo_epi8(l, h), _mm512_unpacklo_epi8(sign, sign)),
                (_mm512_unpackhi_epi8(l, h), _mm512_unpackhi_epi8(sign, sign)),
            ];
            for ((size, sign), out) in sides.into_iter().zip(out.as_chunks_mut::<32>().0) {
                let x = _mm512_sub_epi16(_mm512_xor_si512(size, sign), sign);
                let halves = [_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x)];
                for (x, out) in halves.into_iter().zip(out.as_chunks_mut::<16>().0) {
                    let x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(x)), unit);
                    // SAFETY: an array of 64 bytes is written, unaligned.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
                }
            }
        }
    }
}

/// Levels of one row, `out.len()` of them (a multiple of eight); the ring is longer than a window of `window` bits.
#[target_feature(enable = "avx2")]
pub(super) fn gathered(levels: &[f32], (window, bits): (u8, u8), words: &[u32], out: &mut [f32]) {
    let (l, b) = (usize::from(window), i32::from(bits));
    assert!(levels.len() == 1 << l, "{} levels, windows of {l} bits", levels.len());
    let shifts = _mm256_setr_epi32(0, b, 2 * b, 3 * b, 0, b, 2 * b, 3 * b);
    let mask = _mm256_set1_epi32((1 << l) - 1);
    let (old, b) = (l - usize::from(bits), usize::from(bits));
    let mut before = crate::math::trellis::read(words, out.len() * b - old, old);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let run = crate::math::trellis::read(words, 8 * b * i, 8 * b) << old | before;
        before = run >> (8 * b);
        // Four windows are at most 22 bits.
        let both = _mm256_setr_m128i(_mm_set1_epi32(run as i32), _mm_set1_epi32((run >> (4 * b)) as i32));
        let places = _mm256_and_si256(_mm256_srlv_epi32(both, shifts), mask);
        // SAFETY: every place is below the 2^l levels that there are.
        let x = unsafe { _mm256_i32gather_ps::<4>(levels.as_ptr(), places) };
        // SAFETY: an array of 32 bytes is written, unaligned.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
    }
}
