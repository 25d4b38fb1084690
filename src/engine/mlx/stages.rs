//! The pieces of a stage as MLX graphs: rotation, packing, look-up, scales. Shapes are [..., n] with the band last.

use super::tables::{DeviceTables, RotationTables, native_group};
use crate::codec::Codec;
use crate::engine::mlx::arrays::{bitwise_and, left_shift, right_shift, slice};
use crate::error::{Error, Result};
use crate::math::bits;
use crate::math::scale::{
    COARSE_STEPS, FINE, FINE_CODES, FINE_STEPS, LEAST_HALF, LOG_LOW, LOG_NAN, WIDE_BASE,
};
use crate::spec::{ScaleFormat, ScaleRule};
use crate::tensor::Dtype;
use mlx_rs::ops::{self, matmul, select};
use mlx_rs::{Array, Dtype as MlxDtype};

/// A scalar.
pub fn num(x: f32) -> Array {
    Array::from_f32(x)
}

/// The same axes but the last.
pub fn with_last(a: &Array, last: &[i32]) -> Vec<i32> {
    let shape = a.shape();
    [&shape[..shape.len() - 1], last].concat()
}

/// Inner product of the last axes, kept as an axis of one.
pub fn dot(a: &Array, b: &Array) -> Result<Array> {
    Ok(a.multiply(b)?.sum_axis(-1, true)?)
}

impl RotationTables {
    /// y = R x.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let n = x.shape()[x.ndim() - 1];
        Ok(match self {
            RotationTables::Identity => x.clone(),
            RotationTables::Dense(r) => matmul(x, r.t())?,
            RotationTables::Hadamard(signs, factor) => {
                let x = x.multiply(signs)?;
                match factor {
                    None => x.hadamard_transform(1.0 / (n as f32).sqrt())?,
                    // Only powers of two go to the transform, whose sizes the CPU backend does not check.
                    Some(f) => {
                        let m = f.shape()[0];
                        let x = x.reshape(&with_last(&x, &[m, n / m]))?.hadamard_transform(1.0)?;
                        matmul(f, &x)?
                            .reshape(&with_last_two(&x, n))?
                            .multiply(num(1.0 / (n as f32).sqrt()))?
                    }
                }
            }
        })
    }

    /// x = R^T y.
    pub fn inverse(&self, y: &Array) -> Result<Array> {
        let n = y.shape()[y.ndim() - 1];
        Ok(match self {
            RotationTables::Identity => y.clone(),
            RotationTables::Dense(r) => matmul(y, r)?,
            RotationTables::Hadamard(signs, factor) => {
                let norm = 1.0 / (n as f32).sqrt();
                match factor {
                    None => y.hadamard_transform(norm)?.multiply(signs)?,
                    Some(f) => {
                        let m = f.shape()[0];
                        let x = matmul(f.t(), y.reshape(&with_last(y, &[m, n / m]))?)?
                            .hadamard_transform(norm)?;
                        x.reshape(&with_last_two(&x, n))?.multiply(signs)?
                    }
                }
            }
        })
    }
}

fn with_last_two(a: &Array, last: i32) -> Vec<i32> {
    let shape = a.shape();
    [&shape[..shape.len() - 2], &[last]].concat()
}

/// Adds zeros at the end of the last axis up to a length.
pub fn pad_last(a: &Array, len: i32) -> Result<Array> {
    let missing = len - a.shape()[a.ndim() - 1];
    if missing == 0 {
        return Ok(a.clone());
    }
    let zeros = ops::zeros_dtype(&with_last(a, &[missing]), a.dtype())?;
    Ok(ops::concatenate(&[a.clone(), zeros], -1)?)
}

/// Places of eight codes in a u64.
fn places(bits: u8) -> Array {
    Array::from_slice(&(0..8).map(|i| i * u64::from(bits)).collect::<Vec<_>>(), &[8])
}

/// Codes [..., n] to words [..., W]: eight codes fill `bits` bytes, see [`crate::math::bits`].
pub fn pack(codes: &Array, bits: u8) -> Result<Array> {
    let n = codes.shape()[codes.ndim() - 1];
    let eights = (n + 7) / 8;
    let codes = pad_last(&codes.as_dtype(MlxDtype::Uint64)?, 8 * eights)?;
    let folded =
        left_shift(&codes.reshape(&with_last(&codes, &[eights, 8]))?, &places(bits))?.sum_axis(-1, true)?;
    let bytes = slice(&folded.view::<u8>()?, folded.ndim() - 1, 0, bits.into())?;
    let bytes = bytes.reshape(&with_last(&codes, &[eights * i32::from(bits)]))?;
    let words = bits::words(n as usize, bits) as i32;
    // The tail of the last eight codes is zeros, so bytes past the last word hold nothing.
    let bytes = if eights * i32::from(bits) > 4 * words {
        slice(&bytes, bytes.ndim() - 1, 0, 4 * words as usize)?
    } else {
        pad_last(&bytes, 4 * words)?
    };
    Ok(bytes.contiguous()?.view::<u32>()?)
}

/// Words [..., W] to f32 codes [..., n]: the inverse of [`pack`].
pub fn unpack(words: &Array, n: usize, bits: u8) -> Result<Array> {
    if let Some(group) = native_group(n, bits) {
        let ones = ops::ones::<f32>(&with_last(words, &[n as i32 / group]))?;
        let zeros = ops::zeros_like(&ones)?;
        return Ok(ops::dequantize(words, ones, &zeros, group, i32::from(bits))?);
    }
    let eights = n.div_ceil(8) as i32;
    let bytes = words.contiguous()?.view::<u8>()?;
    let used = (eights * i32::from(bits)).min(bytes.shape()[bytes.ndim() - 1]);
    let bytes = pad_last(&slice(&bytes, bytes.ndim() - 1, 0, used as usize)?, eights * i32::from(bits))?;
    let bytes = pad_last(&bytes.reshape(&with_last(&bytes, &[eights, bits.into()]))?, 8)?;
    let folded = bytes.contiguous()?.view::<u64>()?;
    let mask = Array::from_slice(&[(1u64 << bits) - 1], &[1]);
    let codes = bitwise_and(&right_shift(&folded, &places(bits))?, &mask)?;
    let codes = codes.reshape(&with_last(words, &[8 * eights]))?.as_dtype(MlxDtype::Float32)?;
    if n % 8 == 0 { Ok(codes) } else { slice(&codes, codes.ndim() - 1, 0, n) }
}

/// Stored form of scales: [`ScaleFormat::code`].
pub fn store_scale(scale: &Array, format: ScaleFormat) -> Result<Array> {
    let nan = ops::is_nan(scale)?;
    let scale = ops::maximum(scale, num(0.0))?;
    if format == ScaleFormat::F16 {
        let half = ops::minimum(&scale, num(65504.0))?.as_dtype(MlxDtype::Float16)?;
        // Everything but normal half floats and zero: the top of the f32, see `scale`.
        let bits = scale.view::<u32>()?;
        let odd = bitwise_and(&right_shift(&bits, &word(15))?, &word(1))?;
        let rounded = ops::maximum(bits.add(word(0x3fff))?.add(odd)?, word(WIDE_BASE))?;
        let top = ops::minimum(right_shift(&rounded.subtract(word(WIDE_BASE))?, &word(15))?, word(0x7bff))?;
        let top = select(top.eq(word(0))?, word(0), top.add(word(0x8000))?)?;
        let wide = top.as_dtype(MlxDtype::Uint16)?.view::<half::f16>()?;
        let normal = scale.ge(num(LEAST_HALF))?.logical_and(scale.le(num(65504.0))?)?;
        let stored = select(normal, half, wide)?;
        return Ok(select(&nan, num(f32::NAN).as_dtype(MlxDtype::Float16)?, stored)?);
    }
    let log = scale.log2()?;
    let line = |low: f32, steps: f32, first: f32| -> Result<Array> {
        Ok(log.subtract(num(low))?.multiply(num(steps))?.add(num(first))?)
    };
    let position = if format == ScaleFormat::Wide8 {
        let fine = line(FINE[0], FINE_STEPS, FINE_CODES[0])?;
        let below = line(FINE[0], COARSE_STEPS, FINE_CODES[0])?;
        let above = line(FINE[1], COARSE_STEPS, FINE_CODES[1])?;
        select(log.lt(num(FINE[0]))?, below, select(log.gt(num(FINE[1]))?, above, fine)?)?
    } else {
        line(LOG_LOW, FINE_STEPS, 1.0)?
    };
    let code = ops::minimum(position.add(num(0.5))?.floor()?, num(254.0))?;
    let code = select(position.lt(num(0.5))?, num(0.0), code)?;
    Ok(select(&nan, num(LOG_NAN.into()), code)?.as_dtype(MlxDtype::Uint8)?)
}

fn word(x: u32) -> Array {
    Array::from_slice(&[x], &[1])
}

impl DeviceTables {
    /// f32 scales from their stored form: [`ScaleFormat::value`].
    pub fn load_scale(&self, stored: &Array) -> Result<Array> {
        if let Some(values) = &self.scale_values {
            return Ok(values.take(stored.as_dtype(MlxDtype::Uint32)?)?);
        }
        let half = stored.as_dtype(MlxDtype::Float32)?;
        let top = bitwise_and(&stored.view::<u16>()?.as_dtype(MlxDtype::Uint32)?, &word(0x7fff))?;
        let wide = left_shift(&top, &word(15))?.add(word(WIDE_BASE))?.view::<f32>()?;
        Ok(select(half.lt(num(0.0))?, wide, half)?)
    }
}

/// The scale of [`ScaleRule::scale`]; zero where |y| is, NaN in rows that are not `whole`.
pub fn scale_of(rule: ScaleRule, [yy, cy, cc]: [&Array; 3], dim: usize, whole: &Array) -> Result<Array> {
    let zero = num(0.0);
    let plain = yy.divide(num(dim as f32))?.sqrt()?;
    let scale = match rule {
        ScaleRule::Plain => plain,
        ScaleRule::Matched => select(cc.gt(&zero)?, yy.divide(cc)?.sqrt()?, plain)?,
        ScaleRule::Unbiased => select(cy.gt(&zero)?, yy.divide(cy)?, plain)?,
        ScaleRule::LeastSquares => select(cy.gt(&zero)?, cy.divide(cc)?, plain)?,
    };
    let scale = select(yy.gt(&zero)?, scale, &zero)?;
    Ok(select(whole, scale, num(f32::NAN))?)
}

/// Whether a squared norm is finite.
pub fn finite(yy: &Array) -> Result<Array> {
    Ok(yy.lt(num(f32::INFINITY))?)
}

pub(super) fn mlx_dtype(dtype: Dtype) -> MlxDtype {
    match dtype {
        Dtype::F32 => MlxDtype::Float32,
        Dtype::F16 => MlxDtype::Float16,
        Dtype::BF16 => MlxDtype::Bfloat16,
    }
}

/// Another float type, by the rule of [`Tensor::from_f32`]: finite values saturate, what is not finite stays as it is.
pub(super) fn cast(x: &Array, dtype: MlxDtype) -> Result<Array> {
    let top = match (x.dtype(), dtype) {
        (MlxDtype::Float32 | MlxDtype::Bfloat16, MlxDtype::Float16) => half::f16::MAX.to_f32(),
        (MlxDtype::Float32, MlxDtype::Bfloat16) => half::bf16::MAX.to_f32(),
        _ => return Ok(x.as_dtype(dtype)?),
    };
    let x = x.as_dtype(MlxDtype::Float32)?;
    let kept = ops::minimum(ops::maximum(&x, num(-top))?, num(top))?;
    let infinite = x.abs()?.eq(num(f32::INFINITY))?;
    Ok(ops::select(infinite, &x, kept)?.as_dtype(dtype)?)
}

/// Joins along the last axis.
pub(super) fn join(mut parts: Vec<Array>) -> Result<Array> {
    if parts.len() == 1 { Ok(parts.remove(0)) } else { Ok(ops::concatenate(&parts, -1)?) }
}

pub(super) fn float(x: &Array, what: &'static str) -> Result<Array> {
    match x.dtype() {
        MlxDtype::Float32 => Ok(x.clone()),
        MlxDtype::Float16 | MlxDtype::Bfloat16 => Ok(x.as_dtype(MlxDtype::Float32)?),
        other => Err(Error::Dtype { what, expected: "F32, F16 or BF16", got: format!("{other:?}") }),
    }
}

pub(super) fn unsupported(codec: &Codec) -> Error {
    Error::Unsupported { field: "codec", value: codec.spec().to_string(), reason: "it has no bands".into() }
}

/// Scores behind a boolean or additive mask; what is hidden stays hidden even where the score is NaN.
pub(super) fn masked(scores: Array, mask: &Array) -> Result<Array> {
    let hidden = num(f32::NEG_INFINITY);
    let lowest = match mask.dtype() {
        MlxDtype::Bool => return Ok(select(mask, scores, hidden)?),
        MlxDtype::Uint8 => return Ok(select(mask.as_dtype(MlxDtype::Bool)?, scores, hidden)?),
        MlxDtype::Float32 => f32::MIN,
        MlxDtype::Float16 => half::f16::MIN.to_f32(),
        MlxDtype::Bfloat16 => half::bf16::MIN.to_f32(),
        other => {
            let got = format!("{other:?}");
            return Err(Error::Dtype { what: "mask", expected: "bool, u8 or float", got });
        }
    };
    let mask = mask.as_dtype(MlxDtype::Float32)?;
    Ok(select(mask.le(num(lowest))?, hidden, scores.add(&mask)?)?)
}
