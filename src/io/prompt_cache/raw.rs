//! Arrays as files hold them: any safetensors dtype, bytes untouched, and the checksum of one.

use crate::tensor::Tensor;
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

/// The dtype of a tensor in a file.
pub(super) fn dtype_of(x: &Tensor) -> Dtype {
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
pub(super) fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<usize> {
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
