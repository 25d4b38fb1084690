//! `turbomoq capacity`: how much context and how many agents fit beside a model, from the accounting of caches and pool.
//!
//! A live cache is one that a model decodes on: its newest 128 to 256 tokens beyond the recipe's window are not packed yet. A parked one
//! lies in the pool, packed as a whole but for the tokens that the recipe keeps exact.
//! The original's table stands beside it, each of its figures checked against its own layout: keys and values in half precision of all
//! layers, 2.5 stored bits for what it calls 2 bits.

use super::screen::{Answer, Page, Table, commas, runs};
use super::{Size, bytes};
use serde::Serialize;
use std::path::{Path, PathBuf};
use turbomoq::archive::parked_model_bytes;
use turbomoq::cache::{Claim, Model, ModelPlan, models};
use turbomoq::policy::TierPolicy;
use turbomoq::{Error, Recipe, Result};

/// A claim within this share of what follows from its layout is taken as rounded.
const ROUNDED: f64 = 0.05;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Memory of the machine
    #[arg(long, default_value = "16GB")]
    memory: Size,
    /// What the system and the program need
    #[arg(long, default_value = "3GB")]
    reserve: Size,
    /// Models [default: all that are known]
    #[arg(long)]
    model: Vec<String>,
    /// A model by its config.json, as Hugging Face and mlx-lm have it
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Bytes of that model's weights [default: of the safetensors files beside the config.json]
    #[arg(long, value_name = "BYTES", requires = "config")]
    weights: Option<Size>,
    /// Recipes [default: best@4, best@2, and without window best@2.5/2]
    #[arg(long)]
    recipe: Vec<String>,
    /// Tokens of the contexts for which agents are counted
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 12288])]
    agents: Vec<usize>,
    /// Also the original's own table, checked against its layout
    #[arg(long)]
    original: bool,
}

/// What fits.
#[derive(Serialize)]
pub struct Output {
    /// Bytes of the machine.
    memory: usize,
    /// Bytes that are not for model and cache.
    reserve: usize,
    rows: Vec<CapacityLine>,
    original: Vec<Checked>,
    #[serde(skip)]
    lengths: Vec<usize>,
    #[serde(skip)]
    show_original: bool,
}

/// One model and recipe.
#[derive(Serialize)]
pub struct CapacityLine {
    model: String,
    budget: usize,
    recipe: String,
    /// Longest live context in tokens.
    context: usize,
    /// How many agents fit, for each length of a context.
    agents: Vec<Agents>,
}

/// Agents with contexts of one length.
#[derive(Serialize)]
struct Agents {
    /// Context of each.
    tokens: usize,
    /// That fit with live caches.
    live: usize,
    /// That fit with parked caches; tiers end when a cache is parked.
    parked: Option<usize>,
}

/// A row of the original's table.
#[derive(Serialize)]
pub struct Checked {
    model: String,
    claim: Claim,
    /// What follows from the original's own layout: half precision, and 2.5 bits.
    follows: [f64; 2],
    /// Whether the claims in half precision and at "2 bits" do follow.
    holds: [bool; 2],
}

/// Counts.
pub fn compute(arguments: &Arguments) -> Result<Output> {
    let known = match &arguments.config {
        Some(path) => vec![read_config(path, arguments.weights)?],
        None => models()?,
    };
    let chosen: Vec<&Model> = match &arguments.model[..] {
        [] => known.iter().collect(),
        names => names.iter().map(|name| find(&known, name)).collect::<Result<_>>()?,
    };
    let recipes: Vec<String> = match &arguments.recipe[..] {
        [] => ["best@4", "best@2", "best@2.5/2,sinks=4,window=0"].map(String::from).into(),
        given => given.to_vec(),
    };
    let mut rows = vec![];
    for model in &chosen {
        let taken = model.weights as usize + arguments.reserve.0;
        let budget = arguments.memory.0.saturating_sub(taken);
        let mut add = |name: &str, recipe: &Recipe, policy: &TierPolicy| -> Result<()> {
            let plan = ModelPlan::new(model, recipe, policy)?;
            let agents = |&tokens: &usize| {
                let parked = match policy {
                    TierPolicy::None => Some(budget / parked_model_bytes(recipe, model, tokens)?),
                    _ => None,
                };
                Ok(Agents { tokens, live: plan.agents(tokens, budget), parked })
            };
            rows.push(CapacityLine {
                model: model.name.clone(),
                budget,
                recipe: name.into(),
                context: plan.capacity(budget),
                agents: arguments.agents.iter().map(agents).collect::<Result<_>>()?,
            });
            Ok(())
        };
        add("fp16", &"uniform@16/16".parse()?, &TierPolicy::None)?;
        for recipe in &recipes {
            let recipe: Recipe = recipe.parse()?;
            add(&recipe.name(), &recipe, &TierPolicy::None)?;
        }
        add("best@4, progressive", &"best".parse()?, &"progressive".parse()?)?;
    }
    Ok(Output {
        memory: arguments.memory.0,
        reserve: arguments.reserve.0,
        rows,
        original: chosen.iter().filter_map(|model| check(model)).collect(),
        lengths: arguments.agents.clone(),
        show_original: arguments.original,
    })
}

/// A model by its configuration; the folder names it where the file does not.
fn read_config(path: &Path, weights: Option<Size>) -> Result<Model> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let folder =
        path.parent().map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
    let weights = match (weights, folder) {
        (Some(size), _) => size.0 as u64,
        (None, folder) => folder.map_or(Ok(0), weights_in)?,
    };
    if weights == 0 {
        let reason = "there are no safetensors files beside it: give --weights, for example 4.5GB".into();
        return Err(Error::Unsupported { field: "config", value: path.display().to_string(), reason });
    }
    let full = folder.and_then(|folder| folder.canonicalize().ok());
    let name = full
        .as_deref()
        .and_then(Path::file_name)
        .map_or("model".into(), |n| n.to_string_lossy().into_owned());
    Model::from_config(&name, &text, weights as f64)
        .map_err(|error| Error::Format { path: path.into(), detail: error.to_string() })
}

/// Bytes of the safetensors files in a folder.
fn weights_in(folder: &Path) -> Result<u64> {
    let fail = |source| Error::Io { path: folder.into(), source };
    let mut sum = 0;
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            sum += std::fs::metadata(&path).map_err(fail)?.len();
        }
    }
    Ok(sum)
}

fn find<'a>(known: &'a [Model], name: &str) -> Result<&'a Model> {
    known.iter().find(|m| m.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|m| m.name.as_str()).collect();
        let reason = format!("known are {}", names.join(", "));
        Error::Unsupported { field: "model", value: name.into(), reason }
    })
}

fn check(model: &Model) -> Option<Checked> {
    let claim = model.claim?;
    // The original counts every layer in full, sliding windows too.
    let token = model.layers * model.kv_heads * 2 * (model.key_dim + model.value_dim);
    let fp16 = claim.budget / token as f64;
    let follows = [fp16, fp16 * 16.0 / 2.5];
    let near = |claim: f64, follows: f64| (claim / follows - 1.0).abs() <= ROUNDED;
    let holds = [near(claim.fp16, follows[0]), near(claim.two_bit, follows[1])];
    Some(Checked { model: model.name.clone(), claim, follows, holds })
}

impl Answer for Output {
    fn show(&self, page: &mut Page) {
        page.line(format_args!(
            "{} of memory, {} of it reserved, everything counted. Contexts in thousands of tokens; agents of so many tokens each, live / parked.",
            bytes(self.memory as u64),
            bytes(self.reserve as u64)
        ));
        page.gap();
        let mut head = vec!["model".to_string(), "recipe".into(), ">context K".into()];
        head.extend(self.lengths.iter().map(|tokens| format!(">at {}", commas(*tokens))));
        let mut table = Table::new(&head);
        for (first, last) in runs(&self.rows, |a, b| a.model == b.model) {
            for (i, row) in self.rows[first..=last].iter().enumerate() {
                // The model's name and what it leaves stand in the first two rows of its block.
                let model = match i {
                    0 => row.model.clone(),
                    1 => format!("{} free", bytes(row.budget as u64)),
                    _ => String::new(),
                };
                let parked = |a: &Agents| a.parked.map_or("-".into(), |n| n.to_string());
                let mut cells = vec![model, row.recipe.clone(), kilo(row.context as f64)];
                cells.extend(row.agents.iter().map(|a| format!("{} / {}", a.live, parked(a))));
                table.row(cells);
            }
        }
        page.table(&table);
        if self.show_original && !self.original.is_empty() {
            page.gap();
            self.show_claims(page);
        }
    }
}

impl Output {
    fn show_claims(&self, page: &mut Page) {
        page.line("The original's claims at 16 GB in thousands of tokens, and what follows from its own layout (* does not):");
        page.gap();
        let mut table = Table::new(&[
            "model",
            ">for the cache GiB",
            ">fp16",
            ">follows",
            ">\"2 bits\"",
            ">at 2.5 bits follows",
            ">progressive",
        ]);
        for c in &self.original {
            let mark = |tokens: f64, holds: bool| kilo(tokens) + if holds { "" } else { " *" };
            table.row([
                c.model.clone(),
                format!("{:.2}", c.claim.budget / 1073741824.0),
                mark(c.claim.fp16, c.holds[0]),
                kilo(c.follows[0]),
                mark(c.claim.two_bit, c.holds[1]),
                kilo(c.follows[1]),
                kilo(c.claim.progressive),
            ]);
        }
        page.table(&table);
    }
}

fn kilo(tokens: f64) -> String {
    format!("{:.0}", tokens / 1e3)
}
