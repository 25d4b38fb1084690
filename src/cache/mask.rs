//! The mask for queries that are about to be appended, for callers that attend by themselves on what `update_and_fetch` gives.

use super::LayerCache;
use crate::attention::{Rules, positions, span};
use crate::engine::Engine;
use crate::error::{Error, Result};

/// What mlx-lm's `make_mask` answers.
#[derive(Clone, Debug)]
pub enum Mask<T> {
    /// Every query sees every token.
    None,
    /// A query sees the tokens up to its own, and nothing else is hidden.
    Causal,
    /// Booleans (on the CPU engine u8), false hides: [1, 1, L, T], or [B, 1, L, T] with padding, over the positions held and the L new
    /// ones.
    Array(T),
}

impl<E: Engine + Clone> LayerCache<E> {
    /// The mask of `n` tokens that will be appended next. `array` asks for an array even where a word would do; `window` and
    /// `left_padding` are those of [`Rules`], and the padding of the cache is hidden too. Tokens that a policy drops at that append are
    /// not foreseen.
    ///
    /// # Errors
    /// [`Error::Shape`] if `left_padding` is for another number of sequences than the cache's own; the engine's own.
    pub fn make_mask(
        &self,
        n: usize,
        array: bool,
        window: Option<usize>,
        left_padding: &[usize],
    ) -> Result<Mask<E::Tensor>> {
        let own = self.left_padding();
        if !own.is_empty() && !left_padding.is_empty() && own.len() != left_padding.len() {
            let (expected, got) = (format!("{} entries", own.len()), vec![left_padding.len()]);
            return Err(Error::Shape { what: "left padding", expected, got });
        }
        let rows = own.len().max(left_padding.len()).max(1);
        let padding =
            |b: usize| [own, left_padding].map(|p| p.get(b).copied().unwrap_or(0)).into_iter().max();
        let rules = Rules::<E::Tensor> {
            sliding_window: window,
            left_padding: (0..rows).filter_map(padding).collect(),
            ..Rules::causal(1.0)
        };
        let offset = self.offset();
        let mut columns = if own.is_empty() { positions(&self.segments()) } else { self.positions() };
        columns.extend(offset..offset + n);
        let spans = (0..rows).flat_map(|b| (0..n).map(move |i| (b, i)));
        let spans: Vec<_> = spans.map(|(b, i)| span(&rules, b, offset + i)).collect();
        // Positions rise, so the first token tells whether anything before a query is hidden.
        let plain = spans.iter().all(|s| columns.first().is_none_or(|first| s.start <= *first));
        if plain && !array {
            return Ok(if n <= 1 { Mask::None } else { Mask::Causal });
        }
        let bits: Vec<bool> = spans.iter().flat_map(|s| columns.iter().map(|t| s.contains(t))).collect();
        Ok(Mask::Array(self.engine().mask(&[rows, 1, n, columns.len()], &bits)?))
    }
}
