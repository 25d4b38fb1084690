//! What attention reads: the parts of a cache in token order, and the rules that hide tokens from queries.
//!
//! One softmax in f32 runs over exact and packed parts together: a = softmax(scale q.k + mask), out = sum a v. The packed parts are
//! never decoded as a whole; the query enters the rotated domain once and the sum of values leaves it once.

use crate::codec::codes::{Buffer, Codes};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use std::ops::Range;

/// Keys or values of a run of tokens.
#[derive(Clone, Debug)]
pub enum Stored<T> {
    /// Exact rows [B, H, capacity, D], of which the first `len` are tokens.
    Exact {
        /// The buffer.
        rows: T,
        /// Tokens in it.
        len: usize,
    },
    /// Packed tokens.
    Packed(Codes<T>),
}

/// A run of tokens with consecutive positions.
#[derive(Clone, Debug)]
pub struct Segment<T> {
    /// Position of the first token.
    pub start: usize,
    /// Keys.
    pub keys: Stored<T>,
    /// Values.
    pub values: Stored<T>,
}

impl<T: Buffer> Stored<T> {
    /// Tokens held.
    pub fn len(&self) -> usize {
        match self {
            Stored::Exact { len, .. } => *len,
            Stored::Packed(codes) => codes.shape()[2],
        }
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens `from..to`.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is not inside, or cuts tokens that are encoded together.
    pub fn cut(&self, from: usize, to: usize) -> Result<Stored<T>> {
        if from > to || to > self.len() {
            return Err(Error::Range { start: from, end: to, len: self.len() });
        }
        Ok(match self {
            Stored::Exact { rows, .. } => Stored::Exact { rows: rows.slice(2, from, to)?, len: to - from },
            Stored::Packed(codes) => Stored::Packed(codes.slice(from, to)?),
        })
    }

    /// Channels of a token.
    pub fn dim(&self) -> usize {
        match self {
            Stored::Exact { rows, .. } => rows.shape()[3],
            Stored::Packed(codes) => codes.codec().spec().head_dim,
        }
    }

    /// Sequences and KV heads.
    pub fn heads(&self) -> [usize; 2] {
        match self {
            Stored::Exact { rows, .. } => [rows.shape()[0], rows.shape()[1]],
            Stored::Packed(codes) => [codes.shape()[0], codes.shape()[1]],
        }
    }
}

/// Which tokens a query sees, and how its scores are formed.
#[derive(Clone, Debug)]
pub struct Rules<T> {
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Whether a query sees only tokens up to its own position. The last query stands at the position of the last token.
    pub causal: bool,
    /// A query sees only this many newest tokens, its own included.
    pub sliding_window: Option<usize>,
    /// First tokens of every sequence that are padding and never seen; empty for none. This hides them here only: a cache that is told by
    /// [`crate::cache::LayerCache::with_left_padding`] keeps them out of its sinks and frames too, and needs no rule.
    pub left_padding: Vec<usize>,
    /// Over the tokens held, [B or 1, Hq or 1, L, T]: u8 (zero hides) or a float that is added (minus infinity, or the least finite
    /// value of its dtype, hides).
    pub mask: Option<T>,
    /// A logit for each query head that takes part in the softmax and has no value: f32, one for each of Hq heads.
    pub sink_logits: Option<T>,
    /// Scores become `cap tanh(score / cap)` before the mask.
    pub soft_cap: Option<f32>,
    /// Whether scores and sums are never formed in integers, where an engine has such a form; see `turbomoq::engine::cpu`.
    pub exact: bool,
}

impl<T> Rules<T> {
    /// Causal attention with a scale and nothing else.
    pub fn causal(scale: f32) -> Rules<T> {
        Rules {
            scale,
            causal: true,
            sliding_window: None,
            left_padding: vec![],
            mask: None,
            sink_logits: None,
            soft_cap: None,
            exact: false,
        }
    }
}

/// Sizes of an attention call, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Sequences.
    pub batch: usize,
    /// KV heads.
    pub heads: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// Query tokens.
    pub queries: usize,
    /// Tokens held.
    pub tokens: usize,
    /// Channels of keys and queries.
    pub key_dim: usize,
    /// Channels of values.
    pub value_dim: usize,
}

/// Checks a call: shapes of queries, segments and rules.
///
/// # Errors
/// [`Error::Shape`] names what does not fit: arrays of other sizes, no query at all, or more queries than positions held where the
/// rules ask for the position of a query (causal ones, and sliding windows).
pub fn check<T: Buffer>(segments: &[Segment<T>], queries: &[usize], rules: &Rules<T>) -> Result<Sizes> {
    let bad = |what, expected: String, got: Vec<usize>| Err(Error::Shape { what, expected, got });
    let Some(first) = segments.first() else { return bad("segments", "at least one".into(), vec![]) };
    segments.iter().flat_map(|s| [&s.keys, &s.values]).try_for_each(check_exact)?;
    let ([batch, heads], key_dim, value_dim) = (first.keys.heads(), first.keys.dim(), first.values.dim());
    let &[b, hq, l, d] = queries else { return bad("queries", "[B, Hq, L, D]".into(), queries.to_vec()) };
    let fits = b == batch && heads > 0 && hq > 0 && hq % heads == 0 && d == key_dim;
    if !fits || l == 0 || d == 0 {
        let expected = format!("[{batch}, a multiple of {heads}, L > 0, {key_dim} > 0]");
        return bad("queries", expected, queries.to_vec());
    }
    let mut end = 0;
    for s in segments {
        let fits = s.keys.heads() == [batch, heads] && s.values.heads() == [batch, heads];
        if !fits || s.keys.dim() != key_dim || s.values.dim() != value_dim || s.keys.len() != s.values.len() {
            let got = vec![s.keys.len(), s.keys.dim(), s.values.len(), s.values.dim()];
            return bad(
                "segment",
                format!("{batch} x {heads} heads, {key_dim} and {value_dim} channels"),
                got,
            );
        }
        let Some(last) = s.start.checked_add(s.keys.len()) else {
            return bad("segment", "positions that can be counted".into(), vec![s.start, s.keys.len()]);
        };
        end = if s.keys.is_empty() { end } else { last };
    }
    if (rules.causal || rules.sliding_window.is_some()) && l > end {
        let expected = format!("at most {end} query tokens: the last one stands at the last token held");
        return bad("queries", expected, queries.to_vec());
    }
    let tokens = segments.iter().map(|s| s.keys.len()).sum();
    if let Some(mask) = &rules.mask {
        let shape = mask.shape();
        let fits = matches!(shape[..], [mb, mh, ml, mt] if (mb == b || mb == 1) && (mh == hq || mh == 1) && ml == l && mt == tokens);
        if !fits {
            return bad("mask", format!("[{b} or 1, {hq} or 1, {l}, {tokens}]"), shape);
        }
    }
    if let Some(logits) = &rules.sink_logits
        && logits.shape() != [hq]
    {
        return bad("sink logits", format!("[{hq}]"), logits.shape());
    }
    if !rules.left_padding.is_empty() && rules.left_padding.len() != batch {
        return bad("left padding", format!("{batch} entries"), vec![rules.left_padding.len()]);
    }
    Ok(Sizes { batch, heads, group: hq / heads, queries: l, tokens, key_dim, value_dim })
}

/// Checks that exact rows hold the tokens they are said to.
fn check_exact<T: Buffer>(stored: &Stored<T>) -> Result<()> {
    let Stored::Exact { rows, len } = stored else { return Ok(()) };
    match rows.shape()[..] {
        [_, _, capacity, _] if *len <= capacity => Ok(()),
        _ => {
            let expected = format!("[B, H, {len} or more, D]");
            Err(Error::Shape { what: "exact rows", expected, got: rows.shape() })
        }
    }
}

/// Positions of all tokens, in order.
pub fn positions<T: Buffer>(segments: &[Segment<T>]) -> Vec<usize> {
    segments.iter().flat_map(|s| s.start..s.start + s.keys.len()).collect()
}

/// Positions that a query at position `query` of sequence `batch` sees, mask apart; empty if it ends before it starts.
pub fn span<T>(rules: &Rules<T>, batch: usize, query: usize) -> Range<usize> {
    let window = rules.sliding_window.map_or(0, |w| (query + 1).saturating_sub(w));
    let pad = rules.left_padding.get(batch).copied().unwrap_or(0);
    window.max(pad)..if rules.causal { query + 1 } else { usize::MAX }
}

/// Sums of attention as shares that add up to one, or to zero where no query sees a token.
pub fn shares(sums: &[f64]) -> Vec<f32> {
    let total: f64 = sums.iter().sum();
    sums.iter().map(|s| if total > 0.0 { (s / total) as f32 } else { 0.0 }).collect()
}

/// The tokens `from..to` of a segment, in the same buffers.
///
/// # Errors
/// [`Error::Range`] if they are not inside, or cut tokens that are encoded together.
pub fn cut<T: Buffer>(s: &Segment<T>, from: usize, to: usize) -> Result<Segment<T>> {
    Ok(Segment { start: s.start + from, keys: s.keys.cut(from, to)?, values: s.values.cut(from, to)? })
}

/// The mask as one additive f32 an entry, minus infinity where a token is hidden.
///
/// # Errors
/// [`Error::Dtype`] if the mask is neither u8 nor float.
pub fn additive(mask: &Tensor) -> Result<Vec<f32>> {
    let lowest = match mask {
        Tensor::U8(_) => {
            let bits = mask.to_vec::<u8>()?;
            return Ok(bits.into_iter().map(|b| if b == 0 { f32::NEG_INFINITY } else { 0.0 }).collect());
        }
        Tensor::F16(_) => half::f16::MIN.to_f32(),
        Tensor::BF16(_) => half::bf16::MIN.to_f32(),
        _ => f32::MIN,
    };
    Ok(mask.to_f32()?.into_iter().map(|x| if x <= lowest { f32::NEG_INFINITY } else { x }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_hide_what_they_say() {
        let sees = |rules: &Rules<Tensor>, batch, query, token| span(rules, batch, query).contains(&token);
        let mut rules = Rules::<Tensor>::causal(1.0);
        assert!(sees(&rules, 0, 5, 5) && !sees(&rules, 0, 5, 6));
        rules.sliding_window = Some(2);
        assert!(sees(&rules, 0, 5, 4) && !sees(&rules, 0, 5, 3));
        rules.left_padding = vec![0, 5];
        assert!(sees(&rules, 0, 5, 4) && !sees(&rules, 1, 5, 4));
    }

    #[test]
    fn masks_of_every_dtype_hide() {
        let u8s = Tensor::new(&[2], vec![0u8, 3]).unwrap();
        let f16s = Tensor::new(&[2], vec![half::f16::MIN, half::f16::ONE]).unwrap();
        let f32s = Tensor::new(&[2], vec![f32::NEG_INFINITY, 1.0]).unwrap();
        assert_eq!(additive(&u8s).unwrap(), [f32::NEG_INFINITY, 0.0]);
        assert_eq!(additive(&f16s).unwrap(), [f32::NEG_INFINITY, 1.0]);
        assert_eq!(additive(&f32s).unwrap(), [f32::NEG_INFINITY, 1.0]);
        assert!(additive(&Tensor::new(&[1], vec![1u32]).unwrap()).is_err());
    }
}
