//! From a prompt cache of mlx-lm, and back to one: the way between a Rust program and Python.

use super::Cache;
use super::plan::{LayerKind, unsupported};
use crate::cache::HeadGroups;
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::io::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache, Ring};
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// Tokens of an append.
const PIECE: usize = 2048;

impl<E: Engine + Clone> Cache<E> {
    /// A cache that holds what a prompt cache of mlx-lm holds: plain and quantized layers are packed, rotating ones become sliding
    /// layers, and layers without keys and values are [`LayerKind::State`], whose contents stay in `prompt`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a list of caches in one layer, a class that cannot be interpreted, and a rotating layer that keeps
    /// first tokens; as [`Cache::on_layers`] and [`Cache::update_and_attend`].
    pub fn from_prompt_cache(engine: E, recipe: &str, prompt: &PromptCache) -> Result<Cache<E>> {
        let kinds =
            prompt.layers.iter().enumerate().map(|(i, layer)| kind_of(i, layer)).collect::<Result<_>>()?;
        let mut cache = Cache::on_layers(engine.clone(), recipe, kinds)?;
        for (i, layer) in prompt.layers.iter().enumerate() {
            let Some(Pair { keys, values }) = layer.attention_kv()? else { continue };
            let held = keys.shape()[2];
            // A window that has lost tokens begins behind them: zeros take their positions, and no query sees them.
            let lost = layer.offset().unwrap_or(held).saturating_sub(held);
            cache.append_zeros(i, lost, &keys, &values)?;
            for start in (0..held).step_by(PIECE) {
                let end = held.min(start + PIECE);
                cache.append_host(i, &keys.slice(2, start, end)?, &values.slice(2, start, end)?)?;
            }
        }
        Ok(cache)
    }

    /// The cache as mlx-lm holds it, every layer dense. Layers of [`LayerKind::State`] come from `states`, a prompt cache of the same
    /// model; those that share another one's cache have an empty one of their own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a batch, a layer that has dropped tokens which mlx-lm would keep, and a state that is not in `states`;
    /// the engine's own.
    pub fn to_prompt_cache(&self, layout: Layout, states: Option<&PromptCache>) -> Result<PromptCache> {
        let layers = self.plan.kinds.iter().enumerate().map(|(i, kind)| match (kind, self.layer(i)) {
            (LayerKind::State, _) => match states.and_then(|states| states.layers.get(i)) {
                Some(state) => Ok(state.clone()),
                None => Err(unsupported("layer", i, "its state is not in a cache of keys and values")),
            },
            (LayerKind::Sliding { window }, Some(layer)) => self.rotating(layer, *window),
            (LayerKind::Sliding { window }, None) => {
                Ok(Layer::Rotating { kv: None, ring: Ring { keep: 0, max_size: *window, offset: 0, idx: 0 } })
            }
            (_, Some(layer)) if layer.len() != layer.offset() => Err(unsupported(
                "layer",
                i,
                "it has dropped tokens, whose positions a KVCache could not keep",
            )),
            (_, Some(layer)) => Ok(Layer::Kv { class: KvClass::Kv, kv: Some(self.dense(layer)?) }),
            (_, None) => Ok(Layer::Kv { class: KvClass::Kv, kv: None }),
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(PromptCache { layout, metadata: BTreeMap::new(), layers })
    }

    fn dense(&self, layer: &HeadGroups<E>) -> Result<Pair<Tensor>> {
        let (keys, values) = layer.fetch()?;
        match keys.shape()[0] {
            1 => Ok(Pair { keys: self.engine.get(&keys)?, values: self.engine.get(&values)? }),
            batch => Err(unsupported("batch", batch, "a prompt cache holds one sequence")),
        }
    }

    /// The newest tokens of a window, in order.
    fn rotating(&self, layer: &HeadGroups<E>, window: usize) -> Result<Layer> {
        let all = self.dense(layer)?;
        let held = all.keys.shape()[2];
        let idx = held.min(window);
        let newest = |x: &Tensor| x.slice(2, held - idx, held).map(|x| x.compact());
        let kv = Pair { keys: newest(&all.keys)?, values: newest(&all.values)? };
        let ring = Ring { keep: 0, max_size: window, offset: layer.offset(), idx };
        Ok(Layer::Rotating { kv: Some(kv), ring })
    }

    fn append_host(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (k, v) = (self.engine.put(keys)?, self.engine.put(values)?);
        self.update(layer, &k, &v, |cache| cache.append(&k, &v))
    }

    /// `n` tokens of zeros of the same heads and dtype.
    fn append_zeros(&mut self, layer: usize, n: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        for start in (0..n).step_by(PIECE) {
            let zeros = |like: &Tensor| {
                let mut shape = like.shape().to_vec();
                shape[2] = PIECE.min(n - start);
                like.like(&shape, vec![0.0; shape.iter().product()])
            };
            self.append_host(layer, &zeros(keys)?, &zeros(values)?)?;
        }
        Ok(())
    }
}

fn kind_of(i: usize, layer: &Layer) -> Result<LayerKind> {
    match layer {
        Layer::Kv { class: KvClass::Chunked { .. }, .. } => {
            Err(unsupported("layer", i, "a ChunkedKVCache drops tokens by chunks"))
        }
        Layer::Kv { .. } | Layer::Quantized { .. } => Ok(LayerKind::Full),
        Layer::Rotating { ring, .. } if ring.keep == 0 => Ok(LayerKind::Sliding { window: ring.max_size }),
        Layer::Rotating { ring, .. } => {
            Err(unsupported("keep", ring.keep, "a sliding layer keeps no first tokens"))
        }
        Layer::Arrays { .. } => Ok(LayerKind::State),
        Layer::List(_) | Layer::Opaque { .. } => Err(Error::Unsupported {
            field: "layer",
            value: format!("{i}, {}", layer.class()),
            reason: "it has no one pair of keys and values".into(),
        }),
    }
}
