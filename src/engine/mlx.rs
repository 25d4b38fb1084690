//! The MLX engine: every stage a lazy array graph on unified memory. The caller evaluates, at least once for every prefill chunk of 2,048
//! tokens and for every decoded token: until then MLX keeps all keys, values and queries that the graph begins with, and all its nodes.
//! The one thing that evaluates here is the search of a trellis without a kernel, whose steps would take up far more than that.
//!
//! MLX evaluates an array on the thread that made it, so an engine stays on one thread (it is not `Sync`). Device tables are
//! made once for each codec. Uniform grids whose width MLX's quantized kernels know are scored and summed by
//! `quantized_matmul` on the packed words as they are.

use arrays::slice;
use frame::{enter, leave};
use stages::{cast, float, join, mlx_dtype, num, unpack, unsupported};
use tables::DeviceTables;
mod around;
pub mod arrays;
mod attend;
mod encode;
mod frame;
mod fused;
pub mod kernels;
mod products;
mod stages;
mod tables;
mod tile;
mod trellis;

use crate::codec::codes::{Codes, Frame};
use crate::codec::{Band, BandGrid, Codec};
use crate::engine::attention::{Rules, Segment};
use crate::engine::mlx::kernels::Kernels;
use crate::engine::{Engine, check_vectors};
use crate::error::{Error, Result};
use crate::spec::CodecSpec;
use crate::tensor::{Dtype, Tensor};
use mlx_rs::ops::{self, matmul};
use mlx_rs::{Array, Dtype as MlxDtype};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// The MLX engine.
#[derive(Clone)]
pub struct Mlx {
    tables: Rc<RefCell<HashMap<TableKey, Rc<DeviceTables>>>>,
    kernels: Rc<Kernels>,
}

impl Default for Mlx {
    fn default() -> Mlx {
        Mlx::new()
    }
}

impl std::fmt::Debug for Mlx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mlx({} codecs)", self.tables.borrow().len())
    }
}

/// What makes two codecs the same: the spec and the bits of calibrated levels.
type TableKey = (CodecSpec, Vec<u32>);

impl Mlx {
    /// An engine on MLX's default device, with fused kernels where its GPU has them.
    pub fn new() -> Mlx {
        Mlx::with_kernels(Kernels::current())
    }

    /// An engine with given kernels.
    pub fn with_kernels(kernels: Kernels) -> Mlx {
        Mlx { tables: Rc::default(), kernels: Rc::new(kernels) }
    }

    /// An engine that uses no kernels of its own, only MLX's operations.
    pub fn plain() -> Mlx {
        Mlx::with_kernels(Kernels::default())
    }

    fn tables(&self, codec: &Codec) -> Result<Rc<DeviceTables>> {
        let levels = codec.fitted().map(|l| l.iter().map(|x| x.to_bits()).collect()).unwrap_or_default();
        let key = (*codec.spec(), levels);
        if let Some(tables) = self.tables.borrow().get(&key) {
            return Ok(tables.clone());
        }
        let tables = Rc::new(DeviceTables::new(codec, self.kernels.gpu().is_some())?);
        self.tables.borrow_mut().insert(key, tables.clone());
        Ok(tables)
    }

    /// Levels [B, H, T, n] of one band, before the scale.
    fn levels(&self, tables: &DeviceTables, i: usize, band: &Band, words: &Array) -> Result<Array> {
        let words = slice(words, 3, band.word, band.word + band.words)?;
        let table = tables.bands[i].levels.as_ref();
        match (&band.grid, table) {
            (BandGrid::Trellis(trellis), Some(levels)) => {
                Ok(levels.take(trellis::windows(&words, trellis, band.dim)?)?)
            }
            (BandGrid::Scalar(grid), Some(levels)) => {
                let codes = unpack(&words, band.dim, band.bits)?;
                match grid.step() {
                    Some(step) => {
                        let middle = 0.5 * ((1u32 << band.bits) - 1) as f32;
                        Ok(codes.subtract(num(middle))?.multiply(num(step))?)
                    }
                    None => Ok(levels.take(codes.as_dtype(MlxDtype::Uint32)?)?),
                }
            }
            _ => unpack(&words, band.dim, band.bits),
        }
    }

    /// Rows in the rotated domain, all bands: scaled levels, without a residual.
    fn rotated_rows(&self, codes: &Codes<Array>, tables: &DeviceTables) -> Result<Array> {
        if let Some(rows) = fused::rows(self, codes, tables)? {
            return Ok(rows);
        }
        let codec = codes.codec();
        if let Some(group) = codec.affine_group() {
            let [b, h, t] = codes.shape().map(|n| n as i32);
            let (groups, group) = (codec.row_scales() as i32 / 2, group as i32);
            let level = self.levels(tables, 0, &codec.bands()[0], codes.words())?;
            let part = |start: i32| -> Result<Array> {
                let s = slice(codes.scales(), 3, start as usize, (start + groups) as usize)?;
                Ok(s.as_dtype(MlxDtype::Float32)?.reshape(&[b, h, t, groups, 1])?)
            };
            let level = level.reshape(&[b, h, t, groups, group])?;
            return Ok(level.multiply(part(0)?)?.add(part(groups)?)?.reshape(&[b, h, t, groups * group])?);
        }
        let mut rows = Vec::new();
        for (i, band) in codec.bands().iter().enumerate() {
            let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?;
            rows.push(self.levels(tables, i, band, codes.words())?.multiply(scale)?);
        }
        join(rows)
    }

    /// Signs [B, H, T, m] as +1 and -1, and norms [B, H, T, 1], of one residual round.
    fn residual(&self, codes: &Codes<Array>, tables: &DeviceTables, round: usize) -> Result<(Array, Array)> {
        let codec = codes.codec();
        let qjl = codec.qjl().ok_or_else(|| unsupported(codec))?;
        let per_round = qjl.projections() / 32;
        let start = codec.row_words() - (qjl.rounds() - round) * per_round;
        let bits = unpack(&slice(codes.words(), 3, start, start + per_round)?, qjl.projections(), 1)?;
        let at = codec.bands().len() + round;
        let norm = tables.load_scale(&slice(codes.scales(), 3, at, at + 1)?)?;
        Ok((bits.multiply(num(2.0))?.subtract(num(1.0))?, norm))
    }
}

impl Engine for Mlx {
    type Tensor = Array;

    fn name(&self) -> &'static str {
        "mlx"
    }

    fn put(&self, tensor: &Tensor) -> Result<Array> {
        arrays::put(tensor)
    }

    fn get(&self, tensor: &Array) -> Result<Tensor> {
        arrays::get(tensor)
    }

    fn mask(&self, shape: &[usize], seen: &[bool]) -> Result<Array> {
        let bytes = Tensor::new(shape, seen.iter().map(|&s| u8::from(s)).collect())?;
        Ok(self.put(&bytes)?.as_dtype(MlxDtype::Bool)?)
    }

    fn frame(
        &self,
        codec: &Codec,
        centred: bool,
        block: &Array,
        queries: Option<&Array>,
    ) -> Result<Frame<Array>> {
        frame::frame(codec, centred, block, queries)
    }

    fn encode(&self, codec: &Arc<Codec>, frame: Frame<Array>, x: &Array) -> Result<Codes<Array>> {
        let [b, h, ..] = check_vectors(codec, &arrays::shape(x))?;
        frame.check(codec, b, h)?;
        let x = enter(&frame, &float(x, "vectors")?)?;
        let (words, scales) = match codec.channel() {
            Some(channel) => tile::encode(self, codec, channel, &x)?,
            None => encode::encode_bands(self, codec, &x)?,
        };
        Codes::new(codec.clone(), frame, words, scales)
    }

    fn decode(&self, codes: &Codes<Array>, dtype: Dtype) -> Result<Array> {
        let (codec, tables) = (codes.codec(), self.tables(codes.codec())?);
        let rows = if let Some(channel) = codec.channel() {
            tile::decode(self, codes, channel)?
        } else {
            let mut rows = self.rotated_rows(codes, &tables)?;
            for round in 0..tables.projections.len() {
                let (signs, norm) = self.residual(codes, &tables, round)?;
                let factor = codec.qjl().map_or(0.0, |q| q.shrunk_factor());
                let rest = matmul(signs, &tables.projections[round])?;
                rows = rows.add(rest.multiply(norm.multiply(num(factor))?)?)?;
            }
            rows
        };
        let x = leave(codec, codes.frame(), &tables, &rows, None)?;
        cast(&x, mlx_dtype(dtype))
    }

    fn scores(&self, codes: &Codes<Array>, queries: &Array) -> Result<Array> {
        products::scores(self, codes, queries)
    }

    fn weighted_sum(&self, codes: &Codes<Array>, weights: &Array) -> Result<Array> {
        products::weighted_sum(self, codes, weights)
    }

    fn attend(&self, segments: &[Segment<Array>], queries: &Array, rules: &Rules<Array>) -> Result<Array> {
        attend::attend(self, segments, queries, rules)
    }

    fn masses(&self, segments: &[Segment<Array>], queries: &Array, rules: &Rules<Array>) -> Result<Vec<f32>> {
        attend::masses(self, segments, queries, rules)
    }

    fn dtype(&self, tensor: &Array) -> Result<Dtype> {
        match tensor.dtype() {
            MlxDtype::Float32 => Ok(Dtype::F32),
            MlxDtype::Float16 => Ok(Dtype::F16),
            MlxDtype::Bfloat16 => Ok(Dtype::BF16),
            other => {
                Err(Error::Dtype { what: "array", expected: "F32, F16 or BF16", got: format!("{other:?}") })
            }
        }
    }

    fn zeros(&self, dtype: Dtype, shape: &[usize]) -> Result<Array> {
        let axes = shape.iter().map(|&n| i32::try_from(n)).collect::<std::result::Result<Vec<_>, _>>();
        let Ok(axes) = axes else {
            let expected = "axes below 2^31".into();
            return Err(Error::Shape { what: "zeros", expected, got: shape.to_vec() });
        };
        Ok(ops::zeros_dtype(&axes, mlx_dtype(dtype))?)
    }

    fn write(&self, buffer: &mut Array, start: usize, rows: &Array) -> Result<()> {
        let rows = cast(rows, buffer.dtype())?;
        // Of an update that covers the whole buffer MLX gives the update itself, and a view would keep all of what it is a view of.
        let covers = start == 0 && rows.shape() == buffer.shape();
        *buffer = if covers { self.compact(&rows)? } else { arrays::write_rows(buffer, start, &rows)? };
        Ok(())
    }

    fn compact(&self, tensor: &Array) -> Result<Array> {
        Ok(tensor.contiguous()?)
    }
}
