//! The mathematics under a codec: packing of bits, codebooks, rotations, trellis codes, scales. Nothing here knows of a cache.

pub mod bits;
pub mod codebook;
pub mod lanes;
pub mod qjl;
pub mod rng;
pub mod rotation;
pub mod scale;
pub mod trellis;
pub mod trellis_search;
pub mod walsh;
