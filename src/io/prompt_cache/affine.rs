//! MLX's affine group quantization on the host: pack as `mx.quantize` does, unpack to f32.
//!
//! Per group of `group_size` elements of a row: `x ~ scale * code + bias`, codes of `bits` bits, packed as one
//! LSB-first bit stream per row of u32 words. All arithmetic is f32, scale and bias are rounded to the dtype of
//! the input last, codes are computed from the unrounded ones. Equal bit for bit to the CPU `mx.quantize` of
//! mlx 0.32.2 for every supported width, group and dtype (tests/suite/prompt_cache.rs, tests/interop/check.py).

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Widths that `mx.quantize` knows.
pub const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
/// Group sizes that `mx.quantize` knows.
pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// One side of a quantized layer: `[B, H, T, D]` floats as codes with a scale and a bias per group.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// `[B, H, T, D * bits / 32]` U32: the codes.
    pub words: Tensor,
    /// `[B, H, T, D / group_size]` floats.
    pub scales: Tensor,
    /// Shape and dtype of the scales.
    pub biases: Tensor,
}

impl Packed {
    /// Quantizes the last axis of a float tensor; scales and biases get its dtype.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a width or group that MLX does not know, [`Error::Shape`] if the last axis is
    /// not a multiple of the group, [`Error::Dtype`] if `x` is not a float tensor, [`Error::NonFinite`].
    pub fn quantize(x: &Tensor, group_size: usize, bits: usize) -> Result<Packed> {
        check_codec(group_size, bits)?;
        let (width, lead) = match x.shape().split_last() {
            Some((&width, lead)) if width.is_multiple_of(group_size) => (width, lead),
            _ => return Err(x.wrong_shape("quantize", format!("a last axis that {group_size} divides"))),
        };
        if let Some((index, value)) = x.first_non_finite() {
            return Err(Error::NonFinite { what: "quantize".into(), index, value });
        }
        let data = x.to_f32()?;
        let groups = data.len() / group_size;
        let (mut scales, mut biases) = (Vec::with_capacity(groups), Vec::with_capacity(groups));
        let row_words = width * bits / 32;
        let mut words = vec![0u32; lead.iter().product::<usize>() * row_words];
        // A group is a whole number of words: 32 divides group_size.
        for (group, out) in data.chunks_exact(group_size).zip(words.chunks_exact_mut(group_size * bits / 32))
        {
            let (scale, bias) = scale_and_bias(group, bits);
            pack(group, out, scale, bias, bits);
            scales.push(scale);
            biases.push(bias);
        }
        let shape = |last| [lead, &[last]].concat();
        Ok(Packed {
            words: Tensor::new(&shape(row_words), words)?,
            scales: x.like(&shape(width / group_size), scales)?,
            biases: x.like(&shape(width / group_size), biases)?,
        })
    }

    /// The values `scale * code + bias` in f32.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown width or group, [`Error::Shape`] if the three arrays do not belong
    /// together.
    pub fn dequantize(&self, group_size: usize, bits: usize) -> Result<Tensor> {
        check_codec(group_size, bits)?;
        let reason = |detail| self.words.wrong_shape("packed words", detail);
        let width = self.check(group_size, bits).map_err(reason)?;
        let words = self.words.to_vec::<u32>()?;
        let (scales, biases) = (self.scales.to_f32()?, self.biases.to_f32()?);
        let mask = u32::MAX >> (32 - bits);
        let mut data = Vec::with_capacity(scales.len() * group_size);
        let groups = words.chunks_exact(group_size * bits / 32);
        for ((group, &scale), &bias) in groups.zip(&scales).zip(&biases) {
            for j in 0..group_size {
                let (word, shift) = (j * bits / 32, j * bits % 32);
                let low = group[word] >> shift;
                let high = if shift + bits > 32 { group[word + 1] << (32 - shift) } else { 0 };
                data.push(scale * ((low | high) & mask) as f32 + bias);
            }
        }
        let mut shape = self.words.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = width;
        }
        Tensor::new(&shape, data)
    }

    /// The width `D` if the three arrays belong together, else what is wrong.
    pub(super) fn check(&self, group_size: usize, bits: usize) -> std::result::Result<usize, String> {
        let (words, scales, biases) = (&self.words, &self.scales, &self.biases);
        if words.dtype() != "U32" || scales.float().is_none() || scales.dtype() != biases.dtype() {
            let got = [words.dtype(), scales.dtype(), biases.dtype()];
            return Err(format!("dtypes {got:?}, expected U32 words and two of the same float type"));
        }
        let [.., last] = words.shape() else { return Err("words without axes".into()) };
        let width = self.width(bits);
        let mut expected = words.shape().to_vec();
        if let Some(last) = expected.last_mut() {
            *last = width / group_size;
        }
        if !last.saturating_mul(32).is_multiple_of(bits) || !width.is_multiple_of(group_size) {
            return Err(format!(
                "{last} words a row do not hold groups of {group_size} codes of {bits} bits"
            ));
        }
        for (what, x) in [("scales", scales), ("biases", biases)] {
            if x.shape() != expected {
                let (got, words) = (x.shape(), words.shape());
                return Err(format!("{what} {got:?}, expected {expected:?} beside words {words:?}"));
            }
        }
        Ok(width)
    }

    /// Elements in a row, if the arrays belong together.
    pub(super) fn width(&self, bits: usize) -> usize {
        self.words.shape().last().map_or(0, |words| words.saturating_mul(32) / bits)
    }

    /// The rows `0..rows` of the token axis.
    pub(super) fn cut(&self, rows: usize) -> Result<Packed> {
        Ok(Packed {
            words: self.words.slice(2, 0, rows)?,
            scales: self.scales.slice(2, 0, rows)?,
            biases: self.biases.slice(2, 0, rows)?,
        })
    }
}

/// Refuses widths and groups that MLX does not know.
pub(crate) fn check_codec(group_size: usize, bits: usize) -> Result<()> {
    for (field, value, known) in [("bits", bits, &BITS[..]), ("group_size", group_size, &GROUP_SIZES[..])] {
        if !known.contains(&value) {
            let reason = format!("MLX knows {known:?}");
            return Err(Error::Unsupported { field, value: value.to_string(), reason });
        }
    }
    Ok(())
}

/// The edge of larger magnitude is represented exactly; the scale is negative if that edge is the maximum.
fn scale_and_bias(group: &[f32], bits: usize) -> (f32, f32) {
    let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = group.iter().copied().fold(f32::INFINITY, f32::min);
    let low = min.abs() > max.abs();
    let step = ((max - min) / bins(bits)).max(1e-7);
    let (scale, edge) = if low { (step, min) } else { (-step, max) };
    let zero_point = (edge / scale).round_ties_even();
    if zero_point == 0.0 { (scale, 0.0) } else { (edge / zero_point, edge) }
}

fn bins(bits: usize) -> f32 {
    ((1u32 << bits) - 1) as f32
}

fn pack(group: &[f32], out: &mut [u32], scale: f32, bias: f32, bits: usize) {
    for (j, x) in group.iter().enumerate() {
        let code = ((x - bias) / scale).round_ties_even().clamp(0.0, bins(bits)) as u32;
        let (word, shift) = (j * bits / 32, j * bits % 32);
        out[word] |= code << shift;
        if shift + bits > 32 {
            out[word + 1] |= code >> (32 - shift);
        }
    }
}
