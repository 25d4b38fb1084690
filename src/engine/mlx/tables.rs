//! The tables of a codec as MLX arrays, made once.

use crate::codec::{Band, BandGrid, Codec};
use crate::engine::mlx::kernels::turn::turn_tables;
use crate::engine::mlx::kernels::{EncodeTables, Form, encode_tables, table};
use crate::error::Result;
use crate::math::bits;
use crate::math::rotation::Rotation;
use mlx_rs::Array;

/// Arrays of one band.
pub struct BandTables {
    /// The rotation.
    pub rotation: RotationTables,
    /// Ascending levels.
    pub levels: Option<Array>,
    /// Upper borders of all codes but the last.
    pub borders: Option<Array>,
}

/// Arrays of one rotation.
pub enum RotationTables {
    /// None.
    Identity,
    /// R, [n, n].
    Dense(Array),
    /// Signs [n] and, for an order above 1, the factor [m, m].
    Hadamard(Array, Option<Array>),
}

/// Arrays of a codec.
pub struct DeviceTables {
    /// One entry per band.
    pub bands: Vec<BandTables>,
    /// Projections [m, d] of every QJL round.
    pub projections: Vec<Array>,
    /// The 256 values of a scale of eight bits.
    pub scale_values: Option<Array>,
    /// What kernels read.
    pub kernels: Option<KernelTables>,
}

fn square(data: &[f32], n: usize) -> Array {
    Array::from_slice(data, &[n as i32, n as i32])
}

pub fn line(data: &[f32]) -> Array {
    Array::from_slice(data, &[data.len() as i32])
}

impl BandTables {
    fn new(band: &Band) -> BandTables {
        let rotation = match &band.rotation {
            Rotation::Identity => RotationTables::Identity,
            Rotation::Dense { dim, matrix } => RotationTables::Dense(square(matrix, *dim)),
            Rotation::Hadamard { signs, factor, order } => {
                RotationTables::Hadamard(line(signs), (*order > 1).then(|| square(factor, *order)))
            }
        };
        let levels = match &band.grid {
            BandGrid::Scalar(grid) => Some(line(grid.levels())),
            BandGrid::Trellis(trellis) => Some(line(trellis.levels())),
            BandGrid::Affine => None,
        };
        BandTables { rotation, levels, borders: band.grid.scalar().map(|g| line(g.borders())) }
    }
}

impl DeviceTables {
    /// Copies the tables of a codec to MLX; those that only kernels read where there are kernels.
    pub fn new(codec: &Codec, kernels: bool) -> Result<DeviceTables> {
        let projections = match codec.qjl() {
            None => vec![],
            Some(q) => {
                let shape = [q.projections() as i32, codec.spec().head_dim as i32];
                (0..q.rounds()).map(|r| Array::from_slice(q.matrix(r), &shape)).collect()
            }
        };
        let bands = codec.bands().iter().map(BandTables::new).collect();
        let kernels = kernels.then(|| KernelTables::new(codec)).flatten();
        let scale_values = codec.format().values().map(|values| line(values));
        Ok(DeviceTables { bands, projections, scale_values, kernels })
    }
}

/// Group size with which MLX's quantized kernels read a band's words, if they can: its codes of 2, 3, 4, 5, 6 or 8 bits in whole
/// groups of 128, 64 or 32.
pub fn native_group(dim: usize, bits: u8) -> Option<i32> {
    if !matches!(bits, 2..=6 | 8) || bits::words(dim, bits) * 32 != dim * bits as usize {
        return None;
    }
    [128, 64, 32].into_iter().find(|g| dim % g == 0).map(|g| g as i32)
}

/// Tables of a codec that kernels read, made once.
pub struct KernelTables {
    /// What decoders read.
    pub decode: Array,
    /// What the kernels around attention read: signs, factors, factors transposed; and the orders of the factors, if there is a
    /// rotation.
    pub turn: Option<([Array; 3], Option<[usize; 2]>)>,
    /// What encoders read, and the order of the rotation's factor, 0 without a rotation.
    pub encode: Option<([Array; 4], usize)>,
}

impl KernelTables {
    /// Copies the tables of a codec to MLX; `None` for a codec that no kernel reads.
    pub fn new(codec: &Codec) -> Option<KernelTables> {
        let form = Form::of(codec)?;
        let arrays = |t: EncodeTables| {
            let order = if t.signs.is_empty() { 0 } else { t.order };
            let signs = if t.signs.is_empty() { line(&[1.0]) } else { line(&t.signs) };
            ([signs, line(&t.factor), line(&t.levels), line(&t.borders)], order)
        };
        let turn = turn_tables(codec).map(|t| {
            let signs = if t.signs.is_empty() { line(&[1.0]) } else { line(&t.signs) };
            ([signs, line(&t.factor), line(&t.transposed)], t.rotated.then_some(t.orders))
        });
        let decode = line(&table(codec, form));
        Some(KernelTables { decode, turn, encode: encode_tables(codec).map(arrays) })
    }
}
