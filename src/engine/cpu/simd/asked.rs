//! Random queries through the whole fused attention at every level, held to the row form; emulated processors run this too.
//!
//! The bound is the one of tests/differential/oracle.rs without the terms that play no part here: a score of a query in eight bits has,
//! by the rule in `cpu/domain.rs`, noise of a standard deviation of at most scale sqrt(D_grid / 100) |q| |k| / sqrt(D), of which
//! seven are allowed beside the rounding of f32; weights are then off by w (exp(d + e) - 1) with e = ln sum w exp(d).

use super::level::{LEVELS, Level, MOST};
use crate::codec::Codec;
use crate::codec::frame::RowFrame;
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, Stored};
use crate::engine::cpu::Cpu;
use crate::math::rng::Rng;
use crate::spec::{CodecSpec, Grid, RotationKind};
use crate::tensor::Tensor;
use std::sync::Arc;

const TOKENS: usize = 21;
const HEADS: usize = 8;

/// A query of the kind `kind`.
fn query(kind: usize, rng: &mut Rng, dim: usize) -> Vec<f32> {
    let mut q: Vec<f32> = (0..dim).map(|_| rng.normal() as f32).collect();
    let at = rng.bits() as usize % dim;
    match kind {
        0 => {}
        1 => q.iter_mut().for_each(|q| *q = 0.3 * *q * *q * *q),
        2 => q.iter_mut().enumerate().for_each(|(i, q)| *q = if i == at { 8.0 * *q } else { 0.0 }),
        3 => q[at] = 9.0,
        kind => q.iter_mut().for_each(|q| *q *= [1e-3, 30.0, 1e3][kind - 4]),
    }
    q
}

/// Packed rows and what the row form decodes them to.
fn packed(codec: &Arc<Codec>, rng: &mut Rng) -> (Stored<Tensor>, Vec<Vec<f64>>) {
    let dim = codec.spec().head_dim;
    let x = (0..TOKENS * dim).map(|_| rng.normal() as f32).collect();
    let codes =
        Cpu.encode(codec, Default::default(), &Tensor::new(&[1, 1, TOKENS, dim], x).unwrap()).unwrap();
    let scales = crate::engine::cpu::rows::scale_codes(&codes).unwrap();
    let (words, mut scratch) = (codes.words().to_vec::<u32>().unwrap(), codec.scratch());
    let row = |t: usize| {
        let mut out = vec![0f32; dim];
        let (w, s) = (codec.row_words(), codec.row_scales());
        codec.decode_row(
            RowFrame::default(),
            &words[t * w..][..w],
            &scales[t * s..][..s],
            &mut out,
            &mut scratch,
        );
        out.into_iter().map(f64::from).collect()
    };
    let rows = (0..TOKENS).map(row).collect();
    (Stored::Packed(codes), rows)
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The greatest error of an answer in units of its bound.
fn error(q: &[f32], keys: &[Vec<f64>], values: &[Vec<f64>], noise: f64, scale: f64, got: &[f32]) -> f64 {
    let (dim, q) = (q.len() as f64, q.iter().map(|q| f64::from(*q)).collect::<Vec<_>>());
    let logits: Vec<f64> =
        keys.iter().map(|k| scale * k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>()).collect();
    let each = scale * (7.0 * noise / dim.sqrt() + 2f64.powi(-23) * (dim / 4.0 + 64.0)) * norm(&q);
    let off: Vec<f64> = keys.iter().map(|k| each * norm(k) + 3e-6).collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = logits.iter().map(|l| (l - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    let all = weights.iter().zip(&off).map(|(w, d)| w * d.min(300.0).exp()).sum::<f64>().ln();
    let reach = values.iter().map(|v| norm(v)).fold(0.0, f64::max);
    let always = reach * (1e-6 * TOKENS as f64 + 2f64.powi(-23) * (dim / 4.0 + 70.0) + 9.1e-3 / dim.sqrt());
    let mut worst = 0f64;
    for (c, got) in got.iter().enumerate() {
        let want: f64 = weights.iter().zip(values).map(|(w, v)| w * v[c]).sum();
        let moved =
            |((w, d), v): ((&f64, &f64), &Vec<f64>)| w * (d + all).min(300.0).exp_m1() * (v[c] - want).abs();
        let bound = always + weights.iter().zip(&off).zip(values).map(moved).sum::<f64>();
        worst = worst.max((f64::from(*got) - want).abs() / bound);
    }
    worst
}

/// Asks `calls` times for each grid, head dim and kind; gives the number of queries.
fn ask(level: Level, calls: usize) -> usize {
    let (mut rng, mut asked) = (Rng::new(9, 10), 0);
    for dim in [64, 128, 192, 256] {
        let base = CodecSpec::new(dim, 4, Grid::Uniform);
        for (spec, grid_error) in [
            (CodecSpec { grid: Grid::Beta, ..base }, 0.009),
            (CodecSpec { grid: Grid::Lloyd, ..base }, 0.009),
            (base, 0.0115),
            (CodecSpec { rotation: RotationKind::Identity, ..base }, 0.0115),
            (CodecSpec { bits: 2, grid: Grid::Beta, ..base }, 0.115),
        ] {
            let codec = Arc::new(Codec::new(spec).unwrap());
            let ((keys, k), (values, v)) = (packed(&codec, &mut rng), packed(&codec, &mut rng));
            let segments = [Segment { start: 0, keys, values }];
            let rules = Rules::causal(1.0 / (dim as f32).sqrt());
            for kind in 0..7 {
                for _ in 0..calls {
                    let queries: Vec<Vec<f32>> = (0..HEADS).map(|_| query(kind, &mut rng, dim)).collect();
                    let q = Tensor::new(&[1, HEADS, 1, dim], queries.concat()).unwrap();
                    let out = Cpu.attend(&segments, &q, &rules).unwrap().to_f32().unwrap();
                    for (q, got) in queries.iter().zip(out.chunks_exact(dim)) {
                        let noise = (0.01f64 * grid_error).sqrt();
                        let worst = error(q, &k, &v, noise, f64::from(rules.scale), got);
                        assert!(worst <= 1.0, "{level:?}, {spec}, kind {kind}: {worst} of the bound");
                    }
                    asked += HEADS;
                }
            }
        }
    }
    asked
}

#[test]
fn twenty_thousand_random_queries_are_answered_as_by_the_row_form() {
    let mut asked = 0;
    for &level in LEVELS {
        let pool = rayon::ThreadPoolBuilder::new().start_handler(move |_| MOST.set(level)).build().unwrap();
        asked += pool.install(|| ask(level, if level == LEVELS[0] { 19 } else { 4 }));
    }
    assert!(asked >= 20_000, "{asked} queries");
}
