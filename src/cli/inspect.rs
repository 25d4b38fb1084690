//! `turbomoq inspect`: what a prompt cache or a compressed file holds, layer by layer.

use super::say::{name, say};
use super::{bytes, print_json, table};
use serde::Serialize;
use std::path::PathBuf;
use turbomoq::archive::{Archive, Entry};
use turbomoq::compressor::CompressedSide;
use turbomoq::prompt_cache::{Layer, PromptCache};
use turbomoq::{Error, Result, Tensor};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache or compressed file
    input: PathBuf,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    layer: String,
    class: String,
    tokens: Option<usize>,
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
    layers: Vec<Row>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    // A compressed file says so itself; what it is not must be a prompt cache. Both errors are shown if it is neither.
    let contents = match Archive::read(&arguments.input) {
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
    let mut table = table(&["layer", "class", "tokens", "keys", "values", "bytes"]);
    for row in &contents.layers {
        let tokens = row.tokens.map_or("-".into(), |t| t.to_string());
        table.add_row([
            &row.layer,
            &name(&row.class),
            &tokens,
            &row.keys,
            &row.values,
            &bytes(row.bytes as u64),
        ]);
    }
    say!("{table}");
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

fn add_entry(at: String, entry: &Entry, rows: &mut Vec<Row>) {
    match entry {
        Entry::List(list) => {
            list.iter().enumerate().for_each(|(i, e)| add_entry(format!("{at}.{i}"), e, rows))
        }
        Entry::Other(layer) => add_layer(at, layer, rows),
        Entry::Packed { shell, layer } => rows.push(Row {
            layer: at,
            class: shell.class().into(),
            tokens: Some(layer.key.shape[2]),
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

fn add_layer(at: String, layer: &Layer, rows: &mut Vec<Row>) {
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
        _ => ("-".into(), "-".into()),
    };
    rows.push(Row {
        layer: at,
        class: layer.class().into(),
        tokens: layer.offset(),
        keys,
        values,
        bytes: layer.nbytes(),
    });
}
