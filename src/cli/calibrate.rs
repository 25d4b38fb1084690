//! `turbomoq calibrate`: a table of what noise costs at every head, from a prompt cache alone.
//!
//! Without the model nobody can measure what noise does to its answers, so the heads are scored. Where the model itself can run,
//! measure: `cargo run --release --example smollm2 -- calibrate`.

use super::say::say;
use std::path::{Path, PathBuf};
use turbomoq::allocation::HeadScores;
use turbomoq::allocation::calibration::{Calibration, score_heads};
use turbomoq::internals::io::files;
use turbomoq::policy::ModelShape;
use turbomoq::prompt_cache::{Layer, PromptCache};
use turbomoq::{Error, Result, Tensor};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Prompt cache of mlx-lm
    input: PathBuf,
    /// The table
    #[arg(long)]
    out: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    files::distinct(&arguments.input, &arguments.out)?;
    let table = Scored::read(&arguments.input)?.table()?;
    files::replace(&arguments.out, &[&table.to_bytes()?])?;
    say!("{}: {}", arguments.out.display(), table.source());
    Ok(())
}

/// Keys and values of the layers that have plain ones, and their shape.
pub fn plain_layers(path: &Path) -> Result<(Vec<(Tensor, Tensor)>, ModelShape)> {
    let cache = PromptCache::read(path)?;
    let layers = cache.layers.into_iter().filter_map(|layer| match layer {
        Layer::Kv { kv: Some(kv), .. } => Some((kv.keys, kv.values)),
        _ => None,
    });
    let layers: Vec<_> = layers.collect();
    let fail = |detail: String| Err(Error::Format { path: path.into(), detail });
    let Some((k, v)) = layers.first().map(|(k, v)| (k.shape().to_vec(), v.shape().to_vec())) else {
        return fail("no layer with plain keys and values".into());
    };
    let shape = ModelShape { layers: layers.len(), kv_heads: k[1], key_dim: k[3], value_dim: v[3] };
    Ok((layers, shape))
}

/// A prompt cache whose heads can be scored.
pub struct Scored<'a> {
    path: &'a Path,
    layers: Vec<(Tensor, Tensor)>,
    pub shape: ModelShape,
}

impl Scored<'_> {
    /// Reads the cache.
    pub fn read(path: &Path) -> Result<Scored<'_>> {
        let (layers, shape) = plain_layers(path)?;
        Ok(Scored { path, layers, shape })
    }

    /// Scores of its heads.
    pub fn scores(&self) -> Result<HeadScores> {
        score_heads(&self.layers.iter().map(|(keys, _)| keys).collect::<Vec<_>>(), None)
    }

    /// The table from the scores.
    pub fn table(&self) -> Result<Calibration> {
        let source = format!("head scores of {}", self.path.display());
        Calibration::from_scores(self.shape, &source, &self.scores()?)
    }
}
