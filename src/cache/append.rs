//! How tokens enter a cache: sinks first, then the window, and from the window into packed blocks.

use super::held::Retired;
use super::segments::{joinable, joined, write};
use super::undo::Undo;
use super::{Exact, SequenceCache};
use crate::codec::Codec;
use crate::codec::codes::{Buffer, Frame};
use crate::compressor::TOKENS_PER_BLOCK;
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored};
use crate::error::Result;
use std::sync::Arc;

/// Fewest rows by which an exact buffer grows until it has its full size.
pub(super) const STEP: usize = 64;
/// Rows of a buffer in which `needed` rows have room, of at most `most`: a function of these alone, so that equal caches hold equal
/// bytes however their tokens came. At most a quarter is spare, and a buffer that grows row by row is copied a few times in all.
pub(super) fn rows_for(needed: usize, most: usize) -> usize {
    let step = (needed.min(most).next_power_of_two() / 8).max(STEP);
    needed.next_multiple_of(step).min(most)
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// Appends checked tokens.
    pub(super) fn append_all(
        &mut self,
        undo: &mut Undo<E::Tensor>,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        let (total, mut done) = (keys.shape()[2], 0);
        while done < total {
            done += self.append_piece(undo, keys, values, done)?;
        }
        Ok(())
    }

    /// Appends tokens from `start` on, up to the next border, and says how many.
    pub(super) fn append_piece(
        &mut self,
        undo: &mut Undo<E::Tensor>,
        keys: &E::Tensor,
        values: &E::Tensor,
        start: usize,
    ) -> Result<usize> {
        let total = keys.shape()[2];
        let piece = |n: usize| -> Result<(E::Tensor, E::Tensor)> {
            Ok((keys.slice(2, start, start + n)?, values.slice(2, start, start + n)?))
        };
        let at_start = self.body.is_empty() && self.window_len == 0;
        if at_start && self.sinks_len < self.recipe.sinks {
            let n = (self.recipe.sinks - self.sinks_len).min(total - start);
            let (k, v) = piece(n)?;
            let (len, most) = (self.sinks_len, self.recipe.sinks);
            if let Some(grown) = self.grown(self.sinks.as_ref(), len, most, &k, &v)? {
                undo.replace_sinks(self, grown);
            }
            write(&self.engine, self.sinks.as_mut(), len, &k, &v)?;
            self.open(undo, &k, &v)?;
            self.sinks_len += n;
            self.offset += n;
            return Ok(n);
        }
        if self.window_len >= self.full_window() {
            self.flush(undo, total - start)?;
        }
        let n = (self.full_window() - self.window_len).min(total - start);
        let (k, v) = piece(n)?;
        self.write_window(undo, &k, &v)?;
        self.offset += n;
        self.settle();
        Ok(n)
    }

    /// Tokens that the window holds before a block leaves it; a layer without a codec or a limit keeps everything there.
    pub(super) fn full_window(&self) -> usize {
        let leave = self.codecs.iter().any(Option::is_some) || self.limit().is_some();
        if leave { self.recipe.window + TOKENS_PER_BLOCK } else { usize::MAX }
    }

    /// Writes rows behind the last row of the window.
    fn write_window(
        &mut self,
        undo: &mut Undo<E::Tensor>,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        let (len, most) = (self.window_len, self.full_window());
        if let Some(grown) = self.grown(self.window.as_ref(), len, most, keys, values)? {
            undo.replace_window(self, grown);
        }
        write(&self.engine, self.window.as_mut(), len, keys, values)?;
        self.window_len += keys.shape()[2];
        Ok(())
    }

    /// A buffer of up to `most` rows with the first `len` of an exact one and room for more; `None` where there is room already.
    fn grown(
        &self,
        exact: Option<&Exact<E::Tensor>>,
        len: usize,
        most: usize,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<Option<Exact<E::Tensor>>> {
        let needed = len + keys.shape()[2];
        if exact.is_some_and(|e| needed <= e.capacity) {
            return Ok(None);
        }
        // What a block has left is as large as before at once.
        let left = self.offset > self.sinks_len + self.window_len;
        let capacity = rows_for(if left { most } else { needed }, most.max(needed));
        let (old_k, old_v) = (exact.map(|e| &e.keys), exact.map(|e| &e.values));
        let mut grown = self.room(old_k.unwrap_or(keys), old_v.unwrap_or(values), capacity)?;
        if let Some(old) = exact.filter(|_| len > 0) {
            let (keys, values) = (old.keys.slice(2, 0, len)?, old.values.slice(2, 0, len)?);
            write(&self.engine, Some(&mut grown), 0, &keys, &values)?;
        }
        Ok(Some(grown))
    }

    /// An empty buffer for `capacity` rows like these.
    pub(super) fn room(
        &self,
        keys: &E::Tensor,
        values: &E::Tensor,
        capacity: usize,
    ) -> Result<Exact<E::Tensor>> {
        let zeros = |like: &E::Tensor| -> Result<E::Tensor> {
            let s = like.shape();
            self.engine.zeros(self.engine.dtype(like)?, &[s[0], s[1], capacity, s[3]])
        };
        Ok(Exact { keys: zeros(keys)?, values: zeros(values)?, capacity })
    }

    /// The codecs whose tables the frames hold: of the first tier that packs, if there are tiers. All tiers need the same tables.
    pub(super) fn frame_codecs(&self) -> [Option<Arc<Codec>>; 2] {
        let Some(tiers) = &self.tiers else { return self.codecs.clone() };
        std::array::from_fn(|i| tiers.codecs.iter().rev().find_map(|c| c[i].clone()))
    }

    /// Keeps queries for the gains of equalised keys. Tokens that came by [`super::LayerCache::append`] have no known queries.
    pub(super) fn keep_queries(&mut self, queries: &E::Tensor) -> Result<()> {
        let wanted = self.frame_codecs()[0].as_ref().is_some_and(|codec| codec.spec().equalised);
        if self.frames.is_none() && wanted {
            let all = match &self.queries {
                Some(before) => E::Tensor::concat(2, &[before.clone(), queries.clone()])?,
                None => self.engine.compact(queries)?,
            };
            self.queries = Some(all);
            let (end, n) = (self.offset, queries.shape()[2]);
            match self.asked.last_mut().filter(|run| run.end + n == end) {
                Some(run) => run.end = end,
                None => self.asked.push(end - n..end),
            }
        }
        Ok(())
    }

    /// Packs the oldest block of the window; `coming` tokens of the call come behind it.
    fn flush(&mut self, undo: &mut Undo<E::Tensor>, coming: usize) -> Result<()> {
        let Some(window) = &self.window else { return Ok(()) };
        let (keys, values) =
            (window.keys.slice(2, 0, TOKENS_PER_BLOCK)?, window.values.slice(2, 0, TOKENS_PER_BLOCK)?);
        let frames = match &self.frames {
            Some(frames) => frames.clone(),
            None => {
                let codecs = self.frame_codecs();
                let frame = |side: usize, block: &E::Tensor| match &codecs[side] {
                    Some(codec) if side == 0 => {
                        self.engine.frame(codec, self.recipe.centred, block, self.queries.as_ref())
                    }
                    Some(codec) => self.engine.frame(codec, false, block, None),
                    None => Ok(Frame::default()),
                };
                [frame(0, &keys)?, frame(1, &values)?]
            }
        };
        let start = self.offset - self.window_len;
        let exact = |rows: E::Tensor| Stored::Exact { rows, len: TOKENS_PER_BLOCK };
        let fresh = Segment { start, keys: exact(keys), values: exact(values) };
        // Views, which the next tokens copy into buffers of their own.
        let rest = |rows: &E::Tensor| rows.slice(2, TOKENS_PER_BLOCK, self.window_len);
        let (rest_k, rest_v) = (rest(&window.keys)?, rest(&window.values)?);
        let left = self.window_len - TOKENS_PER_BLOCK;
        let rest = Exact { keys: rest_k, values: rest_v, capacity: left };
        let may_be_rejected = coming <= self.reach();
        let mut border = match may_be_rejected {
            true => Some(self.border_before(&fresh)?),
            false => None,
        };
        if let Some(tiers) = &self.tiers {
            let Retired { body, blocks, old, dropped } =
                self.retier(tiers, &fresh, &frames, may_be_rejected)?;
            if let Some(border) = &mut border {
                border.old = old;
            }
            undo.evicts(dropped);
            undo.changes_tiers(self);
            undo.replace_body(self, body);
            if let Some(tiers) = &mut self.tiers {
                tiers.blocks = blocks;
            }
        } else {
            let packed = self.packed(fresh, &frames)?;
            undo.lengthens_body(self);
            self.push(packed)?;
        }
        undo.replace_window(self, rest);
        self.window_len = left;
        self.frames = Some(frames);
        (self.queries, self.asked) = (None, vec![]);
        self.border = border.map(Arc::new);
        Ok(())
    }

    /// A fresh block packed.
    fn packed(
        &self,
        fresh: Segment<E::Tensor>,
        frames: &[Frame<E::Tensor>; 2],
    ) -> Result<Segment<E::Tensor>> {
        let pack = |i: usize, side: Stored<E::Tensor>| match (&self.codecs[i], side) {
            (Some(codec), Stored::Exact { rows, .. }) => {
                self.engine.encode(codec, frames[i].clone(), &rows).map(Stored::Packed)
            }
            (None, Stored::Exact { rows, len }) => {
                Ok(Stored::Exact { rows: self.engine.compact(&rows)?, len })
            }
            (_, packed) => Ok(packed),
        };
        Ok(Segment { start: fresh.start, keys: pack(0, fresh.keys)?, values: pack(1, fresh.values)? })
    }

    /// Puts a packed block behind the body, in the last segment if it fits there. What an error leaves is for [`Undo`].
    fn push(&mut self, packed: Segment<E::Tensor>) -> Result<()> {
        let Some(last) = self.body.last_mut().filter(|last| joinable(last, &packed)) else {
            self.body.push(packed);
            return Ok(());
        };
        // The keys that were are gone before the values are there twice.
        last.keys = joined(&last.keys, &packed.keys)?;
        last.values = joined(&last.values, &packed.values)?;
        Ok(())
    }
}
