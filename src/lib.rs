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
//! **While a model decodes**: a [`Cache`] stands in for the model's own. It takes the arrays of the application (`mlx_rs::Array`, or
//! [`Tensor`] on the host), gives attention over everything that came before, and tells where the rotary embedding begins.
//!
//! ```
//! use turbomoq::{Cache, Cpu, Tensor};
//!
//! # fn random(heads: usize, tokens: usize) -> turbomoq::Result<Tensor> {
//! #     Tensor::new(&[1, heads, tokens, 64], (0..heads * tokens * 64).map(|i| (i as f32 * 0.37).sin()).collect())
//! # }
//! # fn main() -> turbomoq::Result<()> {
//! let layers = 2;
//! let mut cache = Cache::on(Cpu, "best@3", layers)?; // `Cache::new` takes the engine for this machine
//! for tokens in [300, 1, 1, 1] { // a prompt, then what is decoded
//!     let position = cache.offset(); // for RoPE
//!     for layer in 0..layers {
//!         let (q, k, v) = (random(8, tokens)?, random(2, tokens)?, random(2, tokens)?); // projections, q and k turned by RoPE
//!         let out = cache.update_and_attend(layer, &q, &k, &v, 0.125)?; // in place of concatenate and attention
//!         assert_eq!(out.shape(), [1, 8, tokens, 64]);
//!     }
//!     assert_eq!(cache.offset(), position + tokens as i32);
//! }
//! let fork = cache.clone(); // shares all buffers until one side writes
//! cache.trim(2)?; // rejected drafts
//! assert_eq!((cache.offset(), fork.offset()), (301, 303));
//! # Ok(())
//! # }
//! ```
//!
//! Layers with sliding windows, shared caches or recurrent state have a [`LayerKind`]; [`Cache::save`] and [`Cache::load`] keep a
//! cache packed on disk, [`Cache::to_prompt_cache`] hands it to mlx-lm. One layer by itself is a [`cache::LayerCache`].
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
mod model_cache;
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
pub use engine::bridge::Bridge;
pub use engine::cpu::Cpu;
#[cfg(feature = "mlx")]
pub use engine::mlx::Mlx;
pub use error::{Error, Result};
pub use io::{archive, prompt_cache};
pub use model_cache::{Cache, DefaultEngine, LayerKind};
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
