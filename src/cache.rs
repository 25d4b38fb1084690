//! The cache of one layer while a model decodes: exact sinks, packed blocks, an exact window, with mlx-lm's contract.
//!
//! New tokens join the window; when it would grow beyond `window + 128`, its oldest 128 tokens leave it as one packed block. A call
//! with many tokens is cut at these borders, so any chunking of appends gives the same bytes and the same attention. Encoding a
//! single token never happens. A clone shares buffers until one side writes, then has its own.
//!
//! The newest tokens may be drafts that are rejected: trimming them takes back what they have caused, see [`LayerCache::trim`].
//!
//! Keys come with their rotary embedding. Tokens keep their positions when others are evicted: there is no context shift, which would
//! turn packed keys to new positions.

mod append;
mod batch;
mod capacity;
mod consistent;
mod draft;
mod heads;
mod held;
mod layer;
mod mask;
mod model;
mod models;
mod padding;
mod report;
mod segments;
mod state;
mod tiers;
mod trim;
mod undo;

pub use capacity::{CapacityPlan, PlanPart};
pub use heads::HeadGroups;
pub use layer::LayerCache;
pub use mask::Mask;
pub use model::{KvCache, KvLayer};
pub use models::{Claim, Model, ModelPlan, Sliding, models};
pub use report::{LayerReport, PartReport};
pub use state::{GroupsState, ModelState, State};
pub use tiers::{OBSERVE_EVERY, tier_codecs};

use crate::codec::Codec;
use crate::codec::codes::{Buffer, Frame};
use crate::engine::Engine;
use crate::engine::attention::{Rules, Segment, Stored};
use crate::error::{Error, Result};
use crate::policy::BlockFacts;
use crate::recipe::Recipe;
use crate::spec::Side;
use crate::tensor::Dtype;
use std::ops::Range;
use std::sync::Arc;
use undo::Undo;

/// Channels of the keys and values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

/// Exact rows of one side, [B, H, capacity, D].
#[derive(Clone, Debug)]
struct Exact<T> {
    keys: T,
    values: T,
    capacity: usize,
}

/// The cache of sequences of one length in one layer.
#[derive(Clone, Debug)]
struct SequenceCache<E: Engine> {
    engine: E,
    recipe: Recipe,
    shape: LayerShape,
    codecs: [Option<Arc<Codec>>; 2],
    /// Frames of keys and values, from the first block that left the window.
    frames: Option<[Frame<E::Tensor>; 2]>,
    /// Queries [B, Hq, n, D] so far, until the gains of equalised keys are made from them.
    queries: Option<E::Tensor>,
    /// Their positions, in runs.
    asked: Vec<Range<usize>>,
    sinks: Option<Exact<E::Tensor>>,
    sinks_len: usize,
    body: Vec<Segment<E::Tensor>>,
    window: Option<Exact<E::Tensor>>,
    window_len: usize,
    offset: usize,
    tiers: Option<tiers::Tiers>,
    /// What the newest block was, as long as the tokens behind its border may be taken back.
    border: Option<Arc<draft::Border<E::Tensor>>>,
}

impl<E: Engine + Clone> SequenceCache<E> {
    /// See [`LayerCache::new`].
    pub fn new(engine: E, recipe: &Recipe, layer: usize, shape: LayerShape) -> Result<SequenceCache<E>> {
        let codec = |side, dim| -> Result<Option<Arc<Codec>>> {
            recipe.spec(side, layer, dim)?.map(|spec| Codec::new(spec).map(Arc::new)).transpose()
        };
        let codecs = [codec(Side::Key, shape.key_dim)?, codec(Side::Value, shape.value_dim)?];
        SequenceCache::with_codecs(engine, recipe.clone(), shape, codecs)
    }

    /// See [`LayerCache::with_codecs`].
    pub fn with_codecs(
        engine: E,
        recipe: Recipe,
        shape: LayerShape,
        codecs: [Option<Arc<Codec>>; 2],
    ) -> Result<SequenceCache<E>> {
        for (codec, dim) in codecs.iter().zip([shape.key_dim, shape.value_dim]) {
            if let Some(codec) = codec
                && codec.spec().head_dim != dim
            {
                let reason = format!("the layer has {dim} channels");
                return Err(Error::Unsupported { field: "codec", value: codec.spec().to_string(), reason });
            }
        }
        Ok(SequenceCache {
            engine,
            recipe,
            shape,
            codecs,
            frames: None,
            queries: None,
            asked: vec![],
            sinks: None,
            sinks_len: 0,
            body: vec![],
            window: None,
            window_len: 0,
            offset: 0,
            tiers: None,
            border: None,
        })
    }

    /// See [`LayerCache::offset`].
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.sinks_len + self.body.iter().map(|s| s.keys.len()).sum::<usize>() + self.window_len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Checks the arrays of [`LayerCache::update_and_attend`].
    fn check_attend(
        &self,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<()> {
        let total = self.check(keys, values)?;
        let (q, k) = (queries.shape(), keys.shape());
        let fits = matches!(q[..], [b, hq, l, d]
            if b == k[0] && hq > 0 && hq % k[1] == 0 && l == total && d == self.shape.key_dim);
        if !fits || total == 0 {
            let (b, h, d) = (k[0], k[1], self.shape.key_dim);
            let expected = format!("[{b}, a multiple of {h}, {total}, {d}] with at least one token");
            return Err(Error::Shape { what: "queries", expected, got: q });
        }
        let tokens = self.offset + total;
        if let Some(mask) = &rules.mask
            && (mask.shape().len() != 4 || mask.shape()[2..] != [total, tokens])
        {
            let expected = format!("[B or 1, Hq or 1, {total}, {tokens}]");
            return Err(Error::Shape { what: "mask", expected, got: mask.shape() });
        }
        Ok(())
    }

    /// Appends checked tokens border by border and attends at each; see [`LayerCache::update_and_attend`].
    fn append_and_attend(
        &mut self,
        undo: &mut Undo<E::Tensor>,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        let (total, mut done, mut outs) = (keys.shape()[2], 0, vec![]);
        while done < total {
            let n = self.append_piece(undo, keys, values, done)?;
            let mut piece = rules.clone();
            if let Some(mask) = &rules.mask {
                piece.mask = Some(self.held_columns(&mask.slice(2, done, done + n)?)?);
            }
            let q = queries.slice(2, done, done + n)?;
            outs.push(self.engine.attend(&self.segments(), &q, &piece)?);
            self.keep_queries(&q)?;
            self.observe(undo, n, &q, &piece)?;
            done += n;
        }
        if outs.len() == 1 { Ok(outs.remove(0)) } else { E::Tensor::concat(2, &outs) }
    }

    /// The columns of a mask over positions that belong to tokens held.
    fn held_columns(&self, mask: &E::Tensor) -> Result<E::Tensor> {
        let mut runs: Vec<(usize, usize)> = vec![];
        for s in self.segments() {
            let end = s.start + s.keys.len();
            match runs.last_mut() {
                Some(run) if run.1 == s.start => run.1 = end,
                _ => runs.push((s.start, end)),
            }
        }
        let parts = runs.iter().map(|r| mask.slice(3, r.0, r.1)).collect::<Result<Vec<_>>>()?;
        if parts.len() == 1 { Ok(parts[0].clone()) } else { E::Tensor::concat(3, &parts) }
    }

    /// See [`LayerCache::attend`].
    pub fn attend(&self, queries: &E::Tensor, rules: &Rules<E::Tensor>) -> Result<E::Tensor> {
        self.engine.attend(&self.segments(), queries, rules)
    }

    /// See [`LayerCache::fetch`]; `evicted` are segments that are given besides those held.
    fn fetch(&self, evicted: &[Segment<E::Tensor>]) -> Result<(E::Tensor, E::Tensor)> {
        let Some(window) = &self.window else {
            return Err(Error::Shape { what: "cache", expected: "at least one append".into(), got: vec![0] });
        };
        let dtypes = [self.engine.dtype(&window.keys)?, self.engine.dtype(&window.values)?];
        let dense = |s: &Stored<E::Tensor>, dtype: Dtype| match s {
            Stored::Exact { rows, len } => self.cast(&rows.slice(2, 0, *len)?, dtype),
            Stored::Packed(codes) => self.engine.decode(codes, dtype),
        };
        let (mut keys, mut values) = (vec![window.keys.slice(2, 0, 0)?], vec![window.values.slice(2, 0, 0)?]);
        for segment in self.segments_with(evicted) {
            keys.push(dense(&segment.keys, dtypes[0])?);
            values.push(dense(&segment.values, dtypes[1])?);
        }
        Ok((E::Tensor::concat(2, &keys)?, E::Tensor::concat(2, &values)?))
    }

    /// See [`LayerCache::segments`].
    pub fn segments(&self) -> Vec<Segment<E::Tensor>> {
        let exact = |e: &Exact<E::Tensor>, len: usize, start: usize| Segment {
            start,
            keys: Stored::Exact { rows: e.keys.clone(), len },
            values: Stored::Exact { rows: e.values.clone(), len },
        };
        let mut list = vec![];
        if let Some(sinks) = self.sinks.as_ref().filter(|_| self.sinks_len > 0) {
            list.push(exact(sinks, self.sinks_len, 0));
        }
        list.extend(self.body.iter().cloned());
        if let Some(window) = self.window.as_ref().filter(|_| self.window_len > 0) {
            list.push(exact(window, self.window_len, self.offset - self.window_len));
        }
        list
    }

    /// The parts, and others that were dropped, in token order.
    fn segments_with(&self, evicted: &[Segment<E::Tensor>]) -> Vec<Segment<E::Tensor>> {
        let mut all = self.segments();
        all.extend(evicted.iter().cloned());
        all.sort_by_key(|s| s.start);
        all
    }

    /// Makes the empty window, which tells dtype and heads, before the first token.
    fn open(&mut self, undo: &mut Undo<E::Tensor>, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        if self.window.is_none() {
            let empty = self.room(keys, values, 0)?;
            undo.replace_window(self, empty);
        }
        Ok(())
    }

    /// Checks new tokens against the cache and gives their number.
    fn check(&self, keys: &E::Tensor, values: &E::Tensor) -> Result<usize> {
        let (k, v) = (keys.shape(), values.shape());
        let LayerShape { key_dim, value_dim } = self.shape;
        let held = self.window.as_ref().map(|w| w.keys.shape());
        let fits = |s: &[usize], dim: usize| {
            s.len() == 4
                && s[3] == dim
                && held.as_ref().is_none_or(|h| s[..2] == h[..2])
                && s[0] > 0
                && s[1] > 0
        };
        let heads = held.as_ref().map_or("B, H".to_string(), |h| format!("{}, {}", h[0], h[1]));
        if !fits(&k, key_dim) {
            return Err(Error::Shape { what: "keys", expected: format!("[{heads}, L, {key_dim}]"), got: k });
        }
        if !fits(&v, value_dim) || v[..3] != k[..3] {
            let expected = format!("[{}, {}, {}, {value_dim}]", k[0], k[1], k[2]);
            return Err(Error::Shape { what: "values", expected, got: v });
        }
        self.engine.dtype(keys)?;
        self.engine.dtype(values)?;
        Ok(k[2])
    }
}
