//! How blocks grow old: at every border the cache shows its blocks to a policy and does what it answers.
//!
//! Storage joins neighbours of one tier into segments; the policy still sees blocks of 128 tokens. A block is packed anew from its
//! packed form, in the same frame and with the same rotation; a side whose codec does not change keeps its codes. What is cut from a
//! segment gets buffers of its own, so an evicted or recoded block frees its bytes at once.

use super::SequenceCache;
use super::held::{Held, Retired, Seen};
use super::segments::{compacted, join};
use super::undo::Undo;
use crate::codec::Codec;
use crate::codec::codes::{Buffer, Codes, Frame};
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, Stored, cut};
use crate::error::{Error, Result};
use crate::policy::{Action, Bits, BlockFacts, Ema, TierPolicy};
use crate::recipe;
use crate::tensor::Dtype;
use std::ops::Range;
use std::sync::Arc;

/// Tokens between two observations of attention, unless another number is asked for.
pub const OBSERVE_EVERY: usize = 16;
/// Tokens that are recoded in one batch: a bound for the dense copy.
const BATCH: usize = 512;

/// The policy of a cache and what it has observed.
#[derive(Clone, Debug)]
pub(super) struct Tiers {
    pub(super) policy: TierPolicy,
    pub(super) codecs: Vec<[Option<Arc<Codec>>; 2]>,
    pub(super) blocks: Vec<Held>,
    /// Attention that the sinks and the window receive.
    pub(super) exact: [Ema; 2],
    pub(super) pins: Vec<Range<usize>>,
    pub(super) observe_every: usize,
    pub(super) unobserved: usize,
    /// Calls of the last tokens, as far back as [`SequenceCache::reach`], oldest first.
    pub(super) seen: Vec<Seen>,
}

/// A run of tokens of one tier on its way into the body.
struct TierRun<T> {
    segment: Segment<T>,
    tier: usize,
    changed: bool,
}

/// Codecs of keys and values at the bits of each tier, with the rotations of `codecs`; a side without a codec stays exact.
///
/// # Errors
/// [`Error::Unsupported`] if a codec has no form at these bits, or has calibrated levels.
pub fn tier_codecs(codecs: &[Option<Arc<Codec>>; 2], tiers: &[Bits]) -> Result<Vec<[Option<Arc<Codec>>; 2]>> {
    let side = |codec: &Option<Arc<Codec>>, bits: u8| -> Result<Option<Arc<Codec>>> {
        let Some(codec) = codec else { return Ok(None) };
        if codec.fitted().is_some() {
            let reason = "calibrated levels are for one number of bits".into();
            return Err(Error::Unsupported { field: "tiers", value: codec.spec().to_string(), reason });
        }
        let spec = recipe::with_bits(*codec.spec(), f32::from(bits))?;
        spec.map(|spec| Codec::new(spec).map(Arc::new)).transpose()
    };
    tiers.iter().map(|b| Ok([side(&codecs[0], b.key)?, side(&codecs[1], b.value)?])).collect()
}

impl Tiers {
    /// What the policy sees of blocks when `offset` tokens have come.
    pub(super) fn facts(&self, blocks: &[Held], offset: usize) -> Vec<BlockFacts> {
        let fact = |b: &Held| BlockFacts {
            start: b.start,
            len: b.len,
            age: offset.saturating_sub(b.start + b.len),
            mass: b.mass.value(),
            observed: b.mass.steps(),
            tier: b.tier,
            pinned: self.pins.iter().any(|p| p.start < b.start + b.len && b.start < p.end),
        };
        blocks.iter().map(fact).collect()
    }

    /// Takes back what queries at `target` and later were observed to attend to.
    pub(super) fn forget(&mut self, target: usize) {
        let first = self.seen.partition_point(|s| s.tokens.end <= target);
        let Some(seen) = self.seen.get(first).cloned() else { return };
        let counted = seen.unobserved + target.saturating_sub(seen.tokens.start);
        self.unobserved = counted.min(self.observe_every - 1);
        if let Some((masses, exact)) = self.seen[first..].iter().find_map(|s| s.masses.clone())
            && masses.len() == self.blocks.len()
        {
            self.blocks.iter_mut().zip(masses).for_each(|(b, mass)| b.mass = mass);
            self.exact = exact;
        }
        self.seen.truncate(first);
        if seen.tokens.start < target {
            self.seen.push(Seen { tokens: seen.tokens.start..target, masses: None, ..seen });
        }
    }
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`super::LayerCache::with_tiers`].
    pub fn with_tiers(mut self, policy: &TierPolicy, observe_every: usize) -> Result<SequenceCache<E>> {
        let refuse = |field, value: usize, reason: &str| {
            Err(Error::Unsupported { field, value: value.to_string(), reason: reason.into() })
        };
        if !self.is_empty() {
            return refuse("tiers", self.len(), "the cache already holds tokens");
        }
        if observe_every == 0 {
            return refuse("observe_every", 0, "at least 1");
        }
        if *policy == TierPolicy::None {
            self.tiers = None;
            return Ok(self);
        }
        self.tiers = Some(Tiers {
            policy: policy.clone(),
            codecs: tier_codecs(&self.codecs, &policy.bits())?,
            blocks: vec![],
            exact: [Ema::default(); 2],
            pins: vec![],
            observe_every,
            unobserved: 0,
            seen: vec![],
        });
        Ok(self)
    }

    /// The age from which blocks are evicted, see [`TierPolicy::limit`].
    pub(super) fn limit(&self) -> Option<usize> {
        self.tiers.as_ref().and_then(|tiers| tiers.policy.limit())
    }

    /// See [`super::LayerCache::pin`].
    pub fn pin(&mut self, tokens: Range<usize>) -> Result<()> {
        self.unpin(tokens.clone())?;
        if let Some(tiers) = self.tiers.as_mut().filter(|_| !tokens.is_empty()) {
            tiers.pins.push(tokens);
        }
        Ok(())
    }

    /// See [`super::LayerCache::unpin`].
    pub fn unpin(&mut self, tokens: Range<usize>) -> Result<()> {
        let Range { start, end } = tokens;
        if start > end {
            return Err(Error::Range { start, end, len: self.offset });
        }
        if let Some(tiers) = &mut self.tiers {
            let rest = |p: &Range<usize>| [p.start..p.end.min(start), p.start.max(end)..p.end];
            tiers.pins = tiers.pins.iter().flat_map(rest).filter(|p| !p.is_empty()).collect();
        }
        Ok(())
    }

    /// What the policy sees.
    pub fn blocks(&self) -> Vec<BlockFacts> {
        self.tiers.as_ref().map_or(vec![], |tiers| tiers.facts(&tiers.blocks, self.offset))
    }

    /// The body with a fresh exact block behind it, after the policy has decided; `keep` asks for what blocks were before.
    pub(super) fn retier(
        &self,
        tiers: &Tiers,
        fresh: &Segment<E::Tensor>,
        frames: &[Frame<E::Tensor>; 2],
        keep: bool,
    ) -> Result<Retired<E::Tensor>> {
        let mut held = tiers.blocks.clone();
        held.push(Held::fresh(fresh.start));
        let actions = tiers.policy.decide(&tiers.facts(&held, self.offset));
        let (mut old, mut dropped) = (vec![], vec![]);
        let mut blocks = Vec::with_capacity(held.len());
        let mut body: Vec<TierRun<E::Tensor>> = vec![];
        let mut at = 0;
        for (segment, is_fresh) in self.body.iter().map(|s| (s, false)).chain([(fresh, true)]) {
            let end = segment.start + segment.keys.len();
            let first = at;
            at += held[first..].iter().take_while(|b| b.start < end).count();
            let untouched = !is_fresh && actions[first..at].iter().all(|a| *a == Action::Keep);
            let mut i = first;
            while i < at {
                // A run of blocks that meet the same fate; recoding has a bound, keeping has none.
                let (action, from) = (actions[i], held[i].start);
                let most = if action == Action::Keep { usize::MAX } else { BATCH };
                let run = held[i..at].iter().zip(&actions[i..at]);
                let run = run.take_while(|(b, a)| **a == action && b.start + b.len - from <= most).count();
                let run = &mut held[i..i + run.max(1)];
                i += run.len();
                let to = run[run.len() - 1].start + run[run.len() - 1].len;
                let view = || cut(segment, from - segment.start, to - segment.start);
                if keep && !is_fresh && action != Action::Keep {
                    old.push(compacted(&self.engine, &view()?)?);
                }
                let tier = match action {
                    Action::Keep => run[0].tier,
                    Action::Recode(tier) => tier.min(tiers.codecs.len() - 1),
                    Action::Drop => {
                        dropped.push(view()?);
                        continue;
                    }
                };
                run.iter_mut().for_each(|b| b.tier = tier);
                blocks.extend_from_slice(run);
                let piece =
                    if untouched { segment.clone() } else { self.recode(&view()?, tiers, tier, frames)? };
                add(&mut body, TierRun { segment: piece, tier, changed: !untouched })?;
            }
        }
        let body = body.into_iter().map(|p| p.segment).collect();
        Ok(Retired { body, blocks, old, dropped })
    }

    /// A run of tokens packed for a tier, in buffers of its own.
    fn recode(
        &self,
        run: &Segment<E::Tensor>,
        tiers: &Tiers,
        tier: usize,
        frames: &[Frame<E::Tensor>; 2],
    ) -> Result<Segment<E::Tensor>> {
        let engine = &self.engine;
        let side = |i: usize, stored: &Stored<E::Tensor>| -> Result<Stored<E::Tensor>> {
            let encode = |codec: &Arc<Codec>, rows: &E::Tensor| {
                engine.encode(codec, frames[i].clone(), rows).map(Stored::Packed)
            };
            match (stored, &tiers.codecs[tier][i]) {
                (Stored::Packed(codes), Some(codec)) if !codes.codec().same(codec) => {
                    encode(codec, &engine.decode(codes, Dtype::F32)?)
                }
                (Stored::Packed(codes), _) => {
                    let (words, scales) = (engine.compact(codes.words())?, engine.compact(codes.scales())?);
                    Codes::new(codes.codec().clone(), codes.frame().clone(), words, scales)
                        .map(Stored::Packed)
                }
                (Stored::Exact { rows, len }, Some(codec)) => encode(codec, &rows.slice(2, 0, *len)?),
                (Stored::Exact { rows, len }, None) => {
                    let rows = rows.slice(2, 0, *len)?;
                    // A side that the recipe keeps exact keeps its dtype too.
                    let half = self.codecs[i].is_some() && engine.dtype(&rows)? == Dtype::F32;
                    let rows = if half { self.cast(&rows, Dtype::F16)? } else { engine.compact(&rows)? };
                    Ok(Stored::Exact { rows, len: *len })
                }
            }
        };
        Ok(Segment { start: run.start, keys: side(0, &run.keys)?, values: side(1, &run.values)? })
    }

    /// The same rows in another dtype.
    pub(super) fn cast(&self, rows: &E::Tensor, dtype: Dtype) -> Result<E::Tensor> {
        if self.engine.dtype(rows)? == dtype {
            return Ok(rows.clone());
        }
        let mut cast = self.engine.zeros(dtype, &rows.shape())?;
        self.engine.write(&mut cast, 0, rows)?;
        Ok(cast)
    }

    /// Counts `tokens` just appended and, when it is time, lets the last query tell how much attention each block receives.
    pub(super) fn observe(
        &mut self,
        undo: &mut Undo<E::Tensor>,
        tokens: usize,
        queries: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<()> {
        let Some(TierPolicy::Attention(policy)) = self.tiers.as_ref().map(|t| &t.policy) else {
            return Ok(());
        };
        let alpha = policy.alpha();
        undo.changes_tiers(self);
        let (end, reach) = (self.offset, self.reach());
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        tiers.seen.retain(|s| s.tokens.end + reach > end);
        tiers.seen.push(Seen { tokens: end - tokens..end, unobserved: tiers.unobserved, masses: None });
        tiers.unobserved += tokens;
        if tiers.unobserved < tiers.observe_every {
            return Ok(());
        }
        tiers.unobserved = 0;
        let last = queries.shape()[2];
        let mut one = rules.clone();
        if let Some(mask) = &rules.mask {
            one.mask = Some(mask.slice(2, last - 1, last)?);
        }
        let parts = self.observed_parts()?;
        let shares = self.engine.masses(&parts, &queries.slice(2, last - 1, last)?, &one)?;
        let (sinks, window) = (usize::from(self.sinks_len > 0), usize::from(self.window_len > 0));
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        if let Some(seen) = tiers.seen.last_mut() {
            seen.masses = Some((tiers.blocks.iter().map(|b| b.mass).collect(), tiers.exact));
        }
        let blocks = &shares[sinks..shares.len() - window];
        tiers.blocks.iter_mut().zip(blocks).for_each(|(b, &x)| b.mass = b.mass.with(alpha, x));
        if sinks > 0 {
            tiers.exact[0] = tiers.exact[0].with(alpha, shares[0]);
        }
        if window > 0 {
            tiers.exact[1] = tiers.exact[1].with(alpha, shares[shares.len() - 1]);
        }
        Ok(())
    }

    /// Sinks, blocks, window: the segments with the body cut into its blocks, in the same buffers.
    fn observed_parts(&self) -> Result<Vec<Segment<E::Tensor>>> {
        let Some(tiers) = &self.tiers else { return Ok(self.segments()) };
        let mut parts = vec![];
        for segment in self.segments() {
            let range = segment.start..segment.start + segment.keys.len();
            let inside: Vec<&Held> = tiers.blocks.iter().filter(|b| range.contains(&b.start)).collect();
            if inside.is_empty() {
                parts.push(segment);
                continue;
            }
            for b in inside {
                parts.push(cut(&segment, b.start - range.start, b.start + b.len - range.start)?);
            }
        }
        Ok(parts)
    }
}

/// Puts a piece behind the body, joined to the last one if one of the two is new and both are of one tier.
fn add<T: Buffer>(body: &mut Vec<TierRun<T>>, piece: TierRun<T>) -> Result<()> {
    if let Some(last) = body.last_mut().filter(|last| last.tier == piece.tier)
        && (last.changed || piece.changed)
        && let Some(joined) = join(&last.segment, &piece.segment)
    {
        *last = TierRun { segment: joined?, tier: piece.tier, changed: true };
        return Ok(());
    }
    body.push(piece);
    Ok(())
}
