//! How a padded batch is dealt out to its groups of sequences, and put together again.

use super::consistent::{MOST_TOKENS, misfit};
use super::{LayerCache, LayerReport, SequenceCache, State};
use crate::attention::{Rules, positions};
use crate::codes::Buffer;
use crate::engine::Engine;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// The scalars of a padded batch: those of each group's cache are a text of their own.
#[derive(Serialize, Deserialize)]
struct Padded {
    left_padding: Vec<usize>,
    offset: usize,
    sequences: Vec<String>,
}

/// Sequences of equal padding, and their cache.
#[derive(Clone)]
pub(super) struct Group<E: Engine> {
    /// Their places in the batch; empty for all of them.
    pub(super) sequences: Vec<usize>,
    /// Tokens before their first one.
    pub(super) padding: usize,
    pub(super) cache: SequenceCache<E>,
}

impl<E: Engine> From<SequenceCache<E>> for LayerCache<E> {
    fn from(cache: SequenceCache<E>) -> LayerCache<E> {
        let groups = vec![Group { sequences: vec![], padding: 0, cache }];
        LayerCache { groups, padding: vec![], padded_offset: 0 }
    }
}

impl<E: Engine + Clone> Group<E> {
    /// The groups of a batch, each with a clone of an empty cache.
    pub(super) fn all(padding: &[usize], empty: &SequenceCache<E>) -> Vec<Group<E>> {
        let mut groups: Vec<Group<E>> = vec![];
        for (sequence, &padding) in padding.iter().enumerate() {
            match groups.iter_mut().find(|g| g.padding == padding) {
                Some(group) => group.sequences.push(sequence),
                None => groups.push(Group { sequences: vec![sequence], padding, cache: empty.clone() }),
            }
        }
        if groups.is_empty() {
            groups.push(Group { sequences: vec![], padding: 0, cache: empty.clone() });
        }
        groups
    }

    /// The group's sequences of an array whose first axis is the batch, or of one that holds for every sequence.
    pub(super) fn sequences_of(&self, x: &E::Tensor) -> Result<E::Tensor> {
        let batch = x.shape()[0];
        if self.sequences.is_empty() || batch == 1 || batch == self.sequences.len() {
            return Ok(x.clone());
        }
        let parts = self.sequences.iter().map(|&b| x.slice(0, b, b + 1));
        E::Tensor::concat(0, &parts.collect::<Result<Vec<_>>>()?)
    }

    /// Positions of the batch as positions of the group; a range that runs backwards stays one.
    pub(super) fn own(&self, tokens: &Range<usize>) -> Range<usize> {
        if tokens.start > tokens.end {
            return tokens.clone();
        }
        tokens.start.saturating_sub(self.padding)..tokens.end.saturating_sub(self.padding)
    }

    /// Rules for the group's queries from `first` on; `columns` are the runs of the mask's columns that are tokens of the group.
    pub(super) fn rules(
        &self,
        rules: &Rules<E::Tensor>,
        first: usize,
        columns: &[(usize, usize)],
    ) -> Result<Rules<E::Tensor>> {
        let mut own = rules.clone();
        if let Some(mask) = &rules.mask {
            let mask = self.sequences_of(mask)?.slice(2, first, mask.shape()[2])?;
            let parts = columns.iter().map(|&(from, to)| mask.slice(3, from, to.max(from)));
            own.mask = Some(E::Tensor::concat(3, &parts.collect::<Result<Vec<_>>>()?)?);
        }
        if !rules.left_padding.is_empty() {
            let rest = |&b: &usize| rules.left_padding[b].saturating_sub(self.padding);
            own.left_padding = self.sequences.iter().map(rest).collect();
        }
        Ok(own)
    }

    /// What queries [b, Hq, n, D] gave, behind `first` rows of zeros for the padding before them.
    pub(super) fn behind_zeros(
        &self,
        queries: &E::Tensor,
        first: usize,
        out: Option<E::Tensor>,
    ) -> Result<E::Tensor> {
        let (engine, shape) = (self.cache.engine(), queries.shape());
        let zeros = |n: usize| {
            engine.zeros(engine.dtype(queries)?, &[shape[0], shape[1], n, self.cache.shape.value_dim])
        };
        match out {
            Some(out) if first == 0 => Ok(out),
            Some(out) => E::Tensor::concat(2, &[zeros(first)?, out]),
            None => zeros(first),
        }
    }

    /// Positions of the batch that the group holds a token at.
    pub(super) fn held(&self) -> Vec<usize> {
        positions(&self.cache.segments()).into_iter().map(|p| p + self.padding).collect()
    }

    /// Runs of indices into `all`, rising positions of the batch, that the group holds a token at.
    pub(super) fn held_runs(&self, all: &[usize]) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = vec![];
        let mut i = 0;
        for position in self.held() {
            i += all[i..].partition_point(|&p| p < position);
            match runs.last_mut() {
                Some(run) if run.1 == i => run.1 = i + 1,
                _ => runs.push((i, i + 1)),
            }
        }
        runs
    }

    /// Keys and values dense at the positions `all`, zero where the group holds none.
    pub(super) fn fetch(&self, all: &[usize]) -> Result<(E::Tensor, E::Tensor)> {
        let (engine, runs) = (self.cache.engine(), self.held_runs(all));
        let spread = |x: E::Tensor| -> Result<E::Tensor> {
            let (shape, dtype) = (x.shape(), engine.dtype(&x)?);
            let zeros = |n: usize| engine.zeros(dtype, &[shape[0], shape[1], n, shape[3]]);
            let (mut parts, mut done, mut taken) = (vec![], 0, 0);
            for &(from, to) in &runs {
                if from > done {
                    parts.push(zeros(from - done)?);
                }
                parts.push(x.slice(2, taken, taken + to - from)?);
                (taken, done) = (taken + to - from, to);
            }
            if all.len() > done || parts.is_empty() {
                parts.push(zeros(all.len() - done)?);
            }
            if parts.len() == 1 { Ok(parts.remove(0)) } else { E::Tensor::concat(2, &parts) }
        };
        let (keys, values) = self.cache.fetch()?;
        Ok((spread(keys)?, spread(values)?))
    }
}

impl<E: Engine + Clone> LayerCache<E> {
    /// Does the same for every group. On an error all of them are as they were.
    pub(super) fn each<R>(&mut self, mut f: impl FnMut(&mut Group<E>) -> Result<R>) -> Result<Vec<R>> {
        let mut groups = self.groups.clone();
        let results = groups.iter_mut().map(&mut f).collect::<Result<Vec<_>>>()?;
        self.groups = groups;
        Ok(results)
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

    /// Positions that [`LayerCache::fetch`] gives, rising: those of padding, and those that some sequence holds a token at.
    pub(super) fn positions(&self) -> Vec<usize> {
        let most = self.groups.iter().map(|g| g.padding).max().unwrap_or(0);
        let mut held = vec![false; self.offset()];
        held.iter_mut().take(most).for_each(|h| *h = true);
        self.groups.iter().flat_map(Group::held).for_each(|p| held[p] = true);
        held.iter().enumerate().filter_map(|(p, held)| held.then_some(p)).collect()
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
        if q.len() != 4 || q[0] != batch || q[3] != dim {
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

    /// Sequences and KV heads, once the cache has been appended to.
    pub(super) fn heads(&self) -> Option<[usize; 2]> {
        let heads = |g: &Group<E>| g.cache.window.as_ref().map(|w| [w.keys.shape()[0], w.keys.shape()[1]]);
        let all = self.groups.iter().map(heads).collect::<Option<Vec<_>>>()?;
        Some([all.iter().map(|h| h[0]).sum(), all[0][1]])
    }

    /// The cache taken apart; [`LayerCache::from_state`] puts it together.
    ///
    /// # Errors
    /// The engine's own.
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
        if offset > MOST_TOKENS || left_padding.iter().any(|&p| p > MOST_TOKENS) {
            return Err(misfit(format!(
                "left padding {left_padding:?} and offset {offset}: more than is counted"
            )));
        }
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
        let alike = |g: &Group<E>| {
            let heads = |g: &Group<E>| g.cache.window.as_ref().map(|w| w.keys.shape()[1]);
            heads(g) == heads(&groups[0]) && g.cache.shape == groups[0].cache.shape
        };
        if !groups.iter().all(alike) {
            return Err(misfit("groups of sequences with other heads or channels".into()));
        }
        Ok(LayerCache { groups, padding: left_padding, padded_offset: offset })
    }

    /// What the cache holds, segment by segment; with left padding, one group of sequences after the other.
    ///
    /// # Errors
    /// The engine's own.
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
