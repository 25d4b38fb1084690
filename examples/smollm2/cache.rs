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

    /// Keys and values of all tokens [B, H, T, D], of a cache that keeps them as they are.
    fn exact(&self) -> Option<[&Array; 2]> {
        None
    }

    /// Correlation of the newest queries' scores on decoded keys with those on the exact ones, where both are at hand.
    fn logit_correlation(&self) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Keys and values as they are: the reference.
#[derive(Default)]
pub struct Float {
    kv: Option<[Array; 2]>,
}

impl Float {
    /// A cache that holds tokens.
    pub fn of(keys: Array, values: Array) -> Float {
        Float { kv: Some([keys, values]) }
    }
}

impl Attend for Float {
    fn exact(&self) -> Option<[&Array; 2]> {
        self.kv.as_ref().map(|[k, v]| [k, v])
    }

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

    fn logit_correlation(&self) -> Result<Option<f64>> {
        self.0.logit_correlation()
    }
}

/// Exact causal attention in f32; the queries are those of the last tokens.
pub fn attention(q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
    let [k, v] = [k.as_dtype(Dtype::Float32)?, v.as_dtype(Dtype::Float32)?];
    Ok(scaled_dot_product_attention(q, &k, &v, scale, ScaledDotProductAttentionMask::Causal, None)?)
}

/// A layer whose KV heads have caches of different kinds, each group with its heads.
pub struct ByHead(pub Vec<(Vec<usize>, Box<dyn Attend>)>);

impl Attend for ByHead {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        if let [(_, only)] = &mut self.0[..] {
            return only.attend(q, k, v, scale);
        }
        let share = (q.shape()[1] / k.shape()[1]) as usize;
        let list = |heads: &[usize], share: usize| {
            let all = heads.iter().flat_map(|h| h * share..(h + 1) * share).map(|h| h as i32);
            Array::from_iter(all.collect::<Vec<_>>(), &[(heads.len() * share) as i32])
        };
        let (mut order, mut outs) = (vec![], vec![]);
        for (heads, cache) in &mut self.0 {
            let (own, shared) = (list(heads, 1), list(heads, share));
            let [q, k, v] = [q.take_axis(&shared, 1)?, k.take_axis(&own, 1)?, v.take_axis(&own, 1)?];
            outs.push(cache.attend(&q, &k, &v, scale)?);
            order.extend(heads.iter().flat_map(|h| h * share..(h + 1) * share));
        }
        let mut places = vec![0i32; order.len()];
        order.iter().enumerate().for_each(|(at, &head)| places[head] = at as i32);
        let places = Array::from_slice(&places, &[places.len() as i32]);
        Ok(concatenate(&outs, 1)?.take_axis(&places, 1)?)
    }

    fn usage(&self) -> Usage {
        self.0.iter().map(|group| group.1.usage()).fold(Usage::default(), Usage::add)
    }

    fn logit_correlation(&self) -> Result<Option<f64>> {
        let (mut sum, mut heads) = (0.0, 0);
        for (group, cache) in &self.0 {
            if let Some(x) = cache.logit_correlation()? {
                sum += x * group.len() as f64;
                heads += group.len();
            }
        }
        Ok((heads > 0).then(|| sum / heads as f64))
    }
}
