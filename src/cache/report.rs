//! What a cache holds: one line per segment, with the bytes of its buffers. The lines and the tables add up to `nbytes`.

use super::segments::bytes_of;
use super::{Exact, SequenceCache};
use crate::codec::codes::{Buffer, Frame};
use crate::engine::Engine;
use crate::engine::attention::Stored;
use crate::policy::Ema;
use serde::Serialize;

/// Name of the part that is kept beside the tokens so that the newest block can be taken back, see [`super::LayerCache::trim`].
pub(super) const DRAFT: &str = "draft";

/// A run of tokens of one tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartReport {
    /// `sinks`, `window`, `draft` (no tokens: what is kept so that the newest block can be taken back), or the name of the tier.
    pub tier: String,
    /// Position of the first token.
    pub start: usize,
    /// Tokens.
    pub tokens: usize,
    /// Bits of a code of the keys; 16 or 32 for exact ones.
    pub key_bits: f32,
    /// Bits of a code of the values, likewise.
    pub value_bits: f32,
    /// Bytes of the buffers, rows that hold no token yet included.
    pub bytes: usize,
    /// Share of all attention that the tokens receive; zero if no policy looks at it.
    pub mass: f32,
}

/// What a layer holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// The segments in token order.
    pub parts: Vec<PartReport>,
    /// Bytes of tables: frames, calibrated levels, and the queries from which gains are yet to be made.
    pub table_bytes: usize,
    /// Position of the next token.
    pub offset: usize,
    /// The age from which blocks are evicted, if there is such a limit.
    pub limit: Option<usize>,
}

impl LayerReport {
    /// Bytes of everything.
    pub fn bytes(&self) -> usize {
        self.table_bytes + self.parts.iter().map(|p| p.bytes).sum::<usize>()
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.parts.iter().map(|p| p.tokens).sum()
    }

    /// Tokens and bytes of all parts of one tier.
    pub fn of(&self, tier: &str) -> (usize, usize) {
        let parts = self.parts.iter().filter(|p| p.tier == tier);
        parts.fold((0, 0), |(tokens, bytes), p| (tokens + p.tokens, bytes + p.bytes))
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`super::LayerCache::used_bytes`].
    pub fn used_bytes(&self) -> usize {
        let exact = [(&self.sinks, self.sinks_len), (&self.window, self.window_len)];
        let rows = |(e, len): (&Option<Exact<E::Tensor>>, usize)| {
            e.as_ref().map_or(0, |e| bytes_of_exact(e) / e.capacity.max(1) * len)
        };
        let body = self.body.iter().map(|s| bytes_of(&s.keys) + bytes_of(&s.values));
        let queries = self.queries.as_ref().map_or(0, E::Tensor::nbytes);
        let rows = exact.into_iter().map(rows).sum::<usize>();
        rows + self.table_bytes() - queries + body.sum::<usize>()
    }

    /// See [`super::LayerCache::nbytes`].
    pub fn nbytes(&self) -> usize {
        let exact: usize = [&self.sinks, &self.window].into_iter().flatten().map(bytes_of_exact).sum();
        let body = self.body.iter().map(|s| bytes_of(&s.keys) + bytes_of(&s.values));
        exact + self.table_bytes() + body.sum::<usize>() + self.border_bytes()
    }

    /// Bytes that are kept so that the newest block can be taken back.
    fn border_bytes(&self) -> usize {
        self.border.as_ref().map_or(0, |border| border.nbytes())
    }

    fn table_bytes(&self) -> usize {
        let frames: usize = self.frames.iter().flatten().map(Frame::nbytes).sum();
        let queries = self.queries.as_ref().map_or(0, E::Tensor::nbytes);
        frames
            + queries
            + self.codecs.iter().flatten().filter_map(|c| c.fitted()).map(|l| 4 * l.len()).sum::<usize>()
    }

    /// See [`super::LayerCache::report`].
    pub fn report(&self) -> crate::Result<LayerReport> {
        let masses = self.tiers.as_ref().map_or([Ema::default(); 2], |t| t.exact);
        let mut parts = vec![];
        let bits = |side: &Stored<E::Tensor>| -> crate::Result<f32> {
            Ok(match side {
                Stored::Exact { rows, .. } => 8.0 * self.engine.dtype(rows)?.bytes() as f32,
                Stored::Packed(codes) => codes.codec().spec().nominal_bits(),
            })
        };
        for segment in self.segments() {
            let (start, tokens) = (segment.start, segment.keys.len());
            let in_body = self.body.iter().any(|b| b.start == start);
            let inside = |b: &&super::held::Held| (start..start + tokens).contains(&b.start);
            let tiers = self.tiers.as_ref().filter(|_| in_body);
            let (tier, mass) = match tiers.and_then(|t| Some((t, t.blocks.iter().find(inside)?))) {
                Some((tiers, first)) => (
                    tiers.policy.name(first.tier),
                    tiers.blocks.iter().filter(inside).map(|b| b.mass.value()).sum(),
                ),
                None if in_body => ("packed".into(), 0.0),
                None if start < self.sinks_len => ("sinks".into(), masses[0].value()),
                None => ("window".into(), masses[1].value()),
            };
            parts.push(PartReport {
                tier,
                start,
                tokens,
                key_bits: bits(&segment.keys)?,
                value_bits: bits(&segment.values)?,
                bytes: bytes_of(&segment.keys) + bytes_of(&segment.values),
                mass,
            });
        }
        // A window without a token has its buffer all the same.
        if let Some(window) = self.window.as_ref().filter(|_| self.window_len == 0) {
            parts.push(self.empty("window", window)?);
        }
        if let Some(sinks) = self.sinks.as_ref().filter(|_| self.sinks_len == 0) {
            parts.push(self.empty("sinks", sinks)?);
        }
        if let Some(border) = &self.border {
            let side = |i: usize| self.engine.dtype(&border.block[i]).map(|d| 8.0 * d.bytes() as f32);
            parts.push(PartReport {
                tier: DRAFT.into(),
                start: border.at - self.full_window(),
                tokens: 0,
                key_bits: side(0)?,
                value_bits: side(1)?,
                bytes: border.nbytes(),
                mass: 0.0,
            });
        }
        let (table_bytes, offset, limit) = (self.table_bytes(), self.offset, self.limit());
        Ok(LayerReport { parts, table_bytes, offset, limit })
    }

    fn empty(&self, tier: &str, exact: &Exact<E::Tensor>) -> crate::Result<PartReport> {
        let bits = |rows: &E::Tensor| self.engine.dtype(rows).map(|d| 8.0 * d.bytes() as f32);
        Ok(PartReport {
            tier: tier.into(),
            start: self.offset,
            tokens: 0,
            key_bits: bits(&exact.keys)?,
            value_bits: bits(&exact.values)?,
            bytes: bytes_of_exact(exact),
            mass: 0.0,
        })
    }
}

fn bytes_of_exact<T: Buffer>(exact: &Exact<T>) -> usize {
    exact.keys.nbytes() + exact.values.nbytes()
}
