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
/// Bytes and operations for all codecs of one cache, beside what its rows allow.
const ALL_TABLES: u64 = 1 << 28;
const ALL_WORK: u64 = 1 << 36;
/// Operations that every byte of rows allows: about what packing it takes.
const WORK_A_BYTE: u64 = 1 << 8;
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

/// Counts the codecs of one cache against the rows that it has.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    cost: Cost,
    rows: u64,
}

impl Budget {
    /// Counts a codec that packs rows of so many bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the tables of all of them cost more than some hundred megabytes, or than the rows, or much longer to
    /// make than the rows to pack.
    pub(crate) fn take(&mut self, spec: &CodecSpec, bytes: usize) -> Result<()> {
        let more = spec.cost();
        self.cost = Cost { bytes: self.cost.bytes + more.bytes, work: self.cost.work + more.work };
        self.rows = self.rows.saturating_add(bytes as u64);
        let tables = ALL_TABLES.saturating_add(self.rows);
        let work = ALL_WORK.saturating_add(self.rows.saturating_mul(WORK_A_BYTE));
        if self.cost.bytes <= tables && self.cost.work <= work {
            return Ok(());
        }
        let reason = format!(
            "the tables of this codec and of those before it take {} bytes and {} operations; {} bytes of rows allow {tables} and {work}",
            self.cost.bytes, self.cost.work, self.rows
        );
        Err(Error::Unsupported { field: "codec", value: spec.to_string(), reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::math::rotation::Rotation;
    use crate::spec::Grid;

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

    #[test]
    fn many_codecs_of_few_rows_are_refused_and_those_of_real_models_are_not() {
        let spec = |text: &str| text.parse::<CodecSpec>().unwrap();
        // 128 layers of 256 channels, one token of one head.
        let mut budget = Budget::default();
        for _ in 0..256 {
            budget.take(&spec("d256:b2:dense:qjl256x1"), 512).unwrap();
        }
        // Ten thousand tiny layers of the dearest codec.
        let mut budget = Budget::default();
        let refused = (0..20_000).find_map(|i| budget.take(&spec("d512:dense"), 1024).err().map(|e| (i, e)));
        let (layers, error) = refused.unwrap();
        assert!((100..300).contains(&layers), "{layers}: {error}");
        // The same with rows that are worth it.
        let mut budget = Budget::default();
        (0..2000).for_each(|_| budget.take(&spec("d512:dense"), 4 << 20).unwrap());
        // Without tables of their own any number goes.
        let mut budget = Budget::default();
        (0..100_000).for_each(|_| budget.take(&CodecSpec::new(128, 4, Grid::Lloyd), 256).unwrap());
    }
}
