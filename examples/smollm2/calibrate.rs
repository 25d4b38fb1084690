//! `calibrate`: prices of every layer, side and head from sample texts, as the table that `turbomoq plan` spreads a budget by.

use crate::Result;
use crate::model::Model;
use crate::sensitivity::{Losses, losses};
use crate::tokenizer::Text;
use indicatif::ProgressBar;
use std::path::PathBuf;
use turbomoq::Recipe;
use turbomoq::allocation::MOST_BITS;
use turbomoq::allocation::calibration::Calibration;
use turbomoq::policy::ModelShape;

/// What the table is made from.
#[derive(clap::Args)]
pub struct Arguments {
    /// Text files
    #[arg(required = true)]
    texts: Vec<PathBuf>,
    /// The table
    #[arg(long)]
    out: PathBuf,
    /// Recipe for which prices are made: its sinks, window and codecs
    #[arg(long, default_value = "best")]
    recipe: Recipe,
    /// Tokens of a window; a backward pass holds about 7 MB for each token of 1,024
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(512..=4096))]
    ctx: u32,
    /// Windows from the beginning of each text
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    windows: u32,
}

/// Runs the command.
pub fn run(model: &Model, text: &Text, arguments: &Arguments) -> Result<()> {
    let (ctx, config) = (arguments.ctx as usize, model.config);
    let head_dim = config.head_dim as usize;
    let kv_heads = config.kv_heads as usize;
    let shape = ModelShape { layers: config.layers, kv_heads, key_dim: head_dim, value_dim: head_dim };
    let mut sums: Losses = [(); 2].map(|()| vec![[0.0; MOST_BITS]; config.layers * kv_heads]);
    let mut count = 0;
    let bar = ProgressBar::new(u64::from(arguments.windows) * arguments.texts.len() as u64);
    for path in &arguments.texts {
        let words = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let tokens = text.encode(&words)?;
        for window in tokens.chunks_exact(ctx).take(arguments.windows as usize) {
            let here = losses(model, &arguments.recipe, window, count)?;
            for (sums, here) in sums.iter_mut().zip(&here) {
                sums.as_flattened_mut().iter_mut().zip(here.as_flattened()).for_each(|(sum, x)| *sum += x);
            }
            count += 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if count == 0 {
        return Err(format!("no text has {ctx} tokens").into());
    }
    sums.iter_mut().flat_map(|side| side.as_flattened_mut()).for_each(|x| *x /= count as f64);
    let names: Vec<_> = arguments.texts.iter().filter_map(|p| p.file_stem()?.to_str()).collect();
    let source = format!("{count} windows of {ctx} tokens of {}; {}", names.join(", "), arguments.recipe);
    let [keys, values] = sums;
    let table = Calibration::new(shape, &source, keys, values)?;
    turbomoq::internals::io::files::replace(&arguments.out, &[&table.to_bytes()?])?;
    println!("{}: {source}", arguments.out.display());
    Ok(())
}
