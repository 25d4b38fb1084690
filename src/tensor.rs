//! A host array with a dtype: what files hold, what the CPU engine computes on, what crosses to MLX.

mod concat;

use crate::error::{Error, Result};
use half::{bf16, f16};
use ndarray::{ArcArray, ArrayD, Axis, IxDyn, Slice};
use std::borrow::Cow;

/// A row-major or strided host array; clones share the buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// 32-bit floats.
    F32(ArcArray<f32, IxDyn>),
    /// IEEE half floats.
    F16(ArcArray<f16, IxDyn>),
    /// Brain floats.
    BF16(ArcArray<bf16, IxDyn>),
    /// Packed words.
    U32(ArcArray<u32, IxDyn>),
    /// Bytes.
    U8(ArcArray<u8, IxDyn>),
    /// Signed counters.
    I32(ArcArray<i32, IxDyn>),
}

/// A float type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// IEEE half floats.
    F16,
    /// Brain floats.
    BF16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Dtype::F32 { 4 } else { 2 }
    }
}

/// Runs one generic expression over whichever array the tensor holds.
macro_rules! each {
    ($tensor:expr, $a:ident => $body:expr) => {
        match $tensor {
            Tensor::F32($a) => $body,
            Tensor::F16($a) => $body,
            Tensor::BF16($a) => $body,
            Tensor::U32($a) => $body,
            Tensor::U8($a) => $body,
            Tensor::I32($a) => $body,
        }
    };
}

/// As [`each!`], and wraps the result in the same variant.
macro_rules! map {
    ($tensor:expr, $a:ident => $body:expr) => {
        match $tensor {
            Tensor::F32($a) => Tensor::F32($body),
            Tensor::F16($a) => Tensor::F16($body),
            Tensor::BF16($a) => Tensor::BF16($body),
            Tensor::U32($a) => Tensor::U32($body),
            Tensor::U8($a) => Tensor::U8($body),
            Tensor::I32($a) => Tensor::I32($body),
        }
    };
}

/// An element type of [`Tensor`].
pub trait Element: Copy + Send + Sync + bytemuck::Pod {
    /// The name of the dtype, as safetensors writes it.
    const NAME: &'static str;
    /// Wraps an array.
    fn wrap(array: ArcArray<Self, IxDyn>) -> Tensor;
    /// The array inside, if the dtype is this one.
    fn unwrap(tensor: &Tensor) -> Option<&ArcArray<Self, IxDyn>>;
}

macro_rules! element {
    ($($t:ty, $v:ident, $n:literal;)*) => {$(
        impl Element for $t {
            const NAME: &'static str = $n;
            fn wrap(array: ArcArray<Self, IxDyn>) -> Tensor { Tensor::$v(array) }
            fn unwrap(tensor: &Tensor) -> Option<&ArcArray<Self, IxDyn>> {
                match tensor { Tensor::$v(a) => Some(a), _ => None }
            }
        }
    )*};
}
element! { f32, F32, "F32"; f16, F16, "F16"; bf16, BF16, "BF16"; u32, U32, "U32"; u8, U8, "U8"; i32, I32, "I32"; }

impl Tensor {
    /// An array of `shape` over `data` in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements is not the product of `shape`.
    pub fn new<T: Element>(shape: &[usize], data: Vec<T>) -> Result<Tensor> {
        let len = data.len();
        let array = ArrayD::from_shape_vec(IxDyn(shape), data).map_err(|_| Error::Shape {
            what: "data",
            expected: format!("{shape:?}"),
            got: vec![len],
        })?;
        Ok(T::wrap(array.into_shared()))
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        each!(self, a => a.shape())
    }

    /// Name of the dtype, as safetensors writes it.
    pub fn dtype(&self) -> &'static str {
        fn name<T: Element>(_: &ArcArray<T, IxDyn>) -> &'static str {
            T::NAME
        }
        each!(self, a => name(a))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each!(self, a => a.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the elements (a view counts only what it shows).
    pub fn nbytes(&self) -> usize {
        fn bytes<T>(a: &ArcArray<T, IxDyn>) -> usize {
            a.len() * size_of::<T>()
        }
        each!(self, a => bytes(a))
    }

    /// A float tensor of `shape` with the dtype of `self`, as [`Tensor::from_f32`].
    ///
    /// # Errors
    /// [`Error::Dtype`] if `self` is not a float tensor, [`Error::Shape`] if the sizes differ.
    pub fn like(&self, shape: &[usize], values: Vec<f32>) -> Result<Tensor> {
        let dtype = self.float().ok_or_else(|| self.wrong_dtype("tensor", "F32, F16 or BF16"))?;
        Tensor::from_f32(dtype, shape, values)
    }

    /// The dtype, if the elements are floats.
    pub fn float(&self) -> Option<Dtype> {
        match self {
            Tensor::F32(_) => Some(Dtype::F32),
            Tensor::F16(_) => Some(Dtype::F16),
            Tensor::BF16(_) => Some(Dtype::BF16),
            _ => None,
        }
    }

    /// The elements in row-major order, whatever the strides.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the dtype is another one.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let array = T::unwrap(self).ok_or_else(|| self.wrong_dtype("tensor", T::NAME))?;
        Ok(match array.as_slice() {
            Some(slice) => slice.to_vec(),
            None => array.iter().copied().collect(),
        })
    }

    /// The elements as a slice, made contiguous first if they are not.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the dtype is another one.
    pub fn standard<T: Element>(&self) -> Result<ArcArray<T, IxDyn>> {
        let array = T::unwrap(self).ok_or_else(|| self.wrong_dtype("tensor", T::NAME))?;
        Ok(if array.is_standard_layout() {
            array.clone()
        } else {
            array.as_standard_layout().into_owned().into_shared()
        })
    }

    /// The elements as f32 in row-major order.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the elements are not floats.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        match self {
            Tensor::F32(_) => self.to_vec(),
            Tensor::F16(_) => Ok(self.to_vec::<f16>()?.into_iter().map(f16::to_f32).collect()),
            Tensor::BF16(_) => Ok(self.to_vec::<bf16>()?.into_iter().map(bf16::to_f32).collect()),
            _ => Err(self.wrong_dtype("tensor", "F32, F16 or BF16")),
        }
    }

    /// A float tensor of `shape` from f32 values; half types saturate at their largest finite value, NaN stays NaN.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements is not the product of `shape`.
    pub fn from_f32(dtype: Dtype, shape: &[usize], values: Vec<f32>) -> Result<Tensor> {
        match dtype {
            Dtype::F32 => Tensor::new(shape, values),
            Dtype::F16 => {
                let top = f16::MAX.to_f32();
                Tensor::new(shape, values.into_iter().map(|x| f16::from_f32(x.clamp(-top, top))).collect())
            }
            Dtype::BF16 => {
                let top = bf16::MAX.to_f32();
                Tensor::new(shape, values.into_iter().map(|x| bf16::from_f32(x.clamp(-top, top))).collect())
            }
        }
    }

    /// The elements `start..end` of one axis, without a copy.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is not inside the axis, [`Error::Shape`] if there is no such axis.
    pub fn slice(&self, axis: usize, start: usize, end: usize) -> Result<Tensor> {
        let len =
            *self.shape().get(axis).ok_or_else(|| self.wrong_shape("tensor", format!("an axis {axis}")))?;
        if start > end || end > len {
            return Err(Error::Range { start, end, len });
        }
        Ok(map!(self, a => {
            let mut view = a.clone();
            view.slice_axis_inplace(Axis(axis), Slice::from(start..end));
            view
        }))
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != self.len() {
            return Err(self.wrong_shape("tensor", format!("as many elements as {shape:?}")));
        }
        Ok(map!(self, a => a.as_standard_layout().into_owned().into_shape_with_order(IxDyn(shape))
            .map_err(|_| self.wrong_shape("tensor", format!("{shape:?}")))?.into_shared()))
    }

    /// The same array with its axes in another order, without a copy.
    ///
    /// # Errors
    /// [`Error::Shape`] if `axes` is not a permutation of the axes.
    pub fn permute(&self, axes: &[usize]) -> Result<Tensor> {
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        if sorted.iter().copied().ne(0..self.shape().len()) {
            return Err(self.wrong_shape("tensor", format!("axes that {axes:?} permutes")));
        }
        Ok(map!(self, a => a.clone().permuted_axes(IxDyn(axes))))
    }

    /// The elements as bytes in row-major order, whatever the strides; copied only where the strides need it.
    pub fn row_major_bytes(&self) -> Cow<'_, [u8]> {
        fn bytes<T: Element>(a: &ArcArray<T, IxDyn>) -> Cow<'_, [u8]> {
            match a.as_slice() {
                Some(slice) => Cow::Borrowed(bytemuck::cast_slice(slice)),
                None => {
                    let mut bytes = Vec::with_capacity(size_of::<T>() * a.len());
                    for row in a.rows() {
                        match row.as_slice() {
                            Some(row) => bytes.extend_from_slice(bytemuck::cast_slice(row)),
                            None => row.iter().for_each(|x| bytes.extend_from_slice(bytemuck::bytes_of(x))),
                        }
                    }
                    Cow::Owned(bytes)
                }
            }
        }
        each!(self, a => bytes(a))
    }

    /// The same elements in a buffer of their own, so that a view does not keep a larger buffer alive.
    pub fn compact(&self) -> Tensor {
        fn own<T: Element>(a: &ArcArray<T, IxDyn>) -> Tensor {
            T::wrap(a.as_standard_layout().to_owned().into_shared())
        }
        each!(self, a => own(a))
    }

    /// Writes rows [B, H, n, D] into this float tensor [B, H, capacity, D] from row `start` on, in its own dtype; in place if no
    /// clone shares the buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rows do not fit, [`Error::Dtype`] if one of the two is not a float tensor.
    pub fn write_rows(&mut self, start: usize, rows: &Tensor) -> Result<()> {
        fn copy<T: Element>(to: &mut ArcArray<T, IxDyn>, start: usize, rows: &ArcArray<T, IxDyn>) {
            let end = start + rows.shape()[2];
            to.slice_axis_mut(Axis(2), Slice::from(start..end)).assign(rows);
        }
        let (to, from) = (self.shape(), rows.shape());
        let fits = to.len() == 4 && from.len() == 4 && to[..2] == from[..2] && to[3] == from[3];
        if !fits || start + from[2] > to[2] {
            return Err(rows.wrong_shape("rows", format!("rows that fit {to:?} from row {start} on")));
        }
        let dtype = self.float().ok_or_else(|| self.wrong_dtype("buffer", "F32, F16 or BF16"))?;
        let rows = if rows.float() == Some(dtype) {
            rows.clone()
        } else {
            Tensor::from_f32(dtype, rows.shape(), rows.to_f32()?)?
        };
        match (self, &rows) {
            (Tensor::F32(to), Tensor::F32(rows)) => copy(to, start, rows),
            (Tensor::F16(to), Tensor::F16(rows)) => copy(to, start, rows),
            (Tensor::BF16(to), Tensor::BF16(rows)) => copy(to, start, rows),
            (to, _) => return Err(to.wrong_dtype("buffer", "F32, F16 or BF16")),
        }
        Ok(())
    }

    /// Row-major index and value of the first NaN or infinity, if the tensor is a float one and has any.
    pub fn first_non_finite(&self) -> Option<(usize, f32)> {
        // Exponents of all ones, as bits: a half type need not be converted to be looked at.
        fn first<T: Element>(
            a: &ArcArray<T, IxDyn>,
            bad: impl Fn(&T) -> bool,
            f32_of: impl Fn(T) -> f32,
        ) -> Option<(usize, f32)> {
            let at = match a.as_slice() {
                Some(slice) => slice.iter().position(&bad),
                None => a.iter().position(&bad),
            }?;
            a.iter().nth(at).map(|&x| (at, f32_of(x)))
        }
        match self {
            Tensor::F32(a) => first(a, |x| !x.is_finite(), |x| x),
            Tensor::F16(a) => first(a, |x| x.to_bits() & 0x7c00 == 0x7c00, f16::to_f32),
            Tensor::BF16(a) => first(a, |x| x.to_bits() & 0x7f80 == 0x7f80, bf16::to_f32),
            _ => None,
        }
    }

    pub(crate) fn wrong_dtype(&self, what: &'static str, expected: &'static str) -> Error {
        Error::Dtype { what, expected, got: self.dtype().into() }
    }

    pub(crate) fn wrong_shape(&self, what: &'static str, expected: impl Into<String>) -> Error {
        Error::Shape { what, expected: expected.into(), got: self.shape().to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arange(shape: &[usize]) -> Tensor {
        Tensor::new(shape, (0..shape.iter().product::<usize>()).map(|i| i as f32).collect()).unwrap()
    }

    #[test]
    fn strided_views_give_their_logical_values() {
        // T42: the bytes of a strided array are not its values.
        let sliced = arange(&[1, 2, 4, 2]).slice(2, 0, 2).unwrap();
        assert_eq!(sliced.to_f32().unwrap(), [0., 1., 2., 3., 8., 9., 10., 11.]);
        let narrow = arange(&[3, 3]).slice(1, 0, 2).unwrap();
        assert_eq!(narrow.to_f32().unwrap(), [0., 1., 3., 4., 6., 7.]);
        let turned = Tensor::new(&[2, 3], vec![1f32, 2., 3., 4., 5., 6.]).unwrap().permute(&[1, 0]).unwrap();
        assert_eq!(turned.to_f32().unwrap(), [1., 4., 2., 5., 3., 6.]);
        assert_eq!(turned.reshape(&[6]).unwrap().to_f32().unwrap(), [1., 4., 2., 5., 3., 6.]);
    }

    #[test]
    fn concat_undoes_slice_and_refuses_strangers() {
        let whole = arange(&[2, 5, 3]);
        let parts = [whole.slice(1, 0, 2).unwrap(), whole.slice(1, 2, 5).unwrap()];
        assert_eq!(Tensor::concat(1, &parts).unwrap(), whole);
        let other = Tensor::new(&[2, 1, 3], vec![0u32; 6]).unwrap();
        assert!(matches!(Tensor::concat(1, &[whole.clone(), other]), Err(Error::Dtype { .. })));
        assert!(matches!(Tensor::concat(1, &[whole.clone(), arange(&[3, 1, 3])]), Err(Error::Shape { .. })));
        assert!(matches!(whole.slice(1, 3, 9), Err(Error::Range { start: 3, end: 9, len: 5 })));
    }

    #[test]
    fn non_finite_elements_are_found() {
        let x = Tensor::new(&[3], vec![1.0, f32::NAN, f32::INFINITY]).unwrap();
        assert_eq!(x.first_non_finite().unwrap().0, 1);
        assert!(arange(&[4]).first_non_finite().is_none());
    }
}
