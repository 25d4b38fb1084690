//! An error leaves a cache as it was: every call that changes one is made to fail at each engine call inside it, and then goes on to give
//! what a cache without errors gives.

use crate::common::failing::{Failing, When, is_injected};
use crate::common::*;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::cache::{HeadGroups, KvCache, LayerCache, LayerShape, State};
use turbomoq::internals::math::rng::Rng;
use turbomoq::policy::TierPolicy;
use turbomoq::{Error, Recipe, Result, Tensor};

const HEADS: usize = 2;
const SHAPE: LayerShape = LayerShape { key_dim: 64, value_dim: 32 };

/// All of a cache that can be seen from outside, copied.
#[derive(PartialEq)]
struct Seen(Vec<(String, Vec<(String, Vec<u8>)>)>, usize, String);

/// What the caches have in common.
trait Cached<E: Engine> {
    fn states(&self) -> Result<Vec<State<E::Tensor>>>;
    fn bytes(&self) -> (usize, String);
    fn append(&mut self, k: &E::Tensor, v: &E::Tensor) -> Result<()>;
    fn fetch(&mut self, k: &E::Tensor, v: &E::Tensor) -> Result<(E::Tensor, E::Tensor)>;
    fn attend(
        &mut self,
        q: &E::Tensor,
        k: &E::Tensor,
        v: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor>;
    fn trim(&mut self, n: usize) -> Result<usize>;
}

macro_rules! cached {
    ($cache:ident, $states:expr) => {
        impl<E: Engine + Clone> Cached<E> for $cache<E> {
            fn states(&self) -> Result<Vec<State<E::Tensor>>> {
                $states(self)
            }
            fn bytes(&self) -> (usize, String) {
                (self.nbytes(), format!("{:?}", self.report().unwrap()))
            }
            fn append(&mut self, k: &E::Tensor, v: &E::Tensor) -> Result<()> {
                self.append(k, v)
            }
            fn fetch(&mut self, k: &E::Tensor, v: &E::Tensor) -> Result<(E::Tensor, E::Tensor)> {
                self.update_and_fetch(k, v)
            }
            fn attend(
                &mut self,
                q: &E::Tensor,
                k: &E::Tensor,
                v: &E::Tensor,
                rules: &Rules<E::Tensor>,
            ) -> Result<E::Tensor> {
                self.update_and_attend(q, k, v, rules)
            }
            fn trim(&mut self, n: usize) -> Result<usize> {
                self.trim(n)
            }
        }
    };
}
cached!(LayerCache, |cache: &LayerCache<E>| Ok(vec![cache.state()?]));
cached!(HeadGroups, |cache: &HeadGroups<E>| Ok(cache.state()?.groups));

fn seen<E: Engine>(engine: &E, cache: &impl Cached<E>) -> Seen {
    let host = |x: &E::Tensor| engine.get(x).unwrap().row_major_bytes().into_owned();
    let states = cache.states().unwrap().into_iter().map(|s| {
        let arrays = s.arrays.iter().map(|(name, x)| (name.clone(), host(x))).collect();
        (s.meta, arrays)
    });
    let (bytes, report) = cache.bytes();
    Seen(states.collect(), bytes, report)
}

/// Makes a call fail at each of its engine calls, and then lets it through.
fn stubborn<E: Engine, C: Cached<Failing<E>>, R>(
    engine: &Failing<E>,
    cache: &mut C,
    what: &str,
    call: impl Fn(&mut C) -> Result<R>,
) -> (R, usize)
where
    Failing<E>: Engine<Tensor = E::Tensor>,
{
    engine.fail(When::Never);
    let before = seen(engine, cache);
    for n in 0.. {
        for when in [When::From(n), When::At(n)] {
            engine.fail(when);
            let done = call(cache);
            engine.fail(When::Never);
            match done {
                Ok(done) => return (done, n),
                Err(error) => assert!(is_injected(&error), "{what}: {error}"),
            }
            assert!(seen(engine, cache) == before, "{what}: an error at engine call {n} changed the cache");
        }
    }
    unreachable!("a call has an end")
}

/// A random sequence of calls, each made to fail everywhere, beside the same sequence without errors.
fn goes_on<E: Engine, C: Cached<Failing<E>>>(
    engine: &Failing<E>,
    caches: (&mut C, &mut C),
    seed: u64,
    calls: usize,
) -> usize
where
    Failing<E>: Engine<Tensor = E::Tensor>,
{
    let (one, other) = caches;
    let mut rng = Rng::new(seed, 1);
    let mut failures = 0;
    for i in 0..calls {
        let l = [1, 1, 3, 90, 128, 200][(rng.uniform() * 6.0) as usize];
        let put = |x: Tensor| engine.put(&x).unwrap();
        let stream = seed * 100 + 4 * i as u64;
        let k = put(keys(&[1, HEADS, l, SHAPE.key_dim], stream));
        let v = put(gauss(&[1, HEADS, l, SHAPE.value_dim], stream + 1));
        let q = put(gauss(&[1, 2 * HEADS, l, SHAPE.key_dim], stream + 2));
        let rules = Rules::causal(0.125);
        let host = |x: &E::Tensor| engine.get(x).unwrap().row_major_bytes().into_owned();
        let what = format!("seed {seed}, call {i} of {l} tokens");
        failures += match (rng.uniform() * 5.0) as usize {
            0 => {
                let (_, n) = stubborn(engine, one, &what, |c| c.append(&k, &v));
                other.append(&k, &v).unwrap();
                n
            }
            1 => {
                let ((a, b), n) = stubborn(engine, one, &what, |c| c.fetch(&k, &v));
                let (x, y) = other.fetch(&k, &v).unwrap();
                assert!(host(&a) == host(&x) && host(&b) == host(&y), "{what}");
                n
            }
            2 => {
                let n = [1, 40, 150][(rng.uniform() * 3.0) as usize];
                let (m, failed) = stubborn(engine, one, &format!("{what}, trim({n})"), |c| c.trim(n));
                assert_eq!(m, other.trim(n).unwrap());
                failed
            }
            _ => {
                let (out, n) = stubborn(engine, one, &what, |c| c.attend(&q, &k, &v, &rules));
                assert!(host(&out) == host(&other.attend(&q, &k, &v, &rules).unwrap()), "{what}");
                n
            }
        };
        let (a, b) = (seen(engine, one), seen(engine, other));
        assert!(a.0 == b.0, "{what}: another cache than without errors");
    }
    failures
}

const LAYERS: [(&str, &str); 6] = [
    ("best@4,window=32", "none"),
    ("kivi@2/2,sinks=4,window=16", "none"),
    ("turboquant-mse@4/16,sinks=70,window=0", "none"),
    ("best@4/4,window=16", "progressive:128=16/16,256=6/6,rest=3/2"),
    ("turboquant-mse@4/4,window=16", "attention"),
    ("mlx-affine@4/4,sinks=4,window=16", "progressive:256=4/4,rest=drop"),
];

fn layers_survive_errors<E: Engine + Clone>(engine: E, calls: usize, layers: &[(&str, &str)]) {
    let engine = Failing::new(engine);
    for (seed, (recipe, policy)) in layers.iter().enumerate() {
        let recipe: Recipe = recipe.parse().unwrap();
        let policy: TierPolicy = policy.parse().unwrap();
        let new = || {
            let cache = LayerCache::new(engine.clone(), &recipe, 1, SHAPE).unwrap();
            cache.with_tiers(&policy, 4).unwrap()
        };
        let failures = goes_on(&engine, (&mut new(), &mut new()), seed as u64, calls);
        assert!(failures > 4 * calls, "{failures} engine calls failed: too few to tell");
    }
}

#[test]
fn a_failing_engine_call_leaves_a_layer_as_it_was() {
    layers_survive_errors(Cpu, 10, &LAYERS);
}

#[test]
fn a_failing_engine_call_leaves_all_groups_of_heads_as_they_were() {
    let recipe: Recipe = "best,window=16,key-bits=4.2,value-bits=3".parse().unwrap();
    let engine = Failing::new(Cpu);
    let new = || HeadGroups::new(engine.clone(), &recipe, 0, SHAPE, HEADS).unwrap();
    assert!(goes_on(&engine, (&mut new(), &mut new()), 3, 10) > 40);
}

#[test]
fn a_failing_trim_leaves_all_layers_of_a_model_as_they_were() {
    let engine = Failing::new(Cpu);
    let recipe: Recipe = "kivi@2/2,window=16".parse().unwrap();
    let mut model = KvCache::new(engine.clone(), &recipe, &[Some(SHAPE), None, Some(SHAPE)], &[]).unwrap();
    let (k, v) = (keys(&[1, HEADS, 500, 64], 1), gauss(&[1, HEADS, 500, 32], 2));
    model.layers_mut().iter_mut().for_each(|l| l.append(&k, &v).unwrap());
    let all = |model: &KvCache<_>| model.layers().iter().map(|l| seen(&engine, l)).collect::<Vec<_>>();
    let before = all(&model);
    for n in 0.. {
        engine.fail(When::At(n));
        let done = model.trim(301);
        engine.fail(When::Never);
        if done.is_ok() {
            assert!(n > 4, "{n} engine calls failed: too few to tell");
            break;
        }
        assert!(all(&model) == before, "an error at engine call {n}");
    }
    assert_eq!(model.layers().iter().map(LayerCache::offset).collect::<Vec<_>>(), [199, 199]);
}

#[test]
fn queries_that_do_not_fit_append_nothing() {
    let recipe: Recipe = "best@4".parse().unwrap();
    let shape = LayerShape { key_dim: 64, value_dim: 64 };
    let mut layer = LayerCache::new(Cpu, &recipe, 0, shape).unwrap();
    let recipe: Recipe = "best,key-bits=4.2,value-bits=3".parse().unwrap();
    let mut groups = HeadGroups::new(Cpu, &recipe, 0, shape, HEADS).unwrap();
    let (k, v) = (gauss(&[1, HEADS, 1, 64], 1), gauss(&[1, HEADS, 1, 64], 2));
    let mut rules = Rules::causal(0.125);
    let good = gauss(&[1, 2 * HEADS, 1, 64], 3);
    for bad in [[1, 4, 1, 32], [1, 4, 2, 64], [2, 4, 1, 64], [1, 3, 1, 64], [1, 0, 1, 64]] {
        let q = gauss(&bad, 3);
        assert!(matches!(layer.update_and_attend(&q, &k, &v, &rules), Err(Error::Shape { .. })));
        assert!(matches!(groups.update_and_attend(&q, &k, &v, &rules), Err(Error::Shape { .. })));
    }
    for change in [
        |r: &mut Rules<Tensor>| r.mask = Some(gauss(&[1, 1, 1, 7], 4)),
        |r: &mut Rules<Tensor>| r.mask = Some(Tensor::new(&[1, 1, 1, 1], vec![1u32]).unwrap()),
        |r: &mut Rules<Tensor>| r.mask = Some(gauss(&[1, 8, 1, 1], 4)),
        |r: &mut Rules<Tensor>| r.left_padding = vec![0, 0, 0],
        |r: &mut Rules<Tensor>| r.sink_logits = Some(gauss(&[9], 5)),
    ] {
        rules = Rules::causal(0.125);
        change(&mut rules);
        assert!(layer.update_and_attend(&good, &k, &v, &rules).is_err(), "{rules:?}");
        assert!(groups.update_and_attend(&good, &k, &v, &rules).is_err(), "{rules:?}");
    }
    assert_eq!((layer.offset(), layer.nbytes()), (0, 0));
    assert_eq!((groups.offset(), groups.nbytes()), (0, 0));
    groups.update_and_attend(&good, &k, &v, &Rules::causal(0.125)).unwrap();
    assert!(groups.groups().all(|(_, cache)| cache.offset() == 1));
}

#[cfg(feature = "mlx")]
#[test]
fn a_failing_engine_call_leaves_a_layer_of_the_mlx_engine_as_it_was() {
    layers_survive_errors(turbomoq::Mlx::new(), 6, &LAYERS[1..3]);
}
