//! Codecs and packed vectors for C.

use super::rows::{by_token, tensor, tmq_rows};
use super::tmq_status::{self, TMQ_SHAPE, TMQ_UNSUPPORTED};
use super::{Failure, answer, by_mut, by_ref, free, give, guard, null, text, write};
use std::ffi::c_char;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Codes;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Error;
use turbomoq::Recipe;
use turbomoq::Side;
use turbomoq::TOKENS_PER_BLOCK;
use turbomoq::{Dtype, Tensor};

/// A codec with its tables.
pub struct tmq_codec(pub(super) Arc<Codec>);

/// Packed vectors of one layer and side, with their codec and tables.
pub struct tmq_codes(pub(super) Codes<Tensor>);

/// Sizes of a codec.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tmq_codec_info {
    /// `sizeof(tmq_codec_info)`, set by the caller.
    pub struct_size: usize,
    /// Channels of a vector.
    pub head_dim: usize,
    /// Bytes of a packed vector, scales included.
    pub row_bytes: usize,
    /// Vectors that are encoded together: tokens come in multiples of it.
    pub tile: usize,
    /// Bits of a code.
    pub bits: f32,
}

/// The keys of a recipe.
pub const TMQ_KEY: u32 = 0;
/// The values of a recipe.
pub const TMQ_VALUE: u32 = 1;

/// A codec from its text, for example `d128:b4:hadamard:beta`; `turbomoq recipes` shows more of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_new(spec: *const c_char, out: *mut *mut tmq_codec) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        give(out, || {
            Ok(tmq_codec(Arc::new(Codec::new(text(spec, "spec")?.parse::<turbomoq::CodecSpec>()?)?)))
        })
    })
}

/// The codec of one side of a layer by a recipe, for example `best@3`. `TMQ_UNSUPPORTED` if the recipe keeps the side exact.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_of_recipe(
    recipe: *const c_char,
    side: u32,
    layer: usize,
    head_dim: usize,
    out: *mut *mut tmq_codec,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        give(out, || {
            let recipe: Recipe = text(recipe, "recipe")?.parse()?;
            let side = match side {
                TMQ_KEY => Side::Key,
                TMQ_VALUE => Side::Value,
                other => return Err(Failure(TMQ_UNSUPPORTED, format!("side {other}, expected 0 or 1"))),
            };
            let exact = || Failure(TMQ_UNSUPPORTED, format!("the recipe keeps the {side}s exact"));
            Ok(tmq_codec(Arc::new(Codec::new(recipe.spec(side, layer, head_dim)?.ok_or_else(exact)?)?)))
        })
    })
}

/// Sizes of a codec; `info->struct_size` is set before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_get_info(
    codec: *const tmq_codec,
    info: *mut tmq_codec_info,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let codec = &by_ref(codec, "codec")?.0;
        answer(info, "info", |struct_size| tmq_codec_info {
            struct_size,
            head_dim: codec.spec().head_dim,
            row_bytes: codec.row_bytes(),
            tile: codec.spec().tile(),
            bits: codec.spec().nominal_bits(),
        })
    })
}

/// Frees a codec; codes that it made stay good. Null is nothing to free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codec_free(codec: *mut tmq_codec) {
    // SAFETY: as the caller vouches.
    unsafe { free(codec) }
}

/// Packs keys or values. With `centred` not zero their mean over the first 128 tokens is taken from them first, as recipes do with
/// keys; scores are then those of the centred keys plus that of the mean.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_encode(
    codec: *const tmq_codec,
    rows: *const tmq_rows,
    centred: i32,
    out: *mut *mut tmq_codes,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        give(out, || {
            let (codec, x) = (&by_ref(codec, "codec")?.0, tensor(rows, "rows")?);
            finite(&x, "rows")?;
            let first = x.slice(2, 0, x.shape()[2].min(TOKENS_PER_BLOCK))?;
            let frame = Cpu.frame(codec, centred != 0, &first, None)?;
            Ok(tmq_codes(Cpu.encode(codec, frame, &x)?))
        })
    })
}

pub(super) fn finite(x: &Tensor, what: &str) -> Result<(), Failure> {
    match x.first_non_finite() {
        Some((index, value)) => Err(Error::NonFinite { what: what.into(), index, value }.into()),
        None => Ok(()),
    }
}

/// Bytes of all buffers of packed vectors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codes_bytes(codes: *const tmq_codes, out: *mut usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        *by_mut(out, "out")? = by_ref(codes, "codes")?.0.nbytes();
        Ok(())
    })
}

/// Frees packed vectors. Null is nothing to free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_codes_free(codes: *mut tmq_codes) {
    // SAFETY: as the caller vouches.
    unsafe { free(codes) }
}

/// Unpacks to floats by token, head and channel; `len` must be tokens * heads * head_dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_decode(codes: *const tmq_codes, out: *mut f32, len: usize) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let dense = Cpu.decode(&by_ref(codes, "codes")?.0, Dtype::F32)?;
        write(out, len, &by_token(&dense)?)
    })
}

/// Inner products of queries with packed keys, not scaled: floats by query head, query token and key token.
/// Query heads are a multiple of the key heads, which they share in groups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_scores(
    codes: *const tmq_codes,
    queries: *const tmq_rows,
    out: *mut f32,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let scores = Cpu.scores(&by_ref(codes, "codes")?.0, &tensor(queries, "queries")?)?;
        write(out, len, &scores.to_f32()?)
    })
}

/// Sums of packed values with weights by query head, query token and value token: floats by query token, query head and channel.
/// Here `weights` holds query_heads * query_tokens * tokens floats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tmq_weighted_sum(
    codes: *const tmq_codes,
    weights: *const f32,
    query_heads: usize,
    query_tokens: usize,
    out: *mut f32,
    len: usize,
) -> tmq_status {
    // SAFETY: as the caller vouches.
    guard(|| unsafe {
        let codes = &by_ref(codes, "codes")?.0;
        let tokens = codes.shape()[2];
        let count = query_heads.checked_mul(query_tokens).and_then(|n| n.checked_mul(tokens));
        let Some(count) = count.filter(|n| *n < 1 << 40) else {
            return Err(Failure(
                TMQ_SHAPE,
                format!("{query_heads} query heads and {query_tokens} tokens are too many"),
            ));
        };
        if weights.is_null() {
            return Err(null("weights"));
        }
        let weights = std::slice::from_raw_parts(weights, count).to_vec();
        let weights = Tensor::new(&[1, query_heads, query_tokens, tokens], weights)?;
        write(out, len, &by_token(&Cpu.weighted_sum(codes, &weights)?)?)
    })
}
