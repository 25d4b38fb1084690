//! Attention as one MLX graph: scores of every part, one f32 softmax over all, weighted sums of every part.

use super::products::hiding;
use super::stages::{cast, float, join, masked, num};
use super::{Mlx, fused};
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, Sizes, Stored, check, positions, shares, span};
use crate::engine::mlx::arrays::{self, slice};
use crate::error::{Error, Result};
use mlx_rs::Array;
use mlx_rs::ops::{self, matmul, select};

/// Bytes of f32 scores that are formed at a time; queries that need more go in runs.
const BUDGET: usize = 128 << 20;

/// Attention of queries [B, Hq, L, D] over all segments: [B, Hq, L, Dv] in the dtype of the queries.
pub(super) fn attend(
    mlx: &Mlx,
    segments: &[Segment<Array>],
    queries: &Array,
    rules: &Rules<Array>,
) -> Result<Array> {
    let sizes = check(segments, &arrays::shape(queries), rules)?;
    if let Some(out) = fused::attend(mlx, segments, queries, rules, sizes)? {
        return Ok(out);
    }
    let Sizes { batch, heads, group, queries: l, tokens, .. } = sizes;
    let run = (BUDGET / (4 * batch * heads * group * tokens).max(1)).max(1);
    if run >= l {
        return attend_run(mlx, segments, queries, rules, 0);
    }
    let mut outs = vec![];
    for first in (0..l).step_by(run) {
        let end = (first + run).min(l);
        let mask = rules.mask.as_ref().map(|mask| slice(mask, 2, first, end)).transpose()?;
        let rules = Rules { mask, ..rules.clone() };
        outs.push(attend_run(mlx, segments, &slice(queries, 2, first, end)?, &rules, l - end)?);
    }
    Ok(ops::concatenate(&outs, 2)?)
}

/// The same for queries behind which `behind` more stand.
fn attend_run(
    mlx: &Mlx,
    segments: &[Segment<Array>],
    queries: &Array,
    rules: &Rules<Array>,
    behind: usize,
) -> Result<Array> {
    let (weights, sizes) = weights(mlx, segments, queries, rules, behind)?;
    let [b, h, g, l] = [sizes.batch, sizes.heads, sizes.group, sizes.queries].map(|n| n as i32);
    let mut out: Option<Array> = None;
    let mut start = 0;
    for s in segments {
        let end = start + s.values.len();
        let part = slice(&weights, 3, start, end)?;
        start = end;
        let sum = match &s.values {
            Stored::Packed(codes) => mlx.weighted_sum(codes, &part)?,
            Stored::Exact { rows, len } => {
                let values = float(&slice(rows, 2, 0, *len)?, "values")?;
                let part = part.reshape(&[b, h, g * l, *len as i32])?;
                hiding(&part, &values)?.reshape(&[b, h * g, l, sizes.value_dim as i32])?
            }
        };
        out = Some(match out {
            Some(out) => out.add(sum)?,
            None => sum,
        });
    }
    let out = out.ok_or(Error::Shape { what: "segments", expected: "at least one".into(), got: vec![] })?;
    cast(&out, queries.dtype())
}

/// Share of attention that each segment receives; evaluates one sum per segment.
pub(super) fn masses(
    mlx: &Mlx,
    segments: &[Segment<Array>],
    queries: &Array,
    rules: &Rules<Array>,
) -> Result<Vec<f32>> {
    let (weights, _) = weights(mlx, segments, queries, rules, 0)?;
    let by_token = weights.sum_axes(&[0, 1, 2], false)?;
    let mut sums = vec![];
    let mut start = 0;
    for s in segments {
        let end = start + s.keys.len();
        sums.push(slice(&by_token, 0, start, end)?.sum(true)?.reshape(&[1])?);
        start = end;
    }
    let sums = mlx.get(&join(sums)?)?.to_f32()?;
    Ok(shares(&sums.into_iter().map(f64::from).collect::<Vec<_>>()))
}

/// Softmax weights f32 [B, Hq, L, T] over all segments, of queries behind which `behind` more stand.
fn weights(
    mlx: &Mlx,
    segments: &[Segment<Array>],
    queries: &Array,
    rules: &Rules<Array>,
    behind: usize,
) -> Result<(Array, Sizes)> {
    let sizes = check(segments, &arrays::shape(queries), rules)?;
    let q = float(queries, "queries")?;
    let [b, h, g, l] = [sizes.batch, sizes.heads, sizes.group, sizes.queries].map(|n| n as i32);
    let folded = q.reshape(&[b, h, g * l, sizes.key_dim as i32])?;
    let mut parts = vec![];
    for s in segments {
        parts.push(match &s.keys {
            Stored::Packed(codes) => mlx.scores(codes, &q)?,
            Stored::Exact { rows, len } => {
                let keys = float(&slice(rows, 2, 0, *len)?, "keys")?;
                matmul(&folded, keys.transpose_axes(&[0, 1, 3, 2])?)?.reshape(&[b, h * g, l, *len as i32])?
            }
        });
    }
    let mut scores = join(parts)?.multiply(num(rules.scale))?;
    if let Some(cap) = rules.soft_cap {
        scores = ops::tanh(scores.divide(num(cap))?)?.multiply(num(cap))?;
    }
    let hidden = num(f32::NEG_INFINITY);
    if let Some(seen) = seen(segments, rules, sizes, behind) {
        scores = select(seen, scores, &hidden)?;
    }
    if let Some(mask) = &rules.mask {
        scores = masked(scores, mask)?;
    }
    Ok((softmax(&scores, rules.sink_logits.as_ref())?, sizes))
}

/// f32 softmax over the last axis with an extra logit a head; a row that sees nothing gets weights of zero.
fn softmax(scores: &Array, sink_logits: Option<&Array>) -> Result<Array> {
    let mut top = scores.max_axis(-1, true)?;
    if let Some(logits) = sink_logits {
        let logits = logits.reshape(&[1, logits.shape()[0], 1, 1])?;
        top = ops::maximum(top, &logits)?;
    }
    let blind = top.eq(num(f32::NEG_INFINITY))?;
    let safe = select(&blind, num(0.0), &top)?;
    let weights = scores.subtract(&safe)?.exp()?;
    let mut sum = weights.sum_axis(-1, true)?;
    if let Some(logits) = sink_logits {
        let logits = logits.reshape(&[1, logits.shape()[0], 1, 1])?;
        sum = sum.add(logits.subtract(&safe)?.exp()?)?;
    }
    Ok(weights.divide(select(blind, num(1.0), sum)?)?)
}

/// Tokens that the rules let each query see, [B or 1, 1, L, T]; `None` if they hide nothing.
fn seen(segments: &[Segment<Array>], rules: &Rules<Array>, sizes: Sizes, behind: usize) -> Option<Array> {
    let ends = segments.iter().filter(|s| !s.keys.is_empty()).map(|s| (s.start, s.start + s.keys.len() - 1));
    let (first, last) = ends.reduce(|a, b| (a.0, b.1))?;
    let rows = if rules.left_padding.is_empty() { 1 } else { sizes.batch };
    // The last query of all stands at the last token. More queries than tokens pass the check only where no rule asks for positions.
    let query = |i: usize| (last + 1).saturating_sub(sizes.queries + behind) + i;
    let spans = (0..rows).flat_map(|b| (0..sizes.queries).map(move |i| (b, i)));
    let spans: Vec<_> = spans.map(|(b, i)| span(rules, b, query(i))).collect();
    // What one token asks in a decode step: positions rise, so a span with both ends holds all of them.
    if spans.iter().all(|s| s.contains(&first) && s.contains(&last)) {
        return None;
    }
    let tokens = positions(segments);
    let bits: Vec<bool> = spans.iter().flat_map(|s| tokens.iter().map(|token| s.contains(token))).collect();
    let shape = [rows, 1, sizes.queries, sizes.tokens].map(|n| n as i32);
    Some(Array::from_slice(&bits, &shape))
}
