//! The plain classes of mlx-lm, whose keys and values lie in token order, what is known of a packed class, and a pair of keys and values.

use super::ring::holdable;
use crate::error::Result;
use crate::io::raw::RawTensor;
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// Something for keys and the same for values.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair<T> {
    /// Of the keys.
    pub keys: T,
    /// Of the values.
    pub values: T,
}

impl<T> Pair<T> {
    pub(super) fn try_map<U>(&self, f: impl Fn(&T) -> Result<U>) -> Result<Pair<U>> {
        Ok(Pair { keys: f(&self.keys)?, values: f(&self.values)? })
    }

    pub(super) fn try_zip<U, V>(&self, other: &Pair<U>, f: impl Fn(&T, &U) -> Result<V>) -> Result<Pair<V>> {
        Ok(Pair { keys: f(&self.keys, &other.keys)?, values: f(&self.values, &other.values)? })
    }
}

/// A packed cache of turbomoq's Python package, as functions of a layer's arrays by name.
pub(super) struct PackedClass {
    /// The name of the class.
    pub name: &'static str,
    /// What is wrong with the arrays, if anything is.
    pub check: fn(&BTreeMap<String, RawTensor>) -> Result<(), String>,
    /// Tokens that are held, if the arrays are good.
    pub tokens: fn(&BTreeMap<String, RawTensor>) -> Option<usize>,
    /// Keys and values in words.
    pub describe: fn(&BTreeMap<String, RawTensor>) -> Option<Pair<String>>,
    /// The same tokens as a `KVCache`, packed ones as they decode.
    pub unpack: fn(&BTreeMap<String, RawTensor>) -> Result<Option<Pair<Tensor>>>,
}

/// The plain classes: keys and values `[B, H, T, D]` in token order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvClass {
    /// `KVCache`.
    Kv,
    /// `ConcatenateKVCache`.
    Concatenate,
    /// `ChunkedKVCache`: tokens before `start_position` were dropped.
    Chunked {
        /// Tokens per chunk.
        chunk_size: usize,
        /// Position of the first row.
        start_position: usize,
    },
}

impl KvClass {
    /// The name of the class in mlx-lm.
    pub fn name(&self) -> &'static str {
        match self {
            KvClass::Kv => "KVCache",
            KvClass::Concatenate => "ConcatenateKVCache",
            KvClass::Chunked { .. } => "ChunkedKVCache",
        }
    }

    /// Position of the next token behind `rows` tokens.
    pub(crate) fn offset(&self, rows: usize) -> usize {
        match self {
            KvClass::Chunked { start_position, .. } => start_position.saturating_add(rows),
            KvClass::Kv | KvClass::Concatenate => rows,
        }
    }

    /// What is wrong with the counters beside `rows` stored rows, if anything is.
    pub(crate) fn check(&self, rows: usize) -> Result<(), String> {
        let KvClass::Chunked { chunk_size, start_position } = *self else { return Ok(()) };
        holdable("chunk_size", chunk_size)?;
        holdable("start_position", start_position)?;
        holdable("offset", start_position.saturating_add(rows))
    }
}
