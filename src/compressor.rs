//! Whole caches at once: keys and values of every layer into packed form and back, with the bytes counted from the buffers.
//!
//! A side of a layer is divided by the recipe into exact sinks, packed tokens and an exact window. The frame (centre, gains,
//! channel order) comes from the first block of packed tokens, as it does when a cache is filled token by token.

mod again;
mod packable;

use crate::codec::Codec;
use crate::codec::codes::{Buffer, Codes, Frame};
use crate::engine::Engine;
use crate::engine::cpu::Cpu;
use crate::error::{Error, Result};
use crate::math::codebook;
use crate::recipe::Recipe;
use crate::spec::{CodecSpec, Grid, Side};
use crate::tensor::{Dtype, Tensor};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens from which a frame is made: the first block that leaves the exact window.
pub const TOKENS_PER_BLOCK: usize = 128;

/// Packs and unpacks caches by a recipe, on an engine.
#[derive(Clone, Debug)]
pub struct Compressor<E = Cpu> {
    recipe: Recipe,
    engine: E,
    levels: BTreeMap<(usize, Side), Arc<[f32]>>,
}

/// Keys or values of one layer: exact first tokens, packed tokens, exact last tokens.
#[derive(Clone, Debug)]
pub struct CompressedSide<T> {
    /// Exact first tokens [B, H, sinks, D].
    pub head: Option<T>,
    /// Packed tokens.
    pub body: Option<Codes<T>>,
    /// Exact last tokens [B, H, window, D].
    pub tail: Option<T>,
    /// Shape before packing, [B, H, T, D].
    pub shape: [usize; 4],
    /// Dtype before packing.
    pub dtype: Dtype,
}

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub struct CompressedLayer<T> {
    /// Keys.
    pub key: CompressedSide<T>,
    /// Values.
    pub value: CompressedSide<T>,
}

/// Keys and values of every layer.
#[derive(Clone, Debug)]
pub struct CompressedCache<T> {
    /// The layers.
    pub layers: Vec<CompressedLayer<T>>,
}

/// What a compressed cache costs, from its real buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CompressionStats {
    /// Bytes of all buffers: codes, scales, frames, exact tokens.
    pub bytes: usize,
    /// Bytes of the same keys and values in half precision.
    pub fp16_bytes: usize,
    /// `fp16_bytes / bytes`.
    pub compression_ratio: f64,
    /// Stored bits a key scalar, everything counted.
    pub avg_k_bits: f64,
    /// Stored bits per scalar of the values, everything counted.
    pub avg_v_bits: f64,
}

impl<T: Buffer> CompressedSide<T> {
    /// Bytes of all buffers.
    pub fn nbytes(&self) -> usize {
        let exact: usize = [&self.head, &self.tail].into_iter().flatten().map(T::nbytes).sum();
        exact + self.body.as_ref().map_or(0, Codes::nbytes)
    }

    /// Scalars before packing.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Tokens in the exact head, the packed body and the exact tail.
    pub fn split(&self) -> [usize; 3] {
        let len = |x: &Option<T>| x.as_ref().map_or(0, |x| x.shape()[2]);
        [len(&self.head), self.body.as_ref().map_or(0, |b| b.shape()[2]), len(&self.tail)]
    }
}

impl<T: Buffer> CompressedCache<T> {
    /// Real bytes and ratios.
    pub fn stats(&self) -> CompressionStats {
        let sum = |f: &dyn Fn(&CompressedLayer<T>) -> usize| self.layers.iter().map(f).sum::<usize>();
        let (k_bytes, v_bytes) = (sum(&|l| l.key.nbytes()), sum(&|l| l.value.nbytes()));
        let (k, v) = (sum(&|l| l.key.elements()), sum(&|l| l.value.elements()));
        CompressionStats::new([k_bytes, v_bytes], [k, v])
    }
}

impl CompressionStats {
    /// From bytes and elements of the keys and of the values.
    pub(crate) fn new([k_bytes, v_bytes]: [usize; 2], [k, v]: [usize; 2]) -> CompressionStats {
        let ratio = |a: usize, b: usize| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        let (bytes, fp16_bytes) = (k_bytes + v_bytes, 2 * (k + v));
        CompressionStats {
            bytes,
            fp16_bytes,
            compression_ratio: ratio(fp16_bytes, bytes),
            avg_k_bits: ratio(8 * k_bytes, k),
            avg_v_bits: ratio(8 * v_bytes, v),
        }
    }
}

impl Compressor<Cpu> {
    /// A compressor on the CPU engine.
    pub fn new(recipe: Recipe) -> Compressor<Cpu> {
        Compressor::with_engine(recipe, Cpu)
    }
}

impl<E: Engine> Compressor<E> {
    /// A compressor on an engine.
    pub fn with_engine(recipe: Recipe, engine: E) -> Compressor<E> {
        Compressor { recipe, engine, levels: BTreeMap::new() }
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// Fits the levels of one layer to samples of its keys and values [B, H, T, D]; from then on this layer uses them.
    ///
    /// Sides that are exact or affine have no levels to fit and stay as they are.
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn calibrate(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        for (side, x) in [(Side::Key, keys), (Side::Value, values)] {
            let [_, _, t, d] = check_rows(&layer.to_string(), side, x)?;
            let Some(spec) = self.recipe.spec(side, layer, d)? else { continue };
            let scalar = matches!(spec.grid, Grid::Lloyd | Grid::Beta | Grid::Fitted | Grid::Uniform);
            if !scalar || spec.outliers > 0 || t == 0 {
                continue;
            }
            // What the grid sees: centred, rotated rows of unit variance. Eight bits say it finely enough.
            let probe =
                CodecSpec { bits: 8, grid: Grid::Lloyd, residual: crate::spec::Residual::None, ..spec };
            let codec = Codec::new(probe)?;
            let frame = Cpu.frame(
                &codec,
                self.recipe.centred && side == Side::Key,
                &x.slice(2, 0, t.min(TOKENS_PER_BLOCK))?,
                None,
            )?;
            let codes = Cpu.encode(&Arc::new(codec), frame, x)?;
            let samples = unit_coordinates(&codes)?;
            self.levels.insert((layer, side), codebook::fit(&samples, spec.bits));
        }
        Ok(())
    }

    /// The codec of one side of a layer; `None` if the side stays exact. A fitted grid without calibration is Lloyd-Max.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the recipe has no form for this head dim.
    pub fn codec(&self, side: Side, layer: usize, head_dim: usize) -> Result<Option<Arc<Codec>>> {
        let Some(spec) = self.recipe.spec(side, layer, head_dim)? else { return Ok(None) };
        let codec = match self.levels.get(&(layer, side)) {
            Some(levels) => Codec::with_levels(CodecSpec { grid: Grid::Fitted, ..spec }, levels.clone())?,
            None if spec.grid == Grid::Fitted => Codec::new(CodecSpec { grid: Grid::Lloyd, ..spec })?,
            None => Codec::new(spec)?,
        };
        Ok(Some(Arc::new(codec)))
    }

    /// Packs one layer, keys and values [B, H, T, D] with D of their own. `layer` counts the layers that have keys and values, as
    /// recipes, plans and live caches do: in a hybrid model with attention in layers 3, 7 and 11 these are 0, 1 and 2.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if they are not float tensors of four axes that agree in all but the last,
    /// [`Error::NonFinite`] names the first NaN or infinity, [`Error::Unsupported`] as [`Compressor::codec`] and, naming the place,
    /// for numbers too large to be packed.
    pub fn compress_layer(
        &self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<CompressedLayer<E::Tensor>> {
        self.compress_layer_after(layer, keys, values, None)
    }

    /// Packs one layer of which `before` holds the beginning. Tokens that are bit for bit what `before` unpacks to keep their codes,
    /// so a cache that is unpacked, continued and packed again loses nothing more and costs only its new tokens.
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn compress_layer_after(
        &self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        before: Option<&CompressedLayer<E::Tensor>>,
    ) -> Result<CompressedLayer<E::Tensor>> {
        self.compress_layer_from((layer, &layer.to_string()), keys, values, before, [None, None])
    }

    /// As [`Compressor::compress_layer_after`]; rows of a side with a frame were packed with that frame before. Errors call the layer
    /// by its `name`.
    pub(crate) fn compress_layer_from(
        &self,
        (layer, name): (usize, &str),
        keys: &Tensor,
        values: &Tensor,
        before: Option<&CompressedLayer<E::Tensor>>,
        [key_frame, value_frame]: [Option<Frame<Tensor>>; 2],
    ) -> Result<CompressedLayer<E::Tensor>> {
        let (k, v) = (check_rows(name, Side::Key, keys)?, check_rows(name, Side::Value, values)?);
        if k[..3] != v[..3] {
            return Err(
                values.wrong_shape("values", format!("[{}, {}, {}, D] as the keys", k[0], k[1], k[2]))
            );
        }
        let (k, v) = ((keys, k), (values, v));
        Ok(CompressedLayer {
            key: self.compress_side((layer, name), Side::Key, k, before.map(|l| &l.key), key_frame)?,
            value: self.compress_side(
                (layer, name),
                Side::Value,
                v,
                before.map(|l| &l.value),
                value_frame,
            )?,
        })
    }

    /// Packs every layer.
    ///
    /// # Errors
    /// As [`Compressor::compress_layer`].
    pub fn compress<'a>(
        &self,
        layers: impl IntoIterator<Item = (&'a Tensor, &'a Tensor)>,
    ) -> Result<CompressedCache<E::Tensor>> {
        let layers = layers.into_iter().enumerate().map(|(i, (k, v))| self.compress_layer(i, k, v));
        Ok(CompressedCache { layers: layers.collect::<Result<_>>()? })
    }

    fn compress_side(
        &self,
        (layer, name): (usize, &str),
        side: Side,
        (x, shape): (&Tensor, [usize; 4]),
        before: Option<&CompressedSide<E::Tensor>>,
        frame: Option<Frame<Tensor>>,
    ) -> Result<CompressedSide<E::Tensor>> {
        let dtype = x.float().ok_or_else(|| x.wrong_dtype("tensor", "F32, F16 or BF16"))?;
        let codec = self.codec(side, layer, shape[3])?;
        let [sinks, packed, window] = match codec {
            Some(_) => self.recipe.split(shape[2]),
            None => [shape[2], 0, 0],
        };
        let exact = |start: usize, len: usize| -> Result<Option<E::Tensor>> {
            if len == 0 {
                Ok(None)
            } else {
                self.engine.put(&x.slice(2, start, start + len)?.compact()).map(Some)
            }
        };
        let body = match codec {
            Some(codec) if packed > 0 => {
                let kept = match before {
                    Some(before) => self.kept(before, &codec, x, sinks, packed)?,
                    None => None,
                };
                let rows = x.slice(2, sinks, sinks + packed)?;
                let codes = match (kept, frame) {
                    (Some(kept), _) => self.append(&codec, kept, &rows)?,
                    (None, Some(frame)) => self.encode_again(&codec, &frame, &rows)?,
                    (None, None) => {
                        let rows = self.engine.put(&rows)?;
                        let first = rows.slice(2, 0, packed.min(TOKENS_PER_BLOCK))?;
                        let centred = self.recipe.centred && side == Side::Key;
                        let frame = self.engine.frame(&codec, centred, &first, None)?;
                        self.engine.encode(&codec, frame, &rows)?
                    }
                };
                packable::check(&self.engine, &codes, &rows, sinks, &format!("layer {name} {side}s"))?;
                Some(codes)
            }
            _ => None,
        };
        Ok(CompressedSide {
            head: exact(0, sinks)?,
            body,
            tail: exact(sinks + packed, window)?,
            shape,
            dtype,
        })
    }

    /// Unpacks one side to its first shape and dtype.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn decompress_side(&self, side: &CompressedSide<E::Tensor>) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(3);
        if let Some(head) = &side.head {
            parts.push(self.engine.get(head)?);
        }
        if let Some(body) = &side.body {
            parts.push(self.engine.get(&self.engine.decode(body, side.dtype)?)?);
        }
        if let Some(tail) = &side.tail {
            parts.push(self.engine.get(tail)?);
        }
        match parts.len() {
            0 => Tensor::from_f32(side.dtype, &side.shape, vec![]),
            1 => Ok(parts.remove(0)),
            _ => Tensor::concat(2, &parts),
        }
    }

    /// Unpacks every layer to keys and values.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn decompress(&self, cache: &CompressedCache<E::Tensor>) -> Result<Vec<(Tensor, Tensor)>> {
        cache
            .layers
            .iter()
            .map(|l| Ok((self.decompress_side(&l.key)?, self.decompress_side(&l.value)?)))
            .collect()
    }
}

/// Coordinates in the rotated domain, divided by their vector's scale.
fn unit_coordinates(codes: &Codes<Tensor>) -> Result<Vec<f32>> {
    let codec = codes.codec();
    let (words, w) = (codes.words().to_vec::<u32>()?, codec.row_words());
    let mut scratch = codec.scratch();
    let ones = vec![codec.format().code(1.0); codec.row_scales()];
    let mut out = vec![0f32; words.len() / w * codec.spec().head_dim];
    for (words, out) in words.chunks_exact(w).zip(out.chunks_exact_mut(codec.spec().head_dim)) {
        codec.add_weighted_row(words, &ones, 1.0, out, &mut scratch);
    }
    Ok(out)
}

/// The shape of keys or values [B, H, T, D] of finite numbers.
///
/// # Errors
/// As [`Compressor::compress_layer`].
pub(crate) fn check_rows(layer: &str, side: Side, x: &Tensor) -> Result<[usize; 4]> {
    let what = if side == Side::Key { "keys" } else { "values" };
    if x.float().is_none() {
        return Err(x.wrong_dtype(what, "F32, F16 or BF16"));
    }
    let shape: [usize; 4] = x.shape().try_into().map_err(|_| x.wrong_shape(what, "[B, H, T, D]"))?;
    match x.first_non_finite() {
        Some((index, value)) => {
            let [_, h, t, d] = shape;
            let place = packable::place([index / (h * t * d), index / (t * d) % h, index / d % t], shape[0]);
            Err(Error::NonFinite { what: format!("layer {layer} {what}, {place}"), index, value })
        }
        None => Ok(shape),
    }
}
