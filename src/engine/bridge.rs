//! The passage of an application's arrays into an engine and back: host arrays and MLX arrays, each into each engine.

use super::Engine;
use super::cpu::Cpu;
use crate::error::Result;
use crate::tensor::Tensor;

/// An engine that takes arrays of type `A`.
///
/// [`Cpu`] takes [`Tensor`], and MLX arrays by evaluating and copying them; `Mlx` takes MLX arrays as they are, and [`Tensor`] by a
/// copy.
pub trait Bridge<A>: Engine {
    /// The array as the engine's own.
    ///
    /// # Errors
    /// [`crate::Error::Dtype`] for an element type that caches do not hold; the engine's own.
    fn enter(&self, array: &A) -> Result<Self::Tensor>;

    /// The engine's array as the application's.
    ///
    /// # Errors
    /// The engine's own.
    fn leave(&self, array: Self::Tensor) -> Result<A>;

    /// A mask of the engine, where zero hides, as attention functions beside `A` take it.
    ///
    /// # Errors
    /// The engine's own.
    fn leave_mask(&self, mask: Self::Tensor) -> Result<A> {
        self.leave(mask)
    }
}

impl Bridge<Tensor> for Cpu {
    fn enter(&self, array: &Tensor) -> Result<Tensor> {
        Ok(array.clone())
    }

    fn leave(&self, array: Tensor) -> Result<Tensor> {
        Ok(array)
    }
}
