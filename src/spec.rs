//! The words of a codec: every choice that decides what a packed vector means, as plain data with one text form.
//!
//! Equal specs give equal tables, bit for bit. The text form is a list of terms joined by `:`, for example
//! `d128:b4:hadamard:lloyd:matched:f16:seed42`; [`CodecSpec`] reads back what it writes.

pub mod bit_plan;
mod cost;
mod text;

pub(crate) use text::stored_as_text;

pub(crate) use cost::Budget;

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// What queries are compared with.
    Key,
    /// What attention sums up.
    Value,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Key => "key",
            Side::Value => "value",
        })
    }
}

/// Orthogonal map before the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotationKind {
    /// None.
    Identity,
    /// Haar-distributed dense matrix.
    Dense,
    /// Randomized Hadamard transform; sizes with no such form are cut into blocks that have one.
    Hadamard,
}

/// The set of values that a rotated coordinate can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// Equal steps, symmetric about zero, with the step that is optimal for a Gaussian coordinate.
    Uniform,
    /// Lloyd-Max levels of the standard normal law.
    Lloyd,
    /// Lloyd-Max levels of the law that a coordinate of a random unit vector in `head_dim` dimensions really follows.
    Beta,
    /// k-means levels fitted to calibration samples.
    Fitted,
    /// Trellis-coded: every value is one of 2^states levels that the bits of its neighbours help to choose (algorithm of
    /// [`crate::math::trellis`]); 1 to 4 bits.
    Trellis {
        /// log2 of the number of states, 8 or 10.
        states: u8,
    },
    /// Least and greatest value of every `group` channels of a token, equal steps between: the layout of mlx-lm.
    Affine {
        /// Channels that share a scale and a bias.
        group: u16,
    },
    /// Least and greatest value of every `group` tokens of a channel, equal steps between: the keys of KIVI (2402.02750).
    ChannelAffine {
        /// Tokens that share a scale and a bias.
        group: u16,
    },
}

/// What the stored scale of a vector makes right. y is the rotated vector, c its decoded unit-variance form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// |y| / sqrt(d): the norm as it is.
    Plain,
    /// |y| / |c|: the decoded vector has the norm of the original.
    Matched,
    /// |y|^2 / <c, y>: inner products with the original's direction are unbiased (best for keys at low bits).
    Unbiased,
    /// <c, y> / |c|^2: least squared error (best for values).
    LeastSquares,
}

/// How a scale is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// IEEE half float; the sign bit marks scales that are no normal half float, in a form of their own, see [`crate::math::scale`].
    F16,
    /// Eight bits of log2 from 2^-10 to 2^9.46: what files of format version 1 hold.
    Log8,
    /// Eight bits of log2 from 2^-29 to 2^18.6, with the steps of `log8` between 2^-6 and 2^5 and coarse ones outside.
    Wide8,
}

/// What is stored of the quantization residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residual {
    /// Nothing.
    None,
    /// Signs of random projections and a norm (QJL, 2406.03482).
    Qjl {
        /// Projections (sign bits) a round.
        projections: u16,
        /// Rounds, each with fresh projections of what the one before left.
        rounds: u8,
    },
}

/// Everything that decides how one vector is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct CodecSpec {
    /// Channels of a vector.
    pub head_dim: usize,
    /// Bits of a code, 1 to 8.
    pub bits: u8,
    /// Channels that get `lead` bits more, by energy: 2.5 bits is `bits` = 2 with half of the channels here and a lead of 1.
    pub outliers: u16,
    /// Bits that outliers get more, 1 or more; 1 if there are none.
    pub lead: u8,
    /// Whether keys are multiplied by a diagonal gain first (2.5 of the calibration tables of a sequence).
    pub equalised: bool,
    /// Rotation.
    pub rotation: RotationKind,
    /// Grid.
    pub grid: Grid,
    /// Scale rule.
    pub scale: ScaleRule,
    /// Scale format.
    pub format: ScaleFormat,
    /// Residual.
    pub residual: Residual,
    /// Seed of the random tables.
    pub seed: u64,
}

/// Most channels of a vector.
pub(crate) const MOST_HEAD_DIM: usize = 8192;

/// Checks that a codec may have so many channels.
pub(crate) fn check_head_dim(head_dim: usize) -> Result<()> {
    if (8..=MOST_HEAD_DIM).contains(&head_dim) && head_dim % 2 == 0 {
        return Ok(());
    }
    let reason = format!("an even number from 8 to {MOST_HEAD_DIM} is needed");
    Err(Error::Unsupported { field: "head_dim", value: head_dim.to_string(), reason })
}

impl CodecSpec {
    /// A Hadamard-rotated codec of `bits` bits on `grid`, with a matched f16 scale and nothing else.
    pub const fn new(head_dim: usize, bits: u8, grid: Grid) -> CodecSpec {
        CodecSpec {
            head_dim,
            bits,
            outliers: 0,
            lead: 1,
            equalised: false,
            rotation: RotationKind::Hadamard,
            grid,
            scale: ScaleRule::Matched,
            format: ScaleFormat::F16,
            residual: Residual::None,
            seed: 42,
        }
    }

    /// Tokens that are encoded together: 1, or the group of [`Grid::ChannelAffine`].
    pub fn tile(&self) -> usize {
        match self.grid {
            Grid::ChannelAffine { group } => group as usize,
            _ => 1,
        }
    }

    /// Tables of four bytes per channel that a head's frame has: centre, gains, channel order.
    pub(crate) fn tables(&self, centred: bool) -> usize {
        usize::from(centred) + usize::from(self.equalised) + usize::from(self.outliers > 0)
    }

    /// Bits per channel by name: codes, outliers and residual signs, without scales.
    pub fn nominal_bits(&self) -> f32 {
        let signs = match self.residual {
            Residual::None => 0.0,
            Residual::Qjl { projections, rounds } => f32::from(projections) * f32::from(rounds),
        };
        let more = f32::from(self.outliers) * f32::from(self.lead);
        f32::from(self.bits) + (more + signs) / self.head_dim as f32
    }

    /// Checks the fields on their own and together.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the field, its value and what would do.
    pub fn validate(&self) -> Result<()> {
        let no = |field, value: String, reason: String| Err(Error::Unsupported { field, value, reason });
        let d = self.head_dim;
        check_head_dim(d)?;
        if !(1..=8).contains(&self.bits) {
            return no("bits", self.bits.to_string(), "1 to 8 are supported".into());
        }
        let outliers = self.outliers as usize;
        let most = self.bits.saturating_add(if outliers > 0 { self.lead } else { 0 });
        let led = if outliers > 0 { self.lead > 0 && most <= 8 } else { self.lead == 1 };
        if outliers > 0 && (outliers >= d || outliers % 8 != 0) || !led {
            return no(
                "outliers",
                format!("{outliers}x{}", self.lead),
                format!("a multiple of 8 below {d}, with at most 8 bits"),
            );
        }
        if let Residual::Qjl { projections, rounds } = self.residual
            && !(projections > 0
                && projections % 32 == 0
                && projections as usize <= 4 * d
                && (1..=8).contains(&rounds))
        {
            let reason = format!("projections: a multiple of 32 up to {}; rounds: 1 to 8", 4 * d);
            return no("residual", self.residual.to_string(), reason);
        }
        if self.residual != Residual::None && self.nominal_bits() > 16.0 {
            let reason = format!("{} bits a channel, half precision has 16", self.nominal_bits());
            return no("residual", self.residual.to_string(), reason);
        }
        match self.grid {
            Grid::Affine { group } | Grid::ChannelAffine { group } => self.check_affine(group)?,
            Grid::Trellis { states } if !matches!(states, 8 | 10) || most > 4 || d < 32 => {
                let reason = "8 or 10 states, at most 4 bits, 32 channels or more".into();
                return no("grid", self.grid.to_string(), reason);
            }
            _ => {}
        }
        self.affordable()
    }

    /// Checks what the affine grids, by token and by channel, go together with.
    fn check_affine(&self, group: u16) -> Result<()> {
        let no = |field, value: String, reason: String| Err(Error::Unsupported { field, value, reason });
        let (d, grid) = (self.head_dim, self.grid.to_string());
        if matches!(self.grid, Grid::Affine { .. }) {
            let fits: Vec<u16> = [32, 64, 128].into_iter().filter(|&g| d % usize::from(g) == 0).collect();
            if !fits.contains(&group) {
                let none = "none of the groups of mlx-lm".to_string();
                let takes = if fits.is_empty() { none } else { format!("{fits:?}") };
                return no("group", group.to_string(), format!("head_dim {d} takes {takes}"));
            }
        } else {
            if !matches!(group, 32 | 64 | 128) || (2 * d) % usize::from(group) != 0 {
                let takes = "32, 64 or 128 that divide twice its channels";
                return no("group", group.to_string(), format!("head_dim {d} takes {takes}"));
            }
            if d * usize::from(self.bits) % 32 != 0 {
                let multiple = 32 >> self.bits.trailing_zeros();
                let at = format!("{grid} at {} bits", self.bits);
                let reason = format!("{at} fills whole words only with multiples of {multiple}");
                return no("head_dim", d.to_string(), reason);
            }
        }
        if self.outliers > 0 || self.residual != Residual::None {
            return no("grid", grid, "goes with neither outliers nor a residual".into());
        }
        let by_channel = matches!(self.grid, Grid::ChannelAffine { .. });
        if by_channel && (self.rotation != RotationKind::Identity || self.equalised) {
            return no("grid", grid, "takes channels as they are, without a rotation".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_reads_back_what_it_writes() {
        let mut seen = 0;
        for rotation in [RotationKind::Identity, RotationKind::Dense, RotationKind::Hadamard] {
            for grid in [
                Grid::Uniform,
                Grid::Lloyd,
                Grid::Beta,
                Grid::Fitted,
                Grid::Trellis { states: 8 },
                Grid::Affine { group: 64 },
                Grid::ChannelAffine { group: 32 },
            ] {
                for scale in
                    [ScaleRule::Plain, ScaleRule::Matched, ScaleRule::Unbiased, ScaleRule::LeastSquares]
                {
                    for residual in [Residual::None, Residual::Qjl { projections: 64, rounds: 2 }] {
                        for (outliers, format) in
                            [(0, ScaleFormat::F16), (32, ScaleFormat::Log8), (64, ScaleFormat::Wide8)]
                        {
                            let base = CodecSpec::new(128, 3, grid);
                            let spec =
                                CodecSpec { rotation, scale, residual, outliers, format, seed: 9, ..base };
                            let lead = 1 + u8::from(outliers > 0 && scale == ScaleRule::Plain);
                            let spec = CodecSpec { equalised: outliers > 0, lead, ..spec };
                            if spec.validate().is_ok() {
                                assert_eq!(spec.to_string().parse::<CodecSpec>().unwrap(), spec);
                                seen += 1;
                            }
                        }
                    }
                }
            }
        }
        assert!(seen > 150, "{seen} valid specs");
    }

    #[test]
    fn bad_fields_are_named() {
        for (text, field) in [
            ("d0", "head_dim"),
            ("d7", "head_dim"),
            ("d65538", "head_dim"),
            ("b0", "bits"),
            ("b9", "bits"),
            ("b2+128", "outliers"),
            ("b2+64x0", "outliers"),
            ("b7+64x2", "outliers"),
            ("b3+64x2:trellis8", "grid"),
            ("qjl31x1", "residual"),
            ("b1:identity:uniform:qjl512x8", "residual"),
            ("d8192:b1:hadamard:qjl32768x8", "residual"),
            ("d8192:b1:hadamard:qjl32768x1", "codec"),
            ("d8192:dense", "codec"),
            ("d8192:b2+4096:dense", "codec"),
            ("d80:affine32", "group"),
            ("d96:affine64", "group"),
        ] {
            match text.parse::<CodecSpec>() {
                Err(Error::Unsupported { field: f, .. }) => assert_eq!(f, field, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(matches!("d128:b4:hadamart".parse::<CodecSpec>(), Err(Error::Parse { .. })));
        assert!("".parse::<CodecSpec>().is_err());
    }
}
