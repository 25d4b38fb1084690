//! The layers of a file, of either layout: every class that both releases of mlx-lm can load, and its checks.
//!
//! Both layouts hold the same arrays and counters in other places, so a class is read once, from its two arrays
//! and its counters by name ([`Spec`]).

use super::affine::check_codec;
use super::class::{KvClass, Pair};
use super::layer::{Layer, packed_class, rows_of};
use super::ring::Ring;
use super::source::OpenedFile;
use super::swift;
use super::tree::{Node, strings};
use super::{Fields, Layout, Spec, fields_of};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Classes of mlx-lm that hold several sequences.
const BATCH: [&str; 2] = ["BatchKVCache", "BatchRotatingKVCache"];

impl OpenedFile<'_> {
    /// The layers, each with an error of its own: an unknown class does not hide the others.
    pub(super) fn layers(&self) -> impl Iterator<Item = Result<Layer>> {
        self.classes.iter().enumerate().map(|(i, class)| {
            let none = Node::new();
            let state = self.states.get(&i).unwrap_or(&none);
            let layer = self.layer(i, class, state, self.metas.get(&i))?;
            layer.check().map_err(|e| self.bad(i, class, e))?;
            Ok(layer)
        })
    }

    fn bad(&self, layer: usize, class: &str, detail: impl std::fmt::Display) -> Error {
        self.file.bad(format!("layer {layer} ({class}): {detail}"))
    }

    /// Why a class is not among those that are read.
    fn unknown(&self, layer: usize, class: &str) -> Error {
        let (path, class) = (self.file.path().into(), class.to_string());
        if BATCH.contains(&class.as_str()) {
            Error::BatchCache { path, layer, class }
        } else {
            Error::UnknownClass { path, layer, class }
        }
    }

    fn layer(&self, i: usize, class: &str, state: &Node, meta: Option<&Node>) -> Result<Layer> {
        if let (Layout::V031, Some(mark)) = (self.layout, swift::mark(class, state, meta)) {
            return Err(self.bad(i, class, swift::refusal(mark)));
        }
        // MambaCache is what releases before 0.31 called an ArraysCache of two.
        if class == "ArraysCache" || (class == "MambaCache" && self.layout == Layout::V031) {
            return self.arrays(i, class, state);
        }
        if class == "CacheList" {
            return self.list(i, state, meta);
        }
        if packed_class(class).is_some() {
            return self.opaque(class, state, None);
        }
        let spec = fields_of(class).ok_or_else(|| self.unknown(i, class))?;
        let bad = |detail: String| self.bad(i, class, detail);
        let counters = match self.layout {
            Layout::V031 => 0,
            Layout::V032 => spec.v032.len(),
        };
        let parts = state.children().filter(|c| c.len() == 2 + counters).ok_or_else(|| {
            let found = state.first_leaves(12);
            bad(format!("expected keys, values and {counters} counters, found tensors {found:?}"))
        })?;
        let fields = match self.layout {
            Layout::V032 => self.counters_032(spec, &parts[2..]).map_err(bad)?,
            Layout::V031 => counters_031(spec, meta).map_err(bad)?,
        };
        let get = |name: &str| fields.get(name).copied();
        let none = [self.is_none(parts[0]), self.is_none(parts[1])];
        let (empty, rows) = (none[0], token_rows(class, &fields, none).map_err(bad)?);
        // The rows that are tokens; the rest of an allocated buffer is cut off.
        let cut = |held: usize| match rows {
            Some(rows) if rows > held => Err(bad(format!("offset = {rows}, but only {held} rows"))),
            Some(rows) => Ok(rows),
            None => Ok(held),
        };
        let plain = |limit: usize| -> Result<Option<Pair<Tensor>>> {
            if empty {
                return Ok(None);
            }
            let pair = Pair { keys: self.tensor(parts[0])?, values: self.tensor(parts[1])? };
            pair.try_map(|x| match x.shape() {
                [_, _, held, _] => x.slice(2, 0, cut(*held)?.min(limit)),
                other => Err(bad(format!("array of shape {other:?}, expected [B, H, T, D]"))),
            })
            .map(Some)
        };
        match class {
            "QuantizedKVCache" => {
                let (group_size, bits) = (get("group_size").unwrap_or(0), get("bits").unwrap_or(0));
                let kv = (!empty).then(|| {
                    let pair = Pair { keys: self.packed(parts[0])?, values: self.packed(parts[1])? };
                    check_codec(group_size, bits).map_err(|e| bad(e.to_string()))?;
                    pair.keys.check(group_size, bits).map_err(|e| bad(format!("keys: {e}")))?;
                    pair.values.check(group_size, bits).map_err(|e| bad(format!("values: {e}")))?;
                    pair.try_map(|p| p.cut(cut(rows_of(&p.words))?))
                });
                Ok(Layer::Quantized { kv: kv.transpose()?, group_size, bits })
            }
            "RotatingKVCache" => {
                let field = |name| get(name).unwrap_or(0);
                let (keep, max_size) = (field("keep"), field("max_size"));
                let ring = Ring { keep, max_size, offset: field("offset"), idx: field("idx") };
                Ok(Layer::Rotating { kv: plain(ring.offset)?, ring })
            }
            "ChunkedKVCache" if self.layout == Layout::V031 && get("start_position") != Some(0) => {
                self.opaque(class, state, meta)
            }
            _ => Ok(Layer::Kv { class: kv_class(class, &fields), kv: plain(usize::MAX)? }),
        }
    }

    fn arrays(&self, i: usize, class: &str, state: &Node) -> Result<Layer> {
        let shape = || self.bad(i, class, "its tensors are not a list of arrays");
        let parts = state.children().filter(|c| !c.is_empty()).ok_or_else(shape)?;
        let list = |node: &Node| {
            let parts = node.children().filter(|c| !c.is_empty()).ok_or_else(shape)?;
            parts.into_iter().map(|part| self.optional(part)).collect::<Result<Vec<_>>>()
        };
        match (self.layout, &parts[..]) {
            (Layout::V031, _) => {
                Ok(Layer::Arrays { arrays: list(state)?, left_padding: None, lengths: None })
            }
            (Layout::V032, [arrays, left_padding, lengths]) => Ok(Layer::Arrays {
                arrays: list(arrays)?,
                left_padding: self.optional(left_padding)?,
                lengths: self.optional(lengths)?,
            }),
            _ => Err(shape()),
        }
    }

    fn list(&self, i: usize, state: &Node, meta: Option<&Node>) -> Result<Layer> {
        let bad = |detail: &str| self.bad(i, "CacheList", detail);
        let parts = state.children().filter(|c| !c.is_empty()).ok_or_else(|| bad("no list of caches"))?;
        let mut layers = Vec::with_capacity(parts.len());
        match self.layout {
            Layout::V032 => {
                for part in parts {
                    let (state, name) = match part.children().as_deref() {
                        Some(&[state, Node::Leaf(name)]) => (state, *name),
                        _ => return Err(bad("a member is not (state, class name)")),
                    };
                    layers.push(self.layer(i, &self.string(name)?, state, None)?);
                }
            }
            Layout::V031 => {
                let (names, metas) = match meta.and_then(Node::children).as_deref() {
                    Some(&[names, metas]) => (strings(names), metas.children()),
                    _ => (None, None),
                };
                let (Some(names), Some(metas)) = (names, metas) else {
                    return Err(bad("its metadata is not (class names, meta states)"));
                };
                if names.len() != parts.len() || metas.len() != parts.len() {
                    let found = [parts.len(), names.len(), metas.len()];
                    return Err(bad(&format!("states, class names and meta states differ: {found:?}")));
                }
                for ((part, name), meta) in parts.into_iter().zip(names).zip(metas) {
                    layers.push(self.layer(i, name, part, Some(meta))?);
                }
            }
        }
        Ok(Layer::List(layers))
    }

    fn opaque(&self, class: &str, state: &Node, meta: Option<&Node>) -> Result<Layer> {
        let (mut names, mut values) = (Vec::new(), Vec::new());
        state.leaves("", &mut names);
        if let Some(meta) = meta {
            meta.leaves("", &mut values);
        }
        let tensors = names.into_iter().map(|(path, name)| Ok((path, self.file.raw(name)?)));
        let meta = values.into_iter().map(|(path, value)| (path, value.to_string())).collect();
        Ok(Layer::Opaque { class: class.into(), tensors: tensors.collect::<Result<_>>()?, meta })
    }

    fn counters_032(&self, spec: &Spec, nodes: &[&Node]) -> Result<Fields, String> {
        let mut fields = Fields::new();
        for (&field, node) in spec.v032.iter().zip(nodes) {
            let name = node.leaf().filter(|name| self.kinds.get(name) == Some(&"scalar"));
            let name = name.ok_or_else(|| format!("{field} is not stored as a scalar"))?;
            let values = self.file.integers(name).map_err(|e| e.to_string())?;
            match values[..] {
                [value] => fields.insert(field, counter(field, &value.to_string())?),
                _ => return Err(format!("{field} has {} values", values.len())),
            };
        }
        Ok(fields)
    }
}

fn kv_class(class: &str, fields: &Fields) -> KvClass {
    match (fields.get("chunk_size"), fields.get("start_position")) {
        (Some(&chunk_size), Some(&start_position)) => KvClass::Chunked { chunk_size, start_position },
        _ if class == "ConcatenateKVCache" => KvClass::Concatenate,
        _ => KvClass::Kv,
    }
}

/// Rows that are tokens, where the counters say how many; `none` says which of keys and values are not there.
fn token_rows(class: &str, fields: &Fields, none: [bool; 2]) -> Result<Option<usize>, String> {
    if none[0] != none[1] {
        return Err("only one of keys and values is None".into());
    }
    let start = fields.get("start_position").copied().unwrap_or(0);
    let rows = match fields.get("offset") {
        Some(offset) if class != "RotatingKVCache" => Some(
            offset
                .checked_sub(start)
                .ok_or_else(|| format!("offset = {offset} is before start_position = {start}"))?,
        ),
        _ => None,
    };
    if none[0] && rows.is_some_and(|rows| rows > 0) {
        return Err(format!("offset = {rows:?}, but there are no rows"));
    }
    Ok(rows)
}

fn counters_031(spec: &Spec, meta: Option<&Node>) -> Result<Fields, String> {
    let texts = match meta {
        Some(meta) if spec.v031.is_empty() => meta.leaf().filter(|s| s.is_empty()).map(|_| Vec::new()),
        Some(meta) => strings(meta).filter(|s| s.len() == spec.v031.len()),
        None => None,
    };
    let texts = texts.ok_or_else(|| format!("its meta state is not {:?}", spec.v031))?;
    spec.v031.iter().zip(texts).map(|(&field, text)| Ok((field, counter(field, text)?))).collect()
}

fn counter(field: &str, text: &str) -> Result<usize, String> {
    // mlx-lm holds counters in arrays of i64.
    let value = text.parse::<i64>().ok().and_then(|value| usize::try_from(value).ok());
    value.ok_or_else(|| format!("{field} = {text:?} is not a count that fits 63 bits"))
}
