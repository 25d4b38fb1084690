//! How tokens leave a cache from its end, across the border between exact and packed.

use super::LayerCache;
use crate::attention::{Segment, Stored};
use crate::codes::Buffer;
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::Dtype;

impl<E: Engine + Clone> LayerCache<E> {
    /// Drops the last `n` tokens, exact or packed, and says how many were dropped (all, if there are fewer).
    ///
    /// # Errors
    /// The engine's own; the cache is then as it was.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = n.min(self.len());
        let mut left = n;
        let from_window = left.min(self.window_len);
        left -= from_window;
        let mut body = self.body.clone();
        let mut rescued = None;
        while left > 0 {
            let Some(last) = body.pop() else { break };
            let len = last.keys.len();
            if len <= left {
                left -= len;
                continue;
            }
            // Tokens that are encoded together with trimmed ones go back to the window as they decode.
            let (keep, tile) = (len - left, self.recipe.tile());
            let whole = keep / tile * tile;
            if whole < keep {
                let dense = self.dense(&cut(&last, whole - whole % tile, (whole + tile).min(len))?)?;
                rescued = Some((dense, keep - whole));
            }
            if whole > 0 {
                body.push(cut(&last, 0, whole)?);
            }
            left = 0;
        }
        self.body = body;
        self.window_len -= from_window;
        self.sinks_len -= left;
        self.offset -= n;
        if let Some(((keys, values), len)) = rescued {
            self.write_window(&keys.slice(2, 0, len)?, &values.slice(2, 0, len)?)?;
        }
        if self.body.is_empty() {
            // What comes next is a first block again.
            self.frames = None;
        }
        Ok(n)
    }

    fn dense(&self, s: &Segment<E::Tensor>) -> Result<(E::Tensor, E::Tensor)> {
        let one = |s: &Stored<E::Tensor>| match s {
            Stored::Exact { rows, len } => rows.slice(2, 0, *len),
            Stored::Packed(codes) => self.engine.decode(codes, Dtype::F32),
        };
        Ok((one(&s.keys)?, one(&s.values)?))
    }
}

/// The tokens `from..to` of a segment.
fn cut<T: Buffer>(s: &Segment<T>, from: usize, to: usize) -> Result<Segment<T>> {
    let side = |s: &Stored<T>| -> Result<Stored<T>> {
        Ok(match s {
            Stored::Exact { rows, .. } => Stored::Exact { rows: rows.slice(2, from, to)?, len: to - from },
            Stored::Packed(codes) => Stored::Packed(codes.slice(from, to)?),
        })
    };
    Ok(Segment { start: s.start + from, keys: side(&s.keys)?, values: side(&s.values)? })
}
