//! Layers written as a prompt-cache file of either layout, whole or not at all.
//!
//! Tensors of equal element size stand in the order of their paths. Buffers are as long as the tokens they hold, in
//! 0.32 too: mlx-lm 0.32.2 grows them at the next append as it grows its own. A cache of which one layer is in memory at a
//! time is planned from layers of the same shapes and written as its layers come.

use super::class::KvClass;
use super::layer::{Layer, packed_class};
use super::{Fields, Layout, PromptCache, fields_of};
use crate::error::{Error, Result};
use crate::io::files::Outlives;
use crate::io::image::{Image, Piece};
use crate::io::raw::RawTensor;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

/// What one leaf of the state tree becomes.
enum Item<'a> {
    Array(Piece<'a>),
    Counter(usize),
    Text(String),
    None,
}

/// Everything that goes into a file.
struct FileParts<'a> {
    layout: Layout,
    items: BTreeMap<Vec<usize>, Item<'a>>,
    /// Meta states of 0.31, by path.
    meta: BTreeMap<String, String>,
    /// Class names of the layers.
    classes: Vec<String>,
}

/// A cache of which one layer is in memory at a time.
pub(crate) struct Layers<'a> {
    /// What the user stored beside the cache.
    pub(crate) metadata: &'a BTreeMap<String, String>,
    /// Number of layers.
    pub(crate) count: usize,
    /// A layer of the shapes and dtypes of the one of this index, whatever its numbers.
    pub(crate) like: &'a dyn Fn(usize) -> Result<Layer>,
    /// The layer of this index.
    pub(crate) layer: &'a dyn Fn(usize) -> Result<Layer>,
}

/// Bytes of the file that [`write`] makes.
pub(super) fn file_size(cache: &PromptCache, layout: Layout) -> Result<u64> {
    Ok(image(cache, layout)?.len())
}

/// Writes the file whole or not at all and gives its bytes.
pub(super) fn write(cache: &PromptCache, path: &Path, layout: Layout) -> Result<u64> {
    image(cache, layout)?.write(path)
}

/// As [`write`], with one layer in memory at a time, or two where the last layer's arrays have several element sizes.
pub(super) fn write_layers(layers: &Layers, path: &Path, layout: Layout) -> Result<u64> {
    let mut plan = FileParts::new(layout);
    for i in 0..layers.count {
        let like = (layers.like)(i)?;
        let mut one = FileParts::new(layout);
        one.layer(i, &like)?;
        plan.items.extend(one.items.into_iter().map(|(path, item)| (path, item.late())));
        plan.meta.extend(one.meta);
        plan.classes.extend(one.classes);
    }
    let mut current: BTreeMap<usize, Layer> = BTreeMap::new();
    plan.image(layers.metadata)?.write_late(path, Outlives::Reader, &mut |name, put| {
        let place: Vec<usize> = name.split('.').filter_map(|part| part.parse().ok()).collect();
        let index = place.first().copied().unwrap_or_default();
        // The layer before goes first.
        current.retain(|&i, _| i == index);
        let layer = match current.entry(index) {
            Entry::Occupied(layer) => layer.into_mut(),
            Entry::Vacant(free) => free.insert((layers.layer)(index)?),
        };
        let mut one = FileParts::new(layout);
        one.layer(index, layer)?;
        match one.items.remove(&place) {
            Some(Item::Array(piece)) => put(&piece),
            _ => Ok(()),
        }
    })
}

fn image(cache: &PromptCache, layout: Layout) -> Result<Image<'_>> {
    let mut plan = FileParts::new(layout);
    cache.layers.iter().enumerate().try_for_each(|(i, layer)| plan.layer(i, layer))?;
    plan.image(&cache.metadata)
}

fn refuse(field: &'static str, value: String, reason: &str) -> Error {
    Error::Unsupported { field, value, reason: reason.into() }
}

impl<'a> FileParts<'a> {
    fn new(layout: Layout) -> FileParts<'a> {
        FileParts { layout, items: BTreeMap::new(), meta: BTreeMap::new(), classes: vec![] }
    }

    /// Adds the layer of an index.
    fn layer(&mut self, i: usize, layer: &'a Layer) -> Result<()> {
        let name = || format!("{i} ({})", layer.class());
        layer.check().map_err(|e| refuse("layer", name(), &e))?;
        self.state(layer, vec![i]).map_err(|reason| refuse("layer", name(), reason))?;
        if self.layout == Layout::V031 {
            self.meta(layer, i.to_string());
        }
        self.classes.push(layer.class().into());
        Ok(())
    }

    /// The file of all layers, with what the user stored beside them.
    fn image(self, metadata: &BTreeMap<String, String>) -> Result<Image<'a>> {
        if self.layout == Layout::V031 && self.classes.is_empty() {
            return Err(refuse("layers", "none".into(), "mlx-lm 0.31 cannot load a cache without layers"));
        }
        let metadata = self.metadata(metadata);
        let path = |path: &[usize]| path.iter().map(usize::to_string).collect::<Vec<_>>().join(".");
        let pieces = self.items.into_iter().map(|(key, item)| (path(&key), item.into_piece())).collect();
        Image::new(&metadata, pieces).map_err(|e| refuse("header", "JSON".into(), &e))
    }

    fn put(&mut self, path: &[usize], tail: &[usize], item: Item<'a>) {
        self.items.insert([path, tail].concat(), item);
    }

    /// The leaves of one layer, or why this layout cannot hold it.
    fn state(&mut self, layer: &'a Layer, path: Vec<usize>) -> Result<(), &'static str> {
        let new = self.layout == Layout::V032;
        let empty = match layer {
            Layer::Kv { kv, .. } | Layer::Rotating { kv, .. } => kv.is_none(),
            Layer::Quantized { kv, .. } => kv.is_none(),
            _ => false,
        };
        if empty && !new {
            return Err("mlx-lm 0.31 cannot hold a layer that was never filled, write 0.32");
        }
        match layer {
            Layer::Kv { class: KvClass::Concatenate, kv: None } => {
                return Err("mlx-lm cannot load a ConcatenateKVCache that was never filled");
            }
            Layer::Kv { class: KvClass::Chunked { start_position: 1.., .. }, .. } if !new => {
                return Err(
                    "mlx-lm 0.31 loses the position of a ChunkedKVCache that dropped tokens, write 0.32",
                );
            }
            Layer::Kv { kv: Some(p), .. } | Layer::Rotating { kv: Some(p), .. } => {
                self.put(&path, &[0], Item::Array(Piece::Tensor(&p.keys)));
                self.put(&path, &[1], Item::Array(Piece::Tensor(&p.values)));
            }
            Layer::Quantized { kv: Some(p), .. } => {
                for (side, packed) in [&p.keys, &p.values].into_iter().enumerate() {
                    for (j, x) in [&packed.words, &packed.scales, &packed.biases].into_iter().enumerate() {
                        self.put(&path, &[side, j], Item::Array(Piece::Tensor(x)));
                    }
                }
            }
            Layer::Kv { kv: None, .. }
            | Layer::Quantized { kv: None, .. }
            | Layer::Rotating { kv: None, .. } => {
                self.put(&path, &[0], Item::None);
                self.put(&path, &[1], Item::None);
            }
            Layer::Arrays { arrays, left_padding, lengths } => {
                self.arrays(arrays, [left_padding, lengths], &path)?;
            }
            Layer::List(layers) => self.list(layers, &path)?,
            Layer::Opaque { class, .. } if new && packed_class(class).is_none() => {
                return Err("0.31 does not say which of its rows are tokens, so 0.32 cannot be written");
            }
            Layer::Opaque { tensors, .. } => {
                for (name, x) in tensors {
                    let tail: Result<Vec<usize>, _> = name.split('.').map(str::parse).collect();
                    let tail = tail.map_err(|_| "a tensor has no tree path for a name")?;
                    self.put(&path, &tail, Item::Array(Piece::Raw(x)));
                }
            }
        }
        if let (true, Some(spec)) = (new, fields_of(layer.class())) {
            let fields = counters(layer);
            for (j, field) in spec.v032.iter().enumerate() {
                self.put(&path, &[2 + j], Item::Counter(fields.get(field).copied().unwrap_or(0)));
            }
        }
        Ok(())
    }

    /// The leaves of an ArraysCache: its arrays, its left padding and its lengths.
    fn arrays(
        &mut self,
        arrays: &'a [Option<RawTensor>],
        lengths: [&'a Option<RawTensor>; 2],
        path: &[usize],
    ) -> Result<(), &'static str> {
        if arrays.is_empty() {
            return Err("mlx-lm cannot load an ArraysCache of no arrays");
        }
        let optional =
            |x: &'a Option<RawTensor>| x.as_ref().map_or(Item::None, |x| Item::Array(Piece::Raw(x)));
        if self.layout == Layout::V031 {
            if arrays.iter().any(Option::is_none) || lengths.into_iter().any(Option::is_some) {
                return Err("mlx-lm 0.31 holds neither missing arrays nor paddings or lengths, write 0.32");
            }
            arrays.iter().enumerate().for_each(|(j, x)| self.put(path, &[j], optional(x)));
            return Ok(());
        }
        arrays.iter().enumerate().for_each(|(j, x)| self.put(path, &[0, j], optional(x)));
        lengths.into_iter().enumerate().for_each(|(j, x)| self.put(path, &[1 + j], optional(x)));
        Ok(())
    }

    /// The leaves of a CacheList.
    fn list(&mut self, layers: &'a [Layer], path: &[usize]) -> Result<(), &'static str> {
        if layers.is_empty() {
            return Err("mlx-lm cannot load a CacheList of no caches");
        }
        for (j, layer) in layers.iter().enumerate() {
            let mut below = [path, &[j]].concat();
            if self.layout == Layout::V032 {
                self.put(&below, &[1], Item::Text(layer.class().into()));
                below.push(0);
            }
            self.state(layer, below)?;
        }
        Ok(())
    }

    /// The meta state of 0.31.
    fn meta(&mut self, layer: &Layer, path: String) {
        let mut put = |tail: String, value: &str| self.meta.insert(tail, value.to_string());
        match layer {
            Layer::List(layers) => {
                for (j, layer) in layers.iter().enumerate() {
                    self.meta.insert(format!("{path}.0.{j}"), layer.class().into());
                    self.meta(layer, format!("{path}.1.{j}"));
                }
            }
            Layer::Opaque { class, meta, .. } if packed_class(class).is_none() => {
                for (tail, value) in meta {
                    put(format!("{path}.{tail}"), value);
                }
            }
            _ => {
                let fields = counters(layer);
                match fields_of(layer.class()).map(|spec| spec.v031) {
                    None | Some([]) => drop(put(path, "")),
                    Some(names) => {
                        for (j, name) in names.iter().enumerate() {
                            put(format!("{path}.{j}"), &fields.get(name).copied().unwrap_or(0).to_string());
                        }
                    }
                }
            }
        }
    }

    fn metadata(&self, user_metadata: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let (user, classes) = if self.layout == Layout::V031 { (1, 2) } else { (0, 1) };
        let mut all: BTreeMap<_, _> = self.meta.iter().map(|(k, v)| (format!("0.{k}"), v.clone())).collect();
        all.extend(user_metadata.iter().map(|(k, v)| (format!("{user}.{k}"), v.clone())));
        all.extend(
            self.classes.iter().enumerate().map(|(i, class)| (format!("{classes}.{i}"), class.clone())),
        );
        if self.layout == Layout::V032 {
            all.insert("2.0".into(), String::new());
            let kinds = self.items.iter().filter_map(|(path, item)| Some((path, item.kind()?)));
            for (i, (path, kind)) in kinds.enumerate() {
                let path: Vec<_> = path.iter().map(usize::to_string).collect();
                all.insert(format!("2.{}.0", i + 1), path.join("."));
                all.insert(format!("2.{}.1", i + 1), kind.into());
            }
        }
        all
    }
}

/// The counters of a layer, by name.
fn counters(layer: &Layer) -> Fields {
    let mut fields = Fields::from([("offset", layer.offset().unwrap_or(0))]);
    match layer {
        Layer::Kv { class: KvClass::Chunked { chunk_size, start_position }, .. } => {
            fields.extend([("chunk_size", *chunk_size), ("start_position", *start_position)]);
        }
        Layer::Quantized { group_size, bits, .. } => {
            fields.extend([("group_size", *group_size), ("bits", *bits)]);
        }
        Layer::Rotating { ring, .. } => {
            fields.extend([("keep", ring.keep), ("max_size", ring.max_size), ("idx", ring.idx)]);
        }
        _ => {}
    }
    fields
}

impl<'a> Item<'a> {
    /// The entry in the table of 0.32.
    fn kind(&self) -> Option<&'static str> {
        match self {
            Item::Array(_) => None,
            Item::Counter(_) => Some("scalar"),
            Item::Text(_) => Some("string"),
            Item::None => Some("none"),
        }
    }

    /// The same leaf, whose array comes when it is written.
    fn late(self) -> Item<'static> {
        match self {
            Item::Array(piece) => Item::Array(piece.late()),
            Item::Counter(n) => Item::Counter(n),
            Item::Text(text) => Item::Text(text),
            Item::None => Item::None,
        }
    }

    /// The tensor that stands for the leaf.
    fn into_piece(self) -> Piece<'a> {
        let made = |dtype, shape, bytes| Piece::Made(RawTensor { dtype, shape, bytes });
        match self {
            Item::Array(piece) => piece,
            Item::Counter(n) => match i32::try_from(n) {
                Ok(n) => made(Dtype::I32, vec![], n.to_le_bytes().into()),
                Err(_) => made(Dtype::I64, vec![], (n as u64).to_le_bytes().into()),
            },
            Item::Text(s) => {
                let points = s.chars().flat_map(|c| (c as u32).to_le_bytes()).collect();
                made(Dtype::I32, vec![s.chars().count()], points)
            }
            Item::None => made(Dtype::F32, vec![0], vec![]),
        }
    }
}
