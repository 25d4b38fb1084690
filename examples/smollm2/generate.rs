//! `generate`: an answer token by token, the likeliest or drawn from the head of the distribution (top-p).

use crate::Result;
use crate::kv::{Form, Kv};
use crate::model::Model;
use crate::tokenizer::Text;
use std::io::Write;
use std::time::Instant;
use turbomoq::internals::math::rng::Rng;

/// What is asked, and how the answer is drawn.
#[derive(clap::Args)]
pub struct Arguments {
    /// The question
    prompt: String,
    /// Cache: `float`, a preset such as `best@3/3` or a whole recipe
    #[arg(long, default_value = "float")]
    kv: Kv,
    /// How packed caches are held
    #[arg(long, value_enum, default_value = "cpu")]
    form: Form,
    /// Continue the text as it is, without the chat form
    #[arg(long)]
    raw: bool,
    /// Tokens at most
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Share of the probability that is drawn from
    #[arg(long, default_value_t = 0.9)]
    top_p: f64,
    /// Fixes what is drawn
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Runs the command.
pub fn run(model: &Model, text: &Text, arguments: &Arguments) -> Result<()> {
    let prompt = match arguments.raw {
        true => text.encode(&arguments.prompt)?,
        false => text.question(&arguments.prompt)?,
    };
    if prompt.is_empty() {
        return Err("the prompt has no token".into());
    }
    let mut session = arguments.kv.session(model, false, arguments.form)?;
    let mut rng = Rng::new(arguments.seed, 0);
    let start = Instant::now();
    let mut states = session.states(&prompt)?;
    let prefill = start.elapsed();
    let (mut answer, mut shown) = (vec![], 0);
    let start = Instant::now();
    while answer.len() < arguments.tokens {
        let last = states.shape()[0] as usize - 1;
        let logits = model.logits(&turbomoq::mlx::slice(&states, 0, last, last + 1)?)?;
        let token = draw(logits.try_as_slice()?, arguments.temperature, arguments.top_p, &mut rng);
        if text.ends.contains(&token) {
            break;
        }
        answer.push(token);
        let whole = text.decode(&answer)?;
        // A character of several tokens is shown when it is complete.
        if !whole.ends_with('\u{fffd}') {
            print!("{}", whole.get(shown..).unwrap_or_default());
            std::io::stdout().flush()?;
            shown = whole.len();
        }
        states = session.states(&[token])?;
    }
    println!();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!(
        "{} tokens read in {:.2} s, {} written at {:.1} ms each; the cache ({}) holds {} tokens in {} bytes",
        prompt.len(),
        prefill.as_secs_f64(),
        answer.len(),
        1e3 * seconds / answer.len().max(1) as f64,
        arguments.kv,
        session.position(),
        session.usage().bytes,
    );
    Ok(())
}

fn draw(logits: &[f32], temperature: f64, top_p: f64, rng: &mut Rng) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_unstable_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if temperature <= 0.0 {
        return order[0];
    }
    let top = f64::from(logits[order[0] as usize]);
    let weight = |&i: &u32| ((f64::from(logits[i as usize]) - top) / temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut kept = 0.0;
    let head = order.iter().take_while(|i| {
        let before = kept;
        kept += weight(i);
        before < top_p * total
    });
    let head: Vec<u32> = head.copied().collect();
    let mut left = rng.uniform() * head.iter().map(weight).sum::<f64>();
    let chosen = head.iter().find(|i| {
        left -= weight(i);
        left <= 0.0
    });
    *chosen.unwrap_or(&order[0])
}
