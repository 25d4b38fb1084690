//! `TurboMoqCache` of mlx/python/turbomoq_mlx in a prompt-cache file: checked, carried between layouts, unpacked.
//!
//! Keys are the arrays `0.*` of the layer and values `1.*`, the same in both layouts. The first array of a side is a header of int32,
//! [`SideHeader`]; the arrays behind it are there if the header says that they hold tokens: exact sinks [B, H, S, D], words [B, H, T, W] and
//! scales [B, H, T] of packed tokens, the centre [B, H, 1, D] of packed keys, the exact window [B, H, L, D].

use super::affine::BITS;
use super::class::{PackedClass, Pair};
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::compressor::{CompressedSide, Compressor};
use crate::error::{Error, Result};
use crate::io::raw::{RawTensor, tensor_of};
use crate::recipe::Recipe;
use crate::spec::Side;
use crate::tensor::Tensor;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

const CLASS: &str = "TurboMoqCache";
/// What is known of the class.
pub(super) const TURBOMOQ: PackedClass = PackedClass { name: CLASS, check, tokens, describe, unpack };
/// The version of the arrangement that is read here.
const VERSION: usize = 2;
/// Element types of exact rows, by their number in the header.
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

type Tensors = BTreeMap<String, RawTensor>;

/// The numbers of a side. Those of keys and values agree in all but `bits`, `head_dim` and `dtype`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SideHeader {
    layer: usize,
    sinks: usize,
    window: usize,
    exact_call: usize,
    bits: usize,
    head_dim: usize,
    dtype: usize,
    /// Sinks, packed tokens and tokens of the window that are held.
    held: [usize; 3],
}

/// A side with its arrays.
struct View<'a> {
    header: SideHeader,
    sinks: Option<&'a RawTensor>,
    words: Option<&'a RawTensor>,
    scales: Option<&'a RawTensor>,
    centre: Option<&'a RawTensor>,
    window: Option<&'a RawTensor>,
}

impl SideHeader {
    fn read(x: &RawTensor) -> Result<SideHeader, String> {
        if x.dtype != Dtype::I32 || x.shape.len() != 1 {
            return Err(format!("a header of {} {:?}, expected numbers of I32", x.dtype, x.shape));
        }
        let numbers: Vec<i32> = bytemuck::pod_collect_to_vec(&x.bytes);
        let numbers: Option<Vec<usize>> = numbers.iter().map(|&n| usize::try_from(n).ok()).collect();
        let numbers = numbers.ok_or("a header with a negative number")?;
        match numbers[..] {
            [VERSION, layer, sinks, window, exact_call, bits, head_dim, dtype, a, b, c] => {
                Ok(SideHeader { layer, sinks, window, exact_call, bits, head_dim, dtype, held: [a, b, c] })
            }
            [VERSION, ..] => Err(format!("a header of {} numbers, expected 11", numbers.len())),
            [other, ..] => Err(format!("a {CLASS} of version {other}, this program reads {VERSION}")),
            [] => Err("an empty header".into()),
        }
    }

    fn check(&self) -> Result<(), String> {
        let known = BITS.contains(&self.bits) && self.dtype < DTYPES.len() && self.exact_call <= 1;
        if !known || self.held[0] > self.sinks || (self.head_dim == 0 && self.tokens() > 0) {
            return Err(format!("the header makes no sense: {self:?}"));
        }
        Ok(())
    }

    fn tokens(&self) -> usize {
        self.held.iter().sum()
    }

    fn common(&self) -> SideHeader {
        SideHeader { bits: 0, head_dim: 0, dtype: 0, ..*self }
    }

    /// Words of a vector, whose channels are padded to a multiple of 32.
    fn words(&self) -> usize {
        self.head_dim.div_ceil(32) * self.bits
    }

    /// The recipe of which this is one side; Python's `codec.recipe` writes the same.
    fn recipe(&self, side: Side) -> Result<Recipe> {
        let [key, value] = match side {
            Side::Key => [self.bits, 4],
            Side::Value => [4, self.bits],
        };
        let sides = format!(
            "key=d128:b{key}:hadamard:uniform:matched:f16,value=d128:b{value}:hadamard:uniform:least-squares:f16"
        );
        format!("{sides},centred,sinks=0,window=0").parse()
    }
}

impl<'a> View<'a> {
    fn new(tensors: &'a Tensors, side: Side) -> Result<View<'a>, String> {
        let at = match side {
            Side::Key => 0,
            Side::Value => 1,
        };
        let mut arrays = (0..).map_while(|i| tensors.get(&format!("{at}.{i}")));
        let header = arrays.next().ok_or_else(|| {
            format!("no header {at}.0: a {CLASS} of version 1, or none; this program reads version {VERSION}")
        })?;
        let header = SideHeader::read(header)?;
        header.check()?;
        let [sinks, packed, window] = header.held;
        let mut missing = None;
        let mut take = |name, held: usize, shape: &[usize], dtype| {
            if held == 0 {
                return Ok(None);
            }
            let Some(x) = arrays.next() else {
                missing = Some(name);
                return Ok(None);
            };
            if x.dtype != dtype || x.shape.len() != 2 + shape.len() || x.shape[2..] != *shape {
                return Err(format!(
                    "{name} of {} {:?}, expected {dtype} [B, H] + {shape:?}",
                    x.dtype, x.shape
                ));
            }
            Ok(Some(x))
        };
        let (rows, dim) = (DTYPES[header.dtype], header.head_dim);
        let view = View {
            header,
            sinks: take("sinks", sinks, &[sinks, dim], rows)?,
            words: take("words", packed, &[packed, header.words()], Dtype::U32)?,
            scales: take("scales", packed, &[packed], Dtype::F16)?,
            centre: take("the centre", if at == 0 { packed } else { 0 }, &[1, dim], Dtype::F32)?,
            window: take("the window", window, &[window, dim], rows)?,
        };
        match (missing, arrays.next()) {
            (Some(name), _) => Err(format!("{name} missing")),
            (None, Some(_)) => Err("an array more than the header has room for".into()),
            (None, None) => Ok(view),
        }
    }

    fn arrays(&self) -> impl Iterator<Item = &'a RawTensor> {
        [self.sinks, self.words, self.scales, self.centre, self.window].into_iter().flatten()
    }

    /// Sequences and heads.
    fn lead(&self) -> [usize; 2] {
        self.arrays().next().map_or([0, 0], |x| [x.shape[0], x.shape[1]])
    }

    fn unpack(&self, side: Side) -> Result<Tensor> {
        let SideHeader { layer, head_dim, held: [_, packed, _], .. } = self.header;
        let recipe = self.header.recipe(side)?;
        let spec = recipe.spec(side, layer, head_dim)?;
        let [b, h] = self.lead();
        let body = match (spec, self.words, self.scales) {
            (Some(spec), Some(words), Some(scales)) => {
                let codec = Arc::new(Codec::new(spec)?);
                let words = tensor(words)?.slice(3, 0, codec.row_words().min(self.header.words()))?;
                let scales = tensor(scales)?.to_vec::<half::f16>()?;
                let scales = Tensor::new(&[b, h, packed, 1], scales)?;
                let centre = self.centre.map(tensor).transpose()?;
                let centre =
                    centre.map(|c| Tensor::new(&[b, h, head_dim], c.to_vec::<f32>()?)).transpose()?;
                Some(Codes::new(codec, Frame { centre, ..Frame::default() }, words, scales)?)
            }
            _ => None,
        };
        let dtype = match DTYPES[self.header.dtype] {
            Dtype::F16 => crate::tensor::Dtype::F16,
            Dtype::BF16 => crate::tensor::Dtype::BF16,
            _ => crate::tensor::Dtype::F32,
        };
        let head = self.sinks.map(tensor).transpose()?;
        let tail = self.window.map(tensor).transpose()?;
        let shape = [b, h, self.header.tokens(), head_dim];
        Compressor::new(recipe).decompress_side(&CompressedSide { head, body, tail, shape, dtype })
    }

    fn describe(&self) -> String {
        let SideHeader { bits, head_dim, held: [sinks, packed, window], .. } = self.header;
        format!("{bits} bits, {head_dim} channels ({sinks} + {packed} + {window} tokens)")
    }
}

fn sides(tensors: &Tensors) -> Result<[View<'_>; 2], String> {
    let of = |side, name| View::new(tensors, side).map_err(|e| format!("{name}: {e}"));
    let [keys, values] = [of(Side::Key, "keys")?, of(Side::Value, "values")?];
    if keys.header.common() != values.header.common() {
        return Err(format!("keys {:?} and values {:?} do not agree", keys.header, values.header));
    }
    let lead = keys.lead();
    if let Some(x) = keys.arrays().chain(values.arrays()).find(|x| x.shape[..2] != lead) {
        return Err(format!("arrays of {lead:?} and of {:?} sequences and heads", &x.shape[..2]));
    }
    if tensors.len() != 2 + keys.arrays().count() + values.arrays().count() {
        return Err("an array that belongs to neither keys nor values".into());
    }
    Ok([keys, values])
}

/// What is wrong with the arrays, if anything is.
fn check(tensors: &Tensors) -> Result<(), String> {
    sides(tensors).map(|_| ())
}

/// Tokens that are held, if the arrays are good.
fn tokens(tensors: &Tensors) -> Option<usize> {
    sides(tensors).ok().map(|[keys, _]| keys.header.tokens())
}

/// Keys and values in words.
fn describe(tensors: &Tensors) -> Option<Pair<String>> {
    sides(tensors).ok().map(|[keys, values]| Pair { keys: keys.describe(), values: values.describe() })
}

/// The same tokens as a `KVCache`, packed ones as they decode.
fn unpack(tensors: &Tensors) -> Result<Option<Pair<Tensor>>> {
    let bad = |reason: String| Error::Unsupported { field: "layer", value: CLASS.into(), reason };
    let [keys, values] = sides(tensors).map_err(bad)?;
    let kv = match keys.header.tokens() {
        0 => None,
        _ => Some(Pair { keys: keys.unpack(Side::Key)?, values: values.unpack(Side::Value)? }),
    };
    Ok(kv)
}

fn tensor(x: &RawTensor) -> Result<Tensor> {
    tensor_of(x.dtype, &x.shape, &x.bytes)
}
