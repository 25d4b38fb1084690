//! What tests ask of the fused attention: which of its forms have run, and that it does without an instruction set.

use super::simd;

pub use super::paths::{Path, count};

/// Names of the instruction sets that this machine has forms for, the greatest first.
pub fn levels() -> Vec<String> {
    simd::available().iter().map(|level| format!("{level:?}")).collect()
}

/// Holds the kernels that this thread runs to one of [`levels`] and those after it. Rayon's workers are threads of their own: a pool
/// whose start handler calls this holds all work that is installed in it.
pub fn at_most(level: usize) {
    let levels = simd::available();
    simd::MOST.set(levels[level.min(levels.len() - 1)]);
}
