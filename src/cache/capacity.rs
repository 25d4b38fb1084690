//! What a cache of a given length will cost, from the row bytes of the codecs that the cache itself uses.
//!
//! bytes(T) = layers * heads * (exact rows + sum over tiers of tokens * row bytes + tables), with tokens laid out and tiers decided as
//! the cache does it; so the plan of a half-precision cache equals its `nbytes`, and its `used_bytes`.

use super::append::rows_for;
use super::report::DRAFT;
use super::tiers::tier_codecs;
use crate::codec::Codec;
use crate::compressor::TOKENS_PER_BLOCK;
use crate::error::{Error, Result};
use crate::policy::{Action, BlockFacts, ModelShape, ProgressivePolicy, TierPolicy};
use crate::recipe::Recipe;
use crate::spec::Side;
use serde::Serialize;
use std::sync::Arc;

const SINKS: &str = "sinks";
const WINDOW: &str = "window";

/// The layout of caches by a recipe and a tier policy.
#[derive(Clone, Debug)]
pub struct CapacityPlan {
    policy: TierPolicy,
    shape: ModelShape,
    sinks: usize,
    window: usize,
    /// Newest tokens that can be taken back.
    draft: usize,
    /// Whether blocks leave the window.
    blocks: bool,
    /// Bits and bytes of a key and of a value in each tier.
    tiers: Vec<[(f32, usize); 2]>,
    table_bytes: usize,
}

/// Tokens of one tier, over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanPart {
    /// `sinks`, `window`, `tables`, `draft` (what is kept so that the newest block can be taken back), or the name of the tier.
    pub tier: String,
    /// Tokens of a layer.
    pub tokens: usize,
    /// Bits of a code of the keys.
    pub key_bits: f32,
    /// Bits of a code of the values.
    pub value_bits: f32,
    /// Bytes of all layers.
    pub bytes: usize,
}

impl CapacityPlan {
    /// The plan of caches by a recipe and a policy.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] if the recipe has no form for these head dims or at a tier's bits, or the model has more than
    /// 2^32 heads.
    pub fn new(recipe: &Recipe, policy: &TierPolicy, shape: &ModelShape) -> Result<CapacityPlan> {
        if shape.layers.checked_mul(shape.kv_heads).is_none_or(|heads| heads > 1 << 32) {
            let value = format!("{} layers of {} KV heads", shape.layers, shape.kv_heads);
            return Err(Error::Unsupported { field: "shape", value, reason: "at most 2^32 heads".into() });
        }
        let codec = |side, dim| -> Result<Option<Arc<Codec>>> {
            recipe.spec(side, 0, dim)?.map(|spec| Codec::new(spec).map(Arc::new)).transpose()
        };
        let codecs = [codec(Side::Key, shape.key_dim)?, codec(Side::Value, shape.value_dim)?];
        let tiers = match policy {
            TierPolicy::None => vec![codecs.clone()],
            policy => tier_codecs(&codecs, &policy.bits())?,
        };
        let row = |codec: &Option<Arc<Codec>>, dim: usize| match codec {
            Some(codec) => (codec.spec().nominal_bits(), codec.row_bytes()),
            None => (16.0, 2 * dim),
        };
        let spec = |i: usize| tiers.iter().rev().find_map(|t| t[i].as_ref()).map(|c| *c.spec());
        let tables = [(recipe.centred, shape.key_dim), (false, shape.value_dim)];
        let tables = tables
            .iter()
            .enumerate()
            .filter_map(|(i, &(centred, dim))| Some(4 * dim * spec(i)?.tables(centred)));
        Ok(CapacityPlan {
            policy: policy.clone(),
            shape: *shape,
            sinks: recipe.sinks,
            window: recipe.window,
            draft: recipe.draft,
            blocks: codecs.iter().any(Option::is_some) || policy.limit().is_some(),
            table_bytes: tables.sum(),
            tiers: tiers.iter().map(|t| [row(&t[0], shape.key_dim), row(&t[1], shape.value_dim)]).collect(),
        })
    }

    /// The parts of a cache of `tokens` tokens. A policy by attention is given masses that rise evenly with the position.
    pub fn parts(&self, tokens: usize) -> Vec<PlanPart> {
        let ModelShape { layers, kv_heads, key_dim, value_dim } = self.shape;
        let heads = layers * kv_heads;
        let exact = |tier: &str, tokens: usize, rows: usize| PlanPart {
            tier: tier.into(),
            tokens,
            key_bits: 16.0,
            value_bits: 16.0,
            bytes: product([heads, rows, 2 * (key_dim + value_dim)]),
        };
        let sinks = self.sinks.min(tokens);
        let (full, rest) = (self.window + TOKENS_PER_BLOCK, tokens - sinks);
        let count = self.packed_blocks(tokens);
        let held = rest - count * TOKENS_PER_BLOCK;
        let most = if self.blocks { full } else { usize::MAX };
        let rows = if count > 0 { full } else { rows_for(held, most) };
        let mut parts = vec![];
        if sinks > 0 {
            parts.push(exact(SINKS, sinks, rows_for(sinks, self.sinks)));
        }
        for (i, tokens) in self.tokens_by_tier(sinks, count).into_iter().enumerate() {
            let [(key_bits, key), (value_bits, value)] = self.tiers[i];
            let bytes = product([heads, tokens, key + value]);
            parts.push(PlanPart { tier: self.policy.name(i), tokens, key_bits, value_bits, bytes });
        }
        parts.push(exact(WINDOW, held, rows));
        let bytes = if count > 0 { heads * self.table_bytes } else { 0 };
        parts.push(PlanPart { tier: "tables".into(), tokens: 0, key_bits: 32.0, value_bits: 32.0, bytes });
        let behind_border = if count > 0 { held + TOKENS_PER_BLOCK - full } else { usize::MAX };
        if behind_border <= 2 * self.draft {
            parts.push(PlanPart { bytes: self.draft_bytes(sinks, count), ..exact(DRAFT, 0, 0) });
        }
        parts
    }

    /// Blocks that have left the window of a cache of `tokens` tokens.
    fn packed_blocks(&self, tokens: usize) -> usize {
        let behind_sinks = tokens.saturating_sub(self.sinks);
        if self.blocks {
            behind_sinks.saturating_sub(self.window + TOKENS_PER_BLOCK).div_ceil(TOKENS_PER_BLOCK)
        } else {
            0
        }
    }

    /// Packed tokens of each tier. Of a policy by age whole runs of blocks are counted at once: a search for the longest context asks
    /// for millions of tokens.
    fn tokens_by_tier(&self, sinks: usize, count: usize) -> Vec<usize> {
        let mut tiers = vec![0; self.tiers.len()];
        match &self.policy {
            TierPolicy::None => tiers[0] = count * TOKENS_PER_BLOCK,
            TierPolicy::Progressive(policy) => {
                let mut younger = 0;
                for (tokens, tier) in tiers.iter_mut().zip(policy.tiers()) {
                    let end =
                        tier.until.map_or(count, |until| self.blocks_before(until).min(count)).max(younger);
                    *tokens = (end - younger) * TOKENS_PER_BLOCK;
                    younger = end;
                }
            }
            TierPolicy::Attention(_) => {
                for (block, action) in self.blocks(sinks, count) {
                    if let Some(tier) = tier_after(action) {
                        tiers[tier] += block.len;
                    }
                }
            }
        }
        tiers
    }

    /// How many of the newest blocks are younger than an age.
    fn blocks_before(&self, until: usize) -> usize {
        until.saturating_sub(self.window).div_ceil(TOKENS_PER_BLOCK)
    }

    /// Bytes that are kept while the newest of `count` blocks can be taken back: its exact rows, and older blocks that the policy has
    /// recoded or dropped together with it, as they were.
    fn draft_bytes(&self, sinks: usize, count: usize) -> usize {
        let ModelShape { layers, kv_heads, key_dim, value_dim } = self.shape;
        let row = |tier: usize| self.tiers[tier][0].1 + self.tiers[tier][1].1;
        let changed: Vec<usize> = match &self.policy {
            TierPolicy::None => vec![],
            TierPolicy::Progressive(policy) => {
                // The blocks that the newest one has pushed over the end of a tier, counted from the newest of those before it.
                let ends = policy
                    .tiers()
                    .iter()
                    .filter_map(|tier| tier.until)
                    .map(|until| self.blocks_before(until));
                let mut pushed: Vec<usize> =
                    ends.filter(|end| (1..count).contains(end)).map(|end| end - 1).collect();
                pushed.dedup();
                let was = |block: usize| policy.tier(block * TOKENS_PER_BLOCK + self.window);
                pushed.into_iter().map(was).filter(|tier| *tier < self.tiers.len()).collect()
            }
            TierPolicy::Attention(_) => {
                let (before, after) =
                    (self.blocks(sinks, count.saturating_sub(1)), self.blocks(sinks, count));
                let changed = before.iter().zip(&after).filter(|(b, a)| tier_after(b.1) != tier_after(a.1));
                changed.filter_map(|(b, _)| tier_after(b.1)).collect()
            }
        };
        let old: usize = changed.into_iter().map(|tier| TOKENS_PER_BLOCK * row(tier)).sum();
        product([layers, kv_heads, TOKENS_PER_BLOCK * 2 * (key_dim + value_dim) + old])
    }

    /// What the policy would be shown, and its answer.
    fn blocks(&self, sinks: usize, count: usize) -> Vec<(BlockFacts, Action)> {
        let all = (count * (count + 1) / 2) as f32;
        let block = |j: usize| BlockFacts {
            start: sinks + j * TOKENS_PER_BLOCK,
            len: TOKENS_PER_BLOCK,
            age: (count - 1 - j) * TOKENS_PER_BLOCK + self.window,
            mass: (j + 1) as f32 / all,
            observed: u32::MAX,
            tier: 0,
            pinned: false,
        };
        let blocks: Vec<BlockFacts> = (0..count).map(block).collect();
        let actions = self.policy.decide(&blocks);
        blocks.into_iter().zip(actions).collect()
    }

    /// Bytes that caches of `tokens` tokens hold, [`super::LayerCache::nbytes`] of all layers unless tokens were trimmed.
    pub fn bytes(&self, tokens: usize) -> usize {
        sum(self.parts(tokens).iter().map(|p| p.bytes))
    }

    /// The most bytes that caches of up to `tokens` tokens hold while the last ones may be drafts.
    pub(super) fn most_bytes(&self, tokens: usize) -> usize {
        let count = self.packed_blocks(tokens);
        let held = sum(self.parts(tokens).iter().filter(|p| p.tier != DRAFT).map(|p| p.bytes));
        let draft = if count > 0 && self.draft > 0 { self.draft_bytes(self.sinks, count) } else { 0 };
        held.saturating_add(draft)
    }

    /// Bytes of what the tokens need, [`super::LayerCache::used_bytes`] of all layers: [`CapacityPlan::bytes`] less exact rows that hold no
    /// token yet, and less what is kept for drafts.
    pub fn used_bytes(&self, tokens: usize) -> usize {
        let ModelShape { layers, kv_heads, key_dim, value_dim } = self.shape;
        let row = layers * kv_heads * 2 * (key_dim + value_dim);
        let exact = |p: &PlanPart| p.tier == SINKS || p.tier == WINDOW;
        let parts = self.parts(tokens);
        let parts = parts.iter().filter(|p| p.tier != DRAFT);
        sum(parts.map(|p| if exact(p) { p.tokens.saturating_mul(row) } else { p.bytes }))
    }

    /// Bytes of the same keys and values in half precision, without any allowance.
    pub fn fp16_bytes(&self, tokens: usize) -> usize {
        let ModelShape { layers, kv_heads, key_dim, value_dim } = self.shape;
        product([layers, kv_heads, tokens, 2 * (key_dim + value_dim)])
    }

    /// The longest cache that fits into `budget` bytes, also while its newest block can be taken back. More than 2^26 tokens are not
    /// looked for.
    pub fn capacity(&self, budget: usize) -> usize {
        longest(budget, |tokens| self.most_bytes(tokens))
    }
}

/// The tier of a fresh block after an action; `None` if it is dropped.
fn tier_after(action: Action) -> Option<usize> {
    match action {
        Action::Keep => Some(0),
        Action::Recode(tier) => Some(tier),
        Action::Drop => None,
    }
}

/// More bytes than there are stand for all that no machine has; they never wrap.
fn product<const N: usize>(factors: [usize; N]) -> usize {
    factors.into_iter().fold(1, usize::saturating_mul)
}

fn sum(bytes: impl Iterator<Item = usize>) -> usize {
    bytes.fold(0, usize::saturating_add)
}

/// The most tokens, up to 2^26, whose bytes are within a budget.
pub(super) fn longest(budget: usize, bytes: impl Fn(usize) -> usize) -> usize {
    let (mut low, mut high) = (0, 1);
    while high < 1 << 26 && bytes(high) <= budget {
        (low, high) = (high, 2 * high);
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if bytes(middle) <= budget { low = middle } else { high = middle }
    }
    low
}

impl ProgressivePolicy {
    /// The longest context of a model whose cache fits into `budget` bytes, see [`CapacityPlan::capacity`].
    ///
    /// # Errors
    /// As [`CapacityPlan::new`].
    pub fn capacity(&self, recipe: &Recipe, shape: &ModelShape, budget: usize) -> Result<usize> {
        Ok(CapacityPlan::new(recipe, &TierPolicy::Progressive(self.clone()), shape)?.capacity(budget))
    }
}
