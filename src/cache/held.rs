//! Blocks as a cache with tiers keeps track of them, and what their policy has seen and made of them.

use crate::compressor::TOKENS_PER_BLOCK;
use crate::engine::attention::Segment;
use crate::policy::Ema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A block as the cache keeps track of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) tier: usize,
    pub(super) mass: Ema,
}

impl Held {
    /// A block that has just left the window.
    pub(super) fn fresh(start: usize) -> Held {
        Held { start, len: TOKENS_PER_BLOCK, tier: 0, mass: Ema::default() }
    }
}

/// What the observations were before the queries of some tokens, which may be taken back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Seen {
    /// Positions of the queries.
    pub(super) tokens: Range<usize>,
    pub(super) unobserved: usize,
    /// Attention of the blocks, and of sinks and window, if these queries were observed.
    pub(super) masses: Option<(Vec<Ema>, [Ema; 2])>,
}

/// What a policy makes of a body.
pub(super) struct Retired<T> {
    pub(super) body: Vec<Segment<T>>,
    pub(super) blocks: Vec<Held>,
    /// Blocks that were recoded or dropped, as they were, where they are asked for.
    pub(super) old: Vec<Segment<T>>,
    /// Views of what was dropped, the fresh block included.
    pub(super) dropped: Vec<Segment<T>>,
}
