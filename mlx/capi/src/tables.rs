//! What a second executor needs of a codec: its rotation and levels, and packed vectors as they are stored.
//!
//! `mlx/python` attends on packed caches with MLX's own kernels; its constants come from here, and its words are held to these.

use super::codes::{tmq_codec, tmq_codes};
use super::tmq_status::{self, TMQ_UNSUPPORTED};
use super::{Failure, by_ref, guard, write};
use turbomoq::internals::codec::BandGrid;

/// The rotation of a codec: a vector x becomes y with y_i = sum over j of out[i * head_dim + j] * x_j; `len` must be
/// head_dim * head_dim. A Hadamard rotation of a power of two has the signs that it begins with in its first row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_rotation(
    codec: *const tmq_codec,
    out: *mut f32,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let codec = &by_ref(codec, "codec")?.0;
        let d = codec.spec().head_dim;
        let mut matrix = vec![0.0; d * d];
        for band in codec.bands() {
            let mut scratch = vec![0.0; band.dim];
            for j in 0..band.dim {
                let mut y = vec![0.0; band.dim];
                y[j] = 1.0;
                band.rotation.forward(&mut y, &mut scratch);
                for (i, y) in y.into_iter().enumerate() {
                    matrix[(band.start + i) * d + band.start + j] = y;
                }
            }
        }
        write(out, len, &matrix)
    })
}

/// What the codes of a codec stand for, ascending, before the scale of a vector; `len` must be 2 to the power of its bits.
/// `TMQ_UNSUPPORTED` for a codec without such a table: trellis and affine codes, channels of two widths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_levels(codec: *const tmq_codec, out: *mut f32, len: usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let codec = &by_ref(codec, "codec")?.0;
        match codec.bands().first().map(|band| &band.grid) {
            Some(BandGrid::Scalar(grid)) if codec.spec().outliers == 0 => write(out, len, grid.levels()),
            _ => Err(Failure(TMQ_UNSUPPORTED, format!("{} has no table of levels", codec.spec()))),
        }
    })
}

/// The words of packed vectors by token and head, one bit stream a vector with the lowest bits first; `len` must be
/// tokens * heads * words of a vector.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codes_words(codes: *const tmq_codes, out: *mut u32, len: usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let words = by_ref(codes, "codes")?.0.words().permute(&[0, 2, 1, 3])?;
        write(out, len, &words.to_vec::<u32>()?)
    })
}

/// The scales of packed vectors by token and head, as floats; `len` must be tokens * heads * scales of a vector.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codes_scales(codes: *const tmq_codes, out: *mut f32, len: usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let scales = by_ref(codes, "codes")?.0.scale_values()?.permute(&[0, 2, 1, 3])?.to_f32()?;
        write(out, len, &scales)
    })
}
