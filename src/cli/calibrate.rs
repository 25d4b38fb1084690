//! `turbomoq calibrate`: a table of what noise costs at every head, from a prompt cache alone.
//!
//! Without the model nobody can measure what noise does to its answers. The heads are scored by the spectrum of their keys and by
//! their layer's place, and a key counts as four values: about what measured tables say. Where the model itself can run, measure
//! (`cargo run --release --example smollm2 -- calibrate`).

use std::path::{Path, PathBuf};
use turbomoq::calibration::Calibration;
use turbomoq::policy::ModelShape;
use turbomoq::policy::allocation::DISTORTION;
use turbomoq::policy::head_scores::{HeadScorer, HeadScores, spectral};
use turbomoq::prompt_cache::{Layer, PromptCache};
use turbomoq::{Error, Result, Tensor, files};

/// Price of a key over that of a value of the same head.
const KEYS_OVER_VALUES: f64 = 4.0;

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
    let (table, _) = from_cache(&arguments.input)?;
    files::replace(&arguments.out, &[&table.to_bytes()?])?;
    println!("{}: {}", arguments.out.display(), table.source());
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

/// The table of a prompt cache, and the scores behind it.
pub fn from_cache(path: &Path) -> Result<(Calibration, HeadScores)> {
    let (layers, shape) = plain_layers(path)?;
    let mut signals = vec![];
    for (keys, _) in &layers {
        if keys.shape()[1] != shape.kv_heads || keys.shape()[3] != shape.key_dim || keys.shape()[2] == 0 {
            let expected = format!("[B, {}, T > 0, {}]", shape.kv_heads, shape.key_dim);
            return Err(Error::Shape { what: "keys", expected, got: keys.shape().to_vec() });
        }
        for head in 0..shape.kv_heads {
            let rows = keys.slice(1, head, head + 1)?.to_f32()?;
            signals.push(spectral(&covariance(&rows, shape.key_dim), shape.key_dim));
        }
    }
    let scores = HeadScorer::new(shape.layers, shape.kv_heads, shape.key_dim).score(&signals, None)?;
    let losses =
        |factor: f64| scores.scores().iter().map(|s| DISTORTION.map(|d| factor * s * d)).collect::<Vec<_>>();
    let source = format!("head scores of {}", path.display());
    Ok((Calibration::new(shape, &source, losses(KEYS_OVER_VALUES), losses(1.0))?, scores))
}

/// Covariance of rows about their mean.
fn covariance(rows: &[f32], dim: usize) -> Vec<f64> {
    let mean = turbomoq::frame::mean(rows, dim);
    let mut sums = vec![0f64; dim * dim];
    let mut row = vec![0f64; dim];
    for x in rows.chunks_exact(dim) {
        row.iter_mut().zip(x).zip(&mean).for_each(|((r, x), m)| *r = f64::from(x - m));
        for (sums, a) in sums.chunks_exact_mut(dim).zip(&row) {
            sums.iter_mut().zip(&row).for_each(|(sum, b)| *sum += a * b);
        }
    }
    sums
}
