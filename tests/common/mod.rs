//! What several test binaries share: seeded tensors, the row form run over whole arrays, distances.
#![allow(dead_code)] // each test binary uses its own part

pub mod attention;
pub mod capi;
pub mod failing;
pub mod python;
#[cfg(unix)]
pub mod server;

use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Tensor;
use turbomoq::internals::codec::frame::RowFrame;
use turbomoq::internals::math::codebook;
use turbomoq::internals::math::rng::Rng;
use turbomoq::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule};
use turbomoq::{Codes, Frame};

/// Standard normal f32 values; `stream` sets tensors of one test apart.
pub fn gauss(shape: &[usize], stream: u64) -> Tensor {
    let mut rng = Rng::new(2024, 1000 + stream);
    Tensor::new(shape, (0..shape.iter().product()).map(|_| rng.normal() as f32).collect()).unwrap()
}

/// Normal values with channels of different energies and a mean, as keys have them.
pub fn keys(shape: &[usize], stream: u64) -> Tensor {
    let d = shape[3];
    let mut x = gauss(shape, stream).to_f32().unwrap();
    for (i, x) in x.iter_mut().enumerate() {
        let c = i % d;
        *x = *x * (0.3 + 2.0 * ((c * 7) % 13) as f32 / 13.0) + if c % 9 == 0 { 4.0 } else { 0.5 };
    }
    Tensor::new(shape, x).unwrap()
}

/// A spread of codecs over every field of the spec that `dim` has a form for.
pub fn specs(dim: usize) -> Vec<CodecSpec> {
    let base = CodecSpec::new(dim, 4, Grid::Lloyd);
    let mut list = vec![];
    for bits in 1..=8 {
        list.push(CodecSpec { bits, ..base });
        let format = if bits % 3 == 1 { ScaleFormat::Log8 } else { ScaleFormat::Wide8 };
        list.push(CodecSpec { bits, grid: Grid::Uniform, format, ..base });
    }
    for scale in [ScaleRule::Plain, ScaleRule::Unbiased, ScaleRule::LeastSquares] {
        list.push(CodecSpec { bits: 3, scale, grid: Grid::Beta, ..base });
    }
    list.push(CodecSpec { rotation: RotationKind::Identity, grid: Grid::Uniform, ..base });
    list.push(CodecSpec { rotation: RotationKind::Dense, bits: 3, ..base });
    list.push(CodecSpec { equalised: true, bits: 3, ..base });
    for bits in 1..=4 {
        list.push(CodecSpec {
            grid: Grid::Trellis { states: 8 },
            bits,
            scale: ScaleRule::LeastSquares,
            ..base
        });
    }
    list.push(CodecSpec { grid: Grid::Trellis { states: 10 }, bits: 2, ..base });
    list.push(CodecSpec { grid: Grid::Fitted, bits: 3, ..base });
    list.push(CodecSpec { bits: 2, outliers: if dim < 64 { 16 } else { 32 }, equalised: true, ..base });
    if dim >= 64 {
        let grid = Grid::Trellis { states: 8 };
        list.push(CodecSpec { bits: 2, outliers: 32, lead: 2, grid, format: ScaleFormat::Wide8, ..base });
    }
    list.push(CodecSpec { bits: 2, residual: Residual::Qjl { projections: 64, rounds: 1 }, ..base });
    list.push(CodecSpec { bits: 1, residual: Residual::Qjl { projections: 32, rounds: 3 }, ..base });
    for group in [32, 64, 128] {
        list.push(CodecSpec { grid: Grid::Affine { group }, rotation: RotationKind::Identity, ..base });
        list.push(CodecSpec { grid: Grid::Affine { group }, bits: 3, ..base });
    }
    list.push(CodecSpec {
        grid: Grid::ChannelAffine { group: 32 },
        bits: 2,
        rotation: RotationKind::Identity,
        ..base
    });
    list.retain(|spec| spec.validate().is_ok() && codec(*spec).is_some());
    list
}

/// The codec of a spec, with levels for a fitted grid; `None` if it has no form.
pub fn codec(spec: CodecSpec) -> Option<Arc<Codec>> {
    let made = match spec.grid {
        Grid::Fitted => {
            Codec::with_levels(spec, codebook::fit(&gauss(&[1, 1, 50, 100], 77).to_f32().unwrap(), spec.bits))
        }
        _ => Codec::new(spec),
    };
    made.ok().map(Arc::new)
}

/// The row form over a whole array: words, scale codes, decoded rows, all row-major.
pub fn encode_rows(codec: &Codec, frame: &Frame<Tensor>, x: &Tensor) -> (Vec<u32>, Vec<u16>, Vec<f32>) {
    let [_, _, t, d] = *x.shape() else { panic!("four axes") };
    let tables = Tables::new(frame);
    let mut scratch = codec.scratch();
    let (mut words, mut scales, mut out) = (vec![], vec![], vec![]);
    for (i, x) in x.to_f32().unwrap().chunks_exact(d).enumerate() {
        let (mut w, mut s, mut y) = (vec![0; codec.row_words()], vec![0; codec.row_scales()], vec![0.0; d]);
        codec.encode_row(tables.row(i / t, d), x, &mut w, &mut s, &mut scratch);
        codec.decode_row(tables.row(i / t, d), &w, &s, &mut y, &mut scratch);
        words.extend(w);
        scales.extend(s);
        out.extend(y);
    }
    (words, scales, out)
}

/// Scale codes at rest, row-major.
pub fn scale_codes(codes: &Codes<Tensor>) -> Vec<u16> {
    match codes.scales() {
        Tensor::U8(a) => a.iter().map(|&c| u16::from(c)).collect(),
        scales => scales.to_vec::<half::f16>().unwrap().iter().map(|s| s.to_bits()).collect(),
    }
}

/// Host slices of a frame.
pub struct Tables {
    centre: Option<Vec<f32>>,
    gain: Option<Vec<f32>>,
    order: Option<Vec<u32>>,
}

impl Tables {
    pub fn new(frame: &Frame<Tensor>) -> Tables {
        let f32s = |t: &Option<Tensor>| t.as_ref().map(|t| t.to_f32().unwrap());
        let order = frame.order.as_ref().map(|t| t.to_vec::<u32>().unwrap());
        Tables { centre: f32s(&frame.centre), gain: f32s(&frame.gain), order }
    }
    pub fn row(&self, head: usize, d: usize) -> RowFrame<'_> {
        RowFrame {
            centre: self.centre.as_ref().map(|c| &c[head * d..][..d]),
            gain: self.gain.as_ref().map(|c| &c[head * d..][..d]),
            order: self.order.as_ref().map(|c| &c[head * d..][..d]),
        }
    }
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// |a - b|^2 / |a|^2.
pub fn relative_mse(a: &[f32], b: &[f32]) -> f64 {
    let error: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    error / dot(a, a)
}

pub fn greatest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Mean KL of softmax(b / sqrt d) from softmax(a / sqrt d) over rows of `tokens` scores.
pub fn mean_kl(a: &[f32], b: &[f32], tokens: usize, d: usize) -> f64 {
    let log_softmax = |x: &[f32]| -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x) / (d as f64).sqrt()).collect();
        let top = x.iter().copied().fold(f64::MIN, f64::max);
        let sum = x.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
        x.iter().map(|x| x - top - sum).collect()
    };
    let rows = a.chunks_exact(tokens).zip(b.chunks_exact(tokens));
    let kl = rows
        .map(|(a, b)| log_softmax(a).iter().zip(log_softmax(b)).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
    kl.sum::<f64>() / (a.len() / tokens) as f64
}
