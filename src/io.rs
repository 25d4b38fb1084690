//! Files: prompt caches of mlx-lm, compressed archives, and the rules by which both are written.

pub mod archive;
pub mod files;
#[cfg(unix)]
pub(crate) mod folders;
pub mod prompt_cache;
pub mod saved_cache;
