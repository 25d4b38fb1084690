//! Segments as storage: joined with their neighbours, copied into buffers of their own, counted in bytes.

use super::Exact;
use crate::codec::codes::{Buffer, Codes};
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored};
use crate::error::{Error, Result};

/// Tokens up to which neighbouring packed blocks of one codec are joined into one segment. A join copies one side: this bounds what is
/// held twice for a moment, 3 % of a cache of 32K tokens.
const SEGMENT: usize = 2048;

/// Writes rows into an exact buffer that has room for them, from row `start` on.
pub(super) fn write<E: Engine>(
    engine: &E,
    exact: Option<&mut Exact<E::Tensor>>,
    start: usize,
    keys: &E::Tensor,
    values: &E::Tensor,
) -> Result<()> {
    if let Some(exact) = exact.filter(|_| keys.shape()[2] > 0) {
        engine.write(&mut exact.keys, start, keys)?;
        engine.write(&mut exact.values, start, values)?;
    }
    Ok(())
}

/// Whether two neighbours can be one segment: codes of one codec or exact rows on both sides, and not too long.
pub(super) fn joinable<T: Buffer>(a: &Segment<T>, b: &Segment<T>) -> bool {
    let alike = |a: &Stored<T>, b: &Stored<T>| match (a, b) {
        (Stored::Packed(a), Stored::Packed(b)) => a.codec().same(b.codec()),
        (Stored::Exact { .. }, Stored::Exact { .. }) => true,
        _ => false,
    };
    a.keys.len() + b.keys.len() <= SEGMENT
        && a.start + a.keys.len() == b.start
        && alike(&a.keys, &b.keys)
        && alike(&a.values, &b.values)
}

/// One side of two neighbours that are alike.
pub(super) fn joined<T: Buffer>(a: &Stored<T>, b: &Stored<T>) -> Result<Stored<T>> {
    match (a, b) {
        (Stored::Packed(a), Stored::Packed(b)) => Codes::concat(&[a.clone(), b.clone()]).map(Stored::Packed),
        (Stored::Exact { rows: a, len: n }, Stored::Exact { rows: b, len: m }) => {
            let rows = T::concat(2, &[a.slice(2, 0, *n)?, b.slice(2, 0, *m)?])?;
            Ok(Stored::Exact { rows, len: n + m })
        }
        _ => Err(Error::Unsupported {
            field: "segment",
            value: "codes beside exact rows".into(),
            reason: "sides have to be alike".into(),
        }),
    }
}

/// One segment from two neighbours, if they can be one.
pub(super) fn join<T: Buffer>(a: &Segment<T>, b: &Segment<T>) -> Option<Result<Segment<T>>> {
    let join = || {
        Ok(Segment { start: a.start, keys: joined(&a.keys, &b.keys)?, values: joined(&a.values, &b.values)? })
    };
    joinable(a, b).then(join)
}

/// The same tokens in buffers of their own, so that a view does not keep a larger buffer alive.
pub(super) fn compacted<E: Engine>(engine: &E, s: &Segment<E::Tensor>) -> Result<Segment<E::Tensor>> {
    let own = |side: &Stored<E::Tensor>| -> Result<Stored<E::Tensor>> {
        Ok(match side {
            Stored::Exact { rows, len } => Stored::Exact { rows: engine.compact(rows)?, len: *len },
            Stored::Packed(codes) => {
                let (words, scales) = (engine.compact(codes.words())?, engine.compact(codes.scales())?);
                Stored::Packed(Codes::new(codes.codec().clone(), codes.frame().clone(), words, scales)?)
            }
        })
    };
    Ok(Segment { start: s.start, keys: own(&s.keys)?, values: own(&s.values)? })
}

pub(super) fn bytes_of<T: Buffer>(side: &Stored<T>) -> usize {
    match side {
        Stored::Exact { rows, .. } => rows.nbytes(),
        Stored::Packed(codes) => codes.words().nbytes() + codes.scales().nbytes(),
    }
}
