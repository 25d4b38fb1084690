//! Layers of a compressed file, every part checked against the manifest: shapes first, from the header alone, then what they hold.

use super::manifest::{LayerManifest, MOST, PackedManifest, SideManifest};
use super::{Entry, Shell};
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::compressor::{CompressedLayer, CompressedSide};
use crate::error::{Error, Result};
use crate::io::container::Container;
use crate::io::prompt_cache::{Layer, affine};
use crate::recipe::Recipe;
use crate::spec::{Budget, CodecSpec, Side};
use crate::tensor::Tensor;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Reads one entry.
pub(super) struct Reader<'a> {
    pub(super) file: &'a Container,
    pub(super) recipe: &'a Recipe,
    /// Place in the file, `3` or `3.1` inside a list.
    pub(super) at: String,
    /// Index of the layer in the model.
    pub(super) layer: usize,
    /// Its ordinal among the layers with keys and values.
    pub(super) kv_layer: usize,
    /// Of the codecs of the whole file.
    pub(super) budget: &'a RefCell<Budget>,
}

impl Reader<'_> {
    pub(super) fn entry(&self, manifest: LayerManifest) -> Result<Entry> {
        // Every raw tensor is used once and in order, so that a layer costs no more than its bytes in the file.
        let next = Cell::new(0);
        let raw = |n: usize| {
            if next.replace(n + 1) != n {
                return Err(self.bad(format!("raw tensor {n} is out of order")));
            }
            self.file.raw(&format!("{}.raw.{n}", self.at))
        };
        let optional = |n: Option<usize>| n.map(raw).transpose();
        let entry = match manifest {
            LayerManifest::Packed(packed) => return self.packed(*packed),
            LayerManifest::Empty { shell } => Entry::Other(match *shell {
                Shell::Plain(class) => Layer::Kv { class, kv: None },
                Shell::Rotating(ring) => Layer::Rotating { kv: None, ring },
                Shell::Quantized { group_size, bits, .. } => Layer::Quantized { kv: None, group_size, bits },
            }),
            LayerManifest::Arrays(m) => {
                if m.arrays.len() > MOST {
                    return Err(self.bad(format!("{} arrays, at most {MOST} are read", m.arrays.len())));
                }
                Entry::Other(Layer::Arrays {
                    arrays: m.arrays.into_iter().map(optional).collect::<Result<_>>()?,
                    left_padding: optional(m.left_padding)?,
                    lengths: optional(m.lengths)?,
                })
            }
            LayerManifest::Opaque(m) => {
                let tensors = m.tensors.into_iter().map(|(name, n)| Ok((name, raw(n)?)));
                let (class, tensors) = (m.class, tensors.collect::<Result<_>>()?);
                Entry::Other(Layer::Opaque { class, tensors, meta: m.meta })
            }
            LayerManifest::List(list) => {
                let inner = |(i, m)| Reader { at: format!("{}.{i}", self.at), ..*self }.entry(m);
                Entry::List(list.into_iter().enumerate().map(inner).collect::<Result<_>>()?)
            }
        };
        if let Entry::Other(layer) = &entry {
            layer.check().map_err(|e| self.bad(e))?;
        }
        Ok(entry)
    }

    fn bad(&self, detail: impl std::fmt::Display) -> Error {
        self.file.bad(format!("layer {}: {detail}", self.at))
    }

    fn packed(&self, PackedManifest { shell, key, value }: PackedManifest) -> Result<Entry> {
        let [k, v] = [key.shape, value.shape];
        if k[..3] != v[..3] {
            return Err(self.bad(format!("keys {k:?} and values {v:?} do not agree")));
        }
        // With these axes filled the number of tokens is bounded by the bytes; values may be of width 0.
        if k[0] == 0 || k[1] == 0 || k[3] == 0 {
            return Err(self.bad(format!("keys {k:?} have an empty axis beside the tokens")));
        }
        match shell {
            Shell::Rotating(ring) => ring.check(k[2]).map_err(|e| self.bad(e))?,
            Shell::Quantized { group_size, bits, .. } => {
                affine::check_codec(group_size, bits).map_err(|e| self.bad(e))?;
                let widths = [k[3], v[3]];
                if widths.iter().any(|width| width % group_size != 0) {
                    return Err(self.bad(format!("groups of {group_size} in widths {widths:?}")));
                }
            }
            Shell::Plain(class) => class.check(k[2]).map_err(|e| self.bad(e))?,
        }
        self.shapes(Side::Key, &key)?;
        self.shapes(Side::Value, &value)?;
        let layer =
            CompressedLayer { key: self.side(Side::Key, key)?, value: self.side(Side::Value, value)? };
        Ok(Entry::Packed { shell, layer: Box::new(layer) })
    }

    fn name(&self, side: Side, part: &str) -> String {
        format!("{}.{side}.{part}", self.at)
    }

    /// Compares all tensors of a side with the manifest, without reading one and before a codec is built.
    fn shapes(&self, side: Side, manifest: &SideManifest) -> Result<()> {
        let bad = |detail: String| self.bad(format!("{side}: {detail}"));
        let [b, h, t, d] = manifest.shape;
        let info = |part: &str| {
            let name = self.name(side, part);
            self.file.has(&name).then(|| self.file.info(&name)).transpose()
        };
        // Tokens that a part of [B, H, tokens, last] holds.
        let tokens = |part: &str, dtype: &str, last: usize| -> Result<Option<usize>> {
            let Some(info) = info(part)? else { return Ok(None) };
            match info.shape[..] {
                [b1, h1, n, l] if [b1, h1, l] == [b, h, last] && info.dtype.to_string() == dtype => {
                    Ok(Some(n))
                }
                _ => Err(bad(format!(
                    "{part} {} {:?}, expected {dtype} [{b}, {h}, tokens, {last}]",
                    info.dtype, info.shape
                ))),
            }
        };
        let dtype = format!("{:?}", manifest.dtype);
        let exact = [tokens("head", &dtype, d)?, tokens("tail", &dtype, d)?];
        let mut sum: usize = exact.iter().flatten().sum();
        if let Some(spec) = manifest.codec {
            if spec.head_dim != d {
                return Err(bad(format!("codec {spec} for {:?}", manifest.shape)));
            }
            let [words, scales] = Codec::row_size(&spec).map_err(|e| bad(e.to_string()))?;
            let packed = tokens("words", "U32", words)?.ok_or_else(|| bad("no words".into()))?;
            let scaled = tokens("scales", Codec::scale_format(&spec).dtype(), scales)?;
            if scaled.ok_or_else(|| bad("no scales".into()))? != packed {
                return Err(bad(format!("{packed} tokens of words, {scaled:?} of scales")));
            }
            for (part, dtype, needed) in [
                ("centre", "F32", None),
                ("gain", "F32", Some(spec.equalised)),
                ("order", "U32", Some(spec.outliers > 0)),
            ] {
                let found = info(part)?;
                let fits = found.is_none_or(|i| i.shape == [b, h, d] && i.dtype.to_string() == dtype);
                if !fits || needed.is_some_and(|needed| needed != found.is_some()) {
                    return Err(bad(format!(
                        "{part} is not what codec {spec} needs for {:?}",
                        manifest.shape
                    )));
                }
            }
            sum += packed;
        }
        if sum != t {
            return Err(bad(format!("{sum} tokens in the tensors do not add up to {t}")));
        }
        manifest.codec.map_or(Ok(()), |spec| self.follows_recipe(side, &spec))
    }

    /// A codec with another seed would read the codes as noise. Releases that wrote version 1 counted all layers of the model, and what
    /// they packed keeps its seeds.
    fn follows_recipe(&self, side: Side, spec: &CodecSpec) -> Result<()> {
        let bad = |e: &dyn std::fmt::Display| self.bad(format!("{side}: codec {spec}: {e}"));
        let wanted = |layer| self.recipe.spec(side, layer, spec.head_dim);
        let own = wanted(self.kv_layer).map_err(|e| bad(&e))?;
        let follows = |wanted: Option<CodecSpec>| wanted.is_some_and(|wanted| wanted.seed == spec.seed);
        if follows(own) || wanted(self.layer).is_ok_and(follows) {
            return Ok(());
        }
        let own = own.map_or("exact".into(), |own| own.to_string());
        Err(bad(&format!("the recipe says {own} for KV layer {}", self.kv_layer)))
    }

    fn side(&self, side: Side, manifest: SideManifest) -> Result<CompressedSide<Tensor>> {
        let bad = |e: Error| self.bad(format!("{side}: {e}"));
        let part = |part: &str| -> Result<Option<Tensor>> {
            let name = self.name(side, part);
            if self.file.has(&name) { self.file.tensor(&name).map(Some) } else { Ok(None) }
        };
        let body = match manifest.codec {
            None => None,
            Some(spec) => {
                let rows = manifest.shape.iter().fold(manifest.dtype.bytes(), |n, &d| n.saturating_mul(d));
                self.budget.borrow_mut().take(&spec, rows).map_err(bad)?;
                let missing = |what: &str| self.bad(format!("{side}: no {what}"));
                let words = part("words")?.ok_or_else(|| missing("words"))?;
                let scales = part("scales")?.ok_or_else(|| missing("scales"))?;
                let frame = Frame { centre: part("centre")?, gain: part("gain")?, order: part("order")? };
                frame.check_entries().map_err(bad)?;
                let codec = match part("levels")? {
                    Some(levels) => Codec::with_levels(spec, levels.to_vec::<f32>().map_err(bad)?.into()),
                    None => Codec::new(spec),
                };
                Some(Codes::new(Arc::new(codec.map_err(bad)?), frame, words, scales).map_err(bad)?)
            }
        };
        let (head, tail) = (part("head")?, part("tail")?);
        let read = CompressedSide { head, body, tail, shape: manifest.shape, dtype: manifest.dtype };
        self.finite(side, &read)?;
        Ok(read)
    }

    /// Scales and exact rows must be numbers, or the side would not unpack to numbers.
    fn finite(&self, side: Side, read: &CompressedSide<Tensor>) -> Result<()> {
        for (part, exact) in [("head", &read.head), ("tail", &read.tail)] {
            if let Some((index, value)) = exact.as_ref().and_then(Tensor::first_non_finite) {
                return Err(
                    self.bad(format!("{side}: element {index} of the exact tokens ({part}) is {value}"))
                );
            }
        }
        match read.body.as_ref().and_then(Codes::first_bad_scale) {
            Some(index) => Err(self.bad(format!("{side}: scale {index} is not finite"))),
            None => Ok(()),
        }
    }
}
