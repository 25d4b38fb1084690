//! One band of a vector on its grid: unit-variance coordinates to packed codes, and codes back to levels.
//!
//! A code is the number of borders at or below the coordinate: found by halves up to 16 levels; for more levels a table of
//! narrow cells leaves at most one border to compare with.

use crate::math::bits::{self, CODES_PER_UNPACK};
use crate::math::codebook::{self, Law};
use crate::math::lanes::{self, Tree};
use crate::spec::Grid;
use std::sync::Arc;

/// Cells of the search table.
const CELLS: usize = 4096;

/// A scalar grid with the tables that its two directions need.
#[derive(Clone, Debug)]
pub struct ScalarGrid {
    bits: u8,
    /// Levels by code, padded so that any byte is a valid index.
    levels: Box<[f32; 256]>,
    /// Levels of two neighbours by both codes, up to four bits.
    pairs: Box<[[f32; 2]; 256]>,
    /// Upper border of each code but the last; a coordinate on a border takes the upper code. Padded with infinity.
    borders: Box<[f32; 256]>,
    search: CodeSearch,
    bytes: Option<Box<ByteLevels>>,
}

/// Levels of up to four bits in eight bits: `level[c] ~ unit * (levels[c] - middle)`; a table of fewer codes repeats.
#[derive(Clone, Copy, Debug)]
pub struct ByteLevels {
    /// Integer levels.
    pub levels: [i8; 16],
    /// Their unit.
    pub unit: f32,
    /// What stands for zero: the codes of a uniform grid are its integer levels, others have zero here.
    pub middle: f32,
    /// Mean square of what they miss, on N(0, 1).
    pub error: f32,
}

/// How a code is found.
#[derive(Clone, Debug)]
enum CodeSearch {
    /// 1 / step of a uniform grid, whose codes are computed.
    Step(f32),
    /// Few borders are searched by halves.
    Tree(Tree),
    /// The code of each cell's lower end. A cell is computed by a function that does not fall, so borders of lower cells are
    /// at or below the coordinate, and the borders of higher cells above it; at most one border is in a cell.
    Cells { first: Box<[u8; CELLS]>, scale: f32, offset: f32 },
    /// Many borders, too close for cells.
    Halves,
}

impl ScalarGrid {
    /// The grid of a spec for a band of `dim` coordinates; `fitted` supplies the levels of [`Grid::Fitted`].
    pub fn new(grid: Grid, bits: u8, dim: usize, fitted: Option<&Arc<[f32]>>) -> ScalarGrid {
        let table = match grid {
            Grid::Uniform => codebook::uniform(bits).1,
            Grid::Beta => codebook::lloyd_max(Law::Sphere(dim), bits),
            _ => fitted.cloned().unwrap_or_else(|| codebook::lloyd_max(Law::Gaussian, bits)),
        };
        let mut levels = Box::new([0f32; 256]);
        levels[..table.len()].copy_from_slice(&table);
        let mut pairs = Box::new([[0f32; 2]; 256]);
        for (i, pair) in pairs.iter_mut().enumerate() {
            *pair = [levels[i & (table.len() - 1)], levels[i >> bits & (table.len() - 1)]];
        }
        let mut borders = Box::new([f32::INFINITY; 256]);
        for (border, w) in borders.iter_mut().zip(table.windows(2)) {
            *border = 0.5 * (w[0] + w[1]);
        }
        let search = match grid {
            Grid::Uniform => CodeSearch::Step(1.0 / codebook::uniform_step(bits)),
            _ if bits <= 4 => CodeSearch::Tree(lanes::tree(&borders[..table.len() - 1], bits)),
            _ => CodeSearch::cells(&borders[..table.len() - 1]),
        };
        let mut grid = ScalarGrid { bits, levels, pairs, borders, search, bytes: None };
        grid.bytes = (bits <= 4).then(|| Box::new(grid.to_bytes()));
        grid
    }

    /// The levels in eight bits, up to four bits a code.
    pub fn in_bytes(&self) -> Option<&ByteLevels> {
        self.bytes.as_deref()
    }

    fn to_bytes(&self) -> ByteLevels {
        let table = self.levels();
        if let Some(unit) = self.step() {
            let middle = 0.5 * (table.len() - 1) as f32;
            let levels = std::array::from_fn(|c| (c % table.len()) as i8);
            return ByteLevels { levels, unit, middle, error: 0.0 };
        }
        let top = table.iter().fold(0f32, |top, l| top.max(l.abs())).max(f32::MIN_POSITIVE);
        let round = |unit: f32| -> [i8; 16] {
            std::array::from_fn(|c| (table[c % table.len()] / unit).round().clamp(-127.0, 127.0) as i8)
        };
        let below = |u: f32| 0.5 * libm::erfcf(-u * std::f32::consts::FRAC_1_SQRT_2);
        let edge = |c: usize| self.borders().get(c).map_or(1.0, |&b| below(b));
        let share = |c: usize| edge(c) - if c == 0 { 0.0 } else { edge(c - 1) };
        let shares: Vec<f32> = (0..table.len()).map(share).collect();
        let error = |unit: f32| -> f32 {
            let miss = table.iter().zip(round(unit)).map(|(l, b)| (l - unit * f32::from(b)).powi(2));
            shares.iter().zip(miss).map(|(share, miss)| share * miss).sum()
        };
        // The unit with the least error, of some that use 112 to 127 of the 127 steps.
        let units = (0..31).map(|i| top / (112.0 + 0.5 * i as f32));
        let best = units.map(|unit| (error(unit), unit)).min_by(|a, b| a.0.total_cmp(&b.0));
        let (error, unit) = best.unwrap_or((0.0, 1.0));
        ByteLevels { levels: round(unit), unit, middle: 0.0, error }
    }

    /// Ascending levels.
    pub fn levels(&self) -> &[f32] {
        &self.levels[..1 << self.bits]
    }

    /// Upper border of each code but the last.
    pub fn borders(&self) -> &[f32] {
        &self.borders[..(1 << self.bits) - 1]
    }

    /// The step, if the levels are `step * (code - (2^bits - 1) / 2)`.
    pub fn step(&self) -> Option<f32> {
        matches!(self.search, CodeSearch::Step(_)).then(|| codebook::uniform_step(self.bits))
    }

    /// Codes of unit-variance coordinates.
    #[inline(always)]
    pub fn quantize(&self, u: &[f32], codes: &mut [u8]) {
        match &self.search {
            CodeSearch::Step(inverse) => {
                let (half, top) = ((1u32 << self.bits) as f32 * 0.5, ((1u32 << self.bits) - 1) as f32);
                for (code, &u) in codes.iter_mut().zip(u) {
                    *code = nearest_integer(clamp(u * inverse + half, top).floor()) as u8;
                }
            }
            CodeSearch::Tree(tree) => match self.bits {
                1 => lanes::search::<1>(tree, u, codes),
                2 => lanes::search::<2>(tree, u, codes),
                3 => lanes::search::<3>(tree, u, codes),
                _ => lanes::search::<4>(tree, u, codes),
            },
            CodeSearch::Cells { first, scale, offset } => {
                for (code, &u) in codes.iter_mut().zip(u) {
                    let low = first[cell(u, *scale, *offset) % CELLS];
                    *code = low + u8::from(u >= self.borders[usize::from(low)]);
                }
            }
            CodeSearch::Halves => {
                for (code, &u) in codes.iter_mut().zip(u) {
                    *code = self.borders().partition_point(|&border| border <= u) as u8;
                }
            }
        }
    }

    /// Levels of codes.
    #[inline(always)]
    pub fn look_up(&self, codes: &[u8], out: &mut [f32]) {
        for (o, &code) in out.iter_mut().zip(codes) {
            *o = self.levels[usize::from(code)];
        }
    }

    /// Levels of packed codes; `codes` is overwritten and must be as long as `out`.
    #[inline(always)]
    pub fn unpack(&self, words: &[u32], out: &mut [f32], codes: &mut [u8]) {
        match self.bits {
            1 => pairs::<1>(&self.pairs, words, out),
            2 => pairs::<2>(&self.pairs, words, out),
            3 => pairs::<3>(&self.pairs, words, out),
            4 => pairs::<4>(&self.pairs, words, out),
            _ => {
                bits::unpack(words, self.bits, codes);
                self.look_up(codes, out);
            }
        }
    }
}

/// Levels of packed codes, two by one look-up.
#[inline(always)]
fn pairs<const B: usize>(table: &[[f32; 2]; 256], words: &[u32], out: &mut [f32]) {
    let (out, rest) = out.as_chunks_mut::<CODES_PER_UNPACK>();
    let (words, last) = words.split_at(out.len() * B);
    for (words, out) in words.as_chunks::<B>().0.iter().zip(out) {
        pairs_block::<B>(table, words, out);
    }
    if !rest.is_empty() {
        let mut block = [0.0; CODES_PER_UNPACK];
        pairs_block::<B>(table, &std::array::from_fn(|i| last.get(i).copied().unwrap_or(0)), &mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
}

#[inline(always)]
fn pairs_block<const B: usize>(table: &[[f32; 2]; 256], words: &[u32; B], out: &mut [f32; CODES_PER_UNPACK]) {
    for (i, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (word, shift) = (2 * B * i / 32, 2 * B * i % 32);
        let mut both = words[word] >> shift;
        if shift + 2 * B > 32 {
            both |= words[word + 1] << (32 - shift);
        }
        *out = table[both as usize % (1 << (2 * B))];
    }
}

#[inline(always)]
fn cell(u: f32, scale: f32, offset: f32) -> usize {
    nearest_integer(clamp(u * scale + offset, (CELLS - 1) as f32).floor()) as usize
}

/// `x` from zero to `top`; NaN is zero.
#[inline(always)]
fn clamp(x: f32, top: f32) -> f32 {
    let x = if x > 0.0 { x } else { 0.0 };
    if x < top { x } else { top }
}

/// The nearest integer of 0 <= x < 2^22, ties to even. At 2^23 the unit of an f32 is one, so the sum rounds and its low bits
/// are the integer; the conversions of the language also care for NaN and overflow, which costs a loop its vectors.
#[inline(always)]
fn nearest_integer(x: f32) -> u32 {
    (x + 8_388_608.0).to_bits() & 0x3f_ffff
}

impl CodeSearch {
    fn cells(borders: &[f32]) -> CodeSearch {
        let (low, high) = (borders[0], borders[borders.len() - 1]);
        let scale = (CELLS - 2) as f32 / (high - low);
        let offset = 1.0 - low * scale;
        let cells: Vec<usize> = borders.iter().map(|&b| cell(b, scale, offset)).collect();
        if !scale.is_finite() || cells.windows(2).any(|w| w[0] == w[1]) {
            return CodeSearch::Halves;
        }
        let first = std::array::from_fn(|c| cells.partition_point(|&border| border < c) as u8);
        CodeSearch::Cells { first: Box::new(first), scale, offset }
    }
}

/// Scale and bias of one affine group, by MLX's rule: the end of larger magnitude is hit exactly, and so is zero.
///
/// Returned as they are stored, rounded to half precision.
#[inline(always)]
pub fn affine_range(x: &[f32], bits: u8) -> (f32, f32) {
    const LANES: usize = 16;
    let top = ((1u32 << bits) - 1) as f32;
    let (mut lows, mut highs) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    for x in x.chunks(LANES) {
        for (i, &x) in x.iter().enumerate() {
            lows[i] = if x < lows[i] { x } else { lows[i] };
            highs[i] = if x > highs[i] { x } else { highs[i] };
        }
    }
    let (low, high) = (lows.into_iter().fold(lows[0], f32::min), highs.into_iter().fold(highs[0], f32::max));
    let step = ((high - low) / top).max(1e-7);
    let (edge, step) = if low.abs() > high.abs() { (low, step) } else { (high, -step) };
    let steps = (edge / step).round_ties_even();
    let (scale, bias) = if steps == 0.0 { (step, 0.0) } else { (edge / steps, edge) };
    let half = |x: f32| half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32();
    (half(scale), half(bias))
}

/// Codes of one affine group: the nearest of `scale * code + bias`.
#[inline(always)]
pub fn affine_quantize(x: &[f32], scale: f32, bias: f32, bits: u8, codes: &mut [u8]) {
    let top = ((1u32 << bits) - 1) as f32;
    for (code, &x) in codes.iter_mut().zip(x) {
        // A scale that rounded to zero stands for a constant group: every code is zero.
        let position = if scale == 0.0 { 0.0 } else { (x - bias) / scale };
        *code = nearest_integer(clamp(position, top)) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantize_finds_the_nearest_level() {
        for grid in [Grid::Uniform, Grid::Lloyd, Grid::Beta] {
            for bits in 1..=8 {
                let grid = ScalarGrid::new(grid, bits, 64, None);
                let u: Vec<f32> = (0..997).map(|i| -6.0 + 12.0 * i as f32 / 996.0).collect();
                let (mut codes, mut back) = (vec![0; u.len()], vec![0.0; u.len()]);
                grid.quantize(&u, &mut codes);
                grid.look_up(&codes, &mut back);
                for (u, c) in u.iter().zip(&back) {
                    let nearest = grid.levels().iter().map(|l| (l - u).abs()).fold(f32::INFINITY, f32::min);
                    assert!((u - c).abs() <= nearest + 1e-6, "{bits} bits: {u} became {c}");
                }
            }
        }
    }

    #[test]
    fn affine_groups_hit_constants_and_their_range() {
        // T07 and T08: constants come back, and no lane outside the group takes part in its range.
        for bits in [2, 3, 4, 8] {
            for constant in [0.0f32, 5.0, -9.0, 500.0, 6e4] {
                let x = [constant; 32];
                let (scale, bias) = affine_range(&x, bits);
                let mut codes = [9; 32];
                affine_quantize(&x, scale, bias, bits, &mut codes);
                let back = scale * f32::from(codes[0]) + bias;
                assert!(
                    (back - constant).abs() <= 1e-3 * constant.abs(),
                    "{bits} bits: {constant} became {back}"
                );
            }
            let x: Vec<f32> = (0..32).map(|i| 5.0 + i as f32 / 31.0).collect();
            let (scale, bias) = affine_range(&x, bits);
            let mut codes = [0; 32];
            affine_quantize(&x, scale, bias, bits, &mut codes);
            let bound = 0.5 / ((1u32 << bits) - 1) as f32 + 6e-3;
            for (x, &code) in x.iter().zip(&codes) {
                assert!((scale * f32::from(code) + bias - x).abs() <= bound, "{bits} bits: {x}");
            }
        }
    }
}
