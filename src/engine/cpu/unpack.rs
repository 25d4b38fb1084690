//! Packed tokens that have no form of their own in `simd`: they are unpacked by the row form of the codec, a row or a tile at a time.

use crate::codec::frame::RowFrame;
use crate::codec::tile;
use crate::codec::{Codec, Prepared, RowScratch};
use half::f16;
use pulp::{Simd, WithSimd};

/// Scales as they are stored.
#[derive(Clone, Copy)]
pub(super) enum Scales<'a> {
    Halves(&'a [f16]),
    Bytes(&'a [u8]),
}

impl Scales<'_> {
    #[inline(always)]
    pub fn codes(self, from: usize, to: &mut [u16]) {
        match self {
            Scales::Halves(s) => to.iter_mut().zip(&s[from..]).for_each(|(c, s)| *c = s.to_bits()),
            Scales::Bytes(s) => to.iter_mut().zip(&s[from..]).for_each(|(c, s)| *c = u16::from(*s)),
        }
    }
}

/// Tokens that are unpacked row by row.
pub(super) struct Each<'a> {
    pub codec: &'a Codec,
    pub words: &'a [u32],
    pub scales: Scales<'a>,
    pub picks: &'a [u32],
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
pub(super) struct UnpackRows<'a> {
    pub each: Each<'a>,
    pub plain: bool,
    pub padded: usize,
    pub out: &'a mut [f32],
}

impl WithSimd for UnpackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let UnpackRows { each, plain, padded, out } = self;
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
                if let Some(grid) = codec.bands()[0].grid.scalar() {
                    grid.unpack(words, &mut out[..d], &mut bytes);
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
        let bad = tile::take_marks(codes, group);
        for c in 0..d {
            let (words, scales) = (&words[c * w..][..w], &codes[c * s..][..s]);
            channel.decode_row(RowFrame::default(), words, scales, &mut run, &mut scratch);
            for (i, &pick) in each.picks[done..done + inside].iter().enumerate() {
                out[(done + i) * padded + c] = run[pick as usize - first];
            }
        }
        for (i, &pick) in each.picks[done..done + inside].iter().enumerate() {
            if bad.as_ref().is_some_and(|bad| bad[pick as usize - first]) {
                out[(done + i) * padded..][..d].fill(f32::NAN);
            }
        }
        done += inside;
    }
}

/// Scores of a codec with a residual, which has an estimator of its own.
pub(super) struct ResidualScores<'a> {
    pub rows: Each<'a>,
    pub queries: &'a [Prepared],
    pub stride: usize,
    pub out: &'a mut [f32],
}

impl WithSimd for ResidualScores<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let ResidualScores { rows, queries, stride, out } = self;
        let mut codes = vec![0; rows.codec.row_scales()];
        let mut scratch: RowScratch = rows.codec.scratch();
        for (t, &pick) in rows.picks.iter().enumerate() {
            let words = rows.rows(pick as usize, 1, &mut codes);
            rows.codec.look_up_row(words, &mut scratch);
            for (r, q) in queries.iter().enumerate() {
                out[r * stride + t] = rows.codec.score_levels(q, words, &codes, &scratch);
            }
        }
    }
}
