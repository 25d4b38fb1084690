//! The stages of a codec on one row: what both engines are held to.

use super::{BandGrid, Codec, Prepared, RowScratch};
use crate::codec::frame::RowFrame;
use crate::codec::grid::{affine_quantize, affine_range};
use crate::math::bits;
use crate::math::qjl::Qjl;
use crate::math::rotation::dot;
use crate::spec::ScaleRule;
use half::f16;

/// The half float of an affine scale or bias, which has a sign of its own.
#[inline(always)]
fn half(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

impl BandGrid {
    /// Levels of packed codes; affine groups give their codes. `codes` is overwritten.
    #[inline(always)]
    fn unpack(&self, words: &[u32], out: &mut [f32], codes: &mut [u8], bits: u8) {
        match self {
            BandGrid::Scalar(grid) => grid.unpack(words, out, codes),
            BandGrid::Trellis(trellis) => trellis.decode(words, out),
            BandGrid::Affine => {
                bits::unpack(words, bits, codes);
                out.iter_mut().zip(codes).for_each(|(c, code)| *c = f32::from(*code));
            }
        }
    }
}

impl Codec {
    /// Packs one vector: `row_words` and `scales` are overwritten. A scale is its 16-bit code, see [`crate::math::scale`].
    #[inline(always)]
    pub fn encode_row(
        &self,
        frame: RowFrame,
        x: &[f32],
        row_words: &mut [u32],
        scales: &mut [u16],
        scratch: &mut RowScratch,
    ) {
        let RowScratch { rows: [t, c, spare], codes, search } = scratch;
        frame.enter(x, t);
        let sign_words = self.row_words - self.qjl.as_ref().map_or(0, |q| q.rounds() * q.projections() / 32);
        for (i, band) in self.bands.iter().enumerate() {
            let (y, c) = (&mut t[band.start..][..band.dim], &mut c[band.start..][..band.dim]);
            let (codes, spare) = (&mut codes[..band.dim], &mut spare[..band.dim]);
            band.rotation.forward(y, spare);
            let words = &mut row_words[band.word..][..band.words];
            if let BandGrid::Affine = band.grid {
                if !dot(y, y).is_finite() {
                    return self.encode_nan(row_words, scales);
                }
                self.encode_groups(y, scales, codes);
                bits::pack(codes, band.bits, words);
                continue;
            }
            let yy = dot(y, y);
            if !yy.is_finite() {
                return self.encode_nan(row_words, scales);
            }
            if yy == 0.0 {
                words.fill(0);
                scales[i] = self.spec.format.code(0.0);
                // Nothing of such a band is left for the residual.
                y.fill(0.0);
                continue;
            }
            let rule = self.spec.scale;
            let snap = match &band.grid {
                BandGrid::Trellis(trellis) => {
                    self.spec.format.snap(rule.expected(yy, trellis.mse(), band.dim), true)
                }
                _ => self.spec.format.snap((yy / band.dim as f32).sqrt(), false),
            };
            let inverse = (band.dim as f32 / yy).sqrt() * snap;
            for (u, y) in spare.iter_mut().zip(y.iter()) {
                *u = y * inverse;
            }
            match &band.grid {
                BandGrid::Scalar(grid) => {
                    grid.quantize(spare, codes);
                    bits::pack(codes, band.bits, words);
                }
                BandGrid::Trellis(trellis) => trellis.encode(spare, words, search),
                BandGrid::Affine => {}
            }
            if rule != ScaleRule::Plain || self.qjl.is_some() {
                band.grid.unpack(words, c, codes, band.bits);
            }
            let cy = if rule.needs_cy() { dot(c, y) } else { 0.0 };
            let cc = if rule.needs_cc() { dot(c, c) } else { 0.0 };
            let scale = rule.scale(yy, cy, cc, band.dim);
            scales[i] = self.spec.format.code(scale);
            if self.qjl.is_some() {
                let stored = self.spec.format.value(scales[i]);
                y.iter_mut().zip(c.iter()).for_each(|(y, c)| *y -= stored * c);
            }
        }
        if let Some(qjl) = &self.qjl {
            let per_round = qjl.projections() / 32;
            for (r, signs) in row_words[sign_words..].chunks_exact_mut(per_round).enumerate() {
                qjl.signs(r, t, signs);
                let code = self.spec.format.code(dot(t, t).sqrt());
                scales[self.bands.len() + r] = code;
                qjl.add_rows(r, signs, -qjl.shrunk_factor() * self.spec.format.value(code), t);
            }
        }
    }

    /// The codes of a row that is not finite: every part of it decodes to NaN.
    fn encode_nan(&self, words: &mut [u32], scales: &mut [u16]) {
        words.fill(0);
        scales.fill(if self.affine_group().is_some() {
            half(f32::NAN)
        } else {
            self.spec.format.code(f32::NAN)
        });
    }

    #[inline(always)]
    fn encode_groups(&self, y: &[f32], scales: &mut [u16], codes: &mut [u8]) {
        let group = self.affine_group().expect("an affine codec");
        let groups = y.len() / group;
        for (g, (x, codes)) in y.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate() {
            let (scale, bias) = affine_range(x, self.spec.bits);
            affine_quantize(x, scale, bias, self.spec.bits, codes);
            scales[g] = half(scale);
            scales[groups + g] = half(bias);
        }
    }

    /// Unpacks one vector.
    #[inline(always)]
    pub fn decode_row(
        &self,
        frame: RowFrame,
        words: &[u32],
        scales: &[u16],
        out: &mut [f32],
        scratch: &mut RowScratch,
    ) {
        self.look_up_row(words, scratch);
        if frame.is_empty() {
            self.put_levels::<false>(words, scales, 1.0, out, scratch);
            return self.leave_rotation(out, scratch);
        }
        let mut sum = std::mem::take(&mut scratch.rows[0]);
        self.put_levels::<false>(words, scales, 1.0, &mut sum, scratch);
        self.finish_sum(frame, &mut sum, 1.0, out, scratch);
        scratch.rows[0] = sum;
    }

    /// Adds `weight` times a vector to `sum`, in the rotated domain.
    #[inline(always)]
    pub fn add_weighted_row(
        &self,
        words: &[u32],
        scales: &[u16],
        weight: f32,
        sum: &mut [f32],
        scratch: &mut RowScratch,
    ) {
        self.look_up_row(words, scratch);
        self.add_levels(words, scales, weight, sum, scratch);
    }

    /// The inner product of a prepared query and a packed vector.
    #[inline(always)]
    pub fn score_row(&self, q: &Prepared, words: &[u32], scales: &[u16], scratch: &mut RowScratch) -> f32 {
        self.look_up_row(words, scratch);
        self.score_levels(q, words, scales, scratch)
    }

    /// Unpacks the levels of a row into the scratch, for any number of uses by [`Codec::score_levels`] and
    /// [`Codec::add_levels`]; affine groups leave their codes.
    #[inline(always)]
    pub fn look_up_row(&self, words: &[u32], scratch: &mut RowScratch) {
        let RowScratch { rows: [_, c, _], codes, .. } = scratch;
        for band in &self.bands {
            let (c, codes) = (&mut c[band.start..][..band.dim], &mut codes[..band.dim]);
            band.grid.unpack(&words[band.word..][..band.words], c, codes, band.bits);
        }
    }

    /// [`Codec::score_row`] after [`Codec::look_up_row`].
    #[inline(always)]
    pub fn score_levels(&self, q: &Prepared, words: &[u32], scales: &[u16], scratch: &RowScratch) -> f32 {
        let c = &scratch.rows[1];
        let mut score = q.bias;
        if let Some(group) = self.affine_group() {
            for (g, (q, c)) in q.rotated.chunks_exact(group).zip(c.chunks_exact(group)).enumerate() {
                let (scale, bias) = self.affine_scales(scales, g);
                score += scale * dot(q, c) + bias * q.iter().sum::<f32>();
            }
        } else {
            for (i, band) in self.bands.iter().enumerate() {
                let run = band.start..band.start + band.dim;
                score += self.spec.format.value(scales[i]) * dot(&q.rotated[run.clone()], &c[run]);
            }
        }
        if let Some(qjl) = &self.qjl {
            for (r, signs) in self.sign_words(words, qjl).enumerate() {
                let norm = self.spec.format.value(scales[self.bands.len() + r]);
                let p = &q.projected[r * qjl.projections()..][..qjl.projections()];
                score += norm * qjl.factor_for_score(r) * qjl.dot_signs(signs, p);
            }
        }
        score
    }

    /// [`Codec::add_weighted_row`] after [`Codec::look_up_row`].
    #[inline(always)]
    pub fn add_levels(
        &self,
        words: &[u32],
        scales: &[u16],
        weight: f32,
        sum: &mut [f32],
        scratch: &RowScratch,
    ) {
        self.put_levels::<true>(words, scales, weight, sum, scratch);
    }

    /// Adds to `sum`, or overwrites it.
    #[inline(always)]
    fn put_levels<const ADD: bool>(
        &self,
        words: &[u32],
        scales: &[u16],
        weight: f32,
        sum: &mut [f32],
        scratch: &RowScratch,
    ) {
        let c = &scratch.rows[1];
        if let Some(group) = self.affine_group() {
            for (g, (sum, c)) in sum.chunks_exact_mut(group).zip(c.chunks_exact(group)).enumerate() {
                let (scale, bias) = self.affine_scales(scales, g);
                for (s, c) in sum.iter_mut().zip(c) {
                    *s = if ADD { *s } else { 0.0 } + weight * (scale * c + bias);
                }
            }
        } else {
            for (i, band) in self.bands.iter().enumerate() {
                let w = weight * self.spec.format.value(scales[i]);
                let run = band.start..band.start + band.dim;
                for (s, c) in sum[run.clone()].iter_mut().zip(&c[run]) {
                    *s = if ADD { *s } else { 0.0 } + w * c;
                }
            }
        }
        if let Some(qjl) = &self.qjl {
            for (r, signs) in self.sign_words(words, qjl).enumerate() {
                let norm = self.spec.format.value(scales[self.bands.len() + r]);
                qjl.add_rows(r, signs, weight * norm * qjl.shrunk_factor(), sum);
            }
        }
    }

    #[inline(always)]
    fn affine_scales(&self, scales: &[u16], group: usize) -> (f32, f32) {
        let groups = scales.len() / 2;
        (f16::from_bits(scales[group]).to_f32(), f16::from_bits(scales[groups + group]).to_f32())
    }

    /// Takes a sum out of the rotated domain, once for any number of rows; `weights` is the sum of their weights.
    #[inline(always)]
    pub fn finish_sum(
        &self,
        frame: RowFrame,
        sum: &mut [f32],
        weights: f32,
        out: &mut [f32],
        scratch: &mut RowScratch,
    ) {
        self.leave_rotation(sum, scratch);
        frame.leave(sum, weights, out);
    }

    #[inline(always)]
    fn leave_rotation(&self, sum: &mut [f32], scratch: &mut RowScratch) {
        for band in &self.bands {
            band.rotation.inverse(&mut sum[band.start..][..band.dim], &mut scratch.rows[2][..band.dim]);
        }
    }

    /// Takes a query into the codec's domain.
    pub fn prepare_row(&self, frame: RowFrame, q: &[f32], scratch: &mut RowScratch) -> Prepared {
        let mut rotated = vec![0.0; q.len()];
        frame.enter_query(q, &mut rotated);
        for band in &self.bands {
            band.rotation.forward(&mut rotated[band.start..][..band.dim], &mut scratch.rows[2][..band.dim]);
        }
        let mut projected = Vec::new();
        if let Some(qjl) = &self.qjl {
            projected.resize(qjl.rounds() * qjl.projections(), 0.0);
            for (r, p) in projected.chunks_exact_mut(qjl.projections()).enumerate() {
                qjl.project(r, &rotated, p);
            }
        }
        Prepared { rotated, projected, bias: frame.centre.map_or(0.0, |c| dot(q, c)) }
    }

    fn sign_words<'a>(&self, words: &'a [u32], qjl: &Qjl) -> impl Iterator<Item = &'a [u32]> {
        let first = self.row_words - qjl.rounds() * qjl.projections() / 32;
        words[first..].chunks_exact(qjl.projections() / 32)
    }
}

impl RowFrame<'_> {
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.centre.is_none() && self.gain.is_none() && self.order.is_none()
    }

    #[inline(always)]
    fn source(&self, place: usize) -> usize {
        self.order.map_or(place, |order| order[place] as usize)
    }

    #[inline(always)]
    fn enter(&self, x: &[f32], t: &mut [f32]) {
        match (self.centre, self.gain, self.order) {
            (None, None, None) => t.copy_from_slice(x),
            (Some(centre), None, None) => {
                for i in 0..t.len() {
                    t[i] = x[i] - centre[i];
                }
            }
            _ => {
                for place in 0..t.len() {
                    let i = self.source(place);
                    t[place] = (x[i] - self.centre.map_or(0.0, |c| c[i])) * self.gain.map_or(1.0, |g| g[i]);
                }
            }
        }
    }

    fn enter_query(&self, q: &[f32], t: &mut [f32]) {
        for place in 0..t.len() {
            let i = self.source(place);
            t[place] = q[i] / self.gain.map_or(1.0, |g| g[i]);
        }
    }

    #[inline(always)]
    fn leave(&self, t: &[f32], weights: f32, out: &mut [f32]) {
        if self.is_empty() {
            return out.copy_from_slice(t);
        }
        for place in 0..t.len() {
            let i = self.source(place);
            out[i] = t[place] / self.gain.map_or(1.0, |g| g[i]) + weights * self.centre.map_or(0.0, |c| c[i]);
        }
    }
}
