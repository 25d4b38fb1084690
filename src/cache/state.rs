//! A cache taken apart into named arrays and one text of scalars, and put together again: mlx-lm's `state` and `from_state`.
//!
//! Exact rows are cut to the tokens that they hold. The text is JSON and holds all that is no array: recipe, codec specs, positions,
//! tiers with what they have observed. Codes go back only to the codec whose spec stands beside them.

mod parts;

use super::consistent::misfit;
use super::draft::Border;
use super::held::{Held, Seen};
use super::{HeadGroups, KvCache, LayerCache, LayerShape, SequenceCache};
use crate::codec::Codec;
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored};
use crate::error::{Error, Result};
use crate::policy::{Ema, TierPolicy};
use crate::recipe::Recipe;
use crate::spec::CodecSpec;
use crate::tensor::Tensor;
use parts::{Packed, Parts};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// What a layer's cache is made of.
#[derive(Clone, Debug)]
pub struct State<T> {
    /// Arrays by name. Buffers are shared with the cache, not copied.
    pub arrays: BTreeMap<String, T>,
    /// Everything else, JSON.
    pub meta: String,
}

/// What a model's cache is made of.
#[derive(Clone, Debug)]
pub struct ModelState<T> {
    /// One for each layer with keys and values.
    pub layers: Vec<State<T>>,
    /// Its ordinal among them for each layer of the model.
    pub ordinals: Vec<Option<usize>>,
}

/// What the cache of a layer whose heads have widths of their own is made of.
#[derive(Clone, Debug)]
pub struct GroupsState<T> {
    /// One for each group.
    pub groups: Vec<State<T>>,
    /// KV heads of each group.
    pub heads: Vec<Vec<usize>>,
}

/// The scalars.
#[derive(Serialize, Deserialize)]
struct Meta {
    version: u32,
    recipe: Recipe,
    dims: [usize; 2],
    specs: [Option<CodecSpec>; 2],
    offset: usize,
    sinks: usize,
    window: usize,
    framed: bool,
    body: Vec<StoredRun>,
    tiers: Option<TierMeta>,
    /// Positions of the queries.
    #[serde(default)]
    asked: Vec<Range<usize>>,
    /// The newest first.
    #[serde(default)]
    borders: Vec<BorderMeta>,
}

/// The scalars of a [`Border`].
#[derive(Serialize, Deserialize)]
struct BorderMeta {
    at: usize,
    old: Vec<StoredRun>,
    spans: Vec<(usize, usize)>,
    framed: bool,
    asked: Vec<Range<usize>>,
    tiers: Option<(Vec<Held>, [Ema; 2])>,
}

/// Tokens of a segment, and the specs of what is packed of it.
#[derive(Serialize, Deserialize)]
struct StoredRun {
    start: usize,
    len: usize,
    specs: [Option<CodecSpec>; 2],
}

#[derive(Serialize, Deserialize)]
struct TierMeta {
    policy: TierPolicy,
    observe_every: usize,
    unobserved: usize,
    pins: Vec<Range<usize>>,
    exact: [Ema; 2],
    blocks: Vec<Held>,
    #[serde(default)]
    seen: Vec<Seen>,
}

const VERSION: u32 = 1;
const SIDES: [&str; 2] = ["keys", "values"];

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`LayerCache::state`].
    pub fn state(&self) -> Result<State<E::Tensor>> {
        let mut arrays = BTreeMap::new();
        let exact = [("sinks", &self.sinks, self.sinks_len), ("window", &self.window, self.window_len)];
        for (name, part, len) in exact {
            if let Some(part) = part {
                for (side, rows) in SIDES.iter().zip([&part.keys, &part.values]) {
                    arrays.insert(format!("{name}.{side}"), rows.slice(2, 0, len)?);
                }
            }
        }
        if let Some(queries) = &self.queries {
            arrays.insert("queries".to_string(), queries.clone());
        }
        for (side, frame) in SIDES.iter().zip(self.frames.iter().flatten()) {
            let tables = [("centre", &frame.centre), ("gain", &frame.gain), ("order", &frame.order)];
            for (name, table) in tables {
                if let Some(table) = table {
                    arrays.insert(format!("frame.{side}.{name}"), table.clone());
                }
            }
        }
        for (side, codec) in SIDES.iter().zip(&self.codecs) {
            if let Some(levels) = codec.as_ref().and_then(|c| c.fitted()) {
                let levels = Tensor::new(&[levels.len()], levels.to_vec())?;
                arrays.insert(format!("levels.{side}"), self.engine.put(&levels)?);
            }
        }
        let body = runs("body", &self.body, &mut arrays)?;
        let borders = std::iter::successors(self.border.as_ref(), |border| border.previous.as_ref());
        let borders = borders.enumerate().map(|(i, border)| border_state(i, border, &mut arrays));
        let borders = borders.collect::<Result<_>>()?;
        let meta = Meta {
            version: VERSION,
            recipe: self.recipe.clone(),
            dims: [self.shape.key_dim, self.shape.value_dim],
            specs: [0, 1].map(|i| self.codecs[i].as_ref().map(|c| *c.spec())),
            offset: self.offset,
            sinks: self.sinks_len,
            window: self.window_len,
            framed: self.frames.is_some(),
            body,
            tiers: self.tiers.as_ref().map(|t| TierMeta {
                policy: t.policy.clone(),
                observe_every: t.observe_every,
                unobserved: t.unobserved,
                pins: t.pins.clone(),
                exact: t.exact,
                blocks: t.blocks.clone(),
                seen: t.seen.clone(),
            }),
            asked: self.asked.clone(),
            borders,
        };
        let meta = serde_json::to_string(&meta).map_err(|e| misfit(e.to_string()))?;
        Ok(State { arrays, meta })
    }

    /// See [`LayerCache::from_state`].
    pub fn from_state(engine: E, state: &State<E::Tensor>) -> Result<SequenceCache<E>> {
        let meta: Meta = serde_json::from_str(&state.meta).map_err(|e| misfit(e.to_string()))?;
        if meta.version != VERSION {
            return Err(misfit(format!("version {}, this program reads {VERSION}", meta.version)));
        }
        let parts = Parts { engine: engine.clone(), arrays: &state.arrays, dims: meta.dims };
        let codecs = [parts.codec(0, meta.specs[0])?, parts.codec(1, meta.specs[1])?];
        let shape = LayerShape { key_dim: meta.dims[0], value_dim: meta.dims[1] };
        let mut cache = SequenceCache::with_codecs(engine, meta.recipe, shape, codecs)?;
        let mut known: Vec<Arc<Codec>> = cache.codecs.iter().flatten().cloned().collect();
        if let Some(tiers) = meta.tiers {
            cache = cache.with_tiers(&tiers.policy, tiers.observe_every)?;
            if let Some(made) = &mut cache.tiers {
                (made.unobserved, made.seen) = (tiers.unobserved, tiers.seen);
                (made.pins, made.exact, made.blocks) = (tiers.pins, tiers.exact, tiers.blocks);
                known.extend(made.codecs.iter().flatten().flatten().cloned());
            }
        }
        (cache.sinks, cache.window) =
            (parts.exact("sinks", meta.sinks)?, parts.exact("window", meta.window)?);
        let frames = [parts.frame(0)?, parts.frame(1)?];
        let packed = Packed { parts: &parts, known: &known, frames: &frames };
        cache.body = packed.segments("body", &meta.body)?;
        for (i, border) in meta.borders.into_iter().enumerate().rev() {
            let name = |what: &str| format!("border.{i}.{what}");
            let old = packed.segments(&name("old"), &border.old)?;
            let queries = parts.optional(&name("queries"))?;
            let block = [parts.array(&name("keys"))?, parts.array(&name("values"))?];
            let BorderMeta { at, spans, framed, asked, tiers, .. } = border;
            let previous = cache.border.take();
            let border = Border { at, block, old, spans, framed, queries, asked, tiers, previous };
            cache.border = Some(Arc::new(border));
        }
        cache.queries = parts.optional("queries")?;
        cache.asked = meta.asked;
        if let Some(n) = cache.queries.as_ref().map(|q| q.shape()[2])
            && cache.asked.is_empty()
        {
            // An older state does not say: they are those of the last tokens.
            cache.asked.push(meta.offset.saturating_sub(n)..meta.offset);
        }
        cache.frames = meta.framed.then_some(frames);
        (cache.sinks_len, cache.window_len, cache.offset) = (meta.sinks, meta.window, meta.offset);
        cache.check_parts()?;
        Ok(cache)
    }
}

/// The arrays of segments by name, and their scalars.
fn runs<T: Buffer>(
    part: &str,
    segments: &[Segment<T>],
    arrays: &mut BTreeMap<String, T>,
) -> Result<Vec<StoredRun>> {
    let mut runs = vec![];
    for (i, segment) in segments.iter().enumerate() {
        let mut specs = [None, None];
        for (k, stored) in [&segment.keys, &segment.values].into_iter().enumerate() {
            let name = |what: &str| format!("{part}.{i}.{}.{what}", SIDES[k]);
            match stored {
                Stored::Exact { rows, len } => {
                    arrays.insert(name("rows"), rows.slice(2, 0, *len)?);
                }
                Stored::Packed(codes) => {
                    arrays.insert(name("words"), codes.words().clone());
                    arrays.insert(name("scales"), codes.scales().clone());
                    specs[k] = Some(*codes.codec().spec());
                }
            }
        }
        runs.push(StoredRun { start: segment.start, len: segment.keys.len(), specs });
    }
    Ok(runs)
}

/// The arrays of border `i` by name, and its scalars.
fn border_state<T: Buffer>(
    i: usize,
    border: &Border<T>,
    arrays: &mut BTreeMap<String, T>,
) -> Result<BorderMeta> {
    let old = runs(&format!("border.{i}.old"), &border.old, arrays)?;
    for (side, rows) in SIDES.iter().zip(&border.block) {
        arrays.insert(format!("border.{i}.{side}"), rows.clone());
    }
    if let Some(queries) = &border.queries {
        arrays.insert(format!("border.{i}.queries"), queries.clone());
    }
    let Border { at, spans, framed, asked, tiers, .. } = border.clone();
    Ok(BorderMeta { at, old, spans, framed, asked, tiers })
}

impl<E: Engine + Clone> KvCache<E> {
    /// The cache taken apart; [`KvCache::from_state`] puts it together.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn state(&self) -> Result<ModelState<E::Tensor>> {
        let layers = self.layers.iter().map(LayerCache::state).collect::<Result<_>>()?;
        Ok(ModelState { layers, ordinals: self.ordinals.clone() })
    }

    /// A cache from what [`KvCache::state`] gave.
    ///
    /// # Errors
    /// As [`LayerCache::from_state`]; [`Error::Parse`] if the ordinals do not match the layers.
    pub fn from_state(engine: E, state: &ModelState<E::Tensor>) -> Result<KvCache<E>> {
        if !state.ordinals.iter().flatten().copied().eq(0..state.layers.len()) {
            return Err(misfit(format!("{} layers do not have these ordinals", state.layers.len())));
        }
        let layers = state.layers.iter().map(|s| LayerCache::from_state(engine.clone(), s));
        Ok(KvCache { layers: layers.collect::<Result<_>>()?, ordinals: state.ordinals.clone() })
    }
}

impl<E: Engine + Clone> HeadGroups<E> {
    /// The cache taken apart; [`HeadGroups::from_state`] puts it together.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn state(&self) -> Result<GroupsState<E::Tensor>> {
        let groups = self.groups.iter().map(|(_, cache)| cache.state()).collect::<Result<_>>()?;
        Ok(GroupsState { groups, heads: self.groups.iter().map(|(heads, _)| heads.clone()).collect() })
    }

    /// A cache from what [`HeadGroups::state`] gave.
    ///
    /// # Errors
    /// As [`LayerCache::from_state`]; [`Error::Parse`] if the groups do not cover every head once, or have not seen the same tokens.
    pub fn from_state(engine: E, state: &GroupsState<E::Tensor>) -> Result<HeadGroups<E>> {
        let caches = state.groups.iter().map(|s| LayerCache::from_state(engine.clone(), s));
        let caches = caches.collect::<Result<Vec<_>>>()?;
        let mut all: Vec<usize> = state.heads.concat();
        all.sort_unstable();
        let kv_heads = all.len();
        if kv_heads == 0 || caches.len() != state.heads.len() || !all.into_iter().eq(0..kv_heads) {
            return Err(misfit(format!("{} groups are not of heads {:?}", caches.len(), state.heads)));
        }
        let groups: Vec<_> = state.heads.iter().cloned().zip(caches).collect();
        let batch = |cache: &LayerCache<E>| cache.heads().map(|h| h[0]);
        let first = &groups[0].1;
        for (heads, cache) in &groups {
            let found = cache.heads().map_or(heads.len(), |h| h[1]);
            let alike = cache.offset() == first.offset()
                && batch(cache) == batch(first)
                && cache.shape() == first.shape()
                && cache.left_padding() == first.left_padding();
            if heads.is_empty() || found != heads.len() || !alike {
                let found = format!("{found} heads, {:?} sequences, offset {}", batch(cache), cache.offset());
                return Err(misfit(format!("the group of heads {heads:?} has {found}")));
            }
        }
        Ok(HeadGroups { groups, kv_heads })
    }
}

fn expect_rows<T: Buffer>(rows: &T, len: usize, dim: usize) -> Result<()> {
    match rows.shape()[..] {
        [_, _, n, d] if n == len && d == dim => Ok(()),
        _ => Err(Error::Shape { what: "rows", expected: format!("[B, H, {len}, {dim}]"), got: rows.shape() }),
    }
}
