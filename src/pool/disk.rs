//! The way of caches to the disk and off it: in which order, so that a crash gives back the last cache that was stored or none.
//!
//! Versions rise, and of several files of an agent the newest counts. A file may end up on the disk long after its writing began, so
//! a cache that is stored, dropped or spilled is answered for only when every write of an older version has ended and its file is
//! gone. Nobody who is waited for waits: a write ends by itself, and who stores a version waits for older ones only.

use super::table::{Claimant, Incoming, Table, Terms, Verdict};
use super::{Label, MemoryPool, Outcome, Parcel, Pooled};
use crate::error::{Error, Result, guarded};
use std::sync::{Arc, MutexGuard, PoisonError};

impl<C: Pooled> MemoryPool<C> {
    fn wait<'a>(&self, table: MutexGuard<'a, Table<C>>) -> MutexGuard<'a, Table<C>> {
        self.written.wait(table).unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a write has ended.
    fn end(&self, table: &mut Table<C>, label: &Label) {
        table.written(label);
        self.written.notify_all();
    }

    /// Waits until no version of an agent's cache before this one is on its way to the disk.
    fn outlive<'a>(
        &'a self,
        mut table: MutexGuard<'a, Table<C>>,
        id: &str,
        version: u64,
    ) -> MutexGuard<'a, Table<C>> {
        while table.writing.get(id).is_some_and(|versions| versions.range(..version).next().is_some()) {
            table = self.wait(table);
        }
        table
    }

    /// Does what a table has said must be done before it can let a cache in.
    pub(super) fn make_way<'a>(
        &'a self,
        table: MutexGuard<'a, Table<C>>,
        place: Verdict,
    ) -> Result<MutexGuard<'a, Table<C>>> {
        match place {
            Verdict::Save(ids) => {
                drop(table);
                ids.iter().try_for_each(|id| self.save(id))?;
                Ok(self.lock())
            }
            _ => Ok(self.wait(table)),
        }
    }

    /// Lets a cache in, as soon as what must leave for it is saved. An agent whose cache is on the disk, or on its way there, keeps one
    /// there: the new one is written before the old one goes, so that at no time a crash loses both.
    pub(super) fn put(&self, id: &str, parcel: &Arc<Parcel<C>>, terms: Option<Terms>) -> Result<Outcome> {
        let mut written = None;
        let placed = self.place(id, parcel, terms, &mut written);
        let (label, _) = written.unzip();
        let gone = match &placed {
            Ok((_, _, stale)) => stale.as_ref(),
            Err(_) => label.as_ref(),
        };
        if let (Some(spill), Some(gone)) = (&self.spill, gone) {
            // A file that stays does no harm: one of an older version is not read and goes at the next start, and one that was
            // refused is as a crash in the middle of this call would have left it.
            drop(spill.remove(gone));
        }
        let mut table = self.lock();
        if let Some(label) = &label {
            self.end(&mut table, label);
        }
        let (outcome, version, _) = placed?;
        drop(self.outlive(table, id, version));
        Ok(outcome)
    }

    /// The part of [`MemoryPool::put`] that can fail: the outcome, the version, and what it was in place of on the disk. `written` is
    /// what was written to the disk for it, in place or not.
    fn place(
        &self,
        id: &str,
        parcel: &Arc<Parcel<C>>,
        terms: Option<Terms>,
        written: &mut Option<(Label, u64)>,
    ) -> Result<(Outcome, u64, Option<Label>)> {
        let mut table = self.lock();
        loop {
            let on_disk = table.slots.get(id).is_some_and(|slot| slot.saved.is_some());
            if let Some(spill) = &self.spill
                && written.is_none()
                && (on_disk || table.writing.contains_key(id))
            {
                let label = table.label_of_new(id, terms)?;
                table.write(&label);
                drop(table);
                let saved = spill.save_parcel(&label, parcel);
                table = self.lock();
                match saved {
                    Ok(bytes) => *written = Some((label, bytes)),
                    Err(error) => {
                        self.end(&mut table, &label);
                        return Err(error);
                    }
                }
            }
            let version = match written {
                Some((label, bytes)) => (label.version, Some(*bytes)),
                None => (table.next_version(), None),
            };
            let incoming = Some(Incoming { id, parcel, terms, version: Some(version) });
            let budget = table.budget;
            match table.place(&Claimant { incoming, budget, spills: self.spill.is_some(), evicts: true })? {
                Verdict::Done(outcome, stale) => return Ok((outcome, version.0, stale)),
                place => table = self.make_way(table, place)?,
            }
        }
    }

    /// Writes the cache of an agent to the disk, if it is in memory only; the newest, if it is replaced meanwhile.
    pub(super) fn save(&self, id: &str) -> Result<()> {
        let Some(spill) = &self.spill else { return Ok(()) };
        let mut table = self.lock();
        loop {
            let Some(slot) = table.slots.get(id) else { return Ok(()) };
            let (Some(parcel), None) = (&slot.parcel, slot.saved) else { return Ok(()) };
            if table.is_saving(id, slot) {
                table = self.wait(table);
                continue;
            }
            let (label, parcel) = (slot.label(id), parcel.clone());
            table.write(&label);
            drop(table);
            let mut saved = spill.save_parcel(&label, &parcel);
            table = self.lock();
            if let Some(slot) = table.slots.get_mut(id).filter(|slot| slot.version == label.version) {
                slot.saved = saved.as_ref().ok().copied();
                self.end(&mut table, &label);
                return saved.map(drop);
            }
            // Replaced or dropped while it was written: its file goes before anyone is answered.
            drop(table);
            saved = saved.and_then(|bytes| spill.remove(&label).map(|()| bytes));
            table = self.lock();
            self.end(&mut table, &label);
            saved?;
        }
    }

    /// Forgets an agent and its cache, on the disk too.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the agent is not allocated; the spill's own, and the agent is then what it was.
    pub fn remove(&self, id: &str) -> Result<()> {
        let mut table = self.lock();
        loop {
            let slot = table.slot(id)?;
            let label = slot.label(id);
            let Some(spill) = self.spill.as_ref().filter(|_| slot.saved.is_some()) else { break };
            drop(table);
            spill.remove(&label)?;
            table = self.lock();
            // A cache that was stored meanwhile has a file of its own.
            if let Some(slot) = table.slots.get_mut(id).filter(|slot| slot.version == label.version) {
                slot.saved = None;
            }
        }
        table.release(id);
        table.slots.remove(id);
        let version = table.next_version();
        drop(self.outlive(table, id, version));
        Ok(())
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
        loop {
            self.save(id)?;
            let mut table = self.lock();
            let slot = table.slot(id)?;
            match (&slot.parcel, slot.saved) {
                // Replaced since it was saved.
                (Some(_), None) => continue,
                (Some(_), Some(_)) => {
                    table.release(id);
                    table.stats.spills += 1;
                }
                (None, _) => {}
            }
            return Ok(());
        }
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
}
