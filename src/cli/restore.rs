//! `turbomoq restore`: a compressed file, or a prompt cache with packed layers, into a prompt cache that mlx-lm loads.

use super::screen::{Answer, Page};
use super::{EngineName, OnEngine, beside, bytes, progress};
use serde::Serialize;
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

/// What was written.
#[derive(Serialize)]
pub struct Restored {
    output: PathBuf,
    layout: String,
    layers: usize,
    /// Layers that are still packed.
    packed_layers: usize,
    file_bytes: u64,
}

/// Unpacks and writes the file.
pub fn compute(arguments: &Arguments) -> Result<Restored> {
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
    let packed_layers = cache.layers.iter().filter(|layer| layer.is_packed()).count();
    let layout = arguments.layout.unwrap_or(cache.layout);
    let file_bytes = cache.write(&output, layout)?;
    let (layout, layers) = (layout.to_string(), cache.layers.len());
    Ok(Restored { output, layout, layers, packed_layers, file_bytes })
}

impl Answer for Restored {
    fn show(&self, page: &mut Page) {
        page.line(format_args!(
            "{}: {} layers for mlx-lm {}, {}",
            self.output.display(),
            self.layers,
            self.layout,
            bytes(self.file_bytes)
        ));
        if self.packed_layers > 0 {
            page.line(format_args!(
                "{} layers are packed: import turbomoq_mlx before mlx-lm loads them, or restore with --unpack",
                self.packed_layers
            ));
        }
    }
}
