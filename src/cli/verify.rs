//! `turbomoq verify`: packs a prompt cache in memory, unpacks it, and shows what every layer lost.

use super::screen::{Answer, Page, Table};
use super::{EngineName, OnEngine, RecipeArguments, bytes, progress};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use turbomoq::Compressor;
use turbomoq::Engine;
use turbomoq::Side;
use turbomoq::archive::{Archive, Entry};
use turbomoq::prompt_cache::{Layer, PromptCache};
use turbomoq::quality::{QualityReport, QualityRow, compare};
use turbomoq::{Error, Recipe, Result, Tensor};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache that mlx-lm 0.31 or 0.32 wrote
    input: PathBuf,
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Real queries for the logit correlation: a safetensors file with one float tensor [B, Hq, L, D] a layer, named by its number
    #[arg(long)]
    queries: Option<PathBuf>,
    /// Where the stages run
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineName,
}

/// Packs and unpacks a cache; gives the milliseconds of both.
pub struct RoundTrip<'a> {
    /// The cache.
    pub cache: &'a PromptCache,
    /// How it is packed.
    pub recipe: Recipe,
}

impl OnEngine for RoundTrip<'_> {
    type Output = (Archive, PromptCache, [f64; 2]);
    fn size(&self) -> [usize; 2] {
        super::size(self.cache)
    }
    fn run<E: Engine>(self, engine: E) -> Result<Self::Output> {
        let compressor = Compressor::with_engine(self.recipe, engine);
        let bar = progress(2 * self.cache.layers.len(), "packing and unpacking");
        let start = Instant::now();
        let archive = Archive::compress(self.cache, &compressor, || bar.inc(1))?;
        let packed = start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        let restored = archive.restore(&compressor, || bar.inc(1))?;
        let unpacked = start.elapsed().as_secs_f64() * 1e3;
        bar.finish_and_clear();
        Ok((archive, restored, [packed, unpacked]))
    }
}

/// Packs, unpacks and compares.
pub fn compute(arguments: &Arguments) -> Result<QualityReport> {
    let recipe = arguments.recipe.recipe()?;
    let cache = PromptCache::read(&arguments.input)?;
    let (archive, restored, [encode_ms, decode_ms]) =
        arguments.engine.run(RoundTrip { cache: &cache, recipe })?;
    let queries = arguments.queries.as_deref().map(turbomoq::archive::read_tensors).transpose()?;
    let rows = rows(&cache, &restored, &archive, queries.as_ref())?;
    // The file's bytes are those of a real file, written where temporary files go.
    let folder = std::env::temp_dir();
    let file =
        tempfile::NamedTempFile::new_in(&folder).map_err(|source| Error::Io { path: folder, source })?;
    let file_bytes = archive.write(file.path())?;
    Ok(QualityReport {
        file_bytes,
        encode_ms,
        decode_ms,
        ..QualityReport::new(archive.recipe.to_string(), rows, archive.stats())
    })
}

/// One row a packed layer and side. `queries` are by number of the layer.
pub fn rows(
    before: &PromptCache,
    after: &PromptCache,
    archive: &Archive,
    queries: Option<&BTreeMap<String, Tensor>>,
) -> Result<Vec<QualityRow>> {
    let mut rows = vec![];
    let layers = before.layers.iter().zip(&after.layers).zip(&archive.layers).enumerate();
    for (i, ((before, after), entry)) in layers {
        let queries = queries.and_then(|q| q.get(&i.to_string()));
        add_rows(i.to_string(), before, after, entry, queries, &mut rows)?;
    }
    Ok(rows)
}

fn add_rows(
    at: String,
    before: &Layer,
    after: &Layer,
    entry: &Entry,
    queries: Option<&Tensor>,
    rows: &mut Vec<QualityRow>,
) -> Result<()> {
    match (before, after, entry) {
        (Layer::List(a), Layer::List(b), Entry::List(entries)) => {
            for (i, ((a, b), entry)) in a.iter().zip(b).zip(entries).enumerate() {
                add_rows(format!("{at}.{i}"), a, b, entry, queries, rows)?;
            }
        }
        (_, _, Entry::Packed { layer, .. }) => {
            if let (Some(a), Some(b)) = (before.attention_kv()?, after.attention_kv()?) {
                rows.push(compare(at.clone(), Side::Key, &layer.key, &a.keys, &b.keys, queries)?);
                rows.push(compare(at, Side::Value, &layer.value, &a.values, &b.values, None)?);
            }
        }
        _ => {}
    }
    Ok(())
}

impl Answer for QualityReport {
    fn show(&self, page: &mut Page) {
        let name = self.recipe.parse::<Recipe>().map_or_else(|_| self.recipe.clone(), |r| r.name());
        page.line(format_args!("recipe: {}", if page.verbose { &self.recipe } else { &name }));
        page.gap();
        let head =
            ["layer", ">key cosine", ">relative MSE", ">logit correlation", ">value cosine", ">relative MSE"];
        let mut table = Table::new(&head);
        let mut row = |name: &str, keys: &[&QualityRow], values: &[&QualityRow]| {
            let mean = |rows: &[&QualityRow], f: fn(&QualityRow) -> f64| {
                format!("{:.5}", rows.iter().map(|r| f(r)).sum::<f64>() / rows.len().max(1) as f64)
            };
            table.row([
                name.to_string(),
                mean(keys, |r| r.cosine),
                mean(keys, |r| r.relative_mse),
                mean(keys, |r| r.logit_correlation),
                mean(values, |r| r.cosine),
                mean(values, |r| r.relative_mse),
            ]);
        };
        let of = |side: Side| self.layers.iter().filter(|r| r.side == side).collect::<Vec<_>>();
        let (keys, values) = (of(Side::Key), of(Side::Value));
        for (key, value) in keys.iter().zip(&values) {
            row(&key.layer, &[key], &[value]);
        }
        row("mean", &keys, &values);
        page.table(&table);
        page.gap();
        page.line(format_args!(
            "{} in memory, {} as a file, {} in fp16: ratio {:.2}, stored bits {:.2} a key channel and {:.2} a value channel",
            bytes(self.reported_bytes as u64),
            bytes(self.file_bytes),
            bytes(self.fp16_bytes as u64),
            self.ratio,
            self.key_bits,
            self.value_bits
        ));
        page.line(format_args!("packed in {:.0} ms, unpacked in {:.0} ms", self.encode_ms, self.decode_ms));
    }
}
