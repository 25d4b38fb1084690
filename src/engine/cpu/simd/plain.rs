//! The plain loops of the kernels, see the parent: the definition that the tests hold the others to, and what runs where no other
//! form is. Fixed chunks and no look-ups between neighbours, so that a compiler makes vectors of them on any machine.

use super::{Bytes, LaneBlock, Picked, Small};

/// Channels that are unpacked at a time.
const RUN: usize = 32;

/// See [`super::levels`].
pub(super) fn levels(grid: &Small, rows: Picked, out: &mut [f32]) {
    rows.to(out).for_each(|(row, out)| levels_row(grid, row, out));
}

/// Levels of one row.
pub(super) fn levels_row(grid: &Small, row: &[u32], out: &mut [f32]) {
    let mut codes = [0u8; RUN];
    // RUN codes of b bits are b words.
    for (words, out) in row.chunks(grid.bits.into()).zip(out.chunks_mut(RUN)) {
        let codes = &mut codes[..out.len()];
        crate::math::bits::unpack(words, grid.bits, codes);
        out.iter_mut().zip(&*codes).for_each(|(out, &code)| *out = grid.levels[usize::from(code % 16)]);
    }
}

/// See [`super::scores`].
pub(super) fn scores(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    for (q, out) in queries.chunks_exact(tile.width).zip(out.chunks_exact_mut(tile.stride)) {
        for (k, out) in tile.rows.chunks_exact(tile.width).zip(&mut out[..tile.n]) {
            *out = crate::math::rotation::dot(q, k);
        }
    }
}

/// See [`super::accumulate`].
pub(super) fn accumulate(weights: &[f32], tile: LaneBlock<f32>, sums: &mut [f32]) {
    for (sum, weights) in sums.chunks_exact_mut(tile.width).zip(weights.chunks_exact(tile.stride)) {
        for (v, w) in tile.rows.chunks_exact(tile.width).zip(&weights[..tile.n]) {
            sum.iter_mut().zip(v).for_each(|(s, v)| *s += w * v);
        }
    }
}

/// See [`super::logits`].
pub(super) fn logits(x: &mut [f32], factors: &[f32], bias: f32, scale: f32) -> f32 {
    x.iter_mut().zip(factors).for_each(|(x, f)| *x = (*x * f + bias) * scale);
    greatest(x)
}

/// The greater of two, NaN if one is.
pub(in crate::engine::cpu) fn greater(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

/// The greatest, NaN if one is.
pub(in crate::engine::cpu) fn greatest(x: &[f32]) -> f32 {
    let mut tops = [f32::NEG_INFINITY; 8];
    let mut nan = false;
    for x in x.chunks(8) {
        for (top, &x) in tops.iter_mut().zip(x) {
            *top = if x > *top { x } else { *top };
            nan |= x.is_nan();
        }
    }
    if nan { f32::NAN } else { tops.into_iter().fold(f32::NEG_INFINITY, f32::max) }
}

/// See [`super::exponentials`].
pub(super) fn exponentials(x: &mut [f32], top: f32) -> (f32, f32) {
    x.iter_mut().for_each(|x| *x = (*x - top).exp());
    (x.iter().sum(), x.iter().copied().fold(f32::INFINITY, f32::min))
}

/// See [`super::integer_scores`]: a row becomes integer levels in the order of the queries, once for all of them.
pub(super) fn integer_scores(grid: &Small, queries: &Bytes, codes: LaneBlock<u32>, out: &mut [f32]) {
    let (bits, fields) = (usize::from(grid.bits), 8 / usize::from(grid.bits));
    let channels = codes.width * 4 * fields;
    let mut levels = [0i8; 512];
    let levels = &mut levels[..channels];
    let mask = (1u8 << bits) - 1;
    for t in 0..codes.n {
        let row: &[u8] = bytemuck::cast_slice(codes.row(t));
        for (bytes, levels) in row.as_chunks::<32>().0.iter().zip(levels.chunks_exact_mut(32 * fields)) {
            for (field, levels) in levels.chunks_exact_mut(32).enumerate() {
                for (level, byte) in levels.iter_mut().zip(bytes) {
                    *level = grid.bytes[usize::from(byte >> (bits * field) & mask)];
                }
            }
        }
        for (r, q) in queries.rows.chunks_exact(channels).enumerate() {
            let products = q.iter().zip(&*levels).map(|(&q, &l)| i32::from(q) * i32::from(l));
            let sum = products.sum::<i32>() as f32 - grid.middle * queries.sums[r] as f32;
            out[r * codes.stride + t] = queries.steps[r] * grid.unit * sum;
        }
    }
}
