//! SmolLM2-135M on MLX with any KV cache behind it: generation, perplexity, and what a recipe does to the next-token distribution.
//!
//! `examples/smollm2/setup.sh` fetches the model. Then, for example:
//! `cargo run --release --example smollm2 -- generate "What is the capital of France?" --kv best@3/3`
//! `cargo run --release --example smollm2 -- eval text.txt --kv turboquant-mse@3/3,sinks=4,window=128 --kv best@3/3 --svg kl.svg`
//! `cargo run` sets `OPENBLAS_CORETYPE` (.cargo/config.toml); started without cargo, set it too, or OpenBLAS may run at half speed.

mod cache;
mod calibrate;
mod eval;
mod forms;
mod generate;
mod gguf;
mod kv;
mod live;
mod measure;
mod model;
mod parked;
mod rebuilt;
mod sensitivity;
mod show;
mod tokenizer;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// The result of everything here; the message is for people.
pub type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/mlx/.runtime/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");

#[derive(Parser)]
#[command(name = "smollm2", about = "SmolLM2-135M with a compressed KV cache")]
struct Cli {
    /// The model, a GGUF file
    #[arg(long, global = true, default_value = MODEL)]
    model: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a question
    Generate(generate::Arguments),
    /// Whether attention on packed keys and values writes what attention on the decoded ones does
    Forms(forms::Arguments),
    /// What noise costs at every head, as a table for `turbomoq plan`
    Calibrate(calibrate::Arguments),
    /// Perplexity of texts, on the float cache and on any other
    Perplexity(eval::Arguments),
    /// What recipes do to the next-token distribution, against the float cache
    Eval {
        #[command(flatten)]
        arguments: eval::Arguments,
        /// Print JSON rows in place of the table
        #[arg(long)]
        json: bool,
        /// Draw KL against stored bits per value
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
}

fn run(cli: &Cli) -> Result<()> {
    let gguf = gguf::Gguf::open(&cli.model)?;
    let (model, text) = (model::Model::new(&gguf)?, tokenizer::Text::new(&gguf)?);
    match &cli.command {
        Command::Generate(arguments) => generate::run(&model, &text, arguments)?,
        Command::Forms(arguments) => forms::run(&model, &text, arguments)?,
        Command::Calibrate(arguments) => calibrate::run(&model, &text, arguments)?,
        Command::Perplexity(arguments) => {
            for row in eval::run(&model, &text, arguments)? {
                println!("{} {} {:.4} ({:.2} ms a token)", row.text, row.recipe, row.ppl, row.ms_per_token);
            }
        }
        Command::Eval { arguments, json, svg } => {
            let rows = eval::run(&model, &text, arguments)?;
            match json {
                true => println!("{}", serde_json::to_string_pretty(&rows)?),
                false => println!("{}", show::markdown(&rows)),
            }
            if let Some(path) = svg {
                show::plot(&rows, path)?;
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("smollm2: {error}");
            ExitCode::FAILURE
        }
    }
}
