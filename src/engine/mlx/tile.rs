//! Channel-affine tiles as MLX graphs: channels over tokens, with the tokens that are not finite left out, see [`crate::codec::tile`].

use super::Mlx;
use super::stages::{dot, finite, num, pad_last};
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::codec::tile::LEAST;
use crate::engine::Engine;
use crate::engine::mlx::arrays::{bitwise_and, slice};
use crate::error::Result;
use crate::tensor::Dtype;
use mlx_rs::ops::{self, select};
use mlx_rs::{Array, Dtype as MlxDtype};
use std::sync::Arc;

/// Words and scales of vectors [B, H, T, D] that are in their frame.
pub(super) fn encode(mlx: &Mlx, codec: &Codec, channel: &Arc<Codec>, x: &Array) -> Result<(Array, Array)> {
    let (group, s) = (codec.spec().tile() as i32, x.shape());
    let [b, h, t, d] = [s[0], s[1], s[2], s[3]];
    let tiles = t / group;
    let x = x.reshape(&[b, h, tiles, group, d])?;
    let good = finite(&dot(&x, &x)?)?;
    // Rows that are not finite become copies of one that is: they leave every range as it is.
    let first = ops::indexing::argmax_axis(good.as_dtype(MlxDtype::Int32)?, 3, true)?;
    let spare = x.take_along_axis(ops::broadcast_to(first, &[b, h, tiles, 1, d])?, 3)?;
    let any = good.as_dtype(MlxDtype::Int32)?.max_axis(3, true)?.gt(Array::from_int(0))?;
    let kept = select(any, select(&good, &x, spare)?, num(f32::NAN))?;
    let turned = kept.transpose_axes(&[0, 1, 2, 4, 3])?.reshape(&[b, h, tiles * d, group])?;
    let inner = mlx.encode(channel, Frame::default(), &turned)?;
    let pairs = inner.scales().reshape(&[b, h, tiles, d, 2])?;
    let scales = mark(&pairs, &good.logical_not()?.reshape(&[b, h, tiles, group])?)?;
    let shape = |last: usize| [b, h, t, last as i32];
    Ok((inner.words().reshape(&shape(codec.row_words()))?, scales.reshape(&shape(codec.row_scales()))?))
}

/// Vectors [B, H, T, D] in their frame, f32.
pub(super) fn decode(mlx: &Mlx, codes: &Codes<Array>, channel: &Arc<Codec>) -> Result<Array> {
    let (spec, [b, h, t]) = (codes.codec().spec(), codes.shape().map(|n| n as i32));
    let (group, d) = (spec.tile() as i32, spec.head_dim as i32);
    let (tiles, rows) = (t / group, t / group * d);
    let (pairs, bad) = take_marks(&codes.scales().reshape(&[b, h, tiles, d, 2])?, group)?;
    let words = codes.words().reshape(&[b, h, rows, channel.row_words() as i32])?;
    let scales = pairs.reshape(&[b, h, rows, channel.row_scales() as i32])?;
    let inner = Codes::new(channel.clone(), Frame::default(), words, scales)?;
    let turned = mlx.decode(&inner, Dtype::F32)?.reshape(&[b, h, tiles, d, group])?;
    let turned = turned.transpose_axes(&[0, 1, 2, 4, 3])?;
    let bad = bad.reshape(&[b, h, tiles, group, 1])?;
    Ok(select(bad, num(f32::NAN), turned)?.reshape(&[b, h, t, d])?)
}

/// Marks tokens [B, H, tiles, group] in pairs of scale and bias [B, H, tiles, D, 2].
fn mark(pairs: &Array, bad: &Array) -> Result<Array> {
    let (s, group) = (pairs.shape(), bad.shape()[3]);
    let d = s[3];
    let bad = bad.as_dtype(MlxDtype::Int32)?;
    let by_channel = if d < group {
        bad.reshape(&[s[0], s[1], s[2], group / d, d])?.max_axis(3, false)?
    } else {
        pad_last(&bad, d)?
    };
    let marked = by_channel.gt(Array::from_int(0))?.expand_dims(-1)?;
    let bits = pairs.view::<u16>()?.as_dtype(MlxDtype::Uint32)?;
    let (scale, bias) = (slice(&bits, 4, 0, 1)?, slice(&bits, 4, 1, 2)?);
    let size = |x: &Array| bitwise_and(x, &number(0x7fff));
    let minus = |x: &Array| -> Result<Array> { Ok(x.ge(number(0x8000))?) };
    let least = ops::maximum(size(&scale)?, number(LEAST.into()))?.add(number(0x8000))?;
    let zero = size(&bias)?.eq(number(0))?;
    let below = zero.logical_or(minus(&scale)?.logical_and(minus(&bias)?.logical_not()?)?)?;
    let marked_scale = select(&below, least, size(&scale)?)?;
    let marked_bias = select(&below, size(&bias)?.add(number(0x8000))?, size(&bias)?)?;
    let scale = select(&marked, marked_scale, scale)?;
    let bias = select(&marked, marked_bias, bias)?;
    let bits = ops::concatenate(&[scale, bias], 4)?.as_dtype(MlxDtype::Uint16)?;
    Ok(bits.view::<half::f16>()?)
}

fn number(n: u32) -> Array {
    Array::from_slice(&[n], &[1])
}

/// Pairs [B, H, tiles, D, 2] without their marks, and the tokens [B, H, tiles, group] that were marked.
fn take_marks(pairs: &Array, group: i32) -> Result<(Array, Array)> {
    let s = pairs.shape().to_vec();
    let d = s[3];
    let bits = pairs.view::<u16>()?.as_dtype(MlxDtype::Uint32)?;
    let sign = bitwise_and(&bits, &number(0x8000))?;
    let equal = slice(&sign, 4, 0, 1)?.eq(slice(&sign, 4, 1, 2)?)?;
    let (size, bias) = (bitwise_and(&bits, &number(0x7fff))?, slice(&bits, 4, 1, 2)?);
    let large = slice(&size, 4, 0, 1)?.ge(number(LEAST.into()))?;
    let either = slice(&sign, 4, 0, 1)?.eq(number(0))?.logical_or(large)?;
    let marked = equal.logical_and(bias.ne(number(0))?)?.logical_and(either)?;
    // Only the first channels are marks.
    let channels = Array::from_slice(&(0..d).collect::<Vec<i32>>(), &[d, 1]);
    let marked = marked.logical_and(channels.lt(Array::from_int(group))?)?;
    let (scale, bias) = (slice(pairs, 4, 0, 1)?, slice(pairs, 4, 1, 2)?);
    let bias = select(&marked, bias.negative()?, bias)?;
    let tokens = marked.reshape(&s[..4])?;
    let tokens = if d < group {
        ops::concatenate(&vec![tokens; (group / d) as usize], 3)?
    } else {
        slice(&tokens, 3, 0, group as usize)?
    };
    Ok((ops::concatenate(&[scale, bias], 4)?, tokens))
}
