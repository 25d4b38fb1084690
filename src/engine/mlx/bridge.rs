//! MLX arrays into the CPU engine, host arrays into MLX, and errors the way back into mlx-rs.

use super::Mlx;
use super::arrays::{get, put};
use crate::engine::bridge::Bridge;
use crate::engine::cpu::Cpu;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype};

impl Bridge<Array> for Cpu {
    fn enter(&self, array: &Array) -> Result<Tensor> {
        get(array)
    }

    fn leave(&self, array: Tensor) -> Result<Array> {
        put(&array)
    }

    fn leave_mask(&self, mask: Tensor) -> Result<Array> {
        Ok(put(&mask)?.as_dtype(Dtype::Bool)?)
    }
}

impl Bridge<Array> for Mlx {
    fn enter(&self, array: &Array) -> Result<Array> {
        Ok(array.clone())
    }

    fn leave(&self, array: Array) -> Result<Array> {
        Ok(array)
    }
}

impl Bridge<Tensor> for Mlx {
    fn enter(&self, array: &Tensor) -> Result<Array> {
        put(array)
    }

    fn leave(&self, array: Array) -> Result<Tensor> {
        get(&array)
    }
}

/// So that `?` works in functions that return mlx-rs's errors; one that came from there goes back as it was.
impl From<Error> for Exception {
    fn from(error: Error) -> Exception {
        match error {
            Error::Mlx(exception) => exception,
            other => Exception::custom(other.to_string()),
        }
    }
}
