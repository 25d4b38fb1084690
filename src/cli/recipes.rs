//! `turbomoq recipes`: the presets; with a name, what a recipe does and what it costs.

use super::screen::{Answer, Page, Table, commas};
use serde::Serialize;
use turbomoq::archive::parked_bytes;
use turbomoq::policy::ModelShape;
use turbomoq::{CodecSpec, Grid, PRESETS, Recipe, Residual, Result, RotationKind, ScaleRule, Side};

/// Head dims and lengths of the costs.
const DIMS: [usize; 2] = [64, 128];
const LENGTHS: [usize; 3] = [2048, 8192, 32768];

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// A recipe to explain, for example best@3
    recipe: Option<String>,
}

/// The presets, or one recipe.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Output {
    List(Vec<Preset>),
    One(Box<Explained>),
}

/// A preset.
#[derive(Serialize)]
pub struct Preset {
    name: &'static str,
    what: &'static str,
    /// The recipe at 4 bits in full.
    recipe: String,
}

/// A recipe in words and bytes.
#[derive(Serialize)]
pub struct Explained {
    name: String,
    recipe: String,
    keys: String,
    values: String,
    exact: String,
    costs: Vec<Cost>,
}

/// What a parked cache costs.
#[derive(Serialize)]
struct Cost {
    head_dim: usize,
    tokens: usize,
    /// Stored bits a channel, everything counted.
    bits: f64,
    /// fp16 bytes over bytes.
    ratio: f64,
}

/// Lists or explains.
pub fn compute(arguments: &Arguments) -> Result<Output> {
    match &arguments.recipe {
        None => {
            let preset = |(name, what): (&'static str, &'static str)| -> Result<Preset> {
                Ok(Preset { name, what, recipe: name.parse::<Recipe>()?.to_string() })
            };
            Ok(Output::List(PRESETS.into_iter().map(preset).collect::<Result<_>>()?))
        }
        Some(text) => explain(&text.parse()?).map(|one| Output::One(Box::new(one))),
    }
}

fn explain(recipe: &Recipe) -> Result<Explained> {
    let centred = if recipe.centred { "centred, " } else { "" };
    let side = |side: Side, spec: Option<CodecSpec>| match (spec, &recipe.plan) {
        (None, _) => "exact".to_string(),
        (Some(spec), plan) => {
            let own = if plan.is_some() { "bits by layer from the plan, ".into() } else { bits(&spec) };
            format!("{own}{}{}", if side == Side::Key { centred } else { "" }, words(&spec))
        }
    };
    let layers = recipe.plan.as_ref().map_or(1, |plan| plan.key.layers());
    let mut costs = vec![];
    for head_dim in DIMS {
        let shape = ModelShape { layers, kv_heads: 8, key_dim: head_dim, value_dim: head_dim };
        for tokens in LENGTHS {
            // A codec without a form for this head dim, or widths by head, have no parked form.
            let Ok(bytes) = parked_bytes(recipe, &shape, tokens) else { continue };
            let channels = (layers * 8 * tokens * 2 * head_dim) as f64;
            let bits = 8.0 * bytes as f64 / channels;
            costs.push(Cost { head_dim, tokens, bits, ratio: 16.0 / bits });
        }
    }
    Ok(Explained {
        name: recipe.name(),
        recipe: recipe.to_string(),
        keys: side(Side::Key, recipe.key),
        values: side(Side::Value, recipe.value),
        exact: match [recipe.sinks, recipe.window] {
            [0, 0] => "no tokens".into(),
            [sinks, 0] => format!("the first {sinks} tokens"),
            [0, window] => format!("the newest {window} tokens"),
            [sinks, window] => format!("the first {sinks} tokens and the newest {window}"),
        },
        costs,
    })
}

fn bits(spec: &CodecSpec) -> String {
    let bits = spec.nominal_bits();
    if spec.outliers == 0 {
        return format!("{bits} bits a channel, ");
    }
    let (many, few) = (spec.bits + spec.lead, spec.bits);
    format!("{bits} bits a channel ({many} for the channels with most energy, {few} for others), ")
}

/// The stages of a codec in words.
fn words(spec: &CodecSpec) -> String {
    let mut parts = vec![];
    if spec.equalised {
        parts.push("channels scaled by what queries see of them".to_string());
    }
    parts.push(match spec.rotation {
        RotationKind::Identity => "not rotated".into(),
        RotationKind::Dense => "rotated by a dense random matrix".into(),
        RotationKind::Hadamard => "rotated by a random Hadamard transform".into(),
    });
    parts.push(match spec.grid {
        Grid::Uniform => "a symmetric uniform grid".into(),
        Grid::Lloyd => "Lloyd-Max levels of the normal law".into(),
        Grid::Beta => "Lloyd-Max levels of the law that a rotated channel has".into(),
        Grid::Trellis { states } => format!("trellis codes of 2^{states} states"),
        Grid::Affine { group } => format!("scale and bias for every {group} channels"),
        Grid::ChannelAffine { group } => format!("scale and bias of a channel for every {group} tokens"),
        Grid::Fitted => "levels fitted to the data".into(),
    });
    // Where a group has its own scale and bias, the vector has none.
    if !matches!(spec.grid, Grid::Affine { .. } | Grid::ChannelAffine { .. }) {
        parts.push(match spec.scale {
            ScaleRule::LeastSquares => "scaled for least error".into(),
            ScaleRule::Matched => "scaled to keep the norm".into(),
            ScaleRule::Unbiased => "scaled to keep inner products right on average".into(),
            ScaleRule::Plain => "scaled by the norm as it is".into(),
        });
    }
    if let Residual::Qjl { projections, rounds } = spec.residual {
        parts.push(format!(
            "with the signs of {} projections of what is left",
            projections * u16::from(rounds)
        ));
    }
    parts.join(", ")
}

impl Answer for Output {
    fn show(&self, page: &mut Page) {
        match self {
            Output::List(presets) => {
                let mut table = Table::new(&["preset", "what it is"]);
                presets.iter().for_each(|p| table.row([p.name, p.what]));
                page.table(&table);
                page.gap();
                for p in presets.iter().filter(|_| page.verbose).collect::<Vec<_>>() {
                    page.line(format_args!("{} at 4 bits:", p.name));
                    page.line(format_args!("  {}", p.recipe));
                    page.gap();
                }
                page.line("Bits follow the name: best@3, best@4/2 for keys and values. `turbomoq recipes NAME` explains one.");
            }
            Output::One(one) => one.show(page),
        }
    }
}

impl Answer for Explained {
    fn show(&self, page: &mut Page) {
        page.line(&self.name);
        page.gap();
        page.line(format_args!("keys: {}", self.keys));
        page.line(format_args!("values: {}", self.values));
        page.line(format_args!("exact: {}", self.exact));
        page.line("in full:");
        page.line(format_args!("  {}", self.recipe));
        if self.costs.is_empty() {
            return;
        }
        page.gap();
        page.line("A parked cache, 8 KV heads, everything counted:");
        page.gap();
        let mut table = Table::new(&[">head dim", ">tokens", ">stored bits", ">ratio"]);
        for c in &self.costs {
            let figures = [format!("{:.2}", c.bits), format!("{:.2}", c.ratio)];
            let [bits, ratio] = figures;
            table.row([c.head_dim.to_string(), commas(c.tokens), bits, ratio]);
        }
        page.table(&table);
    }
}
