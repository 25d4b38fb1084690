//! The AVX-512 forms of the kernels, see the parent: sixteen levels are one permutation, and byte products are summed as they are
//! formed. Chosen where the machine has VNNI and VBMI too (Ice Lake, Zen 4 and later).

use super::parts::{accumulate, four};
use super::{Bytes, LaneBlock, Picked, Small};
use std::arch::x86_64::*;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(x: &[f32; 16]) -> __m512 {
    // SAFETY: an array of 64 bytes is read, unaligned.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(x: &mut [f32; 16], value: __m512) {
    // SAFETY: an array of 64 bytes is written, unaligned.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), value) }
}

/// Where the code of each of 64 channels is: the two bytes that hold it, in the low half of a lane, and the bit in them.
struct ChannelPlaces {
    bytes: [[u8; 64]; 4],
    bits: [[u32; 16]; 4],
}

const fn places(bits: usize) -> ChannelPlaces {
    let mut places = ChannelPlaces { bytes: [[0; 64]; 4], bits: [[0; 16]; 4] };
    let mut i = 0;
    while i < 64 {
        let (register, lane) = (i / 16, i % 16);
        places.bytes[register][4 * lane] = (bits * i / 8) as u8;
        places.bytes[register][4 * lane + 1] = (bits * i / 8) as u8 + 1;
        places.bits[register][lane] = (bits * i % 8) as u32;
        i += 1;
    }
    places
}

static PLACES: [ChannelPlaces; 3] = [places(1), places(2), places(3)];

/// Whether [`levels`] has a form for rows of this shape.
pub(super) fn whole(bits: u8, channels: usize) -> bool {
    channels % if bits == 4 { 16 } else { 64 } == 0
}

/// See [`super::levels`]; for rows that are [`whole`]. The look-up takes the four low bits; the tables of narrower codes repeat.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn levels(grid: &Small, rows: Picked, out: &mut [f32]) {
    let table = load(&grid.levels);
    if grid.bits == 4 {
        let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        // No closures in the loops: what takes one is compiled for the plain instruction set and cannot inline it.
        for (row, out) in rows.to(out) {
            for (&[low, high], out) in row.as_chunks().0.iter().zip(out.as_chunks_mut::<16>().0) {
                let codes = _mm512_mask_set1_epi32(_mm512_set1_epi32(low as i32), 0xff00, high as i32);
                store(out, _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), table));
            }
        }
        return;
    }
    let (places, bytes) = (&PLACES[usize::from(grid.bits) - 1], 8 * usize::from(grid.bits));
    for (row, out) in rows.to(out) {
        let row: &[u8] = bytemuck::cast_slice(row);
        for (row, out) in row.chunks_exact(bytes).zip(out.as_chunks_mut::<64>().0) {
            // SAFETY: the mask lets through the bytes of the slice.
            let row = unsafe { _mm512_maskz_loadu_epi8(u64::MAX >> (64 - bytes), row.as_ptr().cast()) };
            for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                // SAFETY: an array of 64 bytes is read, unaligned.
                let place = unsafe { _mm512_loadu_si512(places.bytes[i].as_ptr().cast()) };
                // SAFETY: as above.
                let shift = unsafe { _mm512_loadu_si512(places.bits[i].as_ptr().cast()) };
                let codes = _mm512_srlv_epi32(_mm512_permutexvar_epi8(place, row), shift);
                store(out, _mm512_permutexvar_ps(codes, table));
            }
        }
    }
}

/// Sums the sixteen lanes of each of sixteen registers; sum `4 t + r` belongs to `x[t][r]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums(x: [[__m512; 4]; 4]) -> __m512 {
    let mut y = [_mm512_setzero_ps(); 4];
    for (y, [a, b, c, d]) in y.iter_mut().zip(x) {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        *y = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
        );
    }
    let pair = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let [a, b, c, d] = y;
    pair(pair(a, b), pair(c, d))
}

/// See [`super::scores`]; the width is a multiple of 16. Four tokens by four query rows at a time.
#[target_feature(enable = "avx512f")]
pub(super) fn scores(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    let LaneBlock { rows: tile, width: dim, n, stride } = tile;
    let (rows, parts) = (queries.len() / dim, dim / 16);
    for first in (0..rows).step_by(4) {
        let q = four(queries, dim, first, rows);
        for t in (0..n).step_by(4) {
            let k = four(tile, dim, t, n);
            let mut x = [[_mm512_setzero_ps(); 4]; 4];
            for i in 0..parts {
                for u in 0..4 {
                    let k = load(&k[u][i]);
                    for r in 0..4 {
                        x[u][r] = _mm512_fmadd_ps(load(&q[r][i]), k, x[u][r]);
                    }
                }
            }
            put(sums(x), (rows - first).min(4), (n - t).min(4), stride, &mut out[first * stride + t..]);
        }
    }
}

/// Writes sum `4 t + r` to `out[r * stride + t]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn put(sums: __m512, rows: usize, tokens: usize, stride: usize, out: &mut [f32]) {
    let turned =
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
    let mut all = [0.0; 16];
    store(&mut all, turned);
    for (r, sums) in all.as_chunks::<4>().0.iter().enumerate().take(rows) {
        match out[r * stride..].first_chunk_mut() {
            Some(out) if tokens == 4 => *out = *sums,
            _ => out[r * stride..][..tokens].copy_from_slice(&sums[..tokens]),
        }
    }
}

// The width is a multiple of 16.
accumulate!("avx512f", 16 x [4, 1], _mm512_setzero_ps(), |w, v, sum| _mm512_fmadd_ps(_mm512_set1_ps(w), v, sum));

/// Integer scores of the first tokens, as many as fours hold, which it returns; rows of 8 or 16 words of 2 or 4 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) fn integer_scores(grid: &Small, queries: &Bytes, codes: LaneBlock<u32>, out: &mut [f32]) -> usize {
    type ScoreFn = unsafe fn(&Small, &Bytes, usize, LaneBlock<u32>, &mut [f32]);
    let run: ScoreFn = match (grid.bits, codes.width) {
        (2, 8) => integer_scores_of::<2, 4, 8>,
        (2, 16) => integer_scores_of::<2, 4, 16>,
        (4, 8) => integer_scores_of::<4, 2, 8>,
        (4, 16) => integer_scores_of::<4, 2, 16>,
        _ => return 0,
    };
    let codes = LaneBlock { n: codes.n / 4 * 4, ..codes };
    for first in (0..queries.steps.len()).step_by(4) {
        // SAFETY: the features are those of this function.
        unsafe { run(grid, queries, first, codes, out) };
    }
    codes.n
}

/// Four queries from `first` on; a register holds the codes of one token (W = 16 words) or two.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn integer_scores_of<const B: usize, const FIELDS: usize, const W: usize>(
    grid: &Small,
    queries: &Bytes,
    first: usize,
    codes: LaneBlock<u32>,
    out: &mut [f32],
) {
    let LaneBlock { rows: words, n, stride, .. } = codes;
    let (rows, channels) = (queries.steps.len(), W * 32 / B);
    let place = |r: usize| (first + r).min(rows - 1);
    let mut q = [[_mm512_setzero_si512(); 4]; FIELDS];
    let (mut factor, mut offset) = ([0f32; 16], [0f32; 16]);
    let mut shift = [0i32; 16];
    // Levels of a table are made positive by 128.
    let uniform = grid.middle != 0.0;
    for r in 0..4 {
        let row = queries.rows[place(r) * channels..][..channels].as_chunks::<32>().0;
        for (field, q) in q.iter_mut().enumerate() {
            let (low, high) = (&row[field], &row[field + if W == 16 { FIELDS } else { 0 }]);
            // SAFETY: an array of 32 bytes is read, unaligned.
            let low = unsafe { _mm256_loadu_si256(low.as_ptr().cast()) };
            // SAFETY: as above.
            let high = unsafe { _mm256_loadu_si256(high.as_ptr().cast()) };
            q[r] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        }
        let sum = queries.sums[place(r)];
        for t in 0..4 {
            factor[4 * t + r] = queries.steps[place(r)] * grid.unit;
            offset[4 * t + r] = grid.middle * sum as f32;
            shift[4 * t + r] = if uniform { 0 } else { 128 * sum };
        }
    }
    let (factor, offset) = (load(&factor), load(&offset));
    // SAFETY: an array of 64 bytes is read, unaligned.
    let shift = unsafe { _mm512_loadu_si512(shift.as_ptr().cast()) };
    // SAFETY: an array of 16 bytes is read, unaligned.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(grid.bytes.as_ptr().cast()) });
    let table = _mm512_xor_si512(table, _mm512_set1_epi8(-128));
    let mask = _mm512_set1_epi8((1 << B) - 1);
    let registers = W / 4;
    for t in (0..n).step_by(4) {
        let tokens = words[t * W..][..4 * W].as_chunks::<16>().0;
        let mut x = [[_mm512_setzero_si512(); 4]; 4];
        for (words, x) in tokens.iter().zip(&mut x[..registers]) {
            // SAFETY: an array of 64 bytes is read, unaligned.
            let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
            for (field, q) in q.iter().enumerate() {
                let codes = _mm512_srl_epi16(words, _mm_cvtsi32_si128((B * field) as i32));
                let codes = _mm512_and_si512(codes, mask);
                let levels = if uniform { codes } else { _mm512_shuffle_epi8(table, codes) };
                for r in 0..4 {
                    x[r] = _mm512_dpbusd_epi32(x[r], levels, q[r]);
                }
            }
        }
        let sums = _mm512_cvtepi32_ps(_mm512_sub_epi32(integer_sums::<W>(x), shift));
        let sums = _mm512_mul_ps(factor, _mm512_sub_ps(sums, offset));
        put(sums, (rows - first).min(4), 4, stride, &mut out[first * stride + t..]);
    }
}

/// Sum `4 t + r` belongs to token t and query r: of a register, or of its half if two tokens are in one.
#[inline]
#[target_feature(enable = "avx512f")]
fn integer_sums<const W: usize>(x: [[__m512i; 4]; 4]) -> __m512i {
    let mut y = [_mm512_setzero_si512(); 4];
    for (y, [a, b, c, d]) in y.iter_mut().zip(x).take(W / 4) {
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        *y = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    let pair =
        |a, b| _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
    let [a, b, c, d] = y;
    if W == 8 { pair(a, b) } else { pair(pair(a, b), pair(c, d)) }
}
