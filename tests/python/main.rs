//! The real mlx-lm, both releases, on the other side: prompt caches, the cache in Python, the pool.

#[path = "../common/mod.rs"]
mod common;

mod cache;
mod pool;
mod prompt_caches;
mod recipes;
