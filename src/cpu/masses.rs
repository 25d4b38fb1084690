//! How much attention each part of a cache receives: scores of every part, an f64 softmax, sums a part.

use super::{Cpu, dense_scores};
use crate::attention::{Rules, Segment, Stored, additive, check, positions, sees, shares};
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::Tensor;

/// Share of attention a segment receives, mean over sequences, query heads and query tokens.
pub(super) fn masses(
    segments: &[Segment<Tensor>],
    queries: &Tensor,
    rules: &Rules<Tensor>,
) -> Result<Vec<f32>> {
    let sizes = check(segments, queries.shape(), rules)?;
    let (l, tokens, heads) = (sizes.queries, sizes.tokens, sizes.heads * sizes.group);
    let positions = positions(segments);
    let last = positions.last().copied().unwrap_or(0);
    let mask = match &rules.mask {
        Some(m) => Some((additive(m)?, m.shape()[0], m.shape()[1])),
        None => None,
    };
    let sinks = rules.sink_logits.as_ref().map(Tensor::to_f32).transpose()?;
    let mut parts = vec![];
    for s in segments {
        let scores = match &s.keys {
            Stored::Packed(codes) => Cpu.scores(codes, queries)?,
            Stored::Exact { rows, len } => dense_scores(&rows.slice(2, 0, *len)?, queries)?,
        };
        parts.push(scores.to_f32()?);
    }
    let mut sums = vec![0f64; segments.len()];
    let mut row = Vec::with_capacity(tokens);
    for r in 0..sizes.batch * heads * l {
        let (b, h, query) = (r / (heads * l), r / l % heads, r % l);
        row.clear();
        for (s, scores) in segments.iter().zip(&parts) {
            let n = s.keys.len();
            row.extend_from_slice(&scores[r * n..(r + 1) * n]);
        }
        let position = (last + query + 1).checked_sub(l);
        let mask = mask.as_ref().map(|(mask, mb, mh)| {
            &mask[((b.min(mb - 1) * mh + h.min(mh - 1)) * l + query) * tokens..][..tokens]
        });
        for (j, x) in row.iter_mut().enumerate() {
            let seen = position.is_some_and(|p| sees(rules, b, p, positions[j]));
            let added = mask.map_or(0.0, |m| m[j]);
            let score = *x * rules.scale;
            let score = rules.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
            *x = if seen && added != f32::NEG_INFINITY { score + added } else { f32::NEG_INFINITY };
        }
        let sink = sinks.as_ref().map_or(f32::NEG_INFINITY, |s| s[h]);
        let top = row.iter().copied().fold(sink, f32::max);
        if top == f32::NEG_INFINITY {
            continue;
        }
        let weights = row.iter().map(|x| f64::from((x - top).exp()));
        let total = f64::from((sink - top).exp()) + weights.clone().sum::<f64>();
        let mut weights = weights;
        for (sum, s) in sums.iter_mut().zip(segments) {
            *sum += weights.by_ref().take(s.keys.len()).sum::<f64>() / total;
        }
    }
    Ok(shares(&sums))
}
