//! What the layers of an archive would take if the context had another length, by the same recipe.
//!
//! A short cache says little about a recipe: its exact tokens are most of it. The cost of a longer one follows from the row bytes of
//! the codecs, so nothing has to be packed to know it.

use super::{Archive, Shell};
use crate::compressor::{CompressedSide, CompressionStats, Compressor};
use crate::error::Result;
use crate::spec::Side;
use crate::tensor::Tensor;

/// Bytes of a number in the tables of a frame.
const TABLE: usize = 4;

impl Archive {
    /// Bytes and ratios of the packed layers if each held `tokens` tokens; a layer with a window holds no more than that. At the length
    /// that the archive has this is [`Archive::stats`].
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] never for the recipe that packed these layers.
    pub fn stats_at(&self, tokens: usize) -> Result<CompressionStats> {
        let compressor = Compressor::new(self.recipe.clone());
        let (mut bytes, mut elements) = ([0; 2], [0; 2]);
        for (ordinal, (_, shell, layer)) in self.packed().into_iter().enumerate() {
            let held = match shell {
                Shell::Rotating(ring) => tokens.min(ring.max_size),
                Shell::Plain(_) | Shell::Quantized { .. } => tokens,
            };
            let sides = [(Side::Key, &layer.key), (Side::Value, &layer.value)];
            for (i, (side, packed)) in sides.into_iter().enumerate() {
                let [b, h, _, d] = packed.shape;
                bytes[i] += b * h * head_bytes(&compressor, side, ordinal, packed, held)?;
                elements[i] += b * h * held * d;
            }
        }
        Ok(CompressionStats::new(bytes, elements))
    }
}

/// Bytes of `tokens` tokens of one head of one sequence.
fn head_bytes(
    compressor: &Compressor,
    side: Side,
    ordinal: usize,
    packed: &CompressedSide<Tensor>,
    tokens: usize,
) -> Result<usize> {
    let (recipe, dim) = (compressor.recipe(), packed.shape[3]);
    let exact = |tokens: usize| tokens * dim * packed.dtype.bytes();
    let Some(codec) = compressor.codec(side, ordinal, dim)? else { return Ok(exact(tokens)) };
    let [sinks, body, window] = recipe.split(tokens);
    let tables = if body > 0 { codec.spec().tables(recipe.centred && side == Side::Key) } else { 0 };
    Ok(exact(sinks + window) + body * codec.row_bytes() + tables * dim * TABLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::prompt_cache::PromptCache;

    #[test]
    fn the_cost_at_the_present_length_is_that_of_the_buffers() {
        let cache = PromptCache::read("examples/data/smollm2_250.safetensors").unwrap();
        for text in ["best@4", "best@3,window=0", "kivi@2", "mlx-affine@4/16", "turboquant-prod@3,sinks=4"] {
            let compressor = Compressor::new(text.parse().unwrap());
            let archive = Archive::compress(&cache, &compressor, || ()).unwrap();
            let (now, planned) = (archive.stats(), archive.stats_at(250).unwrap());
            assert_eq!((now.bytes, now.fp16_bytes), (planned.bytes, planned.fp16_bytes), "{text}");
            let longer = archive.stats_at(8192).unwrap();
            // Where nothing is exact the ratio does not depend on the length, but for tables.
            assert!(longer.compression_ratio > 0.999 * now.compression_ratio, "{text}");
        }
    }
}
