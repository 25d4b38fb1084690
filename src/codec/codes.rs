//! Packed vectors at rest: for every codec two buffers, words and scales, that cannot be parted from the codec that made them.
//!
//! `words` is u32 [B, H, T, W], `scales` f16 or u8 [B, H, T, S]; the frame holds the tables of each sequence and head.

use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::spec::ScaleFormat;
use crate::tensor::Tensor;
use half::f16;
use std::sync::Arc;

/// What codes need of an engine's arrays.
pub trait Buffer: Clone {
    /// Sizes of the axes.
    fn shape(&self) -> Vec<usize>;
    /// Bytes of the elements.
    fn nbytes(&self) -> usize;
    /// Elements `start..end` of an axis.
    fn slice(&self, axis: usize, start: usize, end: usize) -> Result<Self>;
    /// Joins arrays along an axis.
    fn concat(axis: usize, parts: &[Self]) -> Result<Self>;
}

impl Buffer for Tensor {
    fn shape(&self) -> Vec<usize> {
        Tensor::shape(self).to_vec()
    }
    fn nbytes(&self) -> usize {
        Tensor::nbytes(self)
    }
    fn slice(&self, axis: usize, start: usize, end: usize) -> Result<Tensor> {
        Tensor::slice(self, axis, start, end)
    }
    fn concat(axis: usize, parts: &[Tensor]) -> Result<Tensor> {
        Tensor::concat(axis, parts)
    }
}

/// Tables of every sequence and head, [B, H, D] each; see [`crate::codec::frame`].
#[derive(Clone, Debug)]
pub struct Frame<T> {
    /// f32, taken from every vector.
    pub centre: Option<T>,
    /// f32, multiplies every centred vector.
    pub gain: Option<T>,
    /// u32, channel that comes at each place.
    pub order: Option<T>,
}

impl<T> Default for Frame<T> {
    fn default() -> Self {
        Frame { centre: None, gain: None, order: None }
    }
}

impl<T: Buffer> Frame<T> {
    /// Bytes of the tables.
    pub fn nbytes(&self) -> usize {
        [&self.centre, &self.gain, &self.order].into_iter().flatten().map(T::nbytes).sum()
    }

    /// Checks that the tables are there when the codec needs them and fit `batch` sequences and `heads` heads.
    ///
    /// # Errors
    /// [`Error::Shape`] names the table.
    pub fn check(&self, codec: &Codec, batch: usize, heads: usize) -> Result<()> {
        let spec = codec.spec();
        let want = vec![batch, heads, spec.head_dim];
        for (what, table, needed) in [
            ("frame centre", &self.centre, self.centre.is_some()),
            ("frame gain", &self.gain, spec.equalised),
            ("frame order", &self.order, spec.outliers > 0),
        ] {
            let got = table.as_ref().map(T::shape);
            if got.is_some() != needed || got.as_ref().is_some_and(|got| *got != want) {
                let expected = if needed { format!("{want:?}") } else { "no table".into() };
                return Err(Error::Shape { what, expected, got: got.unwrap_or_default() });
            }
        }
        Ok(())
    }
}

impl Frame<Tensor> {
    /// Checks what the tables say, for tables that come from outside: centre and gains are finite f32, the gains above zero since
    /// decoding divides by them, and the order of each head is a permutation, since anything else would read outside of a row.
    ///
    /// # Errors
    /// [`Error::Dtype`], or [`Error::Unsupported`] with the first bad entry.
    pub fn check_entries(&self) -> Result<()> {
        let refuse = |field, value: String, reason: &str| {
            Err(Error::Unsupported { field, value, reason: reason.into() })
        };
        for (field, table) in [("frame centre", &self.centre), ("frame gain", &self.gain)] {
            let Some(table) = table else { continue };
            let values = table.to_vec::<f32>()?;
            let gain = field == "frame gain";
            let bad = values.iter().find(|x| !x.is_finite() || (gain && !(x.is_normal() && **x > 0.0)));
            if let Some(x) = bad {
                return refuse(field, x.to_string(), "finite values, and gains above zero");
            }
        }
        let Some(order) = &self.order else { return Ok(()) };
        let (dim, places) = (order.shape().last().copied().unwrap_or(0), order.to_vec::<u32>()?);
        for row in places.chunks(dim.max(1)) {
            let mut seen = vec![false; dim];
            let twice = |&&i: &&u32| seen.get_mut(i as usize).is_none_or(|s| std::mem::replace(s, true));
            if let Some(i) = row.iter().find(twice) {
                return refuse("frame order", i.to_string(), "every channel once");
            }
        }
        Ok(())
    }
}

/// Checks the dtypes of words and scales that come from outside.
///
/// # Errors
/// [`Error::Dtype`] names the array.
pub fn check_dtypes(codec: &Codec, words: &Tensor, scales: &Tensor) -> Result<()> {
    let wanted = codec.format().dtype();
    match (words.dtype(), scales.dtype()) {
        ("U32", got) if got == wanted => Ok(()),
        ("U32", got) => Err(Error::Dtype { what: "scales", expected: wanted, got: got.into() }),
        (got, _) => Err(Error::Dtype { what: "words", expected: "U32", got: got.into() }),
    }
}

/// Packed vectors with their codec and frame.
#[derive(Clone, Debug)]
pub struct Codes<T> {
    codec: Arc<Codec>,
    frame: Frame<T>,
    words: T,
    scales: T,
}

impl Codes<Tensor> {
    /// What the scales stand for, f32 [B, H, T, S]; affine groups have their scales first, then their biases.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the scales are not of the codec's format.
    pub fn scale_values(&self) -> Result<Tensor> {
        let (stored, format) = (&self.scales, self.codec.format());
        let values: Vec<f32> = match format {
            // Scales and biases of affine groups have a sign of their own.
            _ if self.codec.affine_group().is_some() => stored.to_f32()?,
            ScaleFormat::F16 => {
                stored.to_vec::<f16>()?.into_iter().map(|code| format.value(code.to_bits())).collect()
            }
            _ => stored.to_vec::<u8>()?.into_iter().map(|code| format.value(code.into())).collect(),
        };
        Tensor::new(stored.shape(), values)
    }
}

impl<T: Buffer> Codes<T> {
    /// Puts the parts together.
    ///
    /// # Errors
    /// [`Error::Shape`] if words, scales or frame do not fit the codec and one another.
    pub fn new(codec: Arc<Codec>, frame: Frame<T>, words: T, scales: T) -> Result<Codes<T>> {
        let (w, s) = (words.shape(), scales.shape());
        if w.len() != 4 || w[3] != codec.row_words() || w[2] % codec.spec().tile() != 0 {
            let expected =
                format!("[B, H, T, {}], T a multiple of {}", codec.row_words(), codec.spec().tile());
            return Err(Error::Shape { what: "words", expected, got: w });
        }
        if s.len() != 4 || s[..3] != w[..3] || s[3] != codec.row_scales() {
            let expected = format!("[{}, {}, {}, {}]", w[0], w[1], w[2], codec.row_scales());
            return Err(Error::Shape { what: "scales", expected, got: s });
        }
        frame.check(&codec, w[0], w[1])?;
        Ok(Codes { codec, frame, words, scales })
    }

    /// The codec that made the codes.
    pub fn codec(&self) -> &Arc<Codec> {
        &self.codec
    }

    /// Tables of the sequences and heads.
    pub fn frame(&self) -> &Frame<T> {
        &self.frame
    }

    /// Packed words [B, H, T, W].
    pub fn words(&self) -> &T {
        &self.words
    }

    /// Scales [B, H, T, S].
    pub fn scales(&self) -> &T {
        &self.scales
    }

    /// Sequences, KV heads and tokens.
    pub fn shape(&self) -> [usize; 3] {
        let shape = self.words.shape();
        [shape[0], shape[1], shape[2]]
    }

    /// Bytes of every buffer, calibrated levels included.
    pub fn nbytes(&self) -> usize {
        let levels = self.codec.fitted().map_or(0, |levels| 4 * levels.len());
        self.words.nbytes() + self.scales.nbytes() + self.frame.nbytes() + levels
    }

    /// The tokens `start..end`.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is not inside, or cuts tokens that are encoded together.
    pub fn slice(&self, start: usize, end: usize) -> Result<Codes<T>> {
        let (len, tile) = (self.shape()[2], self.codec.spec().tile());
        if start > end || end > len || start % tile != 0 || end % tile != 0 {
            return Err(Error::Range { start, end, len });
        }
        Ok(Codes {
            words: self.words.slice(2, start, end)?,
            scales: self.scales.slice(2, start, end)?,
            ..self.clone()
        })
    }

    /// Joins codes of the same sequences along the tokens. They share the frame of the first.
    ///
    /// # Errors
    /// [`Error::CodecMismatch`] if another codec made one of the parts, [`Error::Shape`] if there is no part or the heads differ.
    pub fn concat(parts: &[Codes<T>]) -> Result<Codes<T>> {
        let first = parts.first().ok_or(Error::Shape {
            what: "parts",
            expected: "at least one".into(),
            got: vec![],
        })?;
        for part in parts {
            part.expect(&first.codec)?;
        }
        let gather = |f: fn(&Codes<T>) -> &T| T::concat(2, &parts.iter().map(f).cloned().collect::<Vec<_>>());
        Codes::new(first.codec.clone(), first.frame.clone(), gather(Codes::words)?, gather(Codes::scales)?)
    }

    /// Refuses codes that another codec made.
    ///
    /// # Errors
    /// [`Error::CodecMismatch`] names both codecs.
    pub fn expect(&self, codec: &Codec) -> Result<()> {
        if self.codec.same(codec) {
            return Ok(());
        }
        let name = |c: &Codec| match c.fitted() {
            Some(levels) => format!("{} with levels {:?}", c.spec(), levels),
            None => c.spec().to_string(),
        };
        Err(Error::CodecMismatch { expected: name(codec), got: name(&self.codec) })
    }
}

impl Codes<Tensor> {
    /// Row-major index of the first scale or bias that is NaN or infinite: its vector would not unpack to numbers.
    pub fn first_bad_scale(&self) -> Option<usize> {
        let affine = self.codec.affine_group().is_some();
        let format = self.codec.format();
        let bad = |code: u16| {
            // Affine scales and biases are plain half floats.
            let value = if affine { half::f16::from_bits(code).to_f32() } else { format.value(code) };
            !value.is_finite()
        };
        match &self.scales {
            Tensor::U8(scales) => {
                let bad: [bool; 256] = std::array::from_fn(|code| bad(code as u16));
                scales.iter().position(|&code| bad[usize::from(code)])
            }
            Tensor::F16(scales) => scales.iter().position(|scale| bad(scale.to_bits())),
            _ => None,
        }
    }
}
