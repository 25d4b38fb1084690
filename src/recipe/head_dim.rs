//! A recipe's spec for a head dim: what counts channels is scaled, and what has no form there takes the nearest one that has.
//!
//! Recipes are written for 128 channels. Tried in this order: the spec as it is; a dense rotation in place of a Hadamard one, which
//! needs blocks of m 2^k channels with m in 1, 12, 20, 28; the Beta-law grid in place of a trellis, which needs 32 channels, a
//! multiple of 8 and a stream of 32 bits; both. So 40 channels are rotated whole by a dense matrix, and 36 have a scalar grid.

use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::spec::{CodecSpec, Grid, Residual, RotationKind, check_head_dim};

/// Head dim for which a recipe's specs are written down.
pub(super) const TEMPLATE_DIM: usize = 128;

/// The spec of `template` for vectors of `head_dim` channels.
///
/// # Errors
/// [`Error::Unsupported`] names the head dim if no form of the spec holds it.
pub(super) fn fit(template: CodecSpec, head_dim: usize) -> Result<CodecSpec> {
    let no =
        |reason: String| Err(Error::Unsupported { field: "head_dim", value: head_dim.to_string(), reason });
    check_head_dim(head_dim)?;
    let spec = scaled(template, head_dim);
    if spec.outliers > 0 && usize::from(spec.outliers) >= head_dim {
        return no(format!(
            "{} bits for some of the channels need more than 8 channels",
            template.nominal_bits()
        ));
    }
    if matches!(spec.grid, Grid::Affine { .. }) && head_dim % 32 != 0 {
        return no(format!(
            "{} shares a scale among 32, 64 or 128 channels: a multiple of 32 is needed",
            spec.grid
        ));
    }
    let grids = [Some(spec.grid), matches!(spec.grid, Grid::Trellis { .. }).then_some(Grid::Beta)];
    let rotations =
        [Some(spec.rotation), (spec.rotation == RotationKind::Hadamard).then_some(RotationKind::Dense)];
    let mut refused = None;
    for grid in grids.into_iter().flatten() {
        for rotation in rotations.into_iter().flatten() {
            let form = CodecSpec { grid, rotation, ..spec };
            match Codec::check(&form) {
                Ok(()) => return Ok(form),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
    }
    refused.map_or_else(|| no("the spec has no form".into()), Err)
}

/// The spec with its numbers of channels in proportion.
fn scaled(template: CodecSpec, head_dim: usize) -> CodecSpec {
    let scale = |n: u16, multiple: usize| {
        (usize::from(n) * head_dim / TEMPLATE_DIM / multiple * multiple).max(multiple) as u16
    };
    let mut spec = CodecSpec { head_dim, ..template };
    if spec.outliers > 0 {
        spec.outliers =
            scale(spec.outliers, [8, 16, 32][usize::from(head_dim >= 32) + usize::from(head_dim >= 64)]);
        if usize::from(spec.outliers) >= head_dim
            && 2 * usize::from(template.outliers) == TEMPLATE_DIM
            && spec.lead == 2
        {
            // Half of the channels two bits more are one bit more for all.
            (spec.bits, spec.outliers, spec.lead) = (spec.bits + 1, 0, 1);
        }
    }
    if let Residual::Qjl { projections, rounds } = spec.residual {
        spec.residual = Residual::Qjl { projections: scale(projections, 32), rounds };
    }
    if spec.grid == (Grid::Affine { group: 64 }) && head_dim % 64 != 0 {
        spec.grid = Grid::Affine { group: 32 };
    }
    spec
}
