//! Many caches in one budget: real bytes, priorities, pins, quotas, shared prefixes, and a disk for what has to leave.
//!
//! Every byte counts: codes, scales, tables, exact tokens, bookkeeping; equal blocks count once. When a cache does not fit, others
//! leave ([`crate::policy::eviction`]), to the disk if there is one. What cannot be made to fit is refused, and the pool is as it was.
//! All methods take `&self`; no lock is held while a cache is cut, joined, written or read, and what a reader has begun to read it
//! has to the end, whatever leaves the pool meanwhile.

mod facts;
mod parcel;
mod table;

pub use facts::{Agent, Label, Outcome, Spill, Stats};
pub use parcel::Pooled;
pub(crate) use parcel::body_bytes;

use crate::error::{EVICTED, Error, Result, guarded};
use parcel::Parcel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use table::{Request, Slot, Table};

/// What a table answers to a cache that wants in.
enum Place {
    /// It is in.
    Done(Outcome),
    /// These have to be saved first.
    Save(Vec<String>),
    /// Others are being saved, which may make room.
    Wait,
}

/// Caches of many agents in one budget.
pub struct MemoryPool<C> {
    table: Mutex<Table<C>>,
    saved: Condvar,
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
        MemoryPool { table: Mutex::new(Table::new(budget)), saved: Condvar::new(), spill: None }
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
        Ok(MemoryPool { table: Mutex::new(table), saved: Condvar::new(), spill: Some(spill) })
    }

    /// Makes an agent known, or changes its type and priority.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the priority is no finite number.
    pub fn allocate(&self, id: &str, kind: &str, priority: f32) -> Result<()> {
        if !priority.is_finite() {
            let (value, reason) = (priority.to_string(), "a finite number is needed".into());
            return Err(Error::Unsupported { field: "priority", value, reason });
        }
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
    /// a crash before that loses it.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated; [`Error::OverBudget`] with the figures if there is no room and none can be
    /// made; the spill's own. The agent then has what it had.
    pub fn store(&self, id: &str, cache: C) -> Result<Outcome> {
        self.lock().slot(id)?;
        self.put(id, &self.split(cache)?)
    }

    /// A cache in blocks, those of the pool where it has equal ones.
    fn split(&self, cache: C) -> Result<Arc<Parcel<C>>> {
        let mut parcel = Parcel::split(cache)?;
        let candidates = self.lock().candidates(&parcel);
        parcel.adopt(candidates);
        Ok(Arc::new(parcel))
    }

    /// Gives `to` the cache of `from`. Packed tokens are shared until one of them stores something else.
    ///
    /// # Errors
    /// As [`MemoryPool::get`] for `from` and [`MemoryPool::store`] for `to`.
    pub fn fork(&self, from: &str, to: &str) -> Result<Outcome> {
        let parcel = self.parcel(from)?;
        self.put(to, &parcel)
    }

    /// An agent whose cache is on the disk keeps one there: the new one is written before the old one goes, so that at no time a crash
    /// loses both, and none gives back an older cache than the last that was stored.
    fn put(&self, id: &str, parcel: &Arc<Parcel<C>>) -> Result<Outcome> {
        let written = self.write_through(id, parcel)?;
        let mut stale = None;
        let outcome = self.settle(Some((id, parcel)), None, |table| {
            let version = written.as_ref().map_or_else(|| table.tick(), |(label, _)| label.version);
            table.stats.stores += 1;
            if let Ok(slot) = table.slot(id) {
                stale = slot.saved.take().map(|_| slot.label(id));
                slot.version = version;
                slot.saved = written.as_ref().map(|(_, bytes)| *bytes);
            }
        });
        let Some(spill) = &self.spill else { return outcome };
        match (&outcome, stale, &written) {
            (Ok(_), Some(label), Some(_)) => spill.remove(&label)?,
            (Ok(_), Some(label), None) => {
                // It went to the disk in the meantime.
                self.save(id)?;
                spill.remove(&label)?;
            }
            (Err(_), _, Some((label, _))) => spill.remove(label)?,
            _ => {}
        }
        outcome
    }

    /// Writes a cache to the disk that is to replace one there.
    fn write_through(&self, id: &str, parcel: &Arc<Parcel<C>>) -> Result<Option<(Label, u64)>> {
        let Some(spill) = &self.spill else { return Ok(None) };
        let mut table = self.lock();
        let slot = table.slot(id)?;
        if slot.saved.is_none() && slot.saving.is_none() {
            return Ok(None);
        }
        let mut label = slot.label(id);
        label.version = table.tick();
        drop(table);
        let bytes = spill.save(&label, &parcel.join()?)?;
        Ok(Some((label, bytes)))
    }

    /// Lets a cache in, or meets a budget, as soon as what must leave is saved. `done` is called in the same critical section.
    fn settle(
        &self,
        incoming: Option<(&str, &Arc<Parcel<C>>)>,
        budget: Option<usize>,
        done: impl FnOnce(&mut Table<C>),
    ) -> Result<Outcome> {
        let mut table = self.lock();
        loop {
            let budget = budget.unwrap_or(table.budget);
            let request = Request { incoming, budget, spills: self.spill.is_some(), evicts: true };
            match table.place(&request)? {
                Place::Done(outcome) => {
                    done(&mut table);
                    return Ok(outcome);
                }
                Place::Save(ids) => {
                    drop(table);
                    ids.iter().try_for_each(|id| self.save(id))?;
                    table = self.lock();
                }
                Place::Wait => table = self.saved.wait(table).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Writes the cache of an agent to the disk, if it is in memory only.
    fn save(&self, id: &str) -> Result<()> {
        let Some(spill) = &self.spill else { return Ok(()) };
        let mut table = self.lock();
        let (label, parcel) = loop {
            let Ok(slot) = table.slot(id) else { return Ok(()) };
            match (&slot.parcel, slot.saved, slot.saving) {
                (Some(parcel), None, None) => {
                    let parcel = parcel.clone();
                    slot.saving = Some(slot.version);
                    break (slot.label(id), parcel);
                }
                (Some(_), None, Some(_)) => {
                    table = self.saved.wait(table).unwrap_or_else(PoisonError::into_inner)
                }
                _ => return Ok(()),
            }
        };
        drop(table);
        let saved = parcel.join().and_then(|cache| spill.save(&label, &cache));
        let mut table = self.lock();
        let mut wanted = false;
        if let Some(slot) = table.slots.get_mut(id).filter(|slot| slot.saving == Some(label.version)) {
            slot.saving = None;
            wanted = slot.version == label.version;
            if wanted {
                slot.saved = saved.as_ref().ok().copied();
            }
        }
        drop(table);
        self.saved.notify_all();
        saved?;
        // Replaced or dropped while it was written.
        if wanted { Ok(()) } else { spill.remove(&label) }
    }

    /// The cache of an agent, bit for bit as it was stored, from memory or from the disk.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent has none, the spill's own.
    pub fn get(&self, id: &str) -> Result<C> {
        self.parcel(id)?.join()
    }

    fn parcel(&self, id: &str) -> Result<Arc<Parcel<C>>> {
        loop {
            let mut table = self.lock();
            let now = table.tick();
            let slot = table.slot(id)?;
            slot.last_used = now;
            if let Some(parcel) = slot.parcel.clone() {
                table.stats.hits += 1;
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
                    self.promote(&label, &parcel);
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
        let request = Request {
            incoming: Some((&label.id, parcel)),
            budget: table.budget,
            spills: false,
            evicts: false,
        };
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

    /// Forgets an agent and its cache, on the disk too.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated, the spill's own.
    pub fn remove(&self, id: &str) -> Result<()> {
        let mut table = self.lock();
        table.slot(id)?;
        table.release(id);
        let Some(slot) = table.slots.remove(id) else { return Ok(()) };
        drop(table);
        match &self.spill {
            Some(spill) if slot.saved.is_some() => spill.remove(&slot.label(id)),
            _ => Ok(()),
        }
    }

    /// Moves an agent's cache to the disk, pinned or not.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated or the pool has no disk, the spill's own.
    pub fn spill(&self, id: &str) -> Result<()> {
        if self.spill.is_none() {
            return Err(Error::NotHeld { id: id.into(), reason: "the pool has no folder to spill to" });
        }
        self.lock().slot(id)?;
        self.save(id)?;
        let mut table = self.lock();
        if table.slot(id)?.saved.is_some() {
            table.release(id);
            table.stats.spills += 1;
        }
        Ok(())
    }

    /// Writes every cache to the disk that is in memory only, and says how many there are now. None leaves the memory, and one that
    /// cannot be written keeps no other from it.
    ///
    /// # Errors
    /// [`Error::Unsaved`] names every agent that could not be written, after all were tried.
    pub fn save_all(&self) -> Result<usize> {
        let ids: Vec<String> = self.lock().slots.keys().cloned().collect();
        let failed = |id: String| guarded(|| self.save(&id)).err().map(|error| (id, error));
        let agents: Vec<_> = ids.into_iter().filter_map(failed).collect();
        if agents.is_empty() { Ok(self.stats().on_disk) } else { Err(Error::Unsaved { agents }) }
    }

    /// Changes the budget; caches leave until it is met.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if pinned caches need more, the spill's own; the budget is then as it was.
    pub fn set_budget(&self, bytes: usize) -> Result<Outcome> {
        self.settle(None, Some(bytes), |table| table.budget = bytes)
    }

    /// Makes at least so many bytes of the budget free, without anything to store.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if pinned caches are in the way, the spill's own.
    pub fn make_room(&self, bytes: usize) -> Result<Outcome> {
        let budget = self.lock().budget.saturating_sub(bytes);
        self.settle(None, Some(budget), |_| ())
    }

    /// Figures of the pool.
    pub fn stats(&self) -> Stats {
        self.lock().stats()
    }

    /// Figures of every agent.
    pub fn agents(&self) -> Vec<Agent> {
        self.lock().agents()
    }
}

impl<C> Slot<C> {
    fn new(kind: String, priority: f32) -> Slot<C> {
        Slot {
            kind,
            priority,
            pinned: false,
            last_used: 0,
            version: 0,
            parcel: None,
            saved: None,
            saving: None,
            evicted: false,
        }
    }

    fn label(&self, id: &str) -> Label {
        Label { id: id.into(), kind: self.kind.clone(), priority: self.priority, version: self.version }
    }
}
