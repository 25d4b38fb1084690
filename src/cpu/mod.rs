//! The CPU engine: the row form over rayon, compiled for the best instruction set that the machine has.
//!
//! Work is cut into runs of rows; every run is one call through `pulp`, which selects the instruction set once, and the row
//! functions are inlined into it. No step reorders a sum by vector width or thread count, so the bytes are the same everywhere.

use crate::attention::{Rules, Segment};
use crate::codec::{Codec, Prepared};
use crate::codes::{Codes, Frame};
use crate::engine::{Engine, check_queries, check_vectors};
use crate::error::Result;
use crate::frame::{self, RowFrame};
use crate::spec::ScaleFormat;
use crate::tensor::{Dtype, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::Arch;
use rayon::prelude::*;
use std::sync::Arc;

mod attend;

/// Rows a run: enough to hide the dispatch, few enough that every core gets some.
const RUN: usize = 128;

/// The CPU engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Host slices of a frame, by sequence and head.
struct Tables {
    dim: usize,
    centre: Option<Vec<f32>>,
    gain: Option<Vec<f32>>,
    order: Option<Vec<u32>>,
}

impl Tables {
    fn new(frame: &Frame<Tensor>, dim: usize) -> Result<Tables> {
        let f32s = |t: &Option<Tensor>| t.as_ref().map(Tensor::to_vec::<f32>).transpose();
        Ok(Tables {
            dim,
            centre: f32s(&frame.centre)?,
            gain: f32s(&frame.gain)?,
            order: frame.order.as_ref().map(Tensor::to_vec::<u32>).transpose()?,
        })
    }

    #[inline(always)]
    fn row(&self, head: usize) -> RowFrame<'_> {
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
fn scale_codes(codes: &Codes<Tensor>) -> Result<Vec<u16>> {
    Ok(match codes.codec().format() {
        ScaleFormat::F16 => codes.scales().standard::<f16>()?.iter().map(|s| s.to_bits()).collect(),
        ScaleFormat::Log8 => codes.scales().standard::<u8>()?.iter().map(|&s| u16::from(s)).collect(),
    })
}

fn scale_tensor(format: ScaleFormat, shape: &[usize], codes: Vec<u16>) -> Result<Tensor> {
    match format {
        ScaleFormat::F16 => Tensor::new(shape, codes.into_iter().map(f16::from_bits).collect()),
        ScaleFormat::Log8 => Tensor::new(shape, codes.into_iter().map(|c| c as u8).collect()),
    }
}

/// A float array's rows as f32, converted run by run.
enum Rows {
    F32(ndarray::ArcArray<f32, ndarray::IxDyn>),
    F16(ndarray::ArcArray<f16, ndarray::IxDyn>),
    BF16(ndarray::ArcArray<bf16, ndarray::IxDyn>),
}

impl Rows {
    fn new(x: &Tensor, what: &'static str) -> Result<Rows> {
        match x.float() {
            Some(Dtype::F32) => Ok(Rows::F32(x.standard()?)),
            Some(Dtype::F16) => Ok(Rows::F16(x.standard()?)),
            Some(Dtype::BF16) => Ok(Rows::BF16(x.standard()?)),
            None => Err(x.wrong_dtype(what, "F32, F16 or BF16")),
        }
    }

    fn read(&self, start: usize, out: &mut [f32]) {
        let run = start..start + out.len();
        match self {
            Rows::F32(a) => out.copy_from_slice(&a.as_slice().expect("standard layout")[run]),
            Rows::F16(a) => a.as_slice().expect("standard layout")[run].convert_to_f32_slice(out),
            Rows::BF16(a) => a.as_slice().expect("standard layout")[run].convert_to_f32_slice(out),
        }
    }
}

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
        let gains = if spec.equalised { Some(gains(&energies, queries, dim)?) } else { None };
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
            let (group, centred) = (codec.spec().tile(), Tables::new(&frame, d)?);
            let turned = turn(&uncentred(x, &centred)?, group)?;
            let inner = self.encode(channel, Frame::default(), &turned)?;
            let (words, scales) =
                (inner.words().reshape(&words_shape)?, inner.scales().reshape(&scales_shape)?);
            return Codes::new(codec.clone(), frame, words, scales);
        }
        let (rows, tables) = (Rows::new(x, "vectors")?, Tables::new(&frame, d)?);
        let (w, s) = (codec.row_words(), codec.row_scales());
        let mut words = vec![0u32; b * h * t * w];
        let mut scales = vec![0u16; b * h * t * s];
        let arch = Arch::new();
        words.par_chunks_mut(RUN * w).zip(scales.par_chunks_mut(RUN * s)).enumerate().for_each(
            |(run, (words, scales))| {
                let mut scratch = codec.scratch();
                let mut x = vec![0f32; words.len() / w * d];
                rows.read(run * RUN * d, &mut x);
                arch.dispatch(|| {
                    let rows =
                        x.chunks_exact(d).zip(words.chunks_exact_mut(w).zip(scales.chunks_exact_mut(s)));
                    for (i, (x, (words, scales))) in rows.enumerate() {
                        codec.encode_row(tables.row((run * RUN + i) / t), x, words, scales, &mut scratch);
                    }
                });
            },
        );
        let scales = scale_tensor(codec.format(), &scales_shape, scales)?;
        Codes::new(codec.clone(), frame, Tensor::new(&words_shape, words)?, scales)
    }

    fn decode(&self, codes: &Codes<Tensor>, dtype: Dtype) -> Result<Tensor> {
        let codec = codes.codec();
        let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
        let shape = [b, h, t, d];
        let tables = Tables::new(codes.frame(), d)?;
        if let Some(channel) = codec.channel() {
            let inner = self.decode(&channel_codes(codes, channel)?, Dtype::F32)?;
            let mut back = turn_back(&inner, codec.spec().tile(), d)?.to_f32()?;
            for (i, row) in back.chunks_exact_mut(d).enumerate() {
                if let Some(centre) = tables.row(i / t.max(1)).centre {
                    row.iter_mut().zip(centre).for_each(|(x, c)| *x += c);
                }
            }
            return Tensor::from_f32(dtype, &shape, back);
        }
        let words = codes.words().standard::<u32>()?;
        let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
        match dtype {
            Dtype::F32 => {
                decode_rows(codec, &tables, words, &scales, t, |x, out: &mut [f32]| out.copy_from_slice(x))
            }
            Dtype::F16 => decode_rows(codec, &tables, words, &scales, t, |x, out: &mut [f16]| {
                x.iter_mut().for_each(|x| *x = x.clamp(-65504.0, 65504.0));
                out.convert_from_f32_slice(x);
            }),
            Dtype::BF16 => decode_rows(codec, &tables, words, &scales, t, |x, out: &mut [bf16]| {
                let top = bf16::MAX.to_f32();
                x.iter_mut().for_each(|x| *x = x.clamp(-top, top));
                out.convert_from_f32_slice(x);
            }),
        }?
        .reshape(&shape)
    }

    fn scores(&self, codes: &Codes<Tensor>, queries: &Tensor) -> Result<Tensor> {
        let codec = codes.codec();
        let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
        let (hq, l) = check_queries(codes, "queries", queries.shape(), d)?;
        if codec.channel().is_some() {
            // Scores of a channel-affine tile mix its channels: its tokens are unpacked first.
            return dense_scores(&self.decode(codes, Dtype::F32)?, queries);
        }
        let tables = Tables::new(codes.frame(), d)?;
        let q = queries.to_f32()?;
        let per_head = hq / h * l;
        let mut scratch = codec.scratch();
        let prepared: Vec<Prepared> = q
            .chunks_exact(d)
            .enumerate()
            .map(|(i, q)| codec.prepare_row(tables.row(i / per_head), q, &mut scratch))
            .collect();
        let words = codes.words().standard::<u32>()?;
        let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
        let (w, s, arch) = (codec.row_words(), codec.row_scales(), Arch::new());
        let runs = t.div_ceil(RUN);
        // Token-major pieces [head, run][token, query], put in place at the end.
        let pieces: Vec<Vec<f32>> = (0..b * h * runs)
            .into_par_iter()
            .map(|piece| {
                let (head, start) = (piece / runs, piece % runs * RUN);
                let queries = &prepared[head * per_head..][..per_head];
                let mut scratch = codec.scratch();
                let mut out = Vec::with_capacity((t - start).min(RUN) * per_head);
                arch.dispatch(|| {
                    for row in head * t + start..head * t + (start + RUN).min(t) {
                        let (words, scales) = (&words[row * w..][..w], &scales[row * s..][..s]);
                        codec.look_up_row(words, &mut scratch);
                        out.extend(queries.iter().map(|q| codec.score_levels(q, words, scales, &scratch)));
                    }
                });
                out
            })
            .collect();
        let mut out = vec![0f32; b * hq * l * t];
        for (piece, scores) in pieces.iter().enumerate() {
            let (head, start) = (piece / runs, piece % runs * RUN);
            for (i, row) in scores.chunks_exact(per_head).enumerate() {
                for (j, &score) in row.iter().enumerate() {
                    out[(head * per_head + j) * t + start + i] = score;
                }
            }
        }
        Tensor::new(&[b, hq, l, t], out)
    }

    fn weighted_sum(&self, codes: &Codes<Tensor>, weights: &Tensor) -> Result<Tensor> {
        let codec = codes.codec();
        let ([b, h, t], d) = (codes.shape(), codec.spec().head_dim);
        let (hq, l) = check_queries(codes, "weights", weights.shape(), t)?;
        if codec.channel().is_some() {
            return dense_sum(&self.decode(codes, Dtype::F32)?, weights);
        }
        let tables = Tables::new(codes.frame(), d)?;
        let weights = weights.to_f32()?;
        let per_head = hq / h * l;
        let words = codes.words().standard::<u32>()?;
        let (words, scales) = (words.as_slice().expect("standard layout"), scale_codes(codes)?);
        let (w, s, arch) = (codec.row_words(), codec.row_scales(), Arch::new());
        let runs = t.div_ceil(RUN);
        let pieces: Vec<Vec<f32>> = (0..b * h * runs)
            .into_par_iter()
            .map(|piece| {
                let (head, start) = (piece / runs, piece % runs * RUN);
                let mut scratch = codec.scratch();
                let mut sums = vec![0f32; per_head * d];
                arch.dispatch(|| {
                    for i in start..(start + RUN).min(t) {
                        let row = head * t + i;
                        let (words, scales) = (&words[row * w..][..w], &scales[row * s..][..s]);
                        codec.look_up_row(words, &mut scratch);
                        for (j, sum) in sums.chunks_exact_mut(d).enumerate() {
                            let weight = weights[(head * per_head + j) * t + i];
                            // A weight of exact zero hides what is in the row, NaN included (masked and padded tokens).
                            if weight != 0.0 {
                                codec.add_levels(words, scales, weight, sum, &scratch);
                            }
                        }
                    }
                });
                sums
            })
            .collect();
        let mut out = vec![0f32; b * hq * l * d];
        let mut scratch = codec.scratch();
        for (row, out) in out.chunks_exact_mut(d).enumerate() {
            let (head, j) = (row / per_head, row % per_head);
            let mut sum = vec![0f32; d];
            // In order, so that the result does not depend on the threads.
            for piece in &pieces[head * runs..(head + 1) * runs] {
                sum.iter_mut().zip(&piece[j * d..][..d]).for_each(|(a, b)| *a += b);
            }
            let total = weights[row * t..][..t].iter().sum();
            codec.finish_sum(tables.row(head), &mut sum, total, out, &mut scratch);
        }
        Tensor::new(&[b, hq, l, d], out)
    }

    fn attend(
        &self,
        segments: &[Segment<Tensor>],
        queries: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Tensor> {
        attend::attend(segments, queries, rules)
    }

    fn dtype(&self, tensor: &Tensor) -> Result<Dtype> {
        tensor.float().ok_or_else(|| tensor.wrong_dtype("tensor", "F32, F16 or BF16"))
    }

    fn zeros(&self, dtype: Dtype, shape: &[usize]) -> Result<Tensor> {
        Tensor::from_f32(dtype, shape, vec![0.0; shape.iter().product()])
    }

    fn write(&self, buffer: &mut Tensor, start: usize, rows: &Tensor) -> Result<()> {
        buffer.write_rows(start, rows)
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.compact())
    }
}

fn decode_rows<T: crate::tensor::Element + Default>(
    codec: &Codec,
    tables: &Tables,
    words: &[u32],
    scales: &[u16],
    tokens: usize,
    store: impl Fn(&mut [f32], &mut [T]) + Sync,
) -> Result<Tensor> {
    let (w, s, d) = (codec.row_words(), codec.row_scales(), codec.spec().head_dim);
    let mut out = vec![T::default(); words.len() / w * d];
    let arch = Arch::new();
    out.par_chunks_mut(RUN * d).enumerate().for_each(|(run, out)| {
        let mut scratch = codec.scratch();
        let mut x = vec![0f32; out.len()];
        arch.dispatch(|| {
            for (i, x) in x.chunks_exact_mut(d).enumerate() {
                let row = run * RUN + i;
                let (words, scales) = (&words[row * w..][..w], &scales[row * s..][..s]);
                codec.decode_row(tables.row(row / tokens), words, scales, x, &mut scratch);
            }
        });
        store(&mut x, out);
    });
    let len = out.len();
    Tensor::new(&[len], out)
}

/// Rows of all heads as f32, and the elements a head has.
fn by_head(x: &Tensor, what: &'static str, dim: usize) -> Result<(Vec<f32>, usize)> {
    match *x.shape() {
        [_, _, n, d] if d == dim && n > 0 => Ok((x.to_f32()?, n * d)),
        _ => Err(x.wrong_shape(what, format!("[B, H, n > 0, {dim}]"))),
    }
}

/// Gains of every KV head; the query heads that share one are taken together.
fn gains(energies: &[Vec<f32>], queries: Option<&Tensor>, dim: usize) -> Result<Vec<Vec<f32>>> {
    let Some(queries) = queries else {
        return Ok(energies.iter().map(|e| frame::gains(e, None)).collect());
    };
    let (rows, per_query_head) = by_head(queries, "queries", dim)?;
    if rows.len() % energies.len() != 0 || (rows.len() / energies.len()) % per_query_head != 0 {
        return Err(queries.wrong_shape("queries", "a multiple of the KV heads"));
    }
    let per_head = rows.len() / energies.len();
    let per_kv = |(i, e): (usize, &Vec<f32>)| {
        frame::gains(e, Some(&frame::energy(&rows[i * per_head..][..per_head], dim, None)))
    };
    Ok(energies.iter().enumerate().map(per_kv).collect())
}

/// [B, H, T, D] to [B, H, T/g * D, g]: the channels of every tile of g tokens.
fn turn(x: &Tensor, group: usize) -> Result<Tensor> {
    let [b, h, t, d] = *x.shape() else { return Err(x.wrong_shape("vectors", "four axes")) };
    x.reshape(&[b, h, t / group, group, d])?.permute(&[0, 1, 2, 4, 3])?.reshape(&[b, h, t / group * d, group])
}

/// The inverse of [`turn`].
fn turn_back(x: &Tensor, group: usize, d: usize) -> Result<Tensor> {
    let [b, h, rows, _] = *x.shape() else { return Err(x.wrong_shape("vectors", "four axes")) };
    let tiles = rows / d;
    x.reshape(&[b, h, tiles, d, group])?.permute(&[0, 1, 2, 4, 3])?.reshape(&[b, h, tiles * group, d])
}

fn uncentred(x: &Tensor, tables: &Tables) -> Result<Tensor> {
    let (shape, mut rows) = (x.shape().to_vec(), x.to_f32()?);
    if tables.centre.is_some() {
        for (i, row) in rows.chunks_exact_mut(tables.dim).enumerate() {
            let centre = tables.row(i / shape[2]).centre.unwrap_or_default();
            row.iter_mut().zip(centre).for_each(|(x, c)| *x -= c);
        }
    }
    Tensor::new(&shape, rows)
}

/// The codes of a channel-affine codec as codes of its channels.
fn channel_codes(codes: &Codes<Tensor>, channel: &Arc<Codec>) -> Result<Codes<Tensor>> {
    let ([b, h, t], spec) = (codes.shape(), codes.codec().spec());
    let rows = t / spec.tile() * spec.head_dim;
    let words = codes.words().reshape(&[b, h, rows, channel.row_words()])?;
    let scales = codes.scales().reshape(&[b, h, rows, channel.row_scales()])?;
    Codes::new(channel.clone(), Frame::default(), words, scales)
}

/// One matrix product a KV head: [B, Hq, L, n] x ([B, H, n, m] or its transpose) through `product`.
fn per_head(
    x: &Tensor,
    rows: &Tensor,
    product: impl Fn(ndarray::ArrayView2<f32>, ndarray::ArrayView2<f32>) -> ndarray::Array2<f32>,
) -> Result<Vec<f32>> {
    let ([b, h, t, d], [_, hq, l, n]) = (shape4(x)?, shape4(rows)?);
    let (x, rows) = (x.to_f32()?, rows.to_f32()?);
    let q = hq / h * l;
    let mut out = Vec::new();
    for head in 0..b * h {
        let x = ndarray::ArrayView2::from_shape((t, d), &x[head * t * d..][..t * d]);
        let r = ndarray::ArrayView2::from_shape((q, n), &rows[head * q * n..][..q * n]);
        if let (Ok(x), Ok(r)) = (x, r) {
            out.extend(product(r, x).iter());
        }
    }
    Ok(out)
}

fn shape4(x: &Tensor) -> Result<[usize; 4]> {
    x.shape().try_into().map_err(|_| x.wrong_shape("tensor", "four axes"))
}

/// Inner products of queries [B, Hq, L, D] with dense keys [B, H, T, D].
pub fn dense_scores(keys: &Tensor, queries: &Tensor) -> Result<Tensor> {
    let shape = [queries.shape()[0], queries.shape()[1], queries.shape()[2], keys.shape()[2]];
    Tensor::new(&shape, per_head(keys, queries, |q, k| q.dot(&k.t()))?)
}

/// Sums of dense values [B, H, T, D] with weights [B, Hq, L, T].
pub fn dense_sum(values: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let shape = [weights.shape()[0], weights.shape()[1], weights.shape()[2], values.shape()[3]];
    Tensor::new(&shape, per_head(values, weights, |w, v| w.dot(&v))?)
}
