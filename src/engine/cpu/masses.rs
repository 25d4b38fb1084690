//! How much attention each part of a cache receives: scores of every part, an f64 softmax, one sum per part.

use super::attend::Hidden;
use super::simd::greater;
use super::{Cpu, dense_scores};
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, Stored, check, shares};
use crate::error::Result;
use crate::tensor::Tensor;

/// Share of attention a segment receives, mean over sequences, query heads and query tokens.
pub(super) fn masses(
    segments: &[Segment<Tensor>],
    queries: &Tensor,
    rules: &Rules<Tensor>,
) -> Result<Vec<f32>> {
    let sizes = check(segments, queries.shape(), rules)?;
    let hidden = Hidden::new(segments, rules, sizes)?;
    let (l, heads) = (sizes.queries, sizes.heads * sizes.group);
    let score = |s: &Segment<Tensor>| match &s.keys {
        Stored::Packed(codes) => Cpu.scores(codes, queries)?.to_f32(),
        Stored::Exact { rows, len } => dense_scores(&rows.slice(2, 0, *len)?, queries)?.to_f32(),
    };
    let mut parts = segments.iter().map(score).collect::<Result<Vec<_>>>()?;
    let mut sums = vec![0f64; segments.len()];
    for r in 0..sizes.batch * heads * l {
        let row = hidden.row(r / (heads * l), r / l % heads, r % l);
        let (mut top, mut first) = (row.sink, 0);
        for (s, scores) in segments.iter().zip(&mut parts) {
            let n = s.keys.len();
            top = greater(top, row.logits(first, s.start, &mut scores[r * n..][..n]));
            first += n;
        }
        if top == f32::NEG_INFINITY {
            continue;
        }
        let weight = |x: f32| f64::from((x - top).exp());
        let of = |s: &Segment<Tensor>, scores: &[f32]| -> f64 {
            let n = s.keys.len();
            scores[r * n..][..n].iter().map(|&x| weight(x)).sum()
        };
        let received: Vec<f64> = segments.iter().zip(&parts).map(|(s, scores)| of(s, scores)).collect();
        let total = weight(row.sink) + received.iter().sum::<f64>();
        sums.iter_mut().zip(received).for_each(|(sum, part)| *sum += part / total);
    }
    Ok(shares(&sums))
}
