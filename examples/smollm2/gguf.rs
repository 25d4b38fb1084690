//! A reader for GGUF files, version 3: metadata, and tensors as f32 whatever they are stored as (F32, F16, Q4_0, Q4_1, Q8_0).
//!
//! A file is a header, key-value pairs, tensor descriptions and, aligned, the data. Block formats hold 32 values:
//! Q4_0 f16 d and nibbles, d (q - 8); Q4_1 f16 d, f16 m and nibbles, d q + m; Q8_0 f16 d and signed bytes, d q.
//! Nibbles: the low halves of the 16 bytes are values 0..16, the high halves 16..32.

use crate::Result;
use half::f16;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A metadata value; all integers are widened.
#[derive(Clone, Debug)]
pub enum Value {
    Integer(i64),
    Float(f64),
    Bool,
    Text(String),
    List(Vec<Value>),
}

impl Value {
    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }

    /// The integer, if it is one.
    pub fn integer(&self) -> Option<i64> {
        if let Value::Integer(n) = self { Some(*n) } else { None }
    }
}

struct Entry {
    /// Row-major, so the reverse of the file's order.
    shape: Vec<usize>,
    kind: u32,
    offset: usize,
}

/// An open file.
pub struct Gguf {
    bytes: Vec<u8>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Entry>,
    data: usize,
}

/// Values in a block, and bytes of it, of a tensor type.
fn block(kind: u32) -> Option<(usize, usize)> {
    match kind {
        0 => Some((1, 4)),
        1 => Some((1, 2)),
        2 => Some((32, 18)),
        3 => Some((32, 20)),
        8 => Some((32, 34)),
        _ => None,
    }
}

impl Gguf {
    /// Reads a file and its descriptions.
    pub fn open(path: &Path) -> Result<Gguf> {
        let hint = "examples/smollm2/setup.sh fetches the model";
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}; {hint}", path.display()))?;
        Gguf::parse(bytes).map_err(|e| format!("{}: {e}", path.display()).into())
    }

    fn parse(bytes: Vec<u8>) -> Result<Gguf> {
        let mut at = Cursor { bytes: &bytes, at: 0 };
        let (magic, version) = (at.take(4)?, at.u32()?);
        if magic != b"GGUF" || version != 3 {
            return Err(format!("not a GGUF file of version 3 (magic {magic:?}, version {version})").into());
        }
        let (tensor_count, pair_count) = (at.u64()?, at.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..pair_count {
            let key = at.text()?;
            let kind = at.u32()?;
            metadata.insert(key, at.value(kind)?);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = at.text()?;
            let axes = at.u32()?.min(8);
            let mut shape = (0..axes).map(|_| at.u64()).collect::<Result<Vec<_>>>()?;
            shape.reverse();
            let (kind, offset) = (at.u32()?, at.u64()?);
            tensors.insert(name, Entry { shape, kind, offset });
        }
        let alignment = match metadata.get("general.alignment") {
            Some(Value::Integer(n)) if *n > 0 => *n as usize,
            _ => 32,
        };
        let data = at.at.next_multiple_of(alignment);
        Ok(Gguf { bytes, metadata, tensors, data })
    }

    fn get(&self, key: &str) -> Result<&Value> {
        Ok(self.metadata.get(key).ok_or_else(|| format!("no {key} in the GGUF's metadata"))?)
    }

    /// A metadata integer.
    pub fn integer(&self, key: &str) -> Result<usize> {
        match self.get(key)? {
            Value::Integer(n) if *n >= 0 => Ok(*n as usize),
            other => Err(format!("{key} is {other:?}, not a count").into()),
        }
    }

    /// A metadata number.
    pub fn float(&self, key: &str) -> Result<f32> {
        match self.get(key)? {
            Value::Float(x) => Ok(*x as f32),
            other => Err(format!("{key} is {other:?}, not a number").into()),
        }
    }

    /// A metadata text.
    pub fn text(&self, key: &str) -> Result<&str> {
        match self.get(key)? {
            Value::Text(text) => Ok(text),
            other => Err(format!("{key} is {other:?}, not a text").into()),
        }
    }

    /// A metadata list, each element read by `read`.
    pub fn list<'a, T>(&'a self, key: &str, read: fn(&'a Value) -> Option<T>) -> Result<Vec<T>> {
        let Value::List(list) = self.get(key)? else { return Err(format!("{key} is not a list").into()) };
        let list = list.iter().map(read).collect::<Option<Vec<T>>>();
        Ok(list.ok_or_else(|| format!("{key} has an element of another type"))?)
    }

    /// Shape and values of a tensor.
    pub fn tensor(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let entry = self.tensors.get(name).ok_or_else(|| format!("no tensor {name} in the GGUF"))?;
        let (values, size) =
            block(entry.kind).ok_or_else(|| format!("{name} has type {}, which is not read", entry.kind))?;
        let count = entry.shape.iter().product::<usize>();
        let start = self.data.saturating_add(entry.offset);
        let end = start.saturating_add((count / values).saturating_mul(size));
        let stored = self.bytes.get(start..end).filter(|_| count % values == 0);
        let stored = stored.ok_or_else(|| format!("{name}: {count} values do not fit the file"))?;
        let mut out = vec![0f32; count];
        let blocks = out.par_chunks_mut(values).zip(stored.par_chunks_exact(size)).with_min_len(1024);
        blocks.for_each(|(out, block)| dequantize(entry.kind, block, out));
        Ok((entry.shape.clone(), out))
    }
}

fn dequantize(kind: u32, block: &[u8], out: &mut [f32]) {
    let half = |i: usize| f16::from_le_bytes([block[i], block[i + 1]]).to_f32();
    let nibbles = |start: usize| {
        let low = block[start..start + 16].iter().map(|b| f32::from(b & 15));
        low.chain(block[start..start + 16].iter().map(|b| f32::from(b >> 4)))
    };
    match kind {
        0 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        1 => out[0] = half(0),
        2 => out.iter_mut().zip(nibbles(2)).for_each(|(x, q)| *x = half(0) * (q - 8.0)),
        3 => out.iter_mut().zip(nibbles(4)).for_each(|(x, q)| *x = half(0) * q + half(2)),
        8 => out.iter_mut().zip(&block[2..]).for_each(|(x, &q)| *x = half(0) * f32::from(q as i8)),
        _ => unreachable!("block() knows no type {kind}"),
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("ends in its description at byte {}", self.at))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into()?)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<usize> {
        Ok(usize::try_from(u64::from_le_bytes(self.array()?))?)
    }

    fn text(&mut self) -> Result<String> {
        let n = self.u64()?;
        Ok(String::from_utf8(self.take(n)?.to_vec())?)
    }

    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Integer(self.array::<1>()?[0].into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => {
                self.take(1)?;
                Value::Bool
            }
            8 => Value::Text(self.text()?),
            9 => {
                let (kind, n) = (self.u32()?, self.u64()?);
                if kind == 9 {
                    return Err("lists of lists are not read".into());
                }
                Value::List((0..n).map(|_| self.value(kind)).collect::<Result<_>>()?)
            }
            10 | 11 => Value::Integer(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("metadata type {kind} is not known").into()),
        })
    }
}
