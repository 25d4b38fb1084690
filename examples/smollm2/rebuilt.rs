//! A cache that packs tokens as its recipe says and keeps what they decode to: the figures of a packed cache, not its memory.
//!
//! The first `sinks` tokens stay exact, and so do the newest `window..window + 128`: when a token comes and that many are there,
//! the oldest 128 leave, are encoded, decoded, and read by attention as decoded rows from then on. The frame comes from the first
//! block. Many tokens at once are taken in up to the next such border at a time, so a chunk gives what its tokens one by one give.
//! With a window of 0 nothing waits: tokens are packed before their own queries read them, as mlx-lm's quantized cache does.

use crate::Result;
use crate::cache::{Attend, Usage, attention};
use mlx_rs::ops::{concatenate, matmul};
use mlx_rs::{Array, Dtype};
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Frame;
use turbomoq::Side;
use turbomoq::TOKENS_PER_BLOCK;
use turbomoq::mlx::{get, put, slice};
use turbomoq::{Compressor, Recipe, Tensor};

/// Queries by which exact and decoded keys are compared.
const NEWEST: usize = 32;

/// The cache of one layer.
pub struct Rebuilt {
    sides: [Store; 2],
    /// Queries so far, until the frames are made from the first block and them.
    queries: Option<Array>,
    /// Exact keys of packed tokens and the newest queries, for [`Attend::logit_correlation`].
    exact_keys: Option<Array>,
    newest: Option<Array>,
    sinks: usize,
    window: usize,
    tile: usize,
}

/// Keys or values.
struct Store {
    /// `None` for a side that stays exact.
    codec: Option<Arc<Codec>>,
    centred: bool,
    frame: Option<Frame<Tensor>>,
    head: Option<Array>,
    body: Option<Array>,
    tail: Option<Array>,
    packed_bytes: usize,
}

impl Rebuilt {
    /// An empty cache of layer `layer`.
    pub fn new(recipe: &Recipe, layer: usize, head_dim: usize) -> Result<Rebuilt> {
        let compressor = Compressor::new(recipe.clone());
        let store = |side: Side| -> Result<Store> {
            Ok(Store {
                codec: compressor.codec(side, layer, head_dim)?,
                centred: recipe.centred && side == Side::Key,
                frame: None,
                head: None,
                body: None,
                tail: None,
                packed_bytes: 0,
            })
        };
        let sides = [store(Side::Key)?, store(Side::Value)?];
        let (sinks, window, tile) = (recipe.sinks, recipe.window, recipe.tile());
        Ok(Rebuilt { sides, queries: None, exact_keys: None, newest: None, sinks, window, tile })
    }

    fn waiting(&self) -> usize {
        length(&self.sides[0].tail)
    }

    fn leave(&mut self, tokens: usize) -> Result<()> {
        if let Some(tail) = self.sides[0].tail.as_ref().filter(|_| tokens > 0) {
            join(&mut self.exact_keys, slice(tail, 2, 0, tokens)?)?;
        }
        let queries = self.queries.take_if(|_| tokens > 0);
        self.sides.iter_mut().try_for_each(|side| side.leave(tokens, queries.as_ref()))
    }
}

impl Attend for Rebuilt {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        let (tokens, mut done, mut parts) = (q.shape()[2] as usize, 0, vec![]);
        while done < tokens {
            if self.window > 0 && self.waiting() == self.window + TOKENS_PER_BLOCK {
                self.leave(TOKENS_PER_BLOCK)?;
            }
            let end = tokens.min(done + self.window + TOKENS_PER_BLOCK - self.waiting());
            for (side, x) in self.sides.iter_mut().zip([k, v]) {
                side.append(&slice(x, 2, done, end)?, self.sinks)?;
            }
            if self.window == 0 {
                self.leave(self.waiting() / self.tile * self.tile)?;
            }
            let [keys, values] = [self.sides[0].whole()?, self.sides[1].whole()?];
            let q = slice(q, 2, done, end)?;
            parts.push(attention(&q, &keys, &values, scale)?);
            if self.exact_keys.is_none() {
                join(&mut self.queries, q)?;
            }
            done = end;
        }
        self.newest = Some(slice(q, 2, tokens.saturating_sub(NEWEST), tokens)?);
        Ok(concatenate(&parts, 2)?)
    }

    fn logit_correlation(&self) -> Result<Option<f64>> {
        let (Some(q), Some(exact), Some(body)) = (&self.newest, &self.exact_keys, &self.sides[0].body) else {
            return Ok(None);
        };
        let [groups, dim] = [q.shape()[1] / exact.shape()[1], q.shape()[3]];
        let folded = q.reshape(&[exact.shape()[1], groups * q.shape()[2], dim])?;
        let scores = |keys: &Array| -> Result<Array> {
            let keys = keys.as_dtype(Dtype::Float32)?.squeeze_axes(&[0])?;
            let scores = matmul(&folded, keys.transpose_axes(&[0, 2, 1])?)?;
            Ok(scores.subtract(scores.mean_axis(-1, true)?)?)
        };
        let (a, b) = (scores(exact)?, scores(body)?);
        let dot = |a: &Array, b: &Array| -> Result<Array> { Ok(a.multiply(b)?.sum_axis(-1, false)?) };
        let norms = dot(&a, &a)?.multiply(dot(&b, &b)?)?.sqrt()?.add(Array::from_f32(f32::MIN_POSITIVE))?;
        Ok(Some(dot(&a, &b)?.divide(norms)?.mean(false)?.item_exact::<f32>().into()))
    }

    fn usage(&self) -> Usage {
        self.sides.iter().map(Store::usage).fold(Usage::default(), Usage::add)
    }
}

impl Store {
    fn append(&mut self, x: &Array, sinks: usize) -> Result<()> {
        let tokens = x.shape()[2] as usize;
        let first = tokens.min(sinks - length(&self.head));
        join(&mut self.head, slice(x, 2, 0, first)?)?;
        join(&mut self.tail, slice(x, 2, first, tokens)?)
    }

    /// Packs the oldest tokens of the tail.
    fn leave(&mut self, tokens: usize, queries: Option<&Array>) -> Result<()> {
        let Some(tail) = self.tail.take_if(|_| tokens > 0) else { return Ok(()) };
        let oldest = slice(&tail, 2, 0, tokens)?;
        join(&mut self.tail, slice(&tail, 2, tokens, tail.shape()[2] as usize)?)?;
        let Some(codec) = &self.codec else { return join(&mut self.body, oldest) };
        let oldest = get(&oldest)?;
        let frame = match &self.frame {
            Some(frame) => frame.clone(),
            None => {
                let queries = queries.map(get).transpose()?;
                let frame = Cpu.frame(codec, self.centred, &oldest, queries.as_ref())?;
                self.packed_bytes += frame.nbytes();
                self.frame.insert(frame).clone()
            }
        };
        let codes = Cpu.encode(codec, frame, &oldest)?;
        self.packed_bytes += codes.words().nbytes() + codes.scales().nbytes();
        join(&mut self.body, put(&Cpu.decode(&codes, turbomoq::Dtype::F32)?)?)
    }

    /// All tokens, as attention reads them.
    fn whole(&self) -> Result<Array> {
        let parts: Vec<&Array> = [&self.head, &self.body, &self.tail].into_iter().flatten().collect();
        Ok(concatenate(&parts, 2)?)
    }

    fn usage(&self) -> Usage {
        let sum = |parts: &[&Option<Array>], f: fn(&Array) -> usize| -> usize {
            parts.iter().copied().flatten().map(f).sum()
        };
        let all = [&self.head, &self.body, &self.tail];
        match self.codec {
            Some(_) => Usage {
                bytes: sum(&[&self.head, &self.tail], Array::nbytes) + self.packed_bytes,
                stored_bytes: self.packed_bytes,
                stored_values: sum(&[&self.body], Array::size),
            },
            None => Usage {
                bytes: sum(&all, Array::nbytes),
                stored_bytes: sum(&all, Array::nbytes),
                stored_values: sum(&all, Array::size),
            },
        }
    }
}

fn length(x: &Option<Array>) -> usize {
    x.as_ref().map_or(0, |x| x.shape()[2] as usize)
}

/// Appends tokens to an array of them; nothing stays `None`.
fn join(to: &mut Option<Array>, x: Array) -> Result<()> {
    if x.shape()[2] > 0 {
        *to = Some(match to.take() {
            Some(old) => concatenate(&[old, x], 2)?,
            None => x,
        });
    }
    Ok(())
}
