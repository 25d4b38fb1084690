//! Blocks of tokens of one side on their way to f32 tiles.
//!
//! A tile row times its factor is the token in the domain where its scores and sums are formed: as it is for exact rows, centred
//! and rotated for packed ones.

use super::dense::{piece, pieces};
use super::domain::{Domain, Ready};
use super::paths::{Path, note};
use super::rows::Door;
use super::simd::{self, BandPlace, LaneBlock, Picked, Small};
use super::unpack::{Each, ResidualScores, Scales, UnpackRows};
use crate::codec::codes::Frame;
use crate::codec::{Band, BandGrid, Codec};
use crate::engine::attention::Stored;
use crate::error::Result;
use crate::spec::ScaleFormat;
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use std::sync::Arc;

/// Keys or values of a segment.
pub(super) struct StoredSide {
    pub dim: usize,
    source: SideRows,
}

#[allow(clippy::large_enum_variant, reason = "one for each segment")]
enum SideRows {
    Exact(Tensor),
    Packed { codec: Arc<Codec>, frame: Frame<Tensor>, words: Tensor, scales: Tensor },
}

/// The tokens of one head of a side.
pub(super) enum TileRows<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    Packed { codec: &'a Codec, small: Option<&'a Small>, words: &'a [u32], scales: Scales<'a> },
}

impl StoredSide {
    pub(super) fn new(stored: &Stored<Tensor>) -> Result<StoredSide> {
        let source = match stored {
            Stored::Exact { rows, .. } => {
                rows.float().ok_or_else(|| rows.wrong_dtype("rows", "F32, F16 or BF16"))?;
                SideRows::Exact(pieces(rows))
            }
            Stored::Packed(codes) => SideRows::Packed {
                codec: codes.codec().clone(),
                frame: codes.frame().clone(),
                words: pieces(codes.words()),
                scales: pieces(codes.scales()),
            },
        };
        Ok(StoredSide { dim: stored.dim(), source })
    }

    /// Tokens that are decoded together.
    pub(super) fn tile(&self) -> usize {
        match &self.source {
            SideRows::Packed { codec, .. } => codec.spec().tile(),
            SideRows::Exact(_) => 1,
        }
    }

    /// The tokens of a head; `small` comes from the side's domain.
    pub(super) fn rows<'a>(&'a self, head: [usize; 2], small: Option<&'a Small>) -> TileRows<'a> {
        let rows = match &self.source {
            SideRows::Exact(t @ Tensor::F16(_)) => piece(t, head).map(TileRows::F16),
            SideRows::Exact(t @ Tensor::BF16(_)) => piece(t, head).map(TileRows::BF16),
            SideRows::Exact(t) => piece(t, head).map(TileRows::F32),
            SideRows::Packed { codec, words, scales, .. } => {
                let scales = match codec.format() {
                    ScaleFormat::F16 => piece(scales, head).map(Scales::Halves),
                    ScaleFormat::Log8 | ScaleFormat::Wide8 => piece(scales, head).map(Scales::Bytes),
                };
                piece(words, head).zip(scales).map(|(words, scales)| TileRows::Packed {
                    codec,
                    small,
                    words,
                    scales,
                })
            }
        };
        rows.expect("every head in one piece")
    }

    /// Whether queries and sums of the other side are in the domain of this one.
    pub(super) fn shares(&self, other: &StoredSide) -> bool {
        fn at(t: &Option<Tensor>) -> *const u8 {
            match t {
                Some(Tensor::F32(a)) => a.as_ptr().cast(),
                Some(Tensor::U32(a)) => a.as_ptr().cast(),
                _ => std::ptr::null(),
            }
        }
        match (&self.source, &other.source) {
            (SideRows::Exact(_), SideRows::Exact(_)) => true,
            (SideRows::Packed { codec: a, frame: f, .. }, SideRows::Packed { codec: b, frame: g, .. }) => {
                let same = at(&f.centre) == at(&g.centre) && at(&f.gain) == at(&g.gain);
                Arc::ptr_eq(a, b) && same && at(&f.order) == at(&g.order)
            }
            _ => false,
        }
    }

    pub(super) fn domain(&self) -> Result<Domain> {
        let (codec, frame) = match &self.source {
            SideRows::Exact(_) => (None, Frame::default()),
            SideRows::Packed { codec, frame, .. } => (Some(codec.clone()), frame.clone()),
        };
        Domain::new(codec, &frame, self.dim)
    }
}

impl TileRows<'_> {
    /// Scores of the tokens `first..first + n` and of all queries, to be multiplied by the tokens' factors; `tile` is overwritten.
    pub(super) fn scores(
        &self,
        ready: &Ready,
        picks: &[u32],
        [dim, stride]: [usize; 2],
        work: &mut Tile,
        out: &mut [f32],
    ) {
        let (n, width) = (picks.len(), dim.next_multiple_of(8));
        if let TileRows::Packed { codec, words, scales, small } = *self {
            if let (Some(small), Some(bytes)) = (small, &ready.bytes) {
                note(Path::IntegerScores);
                factors(codec, scales, picks, 0, &mut work.factors);
                let (row_words, first) = (codec.row_words(), picks[0] as usize);
                let rows = &words[first * row_words..][..n * row_words];
                simd::integer_scores(small, bytes, LaneBlock { rows, width: row_words, n, stride }, out);
                if !ready.places.is_empty() {
                    note(Path::UnevenRescored);
                    self.decode(picks, dim, work);
                    work.spare.resize(ready.places.len() * stride, 0.0);
                    let tile = LaneBlock { rows: &work.rows[..], width, n, stride };
                    simd::scores(&ready.uneven, tile, &mut work.spare);
                    for (&r, scores) in ready.places.iter().zip(work.spare.chunks_exact(stride)) {
                        out[r * stride..][..n].copy_from_slice(&scores[..n]);
                    }
                }
                return;
            }
            if !ready.prepared.is_empty() {
                note(Path::ResidualScores);
                work.factors[..n].fill(1.0);
                let rows = Each { codec, words, scales, picks };
                return pulp::Arch::new().dispatch(ResidualScores {
                    rows,
                    queries: &ready.prepared,
                    stride,
                    out,
                });
            }
        }
        note(Path::FloatScores);
        self.decode(picks, dim, work);
        simd::scores(&ready.rows, LaneBlock { rows: &work.rows[..], width, n, stride }, out);
    }

    /// Levels of codes and the rows of `picks`, where [`simd::weighted_levels`] forms sums.
    pub(super) fn in_integers<'b>(&'b self, picks: &'b [u32]) -> Option<(&'b Small, Picked<'b>)> {
        match *self {
            TileRows::Packed { codec, small: Some(small), words, .. } => {
                let dim = codec.spec().head_dim;
                let rows = picked(codec, &codec.bands()[0], words, picks, dim);
                simd::sums_in_integers(small.bits, dim).then_some((small, rows))
            }
            _ => None,
        }
    }

    /// Factors of the tokens `picks`, as [`Self::decode`] gives them.
    pub(super) fn factors(&self, picks: &[u32], work: &mut Tile) {
        if let TileRows::Packed { codec, scales, .. } = *self {
            factors(codec, scales, picks, 0, &mut work.factors);
        }
    }

    /// Rows and factors of the tokens `picks`.
    pub(super) fn decode(&self, picks: &[u32], dim: usize, work: &mut Tile) {
        let padded = dim.next_multiple_of(8);
        let rows = &mut work.rows[..picks.len() * padded];
        match *self {
            TileRows::Packed { codec, small: Some(small), words, scales } => {
                note(Path::SmallLevels);
                factors(codec, scales, picks, 0, &mut work.factors);
                simd::levels(small, picked(codec, &codec.bands()[0], words, picks, padded), rows);
            }
            TileRows::Packed { codec, words, scales, .. } if codec.is_trellis() => {
                note(if codec.bands().len() > 1 { Path::TrellisBands } else { Path::TrellisLevels });
                for (i, band) in codec.bands().iter().enumerate() {
                    let BandGrid::Trellis(grid) = &band.grid else { continue };
                    factors(codec, scales, picks, i, &mut work.factors);
                    simd::trellis_levels(grid, picked(codec, band, words, picks, padded), rows);
                    if codec.bands().len() > 1 {
                        for (row, factor) in rows.chunks_exact_mut(padded).zip(&work.factors) {
                            row[band.start..][..band.dim].iter_mut().for_each(|x| *x *= factor);
                        }
                    }
                }
                if codec.bands().len() > 1 {
                    work.factors[..picks.len()].fill(1.0);
                }
            }
            TileRows::Packed { codec, words, scales, .. } => {
                let plain = one_band(codec);
                let tiles = codec.channel().is_some();
                note(if tiles {
                    Path::ChannelTiles
                } else if plain {
                    Path::OneBand
                } else {
                    Path::ManyBands
                });
                if plain {
                    factors(codec, scales, picks, 0, &mut work.factors);
                } else {
                    work.factors[..picks.len()].fill(1.0);
                }
                let each = Each { codec, words, scales, picks };
                pulp::Arch::new().dispatch(UnpackRows { each, plain, padded, out: rows });
            }
            TileRows::F32(x) => exact(x, picks, dim, work, f32::read),
            TileRows::F16(x) => exact(x, picks, dim, work, simd::halves),
            TileRows::BF16(x) => exact(x, picks, dim, work, bf16::read),
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
    note(Path::ExactRows);
    for (&pick, row) in picks.iter().zip(work.rows.chunks_exact_mut(dim.next_multiple_of(8))) {
        read(&x[pick as usize * dim..][..dim], &mut row[..dim]);
    }
    work.factors[..picks.len()].fill(1.0);
}

/// Whether a row is one band with one scale, so that its levels are the row.
fn one_band(codec: &Codec) -> bool {
    matches!(codec.bands(), [band] if !matches!(band.grid, BandGrid::Affine)) && codec.qjl().is_none()
}

/// The rows `picks` of a band of packed words.
fn picked<'a>(codec: &Codec, band: &Band, words: &'a [u32], picks: &'a [u32], dim: usize) -> Picked<'a> {
    let place = BandPlace { word: band.word, words: band.words, channel: band.start, channels: band.dim };
    Picked { words, row_words: codec.row_words(), picks, dim, place }
}

/// The scale of a band of each token.
fn factors(codec: &Codec, scales: Scales, picks: &[u32], band: usize, factors: &mut [f32]) {
    let (format, each) = (codec.format(), codec.row_scales());
    if let (Scales::Halves(scales), 1, &[first, .., last]) = (scales, each, picks)
        && (last - first) as usize + 1 == picks.len()
    {
        let (scales, factors) = (&scales[first as usize..=last as usize], &mut factors[..picks.len()]);
        simd::halves(scales, factors);
        // A sign marks what is no half float.
        if factors.iter().any(|factor| *factor < 0.0) {
            scales.iter().zip(factors).for_each(|(scale, factor)| *factor = format.value(scale.to_bits()));
        }
        return;
    }
    for (&pick, factor) in picks.iter().zip(factors) {
        let mut code = [0];
        scales.codes(pick as usize * each + band, &mut code);
        *factor = format.value(code[0]);
    }
}
