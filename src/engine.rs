//! What an engine does: the stages of a codec on whole arrays. It chooses nothing by itself.
//!
//! Two engines exist: [`crate::engine::cpu::Cpu`] on host arrays and, with the feature `mlx`, `Mlx` on lazy MLX arrays. Both follow
//! the row form of [`crate::codec`], and one conformance suite holds them to it.

pub mod attention;
pub mod cpu;
pub mod crossover;
#[cfg(feature = "mlx")]
pub mod mlx;

use crate::codec::Codec;
use crate::codec::codes::{Buffer, Codes, Frame};
use crate::engine::attention::{Rules, Segment};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Tensor};
use std::sync::Arc;

/// The stages on arrays: B sequences, H KV heads, Hq query heads (a multiple of H), T tokens, L query tokens, D channels.
///
/// Arrays that do not fit are [`Error::Shape`] or [`Error::Dtype`], which each method names. Besides, any call of a lazy engine may end in
/// `Error::Mlx`: MLX has no memory left, or an array that it depends on could not be evaluated.
pub trait Engine {
    /// The engine's array.
    type Tensor: Buffer;

    /// Name, for reports.
    fn name(&self) -> &'static str;

    /// Takes a host array to the engine.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the engine has no such dtype; `Error::Mlx` if MLX has no room.
    fn put(&self, tensor: &Tensor) -> Result<Self::Tensor>;

    /// Takes an array to the host, evaluating it if it is lazy.
    ///
    /// # Errors
    /// `Error::Mlx` if the evaluation of a lazy array fails.
    fn get(&self, tensor: &Self::Tensor) -> Result<Tensor>;

    /// A mask of booleans in the form that the engine's own attention takes as one: u8 on the CPU, bool in MLX, which adds other
    /// integers to the scores.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of entries is not the product of `shape`.
    fn mask(&self, shape: &[usize], seen: &[bool]) -> Result<Self::Tensor> {
        self.put(&Tensor::new(shape, seen.iter().map(|&s| u8::from(s)).collect())?)
    }

    /// The frame that `codec` needs, from a block of keys or values [B, H, n, D] and, for gains, queries [B, Hq, m, D].
    /// Without queries the gains assume that queries are isotropic.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit.
    fn frame(
        &self,
        codec: &Codec,
        centred: bool,
        block: &Self::Tensor,
        queries: Option<&Self::Tensor>,
    ) -> Result<Frame<Self::Tensor>>;

    /// Packs vectors [B, H, T, D]. They are in the basis of the model, as everywhere: a codec turns them itself, decoded vectors and
    /// sums come back turned back, and no call takes rotated rows.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if `x` or the frame does not fit the codec, [`Error::Range`] if T is no multiple of
    /// the codec's tile.
    fn encode(
        &self,
        codec: &Arc<Codec>,
        frame: Frame<Self::Tensor>,
        x: &Self::Tensor,
    ) -> Result<Codes<Self::Tensor>>;

    /// Unpacks to [B, H, T, D].
    ///
    /// # Errors
    /// `Error::Mlx` if an operation of a lazy engine fails.
    fn decode(&self, codes: &Codes<Self::Tensor>, dtype: Dtype) -> Result<Self::Tensor>;

    /// Inner products of queries [B, Hq, L, D] with packed keys: f32 [B, Hq, L, T], not scaled.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if the queries do not fit the codes.
    fn scores(&self, codes: &Codes<Self::Tensor>, queries: &Self::Tensor) -> Result<Self::Tensor>;

    /// Sums of packed values with weights f32 [B, Hq, L, T]: f32 [B, Hq, L, D].
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if the weights do not fit the codes.
    fn weighted_sum(&self, codes: &Codes<Self::Tensor>, weights: &Self::Tensor) -> Result<Self::Tensor>;

    /// Attention of queries [B, Hq, L, D] over parts of a cache: [B, Hq, L, Dv] in the dtype of the queries. A query that sees no
    /// token gives zeros.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit.
    fn attend(
        &self,
        segments: &[Segment<Self::Tensor>],
        queries: &Self::Tensor,
        rules: &Rules<Self::Tensor>,
    ) -> Result<Self::Tensor>;

    /// Share of the attention of queries [B, Hq, L, D] that each part receives, mean over sequences, query heads and query tokens.
    /// The shares add up to one, whatever a learned sink takes; they are zero if no query sees a token. Costs the scores of an
    /// [`Engine::attend`] of these queries, and a lazy engine evaluates one number per part.
    ///
    /// # Errors
    /// As [`Engine::attend`].
    fn masses(
        &self,
        segments: &[Segment<Self::Tensor>],
        queries: &Self::Tensor,
        rules: &Rules<Self::Tensor>,
    ) -> Result<Vec<f32>>;

    /// The float dtype of an array.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the elements are not floats.
    fn dtype(&self, tensor: &Self::Tensor) -> Result<Dtype>;

    /// An array of zeros.
    ///
    /// # Errors
    /// `Error::Mlx` if an operation of a lazy engine fails.
    fn zeros(&self, dtype: Dtype, shape: &[usize]) -> Result<Self::Tensor>;

    /// Writes rows [B, H, n, D] into a buffer [B, H, capacity, D] from row `start` on, in the buffer's dtype; in place where no one
    /// else holds the buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rows do not fit; the buffer is then as it was.
    fn write(&self, buffer: &mut Self::Tensor, start: usize, rows: &Self::Tensor) -> Result<()>;

    /// The same elements in a buffer of their own, so that a view does not keep a larger buffer alive.
    ///
    /// # Errors
    /// `Error::Mlx` if an operation of a lazy engine fails.
    fn compact(&self, tensor: &Self::Tensor) -> Result<Self::Tensor>;
}

/// Checks vectors [B, H, T, D] against a codec.
pub(crate) fn check_vectors(codec: &Codec, shape: &[usize]) -> Result<[usize; 4]> {
    let dim = codec.spec().head_dim;
    match *shape {
        [b, h, t, d] if d == dim => {
            if t % codec.spec().tile() != 0 {
                return Err(Error::Range {
                    start: 0,
                    end: t,
                    len: t / codec.spec().tile() * codec.spec().tile(),
                });
            }
            Ok([b, h, t, d])
        }
        _ => {
            Err(Error::Shape { what: "vectors", expected: format!("[B, H, T, {dim}]"), got: shape.to_vec() })
        }
    }
}

/// Checks queries [B, Hq, L, D] or weights [B, Hq, L, T] against codes; gives query heads and query tokens.
pub(crate) fn check_queries<T: Buffer>(
    codes: &Codes<T>,
    what: &'static str,
    shape: &[usize],
    last: usize,
) -> Result<(usize, usize)> {
    let [batch, heads, _] = codes.shape();
    match *shape {
        [b, hq, l, n] if b == batch && n == last && hq > 0 && heads > 0 && hq % heads == 0 && l > 0 => {
            Ok((hq, l))
        }
        _ => {
            let expected = format!("[{batch}, a multiple of {heads}, L > 0, {last}]");
            Err(Error::Shape { what, expected, got: shape.to_vec() })
        }
    }
}
