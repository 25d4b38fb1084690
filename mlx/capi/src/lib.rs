//! The C API: `mlx/include/turbomoq.h`, for engines in C and C++. Everything runs on the CPU engine.
//!
//! Every call gives a status; results go through pointers, texts of errors are kept for each thread. No panic and no exit crosses the
//! border. Structs begin with their own size, so that a caller built against an older or newer header is understood ([`known`],
//! [`answer`]). Handles are owned by the caller: freed once, not used after that, and used by one thread at a time. A pointer must be
//! null or point to what the header says.
//!
//! The symbols stand in this package alone, so that they are in no Rust program that uses the crate.
#![allow(non_camel_case_types, reason = "the names of the C header")]
#![allow(clippy::missing_safety_doc, reason = "what pointers must be is said once, above")]

mod cache;
mod codes;
mod heads;
mod live;
mod rows;
mod tables;

pub use cache::*;
pub use codes::*;
pub use heads::*;
pub use live::*;
pub use rows::*;
pub use tables::*;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use turbomoq::Error;

/// Version of the API: rises when something is added, and nothing is taken away.
pub const TMQ_VERSION: u32 = 3;

/// How a call ended. Numbers never change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum tmq_status {
    /// It is done.
    TMQ_OK = 0,
    /// A pointer is null that must not be.
    TMQ_NULL_POINTER = 1,
    /// A struct names a size that this library does not know.
    TMQ_STRUCT_SIZE = 2,
    /// An array has a shape or length that does not fit.
    TMQ_SHAPE = 3,
    /// An element type, codec or recipe that is not supported.
    TMQ_UNSUPPORTED = 4,
    /// A text that cannot be read.
    TMQ_PARSE = 5,
    /// An element is NaN or infinite.
    TMQ_NON_FINITE = 6,
    /// A range of tokens outside what is stored, or across tokens that are encoded together.
    TMQ_RANGE = 7,
    /// Any other error.
    TMQ_FAILED = 8,
    /// A defect of this library; the handle should be freed.
    TMQ_INTERNAL = 9,
}

use tmq_status::*;

/// Why a call fails.
struct Failure(tmq_status, String);

type Outcome = Result<(), Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match error {
            Error::Shape { .. } => TMQ_SHAPE,
            Error::Dtype { .. } | Error::Unsupported { .. } | Error::CodecMismatch { .. } => TMQ_UNSUPPORTED,
            Error::Parse { .. } => TMQ_PARSE,
            Error::NonFinite { .. } => TMQ_NON_FINITE,
            Error::Range { .. } => TMQ_RANGE,
            _ => TMQ_FAILED,
        };
        Failure(status, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a call and keeps what went wrong for [`tmq_last_error`].
fn guard(call: impl FnOnce() -> Outcome) -> tmq_status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return TMQ_OK,
        Ok(Err(Failure(status, text))) => (status, text),
        Err(_) => (TMQ_INTERNAL, "a defect of the library".into()),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = text);
    status
}

fn null(what: &str) -> Failure {
    Failure(TMQ_NULL_POINTER, format!("{what} is null"))
}

/// What a pointer of the caller points to.
///
/// # Safety
/// `pointer` is null or points to a `T` that nobody changes during the call.
unsafe fn by_ref<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller of the C function vouches for it.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// As [`by_ref`], to change it.
///
/// # Safety
/// `pointer` is null or points to a `T` that nobody else uses during the call.
unsafe fn by_mut<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller of the C function vouches for it.
    unsafe { pointer.as_mut() }.ok_or_else(|| null(what))
}

/// Bytes that a struct of a newer caller may have.
const MOST_STRUCT_BYTES: usize = 4096;

fn struct_size(what: &str, got: usize, known: usize) -> Failure {
    Failure(
        TMQ_STRUCT_SIZE,
        format!("{what}: struct_size is {got}, this library knows a struct of {known} bytes"),
    )
}

/// A struct of the caller, which begins with its size. One from a newer header is longer, and understood if the rest is zero.
///
/// # Safety
/// `pointer` is null or points to as many bytes as its first field says, at least to that field; `T` begins with its size.
unsafe fn known<T: Copy>(pointer: *const T, what: &str) -> Result<T, Failure> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: not null, and the size is the first field of every `T`, as the caller vouches.
    let size = unsafe { pointer.cast::<usize>().read() };
    if !(size_of::<T>()..=MOST_STRUCT_BYTES).contains(&size) {
        return Err(struct_size(what, size, size_of::<T>()));
    }
    // SAFETY: the caller's struct has `size` bytes.
    let rest = unsafe {
        std::slice::from_raw_parts(pointer.cast::<u8>().add(size_of::<T>()), size - size_of::<T>())
    };
    match rest.iter().all(|byte| *byte == 0) {
        // SAFETY: the struct has at least the bytes of a `T`, which the caller has filled.
        true => Ok(unsafe { pointer.read() }),
        false => Err(struct_size(what, size, size_of::<T>())),
    }
}

/// Fills a struct of the caller, which begins with its size, as far as both sides know it; the rest of a longer one becomes zero.
///
/// # Safety
/// `out` is null or points to as many bytes as its first field says, at least to that field, and nobody else uses them during the
/// call; `T` begins with its size.
unsafe fn answer<T: Copy>(out: *mut T, what: &str, make: impl FnOnce(usize) -> T) -> Outcome {
    if out.is_null() {
        return Err(null(what));
    }
    // SAFETY: not null, and the size is the first field of every `T`, as the caller vouches.
    let size = unsafe { out.cast::<usize>().read() };
    if !(size_of::<usize>()..=MOST_STRUCT_BYTES).contains(&size) {
        return Err(struct_size(what, size, size_of::<T>()));
    }
    let (value, common) = (make(size), size.min(size_of::<T>()));
    // SAFETY: `common` bytes are inside of both structs, the caller's has `size` of them, and they are ours for the call.
    unsafe {
        out.cast::<u8>().copy_from_nonoverlapping((&raw const value).cast::<u8>(), common);
        out.cast::<u8>().add(common).write_bytes(0, size - common);
    }
    Ok(())
}

/// A text of the caller.
///
/// # Safety
/// `pointer` is null or points to a text that ends with a zero byte.
unsafe fn text<'a>(pointer: *const c_char, what: &'static str) -> Result<&'a str, Failure> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: not null, and the caller of the C function vouches for the rest.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|e| Failure(TMQ_PARSE, format!("{what}: {e}")))
}

/// Hands a new object to the caller.
///
/// # Safety
/// `out` is null or points to a place for a handle.
unsafe fn give<T>(out: *mut *mut T, make: impl FnOnce() -> Result<T, Failure>) -> Outcome {
    // SAFETY: as the caller of the C function vouches.
    let out = unsafe { by_mut(out, "out") }?;
    *out = std::ptr::null_mut();
    *out = Box::into_raw(Box::new(make()?));
    Ok(())
}

/// Takes an object back from the caller and drops it.
///
/// # Safety
/// `handle` is null or came from [`give`] and was not freed.
unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: it came from `Box::into_raw`. A panic in a destructor would be a defect; it must not cross the border either.
        let object = unsafe { Box::from_raw(handle) };
        drop(catch_unwind(AssertUnwindSafe(|| drop(object))));
    }
}

/// The numbers of the caller that a result goes to, exactly as many as there are.
///
/// # Safety
/// `out` is null or points to `len` numbers that nobody else uses during the call.
unsafe fn write<T: Copy>(out: *mut T, len: usize, values: &[T]) -> Outcome {
    if out.is_null() {
        return Err(null("out"));
    }
    if len != values.len() {
        return Err(Failure(TMQ_SHAPE, format!("out has {len} numbers, the result has {}", values.len())));
    }
    // SAFETY: not null, `len` numbers long as the caller of the C function vouches, and ours for the call.
    unsafe { std::slice::from_raw_parts_mut(out, len) }.copy_from_slice(values);
    Ok(())
}

/// Version of the library's API, to be compared with `TMQ_VERSION` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn tmq_version() -> u32 {
    TMQ_VERSION
}

/// What went wrong in the last call of this thread that failed; the text is there until the next such call.
#[unsafe(no_mangle)]
pub extern "C" fn tmq_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}
