//! `turbomoq compare`: the recipes side by side on one real cache.

use super::say::{complain, say};
use super::verify::{RoundTrip, rows};
use super::{EngineName, print_json, table};
use serde::Serialize;
use std::path::PathBuf;
use turbomoq::Side;
use turbomoq::prompt_cache::PromptCache;
use turbomoq::quality::QualityRow;
use turbomoq::{Error, Recipe, Result};

/// What is compared where no recipe is named: the presets at four bits, then at fewer.
const RECIPES: [&str; 15] = [
    "mlx-affine@4",
    "uniform@4",
    "rotation-only@4",
    "turbomoq@4",
    "turboquant-prod@4",
    "turboquant-mse@4",
    "best@4",
    "mlx-affine@3",
    "turboquant-mse@3",
    "best@3",
    "mlx-affine@2",
    "kivi@2",
    "turboquant-mse@2",
    "best@2",
    "best@1",
];

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache that mlx-lm 0.31 or 0.32 wrote
    input: PathBuf,
    /// Recipes, instead of the presets at 4, 3, 2 and 1 bits
    #[arg(long, num_args = 1..)]
    recipes: Vec<String>,
    /// First tokens that stay exact, for every recipe
    #[arg(long, default_value_t = 0)]
    sinks: usize,
    /// Newest tokens that stay exact, for every recipe
    #[arg(long, default_value_t = 0)]
    window: usize,
    /// Where the stages run
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineName,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Line {
    recipe: String,
    key_cosine: f64,
    value_cosine: f64,
    key_logit_correlation: f64,
    key_bits: f64,
    value_bits: f64,
    ratio: f64,
    encode_ms: f64,
    decode_ms: f64,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let cache = PromptCache::read(&arguments.input)?;
    let names: Vec<&str> = match arguments.recipes.is_empty() {
        true => RECIPES.to_vec(),
        false => arguments.recipes.iter().map(String::as_str).collect(),
    };
    let mut lines = vec![];
    for name in names {
        let recipe = Recipe { sinks: arguments.sinks, window: arguments.window, ..name.parse()? };
        match arguments.engine.run(RoundTrip { cache: &cache, recipe }) {
            Ok((archive, restored, ms)) => {
                let rows = rows(&cache, &restored, &archive, None)?;
                let mean = |side: Side, f: fn(&QualityRow) -> f64| {
                    let of: Vec<f64> = rows.iter().filter(|r| r.side == side).map(f).collect();
                    of.iter().sum::<f64>() / of.len().max(1) as f64
                };
                let stats = archive.stats();
                lines.push(Line {
                    recipe: name.into(),
                    key_cosine: mean(Side::Key, |r| r.cosine),
                    value_cosine: mean(Side::Value, |r| r.cosine),
                    key_logit_correlation: mean(Side::Key, |r| r.logit_correlation),
                    key_bits: stats.avg_k_bits,
                    value_bits: stats.avg_v_bits,
                    ratio: stats.compression_ratio,
                    encode_ms: ms[0],
                    decode_ms: ms[1],
                });
            }
            // A preset that has no form for this head dim is left out, and said so.
            Err(error @ Error::Unsupported { .. }) if arguments.recipes.is_empty() => {
                complain!("{name}: {error}")
            }
            Err(error) => return Err(error),
        }
    }
    if arguments.json {
        print_json(&lines);
        return Ok(());
    }
    let mut table =
        table(&["recipe", "key cosine", "value cosine", "key logits", "bits K / V", "ratio", "ms"]);
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    for l in &lines {
        table.add_row([
            l.recipe.clone(),
            format!("{:.4}", l.key_cosine),
            format!("{:.4}", l.value_cosine),
            format!("{:.4}", l.key_logit_correlation),
            format!("{:.2} / {:.2}", l.key_bits, l.value_bits),
            format!("{:.2}", l.ratio),
            format!("{:.0} / {:.0}", l.encode_ms, l.decode_ms),
        ]);
    }
    say!("{table}");
    Ok(())
}
