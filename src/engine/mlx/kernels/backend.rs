//! What a backend of MLX does with a launch.

use super::plan::{ElementType, Launch};
use crate::error::Result;
use mlx_rs::{Array, Dtype};

/// A kernel of one backend of MLX.
pub(super) trait Backend {
    /// Calls it. `inputs` are in the order of the source.
    fn apply(&self, launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>>;
}

/// MLX's name of an element type.
#[cfg_attr(not(any(feature = "metal", feature = "cuda")), allow(dead_code))]
pub(super) fn dtype(element: ElementType) -> Dtype {
    match element {
        ElementType::F32 => Dtype::Float32,
        ElementType::F16 => Dtype::Float16,
        ElementType::BF16 => Dtype::Bfloat16,
        ElementType::U32 => Dtype::Uint32,
        ElementType::U8 => Dtype::Uint8,
        ElementType::I32 => Dtype::Int32,
    }
}
