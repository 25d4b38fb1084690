//! What mlx-lm's cache contract asks beyond append and attend: state and from_state, masks, and field cases of streaming.

use crate::common::attention::{cache, exact};
use crate::common::*;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::cache::{KvCache, KvLayer, LayerCache, LayerShape, Mask, State};
use turbomoq::policy::TierPolicy;
use turbomoq::{Error, Recipe, Tensor};

const RECIPES: [&str; 6] = [
    "key=d128:b3:equalised:hadamard:trellis10:unbiased:wide8,value=exact,sinks=4,window=32",
    "best@4/4",
    "best@2.5/16,window=32",
    "turboquant-prod@4/4,window=16",
    "kivi@2/2",
    "mlx-affine@4/3,sinks=4,window=32",
];

fn cut(x: &Tensor, a: usize, b: usize) -> Tensor {
    x.slice(2, a, b).unwrap()
}

fn goes_on_from_its_state<E: Engine + Clone>(engine: &E, recipes: &[&str], policies: &[&str], t: usize) {
    let (h, d) = (2, 64);
    let (k, v, q) = (keys(&[1, h, t, d], 1), gauss(&[1, h, t, d], 2), gauss(&[1, 2 * h, t, d], 3));
    let host = |x: &E::Tensor| engine.get(x).unwrap().to_f32().unwrap();
    for recipe in recipes {
        for policy in policies {
            for at in [0, 3, 131, 2 * t / 3] {
                let what = format!("{recipe}, {policy}, {at} tokens");
                let policy: TierPolicy = policy.parse().unwrap();
                let mut one = cache(engine, recipe, d).with_tiers(&policy, 4).unwrap();
                let step = |cache: &mut LayerCache<E>, a: usize, b: usize| {
                    let put = |x: &Tensor| engine.put(&cut(x, a, b)).unwrap();
                    host(
                        &cache
                            .update_and_attend(&put(&q), &put(&k), &put(&v), &Rules::causal(0.125))
                            .unwrap(),
                    )
                };
                if at > 0 {
                    step(&mut one, 0, at);
                }
                let state = one.state().unwrap();
                let mut two = LayerCache::from_state(engine.clone(), &state).unwrap();
                assert_eq!((two.offset(), two.len()), (one.offset(), one.len()), "{what}");
                assert_eq!(two.recipe(), one.recipe(), "{what}");
                for (a, b) in [(at, at + 1), (at + 1, t)] {
                    let far = greatest_difference(&step(&mut one, a, b), &step(&mut two, a, b));
                    assert!(far <= if engine.name() == "cpu" { 0.0 } else { 1e-4 }, "{what}: {far}");
                }
                let ((ka, va), (kb, vb)) = (one.fetch().unwrap(), two.fetch().unwrap());
                assert_eq!(greatest_difference(&host(&ka), &host(&kb)), 0.0, "{what}");
                assert_eq!(greatest_difference(&host(&va), &host(&vb)), 0.0, "{what}");
                assert_eq!(two.blocks(), one.blocks(), "{what}");
            }
        }
    }
}

#[test]
fn a_cache_goes_on_from_its_state() {
    goes_on_from_its_state(&Cpu, &RECIPES, &["none"], 700);
    let policies = ["progressive:128=16/16,256=6/6,rest=3/2", "attention"];
    goes_on_from_its_state(&Cpu, &["best@4/4", "turboquant-mse@4/4"], &policies, 900);
}

#[test]
fn exact_rows_of_a_state_are_cut_to_the_tokens() {
    let x = gauss(&[1, 2, 5, 64], 1);
    let mut cache = cache(&Cpu, "best@4/4", 64);
    cache.append(&x, &x).unwrap();
    let state = cache.state().unwrap();
    let rows = |name: &str| state.arrays[name].shape()[2];
    assert_eq!(["sinks.keys", "sinks.values", "window.keys", "window.values"].map(rows), [4, 4, 1, 1]);
}

#[test]
fn states_that_contradict_themselves_are_refused() {
    let (k, v) = (keys(&[1, 2, 400, 64], 1), gauss(&[1, 2, 400, 64], 2));
    let mut cache = cache(&Cpu, "best@4/4", 64);
    cache.append(&k, &v).unwrap();
    let good = cache.state().unwrap();
    assert!(LayerCache::from_state(Cpu, &good).is_ok());
    for name in good.arrays.keys().filter(|name| !name.starts_with("frame")) {
        let mut bad = good.clone();
        bad.arrays.remove(name);
        assert!(matches!(LayerCache::from_state(Cpu, &bad), Err(Error::Parse { .. })), "without {name}");
        let mut bad = good.clone();
        let short = bad.arrays[name].slice(2, 0, 1).unwrap();
        bad.arrays.insert(name.clone(), short);
        assert!(LayerCache::from_state(Cpu, &bad).is_err() || good.arrays[name].shape()[2] == 1, "{name}");
    }
    let with = |from: &str, to: &str| State { meta: good.meta.replacen(from, to, 1), ..good.clone() };
    for (from, to) in [
        ("\"version\":1", "\"version\":2"),
        ("\"offset\":400", "\"offset\":300"),
        ("\"window\":", "\"window\":1"),
        ("\"start\":4", "\"start\":2"),
        ("{", "["),
    ] {
        assert!(good.meta.contains(from), "{from} in {}", good.meta);
        assert!(LayerCache::from_state(Cpu, &with(from, to)).is_err(), "{from} to {to}");
    }
}

/// The state of a cache with outlier channels, gains, a centre and tiers, and the same of one without tiers.
fn states<E: Engine + Clone>(engine: &E) -> [State<E::Tensor>; 2] {
    let (k, v) = (keys(&[1, 2, 500, 64], 1), gauss(&[1, 2, 500, 64], 2));
    ["progressive:128=4/4,rest=3/2", "none"].map(|policy| {
        let recipe =
            "key=d64:b4+16:equalised:hadamard:lloyd,value=d64:b4:hadamard:lloyd,centred,sinks=4,window=32";
        let cache = cache(engine, recipe, 64).with_tiers(&policy.parse().unwrap(), 4);
        let mut cache = cache.unwrap();
        cache.append(&engine.put(&k).unwrap(), &engine.put(&v).unwrap()).unwrap();
        cache.state().unwrap()
    })
}

fn false_tables_are_refused<E: Engine + Clone>(engine: &E) {
    for good in states(engine) {
        assert!(LayerCache::from_state(engine.clone(), &good).is_ok());
        let refused = |name: &str, change: &dyn Fn(&mut Vec<f32>, &mut Vec<u32>)| {
            let table = engine.get(&good.arrays[name]).unwrap();
            let (mut floats, mut places) =
                (table.to_vec::<f32>().unwrap_or_default(), table.to_vec::<u32>().unwrap_or_default());
            change(&mut floats, &mut places);
            let table = match table.float() {
                Some(_) => Tensor::new(table.shape(), floats),
                None => Tensor::new(table.shape(), places),
            };
            let mut bad = good.clone();
            bad.arrays.insert(name.into(), engine.put(&table.unwrap()).unwrap());
            let made = LayerCache::from_state(engine.clone(), &bad).map(|_| ());
            assert!(matches!(made, Err(Error::Unsupported { .. })), "{name}: {made:?}");
        };
        // Bits of a tier are whole, without channels of their own width.
        let orders = good.arrays.contains_key("frame.keys.order");
        if orders {
            refused("frame.keys.order", &|_, places| places[70] = u32::MAX);
            refused("frame.keys.order", &|_, places| places[3] = 64);
            refused("frame.keys.order", &|_, places| places[127] = places[64]);
        }
        for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            refused("frame.keys.gain", &|floats, _| floats[65] = bad);
        }
        refused("frame.keys.centre", &|floats, _| floats[127] = f32::NEG_INFINITY);
        let named = |name: &&str| good.arrays.contains_key(*name);
        for name in ["frame.keys.order", "frame.keys.gain", "frame.keys.centre"].into_iter().filter(named) {
            let mut bad = good.clone();
            bad.arrays.remove(name);
            assert!(LayerCache::from_state(engine.clone(), &bad).is_err(), "without {name}");
        }
        for name in ["frame.keys.order", "frame.keys.gain", "body.0.keys.words", "body.0.values.scales"]
            .into_iter()
            .filter(named)
        {
            // Another dtype of the right shape.
            let mut bad = good.clone();
            let zeros = Tensor::new(
                engine.get(&good.arrays[name]).unwrap().shape(),
                vec![0i32; engine.get(&good.arrays[name]).unwrap().len()],
            );
            bad.arrays.insert(name.into(), engine.put(&zeros.unwrap()).unwrap());
            let made = LayerCache::from_state(engine.clone(), &bad).map(|_| ());
            assert!(matches!(made, Err(Error::Dtype { .. })), "{name} as i32: {made:?}");
        }
    }
    assert!(states(engine)[1].arrays.contains_key("frame.keys.order"));
}

#[test]
fn tables_of_a_state_that_would_read_outside_of_a_row_are_refused() {
    false_tables_are_refused(&Cpu);
    #[cfg(feature = "mlx")]
    false_tables_are_refused(&turbomoq::Mlx::new());
}

#[test]
fn positions_of_a_state_that_do_not_add_up_are_refused() {
    let [tiered, plain] = states(&Cpu);
    let most = usize::MAX;
    for (state, edits) in [
        (&plain, vec![("\"offset\":500", "\"offset\":501"), ("\"offset\":500", "\"offset\":499")]),
        (&plain, vec![("\"start\":4", "\"start\":5"), ("\"sinks\":4", "\"sinks\":3")]),
        (&plain, vec![("\"framed\":true", "\"framed\":false")]),
        (&tiered, vec![("\"offset\":500", "\"offset\":501")]),
        (
            &tiered,
            vec![("\"tier\":1", "\"tier\":0"), ("\"tier\":0", "\"tier\":1"), ("\"tier\":1", "\"tier\":7")],
        ),
        (
            &tiered,
            vec![("\"len\":128,\"tier\"", "\"len\":64,\"tier\""), ("\"unobserved\":0", "\"unobserved\":4")],
        ),
        (
            &tiered,
            vec![(
                "\"blocks\":[{",
                "\"blocks\":[{\"start\":4,\"len\":128,\"tier\":1,\"mass\":{\"sum\":0.0,\"weight\":0.0,\"steps\":0}},{",
            )],
        ),
    ] {
        for (from, to) in edits {
            assert!(state.meta.contains(from), "{from} in {}", state.meta);
            let bad = State { meta: state.meta.replacen(from, to, 1), ..state.clone() };
            let made = LayerCache::from_state(Cpu, &bad);
            assert!(
                matches!(made, Err(Error::Parse { .. } | Error::CodecMismatch { .. } | Error::Shape { .. })),
                "{from} to {to}: {made:?}"
            );
        }
    }
    // Numbers at which sums would overflow, in every place.
    for state in [&tiered, &plain] {
        for name in ["offset", "sinks", "start", "len", "tier", "unobserved"] {
            let key = format!("\"{name}\":");
            for (at, _) in state.meta.match_indices(&key) {
                let digits = state.meta[at + key.len()..].find(|c: char| !c.is_ascii_digit()).unwrap();
                let (before, after) = (&state.meta[..at + key.len()], &state.meta[at + key.len() + digits..]);
                if digits == 0 || before.ends_with("recipe\":") {
                    continue;
                }
                let bad = State { meta: format!("{before}{most}{after}"), ..state.clone() };
                assert!(LayerCache::from_state(Cpu, &bad).is_err(), "{name} at {at}");
            }
        }
    }
}

#[test]
fn arrays_of_a_state_that_do_not_fit_one_another_are_refused() {
    let [tiered, plain] = states(&Cpu);
    for good in [&tiered, &plain] {
        for (name, array) in &good.arrays {
            // One head of two, none, and both heads one behind the other.
            let wide = Tensor::concat(1, &[array.clone(), array.clone()]).unwrap();
            for bad in [array.slice(1, 0, 1).unwrap(), array.slice(0, 0, 0).unwrap(), wide] {
                let mut state = good.clone();
                state.arrays.insert(name.clone(), bad.clone());
                assert!(LayerCache::from_state(Cpu, &state).is_err(), "{name} as {:?}", bad.shape());
            }
        }
        // Queries that no tokens came with, of other heads, and beside frames.
        for bad in [[1, 4, 3, 64], [1, 3, 3, 64], [2, 4, 3, 64], [1, 4, 0, 64]] {
            let mut state = good.clone();
            state.arrays.insert("queries".into(), gauss(&bad, 9));
            assert!(LayerCache::from_state(Cpu, &state).is_err(), "queries {bad:?}");
        }
    }
}

#[test]
fn a_model_goes_on_from_its_state() {
    // A hybrid: the middle layer has no keys and values.
    let shape = Some(LayerShape { key_dim: 64, value_dim: 64 });
    let mut one =
        KvCache::new(Cpu, &"best@4/4".parse().unwrap(), &[shape, None, shape], &[KvLayer(1)]).unwrap();
    let (k, v) = (keys(&[1, 2, 300, 64], 1), gauss(&[1, 2, 300, 64], 2));
    one.layers_mut().iter_mut().for_each(|l| l.append(&k, &v).unwrap());
    let state = one.state().unwrap();
    let two = KvCache::from_state(Cpu, &state).unwrap();
    assert_eq!((two.offset(), two.ordinal(1), two.ordinal(2)), (300, None, Some(KvLayer(1))));
    for (a, b) in one.layers().iter().zip(two.layers()) {
        assert_eq!(a.fetch().unwrap(), b.fetch().unwrap());
    }
    let mut bad = state.clone();
    bad.ordinals = vec![Some(0), Some(0)];
    assert!(KvCache::from_state(Cpu, &bad).is_err());
}

#[test]
fn masks_say_what_the_rules_do() {
    let (t, d) = (300, 64);
    let (k, v) = (keys(&[2, 2, t, d], 1), gauss(&[2, 2, t, d], 2));
    let q = gauss(&[2, 4, 4, d], 3);
    let mut cache = cache(&Cpu, "best@4/4", d);
    assert!(matches!(cache.make_mask(1, false, None, &[]).unwrap(), Mask::None));
    assert!(matches!(cache.make_mask(5, false, None, &[]).unwrap(), Mask::Causal));
    cache.append(&cut(&k, 0, t - 4), &cut(&v, 0, t - 4)).unwrap();
    assert!(matches!(cache.make_mask(1, false, Some(t), &[0, 0]).unwrap(), Mask::None));
    for (window, padding) in
        [(None, vec![]), (Some(50), vec![]), (None, vec![3, 0]), (Some(200), vec![150, 7])]
    {
        // T21: of shape (B, 1, L, stored), the padding of its row hidden, causal within L.
        let Mask::Array(mask) = cache.make_mask(4, true, window, &padding).unwrap() else {
            panic!("no array")
        };
        assert_eq!(mask.shape(), [padding.len().max(1), 1, 4, t]);
        let mut by_mask = cache.clone();
        let mut by_rules = cache.clone();
        let last = |x: &Tensor| cut(x, t - 4, t);
        let rules = Rules { mask: Some(mask), causal: false, ..Rules::causal(0.125) };
        let a = by_mask.update_and_attend(&q, &last(&k), &last(&v), &rules).unwrap();
        let rules = Rules { sliding_window: window, left_padding: padding, ..Rules::causal(0.125) };
        let b = by_rules.update_and_attend(&q, &last(&k), &last(&v), &rules).unwrap();
        let far = greatest_difference(&a.to_f32().unwrap(), &b.to_f32().unwrap());
        assert!(far < 1e-5, "{window:?}: {far}");
    }
}

#[test]
fn t25_what_was_trimmed_is_never_read_again() {
    let (t, d) = (200, 64);
    let (k, v) = (keys(&[1, 2, t, d], 1), gauss(&[1, 2, t, d], 2));
    let q = gauss(&[1, 4, 1, d], 3);
    let bad = Tensor::new(&[1, 2, 60, d], vec![f32::NAN; 2 * 60 * d]).unwrap();
    // At 200 a block leaves the window in between.
    for len in [1, 7, 63, 64, 65, 133, 190, 200] {
        let mut clean = cache(&Cpu, "best@4/4", d);
        clean.append(&cut(&k, 0, len), &cut(&v, 0, len)).unwrap();
        let mut soiled = clean.clone();
        soiled.append(&bad, &bad).unwrap();
        soiled.trim(60).unwrap();
        let attend = |c: &LayerCache<Cpu>| c.attend(&q, &Rules::causal(0.125)).unwrap();
        let out = attend(&soiled);
        assert!(out.to_f32().unwrap().iter().all(|x| x.is_finite()), "{len} tokens");
        let far = greatest_difference(&out.to_f32().unwrap(), &attend(&clean).to_f32().unwrap());
        assert!(far == 0.0 || len == 200, "{len} tokens: {far}");
    }
}

#[test]
fn t26_a_slice_decodes_to_the_rows_of_the_whole() {
    let x = gauss(&[2, 4, 256, 64], 1);
    for bits in [2, 3, 4, 8] {
        for recipe in ["turboquant-mse", "uniform"] {
            let recipe: Recipe = format!("{recipe}@{bits}").parse().unwrap();
            let packed = turbomoq::Compressor::new(recipe).compress_layer(0, &x, &x).unwrap();
            let codes = packed.key.body.as_ref().unwrap();
            let whole = Cpu.decode(codes, turbomoq::Dtype::F32).unwrap();
            for len in [1, 77, 255, 256] {
                let part = Cpu.decode(&codes.slice(0, len).unwrap(), turbomoq::Dtype::F32).unwrap();
                assert_eq!(part, cut(&whole, 0, len).compact(), "{bits} bits, {len} tokens");
            }
        }
    }
}

#[test]
fn t27_small_prefill_chunks_stay_finite() {
    let (h, t, d) = (16, 44, 64);
    let (k, v, q) = (keys(&[1, h, t, d], 1), gauss(&[1, h, t, d], 2), gauss(&[1, h, t, d], 3));
    for recipe in ["uniform@8/8", "turboquant-mse@4/4"] {
        let run = |chunk: usize| -> Vec<f32> {
            let mut cache = cache(&Cpu, recipe, d);
            let step = |at: usize| {
                let part = |x: &Tensor| cut(x, at, (at + chunk).min(t));
                cache.update_and_attend(&part(&q), &part(&k), &part(&v), &Rules::causal(0.125)).unwrap()
            };
            let outs: Vec<Tensor> = (0..t).step_by(chunk).map(step).collect();
            Tensor::concat(2, &outs).unwrap().to_f32().unwrap()
        };
        let whole = run(t);
        for chunk in [1, 2, 3, 4, 5, 7] {
            let out = run(chunk);
            assert!(out.iter().all(|x| x.is_finite()), "{recipe}, chunks of {chunk}");
            assert!(greatest_difference(&out, &whole) < 1e-3, "{recipe}, chunks of {chunk}");
        }
    }
}

#[test]
fn t28_masks_of_every_width() {
    let d = 64;
    for t in (26..=32).chain([63, 64, 65, 95, 96, 127, 128, 129, 160, 192, 224, 320, 383, 384, 385]) {
        let (k, v) = (keys(&[1, 2, t, d], 1), gauss(&[1, 2, t, d], 2));
        let mut cache = cache(&Cpu, "turboquant-mse@4/4,sinks=4,window=16", d);
        cache.append(&k, &v).unwrap();
        let (kf, vf) = cache.fetch().unwrap();
        for l in [1, t] {
            let hidden = |i: usize, j: usize| (i + 2 * j) % 3 == 0;
            let bits = (0..l * t).map(|n| u8::from(!hidden(n / t, n % t))).collect();
            let mask = Some(Tensor::new(&[1, 1, l, t], bits).unwrap());
            let q = gauss(&[1, 4, l, d], 3);
            let rules = Rules { mask, exact: true, ..Rules::causal(0.125) };
            let out = cache.attend(&q, &rules).unwrap().to_f32().unwrap();
            let far = greatest_difference(&out, &exact(&q, &kf, &vf, 0.125, |_, _, i, j| hidden(i, j)));
            assert!(far < 1e-4, "{t} tokens, {l} queries: {far}");
        }
    }
}

#[test]
fn t29_every_pair_of_widths() {
    let t = 260;
    for d in [64, 128] {
        let (k, v) = (keys(&[1, 2, t, d], 1), gauss(&[1, 2, t, d], 2));
        for key in [2, 3, 4, 5, 6, 8, 16u8] {
            for value in [2, 3, 4, 5, 6, 8, 16u8] {
                let mut cache = cache(&Cpu, &format!("turboquant-mse@{key}/{value},sinks=2,window=8"), d);
                cache.append(&k, &v).unwrap();
                let (kf, vf) = cache.fetch().unwrap();
                for l in [1, 4] {
                    let q = gauss(&[1, 4, l, d], 3);
                    let rules = Rules { exact: true, ..Rules::causal(0.09) };
                    let out = cache.attend(&q, &rules).unwrap().to_f32().unwrap();
                    let far = greatest_difference(&out, &exact(&q, &kf, &vf, 0.09, |_, _, _, _| false));
                    assert!(far < 1e-4, "{key}/{value}, {d} channels, {l} queries: {far}");
                }
                let report = cache.report().unwrap();
                let packed = report.parts.iter().find(|p| p.tier == "packed");
                let Some(packed) = packed.filter(|_| (key, value) != (16, 16)) else {
                    assert_eq!((key, value), (16, 16), "nothing is packed");
                    continue;
                };
                // 16 keeps a side in the dtype it came in.
                let bits = |bits: u8| if bits == 16 { 32.0 } else { f32::from(bits) };
                assert_eq!((packed.key_bits, packed.value_bits), (bits(key), bits(value)));
            }
        }
    }
}

#[test]
fn t30_rows_of_a_batch_do_not_depend_on_one_another() {
    let (t, d) = (400, 64);
    let scaled = |x: Tensor, by: f32| {
        Tensor::new(x.shape(), x.to_f32().unwrap().iter().map(|x| x * by).collect::<Vec<f32>>()).unwrap()
    };
    let rows: Vec<[Tensor; 3]> = [(1000.0, 1000.0), (100.0, 500.0), (1.0, 1.0)]
        .iter()
        .zip(0..)
        .map(|(&(by_q, by_k), i)| {
            [
                scaled(gauss(&[1, 2, t, d], 10 + i), by_k),
                gauss(&[1, 2, t, d], 20 + i),
                scaled(gauss(&[1, 4, 1, d], 30 + i), by_q),
            ]
        })
        .collect();
    let run = |which: &[usize]| {
        let join = |i: usize| {
            let parts: Vec<Tensor> = which.iter().map(|&r| rows[r][i].clone()).collect();
            Tensor::concat(0, &parts).unwrap()
        };
        let mut cache = cache(&Cpu, "turboquant-mse@4/4,sinks=4,window=32", d);
        cache.append(&join(0), &join(1)).unwrap();
        cache.attend(&join(2), &Rules::causal(0.125)).unwrap().to_f32().unwrap()
    };
    let alone: Vec<Vec<f32>> = (0..3).map(|r| run(&[r])).collect();
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        for (out, r) in run(&order).chunks_exact(4 * d).zip(order) {
            assert!(greatest_difference(out, &alone[r]) < 1e-4, "row {r} in {order:?}");
        }
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use turbomoq::Mlx;

    #[test]
    fn a_cache_on_mlx_goes_on_from_its_state() {
        let mlx = Mlx::new();
        goes_on_from_its_state(&mlx, &["turboquant-mse@4/4,window=32", "kivi@2/2"], &["none"], 300);
        let policy = "progressive:128=16/16,256=6/6,rest=3/2";
        goes_on_from_its_state(&mlx, &["turboquant-mse@4/4"], &[policy], 600);
    }

    #[test]
    fn t33_scores_of_a_long_prefill_stay_within_a_budget() {
        // All scores at once would be 4 x 1500 x 8192 floats: 197 MB.
        let (t, l, d) = (8192, 1500, 64);
        let (k, v, q) = (gauss(&[1, 1, t, d], 1), gauss(&[1, 1, t, d], 2), gauss(&[1, 4, l, d], 3));
        let mlx = Mlx::new();
        let put = |x: &Tensor| mlx.put(x).unwrap();
        let recipe = "turbomoq@4/16,sinks=0,window=0";
        let (mut host, mut device) = (cache(&Cpu, recipe, d), cache(&mlx, recipe, d));
        host.append(&k, &v).unwrap();
        device.append(&put(&k), &put(&v)).unwrap();
        let bits = (0..l * t).map(|i| u8::from(i % 7 != 0)).collect();
        let mask = Tensor::new(&[1, 1, l, t], bits).unwrap();
        let on_device = Rules { mask: Some(put(&mask)), sliding_window: Some(7900), ..Rules::causal(0.125) };
        let on_host = Rules { mask: Some(mask), sliding_window: Some(7900), ..Rules::causal(0.125) };
        let want = host.attend(&q, &Rules { exact: true, ..on_host }).unwrap().to_f32().unwrap();
        let out = device.attend(&put(&q), &on_device).unwrap();
        let out = mlx.get(&out).unwrap().to_f32().unwrap();
        assert!(greatest_difference(&want, &out) < 1e-3);
    }
}
