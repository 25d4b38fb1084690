//! The ring of a sliding-window cache: where each token lies, and the way back.
//!
//! mlx-lm keeps the first `keep` rows for ever and overwrites the rest in a circle. In token order the rows are
//! `[0, keep)`, `[idx, rows)`, `[keep, idx)`; if `idx == rows` the rows are in order as they lie.

use crate::error::Result;
use crate::tensor::Tensor;

/// mlx-lm keeps counters in arrays of 64-bit integers with a sign.
pub(crate) fn holdable(counter: &str, value: usize) -> Result<(), String> {
    match i64::try_from(value) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("{counter} = {value} is more than mlx-lm's integers hold")),
    }
}

/// State of a `RotatingKVCache` beside its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ring {
    /// Rows at the front that are never overwritten (attention sinks).
    pub keep: usize,
    /// Size of the window.
    pub max_size: usize,
    /// Tokens seen so far; the position of the next token.
    pub offset: usize,
    /// The row after the newest one.
    pub idx: usize,
}

impl Ring {
    /// What is wrong with this ring over `rows` stored rows, if anything is.
    pub(crate) fn check(&self, rows: usize) -> Result<(), String> {
        let Ring { keep, max_size, offset, idx } = *self;
        holdable("offset", offset)?;
        holdable("max_size", max_size)?;
        if max_size == 0 || keep > max_size {
            return Err(format!("keep = {keep} and max_size = {max_size} make no window"));
        }
        if idx > rows || (idx < rows && idx < keep) {
            return Err(format!("idx = {idx} is no place in a ring of {rows} rows that keeps {keep}"));
        }
        if rows > offset || (rows == 0 && offset > 0) {
            return Err(format!("{rows} rows after offset = {offset} tokens"));
        }
        Ok(())
    }

    /// Position in the sequence of each row of `rows`, oldest token first.
    pub fn positions(&self, rows: usize) -> Vec<usize> {
        let keep = self.keep.min(rows);
        (0..keep).chain(self.offset.saturating_sub(rows - keep)..self.offset).collect()
    }

    /// Rows as stored (axis 2) brought into token order.
    ///
    /// # Errors
    /// [`crate::Error::Range`] if `idx` or `keep` lies outside the rows.
    pub fn token_order(&self, stored: &Tensor) -> Result<Tensor> {
        self.swap(stored, self.idx)
    }

    /// The inverse of [`Ring::token_order`]: rows in token order put back where mlx-lm expects them.
    ///
    /// # Errors
    /// [`crate::Error::Range`] if `idx` or `keep` lies outside the rows.
    pub fn ring_order(&self, tokens: &Tensor) -> Result<Tensor> {
        let rows = tokens.shape().get(2).copied().unwrap_or(0);
        self.swap(tokens, (self.keep + rows).saturating_sub(self.idx))
    }

    /// Exchanges the parts `keep..cut` and `cut..rows`.
    fn swap(&self, x: &Tensor, cut: usize) -> Result<Tensor> {
        let rows = x.shape().get(2).copied().unwrap_or(0);
        if self.idx == rows {
            return Ok(x.clone());
        }
        let part = |start, end| x.slice(2, start, end);
        Tensor::concat(2, &[part(0, self.keep)?, part(cut, rows)?, part(self.keep, cut)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_order_and_back() {
        // Window 8 that keeps 2, tokens 0..20: rows 2.. hold 14..19 turned by some amount.
        for idx in 2..=8 {
            let ring = Ring { keep: 2, max_size: 8, offset: 20, idx };
            ring.check(8).unwrap();
            let mut stored = vec![0f32, 1.];
            stored.extend((0..6).map(|i| ((i + 8 - idx) % 6 + 14) as f32));
            let stored = Tensor::new(&[1, 1, 8, 1], stored).unwrap();
            let tokens = ring.token_order(&stored).unwrap();
            assert_eq!(tokens.to_f32().unwrap(), [0., 1., 14., 15., 16., 17., 18., 19.], "idx {idx}");
            assert_eq!(ring.ring_order(&tokens).unwrap(), stored);
            assert_eq!(ring.positions(8), [0, 1, 14, 15, 16, 17, 18, 19]);
        }
    }
}
