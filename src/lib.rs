#![doc = include_str!("../README.md")]

pub mod allocation;
pub mod cache;
pub mod codec;
pub mod compressor;
pub mod engine;
pub mod error;
pub mod io;
pub mod math;
pub mod policy;
pub mod pool;
pub mod quality;
pub mod recipe;
#[cfg(unix)]
pub mod serve;
pub mod spec;
pub mod tensor;

pub use compressor::Compressor;
pub use error::{Error, Result};
pub use recipe::Recipe;
pub use tensor::{Dtype, Tensor};
