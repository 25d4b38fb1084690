//! One band of a vector on its grid: unit-variance coordinates to packed codes, and codes back to levels.

use crate::codebook::{self, Law};
use crate::spec::Grid;
use std::sync::Arc;

/// A scalar grid with the tables that its two directions need.
#[derive(Clone, Debug)]
pub struct ScalarGrid {
    bits: u8,
    /// Levels by code, padded so that any byte is a valid index.
    levels: Box<[f32; 256]>,
    /// Upper border of each code but the last; a coordinate on a border takes the upper code.
    borders: Vec<f32>,
    /// 1 / step of a uniform grid, whose codes are computed instead of searched.
    inverse_step: Option<f32>,
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
        let inverse_step = matches!(grid, Grid::Uniform).then(|| 1.0 / codebook::uniform_step(bits));
        ScalarGrid {
            bits,
            levels,
            borders: table.windows(2).map(|w| 0.5 * (w[0] + w[1])).collect(),
            inverse_step,
        }
    }

    /// Ascending levels.
    pub fn levels(&self) -> &[f32] {
        &self.levels[..1 << self.bits]
    }

    /// Upper border of each code but the last.
    pub fn borders(&self) -> &[f32] {
        &self.borders
    }

    /// The step, if the levels are `step * (code - (2^bits - 1) / 2)`.
    pub fn step(&self) -> Option<f32> {
        self.inverse_step.map(|_| codebook::uniform_step(self.bits))
    }

    /// Codes of unit-variance coordinates.
    #[inline(always)]
    pub fn quantize(&self, u: &[f32], codes: &mut [u8]) {
        if let Some(inverse) = self.inverse_step {
            let (half, top) = ((1u32 << self.bits) as f32 * 0.5, ((1u32 << self.bits) - 1) as f32);
            for (code, &u) in codes.iter_mut().zip(u) {
                // The clamp comes first, so the conversion is exact; truncation is floor on what is not negative.
                *code = (u * inverse + half).clamp(0.0, top) as i32 as u8;
            }
        } else if self.bits <= 4 {
            const LANES: usize = 16;
            let chunks = u.chunks_exact(LANES);
            let rest = chunks.remainder();
            let (whole, tail) = codes.split_at_mut(u.len() - rest.len());
            for (u, codes) in chunks.zip(whole.chunks_exact_mut(LANES)) {
                let mut count = [0i32; LANES];
                for &border in &self.borders {
                    for i in 0..LANES {
                        count[i] += i32::from(u[i] >= border);
                    }
                }
                for i in 0..LANES {
                    codes[i] = count[i] as u8;
                }
            }
            for (code, &u) in tail.iter_mut().zip(rest) {
                *code = self.borders.iter().map(|&border| u8::from(u >= border)).sum();
            }
        } else {
            for (code, &u) in codes.iter_mut().zip(u) {
                *code = self.borders.partition_point(|&border| border <= u) as u8;
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
}

/// Scale and bias of one affine group, by MLX's rule: the end of larger magnitude is hit exactly, and so is zero.
///
/// Returned as they are stored, rounded to half precision.
#[inline(always)]
pub fn affine_range(x: &[f32], bits: u8) -> (f32, f32) {
    let top = ((1u32 << bits) - 1) as f32;
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for &x in x {
        low = low.min(x);
        high = high.max(x);
    }
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
        *code = position.round_ties_even().clamp(0.0, top) as i32 as u8;
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
