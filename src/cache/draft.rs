//! How a block that has just been packed is taken back: tokens behind its border may still be rejected, as drafts are.
//!
//! A block leaves the window when the token behind its border comes, and what then happens to it and to older blocks loses bits. For some
//! tokens the cache therefore keeps what was lost: the exact rows of the block, and the packed form of older blocks that the policy
//! recoded or dropped at that moment. A trim back to the border puts them in place again, so the cache is bit for bit the one that never
//! saw the rejected tokens.
//!
//! From any offset a trim of `draft` tokens must be able to go back, also after `draft` more have come and gone: what was lost is kept
//! until `2 draft` tokens have come behind the border. With 16 that is one exact block in each layer, and one packed block for each border
//! between tiers, during 32 of every 128 tokens.

use super::SequenceCache;
use super::held::Held;
use super::segments::{bytes_of, compacted, join, write};
use crate::codec::codes::Buffer;
use crate::compressor::TOKENS_PER_BLOCK;
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored, cut};
use crate::error::{Error, Result};
use crate::policy::Ema;
use crate::tensor::Dtype;
use std::ops::Range;
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
    /// Queries, and their positions.
    pub(super) queries: Option<T>,
    pub(super) asked: Vec<Range<usize>>,
    /// Blocks of the tiers, and the attention that sinks and window received.
    pub(super) tiers: Option<(Vec<Held>, [Ema; 2])>,
    /// The border before, if it can still be reached.
    pub(super) previous: Option<Arc<Border<T>>>,
}

impl<T: Buffer> Border<T> {
    /// Bytes that are kept on top of the cache itself.
    pub(super) fn nbytes(&self) -> usize {
        let old = self.old.iter().map(|s| bytes_of(&s.keys) + bytes_of(&s.values));
        let queries = self.queries.as_ref().map_or(0, T::nbytes);
        let previous = self.previous.as_ref().map_or(0, |border| border.nbytes());
        self.block.iter().map(T::nbytes).sum::<usize>() + old.sum::<usize>() + queries + previous
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// What the cache is now, when `fresh` is about to leave the window.
    pub(super) fn border_before(&self, fresh: &Segment<E::Tensor>) -> Result<Border<E::Tensor>> {
        let rows = |side: &Stored<E::Tensor>| match side {
            Stored::Exact { rows, .. } => self.engine.compact(rows),
            Stored::Packed(codes) => self.engine.decode(codes, Dtype::F32),
        };
        Ok(Border {
            at: self.offset,
            block: [rows(&fresh.keys)?, rows(&fresh.values)?],
            old: vec![],
            spans: self.body.iter().map(|s| (s.start, s.keys.len())).collect(),
            framed: self.frames.is_some(),
            queries: self.queries.clone(),
            asked: self.asked.clone(),
            tiers: self.tiers.as_ref().map(|t| (t.blocks.clone(), t.exact)),
            previous: self.border.clone(),
        })
    }

    /// The border of the newest block, if a trim to `target` reaches it.
    pub(super) fn crossed(&self, target: usize) -> Option<Arc<Border<E::Tensor>>> {
        self.border.clone().filter(|border| target <= border.at)
    }

    /// Tokens behind a border after which no trim of `draft` tokens leads back to it.
    pub(super) fn reach(&self) -> usize {
        2 * self.recipe.draft
    }

    /// Forgets borders that are out of reach.
    pub(super) fn settle(&mut self) {
        let first = self.offset.saturating_sub(self.reach());
        if let Some(border) = &mut self.border {
            if border.at < first {
                self.border = None;
            } else if border.previous.as_ref().is_some_and(|previous| previous.at < first) {
                Arc::make_mut(border).previous = None;
            }
        }
    }

    /// Becomes what the cache was at a border. On an error the cache is of no use.
    pub(super) fn go_back(&mut self, border: &Border<E::Tensor>) -> Result<()> {
        let Some(window) = &self.window else {
            return Err(Error::Shape { what: "window", expected: "one or more tokens".into(), got: vec![] });
        };
        let (full, rest) = (self.full_window(), self.full_window() - TOKENS_PER_BLOCK);
        let mut whole = self.room(&window.keys, &window.values, full)?;
        write(&self.engine, Some(&mut whole), 0, &border.block[0], &border.block[1])?;
        let (keys, values) = (window.keys.slice(2, 0, rest)?, window.values.slice(2, 0, rest)?);
        write(&self.engine, Some(&mut whole), TOKENS_PER_BLOCK, &keys, &values)?;
        let body = border.spans.iter().map(|&span| self.segment_before(border, span));
        self.body = body.collect::<Result<_>>()?;
        (self.window, self.window_len, self.offset) = (Some(whole), full, border.at);
        (self.queries, self.asked) = (border.queries.clone(), border.asked.clone());
        if !border.framed {
            self.frames = None;
        }
        if let (Some(tiers), Some((blocks, exact))) = (&mut self.tiers, &border.tiers) {
            tiers.forget(border.at);
            (tiers.blocks, tiers.exact) = (blocks.clone(), *exact);
        }
        self.border = border.previous.clone();
        Ok(())
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
