//! Scores of heads, and bits for them, for C.

use super::codes::finite;
use super::rows::{tensor, tmq_rows};
use super::tmq_status::{self, TMQ_SHAPE};
use super::{Failure, Outcome, guard, null};
use crate::policy::allocation::{MOST_BITS, Part, allocate};
use crate::policy::head_scores::{HeadScorer, spectral};
use crate::spec::Side;

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
        let (mut signals, mut first) = (vec![], None);
        for layer in 0..layers {
            let x = tensor(keys.add(layer), "keys")?;
            finite(&x, "keys")?;
            let (heads, tokens, dim) = (x.shape()[1], x.shape()[2], x.shape()[3]);
            if *first.get_or_insert((heads, dim)) != (heads, dim) {
                let text = format!("layer {layer} has {heads} heads of {dim} channels, the first {first:?}");
                return Err(Failure(TMQ_SHAPE, text));
            }
            let rows = x.to_f32()?;
            let of = |h: usize| spectral(&covariance(&rows[h * tokens * dim..][..tokens * dim], dim), dim);
            signals.extend((0..heads).map(of));
        }
        let (heads, dim) = first.unwrap_or((0, 0));
        let sensitivity = match sensitivity.is_null() {
            true => None,
            false => Some(std::slice::from_raw_parts(sensitivity, layers * heads)),
        };
        let scores = HeadScorer::new(layers, heads, dim).score(&signals, sensitivity)?;
        put(std::slice::from_raw_parts_mut(out, check(len, scores.scores().len())?), scores.scores())
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
        let count = layers.checked_mul(heads).filter(|n| *n < 1 << 24);
        let count = check(len, count.unwrap_or(usize::MAX))?;
        let scores = std::slice::from_raw_parts(scores, count);
        let part = |(i, &s): (usize, &f64)| Part::by_price(i / heads, i % heads, Side::Key, head_dim, s);
        let parts: Vec<Part> = scores.iter().enumerate().map(part).collect();
        put(std::slice::from_raw_parts_mut(out, count), &allocate(&parts, average, 1, MOST_BITS as u8)?)
    })
}

fn check(len: usize, needed: usize) -> Result<usize, Failure> {
    match len == needed {
        true => Ok(len),
        false => Err(Failure(TMQ_SHAPE, format!("out has {len} places, the result has {needed}"))),
    }
}

fn put<T: Copy>(out: &mut [T], values: &[T]) -> Outcome {
    out.copy_from_slice(values);
    Ok(())
}

/// Covariance of rows, `dim` x `dim`.
fn covariance(rows: &[f32], dim: usize) -> Vec<f64> {
    let n = (rows.len() / dim).max(1) as f64;
    let mut mean = vec![0f64; dim];
    rows.iter().enumerate().for_each(|(i, &x)| mean[i % dim] += f64::from(x) / n);
    let mut sum = vec![0f64; dim * dim];
    for row in rows.chunks_exact(dim) {
        let centred: Vec<f64> = row.iter().zip(&mean).map(|(&x, m)| f64::from(x) - m).collect();
        for (out, a) in sum.chunks_exact_mut(dim).zip(&centred) {
            out.iter_mut().zip(&centred).for_each(|(out, b)| *out += a * b / n);
        }
    }
    sum
}
