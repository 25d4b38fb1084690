//! `calibrate`: prices of every layer, side and head from sample texts, as the table that `turbomoq plan` spreads a budget by.

use crate::Result;
use crate::eval;
use crate::kv::Kv;
use crate::model::Model;
use crate::sensitivity::{Gradient, gradients};
use crate::tokenizer::Text;
use indicatif::ProgressBar;
use mlx_rs::Dtype;
use std::path::PathBuf;
use turbomoq::Recipe;
use turbomoq::calibration::{Calibration, MEASURED};
use turbomoq::compressor::BLOCK;
use turbomoq::mlx_ops::slice;
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
    /// Leave out the measured losses at 1 to 4 bits
    #[arg(long)]
    no_measure: bool,
}

/// Runs the command.
pub fn run(model: &Model, text: &Text, arguments: &Arguments) -> Result<()> {
    let (ctx, config) = (arguments.ctx as usize, model.config);
    let head_dim = config.head_dim as usize;
    let kv_heads = config.kv_heads as usize;
    let shape = ModelShape { layers: config.layers, kv_heads, key_dim: head_dim, value_dim: head_dim };
    let mut prices = [vec![0.0; config.layers * kv_heads], vec![0.0; config.layers * kv_heads]];
    let mut count = 0;
    let bar = ProgressBar::new(u64::from(arguments.windows) * arguments.texts.len() as u64);
    for path in &arguments.texts {
        let words = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let tokens = text.encode(&words)?;
        for window in tokens.chunks_exact(ctx).take(arguments.windows as usize) {
            for (layer, sides) in gradients(model, &arguments.recipe, window, count)?.iter().enumerate() {
                for (side, gradient) in sides.iter().enumerate() {
                    let centred = side == 0 && arguments.recipe.centred;
                    let here = price(gradient, arguments.recipe.sinks, centred)?;
                    let sums = &mut prices[side][layer * kv_heads..][..kv_heads];
                    sums.iter_mut().zip(here).for_each(|(sum, x)| *sum += x);
                }
            }
            count += 1;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if count == 0 {
        return Err(format!("no text has {ctx} tokens").into());
    }
    prices.iter_mut().flatten().for_each(|x| *x /= count as f64);
    let names: Vec<_> = arguments.texts.iter().filter_map(|p| p.file_stem()?.to_str()).collect();
    let source = format!("{count} windows of {ctx} tokens of {}; {}", names.join(", "), arguments.recipe);
    let [keys, values] = prices;
    let mut table = Calibration::new(shape, &source, keys, values)?;
    if !arguments.no_measure {
        table = table.with_measured(measure(model, text, arguments)?)?;
    }
    turbomoq::files::replace(&arguments.out, &[&table.to_bytes()?])?;
    println!("{}: {source}", arguments.out.display());
    Ok(())
}

/// Half of the mean square of g . e for noise of the energy of the vectors, isotropic after the rotation, for each head.
fn price(side: &Gradient, sinks: usize, centred: bool) -> Result<Vec<f64>> {
    let [_, heads, tokens, dim] = [0, 1, 2, 3].map(|i| side.x.shape()[i] as usize);
    let x = match centred {
        true => side.x.subtract(slice(&side.x, 2, sinks, sinks + BLOCK)?.mean_axis(2, true)?)?,
        false => side.x.clone(),
    };
    let energy = |x: &mlx_rs::Array| x.square()?.sum_axis(-1, false);
    let sums =
        energy(&x)?.multiply(energy(&side.gradient)?)?.sum_axis(-1, false)?.as_dtype(Dtype::Float32)?;
    mlx_rs::transforms::eval([&sums])?;
    let sums = sums.try_as_slice::<f32>()?;
    assert_eq!(sums.len(), heads, "one sequence");
    Ok(sums.iter().map(|&sum| 0.5 * f64::from(sum) / (dim * tokens) as f64).collect())
}

/// Mean KL with one side packed at 1 to 4 bits and the other exact.
fn measure(model: &Model, text: &Text, arguments: &Arguments) -> Result<[[f64; MEASURED]; 2]> {
    let mut kv = vec![];
    for side in 0..2 {
        for bits in 1..=MEASURED {
            let at = |template| turbomoq::recipe::with_bits(template, bits as f32);
            let mut recipe = Recipe { plan: None, ..arguments.recipe.clone() };
            recipe.key = recipe.key.filter(|_| side == 0).map(at).transpose()?.flatten();
            recipe.value = recipe.value.filter(|_| side == 1).map(at).transpose()?.flatten();
            kv.push(Kv::Packed { name: format!("{side} at {bits}"), recipe });
        }
    }
    let wanted = eval::Arguments::new(arguments.texts.clone(), kv, arguments.ctx, arguments.windows.min(2));
    let rows = eval::run(model, text, &wanted)?;
    let mut losses = [[0.0; MEASURED]; 2];
    for row in rows.chunks_exact(1 + 2 * MEASURED) {
        for (i, row) in row[1..].iter().enumerate() {
            losses[i / MEASURED][i % MEASURED] += row.kl_mean / arguments.texts.len() as f64;
        }
    }
    Ok(losses)
}
