//! The cache of one sequence in one layer as bytes: what the C API saves, and what a `RecipeCache` of mlx/python holds in a prompt cache.
//!
//! The bytes are a safetensors file: the arrays of the cache's groups of heads, named `GROUP.NAME`, and in the metadata one JSON text
//! with the version, the heads of each group and its scalars. Equal caches give equal bytes.

use crate::cache::{GroupsState, HeadGroups, LayerShape, State};
use crate::engine::cpu::Cpu;
use crate::error::{Error, Result};
use crate::io::image::{Image, Piece};
use crate::io::raw::tensor_of;
use crate::recipe::Recipe;
use safetensors::SafeTensors;
use std::collections::BTreeMap;

const VERSION: &str = "1";
/// The entry of the metadata that has everything but the arrays, and tells these bytes from other files.
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
                arrays.push((format!("{i}.{name}"), Piece::Tensor(x)));
            }
        }
        let meta = serde_json::to_string(&meta).map_err(unreadable)?;
        Ok(Image::new(&[(META.to_string(), meta)].into(), arrays).map_err(unreadable)?.to_bytes())
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
                    let array = tensor_of(view.dtype(), view.shape(), view.data()).map_err(unreadable)?;
                    arrays.insert(name.to_string(), array);
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
