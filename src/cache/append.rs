//! How tokens enter a cache: sinks first, then the window, and from the window into packed blocks.

use super::{Exact, LayerCache};
use crate::attention::{Segment, Stored};
use crate::codec::Codec;
use crate::codes::{Buffer, Codes, Frame};
use crate::compressor::BLOCK;
use crate::engine::Engine;
use crate::error::Result;
use std::sync::Arc;

/// Rows by which an exact buffer grows until it has its full size.
pub(super) const STEP: usize = 64;
/// Tokens up to which neighbouring packed blocks of one codec are joined into one segment. A join copies: this bounds what is held
/// twice for a moment, 3 % of a cache of 32K tokens.
const SEGMENT: usize = 1024;

impl<E: Engine + Clone> LayerCache<E> {
    /// Appends tokens from `start` on, up to the next border, and says how many.
    pub(super) fn append_piece(
        &mut self,
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
            let mut sinks = self.sinks.take();
            let written = self.write(&mut sinks, self.sinks_len, self.recipe.sinks, &k, &v);
            self.sinks = sinks;
            written?;
            if self.window.is_none() {
                // An empty window tells the dtype and the heads from now on.
                let mut window = None;
                self.write(&mut window, 0, self.full_window(), &k.slice(2, 0, 0)?, &v.slice(2, 0, 0)?)?;
                self.window = window;
            }
            self.sinks_len += n;
            self.offset += n;
            return Ok(n);
        }
        if self.window_len >= self.full_window() {
            self.flush()?;
        }
        let n = (self.full_window() - self.window_len).min(total - start);
        let (k, v) = piece(n)?;
        self.write_window(&k, &v)?;
        self.offset += n;
        Ok(n)
    }

    /// Tokens that the window holds before a block leaves it; a layer without a codec or a limit keeps everything there.
    pub(super) fn full_window(&self) -> usize {
        let leave = self.codecs.iter().any(Option::is_some) || self.limit().is_some();
        if leave { self.recipe.window + BLOCK } else { usize::MAX }
    }

    pub(super) fn write_window(&mut self, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        let mut window = self.window.take();
        let written = self.write(&mut window, self.window_len, self.full_window(), keys, values);
        self.window = window;
        written?;
        self.window_len += keys.shape()[2];
        Ok(())
    }

    /// Writes rows behind the first `len` of an exact buffer, which grows in steps up to `most` rows.
    fn write(
        &self,
        exact: &mut Option<Exact<E::Tensor>>,
        len: usize,
        most: usize,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        let needed = len + keys.shape()[2];
        let capacity = exact.as_ref().map_or(0, |e| e.capacity);
        if needed > capacity || exact.is_none() {
            // Doubling keeps the copying of a layer that packs nothing linear.
            let grown = needed.max(2 * len.min(most)).next_multiple_of(STEP).min(most.max(needed));
            let grow = |old: Option<&E::Tensor>, like: &E::Tensor| -> Result<E::Tensor> {
                let s = like.shape();
                let dtype = self.engine.dtype(old.unwrap_or(like))?;
                let mut new = self.engine.zeros(dtype, &[s[0], s[1], grown, s[3]])?;
                if let Some(old) = old {
                    self.engine.write(&mut new, 0, &old.slice(2, 0, len)?)?;
                }
                Ok(new)
            };
            let (old_k, old_v) = (exact.as_ref().map(|e| &e.keys), exact.as_ref().map(|e| &e.values));
            *exact = Some(Exact { keys: grow(old_k, keys)?, values: grow(old_v, values)?, capacity: grown });
        }
        let Some(exact) = exact else { return Ok(()) };
        if keys.shape()[2] > 0 {
            self.engine.write(&mut exact.keys, len, keys)?;
            self.engine.write(&mut exact.values, len, values)?;
        }
        Ok(())
    }

    /// The codecs whose tables the frames hold: those of a tier that packs, if there are tiers. All of them need the same tables.
    fn frame_codecs(&self) -> [Option<Arc<Codec>>; 2] {
        let Some(tiers) = &self.tiers else { return self.codecs.clone() };
        std::array::from_fn(|i| tiers.codecs.iter().rev().find_map(|c| c[i].clone()))
    }

    /// Keeps queries for the gains of equalised keys; those of tokens that came by [`LayerCache::append`] are not known.
    pub(super) fn keep_queries(&mut self, queries: &E::Tensor) -> Result<()> {
        let wanted = self.frame_codecs()[0].as_ref().is_some_and(|codec| codec.spec().equalised);
        if self.frames.is_none() && wanted {
            let all = match self.queries.take() {
                Some(before) => E::Tensor::concat(2, &[before, queries.clone()])?,
                None => self.engine.compact(queries)?,
            };
            self.queries = Some(all);
        }
        Ok(())
    }

    /// Packs the oldest block of the window.
    fn flush(&mut self) -> Result<()> {
        let Some(window) = &self.window else { return Ok(()) };
        let (keys, values) = (window.keys.slice(2, 0, BLOCK)?, window.values.slice(2, 0, BLOCK)?);
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
        let exact = |rows: &E::Tensor| Stored::Exact { rows: rows.clone(), len: BLOCK };
        let fresh = Segment { start, keys: exact(&keys), values: exact(&values) };
        let (body, blocks) = match &self.tiers {
            Some(tiers) => self.retier(tiers, &fresh, &frames)?,
            None => (self.packed(&fresh, &frames)?, vec![]),
        };
        let rest = [&window.keys, &window.values].map(|w| w.slice(2, BLOCK, self.window_len));
        let [rest_k, rest_v] = rest;
        let (rest_k, rest_v) = (rest_k?, rest_v?);
        let mut moved = window.clone();
        if self.window_len > BLOCK {
            self.engine.write(&mut moved.keys, 0, &rest_k)?;
            self.engine.write(&mut moved.values, 0, &rest_v)?;
        }
        // Nothing can fail from here on.
        self.window = Some(moved);
        self.window_len -= BLOCK;
        self.frames = Some(frames);
        self.queries = None;
        self.body = body;
        if let Some(tiers) = &mut self.tiers {
            tiers.blocks = blocks;
        }
        Ok(())
    }

    /// The body with a fresh block packed behind it.
    fn packed(
        &self,
        fresh: &Segment<E::Tensor>,
        frames: &[Frame<E::Tensor>; 2],
    ) -> Result<Vec<Segment<E::Tensor>>> {
        let pack = |i: usize, side: &Stored<E::Tensor>| match (&self.codecs[i], side) {
            (Some(codec), Stored::Exact { rows, .. }) => {
                self.engine.encode(codec, frames[i].clone(), rows).map(Stored::Packed)
            }
            (None, Stored::Exact { rows, len }) => {
                Ok(Stored::Exact { rows: self.engine.compact(rows)?, len: *len })
            }
            (_, packed) => Ok(packed.clone()),
        };
        let packed =
            Segment { start: fresh.start, keys: pack(0, &fresh.keys)?, values: pack(1, &fresh.values)? };
        let mut body = self.body.clone();
        match body.last().and_then(|last| join(last, &packed)) {
            Some(joined) => *body.last_mut().expect("a last segment") = joined?,
            None => body.push(packed),
        }
        Ok(body)
    }
}

/// One segment from two neighbours, if both sides can be joined and the result is not too long.
pub(super) fn join<T: Buffer>(a: &Segment<T>, b: &Segment<T>) -> Option<Result<Segment<T>>> {
    if a.keys.len() + b.keys.len() > SEGMENT || a.start + a.keys.len() != b.start {
        return None;
    }
    let side = |a: &Stored<T>, b: &Stored<T>| -> Option<Result<Stored<T>>> {
        match (a, b) {
            (Stored::Packed(a), Stored::Packed(b)) if a.codec().same(b.codec()) => {
                Some(Codes::concat(&[a.clone(), b.clone()]).map(Stored::Packed))
            }
            (Stored::Exact { rows: a, len: n }, Stored::Exact { rows: b, len: m }) => {
                let parts = a.slice(2, 0, *n).and_then(|a| Ok([a, b.slice(2, 0, *m)?]));
                Some(parts.and_then(|p| T::concat(2, &p)).map(|rows| Stored::Exact { rows, len: n + m }))
            }
            _ => None,
        }
    };
    let (keys, values) = (side(&a.keys, &b.keys)?, side(&a.values, &b.values)?);
    Some(keys.and_then(|keys| Ok(Segment { start: a.start, keys, values: values? })))
}
