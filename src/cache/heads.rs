//! The cache of a layer whose KV heads have widths of their own: heads of equal width share one [`LayerCache`].
//!
//! Heads never meet inside attention, so a layer is the sum of its groups: new rows are dealt out to them, and what they answer is
//! put back in the order of the query heads. A layer of one width is one group, and nothing is dealt out.

use super::batch::LayerUndo;
use super::{LayerCache, LayerReport, LayerShape, Mask};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::Rules;
use crate::error::{Error, Result};
use crate::policy::TierPolicy;
use crate::recipe::Recipe;

/// The groups of a layer, each with its KV heads.
#[derive(Clone)]
pub struct HeadGroups<E: Engine> {
    pub(super) groups: Vec<(Vec<usize>, LayerCache<E>)>,
    pub(super) kv_heads: usize,
}

impl<E: Engine> std::fmt::Debug for HeadGroups<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let heads: Vec<_> = self.groups.iter().map(|g| &g.0).collect();
        write!(f, "HeadGroups({heads:?})")
    }
}

impl<E: Engine + Clone> HeadGroups<E> {
    /// An empty cache for layer `layer` with `kv_heads` KV heads, as the plan of the recipe divides them.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no head, the recipe has no form for these head dims, or its plan does not reach a head.
    pub fn new(
        engine: E,
        recipe: &Recipe,
        layer: usize,
        shape: LayerShape,
        kv_heads: usize,
    ) -> Result<HeadGroups<E>> {
        if kv_heads == 0 {
            let reason = "a layer has one or more".into();
            return Err(Error::Unsupported { field: "KV heads", value: "0".into(), reason });
        }
        let groups = recipe
            .by_heads(layer, kv_heads)?
            .into_iter()
            .map(|(heads, recipe)| Ok((heads, LayerCache::new(engine.clone(), &recipe, layer, shape)?)));
        Ok(HeadGroups { groups: groups.collect::<Result<_>>()?, kv_heads })
    }

    /// Gives every group the same tier policy, see [`LayerCache::with_tiers`].
    ///
    /// # Errors
    /// As [`LayerCache::with_tiers`].
    pub fn with_tiers(self, policy: &TierPolicy, observe_every: usize) -> Result<HeadGroups<E>> {
        let groups = self
            .groups
            .into_iter()
            .map(|(heads, cache)| Ok((heads, cache.with_tiers(policy, observe_every)?)));
        Ok(HeadGroups { groups: groups.collect::<Result<_>>()?, kv_heads: self.kv_heads })
    }

    /// Tells every group the padding of the batch, see [`LayerCache::with_left_padding`].
    ///
    /// # Errors
    /// As [`LayerCache::with_left_padding`].
    pub fn with_left_padding(self, padding: Vec<usize>) -> Result<HeadGroups<E>> {
        let groups = self
            .groups
            .into_iter()
            .map(|(heads, cache)| Ok((heads, cache.with_left_padding(padding.clone())?)));
        Ok(HeadGroups { groups: groups.collect::<Result<_>>()?, kv_heads: self.kv_heads })
    }

    /// KV heads and cache of each group.
    pub fn groups(&self) -> impl Iterator<Item = (&[usize], &LayerCache<E>)> {
        self.groups.iter().map(|(heads, cache)| (&heads[..], cache))
    }

    /// Position of the next token.
    pub fn offset(&self) -> usize {
        self.groups.iter().map(|g| g.1.offset()).min().unwrap_or(0)
    }

    /// Positions held, see [`LayerCache::len`].
    pub fn len(&self) -> usize {
        self.groups.iter().map(|g| g.1.len()).min().unwrap_or(0)
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Everything that is held, dense, see [`LayerCache::fetch`].
    ///
    /// # Errors
    /// As [`LayerCache::fetch`].
    pub fn fetch(&self) -> Result<(E::Tensor, E::Tensor)> {
        let parts = self.groups.iter().map(|g| g.1.fetch()).collect::<Result<Vec<_>>>()?;
        let (keys, values): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Ok((self.put_back(&keys, 1)?, self.put_back(&values, 1)?))
    }

    /// The mask of `n` tokens that will be appended next, see [`LayerCache::make_mask`]; the groups lose the same tokens unless a policy
    /// goes by attention, and then this is the mask of the first.
    ///
    /// # Errors
    /// As [`LayerCache::make_mask`].
    pub fn make_mask(&self, n: usize, array: bool, window: Option<usize>) -> Result<Mask<E::Tensor>> {
        match self.groups.first() {
            Some((_, cache)) => cache.make_mask(n, array, window, &[]),
            None => Ok(Mask::None),
        }
    }

    /// Bytes that the tokens need, see [`LayerCache::used_bytes`].
    pub fn used_bytes(&self) -> usize {
        self.groups.iter().map(|g| g.1.used_bytes()).sum()
    }

    /// Bytes of every buffer.
    pub fn nbytes(&self) -> usize {
        self.groups.iter().map(|g| g.1.nbytes()).sum()
    }

    /// What each group holds.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn report(&self) -> Result<Vec<LayerReport>> {
        self.groups.iter().map(|g| g.1.report()).collect()
    }

    /// See [`LayerCache::append`].
    ///
    /// # Errors
    /// As [`LayerCache::append`].
    pub fn append(&mut self, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        self.check(keys, values)?;
        self.all_or_nothing(|layer, undo| layer.append_all(undo, keys, values))
    }

    /// Appends checked tokens to every group.
    fn append_all(
        &mut self,
        undo: &mut [LayerUndo<E::Tensor>],
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        for ((heads, cache), undo) in self.groups.iter_mut().zip(undo) {
            cache.append_all(undo, &take(keys, heads, 1)?, &take(values, heads, 1)?)?;
        }
        Ok(())
    }

    /// Runs a call that changes the groups; if it fails in one of them, all are as they were.
    fn all_or_nothing<R>(
        &mut self,
        call: impl FnOnce(&mut Self, &mut [LayerUndo<E::Tensor>]) -> Result<R>,
    ) -> Result<R> {
        let mut undo: Vec<_> = self.groups.iter().map(|g| g.1.undo()).collect();
        let done = call(self, &mut undo);
        if done.is_err() {
            self.groups.iter_mut().zip(undo).for_each(|(g, undo)| g.1.restore(undo));
        }
        done
    }

    /// See [`LayerCache::update_and_fetch`].
    ///
    /// # Errors
    /// As [`LayerCache::update_and_fetch`].
    pub fn update_and_fetch(
        &mut self,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<(E::Tensor, E::Tensor)> {
        self.check(keys, values)?;
        self.all_or_nothing(|layer, undo| {
            let mut parts = vec![];
            for ((heads, cache), undo) in layer.groups.iter_mut().zip(undo) {
                parts.push(cache.append_and_fetch(undo, &take(keys, heads, 1)?, &take(values, heads, 1)?)?);
            }
            let (keys, values): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            Ok((layer.put_back(&keys, 1)?, layer.put_back(&values, 1)?))
        })
    }

    /// See [`LayerCache::update_and_attend`].
    ///
    /// # Errors
    /// As [`LayerCache::update_and_attend`].
    pub fn update_and_attend(
        &mut self,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        self.check(keys, values)?;
        let share = self.query_heads(queries)?;
        self.check_rules(rules, share)?;
        self.all_or_nothing(|layer, undo| {
            let mut outs = vec![];
            for ((heads, cache), undo) in layer.groups.iter_mut().zip(undo) {
                let (q, rules) = (take(queries, heads, share)?, for_heads(rules, heads, share)?);
                let (k, v) = (take(keys, heads, 1)?, take(values, heads, 1)?);
                cache.check_attend(&q, &k, &v, &rules)?;
                outs.push(cache.append_and_attend(undo, &q, &k, &v, &rules)?);
            }
            layer.put_back(&outs, share)
        })
    }

    /// See [`LayerCache::attend`].
    ///
    /// # Errors
    /// As [`LayerCache::attend`].
    pub fn attend(&self, queries: &E::Tensor, rules: &Rules<E::Tensor>) -> Result<E::Tensor> {
        let share = self.query_heads(queries)?;
        self.check_rules(rules, share)?;
        let one = |(heads, cache): &(Vec<usize>, LayerCache<E>)| {
            cache.attend(&take(queries, heads, share)?, &for_heads(rules, heads, share)?)
        };
        let outs = self.groups.iter().map(one).collect::<Result<Vec<_>>>()?;
        self.put_back(&outs, share)
    }

    /// See [`LayerCache::trim`].
    ///
    /// # Errors
    /// As [`Engine`]'s methods; the cache is then as it was.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let (mut groups, n) = (self.groups.clone(), n.min(self.offset()));
        for (_, cache) in &mut groups {
            cache.trim(n)?;
        }
        self.groups = groups;
        Ok(n)
    }

    fn check(&self, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        for (what, x) in [("keys", keys), ("values", values)] {
            let got = x.shape();
            if got.len() != 4 || got[1] != self.kv_heads {
                return Err(Error::Shape { what, expected: format!("[B, {}, L, D]", self.kv_heads), got });
            }
        }
        for (heads, cache) in &self.groups {
            cache.check(&take(keys, heads, 1)?, &take(values, heads, 1)?)?;
        }
        Ok(())
    }

    /// Checks what of the rules is dealt out by head: a part of what does not fit may fit.
    fn check_rules(&self, rules: &Rules<E::Tensor>, share: usize) -> Result<()> {
        let all = self.kv_heads * share;
        if let Some(mask) = rules.mask.as_ref().map(Buffer::shape)
            && !mask.get(1).is_some_and(|&h| h == 1 || h == all)
        {
            let expected = format!("[B or 1, {all} or 1, L, T]");
            return Err(Error::Shape { what: "mask", expected, got: mask });
        }
        if let Some(logits) = rules.sink_logits.as_ref().map(Buffer::shape)
            && logits != [all]
        {
            return Err(Error::Shape { what: "sink logits", expected: format!("[{all}]"), got: logits });
        }
        Ok(())
    }

    /// Query heads of a KV head.
    fn query_heads(&self, queries: &E::Tensor) -> Result<usize> {
        match queries.shape()[..] {
            [_, hq, _, _] if hq > 0 && hq % self.kv_heads == 0 => Ok(hq / self.kv_heads),
            _ => {
                let expected = format!("[B, a multiple of {}, L, D]", self.kv_heads);
                Err(Error::Shape { what: "queries", expected, got: queries.shape() })
            }
        }
    }

    /// Joins what the groups give, `share` heads for each KV head, in the order of the heads.
    fn put_back(&self, parts: &[E::Tensor], share: usize) -> Result<E::Tensor> {
        if let [part] = parts {
            return Ok(part.clone());
        }
        let place = |head: usize| {
            let at =
                |(i, group): (usize, &(Vec<usize>, _))| Some((i, group.0.iter().position(|&h| h == head)?));
            self.groups.iter().enumerate().find_map(at)
        };
        let heads = (0..self.kv_heads).filter_map(place);
        let heads = heads.map(|(i, at)| parts[i].slice(1, at * share, (at + 1) * share));
        E::Tensor::concat(1, &heads.collect::<Result<Vec<_>>>()?)
    }
}

/// Heads of an array [B, heads, ..], `share` for each of the listed KV heads; the array itself where that is all of them.
fn take<T: Buffer>(x: &T, heads: &[usize], share: usize) -> Result<T> {
    if heads.len() * share == x.shape()[1] {
        return Ok(x.clone());
    }
    let parts = heads.iter().map(|h| x.slice(1, h * share, (h + 1) * share));
    T::concat(1, &parts.collect::<Result<Vec<_>>>()?)
}

/// Rules for some of the heads: masks and sink logits that differ by head are dealt out too.
fn for_heads<T: Buffer>(rules: &Rules<T>, heads: &[usize], share: usize) -> Result<Rules<T>> {
    let mut rules = rules.clone();
    if let Some(mask) = rules.mask.as_mut().filter(|mask| mask.shape().get(1).is_some_and(|&h| h > 1)) {
        *mask = take(mask, heads, share)?;
    }
    if let Some(logits) = &mut rules.sink_logits
        && heads.len() * share < logits.shape().iter().product()
    {
        let parts = heads.iter().map(|h| logits.slice(0, h * share, (h + 1) * share));
        *logits = T::concat(0, &parts.collect::<Result<Vec<_>>>()?)?;
    }
    Ok(rules)
}
