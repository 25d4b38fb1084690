//! What the numbers of a packed side must be, asked of every side before it is written and after it was read: a side that passes
//! unpacks to finite rows.

use crate::codes::{Codes, Frame};
use crate::compressor::CompressedSide;
use crate::tensor::{Dtype, Tensor};

/// What is wrong with the numbers of a side, if anything is.
pub(super) fn side(side: &CompressedSide<Tensor>) -> Result<(), String> {
    for (part, exact) in [("head", &side.head), ("tail", &side.tail)] {
        if let Some((index, value)) = exact.as_ref().and_then(Tensor::first_non_finite) {
            return Err(format!("element {index} of the exact tokens ({part}) is {value}"));
        }
    }
    let Some(body) = &side.body else { return Ok(()) };
    tables(body.frame())?;
    match bad_scale(body) {
        Some(index) => Err(format!("scale {index} is not finite")),
        None => Ok(()),
    }
}

/// Row-major index of the first scale that is NaN or infinite.
pub(super) fn bad_scale(codes: &Codes<Tensor>) -> Option<usize> {
    let format = codes.codec().format();
    let bad = |code: u16| !format.value(code).is_finite();
    match codes.scales() {
        Tensor::U8(a) => {
            let bad: [bool; 256] = std::array::from_fn(|code| bad(code as u16));
            a.iter().position(|&code| bad[usize::from(code)])
        }
        Tensor::F16(a) => a.iter().position(|x| bad(x.to_bits())),
        _ => None,
    }
}

/// Tables must be numbers to decode with, and a channel order a permutation: anything else would read outside a row.
pub(super) fn tables(frame: &Frame<Tensor>) -> Result<(), String> {
    for t in [&frame.centre, &frame.gain].into_iter().flatten() {
        if t.float() != Some(Dtype::F32) || t.first_non_finite().is_some() {
            return Err("centre and gain must be finite f32".into());
        }
    }
    // Decoding divides by the gains.
    if let Some(gain) = &frame.gain
        && !gain.to_f32().is_ok_and(|gain| gain.iter().all(|x| x.is_normal() && *x > 0.0))
    {
        return Err("every gain must be above zero".into());
    }
    let Some(order) = &frame.order else { return Ok(()) };
    let (d, places) =
        (order.shape().last().copied().unwrap_or(0), order.to_vec::<u32>().map_err(|e| e.to_string())?);
    let permutation = |row: &[u32]| {
        let mut seen = vec![false; d];
        row.iter().all(|&i| seen.get_mut(i as usize).is_some_and(|s| !std::mem::replace(s, true)))
    };
    if d == 0 || !places.chunks_exact(d).all(permutation) {
        return Err("the channel order is no permutation".into());
    }
    Ok(())
}
