//! What a call has changed in a cache, so that a call that fails leaves the cache as it was.
//!
//! Rows are written into exact buffers behind the tokens that they hold, so the lengths undo a write and no buffer is copied. A
//! buffer that is replaced moves in here until the call ends. Of a body without tiers only the lengths are kept: holding the segment
//! that a block is joined to would double the bytes that a join holds twice for a moment.

use super::tiers::Held;
use super::{Exact, LayerCache, SequenceCache};
use crate::attention::{Segment, Stored, cut};
use crate::codes::{Buffer, Codes};
use crate::engine::Engine;
use crate::error::Result;
use crate::policy::Ema;

/// What the parts of a cache were before a call.
pub(super) struct Undo<T> {
    offset: usize,
    sinks_len: usize,
    window_len: usize,
    framed: bool,
    queries: Option<T>,
    sinks: Option<Option<Exact<T>>>,
    window: Option<Option<Exact<T>>>,
    body: Option<Body<T>>,
    tiers: Option<Observed>,
}

enum Body<T> {
    /// Blocks were only put behind it: segments, and tokens of the last one.
    Lengths(usize, usize),
    Segments(Vec<Segment<T>>),
}

struct Observed {
    blocks: Vec<Held>,
    exact: [Ema; 2],
    unobserved: usize,
}

impl<T: Buffer> Undo<T> {
    /// What `cache` is now.
    pub(super) fn new<E: Engine<Tensor = T>>(cache: &SequenceCache<E>) -> Undo<T> {
        Undo {
            offset: cache.offset,
            sinks_len: cache.sinks_len,
            window_len: cache.window_len,
            framed: cache.frames.is_some(),
            queries: cache.queries.clone(),
            sinks: None,
            window: None,
            body: None,
            tiers: None,
        }
    }

    /// Puts other sinks in place.
    pub(super) fn replace_sinks<E: Engine<Tensor = T>>(
        &mut self,
        cache: &mut SequenceCache<E>,
        by: Exact<T>,
    ) {
        let before = cache.sinks.replace(by);
        self.sinks.get_or_insert(before);
    }

    /// Puts another window in place.
    pub(super) fn replace_window<E: Engine<Tensor = T>>(
        &mut self,
        cache: &mut SequenceCache<E>,
        by: Exact<T>,
    ) {
        let before = cache.window.replace(by);
        self.window.get_or_insert(before);
    }

    /// To be called before blocks are put behind the body.
    pub(super) fn lengthens_body<E: Engine<Tensor = T>>(&mut self, cache: &SequenceCache<E>) {
        let last = cache.body.last().map_or(0, |s| s.keys.len());
        self.body.get_or_insert(Body::Lengths(cache.body.len(), last));
    }

    /// Puts another body in place.
    pub(super) fn replace_body<E: Engine<Tensor = T>>(
        &mut self,
        cache: &mut SequenceCache<E>,
        by: Vec<Segment<T>>,
    ) {
        let before = std::mem::replace(&mut cache.body, by);
        self.body.get_or_insert(Body::Segments(before));
    }

    /// To be called before what the tiers have observed changes.
    pub(super) fn changes_tiers<E: Engine<Tensor = T>>(&mut self, cache: &SequenceCache<E>) {
        if let Some(tiers) = cache.tiers.as_ref().filter(|_| self.tiers.is_none()) {
            let blocks = tiers.blocks.clone();
            self.tiers = Some(Observed { blocks, exact: tiers.exact, unobserved: tiers.unobserved });
        }
    }
}

/// What the groups of sequences of a layer were before a call.
pub(super) struct LayerUndo<T> {
    pub(super) groups: Vec<Undo<T>>,
    padded_offset: usize,
}

impl<T: Buffer> LayerUndo<T> {
    /// What `cache` is now.
    pub(super) fn new<E: Engine<Tensor = T>>(cache: &LayerCache<E>) -> LayerUndo<T> {
        let groups = cache.groups.iter().map(|g| Undo::new(&g.cache)).collect();
        LayerUndo { groups, padded_offset: cache.padded_offset }
    }
}

impl<E: Engine + Clone> LayerCache<E> {
    /// Runs a call that changes the cache; if it fails, the cache is as it was.
    pub(super) fn all_or_nothing<R>(
        &mut self,
        call: impl FnOnce(&mut Self, &mut LayerUndo<E::Tensor>) -> Result<R>,
    ) -> Result<R> {
        let mut undo = LayerUndo::new(self);
        let done = call(self, &mut undo);
        if done.is_err() {
            self.restore(undo);
        }
        done
    }

    /// Makes the cache what it was.
    pub(super) fn restore(&mut self, undo: LayerUndo<E::Tensor>) {
        self.padded_offset = undo.padded_offset;
        self.groups.iter_mut().zip(undo.groups).for_each(|(g, undo)| g.cache.restore(undo));
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// Makes the cache what it was. Cannot fail, since it runs after a failure.
    fn restore(&mut self, undo: Undo<E::Tensor>) {
        (self.offset, self.sinks_len, self.window_len) = (undo.offset, undo.sinks_len, undo.window_len);
        self.queries = undo.queries;
        if !undo.framed {
            self.frames = None;
        }
        if let Some(sinks) = undo.sinks {
            self.sinks = sinks;
        }
        if let Some(window) = undo.window {
            self.window = window;
        }
        match undo.body {
            Some(Body::Segments(body)) => self.body = body,
            Some(Body::Lengths(segments, last)) => {
                self.body.truncate(segments);
                if let Some(s) = self.body.last_mut().filter(|s| s.keys.len() > last)
                    && let Ok(shorter) = cut(s, 0, last)
                {
                    // Where even the copy fails, the tokens stay a view of the longer buffer.
                    *s = compacted(&self.engine, &shorter).unwrap_or(shorter);
                }
            }
            None => {}
        }
        if let (Some(tiers), Some(before)) = (&mut self.tiers, undo.tiers) {
            (tiers.blocks, tiers.exact, tiers.unobserved) = (before.blocks, before.exact, before.unobserved);
        }
    }
}

/// The same tokens in buffers of their own, so that a view does not keep a larger buffer alive.
pub(super) fn compacted<E: Engine>(engine: &E, s: &Segment<E::Tensor>) -> Result<Segment<E::Tensor>> {
    let own = |side: &Stored<E::Tensor>| -> Result<Stored<E::Tensor>> {
        Ok(match side {
            Stored::Exact { rows, len } => Stored::Exact { rows: engine.compact(rows)?, len: *len },
            Stored::Packed(codes) => {
                let (words, scales) = (engine.compact(codes.words())?, engine.compact(codes.scales())?);
                Stored::Packed(Codes::new(codes.codec().clone(), codes.frame().clone(), words, scales)?)
            }
        })
    };
    Ok(Segment { start: s.start, keys: own(&s.keys)?, values: own(&s.values)? })
}
