//! Eighty-five agents with 4,096 tokens each of an 8B-shaped model in one memory, then with half of it:
//! `cargo run --release --example agents`.
//!
//! The model has 36 layers; so that it runs anywhere, `--layers` of them are taken and the memory with them (same heads, same
//! channels, same tokens). The allocator chooses widths so that all agents fit. First all park and nothing may leave the memory; then
//! the memory is halved, and threads resume and park agents at once, so that caches go to the disk and come back. Every cache that
//! comes back is compared, codes and decoded rows, with what parking it has made. It ends with an error if anything of this does not
//! hold, and prints times beside a plain copy of the same bytes.

use clap::Parser;
use half::f16;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use turbomoq::allocation::calibration::{Calibration, score_heads};
use turbomoq::archive::{Archive, SpillFolder, parked_bytes, plan_within};
use turbomoq::internals::io::files::stable_hash;
use turbomoq::internals::math::rng::Rng;
use turbomoq::policy::ModelShape;
use turbomoq::pool::MemoryPool;
use turbomoq::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
use turbomoq::{Compressor, Recipe, Tensor};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Tokens between the caches of two agents in the rows that all are cut from. It has no factor in common with the 128 tokens of a
/// block, so no two agents have an equal block, which the pool would keep once.
const SHIFT: usize = 37;

/// Sizes of the run.
#[derive(Parser)]
pub struct Arguments {
    /// Agents
    #[arg(long, default_value_t = 85)]
    agents: usize,
    /// Tokens of each
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Bytes of memory for the whole model
    #[arg(long, default_value_t = 8_100_000_000)]
    memory: usize,
    /// Layers of the whole model
    #[arg(long, default_value_t = 36)]
    of_layers: usize,
    /// Layers that are held here
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// KV heads of a layer
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Channels of a key and of a value
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Threads that park and resume at once
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Agents that each thread resumes while memory is short; every fourth is parked anew
    #[arg(long, default_value_t = 60)]
    turns: usize,
    /// Recipe whose widths the allocator chooses
    #[arg(long, default_value = "best,window=0")]
    recipe: Recipe,
}

/// Rows that the caches of all agents are cut from, keys and values of every layer.
struct Source {
    layers: Vec<(Tensor, Tensor)>,
    tokens: usize,
}

impl Source {
    /// Normal values; the channels of keys have energies that fall the faster the higher the head, and a mean.
    fn new(arguments: &Arguments) -> Result<Source> {
        let Arguments { agents, tokens, kv_heads: heads, head_dim: dim, .. } = *arguments;
        let rows = tokens + SHIFT * agents;
        let side = |stream: usize, keys: bool| -> Result<Tensor> {
            let mut rng = Rng::new(8, stream as u64);
            let mut data = Vec::with_capacity(heads * rows * dim);
            for head in 0..heads {
                let falls = if keys { head as f64 / heads as f64 } else { 0.0 };
                let channel =
                    |c: usize| ((1.0 + c as f64).powf(-falls), if keys && c % 9 == 0 { 2.0 } else { 0.0 });
                let channels: Vec<(f64, f64)> = (0..dim).map(channel).collect();
                for _ in 0..rows {
                    data.extend(
                        channels.iter().map(|(energy, mean)| f16::from_f64(energy * rng.normal() + mean)),
                    );
                }
            }
            Ok(Tensor::new(&[1, heads, rows, dim], data)?)
        };
        let layer =
            |i: usize| -> Result<(Tensor, Tensor)> { Ok((side(2 * i, true)?, side(2 * i + 1, false)?)) };
        Ok(Source { layers: (0..arguments.layers).map(layer).collect::<Result<_>>()?, tokens })
    }

    /// The prompt cache of an agent.
    fn cache(&self, agent: usize) -> Result<PromptCache> {
        let cut = |x: &Tensor| -> Result<Tensor> {
            Ok(x.slice(2, SHIFT * agent, SHIFT * agent + self.tokens)?.compact())
        };
        let layer = |(k, v): &(Tensor, Tensor)| -> Result<Layer> {
            Ok(Layer::Kv { class: KvClass::Kv, kv: Some(Pair { keys: cut(k)?, values: cut(v)? }) })
        };
        let layers = self.layers.iter().map(layer).collect::<Result<Vec<_>>>()?;
        Ok(PromptCache { layout: Layout::V032, metadata: BTreeMap::new(), layers })
    }
}

/// A number that follows from every byte of the codes, tables and exact tokens of a cache.
fn print_of(archive: &Archive) -> u64 {
    let mut bytes = vec![];
    let mut put = |t: Option<&Tensor>| {
        if let Some(t) = t {
            bytes.extend_from_slice(&stable_hash(&t.row_major_bytes()).to_le_bytes());
        }
    };
    for (_, _, layer) in archive.packed() {
        for side in [&layer.key, &layer.value] {
            put(side.head.as_ref());
            put(side.tail.as_ref());
            if let Some(codes) = &side.body {
                let frame = codes.frame();
                [Some(codes.words()), Some(codes.scales())].into_iter().for_each(&mut put);
                [&frame.centre, &frame.gain, &frame.order].into_iter().for_each(|t| put(t.as_ref()));
            }
        }
    }
    stable_hash(&bytes)
}

/// The same of decoded rows.
fn print_of_rows(cache: &PromptCache) -> Result<u64> {
    let mut bytes = vec![];
    for layer in &cache.layers {
        if let Some(kv) = layer.attention_kv()? {
            for side in [&kv.keys, &kv.values] {
                bytes.extend_from_slice(&stable_hash(&side.row_major_bytes()).to_le_bytes());
            }
        }
    }
    Ok(stable_hash(&bytes))
}

/// Times in milliseconds a MiB of half-precision rows.
#[derive(Default)]
struct Times(Mutex<Vec<f64>>);

impl Times {
    fn add(&self, start: Instant, bytes: usize) {
        let ms = 1e3 * start.elapsed().as_secs_f64();
        if let Ok(mut list) = self.0.lock() {
            list.push(ms * f64::from(1 << 20) / bytes as f64);
        }
    }

    fn row(&self, what: &str) -> [String; 4] {
        let mut list = self.0.lock().map(|list| list.clone()).unwrap_or_default();
        list.sort_by(f64::total_cmp);
        let at = |share: f64| match list.len() {
            0 => "-".into(),
            n => format!("{:.3}", list[((n as f64 * share).ceil() as usize).clamp(1, n) - 1]),
        };
        [what.into(), list.len().to_string(), at(0.5), at(0.99)]
    }
}

/// The agents, the pool, and what every agent's cache must come back as.
struct World {
    source: Source,
    compressor: Compressor,
    pool: MemoryPool<Archive>,
    /// Of codes and of decoded rows, by agent; whoever works with an agent holds its lock.
    known: Vec<Mutex<[u64; 2]>>,
    fp16_bytes: usize,
    park: Times,
    hit: Times,
    load: Times,
    wrong: AtomicUsize,
}

fn name(agent: usize) -> String {
    format!("agent-{agent}")
}

impl World {
    fn park(&self, agent: usize) -> Result<()> {
        let cache = self.source.cache(agent)?;
        let mut known = self.known[agent].lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let archive = Archive::compress(&cache, &self.compressor, || ())?;
        self.pool.allocate(&name(agent), "chat", 1.0)?;
        self.pool.store(&name(agent), archive.clone())?;
        self.park.add(start, self.fp16_bytes);
        *known = [print_of(&archive), print_of_rows(&archive.restore(&self.compressor, || ())?)?];
        Ok(())
    }

    fn resume(&self, agent: usize) -> Result<()> {
        let known = self.known[agent].lock().unwrap_or_else(PoisonError::into_inner);
        let in_memory = self.pool.agents().iter().any(|a| a.id == name(agent) && a.bytes.is_some());
        let start = Instant::now();
        let archive = self.pool.get(&name(agent))?;
        let cache = archive.restore(&self.compressor, || ())?;
        if in_memory { &self.hit } else { &self.load }.add(start, self.fp16_bytes);
        if [print_of(&archive), print_of_rows(&cache)?] != *known {
            self.wrong.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Runs `turn(thread, number)` on all threads.
    fn on_threads(
        &self,
        threads: usize,
        turns: usize,
        turn: impl Fn(usize, usize) -> Result<()> + Sync,
    ) -> Result<()> {
        std::thread::scope(|scope| {
            let run = |thread: usize| {
                let turn = &turn;
                scope.spawn(move || (0..turns).try_for_each(|number| turn(thread, number)))
            };
            let threads: Vec<_> = (0..threads).map(run).collect();
            threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
        })
    }
}

fn check(holds: bool, what: String) -> Result<()> {
    println!("{} {what}", if holds { "ok:" } else { "NOT:" });
    if holds { Ok(()) } else { Err(format!("this was to hold and does not: {what}").into()) }
}

/// Does it all; an error says what does not hold.
#[allow(clippy::too_many_lines)] // read from top to bottom
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { agents, tokens, layers, kv_heads, head_dim, threads, turns, .. } = *arguments;
    let shape = ModelShape { layers, kv_heads, key_dim: head_dim, value_dim: head_dim };
    let budget = (arguments.memory as f64 * layers as f64 / arguments.of_layers as f64) as usize;
    let values = 2 * layers * kv_heads * head_dim * tokens;
    let stored = |bytes: usize| 8.0 * bytes as f64 / values as f64;
    println!(
        "{agents} agents x {tokens} tokens, {kv_heads} KV heads of {head_dim} channels, {layers} of {} layers: {budget} bytes, {:.3} bits a value",
        arguments.of_layers,
        stored(budget / agents)
    );
    let source = Source::new(arguments)?;

    let sample = source.cache(0)?;
    let kv = sample.layers.iter().filter_map(|layer| layer.attention_kv().transpose());
    let kv = kv.collect::<turbomoq::Result<Vec<_>>>()?;
    let scores = score_heads(&kv.iter().map(|kv| &kv.keys).collect::<Vec<_>>(), None)?;
    let table = Calibration::from_scores(shape, "the sample's keys", &scores)?;
    let plan = plan_within(&arguments.recipe, &table, tokens, budget / agents)?;
    let recipe = Recipe { plan: Some(plan), ..arguments.recipe.clone() };
    let each = parked_bytes(&recipe, &shape, tokens)?;
    println!("recipe {recipe}: {each} bytes an agent, {:.3} bits a value, everything counted", stored(each));

    let folder = tempfile::tempdir()?;
    let world = World {
        source,
        compressor: Compressor::new(recipe),
        pool: MemoryPool::with_spill(budget, Box::new(SpillFolder::open(folder.path())?))?,
        known: (0..agents).map(|_| Mutex::default()).collect(),
        fp16_bytes: 2 * values,
        park: Times::default(),
        hit: Times::default(),
        load: Times::default(),
        wrong: AtomicUsize::new(0),
    };
    world.on_threads(threads, agents.div_ceil(threads), |thread, number| {
        let agent = number * threads + thread;
        if agent < agents { world.park(agent) } else { Ok(()) }
    })?;
    let stats = world.pool.stats();
    check(stats.in_memory == agents, format!("{} agents are in memory", stats.in_memory))?;
    check(stats.spills == 0 && stats.on_disk == 0, format!("{} are on the disk", stats.on_disk))?;
    check(stats.saved_by_sharing == 0, format!("{} bytes are shared", stats.saved_by_sharing))?;
    check(stats.used == agents * each, format!("{} bytes are in use, as planned", stats.used))?;
    check(
        stats.used <= budget,
        format!("they are {:.2} % of {budget}", 100.0 * stats.used as f64 / budget as f64),
    )?;

    // With half of the memory whoever is resumed may be on the disk, and whoever is parked anew drives others there.
    world.pool.set_budget(budget / 2)?;
    world.on_threads(threads, turns, |thread, number| {
        let agent = (number * 31 + thread * 17 + number / 7) % agents;
        if number % 4 == 3 { world.park(agent) } else { world.resume(agent) }
    })?;
    let stats = world.pool.stats();
    check(stats.spills > 0, format!("{} times a cache went to the disk", stats.spills))?;
    check(stats.evictions == 0, format!("{} caches were lost", stats.evictions))?;
    check(stats.loads > 0, format!("{} times one came back from there", stats.loads))?;
    check(stats.used <= budget / 2, format!("{} bytes are in use of {}", stats.used, budget / 2))?;
    (0..agents).try_for_each(|agent| world.resume(agent))?;
    let wrong = world.wrong.load(Ordering::SeqCst);
    check(
        wrong == 0,
        format!("{wrong} resumed caches differ from the parked ones, {agents} agents resumed at the end"),
    )?;

    let copy = Times::default();
    let rows = vec![1u8; world.fp16_bytes];
    for _ in 0..20 {
        let start = Instant::now();
        black_box(black_box(&rows).clone());
        copy.add(start, world.fp16_bytes);
    }
    println!("\n{:<34} {:>6} {:>12} {:>12}", "ms a MiB of half-precision rows", "times", "p50", "p99");
    for [what, times, p50, p99] in [
        world.park.row("park (pack, others to the disk)"),
        world.hit.row("resume from memory (unpack)"),
        world.load.row("resume from the disk (unpack)"),
        copy.row("plain copy of the rows"),
    ] {
        println!("{what:<34} {times:>6} {p50:>12} {p99:>12}");
    }
    println!("{:.1} MiB of rows an agent", world.fp16_bytes as f64 / f64::from(1 << 20));
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agents: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
