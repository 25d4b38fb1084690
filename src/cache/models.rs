//! Models as data: what decides how much context fits into a memory. `models.json` holds them, with what the original claims for each.
//!
//! Layers with a sliding window hold its newest tokens in half precision, as mlx-lm does, and do not grow with the context.

use super::capacity::{CapacityPlan, longest};
use crate::error::{Error, Result};
use crate::policy::{ModelShape, TierPolicy};
use crate::recipe::Recipe;
use serde::{Deserialize, Serialize};

/// A model as far as its cache goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its usual name.
    pub name: String,
    /// Bytes of the weights at 4 bits.
    pub weights: f64,
    /// Layers with keys and values, sliding ones included.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// The layers with a sliding window, if there are any.
    #[serde(default)]
    pub sliding: Option<Sliding>,
    /// What the original claims for 16 GB.
    #[serde(default)]
    pub claim: Option<Claim>,
}

/// Layers with a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sliding {
    /// How many.
    pub layers: usize,
    /// Tokens of the window.
    pub window: usize,
}

/// A row of the original's table: bytes for the cache, and tokens of context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Bytes for keys and values.
    pub budget: f64,
    /// In half precision.
    pub fp16: f64,
    /// At what it calls 2 bits.
    pub two_bit: f64,
    /// With progressive tiers.
    pub progressive: f64,
}

/// The models of `models.json`.
///
/// # Errors
/// [`Error::Parse`] never, as a test sees to it.
pub fn models() -> Result<Vec<Model>> {
    serde_json::from_str(include_str!("models.json")).map_err(|e| Error::Parse {
        what: "models",
        text: "models.json".into(),
        reason: e.to_string(),
    })
}

/// What caches of a model cost by a recipe and a policy.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    plan: CapacityPlan,
    sliding: Sliding,
    /// Half-precision bytes of a token in one layer.
    token_bytes: usize,
}

impl ModelPlan {
    /// The plan of a model.
    ///
    /// # Errors
    /// As [`CapacityPlan::new`]; [`Error::Unsupported`] if more layers slide than there are.
    pub fn new(model: &Model, recipe: &Recipe, policy: &TierPolicy) -> Result<ModelPlan> {
        let sliding = model.sliding.unwrap_or(Sliding { layers: 0, window: 0 });
        let Some(layers) = model.layers.checked_sub(sliding.layers) else {
            let reason = format!("the model has {} layers", model.layers);
            return Err(Error::Unsupported {
                field: "sliding layers",
                value: sliding.layers.to_string(),
                reason,
            });
        };
        let Model { kv_heads, key_dim, value_dim, .. } = *model;
        let plan = CapacityPlan::new(recipe, policy, &ModelShape { layers, kv_heads, key_dim, value_dim })?;
        Ok(ModelPlan { plan, sliding, token_bytes: kv_heads * 2 * (key_dim + value_dim) })
    }

    /// Bytes of a cache of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> usize {
        self.plan.bytes(tokens).saturating_add(self.sliding_bytes(tokens))
    }

    fn sliding_bytes(&self, tokens: usize) -> usize {
        self.sliding.layers * self.sliding.window.min(tokens) * self.token_bytes
    }

    /// The longest context whose cache fits into `budget` bytes, see [`CapacityPlan::capacity`].
    pub fn capacity(&self, budget: usize) -> usize {
        longest(budget, |tokens| self.plan.most_bytes(tokens).saturating_add(self.sliding_bytes(tokens)))
    }

    /// Caches of `tokens` tokens that fit into `budget` bytes.
    pub fn agents(&self, tokens: usize, budget: usize) -> usize {
        budget / self.bytes(tokens).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact() -> Recipe {
        "uniform@16/16".parse().unwrap()
    }

    #[test]
    fn half_precision_follows_from_the_layout() {
        for model in models().unwrap() {
            let plan = ModelPlan::new(&model, &exact(), &TierPolicy::None).unwrap();
            let sliding = model.sliding.map_or(0, |s| s.layers);
            let token = (model.layers - sliding) * model.kv_heads * 2 * (model.key_dim + model.value_dim);
            // Whole steps of rows, beyond any window.
            assert_eq!(plan.bytes(8192) - plan.bytes(4096), 4096 * token, "{}", model.name);
            let tokens = plan.capacity(8_100_000_000);
            assert!(plan.bytes(tokens) <= 8_100_000_000 && plan.bytes(tokens + 64) > 8_100_000_000);
        }
    }

    #[test]
    fn agents_of_the_original_in_half_precision() {
        let model = models().unwrap().into_iter().find(|m| m.name == "qwen3-8b").unwrap();
        let plan = ModelPlan::new(&model, &exact(), &TierPolicy::None).unwrap();
        assert_eq!(plan.agents(4096, 8_100_000_000), 13);
    }
}
