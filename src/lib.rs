//! KV-cache compression for large language models: keys and values in 1.5 to 4.5 bits per value, attention directly on the packed form.
//!
//! A [`Recipe`] says how keys and values are packed and which tokens stay exact; every text form of the command line parses. From
//! there it goes three ways:
//!
//! **A whole cache at once**: [`Compressor`] packs a prompt cache of mlx-lm, [`archive`] keeps it in a file.
//!
//! ```no_run
//! use turbomoq::archive::Archive;
//! use turbomoq::prompt_cache::PromptCache;
//! use turbomoq::{Compressor, Recipe};
//!
//! # fn main() -> turbomoq::Result<()> {
//! let cache = PromptCache::read("cache.safetensors")?;
//! let recipe: Recipe = "best@3".parse()?;
//! let packed = Archive::compress(&cache, &Compressor::new(recipe), || {})?;
//! println!("{} bytes in place of {} in fp16", packed.stats().bytes, packed.stats().fp16_bytes);
//! packed.write("cache.tmq")?;
//! # Ok(())
//! # }
//! ```
//!
//! **While a model decodes**: a [`cache::LayerCache`] for each layer takes the keys and values of new tokens and answers their queries.
//!
//! ```
//! use turbomoq::cache::{LayerCache, LayerShape};
//! use turbomoq::{Cpu, Recipe, Rules, Tensor};
//!
//! # fn main() -> turbomoq::Result<()> {
//! let recipe: Recipe = "best@3".parse()?;
//! let mut cache = LayerCache::new(Cpu, &recipe, 0, LayerShape { key_dim: 64, value_dim: 64 })?;
//! // A prompt of 300 tokens, then three single tokens: 8 query heads on 2 KV heads of 64 channels.
//! for tokens in [300, 1, 1, 1] {
//!     let q = Tensor::new(&[1, 8, tokens, 64], vec![0.1f32; 8 * tokens * 64])?;
//!     let k = Tensor::new(&[1, 2, tokens, 64], vec![0.2f32; 2 * tokens * 64])?;
//!     let v = Tensor::new(&[1, 2, tokens, 64], vec![0.3f32; 2 * tokens * 64])?;
//!     let out = cache.update_and_attend(&q, &k, &v, &Rules::causal(0.125))?;
//!     assert_eq!(out.shape(), [1, 8, tokens, 64]);
//! }
//! assert_eq!(cache.offset(), 303);
//! # Ok(())
//! # }
//! ```
//!
//! **Many caches in one budget**: a [`pool::MemoryPool`] holds parked caches of many agents, shares equal blocks and evicts by value.
//!
//! ```
//! use turbomoq::pool::MemoryPool;
//! use turbomoq::{Compressor, Recipe, Tensor};
//!
//! # fn main() -> turbomoq::Result<()> {
//! let recipe: Recipe = "best@3".parse()?;
//! let keys = Tensor::new(&[1, 2, 300, 64], vec![0.2f32; 2 * 300 * 64])?;
//! let values = Tensor::new(&[1, 2, 300, 64], vec![0.3f32; 2 * 300 * 64])?;
//! let packed = Compressor::new(recipe).compress([(&keys, &values)])?;
//! let bytes = 64 << 20;
//! let pool = MemoryPool::new(bytes);
//! pool.park("planner", "reasoning", 0.5, packed)?;
//! assert!(pool.stats().used <= bytes);
//! let resumed = pool.get("planner")?;
//! # assert_eq!(resumed.layers.len(), 1);
//! # Ok(())
//! # }
//! ```
//!
//! [`Engine`] is what computes: [`Cpu`] on host arrays, and with the feature `mlx` (on by default) `Mlx` as lazy graphs on unified
//! memory. The feature `cli` (on by default) builds the program `turbomoq`; a library needs neither clap nor what draws tables.

pub mod allocation;
pub mod cache;
mod codec;
mod compressor;
mod engine;
mod error;
mod io;
mod math;
pub mod policy;
pub mod pool;
pub mod quality;
mod recipe;
#[cfg(unix)]
pub mod serve;
mod spec;
mod tensor;

pub use codec::Codec;
pub use codec::codes::{Buffer, Codes, Frame};
pub use compressor::{
    CompressedCache, CompressedLayer, CompressedSide, CompressionStats, Compressor, TOKENS_PER_BLOCK,
};
pub use engine::Engine;
pub use engine::attention::{Rules, Segment, Stored};
pub use engine::cpu::Cpu;
#[cfg(feature = "mlx")]
pub use engine::mlx::Mlx;
pub use error::{Error, Result};
pub use io::{archive, prompt_cache};
pub use recipe::{PRESETS, Recipe};
pub use spec::bit_plan::BitPlan;
pub use spec::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule, Side};
pub use tensor::{Dtype, Element, Tensor};

/// Arrays between the host and MLX.
#[cfg(feature = "mlx")]
pub mod mlx {
    pub use crate::engine::mlx::arrays::{evaluate, get, on_gpu, put, slice};
}

/// The rooms behind the door, for this repository's own tests, benchmarks and program. Nothing here is a promise.
#[doc(hidden)]
pub mod internals {
    macro_rules! rooms {
        ($($room:ident)*) => {
            $(pub mod $room {
                pub use crate::$room::*;
            })*
        };
    }
    rooms!(codec compressor engine error io math recipe spec tensor);
}

/// The README's Rust examples compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
