//! What a packed layer was: its class and counters, from which it is rebuilt around unpacked keys and values.

use crate::error::Result;
use crate::io::prompt_cache::{KvClass, KvKind, Layer, Packed, Pair, Ring};
use crate::tensor::{Dtype, Tensor};
use serde::{Deserialize, Serialize};

/// What is needed beside keys and values to rebuild a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shell {
    /// A plain class.
    Plain(KvClass),
    /// A rotating window.
    Rotating(Ring),
    /// MLX affine codes.
    Quantized {
        /// Elements per scale.
        group_size: usize,
        /// Bits per code.
        bits: usize,
        /// Dtype of the scales.
        dtype: Dtype,
    },
}

impl Shell {
    /// The name of the class in mlx-lm.
    pub fn class(&self) -> &'static str {
        match self {
            Shell::Plain(class) => class.name(),
            Shell::Rotating(_) => "RotatingKVCache",
            Shell::Quantized { .. } => "QuantizedKVCache",
        }
    }

    /// Position of the next token of a layer that holds `rows` tokens.
    pub fn offset(&self, rows: usize) -> usize {
        match self {
            Shell::Plain(class) => class.offset(rows),
            Shell::Quantized { .. } => rows,
            Shell::Rotating(ring) => ring.offset,
        }
    }
}

/// What a layer is beside its keys and values.
pub(super) fn shell_of(layer: &Layer, kind: KvKind) -> Shell {
    match (layer, kind) {
        (Layer::Kv { class, .. }, _) => Shell::Plain(*class),
        (_, KvKind::Rotating(ring)) => Shell::Rotating(ring),
        (Layer::Quantized { kv: Some(kv), group_size, bits }, _) => {
            let dtype = kv.keys.scales.float().unwrap_or(Dtype::F32);
            Shell::Quantized { group_size: *group_size, bits: *bits, dtype }
        }
        (_, KvKind::Quantized { group_size, bits }) => {
            Shell::Quantized { group_size, bits, dtype: Dtype::F32 }
        }
        (_, KvKind::Plain) => Shell::Plain(KvClass::Kv),
    }
}

/// The layer with keys and values in token order.
pub(super) fn rebuild(shell: &Shell, kv: Pair<Tensor>) -> Result<Layer> {
    Ok(match *shell {
        Shell::Plain(class) => Layer::Kv { class, kv: Some(kv) },
        Shell::Rotating(ring) => {
            let (keys, values) = (ring.ring_order(&kv.keys)?, ring.ring_order(&kv.values)?);
            Layer::Rotating { kv: Some(Pair { keys, values }), ring }
        }
        Shell::Quantized { group_size, bits, dtype } => {
            let quantize = |x: &Tensor| {
                Packed::quantize(&Tensor::from_f32(dtype, x.shape(), x.to_f32()?)?, group_size, bits)
            };
            Layer::Quantized {
                kv: Some(Pair { keys: quantize(&kv.keys)?, values: quantize(&kv.values)? }),
                group_size,
                bits,
            }
        }
    })
}
