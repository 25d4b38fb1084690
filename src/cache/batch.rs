//! What a call does in every group of a batch: dealt out to them, and put together again.

use super::consistent::{MOST_TOKENS, misfit};
use super::padding::Group;
use super::undo::Undo;
use super::{LayerCache, LayerReport, LayerShape, SequenceCache, State};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The scalars of a padded batch; the scalars of each group's cache are a text of their own.
#[derive(Serialize, Deserialize)]
struct Padded {
    left_padding: Vec<usize>,
    offset: usize,
    sequences: Vec<String>,
}

/// What the groups of a layer were before a call.
pub(super) struct LayerUndo<T> {
    pub(super) groups: Vec<Undo<T>>,
    padded_offset: usize,
}

impl<E: Engine + Clone> LayerCache<E> {
    /// What the groups are now, for a call that may fail.
    pub(super) fn undo(&self) -> LayerUndo<E::Tensor> {
        let groups = self.groups.iter().map(|g| Undo::new(&g.cache)).collect();
        LayerUndo { groups, padded_offset: self.padded_offset }
    }

    /// Makes the groups what they were.
    pub(super) fn restore(&mut self, undo: LayerUndo<E::Tensor>) {
        self.padded_offset = undo.padded_offset;
        self.groups.iter_mut().zip(undo.groups).for_each(|(g, undo)| g.cache.restore(undo));
    }

    /// Runs a call that changes the cache; if it fails, the cache is as it was.
    pub(super) fn all_or_nothing<R>(
        &mut self,
        call: impl FnOnce(&mut Self, &mut LayerUndo<E::Tensor>) -> Result<R>,
    ) -> Result<R> {
        let mut undo = self.undo();
        let done = call(self, &mut undo);
        if done.is_err() {
            self.restore(undo);
        }
        done
    }

    /// Appends checked tokens to every group.
    pub(super) fn append_all(
        &mut self,
        undo: &mut LayerUndo<E::Tensor>,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        if self.padding.is_empty() {
            return self.groups[0].cache.append_all(&mut undo.groups[0], keys, values);
        }
        let (offset, total) = (self.padded_offset, keys.shape()[2]);
        for (g, undo) in self.groups.iter_mut().zip(&mut undo.groups) {
            let from = g.padding.saturating_sub(offset).min(total);
            let new = |x: &E::Tensor| g.sequences_of(x)?.slice(2, from, total);
            let (keys, values) = (new(keys)?, new(values)?);
            g.cache.open(undo, &keys, &values)?;
            g.cache.append_all(undo, &keys, &values)?;
        }
        self.padded_offset += total;
        Ok(())
    }

    /// Checks the arrays of [`LayerCache::update_and_attend`].
    pub(super) fn check_attend(
        &self,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<()> {
        if self.padding.is_empty() {
            return self.groups[0].cache.check_attend(queries, keys, values, rules);
        }
        let total = self.check(keys, values)?;
        if queries.shape().get(2) != Some(&total) || total == 0 {
            let expected = format!("[B, Hq, {total}, D] with at least one token");
            return Err(Error::Shape { what: "queries", expected, got: queries.shape() });
        }
        self.check_queries(queries, rules, self.padded_offset + total)
    }

    /// Appends checked tokens and attends with their queries.
    pub(super) fn append_and_attend(
        &mut self,
        undo: &mut LayerUndo<E::Tensor>,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        if self.padding.is_empty() {
            let (cache, undo) = (&mut self.groups[0].cache, &mut undo.groups[0]);
            return cache.append_and_attend(undo, queries, keys, values, rules);
        }
        let (offset, total, mut outs) = (self.padded_offset, keys.shape()[2], vec![]);
        for (g, undo) in self.groups.iter_mut().zip(&mut undo.groups) {
            let from = g.padding.saturating_sub(offset).min(total);
            let new = |x: &E::Tensor| g.sequences_of(x)?.slice(2, from, total);
            let (q, keys, values) = (new(queries)?, new(keys)?, new(values)?);
            let rules = g.rules(rules, from, &[(g.padding, offset + total)])?;
            g.cache.open(undo, &keys, &values)?;
            let out = match total - from {
                0 => None,
                _ => Some(g.cache.append_and_attend(undo, &q, &keys, &values, &rules)?),
            };
            outs.push(g.behind_zeros(&q, from, out)?);
        }
        self.padded_offset += total;
        self.put_back(&outs)
    }

    /// Puts what the groups give in the order of the sequences.
    pub(super) fn put_back(&self, parts: &[E::Tensor]) -> Result<E::Tensor> {
        if let [part] = parts {
            return Ok(part.clone());
        }
        let place = |b: usize| {
            let at = |(i, g): (usize, &Group<E>)| Some((i, g.sequences.iter().position(|&s| s == b)?));
            self.groups.iter().enumerate().find_map(at)
        };
        let rows = (0..self.padding.len()).filter_map(place);
        let rows = rows.map(|(i, at)| parts[i].slice(0, at, at + 1));
        E::Tensor::concat(0, &rows.collect::<Result<Vec<_>>>()?)
    }

    /// Positions that [`LayerCache::fetch`] gives, rising: padding, and every position at which some sequence holds a token. `evicted` are
    /// segments of a group that are given besides.
    pub(super) fn positions<'a>(&self, evicted: impl Fn(usize) -> &'a [Segment<E::Tensor>]) -> Vec<usize>
    where
        E::Tensor: 'a,
    {
        let most = self.groups.iter().map(|g| g.padding).max().unwrap_or(0);
        let mut held = vec![false; self.offset()];
        held.iter_mut().take(most).for_each(|h| *h = true);
        self.groups.iter().enumerate().flat_map(|(i, g)| g.held(evicted(i))).for_each(|p| held[p] = true);
        held.iter().enumerate().filter_map(|(p, held)| held.then_some(p)).collect()
    }

    /// All keys and values dense, with segments of a group that are given besides.
    pub(super) fn fetch_with<'a>(
        &self,
        evicted: impl Fn(usize) -> &'a [Segment<E::Tensor>],
    ) -> Result<(E::Tensor, E::Tensor)>
    where
        E::Tensor: 'a,
    {
        if self.padding.is_empty() {
            return self.groups[0].cache.fetch(evicted(0));
        }
        let all = self.positions(&evicted);
        let parts = self.groups.iter().enumerate().map(|(i, g)| g.fetch(&all, evicted(i)));
        let (keys, values): (Vec<_>, Vec<_>) = parts.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        Ok((self.put_back(&keys)?, self.put_back(&values)?))
    }

    /// Appends checked tokens and gives everything dense, what they have displaced included.
    pub(super) fn append_and_fetch(
        &mut self,
        undo: &mut LayerUndo<E::Tensor>,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<(E::Tensor, E::Tensor)> {
        undo.groups.iter_mut().for_each(Undo::keep_evicted);
        self.append_all(undo, keys, values)?;
        self.fetch_with(|i| undo.groups[i].evicted())
    }

    /// Checks new tokens against the cache and gives their number.
    pub(super) fn check(&self, keys: &E::Tensor, values: &E::Tensor) -> Result<usize> {
        let (batch, shape) = (self.padding.len(), keys.shape());
        if batch > 0 && (shape.len() != 4 || values.shape().len() != 4 || shape[0] != batch) {
            let expected = format!("[{batch}, H, L, D], as the left padding is of {batch} sequences");
            return Err(Error::Shape { what: "keys", expected, got: shape });
        }
        if batch > 0 && values.shape()[0] != batch {
            let expected = format!("[{batch}, H, L, D]");
            return Err(Error::Shape { what: "values", expected, got: values.shape() });
        }
        let check = |g: &Group<E>| g.cache.check(&g.sequences_of(keys)?, &g.sequences_of(values)?);
        let totals = self.groups.iter().map(check).collect::<Result<Vec<_>>>()?;
        Ok(totals[0])
    }

    /// Checks queries and rules of a padded batch, as far as they are dealt out here; a mask has `columns` columns.
    pub(super) fn check_queries(
        &self,
        queries: &E::Tensor,
        rules: &Rules<E::Tensor>,
        columns: usize,
    ) -> Result<()> {
        let (batch, q) = (self.padding.len(), queries.shape());
        let dim = self.groups[0].cache.shape.key_dim;
        if q.len() != 4 || q[0] != batch || q[1] == 0 || q[3] != dim {
            return Err(Error::Shape {
                what: "queries",
                expected: format!("[{batch}, Hq, L, {dim}]"),
                got: q,
            });
        }
        if let Some(mask) = rules.mask.as_ref().map(Buffer::shape)
            && !matches!(mask[..], [b, _, l, t] if (b == 1 || b == batch) && l == q[2] && t == columns)
        {
            let expected = format!("[{batch} or 1, Hq or 1, {}, {columns}]", q[2]);
            return Err(Error::Shape { what: "mask", expected, got: mask });
        }
        if !rules.left_padding.is_empty() && rules.left_padding.len() != batch {
            let (expected, got) = (format!("{batch} entries"), vec![rules.left_padding.len()]);
            return Err(Error::Shape { what: "left padding", expected, got });
        }
        Ok(())
    }

    /// Channels of keys and values.
    pub(super) fn shape(&self) -> LayerShape {
        self.groups[0].cache.shape
    }

    /// Sequences and KV heads, once the cache has been appended to.
    pub(super) fn heads(&self) -> Option<[usize; 2]> {
        let heads = |g: &Group<E>| g.cache.window.as_ref().map(|w| [w.keys.shape()[0], w.keys.shape()[1]]);
        let all = self.groups.iter().map(heads).collect::<Option<Vec<_>>>()?;
        Some([all.iter().map(|h| h[0]).sum(), all[0][1]])
    }

    /// The cache taken apart; [`LayerCache::from_state`] puts it together.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn state(&self) -> Result<State<E::Tensor>> {
        if self.padding.is_empty() {
            return self.groups[0].cache.state();
        }
        let (mut arrays, mut sequences) = (BTreeMap::new(), vec![]);
        for (i, g) in self.groups.iter().enumerate() {
            let State { arrays: own, meta } = g.cache.state()?;
            arrays.extend(own.into_iter().map(|(name, array)| (format!("{i}.{name}"), array)));
            sequences.push(meta);
        }
        let meta = Padded { left_padding: self.padding.clone(), offset: self.padded_offset, sequences };
        let meta = serde_json::to_string(&meta).map_err(|e| misfit(e.to_string()))?;
        Ok(State { arrays, meta })
    }

    /// A cache from what [`LayerCache::state`] gave; it goes on as the first one would have.
    ///
    /// # Errors
    /// [`Error::Parse`] if the text is not one of this version, an array is missing, or the numbers contradict the arrays;
    /// [`Error::Shape`] if an array does not fit its codec.
    pub fn from_state(engine: E, state: &State<E::Tensor>) -> Result<LayerCache<E>> {
        let Ok(Padded { left_padding, offset, sequences }) = serde_json::from_str(&state.meta) else {
            return SequenceCache::from_state(engine, state).map(LayerCache::from);
        };
        if offset > MOST_TOKENS || left_padding.iter().any(|&p| p > MOST_TOKENS) {
            return Err(misfit(format!("left padding {left_padding:?}, the offset is {offset}")));
        }
        let mut caches = vec![];
        for (i, meta) in sequences.into_iter().enumerate() {
            let prefix = format!("{i}.");
            let own = |(name, array): (&String, &E::Tensor)| {
                name.strip_prefix(&prefix).map(|name| (name.to_string(), array.clone()))
            };
            let arrays = state.arrays.iter().filter_map(own).collect();
            caches.push(SequenceCache::from_state(engine.clone(), &State { arrays, meta })?);
        }
        let Some(first) = caches.first().filter(|_| !left_padding.is_empty()) else {
            return Err(misfit("a padded batch without a sequence".into()));
        };
        let mut groups = Group::all(&left_padding, first);
        if groups.len() != caches.len() {
            return Err(misfit(format!("{} caches for left padding {left_padding:?}", caches.len())));
        }
        for (group, cache) in groups.iter_mut().zip(caches) {
            let batch = cache.window.as_ref().map_or(group.sequences.len(), |w| w.keys.shape()[0]);
            if batch != group.sequences.len() || cache.offset() != offset.saturating_sub(group.padding) {
                let found = format!("{batch} sequences at offset {}", cache.offset());
                return Err(misfit(format!("left padding {}: {found}", group.padding)));
            }
            group.cache = cache;
        }
        Ok(LayerCache { groups, padding: left_padding, padded_offset: offset })
    }

    /// What the cache holds, segment by segment; with left padding, one group of sequences after the other.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn report(&self) -> Result<LayerReport> {
        let mut whole: Option<LayerReport> = None;
        for g in &self.groups {
            let mut report = g.cache.report()?;
            report.parts.iter_mut().for_each(|p| p.start += g.padding);
            match &mut whole {
                None => whole = Some(LayerReport { offset: self.offset(), ..report }),
                Some(whole) => {
                    whole.parts.extend(report.parts);
                    whole.table_bytes += report.table_bytes;
                }
            }
        }
        whole.ok_or_else(|| Error::Shape { what: "groups", expected: "one or more".into(), got: vec![] })
    }
}
