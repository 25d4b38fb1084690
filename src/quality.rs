//! What packing costs in accuracy: one row a layer and side, from the vectors before and after.
//!
//! Cosine and relative MSE are over all vectors of the packed tokens. Logit correlation is what attention sees: inner products
//! with queries, each query's products centred over the tokens (softmax does not see their mean), correlated before against after.

use crate::codec::codes::Buffer;
use crate::compressor::{CompressedSide, CompressionStats};
use crate::error::{Error, Result};
use crate::math::rng::Rng;
use crate::spec::Side;
use crate::tensor::Tensor;
use serde::Serialize;

/// Queries a KV head for the logit correlation, where none are given.
const QUERIES: usize = 16;

/// Accuracy of one side of one layer.
#[derive(Clone, Debug, Serialize)]
pub struct QualityRow {
    /// Place in the model.
    pub layer: String,
    /// Keys or values.
    pub side: Side,
    /// Mean cosine of a vector before and after.
    pub cosine: f64,
    /// Squared error over squared norm, all vectors together.
    pub relative_mse: f64,
    /// Correlation of centred inner products with queries.
    pub logit_correlation: f64,
}

/// Accuracy, size and time of a whole cache.
#[derive(Clone, Debug, Serialize)]
pub struct QualityReport {
    /// The recipe in its text form.
    pub recipe: String,
    /// One row a layer and side.
    pub layers: Vec<QualityRow>,
    /// Bytes of all buffers in memory.
    pub reported_bytes: usize,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the same keys and values in half precision.
    pub fp16_bytes: usize,
    /// `fp16_bytes / reported_bytes`.
    pub ratio: f64,
    /// Stored bits a key scalar.
    pub key_bits: f64,
    /// Stored bits per scalar of the values.
    pub value_bits: f64,
    /// Time to pack, in milliseconds.
    pub encode_ms: f64,
    /// Time to unpack, in milliseconds.
    pub decode_ms: f64,
}

impl QualityReport {
    /// A report without times and file.
    pub fn new(recipe: String, layers: Vec<QualityRow>, stats: CompressionStats) -> QualityReport {
        QualityReport {
            recipe,
            layers,
            reported_bytes: stats.bytes,
            file_bytes: 0,
            fp16_bytes: stats.fp16_bytes,
            ratio: stats.compression_ratio,
            key_bits: stats.avg_k_bits,
            value_bits: stats.avg_v_bits,
            encode_ms: 0.0,
            decode_ms: 0.0,
        }
    }
}

/// Compares the packed tokens of a side [B, H, T, D] before and after; where nothing is packed, all tokens.
///
/// `queries` [B, Hq, L, D] replace random ones for the logit correlation.
///
/// # Errors
/// [`Error::Shape`] or [`Error::Dtype`] if the tensors do not fit one another, [`Error::NonFinite`] names the first NaN or infinity.
pub fn compare<T: Buffer>(
    layer: String,
    side: Side,
    packed: &CompressedSide<T>,
    before: &Tensor,
    after: &Tensor,
    queries: Option<&Tensor>,
) -> Result<QualityRow> {
    let shape = packed.shape;
    for (what, x) in [("before", before), ("after", after)] {
        if x.shape() != shape {
            return Err(x.wrong_shape(what, format!("{shape:?}")));
        }
        finite(what, x)?;
    }
    if let Some(q) = queries {
        let [b, h, _, d] = shape;
        match *q.shape() {
            [qb, qh, n, qd] if qb == b && qh % h.max(1) == 0 && qh > 0 && n > 0 && qd == d => {}
            _ => return Err(q.wrong_shape("queries", format!("[{b}, a multiple of {h}, L > 0, {d}]"))),
        }
        finite("queries", q)?;
    }
    let [sinks, body, _] = packed.split();
    let range = if body == 0 { 0..packed.shape[2] } else { sinks..sinks + body };
    let rows = |x: &Tensor| x.slice(2, range.start, range.end)?.to_f32();
    let (a, b) = (rows(before)?, rows(after)?);
    let ([batch, heads, _, d], t) = (packed.shape, range.len());
    if a.is_empty() {
        return Ok(QualityRow { layer, side, cosine: 1.0, relative_mse: 0.0, logit_correlation: 1.0 });
    }
    let (mut cosine, mut error, mut size) = (0f64, 0f64, 0f64);
    for (a, b) in a.chunks_exact(d).zip(b.chunks_exact(d)) {
        let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
        cosine += if aa == 0.0 && bb == 0.0 { 1.0 } else { ab / (aa * bb).sqrt().max(f64::MIN_POSITIVE) };
        error += aa + bb - 2.0 * ab;
        size += aa;
    }
    let given = queries.map(Tensor::to_f32).transpose()?;
    let mut rng = Rng::new(7, 0);
    let mut sums = [0f64; 3];
    for head in 0..batch * heads {
        let (a, b) = (&a[head * t * d..][..t * d], &b[head * t * d..][..t * d]);
        let random: Vec<f32>;
        let q = match &given {
            Some(q) => &q[head * (q.len() / (batch * heads))..][..q.len() / (batch * heads)],
            None => {
                random = (0..QUERIES * d).map(|_| rng.normal() as f32).collect();
                &random
            }
        };
        for q in q.chunks_exact(d) {
            let logits = |x: &[f32]| -> Vec<f64> {
                let raw: Vec<f64> = x.chunks_exact(d).map(|row| dot(q, row)).collect();
                let mean = raw.iter().sum::<f64>() / raw.len().max(1) as f64;
                raw.iter().map(|l| l - mean).collect()
            };
            for (x, y) in logits(a).into_iter().zip(logits(b)) {
                sums[0] += x * x;
                sums[1] += y * y;
                sums[2] += x * y;
            }
        }
    }
    let vectors = (a.len() / d).max(1) as f64;
    let flat = sums[0] * sums[1] <= 0.0;
    Ok(QualityRow {
        layer,
        side,
        cosine: cosine / vectors,
        relative_mse: if size == 0.0 { 0.0 } else { (error / size).max(0.0) },
        logit_correlation: if flat { 1.0 } else { sums[2] / (sums[0] * sums[1]).sqrt() },
    })
}

fn finite(what: &str, x: &Tensor) -> Result<()> {
    match x.first_non_finite() {
        Some((index, value)) => Err(Error::NonFinite { what: what.into(), index, value }),
        None => Ok(()),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
