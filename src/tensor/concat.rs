//! Joining tensors: the result lies in memory row by row, whatever the parts were views of.

use super::{Element, Tensor};
use crate::error::{Error, Result};
use half::{bf16, f16};
use ndarray::{ArrayD, Axis};

impl Tensor {
    /// Joins tensors along one axis, in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`] if `parts` is empty or the other axes differ, [`Error::Dtype`] if the dtypes differ.
    pub fn concat(axis: usize, parts: &[Tensor]) -> Result<Tensor> {
        fn join<T: Element>(axis: usize, parts: &[Tensor]) -> Result<Tensor> {
            let views = parts
                .iter()
                .map(|p| T::unwrap(p).map(|a| a.view()).ok_or_else(|| p.wrong_dtype("parts", T::NAME)))
                .collect::<Result<Vec<_>>>()?;
            let mut shape = parts[0].shape().to_vec();
            let fit =
                |p: &Tensor| p.shape().iter().enumerate().all(|(i, n)| i == axis || shape.get(i) == Some(n));
            if axis >= shape.len() || !parts.iter().all(|p| p.shape().len() == shape.len() && fit(p)) {
                return Err(parts[0].wrong_shape("parts", format!("equal shapes off axis {axis}")));
            }
            shape[axis] = views.iter().map(|v| v.len_of(Axis(axis))).sum();
            // Not by ndarray's own function, which makes the joined axis the slowest: every reader of rows would have to copy.
            let (mut joined, mut at) = (ArrayD::from_elem(shape, T::zeroed()), 0);
            for view in views {
                let n = view.len_of(Axis(axis));
                joined.slice_axis_mut(Axis(axis), (at..at + n).into()).assign(&view);
                at += n;
            }
            Ok(T::wrap(joined.into_shared()))
        }
        match parts.first() {
            None => Err(Error::Shape { what: "parts", expected: "at least one part".into(), got: vec![] }),
            Some(Tensor::F32(_)) => join::<f32>(axis, parts),
            Some(Tensor::F16(_)) => join::<f16>(axis, parts),
            Some(Tensor::BF16(_)) => join::<bf16>(axis, parts),
            Some(Tensor::U32(_)) => join::<u32>(axis, parts),
            Some(Tensor::U8(_)) => join::<u8>(axis, parts),
            Some(Tensor::I32(_)) => join::<i32>(axis, parts),
        }
    }
}
