//! What the parts of a cache fulfil that is put together from a state: nothing of a state is believed.
//!
//! Every cache that append and trim make passes, so what passes here cannot fail or mislead later: positions add up to the offset, tables
//! belong to the codecs, and a policy knows every block of the body and no other.

use super::held::Seen;
use super::{LayerShape, SequenceCache};
use crate::codec::Codec;
use crate::codec::codes::{Buffer, Frame, check_dtypes};
use crate::compressor::TOKENS_PER_BLOCK;
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Positions up to which a cache can be put together: those that an engine can count.
pub(super) const MOST_TOKENS: usize = i32::MAX as usize;

impl<E: Engine + Clone> SequenceCache<E> {
    /// Checks the parts of a cache against one another.
    ///
    /// # Errors
    /// [`Error::Parse`] names what contradicts what, [`Error::Shape`] or [`Error::Dtype`] an array that does not fit.
    pub(super) fn check_parts(&self) -> Result<()> {
        self.check_positions()?;
        let Some(window) = &self.window else {
            // Without a window no token has ever come.
            let nothing = self.offset == 0 && self.sinks.is_none() && self.frames.is_none();
            return if nothing && self.queries.is_none() {
                Ok(())
            } else {
                Err(misfit("there is no array window.keys".into()))
            };
        };
        let [b, h] = [window.keys.shape()[0], window.keys.shape()[1]];
        if b == 0 || h == 0 {
            return Err(misfit(format!("{b} sequences and {h} heads")));
        }
        let exact = [&self.sinks, &self.window].into_iter().flatten().flat_map(|e| [&e.keys, &e.values]);
        let body = self.body.iter().flat_map(|s| [&s.keys, &s.values]);
        let rows = body.clone().filter_map(|side| match side {
            Stored::Exact { rows, .. } => Some(rows),
            Stored::Packed(_) => None,
        });
        for rows in exact.chain(rows) {
            self.engine.dtype(rows)?;
            if rows.shape()[..2] != [b, h] {
                let expected = format!("[{b}, {h}, ..] as the window has");
                return Err(Error::Shape { what: "rows", expected, got: rows.shape() });
            }
        }
        for codes in body {
            if let Stored::Packed(codes) = codes {
                let none = |x: &E::Tensor| self.engine.get(&x.slice(2, 0, 0)?);
                check_dtypes(codes.codec(), &none(codes.words())?, &none(codes.scales())?)?;
                if codes.shape()[..2] != [b, h] {
                    let expected = format!("[{b}, {h}, ..] as the window has");
                    return Err(Error::Shape { what: "words", expected, got: codes.words().shape() });
                }
            }
        }
        self.check_frames(b, h)?;
        check_queries(self.queries.as_ref(), &self.asked, [b, h, self.shape.key_dim])?;
        if self.frames.is_some() && self.queries.is_some() {
            return Err(misfit("queries beside frames".into()));
        }
        self.check_tiers()?;
        self.check_border(b, h)
    }

    /// A border lies within the last tokens, and a trim can go back to it: what that would give is a cache as consistent as any.
    fn check_border(&self, b: usize, h: usize) -> Result<()> {
        let Some(border) = &self.border else { return Ok(()) };
        let (at, full) = (border.at, self.full_window());
        let behind = self.offset.checked_sub(at).filter(|n| (1..=self.reach()).contains(n));
        if behind.map(|n| n + full - TOKENS_PER_BLOCK) != Some(self.window_len) || at < full {
            return Err(misfit(format!("a border at {at}, the offset is {}", self.offset)));
        }
        let LayerShape { key_dim, value_dim } = self.shape;
        for (rows, dim) in border.block.iter().zip([key_dim, value_dim]) {
            self.engine.dtype(rows)?;
            if rows.shape() != [b, h, TOKENS_PER_BLOCK, dim] {
                let expected = format!("[{b}, {h}, {TOKENS_PER_BLOCK}, {dim}]");
                return Err(Error::Shape { what: "border", expected, got: rows.shape() });
            }
        }
        if border.tiers.is_some() != self.tiers.is_some() || border.spans.iter().any(|s| s.0 > at || s.1 > at)
        {
            return Err(misfit(format!("the border at {at} is that of another cache")));
        }
        check_queries(border.queries.as_ref(), &border.asked, [b, h, key_dim])?;
        let mut cache = self.clone();
        cache.trim(self.offset - at)?;
        cache.check_parts()
    }

    /// Tokens follow one another up to the offset; only a policy that drops blocks leaves gaps.
    fn check_positions(&self) -> Result<()> {
        let (sinks, window, offset) = (self.sinks_len, self.window_len, self.offset);
        if offset > MOST_TOKENS || window > offset {
            return Err(misfit(format!("{window} tokens in the window, the offset is {offset}")));
        }
        if sinks > self.recipe.sinks || window > self.full_window() {
            return Err(misfit(format!("{sinks} sinks and {window} tokens in the window: more than fit")));
        }
        if sinks < self.recipe.sinks && offset > sinks {
            return Err(misfit(format!("{sinks} sinks of {}, the offset is {offset}", self.recipe.sinks)));
        }
        let mut end = sinks;
        let gaps = self.tiers.as_ref().is_some_and(|tiers| tiers.policy.drops());
        let mut follow = |what: &str, start: usize, len: usize| {
            let fits = if gaps { start >= end } else { start == end };
            if !fits || start > offset || len > offset - start {
                let reason = format!("{what} holds {len} tokens from {start} on, those before end at {end}");
                return Err(misfit(format!("{reason}, the offset is {offset}")));
            }
            end = start + len;
            Ok(())
        };
        for s in &self.body {
            if s.keys.is_empty() {
                return Err(misfit(format!("the segment at {} holds no token", s.start)));
            }
            follow("a segment", s.start, s.keys.len())?;
        }
        follow("the window", offset - window, window)
    }

    /// Tables are there once a block has left the window, and are what the codecs need.
    fn check_frames(&self, b: usize, h: usize) -> Result<()> {
        let Some(frames) = &self.frames else {
            return match self.body.first() {
                None => Ok(()),
                Some(s) => Err(misfit(format!("a segment at {} without frames", s.start))),
            };
        };
        for (i, (frame, codec)) in frames.iter().zip(self.frame_codecs()).enumerate() {
            let (side, centred) = (["keys", "values"][i], i == 0 && codec.is_some() && self.recipe.centred);
            if frame.centre.is_some() != centred {
                let found = if centred { "no centre" } else { "a centre that the recipe does not have" };
                return Err(misfit(format!("the frame of the {side} has {found}")));
            }
            match &codec {
                Some(codec) => frame.check(codec, b, h)?,
                None if frame.gain.is_none() && frame.order.is_none() => {}
                None => return Err(misfit(format!("a frame of the {side}, which have no codec"))),
            }
            let get = |t: &Option<E::Tensor>| t.as_ref().map(|t| self.engine.get(t)).transpose();
            Frame { centre: get(&frame.centre)?, gain: get(&frame.gain)?, order: get(&frame.order)? }
                .check_entries()?;
        }
        Ok(())
    }

    /// Every segment has the codecs of its tier, and the blocks of the tiers are its tokens.
    fn check_tiers(&self) -> Result<()> {
        let Some(tiers) = &self.tiers else {
            let codecs = [&self.codecs[0], &self.codecs[1]];
            return self.body.iter().try_for_each(|s| check_segment(s, codecs));
        };
        if tiers.unobserved >= tiers.observe_every || tiers.pins.iter().any(|p| p.start > p.end) {
            return Err(misfit("observations or pins that no cache has".into()));
        }
        let bad = |s: &Seen| s.unobserved >= tiers.observe_every || s.tokens.end > self.offset;
        if tiers.seen.iter().any(|s| bad(s) || s.tokens.start > s.tokens.end) {
            return Err(misfit("observations of tokens that did not come".into()));
        }
        let (mut blocks, tile) = (tiers.blocks.iter().peekable(), self.recipe.tile());
        for s in &self.body {
            let (mut at, end) = (s.start, s.start + s.keys.len());
            while at < end {
                let block = blocks.next().filter(|b| b.start == at && b.len > 0 && b.len <= end - at);
                let block = block.filter(|b| (b.start - s.start) % tile == 0 && b.len % tile == 0);
                let block = block
                    .ok_or_else(|| misfit(format!("no block of a tier begins at {at} and ends by {end}")))?;
                let codecs = tiers.codecs.get(block.tier);
                let codecs = codecs.ok_or_else(|| misfit(format!("there is no tier {}", block.tier)))?;
                check_segment(s, [&codecs[0], &codecs[1]])?;
                at += block.len;
            }
        }
        match blocks.next() {
            Some(b) => Err(misfit(format!("a block at {} of which there are no tokens", b.start))),
            None => Ok(()),
        }
    }
}

/// Checks kept queries and their positions against sequences, heads and channels of the keys.
fn check_queries<T: Buffer>(
    queries: Option<&T>,
    asked: &[Range<usize>],
    [b, h, d]: [usize; 3],
) -> Result<()> {
    let rising = asked.windows(2).all(|w| w[0].end <= w[1].start) && asked.iter().all(|r| r.start < r.end);
    let positions = asked.iter().fold(0usize, |sum, r| sum.saturating_add(r.len()));
    let Some(shape) = queries.map(T::shape) else {
        return if asked.is_empty() {
            Ok(())
        } else {
            Err(misfit("positions of queries that are not there".into()))
        };
    };
    match shape[..] {
        [qb, hq, n, qd] if qb == b && hq > 0 && hq % h == 0 && n > 0 && qd == d => {
            if rising && n == positions {
                return Ok(());
            }
            Err(misfit(format!("{n} queries at positions {asked:?}")))
        }
        _ => {
            let expected = format!("[{b}, a multiple of {h}, n > 0, {d}]");
            Err(Error::Shape { what: "queries", expected, got: shape })
        }
    }
}

/// Checks that the sides of a segment are packed by these codecs, or exact where there is none.
fn check_segment<T: Buffer>(s: &Segment<T>, codecs: [&Option<Arc<Codec>>; 2]) -> Result<()> {
    for (side, codec) in [&s.keys, &s.values].into_iter().zip(codecs) {
        match (side, codec) {
            (Stored::Packed(codes), Some(codec)) => codes.expect(codec)?,
            (Stored::Exact { .. }, None) => {}
            _ => return Err(misfit(format!("the segment at {} is not packed as its tier is", s.start))),
        }
    }
    Ok(())
}

/// An [`Error::Parse`] about a state.
pub(super) fn misfit(reason: String) -> Error {
    Error::Parse { what: "cache state", text: "state".into(), reason }
}
