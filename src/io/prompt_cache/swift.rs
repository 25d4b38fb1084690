//! What tells a file of mlx-swift-lm from one of mlx-lm 0.31, whose layout it follows with other contents.
//!
//! Swift keeps the meta state of every class as a list, with a number more for rotating and quantized caches, flattens codes and lists
//! of caches, and stores the present arrays of a recurrent state without its gaps. Neither side loads the other's files, and read as
//! mlx-lm's they would lose what the lists say; so they are refused by name.

use super::tree::{Node, strings};

/// How tensors, metadata and class names of model state begin, which Swift stores beside a cache.
const MODEL_STATE: &str = "__mlx_lm_state_";

/// The error of a file whose mark was found.
pub(super) fn refusal(mark: &str) -> String {
    format!("written by mlx-swift-lm: {mark}; such files are not read, mlx-lm cannot load them either")
}

/// Whether a tensor belongs to model state.
pub(super) fn is_model_state(tensor: &str) -> bool {
    tensor.starts_with(MODEL_STATE)
}

/// What of a layer only mlx-swift-lm writes.
pub(super) fn mark(class: &str, state: &Node, meta: Option<&Node>) -> Option<&'static str> {
    let list = meta.and_then(strings);
    let count = list.as_ref().map(Vec::len);
    let flat = strings(state).map_or(0, |tensors| tensors.len());
    match class {
        _ if class.starts_with(MODEL_STATE) => Some("model state lies beside the cache"),
        "KVCache" | "KVCacheSimple" if list.is_some() => Some("the meta state of a plain cache is a list"),
        "RotatingKVCache" if matches!(count, Some(5 | 6)) => {
            Some("the meta state of a rotating cache has 5 or 6 values, among them its step")
        }
        "QuantizedKVCache" if count == Some(4) || matches!(flat, 4 | 6) => Some(
            "codes, scales and biases of a quantized cache are one flat list, its meta state has 4 values",
        ),
        "ArraysCache" | "MambaCache" if meta.is_some_and(|meta| meta.leaf() != Some("")) => {
            Some("the meta state of a recurrent cache says which of its arrays are there")
        }
        "CacheList" if list.is_some() => Some("the meta state of a list of caches is flat"),
        _ => None,
    }
}
