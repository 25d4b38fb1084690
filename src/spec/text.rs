//! The text form of a codec spec: written by `Display`, read back by `FromStr`, used by serde.

use super::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

impl fmt::Display for RotationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RotationKind::Identity => "identity",
            RotationKind::Dense => "dense",
            RotationKind::Hadamard => "hadamard",
        })
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Grid::Uniform => f.write_str("uniform"),
            Grid::Lloyd => f.write_str("lloyd"),
            Grid::Beta => f.write_str("beta"),
            Grid::Fitted => f.write_str("fitted"),
            Grid::Trellis { states } => write!(f, "trellis{states}"),
            Grid::Affine { group } => write!(f, "affine{group}"),
            Grid::ChannelAffine { group } => write!(f, "channel-affine{group}"),
        }
    }
}

impl fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScaleRule::Plain => "plain",
            ScaleRule::Matched => "matched",
            ScaleRule::Unbiased => "unbiased",
            ScaleRule::LeastSquares => "least-squares",
        })
    }
}

impl fmt::Display for ScaleFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScaleFormat::F16 => "f16",
            ScaleFormat::Log8 => "log8",
            ScaleFormat::Wide8 => "wide8",
        })
    }
}

impl fmt::Display for Residual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Residual::None => f.write_str("no-residual"),
            Residual::Qjl { projections, rounds } => write!(f, "qjl{projections}x{rounds}"),
        }
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "d{}:b{}", self.head_dim, self.bits)?;
        if self.outliers > 0 {
            write!(f, "+{}", self.outliers)?;
            if self.lead != 1 {
                write!(f, "x{}", self.lead)?;
            }
        }
        if self.equalised {
            f.write_str(":equalised")?;
        }
        write!(f, ":{}:{}:{}:{}", self.rotation, self.grid, self.scale, self.format)?;
        if self.residual != Residual::None {
            write!(f, ":{}", self.residual)?;
        }
        write!(f, ":seed{}", self.seed)
    }
}

impl FromStr for CodecSpec {
    type Err = Error;

    /// Terms may come in any order; what is left out keeps the value of [`CodecSpec::new`] for 128 channels, 4 bits, Lloyd-Max.
    fn from_str(text: &str) -> Result<CodecSpec> {
        let fail = |reason: String| Error::Parse { what: "codec spec", text: text.into(), reason };
        let mut spec = CodecSpec::new(128, 4, Grid::Lloyd);
        for term in text.split(':') {
            spec.read_term(term).ok_or_else(|| fail(format!("unknown term {term:?}")))?;
        }
        spec.validate()?;
        Ok(spec)
    }
}

impl CodecSpec {
    fn read_term(&mut self, term: &str) -> Option<()> {
        match term {
            "equalised" => self.equalised = true,
            "identity" => self.rotation = RotationKind::Identity,
            "dense" => self.rotation = RotationKind::Dense,
            "hadamard" => self.rotation = RotationKind::Hadamard,
            "uniform" => self.grid = Grid::Uniform,
            "lloyd" => self.grid = Grid::Lloyd,
            "beta" => self.grid = Grid::Beta,
            "fitted" => self.grid = Grid::Fitted,
            "plain" => self.scale = ScaleRule::Plain,
            "matched" => self.scale = ScaleRule::Matched,
            "unbiased" => self.scale = ScaleRule::Unbiased,
            "least-squares" => self.scale = ScaleRule::LeastSquares,
            "f16" => self.format = ScaleFormat::F16,
            "log8" => self.format = ScaleFormat::Log8,
            "wide8" => self.format = ScaleFormat::Wide8,
            "no-residual" => self.residual = Residual::None,
            _ => {
                let number = |prefix: &str| term.strip_prefix(prefix);
                if let Some(n) = number("channel-affine") {
                    self.grid = Grid::ChannelAffine { group: n.parse().ok()? };
                } else if let Some(n) = number("trellis") {
                    self.grid = Grid::Trellis { states: n.parse().ok()? };
                } else if let Some(n) = number("affine") {
                    self.grid = Grid::Affine { group: n.parse().ok()? };
                } else if let Some(n) = number("seed") {
                    self.seed = n.parse().ok()?;
                } else if let Some((m, r)) = number("qjl").and_then(|n| n.split_once('x')) {
                    self.residual = Residual::Qjl { projections: m.parse().ok()?, rounds: r.parse().ok()? };
                } else if let Some((b, n)) = number("b").and_then(|n| n.split_once('+')) {
                    let (n, lead) = n.split_once('x').unwrap_or((n, "1"));
                    (self.bits, self.outliers, self.lead) =
                        (b.parse().ok()?, n.parse().ok()?, lead.parse().ok()?);
                } else if let Some(n) = number("b") {
                    (self.bits, self.outliers, self.lead) = (n.parse().ok()?, 0, 1);
                } else {
                    self.head_dim = number("d")?.parse().ok()?;
                }
            }
        }
        Some(())
    }
}

impl From<CodecSpec> for String {
    fn from(spec: CodecSpec) -> String {
        spec.to_string()
    }
}

impl TryFrom<String> for CodecSpec {
    type Error = Error;
    fn try_from(text: String) -> Result<CodecSpec> {
        text.parse()
    }
}
