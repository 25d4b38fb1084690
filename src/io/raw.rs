//! Arrays as files hold them: any safetensors dtype, bytes untouched, and the checksum of one.

use crate::error::{Error, Result};
use crate::tensor::{Element, Tensor};
use safetensors::Dtype;
use xxhash_rust::xxh3::Xxh3;

/// An array of any safetensors dtype, untouched.
#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes of the axes.
    pub shape: Vec<usize>,
    /// The elements, row-major and little-endian.
    pub bytes: Vec<u8>,
}

/// A tensor from its bytes in a file.
///
/// # Errors
/// [`Error::Dtype`] for element types that tensors have not, [`Error::Shape`] for another number of elements.
pub(crate) fn tensor_of(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<Tensor> {
    fn of<T: Element>(shape: &[usize], bytes: &[u8]) -> Result<Tensor> {
        Tensor::new(shape, bytemuck::pod_collect_to_vec::<u8, T>(bytes))
    }
    match dtype {
        Dtype::F32 => of::<f32>(shape, bytes),
        Dtype::F16 => of::<half::f16>(shape, bytes),
        Dtype::BF16 => of::<half::bf16>(shape, bytes),
        Dtype::U32 => of::<u32>(shape, bytes),
        Dtype::I32 => of::<i32>(shape, bytes),
        Dtype::U8 => of::<u8>(shape, bytes),
        other => Err(Error::Dtype {
            what: "stored tensor",
            expected: "F32, F16, BF16, U32, I32 or U8",
            got: other.to_string(),
        }),
    }
}

/// The dtype of a tensor in a file.
pub(crate) fn dtype_of(x: &Tensor) -> Dtype {
    match x {
        Tensor::F32(_) => Dtype::F32,
        Tensor::F16(_) => Dtype::F16,
        Tensor::BF16(_) => Dtype::BF16,
        Tensor::U32(_) => Dtype::U32,
        Tensor::U8(_) => Dtype::U8,
        Tensor::I32(_) => Dtype::I32,
    }
}

/// Bytes that `shape` takes in `dtype`; `None` if that overflows or is no whole number of bytes.
pub(crate) fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// XXH3 (64 bits) of a tensor: its dtype and shape as text, like `F16[1, 2, 40, 64]`, then its bytes.
pub(crate) fn checksum(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(format!("{dtype}{shape:?}").as_bytes());
    hash.update(bytes);
    hash.digest()
}
