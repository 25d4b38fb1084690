//! What a parked cache costs in a pool before there is one, and the widths that the allocator finds for so many bytes.
//!
//! bytes(T) = archive + sum over layers and sides of: exact tokens in half precision, packed tokens in blocks with their bookkeeping,
//! tables. It is the sum that [`crate::pool::MemoryPool`] counts for an [`Archive`] of plain layers without metadata.

use super::{Archive, Entry};
use crate::allocation::calibration::{Calibration, Unit};
use crate::cache::Model;
use crate::compressor::{CompressedLayer, Compressor};
use crate::error::{Error, Result};
use crate::policy::ModelShape;
use crate::pool::body_bytes;
use crate::recipe::Recipe;
use crate::spec::bit_plan::BitPlan;
use crate::spec::{CodecSpec, Side};
use crate::tensor::Tensor;
use std::collections::HashMap;

/// Bytes of a channel of an exact token, and of a number in a table.
const EXACT: usize = 2;
const TABLE: usize = 4;
/// Most bits of a side of a layer that [`plan_within`] gives out.
const MOST_BITS: u8 = 8;

/// Bytes that a pool counts for the parked cache of one agent: `tokens` tokens in every layer, exact ones in half precision.
///
/// # Errors
/// [`Error::Unsupported`] if the recipe has no form for these head dims, or heads of one layer have widths of their own.
pub fn parked_bytes(recipe: &Recipe, shape: &ModelShape, tokens: usize) -> Result<usize> {
    sum(recipe, shape, &mut HashMap::new(), |_| tokens)
}

/// As [`parked_bytes`] for a model; layers with a sliding window hold its tokens, packed like the others, and count as the last ones.
///
/// # Errors
/// As [`parked_bytes`].
pub fn parked_model_bytes(recipe: &Recipe, model: &Model, tokens: usize) -> Result<usize> {
    let Model { layers, kv_heads, key_dim, value_dim, .. } = *model;
    let shape = ModelShape { layers, kv_heads, key_dim, value_dim };
    let [sliding, window] = model.sliding.map_or([0, 0], |s| [s.layers, s.window]);
    let held = |layer: usize| if layer + sliding < layers { tokens } else { tokens.min(window) };
    sum(recipe, &shape, &mut HashMap::new(), held)
}

/// One width for each layer and side, of least loss by a table, with which the parked cache of `tokens` tokens has `bytes` bytes at
/// most; codecs, exact tokens and all else are as in `recipe`.
///
/// # Errors
/// [`Error::Unsupported`] if one bit everywhere needs more, else as [`parked_bytes`].
pub fn plan_within(
    recipe: &Recipe,
    calibration: &Calibration,
    tokens: usize,
    bytes: usize,
) -> Result<BitPlan> {
    let shape = calibration.shape();
    let mut rows = HashMap::new();
    let mut least = 0;
    // A step is one bit of one side of one layer.
    let steps = 2 * shape.layers;
    for step in (steps..=steps * usize::from(MOST_BITS)).rev() {
        let plan = calibration.plan(Unit::Layer, step as f64 / steps as f64, 1, MOST_BITS)?;
        let planned = Recipe { plan: Some(plan.clone()), ..recipe.clone() };
        least = sum(&planned, shape, &mut rows, |_| tokens)?;
        if least <= bytes {
            return Ok(plan);
        }
    }
    let reason = format!("one bit everywhere takes {least}");
    Err(Error::Unsupported { field: "bytes of a parked cache", value: bytes.to_string(), reason })
}

/// Bytes of a packed vector by the spec of its codec, whose seed does not matter.
type RowBytes = HashMap<CodecSpec, usize>;

fn sum(
    recipe: &Recipe,
    shape: &ModelShape,
    rows: &mut RowBytes,
    tokens: impl Fn(usize) -> usize,
) -> Result<usize> {
    let compressor = Compressor::new(recipe.clone());
    let mut bytes = size_of::<Archive>();
    for layer in 0..shape.layers {
        bytes += size_of::<Entry>() + size_of::<CompressedLayer<Tensor>>();
        for (side, dim) in [(Side::Key, shape.key_dim), (Side::Value, shape.value_dim)] {
            bytes += side_bytes(&compressor, rows, side, layer, [shape.kv_heads, tokens(layer), dim])?;
        }
    }
    Ok(bytes)
}

fn side_bytes(
    compressor: &Compressor,
    rows: &mut RowBytes,
    side: Side,
    layer: usize,
    [heads, tokens, dim]: [usize; 3],
) -> Result<usize> {
    let recipe = compressor.recipe();
    // `None` is a side that stays exact, for the compressor too.
    let Some(spec) = recipe.spec(side, layer, dim)? else { return Ok(heads * tokens * dim * EXACT) };
    let known = CodecSpec { seed: 0, ..spec };
    if !rows.contains_key(&known)
        && let Some(codec) = compressor.codec(side, layer, dim)?
    {
        rows.insert(known, codec.row_bytes());
    }
    let row_bytes = rows.get(&known).copied().unwrap_or_default();
    let [sinks, packed, window] = recipe.split(tokens);
    let exact = heads * (sinks + window) * dim * EXACT;
    if packed == 0 {
        return Ok(exact);
    }
    let tables = spec.tables(recipe.centred && side == Side::Key);
    Ok(exact + body_bytes(packed, heads * row_bytes, heads * tables * dim * TABLE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
    use crate::pool::MemoryPool;
    use crate::tensor::Dtype;

    const SHAPE: ModelShape = ModelShape { layers: 3, kv_heads: 2, key_dim: 64, value_dim: 32 };

    fn cache(tokens: usize) -> PromptCache {
        let rows = |dim: usize| {
            let data = (0..2 * tokens * dim).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
            Tensor::from_f32(Dtype::F16, &[1, 2, tokens, dim], data).unwrap()
        };
        let kv = Pair { keys: rows(SHAPE.key_dim), values: rows(SHAPE.value_dim) };
        let layer = Layer::Kv { class: KvClass::Kv, kv: Some(kv) };
        PromptCache { layout: Layout::V032, metadata: Default::default(), layers: vec![layer; 3] }
    }

    /// What a pool counts for a cache of `tokens` tokens.
    fn counted(recipe: &Recipe, tokens: usize) -> usize {
        let packed = Archive::compress(&cache(tokens), &Compressor::new(recipe.clone()), || ()).unwrap();
        let pool = MemoryPool::new(usize::MAX);
        pool.allocate("a", "", 1.0).unwrap();
        pool.store("a", packed).unwrap().bytes
    }

    #[test]
    fn the_plan_is_what_the_pool_counts() {
        for text in [
            "best@2.5/2,window=0",
            "best@3",
            "kivi@2",
            "mlx-affine@4/16",
            "uniform@16/16",
            "turboquant-prod@3",
            "best@4,window=0,key-bits=1-3-6,value-bits=2-2-16",
        ] {
            let recipe: Recipe = text.parse().unwrap();
            for tokens in [1, 3, 4, 131, 132, 300, 389] {
                let planned = parked_bytes(&recipe, &SHAPE, tokens).unwrap();
                assert_eq!(planned, counted(&recipe, tokens), "{text}, {tokens} tokens");
            }
        }
    }

    #[test]
    fn the_plan_within_a_budget_uses_it_and_no_more() {
        let losses = |first: f64| {
            let curve = |price: f64| std::array::from_fn(|i| price * 0.27f64.powi(i as i32 + 1));
            (0..6).map(|i| curve(if i < 2 { first } else { 1.0 })).collect::<Vec<_>>()
        };
        let table = Calibration::new(SHAPE, "a test", losses(50.0), losses(1.0)).unwrap();
        let base: Recipe = "best@4,window=0".parse().unwrap();
        let values = 600 * SHAPE.layers * SHAPE.kv_heads * (SHAPE.key_dim + SHAPE.value_dim);
        for bits in [2.0, 2.7, 3.3, 4.5] {
            let budget = (bits * values as f64 / 8.0) as usize;
            let plan = plan_within(&base, &table, 600, budget).unwrap();
            let planned = Recipe { plan: Some(plan.clone()), ..base.clone() };
            let bytes = parked_bytes(&planned, &SHAPE, 600).unwrap();
            // A step is a bit of a side of a layer, of the keys at most.
            let step = 600 * SHAPE.kv_heads * SHAPE.key_dim / 8;
            assert!(bytes <= budget && bytes + 2 * step > budget, "{bits}: {bytes} of {budget}");
            // Two bits with everything counted leave room for one step here.
            let dear = bits == 2.0 || plan.key.head(0, 0) > plan.key.head(1, 0);
            assert!(dear, "the dear layer gets most: {plan:?}");
        }
        let refused = plan_within(&base, &table, 600, 1000).unwrap_err();
        assert!(refused.to_string().contains("one bit everywhere takes"), "{refused}");
    }
}
