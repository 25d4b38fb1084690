//! KV-cache compression for large language models on MLX.

pub mod bits;
pub mod codebook;
pub mod codec;
pub mod codes;
pub mod compressor;
pub mod cpu;
pub mod engine;
pub mod error;
pub mod frame;
#[cfg(feature = "mlx")]
pub mod graph;
pub mod grid;
#[cfg(feature = "mlx")]
pub mod mlx_ops;
pub mod qjl;
pub mod recipe;
pub mod rng;
pub mod rotation;
pub mod scale;
pub mod spec;
pub mod tensor;

pub use error::{Error, Result};
pub use tensor::{Dtype, Tensor};
