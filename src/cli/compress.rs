//! `turbomoq compress`: a prompt cache into a compressed file.

use super::say::say;
use super::{EngineName, OnEngine, RecipeArguments, beside, bytes, print_json, progress, table};
use std::path::PathBuf;
use std::time::Instant;
use turbomoq::Compressor;
use turbomoq::Engine;
use turbomoq::archive::Archive;
use turbomoq::internals::io::files;
use turbomoq::prompt_cache::PromptCache;
use turbomoq::{Error, Recipe, Result};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache that mlx-lm 0.31 or 0.32 wrote
    input: PathBuf,
    /// Compressed file [default: the input's name with the ending .tmq]
    #[arg(short, long)]
    output: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Compressed file from which the input was restored: tokens that are unchanged keep their codes, whatever the recipe
    #[arg(long, value_name = "FILE")]
    after: Option<PathBuf>,
    /// Pack layers that hold different numbers of tokens too
    #[arg(long)]
    uneven: bool,
    /// Where the stages run
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineName,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
}

struct Pack<'a> {
    cache: &'a PromptCache,
    recipe: Recipe,
    before: Option<Archive>,
}

impl OnEngine for Pack<'_> {
    type Output = (Archive, &'static str);
    fn size(&self) -> [usize; 2] {
        super::size(self.cache)
    }
    fn run<E: Engine>(self, engine: E) -> Result<Self::Output> {
        let name = engine.name();
        let bar = progress(self.cache.layers.len(), "packing");
        let compressor = Compressor::with_engine(self.recipe, engine);
        let archive = Archive::compress_after(self.before.as_ref(), self.cache, &compressor, || bar.inc(1))?;
        bar.finish_and_clear();
        Ok((archive, name))
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let output = arguments.output.clone().unwrap_or_else(|| beside(&arguments.input, ".tmq"));
    files::distinct(&arguments.input, &output)?;
    let recipe = arguments.recipe.recipe()?;
    let cache = PromptCache::read_signed(&arguments.input)?;
    if !arguments.uneven {
        even(&cache)?;
    }
    let before = arguments.after.as_ref().map(Archive::read).transpose()?;
    let start = Instant::now();
    let (archive, engine) = arguments.engine.run(Pack { cache: &cache, recipe, before })?;
    let encode_ms = start.elapsed().as_secs_f64() * 1e3;
    let file_bytes = archive.write(&output)?;
    let stats = archive.stats();
    if arguments.json {
        print_json(&serde_json::json!({
            "output": output,
            "recipe": archive.recipe.to_string(),
            "engine": engine,
            "packed_layers": archive.packed().len(),
            "layers": archive.layers.len(),
            "reported_bytes": stats.bytes,
            "file_bytes": file_bytes,
            "fp16_bytes": stats.fp16_bytes,
            "ratio": stats.compression_ratio,
            "key_bits": stats.avg_k_bits,
            "value_bits": stats.avg_v_bits,
            "encode_ms": encode_ms,
        }));
        return Ok(());
    }
    let mut table = table(&["", "fp16", "packed", "ratio"]);
    table.add_row([
        format!("{} of {} layers", archive.packed().len(), archive.layers.len()),
        bytes(stats.fp16_bytes as u64),
        bytes(stats.bytes as u64),
        format!("{:.2}", stats.compression_ratio),
    ]);
    say!("{table}");
    if let Some((_, _, layer)) = archive.packed().first() {
        let [sinks, packed, window] = layer.key.split();
        say!("first packed layer: {sinks} exact sinks, {packed} packed tokens, {window} exact in the window");
    }
    say!(
        "stored bits: {:.2} a key scalar, {:.2} a value scalar, everything counted",
        stats.avg_k_bits,
        stats.avg_v_bits
    );
    say!("recipe: {}", archive.recipe);
    say!("{} ({}), {encode_ms:.0} ms on the {engine} engine", output.display(), bytes(file_bytes));
    Ok(())
}

/// Refuses layers with different numbers of tokens, and says how to pack them nevertheless.
pub fn even(cache: &PromptCache) -> Result<()> {
    cache.check_even().map_err(|error| match error {
        Error::Unsupported { field, value, reason } => {
            let reason = reason.replace("ask for uneven layers", "use --uneven; `inspect` shows all offsets");
            Error::Unsupported { field, value, reason }
        }
        other => other,
    })
}
