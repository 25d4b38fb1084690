//! The memory pool: a model of it beside it on random calls, the laws of sharing and spilling, and threads under contention.

use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use turbomoq::pool::{Label, MemoryPool, Pooled, Spill};
use turbomoq::{CompressedCache, Compressor};
use turbomoq::{Error, Result, Tensor};

type Cache = CompressedCache<Tensor>;

const BLOCK: usize = 128;
const DIM: usize = 32;

/// A cache of one layer whose blocks of 128 tokens follow from one number each.
fn cache(blocks: &[u8]) -> Cache {
    let rows = |sign: f32| {
        let row = |b: u8| (0..BLOCK * DIM).map(move |i| sign * (f32::from(b) + 1.0 + (i % 7) as f32 / 8.0));
        let data: Vec<f32> = blocks.iter().flat_map(|&b| row(b)).collect();
        Tensor::new(&[1, 1, blocks.len() * BLOCK, DIM], data).unwrap()
    };
    let compressor = Compressor::new("uniform@8".parse().unwrap());
    compressor.compress([(&rows(1.0), &rows(-1.0))]).unwrap()
}

fn bytes_of(cache: &Cache) -> Vec<u8> {
    let mut out = vec![];
    for side in cache.layers.iter().flat_map(|l| [&l.key, &l.value]) {
        out.extend(
            side.body
                .iter()
                .flat_map(|b| [b.words(), b.scales()])
                .flat_map(|t| t.row_major_bytes().into_owned()),
        );
    }
    out
}

/// A disk in memory that can be full, and slow: a write that began with a gate set tells it so, and ends when the gate opens.
#[derive(Clone, Default)]
struct Disk {
    files: Arc<Mutex<BTreeMap<(String, u64), (Label, Cache)>>>,
    full: Arc<AtomicUsize>,
    gate: Arc<Mutex<Option<(Sender<Label>, Receiver<()>)>>>,
}

/// The other side of a gate of [`Disk`].
struct Gate {
    began: Receiver<Label>,
    open: Sender<()>,
}

impl Disk {
    /// Holds the next write up.
    fn slow(&self) -> Gate {
        let ((began_in, began), (open, opened)) = (channel(), channel());
        *self.gate.lock().unwrap() = Some((began_in, opened));
        Gate { began, open }
    }

    /// What a crash at this moment leaves.
    fn after_crash(&self) -> MemoryPool<Cache> {
        let files = Arc::new(Mutex::new(self.files.lock().unwrap().clone()));
        MemoryPool::with_spill(usize::MAX, Box::new(Disk { files, ..Disk::default() })).unwrap()
    }
}

impl Spill<Cache> for Disk {
    fn save(&self, label: &Label, cache: &Cache) -> Result<u64> {
        if self.full.load(Ordering::SeqCst) > 0 {
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(Error::Io { path: "disk".into(), source });
        }
        let gate = self.gate.lock().unwrap().take();
        if let Some((began, opened)) = gate {
            began.send(label.clone()).unwrap();
            opened.recv().unwrap();
        }
        let key = (label.id.clone(), label.version);
        let old = self.files.lock().unwrap().insert(key, (label.clone(), cache.clone()));
        assert!(old.is_none(), "one version was written twice: {label:?}");
        Ok(cache.nbytes() as u64)
    }
    fn load(&self, label: &Label) -> Result<Cache> {
        let files = self.files.lock().unwrap();
        let missing = || Error::Io { path: "disk".into(), source: std::io::ErrorKind::NotFound.into() };
        files.get(&(label.id.clone(), label.version)).map(|f| f.1.clone()).ok_or_else(missing)
    }
    fn remove(&self, label: &Label) -> Result<()> {
        self.files.lock().unwrap().remove(&(label.id.clone(), label.version));
        Ok(())
    }
    fn list(&self) -> Result<Vec<(Label, u64)>> {
        // In the order of versions, so that the newest of an agent stays.
        let files = self.files.lock().unwrap();
        let newest: BTreeMap<&String, &(Label, Cache)> =
            files.iter().map(|((id, _), file)| (id, file)).collect();
        Ok(newest.values().map(|(label, cache)| (label.clone(), cache.nbytes() as u64)).collect())
    }
}

/// What a pool counts: so much a cache, so much for each block that it names, so much for each block that is there.
#[derive(Clone, Copy)]
struct Sizes {
    own: usize,
    name: usize,
    block: usize,
}

impl Sizes {
    fn new() -> Sizes {
        let size = |blocks: &[u8]| {
            let pool = MemoryPool::new(usize::MAX);
            pool.allocate("a", "", 1.0).unwrap();
            pool.store("a", cache(blocks)).unwrap();
            pool.stats().used
        };
        // A block of the keys and one of the values.
        let (one, two, name) = (size(&[1]), size(&[1, 2]), 2 * size_of::<usize>());
        Sizes { own: 2 * one - two, name, block: two - one - name }
    }

    /// Bytes of a pool that holds caches of these blocks.
    fn used<'a>(self, caches: impl IntoIterator<Item = &'a [u8]>) -> usize {
        let (mut used, mut distinct) = (0, BTreeSet::<u8>::new());
        for blocks in caches {
            used += self.own + self.name * blocks.len();
            distinct.extend(blocks);
        }
        used + self.block * distinct.len()
    }

    fn alone(self, blocks: &[u8]) -> usize {
        self.used([blocks])
    }
}

/// What the pool should do, said in the plainest way.
#[derive(Clone, Default, Debug)]
struct Model {
    agents: BTreeMap<u8, ModelAgent>,
    clock: u64,
}

#[derive(Clone, Default, Debug)]
struct ModelAgent {
    priority: u8,
    pinned: bool,
    last: u64,
    memory: Option<Vec<u8>>,
    disk: Option<Vec<u8>>,
}

impl Model {
    fn used(&self, sizes: Sizes) -> usize {
        sizes.used(self.agents.values().filter_map(|a| a.memory.as_deref()))
    }

    /// Lets agents leave, worst first, until the budget is met; `None` if it cannot be.
    fn shrink(&self, budget: usize, spare: Option<u8>, spills: bool, sizes: Sizes) -> Option<Model> {
        let mut model = self.clone();
        while model.used(sizes) > budget {
            let worst = model
                .agents
                .iter_mut()
                .filter(|(id, a)| a.memory.is_some() && !a.pinned && Some(**id) != spare)
                .min_by_key(|(_, a)| (a.priority, a.last))?;
            let gone = worst.1.memory.take();
            worst.1.disk = if spills { gone } else { None };
        }
        Some(model)
    }
}

#[derive(Clone, Debug)]
enum Call {
    Allocate(u8, u8),
    Store(u8, Vec<u8>),
    Park(u8, u8, Vec<u8>),
    Branch(u8, u8),
    Peek(u8),
    Get(u8),
    Pin(u8, bool),
    Remove(u8),
    Fork(u8, u8),
    Budget(usize),
    Spill(u8),
}

fn call() -> impl Strategy<Value = Call> {
    let id = 0u8..5;
    prop_oneof![
        2 => (id.clone(), 0u8..3).prop_map(|(i, p)| Call::Allocate(i, p)),
        5 => (id.clone(), prop::collection::btree_set(0u8..9, 1..5))
            .prop_map(|(i, b)| Call::Store(i, b.into_iter().collect())),
        3 => (id.clone(), 0u8..3, prop::collection::btree_set(0u8..9, 1..7))
            .prop_map(|(i, p, b)| Call::Park(i, p, b.into_iter().collect())),
        2 => (id.clone(), id.clone()).prop_map(|(a, b)| Call::Branch(a, b)),
        1 => id.clone().prop_map(Call::Peek),
        4 => id.clone().prop_map(Call::Get),
        1 => (id.clone(), any::<bool>()).prop_map(|(i, p)| Call::Pin(i, p)),
        1 => id.clone().prop_map(Call::Remove),
        2 => (id.clone(), id.clone()).prop_map(|(a, b)| Call::Fork(a, b)),
        1 => (0usize..14).prop_map(Call::Budget),
        1 => id.prop_map(Call::Spill),
    ]
}

/// Runs calls on a pool and on the model; both must agree after each.
#[allow(clippy::too_many_lines)] // a call and its model beside each other, for every kind of call
fn run(calls: &[Call], spills: bool) {
    let sizes = Sizes::new();
    let disk = Disk::default();
    let mut budget = sizes.used([&[0, 1, 2][..], &[3, 4], &[5]]);
    let pool = match spills {
        true => MemoryPool::with_spill(budget, Box::new(disk.clone())).unwrap(),
        false => MemoryPool::new(budget),
    };
    let mut model = Model::default();
    let name = |id: &u8| format!("agent {id}");
    for call in calls {
        model.clock += 2;
        let (before, now) = (model.clone(), model.clock);
        let store = |model: &Model, id: u8, blocks: &[u8]| -> Option<Model> {
            let mut next = model.clone();
            let agent = next.agents.get_mut(&id)?;
            // Who is on the disk stays there.
            agent.disk = agent.disk.take().map(|_| blocks.to_vec());
            (agent.memory, agent.last) = (Some(blocks.to_vec()), now);
            next.shrink(budget, Some(id), spills, sizes)
        };
        let (ok, next) = match call {
            Call::Allocate(id, p) => {
                pool.allocate(&name(id), "kind", f32::from(*p)).unwrap();
                model.agents.entry(*id).or_default().priority = *p;
                (true, Some(model.clone()))
            }
            Call::Store(id, blocks) => {
                (pool.store(&name(id), cache(blocks)).is_ok(), store(&model, *id, blocks))
            }
            Call::Park(id, p, blocks) => {
                let ok = pool.park(&name(id), "kind", f32::from(*p), cache(blocks)).is_ok();
                let mut next = model.clone();
                next.agents.entry(*id).or_default().priority = *p;
                (ok, store(&next, *id, blocks))
            }
            Call::Peek(id) => {
                let held = model.agents.get(id).and_then(|a| a.memory.as_ref().or(a.disk.as_ref()));
                let before = (pool.stats(), pool.agents());
                assert_eq!(
                    pool.peek(&name(id)).and_then(|p| p.join()).ok().map(|c| bytes_of(&c)),
                    held.map(|b| bytes_of(&cache(b)))
                );
                assert_eq!(before, (pool.stats(), pool.agents()));
                (true, Some(model.clone()))
            }
            Call::Get(id) => {
                let got = pool.get(&name(id)).ok().map(|c| bytes_of(&c));
                let mut next = model.clone();
                let mut want = None;
                if let Some(agent) = next.agents.get_mut(id) {
                    agent.last = now;
                    want = agent.memory.clone().or(agent.disk.clone());
                    if agent.memory.is_none() {
                        // From the disk into memory only if there is room.
                        agent.memory = agent.disk.clone();
                        if next.used(sizes) > budget
                            && let Some(agent) = next.agents.get_mut(id)
                        {
                            agent.memory = None;
                        }
                    }
                }
                assert_eq!(got, want.map(|b| bytes_of(&cache(&b))), "{call:?}");
                (true, Some(next))
            }
            Call::Pin(id, pin) => {
                let ok = if *pin { pool.pin(&name(id)) } else { pool.unpin(&name(id)) }.is_ok();
                let mut next = model.clone();
                (ok, next.agents.get_mut(id).map(|a| a.pinned = *pin).map(|()| next))
            }
            Call::Remove(id) => {
                let mut next = model.clone();
                (pool.remove(&name(id)).is_ok(), next.agents.remove(id).map(|_| next))
            }
            Call::Fork(from, to) | Call::Branch(from, to) => {
                let branch = matches!(call, Call::Branch(..));
                let ok = match branch {
                    true => pool.fork_or_allocate(&name(from), &name(to)).is_ok(),
                    false => pool.fork(&name(from), &name(to)).is_ok(),
                };
                let mut next = model.clone();
                let held = next.agents.get_mut(from).and_then(|a| {
                    a.last = now - 1;
                    a.memory.clone().or(a.disk.clone())
                });
                if held.is_some()
                    && let Some(agent) = next.agents.get_mut(from)
                    && agent.memory.is_none()
                {
                    agent.memory = agent.disk.clone();
                    if next.used(sizes) > budget
                        && let Some(agent) = next.agents.get_mut(from)
                    {
                        agent.memory = None;
                    }
                }
                model = next.clone(); // reading counts even if the fork has no room
                if let Some(priority) = next.agents.get(from).map(|a| a.priority).filter(|_| branch) {
                    next.agents.entry(*to).or_insert(ModelAgent { priority, ..ModelAgent::default() });
                }
                (ok, held.and_then(|blocks| store(&next, *to, &blocks)))
            }
            Call::Budget(units) => {
                let bytes = units * sizes.block;
                let next = model.shrink(bytes, None, spills, sizes);
                let ok = pool.set_budget(bytes).is_ok();
                if ok {
                    budget = bytes;
                }
                (ok, next)
            }
            Call::Spill(id) => {
                let mut next = model.clone();
                let known = next.agents.get_mut(id).filter(|_| spills);
                let next = known.map(|a| a.memory.take().map(|m| a.disk = Some(m))).map(|_| next);
                (pool.spill(&name(id)).is_ok(), next)
            }
        };
        assert_eq!(ok, next.is_some(), "{call:?} on {before:?}, budget {budget}");
        model = next.unwrap_or(model);
        let stats = pool.stats();
        assert_eq!(stats.used, model.used(sizes), "{call:?} on {before:?}");
        assert!(stats.used <= budget || matches!(call, Call::Budget(_)), "{call:?}");
        for agent in pool.agents() {
            let id: u8 = agent.id.trim_start_matches("agent ").parse().unwrap();
            let want = &model.agents[&id];
            assert_eq!(
                (agent.bytes.is_some(), agent.pinned, agent.priority),
                (want.memory.is_some(), want.pinned, f32::from(want.priority)),
                "{call:?}: {id}"
            );
            assert_eq!(agent.disk_bytes.is_some(), want.disk.is_some(), "{call:?}: {id}");
        }
        assert_eq!(pool.agents().len(), model.agents.len());
        assert_eq!(
            disk.files.lock().unwrap().len(),
            model.agents.values().filter(|a| a.disk.is_some()).count()
        );
    }
    (0..5).for_each(|id| drop(pool.remove(&name(&id))));
    assert_eq!((pool.stats().used, disk.files.lock().unwrap().len()), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn a_pool_that_evicts_does_what_its_model_does(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, false);
    }
    #[test]
    fn a_pool_that_spills_does_what_its_model_does(calls in prop::collection::vec(call(), 1..60)) {
        run(&calls, true);
    }
}

#[test]
fn bytes_are_those_of_the_buffers() {
    let big = Compressor::new("best@2.5/2".parse().unwrap());
    let rows = |stream| {
        let mut rng = turbomoq::internals::math::rng::Rng::new(3, stream);
        let n = 8 * 1024 * 128;
        Tensor::new(&[1, 8, 1024, 128], (0..n).map(|_| rng.normal() as f32).collect()).unwrap()
    };
    let cache = big.compress([(&rows(0), &rows(1))]).unwrap();
    let bytes = cache.stats().bytes;
    let pool = MemoryPool::new(2 * bytes);
    pool.allocate("a", "", 0.0).unwrap();
    pool.store("a", cache.clone()).unwrap();
    let used = pool.stats().used;
    assert!(used >= bytes && (used as f64) < 1.01 * bytes as f64, "{used} for {bytes}");
    assert_eq!(bytes_of(&pool.get("a").unwrap()), bytes_of(&cache));
    assert_eq!(pool.get("a").unwrap().stats(), cache.stats());
}

#[test]
fn a_refused_store_changes_nothing_and_says_why() {
    let sizes = Sizes::new();
    let budget = sizes.used([&[1, 2][..], &[3, 4]]);
    let pool = MemoryPool::new(budget);
    for id in ["pinned", "b"] {
        pool.allocate(id, "t", 1.0).unwrap();
    }
    pool.store("pinned", cache(&[1, 2])).unwrap();
    pool.pin("pinned").unwrap();
    pool.store("b", cache(&[3])).unwrap();
    let before = (pool.stats(), pool.agents());
    match pool.store("b", cache(&[3, 4, 5, 6])).unwrap_err() {
        Error::OverBudget { id, needed, limit, bytes, free } => {
            assert_eq!((id.as_str(), limit.as_str(), bytes), ("b", "budget", budget));
            // Block 3 is there already, and its own old cache makes room; it keeps block 3.
            assert_eq!(needed, sizes.alone(&[3, 4, 5, 6]) - sizes.block);
            assert_eq!(free, sizes.alone(&[3, 4]) - sizes.block);
        }
        other => panic!("{other}"),
    }
    assert_eq!(before, (pool.stats(), pool.agents()));
    assert!(matches!(pool.store("nobody", cache(&[1])), Err(Error::NotHeld { .. })));
    assert!(matches!(pool.allocate("b", "t", f32::NAN), Err(Error::Unsupported { field: "priority", .. })));
    assert!(matches!(pool.spill("b"), Err(Error::NotHeld { .. })));
    assert!(matches!(pool.set_budget(sizes.block), Err(Error::OverBudget { .. })));
    assert_eq!(before, (pool.stats(), pool.agents()));
    // Twice released is an error, not a lower count.
    pool.remove("b").unwrap();
    assert!(matches!(pool.remove("b"), Err(Error::NotHeld { .. })));
    pool.unpin("pinned").unwrap();
    assert_eq!(pool.set_budget(0).unwrap().evicted, ["pinned"]);
    assert!(matches!(pool.get("pinned"), Err(Error::NotHeld { reason: "its cache was evicted", .. })));
    pool.set_budget(budget).unwrap();
    pool.store("pinned", cache(&[9])).unwrap();
    assert_eq!(bytes_of(&pool.get("pinned").unwrap()), bytes_of(&cache(&[9])));
}

#[test]
fn a_quota_binds_its_type_only() {
    let pool = MemoryPool::new(usize::MAX);
    pool.set_quota("coding", 2 * Sizes::new().alone(&[1]));
    for (id, kind) in [("c1", "coding"), ("c2", "coding"), ("c3", "coding"), ("r", "research")] {
        pool.allocate(id, kind, 1.0).unwrap();
    }
    // Shared blocks count in full against a quota.
    for id in ["c1", "c2", "r"] {
        assert!(pool.store(id, cache(&[1])).unwrap().evicted.is_empty());
    }
    pool.get("c1").unwrap();
    assert_eq!(pool.store("c3", cache(&[1])).unwrap().evicted, ["c2"]);
    let error = pool.store("c3", cache(&[1, 2, 3])).unwrap_err();
    assert!(error.to_string().contains("quota of type \"coding\""), "{error}");
    assert!(pool.get("c1").is_ok() && pool.get("r").is_ok());
}

#[test]
fn forks_share_until_one_of_them_changes() {
    let sizes = Sizes::new();
    let pool = MemoryPool::new(usize::MAX);
    for id in ["prefix", "a", "b"] {
        pool.allocate(id, "", 1.0).unwrap();
    }
    let two: &[u8] = &[1, 2];
    pool.store("prefix", cache(two)).unwrap();
    assert_eq!(pool.fork("prefix", "a").unwrap().added, sizes.own + 2 * sizes.name);
    pool.fork("prefix", "b").unwrap();
    assert_eq!(pool.stats().used, sizes.used([two, two, two]));
    assert_eq!(pool.stats().saved_by_sharing, 4 * sizes.block);
    pool.store("a", cache(&[1, 2, 3])).unwrap();
    pool.store("b", cache(&[1, 2, 4])).unwrap();
    assert_eq!(pool.stats().used, sizes.used([two, &[1, 2, 3], &[1, 2, 4]]));
    pool.remove("a").unwrap();
    pool.remove("prefix").unwrap();
    assert_eq!(bytes_of(&pool.get("b").unwrap()), bytes_of(&cache(&[1, 2, 4])));
    assert_eq!(pool.stats().used, sizes.alone(&[1, 2, 4]));
}

#[test]
fn a_full_disk_loses_nothing() {
    let disk = Disk::default();
    let pool = MemoryPool::with_spill(Sizes::new().used([&[1][..], &[2]]), Box::new(disk.clone())).unwrap();
    for id in ["a", "b", "c"] {
        pool.allocate(id, "", 1.0).unwrap();
    }
    pool.store("a", cache(&[1])).unwrap();
    pool.store("b", cache(&[2])).unwrap();
    disk.full.store(1, Ordering::SeqCst);
    let before = (pool.stats(), pool.agents());
    assert!(matches!(pool.store("c", cache(&[3])), Err(Error::Io { .. })));
    assert_eq!(before, (pool.stats(), pool.agents()));
    disk.full.store(0, Ordering::SeqCst);
    assert_eq!(pool.store("c", cache(&[3])).unwrap().spilled, ["a"]);
    assert_eq!(bytes_of(&pool.get("a").unwrap()), bytes_of(&cache(&[1])));
    // A new pool on the same disk goes on where this one was, with a copy that was deleted behind its back forgotten.
    pool.spill("b").unwrap();
    drop(pool);
    let pool = MemoryPool::with_spill(usize::MAX, Box::new(disk.clone())).unwrap();
    assert_eq!(pool.stats().on_disk, 2);
    assert_eq!(bytes_of(&pool.get("b").unwrap()), bytes_of(&cache(&[2])));
    disk.files.lock().unwrap().retain(|(id, _), _| id != "a");
    assert!(matches!(pool.get("a"), Err(Error::Io { .. })));
    assert!(matches!(pool.get("a"), Err(Error::NotHeld { .. })));
}

#[test]
fn who_is_on_the_disk_stays_there_in_the_newest_form() {
    let disk = Disk::default();
    let again = || MemoryPool::<Cache>::with_spill(usize::MAX, Box::new(disk.clone())).unwrap();
    let pool = again();
    for id in ["a", "b"] {
        pool.allocate(id, "", 1.0).unwrap();
        pool.store(id, cache(&[1])).unwrap();
    }
    pool.spill("a").unwrap();
    pool.store("a", cache(&[2])).unwrap();
    pool.store("b", cache(&[2])).unwrap();
    assert_eq!(disk.files.lock().unwrap().len(), 1);
    // What a crash leaves: the newest of `a`, nothing of `b`, which was never on the disk.
    assert_eq!(bytes_of(&again().get("a").unwrap()), bytes_of(&cache(&[2])));
    assert!(matches!(again().get("b"), Err(Error::NotHeld { .. })));
    // A cache that cannot be written is refused, in memory and on the disk.
    disk.full.store(1, Ordering::SeqCst);
    assert!(matches!(pool.store("a", cache(&[3])), Err(Error::Io { .. })));
    pool.store("b", cache(&[3])).unwrap();
    for pool in [&pool, &again()] {
        assert_eq!(bytes_of(&pool.get("a").unwrap()), bytes_of(&cache(&[2])));
    }
    disk.full.store(0, Ordering::SeqCst);
    // So is one that does not fit, which leaves no file.
    pool.set_budget(Sizes::new().used([&[2][..], &[3]])).unwrap();
    assert!(matches!(pool.store("a", cache(&[4, 5, 6, 7, 8])), Err(Error::OverBudget { .. })));
    assert_eq!(bytes_of(&again().get("a").unwrap()), bytes_of(&cache(&[2])));
    assert!(disk.files.lock().unwrap().keys().filter(|(id, _)| id == "a").count() == 1);
}

/// Four threads store, read, fork, pin and drop the agents of one another under a budget of a third of them. Every cache says in its
/// first block whose it is, so a reader sees at once if it got another's or a torn one.
#[test]
fn threads_under_contention() {
    let disk = Disk::default();
    let budget = Sizes::new().used([&[0, 100, 101][..], &[1, 100, 101], &[2, 3]]);
    let pool = MemoryPool::with_spill(budget, Box::new(disk.clone())).unwrap();
    let caches: Vec<Cache> = (0..12).map(|i| cache(&[i, 100, 101])).collect();
    let marks: Vec<Vec<u8>> = caches.iter().map(bytes_of).collect();
    let owners = |bytes: &Vec<u8>| marks.iter().position(|m| m == bytes);
    for i in 0..12 {
        pool.allocate(&format!("{i}"), "", (i % 3) as f32).unwrap();
    }
    let refused = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (pool, caches, refused, owners) = (&pool, &caches, &refused, &owners);
            scope.spawn(move || {
                let mut rng = turbomoq::internals::math::rng::Rng::new(5, thread);
                let mut below = |n: u64| (rng.uniform() * n as f64) as u64;
                for _ in 0..400 {
                    let i = below(12) as usize;
                    let id = format!("{i}");
                    match below(10) {
                        0..4 => match pool.store(&id, caches[i].clone()) {
                            Ok(_) => {}
                            Err(Error::OverBudget { .. }) => drop(refused.fetch_add(1, Ordering::SeqCst)),
                            Err(e) => panic!("{e}"),
                        },
                        4..8 => match pool.get(&id) {
                            Ok(cache) => assert_eq!(owners(&bytes_of(&cache)), Some(i)),
                            Err(Error::NotHeld { .. }) => {}
                            Err(e) => panic!("{e}"),
                        },
                        8 => {
                            pool.pin(&id).unwrap();
                            pool.unpin(&id).unwrap();
                        }
                        _ => match pool.spill(&id) {
                            Ok(()) | Err(Error::NotHeld { .. }) => {}
                            Err(e) => panic!("{e}"),
                        },
                    }
                    assert!(pool.stats().used <= pool.stats().budget);
                }
            });
        }
    });
    for i in 0..12 {
        match pool.get(&format!("{i}")) {
            Ok(cache) => assert_eq!(owners(&bytes_of(&cache)), Some(i)),
            Err(Error::NotHeld { reason, .. }) => assert_eq!(reason, "nothing was stored"),
            Err(e) => panic!("{e}"),
        }
        pool.remove(&format!("{i}")).unwrap();
    }
    assert!(pool.stats().stores > 300 && pool.stats().loads > 10, "{:?}", pool.stats());
    assert_eq!((pool.stats().used, disk.files.lock().unwrap().len()), (0, 0));
}

/// Runs a call while the write of a gate is held up, and gives what the disk would give back had the machine stopped at its answer.
/// A call that waits for the write gets its end after a while; one that does not has answered long before.
fn answered_beside<R: Send>(
    disk: &Disk,
    gate: &Gate,
    id: &str,
    call: impl FnOnce() -> R + Send,
) -> (R, Result<Cache>) {
    std::thread::scope(|scope| {
        let (done, answered) = channel();
        let thread = scope.spawn(move || {
            let result = call();
            // What was held up when the answer came may reach the disk at any time.
            done.send(()).unwrap();
            result
        });
        let early = answered.recv_timeout(std::time::Duration::from_millis(100)).is_ok();
        gate.open.send(()).unwrap();
        if early {
            // Only now does the file that was held up come into being, as a crash may find it.
            while !disk.files.lock().unwrap().keys().any(|(file, _)| file == id) {
                std::thread::yield_now();
            }
        } else {
            answered.recv().unwrap();
        }
        let left = disk.after_crash().get(id);
        (thread.join().unwrap(), left)
    })
}

#[test]
fn a_crash_after_a_store_gives_back_no_older_cache_that_was_on_its_way_to_the_disk() {
    let disk = Disk::default();
    let pool = MemoryPool::with_spill(usize::MAX, Box::new(disk.clone())).unwrap();
    pool.park("x", "", 1.0, cache(&[1])).unwrap();
    let gate = disk.slow();
    std::thread::scope(|scope| {
        let spilled = scope.spawn(|| pool.spill("x"));
        let first = gate.began.recv().unwrap();
        let (stored, left) = answered_beside(&disk, &gate, "x", || pool.store("x", cache(&[2])));
        stored.unwrap();
        assert_eq!(bytes_of(&left.unwrap()), bytes_of(&cache(&[2])));
        // Who spills is answered when a cache is on the disk, the newest one.
        spilled.join().unwrap().unwrap();
        let files = disk.files.lock().unwrap();
        assert!(files.len() == 1 && !files.contains_key(&("x".into(), first.version)));
    });
    assert_eq!((pool.stats().on_disk, pool.stats().used), (1, 0));
    assert_eq!(bytes_of(&pool.get("x").unwrap()), bytes_of(&cache(&[2])));
}

#[test]
fn a_crash_after_a_drop_gives_back_no_cache_that_was_on_its_way_to_the_disk() {
    let disk = Disk::default();
    let pool = MemoryPool::with_spill(usize::MAX, Box::new(disk.clone())).unwrap();
    pool.park("x", "", 1.0, cache(&[1])).unwrap();
    let gate = disk.slow();
    std::thread::scope(|scope| {
        let spilled = scope.spawn(|| pool.spill("x"));
        gate.began.recv().unwrap();
        let (dropped, left) = answered_beside(&disk, &gate, "x", || pool.remove("x"));
        dropped.unwrap();
        assert!(matches!(left, Err(Error::NotHeld { .. })), "{left:?}");
        assert!(matches!(spilled.join().unwrap(), Err(Error::NotHeld { .. })));
    });
    assert_eq!((pool.stats().agents, disk.files.lock().unwrap().len()), (0, 0));
}

#[test]
fn a_cache_evicted_to_the_disk_while_it_is_dropped_or_parked_anew_leaves_no_file() {
    let disk = Disk::default();
    let budget = Sizes::new().used([&[1][..]]);
    let pool = MemoryPool::with_spill(budget, Box::new(disk.clone())).unwrap();
    pool.park("x", "", 1.0, cache(&[1])).unwrap();
    let gate = disk.slow();
    std::thread::scope(|scope| {
        // Makes room by a write of x.
        let other = scope.spawn(|| pool.park("y", "", 2.0, cache(&[2])));
        assert_eq!(gate.began.recv().unwrap().id, "x");
        let (dropped, left) = answered_beside(&disk, &gate, "x", || pool.remove("x"));
        dropped.unwrap();
        assert!(left.is_err());
        assert!(other.join().unwrap().unwrap().spilled.is_empty());
    });
    // An id that comes again is another agent, and nothing of the first one is there.
    pool.remove("y").unwrap();
    pool.park("x", "", 1.0, cache(&[3])).unwrap();
    assert!(disk.files.lock().unwrap().is_empty());
}

#[test]
fn a_refused_park_of_a_new_id_leaves_what_another_client_parked_under_it() {
    let disk = Disk::default();
    let sizes = Sizes::new();
    let budget = sizes.used([&[1][..], &[2]]) + sizes.own;
    let pool = MemoryPool::with_spill(budget, Box::new(disk.clone())).unwrap();
    pool.park("victim", "", 0.0, cache(&[1])).unwrap();
    pool.park("pinned", "", 0.0, cache(&[2])).unwrap();
    let gate = disk.slow();
    std::thread::scope(|scope| {
        // Room for one more block, if `victim` leaves.
        let late = scope.spawn(|| pool.park("n", "late", 9.0, cache(&[3])));
        assert_eq!(gate.began.recv().unwrap().id, "victim");
        // Meanwhile others take the room.
        pool.park("pinned", "", 0.0, cache(&[])).unwrap();
        pool.park("n", "early", 1.0, cache(&[4])).unwrap();
        for id in ["pinned", "n"] {
            pool.pin(id).unwrap();
        }
        pool.set_quota("late", 0);
        gate.open.send(()).unwrap();
        assert!(matches!(late.join().unwrap(), Err(Error::OverBudget { .. })));
    });
    let agent = pool.agents().into_iter().find(|a| a.id == "n").unwrap();
    assert_eq!((agent.kind.as_str(), agent.priority, agent.pinned), ("early", 1.0, true));
    assert_eq!(bytes_of(&pool.get("n").unwrap()), bytes_of(&cache(&[4])));
}

#[test]
fn a_refused_park_or_fork_changes_neither_type_nor_priority_and_makes_no_agent() {
    for disk in [None, Some(Disk::default())] {
        let budget = Sizes::new().used([&[1, 2][..]]);
        let pool = match &disk {
            Some(disk) => MemoryPool::with_spill(budget, Box::new(disk.clone())).unwrap(),
            None => MemoryPool::new(budget),
        };
        pool.park("known", "chat", 1.0, cache(&[1, 2])).unwrap();
        pool.pin("known").unwrap();
        if disk.is_some() {
            pool.save_all().unwrap();
        }
        let before = (pool.stats(), pool.agents());
        for (id, kind, priority) in [("known", "coding", 5.0), ("new", "coding", 5.0)] {
            let refused = pool.park(id, kind, priority, cache(&[1, 2, 3])).unwrap_err();
            assert!(matches!(&refused, Error::OverBudget { id: named, .. } if named == id), "{refused}");
            let refused = pool.park(id, kind, f32::INFINITY, cache(&[1])).unwrap_err();
            assert!(matches!(refused, Error::Unsupported { field: "priority", .. }), "{refused}");
        }
        assert_eq!(before, (pool.stats(), pool.agents()));
        assert!(matches!(pool.fork_or_allocate("nobody", "fork"), Err(Error::NotHeld { .. })));
        assert!(matches!(pool.fork_or_allocate("known", "fork"), Err(Error::OverBudget { .. })));
        pool.allocate("empty", "", 0.0).unwrap();
        assert!(matches!(pool.fork_or_allocate("empty", "fork"), Err(Error::NotHeld { .. })));
        pool.remove("empty").unwrap();
        assert_eq!(before.1.len(), pool.agents().len(), "no agent by a refused fork");
        assert_eq!(disk.map(|d| d.files.lock().unwrap().len()), before.1[0].disk_bytes.map(|_| 1));
        pool.set_budget(usize::MAX).unwrap();
        pool.fork_or_allocate("known", "fork").unwrap();
        let agent = pool.agents().into_iter().find(|a| a.id == "fork").unwrap();
        assert_eq!((agent.kind.as_str(), agent.priority, agent.pinned), ("chat", 1.0, false));
    }
}

#[test]
fn agents_that_lost_their_caches_keep_no_slot_for_ever() {
    let pool = MemoryPool::new(Sizes::new().used([&[1][..]]));
    let one = cache(&[1]);
    // Forks of one cache are cheap, but every one has bytes of its own and makes the one before leave.
    for i in 0..3000 {
        pool.park(&format!("{i}"), "", 1.0, one.clone()).unwrap();
    }
    let agents = pool.agents().len();
    assert!((100..=1100).contains(&agents), "{agents} agents of which one has a cache");
    let reason = |id: &str| match pool.get(id) {
        Err(Error::NotHeld { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!((reason("2998"), reason("0")), ("its cache was evicted", "not allocated"));
    assert!(pool.get("2999").is_ok());
}

#[test]
fn a_cache_without_heads_is_refused_however_many_tokens_it_claims() {
    let none = Tensor::new(&[1, 0, 1 << 40, DIM], Vec::<f32>::new()).unwrap();
    let packed = Compressor::new("uniform@8".parse().unwrap()).compress([(&none, &none)]);
    assert!(matches!(packed, Err(Error::Shape { .. })), "{packed:?}");
}
