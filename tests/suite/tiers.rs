//! Tiers on a real cache: blocks really lose bytes as they age, nothing moves, pins hold, what is evicted stays away.

use crate::common::*;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::cache::{CapacityPlan, KvCache, KvLayer, LayerCache, LayerShape, OBSERVE_EVERY};
use turbomoq::internals::engine::cpu::{dense_scores, dense_sum};
use turbomoq::policy::{ModelShape, TierPolicy};
use turbomoq::{Dtype, Error, Recipe, Tensor};

const D: usize = 64;
/// Tiers that a test of a few thousand tokens passes through.
const SHORT: &str = "progressive:256=16/16,768=4/4,1536=3/2,rest=2/1";

fn half(x: &Tensor) -> Tensor {
    Tensor::from_f32(Dtype::F16, x.shape(), x.to_f32().unwrap()).unwrap()
}

fn tiered<E: Engine + Clone>(engine: &E, recipe: &str, policy: &str) -> LayerCache<E> {
    let (recipe, policy): (Recipe, TierPolicy) = (recipe.parse().unwrap(), policy.parse().unwrap());
    let shape = LayerShape { key_dim: D, value_dim: D };
    LayerCache::new(engine.clone(), &recipe, 1, shape).unwrap().with_tiers(&policy, OBSERVE_EVERY).unwrap()
}

fn cut(x: &Tensor, a: usize, b: usize) -> Tensor {
    x.slice(2, a, b).unwrap()
}

/// Appends in chunks of `n`.
fn fill(cache: &mut LayerCache<Cpu>, k: &Tensor, v: &Tensor, n: usize) {
    let t = k.shape()[2];
    for a in (0..t).step_by(n) {
        cache.update_and_fetch(&cut(k, a, (a + n).min(t)), &cut(v, a, (a + n).min(t))).unwrap();
    }
}

fn positions(cache: &LayerCache<Cpu>) -> Vec<usize> {
    cache.segments().iter().flat_map(|s| s.start..s.start + s.keys.len()).collect()
}

/// Softmax attention of the last queries over dense keys and values at given positions.
fn exact(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, at: &[usize]) -> Vec<f32> {
    let ([b, hq, l, _], t) = (<[usize; 4]>::try_from(q.shape()).unwrap(), k.shape()[2]);
    let mut w = dense_scores(k, q).unwrap().to_f32().unwrap();
    for (row, w) in w.chunks_exact_mut(t).enumerate() {
        let own = at[t - 1] + row % l + 1 - l;
        let seen: Vec<f64> =
            (0..t).map(|j| if at[j] <= own { f64::from(w[j] * scale) } else { f64::NEG_INFINITY }).collect();
        let top = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = seen.iter().map(|x| (x - top).exp()).sum();
        w.iter_mut().zip(seen).for_each(|(w, x)| *w = ((x - top).exp() / sum) as f32);
    }
    dense_sum(v, &Tensor::new(&[b, hq, l, t], w).unwrap()).unwrap().to_f32().unwrap()
}

#[test]
fn blocks_lose_bytes_as_they_age_and_nothing_moves() {
    let (h, t) = (2, 2500);
    let (k, v) = (half(&keys(&[1, h, t, D], 1)), half(&gauss(&[1, h, t, D], 2)));
    let mut cache = tiered(&Cpu, "best@4/4", SHORT);
    fill(&mut cache, &k, &v, 100);
    assert_eq!((cache.offset(), cache.len()), (t, t));
    assert_eq!(positions(&cache), (0..t).collect::<Vec<_>>());
    let report = cache.report().unwrap();
    assert_eq!(report.bytes(), cache.nbytes());
    assert_eq!(report.tokens(), t);
    // Bytes of a tier are its tokens times the row bytes of its codecs: d/8 bytes a bit and one scale.
    for (tier, row) in [("active", 4 * D), ("warm", 33 + 33), ("cold", 25 + 17), ("archive", 17 + 9)] {
        let (tokens, bytes) = report.of(tier);
        assert!(tokens >= 256 - 128, "{tier}: {tokens}");
        assert_eq!(bytes, tokens * h * row, "{tier}");
    }
    // The quality of a token is that of its tier, best at the end.
    let (fk, fv) = cache.fetch().unwrap();
    let error = |got: &Tensor, want: &Tensor, a: usize, b: usize| {
        relative_mse(&cut(want, a, b).to_f32().unwrap(), &cut(got, a, b).to_f32().unwrap())
    };
    assert_eq!(error(&fk, &k, 0, 4) + error(&fk, &k, t - 250, t), 0.0);
    let mut last = f64::INFINITY;
    for (a, b) in [(4, 700), (1100, 1600), (1800, 2000), (2300, 2500)] {
        let e = error(&fv, &v, a, b);
        assert!(e < last && e < 0.4, "tokens {a}..{b}: {e}, before {last}");
        last = e;
    }
}

#[test]
fn any_chunking_gives_the_same_tiers() {
    let t = 2100;
    let (k, v) = (half(&keys(&[1, 2, t, D], 1)), half(&gauss(&[1, 2, t, D], 2)));
    for recipe in ["best@4/4", "kivi@4/4", "turboquant-mse@16/4,sinks=2,window=16"] {
        let mut first = None;
        for n in [1, 7, 128, t] {
            let mut cache = tiered(&Cpu, recipe, SHORT);
            fill(&mut cache, &k, &v, n);
            let got = (cache.fetch().unwrap(), cache.nbytes(), cache.blocks());
            let first = first.get_or_insert_with(|| got.clone());
            assert!(*first == got, "{recipe} in chunks of {n}");
        }
    }
}

#[test]
fn the_plan_is_what_the_cache_costs() {
    let h = 2;
    let shape = ModelShape { layers: 1, kv_heads: h, key_dim: D, value_dim: D };
    for policy in [SHORT, "none", "progressive:300=8/8,rest=3/2"] {
        for recipe in ["best@4/4", "turboquant-mse@16/4,sinks=0,window=50"] {
            let plan = CapacityPlan::new(&recipe.parse().unwrap(), &policy.parse().unwrap(), &shape).unwrap();
            for t in [1, 3, 133, 200, 261, 1000, 2500] {
                let x = half(&gauss(&[1, h, t, D], 2));
                for chunk in [t, 100, 1] {
                    let mut cache = tiered(&Cpu, recipe, policy);
                    for at in (0..t).step_by(chunk) {
                        let part = cut(&x, at, t.min(at + chunk));
                        cache.append(&part, &part).unwrap();
                    }
                    let what = format!("{policy}, {recipe}, {t} tokens, {chunk} at a time");
                    assert_eq!(plan.bytes(t), cache.nbytes(), "{what}");
                    assert_eq!(plan.used_bytes(t), cache.used_bytes(), "{what}");
                }
            }
        }
    }
}

#[test]
fn used_bytes_are_those_of_the_tokens_that_a_trim_has_left() {
    let x = half(&gauss(&[1, 2, 1000, D], 2));
    let mut cache = tiered(&Cpu, "key=exact,value=exact,sinks=0,window=0", "none");
    cache.append(&x, &x).unwrap();
    assert_eq!(cache.used_bytes(), 1000 * 2 * 2 * 2 * D);
    cache.trim(990).unwrap();
    assert_eq!(cache.used_bytes(), 10 * 2 * 2 * 2 * D);
    assert!(cache.nbytes() >= cache.used_bytes());
    // The same tokens with the queries that are kept for the first frame, and as an offset of their own after a trim.
    let mut one = tiered(&Cpu, "key=d64:b4:equalised:hadamard:lloyd,value=exact", "none");
    let mut two = one.clone();
    one.append(&cut(&x, 0, 120), &cut(&x, 0, 120)).unwrap();
    one.trim(20).unwrap();
    let rules = turbomoq::Rules::causal(0.1);
    two.update_and_attend(&cut(&x, 0, 100), &cut(&x, 0, 100), &cut(&x, 0, 100), &rules).unwrap();
    assert_eq!(one.used_bytes(), two.used_bytes());
    assert!(two.nbytes() > one.nbytes(), "queries are held too");
}

#[test]
fn attention_on_mixed_tiers_is_attention_on_what_is_fetched() {
    // T44: exact, 4-, 3- and 2-bit blocks in one chain.
    let (h, rep, t) = (2, 3, 2300);
    let (k, v) = (keys(&[1, h, t, D], 1), gauss(&[1, h, t, D], 2));
    for recipe in ["best@4/4", "kivi@4/4", "turbomoq@4/4,window=64"] {
        for (k, v) in [(k.clone(), v.clone()), (half(&k), half(&v))] {
            let mut cache = tiered(&Cpu, recipe, SHORT);
            fill(&mut cache, &k, &v, 500);
            let kinds: std::collections::BTreeSet<String> =
                cache.report().unwrap().parts.iter().map(|p| p.tier.clone()).collect();
            assert!(kinds.len() >= 5, "{kinds:?}");
            let q = gauss(&[1, h * rep, 3, D], 9);
            let rules = Rules { exact: true, ..Rules::causal(0.125) };
            let out = cache.attend(&q, &rules).unwrap().to_f32().unwrap();
            let (fk, fv) = cache.fetch().unwrap();
            // Fetching rounds packed tokens to the dtype of the cache; attention does not.
            let bound = if fk.float() == Some(Dtype::F32) { 1e-4 } else { 5e-3 };
            let worst = greatest_difference(&out, &exact(&q, &fk, &fv, 0.125, &positions(&cache)));
            assert!(worst < bound, "{recipe}: {worst}");
        }
    }
}

#[test]
fn trim_across_tiers_and_append_again() {
    let t = 2400;
    let (k, v) = (half(&keys(&[1, 2, t, D], 1)), half(&gauss(&[1, 2, t, D], 2)));
    for recipe in ["best@4/4", "kivi@4/4"] {
        let mut cache = tiered(&Cpu, recipe, SHORT);
        let mut at = 2300;
        fill(&mut cache, &cut(&k, 0, at), &cut(&v, 0, at), 128);
        for back in [3, 200, 333, 900, 1] {
            assert_eq!(cache.trim(back).unwrap(), back);
            at -= back;
            assert_eq!((cache.offset(), cache.len()), (at, at), "{recipe}");
            let report = cache.report().unwrap();
            assert_eq!((report.bytes(), report.tokens()), (cache.nbytes(), at));
            let held: usize = cache.blocks().iter().map(|b| b.len).sum();
            let exact: usize = report.of("window").0 + report.of("sinks").0;
            assert_eq!(held + exact, at, "{recipe}: blocks are the body");
            cache.update_and_fetch(&cut(&k, at, at + 70), &cut(&v, at, at + 70)).unwrap();
            at += 70;
            let (fk, _) = cache.fetch().unwrap();
            assert!(relative_mse(&cut(&k, 0, at).to_f32().unwrap(), &fk.to_f32().unwrap()) < 0.25);
            assert_eq!(positions(&cache), (0..at).collect::<Vec<_>>());
        }
        assert_eq!(cache.trim(usize::MAX).unwrap(), at);
        assert!(cache.is_empty() && cache.blocks().is_empty());
        cache.update_and_fetch(&k, &v).unwrap();
        let mut fresh = tiered(&Cpu, recipe, SHORT);
        fresh.update_and_fetch(&k, &v).unwrap();
        assert_eq!(cache.fetch().unwrap(), fresh.fetch().unwrap(), "{recipe}");
    }
}

#[test]
fn a_clone_ages_on_its_own() {
    let t = 2000;
    let (k, v) = (half(&keys(&[1, 2, t, D], 1)), half(&gauss(&[1, 2, t, D], 2)));
    let mut one = tiered(&Cpu, "best@4/4", SHORT);
    fill(&mut one, &cut(&k, 0, 900), &cut(&v, 0, 900), 128);
    let before = (one.fetch().unwrap(), one.nbytes());
    let mut two = one.clone();
    fill(&mut two, &cut(&k, 900, t), &cut(&v, 900, t), 128);
    two.trim(1500).unwrap();
    assert_eq!((one.fetch().unwrap(), one.nbytes()), before);
}

#[test]
fn prefill_in_chunks_never_holds_much_more_than_at_the_end() {
    // T46: packed while it comes in, not after; and a tenfold prompt costs what its archive costs.
    let (h, t, chunk) = (2, 8192, 512);
    let mut cache = tiered(&Cpu, "turboquant-mse@4/4,window=128", SHORT);
    let x = half(&gauss(&[1, h, chunk, D], 5));
    let (mut peak, mut sizes) = (0, vec![]);
    for _ in 0..t / chunk {
        cache.append(&x, &x).unwrap();
        peak = peak.max(cache.nbytes());
        sizes.push(cache.nbytes());
    }
    let last = cache.nbytes();
    assert!(peak as f64 <= 1.15 * last as f64 + (chunk * h * 4 * D) as f64);
    // From the archive's border on, a chunk adds archive rows only: 2 and 1 bits with two-byte scales.
    let growth = sizes[sizes.len() - 1] - sizes[sizes.len() - 5];
    assert_eq!(growth, 4 * chunk * h * (2 * D / 8 + 2 + D / 8 + 2));
    assert!(cache.segments().len() < 12, "{} segments", cache.segments().len());
}

/// Decodes `t` tokens; keys of `loud` positions point to every query, so that they draw most attention.
fn decode(cache: &mut LayerCache<Cpu>, t: usize, loud: &[usize], seed: u64) {
    let (h, rep) = (2, 2);
    let direction = gauss(&[1, 1, 1, D], 77).to_f32().unwrap();
    let at = cache.offset();
    let noise = gauss(&[1, h, t, D], seed).to_f32().unwrap();
    let mut k = noise;
    for (i, row) in k.chunks_exact_mut(D).enumerate() {
        let gain = if loud.contains(&(at + i % t)) { 1.0 } else { 0.0 };
        row.iter_mut().zip(&direction).for_each(|(x, d)| *x = 0.3 * *x + gain * d);
    }
    let k = half(&Tensor::new(&[1, h, t, D], k).unwrap());
    let v = half(&gauss(&[1, h, t, D], seed + 1));
    let mut q = gauss(&[1, h * rep, t, D], seed + 2).to_f32().unwrap();
    q.chunks_exact_mut(D).for_each(|row| row.iter_mut().zip(&direction).for_each(|(x, d)| *x = 0.1 * *x + d));
    let q = half(&Tensor::new(&[1, h * rep, t, D], q).unwrap());
    for i in 0..t {
        let one = |x: &Tensor| cut(x, i, i + 1);
        cache.update_and_attend(&one(&q), &one(&k), &one(&v), &Rules::causal(0.125)).unwrap();
    }
}

#[test]
fn what_draws_attention_keeps_its_bits() {
    let mut cache = tiered(&Cpu, "best@4/4,window=64", "attention");
    cache.pin(1000..1001).unwrap();
    decode(&mut cache, 2200, &[300], 10);
    let blocks = cache.blocks();
    let at = |p: usize| *blocks.iter().find(|b| (b.start..b.start + b.len).contains(&p)).unwrap();
    let heavy = at(300);
    assert_eq!(heavy.tier, 0, "{heavy:?}");
    assert!(heavy.mass > 3.0 * at(500).mass, "{} against {}", heavy.mass, at(500).mass);
    assert!(at(1000).pinned && at(1000).tier == 0, "{:?}", at(1000));
    let tiers: Vec<usize> = blocks.iter().map(|b| b.tier).collect();
    assert!(tiers.iter().filter(|&&t| t >= 2).count() > blocks.len() / 2, "{tiers:?}");
    // Nothing falls before it was observed often enough.
    assert!(blocks.iter().all(|b| b.tier == 0 || b.observed >= 4));
    let report = cache.report().unwrap();
    assert_eq!(report.bytes(), cache.nbytes());
    let mass: f32 = report.parts.iter().map(|p| p.mass).sum();
    assert!((0.5..1.5).contains(&mass), "{mass}");
    // Without the pin it may fall.
    cache.unpin(0..usize::MAX).unwrap();
    decode(&mut cache, 300, &[], 20);
    assert!(cache.blocks().iter().all(|b| !b.pinned));
    assert!(matches!(cache.pin(std::ops::Range { start: 5, end: 3 }), Err(Error::Range { .. })));
}

#[test]
fn eviction_is_final_and_moves_no_one() {
    // T34: the offset counts all tokens, the survivors stay where they were.
    let policy = "attention:0.5=8/8,rest=4/4,patience=2,evict=0.03";
    let mut cache = tiered(&Cpu, "best@4/4,window=64", policy);
    decode(&mut cache, 1500, &[200, 900], 10);
    assert_eq!(cache.offset(), 1500);
    assert!(cache.len() < 1200, "{}", cache.len());
    let held = positions(&cache);
    assert_eq!(held.len(), cache.len());
    assert!(held.windows(2).all(|w| w[0] < w[1]) && held[..4] == [0, 1, 2, 3]);
    assert!(held.contains(&200) && held.contains(&900) && held.contains(&1499), "heavy hitters stay");
    assert_eq!(cache.report().unwrap().bytes(), cache.nbytes());
    let (fk, fv) = cache.fetch().unwrap();
    assert_eq!(fk.shape()[2], held.len());
    let q = gauss(&[1, 4, 2, D], 9);
    let out = cache.attend(&q, &Rules::causal(0.125)).unwrap().to_f32().unwrap();
    assert!(greatest_difference(&out, &exact(&q, &fk, &fv, 0.125, &held)) < 5e-3);

    let gone: Vec<usize> = (0..1500).filter(|p| !held.contains(p)).collect();
    decode(&mut cache, 400, &[], 30);
    let later = positions(&cache);
    assert!(gone.iter().all(|p| !later.contains(p)), "what is gone stays away");
    assert_eq!(cache.offset(), 1900);

    // A mask covers positions, those of evicted tokens too.
    let one = half(&gauss(&[1, 2, 1, D], 40));
    let mask = Tensor::new(&[1, 1, 1, 1901], vec![1u8; 1901]).unwrap();
    let rules = Rules { mask: Some(mask), ..Rules::causal(0.125) };
    let q = half(&gauss(&[1, 4, 1, D], 41));
    let mut plain = cache.clone();
    let masked = cache.update_and_attend(&q, &one, &one, &rules).unwrap();
    assert_eq!(masked, plain.update_and_attend(&q, &one, &one, &Rules::causal(0.125)).unwrap());

    // Trimming goes by position.
    assert_eq!(cache.trim(1).unwrap(), 1);
    let later = positions(&cache);
    let n = later.len();
    assert_eq!((cache.trim(3).unwrap(), cache.len(), cache.offset()), (3, n - 3, 1897));
    assert_eq!(cache.trim(1800).unwrap(), 1800);
    assert_eq!(cache.offset(), 97);
    assert_eq!(positions(&cache), later.iter().copied().filter(|&p| p < 97).collect::<Vec<_>>());
    decode(&mut cache, 5, &[], 50);
    assert_eq!(*positions(&cache).last().unwrap(), 101);
}

#[test]
fn masses_add_up_to_one() {
    let (b, h, rep, t) = (2, 2, 2, 1200);
    let (k, v) = (keys(&[b, h, t, D], 1), gauss(&[b, h, t, D], 2));
    let mut cache = tiered(&Cpu, "best@4/4", SHORT);
    fill(&mut cache, &k, &v, 300);
    let parts = cache.segments();
    let q = gauss(&[b, h * rep, 3, D], 5);
    let sinks = Tensor::new(&[4], vec![0.0f32, 2.0, f32::NEG_INFINITY, 9.0]).unwrap();
    let hide = Tensor::new(&[1, 1, 3, t], (0..3 * t).map(|i| u8::from(i % 7 != 0)).collect()).unwrap();
    let plain = Rules::causal(0.125);
    for rules in [
        plain.clone(),
        Rules { sink_logits: Some(sinks), ..plain.clone() },
        Rules { mask: Some(hide), soft_cap: Some(20.0), left_padding: vec![5, 0], ..plain.clone() },
        Rules { sliding_window: Some(100), ..plain.clone() },
    ] {
        let masses = Cpu.masses(&parts, &q, &rules).unwrap();
        assert_eq!(masses.len(), parts.len());
        assert!((masses.iter().map(|&m| f64::from(m)).sum::<f64>() - 1.0).abs() < 1e-5, "{masses:?}");
        assert!(masses.iter().all(|m| *m >= 0.0));
    }
    let narrow = Cpu.masses(&parts, &q, &Rules { sliding_window: Some(100), ..plain.clone() }).unwrap();
    assert_eq!(narrow[..parts.len() - 1].iter().sum::<f32>(), 0.0, "only the window is seen");
    let blind = Tensor::new(&[1, 1, 3, t], vec![0u8; 3 * t]).unwrap();
    let none = Cpu.masses(&parts, &q, &Rules { mask: Some(blind), ..plain }).unwrap();
    assert!(none.iter().all(|m| *m == 0.0));
}

#[test]
fn a_model_counts_its_kv_layers_and_exempts_some() {
    // T14 and hybrids: layers 1, 4 have no keys and values.
    let shape = Some(LayerShape { key_dim: D, value_dim: D });
    let shapes = [shape, None, shape, shape, None, shape];
    let recipe: Recipe = "best@4/4,sinks=0,window=0".parse().unwrap();
    let mut cache = KvCache::new(Cpu, &recipe, &shapes, &[KvLayer(0), KvLayer(3)])
        .unwrap()
        .with_tiers(&SHORT.parse().unwrap(), 16)
        .unwrap();
    assert_eq!((cache.layers().len(), cache.ordinal(1), cache.ordinal(5)), (4, None, Some(KvLayer(3))));
    assert!(cache.at(4).is_none() && cache.at(9).is_none());
    let t = 1900;
    let x = half(&gauss(&[1, 2, t, D], 3));
    for layer in 0..shapes.len() {
        if let Some(layer) = cache.at(layer) {
            layer.update_and_fetch(&x, &x).unwrap();
        }
    }
    for (i, layer) in cache.layers().iter().enumerate() {
        let same = layer.fetch().unwrap().0 == x;
        assert_eq!(same, i == 0 || i == 3, "ordinal {i}");
    }
    let reports = cache.report().unwrap();
    assert_eq!(reports.iter().map(|r| r.bytes()).sum::<usize>(), cache.nbytes());
    assert!(reports[0].bytes() > 2 * reports[1].bytes());
    assert_eq!((cache.offset(), cache.trim(100).unwrap(), cache.offset()), (t, 100, t - 100));
    assert!(matches!(
        KvCache::new(Cpu, &recipe, &shapes, &[KvLayer(4)]),
        Err(Error::Unsupported { field: "exempt", .. })
    ));
    let mixed = KvCache::with_recipes(Cpu, &shapes, |i| format!("best@{}/2", i + 1).parse().unwrap());
    let key_bits: Vec<f32> =
        mixed.unwrap().layers().iter().map(|l| l.recipe().key.unwrap().nominal_bits()).collect();
    assert_eq!(key_bits, [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn what_has_no_form_is_refused_at_construction() {
    let make = |recipe: &str, policy: &str, every: usize| {
        let shape = LayerShape { key_dim: D, value_dim: D };
        LayerCache::new(Cpu, &recipe.parse().unwrap(), 0, shape)
            .unwrap()
            .with_tiers(&policy.parse().unwrap(), every)
    };
    // The residual takes one of the bits: there is no one-bit form.
    assert!(matches!(make("turboquant-prod@4/4", "progressive", 16), Err(Error::Unsupported { .. })));
    assert!(matches!(
        make("best@4/4", "attention", 0),
        Err(Error::Unsupported { field: "observe_every", .. })
    ));
    assert!(make("best@16/16", "progressive", 16).is_ok());
}

#[cfg(feature = "mlx")]
#[test]
fn the_graph_has_the_same_tiers_and_masses() {
    use turbomoq::Mlx;
    let mlx = Mlx::new();
    let (h, rep, t) = (2, 2, 1400);
    let (k, v) = (half(&keys(&[1, h, t, D], 1)), half(&gauss(&[1, h, t, D], 2)));
    let policy = "progressive:256=16/16,512=4/4,rest=2/1";
    let mut host = tiered(&Cpu, "turboquant-mse@4/4,sinks=4,window=128", policy);
    let mut device = tiered(&mlx, "turboquant-mse@4/4,sinks=4,window=128", policy);
    let put = |x: &Tensor| mlx.put(x).unwrap();
    host.update_and_fetch(&k, &v).unwrap();
    device.update_and_fetch(&put(&k), &put(&v)).unwrap();
    assert_eq!(host.report().unwrap(), device.report().unwrap());
    let q = gauss(&[1, h * rep, 1, D], 5);
    let rules = Rules { exact: true, ..Rules::causal(0.125) };
    let a = Cpu.masses(&host.segments(), &q, &rules).unwrap();
    let b = mlx.masses(&device.segments(), &put(&q), &Rules::causal(0.125)).unwrap();
    assert!(greatest_difference(&a, &b) < 1e-3, "{a:?} {b:?}");
    assert!((b.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let a = host.attend(&q, &rules).unwrap().to_f32().unwrap();
    let b = device.attend(&put(&q), &Rules::causal(0.125)).unwrap();
    assert!(greatest_difference(&a, &mlx.get(&b).unwrap().to_f32().unwrap()) < 5e-3);
}
