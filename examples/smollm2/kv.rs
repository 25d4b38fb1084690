//! `--kv`: names the caches of a model and makes one for each layer. A new kind of cache is plugged in here.

use crate::Result;
use crate::cache::{Attend, ByHead, Float, Half};
use crate::live::Live;
use crate::model::{Model, Session};
use crate::rebuilt::Rebuilt;
use mlx_rs::Array;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;
use turbomoq::policy::TierPolicy;
use turbomoq::{Bridge, Cache, Cpu, Mlx, Recipe, Residual, Side};

/// The float cache, or a recipe as it was written, with a tier policy behind a `|` if there is one: `best@4/4|progressive`.
#[derive(Clone, Debug)]
pub enum Kv {
    Float,
    Packed { name: String, recipe: Box<Recipe>, policy: TierPolicy },
}

/// One cache, or those of a file.
#[derive(Clone, Debug)]
pub struct Kvs(pub Vec<Kv>);

/// How a packed cache is held.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum Form {
    /// Packed, and read by attention as what it decodes to: the same figures, fastest here
    Rebuilt,
    /// Packed, attention on the packed form on the CPU engine
    Cpu,
    /// Packed, attention on the packed form as MLX graphs
    Mlx,
}

impl FromStr for Kv {
    type Err = turbomoq::Error;
    fn from_str(text: &str) -> Result<Kv, turbomoq::Error> {
        match text {
            "float" => Ok(Kv::Float),
            _ => Kv::packed(text, text),
        }
    }
}

impl FromStr for Kvs {
    type Err = String;
    fn from_str(text: &str) -> Result<Kvs, String> {
        let Some(path) = text.strip_prefix('@') else {
            return text.parse().map(|kv| Kvs(vec![kv])).map_err(|e: turbomoq::Error| e.to_string());
        };
        let lines = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
        let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let kv = |line: &str| -> Result<Kv, String> {
            let (name, recipe) = line.rsplit_once(char::is_whitespace).unwrap_or((line, line));
            Kv::packed(name.trim(), recipe).map_err(|e| format!("{path}: {e}"))
        };
        Ok(Kvs(lines.map(kv).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kv::Float => "float",
            Kv::Packed { name, .. } => name,
        })
    }
}

impl Kv {
    fn packed(name: &str, text: &str) -> Result<Kv, turbomoq::Error> {
        let (recipe, policy) = text.split_once('|').unwrap_or((text, "none"));
        Ok(Kv::Packed { name: name.into(), recipe: Box::new(recipe.parse()?), policy: policy.parse()? })
    }

    /// Whether scores come from a QJL residual, not from decoded rows.
    pub fn has_residual(&self) -> bool {
        let Kv::Packed { recipe, .. } = self else { return false };
        let spec = recipe.spec(Side::Key, 0, 64).ok().flatten();
        spec.is_some_and(|spec| spec.residual != Residual::None)
    }

    /// A new sequence on caches of this kind; with `half` they are handed f16 keys and values.
    pub fn session<'a>(&self, model: &'a Model, half: bool, form: Form) -> Result<Session<'a>> {
        match (self, form) {
            (Kv::Packed { recipe, policy, .. }, Form::Cpu) => live(Cpu, model, half, recipe, policy),
            (Kv::Packed { recipe, policy, .. }, Form::Mlx) => live(Mlx::new(), model, half, recipe, policy),
            (Kv::Packed { recipe, policy, .. }, Form::Rebuilt) => rebuilt(model, half, recipe, policy),
            (Kv::Float, _) => model.session(|_| Ok(boxed(Float::default(), half))),
        }
    }
}

/// A session on one packed cache for all layers.
fn live<'a, E: Bridge<Array> + Clone + 'static>(
    engine: E,
    model: &'a Model,
    half: bool,
    recipe: &Recipe,
    policy: &TierPolicy,
) -> Result<Session<'a>> {
    let cache = Cache::on(engine, &format!("{recipe}|{policy}"), model.config.layers)?;
    let cache = Rc::new(RefCell::new(cache));
    model.session(|layer| Ok(boxed(Live::new(&cache, layer), half)))
}

/// A session on caches whose packed rows are read as what they decode to.
fn rebuilt<'a>(model: &'a Model, half: bool, recipe: &Recipe, policy: &TierPolicy) -> Result<Session<'a>> {
    if *policy != TierPolicy::None {
        return Err("tiers need the packed cache itself: --form cpu or --form mlx".into());
    }
    let (head_dim, kv_heads) = (model.config.head_dim as usize, model.config.kv_heads as usize);
    model.session(|layer| {
        let groups = recipe.by_heads(layer, kv_heads)?.into_iter().map(|(heads, recipe)| {
            let cache: Box<dyn Attend> = Box::new(Rebuilt::new(&recipe, layer, head_dim)?);
            Ok((heads, cache))
        });
        Ok(boxed(ByHead(groups.collect::<Result<_>>()?), half))
    })
}

fn boxed(cache: impl Attend + 'static, half: bool) -> Box<dyn Attend> {
    if half { Box::new(Half(cache)) } else { Box::new(cache) }
}
