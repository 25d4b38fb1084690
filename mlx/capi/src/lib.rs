//! The functions of `mlx/include/turbomoq.h`, which are those of `turbomoq::ffi`.

pub use turbomoq::ffi::*;
