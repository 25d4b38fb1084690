//! How tokens leave a cache from its end, across the border between exact and packed.

use super::append::{STEP, write};
use super::undo::compacted;
use super::{Exact, SequenceCache};
use crate::attention::{Segment, Stored, cut};
use crate::codes::Buffer;
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::Dtype;

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`super::LayerCache::trim`].
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = n.min(self.offset);
        if n == 0 {
            return Ok(0);
        }
        let queries = self.queries.as_ref().filter(|q| q.shape()[2] > n);
        let queries = queries.map(|q| self.engine.compact(&q.slice(2, 0, q.shape()[2] - n)?)).transpose()?;
        let target = self.offset - n;
        let from_window = n.min(self.window_len);
        let mut body = self.body.clone();
        let mut rescued = None;
        while let Some(last) = body.last() {
            if last.start + last.keys.len() <= target {
                break;
            }
            let Some(last) = body.pop() else { break };
            if last.start >= target {
                continue;
            }
            // Tokens that are encoded together with trimmed ones go back to the window as they decode.
            let (len, keep, tile) = (last.keys.len(), target - last.start, self.recipe.tile());
            let whole = keep / tile * tile;
            if whole < keep {
                let dense = self.dense(&cut(&last, whole, (whole + tile).min(len))?)?;
                rescued = Some((dense, keep - whole));
            }
            if whole > 0 {
                body.push(compacted(&self.engine, &cut(&last, 0, whole)?)?);
            }
        }
        let window = rescued.map(|(rows, len)| self.fresh_window(&rows, len)).transpose()?;
        // Nothing can fail from here on.
        if let Some(tiers) = &mut self.tiers {
            let end = body.last().map_or(0, |last| last.start + last.keys.len());
            tiers.blocks.retain(|b| b.start < end);
            if let Some(last) = tiers.blocks.last_mut() {
                last.len = last.len.min(end - last.start);
            }
        }
        self.body = body;
        self.queries = queries;
        self.window_len -= from_window;
        self.sinks_len = self.sinks_len.min(target);
        self.offset = target;
        if let Some((window, len)) = window {
            (self.window, self.window_len) = (Some(window), len);
        }
        if self.body.is_empty() {
            // What comes next is a first block again.
            self.frames = None;
        }
        Ok(n)
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
