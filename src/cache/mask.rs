//! The mask for queries that are about to be appended, for callers that attend by themselves on what `update_and_fetch` gives.

use super::held::Held;
use super::padding::Group;
use super::{LayerCache, SequenceCache};
use crate::compressor::TOKENS_PER_BLOCK;
use crate::engine::Engine;
use crate::engine::attention::{Rules, positions, span};
use crate::error::{Error, Result};
use crate::policy::Action;
use std::ops::Range;

/// What mlx-lm's `make_mask` answers.
#[derive(Clone, Debug)]
pub enum Mask<T> {
    /// Every query sees every token.
    None,
    /// A query sees the tokens up to its own, and nothing else is hidden.
    Causal,
    /// Booleans (on the CPU engine u8), false hides: [1, 1, L, T], or [B, 1, L, T] with padding, over the positions held and the L new
    /// ones.
    Array(T),
}

impl<E: Engine + Clone> LayerCache<E> {
    /// The mask of `n` tokens that will be appended next, over what [`LayerCache::update_and_fetch`] will give. `array` asks for an
    /// array even where a word would do; `window` and `left_padding` mean what they do in [`Rules`], and the padding of the cache is hidden too.
    /// Tokens that a policy will drop while these come are hidden from the queries behind, as [`LayerCache::update_and_attend`] hides
    /// them; what a policy by attention learns in that call itself cannot be foreseen.
    ///
    /// # Errors
    /// [`Error::Shape`] if `left_padding` is for another number of sequences than the cache's own; the engine's own.
    pub fn make_mask(
        &self,
        n: usize,
        array: bool,
        window: Option<usize>,
        left_padding: &[usize],
    ) -> Result<Mask<E::Tensor>> {
        let own = self.left_padding();
        if !own.is_empty() && !left_padding.is_empty() && own.len() != left_padding.len() {
            let (expected, got) = (format!("{} entries", own.len()), vec![left_padding.len()]);
            return Err(Error::Shape { what: "left padding", expected, got });
        }
        let rows = own.len().max(left_padding.len()).max(1);
        let padding =
            |b: usize| [own, left_padding].map(|p| p.get(b).copied().unwrap_or(0)).into_iter().max();
        let rules = Rules::<E::Tensor> {
            sliding_window: window,
            left_padding: (0..rows).filter_map(padding).collect(),
            ..Rules::causal(1.0)
        };
        let offset = self.offset();
        let mut columns = if own.is_empty() { positions(&self.segments()) } else { self.positions(|_| &[]) };
        columns.extend(offset..offset + n);
        // The runs that each sequence will lose, and the first query without them.
        let lost = |g: &Group<E>| {
            let padding = g.padding;
            let runs = g.cache.foreseen((offset + n).saturating_sub(offset.max(padding)));
            runs.into_iter().map(move |(r, at)| (r.start + padding..r.end + padding, at + padding)).collect()
        };
        let lost: Vec<Vec<(Range<usize>, usize)>> = self.groups.iter().map(lost).collect();
        let group = |b: usize| self.groups.iter().position(|g| g.sequences.contains(&b)).unwrap_or(0);
        let spans = (0..rows).flat_map(|b| (0..n).map(move |i| (b, offset + i)));
        let spans: Vec<_> = spans.map(|(b, query)| (b, query, span(&rules, b, query))).collect();
        // Positions rise, so the first token tells whether anything before a query is hidden.
        let plain = spans.iter().all(|(_, _, s)| columns.first().is_none_or(|first| s.start <= *first));
        if plain && lost.iter().all(Vec::is_empty) && !array {
            return Ok(if n <= 1 { Mask::None } else { Mask::Causal });
        }
        // Sequences of other padding may hold a position that this one has lost.
        let held = |g: &Group<E>| -> Vec<bool> {
            let mut all = vec![own.is_empty(); offset + n];
            g.held(&[]).into_iter().chain(offset..offset + n).for_each(|p| all[p] = true);
            all
        };
        let held: Vec<Vec<bool>> = self.groups.iter().map(held).collect();
        let mut bits = Vec::with_capacity(spans.len() * columns.len());
        for (b, query, span) in spans {
            let b = group(b);
            let gone = |t: &usize| lost[b].iter().any(|(run, at)| query >= *at && run.contains(t));
            bits.extend(columns.iter().map(|t| span.contains(t) && held[b][*t] && !gone(t)));
        }
        Ok(Mask::Array(self.engine().mask(&[rows, 1, n, columns.len()], &bits)?))
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// Runs of tokens that the policy will drop while `n` more come, each with the position of the first token that comes after. What the
    /// policy decides depends on numbers only, so this is [`SequenceCache::flush`] without arrays.
    fn foreseen(&self, n: usize) -> Vec<(Range<usize>, usize)> {
        let Some(tiers) = self.tiers.as_ref().filter(|tiers| tiers.policy.drops()) else { return vec![] };
        let (end, full, mut dropped) = (self.offset + n, self.full_window(), vec![]);
        let (mut offset, mut window) = (self.offset.max(self.recipe.sinks), self.window_len);
        let mut blocks = tiers.blocks.clone();
        while offset.saturating_add(full - window) < end {
            offset += full - window;
            window = full - TOKENS_PER_BLOCK;
            blocks.push(Held::fresh(offset - full));
            let actions = tiers.policy.decide(&tiers.facts(&blocks, offset));
            let mut kept = vec![];
            for (mut block, action) in blocks.into_iter().zip(actions) {
                match action {
                    Action::Drop => {
                        dropped.push((block.start..block.start + block.len, offset));
                        continue;
                    }
                    Action::Recode(tier) => block.tier = tier.min(tiers.codecs.len() - 1),
                    Action::Keep => {}
                }
                kept.push(block);
            }
            blocks = kept;
        }
        dropped
    }
}
