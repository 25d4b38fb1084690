//! Frames as MLX graphs: centre, gains and channel order of a block, by the rules of [`crate::codec::frame`].

use super::stages::{dot, finite, float, join, num};
use super::tables::DeviceTables;
use crate::codec::Codec;
use crate::codec::codes::Frame;
use crate::engine::mlx::arrays::{self, slice, wrong_shape};
use crate::error::{Error, Result};
use mlx_rs::ops::{self, select};
use mlx_rs::{Array, Dtype};

/// See [`crate::engine::Engine::frame`].
pub(super) fn frame(
    codec: &Codec,
    centred: bool,
    block: &Array,
    queries: Option<&Array>,
) -> Result<Frame<Array>> {
    let (spec, shape) = (codec.spec(), arrays::shape(block));
    if shape.len() != 4 || shape[3] != spec.head_dim || shape[..3].contains(&0) {
        return Err(wrong_shape(block, "block", format!("[B > 0, H > 0, n > 0, {}]", spec.head_dim)));
    }
    let (block, rows) = finite_rows(&float(block, "block")?)?;
    let centre =
        centred.then(|| Ok::<_, Error>(block.sum_axis(2, true)?.divide(&rows.count)?)).transpose()?;
    let centred_block = match &centre {
        Some(c) => select(&rows.finite, block.subtract(c)?, num(0.0))?,
        None => block,
    };
    let [b, h, _, d] = [0, 1, 2, 3].map(|i| shape[i] as i32);
    let mut energy = mean_square(&centred_block, &rows)?;
    let mut gain = None;
    if spec.equalised {
        let query_energy = queries.map(|q| query_energy(q, b, h, d)).transpose()?;
        let g = gains(&energy, query_energy.as_ref())?;
        energy = energy.multiply(g.square()?)?;
        gain = Some(g);
    }
    let mut order = None;
    if spec.outliers > 0 {
        let (places, n) = (ops::argsort_axis(energy.negative()?, -1)?, spec.outliers as usize);
        let part = |start, end| -> Result<Array> { Ok(ops::sort_axis(slice(&places, 2, start, end)?, -1)?) };
        order = Some(join(vec![part(0, n)?, part(n, spec.head_dim)?])?);
    }
    let centre = centre.map(|c| c.reshape(&[b, h, d])).transpose()?;
    Ok(Frame { centre, gain, order })
}

/// Which rows of a block are finite, [B, H, n, 1], and how many, at least one, [B, H, 1, 1].
struct FiniteRows {
    finite: Array,
    count: Array,
}

/// The rows [B, H, n, D] with zeros in place of those that are not finite, by the rule of [`crate::codec::frame::finite`].
fn finite_rows(x: &Array) -> Result<(Array, FiniteRows)> {
    let finite = finite(&dot(x, x)?)?;
    let count = finite.as_dtype(Dtype::Float32)?.sum_axis(2, true)?;
    let kept = select(&finite, x, num(0.0))?;
    Ok((kept, FiniteRows { finite, count: ops::maximum(count, num(1.0))? }))
}

/// Mean square of each channel over the finite rows, [B, H, D]. The rows are divided first: a sum of squares may be no finite f32.
fn mean_square(kept: &Array, rows: &FiniteRows) -> Result<Array> {
    Ok(kept.divide(rows.count.sqrt()?)?.square()?.sum_axis(2, false)?)
}

/// Mean square of the query heads that share a KV head, [B, H, D].
fn query_energy(q: &Array, b: i32, h: i32, d: i32) -> Result<Array> {
    let shape = q.shape();
    let fits = shape.len() == 4 && shape[0] == b && shape[1] % h == 0 && shape[3] == d;
    if !fits || shape[1] == 0 || shape[2] == 0 {
        return Err(wrong_shape(q, "queries", format!("[{b}, a multiple of {h}, m > 0, {d}]")));
    }
    let folded = [b, h, shape[1] / h * shape[2], d];
    let (kept, rows) = finite_rows(&float(q, "queries")?.reshape(&folded)?)?;
    mean_square(&kept, &rows)
}

/// The gains of [`crate::codec::frame::gains`].
fn gains(keys: &Array, queries: Option<&Array>) -> Result<Array> {
    let shape = keys.shape().to_vec();
    let half = shape[2] / 2;
    // Pair sums and the floor under them.
    let pairs = |e: &Array| -> Result<Array> {
        let floor = e.sum_axis(-1, true)?.multiply(num(1e-3 / half as f32))?.add(num(1e-30))?;
        let pair = e.reshape(&[shape[0], shape[1], 2, half])?.sum_axis(2, false)?;
        Ok(pair.add(floor)?)
    };
    let mut log = pairs(keys)?.log()?.negative()?;
    if let Some(q) = queries {
        log = log.add(pairs(q)?.log()?)?;
    }
    let log = log.multiply(num(0.25))?;
    let gain = log.subtract(log.mean_axis(-1, true)?)?.exp()?;
    join(vec![gain.clone(), gain])
}

/// Centred, equalised, in channel order.
pub(super) fn enter(frame: &Frame<Array>, x: &Array) -> Result<Array> {
    let mut x = x.clone();
    if let Some(centre) = &frame.centre {
        x = x.subtract(centre.expand_dims(2)?)?;
    }
    if let Some(gain) = &frame.gain {
        x = x.multiply(gain.expand_dims(2)?)?;
    }
    reorder(frame, x)
}

pub(super) fn enter_query(frame: &Frame<Array>, q: &Array) -> Result<Array> {
    let q = match &frame.gain {
        Some(gain) => q.divide(gain.expand_dims(2)?)?,
        None => q.clone(),
    };
    reorder(frame, q)
}

pub(super) fn reorder(frame: &Frame<Array>, x: Array) -> Result<Array> {
    match &frame.order {
        Some(order) => Ok(x.take_along_axis(ops::broadcast_to(order.expand_dims(2)?, x.shape())?, -1)?),
        None => Ok(x),
    }
}

/// Out of the rotated domain; `weights` is the sum of the rows' weights, one where it is `None`.
pub(super) fn leave(
    codec: &Codec,
    frame: &Frame<Array>,
    tables: &DeviceTables,
    rows: &Array,
    weights: Option<&Array>,
) -> Result<Array> {
    let mut x = rows.clone();
    if codec.channel().is_none() {
        let bands = codec.bands().iter().zip(&tables.bands);
        let back = bands.map(|(b, t)| t.rotation.inverse(&slice(rows, 3, b.start, b.start + b.dim)?));
        x = join(back.collect::<Result<_>>()?)?;
    }
    if let Some(order) = &frame.order {
        let places = ops::argsort_axis(order, -1)?;
        x = x.take_along_axis(ops::broadcast_to(places.expand_dims(2)?, x.shape())?, -1)?;
    }
    if let Some(gain) = &frame.gain {
        x = x.divide(gain.expand_dims(2)?)?;
    }
    if let Some(centre) = &frame.centre {
        let centre = centre.expand_dims(2)?;
        x = match weights {
            Some(w) => x.add(centre.multiply(w)?)?,
            None => x.add(centre)?,
        };
    }
    Ok(x)
}
