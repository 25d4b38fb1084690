//! Scores of heads, and bits for them, for C.

use super::codes::finite;
use super::rows::{tensor, tmq_rows};
use super::tmq_status::{self, TMQ_SHAPE};
use super::{Failure, guard, null, write};
use turbomoq::Side;
use turbomoq::allocation::calibration::score_heads;
use turbomoq::allocation::{HeadSide, MOST_BITS, allocate};

/// Heads of a whole model that bits are shared out to.
const MOST_HEADS: usize = 1 << 24;

/// Importance of the KV heads of a model, 0 to 1, from sample keys of every layer, of equal heads and channels: doubles by layer and
/// head. `sensitivity` has a number for each of them (how much the output changes by noise on the head) or is null.
/// Here `keys` holds `layers` structs, `sensitivity` and `out` layers * heads doubles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_score_heads(
    keys: *const tmq_rows,
    layers: usize,
    sensitivity: *const f64,
    out: *mut f64,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        if keys.is_null() || out.is_null() {
            return Err(null(if keys.is_null() { "keys" } else { "out" }));
        }
        let mut rows = vec![];
        for layer in 0..layers {
            // The first struct says how long each of them is for this caller.
            let x = tensor(keys.byte_add(layer * (*keys).struct_size), "keys")?;
            finite(&x, "keys")?;
            rows.push(x);
        }
        let heads = rows.first().map_or(0, |x| x.shape()[1]);
        let count = check(len, layers * heads)?;
        let sensitivity = match sensitivity.is_null() {
            true => None,
            false => Some(std::slice::from_raw_parts(sensitivity, count)),
        };
        let scores = score_heads(&rows.iter().collect::<Vec<_>>(), sensitivity)?;
        write(out, count, scores.scores())
    })
}

/// Bits of every head, 1 to 8, for an average of `average` bits, from scores by layer and head: more for the important ones.
/// Here `scores` and `out` hold layers * heads numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_allocate_bits(
    scores: *const f64,
    layers: usize,
    heads: usize,
    head_dim: usize,
    average: f64,
    out: *mut u8,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        if scores.is_null() || out.is_null() {
            return Err(null(if scores.is_null() { "scores" } else { "out" }));
        }
        let Some(count) = layers.checked_mul(heads).filter(|n| *n < MOST_HEADS) else {
            return Err(Failure(TMQ_SHAPE, format!("{layers} layers of {heads} heads are too many")));
        };
        check(len, count)?;
        let scores = std::slice::from_raw_parts(scores, count);
        let part = |(i, &s): (usize, &f64)| HeadSide::by_price(i / heads, i % heads, Side::Key, head_dim, s);
        let parts: Vec<HeadSide> = scores.iter().enumerate().map(part).collect();
        write(out, count, &allocate(&parts, average, 1, MOST_BITS as u8)?)
    })
}

fn check(len: usize, needed: usize) -> Result<usize, Failure> {
    match len == needed {
        true => Ok(len),
        false => Err(Failure(TMQ_SHAPE, format!("out has {len} places, the result has {needed}"))),
    }
}
