//! Every way in which a call can fail: one enum, named fields, the value that was wrong in the message.

use std::path::PathBuf;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason of [`Error::NotHeld`] that means a loss.
pub(crate) const EVICTED: &str = "its cache was evicted";

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
    /// A pool has no room for a cache, and cannot make any.
    #[error("{id}: {needed} bytes do not fit into the {limit} of {bytes}: at most {free} can be made free")]
    OverBudget {
        /// The agent.
        id: String,
        /// Bytes that storing the cache would take.
        needed: usize,
        /// `budget`, or the quota with its type.
        limit: String,
        /// Bytes of the limit.
        bytes: usize,
        /// Bytes that are free or could be made free.
        free: usize,
    },
    /// A pool does not hold what was asked for.
    #[error("agent {id:?}: {reason}")]
    NotHeld {
        /// The agent.
        id: String,
        /// Why not.
        reason: &'static str,
    },
    /// Another process holds the lock of a folder.
    #[error("{path}: another process uses this folder")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// Caches that were in memory only could not be written to the disk; all others were.
    #[error("{} not written: {}", count(agents.len(), "agent"), list(agents))]
    Unsaved {
        /// The agents, with the reasons.
        agents: Vec<(String, Error)>,
    },
    /// A bug: code of this crate has panicked, and the call has been given up.
    #[error("a bug in turbomoq: {message}")]
    Panic {
        /// The panic's words.
        message: String,
    },
    /// A server has refused a request.
    #[error("the server refused: {message}")]
    Refused {
        /// The kind of error, see [`Error::code`].
        code: String,
        /// The server's words.
        message: String,
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
    /// Not one worker thread could be started.
    #[error("no worker thread could be started: {reason}")]
    Threads {
        /// The system's answer.
        reason: String,
    },
    /// MLX reported an error.
    #[cfg(feature = "mlx")]
    #[error("MLX: {0}")]
    Mlx(#[from] mlx_rs::error::Exception),
}

impl Error {
    /// A word for programs that tells the kinds of errors apart.
    pub fn code(&self) -> &str {
        match self {
            Error::Shape { .. } => "shape",
            Error::Dtype { .. } => "dtype",
            Error::Unsupported { .. } => "unsupported",
            Error::Parse { .. } => "parse",
            Error::NonFinite { .. } => "non-finite",
            Error::CodecMismatch { .. } => "codec-mismatch",
            Error::Range { .. } => "range",
            Error::Io { .. } => "io",
            Error::Format { .. } => "format",
            Error::UnknownClass { .. } => "unknown-class",
            Error::BatchCache { .. } => "batch-cache",
            Error::SameFile { .. } => "same-file",
            Error::OverBudget { .. } => "over-budget",
            Error::NotHeld { reason, .. } if *reason == EVICTED => "evicted",
            Error::NotHeld { .. } => "not-held",
            Error::InUse { .. } => "in-use",
            Error::Unsaved { .. } => "unsaved",
            Error::Panic { .. } => "panic",
            Error::Refused { code, .. } => code,
            Error::Inaccurate { .. } => "inaccurate",
            Error::Threads { .. } => "threads",
            #[cfg(feature = "mlx")]
            Error::Mlx(_) => "mlx",
        }
    }
}

fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

fn list(agents: &[(String, Error)]) -> String {
    agents.iter().map(|(id, error)| format!("{id:?}: {error}")).collect::<Vec<_>>().join("; ")
}

/// Runs work whose panic is to be an error like others, because what the caller holds has to outlive it.
///
/// # Errors
/// Those of the work, [`Error::Panic`].
pub(crate) fn guarded<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
        Err(Error::Panic { message: text.into() })
    })
}
