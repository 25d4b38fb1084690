//! `turbomoq inspect`: what a prompt cache or a compressed file holds, layer by layer.

use super::say::{name, say};
use super::{bytes, print_json, table};
use serde::Serialize;
use std::path::PathBuf;
use turbomoq::CompressedSide;
use turbomoq::archive::{Archive, Entry};
use turbomoq::prompt_cache::{Layer, PromptCache, place_in_layer, usual_offsets};
use turbomoq::{Error, Result, Tensor};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache or compressed file
    input: PathBuf,
    /// Do not compare checksums
    #[arg(long)]
    no_verify: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
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
    bytes: usize,
}

#[derive(Serialize)]
struct Contents {
    format: &'static str,
    layout: String,
    recipe: Option<String>,
    metadata: std::collections::BTreeMap<String, String>,
    bytes: usize,
    layers: Vec<LayerLine>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
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
    if arguments.json {
        print_json(&contents);
        return Ok(());
    }
    say!(
        "{}, layout of mlx-lm {}, {} in memory",
        contents.format,
        contents.layout,
        bytes(contents.bytes as u64)
    );
    if let Some(recipe) = &contents.recipe {
        say!("recipe: {recipe}");
    }
    for (key, value) in &contents.metadata {
        say!("{}: {}", name(key), name(value));
    }
    let mut table = table(&["layer", "class", "tokens", "offset", "keys", "values", "bytes"]);
    for row in &contents.layers {
        let shown = |n: Option<usize>| n.map_or("-".into(), |n| n.to_string());
        let offset = format!("{}{}", shown(row.offset), if row.odd { " (!)" } else { "" });
        table.add_row([
            &row.layer,
            &name(&row.class),
            &shown(row.tokens),
            &offset,
            &row.keys,
            &row.values,
            &bytes(row.bytes as u64),
        ]);
    }
    say!("{table}");
    if contents.layers.iter().any(|row| row.odd) {
        say!("(!) not at the token of the other layers: `compress` takes such a cache with --uneven only");
    }
    Ok(())
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

fn of_cache(cache: &PromptCache) -> Contents {
    let mut layers = vec![];
    for (i, layer) in cache.layers.iter().enumerate() {
        add_layer(i.to_string(), layer, &mut layers);
    }
    Contents {
        format: "mlx-lm prompt cache",
        layout: cache.layout.to_string(),
        recipe: None,
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
    let (keys, values) = match layer {
        Layer::Kv { kv: Some(kv), .. } | Layer::Rotating { kv: Some(kv), .. } => {
            (show(&kv.keys), show(&kv.values))
        }
        Layer::Quantized { kv: Some(kv), group_size, bits } => {
            let show = |words: &Tensor| format!("{bits} bits, group {group_size}, words {:?}", words.shape());
            (show(&kv.keys.words), show(&kv.values.words))
        }
        _ => layer.describe_packed().map_or(("-".into(), "-".into()), |p| (p.keys, p.values)),
    };
    rows.push(LayerLine {
        layer: at,
        class: layer.class().into(),
        tokens: layer.kind().map(|_| layer.rows()),
        offset: layer.offset(),
        odd: false,
        keys,
        values,
        bytes: layer.nbytes(),
    });
}
