//! Keys, values and queries of the caller, read in place and copied once.

use super::tmq_status::{TMQ_FAILED, TMQ_NULL_POINTER, TMQ_SHAPE, TMQ_UNSUPPORTED};
use super::{Failure, known};
use half::{bf16, f16};
use std::ffi::c_void;
use turbomoq::Tensor;
use turbomoq::internals::tensor::Element;

/// Elements are 32-bit floats.
pub const TMQ_F32: u32 = 0;
/// Elements are IEEE half floats.
pub const TMQ_F16: u32 = 1;
/// Elements are brain floats.
pub const TMQ_BF16: u32 = 2;

/// Vectors of one layer: channel `d` of token `t` and head `h` is element `t * token_stride + h * head_stride + d` of `data`.
///
/// A row of all heads for each token, as llama.cpp keeps its keys, has `head_stride = head_dim` and
/// `token_stride = heads * head_dim`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tmq_rows {
    /// `sizeof(tmq_rows)`.
    pub struct_size: usize,
    /// The first element.
    pub data: *const c_void,
    /// `TMQ_F32`, `TMQ_F16` or `TMQ_BF16`.
    pub dtype: u32,
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels.
    pub head_dim: usize,
    /// Elements from a token to the next.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

/// Elements of one call: 8 GiB as 32-bit floats.
const MOST_ELEMENTS: usize = 1 << 31;

/// The rows as a tensor [1, H, T, D].
///
/// # Safety
/// `rows` is null or points to a struct whose `data` is null or holds every element that its fields name.
pub(super) unsafe fn tensor(rows: *const tmq_rows, what: &'static str) -> Result<Tensor, Failure> {
    // SAFETY: as the caller vouches.
    let rows = &unsafe { known(rows, what) }?;
    // SAFETY: as the caller vouches.
    unsafe {
        match rows.dtype {
            TMQ_F32 => gather::<f32>(rows, what),
            TMQ_F16 => gather::<f16>(rows, what),
            TMQ_BF16 => gather::<bf16>(rows, what),
            other => Err(Failure(TMQ_UNSUPPORTED, format!("{what}: dtype {other}, expected 0, 1 or 2"))),
        }
    }
}

/// # Safety
/// As [`tensor`], with elements of type `T`.
unsafe fn gather<T: Element>(rows: &tmq_rows, what: &'static str) -> Result<Tensor, Failure> {
    let tmq_rows { data, heads, tokens, head_dim, token_stride, head_stride, .. } = *rows;
    let shape = |detail: String| Failure(TMQ_SHAPE, format!("{what}: {detail}"));
    // The last element that is read, so that no offset below can overflow.
    let last = |count: usize, stride: usize| count.saturating_sub(1).checked_mul(stride);
    let extent = last(tokens, token_stride)
        .and_then(|t| last(heads, head_stride)?.checked_add(t)?.checked_add(head_dim))
        .and_then(|n| n.checked_mul(size_of::<T>()))
        .filter(|bytes| *bytes <= isize::MAX as usize);
    let count =
        heads.checked_mul(tokens).and_then(|n| n.checked_mul(head_dim)).filter(|n| *n <= MOST_ELEMENTS);
    let (Some(_), Some(count)) = (extent, count) else {
        return Err(shape(format!("{heads} heads, {tokens} tokens, {head_dim} channels are too many")));
    };
    if heads == 0 || head_dim == 0 {
        return Err(shape(format!("{heads} heads of {head_dim} channels")));
    }
    if data.is_null() && count > 0 {
        return Err(Failure(TMQ_NULL_POINTER, format!("{what}: data is null")));
    }
    if !data.cast::<T>().is_aligned() {
        return Err(shape(format!("data is not aligned to its elements of {} bytes", size_of::<T>())));
    }
    let mut out: Vec<T> = vec![];
    // Strides of zero name many elements in a few bytes, so that the memory may not be there.
    out.try_reserve_exact(count)
        .map_err(|error| Failure(TMQ_FAILED, format!("{what}: {count} elements: {error}")))?;
    for h in 0..heads {
        for t in 0..tokens {
            // SAFETY: inside the extent that the caller vouches for and that was checked not to overflow; aligned and not null.
            let row = unsafe {
                let first = data.cast::<T>().add(t * token_stride + h * head_stride);
                std::slice::from_raw_parts(first, head_dim)
            };
            out.extend_from_slice(row);
        }
    }
    Ok(Tensor::new(&[1, heads, tokens, head_dim], out)?)
}

/// Values [1, H, T, D] in the order of the caller's rows: token, head, channel.
pub(super) fn by_token(x: &Tensor) -> Result<Vec<f32>, Failure> {
    Ok(x.permute(&[0, 2, 1, 3])?.to_f32()?)
}
