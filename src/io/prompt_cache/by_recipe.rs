//! `RecipeCache` of mlx/python/turbomoq_mlx in a prompt-cache file: checked, carried between layouts, unpacked.
//!
//! Array `0` of the layer is a header of int32, the same in both layouts: version, ordinal of the layer, tokens, KV heads, channels of keys
//! and of values, their dtypes, and behind these the recipe's text, a number per byte. Arrays `1`, `2`, ... of u8 are the sequences,
//! each as [`crate::io::saved_cache`] has it; there are none before the first token.

use super::class::{PackedClass, Pair};
use crate::error::{Error, Result};
use crate::io::raw::RawTensor;
use crate::io::saved_cache::SavedCache;
use crate::recipe::Recipe;
use crate::tensor::{Dtype, Tensor};
use safetensors::Dtype as Stored;
use std::collections::BTreeMap;

const CLASS: &str = "RecipeCache";
/// What is known of the class.
pub(super) const BY_RECIPE: PackedClass = PackedClass { name: CLASS, check, tokens, describe, unpack };
/// The version of the arrangement that is read here.
const VERSION: i32 = 1;
/// Element types of rows, by their number in the header.
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

type Tensors = BTreeMap<String, RawTensor>;

/// A layer with its arrays.
struct View<'a> {
    recipe: Recipe,
    tokens: usize,
    dtypes: [Dtype; 2],
    sequences: Vec<&'a RawTensor>,
}

impl<'a> View<'a> {
    fn new(tensors: &'a Tensors) -> Result<View<'a>, String> {
        let header = tensors.get("0").ok_or("there is no header 0")?;
        if header.dtype != Stored::I32 || header.shape.len() != 1 {
            return Err(format!("a header of {} {:?}, expected numbers of I32", header.dtype, header.shape));
        }
        let numbers: Vec<i32> = bytemuck::pod_collect_to_vec(&header.bytes);
        let [VERSION, _, tokens, _, _, _, key, value, text @ ..] = &numbers[..] else {
            let start = &numbers[..numbers.len().min(8)];
            return Err(format!(
                "a header that begins with {start:?}, version {VERSION} has 8 numbers and a text"
            ));
        };
        let dtype = |n: &i32| usize::try_from(*n).ok().and_then(|n| DTYPES.get(n).copied());
        let (Ok(tokens), Some(key), Some(value)) = (usize::try_from(*tokens), dtype(key), dtype(value))
        else {
            return Err(format!("the header makes no sense: {:?}", &numbers[..8]));
        };
        let text = text.iter().map(|&byte| u8::try_from(byte).ok()).collect::<Option<Vec<u8>>>();
        let text = text.and_then(|text| String::from_utf8(text).ok()).ok_or("its recipe is no text")?;
        let recipe = text.parse::<Recipe>().map_err(|e| e.to_string())?;
        let sequences: Vec<_> = (1..).map_while(|i| tensors.get(&i.to_string())).collect();
        if sequences.len() + 1 != tensors.len() || sequences.is_empty() != (tokens == 0) {
            return Err(format!("{} arrays for {tokens} tokens", tensors.len()));
        }
        if let Some(x) = sequences.iter().find(|x| x.dtype != Stored::U8 || x.shape.len() != 1) {
            return Err(format!("a sequence of {} {:?}, expected bytes", x.dtype, x.shape));
        }
        Ok(View { recipe, tokens, dtypes: [key, value], sequences })
    }
}

/// What is wrong with the arrays, if anything is. The sequences themselves are checked when they are unpacked.
fn check(tensors: &Tensors) -> Result<(), String> {
    View::new(tensors).map(|_| ())
}

/// Tokens that are held, if the arrays are good.
fn tokens(tensors: &Tensors) -> Option<usize> {
    View::new(tensors).ok().map(|view| view.tokens)
}

/// Keys and values in words.
fn describe(tensors: &Tensors) -> Option<Pair<String>> {
    let view = View::new(tensors).ok()?;
    let text = format!("{} ({} tokens)", view.recipe, view.tokens);
    Some(Pair { keys: text.clone(), values: text })
}

/// The same tokens as a `KVCache`, packed ones as they decode.
fn unpack(tensors: &Tensors) -> Result<Option<Pair<Tensor>>> {
    let bad = |reason: String| Error::Unsupported { field: "layer", value: CLASS.into(), reason };
    let view = View::new(tensors).map_err(bad)?;
    let (mut keys, mut values) = (vec![], vec![]);
    for sequence in &view.sequences {
        let SavedCache::Held(cache) = SavedCache::from_bytes(&sequence.bytes)? else {
            return Err(bad("a sequence without tokens".into()));
        };
        if cache.offset() != view.tokens {
            return Err(bad(format!("a sequence of {} tokens, not {}", cache.offset(), view.tokens)));
        }
        let (k, v) = cache.fetch()?;
        keys.push(cast(&k, view.dtypes[0])?);
        values.push(cast(&v, view.dtypes[1])?);
    }
    if keys.is_empty() {
        return Ok(None);
    }
    Ok(Some(Pair { keys: Tensor::concat(0, &keys)?, values: Tensor::concat(0, &values)? }))
}

fn cast(x: &Tensor, dtype: Dtype) -> Result<Tensor> {
    Tensor::from_f32(dtype, x.shape(), x.to_f32()?)
}
