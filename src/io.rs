//! Files: prompt caches of mlx-lm, compressed archives, and the rules by which both are written.

pub mod archive;
pub(crate) mod container;
pub mod files;
#[cfg(unix)]
pub(crate) mod folders;
pub(crate) mod image;
pub mod prompt_cache;
pub(crate) mod raw;
pub mod saved_cache;
