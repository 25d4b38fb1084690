//! The rules of an attention call on host slices, and the plain composition that the fused driver is tested against: scores of
//! every part, one f32 softmax over all, weighted sums of every part.

use crate::engine::attention::{Rules, Segment, Sizes, additive, span};
use crate::error::Result;
use crate::tensor::Tensor;
use std::ops::Range;

/// Everything that decides which tokens a query sees.
pub(super) struct Hidden<'a> {
    rules: &'a Rules<Tensor>,
    sizes: Sizes,
    /// Position of the last token.
    last: usize,
    mask: Option<(Vec<f32>, [usize; 2])>,
    sink_logits: Option<Vec<f32>>,
}

/// What [`Hidden`] says of one query.
pub(super) struct QueryMask<'a> {
    rules: &'a Rules<Tensor>,
    /// Positions that are seen, mask apart.
    pub span: Range<usize>,
    mask: Option<&'a [f32]>,
    /// The logit that has no value.
    pub sink: f32,
}

impl Hidden<'_> {
    pub(super) fn new<'a>(
        segments: &[Segment<Tensor>],
        rules: &'a Rules<Tensor>,
        sizes: Sizes,
    ) -> Result<Hidden<'a>> {
        let mask = match &rules.mask {
            Some(mask) => Some((additive(mask)?, [mask.shape()[0], mask.shape()[1]])),
            None => None,
        };
        let sink_logits = rules.sink_logits.as_ref().map(Tensor::to_f32).transpose()?;
        let mut ends = segments.iter().filter(|s| !s.keys.is_empty()).map(|s| s.start + s.keys.len() - 1);
        Ok(Hidden { rules, sizes, last: ends.next_back().unwrap_or(0), mask, sink_logits })
    }

    pub(super) fn row(&self, batch: usize, head: usize, query: usize) -> QueryMask<'_> {
        // The last query stands at the last token. More queries than tokens pass the check only where no rule asks for positions.
        let position = (self.last + 1).saturating_sub(self.sizes.queries) + query;
        let mask = self.mask.as_ref().map(|(mask, [mb, mh])| {
            let (b, h) = (batch.min(mb - 1), head.min(mh - 1));
            &mask[((b * mh + h) * self.sizes.queries + query) * self.sizes.tokens..][..self.sizes.tokens]
        });
        QueryMask {
            rules: self.rules,
            span: span(self.rules, batch, position),
            mask,
            sink: self.sink_logits.as_ref().map_or(f32::NEG_INFINITY, |s| s[head]),
        }
    }
}

impl QueryMask<'_> {
    /// Turns scores of the tokens from index `first` and position `position` on into logits, and gives the greatest; NaN if one is.
    pub(super) fn logits(&self, first: usize, position: usize, scores: &mut [f32]) -> f32 {
        let within = |p: usize| p.saturating_sub(position).min(scores.len());
        let (from, to) = (within(self.span.start), within(self.span.end));
        scores[..from].fill(f32::NEG_INFINITY);
        scores[to.max(from)..].fill(f32::NEG_INFINITY);
        if to <= from {
            return f32::NEG_INFINITY;
        }
        let seen = &mut scores[from..to];
        let scale = self.rules.scale;
        match self.rules.soft_cap {
            Some(cap) => seen.iter_mut().for_each(|x| *x = cap * (*x * scale / cap).tanh()),
            None => seen.iter_mut().for_each(|x| *x *= scale),
        }
        if let Some(mask) = self.mask {
            for (x, &m) in seen.iter_mut().zip(&mask[first + from..]) {
                // Garbage behind a mask may be NaN; a hidden token stays hidden.
                *x = if m == f32::NEG_INFINITY { m } else { *x + m };
            }
        }
        super::simd::greatest(seen)
    }

    /// Turns products of levels into logits and gives the greatest: token `i` has the scale `factors[i]`, all have `bias`. `at` is the
    /// index and the position of the first.
    #[inline(always)]
    pub(super) fn to_logits(&self, at: [usize; 2], factors: &[f32], bias: f32, x: &mut [f32]) -> f32 {
        let factors = &factors[..x.len()];
        match self.plain_scale(at[1], x.len()) {
            Some(scale) => super::simd::logits(x, factors, bias, scale),
            None => {
                x.iter_mut().zip(factors).for_each(|(x, f)| *x = *x * f + bias);
                self.logits(at[0], at[1], x)
            }
        }
    }

    /// The scale of scores, if the query sees all of `n` tokens from `position` on and its logits are scores times that.
    pub(super) fn plain_scale(&self, position: usize, n: usize) -> Option<f32> {
        let all = self.span.start <= position && position + n <= self.span.end;
        (all && self.mask.is_none() && self.rules.soft_cap.is_none()).then_some(self.rules.scale)
    }
}

#[cfg(test)]
pub(super) mod plain {
    use super::super::simd::greater;
    use super::*;
    use crate::codec::Codec;
    use crate::engine::Engine;
    use crate::engine::attention::{Stored, check};
    use crate::engine::cpu::{Cpu, dense_scores, dense_sum};
    use crate::math::rng::Rng;
    use crate::spec::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat};
    use crate::tensor::Dtype;
    use std::sync::Arc;

    /// The weights of one query. A query that sees nothing has weights of zero.
    fn softmax(row: &QueryMask, segments: &[Segment<Tensor>], weights: &mut [f32]) {
        let (mut top, mut first) = (row.sink, 0);
        for s in segments {
            let n = s.keys.len();
            top = greater(top, row.logits(first, s.start, &mut weights[first..first + n]));
            first += n;
        }
        if top == f32::NEG_INFINITY {
            return weights.fill(0.0);
        }
        weights.iter_mut().for_each(|x| *x = (*x - top).exp());
        let sum = weights.iter().sum::<f32>() + (row.sink - top).exp();
        weights.iter_mut().for_each(|x| *x /= sum);
    }

    /// Attention in the plainest form, f32 out.
    pub(in crate::engine::cpu) fn attend(
        segments: &[Segment<Tensor>],
        queries: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Tensor> {
        let sizes = check(segments, queries.shape(), rules)?;
        let Sizes { batch, heads, group, queries: l, tokens, value_dim, .. } = sizes;
        let (hidden, query_heads) = (Hidden::new(segments, rules, sizes)?, heads * group);
        let mut parts = vec![];
        for s in segments {
            parts.push(match &s.keys {
                Stored::Packed(codes) => Cpu.scores(codes, queries)?,
                Stored::Exact { rows, len } => dense_scores(&rows.slice(2, 0, *len)?, queries)?,
            });
        }
        let mut weights = Tensor::concat(3, &parts)?.to_f32()?;
        for (i, weights) in weights.chunks_exact_mut(tokens.max(1)).enumerate() {
            let (head, query) = (i / l, i % l);
            softmax(&hidden.row(head / query_heads, head % query_heads, query), segments, weights);
        }
        let weights = Tensor::new(&[batch, query_heads, l, tokens], weights)?;
        let (mut out, mut start) = (vec![0f32; batch * query_heads * l * value_dim], 0);
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

    fn gauss(shape: &[usize], stream: u64) -> Tensor {
        let mut rng = Rng::new(7, stream);
        Tensor::new(shape, (0..shape.iter().product()).map(|_| rng.normal() as f32).collect()).unwrap()
    }

    fn packed(spec: CodecSpec, centred: bool, x: &Tensor) -> Stored<Tensor> {
        let codec = Arc::new(Codec::new(spec).unwrap());
        let frame = Cpu.frame(&codec, centred, x, None).unwrap();
        Stored::Packed(Cpu.encode(&codec, frame, x).unwrap())
    }

    fn differ(segments: &[Segment<Tensor>], q: &Tensor, rules: &Rules<Tensor>, what: &str) {
        let want = attend(segments, q, rules).unwrap().to_f32().unwrap();
        let got = Cpu.attend(segments, q, rules).unwrap().to_f32().unwrap();
        let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 2e-5 && got.iter().all(|x| x.is_finite()), "{what}: {far}");
    }

    #[test]
    fn fused_is_the_plain_composition() {
        let base = CodecSpec::new(64, 4, Grid::Uniform);
        let residual = Residual::Qjl { projections: 64, rounds: 1 };
        let mut specs: Vec<CodecSpec> = (1..=8).map(|bits| CodecSpec { bits, ..base }).collect();
        specs.extend((1..=6).map(|bits| CodecSpec {
            bits,
            grid: Grid::Beta,
            format: ScaleFormat::Log8,
            ..base
        }));
        specs.push(CodecSpec { bits: 2, grid: Grid::Trellis { states: 8 }, ..base });
        specs.push(CodecSpec { bits: 2, outliers: 32, grid: Grid::Lloyd, ..base });
        specs.push(CodecSpec { bits: 3, residual, grid: Grid::Lloyd, ..base });
        specs.push(CodecSpec { grid: Grid::Affine { group: 32 }, ..base });
        let rotation = RotationKind::Identity;
        specs.push(CodecSpec { grid: Grid::ChannelAffine { group: 64 }, rotation, ..base });
        for spec in specs {
            for (rep, l) in [(1, 1), (4, 3), (3, 70)] {
                let x = [1, 2].map(|i| gauss(&[2, 2, 1152, 64], i));
                let half = |x: &Tensor, n| {
                    Tensor::from_f32(Dtype::F16, &[2, 2, n, 64], x.slice(2, 0, n).unwrap().to_f32().unwrap())
                        .unwrap()
                };
                let exact = |i: usize, n: usize, len| Stored::Exact { rows: half(&x[i], n), len };
                let segments = [
                    Segment { start: 0, keys: exact(0, 4, 4), values: exact(1, 4, 4) },
                    Segment { start: 9, keys: packed(spec, true, &x[0]), values: packed(spec, true, &x[1]) },
                    Segment { start: 1161, keys: exact(0, 64, 37), values: exact(1, 64, 37) },
                ];
                let rules = Rules { exact: true, ..Rules::causal(0.125) };
                let q = gauss(&[2, 2 * rep, l, 64], 5);
                differ(&segments, &q, &rules, &format!("{spec}, {rep} x {l} queries"));
            }
        }
    }

    #[test]
    fn odd_widths_garbage_and_every_rule() {
        let (t, l) = (50, 4);
        let mut bad = gauss(&[1, 1, t, 20], 1).to_f32().unwrap();
        // What only some queries see may be NaN for the others; token 9 is hidden from all.
        bad[9 * 20..10 * 20].fill(f32::NAN);
        let rows = Tensor::new(&[1, 1, t, 20], bad).unwrap();
        let values = gauss(&[1, 1, t, 12], 2);
        let segment = |v: &Tensor| {
            let (keys, values) =
                (Stored::Exact { rows: rows.clone(), len: t }, Stored::Exact { rows: v.clone(), len: t });
            [Segment { start: 3, keys, values }]
        };
        let mask = |hide: fn(usize, usize) -> bool| {
            let bits = (0..l * t).map(|i| u8::from(!hide(i / t, i % t))).collect();
            Some(Tensor::new(&[1, 1, l, t], bits).unwrap())
        };
        let rules = Rules {
            sliding_window: Some(46),
            left_padding: vec![5],
            mask: mask(|i, j| j == 9 || i == 2 || (i == 1 && j == 30)),
            sink_logits: Some(Tensor::new(&[3], vec![0.5f32, -1.0, 2.0]).unwrap()),
            soft_cap: Some(3.0),
            ..Rules::causal(0.3)
        };
        let q = gauss(&[1, 3, l, 20], 3);
        differ(&segment(&values), &q, &rules, "rules");
        // A NaN value that query 1 does not see leaves it finite and makes the others NaN.
        let mut v = values.to_f32().unwrap();
        v[30 * 12] = f32::NAN;
        let v = Tensor::new(&[1, 1, t, 12], v).unwrap();
        let out = Cpu.attend(&segment(&v), &q, &rules).unwrap().to_f32().unwrap();
        for (i, row) in out.chunks_exact(12).enumerate() {
            assert_eq!(row[0].is_nan(), matches!(i % l, 0 | 3), "row {i}");
            assert!(row[1..].iter().all(|x| x.is_finite()));
        }
    }
}
