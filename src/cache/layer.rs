//! The cache of one layer: sequences with equal left padding share one [`SequenceCache`], which never sees their padding.
//!
//! A batch without padding is one group of all sequences, and nothing is dealt out. With padding, every sequence is packed as it would
//! be alone: its sinks are its own first tokens, and block borders and frames are counted from its own first token on. Positions that
//! callers give and get belong to the whole batch, padding included.

use super::padding::Group;
use super::{BlockFacts, LayerShape, SequenceCache};
use crate::codec::Codec;
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment};
use crate::error::{Error, Result};
use crate::policy::TierPolicy;
use crate::recipe::Recipe;
use std::ops::Range;
use std::sync::Arc;

/// The cache of one layer.
#[derive(Clone)]
pub struct LayerCache<E: Engine> {
    /// At least one.
    pub(super) groups: Vec<Group<E>>,
    /// Padding tokens of each sequence; empty where the batch has none and may be of any size.
    pub(super) padding: Vec<usize>,
    /// Tokens of the batch where it has padding.
    pub(super) padded_offset: usize,
}

impl<E: Engine> std::fmt::Debug for LayerCache<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LayerCache({} groups of sequences, left padding {:?})", self.groups.len(), self.padding)
    }
}

impl<E: Engine + Clone> LayerCache<E> {
    /// An empty cache for one layer of a model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the recipe has no form for these head dims.
    pub fn new(engine: E, recipe: &Recipe, layer: usize, shape: LayerShape) -> Result<LayerCache<E>> {
        SequenceCache::new(engine, recipe, layer, shape).map(LayerCache::from)
    }

    /// An empty cache with given codecs, for calibrated levels.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a codec is made for another head dim.
    pub fn with_codecs(
        engine: E,
        recipe: Recipe,
        shape: LayerShape,
        codecs: [Option<Arc<Codec>>; 2],
    ) -> Result<LayerCache<E>> {
        SequenceCache::with_codecs(engine, recipe, shape, codecs).map(LayerCache::from)
    }

    /// Gives an empty cache a tier policy, which looks at received attention every `observe_every` tokens if it needs it: that costs
    /// the scores of one query once more, so one part in `observe_every` of decoding at most.
    ///
    /// The recipe says how blocks are packed, the tiers with how many bits. 16 bits are half floats. Decisions by
    /// attention depend on the queries, so a cache with them is not the same for any chunking of appends.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the recipe has no form at a tier's bits, the cache holds tokens, or `observe_every` is zero.
    pub fn with_tiers(mut self, policy: &TierPolicy, observe_every: usize) -> Result<LayerCache<E>> {
        let with = |g: Group<E>| Ok(Group { cache: g.cache.with_tiers(policy, observe_every)?, ..g });
        self.groups = self.groups.into_iter().map(with).collect::<Result<_>>()?;
        Ok(self)
    }

    /// Tells an empty cache that the first `padding[b]` tokens of sequence `b` are padding; an empty list takes the padding away.
    ///
    /// Padding tokens count as positions, but they are not kept: they take no part in sinks, frames, blocks or attention, and
    /// [`LayerCache::fetch`] gives zeros for them. Each sequence has the same codes, bit for bit, as if it were alone in a cache
    /// without padding; sequences of equal padding are attended to in one call, others in calls of their own.
    /// [`Rules::left_padding`] may hide more tokens, never fewer: of the two, the greater counts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the cache holds tokens.
    pub fn with_left_padding(mut self, padding: Vec<usize>) -> Result<LayerCache<E>> {
        if self.offset() > 0 {
            let (value, reason) = (self.offset().to_string(), "the cache already holds tokens".into());
            return Err(Error::Unsupported { field: "left padding", value, reason });
        }
        let empty = self.groups.swap_remove(0).cache;
        self.groups = Group::all(&padding, &empty);
        self.padding = padding;
        Ok(self)
    }

    /// Padding tokens of each sequence; empty if there are none.
    pub fn left_padding(&self) -> &[usize] {
        &self.padding
    }

    /// Tokens appended so far less those trimmed: the position of the next token. Eviction does not change it.
    pub fn offset(&self) -> usize {
        if self.padding.is_empty() { self.groups[0].cache.offset() } else { self.padded_offset }
    }

    /// Positions held: every position at which a sequence holds a token, and padding.
    pub fn len(&self) -> usize {
        if self.padding.is_empty() { self.groups[0].cache.len() } else { self.positions(|_| &[]).len() }
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        self.groups[0].cache.engine()
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        self.groups[0].cache.recipe()
    }

    /// Bytes that the tokens held need: exact rows, codes, scales and tables, however the tokens came. [`LayerCache::nbytes`] has the
    /// rows that hold no token yet besides, the queries that are kept until the first block leaves the window, and what is kept so that
    /// the newest block can be taken back.
    pub fn used_bytes(&self) -> usize {
        self.groups.iter().map(|g| g.cache.used_bytes()).sum()
    }

    /// Bytes that the cache holds: every buffer, allocated rows that hold no token yet included. What a trim has left in the buffer of
    /// the window stays held for the tokens to come; [`LayerCache::used_bytes`] is without it.
    pub fn nbytes(&self) -> usize {
        self.groups.iter().map(|g| g.cache.nbytes()).sum()
    }

    /// Appends keys [B, H, L, D] and values [B, H, L, Dv] and gives all of them dense, in their dtype: the oracle, always right. Tokens
    /// that a policy drops at this call are given once more, at their places; [`LayerCache::make_mask`] hides them from the queries that
    /// come after.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if they do not fit what the cache holds; the cache is then as it was.
    pub fn update_and_fetch(
        &mut self,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<(E::Tensor, E::Tensor)> {
        self.check(keys, values)?;
        self.all_or_nothing(|layer, undo| layer.append_and_fetch(undo, keys, values))
    }

    /// Appends keys [B, H, L, D] and values [B, H, L, Dv].
    ///
    /// # Errors
    /// As [`LayerCache::update_and_fetch`].
    pub fn append(&mut self, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        self.check(keys, values)?;
        self.all_or_nothing(|layer, undo| layer.append_all(undo, keys, values))
    }

    /// Appends keys and values and attends with queries [B, Hq, L, D]: [B, Hq, L, Dv] in the dtype of the queries.
    ///
    /// A mask in `rules` covers all positions up to the last new token, evicted ones included. L may exceed the room of the window: the
    /// call is then cut at block borders, and every query sees what it would have seen had the tokens come one by one. A query at a
    /// position of padding gives zeros.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit; the cache is then as it was.
    pub fn update_and_attend(
        &mut self,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        self.check_attend(queries, keys, values, rules)?;
        self.all_or_nothing(|layer, undo| layer.append_and_attend(undo, queries, keys, values, rules))
    }

    /// Attends without appending.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit, or the cache is empty.
    pub fn attend(&self, queries: &E::Tensor, rules: &Rules<E::Tensor>) -> Result<E::Tensor> {
        if self.padding.is_empty() {
            return self.groups[0].cache.attend(queries, rules);
        }
        let positions = self.positions(|_| &[]);
        self.check_queries(queries, rules, positions.len())?;
        let l = queries.shape()[2];
        if l > positions.len() || positions.is_empty() {
            let expected = format!("at most as many as the {} positions held", positions.len());
            return Err(Error::Shape { what: "queries", expected, got: queries.shape() });
        }
        let one = |g: &Group<E>| {
            let from = l.saturating_sub(g.cache.offset());
            let q = g.sequences_of(queries)?.slice(2, from, l)?;
            let out = match l - from {
                0 => None,
                _ => Some(g.cache.attend(&q, &g.rules(rules, from, &g.held_runs(&positions, &[]))?)?),
            };
            g.behind_zeros(&q, from, out)
        };
        self.put_back(&self.groups.iter().map(one).collect::<Result<Vec<_>>>()?)
    }

    /// All keys and values dense, in the dtype they came in. Where a sequence holds nothing at a position that another one holds,
    /// which padding and eviction cause, its row is zero.
    ///
    /// # Errors
    /// [`Error::Shape`] if the cache has never held a token.
    pub fn fetch(&self) -> Result<(E::Tensor, E::Tensor)> {
        self.fetch_with(|_| &[])
    }

    /// Drops the last `n` tokens, exact or packed, and says how many were dropped (all, if there are fewer). Tokens that a tier policy
    /// evicted count with the rest: the next token has position `offset - n`. They do not come back, unless they left within `draft`.
    ///
    /// Of the newest [`Recipe::draft`] tokens any number can be trimmed, in any pieces, and leaves no trace: the cache is bit for bit
    /// what it was before they came, even where a block was packed, a frame was made or a policy decided in between. That holds at every
    /// offset from which no more than `draft` tokens were appended and trimmed again at a time. Beyond them, tokens that were packed go
    /// back to the window as they decode.
    ///
    /// All rows of a batch lose the same `n`. Where they accept different numbers of drafts, trim what all reject and hide the rest by
    /// [`crate::engine::attention::Rules::mask`].
    ///
    /// # Errors
    /// As [`Engine`]'s methods; the cache is then as it was.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        if self.padding.is_empty() {
            return self.groups[0].cache.trim(n);
        }
        let n = n.min(self.padded_offset);
        let target = self.padded_offset - n;
        let mut groups = self.groups.clone();
        for g in &mut groups {
            g.cache.trim(g.cache.offset().saturating_sub(target.saturating_sub(g.padding)))?;
        }
        (self.groups, self.padded_offset) = (groups, target);
        Ok(n)
    }

    /// The parts in token order. Buffers are shared, not copied. With left padding these are the parts of one group of sequences after the
    /// other, each counted from its own first token.
    pub fn segments(&self) -> Vec<Segment<E::Tensor>> {
        self.groups.iter().flat_map(|g| g.cache.segments()).collect()
    }

    /// Keeps blocks with tokens at these positions in the tier they are in; new ones among them stay in the first tier. Without a
    /// policy nothing falls anyway.
    ///
    /// # Errors
    /// [`Error::Range`] if the range runs backwards.
    pub fn pin(&mut self, tokens: Range<usize>) -> Result<()> {
        self.groups.iter_mut().try_for_each(|g| g.cache.pin(g.own(&tokens)))
    }

    /// Undoes [`LayerCache::pin`] for these positions.
    ///
    /// # Errors
    /// [`Error::Range`] if the range runs backwards.
    pub fn unpin(&mut self, tokens: Range<usize>) -> Result<()> {
        self.groups.iter_mut().try_for_each(|g| g.cache.unpin(g.own(&tokens)))
    }

    /// What the policy sees, for each group of sequences of equal padding.
    pub fn blocks(&self) -> Vec<BlockFacts> {
        let of = |g: &Group<E>| {
            let padding = g.padding;
            g.cache.blocks().into_iter().map(move |b| BlockFacts { start: b.start + padding, ..b })
        };
        self.groups.iter().flat_map(of).collect()
    }
}
