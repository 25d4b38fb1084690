//! The Llama architecture on MLX arrays, one sequence at a time, in f32.
//!
//! llama.cpp stores the rows of the query and key projections for its own interleaved RoPE: row 2 i + p of a head is row
//! p D/2 + i of the original. They are put back, so that RoPE turns the halves (i, i + D/2) of a head.

use crate::Result;
use crate::cache::{Attend, Usage};
use crate::gguf::Gguf;
use mlx_rs::fast::{rms_norm, rope};
use mlx_rs::ops::{matmul, sigmoid};
use mlx_rs::{Array, transforms};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub layers: usize,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    eps: f32,
    rope_base: f32,
}

struct Layer {
    attention_norm: Array,
    q: Array,
    k: Array,
    v: Array,
    output: Array,
    mlp_norm: Array,
    gate: Array,
    up: Array,
    down: Array,
}

/// The weights.
pub struct Model {
    pub config: Config,
    embedding: Array,
    layers: Vec<Layer>,
    norm: Array,
}

/// One sequence: a model, a cache for every layer, and how many tokens they have seen.
pub struct Session<'a> {
    model: &'a Model,
    caches: Vec<Box<dyn Attend>>,
    position: i32,
}

impl Model {
    /// Reads the weights of a model file.
    pub fn new(gguf: &Gguf) -> Result<Model> {
        let architecture = gguf.text("general.architecture")?;
        if architecture != "llama" {
            return Err(format!("the architecture is {architecture:?}, this example knows \"llama\"").into());
        }
        let count = |key: &str| gguf.integer(&format!("llama.{key}"));
        let heads = count("attention.head_count")?;
        let config = Config {
            layers: count("block_count")?,
            heads: heads as i32,
            kv_heads: count("attention.head_count_kv")? as i32,
            head_dim: (count("embedding_length")? / heads.max(1)) as i32,
            eps: gguf.float("llama.attention.layer_norm_rms_epsilon")?,
            rope_base: gguf.float("llama.rope.freq_base")?,
        };
        check_rope(&config)?;
        let weight = |name: &str| -> Result<Array> {
            let (shape, values) = gguf.tensor(&format!("{name}.weight"))?;
            Ok(Array::from_slice(&values, &shape.iter().map(|&n| n as i32).collect::<Vec<_>>()))
        };
        let layer = |i: usize| -> Result<Layer> {
            let weight = |name: &str| weight(&format!("blk.{i}.{name}"));
            let layer = Layer {
                attention_norm: weight("attn_norm")?,
                q: rows_for_halves(&weight("attn_q")?, config.heads)?,
                k: rows_for_halves(&weight("attn_k")?, config.kv_heads)?,
                v: weight("attn_v")?,
                output: weight("attn_output")?,
                mlp_norm: weight("ffn_norm")?,
                gate: weight("ffn_gate")?,
                up: weight("ffn_up")?,
                down: weight("ffn_down")?,
            };
            transforms::eval([&layer.q, &layer.k])?;
            Ok(layer)
        };
        Ok(Model {
            config,
            embedding: weight("token_embd")?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: weight("output_norm")?,
        })
    }

    /// A new sequence on caches made by `cache`, one for each layer.
    pub fn session(&self, cache: impl FnMut(usize) -> Result<Box<dyn Attend>>) -> Result<Session<'_>> {
        self.session_at(0, cache)
    }

    /// As [`Model::session`], on caches that hold `position` tokens.
    pub fn session_at(
        &self,
        position: usize,
        cache: impl FnMut(usize) -> Result<Box<dyn Attend>>,
    ) -> Result<Session<'_>> {
        let caches = (0..self.config.layers).map(cache).collect::<Result<_>>()?;
        Ok(Session { model: self, caches, position: position as i32 })
    }

    /// Logits [n, vocabulary] of final states [n, width], evaluated.
    pub fn logits(&self, states: &Array) -> Result<Array> {
        let logits = matmul(states, self.embedding.t())?;
        transforms::eval([&logits])?;
        Ok(logits)
    }
}

/// Refuses an MLX whose RoPE turns a token by itself otherwise than in a run of tokens, or a second sequence otherwise than a first:
/// a defect of old releases that would look like one of the cache.
fn check_rope(config: &Config) -> Result<()> {
    let (heads, dim) = (config.kv_heads, config.head_dim);
    let x: Vec<f32> = (0..2 * heads * 6 * dim).map(|i| (0.37 * i as f32).sin()).collect();
    let x = Array::from_slice(&x, &[2, heads, 6, dim]);
    let turn = |x: &Array, position: i32| rope(x, dim, false, config.rope_base, 1.0, position, None);
    let last = Array::from_slice(&[5u32], &[1]);
    let one = turn(&x.take_axis(&last, 2)?, 5)?.contiguous()?;
    let run = turn(&x, 0)?.take_axis(&last, 2)?.contiguous()?;
    transforms::eval([&one, &run])?;
    let (one, run): (&[f32], &[f32]) = (one.try_as_slice()?, run.try_as_slice()?);
    match one.iter().zip(run).all(|(a, b)| (a - b).abs() < 1e-4) {
        true => Ok(()),
        false => Err("the RoPE of this MLX turns a token by itself otherwise than in a run of tokens".into()),
    }
}

/// Puts the rows of a query or key projection back in the order of half-split RoPE.
fn rows_for_halves(weight: &Array, heads: i32) -> Result<Array> {
    let [rows, width] = [weight.shape()[0], weight.shape()[1]];
    let paired = weight.reshape(&[heads, rows / heads / 2, 2, width])?;
    Ok(paired.transpose_axes(&[0, 2, 1, 3])?.reshape(&[rows, width])?.contiguous()?)
}

impl Session<'_> {
    /// Runs the next tokens: their final states [n, width], evaluated.
    pub fn states(&mut self, tokens: &[u32]) -> Result<Array> {
        let states = self.forward(tokens)?;
        transforms::eval([&states])?;
        Ok(states)
    }

    /// Runs the next tokens lazily: their logits [n, vocabulary].
    pub fn trace(&mut self, tokens: &[u32]) -> Result<Array> {
        Ok(matmul(self.forward(tokens)?, self.model.embedding.t())?)
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Array> {
        let (model, length) = (self.model, tokens.len() as i32);
        let mut x = model.embedding.take_axis(Array::from_slice(tokens, &[length]), 0)?;
        for (layer, cache) in model.layers.iter().zip(&mut self.caches) {
            x = layer.forward(&model.config, &x, cache.as_mut(), self.position)?;
        }
        self.position += length;
        Ok(rms_norm(&x, Some(&model.norm), model.config.eps)?)
    }

    /// Tokens seen.
    pub fn position(&self) -> usize {
        self.position as usize
    }

    /// Keys and values of every layer, if all caches keep them as they are and hold any.
    pub fn exact(&self) -> Option<Vec<[&Array; 2]>> {
        self.caches.iter().map(|c| c.exact()).collect()
    }

    /// The least logit correlation of a layer, see [`Attend::logit_correlation`].
    pub fn worst_logit_correlation(&self) -> Result<Option<f64>> {
        self.caches.iter().try_fold(None, |least: Option<f64>, cache| {
            let here = cache.logit_correlation()?;
            Ok(least.map_or(here, |least| here.map(|x| x.min(least)).or(Some(least))))
        })
    }

    /// What the buffers of all layers hold.
    pub fn usage(&self) -> Usage {
        self.caches.iter().map(|c| c.usage()).fold(Usage::default(), Usage::add)
    }
}

impl Layer {
    fn forward(&self, config: &Config, x: &Array, cache: &mut dyn Attend, position: i32) -> Result<Array> {
        let (length, dim) = (x.shape()[0], config.head_dim);
        let y = rms_norm(x, Some(&self.attention_norm), config.eps)?;
        let heads = |weight: &Array, heads: i32| -> Result<Array> {
            let rows = matmul(&y, weight.t())?.reshape(&[1, length, heads, dim])?;
            Ok(rows.transpose_axes(&[0, 2, 1, 3])?)
        };
        let turn = |x: Array| rope(&x, dim, false, config.rope_base, 1.0, position, None);
        let q = turn(heads(&self.q, config.heads)?)?;
        let k = turn(heads(&self.k, config.kv_heads)?)?;
        let v = heads(&self.v, config.kv_heads)?;
        let attended = cache.attend(&q, &k, &v, 1.0 / (dim as f32).sqrt())?;
        let attended = attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[length, config.heads * dim])?;
        let x = x.add(matmul(&attended, self.output.t())?)?;
        let y = rms_norm(&x, Some(&self.mlp_norm), config.eps)?;
        let gate = matmul(&y, self.gate.t())?;
        let inner = gate.multiply(sigmoid(&gate)?)?.multiply(matmul(&y, self.up.t())?)?;
        Ok(x.add(matmul(&inner, self.down.t())?)?)
    }
}
