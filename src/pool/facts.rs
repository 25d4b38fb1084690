//! What a pool tells of itself, and what it asks of a disk.

use super::table::{Slot, Table};
use super::{Parcel, Pooled};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Where caches go that leave the memory. The pool calls it without holding a lock, for one version of a cache never twice at a time.
pub trait Spill<C>: Send + Sync {
    /// Writes a cache so that it survives a crash, and gives the bytes written.
    ///
    /// # Errors
    /// The implementor's own; nothing is left behind then.
    fn save(&self, label: &Label, cache: &C) -> Result<u64>;

    /// As [`Spill::save`] for a cache in blocks, which need not be joined as a whole for that.
    ///
    /// # Errors
    /// As [`Spill::save`].
    fn save_parcel(&self, label: &Label, parcel: &Parcel<C>) -> Result<u64>
    where
        C: Pooled,
    {
        self.save(label, &parcel.join()?)
    }

    /// Reads a cache back.
    ///
    /// # Errors
    /// The implementor's own, if it is not there or damaged.
    fn load(&self, label: &Label) -> Result<C>;

    /// Forgets a cache.
    ///
    /// # Errors
    /// The implementor's own; a cache that is not there is no error.
    fn remove(&self, label: &Label) -> Result<()>;

    /// What is there, with its bytes, one version of each agent.
    ///
    /// # Errors
    /// The implementor's own.
    fn list(&self) -> Result<Vec<(Label, u64)>>;
}

/// What a cache on the disk is known by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Label {
    /// The agent.
    pub id: String,
    /// Its type.
    pub kind: String,
    /// Its priority.
    pub priority: f32,
    /// Rises with every cache that is stored.
    pub version: u64,
}

/// What storing a cache has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Bytes of the cache if nothing is shared.
    pub bytes: usize,
    /// Bytes that the pool grew by, before others left.
    pub added: usize,
    /// Agents whose caches are lost.
    pub evicted: Vec<String>,
    /// Agents whose caches are on the disk now, and no longer in memory.
    pub spilled: Vec<String>,
}

/// Figures of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStats {
    /// Bytes that may be used.
    pub budget: usize,
    /// Bytes in use.
    pub used: usize,
    /// Bytes that would be in use beside those if no block were shared.
    pub saved_by_sharing: usize,
    /// Agents allocated.
    pub agents: usize,
    /// Agents whose cache is in memory.
    pub in_memory: usize,
    /// Agents whose cache is on the disk.
    pub on_disk: usize,
    /// Bytes on the disk.
    pub disk_bytes: u64,
    /// Caches stored so far.
    pub stores: u64,
    /// Caches given out from memory.
    pub hits: u64,
    /// Caches given out from the disk.
    pub loads: u64,
    /// Caches lost to make room.
    pub evictions: u64,
    /// Caches moved to the disk to make room.
    pub spills: u64,
}

/// Figures of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    /// Its name.
    pub id: String,
    /// Its type, for quotas.
    pub kind: String,
    /// Low ones leave first.
    pub priority: f32,
    /// Whether its cache must stay in memory.
    pub pinned: bool,
    /// Bytes in memory if nothing is shared; `None` if the cache is not in memory.
    pub bytes: Option<usize>,
    /// Bytes of those that other agents use too.
    pub shared_bytes: usize,
    /// Bytes on the disk.
    pub disk_bytes: Option<u64>,
    /// Uses of the pool since the last use of this agent.
    pub idle: u64,
}

impl<C> Table<C> {
    /// Figures of the whole pool.
    pub(super) fn stats(&self) -> PoolStats {
        let held = self.slots.values();
        let in_memory = || held.clone().filter(|s| s.parcel.is_some());
        let alone: usize = in_memory().filter_map(|s| s.parcel.as_ref()).map(|p| p.alone()).sum();
        PoolStats {
            budget: self.budget,
            used: self.used,
            saved_by_sharing: alone - self.used,
            agents: self.slots.len(),
            in_memory: in_memory().count(),
            on_disk: held.clone().filter(|s| s.saved.is_some()).count(),
            disk_bytes: held.clone().filter_map(|s| s.saved).sum(),
            ..self.stats
        }
    }

    /// Figures of every agent.
    pub(super) fn agents(&self) -> Vec<Agent> {
        let shared = |p: &Parcel<C>| -> usize {
            let blocks: BTreeSet<_> =
                p.blocks().filter(|b| self.users(b) > 1).map(|b| (Arc::as_ptr(b), b.nbytes())).collect();
            blocks.into_iter().map(|(_, bytes)| bytes).sum()
        };
        let agent = |(id, slot): (&String, &Slot<C>)| Agent {
            id: id.clone(),
            kind: slot.kind.clone(),
            priority: slot.priority,
            pinned: slot.pinned,
            bytes: slot.parcel.as_ref().map(|p| p.alone()),
            shared_bytes: slot.parcel.as_ref().map_or(0, |p| shared(p)),
            disk_bytes: slot.saved,
            idle: self.clock - slot.last_used,
        };
        self.slots.iter().map(agent).collect()
    }
}
