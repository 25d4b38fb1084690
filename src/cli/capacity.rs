//! `turbomoq capacity`: how much context and how many agents fit beside a model, from the accounting of caches and pool.
//!
//! A live cache is one that a model decodes on: its newest 128 to 256 tokens beyond the recipe's window are not packed yet. A parked one
//! lies in the pool, packed as a whole but for the tokens that the recipe keeps exact.
//! The original's table stands beside it, each of its figures checked against its own layout: keys and values in half precision of all
//! layers, 2.5 stored bits for what it calls 2 bits.

use super::say::say;
use super::{Size, bytes, print_json, table};
use serde::Serialize;
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
    /// Recipes [default: best@4, best@2, and without window best@2.5/2]
    #[arg(long)]
    recipe: Vec<String>,
    /// Tokens of the contexts for which agents are counted
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 12288])]
    agents: Vec<usize>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CapacityLine {
    model: String,
    budget: usize,
    recipe: String,
    /// Longest live context in tokens.
    context: usize,
    /// How many agents fit, for each length of a context.
    agents: Vec<Agents>,
}

#[derive(Serialize)]
struct Agents {
    /// Context of each.
    tokens: usize,
    /// That fit with live caches.
    live: usize,
    /// That fit with parked caches; tiers end when a cache is parked.
    parked: Option<usize>,
}

#[derive(Serialize)]
struct Checked {
    model: String,
    claim: Claim,
    /// What follows from the original's own layout: half precision, and 2.5 bits.
    follows: [f64; 2],
    /// Whether the claims in half precision and at "2 bits" do follow.
    holds: [bool; 2],
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let known = models()?;
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
            add(recipe, &recipe.parse()?, &TierPolicy::None)?;
        }
        add("best, progressive tiers", &"best".parse()?, &"progressive".parse()?)?;
    }
    let claims: Vec<Checked> = chosen.iter().filter_map(|model| check(model)).collect();
    if arguments.json {
        print_json(&serde_json::json!({ "memory": arguments.memory.0, "rows": rows, "original": claims }));
    } else {
        print(arguments, &rows, &claims);
    }
    Ok(())
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

fn print(arguments: &Arguments, rows: &[CapacityLine], claims: &[Checked]) {
    let kilo = |tokens: f64| format!("{:.0}K", tokens / 1e3);
    say!(
        "{} of memory, {} of them reserved; real bytes, everything counted",
        bytes(arguments.memory.0 as u64),
        bytes(arguments.reserve.0 as u64)
    );
    let mut header =
        vec!["model".to_string(), "for the cache".into(), "recipe".into(), "live context".into()];
    header.extend(arguments.agents.iter().flat_map(|t| [format!("live at {t}"), format!("parked at {t}")]));
    let mut out = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        let mut cells =
            vec![row.model.clone(), bytes(row.budget as u64), row.recipe.clone(), kilo(row.context as f64)];
        let parked = |a: &Agents| a.parked.map_or("-".into(), |n| n.to_string());
        cells.extend(row.agents.iter().flat_map(|a| [a.live.to_string(), parked(a)]));
        out.add_row(cells);
    }
    say!("{out}");
    if claims.is_empty() {
        return;
    }
    say!("\nthe original's claims at 16 GB; * does not follow from its own layout");
    let mut out = table(&[
        "model",
        "for the cache",
        "fp16",
        "follows",
        "\"2 bits\"",
        "at 2.5 bits follows",
        "progressive",
    ]);
    for c in claims {
        let mark = |tokens: f64, holds: bool| kilo(tokens) + if holds { "" } else { " *" };
        out.add_row([
            c.model.clone(),
            bytes(c.claim.budget as u64),
            mark(c.claim.fp16, c.holds[0]),
            kilo(c.follows[0]),
            mark(c.claim.two_bit, c.holds[1]),
            kilo(c.follows[1]),
            kilo(c.claim.progressive),
        ]);
    }
    say!("{out}");
}
