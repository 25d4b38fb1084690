//! Kernels of the fused attention: unpacking to levels, dense scores and sums on small tiles, integer scores, exponentials.
//!
//! Rows of queries and tiles are padded with zeros to a stride `dim` that eight divides. x86-64 with AVX2, FMA and F16C has forms
//! of its own, and others with AVX-512; aarch64 has forms with NEON, and integer scores with `dotprod`. They are chosen at run
//! time. Every other machine runs the plain loops, which the tests hold the others to.
//! A sum runs over the tokens in order, one accumulator a channel, so a zero weight changes no bit.

pub(super) use level::{MOST, available};
pub(super) use plain::{greater, greatest};

#[cfg(target_arch = "x86_64")]
use super::paths::{Path, note};
use super::rows::Door;
use crate::math::trellis::Trellis;
use half::f16;
use level::Level;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use level::level;

#[cfg(test)]
mod asked;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod level;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod parts;
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
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only AVX-512 has such sums"))]
    pub wide: [i16; 16],
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only AVX-512 has such sums"))]
    pub wide_unit: f32,
}

/// The greatest of the integer levels for sums. 15 divides it, so that the levels of the uniform grid are whole.
pub(super) const WIDE: f32 = 1020.0;

/// A block of tokens: `n` rows of `width` elements. The score of a query row is at `row * stride + token`, and so is a weight.
#[derive(Clone, Copy)]
pub(super) struct LaneBlock<'a, T> {
    pub rows: &'a [T],
    pub width: usize,
    pub n: usize,
    pub stride: usize,
}

impl<'a, T> LaneBlock<'a, T> {
    #[inline(always)]
    fn row(&self, token: usize) -> &'a [T] {
        &self.rows[token * self.width..][..self.width]
    }
}

/// Rows of packed words; those at `picks` go to rows of levels, `dim` apart.
#[derive(Clone, Copy)]
pub(super) struct Picked<'a> {
    pub words: &'a [u32],
    pub row_words: usize,
    pub picks: &'a [u32],
    pub dim: usize,
    pub place: BandPlace,
}

/// Where a band is in a row of words and in a row of levels.
#[derive(Clone, Copy)]
pub(super) struct BandPlace {
    pub word: usize,
    pub words: usize,
    pub channel: usize,
    pub channels: usize,
}

impl<'a> Picked<'a> {
    /// Each row of the band with its place in `out`.
    #[inline(always)]
    fn to<'b>(self, out: &'b mut [f32]) -> impl Iterator<Item = (&'a [u32], &'b mut [f32])> {
        let BandPlace { word, words, channel, channels } = self.place;
        self.picks.iter().zip(out.chunks_exact_mut(self.dim)).map(move |(&pick, out)| {
            let row = &self.words[pick as usize * self.row_words + word..][..words];
            (row, &mut out[channel..][..channels])
        })
    }
}

/// Queries in eight bits for the integer scores, in the order of [`channel_at`].
pub(super) struct Bytes {
    pub rows: Vec<i8>,
    /// Step of each row.
    pub steps: Vec<f32>,
    /// Sum of each row.
    pub sums: Vec<i32>,
}

/// Calls a form and returns, where the machine has its level.
macro_rules! fast {
    (Neon, $($call:tt)*) => { fast!("aarch64", Neon, $($call)*); };
    ($level:ident, $($call:tt)*) => { fast!("x86_64", $level, $($call)*); };
    ($arch:literal, $level:ident, $($call:tt)*) => {
        #[cfg(target_arch = $arch)]
        if level() >= Level::$level {
            // SAFETY: the features that the function enables were found on this machine.
            return unsafe { $($call)* };
        }
    };
}

/// Levels of packed rows of codes; the channels are a multiple of eight.
pub(super) fn levels(grid: &Small, rows: Picked, out: &mut [f32]) {
    assert_eq!(rows.place.channels % 8, 0, "{} channels", rows.place.channels);
    #[cfg(target_arch = "x86_64")]
    if avx512::whole(grid.bits, rows.place.channels) {
        fast!(Avx512, avx512::levels(grid, rows, out));
    } else if level() >= Level::Avx512 {
        note(Path::NarrowLevels);
    }
    fast!(Avx2, avx2::levels(grid, rows, out));
    fast!(Neon, neon::levels(grid, rows, out));
    plain::levels(grid, rows, out);
}

/// Levels of rows of trellis codes.
pub(super) fn trellis_levels(grid: &Trellis, rows: Picked, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if trellis::fits(grid.states_log2, grid.bits, rows.place.channels)
        && let Ok(fixed) = (&grid.fixed[..]).try_into()
    {
        fast!(Avx512, trellis::vbmi((fixed, crate::math::trellis::UNIT, grid.bits), rows, out));
    }
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx512 {
        note(Path::TrellisGathered);
    }
    rows.to(out).for_each(|(row, out)| trellis_row(grid, row, out));
}

fn trellis_row(grid: &Trellis, words: &[u32], out: &mut [f32]) {
    if out.len() % 8 == 0 {
        fast!(Avx2, trellis::gathered(grid.levels(), (grid.states_log2, grid.bits), words, out));
    }
    grid.decode(words, out);
}

/// Half floats as f32.
pub(super) fn halves(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "{} half floats, room for {}", from.len(), to.len());
    fast!(Avx2, avx2::halves(from, to));
    fast!(Neon, neon::halves(from, to));
    f16::read(from, to);
}

/// Counts a tile that a machine with AVX-512 leaves to the forms below.
fn narrow_tile() {
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx512 {
        note(Path::NarrowTile);
    }
}

/// Inner products of all query rows with the rows of a tile.
pub(super) fn scores(queries: &[f32], tile: LaneBlock<f32>, out: &mut [f32]) {
    if tile.width % 16 == 0 {
        fast!(Avx512, avx512::scores(queries, tile, out));
    } else {
        narrow_tile();
    }
    fast!(Avx2, avx2::scores(queries, tile, out));
    fast!(Neon, neon::scores(queries, tile, out));
    plain::scores(queries, tile, out);
}

/// Adds the rows of a tile to the sums of all query rows, weighted.
pub(super) fn accumulate(weights: &[f32], tile: LaneBlock<f32>, sums: &mut [f32]) {
    if tile.width % 16 == 0 {
        fast!(Avx512, avx512::accumulate(weights, tile, sums));
    } else {
        narrow_tile();
    }
    fast!(Avx2, avx2::accumulate(weights, tile, sums));
    fast!(Neon, neon::accumulate(weights, tile, sums));
    plain::accumulate(weights, tile, sums);
}

/// Tokens that are summed in integers at once.
pub(super) const MOST_SUMMED: usize = 64;

/// Whether sums of up to [`MOST_SUMMED`] tokens have an integer form on this machine, for this many bits and channels.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn sums_in_integers(bits: u8, channels: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx512 {
        return bits == 4 && channels % 64 == 0;
    }
    false
}

/// [`accumulate`] of the levels of packed rows in integers, where there is such a form and the weights are finite; else false, and
/// nothing is done.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn weighted_levels(
    grid: &Small,
    rows: Picked,
    weights: &[f32],
    stride: usize,
    sums: &mut [f32],
) -> bool {
    fast!(Avx512, weighted::weighted_levels(grid, rows, weights, stride, sums));
    false
}

/// `(x f + bias) scale` in place for the factor f of each token; the greatest, NaN if one is.
pub(super) fn logits(x: &mut [f32], factors: &[f32], bias: f32, scale: f32) -> f32 {
    assert_eq!(x.len(), factors.len(), "{} scores, {} factors", x.len(), factors.len());
    fast!(Avx2, softmax::logits(x, factors, bias, scale));
    fast!(Neon, neon::logits(x, factors, bias, scale));
    plain::logits(x, factors, bias, scale)
}

/// exp(x - top) in place; the sum, and the least.
pub(super) fn exponentials(x: &mut [f32], top: f32) -> (f32, f32) {
    fast!(Avx512, softmax::exponentials_512(x, top));
    fast!(Avx2, softmax::exponentials(x, top));
    fast!(Neon, neon::exponentials(x, top));
    plain::exponentials(x, top)
}

/// Whether integer scores have a form for this many bits and channels.
pub(super) fn integer_form(bits: u8, channels: usize) -> bool {
    matches!(bits, 2 | 4) && channels % (256 / usize::from(bits)) == 0 && channels <= 512
}

/// The channel that stands at `place` of a row of [`Bytes`]: 32 bytes of codes are taken a field at a time.
pub(super) fn channel_at(bits: u8, place: usize) -> usize {
    let per_byte = 8 / usize::from(bits);
    let (chunk, field, byte) = (place / (32 * per_byte), place / 32 % per_byte, place % 32);
    (chunk * 32 + byte) * per_byte + field
}

/// Integer inner products of rows of codes with all queries, times `grid.unit` and the steps of the queries.
pub(super) fn integer_scores(grid: &Small, queries: &Bytes, codes: LaneBlock<u32>, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx512 {
        // SAFETY: the features that the function enables were found on this machine.
        let done = unsafe { avx512::integer_scores(grid, queries, codes, out) };
        if done == codes.n {
            return;
        }
        note(if done > 0 { Path::TokensBeyondFours } else { Path::NarrowIntegers });
        let rest = LaneBlock { rows: &codes.rows[done * codes.width..], n: codes.n - done, ..codes };
        fast!(Avx2, avx2::integer_scores(grid, queries, rest, &mut out[done..]));
    }
    fast!(Avx2, avx2::integer_scores(grid, queries, codes, out));
    fast!(Neon, neon::integer_scores(grid, queries, codes, out));
    plain::integer_scores(grid, queries, codes, out);
}

#[cfg(test)]
mod tests;
