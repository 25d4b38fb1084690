//! `turbomoq plan`: what a tier policy decides for a cache of a given length, and what that costs in real bytes; with `--budget` or
//! `--stored`, how bits are spread over heads.

use super::say::say;
use super::{RecipeArguments, budget, bytes, calibrate, print_json, table};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::cache::{CapacityPlan, LayerCache, LayerReport, LayerShape, OBSERVE_EVERY, PlanPart};
use turbomoq::internals::math::rng::Rng;
use turbomoq::policy::{ModelShape, TierPolicy};
use turbomoq::{Dtype, Error, Recipe, Result, Tensor};

/// Tokens of an append while measuring.
const CHUNK: usize = 1024;
/// Tokens of a parked cache whose bits a plan names.
const PARKED: usize = 4096;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache of mlx-lm that gives layers, heads, channels and tokens
    input: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeArguments,
    /// none, progressive or attention, with tiers if they are not the default ones: `progressive:1024=16/16,8192=4/4,rest=2/2`;
    /// `rest=drop` evicts what is older
    #[arg(long, default_value = "progressive")]
    policy: String,
    /// Tokens of the cache; for a budget of bits those of a parked one [default there: 4096]
    #[arg(long)]
    tokens: Option<usize>,
    /// Layers with keys and values
    #[arg(long, default_value_t = 36)]
    layers: usize,
    /// KV heads of a layer
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Channels of a key and of a value
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Also the longest context that fits into so many MiB
    #[arg(long)]
    budget_mib: Option<usize>,
    /// Fill a CPU cache of one layer with random tokens and show what it really holds
    #[arg(long)]
    measure: bool,
    #[command(flatten)]
    budget: budget::Arguments,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Output {
    policy: TierPolicy,
    recipe: String,
    shape: ModelShape,
    tokens: usize,
    parts: Vec<PlanPart>,
    bytes: usize,
    fp16_bytes: usize,
    /// fp16 bytes over bytes: how much longer a context of the same bytes is.
    expansion: f64,
    /// Longest context in the budget, with the tiers and in half precision.
    capacity: Option<[usize; 2]>,
    measured: Option<MeasuredLayer>,
}

#[derive(Serialize)]
struct MeasuredLayer {
    layer: Vec<PlanPart>,
    bytes: usize,
    expansion: f64,
    /// Greatest bytes held between two appends.
    peak_bytes: usize,
    /// Time of all appends: packing and every demotion.
    ms_per_token: f64,
    /// That less the time of the same appends without a policy.
    demotion_ms_per_token: f64,
    /// One step of attention over the full cache, four queries a KV head.
    attend_ms: f64,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let recipe = arguments.recipe.recipe()?;
    if arguments.budget.budget.or(arguments.budget.stored).is_some() {
        let tokens = count("tokens", arguments.tokens.unwrap_or(PARKED))?;
        return budget::run(arguments.input.as_deref(), &recipe, tokens, &arguments.budget, arguments.json);
    }
    let policy: TierPolicy = arguments.policy.parse()?;
    let (shape, tokens) = shape(arguments)?;
    let plan = CapacityPlan::new(&recipe, &policy, &shape)?;
    let capacity = arguments.budget_mib.map(|mib| {
        let budget = mib.saturating_mul(1 << 20);
        [plan.capacity(budget), budget / plan.fp16_bytes(1).max(1)]
    });
    let (parts, total) = (plan.parts(tokens), plan.bytes(tokens));
    let fp16_bytes = plan.fp16_bytes(tokens);
    let measured = match arguments.measure {
        true => Some(measure(arguments, &policy, &shape, tokens)?),
        false => None,
    };
    let output = Output {
        recipe: recipe.to_string(),
        expansion: fp16_bytes as f64 / total.max(1) as f64,
        bytes: total,
        policy,
        shape,
        tokens,
        parts,
        fp16_bytes,
        capacity,
        measured,
    };
    if arguments.json {
        print_json(&output);
    } else {
        print(&output);
    }
    Ok(())
}

fn shape(arguments: &Arguments) -> Result<(ModelShape, usize)> {
    let given = |tokens: usize| arguments.tokens.unwrap_or(tokens);
    let (shape, tokens) = match &arguments.input {
        None => {
            let d = arguments.head_dim;
            let (layers, kv_heads) = (arguments.layers, arguments.kv_heads);
            (ModelShape { layers, kv_heads, key_dim: d, value_dim: d }, given(131_072))
        }
        Some(path) => {
            let (layers, shape) = calibrate::plain_layers(path)?;
            (shape, given(layers[0].0.shape()[2]))
        }
    };
    for (field, n) in [("tokens", tokens), ("layers", shape.layers), ("kv_heads", shape.kv_heads)] {
        count(field, n)?;
    }
    Ok((shape, tokens))
}

/// A number of things that a model or a cache can have.
fn count(field: &'static str, n: usize) -> Result<usize> {
    match n {
        1..=0x400_0000 => Ok(n),
        _ => Err(Error::Unsupported { field, value: n.to_string(), reason: "1 to 2^26".into() }),
    }
}

/// Fills one layer and looks at its buffers.
fn measure(
    arguments: &Arguments,
    policy: &TierPolicy,
    shape: &ModelShape,
    tokens: usize,
) -> Result<MeasuredLayer> {
    let ModelShape { kv_heads, key_dim, value_dim, .. } = *shape;
    let recipe = arguments.recipe.recipe()?;
    let (_, plain, _) = fill(&recipe, &TierPolicy::None, shape, tokens)?;
    let (cache, seconds, peak_bytes) = fill(&recipe, policy, shape, tokens)?;
    let report = cache.report()?;
    let fp16 = kv_heads * tokens * 2 * (key_dim + value_dim);
    let q = random(&mut Rng::new(1, 1), [1, 4 * kv_heads, 1, key_dim])?;
    let mut attend_ms = f64::INFINITY;
    for _ in 0..3 {
        let clock = Instant::now();
        cache.attend(&q, &Rules::causal((key_dim as f32).powf(-0.5)))?;
        attend_ms = attend_ms.min(1e3 * clock.elapsed().as_secs_f64());
    }
    Ok(MeasuredLayer {
        layer: by_tier(&report),
        bytes: report.bytes(),
        expansion: fp16 as f64 / report.bytes() as f64,
        peak_bytes,
        ms_per_token: 1e3 * seconds / tokens as f64,
        demotion_ms_per_token: 1e3 * (seconds - plain) / tokens as f64,
        attend_ms,
    })
}

/// A layer with random tokens, the seconds of its appends, and the greatest bytes held between two of them.
fn fill(
    recipe: &Recipe,
    policy: &TierPolicy,
    shape: &ModelShape,
    tokens: usize,
) -> Result<(LayerCache<Cpu>, f64, usize)> {
    let ModelShape { kv_heads, key_dim, value_dim, .. } = *shape;
    let mut cache = LayerCache::new(Cpu, recipe, 0, LayerShape { key_dim, value_dim })?;
    cache = cache.with_tiers(policy, OBSERVE_EVERY)?;
    let mut rng = Rng::new(1, 0);
    let (mut seconds, mut peak_bytes, mut done) = (0.0, 0, 0);
    while done < tokens {
        let n = CHUNK.min(tokens - done);
        let k = random(&mut rng, [1, kv_heads, n, key_dim])?;
        let v = random(&mut rng, [1, kv_heads, n, value_dim])?;
        let clock = Instant::now();
        cache.append(&k, &v)?;
        seconds += clock.elapsed().as_secs_f64();
        peak_bytes = peak_bytes.max(cache.nbytes());
        done += n;
    }
    Ok((cache, seconds, peak_bytes))
}

fn random(rng: &mut Rng, shape: [usize; 4]) -> Result<Tensor> {
    let values = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_f32(Dtype::F16, &shape, values)
}

/// The segments of a report, those of one tier together.
fn by_tier(report: &LayerReport) -> Vec<PlanPart> {
    let mut parts: Vec<PlanPart> = vec![];
    for part in &report.parts {
        match parts.iter_mut().find(|p| p.tier == part.tier) {
            Some(sum) => {
                sum.tokens += part.tokens;
                sum.bytes += part.bytes;
            }
            None => parts.push(PlanPart {
                tier: part.tier.clone(),
                tokens: part.tokens,
                key_bits: part.key_bits,
                value_bits: part.value_bits,
                bytes: part.bytes,
            }),
        }
    }
    let bytes = report.table_bytes;
    parts.push(PlanPart { tier: "tables".into(), tokens: 0, key_bits: 32.0, value_bits: 32.0, bytes });
    parts
}

fn print(output: &Output) {
    let ModelShape { layers, kv_heads, key_dim, value_dim } = output.shape;
    say!("{} tokens, {layers} layers, {kv_heads} KV heads, {key_dim}/{value_dim} channels", output.tokens);
    say!("policy {}, recipe {}", output.policy, output.recipe);
    print_parts(&output.parts);
    say!(
        "{} against {} in fp16: {:.2} times the context",
        bytes(output.bytes as u64),
        bytes(output.fp16_bytes as u64),
        output.expansion
    );
    if let Some([tiers, fp16]) = output.capacity {
        say!("longest context in the budget: {tiers} tokens, {fp16} in fp16");
    }
    if let Some(m) = &output.measured {
        say!("\nmeasured, one layer on the CPU engine:");
        print_parts(&m.layer);
        say!(
            "{} held, at most {}; {:.2} times the context",
            bytes(m.bytes as u64),
            bytes(m.peak_bytes as u64),
            m.expansion
        );
        say!(
            "{:.3} ms a token for packing and demotion, {:.3} of it for demotion; {:.2} ms a step of attention",
            m.ms_per_token,
            m.demotion_ms_per_token,
            m.attend_ms
        );
    }
}

fn print_parts(parts: &[PlanPart]) {
    let mut table = table(&["tier", "tokens", "bits K / V", "bytes", "bytes a token"]);
    for p in parts {
        let each =
            if p.tokens == 0 { "-".into() } else { format!("{:.1}", p.bytes as f64 / p.tokens as f64) };
        let bits = format!("{} / {}", p.key_bits, p.value_bits);
        table.add_row([p.tier.clone(), p.tokens.to_string(), bits, p.bytes.to_string(), each]);
    }
    say!("{table}");
}
