//! Arguments, exit codes and the choice of an engine; each command is a file of its own.
//!
//! Exit codes: 0 done, 1 the command failed, 2 the arguments make no sense (clap's own).

mod bench;
mod budget;
mod calibrate;
mod capacity;
mod compare;
mod compress;
mod inspect;
mod plan;
mod restore;
mod say;
#[cfg(unix)]
mod serve;
#[cfg(unix)]
mod top;
#[cfg(feature = "mlx")]
mod tune;
mod verify;

use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use say::{complain, say};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use turbomoq::Engine;
use turbomoq::PRESETS;
use turbomoq::internals::recipe;
use turbomoq::prompt_cache::{Layer, PromptCache};
use turbomoq::{Recipe, Result};

#[derive(Parser)]
#[command(
    name = "turbomoq",
    version,
    about = "Packs the KV cache of a language model, and attends on the packed form"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pack a prompt cache of mlx-lm
    Compress(compress::Arguments),
    /// Unpack a compressed file into a prompt cache that mlx-lm loads
    Restore(restore::Arguments),
    /// Show what a prompt cache or a compressed file holds
    Inspect(inspect::Arguments),
    /// Pack in memory, unpack, and show the error of every layer
    Verify(verify::Arguments),
    /// Compare recipes on one prompt cache
    Compare(compare::Arguments),
    /// Score the heads of a prompt cache, as a table for `plan --budget`
    Calibrate(calibrate::Arguments),
    /// Show what a tier policy decides and what that costs, or how a budget is spread over heads
    Plan(plan::Arguments),
    /// Show how much context, and how many agents, fit into a memory
    Capacity(capacity::Arguments),
    /// Hold the caches of many mlx-lm processes in one budget
    #[cfg(unix)]
    Serve(serve::Arguments),
    /// Show what a server holds, live
    #[cfg(unix)]
    Top(top::TopArguments),
    /// Show what a server holds
    #[cfg(unix)]
    Stats(top::StatsArguments),
    /// Time a decode step on this machine: engines x recipes x lengths
    Bench(bench::Arguments),
    #[cfg(feature = "mlx")]
    /// Time both engines on this machine, for `--engine auto`
    Tune(tune::Arguments),
    /// List the presets
    Recipes,
}

/// How keys and values are packed.
#[derive(Args)]
struct RecipeArguments {
    /// A preset or a whole recipe, for example `turboquant-mse@3/2,sinks=4`; `turbomoq recipes` lists the presets
    #[arg(long, default_value = "best")]
    recipe: String,
    /// Bits of keys and values, for example 4 or 4/2; 16 keeps a side exact
    #[arg(long)]
    bits: Option<String>,
    /// First tokens that stay exact
    #[arg(long)]
    sinks: Option<usize>,
    /// Newest tokens that stay exact
    #[arg(long)]
    window: Option<usize>,
}

impl RecipeArguments {
    fn recipe(&self) -> Result<Recipe> {
        let mut recipe = match &self.bits {
            Some(bits) => {
                let (k, v) = recipe::parse_bits(bits)?;
                // The bits go to the preset; options behind its name stay.
                let (name, options) = self.recipe.split_once(',').unwrap_or((&self.recipe, ""));
                let name = name.split('@').next().unwrap_or(name);
                let options = if options.is_empty() { String::new() } else { format!(",{options}") };
                format!("{name}@{k}/{v}{options}").parse::<Recipe>()?
            }
            None => self.recipe.parse::<Recipe>()?,
        };
        recipe.sinks = self.sinks.unwrap_or(recipe.sinks);
        recipe.window = self.window.unwrap_or(recipe.window);
        Ok(recipe)
    }
}

/// Where the stages run.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum EngineName {
    /// The one that was faster at this size, see `turbomoq tune`
    Auto,
    /// The CPU engine
    Cpu,
    /// MLX
    #[cfg(feature = "mlx")]
    Mlx,
}

/// A command that runs on any engine.
trait OnEngine {
    type Output;
    /// Channels of a vector, and vectors of a side of a layer.
    #[cfg_attr(not(feature = "mlx"), allow(dead_code))] // there is nothing to choose from
    fn size(&self) -> [usize; 2];
    fn run<E: Engine>(self, engine: E) -> Result<Self::Output>;
}

/// The size of the first plain layer of a prompt cache.
fn size(cache: &PromptCache) -> [usize; 2] {
    let shape = |layer: &Layer| match layer {
        Layer::Kv { kv: Some(kv), .. } => Some(kv.keys.shape().to_vec()),
        _ => None,
    };
    match cache.layers.iter().find_map(shape).as_deref() {
        Some([b, h, t, d]) => [*d, b * h * t],
        _ => [128, 0],
    }
}

impl EngineName {
    fn run<C: OnEngine>(self, command: C) -> Result<C::Output> {
        #[cfg(feature = "mlx")]
        {
            let [head_dim, rows] = command.size();
            if self == EngineName::Mlx || (self == EngineName::Auto && tune::prefers_mlx(head_dim, rows)?) {
                return command.run(turbomoq::Mlx::new());
            }
        }
        command.run(turbomoq::Cpu)
    }
}

/// Runs the command line and says with which code to exit.
pub fn run() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Compress(arguments) => compress::run(&arguments),
        Command::Restore(arguments) => restore::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Calibrate(arguments) => calibrate::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Capacity(arguments) => capacity::run(&arguments),
        #[cfg(unix)]
        Command::Serve(arguments) => serve::run(&arguments),
        #[cfg(unix)]
        Command::Top(arguments) => top::top(&arguments),
        #[cfg(unix)]
        Command::Stats(arguments) => top::stats(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        #[cfg(feature = "mlx")]
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Recipes => {
            let mut table = table(&["preset", "what it is", "recipe at 4 bits"]);
            for (name, what) in PRESETS {
                let recipe = name.parse::<Recipe>().map_or_else(|e| e.to_string(), |r| r.to_string());
                table.add_row([name, what, &recipe]);
            }
            say!("{table}");
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain!("turbomoq: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A progress bar on standard error, drawn only on a terminal.
fn progress(total: usize, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:32} {pos}/{len} layers {eta}");
    let bar = ProgressBar::new(total as u64).with_message(what);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn table(header: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    table
}

/// Bytes that a person wrote: `8GiB`, `16GB`, `512MiB`, or a plain number.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Size(usize);

impl std::str::FromStr for Size {
    type Err = turbomoq::Error;
    fn from_str(text: &str) -> Result<Size> {
        const UNITS: [(&str, f64); 8] = [
            ("KiB", 1024.0),
            ("MiB", 1048576.0),
            ("GiB", 1073741824.0),
            ("TiB", 1099511627776.0),
            ("KB", 1e3),
            ("MB", 1e6),
            ("GB", 1e9),
            ("TB", 1e12),
        ];
        let unit = UNITS.iter().find_map(|(name, n)| Some((text.strip_suffix(name)?, *n)));
        let (number, unit) = unit.unwrap_or((text, 1.0));
        match number.trim().parse::<f64>() {
            Ok(n) if (0.0..1e18).contains(&(n * unit)) => Ok(Size((n * unit) as usize)),
            _ => Err(turbomoq::Error::Parse {
                what: "bytes",
                text: text.into(),
                reason: "expected a number with a unit like GiB or GB".into(),
            }),
        }
    }
}

/// Bytes for people.
fn bytes(n: impl TryInto<u64>) -> String {
    indicatif::HumanBytes(n.try_into().unwrap_or(u64::MAX)).to_string()
}

/// The input's name with another ending.
fn beside(input: &Path, ending: &str) -> PathBuf {
    let stem = input.file_stem().unwrap_or(input.as_os_str()).to_string_lossy().into_owned();
    input.with_file_name(format!("{stem}{ending}"))
}

fn print_json(value: &impl serde::Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => say!("{text}"),
        Err(error) => complain!("turbomoq: {error}"),
    }
}
