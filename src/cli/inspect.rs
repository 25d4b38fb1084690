//! `turbomoq inspect`: what a prompt cache or a compressed file holds, layer by layer.

use super::bytes;
use super::say::name;
use super::screen::{Answer, Page, Table, commas, mib, runs, span};
use serde::Serialize;
use std::path::PathBuf;
use turbomoq::CompressedSide;
use turbomoq::archive::{Archive, Entry};
use turbomoq::prompt_cache::{Layer, PromptCache, place_in_layer, usual_offsets};
use turbomoq::{Error, Result, Tensor};

/// Characters of metadata beyond which only their number is shown.
const LONG: usize = 120;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache or compressed file
    input: PathBuf,
    /// Do not compare checksums
    #[arg(long)]
    no_verify: bool,
}

#[derive(Serialize)]
struct LayerLine {
    layer: String,
    class: String,
    /// Tokens that the layer holds.
    tokens: Option<usize>,
    /// Position of the next token.
    offset: Option<usize>,
    /// Whether that is another than in most layers.
    odd: bool,
    keys: String,
    values: String,
    /// Keys and values without seeds, for people.
    #[serde(skip)]
    short: [String; 2],
    bytes: usize,
}

/// What a file holds.
#[derive(Serialize)]
pub struct Contents {
    format: &'static str,
    layout: String,
    recipe: Option<String>,
    /// Short text of the recipe.
    name: Option<String>,
    metadata: std::collections::BTreeMap<String, String>,
    bytes: usize,
    layers: Vec<LayerLine>,
}

/// Reads the file.
pub fn compute(arguments: &Arguments) -> Result<Contents> {
    // A compressed file says so itself; what it is not must be a prompt cache. Both errors are shown if it is neither.
    let read = if arguments.no_verify { Archive::read_unverified } else { Archive::read };
    let mut contents = match read(&arguments.input) {
        Ok(archive) => of_archive(&archive),
        Err(not_archive) => match PromptCache::read(&arguments.input) {
            Ok(cache) => of_cache(&cache),
            Err(Error::Format { path, detail }) => {
                return Err(Error::Format {
                    path,
                    detail: format!("{detail}; and as a compressed file: {not_archive}"),
                });
            }
            Err(other) => return Err(other),
        },
    };
    let offsets = contents.layers.iter().filter_map(|row| Some((row.layer.as_str(), row.offset?)));
    let usual = usual_offsets(offsets);
    let odd = |row: &LayerLine| row.offset.is_some_and(|offset| usual[place_in_layer(&row.layer)] != offset);
    let odd: Vec<bool> = contents.layers.iter().map(odd).collect();
    contents.layers.iter_mut().zip(odd).for_each(|(row, odd)| row.odd = odd);
    Ok(contents)
}

impl Answer for Contents {
    fn show(&self, page: &mut Page) {
        page.line(format_args!(
            "{}, layout of mlx-lm {}, {} in memory",
            self.format,
            self.layout,
            bytes(self.bytes as u64)
        ));
        if let (Some(recipe), Some(short)) = (&self.recipe, &self.name) {
            page.line(format_args!("recipe: {}", if page.verbose { recipe } else { short }));
        }
        for (key, value) in &self.metadata {
            let (key, value, length) = (name(key), name(value), value.chars().count());
            match page.verbose || length <= LONG {
                true => page.line(format_args!("{key}: {value}")),
                false => page.line(format_args!("{key}: {} characters, see --verbose", commas(length))),
            }
        }
        page.gap();
        self.show_layers(page);
        if self.layers.iter().any(|row| row.odd) {
            page.gap();
            page.line(
                "(!) not at the token of the other layers: `compress` takes such a cache with --uneven only",
            );
        }
    }
}

impl Contents {
    /// A row for each run of equal layers, or for each layer with all that is known of it.
    fn show_layers(&self, page: &mut Page) {
        let head = ["layers", "class", ">tokens", ">offset", "keys", "values", ">MiB a layer"];
        let mut table = Table::new(&head);
        let runs = match page.verbose {
            true => (0..self.layers.len()).map(|i| (i, i)).collect(),
            false => runs(&self.layers, |a, b| a.looks() == b.looks()),
        };
        for (first, last) in runs {
            let row = &self.layers[first];
            let shown = |n: Option<usize>| n.map_or("-".into(), |n| n.to_string());
            let (keys, values) = match page.verbose {
                true => (&row.keys, &row.values),
                false => (&row.short[0], &row.short[1]),
            };
            table.row([
                span(&row.layer, &self.layers[last].layer),
                name(&row.class),
                shown(row.tokens),
                format!("{}{}", shown(row.offset), if row.odd { " (!)" } else { "" }),
                keys.clone(),
                values.clone(),
                mib(row.bytes as u64),
            ]);
        }
        page.table(&table);
    }
}

impl LayerLine {
    /// Everything that is shown but the layer's number.
    fn looks(&self) -> (&str, Option<usize>, Option<usize>, bool, &[String; 2], usize) {
        (&self.class, self.tokens, self.offset, self.odd, &self.short, self.bytes)
    }
}

fn of_archive(archive: &Archive) -> Contents {
    let mut layers = vec![];
    for (i, entry) in archive.layers.iter().enumerate() {
        add_entry(i.to_string(), entry, &mut layers);
    }
    Contents {
        format: "turbomoq compressed cache",
        layout: archive.layout.to_string(),
        recipe: Some(archive.recipe.to_string()),
        name: Some(archive.recipe.name()),
        metadata: archive.metadata.clone(),
        bytes: layers.iter().map(|r| r.bytes).sum(),
        layers,
    }
}

fn add_entry(at: String, entry: &Entry, rows: &mut Vec<LayerLine>) {
    match entry {
        Entry::List(list) => {
            list.iter().enumerate().for_each(|(i, e)| add_entry(format!("{at}.{i}"), e, rows))
        }
        Entry::Other(layer) => add_layer(at, layer, rows),
        Entry::Packed { shell, layer } => rows.push(LayerLine {
            layer: at,
            class: shell.class().into(),
            tokens: Some(layer.key.shape[2]),
            offset: Some(shell.offset(layer.key.shape[2])),
            odd: false,
            keys: describe(&layer.key),
            values: describe(&layer.value),
            short: [brief(&layer.key), brief(&layer.value)],
            bytes: layer.key.nbytes() + layer.value.nbytes(),
        }),
    }
}

fn describe(side: &CompressedSide<Tensor>) -> String {
    let [sinks, packed, window] = side.split();
    match &side.body {
        Some(body) => format!("{} ({sinks} + {packed} + {window} tokens)", body.codec().spec()),
        None => format!("exact {:?} {:?}", side.dtype, side.shape),
    }
}

/// Bits, KV heads and channels, and how the tokens are divided: `4.25 bits, 3 x 64, 4+118+128`.
fn brief(side: &CompressedSide<Tensor>) -> String {
    let [_, heads, _, channels] = side.shape;
    let [sinks, packed, window] = side.split();
    match &side.body {
        Some(body) => {
            let bits = body.codec().spec().nominal_bits();
            format!("{bits} bits, {heads} x {channels}, {sinks}+{packed}+{window} tokens")
        }
        None => format!("{:?}, {heads} x {channels}", side.dtype),
    }
}

fn of_cache(cache: &PromptCache) -> Contents {
    let mut layers = vec![];
    for (i, layer) in cache.layers.iter().enumerate() {
        add_layer(i.to_string(), layer, &mut layers);
    }
    Contents {
        format: "mlx-lm prompt cache",
        layout: cache.layout.to_string(),
        recipe: None,
        name: None,
        metadata: cache.metadata.clone(),
        bytes: layers.iter().map(|r| r.bytes).sum(),
        layers,
    }
}

fn add_layer(at: String, layer: &Layer, rows: &mut Vec<LayerLine>) {
    if let Layer::List(list) = layer {
        return list.iter().enumerate().for_each(|(i, l)| add_layer(format!("{at}.{i}"), l, rows));
    }
    let show = |t: &Tensor| format!("{} {:?}", t.dtype(), t.shape());
    let short = |t: &Tensor| match t.shape() {
        [_, heads, _, channels] => format!("{}, {heads} x {channels}", t.dtype()),
        _ => show(t),
    };
    let ((keys, values), brief) = match layer {
        Layer::Kv { kv: Some(kv), .. } | Layer::Rotating { kv: Some(kv), .. } => {
            ((show(&kv.keys), show(&kv.values)), Some([short(&kv.keys), short(&kv.values)]))
        }
        Layer::Quantized { kv: Some(kv), group_size, bits } => {
            let show = |words: &Tensor| format!("{bits} bits, group {group_size}, words {:?}", words.shape());
            let short = format!("{bits} bits, group {group_size}");
            ((show(&kv.keys.words), show(&kv.values.words)), Some([short.clone(), short]))
        }
        _ => (layer.describe_packed().map_or(("-".into(), "-".into()), |p| (p.keys, p.values)), None),
    };
    let short = brief.unwrap_or_else(|| [&keys, &values].map(|text| without_seed(text)));
    rows.push(LayerLine {
        layer: at,
        class: layer.class().into(),
        tokens: layer.kind().map(|_| layer.rows()),
        offset: layer.offset(),
        odd: false,
        keys,
        values,
        short,
        bytes: layer.nbytes(),
    });
}

/// A codec's text without its seed, which differs in every layer.
fn without_seed(text: &str) -> String {
    let Some((before, seed)) = text.split_once(":seed") else { return text.into() };
    format!("{before}{}", seed.trim_start_matches(|c: char| c.is_ascii_digit()))
}
