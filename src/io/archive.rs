//! The compressed file: one safetensors file that says what it is, and the way from a prompt cache to it and back.
//!
//! Metadata holds `turbomoq`, a JSON manifest: format version, recipe, the layout and user metadata of the source, for every layer
//! its class, shapes and codecs, and for every tensor a checksum. Tensors are `<layer>.<side>.<part>` for the parts words, scales,
//! centre, gain, order, levels, head and tail; what is not attention keys and values passes through as `<layer>.raw.<n>`.
//!
//! A checksum is 16 hexadecimal digits of the 64-bit XXH3 of the tensor's dtype and shape as text, `F16[1, 2, 40, 64]`, and its
//! bytes after them. The metadata entry `turbomoq.checksum` is the XXH3 of the manifest's text. Version 1 had no checksums.

mod cost;
mod manifest;
mod origin;
mod parked;
mod reader;
mod shell;
#[cfg(unix)]
mod spill;
mod stream;

pub use parked::{parked_bytes, parked_model_bytes, plan_within};
pub use shell::Shell;
#[cfg(unix)]
pub use spill::SpillFolder;

use crate::codec::codes::{Buffer, Codes, Frame};
use crate::compressor::{
    CompressedCache, CompressedLayer, CompressedSide, CompressionStats, Compressor, check_rows,
};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::io::container::Container;
use crate::io::files::Outlives;
use crate::io::prompt_cache::{Layer, Layout, ORIGIN_KEY, Pair, PromptCache};
use crate::pool::Pooled;
use crate::recipe::Recipe;
use crate::spec::{Budget, Side};
use crate::tensor::Tensor;
use manifest::Manifest;
use origin::Origin;
use reader::Reader;
use shell::{rebuild, shell_of};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

/// Version of the format that this crate writes; it reads this one and those before it.
pub const VERSION: u32 = 2;
/// Metadata keys of the manifest and of its checksum.
const KEY: &str = "turbomoq";
const CHECKSUM_KEY: &str = "turbomoq.checksum";

/// A compressed prompt cache.
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
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

/// Float tensors of a safetensors file, by name.
///
/// # Errors
/// [`Error::Io`] and [`Error::Format`] as [`Archive::read`].
pub fn read_tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let file = Container::open(path)?;
    file.names().map(|name| Ok((name.to_string(), file.tensor(name)?))).collect()
}

impl Archive {
    /// Packs the attention layers of a prompt cache; `done` is called after every layer.
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn compress<E: Engine>(
        cache: &PromptCache,
        compressor: &Compressor<E>,
        done: impl FnMut(),
    ) -> Result<Archive> {
        Archive::compress_after(None, cache, compressor, done)
    }

    /// As [`Archive::compress`], for a cache of which `before` may hold the beginning: plain layers keep the codes of tokens that are
    /// what `before` unpacks to, see [`Compressor::compress_layer_after`].
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn compress_after<E: Engine>(
        before: Option<&Archive>,
        cache: &PromptCache,
        compressor: &Compressor<E>,
        mut done: impl FnMut(),
    ) -> Result<Archive> {
        let before = before.filter(|b| b.recipe == *compressor.recipe());
        let mut metadata = cache.metadata.clone();
        let mut packer = Packer::new(compressor, &mut metadata);
        let layers = cache.layers.iter().enumerate().map(|(i, layer)| {
            let entry = packer.layer(i, layer, before.and_then(|b| b.layers.get(i)));
            done();
            entry
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Archive { recipe: compressor.recipe().clone(), layout: cache.layout, metadata, layers })
    }

    /// Says in the metadata of a restored cache how its rows were packed (`turbomoq_origin`), so that packing it again by the same
    /// recipe starts from the same frames: [`Archive::compress`] reads it, [`PromptCache::read_signed`] brings it there. Tokens may have
    /// been appended since.
    ///
    /// # Errors
    /// As [`Layer::attention_kv`].
    pub fn sign(&self, restored: &mut PromptCache) -> Result<()> {
        let origin = Origin::of(self, restored)?;
        restored.metadata.insert(ORIGIN_KEY.into(), origin.to_text());
        Ok(())
    }

    /// Unpacks every layer into a prompt cache of the source's layout; `done` is called after every layer.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn restore<E: Engine>(
        &self,
        compressor: &Compressor<E>,
        mut done: impl FnMut(),
    ) -> Result<PromptCache> {
        let layers = self.layers.iter().map(|entry| {
            let layer = unpack(entry, &|side| dense(side, compressor));
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
    pub fn stats(&self) -> CompressionStats {
        CompressedCache { layers: self.packed().into_iter().map(|(_, _, layer)| layer.clone()).collect() }
            .stats()
    }

    /// Writes the file in one step, see [`crate::io::files`]; nothing is copied on the way. Returns its bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; then `path` is as it was.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<u64> {
        self.write_as(path.as_ref(), Outlives::Power)
    }

    fn write_as(&self, path: &Path, outlives: Outlives) -> Result<u64> {
        stream::write(self, &self.metadata, &|i| Ok(Cow::Borrowed(&self.layers[i])), path, outlives)
    }

    /// Reads a file that [`Archive::write`] made, of this format version or an older one.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a file that is truncated, damaged, inconsistent, not of this format or of a newer version.
    pub fn read(path: impl AsRef<Path>) -> Result<Archive> {
        Archive::read_with(path.as_ref(), true)
    }

    /// As [`Archive::read`] without the checksums: for what can be saved of a damaged file. All other checks are made.
    ///
    /// # Errors
    /// As [`Archive::read`].
    pub fn read_unverified(path: impl AsRef<Path>) -> Result<Archive> {
        Archive::read_with(path.as_ref(), false)
    }

    fn read_with(path: &Path, verify: bool) -> Result<Archive> {
        let mut file = Container::open(path)?;
        let Manifest { recipe, layout, metadata, layers, .. } = Manifest::read(&mut file, verify)?;
        let layout = layout.parse().map_err(|e: Error| file.bad(format!("manifest: {e}")))?;
        let budget = RefCell::default();
        let mut kv_layers = 0;
        let layers = layers.into_iter().enumerate().map(|(layer, manifest)| {
            let (at, kv_layer) = (layer.to_string(), kv_layers);
            kv_layers += usize::from(manifest.is_kv());
            Reader { file: &file, recipe: &recipe, at, layer, kv_layer, budget: &budget }.entry(manifest)
        });
        let layers = layers.collect::<Result<_>>()?;
        match file.unread() {
            Some(name) => Err(file.bad(format!("tensor {name:?} belongs to no layer of the manifest"))),
            None => Ok(Archive { recipe, layout, metadata, layers }),
        }
    }
}

impl Pooled for Archive {
    fn bodies(&mut self) -> Vec<&mut Option<Codes<Tensor>>> {
        fn walk<'a>(list: &'a mut [Entry], out: &mut Vec<&'a mut Option<Codes<Tensor>>>) {
            for entry in list {
                match entry {
                    Entry::Packed { layer, .. } => {
                        out.extend([&mut layer.key.body, &mut layer.value.body]);
                    }
                    Entry::Other(_) => {}
                    Entry::List(list) => walk(list, out),
                }
            }
        }
        let mut out = vec![];
        walk(&mut self.layers, &mut out);
        out
    }

    fn nbytes(&self) -> usize {
        fn entry(e: &Entry) -> usize {
            size_of::<Entry>()
                + match e {
                    Entry::Packed { layer, .. } => {
                        size_of::<CompressedLayer<Tensor>>() + layer.key.nbytes() + layer.value.nbytes()
                    }
                    Entry::Other(layer) => layer.nbytes(),
                    Entry::List(list) => list.iter().map(entry).sum(),
                }
        }
        let metadata = self.metadata.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
        metadata + self.layers.iter().map(entry).sum::<usize>()
    }
}

/// Packs the layers of one cache, in order.
struct Packer<'a, E> {
    compressor: &'a Compressor<E>,
    origin: Option<Origin>,
    /// Of the codecs of the whole cache.
    budget: Budget,
    /// Layers with keys and values so far, which recipes count.
    kv_layers: usize,
}

impl<'a, E: Engine> Packer<'a, E> {
    /// Takes out of the metadata where the rows come from, which is no word of the user.
    fn new(compressor: &'a Compressor<E>, metadata: &mut BTreeMap<String, String>) -> Packer<'a, E> {
        let origin = metadata.remove(ORIGIN_KEY).and_then(|text| Origin::parse(&text, compressor.recipe()));
        Packer { compressor, origin, budget: Budget::default(), kv_layers: 0 }
    }

    /// Packs the next layer, whose index in the model is `index`, if it has keys and values of tokens.
    fn layer(&mut self, index: usize, layer: &Layer, before: Option<&Entry>) -> Result<Entry> {
        let kv_layer = self.kv_layers;
        self.kv_layers += usize::from(layer.is_kv());
        self.pack(layer, &index.to_string(), kv_layer, before)
    }

    /// Packs a layer or a member of a list, whose place in the model is `at`.
    fn pack(&mut self, layer: &Layer, at: &str, kv_layer: usize, before: Option<&Entry>) -> Result<Entry> {
        let compressor = self.compressor;
        if let Layer::List(list) = layer {
            let entry = |(i, l)| self.pack(l, &format!("{at}.{i}"), kv_layer, None);
            return Ok(Entry::List(list.iter().enumerate().map(entry).collect::<Result<_>>()?));
        }
        let (Some(kind), Some(kv)) = (layer.kind(), layer.attention_kv()?) else {
            return Ok(Entry::Other(layer.clone()));
        };
        let shell = shell_of(layer, kind);
        // Values of width zero (the indexers of some models) and layers without tokens have nothing to pack: exact, in token order.
        if kv.values.is_empty() || kv.keys.is_empty() {
            check_rows(at, Side::Key, &kv.keys)?;
            let layer =
                Box::new(CompressedLayer { key: exact_side(kv.keys)?, value: exact_side(kv.values)? });
            return Ok(Entry::Packed { shell, layer });
        }
        let before = match before {
            Some(Entry::Packed { shell: Shell::Plain(_), layer }) if matches!(shell, Shell::Plain(_)) => {
                let side = |side| to_engine(side, compressor.engine());
                Some(CompressedLayer { key: side(&layer.key)?, value: side(&layer.value)? })
            }
            _ => None,
        };
        let frames = match &self.origin {
            Some(origin) => {
                let split = compressor.recipe().split(kv.keys.shape()[2]);
                let frame = |side, rows| origin.frame(at, side, rows, split);
                [frame(Side::Key, &kv.keys)?, frame(Side::Value, &kv.values)?]
            }
            None => [None, None],
        };
        for (side, x) in [(Side::Key, &kv.keys), (Side::Value, &kv.values)] {
            let dim = x.shape().last().copied().unwrap_or_default();
            if let Some(spec) = compressor.recipe().spec(side, kv_layer, dim)? {
                self.budget.take(&spec, x.nbytes())?;
            }
        }
        let packed =
            compressor.compress_layer_from((kv_layer, at), &kv.keys, &kv.values, before.as_ref(), frames)?;
        let host = |side: CompressedSide<E::Tensor>| -> Result<CompressedSide<Tensor>> {
            let get = |t: Option<E::Tensor>| t.map(|t| compressor.engine().get(&t)).transpose();
            let body =
                side.body.map(|codes| move_codes(&codes, |t| compressor.engine().get(t))).transpose()?;
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

/// The layer of an entry, with sides that `dense` makes.
fn unpack(entry: &Entry, dense: &dyn Fn(&CompressedSide<Tensor>) -> Result<Tensor>) -> Result<Layer> {
    match entry {
        Entry::Other(layer) => Ok(layer.clone()),
        Entry::List(list) => Ok(Layer::List(list.iter().map(|e| unpack(e, dense)).collect::<Result<_>>()?)),
        Entry::Packed { shell, layer } => {
            rebuild(shell, Pair { keys: dense(&layer.key)?, values: dense(&layer.value)? })
        }
    }
}

/// A side as it was before it was packed, to the rounding of its codec.
fn dense<E: Engine>(side: &CompressedSide<Tensor>, compressor: &Compressor<E>) -> Result<Tensor> {
    compressor.decompress_side(&to_engine(side, compressor.engine())?)
}

fn to_engine<E: Engine>(side: &CompressedSide<Tensor>, engine: &E) -> Result<CompressedSide<E::Tensor>> {
    let put = |t: &Option<Tensor>| t.as_ref().map(|t| engine.put(t)).transpose();
    let body = side.body.as_ref().map(|codes| move_codes(codes, |t| engine.put(t))).transpose()?;
    let (head, tail) = (put(&side.head)?, put(&side.tail)?);
    Ok(CompressedSide { head, body, tail, shape: side.shape, dtype: side.dtype })
}
