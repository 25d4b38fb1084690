//! What a call has changed in a cache, so that a call that fails leaves the cache as it was.
//!
//! Rows are written into exact buffers behind the tokens that they hold, so the lengths undo a write and no buffer is copied. A
//! buffer that is replaced moves in here until the call ends. Of a body without tiers only the lengths are kept: holding the segment
//! that a block is joined to would double the bytes that a join holds twice for a moment.

use super::draft::Border;
use super::held::{Held, Seen};
use super::segments::compacted;
use super::{Exact, SequenceCache};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Segment, cut};
use crate::policy::Ema;
use std::ops::Range;
use std::sync::Arc;

/// What the parts of a cache were before a call.
pub(super) struct Undo<T> {
    offset: usize,
    sinks_len: usize,
    window_len: usize,
    framed: bool,
    queries: Option<T>,
    asked: Vec<Range<usize>>,
    border: Option<Arc<Border<T>>>,
    /// Segments that the call has dropped, if they are asked for.
    evicted: Option<Vec<Segment<T>>>,
    sinks: Option<Option<Exact<T>>>,
    window: Option<Option<Exact<T>>>,
    body: Option<OldBody<T>>,
    tiers: Option<Observed>,
}

enum OldBody<T> {
    /// Blocks were only put behind it: segments, and tokens of the last one.
    Lengths(usize, usize),
    Segments(Vec<Segment<T>>),
}

struct Observed {
    blocks: Vec<Held>,
    exact: [Ema; 2],
    unobserved: usize,
    seen: Vec<Seen>,
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
            asked: cache.asked.clone(),
            border: cache.border.clone(),
            evicted: None,
            sinks: None,
            window: None,
            body: None,
            tiers: None,
        }
    }

    /// Asks for the segments that the call will drop.
    pub(super) fn keep_evicted(&mut self) {
        self.evicted = Some(vec![]);
    }

    /// The segments that were asked for.
    pub(super) fn evicted(&self) -> &[Segment<T>] {
        self.evicted.as_deref().unwrap_or_default()
    }

    /// Notes segments that are dropped.
    pub(super) fn evicts(&mut self, dropped: Vec<Segment<T>>) {
        if let Some(evicted) = &mut self.evicted {
            evicted.extend(dropped);
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
        self.body.get_or_insert(OldBody::Lengths(cache.body.len(), last));
    }

    /// Puts another body in place.
    pub(super) fn replace_body<E: Engine<Tensor = T>>(
        &mut self,
        cache: &mut SequenceCache<E>,
        by: Vec<Segment<T>>,
    ) {
        let before = std::mem::replace(&mut cache.body, by);
        self.body.get_or_insert(OldBody::Segments(before));
    }

    /// To be called before what the tiers have observed changes.
    pub(super) fn changes_tiers<E: Engine<Tensor = T>>(&mut self, cache: &SequenceCache<E>) {
        if let Some(tiers) = cache.tiers.as_ref().filter(|_| self.tiers.is_none()) {
            let blocks = tiers.blocks.clone();
            let (exact, unobserved, seen) = (tiers.exact, tiers.unobserved, tiers.seen.clone());
            self.tiers = Some(Observed { blocks, exact, unobserved, seen });
        }
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// Makes the cache what it was. Cannot fail, since it runs after a failure.
    pub(super) fn restore(&mut self, undo: Undo<E::Tensor>) {
        (self.offset, self.sinks_len, self.window_len) = (undo.offset, undo.sinks_len, undo.window_len);
        (self.queries, self.asked, self.border) = (undo.queries, undo.asked, undo.border);
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
            Some(OldBody::Segments(body)) => self.body = body,
            Some(OldBody::Lengths(segments, last)) => {
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
            (tiers.blocks, tiers.exact) = (before.blocks, before.exact);
            (tiers.unobserved, tiers.seen) = (before.unobserved, before.seen);
        }
    }
}
