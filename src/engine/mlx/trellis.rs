//! The trellis-coded grid as MLX graphs: windows of a packed stream, and the Viterbi search over a batch of vectors.
//!
//! The recursion is the same as in [`crate::math::trellis_search`] with f32 costs, one step of the graph per coordinate: the batch is what runs in
//! parallel. Costs are not rounded as on the CPU engine, so the codes may be others of the same quality.

use super::stages::{num, pad_last, with_last};
use crate::engine::mlx::arrays::{bitwise_and, evaluate, left_shift, right_shift, slice};
use crate::error::Result;
use crate::math::trellis::Trellis;
use mlx_rs::ops::{self, select};
use mlx_rs::{Array, Dtype};

/// Cost of a state that a held search may not start in.
const BARRED: f32 = 1e30;

fn word(x: u64) -> Array {
    Array::from_slice(&[x], &[1])
}

/// The windows [..., dim] of packed streams [..., W], as u32. Eight coordinates come from one u64, as in [`Trellis::decode`].
pub fn windows(words: &Array, trellis: &Trellis, dim: usize) -> Result<Array> {
    let (l, b) = (u64::from(trellis.states_log2), u64::from(trellis.bits));
    let eights = dim as i32 / 8;
    let bytes = words.contiguous()?.view::<u8>()?;
    let bytes = slice(&bytes, bytes.ndim() - 1, 0, dim / 8 * b as usize)?;
    let own =
        pad_last(&bytes.reshape(&with_last(&bytes, &[eights, b as i32]))?, 8)?.contiguous()?.view::<u64>()?;
    // The L - b bits before a run of eight lie in the two runs before it; the first run follows the last.
    let axis = own.ndim() - 2;
    let turned = |n: usize| -> Result<Array> {
        let cut = eights as usize - n % eights as usize;
        let (low, high) = (slice(&own, axis, 0, cut)?, slice(&own, axis, cut, eights as usize)?);
        Ok(ops::concatenate(&[high, low], axis as i32)?)
    };
    let before = left_shift(&turned(1)?, &word(8 * b))?.add(turned(2)?)?;
    let before = right_shift(&before, &word(16 * b - (l - b)))?;
    let run = left_shift(&own, &word(l - b))?.add(before)?;
    let places = Array::from_slice(&(0..8).map(|k| k * b).collect::<Vec<u64>>(), &[8]);
    let windows = bitwise_and(&right_shift(&run, &places)?, &word((1 << l) - 1))?;
    Ok(windows.as_dtype(Dtype::Uint32)?.reshape(&with_last(words, &[dim as i32]))?)
}

/// Bytes of path costs that a search may keep at once: 1,000 vectors of 128 channels at 2 bits.
const COSTS: usize = 1 << 26;

/// Codes [..., n] of unit-variance coordinates [..., n]. A search keeps the costs of every state at every step, 66 KB for a vector at
/// 2 bits, so it is cut into runs of vectors that are evaluated here, one after the other.
pub fn search(u: &Array, trellis: &Trellis) -> Result<Array> {
    let n = u.shape()[u.ndim() - 1];
    let rows = u.size() / n.max(1) as usize;
    if rows == 0 {
        return Ok(ops::zeros_dtype(u.shape(), Dtype::Uint32)?);
    }
    let y = u.reshape(&[rows as i32, n])?;
    let run = run_of(trellis, n as usize);
    let mut codes = vec![];
    for start in (0..rows).step_by(run) {
        let part = search_run(&slice(&y, 0, start, rows.min(start + run))?, trellis)?;
        evaluate(&[&part])?;
        codes.push(part);
    }
    let codes = if codes.len() == 1 { codes.remove(0) } else { ops::concatenate(&codes, 0)? };
    Ok(codes.reshape(u.shape())?)
}

/// Coordinates on either side of the seam that the free search runs over.
fn lead(trellis: &Trellis) -> usize {
    16 * trellis.states_log2 as usize / trellis.bits as usize
}

/// Vectors of `n` coordinates whose path costs are within [`COSTS`].
fn run_of(trellis: &Trellis, n: usize) -> usize {
    let groups = 1usize << (trellis.states_log2 - trellis.bits);
    (COSTS / (4 * groups * (n + 2 * lead(trellis)))).max(1)
}

/// Codes [rows, n] of coordinates [rows, n].
fn search_run(y: &Array, trellis: &Trellis) -> Result<Array> {
    let (rows, n) = (y.shape()[0], y.shape()[1]);
    let search = SearchTables::new(trellis, rows);
    let lead = lead(trellis) as i32;
    // A free search around the seam proposes the window there; a search held to it at both ends finds the codes.
    let near: Vec<Array> =
        (0..2 * lead).map(|k| search.column(y, (n * lead - lead + k) % n)).collect::<Result<_>>()?;
    let mut costs = vec![ops::zeros::<f32>(&[rows, search.groups])?];
    search.forward(&near, &mut costs)?;
    let mut group = ops::indexing::argmin_axis(&costs[2 * lead as usize], 1, false)?;
    let mut seam = group.clone();
    for i in (lead as usize - 1..2 * lead as usize).rev() {
        seam = search.back(&group, &near[i], &costs[i])?;
        group = search.group_after(&seam)?;
    }
    let states = Array::from_slice(&(0..search.groups as u32).collect::<Vec<_>>(), &[1, search.groups]);
    let start =
        seam.divide(Array::from_slice(&[1u32 << trellis.bits], &[1]))?.floor()?.as_dtype(Dtype::Uint32)?;
    let barred = select(states.eq(start.reshape(&[rows, 1])?)?, num(0.0), num(BARRED))?;
    let columns: Vec<Array> = (0..n).map(|i| search.column(y, i)).collect::<Result<_>>()?;
    let mut costs = vec![barred];
    search.forward(&columns[..n as usize - 1], &mut costs)?;
    let mut window = seam;
    let mut codes = vec![search.code(&window)?];
    for i in (0..n as usize - 1).rev() {
        window = search.back(&search.group_after(&window)?, &columns[i], &costs[i])?;
        codes.push(search.code(&window)?);
    }
    codes.reverse();
    Ok(ops::stack(&codes, 1)?)
}

/// Constant tables of the recursion. A group is the high L - b bits of a window, and the low ones name the group it leads to.
struct SearchTables {
    rows: i32,
    groups: i32,
    branches: i32,
    /// [groups * branches]: the group whose cost branch j into group p continues.
    from: Array,
    /// [groups, branches]: its level.
    levels: Array,
}

impl SearchTables {
    fn new(trellis: &Trellis, rows: i32) -> SearchTables {
        let (l, b) = (trellis.states_log2, trellis.bits);
        let (groups, branches) = (1i32 << (l - b), 1i32 << b);
        let from: Vec<u32> = (0..1u32 << l).map(|w| w % groups as u32).collect();
        let levels = Array::from_slice(trellis.levels(), &[groups, branches]);
        SearchTables { rows, groups, branches, from: Array::from_slice(&from, &[1 << l]), levels }
    }

    fn column(&self, y: &Array, i: i32) -> Result<Array> {
        slice(y, 1, i as usize, i as usize + 1)
    }

    fn forward(&self, columns: &[Array], costs: &mut Vec<Array>) -> Result<()> {
        let shape = [self.rows, self.groups, self.branches];
        for y in columns {
            let last = &costs[costs.len() - 1];
            let miss = y.reshape(&[self.rows, 1, 1])?.subtract(&self.levels)?.square()?;
            let next = last.take_axis(&self.from, 1)?.reshape(&shape)?.add(miss)?.min_axis(-1, false)?;
            costs.push(next);
        }
        Ok(())
    }

    /// The cheapest window [rows] with high bits `group` [rows], paying `y` [rows, 1], from the costs before it.
    fn back(&self, group: &Array, y: &Array, costs: &Array) -> Result<Array> {
        let (rows, branches) = (self.rows, self.branches);
        let from = self.from.reshape(&[self.groups, branches])?.take_axis(group, 0)?;
        let miss = y.subtract(self.levels.take_axis(group, 0)?)?.square()?;
        let cost = costs.take_along_axis(from, 1)?.add(miss)?.reshape(&[rows, branches])?;
        let branch = ops::indexing::argmin_axis(&cost, 1, false)?.as_dtype(Dtype::Uint32)?;
        Ok(group
            .as_dtype(Dtype::Uint32)?
            .multiply(Array::from_slice(&[branches as u32], &[1]))?
            .add(branch)?)
    }

    /// The group that a window leads to.
    fn group_after(&self, window: &Array) -> Result<Array> {
        bitwise_and(window, &Array::from_slice(&[self.groups as u32 - 1], &[1]))
    }

    /// The bits that the coordinate of a window owns: its highest.
    fn code(&self, window: &Array) -> Result<Array> {
        let low = u32::BITS - (self.groups as u32).leading_zeros() - 1;
        right_shift(window, &Array::from_slice(&[low], &[1]))
    }
}
