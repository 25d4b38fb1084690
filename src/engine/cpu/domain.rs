//! Queries on their way to the domain of a side, and sums on their way out.
//!
//! Integer scores: a query in eight bits is off by at most half a step, max|q| / 127, in each channel; with crest
//! C = max|q| / rms(q) that adds noise of relative variance C^2 / (12 * 127^2) to a score, and rounding the levels of a table to
//! eight bits adds E, their mean square error. The grid's own is D (relative MSE). A query whose C^2 / 193548 + E is above D / 100
//! keeps the exact form, so the noise that integers add stays below a tenth of the grid's (root mean square).

use super::paths::{Path, note};
use super::rows::FrameTables;
use super::simd::{self, Bytes, Small};
use crate::codec::codes::Frame;
use crate::codec::grid::ByteLevels;
use crate::codec::{Codec, Prepared};
use crate::error::Result;
use crate::tensor::Tensor;
use std::sync::Arc;

/// Least relative MSE of a scalar grid of 2 and 4 bits on 64 channels or more (Lloyd-Max: 0.116, 0.0091), and of the uniform one.
const GRID_ERROR: [[f32; 2]; 2] = [[0.115, 0.009], [0.118, 0.0115]];

/// The levels of a codec whose rows are one band of up to four bits.
fn small(codec: &Codec) -> Option<Small> {
    let [band] = codec.bands() else { return None };
    let grid = band.grid.scalar()?;
    if band.dim % 8 != 0 || codec.qjl().is_some() {
        return None;
    }
    let (table, bytes) = (grid.levels(), grid.in_bytes()?);
    let levels = std::array::from_fn(|c| table[c % table.len()]);
    let ByteLevels { levels: bytes, unit, middle, error } = *bytes;
    let wide_unit = levels.iter().fold(0f32, |top, x: &f32| top.max(x.abs())) / simd::WIDE;
    let wide = levels.map(|x| (x / wide_unit).round() as i16);
    Some(Small { bits: band.bits, levels, bytes, unit, middle, error, wide, wide_unit })
}

/// A place where queries are taken and sums come from.
pub(super) struct Domain {
    codec: Option<Arc<Codec>>,
    tables: FrameTables,
    /// The levels of the codec, if it has few.
    pub small: Option<Small>,
}

/// The queries of a head in a domain.
pub(super) struct Ready {
    /// Rows padded to a multiple of eight channels.
    pub rows: Vec<f32>,
    pub bias: Vec<f32>,
    /// For codecs with a residual.
    pub prepared: Vec<Prepared>,
    pub bytes: Option<Bytes>,
    /// Rows that are too uneven for eight bits, and where they stand: each query by itself, so that its neighbours do not matter.
    pub uneven: Vec<f32>,
    pub places: Vec<usize>,
}

impl Domain {
    pub(super) fn new(codec: Option<Arc<Codec>>, frame: &Frame<Tensor>, dim: usize) -> Result<Domain> {
        let small = codec.as_deref().and_then(small);
        Ok(Domain { codec, tables: FrameTables::new(frame, dim)?, small })
    }

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
                ready.bias[i] = frame.centre.map_or(0.0, |c| crate::math::rotation::dot(q, c));
            }
        }
        match &self.small {
            Some(small) if !exact => ready.in_bytes(small, dim),
            Some(_) => note(Path::ExactAsked),
            None => {}
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
            note(Path::NoIntegerForm);
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
                note(Path::UnevenQuery);
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
        } else {
            note(Path::OnlyUnevenQueries);
        }
    }
}
