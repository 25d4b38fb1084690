//! The manifest of a compressed file, and the tensors that it names: laid out for writing, checked when read.

use super::{Entry, Shell, shell_of};
use crate::codec::Codec;
use crate::codes::{Codes, Frame, check_dtypes};
use crate::compressor::{CompressedLayer, CompressedSide};
use crate::error::{Error, Result};
use crate::prompt_cache::{Container, KvKind, Layer, RawTensor, affine};
use crate::recipe::Recipe;
use crate::spec::{CodecSpec, Side};
use crate::tensor::{Dtype, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) recipe: Recipe,
    pub(super) layout: String,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) layers: Vec<LayerManifest>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LayerManifest {
    Packed { shell: Shell, key: SideManifest, value: SideManifest },
    Empty { shell: Shell },
    Arrays { arrays: Vec<Option<usize>>, left_padding: Option<usize>, lengths: Option<usize> },
    Opaque { class: String, tensors: BTreeMap<String, usize>, meta: BTreeMap<String, String> },
    List(Vec<LayerManifest>),
}

#[derive(Serialize, Deserialize)]
pub(super) struct SideManifest {
    shape: [usize; 4],
    dtype: Dtype,
    codec: Option<CodecSpec>,
}

/// Puts the tensors of an entry under their names and gives its manifest.
pub(super) fn lay_out(entry: &Entry, at: &str, tensors: &mut BTreeMap<String, RawTensor>) -> LayerManifest {
    let mut count = 0;
    let mut raw = |t: &RawTensor| {
        tensors.insert(format!("{at}.raw.{count}"), t.clone());
        count += 1;
        count - 1
    };
    match entry {
        Entry::Packed { shell, layer } => LayerManifest::Packed {
            shell: *shell,
            key: lay_out_side(&layer.key, &format!("{at}.key"), tensors),
            value: lay_out_side(&layer.value, &format!("{at}.value"), tensors),
        },
        Entry::List(list) => LayerManifest::List(
            list.iter().enumerate().map(|(i, e)| lay_out(e, &format!("{at}.{i}"), tensors)).collect(),
        ),
        Entry::Other(Layer::Arrays { arrays, left_padding, lengths }) => LayerManifest::Arrays {
            arrays: arrays.iter().map(|a| a.as_ref().map(&mut raw)).collect(),
            left_padding: left_padding.as_ref().map(&mut raw),
            lengths: lengths.as_ref().map(&mut raw),
        },
        Entry::Other(Layer::Opaque { class, tensors: list, meta }) => LayerManifest::Opaque {
            class: class.clone(),
            tensors: list.iter().map(|(name, t)| (name.clone(), raw(t))).collect(),
            meta: meta.clone(),
        },
        Entry::Other(layer) => {
            // What has tokens became a packed layer.
            LayerManifest::Empty { shell: shell_of(layer, layer.kind().unwrap_or(KvKind::Plain)) }
        }
    }
}

fn lay_out_side(
    side: &CompressedSide<Tensor>,
    at: &str,
    tensors: &mut BTreeMap<String, RawTensor>,
) -> SideManifest {
    let mut put = |part: &str, t: Option<&Tensor>| {
        if let Some(t) = t {
            tensors.insert(format!("{at}.{part}"), RawTensor::from(t));
        }
    };
    put("head", side.head.as_ref());
    put("tail", side.tail.as_ref());
    if let Some(body) = &side.body {
        put("words", Some(body.words()));
        put("scales", Some(body.scales()));
        put("centre", body.frame().centre.as_ref());
        put("gain", body.frame().gain.as_ref());
        put("order", body.frame().order.as_ref());
        let levels = body.codec().fitted().and_then(|l| Tensor::new(&[l.len()], l.to_vec()).ok());
        put("levels", levels.as_ref());
    }
    SideManifest {
        shape: side.shape,
        dtype: side.dtype,
        codec: side.body.as_ref().map(|b| *b.codec().spec()),
    }
}

/// Reads one entry, checking every part against the manifest.
pub(super) struct Reader<'a> {
    pub(super) file: &'a Container,
    pub(super) at: String,
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
        Ok(match manifest {
            LayerManifest::Packed { shell, key, value } => {
                if key.shape[..3] != value.shape[..3] {
                    return Err(
                        self.bad(format!("keys {:?} and values {:?} do not agree", key.shape, value.shape))
                    );
                }
                match shell {
                    Shell::Rotating(ring) => ring.check(key.shape[2]).map_err(|e| self.bad(e))?,
                    Shell::Quantized { group_size, bits, .. } => {
                        affine::check_codec(group_size, bits).map_err(|e| self.bad(e.to_string()))?;
                        let widths = [key.shape[3], value.shape[3]];
                        if widths.iter().any(|width| width % group_size != 0) {
                            return Err(self.bad(format!("groups of {group_size} in widths {widths:?}")));
                        }
                    }
                    Shell::Plain(_) => {}
                }
                let layer = CompressedLayer {
                    key: self.side(Side::Key, key)?,
                    value: self.side(Side::Value, value)?,
                };
                Entry::Packed { shell, layer: Box::new(layer) }
            }
            LayerManifest::Empty { shell } => Entry::Other(match shell {
                Shell::Plain(class) => Layer::Kv { class, kv: None },
                Shell::Rotating(ring) => Layer::Rotating { kv: None, ring },
                Shell::Quantized { group_size, bits, .. } => Layer::Quantized { kv: None, group_size, bits },
            }),
            LayerManifest::Arrays { arrays, left_padding, lengths } => Entry::Other(Layer::Arrays {
                arrays: arrays.into_iter().map(optional).collect::<Result<_>>()?,
                left_padding: optional(left_padding)?,
                lengths: optional(lengths)?,
            }),
            LayerManifest::Opaque { class, tensors, meta } => {
                let tensors =
                    tensors.into_iter().map(|(name, n)| Ok((name, raw(n)?))).collect::<Result<_>>()?;
                Entry::Other(Layer::Opaque { class, tensors, meta })
            }
            LayerManifest::List(list) => {
                let inner = |(i, m)| Reader { file: self.file, at: format!("{}.{i}", self.at) }.entry(m);
                Entry::List(list.into_iter().enumerate().map(inner).collect::<Result<_>>()?)
            }
        })
    }

    fn bad(&self, detail: String) -> Error {
        self.file.bad(format!("layer {}: {detail}", self.at))
    }

    fn side(&self, side: Side, manifest: SideManifest) -> Result<CompressedSide<Tensor>> {
        let bad = |e: Error| self.bad(format!("{side}: {e}"));
        let part = |name: &str| -> Result<Option<Tensor>> {
            let name = format!("{}.{side}.{name}", self.at);
            if self.file.has(&name) { self.file.tensor(&name).map(Some) } else { Ok(None) }
        };
        let needed = |name: &str| part(name)?.ok_or_else(|| self.bad(format!("{side}: no {name}")));
        let body = match manifest.codec {
            None => None,
            Some(spec) => {
                let codec = match part("levels")? {
                    Some(levels) => {
                        Codec::with_levels(spec, levels.to_vec::<f32>().map_err(bad)?.into()).map_err(bad)?
                    }
                    None => Codec::new(spec).map_err(bad)?,
                };
                let frame = Frame { centre: part("centre")?, gain: part("gain")?, order: part("order")? };
                frame.check_entries().map_err(bad)?;
                let (words, scales) = (needed("words")?, needed("scales")?);
                check_dtypes(&codec, &words, &scales).map_err(bad)?;
                Some(Codes::new(Arc::new(codec), frame, words, scales).map_err(bad)?)
            }
        };
        let side_of = CompressedSide {
            head: part("head")?,
            body,
            tail: part("tail")?,
            shape: manifest.shape,
            dtype: manifest.dtype,
        };
        let [b, h, t, d] = side_of.shape;
        for exact in [&side_of.head, &side_of.tail].into_iter().flatten() {
            let s = exact.shape();
            if s.len() != 4 || [s[0], s[1], s[3]] != [b, h, d] || exact.float() != Some(side_of.dtype) {
                return Err(self.bad(format!("{side}: exact tokens {} {s:?}", exact.dtype())));
            }
        }
        if let Some(body) = &side_of.body
            && (body.shape()[..2] != [b, h] || body.codec().spec().head_dim != d)
        {
            return Err(self.bad(format!("{side}: codes {:?} for {:?}", body.shape(), side_of.shape)));
        }
        if side_of.split().iter().sum::<usize>() != t {
            return Err(self.bad(format!("{side}: tokens {:?} do not add up to {t}", side_of.split())));
        }
        Ok(side_of)
    }
}
