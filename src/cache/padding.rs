//! Sequences of equal left padding: which parts of a batch are theirs, and where what they give belongs in it.

use super::{LayerCache, SequenceCache};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, positions};
use crate::error::Result;
use std::ops::Range;

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

    /// Positions of the batch that the group holds a token at, or has just dropped one.
    pub(super) fn held(&self, evicted: &[Segment<E::Tensor>]) -> Vec<usize> {
        positions(&self.cache.segments_with(evicted)).into_iter().map(|p| p + self.padding).collect()
    }

    /// Runs of indices into `all`, rising positions of the batch, that the group holds a token at.
    pub(super) fn held_runs(&self, all: &[usize], evicted: &[Segment<E::Tensor>]) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = vec![];
        let mut i = 0;
        for position in self.held(evicted) {
            i += all[i..].partition_point(|&p| p < position);
            match runs.last_mut() {
                Some(run) if run.1 == i => run.1 = i + 1,
                _ => runs.push((i, i + 1)),
            }
        }
        runs
    }

    /// Keys and values dense at the positions `all`, zero where the group holds none.
    pub(super) fn fetch(
        &self,
        all: &[usize],
        evicted: &[Segment<E::Tensor>],
    ) -> Result<(E::Tensor, E::Tensor)> {
        let (engine, runs) = (self.cache.engine(), self.held_runs(all, evicted));
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
        let (keys, values) = self.cache.fetch(evicted)?;
        Ok((spread(keys)?, spread(values)?))
    }
}
