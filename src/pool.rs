//! Many caches in one budget: real bytes, priorities, pins, quotas, shared prefixes, and a disk for what has to leave.
//!
//! Every byte counts: codes, scales, tables, exact tokens, bookkeeping; equal blocks count once. When a cache does not fit, others
//! leave ([`crate::pool::eviction`]), to the disk if there is one. What cannot be made to fit is refused, and the pool is as it was.
//! All methods take `&self`; no lock is held while a cache is cut, joined, written or read, and what a reader has begun to read it
//! has to the end, whatever leaves the pool meanwhile.

mod disk;
pub mod eviction;
mod facts;
mod parcel;
mod table;

pub use facts::{Agent, Label, Outcome, PoolStats, Spill};
pub(crate) use parcel::body_bytes;
pub use parcel::{Parcel, Pooled};

use crate::error::{EVICTED, Error, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use table::{Claimant, Incoming, Slot, Table, Terms, Verdict};

/// Caches of many agents in one budget.
pub struct MemoryPool<C> {
    table: Mutex<Table<C>>,
    /// Told of every write to the disk that ends.
    written: Condvar,
    spill: Option<Box<dyn Spill<C>>>,
}

impl<C> std::fmt::Debug for MemoryPool<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemoryPool({:?})", self.lock().stats())
    }
}

impl<C> MemoryPool<C> {
    // The table is consistent between any two statements that can panic, of which there are none.
    fn lock(&self) -> MutexGuard<'_, Table<C>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Pooled> MemoryPool<C> {
    /// A pool of so many bytes; caches that have to leave it are lost.
    pub fn new(budget: usize) -> MemoryPool<C> {
        MemoryPool { table: Mutex::new(Table::new(budget)), written: Condvar::new(), spill: None }
    }

    /// A pool whose caches go to a disk when they have to leave; what is there already is held from the start.
    ///
    /// # Errors
    /// Those of [`Spill::list`].
    pub fn with_spill(budget: usize, spill: Box<dyn Spill<C>>) -> Result<MemoryPool<C>> {
        let mut table = Table::new(budget);
        for (label, bytes) in spill.list()? {
            table.advance(label.version);
            let mut slot = Slot::new(label.kind, label.priority);
            (slot.version, slot.last_used, slot.saved) = (label.version, label.version, Some(bytes));
            table.slots.insert(label.id, slot);
        }
        Ok(MemoryPool { table: Mutex::new(table), written: Condvar::new(), spill: Some(spill) })
    }

    /// Makes an agent known, or changes its type and priority. It stays known until [`MemoryPool::remove`]; of agents whose cache was
    /// lost the last thousand stay.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the priority is no finite number.
    pub fn allocate(&self, id: &str, kind: &str, priority: f32) -> Result<()> {
        check_priority(priority)?;
        let mut table = self.lock();
        let slot = table.slots.entry(id.into()).or_insert_with(|| Slot::new(kind.into(), priority));
        (slot.kind, slot.priority) = (kind.into(), priority);
        Ok(())
    }

    /// Limits the bytes in memory of all agents of a type. A cache counts with all its bytes there, shared or not, so that what fits
    /// does not depend on other types. Takes effect when the next cache of the type is stored.
    pub fn set_quota(&self, kind: &str, bytes: usize) {
        self.lock().quotas.insert(kind.into(), bytes);
    }

    /// Stores the cache of an allocated agent in place of the one it had. If that one was on the disk, the new one is there too when
    /// this returns; else it is in memory only until it has to leave, or until [`MemoryPool::spill`] or [`MemoryPool::save_all`], and
    /// a crash before that loses it. A crash after this has returned gives back no older cache.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated; [`Error::OverBudget`] with the figures if there is no room and none can be
    /// made; the spill's own. The agent then has what it had.
    pub fn store(&self, id: &str, cache: C) -> Result<Outcome> {
        self.lock().slot(id)?;
        self.put(id, &self.split(cache)?, None)
    }

    /// As [`MemoryPool::allocate`] and [`MemoryPool::store`] in one step: type, priority and cache of the agent become these together,
    /// or nothing changes; an agent that was not known is none then.
    ///
    /// # Errors
    /// As [`MemoryPool::allocate`] and [`MemoryPool::store`].
    pub fn park(&self, id: &str, kind: &str, priority: f32, cache: C) -> Result<Outcome> {
        self.park_parcel(id, kind, priority, Parcel::split(cache)?)
    }

    /// As [`MemoryPool::park`] of a cache in blocks.
    ///
    /// # Errors
    /// As [`MemoryPool::park`].
    pub fn park_parcel(&self, id: &str, kind: &str, priority: f32, parcel: Parcel<C>) -> Result<Outcome> {
        check_priority(priority)?;
        self.put(id, &self.adopt(parcel), Some(Terms { kind, priority, renew: true }))
    }

    /// A cache in blocks; where the pool has an equal block, that block is used.
    fn split(&self, cache: C) -> Result<Arc<Parcel<C>>> {
        Ok(self.adopt(Parcel::split(cache)?))
    }

    fn adopt(&self, mut parcel: Parcel<C>) -> Arc<Parcel<C>> {
        let candidates = self.lock().candidates(&parcel);
        parcel.adopt(candidates);
        Arc::new(parcel)
    }

    /// Gives `to`, which is allocated, the cache of `from`. Packed tokens are shared until one of them stores something else.
    ///
    /// # Errors
    /// As [`MemoryPool::get`] for `from` and [`MemoryPool::store`] for `to`.
    pub fn fork(&self, from: &str, to: &str) -> Result<Outcome> {
        let parcel = self.parcel(from)?;
        self.put(to, &parcel, None)
    }

    /// As [`MemoryPool::fork`]; if `to` is not known, it becomes an agent of the type and priority of `from`, in the same step.
    ///
    /// # Errors
    /// As [`MemoryPool::fork`]; `to` is then what it was, or no agent if it was none.
    pub fn fork_or_allocate(&self, from: &str, to: &str) -> Result<Outcome> {
        let parcel = self.parcel(from)?;
        let (kind, priority) = {
            let mut table = self.lock();
            let slot = table.slot(from)?;
            (slot.kind.clone(), slot.priority)
        };
        self.put(to, &parcel, Some(Terms { kind: &kind, priority, renew: false }))
    }

    /// The cache of an agent, bit for bit as it was stored, from memory or from the disk.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent has none, the spill's own.
    pub fn get(&self, id: &str) -> Result<C> {
        self.parcel(id)?.join()
    }

    /// As [`MemoryPool::get`], in blocks: for who needs a part at a time.
    ///
    /// # Errors
    /// As [`MemoryPool::get`].
    pub fn parcel(&self, id: &str) -> Result<Arc<Parcel<C>>> {
        self.find(id, true)
    }

    /// As [`MemoryPool::parcel`], but no use: nothing of the pool changes, whatever the caller does next.
    ///
    /// # Errors
    /// As [`MemoryPool::get`].
    pub fn peek(&self, id: &str) -> Result<Arc<Parcel<C>>> {
        self.find(id, false)
    }

    /// The cache of an agent. `counts` is whether this is a use: it then stands last among those that have to leave, and comes back
    /// from the disk to memory if there is room.
    fn find(&self, id: &str, counts: bool) -> Result<Arc<Parcel<C>>> {
        loop {
            let mut table = self.lock();
            table.slot(id)?;
            if counts {
                let now = table.tick();
                table.slot(id)?.last_used = now;
            }
            let slot = table.slot(id)?;
            if let Some(parcel) = slot.parcel.clone() {
                table.stats.hits += u64::from(counts);
                return Ok(parcel);
            }
            let label = slot.label(id);
            let Some(spill) = self.spill.as_ref().filter(|_| slot.saved.is_some()) else {
                let reason = if slot.evicted { EVICTED } else { "nothing was stored" };
                return Err(Error::NotHeld { id: id.into(), reason });
            };
            drop(table);
            match spill.load(&label).and_then(|cache| self.split(cache)) {
                Ok(parcel) => {
                    if counts {
                        self.promote(&label, &parcel);
                    }
                    return Ok(parcel);
                }
                Err(error) => {
                    let mut table = self.lock();
                    // Only if it was not replaced meanwhile; then the new one is there to be given.
                    let current = table.slots.get_mut(id).filter(|slot| slot.version == label.version);
                    let Some(slot) = current else { continue };
                    if matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
                    {
                        (slot.saved, slot.evicted) = (None, true);
                        table.forget_lost();
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Holds a cache from the disk in memory too, if no other has to leave for it.
    fn promote(&self, label: &Label, parcel: &Arc<Parcel<C>>) {
        let mut table = self.lock();
        table.stats.loads += 1;
        let current = |slot: &Slot<C>| slot.version == label.version && slot.parcel.is_none();
        if !table.slots.get(&label.id).is_some_and(current) {
            return;
        }
        let incoming = Some(Incoming { id: &label.id, parcel, terms: None, version: None });
        let request = Claimant { incoming, budget: table.budget, spills: false, evicts: false };
        // No room is no error here: it stays on the disk.
        drop(table.place(&request));
    }

    /// Keeps an agent's cache in memory whatever comes; one on the disk stays there until it is used.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated.
    pub fn pin(&self, id: &str) -> Result<()> {
        self.lock().slot(id).map(|slot| slot.pinned = true)
    }

    /// Undoes [`MemoryPool::pin`].
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated.
    pub fn unpin(&self, id: &str) -> Result<()> {
        self.lock().slot(id).map(|slot| slot.pinned = false)
    }

    /// Changes the budget; caches leave until it is met.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if pinned caches need more, the spill's own; the budget is then as it was.
    pub fn set_budget(&self, bytes: usize) -> Result<Outcome> {
        self.meet(|_| bytes, |table| table.budget = bytes)
    }

    /// Makes at least so many bytes of the budget free, without anything to store.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if pinned caches are in the way, the spill's own.
    pub fn make_room(&self, bytes: usize) -> Result<Outcome> {
        self.meet(|table| table.budget.saturating_sub(bytes), |_| ())
    }

    /// Lets caches leave until a budget is met; `done` is called in the same critical section.
    fn meet(&self, budget: impl Fn(&Table<C>) -> usize, done: impl FnOnce(&mut Table<C>)) -> Result<Outcome> {
        let mut table = self.lock();
        loop {
            let budget = budget(&table);
            let request = Claimant { incoming: None, budget, spills: self.spill.is_some(), evicts: true };
            match table.place(&request)? {
                Verdict::Done(outcome, _) => {
                    done(&mut table);
                    return Ok(outcome);
                }
                place => table = self.make_way(table, place)?,
            }
        }
    }

    /// Figures of the pool.
    pub fn stats(&self) -> PoolStats {
        self.lock().stats()
    }

    /// Figures of every agent.
    pub fn agents(&self) -> Vec<Agent> {
        self.lock().agents()
    }
}

fn check_priority(priority: f32) -> Result<()> {
    if priority.is_finite() {
        return Ok(());
    }
    let (value, reason) = (priority.to_string(), "a finite number is needed".into());
    Err(Error::Unsupported { field: "priority", value, reason })
}
