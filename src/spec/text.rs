//! The text form of a codec spec: written by `Display`, read back by `FromStr`, used by serde.

use super::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Gives a type that is written by `Display` and read by `FromStr` the two conversions by which serde stores it as that text.
macro_rules! stored_as_text {
    ($t:ty) => {
        impl From<$t> for String {
            fn from(value: $t) -> String {
                value.to_string()
            }
        }

        impl TryFrom<String> for $t {
            type Error = $crate::error::Error;
            fn try_from(text: String) -> $crate::error::Result<$t> {
                text.parse()
            }
        }
    };
}
pub(crate) use stored_as_text;

/// The words of a choice without numbers, written and read from one list.
macro_rules! words {
    ($t:ident: $($variant:ident = $word:literal),*) => {
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $($t::$variant => $word,)*
                })
            }
        }

        impl $t {
            fn of_word(word: &str) -> Option<$t> {
                match word {
                    $($word => Some($t::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

words!(RotationKind: Identity = "identity", Dense = "dense", Hadamard = "hadamard");
words!(ScaleRule: Plain = "plain", Matched = "matched", Unbiased = "unbiased", LeastSquares = "least-squares");
words!(ScaleFormat: F16 = "f16", Log8 = "log8", Wide8 = "wide8");
stored_as_text!(CodecSpec);

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
        if let Some(rotation) = RotationKind::of_word(term) {
            self.rotation = rotation;
            return Some(());
        }
        if let Some(scale) = ScaleRule::of_word(term) {
            self.scale = scale;
            return Some(());
        }
        if let Some(format) = ScaleFormat::of_word(term) {
            self.format = format;
            return Some(());
        }
        match term {
            "equalised" => self.equalised = true,
            "uniform" => self.grid = Grid::Uniform,
            "lloyd" => self.grid = Grid::Lloyd,
            "beta" => self.grid = Grid::Beta,
            "fitted" => self.grid = Grid::Fitted,
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
