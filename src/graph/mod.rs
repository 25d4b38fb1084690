//! The MLX engine: every stage a lazy array graph on unified memory. Nothing here evaluates; the caller does, once.
//!
//! MLX evaluates an array on the thread that made it, so an engine stays on one thread (it is not `Sync`). Device tables are
//! made once for each codec. Uniform grids whose width MLX's quantized kernels know are scored and summed by
//! `quantized_matmul` on the packed words as they are.

mod attend;
mod stages;
mod tables;
mod trellis;

use crate::attention::{Rules, Segment};
use crate::codec::{Band, BandGrid, Codec};
use crate::codes::{Codes, Frame};
use crate::engine::{Engine, check_queries, check_vectors};
use crate::error::{Error, Result};
use crate::mlx_ops::{self, slice, wrong_shape};
use crate::spec::CodecSpec;
use crate::tensor::{Dtype, Tensor};
use mlx_rs::ops::{self, matmul, select};
use mlx_rs::{Array, Dtype as MlxDtype};
use stages::{dot, finite, num, pack, scale_of, store_scale, unpack, with_last};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use tables::{BandTables, Tables, native_group};

/// The MLX engine.
#[derive(Clone, Default)]
pub struct Graph {
    tables: Rc<RefCell<HashMap<TableKey, Rc<Tables>>>>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} codecs)", self.tables.borrow().len())
    }
}

/// Whether MLX's default device is a GPU.
pub fn on_gpu() -> bool {
    mlx_rs::Device::try_default()
        .is_ok_and(|d| d.get_type().is_ok_and(|t| matches!(t, mlx_rs::DeviceType::Gpu)))
}

/// What makes two codecs the same: the spec and the bits of calibrated levels.
type TableKey = (CodecSpec, Vec<u32>);

impl Graph {
    /// An engine on MLX's default device.
    pub fn new() -> Graph {
        Graph::default()
    }

    fn tables(&self, codec: &Codec) -> Result<Rc<Tables>> {
        let levels = codec.fitted().map(|l| l.iter().map(|x| x.to_bits()).collect()).unwrap_or_default();
        let key = (*codec.spec(), levels);
        if let Some(tables) = self.tables.borrow().get(&key) {
            return Ok(tables.clone());
        }
        let tables = Rc::new(Tables::new(codec)?);
        self.tables.borrow_mut().insert(key, tables.clone());
        Ok(tables)
    }

    /// Levels [B, H, T, n] of one band, before the scale.
    fn levels(&self, tables: &Tables, i: usize, band: &Band, words: &Array) -> Result<Array> {
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
    fn rotated_rows(&self, codes: &Codes<Array>, tables: &Tables) -> Result<Array> {
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
    fn residual(&self, codes: &Codes<Array>, tables: &Tables, round: usize) -> Result<(Array, Array)> {
        let codec = codes.codec();
        let qjl = codec.qjl().ok_or_else(|| unsupported(codec))?;
        let per_round = qjl.projections() / 32;
        let start = codec.row_words() - (qjl.rounds() - round) * per_round;
        let bits = unpack(&slice(codes.words(), 3, start, start + per_round)?, qjl.projections(), 1)?;
        let at = codec.bands().len() + round;
        let norm = tables.load_scale(&slice(codes.scales(), 3, at, at + 1)?)?;
        Ok((bits.multiply(num(2.0))?.subtract(num(1.0))?, norm))
    }

    fn encode_bands(&self, codec: &Codec, t: &Array) -> Result<(Array, Array)> {
        let tables = self.tables(codec)?;
        let (mut words, mut scales, mut left) = (vec![], vec![], vec![]);
        for (i, band) in codec.bands().iter().enumerate() {
            let y = tables.bands[i].rotation.forward(&slice(t, 3, band.start, band.start + band.dim)?)?;
            let Some(levels) = &tables.bands[i].levels else { return encode_groups(codec, &y) };
            let yy = dot(&y, &y)?;
            let good = yy.gt(num(0.0))?.logical_and(finite(&yy)?)?;
            let u = y.multiply(num(band.dim as f32).divide(&yy)?.sqrt()?)?;
            // What a bad row gives is undefined up to the mask; its codes are zeros.
            let zero = Array::from_slice(&[0u32], &[1]);
            let (codes, c) = match &band.grid {
                BandGrid::Trellis(trellis) => {
                    let codes = select(&good, trellis::search(&u, trellis)?, zero)?;
                    let windows = trellis::windows(&pack(&codes, band.bits)?, trellis, band.dim)?;
                    (codes, levels.take(windows)?)
                }
                grid => {
                    let codes = select(&good, scalar_codes(&u, grid, &tables.bands[i], band.bits)?, zero)?;
                    let c = levels.take(&codes)?;
                    (codes, c)
                }
            };
            let scale = scale_of(codec.spec().scale, &yy, &dot(&c, &y)?, &dot(&c, &c)?, band.dim)?;
            let stored = store_scale(&scale, codec.format())?;
            if codec.qjl().is_some() {
                let rest = y.subtract(c.multiply(tables.load_scale(&stored)?)?)?;
                left.push(select(&good, rest, num(0.0))?);
            }
            words.push(pack(&codes, band.bits)?);
            scales.push(stored);
        }
        if let Some(qjl) = codec.qjl() {
            let mut left = join(left)?;
            for s in &tables.projections {
                let positive = matmul(&left, s.t())?.gt(num(0.0))?;
                words.push(pack(&positive, 1)?);
                let stored = store_scale(&dot(&left, &left)?.sqrt()?, codec.format())?;
                let signs = positive.as_dtype(MlxDtype::Float32)?.multiply(num(2.0))?.subtract(num(1.0))?;
                let norm = tables.load_scale(&stored)?.multiply(num(qjl.shrunk_factor()))?;
                left = left.subtract(matmul(signs, s)?.multiply(norm)?)?;
                scales.push(stored);
            }
        }
        Ok((join(words)?, join(scales)?))
    }
}

impl Engine for Graph {
    type Tensor = Array;

    fn name(&self) -> &'static str {
        "mlx"
    }

    fn put(&self, tensor: &Tensor) -> Result<Array> {
        mlx_ops::put(tensor)
    }

    fn get(&self, tensor: &Array) -> Result<Tensor> {
        mlx_ops::get(tensor)
    }

    fn frame(
        &self,
        codec: &Codec,
        centred: bool,
        block: &Array,
        queries: Option<&Array>,
    ) -> Result<Frame<Array>> {
        let (spec, shape) = (codec.spec(), mlx_ops::shape(block));
        if shape.len() != 4 || shape[3] != spec.head_dim || shape[2] == 0 {
            return Err(wrong_shape(block, "block", format!("[B, H, n > 0, {}]", spec.head_dim)));
        }
        let block = float(block, "block")?;
        let centre = centred.then(|| block.mean_axis(2, true)).transpose()?;
        let centred_block = match &centre {
            Some(c) => block.subtract(c)?,
            None => block,
        };
        let [b, h, _, d] = [0, 1, 2, 3].map(|i| shape[i] as i32);
        let mut energy = centred_block.square()?.mean_axis(2, false)?;
        let mut gain = None;
        if spec.equalised {
            let query_energy = queries.map(|q| query_energy(q, b, h, d)).transpose()?;
            let g = gains(&energy, query_energy.as_ref())?;
            energy = energy.multiply(g.square()?)?;
            gain = Some(g);
        }
        let mut order = None;
        if spec.outliers > 0 {
            let (places, n) = (ops::argsort_axis(energy.negative()?, -1)?, spec.outliers as usize);
            let part =
                |start, end| -> Result<Array> { Ok(ops::sort_axis(slice(&places, 2, start, end)?, -1)?) };
            order = Some(join(vec![part(0, n)?, part(n, spec.head_dim)?])?);
        }
        let centre = centre.map(|c| c.reshape(&[b, h, d])).transpose()?;
        Ok(Frame { centre, gain, order })
    }

    fn encode(&self, codec: &Arc<Codec>, frame: Frame<Array>, x: &Array) -> Result<Codes<Array>> {
        let [b, h, t, d] = check_vectors(codec, &mlx_ops::shape(x))?;
        frame.check(codec, b, h)?;
        let x = enter(&frame, &float(x, "vectors")?)?;
        let (words, scales) = match codec.channel() {
            Some(channel) => {
                let (group, [b, h, t, d]) = (codec.spec().tile() as i32, [b, h, t, d].map(|n| n as i32));
                let turned = x.reshape(&[b, h, t / group, group, d])?.transpose_axes(&[0, 1, 2, 4, 3])?;
                let inner =
                    self.encode(channel, Frame::default(), &turned.reshape(&[b, h, t / group * d, group])?)?;
                let shape = |last: usize| [b, h, t, last as i32];
                (
                    inner.words().reshape(&shape(codec.row_words()))?,
                    inner.scales().reshape(&shape(codec.row_scales()))?,
                )
            }
            None => self.encode_bands(codec, &x)?,
        };
        Codes::new(codec.clone(), frame, words, scales)
    }

    fn decode(&self, codes: &Codes<Array>, dtype: Dtype) -> Result<Array> {
        let (codec, tables) = (codes.codec(), self.tables(codes.codec())?);
        let [b, h, t] = codes.shape().map(|n| n as i32);
        let rows = if let Some(channel) = codec.channel() {
            let (group, d) = (codec.spec().tile() as i32, codec.spec().head_dim as i32);
            let rows = t / group * d;
            let words = codes.words().reshape(&[b, h, rows, channel.row_words() as i32])?;
            let scales = codes.scales().reshape(&[b, h, rows, channel.row_scales() as i32])?;
            let inner = Codes::new(channel.clone(), Frame::default(), words, scales)?;
            let turned = self.decode(&inner, Dtype::F32)?.reshape(&[b, h, t / group, d, group])?;
            turned.transpose_axes(&[0, 1, 2, 4, 3])?.reshape(&[b, h, t, d])?
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
        let top = match dtype {
            Dtype::F32 => return Ok(x),
            Dtype::F16 => 65504.0,
            Dtype::BF16 => half::bf16::MAX.to_f32(),
        };
        Ok(ops::minimum(ops::maximum(x, num(-top))?, num(top))?.as_dtype(mlx_dtype(dtype))?)
    }

    fn scores(&self, codes: &Codes<Array>, queries: &Array) -> Result<Array> {
        let (codec, [b, h, t]) = (codes.codec(), codes.shape());
        let d = codec.spec().head_dim;
        let (hq, l) = check_queries(codes, "queries", &mlx_ops::shape(queries), d)?;
        let folded = [b as i32, h as i32, (hq / h * l) as i32, d as i32];
        let q = float(queries, "queries")?.reshape(&folded)?;
        let out = [b, hq, l, t].map(|n| n as i32);
        if codec.channel().is_some() {
            let keys = self.decode(codes, Dtype::F32)?;
            return Ok(matmul(q, keys.transpose_axes(&[0, 1, 3, 2])?)?.reshape(&out)?);
        }
        let tables = self.tables(codec)?;
        let entered = enter_query(codes.frame(), &q)?;
        let mut score: Option<Array> = None;
        let mut add = |part: Array| -> Result<()> {
            score = Some(match score.take() {
                Some(sum) => sum.add(part)?,
                None => part,
            });
            Ok(())
        };
        let mut rotated = vec![];
        for (i, band) in codec.bands().iter().enumerate() {
            let q =
                tables.bands[i].rotation.forward(&slice(&entered, 3, band.start, band.start + band.dim)?)?;
            if codec.affine_group().is_some() {
                add(matmul(&q, self.rotated_rows(codes, &tables)?.transpose_axes(&[0, 1, 3, 2])?)?)?;
            } else if let Some(native) = self.native(codes, &tables, i, band)? {
                add(native.matmul(&q, true)?)?;
            } else {
                let c = self.levels(&tables, i, band, codes.words())?;
                let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?;
                let product = matmul(&q, c.transpose_axes(&[0, 1, 3, 2])?)?;
                add(product.multiply(scale.transpose_axes(&[0, 1, 3, 2])?)?)?;
            }
            rotated.push(q);
        }
        if let Some(qjl) = codec.qjl() {
            let rotated = join(rotated)?;
            for round in 0..qjl.rounds() {
                let (signs, norm) = self.residual(codes, &tables, round)?;
                let projected = matmul(&rotated, tables.projections[round].t())?;
                let norm = norm.multiply(num(qjl.factor_for_score(round)))?.transpose_axes(&[0, 1, 3, 2])?;
                add(matmul(projected, signs.transpose_axes(&[0, 1, 3, 2])?)?.multiply(norm)?)?;
            }
        }
        if let Some(centre) = &codes.frame().centre {
            add(dot(&q, &centre.expand_dims(2)?)?)?;
        }
        Ok(score.ok_or_else(|| unsupported(codec))?.reshape(&out)?)
    }

    fn weighted_sum(&self, codes: &Codes<Array>, weights: &Array) -> Result<Array> {
        let (codec, [b, h, t]) = (codes.codec(), codes.shape());
        let (hq, l) = check_queries(codes, "weights", &mlx_ops::shape(weights), t)?;
        let d = codec.spec().head_dim;
        let w = float(weights, "weights")?.reshape(&[b, h, hq / h * l, t].map(|n| n as i32))?;
        let out = [b, hq, l, d].map(|n| n as i32);
        if codec.channel().is_some() {
            return Ok(matmul(w, self.decode(codes, Dtype::F32)?)?.reshape(&out)?);
        }
        let tables = self.tables(codec)?;
        // A weight of exact zero hides what is in the row, NaN included (masked and padded tokens).
        let hidden = w.eq(num(0.0))?;
        let scaled = |scale: &Array| -> Result<Array> {
            let product = w.multiply(scale.transpose_axes(&[0, 1, 3, 2])?)?;
            Ok(select(&hidden, num(0.0), product)?)
        };
        let mut sums = vec![];
        for (i, band) in codec.bands().iter().enumerate() {
            sums.push(if codec.affine_group().is_some() {
                matmul(&w, self.rotated_rows(codes, &tables)?)?
            } else if let Some(native) = self.native(codes, &tables, i, band)? {
                native.matmul(&w, false)?
            } else {
                let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?;
                matmul(scaled(&scale)?, self.levels(&tables, i, band, codes.words())?)?
            });
        }
        let mut sum = join(sums)?;
        if let Some(qjl) = codec.qjl() {
            for round in 0..qjl.rounds() {
                let (signs, norm) = self.residual(codes, &tables, round)?;
                let weights = scaled(&norm.multiply(num(qjl.shrunk_factor()))?)?;
                sum = sum.add(matmul(matmul(weights, signs)?, &tables.projections[round])?)?;
            }
        }
        let out_of_it = leave(codec, codes.frame(), &tables, &sum, Some(&w.sum_axis(-1, true)?))?;
        Ok(out_of_it.reshape(&out)?)
    }

    fn attend(&self, segments: &[Segment<Array>], queries: &Array, rules: &Rules<Array>) -> Result<Array> {
        attend::attend(self, segments, queries, rules)
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
        let shape: Vec<i32> = shape.iter().map(|&n| n as i32).collect();
        Ok(ops::zeros_dtype(&shape, mlx_dtype(dtype))?)
    }

    fn write(&self, buffer: &mut Array, start: usize, rows: &Array) -> Result<()> {
        *buffer = mlx_ops::write_rows(buffer, start, &rows.as_dtype(buffer.dtype())?)?;
        Ok(())
    }

    fn compact(&self, tensor: &Array) -> Result<Array> {
        Ok(tensor.contiguous()?)
    }
}

/// Codes of unit-variance coordinates on a scalar grid.
fn scalar_codes(u: &Array, grid: &BandGrid, tables: &BandTables, bits: u8) -> Result<Array> {
    match (grid.scalar().and_then(|g| g.step()), &tables.borders) {
        (None, Some(borders)) => Ok(borders.search_sorted(u, ops::SearchSide::Right)?),
        (step, _) => {
            let (half, top) = ((1u32 << bits) as f32 * 0.5, ((1u32 << bits) - 1) as f32);
            let place = u.multiply(num(1.0 / step.unwrap_or(1.0)))?.add(num(half))?;
            Ok(ops::minimum(ops::maximum(place, num(0.0))?, num(top))?.as_dtype(MlxDtype::Uint32)?)
        }
    }
}

/// Packed words with the scales and biases that `quantized_matmul` wants.
struct Native {
    words: Array,
    scales: Array,
    biases: Array,
    group: i32,
    bits: i32,
}

impl Native {
    fn matmul(&self, x: &Array, transpose: bool) -> Result<Array> {
        let (group, bits) = (self.group, self.bits);
        Ok(ops::quantized_matmul(x, &self.words, &self.scales, &self.biases, transpose, group, bits)?)
    }
}

impl Graph {
    /// A uniform band in MLX's own layout, if it is one.
    fn native(&self, codes: &Codes<Array>, tables: &Tables, i: usize, band: &Band) -> Result<Option<Native>> {
        let Some((step, group)) =
            band.grid.scalar().and_then(|g| g.step()).zip(native_group(band.dim, band.bits))
        else {
            return Ok(None);
        };
        let scale = tables.load_scale(&slice(codes.scales(), 3, i, i + 1)?)?.multiply(num(step))?;
        let scales = ops::broadcast_to(&scale, &with_last(&scale, &[band.dim as i32 / group]))?;
        let biases = scales.multiply(num(-0.5 * ((1u32 << band.bits) - 1) as f32))?;
        let words = slice(codes.words(), 3, band.word, band.word + band.words)?;
        Ok(Some(Native { words, scales, biases, group, bits: band.bits.into() }))
    }
}

fn mlx_dtype(dtype: Dtype) -> MlxDtype {
    match dtype {
        Dtype::F32 => MlxDtype::Float32,
        Dtype::F16 => MlxDtype::Float16,
        Dtype::BF16 => MlxDtype::Bfloat16,
    }
}

/// Joins along the last axis.
fn join(mut parts: Vec<Array>) -> Result<Array> {
    if parts.len() == 1 { Ok(parts.remove(0)) } else { Ok(ops::concatenate(&parts, -1)?) }
}

fn float(x: &Array, what: &'static str) -> Result<Array> {
    match x.dtype() {
        MlxDtype::Float32 => Ok(x.clone()),
        MlxDtype::Float16 | MlxDtype::Bfloat16 => Ok(x.as_dtype(MlxDtype::Float32)?),
        other => Err(Error::Dtype { what, expected: "F32, F16 or BF16", got: format!("{other:?}") }),
    }
}

fn unsupported(codec: &Codec) -> Error {
    Error::Unsupported { field: "codec", value: codec.spec().to_string(), reason: "it has no bands".into() }
}

/// Centred, equalised, in channel order.
fn enter(frame: &Frame<Array>, x: &Array) -> Result<Array> {
    let mut x = x.clone();
    if let Some(centre) = &frame.centre {
        x = x.subtract(centre.expand_dims(2)?)?;
    }
    if let Some(gain) = &frame.gain {
        x = x.multiply(gain.expand_dims(2)?)?;
    }
    reorder(frame, x)
}

fn enter_query(frame: &Frame<Array>, q: &Array) -> Result<Array> {
    let q = match &frame.gain {
        Some(gain) => q.divide(gain.expand_dims(2)?)?,
        None => q.clone(),
    };
    reorder(frame, q)
}

fn reorder(frame: &Frame<Array>, x: Array) -> Result<Array> {
    match &frame.order {
        Some(order) => Ok(x.take_along_axis(ops::broadcast_to(order.expand_dims(2)?, x.shape())?, -1)?),
        None => Ok(x),
    }
}

/// Out of the rotated domain; `weights` is the sum of the rows' weights, one where it is `None`.
fn leave(
    codec: &Codec,
    frame: &Frame<Array>,
    tables: &Tables,
    rows: &Array,
    weights: Option<&Array>,
) -> Result<Array> {
    let mut x = rows.clone();
    if codec.channel().is_none() {
        let bands = codec.bands().iter().zip(&tables.bands);
        let back = bands.map(|(b, t)| t.rotation.inverse(&slice(rows, 3, b.start, b.start + b.dim)?));
        x = join(back.collect::<Result<_>>()?)?;
    }
    if let Some(order) = &frame.order {
        let places = ops::argsort_axis(order, -1)?;
        x = x.take_along_axis(ops::broadcast_to(places.expand_dims(2)?, x.shape())?, -1)?;
    }
    if let Some(gain) = &frame.gain {
        x = x.divide(gain.expand_dims(2)?)?;
    }
    if let Some(centre) = &frame.centre {
        let centre = centre.expand_dims(2)?;
        x = match weights {
            Some(w) => x.add(centre.multiply(w)?)?,
            None => x.add(centre)?,
        };
    }
    Ok(x)
}

/// Codes, scales and biases of affine groups, by the rule of [`crate::grid::affine_range`].
fn encode_groups(codec: &Codec, y: &Array) -> Result<(Array, Array)> {
    let group = codec.affine_group().ok_or_else(|| unsupported(codec))? as i32;
    let n = y.shape()[3];
    let x = y.reshape(&with_last(y, &[n / group, group]))?;
    let top = num(((1u32 << codec.spec().bits) - 1) as f32);
    let (low, high) = (x.min_axis(-1, true)?, x.max_axis(-1, true)?);
    let step = ops::maximum(high.subtract(&low)?.divide(&top)?, num(1e-7))?;
    let from_low = low.abs()?.gt(high.abs()?)?;
    let edge = select(&from_low, &low, &high)?;
    let step = select(&from_low, &step, step.negative()?)?;
    let steps = edge.divide(&step)?.round(0)?;
    let on_zero = steps.eq(num(0.0))?;
    let half = |x: Array| -> Result<Array> {
        Ok(ops::minimum(ops::maximum(x, num(-65504.0))?, num(65504.0))?.as_dtype(MlxDtype::Float16)?)
    };
    let scale = half(select(&on_zero, &step, edge.divide(&steps)?)?)?;
    let bias = half(select(&on_zero, num(0.0), &edge)?)?;
    let (s, z) = (scale.as_dtype(MlxDtype::Float32)?, bias.as_dtype(MlxDtype::Float32)?);
    let place = x.subtract(z)?.divide(&s)?.round(0)?;
    let place = ops::minimum(ops::maximum(place, num(0.0))?, &top)?;
    let place = select(s.eq(num(0.0))?.logical_or(ops::is_nan(&place)?)?, num(0.0), place)?;
    let codes = place.as_dtype(MlxDtype::Uint32)?.reshape(y.shape())?;
    let flat = |a: Array| a.reshape(&with_last(y, &[n / group]));
    Ok((pack(&codes, codec.spec().bits)?, join(vec![flat(scale)?, flat(bias)?])?))
}

/// Mean square of the query heads that share a KV head, [B, H, D].
fn query_energy(q: &Array, b: i32, h: i32, d: i32) -> Result<Array> {
    let shape = q.shape();
    if shape.len() != 4 || shape[0] != b || shape[1] % h != 0 || shape[3] != d || shape[2] == 0 {
        return Err(wrong_shape(q, "queries", format!("[{b}, a multiple of {h}, m > 0, {d}]")));
    }
    let folded = [b, h, shape[1] / h * shape[2], d];
    Ok(float(q, "queries")?.reshape(&folded)?.square()?.mean_axis(2, false)?)
}

/// The gains of [`crate::frame::gains`].
fn gains(keys: &Array, queries: Option<&Array>) -> Result<Array> {
    let shape = keys.shape().to_vec();
    let half = shape[2] / 2;
    // Pair sums and the floor under them.
    let pairs = |e: &Array| -> Result<Array> {
        let floor = e.sum_axis(-1, true)?.multiply(num(1e-3 / half as f32))?.add(num(1e-30))?;
        let pair = e.reshape(&[shape[0], shape[1], 2, half])?.sum_axis(2, false)?;
        Ok(pair.add(floor)?)
    };
    let mut log = pairs(keys)?.log()?.negative()?;
    if let Some(q) = queries {
        log = log.add(pairs(q)?.log()?)?;
    }
    let log = log.multiply(num(0.25))?;
    let gain = log.subtract(log.mean_axis(-1, true)?)?.exp()?;
    join(vec![gain.clone(), gain])
}
