//! A session parked in a memory pool and resumed from it, as `turbomoq serve` does with the caches of mlx-lm in half precision.

use crate::Result;
use crate::cache::Float;
use crate::model::{Model, Session};
use mlx_rs::{Array, Dtype};
use std::collections::BTreeMap;
use turbomoq::archive::Archive;
use turbomoq::mlx::{get, put};
use turbomoq::pool::MemoryPool;
use turbomoq::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
use turbomoq::{Compressor, Recipe, Tensor};

/// The session that goes on where a session on exact caches is, after its caches went through a pool, and the bytes that the pool
/// counted for them.
pub fn through_pool<'a>(
    model: &'a Model,
    session: &Session,
    recipe: &Recipe,
) -> Result<(Session<'a>, usize)> {
    let half = |x: &Array| -> Result<_> { Ok(get(&x.as_dtype(Dtype::Float16)?)?) };
    let layer = |[keys, values]: [&Array; 2]| -> Result<Layer> {
        let kv = Pair { keys: half(keys)?, values: half(values)? };
        Ok(Layer::Kv { class: KvClass::Kv, kv: Some(kv) })
    };
    let exact = session.exact().ok_or("only a session on float caches can be parked here")?;
    let layers = exact.into_iter().map(layer).collect::<Result<_>>()?;
    let cache = PromptCache { layout: Layout::V032, metadata: BTreeMap::new(), layers };

    let (compressor, pool) = (Compressor::new(recipe.clone()), MemoryPool::new(usize::MAX));
    pool.allocate("agent", "", 1.0)?;
    let bytes = pool.store("agent", Archive::compress(&cache, &compressor, || ())?)?.bytes;
    let back = pool.get("agent")?.restore(&compressor, || ())?;

    let single = |x: &Tensor| -> Result<Array> { Ok(put(x)?.as_dtype(Dtype::Float32)?) };
    let session = model.session_at(session.position(), |layer| {
        let kv = back.layers[layer].attention_kv()?.ok_or("a layer has come back without keys and values")?;
        Ok(Box::new(Float::of(single(&kv.keys)?, single(&kv.values)?)))
    })?;
    Ok((session, bytes))
}
