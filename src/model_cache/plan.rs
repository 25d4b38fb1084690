//! What a cache knows before the first token: the kind of each layer, how full ones are packed, padding.

use crate::error::{Error, Result};
use crate::policy::TierPolicy;
use crate::recipe::Recipe;
use serde::{Deserialize, Serialize};

/// What a layer of a model caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Keys and values of all tokens, packed by the recipe.
    Full,
    /// Keys and values of all tokens, exact: for layers that a recipe would hurt.
    Exact,
    /// Keys and values of the newest tokens, exact, as mlx-lm's `RotatingKVCache` holds them. Attention hides what is older.
    Sliding {
        /// Tokens that a query sees, its own included.
        window: usize,
    },
    /// None of its own: queries attend to the keys and values of an earlier layer.
    Shares {
        /// Index of that layer.
        layer: usize,
    },
    /// No keys and values: a state space, linear attention, a convolution. Its state stays with the model.
    State,
}

/// What all layers have in common.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) recipe: Recipe,
    pub(super) policy: TierPolicy,
    pub(super) kinds: Vec<LayerKind>,
    pub(super) padding: Vec<usize>,
}

impl Plan {
    /// The number of a layer among those with keys and values, which is that of recipes and plans of bits.
    pub(super) fn ordinal(&self, layer: usize) -> usize {
        let own = |kind: &&LayerKind| !matches!(kind, LayerKind::Shares { .. } | LayerKind::State);
        self.kinds[..layer].iter().filter(own).count()
    }

    /// Whether it describes a model.
    pub(super) fn check(&self) -> Result<()> {
        for (i, kind) in self.kinds.iter().enumerate() {
            match kind {
                LayerKind::Sliding { window: 0 } => {
                    return Err(unsupported("window", 0, "one token or more"));
                }
                LayerKind::Shares { layer } => match self.kinds[..i].get(*layer) {
                    Some(LayerKind::Full | LayerKind::Exact | LayerKind::Sliding { .. }) => {}
                    _ => {
                        return Err(unsupported(
                            "shared layer",
                            *layer,
                            "an earlier layer with keys and values",
                        ));
                    }
                },
                _ => {}
            }
        }
        let count = self.ordinal(self.kinds.len());
        if let Some(plan) = &self.recipe.plan
            && [plan.key.layers(), plan.value.layers()] != [count; 2]
        {
            let reason = format!("the model has {count} layers with keys and values");
            return Err(unsupported("bits of a layer", plan.key.layers(), &reason));
        }
        Ok(())
    }
}

/// An [`Error::Unsupported`] about a number.
pub(super) fn unsupported(field: &'static str, value: usize, reason: &str) -> Error {
    Error::Unsupported { field, value: value.to_string(), reason: reason.into() }
}
