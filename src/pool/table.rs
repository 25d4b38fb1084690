//! What a pool holds, under its lock: the agents, the blocks with their users, and the bytes of both.
//!
//! `used` is the sum of what every cache in memory has for itself and of every block once. Nothing here waits or touches a disk.

use super::parcel::{Parcel, SharedBlock};
use super::{Label, Outcome, PoolStats};
use crate::error::{Error, Result};
use crate::pool::eviction::{Need, Resident, Shortfall, evict};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// What a table answers to a cache that wants in.
pub(super) enum Verdict {
    /// It is in; the file of the cache that it has replaced is to go.
    Done(Outcome, Option<Label>),
    /// These have to be saved first.
    Save(Vec<String>),
    /// Others are being saved, which may make room.
    Wait,
}

/// Agents without a cache that are remembered, so that who asks for one hears that it was lost and not that it never was.
pub(super) const LOST: usize = 1024;

/// An agent and where its cache is.
#[derive(Debug)]
pub(super) struct Slot<C> {
    pub(super) kind: String,
    pub(super) priority: f32,
    pub(super) pinned: bool,
    pub(super) last_used: u64,
    /// Set anew with every cache that is stored.
    pub(super) version: u64,
    /// The cache in memory.
    pub(super) parcel: Option<Arc<Parcel<C>>>,
    /// Bytes of the cache on the disk.
    pub(super) saved: Option<u64>,
    /// Whether a cache was stored and lost again.
    pub(super) evicted: bool,
}

/// A block in memory and the number of places in caches that hold it.
#[derive(Debug)]
struct Shared {
    block: Arc<SharedBlock>,
    users: usize,
}

/// Everything under the lock.
#[derive(Debug)]
pub(super) struct Table<C> {
    pub(super) budget: usize,
    pub(super) quotas: BTreeMap<String, usize>,
    pub(super) slots: BTreeMap<String, Slot<C>>,
    pub(super) stats: PoolStats,
    /// Versions of an agent's cache that are on their way to the disk, or on their way off it again.
    pub(super) writing: BTreeMap<String, BTreeSet<u64>>,
    shared: HashMap<u64, Vec<Shared>>,
    pub(super) used: usize,
    pub(super) clock: u64,
    /// The last version that was given out.
    version: u64,
}

/// Type and priority of an agent whose cache comes in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) kind: &'a str,
    pub(super) priority: f32,
    /// Whether an agent that is known gets them too.
    pub(super) renew: bool,
}

/// A cache on its way in.
pub(super) struct Incoming<'a, C> {
    pub(super) id: &'a str,
    pub(super) parcel: &'a Arc<Parcel<C>>,
    /// Without them the agent must be known.
    pub(super) terms: Option<Terms<'a>>,
    /// Version and, if it is on the disk already, bytes there of a new cache; `None` if it is the one on the disk that comes back.
    pub(super) version: Option<(u64, Option<u64>)>,
}

// Derived, `Clone` would ask for a cache that can be cloned.
impl<C> Clone for Incoming<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Incoming<'_, C> {}

/// A cache on its way in, or only a budget to be met.
pub(super) struct Claimant<'a, C> {
    pub(super) incoming: Option<Incoming<'a, C>>,
    pub(super) budget: usize,
    /// Whether what leaves goes to the disk.
    pub(super) spills: bool,
    /// Whether caches may leave at all.
    pub(super) evicts: bool,
}

/// What blocks would be used by if caches came and went, step by step, while the table stays as it is.
struct Tally<'a, C> {
    table: &'a Table<C>,
    users: HashMap<*const SharedBlock, usize>,
}

impl<C> Tally<'_, C> {
    fn users(&mut self, block: &Arc<SharedBlock>) -> &mut usize {
        self.users.entry(Arc::as_ptr(block)).or_insert_with(|| self.table.users(block))
    }

    /// A cache comes in: the bytes that it adds.
    fn add(&mut self, parcel: &Parcel<C>) -> usize {
        let mut added = parcel.own();
        for block in parcel.blocks() {
            let users = self.users(block);
            added += if *users == 0 { block.nbytes() } else { 0 };
            *users += 1;
        }
        added
    }

    /// A cache goes: the bytes that become free.
    fn free(&mut self, parcel: &Parcel<C>) -> usize {
        let mut freed = parcel.own();
        for block in parcel.blocks() {
            let users = self.users(block);
            *users -= 1;
            freed += if *users == 0 { block.nbytes() } else { 0 };
        }
        freed
    }
}

impl<C> Slot<C> {
    pub(super) fn new(kind: String, priority: f32) -> Slot<C> {
        let (pinned, last_used, version) = (false, 0, 0);
        Slot { kind, priority, pinned, last_used, version, parcel: None, saved: None, evicted: false }
    }

    pub(super) fn label(&self, id: &str) -> Label {
        Label { id: id.into(), kind: self.kind.clone(), priority: self.priority, version: self.version }
    }
}

impl<C> Table<C> {
    pub(super) fn new(budget: usize) -> Table<C> {
        Table {
            budget,
            quotas: BTreeMap::new(),
            slots: BTreeMap::new(),
            stats: PoolStats::default(),
            writing: BTreeMap::new(),
            shared: HashMap::new(),
            used: 0,
            clock: 0,
            version: 0,
        }
    }

    pub(super) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Clock and versions go on behind those that lie on the disk.
    pub(super) fn advance(&mut self, version: u64) {
        (self.clock, self.version) = (self.clock.max(version), self.version.max(version));
    }

    /// A version above all others. It is no use of the pool: a cache that is refused has one too.
    pub(super) fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    pub(super) fn slot(&mut self, id: &str) -> Result<&mut Slot<C>> {
        let none = || Error::NotHeld { id: id.into(), reason: "not allocated" };
        self.slots.get_mut(id).ok_or_else(none)
    }

    /// Whether the cache that an agent has now is on its way to the disk.
    pub(super) fn is_saving(&self, id: &str, slot: &Slot<C>) -> bool {
        self.writing.get(id).is_some_and(|versions| versions.contains(&slot.version))
    }

    /// The label of a cache that is about to be written in place of the one that an agent has.
    pub(super) fn label_of_new(&mut self, id: &str, terms: Option<Terms>) -> Result<Label> {
        let version = self.next_version();
        if let Some(Terms { kind, priority, .. }) = terms.filter(|t| t.renew || !self.slots.contains_key(id))
        {
            return Ok(Label { id: id.into(), kind: kind.into(), priority, version });
        }
        Ok(Label { version, ..self.slot(id)?.label(id) })
    }

    /// Notes that a version goes to the disk, until [`Table::written`].
    pub(super) fn write(&mut self, label: &Label) {
        self.writing.entry(label.id.clone()).or_default().insert(label.version);
    }

    pub(super) fn written(&mut self, label: &Label) {
        if let Some(versions) = self.writing.get_mut(&label.id) {
            versions.remove(&label.version);
            if versions.is_empty() {
                self.writing.remove(&label.id);
            }
        }
    }

    /// Forgets the agents that lost their caches longest ago, beyond [`LOST`] of them.
    pub(super) fn forget_lost(&mut self) {
        let lost = |slot: &Slot<C>| slot.evicted && slot.parcel.is_none();
        let count = self.slots.values().filter(|slot| lost(slot)).count();
        for _ in LOST..count {
            let oldest =
                self.slots.iter().filter(|(_, slot)| lost(slot)).min_by_key(|(_, slot)| slot.last_used);
            let Some(id) = oldest.map(|(id, _)| id.clone()) else { return };
            self.slots.remove(&id);
        }
    }

    /// Blocks in memory that have the hashes of a cache's blocks, for each of them.
    pub(super) fn candidates(&self, parcel: &Parcel<C>) -> Vec<Vec<Arc<SharedBlock>>> {
        let of = |b: &Arc<SharedBlock>| {
            self.shared.get(&b.hash()).map_or(vec![], |l| l.iter().map(|s| s.block.clone()).collect())
        };
        parcel.blocks().map(of).collect()
    }

    pub(super) fn users(&self, block: &Arc<SharedBlock>) -> usize {
        let list = self.shared.get(&block.hash());
        list.and_then(|l| l.iter().find(|s| Arc::ptr_eq(&s.block, block))).map_or(0, |s| s.users)
    }

    fn add(&mut self, parcel: &Parcel<C>) {
        self.used += parcel.own();
        for block in parcel.blocks() {
            let list = self.shared.entry(block.hash()).or_default();
            match list.iter_mut().find(|s| Arc::ptr_eq(&s.block, block)) {
                Some(shared) => shared.users += 1,
                None => {
                    list.push(Shared { block: block.clone(), users: 1 });
                    self.used += block.nbytes();
                }
            }
        }
    }

    fn remove(&mut self, parcel: &Parcel<C>) {
        self.used -= parcel.own();
        for block in parcel.blocks() {
            let Some(list) = self.shared.get_mut(&block.hash()) else { continue };
            let Some(i) = list.iter().position(|s| Arc::ptr_eq(&s.block, block)) else { continue };
            list[i].users -= 1;
            if list[i].users == 0 {
                list.swap_remove(i);
                self.used -= block.nbytes();
            }
            if list.is_empty() {
                self.shared.remove(&block.hash());
            }
        }
    }

    /// Takes the cache of an agent out of memory.
    pub(super) fn release(&mut self, id: &str) {
        if let Some(parcel) = self.slots.get_mut(id).and_then(|s| s.parcel.take()) {
            self.remove(&parcel);
        }
    }

    /// The type that a cache on its way in will have, and the cache that it takes the place of.
    fn before(&mut self, incoming: Option<&Incoming<C>>) -> Result<(Option<String>, Option<Arc<Parcel<C>>>)> {
        let Some(Incoming { id, terms, .. }) = incoming else { return Ok((None, None)) };
        Ok(match (terms, self.slots.get(*id)) {
            (Some(terms), slot) if terms.renew || slot.is_none() => {
                (Some(terms.kind.to_string()), slot.and_then(|slot| slot.parcel.clone()))
            }
            _ => {
                let slot = self.slot(id)?;
                (Some(slot.kind.clone()), slot.parcel.clone())
            }
        })
    }

    /// Lets a cache in, or says what must happen before. On an error nothing has changed.
    pub(super) fn place(&mut self, request: &Claimant<C>) -> Result<Verdict> {
        let (id, parcel) = request.incoming.map(|i| (i.id, i.parcel)).unzip();
        let (kind, old) = self.before(request.incoming.as_ref())?;
        let mut tally = Tally { table: self, users: HashMap::new() };
        let added = parcel.map_or(0, |parcel| tally.add(parcel));
        let replaced = old.as_deref().map_or(0, |parcel| tally.free(parcel));
        let (mut names, mut facts) = (vec![], vec![]);
        let in_quota = |slot: &Slot<C>| kind.as_ref() == Some(&slot.kind);
        for (name, slot) in self.slots.iter().filter(|(name, _)| Some(name.as_str()) != id) {
            let Some(parcel) = &slot.parcel else { continue };
            names.push((name, slot));
            facts.push(Resident {
                priority: slot.priority,
                last_used: slot.last_used,
                pinned: slot.pinned || self.is_saving(name, slot) || !request.evicts,
                in_quota: in_quota(slot),
                charge: parcel.alone(),
            });
        }
        let charge = parcel.map_or(0, |p| p.alone());
        let charged = charge + facts.iter().filter(|f| f.in_quota).map(|f| f.charge).sum::<usize>();
        let quota = kind.as_ref().and_then(|kind| self.quotas.get(kind));
        let need = Need {
            quota: quota.map_or(0, |quota| charged.saturating_sub(*quota)),
            budget: (self.used + added).saturating_sub(request.budget.saturating_add(replaced)),
        };
        let leaving =
            evict(&facts, need, |i| names[i].1.parcel.as_deref().map_or(0, |parcel| tally.free(parcel)));
        let leaving = match leaving {
            Ok(leaving) => leaving,
            Err(_) if request.evicts && names.iter().any(|(id, slot)| self.is_saving(id, slot)) => {
                return Ok(Verdict::Wait);
            }
            Err(shortfall) => {
                let free = |limit: usize, held: usize, freed: usize| limit.saturating_sub(held - freed);
                let id = id.unwrap_or("budget").to_string();
                return Err(match shortfall {
                    Shortfall::Quota(freed) => {
                        let bytes = quota.copied().unwrap_or(0);
                        let limit = format!("quota of type {:?}", kind.unwrap_or_default());
                        let free = free(bytes, charged - charge, freed);
                        Error::OverBudget { id, needed: charge, limit, bytes, free }
                    }
                    Shortfall::Budget(freed) => {
                        let (bytes, limit) = (request.budget, "budget".into());
                        let free = free(bytes, self.used, freed + replaced);
                        Error::OverBudget { id, needed: added, limit, bytes, free }
                    }
                });
            }
        };
        let mut unsaved = vec![];
        if request.spills {
            unsaved
                .extend(leaving.iter().filter(|&&i| names[i].1.saved.is_none()).map(|&i| names[i].0.clone()));
        }
        if !unsaved.is_empty() {
            return Ok(Verdict::Save(unsaved));
        }
        let leaving: Vec<String> = leaving.into_iter().map(|i| names[i].0.clone()).collect();
        Ok(self.commit(request, leaving, added))
    }

    fn commit(&mut self, request: &Claimant<C>, leaving: Vec<String>, added: usize) -> Verdict {
        let mut outcome = Outcome { added, ..Outcome::default() };
        for name in leaving {
            self.release(&name);
            let Some(slot) = self.slots.get_mut(&name) else { continue };
            slot.evicted = slot.saved.is_none();
            let list = if slot.evicted { &mut outcome.evicted } else { &mut outcome.spilled };
            list.push(name);
        }
        self.stats.evictions += outcome.evicted.len() as u64;
        self.stats.spills += outcome.spilled.len() as u64;
        let mut stale = None;
        if let Some(Incoming { id, parcel, terms, version }) = request.incoming {
            self.add(parcel);
            self.release(id);
            outcome.bytes = parcel.alone();
            let now = self.tick();
            let known = self.slots.contains_key(id);
            let new = || Slot::new(terms.map_or_else(String::new, |t| t.kind.into()), 1.0);
            let slot = self.slots.entry(id.into()).or_insert_with(new);
            if let Some(terms) = terms.filter(|terms| terms.renew || !known) {
                (slot.kind, slot.priority) = (terms.kind.into(), terms.priority);
            }
            if let Some((version, saved)) = version {
                stale = slot.saved.map(|_| slot.label(id));
                (slot.version, slot.saved) = (version, saved);
                self.stats.stores += 1;
            }
            slot.parcel = Some(parcel.clone());
            slot.last_used = now;
            slot.evicted = false;
        }
        if !outcome.evicted.is_empty() {
            self.forget_lost();
        }
        Verdict::Done(outcome, stale)
    }
}
