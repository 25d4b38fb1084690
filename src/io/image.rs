//! A safetensors file before it is written: the header is made from what the tensors are, then their bytes go out one after the other.
//!
//! Nothing is gathered: a tensor that lies in one run of memory is written from where it is, and one may come into being only when its
//! turn comes. Deterministic: metadata sorted, tensors
//! by element size, so that all are aligned, then in the order given.

use super::raw::{RawTensor, byte_len, checksum, dtype_of};
use crate::error::{Error, Result};
use crate::io::files::{self, Outlives};
use crate::tensor::Tensor;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// One tensor of the file.
pub(crate) enum Piece<'a> {
    Tensor(&'a Tensor),
    Raw(&'a RawTensor),
    Made(RawTensor),
    /// What it will be when it is written, see [`Image::write_late`].
    Late {
        dtype: Dtype,
        shape: Vec<usize>,
    },
}

impl Piece<'_> {
    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Piece::Tensor(x) => dtype_of(x),
            Piece::Raw(x) => x.dtype,
            Piece::Made(x) => x.dtype,
            Piece::Late { dtype, .. } => *dtype,
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Piece::Tensor(x) => x.shape(),
            Piece::Raw(x) => &x.shape,
            Piece::Made(x) => &x.shape,
            Piece::Late { shape, .. } => shape,
        }
    }

    fn len(&self) -> usize {
        match self {
            Piece::Tensor(x) => x.nbytes(),
            Piece::Raw(x) => x.bytes.len(),
            Piece::Made(x) => x.bytes.len(),
            Piece::Late { dtype, shape } => byte_len(*dtype, shape).unwrap_or(0),
        }
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            Piece::Tensor(x) => x.row_major_bytes(),
            Piece::Raw(x) => Cow::Borrowed(&x.bytes),
            Piece::Made(x) => Cow::Borrowed(&x.bytes),
            Piece::Late { .. } => Cow::Borrowed(&[]),
        }
    }

    /// The promise of this tensor.
    pub(crate) fn late(&self) -> Piece<'static> {
        Piece::Late { dtype: self.dtype(), shape: self.shape().to_vec() }
    }

    /// The checksum of the tensor as it will be written.
    pub(crate) fn checksum(&self) -> u64 {
        checksum(self.dtype(), self.shape(), &self.bytes())
    }
}

#[derive(Serialize)]
struct NewHeader<'a> {
    __metadata__: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, TensorInfo>,
}

/// The bytes before the data section, and the tensors in the order of the data section.
pub(crate) struct Image<'a> {
    head: Vec<u8>,
    pieces: Vec<(String, Piece<'a>)>,
    len: u64,
}

impl<'a> Image<'a> {
    /// Lays out named tensors. Says what is wrong if the header cannot be written.
    pub(crate) fn new(
        metadata: &BTreeMap<String, String>,
        mut pieces: Vec<(String, Piece<'a>)>,
    ) -> Result<Image<'a>, String> {
        pieces.sort_by_key(|(_, piece)| std::cmp::Reverse(piece.dtype().bitsize())); // stable
        let mut tensors = BTreeMap::new();
        let mut at = 0;
        for (name, piece) in &pieces {
            let end = at + piece.len();
            let (dtype, shape) = (piece.dtype(), piece.shape().to_vec());
            tensors.insert(name.as_str(), TensorInfo { dtype, shape, data_offsets: (at, end) });
            at = end;
        }
        let header = NewHeader { __metadata__: metadata, tensors };
        let mut text = serde_json::to_vec(&header).map_err(|e| format!("header: {e}"))?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let head = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
        let len = (head.len() + at) as u64;
        Ok(Image { head, pieces, len })
    }

    /// Bytes of the file.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The file in memory, for images without late tensors.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.head.clone();
        self.pieces.iter().for_each(|(_, piece)| out.extend_from_slice(&piece.bytes()));
        out
    }

    /// Writes the file whole or not at all and gives its bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn write(&self, path: &Path) -> Result<u64, Error> {
        self.write_late(path, Outlives::Power, &mut |_, _| Ok(()))
    }

    /// As [`Image::write`]. `make` is asked for every late tensor by name, in the order of the file, and hands it over as it was
    /// promised.
    ///
    /// # Errors
    /// [`Error::Io`]; whatever `make` returns; [`Error::Format`] if a tensor is not what it was to be.
    pub(crate) fn write_late(
        &self,
        path: &Path,
        outlives: Outlives,
        make: &mut dyn FnMut(&str, &mut dyn FnMut(&Piece) -> Result<(), Error>) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        let mut failure = None;
        let written = files::replace_with(path, outlives, |out| {
            out.write_all(&self.head)?;
            for (name, piece) in &self.pieces {
                let Piece::Late { .. } = piece else {
                    out.write_all(&piece.bytes())?;
                    continue;
                };
                let mut there = false;
                let made = make(name, &mut |made| {
                    there = (made.dtype(), made.shape()) == (piece.dtype(), piece.shape());
                    out.write_all(&made.bytes()).map_err(|source| Error::Io { path: path.into(), source })
                });
                let promised =
                    || Error::Format { path: path.into(), detail: format!("tensor {name:?} changed") };
                if let Err(error) = made.and_then(|()| if there { Ok(()) } else { Err(promised()) }) {
                    failure = Some(error);
                    return Err(std::io::ErrorKind::Other.into());
                }
            }
            Ok(())
        });
        match failure {
            Some(error) => Err(error),
            None => written.map(|()| self.len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_covers_dtype_and_shape_and_is_the_known_one() {
        // The value that the authors of XXH3 give for no bytes at all.
        assert_eq!(xxhash_rust::xxh3::xxh3_64(b""), 0x2d06_8005_38d3_94c2);
        let known = xxhash_rust::xxh3::xxh3_64(b"U8[3]abc");
        assert_eq!(checksum(Dtype::U8, &[3], b"abc"), known);
        assert_ne!(checksum(Dtype::I8, &[3], b"abc"), known);
        assert_ne!(checksum(Dtype::U8, &[3, 1], b"abc"), known);
        assert_ne!(checksum(Dtype::U8, &[3], b"abd"), known);
    }
}
