//! The cache of one layer for C: exact sinks and window, packed blocks between them.

use super::codes::finite;
use super::rows::{by_token, tensor, tmq_rows};
use super::tmq_status::{self, TMQ_NON_FINITE};
use super::{Failure, answer, by_mut, by_ref, free, give, guard, text, write};
use std::ffi::c_char;
use turbomoq::cache::{HeadGroups, LayerShape};
use turbomoq::{Cpu, Error, Recipe, Rules, Side, Stored, Tensor};

/// The cache of one layer.
pub struct tmq_cache(pub(super) Layer);

/// The cache, or what it will be made from: the first rows say how many heads there are.
#[derive(Clone)]
pub(super) enum Layer {
    Empty { recipe: Recipe, layer: usize, shape: LayerShape },
    Held(HeadGroups<Cpu>),
}

impl Layer {
    /// The cache for keys [1, H, T, D], made if this is their first call. If `call` fails then, there is none as before.
    pub(super) fn open<R>(
        &mut self,
        keys: &Tensor,
        call: impl FnOnce(&mut HeadGroups<Cpu>) -> Result<R, Error>,
    ) -> Result<R, Failure> {
        match self {
            Layer::Held(cache) => Ok(call(cache)?),
            Layer::Empty { recipe, layer, shape } => {
                let mut cache = HeadGroups::new(Cpu, recipe, *layer, *shape, keys.shape()[1])?;
                let done = call(&mut cache)?;
                *self = Layer::Held(cache);
                Ok(done)
            }
        }
    }

    /// The cache, to be read.
    pub(super) fn held(&self) -> Result<&HeadGroups<Cpu>, Failure> {
        let none = || Error::Shape { what: "cache", expected: "at least one append".into(), got: vec![0] };
        match self {
            Layer::Held(cache) => Ok(cache),
            Layer::Empty { .. } => Err(none().into()),
        }
    }

    fn info(&self, struct_size: usize) -> tmq_cache_info {
        let mut info = tmq_cache_info { struct_size, tokens: 0, offset: 0, bytes: 0, packed: 0 };
        let Layer::Held(groups) = self else { return info };
        (info.offset, info.bytes) = (groups.offset(), groups.nbytes());
        if let Some((_, cache)) = groups.groups().next() {
            info.tokens = cache.len();
            let packed = |s: &Stored<Tensor>| matches!(s, Stored::Packed(_));
            let segments = cache.segments();
            let lens = segments.iter().filter(|s| packed(&s.keys) || packed(&s.values)).map(|s| s.keys.len());
            info.packed = lens.sum();
        }
        info
    }
}

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
    /// Tokens of which the keys or the values are packed.
    pub packed: usize,
}

/// An empty cache for a layer by a recipe, for example `best@3,sinks=4,window=128`. Its plan may differ by layer and KV head.
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
            let recipe: Recipe = text(recipe, "recipe")?.parse()?;
            if recipe.plan.is_none() {
                // What has no form is refused here; widths by head are checked when the heads are known.
                recipe.spec(Side::Key, layer, key_dim)?;
                recipe.spec(Side::Value, layer, value_dim)?;
            }
            Ok(tmq_cache(Layer::Empty { recipe, layer, shape: LayerShape { key_dim, value_dim } }))
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
        cache.0.open(&keys, |cache| cache.append(&keys, &values))
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
        let queries = tensor(queries, "queries")?;
        write(out, len, &by_token(&cache.0.held()?.attend(&queries, &Rules::causal(scale))?)?)
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
        let n = match &mut by_mut(cache, "cache")?.0 {
            Layer::Held(cache) => cache.trim(tokens)?,
            Layer::Empty { .. } => 0,
        };
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
        answer(info, "info", |struct_size| cache.info(struct_size))
    })
}

/// Frees a cache. Null is nothing to free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_free(cache: *mut tmq_cache) {
    // SAFETY: as the caller vouches.
    unsafe { free(cache) }
}
