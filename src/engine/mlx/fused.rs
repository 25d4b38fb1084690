//! Stages of the graph by fused kernels, where [`crate::engine::mlx::kernels::find`] gives one; `None` leaves them to the
//! plain graph.
//!
//! Every segment is a first pass over shares of its tokens. Shares of a packed segment are joined and leave the rotated domain as one
//! sum; then they, all shares of exact rows and the learned sinks are joined by their greatest scores.

use super::frame::{enter_query, leave};
use super::stages::{dot, float, join, masked, num};
use super::tables::{DeviceTables, line};
use super::{Mlx, around};
use crate::codec::Codec;
use crate::codec::codes::Codes;
use crate::engine::attention::{Rules, Segment, Sizes, Stored};
use crate::engine::mlx::arrays::slice;
use crate::engine::mlx::kernels::plan::{self, ElementType, Pass};
use crate::engine::mlx::kernels::{Form, Stage, find};
use crate::error::Result;
use mlx_rs::ops;
use mlx_rs::{Array, Dtype};
/// Words and scales of vectors [B, H, T, D] that are in their frame.
pub(super) fn encode(mlx: &Mlx, codec: &Codec, x: &Array) -> Result<Option<(Array, Array)>> {
    let Some(form) = find(Stage::Encode, codec, mlx.kernels.gpu()) else { return Ok(None) };
    let tables = mlx.tables(codec)?;
    let Some((arrays, order)) = tables.kernels.as_ref().and_then(|k| k.encode.as_ref()) else {
        return Ok(None);
    };
    let shape = [0, 1, 2].map(|i| x.shape()[i] as usize);
    if shape.contains(&0) {
        return Ok(None);
    }
    let spec = codec.spec();
    let (launch, place) = plan::encode(form, (*order).max(1), *order > 0, spec.scale, codec.format(), shape);
    let place = Array::from_slice(&place, &[2]);
    let [signs, factor, levels, borders] = arrays;
    let mut inputs = vec![x, signs, factor, levels];
    if launch.source.inputs.contains(&"borders") {
        inputs.push(borders);
    }
    inputs.push(&place);
    let mut out = mlx.kernels.run(&launch, &inputs)?.into_iter();
    Ok(out.next().zip(out.next()))
}

/// Rows in the rotated domain, f32 [B, H, T, D].
pub(super) fn rows(mlx: &Mlx, codes: &Codes<Array>, tables: &DeviceTables) -> Result<Option<Array>> {
    let Some(form) = find(Stage::Decode, codes.codec(), mlx.kernels.gpu()) else { return Ok(None) };
    let (Some(tables), shape) = (&tables.kernels, codes.shape()) else { return Ok(None) };
    if shape.contains(&0) {
        return Ok(None);
    }
    let launch = plan::dequantize(form, shape, ElementType::F32);
    let tokens = Array::from_int(shape[2] as i32);
    let out = mlx.kernels.run(&launch, &[codes.words(), codes.scales(), &tables.decode, &tokens])?;
    Ok(out.into_iter().next())
}

/// One side of a segment as a kernel reads it: form, words, scales, levels.
fn side(mlx: &Mlx, stored: &Stored<Array>) -> Result<Option<(Form, [Array; 3])>> {
    Ok(match stored {
        Stored::Exact { rows, .. } => {
            if !matches!(rows.dtype(), Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16) {
                return Ok(None);
            }
            let nothing = Array::from_slice(&[half::f16::ZERO], &[1, 1, 1, 1]);
            Some((Form::exact(rows.shape()[3] as usize), [rows.clone(), nothing, line(&[0.0])]))
        }
        Stored::Packed(codes) => {
            let Some(form) = find(Stage::Attend, codes.codec(), mlx.kernels.gpu()) else {
                return Ok(None);
            };
            let tables = mlx.tables(codes.codec())?;
            let Some(tables) = &tables.kernels else { return Ok(None) };
            Some((form, [codes.words().clone(), codes.scales().clone(), tables.decode.clone()]))
        }
    })
}

/// Attention over all segments by kernels, if every one of them has one.
pub(super) fn attend(
    mlx: &Mlx,
    segments: &[Segment<Array>],
    queries: &Array,
    rules: &Rules<Array>,
    sizes: Sizes,
) -> Result<Option<Array>> {
    // Exact rows alone would pass every question below.
    if mlx.kernels.gpu().is_none() {
        return Ok(None);
    }
    let held: Vec<_> = segments.iter().filter(|s| !s.keys.is_empty()).collect();
    let Some(last) = held.last().map(|s| s.start + s.keys.len() - 1) else { return Ok(None) };
    let mut sides = vec![];
    for s in &held {
        let (Some(keys), Some(values)) = (side(mlx, &s.keys)?, side(mlx, &s.values)?) else {
            return Ok(None);
        };
        let pass = Pass {
            batch: sizes.batch,
            heads: sizes.heads,
            group: sizes.group,
            queries: sizes.queries,
            tokens: s.keys.len(),
            // The last query stands at the last token.
            position: last as i64 + 1 - sizes.queries as i64 - s.start as i64,
            window: rules.sliding_window.unwrap_or(0),
            causal: rules.causal,
            masked: rules.mask.is_some(),
        };
        // A window of nothing hides everything, which the texts have no word for.
        if rules.sliding_window == Some(0) {
            return Ok(None);
        }
        let Some(plan) = plan::attend(keys.0, values.0, &pass) else { return Ok(None) };
        sides.push((*s, keys.1, values.1, plan));
    }
    let out = match queries.dtype() {
        Dtype::Float16 => ElementType::F16,
        Dtype::Bfloat16 => ElementType::BF16,
        _ => ElementType::F32,
    };
    let q = float(queries, "queries")?.multiply(num(rules.scale))?;
    let mask = rules.mask.as_ref().map(additive).transpose()?;
    let (mut shares, mut seen) = (vec![], 0);
    for (s, keys, values, (launch, place)) in &sides {
        let (q, bias) = match around::enter(mlx, &s.keys, queries, rules.scale, sizes)? {
            Some(entered) => entered,
            None => enter(mlx, &s.keys, &q, sizes)?,
        };
        let end = seen + s.keys.len();
        let mask = match &mask {
            Some(mask) => {
                let whole =
                    [sizes.batch, sizes.heads * sizes.group, sizes.queries, end - seen].map(|n| n as i32);
                ops::broadcast_to(slice(mask, 3, seen, end)?, &whole)?
            }
            None => Array::from_slice(&[0f32], &[1, 1, 1, 1]),
        };
        seen = end;
        let first = first_tokens(s, rules, sizes.batch);
        let tokens = Array::from_int(s.keys.len() as i32);
        // Rows of weight zero are not read; skipping light ones is for callers that ask for it, and none does yet.
        let limits = line(&[rules.soft_cap.unwrap_or(0.0), 0.0]);
        let place = Array::from_slice(place, &[place.len() as i32]);
        let inputs = [
            &q, &keys[0], &keys[1], &keys[2], &values[0], &values[1], &values[2], &bias, &mask, &first,
            &tokens, &limits, &place,
        ];
        shares.push(mlx.kernels.run(launch, &inputs)?);
    }
    let values: Vec<&Stored<Array>> = held.iter().map(|s| &s.values).collect();
    let sinks = rules.sink_logits.as_ref();
    if let Some(whole) = around::finish(mlx, &values, &shares, sinks, out, sizes)? {
        return Ok(Some(whole));
    }
    let parts = one_list(mlx, values, shares, sizes)?;
    Ok(Some(merge(mlx, &parts, out, sinks, true)?.0))
}

/// The first token of a segment that is no padding, for each sequence.
fn first_tokens(segment: &Segment<Array>, rules: &Rules<Array>, batch: usize) -> Array {
    let first = |b: usize| {
        let padding = rules.left_padding.get(b).copied().unwrap_or(0);
        padding.saturating_sub(segment.start).min(segment.keys.len()) as i32
    };
    Array::from_slice(&(0..batch).map(first).collect::<Vec<i32>>(), &[batch as i32])
}

/// The shares of all segments in the domain of the model, for one merge.
fn one_list(
    mlx: &Mlx,
    values: Vec<&Stored<Array>>,
    shares: Vec<Vec<Array>>,
    sizes: Sizes,
) -> Result<[Array; 2]> {
    let (mut sums, mut states, segments) = (vec![], vec![], values.len());
    for (values, mut parts) in values.into_iter().zip(shares) {
        // A few shares of exact rows are joined with everything else at the end; those of packed rows leave their domain together.
        let count = parts[0].shape()[3] as usize;
        if matches!(values, Stored::Packed(_)) || count * segments > plan::MOST_PARTS {
            let (sum, state) = merge(mlx, &parts, ElementType::F32, None, false)?;
            let sum = leave_segment(mlx, values, &sum, &state, sizes)?;
            parts = vec![sum.expand_dims(3)?, state.expand_dims(3)?];
        }
        let state = parts.remove(1);
        sums.push(parts.remove(0));
        states.push(state);
    }
    Ok([ops::concatenate(&sums, 3)?, ops::concatenate(&states, 3)?])
}

/// Queries in the domain of the keys, and what their frame adds to every score.
fn enter(mlx: &Mlx, keys: &Stored<Array>, q: &Array, sizes: Sizes) -> Result<(Array, Array)> {
    let [b, h, g, l, d] =
        [sizes.batch, sizes.heads, sizes.group, sizes.queries, sizes.key_dim].map(|n| n as i32);
    let none = || ops::broadcast_to(num(0.0), &[b, h * g, l, 1]);
    let Stored::Packed(codes) = keys else { return Ok((q.clone(), none()?)) };
    let folded = q.reshape(&[b, h, g * l, d])?;
    let bias = match &codes.frame().centre {
        Some(centre) => dot(&folded, &centre.expand_dims(2)?)?.reshape(&[b, h * g, l, 1])?,
        None => none()?,
    };
    let entered = enter_query(codes.frame(), &folded)?;
    let tables = mlx.tables(codes.codec())?;
    let bands = codes.codec().bands().iter().zip(&tables.bands);
    let turned = bands.map(|(b, t)| t.rotation.forward(&slice(&entered, 3, b.start, b.start + b.dim)?));
    let rotated = join(turned.collect::<Result<_>>()?)?;
    Ok((rotated.reshape(&[b, h * g, l, d])?, bias))
}

/// Sums of values [B, Hq, L, D] out of the rotated domain.
fn leave_segment(
    mlx: &Mlx,
    values: &Stored<Array>,
    sum: &Array,
    state: &Array,
    sizes: Sizes,
) -> Result<Array> {
    let Stored::Packed(codes) = values else { return Ok(sum.clone()) };
    let [b, h, gl] = [sizes.batch, sizes.heads, sizes.group * sizes.queries].map(|n| n as i32);
    let fold = |a: &Array, last: i32| a.reshape(&[b, h, gl, last]);
    let weights = fold(&slice(state, 3, 1, 2)?, 1)?;
    let tables = mlx.tables(codes.codec())?;
    let rows = fold(sum, sizes.value_dim as i32)?;
    let out = leave(codes.codec(), codes.frame(), &tables, &rows, Some(&weights))?;
    Ok(out.reshape(sum.shape())?)
}

/// Joins parts [B, Hq, L, N, D] and their states [B, Hq, L, N, 2].
fn merge(
    mlx: &Mlx,
    parts: &[Array],
    out: ElementType,
    sinks: Option<&Array>,
    divide: bool,
) -> Result<(Array, Array)> {
    let shape = parts[0].shape().to_vec();
    let size = |i: usize| shape[i] as usize;
    let (launch, counts) =
        plan::merge([size(0), size(1), size(2)], size(3), size(4), out, sinks.is_some(), divide);
    let sinks = match sinks {
        Some(sinks) => sinks.as_dtype(Dtype::Float32)?.contiguous()?,
        None => line(&[0.0]),
    };
    let counts = Array::from_slice(&counts, &[5]);
    let (sums, states) = (parts[0].contiguous()?, parts[1].contiguous()?);
    let mut out = mlx.kernels.run(&launch, &[&sums, &states, &sinks, &counts])?;
    let state = out.remove(1);
    Ok((out.remove(0), state))
}

/// A boolean or additive mask as f32, minus infinity where a token is hidden.
fn additive(mask: &Array) -> Result<Array> {
    let shown = num(0.0);
    masked(ops::broadcast_to(&shown, mask.shape())?, mask)
}
