//! What noise on packed keys and values costs: the gradient of the model's own log-likelihood, by automatic differentiation.
//!
//! To second order the KL divergence of the next-token distributions is half of the mean square of g . e, with e the error of the
//! cache and g the gradient of log p(y) at a next token y drawn from the model itself (the Fisher information). Summed over
//! positions, whose draws are independent, one backward pass gives an estimate for every layer, head, side and channel at once.
//! Only packed tokens count, and only for the queries that find them packed.

use crate::Result;
use crate::cache::{Attend, Usage};
use crate::model::Model;
use mlx_rs::error::Exception;
use mlx_rs::ops::softmax_axis;
use mlx_rs::stop_gradient;
use mlx_rs::{Array, Dtype, random, transforms};
use std::cell::RefCell;
use std::rc::Rc;
use turbomoq::Recipe;
use turbomoq::compressor::BLOCK;

/// Gradients and the keys or values they belong to, [1, H, T, D], of one layer and side.
pub struct Gradient {
    pub x: Array,
    pub gradient: Array,
}

/// Differentiable attention with noise on packed keys and values; `seen` keeps what came in.
struct Probe {
    noise: [Array; 2],
    packed: Array,
    seen: Option<Rc<RefCell<Vec<[Array; 2]>>>>,
}

impl Attend for Probe {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        if let Some(seen) = &self.seen {
            transforms::eval([k, v])?;
            seen.borrow_mut().push([k.clone(), v.clone()]);
        }
        let [heads, length, dim] = [1, 2, 3].map(|i| q.shape()[i]);
        let kv_heads = k.shape()[1];
        let folded = q.reshape(&[kv_heads, heads / kv_heads * length, dim])?;
        let scores = |keys: &Array| -> Result<Array> {
            let scores = folded.matmul(keys.squeeze_axes(&[0])?.transpose_axes(&[0, 2, 1])?)?;
            Ok(scores.multiply(Array::from_f32(scale))?.reshape(&[heads, length, length])?)
        };
        let places = mlx_rs::ops::arange::<_, i32>(0, length, 1)?;
        let future = places.expand_dims(0)?.gt(places.expand_dims(1)?)?.as_dtype(Dtype::Float32)?;
        let noise = scores(&self.noise[0])?.multiply(&self.packed)?;
        let scores = scores(k)?.add(noise)?.subtract(future.multiply(Array::from_f32(1e9))?)?;
        let weights = softmax_axis(&scores, -1, true)?;
        let sum = |weights: &Array, values: &Array| -> Result<Array> {
            let folded = weights.reshape(&[kv_heads, heads / kv_heads * length, length])?;
            Ok(folded.matmul(values.squeeze_axes(&[0])?)?.reshape(&[1, heads, length, dim])?)
        };
        Ok(sum(&weights, v)?.add(sum(&weights.multiply(&self.packed)?, &self.noise[1])?)?)
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Tokens packed when the token at `position` attends: the rule of the cache.
fn packed(recipe: &Recipe, position: usize) -> std::ops::Range<usize> {
    let waiting = (position + 1).saturating_sub(recipe.sinks);
    let blocks = waiting.saturating_sub(recipe.window + BLOCK).div_ceil(BLOCK);
    recipe.sinks..recipe.sinks + blocks * BLOCK
}

/// One backward pass: for every layer, keys and values.
pub fn gradients(model: &Model, recipe: &Recipe, tokens: &[u32], seed: u64) -> Result<Vec<[Gradient; 2]>> {
    let length = tokens.len();
    let mask: Vec<f32> = (0..length)
        .flat_map(|t| (0..length).map(move |p| (t, p)))
        .map(|(t, p)| if packed(recipe, t).contains(&p) { 1.0 } else { 0.0 })
        .collect();
    let mask = Array::from_slice(&mask, &[length as i32, length as i32]);
    let (config, seen) = (model.config, Rc::new(RefCell::new(vec![])));
    let zeros = Array::zeros::<f32>(&[1, config.kv_heads, length as i32, config.head_dim])?;
    let noise = vec![zeros; 2 * config.layers];
    let seen_by = |noise: &[Array], seen: Option<&Rc<RefCell<Vec<_>>>>| {
        model.session(|layer| {
            let noise = [noise[2 * layer].clone(), noise[2 * layer + 1].clone()];
            Ok(Box::new(Probe { noise, packed: mask.clone(), seen: seen.cloned() }))
        })
    };
    seen_by(&noise, Some(&seen))?.states(tokens)?;
    let likelihood = |noise: &[Array]| -> Result<Array> {
        let logits = seen_by(noise, None)?.trace(tokens)?;
        let key = random::key(seed)?;
        let drawn = random::categorical(stop_gradient(&logits)?, -1, None, &key)?.expand_dims(1)?;
        let chosen = logits.take_along_axis(drawn, 1)?.squeeze_axes(&[1])?;
        Ok(chosen.subtract(logits.logsumexp_axis(-1, false)?)?.sum(false)?)
    };
    let likelihood = |noise: &[Array]| {
        likelihood(noise).map(|x| vec![x]).map_err(|error| Exception::custom(error.to_string()))
    };
    let (_, gradients) = transforms::fallible_vjp(likelihood, &noise, &[Array::from_f32(1.0)])?;
    transforms::eval(&gradients)?;
    let mut gradients = gradients.into_iter();
    let seen = seen.take();
    let pair = |x: [Array; 2]| x.map(|x| Gradient { x, gradient: gradients.next().expect("one for each") });
    Ok(seen.into_iter().map(pair).collect())
}
