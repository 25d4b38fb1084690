//! The compressed file: one safetensors file that says what it is, and the way from a prompt cache to it and back.
//!
//! Metadata holds one entry, `turbomoq`, a JSON manifest: format version, recipe, the layout and user metadata of the source, and
//! for every layer its class, shapes and codecs. Tensors are `<layer>.<side>.<part>` for the parts words, scales, centre, gain,
//! order, levels, head and tail; what is not attention keys and values passes through as `<layer>.raw.<n>`.

use crate::codec::Codec;
use crate::codes::{Buffer, Codes, Frame};
use crate::compressor::{CompressedCache, CompressedLayer, CompressedSide, Compressor, Stats};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::files;
use crate::prompt_cache::{
    Container, KvClass, KvKind, Layer, Layout, Packed, Pair, PromptCache, RawTensor, Ring, affine,
};
use crate::recipe::Recipe;
use crate::spec::{CodecSpec, Side};
use crate::tensor::{Dtype, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Version of the format that this crate writes, and the only one that it reads.
pub const VERSION: u32 = 1;
/// Metadata key of the manifest.
const KEY: &str = "turbomoq";

/// A compressed prompt cache.
#[derive(Debug)]
pub struct Archive {
    /// How keys and values were packed.
    pub recipe: Recipe,
    /// The layout of the source, and of what [`Archive::restore`] gives.
    pub layout: Layout,
    /// What the user stored beside the cache.
    pub metadata: BTreeMap<String, String>,
    /// One per cache of the model.
    pub layers: Vec<Entry>,
}

/// One layer of an archive.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "tens of layers, each in front of megabytes")]
pub enum Entry {
    /// Attention keys and values, packed.
    Packed {
        /// What the layer was.
        shell: Shell,
        /// Keys and values in token order.
        layer: Box<CompressedLayer<Tensor>>,
    },
    /// What has no attention keys and values, untouched.
    Other(Layer),
    /// A list of caches.
    List(Vec<Entry>),
}

/// What is needed beside keys and values to rebuild a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shell {
    /// A plain class.
    Plain(KvClass),
    /// A rotating window.
    Rotating(Ring),
    /// MLX affine codes.
    Quantized {
        /// Elements per scale.
        group_size: usize,
        /// Bits per code.
        bits: usize,
        /// Dtype of the scales.
        dtype: Dtype,
    },
}

impl Shell {
    /// The name of the class in mlx-lm.
    pub fn class(&self) -> &'static str {
        match self {
            Shell::Plain(class) => class.name(),
            Shell::Rotating(_) => "RotatingKVCache",
            Shell::Quantized { .. } => "QuantizedKVCache",
        }
    }
}

/// Float tensors of a safetensors file, by name.
///
/// # Errors
/// [`Error::Io`] and [`Error::Format`] as [`Archive::read`].
pub fn read_tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let file = Container::open(path)?;
    file.names().map(|name| Ok((name.to_string(), file.tensor(name)?))).collect()
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    version: u32,
    recipe: Recipe,
    layout: String,
    metadata: BTreeMap<String, String>,
    layers: Vec<LayerManifest>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LayerManifest {
    Packed { shell: Shell, key: SideManifest, value: SideManifest },
    Empty { shell: Shell },
    Arrays { arrays: Vec<Option<usize>>, left_padding: Option<usize>, lengths: Option<usize> },
    Opaque { class: String, tensors: BTreeMap<String, usize>, meta: BTreeMap<String, String> },
    List(Vec<LayerManifest>),
}

#[derive(Serialize, Deserialize)]
struct SideManifest {
    shape: [usize; 4],
    dtype: Dtype,
    codec: Option<CodecSpec>,
}

impl Archive {
    /// Packs the attention layers of a prompt cache; `done` is called after every layer.
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn compress<E: Engine>(
        cache: &PromptCache,
        compressor: &Compressor<E>,
        mut done: impl FnMut(),
    ) -> Result<Archive> {
        let layers = cache.layers.iter().enumerate().map(|(i, layer)| {
            let entry = pack(layer, i, compressor);
            done();
            entry
        });
        Ok(Archive {
            recipe: compressor.recipe().clone(),
            layout: cache.layout,
            metadata: cache.metadata.clone(),
            layers: layers.collect::<Result<_>>()?,
        })
    }

    /// Unpacks every layer into a prompt cache of the source's layout; `done` is called after every layer.
    ///
    /// # Errors
    /// The engine's own.
    pub fn restore<E: Engine>(
        &self,
        compressor: &Compressor<E>,
        mut done: impl FnMut(),
    ) -> Result<PromptCache> {
        let layers = self.layers.iter().map(|entry| {
            let layer = unpack(entry, compressor);
            done();
            layer
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(PromptCache { layout: self.layout, metadata: self.metadata.clone(), layers })
    }

    /// Packed layers with their place in the model, `3` or `3.1` inside a list.
    pub fn packed(&self) -> Vec<(String, &Shell, &CompressedLayer<Tensor>)> {
        fn walk<'a>(
            at: String,
            entry: &'a Entry,
            out: &mut Vec<(String, &'a Shell, &'a CompressedLayer<Tensor>)>,
        ) {
            match entry {
                Entry::Packed { shell, layer } => out.push((at, shell, layer)),
                Entry::Other(_) => {}
                Entry::List(list) => {
                    list.iter().enumerate().for_each(|(i, e)| walk(format!("{at}.{i}"), e, out))
                }
            }
        }
        let mut out = vec![];
        self.layers.iter().enumerate().for_each(|(i, e)| walk(i.to_string(), e, &mut out));
        out
    }

    /// Real bytes and ratios of what is packed.
    pub fn stats(&self) -> Stats {
        CompressedCache { layers: self.packed().into_iter().map(|(_, _, layer)| layer.clone()).collect() }
            .stats()
    }

    /// Writes the file in one step: a sibling, flushed, renamed. Returns its bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; then `path` is as it was.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<u64> {
        let path = path.as_ref();
        let mut tensors = BTreeMap::new();
        let layers =
            self.layers.iter().enumerate().map(|(i, e)| lay_out(e, &i.to_string(), &mut tensors)).collect();
        let manifest = Manifest {
            version: VERSION,
            recipe: self.recipe.clone(),
            layout: self.layout.to_string(),
            metadata: self.metadata.clone(),
            layers,
        };
        let bad = |detail: String| Error::Format { path: path.into(), detail };
        let text = serde_json::to_string(&manifest).map_err(|e| bad(e.to_string()))?;
        let views = tensors.iter().map(|(name, t)| {
            let view = safetensors::tensor::TensorView::new(t.dtype, t.shape.clone(), &t.bytes);
            view.map(|view| (name, view)).map_err(|e| bad(e.to_string()))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let metadata = Some(HashMap::from([(KEY.to_string(), text)]));
        let bytes = safetensors::serialize(views, metadata).map_err(|e| bad(e.to_string()))?;
        files::replace(path, &[&bytes])
    }

    /// Reads a file that [`Archive::write`] made.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a file that is truncated, inconsistent, not of this format or of another version.
    pub fn read(path: impl AsRef<Path>) -> Result<Archive> {
        let file = Container::open(path.as_ref())?;
        let text = file.metadata.get(KEY).ok_or_else(|| file.bad("not a turbomoq file: no such metadata"))?;
        // The version comes first: a newer file may have a manifest that this version cannot read.
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let head: Head = serde_json::from_str(text).map_err(|e| file.bad(format!("manifest: {e}")))?;
        if head.version != VERSION {
            return Err(
                file.bad(format!("format version {}, this program reads version {VERSION}", head.version))
            );
        }
        let manifest: Manifest =
            serde_json::from_str(text).map_err(|e| file.bad(format!("manifest: {e}")))?;
        let layout = manifest.layout.parse().map_err(|e: Error| file.bad(format!("manifest: {e}")))?;
        let layers = manifest.layers.into_iter().enumerate();
        let layers =
            layers.map(|(i, m)| Reader { file: &file, at: i.to_string() }.entry(m)).collect::<Result<_>>()?;
        Ok(Archive { recipe: manifest.recipe, layout, metadata: manifest.metadata, layers })
    }
}

fn pack<E: Engine>(layer: &Layer, index: usize, compressor: &Compressor<E>) -> Result<Entry> {
    if let Layer::List(list) = layer {
        return Ok(Entry::List(list.iter().map(|l| pack(l, index, compressor)).collect::<Result<_>>()?));
    }
    let (Some(kind), Some(kv)) = (layer.kind(), layer.attention_kv()?) else {
        return Ok(Entry::Other(layer.clone()));
    };
    let shell = shell_of(layer, kind);
    // Values of width zero (the indexers of some models) and layers without tokens have nothing to pack: exact, in token order.
    if kv.values.is_empty() || kv.keys.is_empty() {
        let layer = Box::new(CompressedLayer { key: exact_side(kv.keys)?, value: exact_side(kv.values)? });
        return Ok(Entry::Packed { shell, layer });
    }
    let packed = compressor.compress_layer(index, &kv.keys, &kv.values)?;
    let host = |side: CompressedSide<E::Tensor>| -> Result<CompressedSide<Tensor>> {
        let get = |t: Option<E::Tensor>| t.map(|t| compressor.engine().get(&t)).transpose();
        let body = side.body.map(|codes| move_codes(&codes, |t| compressor.engine().get(t))).transpose()?;
        Ok(CompressedSide {
            head: get(side.head)?,
            body,
            tail: get(side.tail)?,
            shape: side.shape,
            dtype: side.dtype,
        })
    };
    let layer = Box::new(CompressedLayer { key: host(packed.key)?, value: host(packed.value)? });
    Ok(Entry::Packed { shell, layer })
}

fn exact_side(x: Tensor) -> Result<CompressedSide<Tensor>> {
    let dtype = x.float().ok_or_else(|| x.wrong_dtype("tensor", "F32, F16 or BF16"))?;
    let shape = x.shape().try_into().map_err(|_| x.wrong_shape("tensor", "[B, H, T, D]"))?;
    Ok(CompressedSide { head: Some(x), body: None, tail: None, shape, dtype })
}

fn move_codes<A: Buffer, B: Buffer>(codes: &Codes<A>, f: impl Fn(&A) -> Result<B>) -> Result<Codes<B>> {
    let frame = codes.frame();
    let table = |t: &Option<A>| t.as_ref().map(&f).transpose();
    let frame =
        Frame { centre: table(&frame.centre)?, gain: table(&frame.gain)?, order: table(&frame.order)? };
    Codes::new(codes.codec().clone(), frame, f(codes.words())?, f(codes.scales())?)
}

fn unpack<E: Engine>(entry: &Entry, compressor: &Compressor<E>) -> Result<Layer> {
    let (shell, layer) = match entry {
        Entry::Other(layer) => return Ok(layer.clone()),
        Entry::List(list) => {
            return Ok(Layer::List(list.iter().map(|e| unpack(e, compressor)).collect::<Result<_>>()?));
        }
        Entry::Packed { shell, layer } => (shell, layer),
    };
    let device = |side: &CompressedSide<Tensor>| -> Result<Tensor> {
        let put = |t: &Option<Tensor>| t.as_ref().map(|t| compressor.engine().put(t)).transpose();
        let body =
            side.body.as_ref().map(|codes| move_codes(codes, |t| compressor.engine().put(t))).transpose()?;
        let (head, tail) = (put(&side.head)?, put(&side.tail)?);
        compressor.decompress_side(&CompressedSide { head, body, tail, shape: side.shape, dtype: side.dtype })
    };
    rebuild(shell, Pair { keys: device(&layer.key)?, values: device(&layer.value)? })
}

fn shell_of(layer: &Layer, kind: KvKind) -> Shell {
    match (layer, kind) {
        (Layer::Kv { class, .. }, _) => Shell::Plain(*class),
        (_, KvKind::Rotating(ring)) => Shell::Rotating(ring),
        (Layer::Quantized { kv: Some(kv), group_size, bits }, _) => {
            let dtype = kv.keys.scales.float().unwrap_or(Dtype::F32);
            Shell::Quantized { group_size: *group_size, bits: *bits, dtype }
        }
        (_, KvKind::Quantized { group_size, bits }) => {
            Shell::Quantized { group_size, bits, dtype: Dtype::F32 }
        }
        (_, KvKind::Plain) => Shell::Plain(KvClass::Kv),
    }
}

fn rebuild(shell: &Shell, kv: Pair<Tensor>) -> Result<Layer> {
    Ok(match *shell {
        Shell::Plain(class) => Layer::Kv { class, kv: Some(kv) },
        Shell::Rotating(ring) => {
            let (keys, values) = (ring.ring_order(&kv.keys)?, ring.ring_order(&kv.values)?);
            Layer::Rotating { kv: Some(Pair { keys, values }), ring }
        }
        Shell::Quantized { group_size, bits, dtype } => {
            let quantize = |x: &Tensor| {
                Packed::quantize(&Tensor::from_f32(dtype, x.shape(), x.to_f32()?)?, group_size, bits)
            };
            Layer::Quantized {
                kv: Some(Pair { keys: quantize(&kv.keys)?, values: quantize(&kv.values)? }),
                group_size,
                bits,
            }
        }
    })
}

/// Puts the tensors of an entry under their names and gives its manifest.
fn lay_out(entry: &Entry, at: &str, tensors: &mut BTreeMap<String, RawTensor>) -> LayerManifest {
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
struct Reader<'a> {
    file: &'a Container,
    at: String,
}

impl Reader<'_> {
    fn entry(&self, manifest: LayerManifest) -> Result<Entry> {
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
                check_tables(&frame).map_err(|e| self.bad(format!("{side}: {e}")))?;
                let (words, scales) = (needed("words")?, needed("scales")?);
                if words.dtype() != "U32" || scales.dtype() != codec.format().dtype() {
                    return Err(self.bad(format!(
                        "{side}: words {} and scales {}",
                        words.dtype(),
                        scales.dtype()
                    )));
                }
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

/// A channel order must be a permutation; anything else would read outside a row.
fn check_tables(frame: &Frame<Tensor>) -> Result<(), String> {
    for t in [&frame.centre, &frame.gain].into_iter().flatten() {
        if t.float() != Some(Dtype::F32) || t.first_non_finite().is_some() {
            return Err("centre and gain must be finite f32".into());
        }
    }
    // Decoding divides by the gains.
    if let Some(gain) = &frame.gain
        && !gain.to_f32().is_ok_and(|gain| gain.iter().all(|x| x.is_normal() && *x > 0.0))
    {
        return Err("every gain must be above zero".into());
    }
    let Some(order) = &frame.order else { return Ok(()) };
    let (d, places) =
        (order.shape().last().copied().unwrap_or(0), order.to_vec::<u32>().map_err(|e| e.to_string())?);
    let permutation = |row: &[u32]| {
        let mut seen = vec![false; d];
        row.iter().all(|&i| seen.get_mut(i as usize).is_some_and(|s| !std::mem::replace(s, true)))
    };
    if d == 0 || !places.chunks_exact(d).all(permutation) {
        return Err("the channel order is no permutation".into());
    }
    Ok(())
}
