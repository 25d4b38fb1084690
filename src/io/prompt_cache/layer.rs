//! One layer of a prompt cache, and its keys and values in a form that a compressor can work on.
//!
//! Buffers hold the tokens only: mlx-lm's allocated but unused rows are cut off at load. What is not attention
//! K/V (recurrent state, classes whose rows cannot be interpreted) is kept as raw tensors and passed through.

use super::affine::{Packed, check_codec};
use super::class::{KvClass, PackedClass, Pair};
use super::ring::Ring;
use super::{by_recipe, packed};
use crate::error::{Error, Result};
use crate::io::raw::{RawTensor, byte_len};
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// The cache of one layer; `None` instead of a pair where mlx-lm holds a cache that was never filled.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "tens of layers, each in front of megabytes")]
pub enum Layer {
    /// Plain floats.
    Kv {
        /// Which of the plain classes.
        class: KvClass,
        /// Keys and values.
        kv: Option<Pair<Tensor>>,
    },
    /// `QuantizedKVCache`.
    Quantized {
        /// Keys and values.
        kv: Option<Pair<Packed>>,
        /// Elements per scale.
        group_size: usize,
        /// Bits per code.
        bits: usize,
    },
    /// `RotatingKVCache`: rows in the order in which the ring holds them.
    Rotating {
        /// Keys and values.
        kv: Option<Pair<Tensor>>,
        /// Where the ring stands.
        ring: Ring,
    },
    /// `ArraysCache` (recurrent state), untouched.
    Arrays {
        /// The state.
        arrays: Vec<Option<RawTensor>>,
        /// Padding of a batch; 0.32 only.
        left_padding: Option<RawTensor>,
        /// Lengths of a batch; 0.32 only.
        lengths: Option<RawTensor>,
    },
    /// `CacheList`.
    List(Vec<Layer>),
    /// Kept as it is. A `ChunkedKVCache` of 0.31 that dropped tokens: that layout does not say how many of its rows are
    /// tokens, so it is only passed through, to the same layout. And the packed caches of turbomoq's Python package, which both layouts hold.
    Opaque {
        /// Name of the class.
        class: String,
        /// Tensors by their path inside the layer.
        tensors: BTreeMap<String, RawTensor>,
        /// Metadata by its path inside the layer.
        meta: BTreeMap<String, String>,
    },
}

/// How a layer holds its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// Floats, all tokens.
    Plain,
    /// Floats, the tokens of a window.
    Rotating(Ring),
    /// MLX affine codes, all tokens.
    Quantized {
        /// Elements per scale.
        group_size: usize,
        /// Bits per code.
        bits: usize,
    },
}

impl Layer {
    /// The name of the class in mlx-lm.
    pub fn class(&self) -> &str {
        match self {
            Layer::Kv { class, .. } => class.name(),
            Layer::Quantized { .. } => "QuantizedKVCache",
            Layer::Rotating { .. } => "RotatingKVCache",
            Layer::Arrays { .. } => "ArraysCache",
            Layer::List(_) => "CacheList",
            Layer::Opaque { class, .. } => class,
        }
    }

    /// How keys and values are held, if the layer is an attention layer of one part.
    pub fn kind(&self) -> Option<KvKind> {
        match *self {
            Layer::Kv { .. } => Some(KvKind::Plain),
            Layer::Quantized { group_size, bits, .. } => Some(KvKind::Quantized { group_size, bits }),
            Layer::Rotating { ring, .. } => Some(KvKind::Rotating(ring)),
            Layer::Arrays { .. } | Layer::List(_) | Layer::Opaque { .. } => None,
        }
    }

    /// Whether the layer has keys and values of attention, which gives it an ordinal among the KV layers of the model; a list counts
    /// once.
    pub fn is_kv(&self) -> bool {
        match self {
            Layer::Kv { .. } | Layer::Quantized { .. } | Layer::Rotating { .. } | Layer::Opaque { .. } => {
                true
            }
            Layer::Arrays { .. } => false,
            Layer::List(layers) => layers.iter().any(Layer::is_kv),
        }
    }

    /// Position of the next token, if the layer has a [`Layer::kind`].
    pub fn offset(&self) -> Option<usize> {
        let rows = self.rows();
        match self {
            Layer::Kv { class, .. } => Some(class.offset(rows)),
            Layer::Quantized { .. } => Some(rows),
            Layer::Rotating { ring, .. } => Some(ring.offset),
            Layer::Opaque { tensors, .. } => (self.packed_class()?.tokens)(tensors),
            _ => None,
        }
    }

    /// Whether the layer is a `TurboMoqCache` or a `RecipeCache`, the packed caches of turbomoq's Python package, or a list with one in it.
    pub fn is_packed(&self) -> bool {
        match self {
            Layer::Opaque { .. } => self.packed_class().is_some(),
            Layer::List(layers) => layers.iter().any(Layer::is_packed),
            _ => false,
        }
    }

    fn packed_class(&self) -> Option<&'static PackedClass> {
        packed_class(self.class())
    }

    /// The keys and the values of a packed cache in words; `None` for other layers.
    pub fn describe_packed(&self) -> Option<Pair<String>> {
        match self {
            Layer::Opaque { tensors, .. } => (self.packed_class()?.describe)(tensors),
            _ => None,
        }
    }

    /// A packed cache as a `KVCache` with the rows that its codes decode to, in lists too; other layers as they are.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for arrays that are damaged, or a head dim that has no codec.
    pub fn unpacked(&self) -> Result<Layer> {
        match self {
            Layer::Opaque { tensors, .. } => match self.packed_class() {
                Some(class) => Ok(Layer::Kv { class: KvClass::Kv, kv: (class.unpack)(tensors)? }),
                None => Ok(self.clone()),
            },
            Layer::List(layers) => {
                Ok(Layer::List(layers.iter().map(Layer::unpacked).collect::<Result<_>>()?))
            }
            _ => Ok(self.clone()),
        }
    }

    /// Tokens that the layer holds: fewer than its offset in a window.
    pub fn rows(&self) -> usize {
        match self {
            Layer::Kv { kv: Some(p), .. } | Layer::Rotating { kv: Some(p), .. } => rows_of(&p.keys),
            Layer::Quantized { kv: Some(p), .. } => rows_of(&p.keys.words),
            _ => 0,
        }
    }

    /// Keys and values `[B, H, T, D]` in token order: plain layers as they are, rotating ones unrolled, quantized
    /// ones decoded to f32. `None` for an empty layer and for one without a [`Layer::kind`].
    ///
    /// # Errors
    /// Those of [`Packed::dequantize`] and [`Ring::token_order`], for a layer that was not read from a file.
    pub fn attention_kv(&self) -> Result<Option<Pair<Tensor>>> {
        match self {
            Layer::Kv { kv, .. } => Ok(kv.clone()),
            Layer::Rotating { kv: Some(p), ring } => p.try_map(|x| ring.token_order(x)).map(Some),
            Layer::Quantized { kv: Some(p), group_size, bits } => {
                p.try_map(|x| x.dequantize(*group_size, *bits)).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The same kind of layer with other contents, given as [`Layer::attention_kv`] gives them. They are rounded
    /// to the dtype of this layer; quantized layers quantize again with their own width and group.
    ///
    /// # Errors
    /// [`Error::Shape`] if a shape differs from the one now held, [`Error::Unsupported`] if the layer holds no
    /// keys and values, [`Error::NonFinite`] and [`Error::Dtype`] for contents that cannot be held.
    pub fn with_kv(&self, new: &Pair<Tensor>) -> Result<Layer> {
        let fit = |old: &Tensor, new: &Tensor, shape: &[usize]| {
            if new.shape() != shape {
                return Err(new.wrong_shape("new keys or values", format!("{shape:?}")));
            }
            if let Some((index, value)) = new.first_non_finite() {
                return Err(Error::NonFinite { what: "new keys or values".into(), index, value });
            }
            if old.dtype() == new.dtype() { Ok(new.clone()) } else { old.like(shape, new.to_f32()?) }
        };
        match self {
            Layer::Kv { class, kv: Some(old) } => {
                let kv = old.try_zip(new, |old, new| fit(old, new, old.shape()))?;
                Ok(Layer::Kv { class: *class, kv: Some(kv) })
            }
            Layer::Rotating { kv: Some(old), ring } => {
                let kv = old.try_zip(new, |old, new| ring.ring_order(&fit(old, new, old.shape())?))?;
                Ok(Layer::Rotating { kv: Some(kv), ring: *ring })
            }
            Layer::Quantized { kv: Some(old), group_size, bits } => {
                check_codec(*group_size, *bits)?;
                let kv = old.try_zip(new, |old, new| {
                    let mut shape = old.words.shape().to_vec();
                    if let Some(last) = shape.last_mut() {
                        *last = old.width(*bits);
                    }
                    Packed::quantize(&fit(&old.scales, new, &shape)?, *group_size, *bits)
                })?;
                Ok(Layer::Quantized { kv: Some(kv), group_size: *group_size, bits: *bits })
            }
            _ => Err(Error::Unsupported {
                field: "layer",
                value: self.class().into(),
                reason: "it holds no keys and values that could be replaced".into(),
            }),
        }
    }

    /// Bytes of all arrays.
    pub fn nbytes(&self) -> usize {
        let packed = |p: &Packed| p.words.nbytes() + p.scales.nbytes() + p.biases.nbytes();
        match self {
            Layer::Kv { kv, .. } | Layer::Rotating { kv, .. } => {
                kv.as_ref().map_or(0, |p| p.keys.nbytes() + p.values.nbytes())
            }
            Layer::Quantized { kv, .. } => kv.as_ref().map_or(0, |p| packed(&p.keys) + packed(&p.values)),
            Layer::Arrays { arrays, left_padding, lengths } => {
                arrays.iter().chain([left_padding, lengths]).flatten().map(|x| x.bytes.len()).sum()
            }
            Layer::List(layers) => layers.iter().map(Layer::nbytes).sum(),
            Layer::Opaque { tensors, .. } => tensors.values().map(|x| x.bytes.len()).sum(),
        }
    }

    /// What is inconsistent in this layer, if anything is: run on every layer read and on every layer written.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Layer::Kv { class, kv } => class.check(kv.as_ref().map_or(Ok(0), floats)?),
            Layer::Rotating { kv, ring } => ring.check(kv.as_ref().map_or(Ok(0), floats)?),
            Layer::Quantized { kv, group_size, bits } => {
                check_codec(*group_size, *bits).map_err(|e| e.to_string())?;
                let Some(p) = kv else { return Ok(()) };
                p.keys.check(*group_size, *bits).map_err(|e| format!("keys: {e}"))?;
                p.values.check(*group_size, *bits).map_err(|e| format!("values: {e}"))?;
                same_rows(&p.keys.words, &p.values.words).map(|_| ())
            }
            Layer::Arrays { arrays, left_padding, lengths } => {
                arrays.iter().chain([left_padding, lengths]).flatten().try_for_each(check_raw)
            }
            Layer::List(layers) => layers.iter().try_for_each(Layer::check),
            Layer::Opaque { tensors, .. } => {
                tensors.values().try_for_each(check_raw)?;
                self.packed_class().map_or(Ok(()), |class| (class.check)(tensors))
            }
        }
    }
}

/// The packed caches of turbomoq's Python package.
static PACKED: [PackedClass; 2] = [packed::TURBOMOQ, by_recipe::BY_RECIPE];

/// The packed cache of a name, if it is one.
pub(super) fn packed_class(name: &str) -> Option<&'static PackedClass> {
    PACKED.iter().find(|class| class.name == name)
}

impl std::fmt::Display for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.class())
    }
}

pub(super) fn rows_of(x: &Tensor) -> usize {
    x.shape().get(2).copied().unwrap_or(0)
}

/// Rows of a pair of `[B, H, T, _]` arrays that agree in B, H and T.
fn same_rows(keys: &Tensor, values: &Tensor) -> Result<usize, String> {
    let (k, v) = (keys.shape(), values.shape());
    if k.len() != 4 || v.len() != 4 || k[..3] != v[..3] {
        return Err(format!("keys {k:?} and values {v:?} are not [B, H, T, D] with equal B, H and T"));
    }
    // Values may be of width 0 (MLA indexers); with these axes filled the number of rows is bounded by the bytes.
    if k[0] == 0 || k[1] == 0 || k[3] == 0 {
        return Err(format!("keys {k:?} have an empty axis beside the tokens"));
    }
    Ok(k[2])
}

fn floats(p: &Pair<Tensor>) -> Result<usize, String> {
    for (what, x) in [("keys", &p.keys), ("values", &p.values)] {
        if x.float().is_none() {
            return Err(format!("{what} have dtype {}, expected F32, F16 or BF16", x.dtype()));
        }
    }
    same_rows(&p.keys, &p.values)
}

fn check_raw(x: &RawTensor) -> Result<(), String> {
    match byte_len(x.dtype, &x.shape) {
        Some(n) if n == x.bytes.len() => Ok(()),
        _ => Err(format!("{} bytes for {} {:?}", x.bytes.len(), x.dtype, x.shape)),
    }
}
