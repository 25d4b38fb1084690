//! The cache of one sequence in one layer as bytes: what the C API saves, and what a `RecipeCache` of mlx/python holds in a prompt cache.
//!
//! The bytes are a safetensors file: the arrays of the cache's groups of heads, named `GROUP.NAME`, and in the metadata one JSON text
//! with the version, the heads of each group and its scalars. Equal caches give equal bytes.

use crate::cache::{GroupsState, HeadGroups, LayerShape, State};
use crate::engine::cpu::Cpu;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::tensor::{Element, Tensor};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, View};
use std::borrow::Cow;
use std::collections::BTreeMap;

const VERSION: &str = "1";
/// The entry of the metadata that has everything but the arrays.
const META: &str = "turbomoq_cache";

/// The cache, or what it will be made from: the first rows say how many heads there are.
#[derive(Clone)]
pub enum SavedCache {
    /// Nothing was appended yet.
    Empty {
        /// The recipe.
        recipe: Recipe,
        /// Ordinal of the layer among those with keys and values.
        layer: usize,
        /// Channels of keys and values.
        shape: LayerShape,
    },
    /// A cache with tokens.
    Held(HeadGroups<Cpu>),
}

impl SavedCache {
    /// The cache as bytes.
    ///
    /// # Errors
    /// As [`HeadGroups::state`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut meta: BTreeMap<String, String> = [("version".into(), VERSION.into())].into();
        let state = match self {
            SavedCache::Empty { recipe, layer, shape } => {
                let LayerShape { key_dim, value_dim } = *shape;
                let empty = (recipe, layer, key_dim, value_dim);
                meta.insert("empty".into(), serde_json::to_string(&empty).map_err(unreadable)?);
                GroupsState { groups: vec![], heads: vec![] }
            }
            SavedCache::Held(cache) => {
                let state = cache.state()?;
                meta.insert("heads".into(), serde_json::to_string(&state.heads).map_err(unreadable)?);
                state
            }
        };
        let mut arrays = vec![];
        for (i, group) in state.groups.iter().enumerate() {
            meta.insert(i.to_string(), group.meta.clone());
            for (name, x) in &group.arrays {
                arrays.push((format!("{i}.{name}"), Written(x)));
            }
        }
        // One text, since a table of texts would be written in an order of its own each time.
        let meta = serde_json::to_string(&meta).map_err(unreadable)?;
        safetensors::serialize(arrays, Some([(META.to_string(), meta)].into())).map_err(unreadable)
    }

    /// A cache from its bytes, none of which are believed.
    ///
    /// # Errors
    /// [`Error::Parse`] for bytes that are no saved cache, and as [`HeadGroups::from_state`].
    pub fn from_bytes(bytes: &[u8]) -> Result<SavedCache> {
        let file = SafeTensors::deserialize(bytes).map_err(unreadable)?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(unreadable)?;
        let meta = header.metadata().as_ref().and_then(|meta| meta.get(META));
        let meta = meta.ok_or_else(|| unreadable(format!("there is no {META}")))?;
        let meta: BTreeMap<String, String> = serde_json::from_str(meta).map_err(unreadable)?;
        let need = |name: &str| meta.get(name).ok_or_else(|| unreadable(format!("there is no {name}")));
        if need("version")? != VERSION {
            return Err(unreadable(format!("version {}, this program reads {VERSION}", need("version")?)));
        }
        if let Some(empty) = meta.get("empty") {
            let (recipe, layer, key_dim, value_dim): (Recipe, usize, usize, usize) =
                serde_json::from_str(empty).map_err(unreadable)?;
            return Ok(SavedCache::Empty { recipe, layer, shape: LayerShape { key_dim, value_dim } });
        }
        let heads: Vec<Vec<usize>> = serde_json::from_str(need("heads")?).map_err(unreadable)?;
        let mut groups = vec![];
        for i in 0..heads.len() {
            let (mut arrays, prefix) = (BTreeMap::new(), format!("{i}."));
            for (name, view) in file.iter() {
                if let Some(name) = name.strip_prefix(&prefix) {
                    arrays.insert(name.to_string(), read(view.dtype(), view.shape(), view.data())?);
                }
            }
            groups.push(State { arrays, meta: need(&i.to_string())?.clone() });
        }
        Ok(SavedCache::Held(HeadGroups::from_state(Cpu, &GroupsState { groups, heads })?))
    }
}

fn unreadable(error: impl std::fmt::Display) -> Error {
    Error::Parse { what: "a saved cache", text: "its bytes".into(), reason: error.to_string() }
}

/// An array as safetensors writes it.
struct Written<'a>(&'a Tensor);

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        match self.0 {
            Tensor::F32(_) => Dtype::F32,
            Tensor::F16(_) => Dtype::F16,
            Tensor::BF16(_) => Dtype::BF16,
            Tensor::U32(_) => Dtype::U32,
            Tensor::U8(_) => Dtype::U8,
            Tensor::I32(_) => Dtype::I32,
        }
    }
    fn shape(&self) -> &[usize] {
        self.0.shape()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        self.0.row_major_bytes()
    }
    fn data_len(&self) -> usize {
        self.0.nbytes()
    }
}

fn read(dtype: Dtype, shape: &[usize], data: &[u8]) -> Result<Tensor> {
    fn of<T: Element, const N: usize>(
        shape: &[usize],
        data: &[u8],
        one: impl Fn([u8; N]) -> T,
    ) -> Result<Tensor> {
        Tensor::new(shape, data.as_chunks::<N>().0.iter().map(|&x| one(x)).collect())
    }
    match dtype {
        Dtype::F32 => of(shape, data, f32::from_le_bytes),
        Dtype::F16 => of(shape, data, f16::from_le_bytes),
        Dtype::BF16 => of(shape, data, bf16::from_le_bytes),
        Dtype::U32 => of(shape, data, u32::from_le_bytes),
        Dtype::U8 => Tensor::new(shape, data.to_vec()),
        Dtype::I32 => of(shape, data, i32::from_le_bytes),
        other => Err(unreadable(format!("an array of {other:?}"))),
    }
}
