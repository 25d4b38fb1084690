//! Every way in which a call can fail: one enum, named fields, the value that was wrong in the message.

use std::path::PathBuf;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the thing and the value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An array has a shape that the call cannot use.
    #[error("{what}: expected shape {expected}, got {got:?}")]
    Shape {
        /// The array.
        what: &'static str,
        /// The shape that would do, in words.
        expected: String,
        /// The shape it has.
        got: Vec<usize>,
    },
    /// An array has an element type that the call cannot use.
    #[error("{what}: expected dtype {expected}, got {got}")]
    Dtype {
        /// The array.
        what: &'static str,
        /// The dtypes that would do.
        expected: &'static str,
        /// The dtype it has.
        got: String,
    },
    /// A field of a codec or recipe has a value that is not supported.
    #[error("{field} = {value} is not supported: {reason}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why not, and what would do.
        reason: String,
    },
    /// A text could not be parsed.
    #[error("cannot parse {what} from {text:?}: {reason}")]
    Parse {
        /// What the text should have been.
        what: &'static str,
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An input holds NaN or an infinity.
    #[error("{what}: element {index} is {value}, keys and values must be finite")]
    NonFinite {
        /// The array, with its place in the model.
        what: String,
        /// Row-major index of the first such element.
        index: usize,
        /// The element.
        value: f32,
    },
    /// Codes were handed to a codec or joined with codes that another codec made.
    #[error("codes of codec {got} do not belong to codec {expected}")]
    CodecMismatch {
        /// The codec that was asked.
        expected: String,
        /// The codec that made the codes.
        got: String,
    },
    /// A range of tokens lies outside what is stored.
    #[error("token range {start}..{end} is outside 0..{len}")]
    Range {
        /// First token asked for.
        start: usize,
        /// One past the last token asked for.
        end: usize,
        /// Tokens stored.
        len: usize,
    },
    /// A file could not be opened, read, written or renamed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is not what its reader expects: truncated, inconsistent or foreign.
    #[error("{path}: {detail}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        detail: String,
    },
    /// A prompt cache holds a cache class that this crate does not know.
    #[error("{path}: layer {layer} is a {class}, which is not a known cache class")]
    UnknownClass {
        /// The file.
        path: PathBuf,
        /// Index of the layer in the model.
        layer: usize,
        /// The class name found.
        class: String,
    },
    /// A prompt cache holds a class for several sequences at once.
    #[error("{path}: layer {layer} is a {class} of several sequences, extract one of them and save that")]
    BatchCache {
        /// The file.
        path: PathBuf,
        /// Index of the layer in the model.
        layer: usize,
        /// The class name found.
        class: String,
    },
    /// The output of a command would overwrite its own input.
    #[error("{path}: input and output are the same file")]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// A measurement found a result that is too far from its reference.
    #[error("{what}: off by {error:.2e} of the greatest value, {bound:.2e} is allowed")]
    Inaccurate {
        /// What was computed.
        what: String,
        /// Greatest difference over the greatest value.
        error: f64,
        /// What is allowed.
        bound: f64,
    },
    /// MLX reported an error.
    #[cfg(feature = "mlx")]
    #[error("MLX: {0}")]
    Mlx(#[from] mlx_rs::error::Exception),
}
