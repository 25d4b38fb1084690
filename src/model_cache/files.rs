//! A cache in a file, packed as it is, and back on any engine.
//!
//! One safetensors file: arrays are `<layer>.<group>.<name>` of [`crate::cache::GroupsState`]; the metadata entry `turbomoq.cache` is JSON
//! with the format's version, the plan of the layers, and for each layer the heads and scalars of its groups.

use super::Cache;
use super::plan::Plan;
use crate::cache::{GroupsState, HeadGroups, State};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::io::container::Container;
use crate::io::image::{Image, Piece};
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const KEY: &str = "turbomoq.cache";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Manifest {
    version: u32,
    plan: Plan,
    layers: Vec<Option<LayerManifest>>,
}

/// Heads and scalars of each group of a layer.
#[derive(Serialize, Deserialize)]
struct LayerManifest {
    heads: Vec<Vec<usize>>,
    metas: Vec<String>,
}

type HostState = Option<GroupsState<Tensor>>;

impl<E: Engine + Clone> Cache<E> {
    /// Writes the cache into a file, whole or not at all, and gives its bytes. Arrays that are lazy are evaluated.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written, which is then as it was; the engine's own.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64> {
        let states = self.host_states()?;
        let layer = |state: &GroupsState<Tensor>| LayerManifest {
            heads: state.heads.clone(),
            metas: state.groups.iter().map(|group| group.meta.clone()).collect(),
        };
        let layers = states.iter().map(|state| state.as_ref().map(layer)).collect();
        let manifest = Manifest { version: VERSION, plan: self.plan.clone(), layers };
        let bad = |detail: String| Error::Format { path: path.as_ref().into(), detail };
        let text = serde_json::to_string(&manifest).map_err(|e| bad(e.to_string()))?;
        let mut pieces = vec![];
        for (i, state) in states.iter().enumerate() {
            for (j, group) in state.iter().flat_map(|state| state.groups.iter().enumerate()) {
                let named = |(name, array)| (format!("{i}.{j}.{name}"), Piece::Tensor(array));
                pieces.extend(group.arrays.iter().map(named));
            }
        }
        let metadata = BTreeMap::from([(KEY.to_string(), text)]);
        Image::new(&metadata, pieces).map_err(bad)?.write(path.as_ref())
    }

    /// Reads what [`Cache::save`] wrote, onto an engine that may be another than it was written from.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a file that is damaged, inconsistent, not of this format or of a newer version.
    pub fn load_on(engine: E, path: impl AsRef<Path>) -> Result<Cache<E>> {
        let file = Container::open(path.as_ref())?;
        let text = file.metadata.get(KEY).ok_or_else(|| file.bad("not a cache that turbomoq saved"))?;
        let manifest: Manifest = serde_json::from_str(text).map_err(|e| file.bad(format!("{KEY}: {e}")))?;
        if manifest.version != VERSION {
            let found = manifest.version;
            return Err(file.bad(format!("version {found} of the format, this program reads {VERSION}")));
        }
        let mut arrays: BTreeMap<[usize; 2], BTreeMap<String, Tensor>> = BTreeMap::new();
        for name in file.names() {
            let mut parts = name.splitn(3, '.');
            let mut number = || parts.next().and_then(|part| part.parse::<usize>().ok());
            let (Some(layer), Some(group)) = (number(), number()) else {
                return Err(file.bad(format!("tensor {name:?} is of no layer")));
            };
            let rest = parts.next().unwrap_or_default().to_string();
            arrays.entry([layer, group]).or_default().insert(rest, file.tensor(name)?);
        }
        let mut states = vec![];
        for (i, layer) in manifest.layers.into_iter().enumerate() {
            states.push(layer.map(|layer| {
                let state = |(j, meta)| State { arrays: arrays.remove(&[i, j]).unwrap_or_default(), meta };
                GroupsState {
                    groups: layer.metas.into_iter().enumerate().map(state).collect(),
                    heads: layer.heads,
                }
            }));
        }
        if let Some([layer, group]) = arrays.keys().next() {
            return Err(file.bad(format!("tensors of group {group} in layer {layer}, which is not there")));
        }
        manifest.plan.check().and_then(|()| Cache::from_states(engine, manifest.plan, &states)).map_err(
            |error| match error {
                Error::Io { .. } | Error::Format { .. } => error,
                other => file.bad(other.to_string()),
            },
        )
    }

    /// The same cache on another engine.
    ///
    /// # Errors
    /// Those of the engines.
    pub fn to_engine<F: Engine + Clone>(&self, engine: F) -> Result<Cache<F>> {
        Cache::from_states(engine, self.plan.clone(), &self.host_states()?)
    }

    /// Every layer taken apart into host arrays.
    fn host_states(&self) -> Result<Vec<HostState>> {
        let host = |state: State<E::Tensor>| -> Result<State<Tensor>> {
            let arrays = state.arrays.iter().map(|(name, array)| Ok((name.clone(), self.engine.get(array)?)));
            Ok(State { arrays: arrays.collect::<Result<_>>()?, meta: state.meta })
        };
        let layer = |layer: &Option<HeadGroups<E>>| -> Result<HostState> {
            let Some(layer) = layer else { return Ok(None) };
            let state = layer.state()?;
            let groups = state.groups.into_iter().map(host).collect::<Result<_>>()?;
            Ok(Some(GroupsState { groups, heads: state.heads }))
        };
        self.layers.iter().map(layer).collect()
    }

    fn from_states(engine: E, plan: Plan, states: &[HostState]) -> Result<Cache<E>> {
        if states.len() != plan.kinds.len() {
            let got = vec![states.len()];
            return Err(Error::Shape { what: "layers", expected: plan.kinds.len().to_string(), got });
        }
        let there = |state: &State<Tensor>| -> Result<State<E::Tensor>> {
            let arrays = state.arrays.iter().map(|(name, array)| Ok((name.clone(), engine.put(array)?)));
            Ok(State { arrays: arrays.collect::<Result<_>>()?, meta: state.meta.clone() })
        };
        let layer = |state: &HostState| -> Result<Option<HeadGroups<E>>> {
            let Some(state) = state else { return Ok(None) };
            let groups = state.groups.iter().map(there).collect::<Result<_>>()?;
            let state = GroupsState { groups, heads: state.heads.clone() };
            HeadGroups::from_state(engine.clone(), &state).map(Some)
        };
        let layers = states.iter().map(layer).collect::<Result<_>>()?;
        Ok(Cache { engine, plan, layers })
    }
}

impl Cache {
    /// As [`Cache::load_on`] on the engine for this machine.
    ///
    /// # Errors
    /// As [`Cache::load_on`].
    pub fn load(path: impl AsRef<Path>) -> Result<Cache> {
        Cache::load_on(Default::default(), path)
    }
}
