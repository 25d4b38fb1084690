//! A cache taken apart for the pool: its packed tokens in blocks that other caches may share, and all the rest.
//!
//! A block holds 128 packed tokens of one side of one layer and is never written to; equal blocks are kept once. Caches with a common
//! prefix have equal blocks there, because a codec is a pure function of its spec and the frame comes from the first block.

use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::compressor::{CompressedCache, TOKENS_PER_BLOCK};
use crate::engine::cpu::workers;
use crate::error::Result;
use crate::tensor::Tensor;
use rayon::prelude::*;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

/// Bytes of memory that a block costs beside its codes: the block itself, two reference counts a buffer and its place in the pool.
const BLOCK_OVERHEAD: usize =
    size_of::<SharedBlock>() + 3 * 2 * size_of::<usize>() + size_of::<(u64, usize, usize)>();

/// A cache that a pool can hold.
pub trait Pooled: Clone + Send + Sync {
    /// Packed tokens of every layer and side, always in the same order.
    fn bodies(&mut self) -> Vec<&mut Option<Codes<Tensor>>>;

    /// Bytes of every buffer, packed tokens included where they are in place.
    fn nbytes(&self) -> usize;
}

impl Pooled for CompressedCache<Tensor> {
    fn bodies(&mut self) -> Vec<&mut Option<Codes<Tensor>>> {
        self.layers.iter_mut().flat_map(|l| [&mut l.key.body, &mut l.value.body]).collect()
    }

    fn nbytes(&self) -> usize {
        self.layers.iter().map(|l| l.key.nbytes() + l.value.nbytes()).sum()
    }
}

/// Packed tokens that nobody writes to.
#[derive(Debug)]
pub(super) struct SharedBlock {
    words: Tensor,
    scales: Tensor,
    hash: u64,
}

impl SharedBlock {
    fn new(codes: &Codes<Tensor>) -> SharedBlock {
        let (words, scales) = (codes.words().compact(), codes.scales().compact());
        let mut hasher = DefaultHasher::new();
        for part in [&words, &scales] {
            hasher.write(&part.row_major_bytes());
        }
        SharedBlock { words, scales, hash: hasher.finish() }
    }

    /// Equal blocks have equal hashes.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn nbytes(&self) -> usize {
        self.words.nbytes() + self.scales.nbytes() + BLOCK_OVERHEAD
    }

    pub(super) fn same(&self, other: &SharedBlock) -> bool {
        self.hash == other.hash && self.words == other.words && self.scales == other.scales
    }
}

/// The packed tokens of one side of one layer.
#[derive(Clone, Debug)]
struct PackedSide {
    codec: Arc<Codec>,
    frame: Frame<Tensor>,
    blocks: Vec<Arc<SharedBlock>>,
}

impl PackedSide {
    fn split(codes: Codes<Tensor>) -> Result<PackedSide> {
        let tokens = codes.shape()[2];
        // Without heads any number of tokens has no bytes.
        let step = if codes.words().is_empty() { tokens.max(1) } else { TOKENS_PER_BLOCK };
        let cut =
            |start: usize| Ok(Arc::new(SharedBlock::new(&codes.slice(start, (start + step).min(tokens))?)));
        // A side without tokens is one empty block, so that its buffers keep their shape.
        let blocks = (0..tokens.max(1)).step_by(step).map(cut).collect::<Result<_>>()?;
        Ok(PackedSide { codec: codes.codec().clone(), frame: codes.frame().clone(), blocks })
    }

    fn join(&self) -> Result<Codes<Tensor>> {
        let gather = |f: fn(&SharedBlock) -> &Tensor| match &self.blocks[..] {
            [one] => Ok(f(one).clone()),
            blocks => Tensor::concat(2, &blocks.iter().map(|b| f(b).clone()).collect::<Vec<_>>()),
        };
        Codes::new(self.codec.clone(), self.frame.clone(), gather(|b| &b.words)?, gather(|b| &b.scales)?)
    }

    /// Bytes beside the blocks.
    fn nbytes(&self) -> usize {
        let levels = self.codec.fitted().map_or(0, |levels| 4 * levels.len());
        self.frame.nbytes()
            + levels
            + size_of::<PackedSide>()
            + self.blocks.len() * size_of::<Arc<SharedBlock>>()
    }
}

/// Bytes that a pool counts for the packed tokens of one side of a layer, before there are any: `row_bytes` a token of all heads,
/// `frame_bytes` of tables.
pub(crate) fn body_bytes(tokens: usize, row_bytes: usize, frame_bytes: usize) -> usize {
    let blocks = tokens.max(1).div_ceil(TOKENS_PER_BLOCK);
    let block = BLOCK_OVERHEAD + size_of::<Arc<SharedBlock>>();
    tokens * row_bytes + blocks * block + frame_bytes + size_of::<PackedSide>()
}

/// A cache in blocks, as a pool holds it. Cheap to clone: a clone shares all buffers.
#[derive(Clone, Debug)]
pub struct Parcel<C> {
    rest: C,
    bodies: Vec<Option<PackedSide>>,
    own: usize,
}

impl<C: Pooled> Parcel<C> {
    /// Takes a cache apart; blocks get buffers of their own.
    ///
    /// # Errors
    /// [`crate::Error::Range`] if codes do not have the tokens that they claim, which no engine makes.
    pub fn split(cache: C) -> Result<Parcel<C>> {
        let mut parcel = Parcel { rest: cache, bodies: vec![], own: 0 };
        parcel.extend(|_| ())?;
        Ok(parcel)
    }

    /// Lets `change` add to the end of a cache, and takes apart what is new. So a cache can come into being without ever being there
    /// whole beside its blocks.
    ///
    /// # Errors
    /// As [`Parcel::split`].
    pub fn extend(&mut self, change: impl FnOnce(&mut C)) -> Result<()> {
        change(&mut self.rest);
        let new: Vec<_> = self.rest.bodies().into_iter().skip(self.bodies.len()).map(Option::take).collect();
        let new: Vec<Option<PackedSide>> = workers::run(|| {
            new.into_par_iter().map(|b| b.map(PackedSide::split).transpose()).collect::<Result<_>>()
        })??;
        self.bodies.extend(new);
        let bodies = self.bodies.iter().flatten().map(PackedSide::nbytes).sum::<usize>();
        self.own = self.rest.nbytes() + size_of::<C>() + bodies;
        Ok(())
    }

    /// The cache, bit for bit as it was, in buffers of its own.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the blocks do not belong together, which no pool makes.
    pub fn join(&self) -> Result<C> {
        let mut cache = self.rest.clone();
        let bodies: Vec<Option<Codes<Tensor>>> = workers::run(|| {
            self.bodies
                .par_iter()
                .map(|b| b.as_ref().map(PackedSide::join).transpose())
                .collect::<Result<_>>()
        })??;
        cache.bodies().into_iter().zip(bodies).for_each(|(place, body)| *place = body);
        Ok(cache)
    }
}

impl<C> Parcel<C> {
    /// The cache without its packed tokens.
    pub fn rest(&self) -> &C {
        &self.rest
    }

    /// Packed tokens by their place in [`Pooled::bodies`], in buffers of their own.
    ///
    /// # Errors
    /// As [`Parcel::join`].
    pub fn body(&self, place: usize) -> Result<Option<Codes<Tensor>>> {
        self.bodies.get(place).and_then(Option::as_ref).map(PackedSide::join).transpose()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = &Arc<SharedBlock>> {
        self.bodies.iter().flatten().flat_map(|b| &b.blocks)
    }

    /// Bytes that no other cache can share: exact tokens, tables, what is not packed, and the bookkeeping.
    pub(super) fn own(&self) -> usize {
        self.own
    }

    /// Bytes of a pool that holds nothing else.
    pub(super) fn alone(&self) -> usize {
        self.own + self.blocks().map(|b| b.nbytes()).sum::<usize>()
    }

    /// Takes other blocks for equal ones of its own. `known` gives candidates a block.
    pub(super) fn adopt(&mut self, mut known: Vec<Vec<Arc<SharedBlock>>>) {
        let mut known = known.drain(..);
        for block in self.bodies.iter_mut().flatten().flat_map(|b| &mut b.blocks) {
            if let Some(same) = known.next().and_then(|list| list.into_iter().find(|k| k.same(block))) {
                *block = same;
            }
        }
    }
}
