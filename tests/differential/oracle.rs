//! The one slow oracle: tokens decoded by the row form of the codec, scores, softmax and sums in f64, and how far an engine may be off.
//!
//! The bound. Let k_t and v_t be the decoded rows, mu the centre, g the gains, r_t = |g (k_t - mu)|, w_t the weights of the softmax.
//! 1. A score is off by at most d_t. In f32, rotation and product of D channels: scale * 2^-23 (D/4 + 64) (|q/g| r_t + |q| |mu|). With a
//!    query in eight bits the noise has, by the rule in `cpu/domain.rs`, a relative variance of at most D_grid / 100 for a grid of
//!    relative error D_grid, so its standard deviation is scale * sqrt(D_grid / 100) |q/g| r_t / sqrt(D): seven of them are allowed.
//! 2. Weights that are off by factors of at most exp(d_t) are, after the division by their sum, off by at most
//!    w_t (exp(d_t + e) - 1) with e = ln sum w exp(d), and that moves channel c by w_t (exp(d_t + e) - 1) |v_tc - out_c|.
//! 3. Tokens below 1e-6 of the sum so far may be left out: 1e-6 T R for R = max |v_t - mu|.
//! 4. Sums in f32: 2^-23 (T/4 + D/4 + 64) (R + |mu|). Sums in integers: levels are off by 1/2040 of the greatest, weights by 1/65534 of
//!    the greatest of 64; a channel of the rotated-back error has a standard deviation below 1.3e-3 R / sqrt(D), and seven are allowed.
//! 5. The output is rounded to its dtype.

use crate::common::Tables;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Engine;
use turbomoq::Grid;
use turbomoq::internals::codec::Prepared;
use turbomoq::internals::engine::attention::additive;
use turbomoq::{Codes, Frame};
use turbomoq::{Dtype, Tensor};
use turbomoq::{Rules, Segment, Stored};

/// Keys or values of a segment, as the row form decodes them.
struct Side {
    dim: usize,
    /// [B * H, len, dim].
    rows: Vec<f64>,
    /// |g (x - mu)| of every row, and the greatest of 1 / g where sums leave the gains.
    reach: Vec<f64>,
    centres: Vec<f64>,
    gains: Option<Vec<f32>>,
    /// Standard deviation of an integer score in units of scale |q/g| r / sqrt(D); zero without integers.
    noise: f64,
    integer_sums: bool,
    residual: Option<Residual>,
}

/// What a codec with a residual scores with.
struct Residual {
    codec: Arc<Codec>,
    tables: Tables,
    words: Vec<u32>,
    scales: Vec<u16>,
}

struct Part {
    start: usize,
    len: usize,
    keys: Side,
    values: Side,
}

/// What a cache holds, decoded.
pub struct Held {
    heads: usize,
    parts: Vec<Part>,
    pub tokens: usize,
}

/// What one output channel has to be.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    pub value: f64,
    pub bound: f64,
    /// Whether NaN is asked for (`Some(true)`), forbidden (`Some(false)`), or a matter of a weight that may or may not be zero.
    pub nan: Option<bool>,
    /// Greatest distance of a value from the result: what a wrong answer could be off by.
    pub spread: f64,
}

/// A segment on the host.
pub fn host<E: Engine>(engine: &E, s: &Segment<E::Tensor>) -> Segment<Tensor> {
    use turbomoq::Buffer;
    let get = |t: &E::Tensor| engine.get(t).unwrap();
    let side = |stored: &Stored<E::Tensor>| match stored {
        Stored::Exact { rows, len } => {
            Stored::Exact { rows: get(&rows.slice(2, 0, *len).unwrap()), len: *len }
        }
        Stored::Packed(c) => {
            let f = c.frame();
            let frame = Frame {
                centre: f.centre.as_ref().map(get),
                gain: f.gain.as_ref().map(get),
                order: f.order.as_ref().map(get),
            };
            Stored::Packed(Codes::new(c.codec().clone(), frame, get(c.words()), get(c.scales())).unwrap())
        }
    };
    Segment { start: s.start, keys: side(&s.keys), values: side(&s.values) }
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

impl Side {
    fn new(stored: &Stored<Tensor>) -> Side {
        let dim = stored.dim();
        let codes = match stored {
            Stored::Exact { rows, len } => {
                let rows = rows.slice(2, 0, *len).unwrap().to_f32().unwrap();
                let rows: Vec<f64> = rows.into_iter().map(f64::from).collect();
                let reach = rows.chunks_exact(dim).map(|r| norm(r.iter().copied())).collect();
                let centres = vec![0.0; stored.heads()[0] * stored.heads()[1]];
                return Side {
                    dim,
                    rows,
                    reach,
                    centres,
                    gains: None,
                    noise: 0.0,
                    integer_sums: false,
                    residual: None,
                };
            }
            Stored::Packed(codes) => codes,
        };
        let (codec, [b, h, t], tables) = (codes.codec(), codes.shape(), Tables::new(codes.frame()));
        let (words, scales) = (codes.words().to_vec::<u32>().unwrap(), crate::common::scale_codes(codes));
        let mut scratch = codec.scratch();
        let (w, s) = (codec.row_words(), codec.row_scales());
        let (mut rows, mut reach, mut centres) = (vec![], vec![], vec![]);
        for head in 0..b * h {
            let frame = tables.row(head, dim);
            let mut mine = vec![0f32; t * dim];
            if let Some(channel) = codec.channel() {
                tiles(
                    codec,
                    channel,
                    &words[head * t * w..],
                    &scales[head * t * s..],
                    frame.centre,
                    &mut mine,
                );
            } else {
                for (i, row) in mine.chunks_exact_mut(dim).enumerate() {
                    let at = head * t + i;
                    codec.decode_row(frame, &words[at * w..][..w], &scales[at * s..][..s], row, &mut scratch);
                }
            }
            for row in mine.chunks_exact(dim) {
                let centred = (0..dim).map(|c| {
                    let mu = frame.centre.map_or(0.0, |m| f64::from(m[c]));
                    (f64::from(row[c]) - mu) * frame.gain.map_or(1.0, |g| f64::from(g[c]))
                });
                reach.push(norm(centred));
            }
            centres.push(frame.centre.map_or(0.0, |m| norm(m.iter().map(|x| f64::from(*x)))));
            rows.extend(mine.into_iter().map(f64::from));
        }
        let gains = codes.frame().gain.as_ref().map(|g| g.to_f32().unwrap());
        let (spec, one) = (codec.spec(), codec.bands().len() == 1 && codec.qjl().is_none());
        let scalar = one && codec.bands()[0].grid.scalar().is_some();
        let grid = match (spec.grid, spec.bits) {
            (Grid::Uniform, 4) => 0.0115,
            (Grid::Uniform, 2) => 0.118,
            (_, 4) => 0.009,
            (_, 2) => 0.115,
            _ => 0.0,
        };
        let noise = if scalar { (0.01f64 * grid).sqrt() } else { 0.0 };
        let integer_sums = scalar && spec.bits == 4 && dim % 64 == 0;
        let residual = codec.qjl().map(|_| Residual { codec: codec.clone(), tables, words, scales });
        Side { dim, rows, reach, centres, gains, noise, integer_sums, residual }
    }

    fn row(&self, head: usize, len: usize, t: usize) -> &[f64] {
        &self.rows[(head * len + t) * self.dim..][..self.dim]
    }

    fn gain(&self, head: usize) -> Option<&[f32]> {
        self.gains.as_ref().map(|g| &g[head * self.dim..][..self.dim])
    }
}

/// Rows of a channel-affine codec, channel by channel of every tile.
fn tiles(
    codec: &Codec,
    channel: &Codec,
    words: &[u32],
    scales: &[u16],
    centre: Option<&[f32]>,
    out: &mut [f32],
) {
    let (d, group) = (codec.spec().head_dim, codec.spec().tile());
    let (w, s) = (channel.row_words(), channel.row_scales());
    let (mut run, mut scratch) = (vec![0f32; group], channel.scratch());
    for (tile, out) in out.chunks_exact_mut(group * d).enumerate() {
        let (words, marked) =
            (&words[tile * group * codec.row_words()..], &scales[tile * group * codec.row_scales()..]);
        let mut scales = marked[..2 * d].to_vec();
        let bad = turbomoq::internals::codec::tile::take_marks(&mut scales, group);
        for c in 0..d {
            channel.decode_row(
                Default::default(),
                &words[c * w..][..w],
                &scales[c * s..][..s],
                &mut run,
                &mut scratch,
            );
            run.iter().enumerate().for_each(|(i, x)| out[i * d + c] = x + centre.map_or(0.0, |m| m[c]));
        }
        // A token that is not finite is marked, and NaN in every channel.
        for (row, _) in out.chunks_exact_mut(d).zip(bad.unwrap_or_default()).filter(|(_, bad)| *bad) {
            row.fill(f32::NAN);
        }
    }
}

/// A token that a query sees: where it is, its logit, and what that may be off by.
struct Seen<'a> {
    values: &'a [f64],
    logit: f64,
    off: f64,
}

impl Held {
    pub fn new<E: Engine>(engine: &E, segments: &[Segment<E::Tensor>]) -> Held {
        let parts: Vec<Part> = segments
            .iter()
            .map(|s| host(engine, s))
            .map(|s| Part {
                start: s.start,
                len: s.keys.len(),
                keys: Side::new(&s.keys),
                values: Side::new(&s.values),
            })
            .collect();
        let tokens = parts.iter().map(|p| p.len).sum();
        Held { heads: segments[0].keys.heads()[1], parts, tokens }
    }

    /// Attention of queries [B, Hq, L, D]: what each channel of [B, Hq, L, Dv] has to be.
    pub fn attend(&self, queries: &Tensor, rules: &Rules<Tensor>) -> Vec<Want> {
        let [_, hq, l, d] = <[usize; 4]>::try_from(queries.shape()).unwrap();
        let q = queries.to_f32().unwrap();
        let dtype = queries.float().unwrap();
        let mask = rules.mask.as_ref().map(|m| (additive(m).unwrap(), [m.shape()[0], m.shape()[1]]));
        let sinks = rules.sink_logits.as_ref().map(|s| s.to_f32().unwrap());
        let last = self.parts.iter().rfind(|p| p.len > 0).map_or(0, |p| p.start + p.len - 1);
        let mut out = vec![];
        for (row, q) in q.chunks_exact(d).enumerate() {
            let (batch, head, i) = (row / (hq * l), row / l % hq, row % l);
            let mask = mask.as_ref().map(|(m, [mb, mh])| {
                let at = ((batch.min(mb - 1) * mh + head.min(mh - 1)) * l + i) * self.tokens;
                &m[at..][..self.tokens]
            });
            let place = (last + 1 + i) as i64 - l as i64;
            let sink = sinks.as_ref().map(|s| f64::from(s[head]));
            let kv = batch * self.heads + head / (hq / self.heads);
            let seen = self.seen([kv, batch], q, place, mask, rules);
            out.extend(self.answer(kv, &seen, sink, dtype));
        }
        out
    }

    fn seen(
        &self,
        [kv, batch]: [usize; 2],
        q: &[f32],
        place: i64,
        mask: Option<&[f32]>,
        rules: &Rules<Tensor>,
    ) -> Vec<Seen<'_>> {
        let (mut seen, mut index) = (vec![], 0);
        let scale = f64::from(rules.scale);
        let q_norm = norm(q.iter().map(|x| f64::from(*x)));
        for p in &self.parts {
            let k = &p.keys;
            let entered = match k.gain(kv) {
                Some(g) => norm(q.iter().zip(g).map(|(q, g)| f64::from(q / g))),
                None => q_norm,
            };
            let (d, mut scratch) = (k.dim as f64, k.residual.as_ref().map(|r| r.codec.scratch()));
            let prepared: Option<Prepared> = k
                .residual
                .as_ref()
                .zip(scratch.as_mut())
                .map(|(r, scratch)| r.codec.prepare_row(r.tables.row(kv, k.dim), q, scratch));
            for t in 0..p.len {
                let (at, m) = ((p.start + t) as i64, mask.map_or(0.0, |m| f64::from(m[index])));
                index += 1;
                let late = rules.causal && at > place;
                let old = rules.sliding_window.is_some_and(|w| at + (w as i64) <= place);
                let padding = rules.left_padding.get(batch).is_some_and(|&n| (at as usize) < n);
                if late || old || padding || m == f64::NEG_INFINITY {
                    continue;
                }
                let score = match (&k.residual, &prepared, &mut scratch) {
                    (Some(r), Some(q), Some(scratch)) => {
                        let (w, s) = (r.codec.row_words(), r.codec.row_scales());
                        let row = kv * p.len + t;
                        f64::from(r.codec.score_row(
                            q,
                            &r.words[row * w..][..w],
                            &r.scales[row * s..][..s],
                            scratch,
                        ))
                    }
                    _ => k.row(kv, p.len, t).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>(),
                };
                let reach = k.reach[kv * p.len + t] * if k.residual.is_some() { 4.0 } else { 1.0 };
                let sized = entered * reach + q_norm * k.centres[kv];
                let mut off = scale * 2f64.powi(-23) * (d / 4.0 + 64.0) * sized;
                if !rules.exact {
                    off += 7.0 * scale * k.noise * entered * reach / d.sqrt();
                }
                let mut logit = scale * score;
                if let Some(cap) = rules.soft_cap {
                    let cap = f64::from(cap);
                    logit = cap * (logit / cap).tanh();
                    off = off.min(2.0 * cap) + 2e-6 * cap;
                }
                logit += m;
                off += 2f64.powi(-22) * (logit.abs() + m.abs()) + 3e-6;
                seen.push(Seen { values: p.values.row(kv, p.len, t), logit, off });
            }
        }
        seen
    }

    fn answer(&self, kv: usize, seen: &[Seen], sink: Option<f64>, dtype: Dtype) -> Vec<Want> {
        let dim = self.parts[0].values.dim;
        let top = seen
            .iter()
            .map(|s| s.logit)
            .chain(sink)
            .fold(f64::NEG_INFINITY, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) });
        if top.is_nan() || top == f64::INFINITY {
            return vec![Want { value: f64::NAN, bound: 0.0, nan: Some(true), spread: 0.0 }; dim];
        }
        if seen.is_empty() || top == f64::NEG_INFINITY {
            return vec![Want { value: 0.0, bound: 0.0, nan: Some(false), spread: 0.0 }; dim];
        }
        let mut weights: Vec<f64> = seen.iter().map(|s| (s.logit - top).exp()).collect();
        let sink = sink.map_or(0.0, |s| (s - top).exp());
        let total = weights.iter().sum::<f64>() + sink;
        weights.iter_mut().for_each(|w| *w /= total);
        let sink = sink / total;
        let grown: f64 =
            weights.iter().zip(seen).map(|(w, s)| w * s.off.min(300.0).exp()).sum::<f64>() + sink;
        let all = grown.max(1.0).ln();
        let factor: Vec<f64> = seen.iter().map(|s| (s.off + all).min(300.0).exp_m1()).collect();
        let (mut reach, mut centre, mut integers) = (0f64, 0f64, false);
        for p in &self.parts {
            let v = &p.values;
            let back = v.gain(kv).map_or(1.0, |g| g.iter().map(|g| 1.0 / f64::from(*g)).fold(0.0, f64::max));
            let mine = v.reach[kv * p.len..][..p.len].iter().filter(|x| x.is_finite());
            reach = mine.fold(reach, |a, b| a.max(b * back));
            centre = centre.max(v.centres[kv]);
            integers |= v.integer_sums;
        }
        let tokens = self.tokens as f64;
        let always = 1e-6 * tokens * reach
            + 2f64.powi(-23) * (tokens / 4.0 + dim as f64 / 4.0 + 64.0) * (reach + centre)
            + if integers { 7.0 * 1.3e-3 * reach / (dim as f64).sqrt() } else { 0.0 }
            + 1e-30;
        let channel = |c: usize| {
            let (mut value, mut nan) = (0.0, Some(false));
            for (s, w) in seen.iter().zip(&weights) {
                if s.values[c].is_finite() {
                    value += w * s.values[c];
                } else if *w * (-s.off).exp() > 1e-4 {
                    nan = Some(true);
                } else if nan == Some(false) {
                    nan = None;
                }
            }
            let (mut bound, mut spread) = (always + sink * value.abs() * all.exp_m1(), 0f64);
            for ((s, w), f) in seen.iter().zip(&weights).zip(&factor) {
                if s.values[c].is_finite() {
                    let far = (s.values[c] - value).abs();
                    bound += w * f * far;
                    spread = spread.max(far);
                }
            }
            let rounding = match dtype {
                Dtype::F32 => 2f64.powi(-23) * value.abs(),
                Dtype::F16 => 2f64.powi(-11) * (value.abs() + bound) + 6e-8,
                Dtype::BF16 => 2f64.powi(-8) * (value.abs() + bound),
            };
            Want { value, bound: bound + rounding, nan, spread }
        };
        (0..dim).map(channel).collect()
    }
}

/// The greatest error in units of its bound, and the part of the channels whose bound is below a tenth of what could go wrong.
///
/// # Errors
/// The first channel that is off by more than its bound.
pub fn compare(got: &[f32], want: &[Want], dtype: Dtype) -> Result<(f64, f64), String> {
    if got.len() != want.len() {
        return Err(format!("{} numbers for {}", got.len(), want.len()));
    }
    let top = match dtype {
        Dtype::F16 => 65504.0,
        _ => f64::from(f32::MAX),
    };
    let (mut worst, mut sharp) = (0f64, 0usize);
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        if got.is_nan() || want.nan == Some(true) {
            if !got.is_nan() && got.is_finite() && want.nan == Some(true) {
                return Err(format!("{got} at {i} where a visible token is not finite"));
            }
            if got.is_nan() && want.nan == Some(false) {
                return Err(format!("NaN at {i}, not {}", want.value));
            }
            continue;
        }
        if want.nan.is_none() {
            continue;
        }
        let far = (f64::from(got) - want.value.clamp(-top, top)).abs();
        if far > want.bound {
            return Err(format!("{got} at {i}, not {} within {}", want.value, want.bound));
        }
        worst = worst.max(far / want.bound.max(f64::MIN_POSITIVE));
        sharp += usize::from(want.bound <= 0.1 * want.spread);
    }
    Ok((worst, sharp as f64 / want.len().max(1) as f64))
}
