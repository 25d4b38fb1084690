//! What packed keys and values cost, head by head: the change of each head's output, weighed by the model's own gradient.
//!
//! To second order the KL divergence of the next-token distributions is half of the mean square of g . d, with d the change of the
//! attention output of a head and g the gradient of log p(y) at it for next tokens y drawn from the model itself (the Fisher
//! information). d is computed with the codes that the cache would hold, softmax and all: at few bits the noise on scores is far
//! beyond what is linear. One backward pass serves every layer, head, side and width; what neighbouring positions share is left out.

use crate::Result;
use crate::cache::{Attend, Usage};
use crate::model::{Config, Model};
use mlx_rs::error::Exception;
use mlx_rs::ops::{select, softmax_axis};
use mlx_rs::{Array, random, stop_gradient, transforms};
use std::cell::RefCell;
use std::rc::Rc;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Recipe;
use turbomoq::Side;
use turbomoq::TOKENS_PER_BLOCK;
use turbomoq::allocation::MOST_BITS;
use turbomoq::internals::recipe::with_bits;
use turbomoq::mlx::{get, put, slice};
use turbomoq::{Compressor, Dtype};

/// Losses by layer and KV head, each at 1 to 8 bits: of keys and of values.
pub type Losses = [Vec<[f64; MOST_BITS]>; 2];

/// Exact attention whose output can be moved, for the gradient; `seen` keeps what came in.
struct Probe {
    shift: Array,
    seen: Option<Rc<RefCell<Vec<[Array; 3]>>>>,
}

impl Attend for Probe {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        if let Some(seen) = &self.seen {
            seen.borrow_mut().push([q.multiply(Array::from_f32(scale))?, k.clone(), v.clone()]);
        }
        Ok(crate::cache::attention(q, k, v, scale)?.add(&self.shift)?)
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Tokens packed when the token at `position` attends: the rule of the cache.
fn packed(recipe: &Recipe, position: usize) -> std::ops::Range<usize> {
    let waiting = (position + 1).saturating_sub(recipe.sinks);
    let blocks = waiting.saturating_sub(recipe.window + TOKENS_PER_BLOCK).div_ceil(TOKENS_PER_BLOCK);
    recipe.sinks..recipe.sinks + blocks * TOKENS_PER_BLOCK
}

/// Losses a token, from one stretch of tokens and one draw.
pub fn losses(model: &Model, recipe: &Recipe, tokens: &[u32], seed: u64) -> Result<Losses> {
    let (config, length) = (model.config, tokens.len() as i32);
    let seen = Rc::new(RefCell::new(vec![]));
    let shift = Array::zeros::<f32>(&[1, config.heads, length, config.head_dim])?;
    let shifts = vec![shift; config.layers];
    let session = |shifts: &[Array], seen: Option<&Rc<RefCell<Vec<_>>>>| {
        model.session(|layer| Ok(Box::new(Probe { shift: shifts[layer].clone(), seen: seen.cloned() })))
    };
    session(&shifts, Some(&seen))?.states(tokens)?;
    let likelihood = |shifts: &[Array]| -> Result<Array> {
        let logits = session(shifts, None)?.trace(tokens)?;
        let key = random::key(seed)?;
        let drawn = random::categorical(stop_gradient(&logits)?, -1, None, &key)?.expand_dims(1)?;
        let chosen = logits.take_along_axis(drawn, 1)?.squeeze_axes(&[1])?;
        Ok(chosen.subtract(logits.logsumexp_axis(-1, false)?)?.sum(false)?)
    };
    let likelihood = |shifts: &[Array]| {
        likelihood(shifts).map(|x| vec![x]).map_err(|error| Exception::custom(error.to_string()))
    };
    let (_, gradients) = transforms::fallible_vjp(likelihood, &shifts, &[Array::from_f32(1.0)])?;
    transforms::eval(&gradients)?;
    let mask = Masks::new(recipe, tokens.len());
    let mut losses = [vec![], vec![]];
    for (layer, (seen, gradient)) in seen.take().iter().zip(&gradients).enumerate() {
        let here = layer_losses(&config, recipe, layer, seen, gradient, &mask)?;
        losses.iter_mut().zip(here).for_each(|(all, here)| all.extend(here));
    }
    Ok(losses)
}

/// Which tokens come after a query, and which it finds packed: [L, L].
struct Masks {
    future: Array,
    packed: Array,
    /// Tokens packed in the end.
    end: usize,
}

impl Masks {
    fn new(recipe: &Recipe, length: usize) -> Masks {
        let shape = [length as i32, length as i32];
        let grid = |f: &dyn Fn(usize, usize) -> bool| {
            let all: Vec<bool> = (0..length * length).map(|i| f(i / length, i % length)).collect();
            Array::from_slice(&all, &shape)
        };
        let end = packed(recipe, length - 1).end;
        Masks { future: grid(&|t, p| p > t), packed: grid(&|t, p| packed(recipe, t).contains(&p)), end }
    }
}

fn layer_losses(
    config: &Config,
    recipe: &Recipe,
    layer: usize,
    [q, k, v]: &[Array; 3],
    gradient: &Array,
    masks: &Masks,
) -> Result<Losses> {
    let (length, dim) = (q.shape()[2], config.head_dim);
    let share = config.heads / config.kv_heads;
    let rows = |x: &Array| -> Result<Array> { Ok(x.reshape(&[config.kv_heads, share * length, dim])?) };
    let grid = [config.kv_heads, share, length, length];
    let scores = |keys: &Array| -> Result<Array> {
        Ok(rows(q)?.matmul(keys.squeeze_axes(&[0])?.transpose_axes(&[0, 2, 1])?)?.reshape(&grid)?)
    };
    let weights = |scores: &Array| -> Result<Array> {
        let hidden = select(&masks.future, Array::from_f32(f32::NEG_INFINITY), scores)?;
        Ok(softmax_axis(&hidden, -1, true)?)
    };
    let sum = |weights: &Array, values: &Array| -> Result<Array> {
        let weights = weights.reshape(&[config.kv_heads, share * length, length])?;
        Ok(weights.matmul(values.squeeze_axes(&[0])?)?)
    };
    // Half of the squares of g . d, summed over query heads and positions.
    let loss = |change: &Array| -> Result<Vec<f32>> {
        let along = change.multiply(rows(gradient)?)?.sum_axis(-1, false)?;
        let loss = along.square()?.sum_axis(-1, false)?.multiply(Array::from_f32(0.5 / length as f32))?;
        transforms::eval([&loss])?;
        Ok(loss.try_as_slice()?.to_vec())
    };
    let exact_scores = scores(k)?;
    let exact_weights = weights(&exact_scores)?;
    let exact = sum(&exact_weights, v)?;
    transforms::eval([&exact_scores, &exact_weights, &exact])?;
    let mut all: Losses = [(); 2].map(|()| vec![[0.0; MOST_BITS]; config.kv_heads as usize]);
    for bits in 1..=MOST_BITS {
        let mut note = |side: usize, losses: Vec<f32>| {
            all[side].iter_mut().zip(losses).for_each(|(heads, loss)| heads[bits - 1] = f64::from(loss));
        };
        if let Some(keys) = decoded(recipe, Side::Key, layer, bits, k, masks.end)? {
            let mixed = select(&masks.packed, scores(&keys)?, &exact_scores)?;
            note(0, loss(&sum(&weights(&mixed)?, v)?.subtract(&exact)?)?);
        }
        if let Some(values) = decoded(recipe, Side::Value, layer, bits, v, masks.end)? {
            let seen_packed = select(&masks.packed, &exact_weights, Array::from_f32(0.0))?;
            note(1, loss(&sum(&seen_packed, &values.subtract(v)?)?)?);
        }
    }
    Ok(all)
}

/// Keys or values with the packed tokens replaced by what their codes give; `None` for a side that stays exact.
fn decoded(
    recipe: &Recipe,
    side: Side,
    layer: usize,
    bits: usize,
    x: &Array,
    end: usize,
) -> Result<Option<Array>> {
    let template = if side == Side::Key { recipe.key } else { recipe.value };
    let Some(template) = template else { return Ok(None) };
    let spec = with_bits(template, bits as f32)?;
    let recipe = Recipe { key: spec, value: spec, plan: None, ..recipe.clone() };
    let head_dim = x.shape()[3] as usize;
    let Some(codec) = Compressor::new(recipe.clone()).codec(side, layer, head_dim)? else { return Ok(None) };
    let rows = get(&slice(x, 2, recipe.sinks, end)?)?;
    let first = rows.slice(2, 0, TOKENS_PER_BLOCK.min(end - recipe.sinks))?;
    let frame = Cpu.frame(&codec, recipe.centred && side == Side::Key, &first, None)?;
    let middle = put(&Cpu.decode(&Cpu.encode(&codec, frame, &rows)?, Dtype::F32)?)?;
    let parts = [slice(x, 2, 0, recipe.sinks)?, middle, slice(x, 2, end, x.shape()[2] as usize)?];
    Ok(Some(mlx_rs::ops::concatenate(&parts, 2)?))
}
