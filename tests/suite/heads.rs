//! Heads of different widths in one layer: each head answers as it would alone, and a plan is held by files and refused by others.

use proptest::prelude::*;
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::Side;
use turbomoq::allocation::{HeadSide, allocate, loss};
use turbomoq::cache::{GroupsState, HeadGroups, KvCache, LayerCache, LayerShape};
use turbomoq::internals::math::rng::Rng;
use turbomoq::{Compressor, Dtype, Error, Recipe, Tensor};

const SHAPE: LayerShape = LayerShape { key_dim: 64, value_dim: 64 };

fn random(rng: &mut Rng, shape: [usize; 4]) -> Tensor {
    let values = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_f32(Dtype::F32, &shape, values).unwrap()
}

fn close(a: &Tensor, b: &Tensor, most: f32) {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.to_f32().unwrap(), b.to_f32().unwrap());
    let worst = a.iter().zip(&b).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= most, "differ by {worst}");
}

#[test]
fn every_head_answers_as_it_would_alone() {
    let recipe: Recipe = "best,window=64,key-bits=3-4.2.4,value-bits=3-2".parse().unwrap();
    let mut groups = HeadGroups::new(Cpu, &recipe, 1, SHAPE, 3).unwrap();
    assert_eq!(groups.groups().map(|g| g.0.to_vec()).collect::<Vec<_>>(), [vec![0, 2], vec![1]]);
    let alone = |bits: u8| {
        let recipe: Recipe = format!("best@{bits}/2,window=64").parse().unwrap();
        LayerCache::new(Cpu, &recipe, 1, SHAPE).unwrap()
    };
    let mut heads = [alone(4), alone(2), alone(4)];
    let mut rng = Rng::new(5, 0);
    let rules = Rules { exact: true, ..Rules::causal(0.125) };
    for tokens in [300, 1, 7, 130] {
        let [k, v] = [(); 2].map(|()| random(&mut rng, [1, 3, tokens, 64]));
        let q = random(&mut rng, [1, 6, tokens, 64]);
        let out = groups.update_and_attend(&q, &k, &v, &rules).unwrap();
        for (h, cache) in heads.iter_mut().enumerate() {
            let one = |x: &Tensor, share: usize| x.slice(1, h * share, (h + 1) * share).unwrap();
            let expected = cache.update_and_attend(&one(&q, 2), &one(&k, 1), &one(&v, 1), &rules).unwrap();
            close(&one(&out, 2), &expected, 1e-6);
        }
    }
    assert_eq!(groups.nbytes(), heads.iter().map(LayerCache::nbytes).sum::<usize>());
    assert_eq!(groups.trim(200).unwrap(), 200);
    let (keys, values) =
        groups.update_and_fetch(&random(&mut rng, [1, 3, 1, 64]), &random(&mut rng, [1, 3, 1, 64])).unwrap();
    assert_eq!((keys.shape(), values.shape()), (&[1, 3, 239, 64][..], &[1, 3, 239, 64][..]));
}

#[test]
fn groups_go_on_from_their_state() {
    let recipe: Recipe = "best,window=64,key-bits=3-4.2.4,value-bits=3-2".parse().unwrap();
    let mut rng = Rng::new(7, 0);
    for tokens in [0, 5, 300] {
        let mut one = HeadGroups::new(Cpu, &recipe, 1, SHAPE, 3).unwrap();
        if tokens > 0 {
            let [k, v] = [(); 2].map(|()| random(&mut rng, [1, 3, tokens, 64]));
            one.append(&k, &v).unwrap();
        }
        let state = one.state().unwrap();
        let mut two = HeadGroups::from_state(Cpu, &state).unwrap();
        let held = |cache: &HeadGroups<Cpu>| -> Vec<_> {
            cache.groups().map(|(heads, cache)| (heads.to_vec(), cache.offset(), cache.len())).collect()
        };
        assert_eq!(held(&two), held(&one));
        let [k, v] = [(); 2].map(|()| random(&mut rng, [1, 3, 200, 64]));
        assert_eq!(one.update_and_fetch(&k, &v).unwrap(), two.update_and_fetch(&k, &v).unwrap());
        let refused = |change: &dyn Fn(&mut GroupsState<Tensor>)| {
            let mut bad = state.clone();
            change(&mut bad);
            matches!(HeadGroups::from_state(Cpu, &bad), Err(Error::Parse { .. }))
        };
        assert!(refused(&|bad| bad.heads = vec![vec![0, 1], vec![1]]));
        assert!(refused(&|bad| bad.heads = vec![vec![0, 3], vec![1]]));
        assert!(refused(&|bad| bad.heads.push(vec![])));
        assert!(refused(&|bad| bad.groups.truncate(1)));
        assert!(refused(&|bad| (bad.groups, bad.heads) = (vec![], vec![])));
        if tokens > 0 {
            assert!(refused(&|bad| bad.heads.swap(0, 1)), "two heads for a cache of one");
            let fewer = HeadGroups::new(Cpu, &recipe, 1, SHAPE, 3).unwrap().state().unwrap();
            assert!(refused(&|bad| bad.groups[1] = fewer.groups[1].clone()), "another offset");
        }
    }
}

#[test]
fn masks_and_sink_logits_go_to_their_heads() {
    let recipe: Recipe = "best,sinks=0,window=0,key-bits=4.2,value-bits=3.3".parse().unwrap();
    let mut groups = HeadGroups::new(Cpu, &recipe, 0, SHAPE, 2).unwrap();
    let mut rng = Rng::new(6, 0);
    let [k, v] = [(); 2].map(|()| random(&mut rng, [1, 2, 140, 64]));
    groups.append(&k, &v).unwrap();
    let q = random(&mut rng, [1, 4, 1, 64]);
    let mask: Vec<u8> = (0..4 * 140).map(|i| u8::from(i % 140 > i / 140 * 20)).collect();
    let mask = Tensor::new(&[1, 4, 1, 140], mask).unwrap();
    let logits = Tensor::new(&[4], vec![0.0f32, 5.0, 1.0, -3.0]).unwrap();
    let rules = Rules { mask: Some(mask), sink_logits: Some(logits), exact: true, ..Rules::causal(0.125) };
    let out = groups.attend(&q, &rules).unwrap();
    for (h, bits) in [(0, 4), (1, 2)] {
        let recipe: Recipe = format!("best@{bits}/3,sinks=0,window=0").parse().unwrap();
        let mut cache = LayerCache::new(Cpu, &recipe, 0, SHAPE).unwrap();
        let one = |x: &Tensor, axis: usize, n: usize| x.slice(axis, h * n, (h + 1) * n).unwrap();
        cache.append(&one(&k, 1, 1), &one(&v, 1, 1)).unwrap();
        let own = Rules {
            mask: rules.mask.as_ref().map(|m| one(m, 1, 2)),
            sink_logits: rules.sink_logits.as_ref().map(|s| one(s, 0, 2)),
            ..rules.clone()
        };
        close(&one(&out, 1, 2), &cache.attend(&one(&q, 1, 2), &own).unwrap(), 1e-6);
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let recipe: Recipe = "best,key-bits=3-4.2.4,value-bits=3-2".parse().unwrap();
    assert_eq!(recipe.to_string().parse::<Recipe>().unwrap(), recipe);
    let no = |layer, heads| match HeadGroups::new(Cpu, &recipe, layer, SHAPE, heads) {
        Err(Error::Unsupported { field, .. }) => assert_eq!(field, "bits of a head"),
        other => panic!("{other:?}"),
    };
    no(2, 3); // no such layer
    no(1, 4); // three widths for four heads
    no(1, 2); // three widths for two heads
    assert!(HeadGroups::new(Cpu, &recipe, 1, SHAPE, 0).is_err());
    assert!("best,key-bits=3".parse::<Recipe>().is_err(), "one side alone");
    for (layers, fits) in [(1, false), (2, true), (3, false)] {
        let plan: Recipe = "best,key-bits=3-4,value-bits=3-2".parse().unwrap();
        let cache = KvCache::new(Cpu, &plan, &vec![Some(SHAPE); layers], &[]);
        assert_eq!(cache.is_ok(), fits, "{layers} layers");
    }
    // A whole-cache file has one codec for all heads of a layer.
    let compressor = Compressor::new(recipe);
    assert!(compressor.codec(Side::Key, 0, 64).unwrap().is_some_and(|c| c.spec().bits == 3));
    assert!(matches!(compressor.codec(Side::Key, 1, 64), Err(Error::Unsupported { .. })));
    assert!(compressor.codec(Side::Value, 2, 64).is_err());
}

#[test]
fn new_rows_that_do_not_fit_leave_every_group_as_it_was() {
    let recipe: Recipe = "best,key-bits=4.2,value-bits=3".parse().unwrap();
    let mut groups = HeadGroups::new(Cpu, &recipe, 0, SHAPE, 2).unwrap();
    let mut rng = Rng::new(7, 0);
    let [k, v] = [(); 2].map(|()| random(&mut rng, [1, 2, 5, 64]));
    groups.append(&k, &v).unwrap();
    let before = groups.nbytes();
    assert!(groups.append(&k, &random(&mut rng, [1, 2, 4, 64])).is_err());
    assert!(groups.append(&random(&mut rng, [1, 3, 5, 64]), &v).is_err());
    assert!(groups.update_and_attend(&random(&mut rng, [1, 3, 5, 64]), &k, &v, &Rules::causal(1.0)).is_err());
    assert_eq!((groups.offset(), groups.nbytes()), (5, before));
}

proptest! {
    #[test]
    fn allocation_keeps_its_laws(
        prices in prop::collection::vec(0.0f64..10.0, 1..40),
        average in 1.0f64..8.0,
        least in 1u8..3,
    ) {
        let parts: Vec<HeadSide> =
            prices.iter().enumerate().map(|(h, &p)| HeadSide::by_price(0, h, Side::Key, 64, p)).collect();
        prop_assume!(average >= f64::from(least));
        let widths = allocate(&parts, average, least, 8).unwrap();
        let sum: f64 = widths.iter().map(|&w| f64::from(w)).sum();
        let budget = average * parts.len() as f64;
        prop_assert!(sum <= budget + 1e-9);
        // Met within one step of the hull, which may be more than a bit where the distortions are not quite convex, unless more bits
        // would buy nothing.
        let can_use = parts.iter().zip(&widths).any(|(p, &w)| w < 8 && p.losses[0] > 0.0);
        prop_assert!(sum > budget - 2.0 || !can_use, "{sum} of {}", budget);
        for (i, j) in (0..parts.len()).flat_map(|i| (0..parts.len()).map(move |j| (i, j))) {
            prop_assert!(prices[i] <= prices[j] || widths[i] >= widths[j], "not monotone");
        }
        let uniform = vec![average.floor() as u8; parts.len()];
        prop_assert!(loss(&parts, &widths) <= loss(&parts, &uniform) + 1e-12);
        prop_assert_eq!(widths, allocate(&parts, average, least, 8).unwrap());
    }
}
