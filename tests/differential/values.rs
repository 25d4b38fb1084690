//! Vectors of every kind that caches meet.

use turbomoq::internals::math::rng::Rng;
use turbomoq::{Dtype, Tensor};

/// A kind of vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Gaussian,
    /// The third power of normal numbers.
    HeavyTailed,
    /// One channel of a row.
    OneHot,
    /// The same number in every channel of a row.
    Constant,
    /// Normal numbers times this.
    Scaled(f32),
    /// Normal numbers among the subnormal ones of f32.
    Subnormal,
    /// Normal numbers, and one row in twenty of NaN.
    SomeNan,
}

impl Kind {
    /// Kinds of queries.
    pub const QUERIES: [Kind; 7] = [
        Kind::Gaussian,
        Kind::HeavyTailed,
        Kind::OneHot,
        Kind::Scaled(1e-3),
        Kind::Scaled(0.1),
        Kind::Scaled(30.0),
        Kind::Scaled(1e3),
    ];
}

/// Rows [.., D] of a kind in a dtype; a pure function of `id`.
pub fn tensor(kind: Kind, dtype: Dtype, shape: &[usize], id: u64) -> Tensor {
    let mut rng = Rng::new(4711, id);
    let d = shape[shape.len() - 1];
    let mut x: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    for row in x.chunks_exact_mut(d.max(1)) {
        let pick = rng.bits();
        match kind {
            Kind::Gaussian => {}
            Kind::HeavyTailed => row.iter_mut().for_each(|x| *x = 0.3 * *x * *x * *x),
            Kind::OneHot => {
                let at = pick as usize % d;
                row.iter_mut().enumerate().for_each(|(i, x)| *x = if i == at { 8.0 * *x } else { 0.0 });
            }
            Kind::Constant => row.fill(row[0]),
            Kind::Scaled(by) => row.iter_mut().for_each(|x| *x *= by),
            Kind::Subnormal => row.iter_mut().for_each(|x| *x *= 1e-39),
            Kind::SomeNan if pick % 20 == 0 => row.fill(f32::NAN),
            Kind::SomeNan => {}
        }
    }
    Tensor::from_f32(dtype, shape, x).unwrap()
}
