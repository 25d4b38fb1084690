//! Random queries over packed keys and values of four bits, held to the row form.

use crate::levels::each_level;
use crate::oracle::{Held, compare};
use crate::values::{Kind, tensor};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::Mutex;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Side;
use turbomoq::internals::engine::cpu::probe::{self, Path};
use turbomoq::{Dtype, Recipe};
use turbomoq::{Rules, Segment, Stored};

/// Scalar grids of four bits, by preset and as specs.
const GRIDS: [&str; 6] = [
    "turboquant-mse@4",
    "turbomoq@4",
    "rotation-only@4",
    "uniform@4",
    "turboquant-mse@2/4",
    "key=d128:b4:hadamard:beta:f16,value=d128:b4:hadamard:lloyd:log8,centred",
];
const DIMS: [usize; 7] = [32, 64, 80, 128, 192, 256, 512];
const GROUPS: [usize; 4] = [1, 3, 4, 8];
/// Tokens of a cache: more than one block, and a rest of every form.
const TOKENS: usize = 101;

/// What a run has seen.
#[derive(Default)]
pub struct Totals {
    calls: usize,
    queries: usize,
    worst: f64,
    sharp: f64,
}

/// Asks queries of every kind, `calls` times for each grid, dim and kind. Gives calls, queries and the greatest error by its bound.
pub fn ask(seed: u64, calls: usize) -> Totals {
    let totals = Mutex::new(Totals::default());
    let cells: Vec<(usize, usize)> =
        (0..GRIDS.len()).flat_map(|g| (0..DIMS.len()).map(move |d| (g, d))).collect();
    cells.par_iter().for_each(|&(g, d)| {
        let (grid, dim) = (GRIDS[g], DIMS[d]);
        let recipe: Recipe = format!("{grid},sinks=0,window=0").parse().unwrap();
        let stream = seed.wrapping_mul(1000) + (g * DIMS.len() + d) as u64;
        // Straight from the engine: a cache would keep the newest of so few tokens exact.
        let side = |side, i| {
            let spec = recipe.spec(side, g, dim).ok()??;
            let codec = Arc::new(Codec::new(spec).ok()?);
            let rows = tensor(Kind::Gaussian, Dtype::F32, &[1, 1, TOKENS, dim], stream * 4 + i);
            let frame = Cpu.frame(&codec, recipe.centred && side == Side::Key, &rows, None).unwrap();
            Some(Stored::Packed(Cpu.encode(&codec, frame, &rows).unwrap()))
        };
        // Some head dims have no form in some grids.
        let (Some(keys), Some(values)) = (side(Side::Key, 0), side(Side::Value, 1)) else { return };
        let segments = [Segment { start: 0, keys, values }];
        let held = Held::new(&Cpu, &segments);
        for (i, kind) in Kind::QUERIES.iter().enumerate() {
            for call in 0..calls {
                let group = GROUPS[(call + i + d) % GROUPS.len()];
                let id = stream.wrapping_mul(1 << 20) + (i * calls + call) as u64 * 4 + 2;
                let q = tensor(*kind, Dtype::F32, &[1, group, 1, dim], id);
                let rules = Rules::causal(1.0 / (dim as f32).sqrt());
                let got = Cpu.attend(&segments, &q, &rules).unwrap().to_f32().unwrap();
                let compared = compare(&got, &held.attend(&q, &rules), Dtype::F32);
                let (worst, sharp) = compared.unwrap_or_else(|e| {
                    panic!("{grid} at {dim}, {kind:?}, group {group}, seed {seed}, call {call}: {e}")
                });
                let mut totals = totals.lock().unwrap();
                totals.calls += 1;
                totals.queries += group;
                totals.worst = totals.worst.max(worst);
                totals.sharp += sharp;
            }
        }
    });
    totals.into_inner().unwrap()
}

#[test]
fn more_than_ten_thousand_random_queries_are_answered_as_by_the_row_form() {
    let (seed, calls) = (crate::seed(11), 36);
    each_level(|level| {
        let totals = ask(seed, calls);
        println!(
            "{level}: {} calls, {} queries, greatest error {:.3} of its bound, {:.2} of the channels with sharp bounds",
            totals.calls,
            totals.queries,
            totals.worst,
            totals.sharp / totals.calls as f64
        );
        for path in [Path::IntegerScores, Path::UnevenQuery, Path::OnlyUnevenQueries, Path::UnevenRescored] {
            assert!(probe::count(path) > 0, "{level}: {path:?} never ran");
        }
        assert!(totals.calls >= 10_000, "{} calls", totals.calls);
        assert!(totals.sharp / totals.calls as f64 > 0.5, "the bounds say little");
    });
}

#[test]
fn a_million_random_queries_at_every_level() {
    if std::env::var_os("TURBOMOQ_LONG").is_none() {
        return;
    }
    each_level(|level| {
        let (mut calls, mut queries, mut worst) = (0, 0, 0f64);
        let mut seed = crate::seed(1000);
        while queries < 1_000_000 {
            let totals = ask(seed, 400);
            (calls, queries, worst) =
                (calls + totals.calls, queries + totals.queries, worst.max(totals.worst));
            seed += 1;
        }
        println!("{level}: {calls} calls, {queries} queries, greatest error {worst:.3} of its bound");
    });
}
