//! Attention on the CPU engine, any codec: scores of every part, one f32 softmax over all, weighted sums of every part.

use super::{Cpu, dense_scores, dense_sum};
use crate::attention::{Rules, Segment, Sizes, Stored, additive, check, positions, sees};
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::{Dtype, Tensor};

/// Bytes of f32 scores held at a time; longer prefills go in chunks of queries.
const SCORE_BYTES: usize = 64 << 20;

/// Attention of queries [B, Hq, L, D] over all segments: [B, Hq, L, Dv] in the dtype of the queries.
pub(super) fn attend(
    segments: &[Segment<Tensor>],
    queries: &Tensor,
    rules: &Rules<Tensor>,
) -> Result<Tensor> {
    let sizes = check(segments, queries.shape(), rules)?;
    let dtype = queries.float().ok_or_else(|| queries.wrong_dtype("queries", "F32, F16 or BF16"))?;
    let heads = sizes.heads * sizes.group;
    let row_bytes = 4 * sizes.batch * heads * sizes.tokens.max(1);
    let step = (SCORE_BYTES / row_bytes).clamp(1, sizes.queries.max(1));
    let hidden = Hidden::new(segments, rules, sizes)?;
    let mut parts = vec![];
    let mut start = 0;
    while start < sizes.queries {
        let end = (start + step).min(sizes.queries);
        parts.push(attend_chunk(segments, &queries.slice(2, start, end)?, &hidden, start)?);
        start = end;
    }
    let shape = [sizes.batch, heads, sizes.queries, sizes.value_dim];
    let out = if parts.is_empty() { vec![] } else { Tensor::concat(2, &parts)?.to_f32()? };
    Tensor::from_f32(dtype, &shape, out)
}

/// Everything that decides which tokens a query sees.
struct Hidden<'a> {
    rules: &'a Rules<Tensor>,
    sizes: Sizes,
    positions: Vec<usize>,
    mask: Option<(Vec<f32>, [usize; 2])>,
    sink_logits: Option<Vec<f32>>,
}

impl Hidden<'_> {
    fn new<'a>(segments: &[Segment<Tensor>], rules: &'a Rules<Tensor>, sizes: Sizes) -> Result<Hidden<'a>> {
        let mask = match &rules.mask {
            Some(mask) => Some((additive(mask)?, [mask.shape()[0], mask.shape()[1]])),
            None => None,
        };
        let sink_logits = rules.sink_logits.as_ref().map(Tensor::to_f32).transpose()?;
        Ok(Hidden { rules, sizes, positions: positions(segments), mask, sink_logits })
    }

    /// Turns the scores of one query into weights. A query that sees nothing has weights of zero.
    fn softmax(&self, batch: usize, head: usize, query: usize, row: &mut [f32]) {
        let last = self.positions.last().copied().unwrap_or(0);
        // The last query stands at the last token; one further back may stand before the first.
        let position = (last + query + 1).checked_sub(self.sizes.queries);
        let mask = self.mask.as_ref().map(|(mask, [mb, mh])| {
            let (b, h) = (batch.min(mb - 1), head.min(mh - 1));
            &mask[((b * mh + h) * self.sizes.queries + query) * self.sizes.tokens..][..self.sizes.tokens]
        });
        let sink = self.sink_logits.as_ref().map_or(f32::NEG_INFINITY, |s| s[head]);
        let mut top = sink;
        for (j, x) in row.iter_mut().enumerate() {
            let seen = position.is_some_and(|p| sees(self.rules, batch, p, self.positions[j]));
            let score = *x * self.rules.scale;
            let score = self.rules.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
            *x = if seen { score + mask.map_or(0.0, |m| m[j]) } else { f32::NEG_INFINITY };
            // Garbage behind a mask may be NaN; a hidden token stays hidden.
            if mask.is_some_and(|m| m[j] == f32::NEG_INFINITY) {
                *x = f32::NEG_INFINITY;
            }
            top = if x.is_nan() { f32::NAN } else { top.max(*x) };
        }
        if top == f32::NEG_INFINITY {
            return row.fill(0.0);
        }
        let mut sum = (sink - top).exp();
        for x in row.iter_mut() {
            *x = (*x - top).exp();
            sum += *x;
        }
        let inverse = 1.0 / sum;
        row.iter_mut().for_each(|x| *x *= inverse);
    }
}

fn attend_chunk(
    segments: &[Segment<Tensor>],
    queries: &Tensor,
    hidden: &Hidden,
    first: usize,
) -> Result<Tensor> {
    let Sizes { batch, heads, group, tokens, value_dim, .. } = hidden.sizes;
    let (l, query_heads) = (queries.shape()[2], heads * group);
    let mut parts = vec![];
    for s in segments {
        parts.push(match &s.keys {
            Stored::Packed(codes) => Cpu.scores(codes, queries)?,
            Stored::Exact { rows, len } => dense_scores(&rows.slice(2, 0, *len)?, queries)?,
        });
    }
    let mut weights = Tensor::concat(3, &parts)?.to_f32()?;
    for (i, row) in weights.chunks_exact_mut(tokens.max(1)).enumerate() {
        let (row_head, query) = (i / l, i % l);
        hidden.softmax(row_head / query_heads, row_head % query_heads, first + query, row);
    }
    let weights = Tensor::new(&[batch, query_heads, l, tokens], weights)?;
    let mut out = vec![0f32; batch * query_heads * l * value_dim];
    let mut start = 0;
    for s in segments {
        let end = start + s.values.len();
        let part = weights.slice(3, start, end)?;
        let sum = match &s.values {
            Stored::Packed(codes) => Cpu.weighted_sum(codes, &part)?,
            Stored::Exact { rows, len } => dense_sum(&rows.slice(2, 0, *len)?, &part)?,
        };
        out.iter_mut().zip(sum.to_f32()?).for_each(|(o, s)| *o += s);
        start = end;
    }
    Tensor::from_f32(Dtype::F32, &[batch, query_heads, l, value_dim], out)
}
