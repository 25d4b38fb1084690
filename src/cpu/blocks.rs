//! Blocks of tokens of one side on their way to f32 tiles, and queries on their way to the domain of a side.
//!
//! A tile row times its factor is the token in the domain where its scores and sums are formed: as it is for exact rows, centred and
//! rotated for packed ones. Integer scores: a query in eight bits is off by at most half a step, max|q| / 127, in each channel; with
//! crest C = max|q| / rms(q) that adds noise of relative variance C^2 / (12 * 127^2) to a score, and rounding the levels of a
//! table to eight bits adds E, their mean square error. The grid's own is D (relative MSE). A query whose C^2 / 193548 + E is
//! above D / 100 keeps the exact form, so the noise that integers add stays below a tenth of the grid's (root mean square).

use super::rows::{Door, Tables};
use super::simd::{self, Bytes, Small};
use crate::attention::Stored;
use crate::codec::{BandGrid, Codec, Prepared, Scratch};
use crate::codes::Frame;
use crate::error::Result;
use crate::frame::RowFrame;
use crate::spec::ScaleFormat;
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use ndarray::Axis;
use pulp::{Simd, WithSimd};
use std::sync::Arc;

/// Least relative MSE of a scalar grid of 2 and 4 bits on 64 channels or more (Lloyd-Max: 0.116, 0.0091), and of the uniform one.
const GRID_ERROR: [[f32; 2]; 2] = [[0.115, 0.009], [0.118, 0.0115]];

/// Keys or values of a segment.
pub(super) struct Side {
    pub dim: usize,
    source: Source,
}

enum Source {
    Exact(Tensor),
    Packed { codec: Arc<Codec>, frame: Frame<Tensor>, words: Tensor, scales: Tensor, small: Option<Small> },
}

/// The tokens of one head of a side.
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    Packed { codec: &'a Codec, small: Option<&'a Small>, words: &'a [u32], scales: Scales<'a> },
}

/// Scales as they are stored.
#[derive(Clone, Copy)]
pub(super) enum Scales<'a> {
    F16(&'a [f16]),
    Log8(&'a [u8]),
}

impl Scales<'_> {
    #[inline(always)]
    fn codes(self, from: usize, to: &mut [u16]) {
        match self {
            Scales::F16(s) => to.iter_mut().zip(&s[from..]).for_each(|(c, s)| *c = s.to_bits()),
            Scales::Log8(s) => to.iter_mut().zip(&s[from..]).for_each(|(c, s)| *c = u16::from(*s)),
        }
    }
}

/// The same elements with every head in one piece; shared where they are so already.
fn pieces(t: &Tensor) -> Tensor {
    fn whole<T: Element>(t: &Tensor) -> bool {
        T::unwrap(t).is_some_and(|a| {
            a.is_empty()
                || a.view().index_axis_move(Axis(0), 0).index_axis_move(Axis(0), 0).to_slice().is_some()
        })
    }
    let in_pieces =
        whole::<f32>(t) || whole::<f16>(t) || whole::<bf16>(t) || whole::<u32>(t) || whole::<u8>(t);
    if in_pieces { t.clone() } else { t.compact() }
}

/// One head of what [`pieces`] gave.
fn piece<T: Element>(t: &Tensor, [batch, head]: [usize; 2]) -> Option<&[T]> {
    T::unwrap(t)?.view().index_axis_move(Axis(0), batch).index_axis_move(Axis(0), head).to_slice()
}

impl Side {
    pub(super) fn new(stored: &Stored<Tensor>) -> Result<Side> {
        let source = match stored {
            Stored::Exact { rows, .. } => {
                rows.float().ok_or_else(|| rows.wrong_dtype("rows", "F32, F16 or BF16"))?;
                Source::Exact(pieces(rows))
            }
            Stored::Packed(codes) => Source::Packed {
                codec: codes.codec().clone(),
                frame: codes.frame().clone(),
                words: pieces(codes.words()),
                scales: pieces(codes.scales()),
                small: small(codes.codec()),
            },
        };
        Ok(Side { dim: stored.dim(), source })
    }

    /// Tokens that are decoded together.
    pub(super) fn tile(&self) -> usize {
        match &self.source {
            Source::Packed { codec, .. } => codec.spec().tile(),
            Source::Exact(_) => 1,
        }
    }

    pub(super) fn rows(&self, head: [usize; 2]) -> Rows<'_> {
        let rows = match &self.source {
            Source::Exact(t @ Tensor::F16(_)) => piece(t, head).map(Rows::F16),
            Source::Exact(t @ Tensor::BF16(_)) => piece(t, head).map(Rows::BF16),
            Source::Exact(t) => piece(t, head).map(Rows::F32),
            Source::Packed { codec, words, scales, small, .. } => {
                let scales = match codec.format() {
                    ScaleFormat::F16 => piece(scales, head).map(Scales::F16),
                    ScaleFormat::Log8 => piece(scales, head).map(Scales::Log8),
                };
                let (words, small) = (piece(words, head), small.as_ref());
                words.zip(scales).map(|(words, scales)| Rows::Packed { codec, small, words, scales })
            }
        };
        rows.expect("every head in one piece")
    }

    /// Whether queries and sums of the other side are in the domain of this one.
    pub(super) fn shares(&self, other: &Side) -> bool {
        fn at(t: &Option<Tensor>) -> *const u8 {
            match t {
                Some(Tensor::F32(a)) => a.as_ptr().cast(),
                Some(Tensor::U32(a)) => a.as_ptr().cast(),
                _ => std::ptr::null(),
            }
        }
        match (&self.source, &other.source) {
            (Source::Exact(_), Source::Exact(_)) => true,
            (Source::Packed { codec: a, frame: f, .. }, Source::Packed { codec: b, frame: g, .. }) => {
                let same = at(&f.centre) == at(&g.centre) && at(&f.gain) == at(&g.gain);
                Arc::ptr_eq(a, b) && same && at(&f.order) == at(&g.order)
            }
            _ => false,
        }
    }

    pub(super) fn domain(&self) -> Result<Domain> {
        let (codec, frame) = match &self.source {
            Source::Exact(_) => (None, Frame::default()),
            Source::Packed { codec, frame, .. } => (Some(codec.clone()), frame.clone()),
        };
        Ok(Domain { tables: Tables::new(&frame, self.dim)?, codec })
    }
}

/// The levels of a codec whose rows are one band of up to four bits.
fn small(codec: &Codec) -> Option<Small> {
    let [band] = codec.bands() else { return None };
    let grid = band.grid.scalar()?;
    if band.bits > 4 || band.dim % 8 != 0 || codec.qjl().is_some() {
        return None;
    }
    let table = grid.levels();
    let levels: [f32; 16] = std::array::from_fn(|c| table[c % table.len()]);
    if let Some(step) = grid.step() {
        let middle = 0.5 * (table.len() - 1) as f32;
        let bytes = std::array::from_fn(|c| (c % table.len()) as i8);
        return Some(Small { bits: band.bits, levels, bytes, unit: step, middle, error: 0.0 });
    }
    let top = levels.iter().fold(0f32, |top, l| top.max(l.abs())).max(f32::MIN_POSITIVE);
    let round = |unit: f32| levels.map(|l| (l / unit).round().clamp(-127.0, 127.0) as i8);
    let below = |u: f32| 0.5 * libm::erfcf(-u * std::f32::consts::FRAC_1_SQRT_2);
    let error = |unit: f32| -> f32 {
        let edge = |c: usize| grid.borders().get(c).map_or(1.0, |&b| below(b));
        let cells = (0..table.len()).map(|c| edge(c) - if c == 0 { 0.0 } else { edge(c - 1) });
        let miss = levels.iter().zip(round(unit)).map(|(l, b)| (l - unit * f32::from(b)).powi(2));
        cells.zip(miss).map(|(p, m)| p * m).sum()
    };
    // The unit with the least error, of those that use 96 to 127 of the 127 steps.
    let units = (0..125).map(|i| top / (96.0 + 0.25 * i as f32));
    let unit = units.min_by(|a, b| error(*a).total_cmp(&error(*b)))?;
    Some(Small { bits: band.bits, levels, bytes: round(unit), unit, middle: 0.0, error: error(unit) })
}

/// A place where queries are taken and sums come from.
pub(super) struct Domain {
    codec: Option<Arc<Codec>>,
    tables: Tables,
}

/// The queries of a head in a domain.
pub(super) struct Ready {
    /// Rows padded to a multiple of eight channels.
    pub rows: Vec<f32>,
    pub bias: Vec<f32>,
    /// For codecs with a residual.
    prepared: Vec<Prepared>,
    bytes: Option<Bytes>,
    /// Rows that are too uneven for eight bits, and where they stand: each query by itself, so that its neighbours do not matter.
    uneven: Vec<f32>,
    places: Vec<usize>,
}

impl Domain {
    pub(super) fn enter(&self, head: usize, queries: &[f32], dim: usize, exact: bool) -> Ready {
        let padded = dim.next_multiple_of(8);
        let n = queries.len() / dim;
        let mut ready = Ready {
            rows: vec![0.0; n * padded],
            bias: vec![0.0; n],
            prepared: vec![],
            bytes: None,
            uneven: vec![],
            places: vec![],
        };
        let frame = self.tables.row(head);
        let codec = self.codec.as_ref().filter(|c| c.channel().is_none());
        let mut scratch = codec.map(|c| c.scratch());
        for (i, q) in queries.chunks_exact(dim).enumerate() {
            let row = &mut ready.rows[i * padded..][..dim];
            if let (Some(codec), Some(scratch)) = (codec, &mut scratch) {
                let prepared = codec.prepare_row(frame, q, scratch);
                row.copy_from_slice(&prepared.rotated);
                ready.bias[i] = prepared.bias;
                if codec.qjl().is_some() {
                    // The residual's own score has the bias in it.
                    ready.bias[i] = 0.0;
                    ready.prepared.push(prepared);
                }
            } else {
                row.copy_from_slice(q);
                ready.bias[i] = frame.centre.map_or(0.0, |c| crate::rotation::dot(q, c));
            }
        }
        if let Some(small) = codec.and_then(|c| small(c)).filter(|_| !exact) {
            ready.in_bytes(&small, dim);
        }
        ready
    }

    /// Takes a sum out of the domain; `weights` is the sum of its weights.
    pub(super) fn leave(&self, head: usize, sum: &mut [f32], weights: f32, out: &mut [f32]) {
        let frame = self.tables.row(head);
        match self.codec.as_ref().filter(|c| c.channel().is_none()) {
            Some(codec) => codec.finish_sum(frame, sum, weights, out, &mut codec.scratch()),
            None => {
                out.copy_from_slice(sum);
                let centre = frame.centre.unwrap_or_default();
                out.iter_mut().zip(centre).for_each(|(o, c)| *o += weights * c);
            }
        }
    }
}

impl Ready {
    /// Takes the queries to eight bits, all that keep the bound at the head of this file.
    fn in_bytes(&mut self, small: &Small, dim: usize) {
        if !simd::integer_form(small.bits, dim) {
            return;
        }
        let error = GRID_ERROR[usize::from(small.middle != 0.0)][usize::from(small.bits == 4)];
        let mut bytes = Bytes { rows: Vec::with_capacity(self.rows.len()), steps: vec![], sums: vec![] };
        for (i, row) in self.rows.chunks_exact(dim).enumerate() {
            let top = row.iter().fold(0f32, |top, q| top.max(q.abs()));
            let square = (row.iter().map(|q| q * q).sum::<f32>() / dim as f32).max(f32::MIN_POSITIVE);
            // What is not finite does not keep the bound either.
            let even = top * top / square / 193_548.0 + small.error <= 0.01 * error;
            if !even {
                self.uneven.extend_from_slice(row);
                self.places.push(i);
            }
            let step = if even { top / 127.0 } else { 0.0 };
            let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
            let start = bytes.rows.len();
            let byte =
                |place| (row[simd::channel_at(small.bits, place)] * inverse).round().clamp(-127.0, 127.0);
            bytes.rows.extend((0..dim).map(|place| byte(place) as i8));
            bytes.sums.push(bytes.rows[start..].iter().map(|&q| i32::from(q)).sum());
            bytes.steps.push(step);
        }
        if self.places.len() < bytes.steps.len() {
            self.bytes = Some(bytes);
        }
    }
}

impl Rows<'_> {
    /// Scores of the tokens `first..first + n` and of all queries, to be multiplied by the tokens' factors; `tile` is overwritten.
    pub(super) fn scores(
        &self,
        ready: &Ready,
        picks: &[u32],
        dim: usize,
        stride: usize,
        work: &mut Tile,
        out: &mut [f32],
    ) {
        let n = picks.len();
        if let Rows::Packed { codec, words, scales, small } = *self {
            let (w, first) = (codec.row_words(), picks[0] as usize);
            if let (Some(small), Some(bytes)) = (small, &ready.bytes) {
                factors(codec, scales, picks, &mut work.factors);
                simd::integer_scores(small, bytes, &words[first * w..][..n * w], w, n, stride, out);
                if !ready.places.is_empty() {
                    self.decode(picks, dim, work);
                    work.spare.resize(ready.places.len() * stride, 0.0);
                    simd::scores(&ready.uneven, &work.rows, dim, n, stride, &mut work.spare);
                    for (&r, scores) in ready.places.iter().zip(work.spare.chunks_exact(stride)) {
                        out[r * stride..][..n].copy_from_slice(&scores[..n]);
                    }
                }
                return;
            }
            if !ready.prepared.is_empty() {
                work.factors[..n].fill(1.0);
                let rows = Each { codec, words, scales, picks };
                return pulp::Arch::new().dispatch(Residual { rows, queries: &ready.prepared, stride, out });
            }
        }
        self.decode(picks, dim, work);
        simd::scores(&ready.rows, &work.rows, dim.next_multiple_of(8), n, stride, out);
    }

    /// Rows and factors of the tokens `picks`.
    pub(super) fn decode(&self, picks: &[u32], dim: usize, work: &mut Tile) {
        let padded = dim.next_multiple_of(8);
        let rows = &mut work.rows[..picks.len() * padded];
        match *self {
            Rows::Packed { codec, small: Some(small), words, scales } => {
                factors(codec, scales, picks, &mut work.factors);
                simd::levels(small, words, codec.row_words(), picks, dim, padded, rows);
            }
            Rows::Packed { codec, words, scales, .. } => {
                let plain = one_band(codec);
                if plain {
                    factors(codec, scales, picks, &mut work.factors);
                } else {
                    work.factors[..picks.len()].fill(1.0);
                }
                let each = Each { codec, words, scales, picks };
                pulp::Arch::new().dispatch(Decode { each, plain, padded, out: rows });
            }
            Rows::F32(x) => exact(x, picks, dim, work, f32::read),
            Rows::F16(x) => exact(x, picks, dim, work, simd::halves),
            Rows::BF16(x) => exact(x, picks, dim, work, bf16::read),
        }
    }
}

/// A block in f32: rows padded to a multiple of eight channels, and what each is to be multiplied with.
#[derive(Default)]
pub(super) struct Tile {
    pub rows: Vec<f32>,
    pub factors: Vec<f32>,
    spare: Vec<f32>,
}

impl Tile {
    /// Room for `n` rows of `dim` channels; the padding is zero, the rest whatever was there.
    pub(super) fn fit(&mut self, n: usize, dim: usize) {
        if dim % 8 != 0 {
            self.rows.clear();
        }
        self.rows.resize(n * dim.next_multiple_of(8), 0.0);
        self.factors.resize(n, 1.0);
    }
}

fn exact<T: Element>(x: &[T], picks: &[u32], dim: usize, work: &mut Tile, read: fn(&[T], &mut [f32])) {
    for (&pick, row) in picks.iter().zip(work.rows.chunks_exact_mut(dim.next_multiple_of(8))) {
        read(&x[pick as usize * dim..][..dim], &mut row[..dim]);
    }
    work.factors[..picks.len()].fill(1.0);
}

/// Whether a row is one band with one scale, so that its levels are the row.
fn one_band(codec: &Codec) -> bool {
    matches!(codec.bands(), [band] if !matches!(band.grid, BandGrid::Affine)) && codec.qjl().is_none()
}

/// The only scale of each token.
fn factors(codec: &Codec, scales: Scales, picks: &[u32], factors: &mut [f32]) {
    let format = codec.format();
    for (&pick, factor) in picks.iter().zip(factors) {
        let mut code = [0];
        scales.codes(pick as usize, &mut code);
        *factor = format.value(code[0]);
    }
}

/// Tokens that are unpacked row by row.
struct Each<'a> {
    codec: &'a Codec,
    words: &'a [u32],
    scales: Scales<'a>,
    picks: &'a [u32],
}

impl Each<'_> {
    /// Words and scale codes of `rows` rows from `at` on.
    #[inline(always)]
    fn rows(&self, at: usize, rows: usize, codes: &mut [u16]) -> &[u32] {
        let (w, s) = (self.codec.row_words(), self.codec.row_scales());
        self.scales.codes(at * s, &mut codes[..rows * s]);
        &self.words[at * w..][..rows * w]
    }
}

/// Levels of rows of one band (`plain`), else rows with their scales.
struct Decode<'a> {
    each: Each<'a>,
    plain: bool,
    padded: usize,
    out: &'a mut [f32],
}

impl WithSimd for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Decode { each, plain, padded, out } = self;
        let (codec, picks) = (each.codec, each.picks);
        let d = codec.spec().head_dim;
        let mut codes = vec![0; codec.row_scales() * codec.spec().tile()];
        if let Some(channel) = codec.channel() {
            return channels(&each, channel, padded, &mut codes, out);
        }
        let (mut scratch, mut bytes) = (codec.scratch(), vec![0; d]);
        for (&pick, out) in picks.iter().zip(out.chunks_exact_mut(padded)) {
            let words = each.rows(pick as usize, 1, &mut codes);
            if plain {
                match &codec.bands()[0].grid {
                    BandGrid::Scalar(grid) => grid.unpack(words, &mut out[..d], &mut bytes),
                    BandGrid::Trellis(trellis) => trellis.decode(words, &mut out[..d]),
                    BandGrid::Affine => {}
                }
            } else {
                out.fill(0.0);
                codec.add_weighted_row(words, &codes, 1.0, &mut out[..d], &mut scratch);
            }
        }
    }
}

/// Tokens of a channel-affine codec: every tile that holds one is unpacked channel by channel.
#[inline(always)]
fn channels(each: &Each, channel: &Codec, padded: usize, codes: &mut [u16], out: &mut [f32]) {
    let (d, group) = (each.codec.spec().head_dim, each.codec.spec().tile());
    let (w, s) = (channel.row_words(), channel.row_scales());
    let (mut scratch, mut run) = (channel.scratch(), vec![0f32; group]);
    let mut done = 0;
    while done < each.picks.len() {
        let first = each.picks[done] as usize / group * group;
        let inside = each.picks[done..].iter().take_while(|&&p| (p as usize) < first + group).count();
        let words = each.rows(first, group, codes);
        for c in 0..d {
            let (words, scales) = (&words[c * w..][..w], &codes[c * s..][..s]);
            channel.decode_row(RowFrame::default(), words, scales, &mut run, &mut scratch);
            for (i, &pick) in each.picks[done..done + inside].iter().enumerate() {
                out[(done + i) * padded + c] = run[pick as usize - first];
            }
        }
        done += inside;
    }
}

/// Scores of a codec with a residual, which has an estimator of its own.
struct Residual<'a> {
    rows: Each<'a>,
    queries: &'a [Prepared],
    stride: usize,
    out: &'a mut [f32],
}

impl WithSimd for Residual<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Residual { rows, queries, stride, out } = self;
        let mut codes = vec![0; rows.codec.row_scales()];
        let mut scratch: Scratch = rows.codec.scratch();
        for (t, &pick) in rows.picks.iter().enumerate() {
            let words = rows.rows(pick as usize, 1, &mut codes);
            rows.codec.look_up_row(words, &mut scratch);
            for (r, q) in queries.iter().enumerate() {
                out[r * stride + t] = rows.codec.score_levels(q, words, &codes, &scratch);
            }
        }
    }
}
