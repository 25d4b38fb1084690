//! Rows at rest and on the way: float types at the doors, scale codes, tables of a frame, runs of rows in one instruction set.
//!
//! The conversions from and to half floats are integer steps that the compiler turns into vectors of any width: exact on the
//! way in, to nearest even on the way out; finite values saturate at the largest finite value, NaN and infinities are kept.

use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::codec::frame::RowFrame;
use crate::error::Result;
use crate::spec::ScaleFormat;
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use pulp::{Simd, WithSimd};

/// A float type of rows.
pub(super) trait Door: Element {
    /// Rows as f32.
    fn read(from: &[Self], to: &mut [f32]);
    /// f32 as rows.
    fn write(from: &[f32], to: &mut [Self]);
}

impl Door for f32 {
    #[inline(always)]
    fn read(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn write(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Door for f16 {
    #[inline(always)]
    fn read(from: &[f16], to: &mut [f32]) {
        for (x, y) in from.iter().zip(to) {
            *y = f16_to_f32(x.to_bits());
        }
    }
    #[inline(always)]
    fn write(from: &[f32], to: &mut [f16]) {
        for (x, y) in from.iter().zip(to) {
            *y = f16::from_bits(f32_to_f16(*x));
        }
    }
}

impl Door for bf16 {
    #[inline(always)]
    fn read(from: &[bf16], to: &mut [f32]) {
        for (x, y) in from.iter().zip(to) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
    #[inline(always)]
    fn write(from: &[f32], to: &mut [bf16]) {
        for (x, y) in from.iter().zip(to) {
            *y = bf16::from_bits(f32_to_bf16(*x));
        }
    }
}

#[inline(always)]
fn f16_to_f32(h: u16) -> f32 {
    const SUBNORMAL: u32 = 113 << 23;
    let bits = u32::from(h & 0x7fff) << 13;
    let exponent = bits & 0x0f80_0000;
    let normal = bits + (112 << 23);
    // The smallest exponent has no leading one: it is given one and the one is taken away again.
    let subnormal = (f32::from_bits(bits + SUBNORMAL) - f32::from_bits(SUBNORMAL)).to_bits();
    let special = bits + (224 << 23);
    let size = if exponent == 0 { subnormal } else { normal };
    let size = if exponent == 0x0f80_0000 { special } else { size };
    f32::from_bits(size | u32::from(h & 0x8000) << 16)
}

#[inline(always)]
fn f32_to_f16(x: f32) -> u16 {
    const HALF: u32 = 126 << 23;
    let bits = x.to_bits();
    let size = f32::from_bits(bits & 0x7fff_ffff);
    let top = if size > 65504.0 { 65504.0 } else { size };
    let t = top.to_bits();
    // Just under half a unit, and one more if the last bit that stays is odd: ties go to even.
    let normal = t.wrapping_sub(112 << 23).wrapping_add(0xfff + (t >> 13 & 1)) >> 13;
    // One half has the unit of the subnormals: the sum rounds to it.
    let subnormal = (top + f32::from_bits(HALF)).to_bits() - HALF;
    let code = if t < 113 << 23 { subnormal } else { normal };
    let code = if size == f32::INFINITY { 0x7c00 } else { code };
    let code = if size.is_nan() { 0x7e00 } else { code };
    (code | bits >> 16 & 0x8000) as u16
}

#[inline(always)]
fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let size = bits & 0x7fff_ffff;
    let code = (size + 0x7fff + (size >> 16 & 1)) >> 16;
    let code = if code > 0x7f7f { 0x7f7f } else { code };
    let code = if size == 0x7f80_0000 { 0x7f80 } else { code };
    let code = if size > 0x7f80_0000 { 0x7fc0 } else { code };
    (code | bits >> 16 & 0x8000) as u16
}

/// Host slices of a frame, by sequence and head.
pub(super) struct FrameTables {
    dim: usize,
    centre: Option<Vec<f32>>,
    gain: Option<Vec<f32>>,
    order: Option<Vec<u32>>,
}

impl FrameTables {
    pub(super) fn new(frame: &Frame<Tensor>, dim: usize) -> Result<FrameTables> {
        if frame.order.is_some() {
            frame.check_entries()?;
        }
        let f32s = |t: &Option<Tensor>| t.as_ref().map(Tensor::to_vec::<f32>).transpose();
        Ok(FrameTables {
            dim,
            centre: f32s(&frame.centre)?,
            gain: f32s(&frame.gain)?,
            order: frame.order.as_ref().map(Tensor::to_vec::<u32>).transpose()?,
        })
    }

    pub(super) fn centred(&self) -> bool {
        self.centre.is_some()
    }

    #[inline(always)]
    pub(super) fn row(&self, head: usize) -> RowFrame<'_> {
        #[inline(always)]
        fn cut<T>(table: &Option<Vec<T>>, head: usize, dim: usize) -> Option<&[T]> {
            table.as_ref().map(|t| &t[head * dim..][..dim])
        }
        RowFrame {
            centre: cut(&self.centre, head, self.dim),
            gain: cut(&self.gain, head, self.dim),
            order: cut(&self.order, head, self.dim),
        }
    }
}

/// Scales at rest as one buffer of 16-bit codes.
pub(super) fn scale_codes(codes: &Codes<Tensor>) -> Result<Vec<u16>> {
    Ok(match codes.codec().format() {
        ScaleFormat::F16 => codes.scales().standard::<f16>()?.iter().map(|s| s.to_bits()).collect(),
        _ => codes.scales().standard::<u8>()?.iter().map(|&s| u16::from(s)).collect(),
    })
}

/// The buffer of [`scale_codes`] as it is stored.
pub(super) fn scale_tensor(format: ScaleFormat, shape: &[usize], codes: Vec<u16>) -> Result<Tensor> {
    match format {
        ScaleFormat::F16 => Tensor::new(shape, codes.into_iter().map(f16::from_bits).collect()),
        _ => Tensor::new(shape, codes.into_iter().map(|c| c as u8).collect()),
    }
}

/// What a run of rows needs.
#[derive(Clone, Copy)]
pub(super) struct RowRun<'a> {
    pub codec: &'a Codec,
    pub tables: &'a FrameTables,
    /// The first row, and the rows of a head.
    pub first: usize,
    pub tokens: usize,
}

/// Packs a run. A type of its own rather than a closure: only a method that is always inlined is compiled for the instruction
/// set that `pulp` selects.
pub(super) struct Encode<'a, T> {
    pub run: RowRun<'a>,
    pub x: &'a [T],
    pub words: &'a mut [u32],
    pub scales: &'a mut [u16],
}

impl<T: Door> WithSimd for Encode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let RowRun { codec, tables, first, tokens } = self.run;
        let (d, w, s) = (codec.spec().head_dim, codec.row_words(), codec.row_scales());
        let (mut scratch, mut row) = (codec.scratch(), vec![0f32; d]);
        let (words, scales) = (self.words.chunks_exact_mut(w), self.scales.chunks_exact_mut(s));
        for (i, (x, (words, scales))) in self.x.chunks_exact(d).zip(words.zip(scales)).enumerate() {
            T::read(x, &mut row);
            codec.encode_row(tables.row((first + i) / tokens), &row, words, scales, &mut scratch);
        }
    }
}

/// Unpacks a run.
pub(super) struct Decode<'a, T> {
    pub run: RowRun<'a>,
    pub words: &'a [u32],
    pub scales: &'a [u16],
    pub out: &'a mut [T],
}

impl<T: Door> WithSimd for Decode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let RowRun { codec, tables, first, tokens } = self.run;
        let (d, w, s) = (codec.spec().head_dim, codec.row_words(), codec.row_scales());
        let (mut scratch, mut row) = (codec.scratch(), vec![0f32; d]);
        let (words, scales) = (self.words.chunks_exact(w), self.scales.chunks_exact(s));
        for (i, (out, (words, scales))) in self.out.chunks_exact_mut(d).zip(words.zip(scales)).enumerate() {
            codec.decode_row(tables.row((first + i) / tokens), words, scales, &mut row, &mut scratch);
            T::write(&row, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_floats_come_in_exactly() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            let mut y = [0f32; 2];
            f16::read(&[h], &mut y[..1]);
            bf16::read(&[b], &mut y[1..]);
            for (got, want) in y.into_iter().zip([h.to_f32(), b.to_f32()]) {
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got}");
            }
        }
    }

    #[test]
    fn half_floats_go_out_to_the_nearest() {
        // Every half float, its neighbours, the ties between two half floats and what is just beside a tie.
        for bits in
            (0..=u32::from(u16::MAX)).flat_map(|h| [f16::from_bits(h as u16).to_f32().to_bits(), h << 16])
        {
            for offset in [0, 1, 2, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                for bits in [bits.wrapping_add(offset), bits.wrapping_sub(offset)] {
                    let x = f32::from_bits(bits);
                    let (mut h, mut b) = ([f16::ZERO], [bf16::ZERO]);
                    f16::write(&[x], &mut h);
                    bf16::write(&[x], &mut b);
                    if x.is_nan() {
                        assert!(h[0].is_nan() && b[0].is_nan(), "{bits:#x}");
                        continue;
                    }
                    let within = |top: f32| if x.is_infinite() { x } else { x.clamp(-top, top) };
                    assert_eq!(h[0].to_bits(), f16::from_f32(within(65504.0)).to_bits(), "{x}");
                    assert_eq!(b[0].to_bits(), bf16::from_f32(within(bf16::MAX.to_f32())).to_bits(), "{x}");
                }
            }
        }
    }
}
