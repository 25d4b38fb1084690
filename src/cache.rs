//! The cache of one layer while a model decodes: exact sinks, packed blocks, an exact window, with mlx-lm's contract.
//!
//! New tokens join the window; when it would grow beyond `window + 128`, its oldest 128 tokens leave it as one packed block. A call
//! with many tokens is cut at these borders, so any chunking of appends gives the same bytes and the same attention. Encoding a
//! single token never happens. A clone shares buffers until one side writes, then has its own.

use crate::attention::{Rules, Segment, Stored};
use crate::codec::Codec;
use crate::codes::{Buffer, Codes, Frame};
use crate::compressor::BLOCK;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::spec::Side;
use crate::tensor::Dtype;
use std::sync::Arc;

/// Rows by which an exact buffer grows until it has its full size.
const STEP: usize = 64;
/// Tokens up to which neighbouring packed blocks of one codec are joined into one segment.
const SEGMENT: usize = 4096;

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

/// The cache of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache<E: Engine> {
    engine: E,
    recipe: Recipe,
    shape: LayerShape,
    codecs: [Option<Arc<Codec>>; 2],
    /// Frames of keys and values, from the first block that left the window.
    frames: Option<[Frame<E::Tensor>; 2]>,
    sinks: Option<Exact<E::Tensor>>,
    sinks_len: usize,
    body: Vec<Segment<E::Tensor>>,
    window: Option<Exact<E::Tensor>>,
    window_len: usize,
    offset: usize,
}

impl<E: Engine + Clone> LayerCache<E> {
    /// An empty cache for one layer of a model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the recipe has no form for these head dims.
    pub fn new(engine: E, recipe: &Recipe, layer: usize, shape: LayerShape) -> Result<LayerCache<E>> {
        let codec = |side, dim| -> Result<Option<Arc<Codec>>> {
            recipe.spec(side, layer, dim)?.map(|spec| Codec::new(spec).map(Arc::new)).transpose()
        };
        let codecs = [codec(Side::Key, shape.key_dim)?, codec(Side::Value, shape.value_dim)?];
        LayerCache::with_codecs(engine, recipe.clone(), shape, codecs)
    }

    /// An empty cache with given codecs, for calibrated levels.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a codec is made for another head dim.
    pub fn with_codecs(
        engine: E,
        recipe: Recipe,
        shape: LayerShape,
        codecs: [Option<Arc<Codec>>; 2],
    ) -> Result<LayerCache<E>> {
        for (codec, dim) in codecs.iter().zip([shape.key_dim, shape.value_dim]) {
            if let Some(codec) = codec
                && codec.spec().head_dim != dim
            {
                let reason = format!("the layer has {dim} channels");
                return Err(Error::Unsupported { field: "codec", value: codec.spec().to_string(), reason });
            }
        }
        Ok(LayerCache {
            engine,
            recipe,
            shape,
            codecs,
            frames: None,
            sinks: None,
            sinks_len: 0,
            body: vec![],
            window: None,
            window_len: 0,
            offset: 0,
        })
    }

    /// Tokens appended so far less those trimmed: the position of the next token.
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

    /// Bytes of every buffer, allocated rows that hold no token yet included.
    pub fn nbytes(&self) -> usize {
        let exact = [&self.sinks, &self.window].into_iter().flatten();
        let exact: usize = exact.map(|e| e.keys.nbytes() + e.values.nbytes()).sum();
        let frames: usize = self.frames.iter().flatten().map(Frame::nbytes).sum();
        let levels =
            self.codecs.iter().flatten().filter_map(|c| c.fitted()).map(|l| 4 * l.len()).sum::<usize>();
        let stored = |s: &Stored<E::Tensor>| match s {
            Stored::Exact { rows, .. } => rows.nbytes(),
            Stored::Packed(codes) => codes.words().nbytes() + codes.scales().nbytes(),
        };
        exact + frames + levels + self.body.iter().map(|s| stored(&s.keys) + stored(&s.values)).sum::<usize>()
    }

    /// Appends keys [B, H, L, D] and values [B, H, L, Dv] and gives all of them dense, in their dtype: the oracle, always right.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if they do not fit what the cache holds; the cache is then as it was.
    pub fn update_and_fetch(
        &mut self,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<(E::Tensor, E::Tensor)> {
        let total = self.check(keys, values)?;
        let mut done = 0;
        while done < total {
            done += self.append_piece(keys, values, done)?;
        }
        self.fetch()
    }

    /// Appends keys and values and attends with queries [B, Hq, L, D]: [B, Hq, L, Dv] in the dtype of the queries.
    ///
    /// A mask in `rules` covers all tokens held after the append. L may exceed the room of the window: the call is then cut at block
    /// borders, and every query sees what it would have seen had the tokens come one by one.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit; the cache is then as it was.
    pub fn update_and_attend(
        &mut self,
        queries: &E::Tensor,
        keys: &E::Tensor,
        values: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        let total = self.check(keys, values)?;
        let q = queries.shape();
        if q.len() != 4 || q[2] != total || total == 0 {
            let expected = format!("[B, Hq, {total}, D] with at least one token");
            return Err(Error::Shape { what: "queries", expected, got: q });
        }
        let before = self.len();
        let tokens = before + total;
        if let Some(mask) = &rules.mask
            && (mask.shape().len() != 4 || mask.shape()[2..] != [total, tokens])
        {
            let expected = format!("[B or 1, Hq or 1, {total}, {tokens}]");
            return Err(Error::Shape { what: "mask", expected, got: mask.shape() });
        }
        let mut outs = vec![];
        let mut done = 0;
        while done < total {
            let n = self.append_piece(keys, values, done)?;
            let mut piece = rules.clone();
            if let Some(mask) = &rules.mask {
                piece.mask = Some(mask.slice(2, done, done + n)?.slice(3, 0, before + done + n)?);
            }
            outs.push(self.engine.attend(&self.segments(), &queries.slice(2, done, done + n)?, &piece)?);
            done += n;
        }
        if outs.len() == 1 { Ok(outs.remove(0)) } else { E::Tensor::concat(2, &outs) }
    }

    /// Attends without appending.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit, or the cache is empty.
    pub fn attend(&self, queries: &E::Tensor, rules: &Rules<E::Tensor>) -> Result<E::Tensor> {
        self.engine.attend(&self.segments(), queries, rules)
    }

    /// All keys and values dense, in the dtype they came in.
    ///
    /// # Errors
    /// [`Error::Shape`] if the cache has never held a token.
    pub fn fetch(&self) -> Result<(E::Tensor, E::Tensor)> {
        let Some(window) = &self.window else {
            return Err(Error::Shape { what: "cache", expected: "at least one append".into(), got: vec![0] });
        };
        let dtypes = [self.engine.dtype(&window.keys)?, self.engine.dtype(&window.values)?];
        let dense = |s: &Stored<E::Tensor>, dtype: Dtype| match s {
            Stored::Exact { rows, len } => rows.slice(2, 0, *len),
            Stored::Packed(codes) => self.engine.decode(codes, dtype),
        };
        let segments = self.segments();
        let side =
            |f: &dyn Fn(&Segment<E::Tensor>) -> &Stored<E::Tensor>, dtype: Dtype| -> Result<E::Tensor> {
                let parts = segments.iter().map(|s| dense(f(s), dtype)).collect::<Result<Vec<_>>>()?;
                if parts.is_empty() {
                    return if dtype == dtypes[0] {
                        window.keys.slice(2, 0, 0)
                    } else {
                        window.values.slice(2, 0, 0)
                    };
                }
                E::Tensor::concat(2, &parts)
            };
        Ok((side(&|s| &s.keys, dtypes[0])?, side(&|s| &s.values, dtypes[1])?))
    }

    /// The parts in token order. Buffers are shared, not copied.
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

    /// Drops the last `n` tokens, exact or packed, and says how many were dropped (all, if there are fewer).
    ///
    /// # Errors
    /// The engine's own; the cache is then as it was.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = n.min(self.len());
        let mut left = n;
        let from_window = left.min(self.window_len);
        left -= from_window;
        let mut body = self.body.clone();
        let mut rescued = None;
        while left > 0 {
            let Some(last) = body.pop() else { break };
            let len = last.keys.len();
            if len <= left {
                left -= len;
                continue;
            }
            // Tokens that are encoded together with trimmed ones go back to the window as they decode.
            let (keep, tile) = (len - left, self.recipe.tile());
            let whole = keep / tile * tile;
            if whole < keep {
                let dense = self.dense(&cut(&last, whole - whole % tile, (whole + tile).min(len))?)?;
                rescued = Some((dense, keep - whole));
            }
            if whole > 0 {
                body.push(cut(&last, 0, whole)?);
            }
            left = 0;
        }
        self.body = body;
        self.window_len -= from_window;
        self.sinks_len -= left;
        self.offset -= n;
        if let Some(((keys, values), len)) = rescued {
            self.write_window(&keys.slice(2, 0, len)?, &values.slice(2, 0, len)?)?;
        }
        if self.body.is_empty() {
            // What comes next is a first block again.
            self.frames = None;
        }
        Ok(n)
    }

    fn dense(&self, s: &Segment<E::Tensor>) -> Result<(E::Tensor, E::Tensor)> {
        let one = |s: &Stored<E::Tensor>| match s {
            Stored::Exact { rows, len } => rows.slice(2, 0, *len),
            Stored::Packed(codes) => self.engine.decode(codes, Dtype::F32),
        };
        Ok((one(&s.keys)?, one(&s.values)?))
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

    /// Appends tokens from `start` on, up to the next border, and says how many.
    fn append_piece(&mut self, keys: &E::Tensor, values: &E::Tensor, start: usize) -> Result<usize> {
        let total = keys.shape()[2];
        let piece = |n: usize| -> Result<(E::Tensor, E::Tensor)> {
            Ok((keys.slice(2, start, start + n)?, values.slice(2, start, start + n)?))
        };
        let at_start = self.body.is_empty() && self.window_len == 0;
        if at_start && self.sinks_len < self.recipe.sinks {
            let n = (self.recipe.sinks - self.sinks_len).min(total - start);
            let (k, v) = piece(n)?;
            let mut sinks = self.sinks.take();
            let written = self.write(&mut sinks, self.sinks_len, self.recipe.sinks, &k, &v);
            self.sinks = sinks;
            written?;
            if self.window.is_none() {
                // An empty window tells the dtype and the heads from now on.
                let mut window = None;
                self.write(&mut window, 0, self.full_window(), &k.slice(2, 0, 0)?, &v.slice(2, 0, 0)?)?;
                self.window = window;
            }
            self.sinks_len += n;
            self.offset += n;
            return Ok(n);
        }
        if self.window_len >= self.full_window() {
            self.flush()?;
        }
        let n = (self.full_window() - self.window_len).min(total - start);
        let (k, v) = piece(n)?;
        self.write_window(&k, &v)?;
        self.offset += n;
        Ok(n)
    }

    /// Tokens that the window holds before a block leaves it; a layer without a codec keeps everything there.
    fn full_window(&self) -> usize {
        if self.codecs.iter().all(Option::is_none) { usize::MAX } else { self.recipe.window + BLOCK }
    }

    fn write_window(&mut self, keys: &E::Tensor, values: &E::Tensor) -> Result<()> {
        let mut window = self.window.take();
        let written = self.write(&mut window, self.window_len, self.full_window(), keys, values);
        self.window = window;
        written?;
        self.window_len += keys.shape()[2];
        Ok(())
    }

    /// Writes rows behind the first `len` of an exact buffer, which grows in steps up to `most` rows.
    fn write(
        &self,
        exact: &mut Option<Exact<E::Tensor>>,
        len: usize,
        most: usize,
        keys: &E::Tensor,
        values: &E::Tensor,
    ) -> Result<()> {
        let needed = len + keys.shape()[2];
        let capacity = exact.as_ref().map_or(0, |e| e.capacity);
        if needed > capacity || exact.is_none() {
            // Doubling keeps the copying of a layer that packs nothing linear.
            let grown = needed.max(2 * len.min(most)).next_multiple_of(STEP).min(most.max(needed));
            let grow = |old: Option<&E::Tensor>, like: &E::Tensor| -> Result<E::Tensor> {
                let s = like.shape();
                let dtype = self.engine.dtype(old.unwrap_or(like))?;
                let mut new = self.engine.zeros(dtype, &[s[0], s[1], grown, s[3]])?;
                if let Some(old) = old {
                    self.engine.write(&mut new, 0, &old.slice(2, 0, len)?)?;
                }
                Ok(new)
            };
            let (old_k, old_v) = (exact.as_ref().map(|e| &e.keys), exact.as_ref().map(|e| &e.values));
            *exact = Some(Exact { keys: grow(old_k, keys)?, values: grow(old_v, values)?, capacity: grown });
        }
        let Some(exact) = exact else { return Ok(()) };
        if keys.shape()[2] > 0 {
            self.engine.write(&mut exact.keys, len, keys)?;
            self.engine.write(&mut exact.values, len, values)?;
        }
        Ok(())
    }

    /// Packs the oldest block of the window.
    fn flush(&mut self) -> Result<()> {
        let Some(window) = &self.window else { return Ok(()) };
        let (keys, values) = (window.keys.slice(2, 0, BLOCK)?, window.values.slice(2, 0, BLOCK)?);
        let frames = match &self.frames {
            Some(frames) => frames.clone(),
            None => {
                let frame = |codec: &Option<Arc<Codec>>, centred: bool, block: &E::Tensor| match codec {
                    Some(codec) => self.engine.frame(codec, centred, block, None),
                    None => Ok(Frame::default()),
                };
                [frame(&self.codecs[0], self.recipe.centred, &keys)?, frame(&self.codecs[1], false, &values)?]
            }
        };
        let pack = |codec: &Option<Arc<Codec>>, frame: &Frame<E::Tensor>, block: &E::Tensor| match codec {
            Some(codec) => self.engine.encode(codec, frame.clone(), block).map(Stored::Packed),
            None => Ok(Stored::Exact { rows: self.engine.compact(block)?, len: BLOCK }),
        };
        let start = self.offset - self.window_len;
        let (k, v) = (pack(&self.codecs[0], &frames[0], &keys)?, pack(&self.codecs[1], &frames[1], &values)?);
        let segment = Segment { start, keys: k, values: v };
        let rest = [&window.keys, &window.values].map(|w| w.slice(2, BLOCK, self.window_len));
        let [rest_k, rest_v] = rest;
        let (rest_k, rest_v) = (rest_k?, rest_v?);
        let mut moved = window.clone();
        if self.window_len > BLOCK {
            self.engine.write(&mut moved.keys, 0, &rest_k)?;
            self.engine.write(&mut moved.values, 0, &rest_v)?;
        }
        // Nothing can fail from here on.
        self.window = Some(moved);
        self.window_len -= BLOCK;
        self.frames = Some(frames);
        match self.body.last().map(|last| join(last, &segment)) {
            Some(Some(joined)) => *self.body.last_mut().expect("a last segment") = joined?,
            _ => self.body.push(segment),
        }
        Ok(())
    }
}

/// One segment from two neighbours, if both sides can be joined and the result is not too long.
fn join<T: Buffer>(a: &Segment<T>, b: &Segment<T>) -> Option<Result<Segment<T>>> {
    if a.keys.len() + b.keys.len() > SEGMENT || a.start + a.keys.len() != b.start {
        return None;
    }
    let side = |a: &Stored<T>, b: &Stored<T>| -> Option<Result<Stored<T>>> {
        match (a, b) {
            (Stored::Packed(a), Stored::Packed(b)) if a.codec().same(b.codec()) => {
                Some(Codes::concat(&[a.clone(), b.clone()]).map(Stored::Packed))
            }
            (Stored::Exact { rows: a, len: n }, Stored::Exact { rows: b, len: m }) => {
                let parts = a.slice(2, 0, *n).and_then(|a| Ok([a, b.slice(2, 0, *m)?]));
                Some(parts.and_then(|p| T::concat(2, &p)).map(|rows| Stored::Exact { rows, len: n + m }))
            }
            _ => None,
        }
    };
    let (keys, values) = (side(&a.keys, &b.keys)?, side(&a.values, &b.values)?);
    Some(keys.and_then(|keys| Ok(Segment { start: a.start, keys, values: values? })))
}

/// The tokens `from..to` of a segment.
fn cut<T: Buffer>(s: &Segment<T>, from: usize, to: usize) -> Result<Segment<T>> {
    let side = |s: &Stored<T>| -> Result<Stored<T>> {
        Ok(match s {
            Stored::Exact { rows, .. } => Stored::Exact { rows: rows.slice(2, from, to)?, len: to - from },
            Stored::Packed(codes) => Stored::Packed(codes.slice(from, to)?),
        })
    };
    Ok(Segment { start: s.start + from, keys: side(&s.keys)?, values: side(&s.values)? })
}
