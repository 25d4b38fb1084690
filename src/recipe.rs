//! A recipe: how the keys and values of a cache are packed, and which tokens stay exact. Named presets are the README's table.

mod head_dim;

use crate::error::{Error, Result};
use crate::math::rng;
use crate::spec::bit_plan::BitPlan;
use crate::spec::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule, Side, stored_as_text};
use head_dim::TEMPLATE_DIM;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// One codec for keys, one for values, and the tokens that stay exact.
///
/// The text form is `key=SPEC,value=SPEC[,centred],sinks=N,window=N[,draft=N][,key-bits=WIDTHS,value-bits=WIDTHS]` with `exact` for a
/// side that is not packed; reading also takes a preset's name with options, `turboquant-mse@3/2,sinks=4`, and `exact` alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Recipe {
    /// Codec of keys for a head of 128 channels, see [`Recipe::spec`]; `None` keeps them exact.
    pub key: Option<CodecSpec>,
    /// Codec of values, likewise.
    pub value: Option<CodecSpec>,
    /// Whether the mean of the first packed block is taken from the keys.
    pub centred: bool,
    /// First tokens that stay exact.
    pub sinks: usize,
    /// Newest tokens that stay exact.
    pub window: usize,
    /// Newest tokens that can be taken back without a trace, as rejected drafts are: 16 unless the text says otherwise, at most
    /// [`MOST_DRAFT`]. See [`crate::cache::LayerCache::trim`].
    pub draft: usize,
    /// Bits of every layer and KV head, in place of the bits of the specs.
    pub plan: Option<BitPlan>,
}

/// Names of the presets and what each is.
pub const PRESETS: [(&str, &str); 8] = [
    (
        "best",
        "centred keys, trellis codes (Beta-law grid above 4 bits), keys of their own norm (3 bits are 4 and 2, by energy), \
         least-squares values, 4 sinks, window 128",
    ),
    ("turbomoq", "the original's split: rotated symmetric keys, rotated Lloyd-Max values"),
    (
        "turboquant-mse",
        "TurboQuant (2504.19874), the form for least error: Hadamard, Beta-law grid, norms kept",
    ),
    ("turboquant-prod", "TurboQuant, the form for inner products: one bit less and a one-bit QJL residual"),
    ("rotation-only", "Hadamard and a symmetric uniform grid"),
    ("uniform", "symmetric uniform grid without rotation"),
    ("mlx-affine", "mlx-lm's own format: scale and bias for every 64 (or 32) channels"),
    ("kivi", "KIVI (2402.02750): keys by channel over 32 tokens, values by token, window 128"),
];

/// Most tokens that a recipe may keep exact at either end: more than any context has, and far from overflow in every count of bytes.
pub const MOST_EXACT_TOKENS: usize = 1 << 26;
/// Draft tokens of a recipe that does not say how many.
const DRAFT: usize = 16;
/// Greatest `draft` of a recipe: the tokens of a block.
pub const MOST_DRAFT: usize = 128;

impl Recipe {
    /// A preset at given bits for keys and values; 16 keeps a side exact, 2.5 gives half of the channels one bit more.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name or bits that the preset has no form for.
    pub fn preset(name: &str, key_bits: f32, value_bits: f32) -> Result<Recipe> {
        let template = |side: Side| template(name, side);
        if !PRESETS.iter().any(|(known, _)| *known == name) {
            let names: Vec<&str> = PRESETS.iter().map(|p| p.0).collect();
            let reason = format!("the presets are {}", names.join(", "));
            return Err(Error::Unsupported { field: "recipe", value: name.into(), reason });
        }
        let mut key = with_bits(template(Side::Key), key_bits)?;
        if let (Some(key), "best", 3.0) = (&mut key, name, key_bits) {
            // Half of the channels hold nearly all energy of centred keys: at 4 and 2 bits they lose a fifth less than at 3.
            (key.bits, key.outliers, key.lead) = (2, key.head_dim as u16 / 2, 2);
        }
        let recipe = Recipe { key, value: with_bits(template(Side::Value), value_bits)?, ..Recipe::exact() };
        Ok(match name {
            "best" => Recipe { centred: true, sinks: 4, window: 128, ..recipe },
            "kivi" => Recipe { window: 128, ..recipe },
            _ => recipe,
        })
    }

    /// The recipe that packs nothing.
    pub fn exact() -> Recipe {
        Recipe { key: None, value: None, centred: false, sinks: 0, window: 0, draft: DRAFT, plan: None }
    }

    fn check_exact_tokens(&self) -> Result<()> {
        let exact = |field, tokens| (field, tokens, MOST_EXACT_TOKENS);
        let bounds =
            [exact("sinks", self.sinks), exact("window", self.window), ("draft", self.draft, MOST_DRAFT)];
        for (field, tokens, most) in bounds {
            if tokens > most {
                let reason = format!("at most {most} tokens");
                return Err(Error::Unsupported { field, value: tokens.to_string(), reason });
            }
        }
        Ok(())
    }

    /// The codec spec of one side of one layer: the recipe's, fitted to the head dim, with a seed of its own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the codec has no form for this head dim (`recipe/head_dim.rs` says which take its place), the plan
    /// ends before the layer, or its heads differ there, see [`Recipe::by_heads`]; also for more than [`MOST_EXACT_TOKENS`] sinks or
    /// tokens of the window.
    pub fn spec(&self, side: Side, layer: usize, head_dim: usize) -> Result<Option<CodecSpec>> {
        let (template, part) = match side {
            Side::Key => (self.key, 0),
            Side::Value => (self.value, 1),
        };
        self.check_exact_tokens()?;
        let Some(mut template) = template else { return Ok(None) };
        if let Some(plan) = &self.plan {
            let no = |value: String, reason: &str| {
                Err(Error::Unsupported { field: "bits of a layer", value, reason: reason.into() })
            };
            let bits = match plan.side(side).layer(layer) {
                Some([bits]) => *bits,
                Some(_) => return no(format!("{side} {layer}"), "its heads have widths of their own"),
                None => return no(format!("{side} {layer}"), "the plan has fewer layers"),
            };
            match with_bits(template, f32::from(bits))? {
                Some(spec) => template = spec,
                None => return Ok(None),
            }
        }
        let template = CodecSpec { seed: rng::derive(template.seed, layer as u64, part), ..template };
        head_dim::fit(template, head_dim).map(Some)
    }

    /// The KV heads of a layer that share their widths, each group with the recipe that packs it: `(heads, recipe)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the plan has no width for a layer or head.
    pub fn by_heads(&self, layer: usize, kv_heads: usize) -> Result<Vec<(Vec<usize>, Recipe)>> {
        let Some(plan) = &self.plan else { return Ok(vec![((0..kv_heads).collect(), self.clone())]) };
        for side in [Side::Key, Side::Value] {
            if let Some(widths) = plan.side(side).layer(layer)
                && ![1, kv_heads].contains(&widths.len())
            {
                let value = format!("{} in layer {layer}", widths.len());
                let reason = format!("the layer has {kv_heads} KV heads");
                return Err(Error::Unsupported { field: "bits of a head", value, reason });
            }
        }
        let mut groups: Vec<([u8; 2], Vec<usize>)> = vec![];
        for head in 0..kv_heads {
            let (Some(key), Some(value)) = (plan.key.head(layer, head), plan.value.head(layer, head)) else {
                let (value, reason) =
                    (format!("layer {layer}, head {head}"), "the plan does not reach it".into());
                return Err(Error::Unsupported { field: "bits of a head", value, reason });
            };
            match groups.iter_mut().find(|group| group.0 == [key, value]) {
                Some(group) => group.1.push(head),
                None => groups.push(([key, value], vec![head])),
            }
        }
        let at = |template: Option<CodecSpec>, bits: u8| match template {
            Some(template) => with_bits(template, bits.into()),
            None => Ok(None),
        };
        let recipe = |[key, value]: [u8; 2]| -> Result<Recipe> {
            Ok(Recipe { key: at(self.key, key)?, value: at(self.value, value)?, plan: None, ..self.clone() })
        };
        groups.into_iter().map(|(bits, heads)| Ok((heads, recipe(bits)?))).collect()
    }

    /// Tokens that are encoded together, over both sides.
    pub fn tile(&self) -> usize {
        [self.key, self.value].iter().flatten().map(CodecSpec::tile).max().unwrap_or(1)
    }

    /// How `tokens` tokens are divided: exact sinks, packed, exact window.
    pub fn split(&self, tokens: usize) -> [usize; 3] {
        let sinks = self.sinks.min(tokens);
        let tile = self.tile();
        let packed = (tokens - sinks).saturating_sub(self.window) / tile * tile;
        [sinks, packed, tokens - sinks - packed]
    }
}

fn template(name: &str, side: Side) -> CodecSpec {
    let base = CodecSpec::new(TEMPLATE_DIM, 4, Grid::Beta);
    match (name, side) {
        ("best", side) => {
            // Keys keep their norm: on SmolLM2 that beats the unbiased scale, whose noise lifts packed tokens above exact ones.
            let scale = if side == Side::Key { ScaleRule::Matched } else { ScaleRule::LeastSquares };
            CodecSpec { scale, format: ScaleFormat::Wide8, grid: Grid::Trellis { states: 8 }, ..base }
        }
        ("turbomoq", Side::Key) | ("rotation-only", _) => CodecSpec { grid: Grid::Uniform, ..base },
        ("turbomoq", Side::Value) => CodecSpec { grid: Grid::Lloyd, ..base },
        ("uniform", _) => CodecSpec { grid: Grid::Uniform, rotation: RotationKind::Identity, ..base },
        ("turboquant-prod", _) => {
            let projections = TEMPLATE_DIM as u16;
            CodecSpec { scale: ScaleRule::Plain, residual: Residual::Qjl { projections, rounds: 1 }, ..base }
        }
        ("kivi", Side::Key) => {
            CodecSpec { grid: Grid::ChannelAffine { group: 32 }, rotation: RotationKind::Identity, ..base }
        }
        ("kivi", Side::Value) | ("mlx-affine", _) => {
            CodecSpec { grid: Grid::Affine { group: 64 }, rotation: RotationKind::Identity, ..base }
        }
        _ => base,
    }
}

/// The same codec at other bits; `None` at 16, which are exact. Halves give half of the channels one bit more.
///
/// # Errors
/// [`Error::Unsupported`] if the codec has no form at these bits.
pub fn with_bits(template: CodecSpec, bits: f32) -> Result<Option<CodecSpec>> {
    if bits == 16.0 {
        return Ok(None);
    }
    // The residual of the inner-product form takes one of the bits.
    let sign_bits = if template.residual == Residual::None { 0.0 } else { 1.0 };
    let whole = (bits - sign_bits).floor();
    let fraction = bits - sign_bits - whole;
    let outliers = if fraction == 0.5 { template.head_dim as u16 / 2 } else { 0 };
    let supported = if sign_bits > 0.0 { "2 to 9, or 16" } else { "1 to 8, halves from 1.5 to 7.5, or 16" };
    let no = || Error::Unsupported {
        field: "bits",
        value: bits.to_string(),
        reason: format!("{supported} are supported"),
    };
    if !(1.0..=8.0).contains(&whole) || (fraction != 0.0 && fraction != 0.5) {
        return Err(no());
    }
    let mut spec = CodecSpec { bits: whole as u8, outliers, lead: 1, ..template };
    if matches!(spec.grid, Grid::Trellis { .. }) && bits > 4.0 {
        // The trellis ends at four bits; above them a scalar grid is as good as lossless.
        spec.grid = Grid::Beta;
    }
    spec.validate()?;
    Ok(Some(spec))
}

/// Reads `4`, `4/2`, `2.5/16`.
///
/// # Errors
/// [`Error::Parse`] if the text is neither one number nor two.
pub fn parse_bits(text: &str) -> Result<(f32, f32)> {
    let fail = || Error::Parse {
        what: "bits",
        text: text.into(),
        reason: "expected K or K/V, for example 4/2".into(),
    };
    let number = |t: &str| t.trim().parse::<f32>().map_err(|_| fail());
    match text.split_once('/') {
        Some((k, v)) => Ok((number(k)?, number(v)?)),
        None => number(text).map(|b| (b, b)),
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = |s: &Option<CodecSpec>| s.map_or("exact".to_string(), |s| s.to_string());
        write!(f, "key={},value={}", spec(&self.key), spec(&self.value))?;
        if self.centred {
            f.write_str(",centred")?;
        }
        write!(f, ",sinks={},window={}", self.sinks, self.window)?;
        if self.draft != DRAFT {
            write!(f, ",draft={}", self.draft)?;
        }
        match &self.plan {
            Some(plan) => write!(f, ",key-bits={},value-bits={}", plan.key, plan.value),
            None => Ok(()),
        }
    }
}

impl FromStr for Recipe {
    type Err = Error;
    fn from_str(text: &str) -> Result<Recipe> {
        let fail = |reason: String| Error::Parse { what: "recipe", text: text.into(), reason };
        let mut terms = text.split(',').peekable();
        let first = terms.peek().copied().unwrap_or_default();
        let mut recipe = if first.contains('=') {
            Recipe::exact()
        } else if first == "exact" {
            terms.next();
            Recipe::exact()
        } else {
            terms.next();
            let (name, bits) = first.split_once('@').unwrap_or((first, "4"));
            let (k, v) = parse_bits(bits)?;
            Recipe::preset(name, k, v)?
        };
        let side = |text: &str| if text == "exact" { Ok(None) } else { text.parse().map(Some) };
        let (mut key_bits, mut value_bits) = (None, None);
        for term in terms {
            match term.split_once('=') {
                None if term == "centred" => recipe.centred = true,
                None if term == "not-centred" => recipe.centred = false,
                Some(("key", spec)) => recipe.key = side(spec)?,
                Some(("value", spec)) => recipe.value = side(spec)?,
                Some(("sinks", n)) => recipe.sinks = n.parse().map_err(|_| fail(format!("sinks {n:?}")))?,
                Some(("window", n)) => {
                    recipe.window = n.parse().map_err(|_| fail(format!("window {n:?}")))?
                }
                Some(("draft", n)) => recipe.draft = n.parse().map_err(|_| fail(format!("draft {n:?}")))?,
                Some(("key-bits", widths)) => key_bits = Some(widths.parse()?),
                Some(("value-bits", widths)) => value_bits = Some(widths.parse()?),
                _ => return Err(fail(format!("unknown term {term:?}"))),
            }
        }
        recipe.plan = match (key_bits, value_bits) {
            (Some(key), Some(value)) => Some(BitPlan { key, value }),
            (None, None) => None,
            _ => return Err(fail("key-bits and value-bits go together".into())),
        };
        recipe.check_exact_tokens()?;
        Ok(recipe)
    }
}

stored_as_text!(Recipe);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_reads_back_what_it_writes() {
        for (name, _) in PRESETS {
            for (k, v) in [(4.0, 4.0), (3.0, 2.0), (16.0, 4.0)] {
                let recipe = Recipe::preset(name, k, v).unwrap();
                assert_eq!(recipe.to_string().parse::<Recipe>().unwrap(), recipe, "{name}");
                assert_eq!(format!("{name}@{k}/{v}").parse::<Recipe>().unwrap(), recipe);
                for dim in [64, 128, 256] {
                    recipe.spec(Side::Key, 3, dim).unwrap();
                    recipe.spec(Side::Value, 3, dim).unwrap();
                }
            }
        }
        let changed: Recipe = "best@2.5/2,sinks=0,window=64,not-centred".parse().unwrap();
        assert_eq!((changed.sinks, changed.window, changed.centred), (0, 64, false));
        assert_eq!(changed.key.unwrap().outliers, 64);
        assert_eq!(changed.spec(Side::Key, 0, 64).unwrap().unwrap().outliers, 32);
    }

    #[test]
    fn what_has_no_form_is_refused() {
        assert!(matches!(Recipe::preset("bset", 4.0, 4.0), Err(Error::Unsupported { field: "recipe", .. })));
        assert!(matches!(
            Recipe::preset("turboquant-prod", 1.0, 4.0),
            Err(Error::Unsupported { field: "bits", .. })
        ));
        assert!(matches!(Recipe::preset("best", 3.3, 4.0), Err(Error::Unsupported { field: "bits", .. })));
        assert!("best@4/4/4".parse::<Recipe>().is_err());
        assert!("best,sink=4".parse::<Recipe>().is_err());
        for exact in ["sinks", "window"] {
            let text = |n: usize| format!("best@4,{exact}={n}");
            assert!(text(MOST_EXACT_TOKENS).parse::<Recipe>().is_ok());
            assert!(matches!(text(MOST_EXACT_TOKENS + 1).parse::<Recipe>(), Err(Error::Unsupported { .. })));
            assert!(text(usize::MAX).parse::<Recipe>().is_err());
        }
    }

    #[test]
    fn layers_and_sides_do_not_share_a_seed() {
        let recipe = Recipe::preset("turboquant-mse", 4.0, 4.0).unwrap();
        let seed = |side, layer| recipe.spec(side, layer, 64).unwrap().unwrap().seed;
        assert_ne!(seed(Side::Key, 0), seed(Side::Key, 1));
        assert_ne!(seed(Side::Key, 0), seed(Side::Value, 0));
    }

    #[test]
    fn tokens_are_divided_without_loss() {
        let kivi = Recipe::preset("kivi", 2.0, 2.0).unwrap();
        for tokens in [0, 1, 3, 127, 128, 129, 160, 161, 1000] {
            let [sinks, packed, window] = kivi.split(tokens);
            assert_eq!(sinks + packed + window, tokens);
            assert_eq!(packed % 32, 0);
            assert!(packed == 0 || (128..160).contains(&window));
        }
        assert_eq!(Recipe::preset("best", 4.0, 4.0).unwrap().split(3), [3, 0, 0]);
    }
}
