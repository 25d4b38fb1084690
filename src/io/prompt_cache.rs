//! mlx-lm's prompt-cache files: both layouts (0.31 and 0.32) read, checked, converted and written.
//!
//! The two releases cannot read each other's files and nothing in a file says which one wrote it. Reading finds
//! out, checks every count against the arrays beside it and cuts buffers to the tokens they hold; writing makes
//! the layout that is asked for. Recurrent state and lists of caches pass through.

pub mod affine;
mod by_recipe;
mod class;
mod layer;
mod offsets;
mod packed;
mod read;
mod ring;
mod source;
mod swift;
mod tree;
mod write;

pub use crate::io::raw::RawTensor;
pub use affine::Packed;
pub use class::{KvClass, Pair};
pub use layer::{KvKind, Layer};
pub(crate) use offsets::Offset;
pub use offsets::{place_in_layer, usual_offsets};
pub use ring::Ring;
pub(crate) use write::Layers;

use crate::error::{Error, Result};
use crate::io::container::Container;
use source::OpenedFile;
use std::collections::BTreeMap;
use std::path::Path;

/// The arrangement of a prompt-cache file, named after the releases of mlx-lm that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// mlx-lm 0.28 to 0.31; older files, whose meta states hold one number more, are refused.
    V031,
    /// mlx-lm from 0.32.
    V032,
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Layout::V031 => "0.31",
            Layout::V032 => "0.32",
        })
    }
}

impl std::str::FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Layout> {
        [Layout::V031, Layout::V032].into_iter().find(|layout| layout.to_string() == text).ok_or_else(|| {
            Error::Parse {
                what: "prompt-cache layout",
                text: text.into(),
                reason: "expected 0.31 or 0.32".into(),
            }
        })
    }
}

/// Key among the user's metadata under which a restored cache says how it was packed, see `Archive::sign`. It has no dot, which would
/// make a tree of it in mlx-lm.
pub(crate) const ORIGIN_KEY: &str = "turbomoq_origin";

/// Counters of a layer, by name.
type Fields = BTreeMap<&'static str, usize>;

/// The counters of one class, in the order of each layout. 0.31 keeps them in the metadata, 0.32 in tensors.
struct Spec {
    class: &'static str,
    v031: &'static [&'static str],
    v032: &'static [&'static str],
}

const SPECS: [Spec; 5] = [
    Spec { class: "KVCache", v031: &[], v032: &["offset"] },
    Spec { class: "ConcatenateKVCache", v031: &[], v032: &[] },
    Spec {
        class: "ChunkedKVCache",
        v031: &["chunk_size", "start_position"],
        v032: &["offset", "chunk_size", "start_position"],
    },
    Spec {
        class: "QuantizedKVCache",
        v031: &["offset", "group_size", "bits"],
        v032: &["offset", "group_size", "bits"],
    },
    Spec {
        class: "RotatingKVCache",
        v031: &["keep", "max_size", "offset", "idx"],
        v032: &["offset", "keep", "max_size", "idx"],
    },
];

fn fields_of(class: &str) -> Option<&'static Spec> {
    SPECS.iter().find(|spec| spec.class == class)
}

/// A prompt cache of mlx-lm.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptCache {
    /// The layout of the file it was read from.
    pub layout: Layout,
    /// What the user stored beside the cache; `mlx_lm.cache_prompt` stores `model` and `tokenizer_config`.
    pub metadata: BTreeMap<String, String>,
    /// One per cache of the model.
    pub layers: Vec<Layer>,
}

/// What [`PromptCache::read_known`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// As in [`PromptCache`].
    pub layout: Layout,
    /// As in [`PromptCache`].
    pub metadata: BTreeMap<String, String>,
    /// The layers of known classes, by index.
    pub layers: BTreeMap<usize, Layer>,
    /// The class names of the others (unknown or batched), by index.
    pub skipped: BTreeMap<usize, String>,
}

impl PromptCache {
    /// Reads a file of either layout.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if the file is damaged, inconsistent or of no known layout;
    /// [`Error::UnknownClass`] and [`Error::BatchCache`] for layers that cannot be interpreted.
    pub fn read(path: impl AsRef<Path>) -> Result<PromptCache> {
        let mut cache = PromptCache::read_signed(path)?;
        cache.metadata.remove(ORIGIN_KEY);
        Ok(cache)
    }

    /// As [`PromptCache::read`], and the metadata keeps what a restored cache says of its origin, for `Archive::compress`.
    ///
    /// # Errors
    /// As [`PromptCache::read`].
    pub fn read_signed(path: impl AsRef<Path>) -> Result<PromptCache> {
        let file = Container::open(path.as_ref())?;
        let source = OpenedFile::new(&file)?;
        let layers = source.layers().collect::<Result<_>>()?;
        Ok(PromptCache { layout: source.layout, metadata: source.metadata, layers })
    }

    /// Reads a file one layer at a time: `take` gets the layout, the metadata and the layers as they are asked for.
    ///
    /// # Errors
    /// As [`PromptCache::read`], each by its layer, and whatever `take` returns.
    pub(crate) fn read_layers<R>(
        path: &Path,
        take: impl FnOnce(Layout, BTreeMap<String, String>, &mut dyn Iterator<Item = Result<Layer>>) -> Result<R>,
    ) -> Result<R> {
        let file = Container::open(path)?;
        let mut source = OpenedFile::new(&file)?;
        let (layout, metadata) = (source.layout, std::mem::take(&mut source.metadata));
        take(layout, metadata, &mut source.layers())
    }

    /// As [`PromptCache::write`] of a cache that is made one layer at a time, for a reader who removes the file: nothing is flushed.
    ///
    /// # Errors
    /// As [`PromptCache::write`], and whatever making a layer returns.
    pub(crate) fn write_layers(layers: &Layers, path: &Path, layout: Layout) -> Result<u64> {
        write::write_layers(layers, path, layout)
    }

    /// Reads the layers whose classes are known and names the others.
    ///
    /// # Errors
    /// As [`PromptCache::read`], but for unknown and batched classes.
    pub fn read_known(path: impl AsRef<Path>) -> Result<Known> {
        let file = Container::open(path.as_ref())?;
        let source = OpenedFile::new(&file)?;
        let (mut layers, mut skipped) = (BTreeMap::new(), BTreeMap::new());
        for (i, layer) in source.layers().enumerate() {
            match layer {
                Ok(layer) => drop(layers.insert(i, layer)),
                Err(Error::UnknownClass { class, .. } | Error::BatchCache { class, .. }) => {
                    skipped.insert(i, class);
                }
                Err(e) => return Err(e),
            }
        }
        Ok(Known { layout: source.layout, metadata: source.metadata, layers, skipped })
    }

    /// Writes the cache in a layout, replaces `path` in one step and returns the bytes written. A file that was
    /// read before may be replaced: nothing of it is needed any more.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unsupported`] for a layer that is inconsistent or that the layout cannot hold.
    pub fn write(&self, path: impl AsRef<Path>, layout: Layout) -> Result<u64> {
        write::write(self, path.as_ref(), layout)
    }

    /// Bytes of the file that [`PromptCache::write`] makes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as [`PromptCache::write`].
    pub fn file_size(&self, layout: Layout) -> Result<u64> {
        write::file_size(self, layout)
    }
}
