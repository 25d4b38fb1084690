//! `turbomoq bench`: one decode step of attention on this machine, engines x recipes x lengths beside the same engine on exact rows.
//!
//! Every engine and recipe is held to dense attention on the unpacked rows before anything is timed; one that is wrong ends the
//! command.

mod chart;

use super::say::say;
use super::{bytes, print_json, table};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Residual;
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::internals::math::rng::Rng;
use turbomoq::{Codes, Frame};
use turbomoq::{Dtype, Error, Recipe, Result, Tensor};
use turbomoq::{Rules, Segment, Stored};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Recipes to time beside exact rows
    #[arg(long, num_args = 1.., default_values = ["turbomoq@4", "turboquant-mse@4", "best@3", "best@2"])]
    recipes: Vec<String>,
    /// Tokens held
    #[arg(long, num_args = 1.., default_values_t = [512, 2048, 8192, 32768])]
    tokens: Vec<usize>,
    /// KV heads
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Query heads of a KV head
    #[arg(long, default_value_t = 4)]
    group: usize,
    /// Channels of a head
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Sequences
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Milliseconds for each cell of the table
    #[arg(long, default_value_t = 300)]
    budget_ms: u64,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Draw the times into this SVG file
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// One cell: an engine, a recipe, a length.
#[derive(Serialize)]
struct Cell {
    engine: &'static str,
    recipe: String,
    tokens: usize,
    /// Fastest of the runs.
    ms: f64,
    /// Time on exact rows over this time, on the same engine.
    times_exact: f64,
    bytes: usize,
    /// Packed and exact bytes of the cache read in a second.
    gb_per_s: f64,
}

#[derive(Serialize)]
struct Check {
    engine: &'static str,
    recipe: String,
    /// Greatest difference to the reference over the greatest value.
    error: f64,
    bound: f64,
}

/// The least length from which packed rows are the faster ones at every length tried.
#[derive(Serialize)]
struct FasterFrom {
    engine: &'static str,
    recipe: String,
    tokens: Option<usize>,
}

#[derive(Serialize)]
struct Output {
    batch: usize,
    heads: usize,
    group: usize,
    head_dim: usize,
    threads: usize,
    gpu: bool,
    checks: Vec<Check>,
    cells: Vec<Cell>,
    crossovers: Vec<FasterFrom>,
}

/// The name of what the recipes are compared with.
const EXACT: &str = "exact fp16";
/// Tokens of the check: sinks, packed blocks and a window.
const CHECKED: usize = 450;
/// Allowed error where scores are formed in floats, and where an engine may form them in integers.
const BOUNDS: [f64; 2] = [3e-3, 3e-2];
/// Tokens appended at once.
const PIECE: usize = 2048;

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut recipes = vec![(EXACT.to_string(), None)];
    for name in &arguments.recipes {
        recipes.push((name.clone(), Some(name.parse::<Recipe>()?)));
    }
    let sizes = [arguments.batch, arguments.heads, arguments.group, arguments.head_dim];
    for (field, n) in ["batch", "heads", "group", "head-dim"].into_iter().zip(sizes) {
        in_range(field, n)?;
    }
    arguments.tokens.iter().try_for_each(|&n| in_range("tokens", n))?;
    let mut output = Output {
        batch: arguments.batch,
        heads: arguments.heads,
        group: arguments.group,
        head_dim: arguments.head_dim,
        threads: rayon::current_num_threads(),
        gpu: gpu(),
        checks: vec![],
        cells: vec![],
        crossovers: vec![],
    };
    for (name, recipe) in &recipes {
        let cache = cache(arguments, recipe.as_ref(), CHECKED, Dtype::F32)?;
        check(&Cpu, arguments, name, &cache, &mut output.checks)?;
        #[cfg(feature = "mlx")]
        check(&turbomoq::Mlx::new(), arguments, name, &cache, &mut output.checks)?;
    }
    let mut lengths = arguments.tokens.clone();
    lengths.sort_unstable();
    lengths.dedup();
    for &tokens in &lengths {
        for (name, recipe) in &recipes {
            let cache = cache(arguments, recipe.as_ref(), tokens, Dtype::F16)?;
            let segments = cache.segments();
            time(&Cpu, arguments, name, tokens, &segments, &mut output.cells)?;
            #[cfg(feature = "mlx")]
            time(&turbomoq::Mlx::new(), arguments, name, tokens, &segments, &mut output.cells)?;
        }
    }
    compare(&mut output, &recipes.iter().map(|r| r.0.as_str()).collect::<Vec<_>>());
    if let Some(path) = &arguments.svg {
        let cells = output.cells.iter().map(|c| (format!("{}, {}", c.engine, c.recipe), c.tokens, c.ms));
        chart::draw(path, &cells.collect::<Vec<_>>())?;
    }
    if arguments.json {
        print_json(&output);
    } else {
        print(&output);
    }
    Ok(())
}

fn in_range(field: &'static str, n: usize) -> Result<()> {
    if (1..=1 << 24).contains(&n) {
        return Ok(());
    }
    Err(Error::Unsupported { field, value: n.to_string(), reason: "1 to 2^24".into() })
}

fn gpu() -> bool {
    #[cfg(feature = "mlx")]
    return turbomoq::mlx::on_gpu();
    #[cfg(not(feature = "mlx"))]
    false
}

fn rows(shape: [usize; 4], stream: u64, dtype: Dtype) -> Result<Tensor> {
    let mut rng = Rng::new(11, stream);
    let values = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_f32(dtype, &shape, values)
}

/// A cache of `tokens` random tokens; every layer of a model has one.
fn cache(a: &Arguments, recipe: Option<&Recipe>, tokens: usize, dtype: Dtype) -> Result<LayerCache<Cpu>> {
    let exact = Recipe::preset("uniform", 16.0, 16.0)?;
    let shape = LayerShape { key_dim: a.head_dim, value_dim: a.head_dim };
    let mut cache = LayerCache::new(Cpu, recipe.unwrap_or(&exact), 0, shape)?;
    for start in (0..tokens).step_by(PIECE) {
        let shape = [a.batch, a.heads, PIECE.min(tokens - start), a.head_dim];
        cache.append(&rows(shape, 2 * start as u64, dtype)?, &rows(shape, 2 * start as u64 + 1, dtype)?)?;
    }
    Ok(cache)
}

fn queries(a: &Arguments, dtype: Dtype) -> Result<Tensor> {
    rows([a.batch, a.heads * a.group, 1, a.head_dim], u64::MAX, dtype)
}

fn rules<T>(a: &Arguments, exact: bool) -> Rules<T> {
    Rules { exact, ..Rules::causal((a.head_dim as f32).powf(-0.5)) }
}

/// The same segments on an engine.
fn put<E: Engine>(engine: &E, segments: &[Segment<Tensor>]) -> Result<Vec<Segment<E::Tensor>>> {
    let table = |t: &Option<Tensor>| t.as_ref().map(|t| engine.put(t)).transpose();
    let side = |s: &Stored<Tensor>| -> Result<Stored<E::Tensor>> {
        Ok(match s {
            Stored::Exact { rows, len } => Stored::Exact { rows: engine.put(rows)?, len: *len },
            Stored::Packed(codes) => {
                let f = codes.frame();
                let frame =
                    Frame { centre: table(&f.centre)?, gain: table(&f.gain)?, order: table(&f.order)? };
                let (words, scales) = (engine.put(codes.words())?, engine.put(codes.scales())?);
                Stored::Packed(Codes::new(codes.codec().clone(), frame, words, scales)?)
            }
        })
    };
    let segment =
        |s: &Segment<Tensor>| Ok(Segment { start: s.start, keys: side(&s.keys)?, values: side(&s.values)? });
    segments.iter().map(segment).collect()
}

/// Holds an engine to dense attention on unpacked rows. The scores of a QJL residual are another estimator than its rows, so there the
/// reference is the CPU engine without integer scores.
fn check<E: Engine>(
    engine: &E,
    a: &Arguments,
    recipe: &str,
    cache: &LayerCache<Cpu>,
    checks: &mut Vec<Check>,
) -> Result<()> {
    let (q, segments) = (queries(a, Dtype::F32)?, cache.segments());
    let (keys, values) = cache.fetch()?;
    let values = values.to_f32()?;
    let estimator = segments.iter().any(|s| match &s.keys {
        Stored::Packed(codes) => codes.codec().spec().residual != Residual::None,
        Stored::Exact { .. } => false,
    });
    let want = match estimator {
        true => Cpu.attend(&segments, &q, &rules(a, true))?.to_f32()?.into_iter().map(f64::from).collect(),
        false => dense(a, &q.to_f32()?, &keys.to_f32()?, &values),
    };
    let size = values.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
    for (exact, bound) in [true, false].into_iter().zip(BOUNDS) {
        let out = engine.attend(&put(engine, &segments)?, &engine.put(&q)?, &rules(a, exact))?;
        let got = engine.get(&out)?.to_f32()?;
        let far = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs());
        // NaN must not pass as the lesser of two.
        let error = far.fold(0.0, |m: f64, x| if x <= m { m } else { x }) / size;
        if error.is_nan() || error > bound {
            let what = format!("attention of {} on {recipe}", engine.name());
            return Err(Error::Inaccurate { what, error, bound });
        }
        checks.push(Check { engine: engine.name(), recipe: recipe.into(), error, bound });
    }
    Ok(())
}

/// Attention of one query token in f64.
fn dense(a: &Arguments, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f64> {
    let (d, tokens) = (a.head_dim, CHECKED);
    let scale = (d as f64).powf(-0.5);
    let row = |(head, q): (usize, &[f32])| {
        let rows = head / a.group * tokens * d..(head / a.group + 1) * tokens * d;
        let dot =
            |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale;
        let scores: Vec<f64> = keys[rows.clone()].chunks_exact(d).map(dot).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        let values = &values[rows];
        let channel = |c: usize| {
            values.iter().skip(c).step_by(d).zip(&weights).map(|(v, w)| w * f64::from(*v)).sum::<f64>()
                / total
        };
        (0..d).map(channel).collect::<Vec<_>>()
    };
    q.chunks_exact(d).enumerate().flat_map(row).collect()
}

fn time<E: Engine>(
    engine: &E,
    a: &Arguments,
    recipe: &str,
    tokens: usize,
    segments: &[Segment<Tensor>],
    cells: &mut Vec<Cell>,
) -> Result<()> {
    let (there, q) = (put(engine, segments)?, engine.put(&queries(a, Dtype::F16)?)?);
    let rules = rules(a, false);
    // Reading the result is what makes a lazy engine do the work.
    let once = || -> Result<Duration> {
        let start = Instant::now();
        engine.get(&engine.attend(&there, &q, &rules)?)?;
        Ok(start.elapsed())
    };
    once()?;
    let (mut least, end) = (once()?, Instant::now() + Duration::from_millis(a.budget_ms));
    while Instant::now() < end {
        least = least.min(once()?);
    }
    let side = |s: &Stored<Tensor>| match s {
        Stored::Exact { rows, len } => rows.nbytes() / rows.shape()[2].max(1) * len,
        Stored::Packed(codes) => codes.nbytes(),
    };
    let bytes = segments.iter().map(|s| side(&s.keys) + side(&s.values)).sum();
    let ms = least.as_secs_f64() * 1e3;
    let gb_per_s = bytes as f64 / least.as_secs_f64() / 1e9;
    let recipe = recipe.to_string();
    cells.push(Cell { engine: engine.name(), recipe, tokens, ms, times_exact: 1.0, bytes, gb_per_s });
    Ok(())
}

/// Fills in how often each cell is faster than exact rows, and where that begins.
fn compare(output: &mut Output, recipes: &[&str]) {
    let exact: Vec<_> =
        output.cells.iter().filter(|c| c.recipe == EXACT).map(|c| (c.engine, c.tokens, c.ms)).collect();
    for cell in &mut output.cells {
        if let Some(e) = exact.iter().find(|e| e.0 == cell.engine && e.1 == cell.tokens) {
            cell.times_exact = e.2 / cell.ms;
        }
    }
    let mut engines: Vec<&'static str> = exact.iter().map(|e| e.0).collect();
    engines.sort_unstable();
    engines.dedup();
    for engine in engines {
        for recipe in recipes.iter().filter(|r| **r != EXACT) {
            let of = output.cells.iter().filter(|c| c.engine == engine && c.recipe == *recipe);
            let slowest = of.clone().filter(|c| c.times_exact < 1.0).map(|c| c.tokens).max();
            let tokens = of.map(|c| c.tokens).filter(|t| slowest.is_none_or(|s| *t > s)).min();
            output.crossovers.push(FasterFrom { engine, recipe: recipe.to_string(), tokens });
        }
    }
}

fn print(output: &Output) {
    let worst = output.checks.iter().map(|c| c.error / c.bound).fold(0.0, f64::max);
    say!(
        "{} x {} query heads on {} KV heads of {} channels, {} threads, {}; {} checks passed, the worst at {:.0} % of its bound",
        output.batch,
        output.heads * output.group,
        output.heads,
        output.head_dim,
        output.threads,
        if output.gpu { "MLX on a GPU" } else { "no GPU" },
        output.checks.len(),
        100.0 * worst
    );
    let mut times = table(&["engine", "recipe", "tokens", "ms", "x exact", "bytes", "GB/s"]);
    for c in &output.cells {
        times.add_row([
            c.engine.to_string(),
            c.recipe.clone(),
            c.tokens.to_string(),
            format!("{:.3}", c.ms),
            format!("{:.2}", c.times_exact),
            bytes(c.bytes),
            format!("{:.2}", c.gb_per_s),
        ]);
    }
    say!("{times}");
    for c in &output.crossovers {
        match c.tokens {
            Some(tokens) => {
                say!("{}, {}: faster than exact rows from {tokens} tokens on", c.engine, c.recipe)
            }
            None => say!("{}, {}: not faster than exact rows at the greatest length", c.engine, c.recipe),
        }
    }
}
