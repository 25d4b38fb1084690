//! The cache of one layer for C: exact sinks and window, packed blocks between them.

use super::codes::finite;
use super::rows::{by_token, tensor, tmq_rows};
use super::tmq_status::{self, TMQ_NON_FINITE};
use super::{Failure, answer, by_mut, by_ref, free, give, guard, text, write};
use std::ffi::c_char;
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::cache::{LayerCache, LayerShape};

/// The cache of one layer.
pub struct tmq_cache(LayerCache<Cpu>);

/// What a cache holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tmq_cache_info {
    /// `sizeof(tmq_cache_info)`, set by the caller.
    pub struct_size: usize,
    /// Tokens held.
    pub tokens: usize,
    /// Position of the next token.
    pub offset: usize,
    /// Bytes of every buffer.
    pub bytes: usize,
}

/// An empty cache for a layer by a recipe, for example `best@3,sinks=4,window=128`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_new(
    recipe: *const c_char,
    layer: usize,
    key_dim: usize,
    value_dim: usize,
    out: *mut *mut tmq_cache,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        give(out, || {
            let recipe = text(recipe, "recipe")?.parse()?;
            Ok(tmq_cache(LayerCache::new(Cpu, &recipe, layer, LayerShape { key_dim, value_dim })?))
        })
    })
}

/// Appends keys and values of the same tokens and heads. On an error the cache is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_append(
    cache: *mut tmq_cache,
    keys: *const tmq_rows,
    values: *const tmq_rows,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let cache = by_mut(cache, "cache")?;
        let (keys, values) = (tensor(keys, "keys")?, tensor(values, "values")?);
        finite(&keys, "keys")?;
        finite(&values, "values")?;
        Ok(cache.0.append(&keys, &values)?)
    })
}

/// Attends with queries of the newest tokens, each of which sees what is not after it: floats by query token, query head and channel
/// of the values. `scale` is usually 1 / sqrt(key_dim).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_attend(
    cache: *const tmq_cache,
    queries: *const tmq_rows,
    scale: f32,
    out: *mut f32,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let cache = by_ref(cache, "cache")?;
        if !scale.is_finite() {
            return Err(Failure(TMQ_NON_FINITE, format!("scale is {scale}")));
        }
        write(out, len, &by_token(&cache.0.attend(&tensor(queries, "queries")?, &Rules::causal(scale))?)?)
    })
}

/// Drops the last `tokens` tokens, or all if there are fewer; `dropped` says how many and may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_trim(
    cache: *mut tmq_cache,
    tokens: usize,
    dropped: *mut usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let n = by_mut(cache, "cache")?.0.trim(tokens)?;
        if let Some(dropped) = dropped.as_mut() {
            *dropped = n;
        }
        Ok(())
    })
}

/// What a cache holds; `info->struct_size` is set before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_get_info(
    cache: *const tmq_cache,
    info: *mut tmq_cache_info,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let cache = &by_ref(cache, "cache")?.0;
        let (tokens, offset, bytes) = (cache.len(), cache.offset(), cache.nbytes());
        answer(info, "info", |struct_size| tmq_cache_info { struct_size, tokens, offset, bytes })
    })
}

/// Frees a cache. Null is nothing to free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_free(cache: *mut tmq_cache) {
    // SAFETY: as the caller vouches.
    unsafe { free(cache) }
}
