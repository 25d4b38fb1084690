//! What the tables of codecs cost before the first vector is packed, in bytes and in work, and how much of both may be asked for.
//!
//! Specs come from recipes of clients and from files of strangers; a few bytes of either must not cost gigabytes or minutes. So the
//! cost is known from the spec alone, and what is above a bound is refused before anything is built.

use super::{CodecSpec, Residual, RotationKind};
use crate::error::{Error, Result};

/// Most bytes of the tables of one codec: a dense rotation of 1,024 channels takes 4 MiB, a projection for each channel as much.
const TABLES: u64 = 1 << 24;
/// Most operations that make them: a dense rotation of 1,024 channels takes this many, a few seconds.
const WORK: u64 = 1 << 32;
/// Operations of a normally distributed number.
const NORMAL: u64 = 32;

/// Cost of the tables of a codec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    bytes: u64,
    work: u64,
}

impl CodecSpec {
    /// Cost of a spec whose fields are in their ranges.
    fn cost(&self) -> Cost {
        let (dim, outliers) = (self.head_dim as u64, u64::from(self.outliers));
        let mut cost = Cost { bytes: 4 * dim, work: dim };
        if self.rotation == RotationKind::Dense {
            // Householder reflections of a Gaussian matrix, twice.
            for n in [outliers, dim - outliers] {
                cost.bytes += 4 * n * n;
                cost.work += 4 * n * n * n;
            }
        }
        if let Residual::Qjl { projections, rounds } = self.residual {
            let numbers = u64::from(projections) * u64::from(rounds) * dim;
            cost.bytes += 4 * numbers;
            cost.work += NORMAL * numbers;
        }
        cost
    }

    /// Refuses a codec whose tables alone cost too much.
    pub(super) fn affordable(&self) -> Result<()> {
        let Cost { bytes, work } = self.cost();
        if bytes <= TABLES && work <= WORK {
            return Ok(());
        }
        let reason = format!(
            "its tables take {bytes} bytes and {work} operations, at most {TABLES} and {WORK} are allowed"
        );
        Err(Error::Unsupported { field: "codec", value: self.to_string(), reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::rotation::Rotation;

    #[test]
    fn the_cost_is_that_of_the_tables_that_are_built() {
        for text in ["d128:dense", "d64:b2+32:dense", "d256:b1:qjl256x2", "d96:dense:qjl64x3", "d128"] {
            let spec: CodecSpec = text.parse().unwrap();
            let codec = Codec::new(spec).unwrap();
            let rotations = codec.bands().iter().map(|band| match &band.rotation {
                Rotation::Dense { matrix, .. } => matrix.len(),
                Rotation::Hadamard { signs, .. } => signs.len(),
                Rotation::Identity => 0,
            });
            let signs = codec.qjl().map_or(0, |q| (0..q.rounds()).map(|r| q.matrix(r).len()).sum::<usize>());
            let built = 4 * (rotations.sum::<usize>() + signs) as u64;
            let said = spec.cost().bytes;
            assert!(built <= said && said <= built + 4 * 256, "{text}: {built} for {said}");
        }
    }
}
