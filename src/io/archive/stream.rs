//! Whole caches one layer at a time: from a prompt cache in a file, to one, and to a compressed file.
//!
//! At most one layer is dense in memory, beside what unpacking it needs, and no packed cache is there twice.

use super::manifest::{Checksum, Manifest, lay_out};
use super::{Archive, CHECKSUM_KEY, Entry, KEY, Packer, VERSION, dense, unpack};
use crate::compressor::{CompressedLayer, CompressedSide, CompressionStats, Compressor};
use crate::engine::Engine;
use crate::engine::cpu::workers;
use crate::error::{Error, Result};
use crate::io::files::Outlives;
use crate::io::image::{Image, Piece};
use crate::io::prompt_cache::{Layers, Layout, Offset, PromptCache};
use crate::pool::Parcel;
use crate::tensor::{Dtype, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

impl Archive {
    /// As [`Archive::compress_after`] of the prompt cache in a file and of a cache of a pool; gives blocks for a pool, and what they cost.
    ///
    /// # Errors
    /// As [`PromptCache::read`], [`Archive::compress`] and, unless `uneven` is set, [`PromptCache::check_even`].
    pub fn compress_file<E: Engine>(
        before: Option<&Parcel<Archive>>,
        path: &Path,
        compressor: &Compressor<E>,
        uneven: bool,
    ) -> Result<(Parcel<Archive>, CompressionStats)> {
        let before = before.filter(|b| b.rest().recipe == *compressor.recipe());
        PromptCache::read_layers(path, |layout, mut metadata, layers| {
            let recipe = compressor.recipe().clone();
            let mut packer = Packer::new(compressor, &mut metadata);
            let mut parcel = Parcel::split(Archive { recipe, layout, metadata, layers: vec![] })?;
            let (mut sums, mut offsets) = ([[0; 2]; 2], vec![]);
            for (i, layer) in layers.enumerate() {
                let layer = layer?;
                let old = before.filter(|b| i < b.rest().layers.len()).map(|b| layer_of(b, i)).transpose()?;
                Offset::of(i.to_string(), &layer, &mut offsets);
                let entry = packer.layer(i, &layer, old.as_ref())?;
                measure(&entry, &mut sums);
                parcel.extend(|archive| archive.layers.push(entry))?;
            }
            if !uneven {
                Offset::check_even(&offsets)?;
            }
            Ok((parcel, CompressionStats::new(sums[0], sums[1])))
        })
    }

    /// As [`Archive::restore`] of a cache of a pool and [`PromptCache::write`], in its own layout if none is given.
    ///
    /// # Errors
    /// As [`Archive::restore`] and [`PromptCache::write`].
    pub fn restore_file<E: Engine>(
        parcel: &Parcel<Archive>,
        compressor: &Compressor<E>,
        path: &Path,
        layout: Option<Layout>,
    ) -> Result<u64> {
        let rest = parcel.rest();
        let layers = Layers {
            metadata: &rest.metadata,
            count: rest.layers.len(),
            like: &|i| unpack(&rest.layers[i], &zeros),
            layer: &|i| unpack(&layer_of(parcel, i)?, &|side| dense(side, compressor)),
        };
        PromptCache::write_layers(&layers, path, layout.unwrap_or(rest.layout))
    }

    /// As [`Archive::write`] of a cache of a pool, with other metadata.
    ///
    /// # Errors
    /// As [`Archive::write`].
    pub(super) fn write_parcel(
        parcel: &Parcel<Archive>,
        metadata: &BTreeMap<String, String>,
        path: &Path,
    ) -> Result<u64> {
        write(parcel.rest(), metadata, &|i| Ok(Cow::Owned(layer_of(parcel, i)?)), path, Outlives::Answer)
    }
}

/// Writes a compressed file of the layers that `entry` gives; `cache` says all else.
pub(super) fn write<'a>(
    cache: &Archive,
    metadata: &BTreeMap<String, String>,
    entry: &dyn Fn(usize) -> Result<Cow<'a, Entry>>,
    path: &Path,
    outlives: Outlives,
) -> Result<u64> {
    let (mut tensors, mut checksums, mut layers) = (BTreeMap::new(), BTreeMap::new(), vec![]);
    for i in 0..cache.layers.len() {
        let (entry, mut pieces) = (entry(i)?, BTreeMap::new());
        layers.push(lay_out(&entry, &i.to_string(), &mut pieces));
        let sum = |(name, piece): (&String, &Piece)| (name.clone(), Checksum(piece.checksum()));
        checksums.extend(workers::run(|| pieces.par_iter().map(sum).collect::<Vec<_>>())?);
        tensors.extend(pieces.into_iter().map(|(name, piece)| (name, piece.late())));
    }
    let (recipe, layout, metadata) = (cache.recipe.clone(), cache.layout.to_string(), metadata.clone());
    let manifest = Manifest { version: VERSION, recipe, layout, metadata, layers, checksums };
    let bad = |detail: String| Error::Format { path: path.into(), detail };
    let text = serde_json::to_string(&manifest).map_err(|e| bad(e.to_string()))?;
    let sum = Manifest::checksum(&text);
    let metadata = BTreeMap::from([(KEY.to_string(), text), (CHECKSUM_KEY.to_string(), sum)]);
    let image = Image::new(&metadata, tensors.into_iter().collect()).map_err(bad)?;
    let current = RefCell::new(None);
    image.write_late(path, outlives, &mut |name, put| {
        let index: usize = name.split('.').next().and_then(|i| i.parse().ok()).unwrap_or_default();
        if current.borrow().as_ref().is_none_or(|(i, _)| *i != index) {
            // The layer before goes first.
            current.replace(None);
            current.replace(Some((index, entry(index)?)));
        }
        let (current, mut pieces) = (current.borrow(), BTreeMap::new());
        if let Some((_, entry)) = &*current {
            lay_out(entry, &index.to_string(), &mut pieces);
        }
        pieces.get(name).map_or(Ok(()), put)
    })
}

/// One layer of a cache in blocks, joined.
fn layer_of(parcel: &Parcel<Archive>, layer: usize) -> Result<Entry> {
    let layers = &parcel.rest().layers;
    let mut place = layers[..layer].iter().map(bodies).sum();
    let mut entry = layers[layer].clone();
    fill(&mut entry, parcel, &mut place)?;
    Ok(entry)
}

/// Adds bytes and elements of keys and of values.
fn measure(entry: &Entry, sums: &mut [[usize; 2]; 2]) {
    match entry {
        Entry::Packed { layer, .. } => {
            let CompressedLayer { key, value } = &**layer;
            for (i, side) in [key, value].into_iter().enumerate() {
                sums[0][i] += side.nbytes();
                sums[1][i] += side.elements();
            }
        }
        Entry::Other(_) => {}
        Entry::List(list) => list.iter().for_each(|entry| measure(entry, sums)),
    }
}

/// Places of an entry in [`crate::pool::Pooled::bodies`].
fn bodies(entry: &Entry) -> usize {
    match entry {
        Entry::Packed { .. } => 2,
        Entry::Other(_) => 0,
        Entry::List(list) => list.iter().map(bodies).sum(),
    }
}

fn fill(entry: &mut Entry, parcel: &Parcel<Archive>, place: &mut usize) -> Result<()> {
    match entry {
        Entry::Packed { layer, .. } => {
            (layer.key.body, layer.value.body) = (parcel.body(*place)?, parcel.body(*place + 1)?);
            *place += 2;
            Ok(())
        }
        Entry::Other(_) => Ok(()),
        Entry::List(list) => list.iter_mut().try_for_each(|entry| fill(entry, parcel, place)),
    }
}

/// A side of zeros, whose memory is not touched before it is written to.
fn zeros(side: &CompressedSide<Tensor>) -> Result<Tensor> {
    let count = side.shape.iter().product();
    match side.dtype {
        Dtype::F32 => Tensor::new(&side.shape, bytemuck::zeroed_vec::<f32>(count)),
        Dtype::F16 => Tensor::new(&side.shape, bytemuck::zeroed_vec::<f16>(count)),
        Dtype::BF16 => Tensor::new(&side.shape, bytemuck::zeroed_vec::<bf16>(count)),
    }
}
