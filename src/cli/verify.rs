//! `turbomoq verify`: packs a prompt cache in memory, unpacks it, and shows what every layer lost.

use super::say::say;
use super::{EngineName, OnEngine, RecipeArguments, bytes, print_json, progress, table};
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
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
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

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
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
    let report = QualityReport {
        file_bytes,
        encode_ms,
        decode_ms,
        ..QualityReport::new(archive.recipe.to_string(), rows, archive.stats())
    };
    if arguments.json {
        print_json(&report);
        return Ok(());
    }
    show(&report);
    Ok(())
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

fn show(report: &QualityReport) {
    let mut table = table(&["layer", "side", "cosine", "relative MSE", "logit correlation"]);
    let cells = |name: &str, side: String, rows: &[&QualityRow]| {
        let mean =
            |f: fn(&QualityRow) -> f64| rows.iter().map(|r| f(r)).sum::<f64>() / rows.len().max(1) as f64;
        let figures = [mean(|r| r.cosine), mean(|r| r.relative_mse), mean(|r| r.logit_correlation)];
        let mut cells = vec![name.to_string(), side];
        cells.extend(figures.iter().zip([5, 5, 5]).map(|(x, places)| format!("{x:.places$}")));
        cells
    };
    for row in &report.layers {
        table.add_row(cells(&row.layer, row.side.to_string(), &[row]));
    }
    for side in [Side::Key, Side::Value] {
        let rows: Vec<&QualityRow> = report.layers.iter().filter(|r| r.side == side).collect();
        table.add_row(cells("mean", side.to_string(), &rows));
    }
    say!("{table}");
    say!("recipe: {}", report.recipe);
    say!(
        "{} in memory, {} as a file, {} in fp16: ratio {:.2}, {:.2} bits a key scalar, {:.2} a value scalar",
        bytes(report.reported_bytes as u64),
        bytes(report.file_bytes),
        bytes(report.fp16_bytes as u64),
        report.ratio,
        report.key_bits,
        report.value_bits
    );
    say!("packed in {:.0} ms, unpacked in {:.0} ms", report.encode_ms, report.decode_ms);
}
