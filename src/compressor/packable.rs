//! Whether codes unpack to numbers that are near the rows they were made from: rows too large for a codec are refused by name.
//!
//! A row whose squared norm is above 3.4e38 unpacks to NaN, and a scale above the greatest of its format is stored as the greatest.
//! The former is found among the rows. The latter may be right to a rounding, so such a row is unpacked and compared: if it has to be
//! multiplied by more than [`SHORT`] to come nearest to the original, it was cut short.

use crate::codec::codes::{Codes, Frame};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};
use half::f16;

/// More than rounding and any scale rule make of a row.
const SHORT: f64 = 1.1;

/// A sequence, KV head and token in words; a sequence is named if there are several.
pub(super) fn place([sequence, head, token]: [usize; 3], sequences: usize) -> String {
    let sequence = if sequences > 1 { format!("sequence {sequence}, ") } else { String::new() };
    format!("{sequence}head {head}, token {token}")
}

/// Refuses codes of rows [B, H, T, D], the first of which is token `first` of what `name` names.
pub(super) fn check<E: Engine>(
    engine: &E,
    codes: &Codes<E::Tensor>,
    rows: &Tensor,
    first: usize,
    name: &str,
) -> Result<()> {
    let get = |t: &Option<E::Tensor>| t.as_ref().map(|t| engine.get(t)).transpose();
    let frame = codes.frame();
    let frame: Frame<Tensor> =
        Frame { centre: get(&frame.centre)?, gain: get(&frame.gain)?, order: get(&frame.order)? };
    let [sequences, heads, tokens] = codes.shape();
    let refuse = |[b, h, t]: [usize; 3], value: f32, why: &str| {
        let place = place([b, h, first + t], sequences);
        let reason = format!("{name}, {place}: {why}");
        Err(Error::Unsupported { field: "value", value: value.to_string(), reason })
    };
    // Half floats are never so large.
    if rows.float() != Some(Dtype::F16) {
        let dim = rows.shape()[3].max(1);
        if let Some(row) = rows.to_f32()?.chunks_exact(dim).position(|row| !crate::codec::frame::finite(row))
        {
            let [b, h, t] = [row / (heads * tokens), row / tokens % heads, row % tokens];
            let (at, value) = greatest(rows, [b..b + 1, h..h + 1, t..t + 1])?;
            return refuse(
                at,
                value,
                "too large for any codec: the squared norm of the row is no finite number",
            );
        }
    }
    if frame.check_entries().is_err() {
        let (at, value) = greatest(rows, [0..sequences, 0..heads, 0..tokens])?;
        return refuse(at, value, "too large for the tables of a frame");
    }
    let scales = engine.get(codes.scales())?;
    let (codec, tile) = (codes.codec(), codes.codec().spec().tile());
    let each = codec.row_scales();
    for row in suspects(
        &scales,
        codec.affine_group().is_some(),
        |scale| codec.format().code(scale),
        each,
        |code| codec.format().value(code),
    ) {
        let (b, h, t) = (row / (heads * tokens), row / tokens % heads, row % tokens);
        let run = t / tile * tile..(t / tile + 1) * tile;
        let unpacked = engine.get(&engine.decode(&codes.slice(run.start, run.end)?, Dtype::F32)?)?;
        for t in run.clone() {
            let of = |x: &Tensor, t: usize| -> Result<Vec<f32>> {
                x.slice(0, b, b + 1)?.slice(1, h, h + 1)?.slice(2, t, t + 1)?.to_f32()
            };
            let centre = match &frame.centre {
                Some(centre) => centre.slice(0, b, b + 1)?.slice(1, h, h + 1)?.to_f32()?,
                None => vec![0.0; rows.shape()[3]],
            };
            if cut_short(&of(rows, t)?, &of(&unpacked, t - run.start)?, &centre) {
                // A row far greater than the others spoils a centre that it is in, and with it the others.
                let (at, value) = greatest(rows, [b..b + 1, h..h + 1, 0..tokens])?;
                return refuse(at, value, "rows of this size do not fit the codec");
            }
        }
    }
    Ok(())
}

/// Rows with a scale that is not finite or the greatest of its format.
fn suspects(
    scales: &Tensor,
    affine: bool,
    code: impl Fn(f32) -> u16,
    each: usize,
    value: impl Fn(u16) -> f32,
) -> Vec<usize> {
    let top = code(f32::MAX);
    let suspect = |code: u16| {
        if affine {
            // Plain half floats with a sign.
            return f16::from_bits(code).to_f32().abs() >= 65504.0 || f16::from_bits(code).is_nan();
        }
        code == top || !value(code).is_finite()
    };
    let mut rows: Vec<usize> = match scales {
        Tensor::U8(a) => {
            let table: [bool; 256] = std::array::from_fn(|code| suspect(code as u16));
            a.iter()
                .enumerate()
                .filter(|(_, code)| table[usize::from(**code)])
                .map(|(i, _)| i / each)
                .collect()
        }
        Tensor::F16(a) => {
            a.iter().enumerate().filter(|(_, x)| suspect(x.to_bits())).map(|(i, _)| i / each).collect()
        }
        _ => vec![],
    };
    rows.dedup();
    rows
}

/// Whether what was unpacked is not finite or much shorter than the row, both about the centre.
fn cut_short(row: &[f32], unpacked: &[f32], centre: &[f32]) -> bool {
    if !unpacked.iter().all(|x| x.is_finite()) {
        return true;
    }
    let (mut both, mut own) = (0f64, 0f64);
    for ((x, y), c) in row.iter().zip(unpacked).zip(centre) {
        let (x, y) = (f64::from(*x) - f64::from(*c), f64::from(*y) - f64::from(*c));
        (both, own) = (both + x * y, own + y * y);
    }
    both > SHORT * own
}

/// Place and value of the element of greatest size in some rows.
fn greatest(rows: &Tensor, [b, h, t]: [std::ops::Range<usize>; 3]) -> Result<([usize; 3], f32)> {
    let part = rows.slice(0, b.start, b.end)?.slice(1, h.start, h.end)?.slice(2, t.start, t.end)?;
    let &[_, heads, tokens, d] = part.shape() else { return Ok(([0; 3], 0.0)) };
    let values = part.to_f32()?;
    let (at, value) = values
        .iter()
        .enumerate()
        .fold((0, 0f32), |best, (i, &x)| if x.abs() > best.1.abs() { (i, x) } else { best });
    let place = [at / (heads * tokens * d), at / (tokens * d) % heads, at / d % tokens];
    Ok(([place[0] + b.start, place[1] + h.start, place[2] + t.start], value))
}
