//! Rows that are not packed one by one: tiles of channels, heads in one piece, and matrix products with dense keys and values.

use super::rows::{FrameTables, scale_codes, scale_tensor};
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::codec::tile;
use crate::error::Result;
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use ndarray::{Array2, ArrayView2, Axis};
use std::sync::Arc;

/// [B, H, T, D] to [B, H, T/g * D, g]: the channels of every tile of g tokens.
pub(super) fn turn(x: &Tensor, group: usize) -> Result<Tensor> {
    let [b, h, t, d] = *x.shape() else { return Err(x.wrong_shape("vectors", "four axes")) };
    x.reshape(&[b, h, t / group, group, d])?.permute(&[0, 1, 2, 4, 3])?.reshape(&[b, h, t / group * d, group])
}

/// The inverse of [`turn`].
pub(super) fn turn_back(x: &Tensor, group: usize, d: usize) -> Result<Tensor> {
    let [b, h, rows, _] = *x.shape() else { return Err(x.wrong_shape("vectors", "four axes")) };
    let tiles = rows / d;
    x.reshape(&[b, h, tiles, d, group])?.permute(&[0, 1, 2, 4, 3])?.reshape(&[b, h, tiles * group, d])
}

/// Vectors [B, H, T, D] without their centres.
pub(super) fn uncentred(x: &Tensor, tables: &FrameTables, dim: usize) -> Result<Vec<f32>> {
    let (shape, mut rows) = (x.shape().to_vec(), x.to_f32()?);
    if tables.centred() {
        for (i, row) in rows.chunks_exact_mut(dim).enumerate() {
            let centre = tables.row(i / shape[2]).centre.unwrap_or_default();
            row.iter_mut().zip(centre).for_each(|(x, c)| *x -= c);
        }
    }
    Ok(rows)
}

/// The codes of a channel-affine codec as codes of its channels, and for each tile which of its tokens are not finite, if any.
pub(super) fn channel_codes(
    codes: &Codes<Tensor>,
    channel: &Arc<Codec>,
) -> Result<(Codes<Tensor>, Vec<Option<Vec<bool>>>)> {
    let ([b, h, t], spec) = (codes.shape(), codes.codec().spec());
    let (group, d) = (spec.tile(), spec.head_dim);
    let rows = t / group * d;
    let words = codes.words().reshape(&[b, h, rows, channel.row_words()])?;
    let mut scales = scale_codes(codes)?;
    let bad = scales.chunks_exact_mut(2 * d).map(|pairs| tile::take_marks(pairs, group)).collect();
    let scales = scale_tensor(channel.format(), &[b, h, rows, channel.row_scales()], scales)?;
    Ok((Codes::new(channel.clone(), Frame::default(), words, scales)?, bad))
}

/// The same elements with every head in one piece; shared where they are so already.
pub(super) fn pieces(t: &Tensor) -> Tensor {
    fn whole<T: Element>(t: &Tensor) -> bool {
        T::unwrap(t).is_some_and(|a| {
            a.is_empty()
                || a.view().index_axis_move(Axis(0), 0).index_axis_move(Axis(0), 0).to_slice().is_some()
        })
    }
    let in_pieces =
        whole::<f32>(t) || whole::<f16>(t) || whole::<bf16>(t) || whole::<u32>(t) || whole::<u8>(t);
    if in_pieces { t.clone() } else { t.compact() }
}

/// One head of what [`pieces`] gave.
pub(super) fn piece<T: Element>(t: &Tensor, [batch, head]: [usize; 2]) -> Option<&[T]> {
    T::unwrap(t)?.view().index_axis_move(Axis(0), batch).index_axis_move(Axis(0), head).to_slice()
}

/// Checks the rows of queries or weights [B, Hq, L, n] against dense keys or values [B, H, T, D], of which the axis `shared` has n too.
fn check_rows(x: &Tensor, rows: &Tensor, shared: usize) -> Result<()> {
    let ([b, h, ..], [rb, rh, _, n]) = (shape4(x)?, shape4(rows)?);
    let axis = x.shape()[shared];
    if b != rb || h == 0 || rh % h != 0 || n != axis {
        return Err(rows.wrong_shape("rows", format!("[{b}, a multiple of {h} > 0, L, {axis}]")));
    }
    Ok(())
}

/// One matrix product a KV head: [B, Hq, L, n] x ([B, H, n, m] or its transpose) through `product`.
fn per_head(
    x: &Tensor,
    rows: &Tensor,
    product: impl Fn(ArrayView2<f32>, ArrayView2<f32>) -> Array2<f32>,
) -> Result<Vec<f32>> {
    let ([b, h, t, d], [_, hq, l, n]) = (shape4(x)?, shape4(rows)?);
    let (x, rows) = (x.to_f32()?, rows.to_f32()?);
    let q = hq / h * l;
    let mut out = Vec::new();
    for head in 0..b * h {
        let x = ArrayView2::from_shape((t, d), &x[head * t * d..][..t * d]);
        let r = ArrayView2::from_shape((q, n), &rows[head * q * n..][..q * n]);
        if let (Ok(x), Ok(r)) = (x, r) {
            out.extend(product(r, x).iter());
        }
    }
    Ok(out)
}

fn shape4(x: &Tensor) -> Result<[usize; 4]> {
    x.shape().try_into().map_err(|_| x.wrong_shape("tensor", "four axes"))
}

/// Inner products of queries [B, Hq, L, D] with dense keys [B, H, T, D].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) unless both have these axes, [`Error::Dtype`](crate::Error::Dtype) unless both are floats.
pub fn dense_scores(keys: &Tensor, queries: &Tensor) -> Result<Tensor> {
    check_rows(keys, queries, 3)?;
    let shape = [queries.shape()[0], queries.shape()[1], queries.shape()[2], keys.shape()[2]];
    Tensor::new(&shape, per_head(keys, queries, |q, k| q.dot(&k.t()))?)
}

/// Sums of dense values [B, H, T, D] with weights [B, Hq, L, T].
///
/// # Errors
/// As [`dense_scores`].
pub fn dense_sum(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    check_rows(values, weights, 2)?;
    let shape = [weights.shape()[0], weights.shape()[1], weights.shape()[2], values.shape()[3]];
    Tensor::new(&shape, per_head(values, weights, |w, v| visible_sum(&w, &v))?)
}

/// `weights` [q, T] times `values` [T, D], in which a weight of zero hides a row that is not finite.
fn visible_sum(weights: &ArrayView2<f32>, values: &ArrayView2<f32>) -> Array2<f32> {
    let finite = |t: &usize| values.row(*t).iter().all(|x| x.is_finite());
    let bad: Vec<usize> = (0..values.nrows()).filter(|t| !finite(t)).collect();
    if bad.is_empty() {
        return weights.dot(values);
    }
    let mut rest = values.to_owned();
    bad.iter().for_each(|&t| rest.row_mut(t).fill(0.0));
    let mut sums = weights.dot(&rest);
    for (mut sum, weights) in sums.outer_iter_mut().zip(weights.outer_iter()) {
        bad.iter().filter(|t| weights[**t] != 0.0).for_each(|&t| sum.scaled_add(weights[t], &values.row(t)));
    }
    sums
}
