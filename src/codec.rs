//! A codec: the tables made from a spec, and the definition of every stage on one vector (encode, decode, score, weighted sum).
//!
//! A vector x of a head is centred, equalised and put in channel order (its frame), cut into bands, and each band y is rotated,
//! scaled to unit variance and put on the grid: R D (x - mu) ~ s c. Scores rotate the query once instead of every key,
//! <q, x> = <q, mu> + s <R D^-1 q, c>, and weighted sums add s c and leave the rotated domain once. Both engines are held to
//! these functions. A vector of zeros has scale zero and decodes to zeros. One with NaN or infinity in it, or whose squared norm is
//! no finite f32, decodes to NaN in every channel and leaves all others as they are: see [`crate::codec::frame`] for the whole rule.

pub mod codes;
pub mod frame;
pub mod grid;
mod stages;
pub mod tile;

use crate::codec::grid::ScalarGrid;
use crate::error::{Error, Result};
use crate::math::bits;
use crate::math::qjl::Qjl;
use crate::math::rotation::{Rotation, hadamard_order};
use crate::math::trellis::Trellis;
use crate::math::trellis_search;
use crate::spec::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat};
use std::sync::Arc;

/// A run of coordinates that share bits, a rotation and a scale.
#[derive(Clone, Debug)]
pub struct Band {
    /// First coordinate, in channel order.
    pub start: usize,
    /// Number of coordinates.
    pub dim: usize,
    /// Bits of a code.
    pub bits: u8,
    /// First word of the row.
    pub word: usize,
    /// Number of words.
    pub words: usize,
    /// The rotation of the band.
    pub rotation: Rotation,
    /// The grid of the band.
    pub grid: BandGrid,
}

/// What the codes of a band stand for.
#[derive(Clone, Debug)]
pub enum BandGrid {
    /// A level for each code.
    Scalar(ScalarGrid),
    /// A level for each window of the bit stream.
    Trellis(Trellis),
    /// Steps between the ends of a group.
    Affine,
}

impl BandGrid {
    /// The scalar grid, if it is one.
    pub fn scalar(&self) -> Option<&ScalarGrid> {
        match self {
            BandGrid::Scalar(grid) => Some(grid),
            _ => None,
        }
    }
}

/// A spec with the tables made from it.
#[derive(Debug)]
pub struct Codec {
    spec: CodecSpec,
    bands: Vec<Band>,
    qjl: Option<Qjl>,
    fitted: Option<Arc<[f32]>>,
    channel: Option<Arc<Codec>>,
    row_words: usize,
    row_scales: usize,
}

/// Buffers that the stages reuse from row to row.
#[derive(Clone, Debug)]
pub struct RowScratch {
    rows: [Vec<f32>; 3],
    codes: Vec<u8>,
    search: trellis_search::SearchScratch,
}

/// A query in the codec's domain.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// R D^-1 q, all bands.
    pub rotated: Vec<f32>,
    /// S R D^-1 q, round by round.
    pub projected: Vec<f32>,
    /// <q, mu>.
    pub bias: f32,
}

impl Codec {
    /// Builds the tables of a spec.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as [`CodecSpec::validate`], for a head dim that no rotation covers, and for [`Grid::Fitted`], whose
    /// levels come from [`Codec::with_levels`].
    pub fn new(spec: CodecSpec) -> Result<Codec> {
        if spec.grid == Grid::Fitted {
            let reason = "a fitted grid needs its calibrated levels".into();
            return Err(Error::Unsupported { field: "grid", value: spec.grid.to_string(), reason });
        }
        Codec::build(spec, None)
    }

    /// Builds the tables of a [`Grid::Fitted`] spec around calibrated levels.
    ///
    /// # Errors
    /// As [`Codec::new`]; [`Error::Shape`] unless there are `2^bits` levels, finite and ascending.
    pub fn with_levels(spec: CodecSpec, levels: Arc<[f32]>) -> Result<Codec> {
        if spec.grid != Grid::Fitted || spec.outliers > 0 {
            let reason = "levels go with the fitted grid without outliers".into();
            return Err(Error::Unsupported { field: "grid", value: spec.to_string(), reason });
        }
        if levels.len() != 1 << spec.bits
            || !levels.windows(2).all(|w| w[0] <= w[1])
            || !levels.iter().all(|x| x.is_finite())
        {
            let expected = format!("{} finite ascending levels", 1 << spec.bits);
            return Err(Error::Shape { what: "levels", expected, got: vec![levels.len()] });
        }
        Codec::build(spec, Some(levels))
    }

    fn build(spec: CodecSpec, fitted: Option<Arc<[f32]>>) -> Result<Codec> {
        spec.validate()?;
        let channel = match spec.grid {
            Grid::ChannelAffine { group } => {
                let inner = CodecSpec { head_dim: group.into(), grid: Grid::Affine { group }, ..spec };
                Some(Arc::new(Codec::build(inner, None)?))
            }
            _ => None,
        };
        let mut bands = Vec::new();
        let mut word = 0;
        for Span { start, dim, bits } in layout(&spec)? {
            // Every band has a rotation of its own.
            let seed = spec.seed.wrapping_add(bands.len() as u64);
            let rotation = match spec.rotation {
                RotationKind::Identity => Rotation::Identity,
                RotationKind::Dense => Rotation::dense(dim, seed),
                RotationKind::Hadamard => Rotation::hadamard(dim, seed).unwrap_or(Rotation::Identity),
            };
            let grid = match spec.grid {
                Grid::Affine { .. } | Grid::ChannelAffine { .. } => BandGrid::Affine,
                Grid::Trellis { states } => BandGrid::Trellis(
                    Trellis::new(states, bits)
                        .ok_or_else(|| no_form(&spec, "there is no such trellis".into()))?,
                ),
                grid => BandGrid::Scalar(ScalarGrid::new(grid, bits, dim, fitted.as_ref())),
            };
            let words = bits::words(dim, bits);
            bands.push(Band { start, dim, bits, word, words, rotation, grid });
            word += words;
        }
        let qjl = match spec.residual {
            Residual::None => None,
            Residual::Qjl { projections, rounds } => {
                Some(Qjl::new(spec.head_dim, projections as usize, rounds as usize, spec.seed))
            }
        };
        let [row_words, row_scales] = Codec::row_size(&spec)?;
        Ok(Codec { spec, row_words, row_scales, bands, qjl, fitted, channel })
    }

    /// Words and scales of an encoded vector, without the tables: what a file is held to before it may cost any.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a head dim that no rotation covers.
    pub(crate) fn row_size(spec: &CodecSpec) -> Result<[usize; 2]> {
        let bands = layout(spec)?;
        let words: usize = bands.iter().map(|band| bits::words(band.dim, band.bits)).sum();
        let (signs, rounds) = match spec.residual {
            Residual::None => (0, 0),
            Residual::Qjl { projections, rounds } => {
                (usize::from(rounds) * usize::from(projections) / 32, usize::from(rounds))
            }
        };
        let scales = match spec.grid {
            Grid::Affine { group } | Grid::ChannelAffine { group } => 2 * spec.head_dim / group as usize,
            _ => bands.len() + rounds,
        };
        Ok([words + signs, scales])
    }

    /// Whether a spec has a form, without building its tables.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as [`CodecSpec::validate`], or naming the head dim that the rotation or the grid does not take.
    pub fn check(spec: &CodecSpec) -> Result<()> {
        layout(spec).map(drop)
    }

    /// The spec.
    pub fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    /// Whether rows are bands of trellis codes and nothing else.
    pub(crate) fn is_trellis(&self) -> bool {
        self.qjl.is_none() && self.bands.iter().all(|b| matches!(b.grid, BandGrid::Trellis(_)))
    }

    /// The bands, in order.
    pub fn bands(&self) -> &[Band] {
        &self.bands
    }

    /// The residual's projections.
    pub fn qjl(&self) -> Option<&Qjl> {
        self.qjl.as_ref()
    }

    /// Calibrated levels of a fitted grid.
    pub fn fitted(&self) -> Option<&Arc<[f32]>> {
        self.fitted.as_ref()
    }

    /// For [`Grid::ChannelAffine`]: the codec of one channel of a tile of tokens. The words and scales of a tile are
    /// the words and scales of its channels one after the other, which fill exactly the rows of its tokens.
    pub fn channel(&self) -> Option<&Arc<Codec>> {
        self.channel.as_ref()
    }

    /// u32 words of an encoded vector.
    pub fn row_words(&self) -> usize {
        self.row_words
    }

    /// Scales of an encoded vector.
    pub fn row_scales(&self) -> usize {
        self.row_scales
    }

    /// The format in which scales are stored; affine scales and biases are always half floats.
    pub fn format(&self) -> ScaleFormat {
        Codec::scale_format(&self.spec)
    }

    /// [`Codec::format`] from the spec alone.
    pub(crate) fn scale_format(spec: &CodecSpec) -> ScaleFormat {
        match spec.grid {
            Grid::Affine { .. } | Grid::ChannelAffine { .. } => ScaleFormat::F16,
            _ => spec.format,
        }
    }

    /// Bytes of an encoded vector.
    pub fn row_bytes(&self) -> usize {
        4 * self.row_words + self.format().bytes() * self.row_scales
    }

    /// Elements that share a scale and a bias, for the affine grids.
    pub fn affine_group(&self) -> Option<usize> {
        match self.spec.grid {
            Grid::Affine { group } | Grid::ChannelAffine { group } => Some(group as usize),
            _ => None,
        }
    }

    /// Whether two codecs read each other's codes.
    pub fn same(&self, other: &Codec) -> bool {
        self.spec == other.spec && self.fitted == other.fitted
    }

    /// Buffers for this codec's stages.
    pub fn scratch(&self) -> RowScratch {
        let d = self.spec.head_dim;
        RowScratch {
            rows: std::array::from_fn(|_| vec![0.0; d]),
            codes: vec![0; d],
            search: trellis_search::SearchScratch::default(),
        }
    }
}

/// Where a band lies.
struct Span {
    start: usize,
    dim: usize,
    bits: u8,
}

/// The bands of a spec, outliers first.
fn layout(spec: &CodecSpec) -> Result<Vec<Span>> {
    spec.validate()?;
    let mut spans = vec![];
    let outliers = usize::from(spec.outliers);
    for (start, end, bits) in [(0, outliers, spec.bits + spec.lead), (outliers, spec.head_dim, spec.bits)] {
        let sizes = blocks(end - start, spec.rotation).ok_or_else(|| {
            let reason = "channels have no blocks of 16 or more with a Hadamard form; the dense rotation takes any size";
            no_form(spec, format!("{} {reason}", end - start))
        })?;
        let mut at = start;
        for dim in sizes {
            // The ring has to be long enough for the cheap search of its seam, see `trellis_search`.
            if let Grid::Trellis { states } = spec.grid
                && (dim % 8 != 0 || dim * usize::from(bits) < 32)
            {
                let what = format!("trellis{states} of {bits} bits on {dim} channels");
                let needed = "a multiple of 8 channels and a stream of 32 bits are needed";
                return Err(no_form(spec, format!("{what}: {needed}")));
            }
            spans.push(Span { start: at, dim, bits });
            at += dim;
        }
    }
    if matches!(spec.grid, Grid::Affine { .. } | Grid::ChannelAffine { .. }) && spans.len() > 1 {
        let reason = "affine groups take a head dim that is rotated whole; the dense rotation does that";
        return Err(no_form(spec, reason.into()));
    }
    Ok(spans)
}

fn no_form(spec: &CodecSpec, reason: String) -> Error {
    Error::Unsupported { field: "head_dim", value: spec.head_dim.to_string(), reason }
}

/// Sizes of the blocks that a run of coordinates is rotated in: one, or for a Hadamard rotation the greatest sizes that have a form.
fn blocks(dim: usize, rotation: RotationKind) -> Option<Vec<usize>> {
    let mut left = dim;
    let mut sizes = Vec::new();
    while left > 0 {
        let size = match rotation {
            RotationKind::Hadamard => (8..=left).rev().find(|&n| hadamard_order(n).is_some())?,
            _ => left,
        };
        if size < left && (size < 16 || left - size < 16) {
            return None;
        }
        sizes.push(size);
        left -= size;
    }
    Some(sizes)
}
