//! What stands around the kernel of attention, in one launch each: queries into the domain of the keys, and all shares joined and out
//! of the domain of the values. `None` where a codec or a cache has another form, and the graph's own operations do the work.

use super::Mlx;
use super::tables::line;
use crate::codec::codes::{Codes, Frame};
use crate::engine::attention::{Sizes, Stored};
use crate::engine::mlx::kernels::Form;
use crate::engine::mlx::kernels::plan::{self, Around, ElementType, Turn};
use crate::error::Result;
use mlx_rs::{Array, Dtype};

fn turn(frame: &Frame<Array>, rotation: Option<[usize; 2]>) -> Turn {
    Turn {
        centre: frame.centre.is_some(),
        gain: frame.gain.is_some(),
        order: frame.order.is_some(),
        rotation,
    }
}

/// Centre, gain and order, with something of three axes in the place of what is not there.
fn frame_inputs(frame: &Frame<Array>) -> [Array; 3] {
    let none = || Array::from_slice(&[0f32], &[1, 1, 1]);
    let order = || Array::from_slice(&[0u32], &[1, 1, 1]);
    [
        frame.centre.clone().unwrap_or_else(none),
        frame.gain.clone().unwrap_or_else(none),
        frame.order.clone().unwrap_or_else(order),
    ]
}

fn around(sizes: Sizes) -> Around {
    Around { rows: [sizes.batch, sizes.heads * sizes.group, sizes.queries], group: sizes.group }
}

/// Scaled queries in the domain of packed keys, and what their frame adds to every score.
pub(super) fn enter(
    mlx: &Mlx,
    keys: &Stored<Array>,
    queries: &Array,
    scale: f32,
    sizes: Sizes,
) -> Result<Option<(Array, Array)>> {
    let Stored::Packed(codes) = keys else { return Ok(None) };
    let known = matches!(queries.dtype(), Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16);
    let tables = mlx.tables(codes.codec())?;
    let (Some(form), Some(([signs, factor, _], rotation))) =
        (Form::of(codes.codec()), tables.kernels.as_ref().and_then(|k| k.turn.as_ref()))
    else {
        return Ok(None);
    };
    if !known {
        return Ok(None);
    }
    let (launch, place) = plan::enter(form, turn(codes.frame(), *rotation), around(sizes));
    let [centre, gain, order] = frame_inputs(codes.frame());
    let (scale, place) = (line(&[scale]), Array::from_slice(&place, &[place.len() as i32]));
    let inputs = [queries, &centre, &gain, &order, signs, factor, &scale, &place];
    let mut out = mlx.kernels.run(&launch, &inputs)?.into_iter();
    Ok(out.next().zip(out.next()))
}

/// All shares joined, for a cache of at most three segments of which at most one is packed. `shares` are the sums
/// [B, Hq, L, N, D] and states [B, Hq, L, N, 2] of the segments.
pub(super) fn finish(
    mlx: &Mlx,
    values: &[&Stored<Array>],
    shares: &[Vec<Array>],
    sinks: Option<&Array>,
    out: ElementType,
    sizes: Sizes,
) -> Result<Option<Array>> {
    let is_packed = |v: &&Stored<Array>| matches!(v, Stored::Packed(_));
    if values.len() > 3 || values.iter().filter(|v| is_packed(v)).count() > 1 {
        return Ok(None);
    }
    // The packed segment, or the first one, comes first.
    let first = values.iter().position(is_packed).unwrap_or(0);
    let others: Vec<&Vec<Array>> = (0..shares.len()).filter(|&i| i != first).map(|i| &shares[i]).collect();
    let count = |parts: &Vec<Array>| parts[0].shape()[3] as usize;
    let counts = [count(&shares[first]), 0, 0];
    let counts =
        std::array::from_fn(|i| if i == 0 { counts[0] } else { others.get(i - 1).map_or(0, |p| count(p)) });
    let bare = Frame { centre: None, gain: None, order: None };
    let one = line(&[1.0]);
    let (form, frame, signs, factor, rotation) = match values[first] {
        Stored::Packed(codes) => match packed(mlx, codes)? {
            Some((form, [signs, _, factor], rotation)) => (form, codes.frame(), signs, factor, rotation),
            None => return Ok(None),
        },
        Stored::Exact { .. } => (Form::exact(sizes.value_dim), &bare, one.clone(), one.clone(), None),
    };
    let planned = plan::finish(form, turn(frame, rotation), around(sizes), counts, (out, sinks.is_some()));
    let Some((launch, place)) = planned else { return Ok(None) };
    let [centre, gain, order] = frame_inputs(frame);
    let sinks = match sinks {
        Some(sinks) => sinks.as_dtype(Dtype::Float32)?.contiguous()?,
        None => one.clone(),
    };
    let place = Array::from_slice(&place, &[place.len() as i32]);
    let part = |i: usize, j: usize| others.get(i).map_or(&one, |parts| &parts[j]);
    let inputs = [
        &shares[first][0],
        &shares[first][1],
        part(0, 0),
        part(0, 1),
        part(1, 0),
        part(1, 1),
        &sinks,
        &centre,
        &gain,
        &order,
        &signs,
        &factor,
        &place,
    ];
    Ok(mlx.kernels.run(&launch, &inputs)?.into_iter().next())
}

/// Form, tables and orders of the rotation of packed values.
type Packed = (Form, [Array; 3], Option<[usize; 2]>);

fn packed(mlx: &Mlx, codes: &Codes<Array>) -> Result<Option<Packed>> {
    let tables = mlx.tables(codes.codec())?;
    let turn = tables.kernels.as_ref().and_then(|k| k.turn.clone());
    Ok(Form::of(codes.codec()).zip(turn).map(|(form, (arrays, rotation))| (form, arrays, rotation)))
}
