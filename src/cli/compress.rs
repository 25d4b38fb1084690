//! `turbomoq compress`: a prompt cache into a compressed file.

use super::screen::{Answer, Page, Table, commas, mib};
use super::{EngineName, OnEngine, RecipeArguments, beside, bytes, progress};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;
use turbomoq::Engine;
use turbomoq::archive::Archive;
use turbomoq::internals::io::files;
use turbomoq::prompt_cache::PromptCache;
use turbomoq::{CompressionStats, Compressor};
use turbomoq::{Error, Recipe, Result};

/// Tokens of the longer contexts whose cost is shown.
const LENGTHS: [usize; 2] = [8192, 32768];

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

/// What packing has given, and what the same recipe costs at other lengths.
#[derive(Serialize)]
pub struct Packed {
    output: PathBuf,
    /// The recipe in full.
    recipe: String,
    /// Its short text.
    name: String,
    engine: &'static str,
    packed_layers: usize,
    layers: usize,
    /// Tokens of the longest packed layer.
    tokens: usize,
    /// Its exact first tokens, packed tokens and exact newest tokens.
    split: [usize; 3],
    reported_bytes: usize,
    file_bytes: u64,
    fp16_bytes: usize,
    ratio: f64,
    key_bits: f64,
    value_bits: f64,
    encode_ms: f64,
    /// The cost of longer caches by the same recipe.
    at: Vec<Cost>,
}

/// Bytes of a cache of so many tokens.
#[derive(Serialize)]
struct Cost {
    tokens: usize,
    fp16_bytes: usize,
    bytes: usize,
    ratio: f64,
    key_bits: f64,
    value_bits: f64,
}

impl Cost {
    fn new(tokens: usize, stats: CompressionStats) -> Cost {
        Cost {
            tokens,
            fp16_bytes: stats.fp16_bytes,
            bytes: stats.bytes,
            ratio: stats.compression_ratio,
            key_bits: stats.avg_k_bits,
            value_bits: stats.avg_v_bits,
        }
    }
}

/// Packs, writes the file and counts.
pub fn compute(arguments: &Arguments) -> Result<Packed> {
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
    let packed = archive.packed();
    let longest = packed.iter().map(|(_, _, layer)| &layer.key).max_by_key(|key| key.shape[2]);
    let tokens = longest.map_or(0, |key| key.shape[2]);
    let stats = archive.stats();
    let longer = LENGTHS.into_iter().filter(|length| *length > tokens && tokens > 0);
    Ok(Packed {
        output,
        recipe: archive.recipe.to_string(),
        name: archive.recipe.name(),
        engine,
        packed_layers: packed.len(),
        layers: archive.layers.len(),
        tokens,
        split: longest.map_or([0; 3], |key| key.split()),
        reported_bytes: stats.bytes,
        file_bytes,
        fp16_bytes: stats.fp16_bytes,
        ratio: stats.compression_ratio,
        key_bits: stats.avg_k_bits,
        value_bits: stats.avg_v_bits,
        encode_ms,
        at: longer.map(|length| Ok(Cost::new(length, archive.stats_at(length)?))).collect::<Result<_>>()?,
    })
}

impl Answer for Packed {
    fn show(&self, page: &mut Page) {
        page.line(format_args!(
            "{} of {} layers packed as {} into {} ({})",
            self.packed_layers,
            self.layers,
            if page.verbose { &self.recipe } else { &self.name },
            self.output.display(),
            bytes(self.file_bytes)
        ));
        if self.packed_layers == 0 {
            return;
        }
        page.gap();
        let mut table = Table::new(&["tokens", ">fp16 MiB", ">packed MiB", ">ratio", ">bits K / V"]);
        let mut row = |tokens: String, fp16: usize, packed: usize, ratio: f64, bits: [f64; 2]| {
            let bits = format!("{:.2} / {:.2}", bits[0], bits[1]);
            table.row([tokens, mib(fp16), mib(packed), format!("{ratio:.2}"), bits]);
        };
        let now = format!("{}, this cache", commas(self.tokens));
        row(now, self.fp16_bytes, self.reported_bytes, self.ratio, [self.key_bits, self.value_bits]);
        for cost in &self.at {
            let bits = [cost.key_bits, cost.value_bits];
            row(commas(cost.tokens), cost.fp16_bytes, cost.bytes, cost.ratio, bits);
        }
        page.table(&table);
        page.gap();
        let [sinks, packed, window] = self.split;
        if sinks + window > 0 {
            page.line(format_args!(
                "Exact in every layer: the first {sinks} tokens and the newest {window}; {packed} are packed here. The rows \
                 below this cache are the same recipe in longer contexts."
            ));
        }
        page.line(format_args!("Packed in {:.0} ms on the {} engine.", self.encode_ms, self.engine));
    }
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
