//! How a block that has just been packed is taken back: tokens behind its border may still be rejected, as drafts are.
//!
//! A block leaves the window when the token behind `border` comes, and what then happens to it and to older blocks loses bits. For the
//! next `draft` tokens the cache therefore keeps what was lost: the exact rows of the block, and the packed form of older blocks that
//! the policy recoded or dropped at that moment. A trim back to the border puts them in place again, so the cache is bit for bit the one
//! that never saw the rejected tokens. The kept bytes are those of one exact block in each layer, and of one packed block for each
//! border between tiers, for `draft` of every 128 tokens.

use super::append::{join, write};
use super::tiers::Held;
use super::undo::compacted;
use super::{Exact, Queries, SequenceCache};
use crate::attention::{Segment, cut};
use crate::codes::Buffer;
use crate::compressor::BLOCK;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::policy::Ema;
use std::sync::Arc;

/// What the cache was when its newest block left the window.
#[derive(Clone, Debug)]
pub(super) struct Border<T> {
    /// The offset then.
    pub(super) at: usize,
    /// The block's exact rows.
    pub(super) block: [T; 2],
    /// Older blocks as they were before the policy recoded or dropped them.
    pub(super) old: Vec<Segment<T>>,
    /// First token and tokens of each segment of the body.
    pub(super) spans: Vec<(usize, usize)>,
    /// Whether there were frames.
    pub(super) framed: bool,
    pub(super) queries: Option<Queries<T>>,
    /// Blocks of the tiers, and the attention that sinks and window received.
    pub(super) tiers: Option<(Vec<Held>, [Ema; 2])>,
}

/// The parts of a cache at a border, ready to be put in place.
pub(super) struct Restored<T> {
    pub(super) window: Exact<T>,
    pub(super) body: Vec<Segment<T>>,
}

impl<T: Buffer> Border<T> {
    /// Bytes that are kept besides those of the cache itself.
    pub(super) fn nbytes(&self) -> usize {
        let old = self.old.iter().map(|s| s.keys.nbytes() + s.values.nbytes());
        let queries = self.queries.as_ref().map_or(0, |q| q.rows.nbytes());
        self.block.iter().map(T::nbytes).sum::<usize>() + old.sum::<usize>() + queries
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// What a trim to `target` has to undo, if it reaches the border of the newest block.
    pub(super) fn crossed(&self, target: usize) -> Option<Arc<Border<E::Tensor>>> {
        self.border.clone().filter(|border| target <= border.at)
    }

    /// Forgets the border once more than `draft` tokens have come behind it.
    pub(super) fn settle(&mut self) {
        let kept = |b: &Arc<Border<E::Tensor>>| self.offset - b.at <= self.recipe.draft;
        if !self.border.as_ref().is_some_and(kept) {
            self.border = None;
        }
    }

    /// Window and body as they were at a border.
    pub(super) fn before(&self, border: &Border<E::Tensor>) -> Result<Restored<E::Tensor>> {
        let Some(window) = &self.window else {
            return Err(Error::Shape { what: "window", expected: "one or more tokens".into(), got: vec![] });
        };
        let (full, rest) = (self.full_window(), self.full_window() - BLOCK);
        let mut whole = self.room(&window.keys, &window.values, full)?;
        write(&self.engine, Some(&mut whole), 0, &border.block[0], &border.block[1])?;
        let (keys, values) = (window.keys.slice(2, 0, rest)?, window.values.slice(2, 0, rest)?);
        write(&self.engine, Some(&mut whole), BLOCK, &keys, &values)?;
        let body = border.spans.iter().map(|&span| self.segment_before(border, span));
        Ok(Restored { window: whole, body: body.collect::<Result<_>>()? })
    }

    /// A segment of the body as it was at a border, from what it has become and what was kept of it.
    fn segment_before(
        &self,
        border: &Border<E::Tensor>,
        (start, len): (usize, usize),
    ) -> Result<Segment<E::Tensor>> {
        let end = start + len;
        let kept = |s: &&Segment<E::Tensor>| (start..end).contains(&s.start);
        let same = self.body.iter().find(|s| (s.start, s.keys.len()) == (start, len));
        if let Some(same) = same.filter(|_| !border.old.iter().any(|s| kept(&s))) {
            return Ok(same.clone());
        }
        let lost = || Error::Range { start, end, len: self.offset };
        let (mut at, mut whole) = (start, None);
        while at < end {
            let piece = match border.old.iter().find(|s| s.start == at) {
                Some(old) => old.clone(),
                None => {
                    let now = self.body.iter().find(|s| (s.start..s.start + s.keys.len()).contains(&at));
                    let now = now.ok_or_else(lost)?;
                    let next = border.old.iter().map(|s| s.start).filter(|&s| s > at).min().unwrap_or(end);
                    let to = end.min(next).min(now.start + now.keys.len());
                    cut(now, at - now.start, to - now.start)?
                }
            };
            at += piece.keys.len();
            whole = Some(match whole {
                Some(before) => join(&before, &piece).ok_or_else(lost)??,
                None if at == end => compacted(&self.engine, &piece)?,
                None => piece,
            });
        }
        whole.ok_or_else(lost)
    }
}
