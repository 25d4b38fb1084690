//! KV-cache compression for large language models on MLX.

pub mod error;
pub mod prompt_cache;
pub mod tensor;

pub use error::{Error, Result};
pub use tensor::Tensor;
