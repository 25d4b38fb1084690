//! `turbomoq plan --budget` and `--stored`: how many bits every layer, KV head and side gets at a budget, as a table, a picture and a
//! recipe.

use super::calibrate::Scored;
use super::screen::{Answer, Page, Table, commas};
use serde::Serialize;
use std::path::{Path, PathBuf};
use turbomoq::BitPlan;
use turbomoq::Side;
use turbomoq::allocation::calibration::{Calibration, Unit};
use turbomoq::allocation::{loss, plan};
use turbomoq::archive::{parked_bytes, plan_within};
use turbomoq::policy::ModelShape;
use turbomoq::{Error, Recipe, Result};

/// Columns of a head's name before its bars.
const MARGIN: usize = 11;

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

/// Bits of every layer, head and side.
#[derive(Serialize)]
pub struct Output {
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
    #[serde(skip)]
    plan: BitPlan,
    #[serde(skip)]
    uniform: u8,
}

#[derive(Serialize)]
struct Parked {
    tokens: usize,
    bytes: usize,
    bits: f64,
}

/// Spreads a budget; `tokens` are those of a parked cache.
pub fn compute(
    input: Option<&Path>,
    recipe: &Recipe,
    tokens: usize,
    arguments: &Arguments,
) -> Result<Output> {
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
    Ok(Output {
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
        plan,
        uniform,
    })
}

impl Answer for Output {
    fn show(&self, page: &mut Page) {
        page.line(format_args!("prices: {}", self.source));
        for side in [Side::Key, Side::Value] {
            page.gap();
            self.show_side(page, side);
        }
        page.gap();
        page.line(format_args!(
            "{:.3} bits a key and {:.3} a value of the codes; loss by the table {:.3e}, with {} bits everywhere {:.3e}",
            self.mean[0], self.mean[1], self.loss, self.uniform, self.uniform_loss
        ));
        if let Some(Parked { tokens, bytes, bits }) = self.parked {
            page.line(format_args!(
                "{bits:.3} stored bits a value in a parked cache of {} tokens ({} bytes), everything counted",
                commas(tokens),
                commas(bytes)
            ));
        }
        page.gap();
        page.line("recipe:");
        page.line(self.recipe.name());
    }
}

impl Output {
    /// The bits of a side: bars in a block with a column for each layer and a row for each head, or all numbers.
    fn show_side(&self, page: &mut Page, side: Side) {
        let ModelShape { layers, kv_heads, .. } = self.shape;
        let bits = |layer: usize, head: usize| self.plan.side(side).head(layer, head).unwrap_or_default();
        if page.verbose {
            let mut table = Table::new(&["layer".to_string(), format!("{side} bits of each KV head")]);
            for layer in 0..layers {
                let row: Vec<String> = (0..kv_heads).map(|head| bits(layer, head).to_string()).collect();
                table.row([layer.to_string(), row.join(" ")]);
            }
            return page.table(&table);
        }
        let uniform = (0..layers).all(|layer| (1..kv_heads).all(|head| bits(layer, head) == bits(layer, 0)));
        let heads = if uniform { 1 } else { kv_heads };
        let room = page.width().unwrap_or(usize::MAX).saturating_sub(MARGIN).max(1);
        for start in (0..layers).step_by(room) {
            let end = layers.min(start + room);
            page.line(format_args!("{side} bits, layers {start} to {}, ▁ 1 to █ 8", end - 1));
            for head in 0..heads {
                let name = if uniform { "all heads".into() } else { format!("head {head}") };
                let bars: String = (start..end).map(|layer| bar(bits(layer, head))).collect();
                page.as_is(format_args!("{name:<MARGIN$}{bars}"));
            }
        }
    }
}

/// A bar as high as the bits.
fn bar(bits: u8) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    BARS[usize::from(bits).clamp(1, 8) - 1]
}
