//! The mask for queries that are about to be appended, for callers that attend by themselves on what `update_and_fetch` gives.

use super::LayerCache;
use crate::attention::{Rules, positions, span};
use crate::engine::Engine;
use crate::error::Result;
use crate::tensor::Tensor;

/// What mlx-lm's `make_mask` answers.
#[derive(Clone, Debug)]
pub enum Mask<T> {
    /// Every query sees every token.
    None,
    /// A query sees the tokens up to its own, and nothing else is hidden.
    Causal,
    /// u8, zero hides: [1, 1, L, T], or [B, 1, L, T] with padding, over the tokens held and the L new ones.
    Array(T),
}

impl<E: Engine + Clone> LayerCache<E> {
    /// The mask of `n` tokens that will be appended next. `array` asks for an array even where a word would do; `window` and
    /// `left_padding` are those of [`Rules`]. Tokens that a policy drops at that append are not foreseen.
    ///
    /// # Errors
    /// The engine's own.
    pub fn make_mask(
        &self,
        n: usize,
        array: bool,
        window: Option<usize>,
        left_padding: &[usize],
    ) -> Result<Mask<E::Tensor>> {
        let rules = Rules::<E::Tensor> {
            sliding_window: window,
            left_padding: left_padding.to_vec(),
            ..Rules::causal(1.0)
        };
        let mut tokens = positions(&self.segments());
        tokens.extend(self.offset..self.offset + n);
        let rows = left_padding.len().max(1);
        let spans = (0..rows).flat_map(|b| (0..n).map(move |i| (b, i)));
        let spans: Vec<_> = spans.map(|(b, i)| span(&rules, b, self.offset + i)).collect();
        // Positions rise, so the first token tells whether anything before a query is hidden.
        let plain = spans.iter().all(|s| tokens.first().is_none_or(|first| s.start <= *first));
        if plain && !array {
            return Ok(if n <= 1 { Mask::None } else { Mask::Causal });
        }
        let bits = spans.iter().flat_map(|s| tokens.iter().map(|t| u8::from(s.contains(t)))).collect();
        Ok(Mask::Array(self.engine.put(&Tensor::new(&[rows, 1, n, tokens.len()], bits)?)?))
    }
}
