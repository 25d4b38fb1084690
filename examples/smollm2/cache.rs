//! The seam between the model and a cache: one trait for the cache of one layer, and the float cache that defines it.

use crate::Result;
use mlx_rs::fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention};
use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

/// What the buffers of a cache hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Bytes of all buffers.
    pub bytes: usize,
    /// Bytes of the stored form: packed codes with scales and tables, or the exact tokens of a side that is never packed.
    pub stored_bytes: usize,
    /// Scalars in the stored form.
    pub stored_values: usize,
}

impl Usage {
    /// The sums.
    pub fn add(self, other: Usage) -> Usage {
        Usage {
            bytes: self.bytes + other.bytes,
            stored_bytes: self.stored_bytes + other.stored_bytes,
            stored_values: self.stored_values + other.stored_values,
        }
    }
}

/// The cache of one layer.
pub trait Attend {
    /// Takes in the keys and values [B, H, L, D] of L new tokens (after RoPE) and lets their queries [B, Hq, L, D] attend,
    /// causally, to everything up to themselves: [B, Hq, L, D].
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array>;

    /// What the buffers hold.
    fn usage(&self) -> Usage;
}

/// Keys and values as they are: the reference.
#[derive(Default)]
pub struct Float {
    kv: Option<[Array; 2]>,
}

impl Attend for Float {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        let [k, v] = match self.kv.take() {
            Some([old_k, old_v]) => [concatenate(&[&old_k, k], 2)?, concatenate(&[&old_v, v], 2)?],
            None => [k.clone(), v.clone()],
        };
        let out = attention(q, &k, &v, scale)?;
        self.kv = Some([k, v]);
        Ok(out)
    }

    fn usage(&self) -> Usage {
        let sum = |f: fn(&Array) -> usize| self.kv.iter().flatten().map(f).sum();
        let bytes = sum(Array::nbytes);
        Usage { bytes, stored_bytes: bytes, stored_values: sum(Array::size) }
    }
}

/// Hands a cache half-precision keys and values, as a model in f16 does.
pub struct Half<C>(pub C);

impl<C: Attend> Attend for Half<C> {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        let [k, v] = [k.as_dtype(Dtype::Float16)?, v.as_dtype(Dtype::Float16)?];
        Ok(self.0.attend(q, &k, &v, scale)?.as_dtype(Dtype::Float32)?)
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

/// Exact causal attention in f32; the queries are those of the last tokens.
pub fn attention(q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
    let [k, v] = [k.as_dtype(Dtype::Float32)?, v.as_dtype(Dtype::Float32)?];
    Ok(scaled_dot_product_attention(q, &k, &v, scale, ScaledDotProductAttentionMask::Causal, None)?)
}
