//! Packing as MLX graphs: every band rotated, scaled, put on its grid and packed; then the residual, round by round.

use super::stages::{dot, finite, join, num, pack, scale_of, store_scale, unsupported, with_last};
use super::tables::{BandTables, DeviceTables};
use super::{Mlx, fused, trellis};
use crate::codec::{Band, BandGrid, Codec};
use crate::engine::mlx::arrays::slice;
use crate::error::Result;
use crate::math::scale::FINE;
use crate::spec::ScaleFormat;
use mlx_rs::ops::{self, matmul, select};
use mlx_rs::{Array, Dtype as MlxDtype};

/// Words and scales of vectors [B, H, T, D] that are in their frame.
pub(super) fn encode_bands(mlx: &Mlx, codec: &Codec, t: &Array) -> Result<(Array, Array)> {
    if let Some(packed) = fused::encode(mlx, codec, t)? {
        return Ok(packed);
    }
    let tables = mlx.tables(codec)?;
    let (mut words, mut scales, mut left) = (vec![], vec![], vec![]);
    let turn = |(i, band): (usize, &Band)| -> Result<(Array, Array)> {
        let y = tables.bands[i].rotation.forward(&slice(t, 3, band.start, band.start + band.dim)?)?;
        let yy = dot(&y, &y)?;
        Ok((y, yy))
    };
    let turned = codec.bands().iter().enumerate().map(turn).collect::<Result<Vec<_>>>()?;
    // Rows whose bands all have a finite norm; the others decode to NaN in every band.
    let mut whole = finite(&turned[0].1)?;
    for (_, yy) in &turned[1..] {
        whole = whole.logical_and(finite(yy)?)?;
    }
    for (i, (band, (y, yy))) in codec.bands().iter().zip(&turned).enumerate() {
        let Some(levels) = &tables.bands[i].levels else { return encode_groups(codec, y, &whole) };
        let good = yy.gt(num(0.0))?.logical_and(&whole)?;
        let u = y.multiply(num(band.dim as f32).divide(yy)?.sqrt()?)?;
        let u = match snap(&tables, codec, yy, band)? {
            Some(snap) => u.multiply(snap)?,
            None => u,
        };
        // The codes of rows that are not good are whatever they are here, and zeros below.
        let zero = Array::from_slice(&[0u32], &[1]);
        let (codes, c) = match &band.grid {
            BandGrid::Trellis(trellis) => {
                let codes = select(&good, trellis::search(&u, trellis)?, zero)?;
                let windows = trellis::windows(&pack(&codes, band.bits)?, trellis, band.dim)?;
                (codes, levels.take(windows)?)
            }
            grid => {
                let codes = select(&good, scalar_codes(&u, grid, &tables.bands[i], band.bits)?, zero)?;
                let c = levels.take(&codes)?;
                (codes, c)
            }
        };
        let sums = [yy, &dot(&c, y)?, &dot(&c, &c)?];
        let scale = scale_of(codec.spec().scale, sums, band.dim, &whole)?;
        let stored = store_scale(&scale, codec.format())?;
        if codec.qjl().is_some() {
            let rest = y.subtract(c.multiply(tables.load_scale(&stored)?)?)?;
            left.push(select(&good, rest, num(0.0))?);
        }
        words.push(pack(&codes, band.bits)?);
        scales.push(stored);
    }
    if let Some(qjl) = codec.qjl() {
        let mut left = join(left)?;
        for s in &tables.projections {
            let positive = matmul(&left, s.t())?.gt(num(0.0))?;
            words.push(pack(&positive, 1)?);
            let norm = select(&whole, dot(&left, &left)?.sqrt()?, num(f32::NAN))?;
            let stored = store_scale(&norm, codec.format())?;
            let signs = positive.as_dtype(MlxDtype::Float32)?.multiply(num(2.0))?.subtract(num(1.0))?;
            let norm = tables.load_scale(&stored)?.multiply(num(qjl.shrunk_factor()))?;
            left = left.subtract(matmul(signs, s)?.multiply(norm)?)?;
            scales.push(stored);
        }
    }
    Ok((join(words)?, join(scales)?))
}

/// What coordinates are multiplied by so that the codes take up the rounding of the scale: [`ScaleFormat::snap`].
fn snap(tables: &DeviceTables, codec: &Codec, yy: &Array, band: &Band) -> Result<Option<Array>> {
    let (format, dim) = (codec.format(), band.dim);
    let (trellis, one) = match &band.grid {
        BandGrid::Trellis(trellis) => (true, codec.spec().scale.expected(dim as f32, trellis.mse(), dim)),
        _ => (false, 1.0),
    };
    if format == ScaleFormat::F16 || (format == ScaleFormat::Log8 && !trellis) {
        return Ok(None);
    }
    let expected = yy.divide(num(dim as f32))?.sqrt()?.multiply(num(one))?;
    let snap = expected.divide(tables.load_scale(&store_scale(&expected, format)?)?)?;
    let near = format.near();
    let mut takes = snap.ge(num(near.start))?.logical_and(snap.lt(num(near.end))?)?;
    if !trellis {
        let [low, high] = FINE.map(f32::exp2);
        takes = takes.logical_and(expected.lt(num(low))?.logical_or(expected.gt(num(high))?)?)?;
    }
    Ok(Some(select(&takes, &snap, num(1.0))?))
}

/// Codes of unit-variance coordinates on a scalar grid.
fn scalar_codes(u: &Array, grid: &BandGrid, tables: &BandTables, bits: u8) -> Result<Array> {
    match (grid.scalar().and_then(|g| g.step()), &tables.borders) {
        (None, Some(borders)) => Ok(borders.search_sorted(u, ops::SearchSide::Right)?),
        (step, _) => {
            let (half, top) = ((1u32 << bits) as f32 * 0.5, ((1u32 << bits) - 1) as f32);
            let place = u.multiply(num(1.0 / step.unwrap_or(1.0)))?.add(num(half))?;
            Ok(ops::minimum(ops::maximum(place, num(0.0))?, num(top))?.as_dtype(MlxDtype::Uint32)?)
        }
    }
}

/// Codes, scales and biases of affine groups, by the rule of [`crate::codec::grid::affine_range`].
fn encode_groups(codec: &Codec, y: &Array, whole: &Array) -> Result<(Array, Array)> {
    let group = codec.affine_group().ok_or_else(|| unsupported(codec))? as i32;
    let n = y.shape()[3];
    let x = y.reshape(&with_last(y, &[n / group, group]))?;
    let top = num(((1u32 << codec.spec().bits) - 1) as f32);
    let (low, high) = (x.min_axis(-1, true)?, x.max_axis(-1, true)?);
    let step = ops::maximum(high.subtract(&low)?.divide(&top)?, num(1e-7))?;
    let from_low = low.abs()?.gt(high.abs()?)?;
    let edge = select(&from_low, &low, &high)?;
    let step = select(&from_low, &step, step.negative()?)?;
    let steps = edge.divide(&step)?.round(0)?;
    let on_zero = steps.eq(num(0.0))?;
    let half = |x: Array| -> Result<Array> {
        Ok(ops::minimum(ops::maximum(x, num(-65504.0))?, num(65504.0))?.as_dtype(MlxDtype::Float16)?)
    };
    let whole = whole.expand_dims(-1)?;
    let nan = num(f32::NAN);
    let scale = half(select(&whole, select(&on_zero, &step, edge.divide(&steps)?)?, &nan)?)?;
    let bias = half(select(&whole, select(&on_zero, num(0.0), &edge)?, &nan)?)?;
    let (s, z) = (scale.as_dtype(MlxDtype::Float32)?, bias.as_dtype(MlxDtype::Float32)?);
    let place = x.subtract(z)?.divide(&s)?.round(0)?;
    let place = ops::minimum(ops::maximum(place, num(0.0))?, &top)?;
    let place = select(s.eq(num(0.0))?.logical_or(ops::is_nan(&place)?)?, num(0.0), place)?;
    let codes = place.as_dtype(MlxDtype::Uint32)?.reshape(y.shape())?;
    let flat = |a: Array| a.reshape(&with_last(y, &[n / group]));
    Ok((pack(&codes, codec.spec().bits)?, join(vec![flat(scale)?, flat(bias)?])?))
}
