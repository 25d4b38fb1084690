//! The rotations of a codec as the kernels around attention read them: into the domain of keys, and out of the domain of values.

use super::{Form, MOST_CHANNELS};
use crate::codec::Codec;
use crate::math::rotation::Rotation;

/// What the kernels around attention read of a codec's rotations.
pub struct TurnTables {
    /// Signs of all bands, or of nothing at all without a rotation.
    pub signs: Vec<f32>,
    /// Row-major factors of all bands, one entry for a power of two.
    pub factor: Vec<f32>,
    /// The same, transposed.
    pub transposed: Vec<f32>,
    /// Orders of the factors, 1 for the second where there is one band.
    pub orders: [usize; 2],
    /// Whether there is a rotation.
    pub rotated: bool,
}

/// Tables of the rotations of a codec that has a form; `None` for a dense one, and for more channels than a threadgroup has threads.
pub fn turn_tables(codec: &Codec) -> Option<TurnTables> {
    let form = Form::of(codec)?;
    if form.channels() > MOST_CHANNELS {
        return None;
    }
    let rotated = !matches!(codec.bands()[0].rotation, Rotation::Identity);
    let mut tables =
        TurnTables { signs: vec![], factor: vec![], transposed: vec![], orders: [1; 2], rotated };
    for (i, band) in codec.bands().iter().enumerate() {
        match &band.rotation {
            Rotation::Identity if !rotated => {
                tables.factor.push(1.0);
                tables.transposed.push(1.0);
            }
            Rotation::Hadamard { signs, factor, order } if rotated => {
                tables.signs.extend(signs);
                tables.orders[i] = *order;
                for k in 0..order * order {
                    tables.factor.push(factor.get(k).copied().unwrap_or(1.0));
                    tables.transposed.push(factor.get(k % order * order + k / order).copied().unwrap_or(1.0));
                }
            }
            _ => return None,
        }
    }
    Some(tables)
}
