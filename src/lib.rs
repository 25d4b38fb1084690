#![doc = include_str!("../README.md")]

pub mod archive;
pub mod attention;
pub mod bit_plan;
pub mod bits;
pub mod cache;
pub mod calibration;
pub mod codebook;
pub mod codec;
pub mod codes;
pub mod compressor;
pub mod cpu;
pub mod engine;
pub mod error;
pub mod files;
#[cfg(unix)]
pub(crate) mod folders;
pub mod frame;
#[cfg(feature = "mlx")]
pub mod graph;
pub mod grid;
pub mod kernels;
pub mod lanes;
#[cfg(feature = "mlx")]
pub mod mlx_ops;
pub mod policy;
pub mod pool;
pub mod prompt_cache;
pub mod qjl;
pub mod recipe;
pub mod report;
pub mod rng;
pub mod rotation;
pub mod scale;
#[cfg(unix)]
pub mod serve;
pub mod spec;
pub mod tensor;
pub mod tile;
pub mod transform;
pub mod trellis;
pub mod trellis_search;

pub use compressor::Compressor;
pub use error::{Error, Result};
pub use recipe::Recipe;
pub use tensor::{Dtype, Tensor};
