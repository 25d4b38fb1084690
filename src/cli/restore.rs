//! `turbomoq restore`: a compressed file, or a prompt cache with packed layers, into a prompt cache that mlx-lm loads.

use super::say::say;
use super::{EngineName, OnEngine, beside, bytes, print_json, progress};
use std::path::PathBuf;
use turbomoq::Compressor;
use turbomoq::Engine;
use turbomoq::Result;
use turbomoq::archive::Archive;
use turbomoq::internals::io::files;
use turbomoq::prompt_cache::{Layer, Layout, PromptCache};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Compressed file, or prompt cache with layers of class TurboMoqCache
    input: PathBuf,
    /// Prompt cache [default: the input's name with the ending .restored.safetensors]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Release of mlx-lm to write for, 0.31 or 0.32 [default: the layout of the source]
    #[arg(long)]
    layout: Option<Layout>,
    /// Make layers of class TurboMoqCache plain ones, which mlx-lm loads without turbomoq's package
    #[arg(long)]
    unpack: bool,
    /// Do not compare checksums: what a damaged file still holds
    #[arg(long)]
    no_verify: bool,
    /// Where the stages run
    #[arg(long, value_enum, default_value = "auto")]
    engine: EngineName,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
}

struct Unpack<'a>(&'a Archive);

impl OnEngine for Unpack<'_> {
    type Output = PromptCache;
    fn size(&self) -> [usize; 2] {
        self.0.packed().first().map_or([128, 0], |(_, _, layer)| {
            let [b, h, t, d] = layer.key.shape;
            [d, b * h * t]
        })
    }
    fn run<E: Engine>(self, engine: E) -> Result<PromptCache> {
        let bar = progress(self.0.layers.len(), "unpacking");
        let cache = self.0.restore(&Compressor::with_engine(self.0.recipe.clone(), engine), || bar.inc(1))?;
        bar.finish_and_clear();
        Ok(cache)
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let output =
        arguments.output.clone().unwrap_or_else(|| beside(&arguments.input, ".restored.safetensors"));
    files::distinct(&arguments.input, &output)?;
    let read = if arguments.no_verify { Archive::read_unverified } else { Archive::read };
    let mut cache = match read(&arguments.input) {
        Ok(archive) => {
            let mut cache = arguments.engine.run(Unpack(&archive))?;
            archive.sign(&mut cache)?;
            cache
        }
        // The layers of a packed prompt cache only change the layout.
        Err(not_archive) => match PromptCache::read(&arguments.input) {
            Ok(cache) if cache.layers.iter().any(Layer::is_packed) => cache,
            _ => return Err(not_archive),
        },
    };
    if arguments.unpack {
        cache.layers = cache.layers.iter().map(Layer::unpacked).collect::<Result<_>>()?;
    }
    let packed = cache.layers.iter().filter(|layer| layer.is_packed()).count();
    let layout = arguments.layout.unwrap_or(cache.layout);
    let file_bytes = cache.write(&output, layout)?;
    if arguments.json {
        print_json(&serde_json::json!({
            "output": output,
            "layout": layout.to_string(),
            "layers": cache.layers.len(),
            "packed_layers": packed,
            "file_bytes": file_bytes,
        }));
    } else {
        say!(
            "{} ({}), {} layers for mlx-lm {layout}",
            output.display(),
            bytes(file_bytes),
            cache.layers.len()
        );
        if packed > 0 {
            say!(
                "{packed} layers are packed: import turbomoq_mlx before mlx-lm loads them, or restore with --unpack"
            );
        }
    }
    Ok(())
}
