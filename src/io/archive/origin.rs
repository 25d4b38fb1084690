//! What a restored prompt cache says about the file that it came from, so that packing it again gives the same codes.
//!
//! A frame is made from the first block of rows, and rows that were packed once give another one: packed again and again, a cache
//! would drift. So a restored cache carries the frames in its metadata, each with a checksum of the rows of its first block as they
//! were restored. A frame is taken only for the same recipe and the same first block; tokens may follow. A Python program that
//! loads the cache and saves it without this metadata loses nothing but that.

use super::{Archive, Entry};
use crate::codec::codes::Frame;
use crate::compressor::TOKENS_PER_BLOCK;
use crate::error::Result;
use crate::io::image::Piece;
use crate::io::prompt_cache::{Layer, PromptCache};
use crate::recipe::Recipe;
use crate::spec::Side;
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The sides that were packed, by `layer.side`.
#[derive(Serialize, Deserialize)]
pub(super) struct Origin {
    recipe: Recipe,
    sides: BTreeMap<String, SideOrigin>,
}

/// The frame of a side, as hexadecimal digits of its numbers, and what it belongs to.
#[derive(Serialize, Deserialize)]
struct SideOrigin {
    /// Checksum of the rows of the first block.
    rows: String,
    centre: Option<String>,
    gain: Option<String>,
    order: Option<String>,
}

impl Origin {
    /// What the metadata of a cache says, if it is about this recipe. Anything else is as good as nothing.
    pub(super) fn parse(text: &str, recipe: &Recipe) -> Option<Origin> {
        serde_json::from_str::<Origin>(text).ok().filter(|origin| origin.recipe == *recipe)
    }

    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// What an archive's cache should say when it is restored.
    pub(super) fn of(archive: &Archive, restored: &PromptCache) -> Result<Origin> {
        let mut origin = Origin { recipe: archive.recipe.clone(), sides: BTreeMap::new() };
        for (i, (entry, layer)) in archive.layers.iter().zip(&restored.layers).enumerate() {
            origin.add(&i.to_string(), entry, layer)?;
        }
        Ok(origin)
    }

    fn add(&mut self, at: &str, entry: &Entry, layer: &Layer) -> Result<()> {
        let packed = match (entry, layer) {
            (Entry::List(entries), Layer::List(layers)) => {
                for (i, (entry, layer)) in entries.iter().zip(layers).enumerate() {
                    self.add(&format!("{at}.{i}"), entry, layer)?;
                }
                return Ok(());
            }
            (Entry::Packed { layer: packed, .. }, _) => packed,
            _ => return Ok(()),
        };
        let Some(kv) = layer.attention_kv()? else { return Ok(()) };
        for (side, packed, rows) in
            [(Side::Key, &packed.key, &kv.keys), (Side::Value, &packed.value, &kv.values)]
        {
            let Some(body) = &packed.body else { continue };
            let hex = |t: &Option<Tensor>| t.as_ref().map(to_hex).transpose();
            let frame = body.frame();
            let of = SideOrigin {
                rows: first_block(rows, packed.split())?,
                centre: hex(&frame.centre)?,
                gain: hex(&frame.gain)?,
                order: hex(&frame.order)?,
            };
            self.sides.insert(format!("{at}.{side}"), of);
        }
        Ok(())
    }

    /// The frame with which rows [B, H, T, D] were packed before, if their first block is one that was.
    pub(super) fn frame(
        &self,
        at: &str,
        side: Side,
        rows: &Tensor,
        split: [usize; 3],
    ) -> Result<Option<Frame<Tensor>>> {
        let Some(of) = self.sides.get(&format!("{at}.{side}")) else { return Ok(None) };
        let &[b, h, _, d] = rows.shape() else { return Ok(None) };
        if split[1] == 0 || first_block(rows, split)? != of.rows {
            return Ok(None);
        }
        // `None` if there are numbers, but not so many.
        let numbers = |text: &Option<String>| match text {
            Some(text) => from_hex(text, b * h * d).map(Some),
            None => Some(None),
        };
        let (Some(centre), Some(gain), Some(order)) =
            (numbers(&of.centre), numbers(&of.gain), numbers(&of.order))
        else {
            return Ok(None);
        };
        let floats = |bits: Vec<u32>| Tensor::new(&[b, h, d], bits.into_iter().map(f32::from_bits).collect());
        let frame = Frame {
            centre: centre.map(floats).transpose()?,
            gain: gain.map(floats).transpose()?,
            order: order.map(|order| Tensor::new(&[b, h, d], order)).transpose()?,
        };
        Ok(frame.check_entries().is_ok().then_some(frame))
    }
}

/// Checksum of the rows from which the frame comes.
fn first_block(rows: &Tensor, [sinks, packed, _]: [usize; 3]) -> Result<String> {
    let block = rows.slice(2, sinks, sinks + packed.min(TOKENS_PER_BLOCK))?;
    Ok(format!("{:016x}", Piece::Tensor(&block).checksum()))
}

fn to_hex(table: &Tensor) -> Result<String> {
    let bits: Vec<u32> = match table.float() {
        Some(_) => table.to_f32()?.into_iter().map(f32::to_bits).collect(),
        None => table.to_vec::<u32>()?,
    };
    Ok(bits.into_iter().map(|bits| format!("{bits:08x}")).collect())
}

/// So many numbers, or nothing.
fn from_hex(text: &str, count: usize) -> Option<Vec<u32>> {
    if text.len() != 8 * count || !text.is_ascii() {
        return None;
    }
    (0..count).map(|i| u32::from_str_radix(&text[8 * i..8 * i + 8], 16).ok()).collect()
}
