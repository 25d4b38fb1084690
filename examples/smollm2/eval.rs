//! `eval` and `perplexity`: a text through the float cache and through every recipe's, chunk by chunk side by side.
//!
//! The tokens are the text's own (teacher-forced), so at every position all runs answer the same question, and no logits are
//! kept beyond a chunk.

use crate::Result;
use crate::kv::{Form, Kv};
use crate::measure::{Logits, Measure};
use crate::model::{Model, Session};
use crate::tokenizer::Text;
use indicatif::ProgressBar;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use turbomoq::mlx_ops::slice;

/// Positions whose logits are held at once: 128 rows of 49,152 are 25 MB.
const ROWS: usize = 128;

/// What is run over which texts.
#[derive(clap::Args)]
pub struct Arguments {
    /// Text files
    #[arg(required = true)]
    texts: Vec<PathBuf>,
    /// Cache: `float`, a preset such as `best@3/3` or a whole recipe; may be repeated
    #[arg(long)]
    pub kv: Vec<Kv>,
    /// Tokens from the beginning of each text
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..))]
    ctx: u32,
    /// Tokens handed to the model at once; 1 is token by token
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// Hand the recipes' caches f16 keys and values, as a model in half precision does
    #[arg(long)]
    half: bool,
    /// How packed caches are held
    #[arg(long, value_enum, default_value = "rebuilt")]
    form: Form,
}

/// The figures of one recipe on one text.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub recipe: String,
    pub text: String,
    pub ctx: usize,
    /// Nats, against the float cache.
    pub kl_mean: f64,
    pub kl_median: f64,
    pub kl_p99: f64,
    /// Share of positions with the same likeliest token.
    pub same_top1: f64,
    pub ppl: f64,
    /// Of the stored form, tables counted, without the tokens that a packed cache keeps exact.
    pub bits_per_value: Option<f64>,
    /// Of all buffers at the end of the text, over its tokens.
    pub bytes_per_token: f64,
    pub ms_per_token: f64,
}

struct Run<'a> {
    name: String,
    session: Session<'a>,
    measure: Measure,
    time: Duration,
}

/// Runs every text; the first row of each is the float cache's.
pub fn run(model: &Model, text: &Text, arguments: &Arguments) -> Result<Vec<Row>> {
    let mut rows = vec![];
    for path in &arguments.texts {
        rows.extend(run_text(model, text, arguments, path)?);
    }
    Ok(rows)
}

fn run_text(model: &Model, text: &Text, arguments: &Arguments, path: &Path) -> Result<Vec<Row>> {
    let words = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let tokens = text.encode(&words)?;
    let ctx = arguments.ctx as usize;
    let tokens = tokens
        .get(..ctx)
        .ok_or_else(|| format!("{} has {} tokens, --ctx asks for {ctx}", path.display(), tokens.len()))?;
    let others = arguments.kv.iter().filter(|kv| arguments.half || !matches!(kv, Kv::Float));
    let others = others.map(|kv| Run::new(kv.to_string(), kv.session(model, arguments.half, arguments.form)));
    let float = Run::new("float".into(), Kv::Float.session(model, false, arguments.form));
    let mut runs: Vec<Run> = std::iter::once(float).chain(others).collect::<Result<_>>()?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let bar = ProgressBar::new(ctx as u64);
    for (i, chunk) in tokens.chunks(arguments.chunk as usize).enumerate() {
        let targets = &tokens[(i * arguments.chunk as usize + 1).min(ctx)..];
        step(model, &mut runs, chunk, targets)?;
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    Ok(runs.into_iter().map(|run| run.row(&name, ctx)).collect())
}

fn step(model: &Model, runs: &mut [Run], chunk: &[u32], targets: &[u32]) -> Result<()> {
    let mut states = vec![];
    for run in runs.iter_mut() {
        let start = Instant::now();
        states.push(run.session.states(chunk)?);
        run.time += start.elapsed();
    }
    for start in (0..chunk.len()).step_by(ROWS) {
        let end = chunk.len().min(start + ROWS);
        let targets = &targets[start.min(targets.len())..end.min(targets.len())];
        let mut reference = None;
        for (run, states) in runs.iter_mut().zip(&states) {
            let clock = Instant::now();
            let logits = model.logits(&slice(states, 0, start, end)?)?;
            run.time += clock.elapsed();
            let vocabulary = logits.shape()[1] as usize;
            match &reference {
                None => {
                    let logits = reference.insert(logits);
                    let float = Logits::new(logits.try_as_slice()?, vocabulary);
                    run.measure.add(&float, &float, targets);
                }
                Some(float) => {
                    let float = Logits::new(float.try_as_slice()?, vocabulary);
                    run.measure.add(&float, &Logits::new(logits.try_as_slice()?, vocabulary), targets);
                }
            }
        }
    }
    Ok(())
}

impl<'a> Run<'a> {
    fn new(name: String, session: Result<Session<'a>>) -> Result<Run<'a>> {
        Ok(Run { name, session: session?, measure: Measure::default(), time: Duration::ZERO })
    }

    fn row(self, text: &str, ctx: usize) -> Row {
        let usage = self.session.usage();
        let [kl_mean, kl_median, kl_p99] = self.measure.kl();
        Row {
            recipe: self.name,
            text: text.into(),
            ctx,
            kl_mean,
            kl_median,
            kl_p99,
            same_top1: self.measure.same_top1(),
            ppl: self.measure.perplexity(),
            bits_per_value: (usage.stored_values > 0)
                .then(|| 8.0 * usage.stored_bytes as f64 / usage.stored_values as f64),
            bytes_per_token: usage.bytes as f64 / ctx as f64,
            ms_per_token: self.time.as_secs_f64() * 1e3 / ctx as f64,
        }
    }
}
