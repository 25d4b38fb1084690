//! The safetensors container: a checked header over one open file, tensors read one by one.
//!
//! Every number of the header is checked against the length of the file before anything is allocated, so a
//! tensor costs exactly its bytes and a hostile file costs at most its own length. Own code instead of
//! `safetensors::SafeTensors`, which accepts duplicate keys, keeps tensor names out of most of its errors and
//! writes metadata in hash order. Bytes are little-endian, as on every machine MLX runs on.

use super::raw::{RawTensor, byte_len, checksum};
use crate::error::{Error, Result};
use crate::tensor::{Element, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Most bytes of a header: those that the safetensors crate takes.
const HEADER: u64 = 100_000_000;

/// So many elements of zero, or an error where there is no memory for them.
fn zeroed<T: bytemuck::Zeroable + Clone>(count: usize) -> std::io::Result<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(count).map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
    data.resize(count, T::zeroed());
    Ok(data)
}

/// Opens a regular file. A FIFO in its place is refused and not waited for.
fn open_regular(path: &Path) -> std::io::Result<(fs::File, u64)> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, nix::libc::O_NONBLOCK);
    let file = options.open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((file, found.len()))
}

/// One open file with a header that was checked.
pub(crate) struct Container {
    path: PathBuf,
    file: fs::File,
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
    /// The `__metadata__` of the header.
    pub(crate) metadata: BTreeMap<String, String>,
    /// What the checksums of tensors must be, by name, if they are held to any.
    checksums: Option<BTreeMap<String, u64>>,
    /// Names of the tensors that were read.
    read: RefCell<BTreeSet<String>>,
}

impl Container {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: &Path) -> Result<Container> {
        let io = |source| Error::Io { path: path.into(), source };
        let bad = |detail: String| Error::Format { path: path.into(), detail };
        let (mut file, len) = open_regular(path).map_err(io)?;
        if len < 8 {
            return Err(bad(format!("{len} bytes, a safetensors file has at least 8")));
        }
        let mut word = [0; 8];
        file.read_exact(&mut word).map_err(io)?;
        let header_len = u64::from_le_bytes(word);
        let most = HEADER.min(len - 8);
        if header_len < 2 || header_len > most {
            return Err(bad(format!("header length {header_len} is not in 2..={most}")));
        }
        let mut text = zeroed(header_len as usize).map_err(io)?;
        file.read_exact(&mut text).map_err(io)?;
        let text = std::str::from_utf8(&text).map_err(|e| bad(format!("header: {e}")))?;
        let header: FileHeader = serde_json::from_str(text).map_err(|e| bad(format!("header: {e}")))?;
        check_ranges(&header.tensors, len - 8 - header_len).map_err(bad)?;
        let FileHeader { metadata, tensors } = header;
        let data_start = 8 + header_len;
        Ok(Container {
            path: path.into(),
            file,
            data_start,
            tensors,
            metadata,
            checksums: None,
            read: RefCell::default(),
        })
    }

    /// From now on every tensor that is read must have its checksum, see [`super::raw::checksum`].
    ///
    /// # Errors
    /// [`Error::Format`] unless there is one for each tensor of the file and none for others.
    pub(crate) fn hold_to(&mut self, checksums: BTreeMap<String, u64>) -> Result<()> {
        let alone = |name: &&String| !(checksums.contains_key(*name) && self.tensors.contains_key(*name));
        if let Some(name) = checksums.keys().chain(self.tensors.keys()).find(alone) {
            return Err(self.bad(format!("tensor {name:?} has no checksum, or a checksum has no tensor")));
        }
        self.checksums = Some(checksums);
        Ok(())
    }

    /// Names of the tensors, sorted as strings.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The first tensor that was never read.
    pub(crate) fn unread(&self) -> Option<&str> {
        let read = self.read.borrow();
        self.names().find(|name| !read.contains(*name))
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// An error about this file.
    pub(crate) fn bad(&self, detail: impl Into<String>) -> Error {
        Error::Format { path: self.path.clone(), detail: detail.into() }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Dtype and shape of a tensor.
    pub(crate) fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| self.bad(format!("tensor {name:?} is missing")))
    }

    fn zeroed<T: bytemuck::Zeroable + Clone>(&self, name: &str, count: usize) -> Result<Vec<T>> {
        zeroed(count).map_err(|source| Error::Io {
            path: self.path.clone(),
            source: std::io::Error::new(
                source.kind(),
                format!("tensor {name:?}: no memory for {count} elements"),
            ),
        })
    }

    fn fill(&self, name: &str, info: &TensorInfo, bytes: &mut [u8]) -> Result<()> {
        let at = self.data_start + info.data_offsets.0 as u64;
        let mut file = &self.file;
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes)).map_err(|source| Error::Io {
            path: self.path.clone(),
            source: std::io::Error::new(source.kind(), format!("tensor {name:?}: {source}")),
        })?;
        self.read.borrow_mut().insert(name.to_string());
        let Some(checksums) = &self.checksums else { return Ok(()) };
        let (want, got) = (checksums.get(name), checksum(info.dtype, &info.shape, bytes));
        if want == Some(&got) {
            return Ok(());
        }
        Err(self
            .bad(format!("tensor {name:?} is damaged: its checksum is {got:016x}, not that of the manifest")))
    }

    /// A tensor as raw bytes.
    pub(crate) fn raw(&self, name: &str) -> Result<RawTensor> {
        let info = self.info(name)?;
        let mut bytes = self.zeroed(name, info.data_offsets.1 - info.data_offsets.0)?;
        self.fill(name, info, &mut bytes)?;
        Ok(RawTensor { dtype: info.dtype, shape: info.shape.clone(), bytes })
    }

    fn typed<T: Element>(&self, name: &str, info: &TensorInfo) -> Result<Tensor> {
        // The data section starts at any byte, so the elements go through an aligned buffer, never a cast.
        let mut data = self.zeroed::<T>(name, info.shape.iter().product())?;
        self.fill(name, info, bytemuck::cast_slice_mut(&mut data))?;
        Tensor::new(&info.shape, data)
            .map_err(|_| self.bad(format!("tensor {name:?}: shape {:?} is too large", info.shape)))
    }

    /// A tensor of one of the dtypes that [`Tensor`] has.
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor> {
        let info = self.info(name)?;
        match info.dtype {
            Dtype::F32 => self.typed::<f32>(name, info),
            Dtype::F16 => self.typed::<half::f16>(name, info),
            Dtype::BF16 => self.typed::<half::bf16>(name, info),
            Dtype::U32 => self.typed::<u32>(name, info),
            Dtype::I32 => self.typed::<i32>(name, info),
            Dtype::U8 => self.typed::<u8>(name, info),
            other => Err(self.bad(format!("tensor {name:?} has dtype {other}, which no K/V array has"))),
        }
    }

    /// The integers of an I32, I64 or U32 tensor.
    pub(crate) fn integers(&self, name: &str) -> Result<Vec<i64>> {
        let raw = self.raw(name)?;
        let wide = |chunk: &[u8]| chunk.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        Ok(match raw.dtype {
            Dtype::I32 => raw.bytes.chunks_exact(4).map(|c| i64::from(wide(c) as u32 as i32)).collect(),
            Dtype::U32 => raw.bytes.chunks_exact(4).map(|c| wide(c) as i64).collect(),
            Dtype::I64 => raw.bytes.chunks_exact(8).map(|c| wide(c) as i64).collect(),
            other => return Err(self.bad(format!("tensor {name:?} has dtype {other}, expected integers"))),
        })
    }
}

/// Tensors must tile the data section: each begins where the one before ends, the last ends with the file.
fn check_ranges(tensors: &BTreeMap<String, TensorInfo>, data_len: u64) -> Result<(), String> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, info)| info.data_offsets);
    let mut at = 0;
    for (name, info) in order {
        let (begin, end) = info.data_offsets;
        if begin != at || end < begin || end as u64 > data_len {
            return Err(format!(
                "tensor {name:?}: data_offsets [{begin}, {end}] should begin at {at} and end within {data_len}"
            ));
        }
        let (dtype, shape) = (info.dtype, &info.shape);
        match byte_len(dtype, shape) {
            Some(n) if n == end - begin => {}
            Some(n) => {
                return Err(format!("tensor {name:?}: {dtype} {shape:?} is {n} bytes, not {}", end - begin));
            }
            None => return Err(format!("tensor {name:?}: {dtype} {shape:?} is no number of bytes")),
        }
        at = end;
    }
    if at as u64 != data_len {
        return Err(format!("the tensors take {at} bytes, the file holds {data_len}"));
    }
    Ok(())
}

struct FileHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// A JSON object of strings in which no key may come twice.
struct Strings(BTreeMap<String, String>);

struct HeaderVisitor;
struct StringsVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = FileHeader;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a safetensors header")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FileHeader, A::Error> {
        let mut metadata = None;
        let mut tensors = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let twice = if key == "__metadata__" {
                let strings = map.next_value::<Option<Strings>>()?.map_or_else(BTreeMap::new, |s| s.0);
                metadata.replace(strings).is_some()
            } else {
                let info = map
                    .next_value::<TensorInfo>()
                    .map_err(|e| A::Error::custom(format!("tensor {key:?}: {e}")))?;
                tensors.insert(key.clone(), info).is_some()
            };
            if twice {
                return Err(A::Error::custom(format!("duplicate key {key:?}")));
            }
        }
        Ok(FileHeader { metadata: metadata.unwrap_or_default(), tensors })
    }
}

impl<'de> Visitor<'de> for StringsVisitor {
    type Value = Strings;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("metadata strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            if strings.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format!("duplicate metadata key {key:?}")));
            }
        }
        Ok(Strings(strings))
    }
}

impl<'de> Deserialize<'de> for FileHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FileHeader, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strings, D::Error> {
        deserializer.deserialize_map(StringsVisitor)
    }
}
