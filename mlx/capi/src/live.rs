//! Caches behind a model that runs elsewhere: append and attend in one call, for several sequences; copies; bytes that outlive them.
//!
//! The bytes of a cache are a safetensors file: the arrays of its groups of heads, named `GROUP.NAME`, and in the metadata one JSON text
//! with the version, the heads of each group and its scalars. Equal caches give equal bytes.

use super::cache::{Layer, tmq_cache};
use super::rows::{by_token, tensor, tmq_rows};
use super::tmq_status::{self, TMQ_NON_FINITE, TMQ_PARSE, TMQ_SHAPE, TMQ_UNSUPPORTED};
use super::{Failure, by_mut, by_ref, give, guard, known, null, write};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, View};
use std::borrow::Cow;
use std::collections::BTreeMap;
use turbomoq::cache::{GroupsState, HeadGroups, LayerShape, State};
use turbomoq::{Cpu, Element, Error, Recipe, Rules, Tensor};

/// Which tokens queries see, and how scores are formed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tmq_rules {
    /// `sizeof(tmq_rules)`.
    pub struct_size: usize,
    /// Factor of the scores, usually 1 / sqrt(key_dim).
    pub scale: f32,
    /// Not zero if a query sees nothing behind its own position. The last query stands at the last token.
    pub causal: i32,
    /// Newest tokens that a query sees, its own included; zero for all.
    pub sliding_window: usize,
    /// Scores become soft_cap * tanh(score / soft_cap); zero for none.
    pub soft_cap: f32,
    /// A logit for each query head that takes part in the softmax without a value, or null.
    pub sink_logits: *const f32,
    /// Added to the scores by mask head, query token and position, new tokens included; minus infinity hides. Or null.
    pub mask: *const f32,
    /// Heads of the mask: one, or all query heads.
    pub mask_heads: usize,
}

/// The rules of a call of `queries` query tokens of `heads` heads, after which the cache stands at `positions`.
///
/// # Safety
/// `rules` is null or a struct whose pointers are null or have as many floats as said.
unsafe fn rules_of(
    rules: *const tmq_rules,
    [heads, queries, positions]: [usize; 3],
) -> Result<Rules<Tensor>, Failure> {
    // SAFETY: as the caller vouches.
    let r = unsafe { known(rules, "rules") }?;
    if !r.scale.is_finite() || !r.soft_cap.is_finite() {
        let what = format!("scale is {}, soft_cap is {}", r.scale, r.soft_cap);
        return Err(Failure(TMQ_NON_FINITE, what));
    }
    let mut rules = Rules { causal: r.causal != 0, ..Rules::causal(r.scale) };
    rules.sliding_window = (r.sliding_window > 0).then_some(r.sliding_window);
    rules.soft_cap = (r.soft_cap > 0.0).then_some(r.soft_cap);
    if !r.sink_logits.is_null() {
        // SAFETY: not null, a float for each head as the caller vouches.
        let logits = unsafe { std::slice::from_raw_parts(r.sink_logits, heads) };
        rules.sink_logits = Some(Tensor::new(&[heads], logits.to_vec())?);
    }
    if !r.mask.is_null() {
        if r.mask_heads != 1 && r.mask_heads != heads {
            return Err(Failure(
                TMQ_SHAPE,
                format!("a mask of {} heads, 1 or {heads} are needed", r.mask_heads),
            ));
        }
        // The arrays of the call have been read, so that the product is far from overflow.
        let count = r.mask_heads * queries * positions;
        // SAFETY: not null, that many floats as the caller vouches.
        let mask = unsafe { std::slice::from_raw_parts(r.mask, count) };
        rules.mask = Some(Tensor::new(&[1, r.mask_heads, queries, positions], mask.to_vec())?);
    }
    Ok(rules)
}

/// Appends keys and values to each of `count` caches, one a sequence, and attends with the queries of the same tokens. Every query sees
/// what it would have seen had the tokens come one by one. Pointer `outs[i]` gets `lens[i]` floats, by query token, query head and
/// channel of the values.
///
/// Rows that are not finite are not refused: they are then packed as NaN. If a sequence fails, it and those behind it are as they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_caches_update_and_attend(
    caches: *const *mut tmq_cache,
    count: usize,
    queries: *const tmq_rows,
    keys: *const tmq_rows,
    values: *const tmq_rows,
    rules: *const tmq_rules,
    outs: *const *mut f32,
    lens: *const usize,
) -> tmq_status {
    // SAFETY: as the caller vouches, each array has `count` entries.
    guard(|| unsafe {
        if [caches.is_null(), outs.is_null(), lens.is_null()].contains(&true) {
            return Err(null("caches, outs or lens"));
        }
        for i in 0..count {
            let cache = by_mut(*caches.add(i), "cache")?;
            let (q, k, v) = (
                tensor(queries.wrapping_add(i), "queries")?,
                tensor(keys.wrapping_add(i), "keys")?,
                tensor(values.wrapping_add(i), "values")?,
            );
            let offset = match &cache.0 {
                Layer::Held(cache) => cache.offset(),
                Layer::Empty { .. } => 0,
            };
            let (heads, new) = (q.shape()[1], q.shape()[2]);
            let rules = rules_of(rules.wrapping_add(i), [heads, new, offset + new])?;
            if *lens.add(i) != heads * new * v.shape()[3] {
                let floats = heads * new * v.shape()[3];
                return Err(Failure(TMQ_SHAPE, format!("out has {} floats, not {floats}", *lens.add(i))));
            }
            let out = cache.0.open(&k, |cache| cache.update_and_attend(&q, &k, &v, &rules))?;
            write(*outs.add(i), *lens.add(i), &by_token(&out)?)?;
        }
        Ok(())
    })
}

/// Appends keys and values as `tmq_cache_append`, rows that are not finite too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_extend(
    cache: *mut tmq_cache,
    keys: *const tmq_rows,
    values: *const tmq_rows,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let (keys, values) = (tensor(keys, "keys")?, tensor(values, "values")?);
        by_mut(cache, "cache")?.0.open(&keys, |cache| cache.append(&keys, &values))
    })
}

/// Attends as `tmq_cache_attend`, by rules.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_attend_by_rules(
    cache: *const tmq_cache,
    queries: *const tmq_rows,
    rules: *const tmq_rules,
    out: *mut f32,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let (cache, q) = (by_ref(cache, "cache")?.0.held()?, tensor(queries, "queries")?);
        let rules = rules_of(rules, [q.shape()[1], q.shape()[2], cache.offset()])?;
        write(out, len, &by_token(&cache.attend(&q, &rules)?)?)
    })
}

/// Unpacks all keys and values that a cache holds to floats by head, token and channel. A side whose pointer is null is left out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_fetch(
    cache: *const tmq_cache,
    keys: *mut f32,
    keys_len: usize,
    values: *mut f32,
    values_len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let (k, v) = by_ref(cache, "cache")?.0.held()?.fetch()?;
        if !keys.is_null() {
            write(keys, keys_len, &k.to_f32()?)?;
        }
        match values.is_null() {
            true => Ok(()),
            false => write(values, values_len, &v.to_f32()?),
        }
    })
}

/// A cache of its own with the same contents; what neither of them changes they share.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_copy(cache: *const tmq_cache, out: *mut *mut tmq_cache) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe { give(out, || Ok(tmq_cache(by_ref(cache, "cache")?.0.clone()))) })
}

/// Bytes of a saved cache.
pub struct tmq_bytes(Vec<u8>);

/// A cache as bytes, for `tmq_cache_load`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_save(cache: *const tmq_cache, out: *mut *mut tmq_bytes) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe { give(out, || Ok(tmq_bytes(save(&by_ref(cache, "cache")?.0)?))) })
}

/// Number of the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_bytes_len(bytes: *const tmq_bytes, out: *mut usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        *by_mut(out, "out")? = by_ref(bytes, "bytes")?.0.len();
        Ok(())
    })
}

/// Copies the bytes; `len` must be their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_bytes_copy(bytes: *const tmq_bytes, out: *mut u8, len: usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe { write(out, len, &by_ref(bytes, "bytes")?.0) })
}

/// Frees bytes. Null is nothing to free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_bytes_free(bytes: *mut tmq_bytes) {
    // SAFETY: as the caller vouches.
    unsafe { super::free(bytes) }
}

/// A cache from the bytes that `tmq_cache_save` gave. `TMQ_PARSE` or `TMQ_SHAPE` if they are not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_cache_load(data: *const u8, len: usize, out: *mut *mut tmq_cache) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        give(out, || {
            if data.is_null() {
                return Err(null("data"));
            }
            Ok(tmq_cache(load(std::slice::from_raw_parts(data, len))?))
        })
    })
}

const VERSION: &str = "1";
/// The entry of the metadata that has everything but the arrays.
const META: &str = "turbomoq_cache";

/// An array as safetensors writes it.
struct Stored<'a>(&'a Tensor, Dtype);

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.1
    }
    fn shape(&self) -> &[usize] {
        self.0.shape()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        self.0.row_major_bytes()
    }
    fn data_len(&self) -> usize {
        self.0.nbytes()
    }
}

fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure(TMQ_PARSE, format!("a saved cache: {error}"))
}

fn save(layer: &Layer) -> Result<Vec<u8>, Failure> {
    let mut meta: BTreeMap<String, String> = [("version".into(), VERSION.into())].into();
    let state = match layer {
        Layer::Empty { recipe, layer, shape } => {
            let LayerShape { key_dim, value_dim } = *shape;
            let empty = (recipe, layer, key_dim, value_dim);
            meta.insert("empty".into(), serde_json::to_string(&empty).map_err(unreadable)?);
            GroupsState { groups: vec![], heads: vec![] }
        }
        Layer::Held(cache) => {
            let state = cache.state()?;
            meta.insert("heads".into(), serde_json::to_string(&state.heads).map_err(unreadable)?);
            state
        }
    };
    let mut arrays = vec![];
    for (i, group) in state.groups.iter().enumerate() {
        meta.insert(i.to_string(), group.meta.clone());
        for (name, x) in &group.arrays {
            arrays.push((format!("{i}.{name}"), Stored(x, dtype(x))));
        }
    }
    // One text, since a table of texts would be written in an order of its own each time.
    let meta = serde_json::to_string(&meta).map_err(unreadable)?;
    safetensors::serialize(arrays, Some([(META.to_string(), meta)].into())).map_err(unreadable)
}

fn load(bytes: &[u8]) -> Result<Layer, Failure> {
    let file = SafeTensors::deserialize(bytes).map_err(unreadable)?;
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(unreadable)?;
    let meta = header.metadata().as_ref().and_then(|meta| meta.get(META));
    let meta = meta.ok_or_else(|| unreadable(format!("there is no {META}")))?;
    let meta: BTreeMap<String, String> = serde_json::from_str(meta).map_err(unreadable)?;
    let text = |name: &str| meta.get(name);
    let need = |name: &str| text(name).ok_or_else(|| unreadable(format!("there is no {name}")));
    if need("version")? != VERSION {
        return Err(unreadable(format!("version {}, this library reads {VERSION}", need("version")?)));
    }
    if let Some(empty) = text("empty") {
        let (recipe, layer, key_dim, value_dim): (Recipe, usize, usize, usize) =
            serde_json::from_str(empty).map_err(unreadable)?;
        return Ok(Layer::Empty { recipe, layer, shape: LayerShape { key_dim, value_dim } });
    }
    let heads: Vec<Vec<usize>> = serde_json::from_str(need("heads")?).map_err(unreadable)?;
    let mut groups = vec![];
    for i in 0..heads.len() {
        let (mut arrays, prefix) = (BTreeMap::new(), format!("{i}."));
        for (name, view) in file.iter() {
            if let Some(name) = name.strip_prefix(&prefix) {
                arrays.insert(name.to_string(), array(view.dtype(), view.shape(), view.data())?);
            }
        }
        groups.push(State { arrays, meta: need(&i.to_string())?.clone() });
    }
    Ok(Layer::Held(HeadGroups::from_state(Cpu, &GroupsState { groups, heads })?))
}

fn dtype(x: &Tensor) -> Dtype {
    match x {
        Tensor::F32(_) => Dtype::F32,
        Tensor::F16(_) => Dtype::F16,
        Tensor::BF16(_) => Dtype::BF16,
        Tensor::U32(_) => Dtype::U32,
        Tensor::U8(_) => Dtype::U8,
        Tensor::I32(_) => Dtype::I32,
    }
}

fn array(dtype: Dtype, shape: &[usize], data: &[u8]) -> Result<Tensor, Failure> {
    fn of<T: Element, const N: usize>(
        shape: &[usize],
        data: &[u8],
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Tensor, Error> {
        Tensor::new(shape, data.as_chunks::<N>().0.iter().map(|&x| read(x)).collect())
    }
    Ok(match dtype {
        Dtype::F32 => of(shape, data, f32::from_le_bytes)?,
        Dtype::F16 => of(shape, data, f16::from_le_bytes)?,
        Dtype::BF16 => of(shape, data, bf16::from_le_bytes)?,
        Dtype::U32 => of(shape, data, u32::from_le_bytes)?,
        Dtype::U8 => Tensor::new(shape, data.to_vec())?,
        Dtype::I32 => of(shape, data, i32::from_le_bytes)?,
        other => return Err(Failure(TMQ_UNSUPPORTED, format!("a saved cache with {other:?}"))),
    })
}
