//! Scores and weighted sums on packed rows, cut into runs of tokens of one head.

use super::rows::{FrameTables, scale_codes};
use super::workers;
use super::{RUN, dense};
use crate::codec::codes::Codes;
use crate::codec::{Codec, Prepared};
use crate::engine::{Engine, check_queries};
use crate::error::Result;
use crate::tensor::{Dtype, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::ops::Range;

/// Tokens of one head.
struct Tokens<'a> {
    codec: &'a Codec,
    words: &'a [u32],
    scales: &'a [u16],
    rows: Range<usize>,
}

impl Tokens<'_> {
    #[inline(always)]
    fn row(&self, row: usize) -> (&[u32], &[u16]) {
        let (w, s) = (self.codec.row_words(), self.codec.row_scales());
        (&self.words[row * w..][..w], &self.scales[row * s..][..s])
    }
}

/// Scores of a run, [token, query].
struct Score<'a> {
    tokens: Tokens<'a>,
    queries: &'a [Prepared],
}

impl WithSimd for Score<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Vec<f32> {
        let Score { tokens, queries } = self;
        let mut scratch = tokens.codec.scratch();
        let mut out = vec![0f32; tokens.rows.len() * queries.len()];
        for (row, out) in tokens.rows.clone().zip(out.chunks_exact_mut(queries.len())) {
            let (words, scales) = tokens.row(row);
            tokens.codec.look_up_row(words, &mut scratch);
            for (q, out) in queries.iter().zip(out) {
                *out = tokens.codec.score_levels(q, words, scales, &scratch);
            }
        }
        out
    }
}

/// Sums of a run with the weights of some queries (`stride` tokens each), [query, D] in the rotated domain.
struct Sum<'a> {
    tokens: Tokens<'a>,
    weights: &'a [f32],
    stride: usize,
    /// Of the first row in its head.
    start: usize,
}

impl WithSimd for Sum<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Vec<f32> {
        let Sum { tokens, weights, stride, start } = self;
        let d = tokens.codec.spec().head_dim;
        let mut scratch = tokens.codec.scratch();
        let mut sums = vec![0f32; weights.len() / stride * d];
        for (i, row) in tokens.rows.clone().enumerate() {
            let (words, scales) = tokens.row(row);
            tokens.codec.look_up_row(words, &mut scratch);
            for (sum, weights) in sums.chunks_exact_mut(d).zip(weights.chunks_exact(stride)) {
                let weight = weights[start + i];
                // A weight of exact zero hides what is in the row, NaN included (masked and padded tokens).
                if weight != 0.0 {
                    tokens.codec.add_levels(words, scales, weight, sum, &scratch);
                }
            }
        }
        sums
    }
}

pub(super) fn scores(codes: &Codes<Tensor>, queries: &Tensor) -> Result<Tensor> {
    let codec = codes.codec();
    let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
    let (hq, l) = check_queries(codes, "queries", queries.shape(), d)?;
    if codec.channel().is_some() {
        // Scores of a channel-affine tile mix its channels: its tokens are unpacked first.
        return dense::dense_scores(&super::Cpu.decode(codes, Dtype::F32)?, queries);
    }
    let tables = FrameTables::new(codes.frame(), d)?;
    let q = queries.to_f32()?;
    let per_head = hq / h * l;
    let mut scratch = codec.scratch();
    let prepared: Vec<Prepared> = q
        .chunks_exact(d)
        .enumerate()
        .map(|(i, q)| codec.prepare_row(tables.row(i / per_head), q, &mut scratch))
        .collect();
    let words = codes.words().standard::<u32>()?;
    let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
    let (runs, arch) = (t.div_ceil(RUN), Arch::new());
    // Token-major pieces [head, run][token, query], put in place at the end.
    let pieces: Vec<Vec<f32>> = pieces(b * h * runs, |piece| {
        let (head, start) = (piece / runs, piece % runs * RUN);
        let rows = head * t + start..head * t + (start + RUN).min(t);
        let tokens = Tokens { codec, words, scales: &scales, rows };
        arch.dispatch(Score { tokens, queries: &prepared[head * per_head..][..per_head] })
    })?;
    let mut out = vec![0f32; b * hq * l * t];
    for (piece, scores) in pieces.iter().enumerate() {
        let (head, start) = (piece / runs, piece % runs * RUN);
        for (i, row) in scores.chunks_exact(per_head).enumerate() {
            for (j, &score) in row.iter().enumerate() {
                out[(head * per_head + j) * t + start + i] = score;
            }
        }
    }
    Tensor::new(&[b, hq, l, t], out)
}

pub(super) fn weighted_sum(codes: &Codes<Tensor>, weights: &Tensor) -> Result<Tensor> {
    let codec = codes.codec();
    let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
    let (hq, l) = check_queries(codes, "weights", weights.shape(), t)?;
    if codec.channel().is_some() {
        return dense::dense_sum(&super::Cpu.decode(codes, Dtype::F32)?, weights);
    }
    let tables = FrameTables::new(codes.frame(), d)?;
    let weights = weights.to_f32()?;
    let per_head = hq / h * l;
    let words = codes.words().standard::<u32>()?;
    let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
    let (runs, arch) = (t.div_ceil(RUN), Arch::new());
    let pieces: Vec<Vec<f32>> = pieces(b * h * runs, |piece| {
        let (head, start) = (piece / runs, piece % runs * RUN);
        let rows = head * t + start..head * t + (start + RUN).min(t);
        let weights = &weights[head * per_head * t..][..per_head * t];
        let tokens = Tokens { codec, words, scales: &scales, rows };
        arch.dispatch(Sum { tokens, weights, stride: t, start })
    })?;
    let mut out = vec![0f32; b * hq * l * d];
    let mut scratch = codec.scratch();
    for (row, out) in out.chunks_exact_mut(d).enumerate() {
        let (head, j) = (row / per_head, row % per_head);
        let mut sum = vec![0f32; d];
        // In order, so that the result does not depend on the threads.
        for piece in &pieces[head * runs..(head + 1) * runs] {
            sum.iter_mut().zip(&piece[j * d..][..d]).for_each(|(a, b)| *a += b);
        }
        let total = weights[row * t..][..t].iter().sum();
        codec.finish_sum(tables.row(head), &mut sum, total, out, &mut scratch);
    }
    Tensor::new(&[b, hq, l, d], out)
}

/// Every piece by some thread, in order.
fn pieces(count: usize, piece: impl Fn(usize) -> Vec<f32> + Send + Sync) -> Result<Vec<Vec<f32>>> {
    workers::run(|| (0..count).into_par_iter().map(piece).collect())
}
