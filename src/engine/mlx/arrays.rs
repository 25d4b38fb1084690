//! The MLX operations that mlx-rs does not wrap, and the passage of arrays between the host and MLX.

use crate::codec::codes::Buffer;
use crate::error::{Error, Result};
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype, Stream};
use mlx_sys::{mlx_array, mlx_array_new, mlx_stream};
use std::ffi::c_int;
use std::sync::Mutex;

/// Whether MLX's default device is a GPU.
pub fn on_gpu() -> bool {
    mlx_rs::Device::try_default()
        .is_ok_and(|d| d.get_type().is_ok_and(|t| matches!(t, mlx_rs::DeviceType::Gpu)))
}

/// Runs one mlx-c operation on the thread's default stream.
fn call(name: &str, op: impl FnOnce(*mut mlx_array, mlx_stream) -> c_int) -> Result<Array> {
    // mlx-c ends the process on an error until mlx-rs has installed its own handler, which any operation of mlx-rs does.
    static HANDLER: std::sync::Once = std::sync::Once::new();
    HANDLER.call_once(|| drop(Array::from_int(0).reshape(&[1])));
    let stream = Stream::thread_local_or_default();
    // SAFETY: the constructor has no precondition; the handle is owned by `Array` below, which frees it once.
    let mut result = unsafe { mlx_array_new() };
    let status = op(&mut result, stream.as_ptr());
    // SAFETY: `result` is a valid handle, whether the operation filled it or not, and no one else owns it.
    let array = unsafe { Array::from_ptr(result) };
    if status == 0 { Ok(array) } else { Err(Exception::custom(format!("{name} failed")).into()) }
}

/// `a << b`, elementwise.
pub fn left_shift(a: &Array, b: &Array) -> Result<Array> {
    // SAFETY: the handles live as long as the borrowed arrays, and `result` points to a valid handle.
    call("left_shift", |result, s| unsafe { mlx_sys::mlx_left_shift(result, a.as_ptr(), b.as_ptr(), s) })
}

/// `a >> b`, elementwise.
pub fn right_shift(a: &Array, b: &Array) -> Result<Array> {
    // SAFETY: the handles live as long as the borrowed arrays, and `result` points to a valid handle.
    call("right_shift", |result, s| unsafe { mlx_sys::mlx_right_shift(result, a.as_ptr(), b.as_ptr(), s) })
}

/// `a & b`, elementwise.
pub fn bitwise_and(a: &Array, b: &Array) -> Result<Array> {
    // SAFETY: the handles live as long as the borrowed arrays, and `result` points to a valid handle.
    call("bitwise_and", |result, s| unsafe { mlx_sys::mlx_bitwise_and(result, a.as_ptr(), b.as_ptr(), s) })
}

/// Elements `start..end` of one axis, as a view.
pub fn slice(a: &Array, axis: usize, start: usize, end: usize) -> Result<Array> {
    let shape = a.shape();
    let len = *shape.get(axis).ok_or_else(|| wrong_shape(a, "array", format!("an axis {axis}")))? as usize;
    if start > end || end > len {
        return Err(Error::Range { start, end, len });
    }
    let (mut from, mut to, steps) = (vec![0; shape.len()], shape.to_vec(), vec![1; shape.len()]);
    (from[axis], to[axis]) = (start as c_int, end as c_int);
    let n = shape.len();
    // SAFETY: the three vectors outlive the call and hold `n` entries each; the handle lives as long as the borrowed array.
    call("slice", |result, s| unsafe {
        mlx_sys::mlx_slice(result, a.as_ptr(), from.as_ptr(), n, to.as_ptr(), n, steps.as_ptr(), n, s)
    })
}

/// A buffer [B, H, capacity, D] with rows [B, H, n, D] from row `start` on.
///
/// # Errors
/// [`Error::Shape`] if the rows do not fit.
pub fn write_rows(buffer: &Array, start: usize, rows: &Array) -> Result<Array> {
    let (to, from) = (buffer.shape(), rows.shape());
    let fits = to.len() == 4 && from.len() == 4 && to[..2] == from[..2] && to[3] == from[3];
    if !fits || start.checked_add(from[2] as usize).is_none_or(|end| end > to[2] as usize) {
        return Err(wrong_shape(rows, "rows", format!("rows that fit {to:?} from row {start} on")));
    }
    let (begin, steps) = ([0, 0, start as c_int, 0], [1; 4]);
    let end = [to[0], to[1], start as c_int + from[2], to[3]];
    // SAFETY: the three arrays hold four entries each and outlive the call, as do the handles of the borrowed arrays.
    call("slice_update", |result, s| unsafe {
        let (a, b) = (buffer.as_ptr(), rows.as_ptr());
        mlx_sys::mlx_slice_update(result, a, b, begin.as_ptr(), 4, end.as_ptr(), 4, steps.as_ptr(), 4, s)
    })
}

/// Sizes of the axes.
pub fn shape(a: &Array) -> Vec<usize> {
    a.shape().iter().map(|&n| n as usize).collect()
}

/// An [`Error::Shape`] about an array.
pub fn wrong_shape(a: &Array, what: &'static str, expected: impl Into<String>) -> Error {
    Error::Shape { what, expected: expected.into(), got: shape(a) }
}

/// A host array as an MLX array (one copy).
///
/// # Errors
/// [`Error::Shape`] for 2^31 elements or more, which mlx-rs cannot count.
pub fn put(tensor: &Tensor) -> Result<Array> {
    if i32::try_from(tensor.len()).is_err() {
        return Err(tensor.wrong_shape("tensor", "fewer than 2^31 elements"));
    }
    let shape = tensor.shape().iter().map(|&n| i32::try_from(n)).collect::<std::result::Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| tensor.wrong_shape("tensor", "axes below 2^31"))?;
    // The bound of `Array::from_slice` is private to mlx-rs, so this cannot be a generic function.
    macro_rules! copy {
        ($t:ty) => {
            Array::from_slice(tensor.standard::<$t>()?.as_slice().unwrap_or_default(), &shape)
        };
    }
    Ok(match tensor {
        Tensor::F32(_) => copy!(f32),
        Tensor::F16(_) => copy!(f16),
        Tensor::BF16(_) => copy!(bf16),
        Tensor::U32(_) => copy!(u32),
        Tensor::U8(_) => copy!(u8),
        Tensor::I32(_) => copy!(i32),
    })
}

/// Evaluates arrays, one thread at a time: concurrent evaluation from several threads has had races in MLX.
///
/// # Errors
/// [`Error::Mlx`] if an operation of the graph fails.
pub fn evaluate(arrays: &[&Array]) -> Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let _held = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(mlx_rs::transforms::eval(arrays.iter().copied())?)
}

/// An MLX array as a host array (evaluated, one copy); booleans become u8.
pub fn get(array: &Array) -> Result<Tensor> {
    fn copy<T: Element + mlx_rs::ArrayElement>(array: &Array) -> Result<Tensor> {
        let shape = shape(array);
        if shape.contains(&0) {
            return Tensor::new::<T>(&shape, vec![]);
        }
        // Mlx results can have any strides; a slice of them would be their storage, not their values.
        let whole = array.contiguous()?;
        evaluate(&[&whole])?;
        let data = whole.try_as_slice::<T>().map_err(|e| Exception::custom(e.to_string()))?.to_vec();
        Tensor::new(&shape, data)
    }
    match array.dtype() {
        Dtype::Float32 => copy::<f32>(array),
        Dtype::Float16 => copy::<f16>(array),
        Dtype::Bfloat16 => copy::<bf16>(array),
        Dtype::Uint32 => copy::<u32>(array),
        Dtype::Uint8 => copy::<u8>(array),
        Dtype::Int32 => copy::<i32>(array),
        // The host has no booleans; a mask there is u8.
        Dtype::Bool => copy::<u8>(&array.as_dtype(Dtype::Uint8)?),
        other => Err(Error::Dtype {
            what: "array",
            expected: "a float, u32, u8, i32 or bool",
            got: format!("{other:?}"),
        }),
    }
}

impl Buffer for Array {
    fn shape(&self) -> Vec<usize> {
        shape(self)
    }
    fn nbytes(&self) -> usize {
        Array::nbytes(self)
    }
    fn slice(&self, axis: usize, start: usize, end: usize) -> Result<Array> {
        slice(self, axis, start, end)
    }
    fn concat(axis: usize, parts: &[Array]) -> Result<Array> {
        if parts.is_empty() {
            return Err(Error::Shape { what: "parts", expected: "at least one part".into(), got: vec![] });
        }
        Ok(mlx_rs::ops::concatenate(parts, axis as i32)?)
    }
}
