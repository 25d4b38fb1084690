//! The CPU engine: the row form over rayon, compiled for the best instruction set that the machine has.
//!
//! Work is cut into runs of rows; every run is one call through `pulp`, which selects the instruction set, and the row
//! functions are inlined into it. No step reorders a sum by vector width or thread count, so the bytes are the same everywhere.

mod attend;
mod blocks;
mod dense;
mod domain;
mod fused;
mod masses;
mod paths;
#[doc(hidden)]
pub mod probe;
mod products;
mod rows;
mod simd;
mod unpack;
pub(crate) mod workers;

use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::codec::frame;
use crate::codec::tile;
use crate::engine::attention::{Rules, Segment};
use crate::engine::{Engine, check_vectors};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};
use dense::{channel_codes, turn, turn_back, uncentred};
pub use dense::{dense_scores, dense_sum};
use half::{bf16, f16};
use pulp::Arch;
use rayon::prelude::*;
use rows::{Decode, Door, Encode, FrameTables, RowRun, scale_codes, scale_tensor};
use std::sync::Arc;

/// Rows a run: enough to hide the dispatch, few enough that every core gets some.
const RUN: usize = 128;

/// The CPU engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Engine for Cpu {
    type Tensor = Tensor;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn put(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }

    fn get(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }

    fn frame(
        &self,
        codec: &Codec,
        centred: bool,
        block: &Tensor,
        queries: Option<&Tensor>,
    ) -> Result<Frame<Tensor>> {
        let spec = codec.spec();
        let dim = spec.head_dim;
        let (heads, per_head) = by_head(block, "block", dim)?;
        let centres: Option<Vec<Vec<f32>>> =
            centred.then(|| heads.chunks_exact(per_head).map(|rows| frame::mean(rows, dim)).collect());
        let energies: Vec<Vec<f32>> = heads
            .chunks_exact(per_head)
            .enumerate()
            .map(|(i, rows)| frame::energy(rows, dim, centres.as_ref().map(|c| &c[i][..])))
            .collect();
        let shape = [block.shape()[0], block.shape()[1], dim];
        let gains = if spec.equalised { Some(gains(&energies, block, queries)?) } else { None };
        let order = |i: usize| {
            let energy = &energies[i];
            let gained: Vec<f32> = match &gains {
                Some(g) => energy.iter().zip(&g[i]).map(|(e, g)| e * g * g).collect(),
                None => energy.clone(),
            };
            frame::order(&gained, spec.outliers as usize)
        };
        let orders = (spec.outliers > 0).then(|| (0..energies.len()).flat_map(order).collect::<Vec<u32>>());
        Ok(Frame {
            centre: centres.map(|c| Tensor::new(&shape, c.concat())).transpose()?,
            order: orders.map(|o| Tensor::new(&shape, o)).transpose()?,
            gain: gains.map(|g| Tensor::new(&shape, g.concat())).transpose()?,
        })
    }

    fn encode(&self, codec: &Arc<Codec>, frame: Frame<Tensor>, x: &Tensor) -> Result<Codes<Tensor>> {
        let [b, h, t, d] = check_vectors(codec, x.shape())?;
        frame.check(codec, b, h)?;
        let (words_shape, scales_shape) = ([b, h, t, codec.row_words()], [b, h, t, codec.row_scales()]);
        if let Some(channel) = codec.channel() {
            let (group, centred) = (codec.spec().tile(), FrameTables::new(&frame, d)?);
            let mut rows = uncentred(x, &centred, d)?;
            let bad: Vec<_> = rows.chunks_exact_mut(group * d).map(|rows| tile::leave_out(rows, d)).collect();
            let turned = turn(&Tensor::new(x.shape(), rows)?, group)?;
            let inner = self.encode(channel, Frame::default(), &turned)?;
            let mut scales = scale_codes(&inner)?;
            let pairs = scales.chunks_exact_mut(2 * d).zip(bad);
            pairs.for_each(|(pairs, bad)| bad.into_iter().for_each(|bad| tile::mark(pairs, &bad)));
            let words = inner.words().reshape(&words_shape)?;
            let scales = scale_tensor(codec.format(), &scales_shape, scales)?;
            return Codes::new(codec.clone(), frame, words, scales);
        }
        let tables = FrameTables::new(&frame, d)?;
        let (words, scales) = match x.float() {
            Some(Dtype::F32) => encode_rows::<f32>(codec, &tables, x, t),
            Some(Dtype::F16) => encode_rows::<f16>(codec, &tables, x, t),
            Some(Dtype::BF16) => encode_rows::<bf16>(codec, &tables, x, t),
            None => Err(x.wrong_dtype("vectors", "F32, F16 or BF16")),
        }?;
        let scales = scale_tensor(codec.format(), &scales_shape, scales)?;
        Codes::new(codec.clone(), frame, Tensor::new(&words_shape, words)?, scales)
    }

    fn decode(&self, codes: &Codes<Tensor>, dtype: Dtype) -> Result<Tensor> {
        let codec = codes.codec();
        let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
        let shape = [b, h, t, d];
        let tables = FrameTables::new(codes.frame(), d)?;
        if let Some(channel) = codec.channel() {
            let group = codec.spec().tile();
            let (inner, bad) = channel_codes(codes, channel)?;
            let mut back = turn_back(&self.decode(&inner, Dtype::F32)?, group, d)?.to_f32()?;
            for (i, row) in back.chunks_exact_mut(d).enumerate() {
                if bad[i / group].as_ref().is_some_and(|bad| bad[i % group]) {
                    row.fill(f32::NAN);
                }
                if let Some(centre) = tables.row(i / t.max(1)).centre {
                    row.iter_mut().zip(centre).for_each(|(x, c)| *x += c);
                }
            }
            return Tensor::from_f32(dtype, &shape, back);
        }
        let words = codes.words().standard::<u32>()?;
        let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
        match dtype {
            Dtype::F32 => decode_rows::<f32>(codec, &tables, words, &scales, &shape),
            Dtype::F16 => decode_rows::<f16>(codec, &tables, words, &scales, &shape),
            Dtype::BF16 => decode_rows::<bf16>(codec, &tables, words, &scales, &shape),
        }
    }

    fn scores(&self, codes: &Codes<Tensor>, queries: &Tensor) -> Result<Tensor> {
        products::scores(codes, queries)
    }

    fn weighted_sum(&self, codes: &Codes<Tensor>, weights: &Tensor) -> Result<Tensor> {
        products::weighted_sum(codes, weights)
    }

    fn attend(
        &self,
        segments: &[Segment<Tensor>],
        queries: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Tensor> {
        fused::attend(segments, queries, rules)
    }

    fn masses(
        &self,
        segments: &[Segment<Tensor>],
        queries: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Vec<f32>> {
        masses::masses(segments, queries, rules)
    }

    fn dtype(&self, tensor: &Tensor) -> Result<Dtype> {
        tensor.float().ok_or_else(|| tensor.wrong_dtype("tensor", "F32, F16 or BF16"))
    }

    fn zeros(&self, dtype: Dtype, shape: &[usize]) -> Result<Tensor> {
        let count = shape.iter().try_fold(1usize, |n, axis| n.checked_mul(*axis));
        let Some(count) = count.filter(|n| *n <= isize::MAX as usize / 4) else {
            let expected = "a number of elements that can be counted".into();
            return Err(Error::Shape { what: "zeros", expected, got: shape.to_vec() });
        };
        Tensor::from_f32(dtype, shape, vec![0.0; count])
    }

    fn write(&self, buffer: &mut Tensor, start: usize, rows: &Tensor) -> Result<()> {
        buffer.write_rows(start, rows)
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.compact())
    }
}

/// Words and scale codes of all rows; a head has `tokens`.
fn encode_rows<T: Door>(
    codec: &Codec,
    tables: &FrameTables,
    x: &Tensor,
    tokens: usize,
) -> Result<(Vec<u32>, Vec<u16>)> {
    let (w, s, d) = (codec.row_words(), codec.row_scales(), codec.spec().head_dim);
    let x = x.standard::<T>()?;
    let x = x.as_slice().expect("standard layout");
    let (mut words, mut scales) = (vec![0u32; x.len() / d * w], vec![0u16; x.len() / d * s]);
    let arch = Arch::new();
    workers::run(|| {
        x.par_chunks(RUN * d)
            .zip(words.par_chunks_mut(RUN * w).zip(scales.par_chunks_mut(RUN * s)))
            .enumerate()
            .for_each(|(i, (x, (words, scales)))| {
                let run = RowRun { codec, tables, first: i * RUN, tokens };
                arch.dispatch(Encode { run, x, words, scales });
            })
    })?;
    Ok((words, scales))
}

fn decode_rows<T: Door>(
    codec: &Codec,
    tables: &FrameTables,
    words: &[u32],
    scales: &[u16],
    shape: &[usize; 4],
) -> Result<Tensor> {
    let (w, s, d) = (codec.row_words(), codec.row_scales(), codec.spec().head_dim);
    // Zeroed by the allocator, so that a large result is first touched by the thread that fills it.
    let mut out = bytemuck::zeroed_vec::<T>(shape.iter().product());
    let arch = Arch::new();
    workers::run(|| {
        words
            .par_chunks(RUN * w)
            .zip(scales.par_chunks(RUN * s).zip(out.par_chunks_mut(RUN * d)))
            .enumerate()
            .for_each(|(i, (words, (scales, out)))| {
                let run = RowRun { codec, tables, first: i * RUN, tokens: shape[2] };
                arch.dispatch(Decode { run, words, scales, out });
            })
    })?;
    Tensor::new(shape, out)
}

/// Rows of all heads as f32, and the elements a head has.
fn by_head(x: &Tensor, what: &'static str, dim: usize) -> Result<(Vec<f32>, usize)> {
    match *x.shape() {
        [b, h, n, d] if d == dim && b > 0 && h > 0 && n > 0 => Ok((x.to_f32()?, n * d)),
        _ => Err(x.wrong_shape(what, format!("[B > 0, H > 0, n > 0, {dim}]"))),
    }
}

/// Gains of every KV head; the query heads that share one are taken together.
fn gains(energies: &[Vec<f32>], block: &Tensor, queries: Option<&Tensor>) -> Result<Vec<Vec<f32>>> {
    let Some(queries) = queries else {
        return Ok(energies.iter().map(|e| frame::gains(e, None)).collect());
    };
    let (shape, dim) = (block.shape(), block.shape()[3]);
    let (rows, _) = by_head(queries, "queries", dim)?;
    if queries.shape()[0] != shape[0] || queries.shape()[1] % shape[1] != 0 {
        let expected = format!("[{}, a multiple of {}, m > 0, {dim}]", shape[0], shape[1]);
        return Err(queries.wrong_shape("queries", expected));
    }
    let per_head = rows.len() / energies.len();
    let per_kv = |(i, e): (usize, &Vec<f32>)| {
        frame::gains(e, Some(&frame::energy(&rows[i * per_head..][..per_head], dim, None)))
    };
    Ok(energies.iter().enumerate().map(per_kv).collect())
}
