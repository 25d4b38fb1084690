//! `turbomoq plan --budget` and `--stored`: how many bits every layer, KV head and side gets at a budget, as a table, a picture and a
//! recipe.

use super::calibrate::Scored;
use super::say::say;
use super::{print_json, table};
use serde::Serialize;
use std::path::{Path, PathBuf};
use turbomoq::BitPlan;
use turbomoq::Side;
use turbomoq::allocation::calibration::{Calibration, Unit};
use turbomoq::allocation::{loss, plan};
use turbomoq::archive::{parked_bytes, plan_within};
use turbomoq::policy::ModelShape;
use turbomoq::{Error, Recipe, Result};

/// The part of the arguments that concerns a budget.
#[derive(clap::Args)]
pub struct Arguments {
    /// Spread so many bits a value (codes alone) over layers, heads and sides
    #[arg(long, value_name = "BITS")]
    pub budget: Option<f64>,
    /// The same by layer, so that a parked cache of `--tokens` tokens has so many bits a value, everything counted as the pool counts it
    #[arg(long, value_name = "BITS", conflicts_with_all = ["budget", "by", "rule", "least", "most"])]
    pub stored: Option<f64>,
    /// Table of prices; without it the heads of the prompt cache are scored
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// What shares a width
    #[arg(long, value_enum, default_value = "head")]
    by: By,
    /// How the bits are spread
    #[arg(long, value_enum, default_value = "prices")]
    rule: Rule,
    /// Fewest bits of a head
    #[arg(long, default_value_t = 1)]
    least: u8,
    /// Most bits of a head
    #[arg(long, default_value_t = 8)]
    most: u8,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum By {
    /// Every KV head has its own
    Head,
    /// The heads of a layer share one, as compressed files need it
    Layer,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Rule {
    /// Where a bit saves most
    Prices,
    /// The original's: hub heads 8 bits, the periphery 1 or 2
    Hubs,
}

#[derive(Serialize)]
struct Output {
    source: String,
    shape: ModelShape,
    budget: f64,
    /// Bytes of a parked cache, and bits a value with everything counted; of plans by layer.
    parked: Option<Parked>,
    /// Mean bits of a key and of a value, codes alone.
    mean: [f64; 2],
    key_bits: String,
    value_bits: String,
    /// Loss by the table, with the plan and with the whole bits below the budget everywhere.
    loss: f64,
    uniform_loss: f64,
    recipe: Recipe,
}

#[derive(Serialize)]
struct Parked {
    tokens: usize,
    bytes: usize,
    bits: f64,
}

/// Runs the command for a budget; `tokens` are those of a parked cache.
pub fn run(
    input: Option<&Path>,
    recipe: &Recipe,
    tokens: usize,
    arguments: &Arguments,
    json: bool,
) -> Result<()> {
    let budget = arguments.budget.or(arguments.stored).unwrap_or_default();
    let cache = input.map(Scored::read).transpose()?;
    let calibration = match (&arguments.calibration, &cache) {
        (Some(path), _) => {
            let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.clone(), source })?;
            let named = |e: Error| Error::Format { path: path.clone(), detail: e.to_string() };
            Calibration::from_bytes(&bytes).map_err(named)?
        }
        (None, Some(cache)) => cache.table()?,
        (None, None) => {
            let reason = "give a prompt cache or --calibration".into();
            return Err(Error::Unsupported { field: "budget", value: budget.to_string(), reason });
        }
    };
    if let Some(cache) = &cache {
        calibration.check(&cache.shape)?;
    }
    let parts = calibration.parts();
    let shape = *calibration.shape();
    let values = shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim) * tokens;
    let plan = match arguments.rule {
        Rule::Prices if arguments.stored.is_some() => {
            plan_within(recipe, &calibration, tokens, (budget * values as f64 / 8.0) as usize)?
        }
        Rule::Prices => {
            let unit = if arguments.by == By::Head { Unit::Head } else { Unit::Layer };
            calibration.plan(unit, budget, arguments.least, arguments.most)?
        }
        Rule::Hubs => {
            let Some(cache) = &cache else {
                let reason = "is scored on a prompt cache; give one".into();
                return Err(Error::Unsupported { field: "rule", value: "hubs".into(), reason });
            };
            let bits = cache.scores()?.hubs_and_periphery(budget)?;
            plan(&parts, &[bits.clone(), bits].concat())?
        }
    };
    let widths: Vec<u8> = parts.iter().filter_map(|p| plan.side(p.side).head(p.layer, p.head)).collect();
    let uniform = (budget.floor().clamp(1.0, 8.0)) as u8;
    let mean = [Side::Key, Side::Value].map(|side| {
        let mine = parts.iter().zip(&widths).filter(|(p, _)| p.side == side);
        let (sum, count) = mine.fold((0.0, 0), |(sum, n), (_, &b)| (sum + f64::from(b), n + 1));
        sum / f64::from(count)
    });
    let planned = Recipe { plan: Some(plan.clone()), ..recipe.clone() };
    // Heads of one layer with widths of their own are for live caches only.
    let parked = parked_bytes(&planned, &shape, tokens).ok();
    let output = Output {
        source: calibration.source().into(),
        shape,
        budget,
        parked: parked.map(|bytes| Parked { tokens, bytes, bits: 8.0 * bytes as f64 / values as f64 }),
        mean,
        key_bits: plan.key.to_string(),
        value_bits: plan.value.to_string(),
        loss: loss(&parts, &widths),
        uniform_loss: loss(&parts, &vec![uniform; parts.len()]),
        recipe: planned,
    };
    if json {
        print_json(&output);
    } else {
        print(&output, &plan, uniform);
    }
    Ok(())
}

fn print(output: &Output, plan: &BitPlan, uniform: u8) {
    let ModelShape { layers, kv_heads, .. } = output.shape;
    say!("prices: {}", output.source);
    let mut rows = table(&["layer", "key bits", "", "value bits", ""]);
    for layer in 0..layers {
        let side = |side: Side| -> (String, String) {
            let bits: Vec<u8> = (0..kv_heads).filter_map(|h| plan.side(side).head(layer, h)).collect();
            let text = bits.iter().map(u8::to_string).collect::<Vec<_>>().join(" ");
            (text, bits.iter().map(|&b| bar(b)).collect())
        };
        let ((keys, key_bars), (values, value_bars)) = (side(Side::Key), side(Side::Value));
        rows.add_row([layer.to_string(), keys, key_bars, values, value_bars]);
    }
    say!("{rows}");
    say!(
        "{:.3} bits a key and {:.3} a value of the codes; loss by the table {:.3e}, with {uniform} bits everywhere {:.3e}",
        output.mean[0],
        output.mean[1],
        output.loss,
        output.uniform_loss
    );
    if let Some(Parked { tokens, bytes, bits }) = output.parked {
        say!(
            "{bits:.3} stored bits a value in a parked cache of {tokens} tokens ({bytes} bytes), everything counted"
        );
    }
    say!("{}", output.recipe);
}

/// A bar as high as the bits.
fn bar(bits: u8) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    BARS[usize::from(bits).clamp(1, 8) - 1]
}
