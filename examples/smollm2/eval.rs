//! `eval` and `perplexity`: a text through the float cache and through every recipe's, chunk by chunk side by side.
//!
//! The tokens are the text's own (teacher-forced), so at every position all runs answer the same question, and no logits are
//! kept beyond a chunk. With `--resume` the first tokens of a window go through the float cache alone, which every recipe then parks
//! and resumes; what comes after is measured.

use crate::Result;
use crate::kv::{Form, Kv, Kvs};
use crate::measure::{Logits, Measure};
use crate::model::{Model, Session};
use crate::parked::through_pool;
use crate::tokenizer::Text;
use indicatif::ProgressBar;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use turbomoq::mlx::slice;
use turbomoq::policy::TierPolicy;

/// Positions whose logits are held at once: 128 rows of 49,152 are 25 MB.
const ROWS: usize = 128;

/// What is run over which texts.
#[derive(clap::Args)]
pub struct Arguments {
    /// Text files
    #[arg(required = true)]
    texts: Vec<PathBuf>,
    /// Cache: `float`, a preset such as `best@3/3`, a whole recipe, or `@FILE` with lines of names and recipes; may be repeated
    #[arg(long)]
    kv: Vec<Kvs>,
    /// Tokens of a window
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..))]
    ctx: u32,
    /// Stretches of `--ctx` tokens from the beginning of each text, each with caches of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    windows: u32,
    /// Tokens handed to the model at once; 1 is token by token
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// Hand the recipes' caches f16 keys and values, as a model in half precision does
    #[arg(long)]
    half: bool,
    /// How packed caches are held
    #[arg(long, value_enum, default_value = "rebuilt")]
    form: Form,
    /// Run so many tokens of a window exactly, park them by each recipe, resume, and measure the rest of the window
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["half", "form"])]
    resume: Option<u32>,
}

/// The figures of one recipe on one text.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub recipe: String,
    pub text: String,
    pub ctx: usize,
    /// Tokens that were parked and resumed; the figures are those of the others.
    pub resumed: Option<usize>,
    /// Stretches of `ctx` tokens, each from an empty cache.
    pub windows: usize,
    /// Nats, against the float cache.
    pub kl_mean: f64,
    /// The least and the greatest mean of a window.
    pub kl_least: f64,
    pub kl_most: f64,
    pub kl_median: f64,
    pub kl_p99: f64,
    /// Share of positions with the same likeliest token.
    pub same_top1: f64,
    pub ppl: f64,
    /// Attention scores on decoded keys against exact ones, of the worst layer and window; of rebuilt caches only.
    pub logit_correlation: Option<f64>,
    /// Of the stored form, tables counted, without the tokens that a packed cache keeps exact; of a parked cache everything that the
    /// pool counts.
    pub bits_per_value: Option<f64>,
    /// Of all buffers at the end of the text, over its tokens; of a parked cache those of the pool, over the parked tokens.
    pub bytes_per_token: f64,
    pub ms_per_token: f64,
}

struct Run<'a> {
    kv: &'a Kv,
    half: bool,
    session: Session<'a>,
    measure: Measure,
    /// The least logit correlation of a layer in the windows before.
    logits: Option<f64>,
    /// Bytes that the pool counted in the last window.
    parked: Option<usize>,
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
    let (ctx, windows) = (arguments.ctx as usize, arguments.windows as usize);
    let (first, chunk) = (arguments.resume.unwrap_or(0) as usize, arguments.chunk as usize);
    if first + 1 >= ctx {
        return Err(format!("--resume {first} leaves nothing to measure of {ctx} tokens").into());
    }
    let tokens = tokens.get(..ctx * windows).ok_or_else(|| {
        format!("{} has {} tokens, {windows} windows of {ctx} were asked for", path.display(), tokens.len())
    })?;
    let others =
        arguments.kv.iter().flat_map(|kv| &kv.0).filter(|kv| arguments.half || !matches!(kv, Kv::Float));
    let float = Kv::Float;
    let mut runs: Vec<Run> = [(&float, false)]
        .into_iter()
        .chain(others.map(|kv| (kv, arguments.half)))
        .map(|(kv, half)| Run::new(model, kv, half, arguments.form))
        .collect::<Result<_>>()?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let bar = ProgressBar::new((ctx * windows) as u64);
    for (i, window) in tokens.chunks(ctx).enumerate() {
        if i > 0 {
            runs.iter_mut().try_for_each(|run| run.next_window(model, arguments.form))?;
        }
        if let [float, others @ ..] = &mut runs[..]
            && first > 0
        {
            for tokens in window[..first].chunks(chunk) {
                float.session.states(tokens)?;
                bar.inc(tokens.len() as u64);
            }
            others.iter_mut().try_for_each(|run| run.resume(model, &float.session))?;
        }
        for (i, tokens) in window[first..].chunks(chunk).enumerate() {
            let targets = &window[(first + i * chunk + 1).min(ctx)..];
            step(model, &mut runs, tokens, targets)?;
            bar.inc(tokens.len() as u64);
        }
    }
    bar.finish_and_clear();
    let values = 2 * model.config.layers * (model.config.kv_heads * model.config.head_dim) as usize;
    let rows = runs.into_iter().map(|run| {
        let parked = run.parked;
        let mut row = run.row(&name, ctx, [ctx - first, windows])?;
        if first > 0 {
            row.resumed = Some(first);
            row.bits_per_value = parked.map(|bytes| 8.0 * bytes as f64 / (values * first) as f64);
            row.bytes_per_token = parked.map_or(row.bytes_per_token, |bytes| bytes as f64 / first as f64);
        }
        Ok(row)
    });
    rows.collect()
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
    fn new(model: &'a Model, kv: &'a Kv, half: bool, form: Form) -> Result<Run<'a>> {
        let session = kv.session(model, half, form)?;
        let measure = Measure::default();
        Ok(Run { kv, half, session, measure, logits: None, parked: None, time: Duration::ZERO })
    }

    /// Goes on from what another session holds, parked and resumed.
    fn resume(&mut self, model: &'a Model, from: &Session) -> Result<()> {
        let Kv::Packed { recipe, policy: TierPolicy::None, .. } = self.kv else {
            return Err(format!("{} cannot be parked: a recipe without tiers is needed", self.kv).into());
        };
        let (session, bytes) = through_pool(model, from, recipe)?;
        (self.session, self.parked) = (session, Some(bytes));
        Ok(())
    }

    fn next_window(&mut self, model: &'a Model, form: Form) -> Result<()> {
        self.note_logits()?;
        self.session = self.kv.session(model, self.half, form)?;
        self.measure.next_window();
        Ok(())
    }

    fn note_logits(&mut self) -> Result<()> {
        if let Some(here) = self.session.worst_logit_correlation()? {
            self.logits = Some(self.logits.map_or(here, |least| least.min(here)));
        }
        Ok(())
    }

    /// The figures; `measured` tokens of each of so many windows were looked at.
    fn row(mut self, text: &str, ctx: usize, [measured, windows]: [usize; 2]) -> Result<Row> {
        self.note_logits()?;
        let usage = self.session.usage();
        let ([kl_mean, kl_median, kl_p99], [kl_least, kl_most]) = (self.measure.kl(), self.measure.spread());
        Ok(Row {
            recipe: self.kv.to_string(),
            text: text.into(),
            ctx,
            resumed: None,
            windows,
            kl_mean,
            kl_least,
            kl_most,
            kl_median,
            kl_p99,
            same_top1: self.measure.same_top1(),
            ppl: self.measure.perplexity(),
            logit_correlation: self.logits,
            bits_per_value: (usage.stored_values > 0)
                .then(|| 8.0 * usage.stored_bytes as f64 / usage.stored_values as f64),
            bytes_per_token: usage.bytes as f64 / ctx as f64,
            ms_per_token: self.time.as_secs_f64() * 1e3 / (measured * windows) as f64,
        })
    }
}
