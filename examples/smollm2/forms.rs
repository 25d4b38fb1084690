//! `forms`: one greedy answer per preset, on the packed form and on what it decodes to, token by token beside each other.
//!
//! Both caches hold the same codes, so that their logits differ by rounding only. Where the two would choose different tokens, the
//! table says how far apart the two candidates are: a tie is a gap of that rounding. A QJL residual (2406.03482) is the exception: its
//! scores come from an unbiased estimator that no decoded row gives, so its two forms are shown and not held to each other.

use crate::Result;
use crate::kv::{Form, Kv};
use crate::model::{Model, Session};
use crate::tokenizer::Text;
use std::path::PathBuf;
use turbomoq::PRESETS;

/// The text to go on from, and how far.
#[derive(clap::Args)]
pub struct Arguments {
    /// A text whose first characters are the prompt
    text: PathBuf,
    /// Caches to try; without any, every preset with a window of 128 tokens (the rebuilt form of a recipe without a window packs
    /// tokens before their own queries read them, the packed form after)
    #[arg(long)]
    kv: Vec<Kv>,
    /// Characters of the prompt
    #[arg(long, default_value_t = 1200)]
    characters: usize,
    /// Tokens to write
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Greatest gap, in logits, of two candidates that count as a tie
    #[arg(long, default_value_t = 0.05)]
    tie: f32,
}

/// Runs the command.
///
/// # Errors
/// A cache that fails, or a choice that differs by more than a tie.
pub fn run(model: &Model, text: &Text, arguments: &Arguments) -> Result<()> {
    let prompt: String =
        std::fs::read_to_string(&arguments.text)?.chars().take(arguments.characters).collect();
    let prompt = text.encode(&prompt)?;
    if prompt.is_empty() {
        return Err(format!("{} has no token", arguments.text.display()).into());
    }
    let presets = || PRESETS.iter().map(|(name, _)| format!("{name},window=128").parse());
    let kvs =
        if arguments.kv.is_empty() { presets().collect::<Result<_, _>>()? } else { arguments.kv.clone() };
    println!(
        "{:28} {:>6} {:>13} {:>16} {:>18}",
        "cache", "tokens", "other choices", "widest gap of one", "largest difference"
    );
    let mut beyond = vec![];
    for kv in &kvs {
        let seen = Seen::of(kv, model, &prompt, arguments.tokens)?;
        println!(
            "{kv:28} {:6} {:13} {:17.4} {:18.4}",
            arguments.tokens, seen.others, seen.gap, seen.difference
        );
        if seen.gap > arguments.tie && !kv.has_residual() {
            beyond.push(kv.to_string());
        }
    }
    if beyond.is_empty() { Ok(()) } else { Err(format!("more than ties: {}", beyond.join(", ")).into()) }
}

/// How two forms of one cache differ over an answer.
#[derive(Default)]
struct Seen {
    /// Tokens for which the second form has another first choice.
    others: usize,
    /// Greatest distance of the two choices there, in logits of the second form.
    gap: f32,
    /// Greatest difference of any logit.
    difference: f32,
}

impl Seen {
    fn of(kv: &Kv, model: &Model, prompt: &[u32], tokens: usize) -> Result<Seen> {
        let mut sessions = [Form::Cpu, Form::Rebuilt].map(|form| kv.session(model, false, form));
        let [packed, rebuilt] = &mut sessions;
        let [packed, rebuilt] = [packed, rebuilt].map(|s| s.as_mut().map_err(|e| e.to_string()));
        let (packed, rebuilt) = (packed?, rebuilt?);
        let (mut seen, mut next) = (Seen::default(), prompt.to_vec());
        for _ in 0..tokens {
            let [a, b] = [last_logits(model, packed, &next)?, last_logits(model, rebuilt, &next)?];
            let [mine, other] = [top(&a), top(&b)];
            if mine != other {
                seen.others += 1;
                seen.gap = seen.gap.max(b[other] - b[mine]);
            }
            seen.difference = a.iter().zip(&b).fold(seen.difference, |d, (x, y)| d.max((x - y).abs()));
            next = vec![mine as u32];
        }
        Ok(seen)
    }
}

fn last_logits(model: &Model, session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>> {
    let states = session.states(tokens)?;
    let last = states.shape()[0] as usize - 1;
    Ok(model.logits(&turbomoq::mlx::slice(&states, 0, last, last + 1)?)?.try_as_slice()?.to_vec())
}

fn top(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |top, i| if logits[i] > logits[top] { i } else { top })
}
