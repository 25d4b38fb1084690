//! Scores of packed keys and sums of packed values as MLX graphs, through `quantized_matmul` where a band is in MLX's own layout.

use super::Mlx;
use super::frame::{enter_query, leave};
use super::stages::{dot, float, join, num, unsupported, with_last};
use super::tables::{DeviceTables, native_group};
use crate::codec::Band;
use crate::codec::codes::Codes;
use crate::engine::mlx::arrays::{self, slice};
use crate::engine::{Engine, check_queries};
use crate::error::Result;
use crate::tensor::Dtype;
use mlx_rs::Array;
use mlx_rs::ops::{self, matmul, select};

/// See [`Engine::scores`].
pub(super) fn scores(mlx: &Mlx, codes: &Codes<Array>, queries: &Array) -> Result<Array> {
    let (codec, [b, h, t]) = (codes.codec(), codes.shape());
    let d = codec.spec().head_dim;
    let (hq, l) = check_queries(codes, "queries", &arrays::shape(queries), d)?;
    let folded = [b as i32, h as i32, (hq / h * l) as i32, d as i32];
    let q = float(queries, "queries")?.reshape(&folded)?;
    let out = [b, hq, l, t].map(|n| n as i32);
    if codec.channel().is_some() {
        let keys = mlx.decode(codes, Dtype::F32)?;
        return Ok(matmul(q, keys.transpose_axes(&[0, 1, 3, 2])?)?.reshape(&out)?);
    }
    let tables = mlx.tables(codec)?;
    let entered = enter_query(codes.frame(), &q)?;
    let mut score: Option<Array> = None;
    let mut add = |part: Array| -> Result<()> {
        score = Some(match score.take() {
            Some(sum) => sum.add(part)?,
            None => part,
        });
        Ok(())
    };
    let mut rotated = vec![];
    for (i, band) in codec.bands().iter().enumerate() {
        let q = tables.bands[i].rotation.forward(&slice(&entered, 3, band.start, band.start + band.dim)?)?;
        if codec.affine_group().is_some() {
            add(matmul(&q, mlx.rotated_rows(codes, &tables)?.transpose_axes(&[0, 1, 3, 2])?)?)?;
        } else if let Some(native) = mlx.native(codes, &tables, i, band)? {
            add(native.matmul(&q, true)?)?;
        } else {
            let c = mlx.levels(&tables, i, band, codes.words())?;
            let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?;
            let product = matmul(&q, c.transpose_axes(&[0, 1, 3, 2])?)?;
            add(product.multiply(scale.transpose_axes(&[0, 1, 3, 2])?)?)?;
        }
        rotated.push(q);
    }
    if let Some(qjl) = codec.qjl() {
        let rotated = join(rotated)?;
        for round in 0..qjl.rounds() {
            let (signs, norm) = mlx.residual(codes, &tables, round)?;
            let projected = matmul(&rotated, tables.projections[round].t())?;
            let norm = norm.multiply(num(qjl.factor_for_score(round)))?.transpose_axes(&[0, 1, 3, 2])?;
            add(matmul(projected, signs.transpose_axes(&[0, 1, 3, 2])?)?.multiply(norm)?)?;
        }
    }
    if let Some(centre) = &codes.frame().centre {
        add(dot(&q, &centre.expand_dims(2)?)?)?;
    }
    Ok(score.ok_or_else(|| unsupported(codec))?.reshape(&out)?)
}

/// See [`Engine::weighted_sum`].
pub(super) fn weighted_sum(mlx: &Mlx, codes: &Codes<Array>, weights: &Array) -> Result<Array> {
    let (codec, [b, h, t]) = (codes.codec(), codes.shape());
    let (hq, l) = check_queries(codes, "weights", &arrays::shape(weights), t)?;
    let d = codec.spec().head_dim;
    let w = float(weights, "weights")?.reshape(&[b, h, hq / h * l, t].map(|n| n as i32))?;
    let out = [b, hq, l, d].map(|n| n as i32);
    if codec.channel().is_some() {
        return Ok(hiding(&w, &mlx.decode(codes, Dtype::F32)?)?.reshape(&out)?);
    }
    let tables = mlx.tables(codec)?;
    // A weight of exact zero hides what is in the row, NaN included (masked and padded tokens).
    let hidden = w.eq(num(0.0))?;
    let scaled = |scale: &Array| -> Result<Array> {
        let product = w.multiply(scale.transpose_axes(&[0, 1, 3, 2])?)?;
        Ok(select(&hidden, num(0.0), product)?)
    };
    let mut sums = vec![];
    for (i, band) in codec.bands().iter().enumerate() {
        sums.push(if codec.affine_group().is_some() {
            hiding(&w, &mlx.rotated_rows(codes, &tables)?)?
        } else if let Some(mut native) = mlx.native(codes, &tables, i, band)? {
            let spoilt = native.take_out()?;
            native.matmul(&w, false)?.add(scaled(&spoilt)?.sum_axis(-1, true)?)?
        } else {
            let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?;
            matmul(scaled(&scale)?, mlx.levels(&tables, i, band, codes.words())?)?
        });
    }
    let mut sum = join(sums)?;
    if let Some(qjl) = codec.qjl() {
        for round in 0..qjl.rounds() {
            let (signs, norm) = mlx.residual(codes, &tables, round)?;
            let weights = scaled(&norm.multiply(num(qjl.shrunk_factor()))?)?;
            sum = sum.add(matmul(matmul(weights, signs)?, &tables.projections[round])?)?;
        }
    }
    let out_of_it = leave(codec, codes.frame(), &tables, &sum, Some(&w.sum_axis(-1, true)?))?;
    Ok(out_of_it.reshape(&out)?)
}

/// Sums of rows [B, H, T, D] with weights [B, H, n, T]. A weight of exact zero hides what is in the row, NaN and infinities included;
/// other weights make NaN of the channels in which a row that they take is not finite.
pub(super) fn hiding(weights: &Array, rows: &Array) -> Result<Array> {
    if rows.shape()[2] == 0 {
        return Ok(matmul(weights, rows)?);
    }
    let finite = rows.abs()?.lt(num(f32::INFINITY))?;
    let sums = matmul(weights, select(&finite, rows, num(0.0))?)?;
    // Which queries give weight to a row that is not finite, and in which channels some row is not.
    let taken = select(weights.eq(num(0.0))?, num(0.0), num(1.0))?;
    let queries = matmul(taken, select(finite.all_axes(&[3], true)?, num(0.0), num(1.0))?)?;
    let channels = select(finite.all_axes(&[2], true)?, num(0.0), num(1.0))?;
    Ok(select(queries.multiply(channels)?.gt(num(0.0))?, num(f32::NAN), sums)?)
}

/// Packed words with the scales and biases that `quantized_matmul` wants.
struct Native {
    words: Array,
    scales: Array,
    biases: Array,
    group: i32,
    bits: i32,
}

impl Native {
    /// Takes the scales that are not finite out of the product, which has no way to hide a row, and gives them: [B, H, T, 1], zero
    /// for the other rows.
    fn take_out(&mut self) -> Result<Array> {
        let finite = self.scales.abs()?.lt(num(f32::INFINITY))?;
        let spoilt = slice(&select(&finite, num(0.0), &self.scales)?, 3, 0, 1)?;
        self.scales = select(&finite, &self.scales, num(0.0))?;
        self.biases = select(&finite, &self.biases, num(0.0))?;
        Ok(spoilt)
    }

    fn matmul(&self, x: &Array, transpose: bool) -> Result<Array> {
        let (group, bits) = (self.group, self.bits);
        Ok(ops::quantized_matmul(x, &self.words, &self.scales, &self.biases, transpose, group, bits)?)
    }
}

impl Mlx {
    /// A uniform band in MLX's own layout, if it is one.
    fn native(
        &self,
        codes: &Codes<Array>,
        tables: &DeviceTables,
        i: usize,
        band: &Band,
    ) -> Result<Option<Native>> {
        let Some((step, group)) =
            band.grid.scalar().and_then(|g| g.step()).zip(native_group(band.dim, band.bits))
        else {
            return Ok(None);
        };
        let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?.multiply(num(step))?;
        let scales = ops::broadcast_to(&scale, &with_last(&scale, &[band.dim as i32 / group]))?;
        let biases = scales.multiply(num(-0.5 * ((1u32 << band.bits) - 1) as f32))?;
        let words = slice(codes.words(), 3, band.word, band.word + band.words)?;
        Ok(Some(Native { words, scales, biases, group, bits: band.bits.into() }))
    }
}
