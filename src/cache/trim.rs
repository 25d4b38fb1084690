//! How tokens leave a cache from its end, across the border between exact and packed.

use super::SequenceCache;
use crate::attention::{Segment, Stored, cut};
use crate::codes::Buffer;
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::Dtype;

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`super::LayerCache::trim`].
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = n.min(self.offset);
        let queries = self.queries.as_ref().filter(|q| q.shape()[2] > n);
        let queries = queries.map(|q| q.slice(2, 0, q.shape()[2] - n)).transpose()?;
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
                body.push(cut(&last, 0, whole)?);
            }
        }
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
        if let Some(((keys, values), len)) = rescued {
            self.write_window(&keys.slice(2, 0, len)?, &values.slice(2, 0, len)?)?;
        }
        if self.body.is_empty() {
            // What comes next is a first block again.
            self.frames = None;
        }
        Ok(n)
    }

    fn dense(&self, s: &Segment<E::Tensor>) -> Result<(E::Tensor, E::Tensor)> {
        let one = |s: &Stored<E::Tensor>| match s {
            Stored::Exact { rows, len } => rows.slice(2, 0, *len),
            Stored::Packed(codes) => self.engine.decode(codes, Dtype::F32),
        };
        Ok((one(&s.keys)?, one(&s.values)?))
    }
}
