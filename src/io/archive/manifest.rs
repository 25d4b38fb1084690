//! The manifest of a compressed file, read and held to its checksums, and the tensors that it names, laid out for writing.

use super::shell::shell_of;
use super::{CHECKSUM_KEY, Entry, KEY, Shell, VERSION};
use crate::compressor::CompressedSide;
use crate::error::Result;
use crate::io::container::Container;
use crate::io::image::Piece;
use crate::io::prompt_cache::{KvKind, Layer, RawTensor};
use crate::recipe::Recipe;
use crate::spec::CodecSpec;
use crate::tensor::{Dtype, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most layers of a file, those inside lists included, and most arrays of one layer: some times what any model has.
pub(super) const MOST: usize = 4096;

#[derive(Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) recipe: Recipe,
    pub(super) layout: String,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) layers: Vec<LayerManifest>,
    /// Of every tensor; not in version 1.
    #[serde(default)]
    pub(super) checksums: BTreeMap<String, Checksum>,
}

/// A checksum as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(super) struct Checksum(pub(super) u64);

impl From<Checksum> for String {
    fn from(sum: Checksum) -> String {
        format!("{:016x}", sum.0)
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;
    fn try_from(text: String) -> Result<Checksum, String> {
        let sum = u64::from_str_radix(&text, 16).map(Checksum);
        sum.ok().filter(|sum| String::from(*sum) == text).ok_or_else(|| format!("{text:?} is no checksum"))
    }
}

/// Small, so that a manifest of many layers costs little more than its text before they are counted.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LayerManifest {
    Packed(Box<PackedManifest>),
    Empty { shell: Box<Shell> },
    Arrays(Box<ArraysManifest>),
    Opaque(Box<OpaqueManifest>),
    List(Vec<LayerManifest>),
}

impl LayerManifest {
    /// As [`Layer::is_kv`] of the layer that it describes.
    pub(super) fn is_kv(&self) -> bool {
        match self {
            LayerManifest::Packed(_) | LayerManifest::Empty { .. } | LayerManifest::Opaque(_) => true,
            LayerManifest::Arrays(_) => false,
            LayerManifest::List(layers) => layers.iter().any(LayerManifest::is_kv),
        }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct PackedManifest {
    pub(super) shell: Shell,
    pub(super) key: SideManifest,
    pub(super) value: SideManifest,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ArraysManifest {
    pub(super) arrays: Vec<Option<usize>>,
    pub(super) left_padding: Option<usize>,
    pub(super) lengths: Option<usize>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct OpaqueManifest {
    pub(super) class: String,
    pub(super) tensors: BTreeMap<String, usize>,
    pub(super) meta: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct SideManifest {
    pub(super) shape: [usize; 4],
    pub(super) dtype: Dtype,
    pub(super) codec: Option<CodecSpec>,
}

impl Manifest {
    /// The manifest of a file. Its own checksum and the checksums of its tensors are compared if `verify` says so.
    pub(super) fn read(file: &mut Container, verify: bool) -> Result<Manifest> {
        let text = file.metadata.get(KEY).ok_or_else(|| file.bad("not a turbomoq file: no such metadata"))?;
        // The version comes first: a newer file may have a manifest that this version cannot read.
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let bad = |e: serde_json::Error| file.bad(format!("manifest: {e}"));
        let Head { version } = serde_json::from_str(text).map_err(bad)?;
        if !(1..=VERSION).contains(&version) {
            let known = format!("this program reads versions 1 to {VERSION}");
            return Err(file.bad(format!("format version {version}, {known}")));
        }
        let verify = verify && version > 1;
        if verify && file.metadata.get(CHECKSUM_KEY).map(String::as_str) != Some(&Manifest::checksum(text)) {
            return Err(file.bad("the manifest is damaged: its checksum is another"));
        }
        let mut manifest: Manifest = serde_json::from_str(text).map_err(bad)?;
        let layers = manifest.layers.iter().map(LayerManifest::count).sum::<usize>();
        if layers > MOST {
            return Err(file.bad(format!("manifest: {layers} layers, at most {MOST} are read")));
        }
        if verify {
            let sums = std::mem::take(&mut manifest.checksums);
            file.hold_to(sums.into_iter().map(|(name, sum)| (name, sum.0)).collect())?;
        }
        Ok(manifest)
    }

    /// What the user stored beside the cache in a file of a later version, as far as this version can read that.
    pub(super) fn metadata_of_later(file: &Container) -> Option<BTreeMap<String, String>> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
            metadata: BTreeMap<String, String>,
        }
        let head: Head = serde_json::from_str(file.metadata.get(KEY)?).ok()?;
        (head.version > VERSION).then_some(head.metadata)
    }

    /// The checksum of a manifest's text.
    pub(super) fn checksum(text: &str) -> String {
        Checksum(xxhash_rust::xxh3::xxh3_64(text.as_bytes())).into()
    }
}

impl LayerManifest {
    /// Layers and lists.
    fn count(&self) -> usize {
        match self {
            LayerManifest::List(list) => 1 + list.iter().map(LayerManifest::count).sum::<usize>(),
            _ => 1,
        }
    }
}

/// Puts the tensors of an entry under their names and gives its manifest.
pub(super) fn lay_out<'a>(
    entry: &'a Entry,
    at: &str,
    tensors: &mut BTreeMap<String, Piece<'a>>,
) -> LayerManifest {
    let mut count = 0;
    let mut raw = |t: &'a RawTensor| {
        tensors.insert(format!("{at}.raw.{count}"), Piece::Raw(t));
        count += 1;
        count - 1
    };
    match entry {
        Entry::Packed { shell, layer } => LayerManifest::Packed(Box::new(PackedManifest {
            shell: *shell,
            key: lay_out_side(&layer.key, &format!("{at}.key"), tensors),
            value: lay_out_side(&layer.value, &format!("{at}.value"), tensors),
        })),
        Entry::List(list) => LayerManifest::List(
            list.iter().enumerate().map(|(i, e)| lay_out(e, &format!("{at}.{i}"), tensors)).collect(),
        ),
        Entry::Other(Layer::Arrays { arrays, left_padding, lengths }) => {
            LayerManifest::Arrays(Box::new(ArraysManifest {
                arrays: arrays.iter().map(|a| a.as_ref().map(&mut raw)).collect(),
                left_padding: left_padding.as_ref().map(&mut raw),
                lengths: lengths.as_ref().map(&mut raw),
            }))
        }
        Entry::Other(Layer::Opaque { class, tensors: list, meta }) => {
            LayerManifest::Opaque(Box::new(OpaqueManifest {
                class: class.clone(),
                tensors: list.iter().map(|(name, t)| (name.clone(), raw(t))).collect(),
                meta: meta.clone(),
            }))
        }
        Entry::Other(layer) => {
            // What has tokens became a packed layer.
            let shell = shell_of(layer, layer.kind().unwrap_or(KvKind::Plain));
            LayerManifest::Empty { shell: Box::new(shell) }
        }
    }
}

fn lay_out_side<'a>(
    side: &'a CompressedSide<Tensor>,
    at: &str,
    tensors: &mut BTreeMap<String, Piece<'a>>,
) -> SideManifest {
    let mut put = |part: &str, t: Option<&'a Tensor>| {
        if let Some(t) = t {
            tensors.insert(format!("{at}.{part}"), Piece::Tensor(t));
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
        if let Some(levels) = body.codec().fitted() {
            let bytes = levels.iter().flat_map(|x| x.to_le_bytes()).collect();
            let raw = RawTensor { dtype: safetensors::Dtype::F32, shape: vec![levels.len()], bytes };
            tensors.insert(format!("{at}.levels"), Piece::Made(raw));
        }
    }
    SideManifest {
        shape: side.shape,
        dtype: side.dtype,
        codec: side.body.as_ref().map(|b| *b.codec().spec()),
    }
}
