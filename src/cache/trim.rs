//! How tokens leave a cache from its end, across the border between exact and packed.

use super::append::STEP;
use super::segments::compacted;
use super::segments::write;
use super::{Exact, SequenceCache};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored, cut};
use crate::error::Result;
use crate::tensor::Dtype;
use std::ops::Range;

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`super::LayerCache::trim`].
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = n.min(self.offset);
        if n == 0 {
            return Ok(0);
        }
        let target = self.offset - n;
        if let Some(border) = self.crossed(target) {
            let mut before = self.clone();
            before.go_back(&border)?;
            before.trim(border.at - target)?;
            *self = before;
            return Ok(n);
        }
        let (queries, asked) = self.asked_before(target)?;
        let (body, rescued) = self.body_before(target)?;
        let rescued = rescued.map(|(rows, len)| self.fresh_window(&rows, len)).transpose()?;
        // Nothing can fail from here on.
        if let Some(tiers) = &mut self.tiers {
            let end = body.last().map_or(0, |last| last.start + last.keys.len());
            tiers.blocks.retain(|b| b.start < end);
            if let Some(last) = tiers.blocks.last_mut() {
                last.len = last.len.min(end - last.start);
            }
            tiers.forget(target);
        }
        (self.body, self.queries, self.asked) = (body, queries, asked);
        self.window_len -= n.min(self.window_len);
        self.sinks_len = self.sinks_len.min(target);
        self.offset = target;
        if let Some((window, len)) = rescued {
            (self.window, self.window_len) = (Some(window), len);
        }
        if self.body.is_empty() && target <= self.recipe.sinks.saturating_add(self.full_window()) {
            // What leaves next is a first block again. A policy may have dropped the whole body of a longer cache.
            self.frames = None;
        }
        Ok(n)
    }

    /// The body without the tokens from `target` on, and the tokens before it that are encoded together with some of them, as they decode,
    /// of which the first `len` stay: `(rows, len)`.
    fn body_before(
        &self,
        target: usize,
    ) -> Result<(Vec<Segment<E::Tensor>>, Option<((E::Tensor, E::Tensor), usize)>)> {
        let body = &self.body;
        let kept = body.iter().take_while(|s| s.start + s.keys.len() <= target).count();
        let mut rest = body[..kept].to_vec();
        let Some(last) = body.get(kept).filter(|s| s.start < target) else { return Ok((rest, None)) };
        let (len, keep, tile) = (last.keys.len(), target - last.start, self.recipe.tile());
        let whole = keep / tile * tile;
        let mut rescued = None;
        if whole < keep {
            rescued = Some((self.dense(&cut(last, whole, (whole + tile).min(len))?)?, keep - whole));
        }
        if whole > 0 {
            rest.push(compacted(&self.engine, &cut(last, 0, whole)?)?);
        }
        Ok((rest, rescued))
    }

    /// Queries at positions before `target`, and these positions.
    fn asked_before(&self, target: usize) -> Result<(Option<E::Tensor>, Vec<Range<usize>>)> {
        let runs = self.asked.iter().map(|r| r.start..r.end.min(target)).filter(|r| !r.is_empty());
        let runs: Vec<_> = runs.collect();
        let n = runs.iter().map(Range::len).sum();
        let queries = match self.queries.as_ref().filter(|_| n > 0) {
            Some(queries) if n < queries.shape()[2] => Some(self.engine.compact(&queries.slice(2, 0, n)?)?),
            queries => queries.cloned(),
        };
        Ok((queries, runs))
    }

    /// A window with the first `len` of some rows, in the dtypes of the window that is there.
    fn fresh_window(
        &self,
        (keys, values): &(E::Tensor, E::Tensor),
        len: usize,
    ) -> Result<(Exact<E::Tensor>, usize)> {
        let capacity = len.next_multiple_of(STEP).min(self.full_window());
        let mut window = match &self.window {
            Some(window) => self.room(&window.keys, &window.values, capacity)?,
            None => self.room(keys, values, capacity)?,
        };
        write(&self.engine, Some(&mut window), 0, &keys.slice(2, 0, len)?, &values.slice(2, 0, len)?)?;
        Ok((window, len))
    }

    fn dense(&self, s: &Segment<E::Tensor>) -> Result<(E::Tensor, E::Tensor)> {
        let one = |s: &Stored<E::Tensor>| match s {
            Stored::Exact { rows, len } => rows.slice(2, 0, *len),
            Stored::Packed(codes) => self.engine.decode(codes, Dtype::F32),
        };
        Ok((one(&s.keys)?, one(&s.values)?))
    }
}
