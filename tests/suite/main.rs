//! What the crate promises, part by part, as one program: its generic code is compiled once, not for every file of tests.

#[path = "../common/mod.rs"]
mod common;

mod agents;
mod archive;
mod cache;
mod conformance;
mod contract;
mod errors;
mod field_cases;
mod heads;
mod laws;
mod limits;
mod numbers;
mod own_tokens;
mod policy;
mod pool;
mod prompt_cache;
mod prompt_cache_hostile;
mod rows;
mod tiers;
