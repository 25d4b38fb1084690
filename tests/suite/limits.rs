//! Caches with a size limit, and batches whose rows go different ways (../shared/field-cases.md).

use crate::common::attention::{cache, exact};
use crate::common::*;
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::cache::{KvCache, KvLayer, LayerCache, LayerShape, Mask};
use turbomoq::policy::TierPolicy;
use turbomoq::{Error, Recipe, Tensor};

const D: usize = 64;
const SINKS: usize = 4;
/// The age from which blocks leave, and how many tokens a cache holds at most: a block and the window's new tokens above it.
const LIMIT: usize = 256;
const MOST: usize = SINKS + LIMIT + 2 * 128;
const FOUR_BITS: &str = "key=d64:b4:lloyd:hadamard,value=d64:b4:lloyd:hadamard,sinks=4,window=32";
const EXACT: &str = "uniform@16/16,sinks=4,window=32";

fn limited(recipe: &str) -> LayerCache<Cpu> {
    let policy: TierPolicy = format!("progressive:{LIMIT}=4/4,rest=drop").parse().unwrap();
    cache(&Cpu, recipe, D).with_tiers(&policy, 1).unwrap()
}

fn cut(x: &Tensor, a: usize, b: usize) -> Tensor {
    x.slice(2, a, b).unwrap()
}

/// Keys and values of 1200 tokens.
fn rows(seed: u64) -> [Tensor; 2] {
    [gauss(&[1, 2, 1200, D], seed), gauss(&[1, 2, 1200, D], seed + 1)]
}

/// Positions of the tokens held, with the number of exact ones at the end.
fn positions(cache: &LayerCache<Cpu>) -> Vec<usize> {
    let list: Vec<usize> = cache.segments().iter().flat_map(|s| s.start..s.start + s.keys.len()).collect();
    assert!(list.windows(2).all(|w| w[0] < w[1]), "{list:?}");
    assert!(list.last().is_none_or(|last| *last < cache.offset()), "{list:?}");
    assert_eq!(list.len(), cache.len());
    list
}

/// Every row held is the one that `x` has at its position, sinks to the bit.
fn holds(cache: &LayerCache<Cpu>, [k, v]: &[Tensor; 2], what: &str) {
    let (keys, values) = cache.fetch().unwrap();
    for (got, x) in [(keys, k), (values, v)] {
        for (i, &at) in positions(cache).iter().enumerate() {
            let (a, b) = (cut(&got, i, i + 1).to_f32().unwrap(), cut(x, at, at + 1).to_f32().unwrap());
            let most = if at < SINKS { 0.0 } else { 0.03 };
            assert!(relative_mse(&b, &a) <= most, "{what}: position {at}");
        }
    }
}

#[test]
fn t19_a_limit_holds_for_any_chunks() {
    for recipe in [FOUR_BITS, EXACT] {
        let x = rows(1);
        let mut single = limited(recipe);
        let mut mixed = limited(recipe);
        let mut chunks = [1, 7, 100, 101, 512, 1].iter().cycle();
        let mut next = 0;
        for t in 0..1200 {
            single.append(&cut(&x[0], t, t + 1), &cut(&x[1], t, t + 1)).unwrap();
            let held = positions(&single);
            let what = format!("{recipe}, {} tokens", t + 1);
            assert!(held.len() <= MOST, "{what}: {} held", held.len());
            // The sinks, the newest without a gap, and nothing between them.
            let sinks = SINKS.min(t + 1);
            let oldest = t + 1 - (held.len() - sinks);
            assert!(held.iter().copied().eq((0..sinks).chain(oldest..=t)), "{what}: {held:?}");
            assert!(held.len() >= LIMIT.min(t + 1), "{what}: {} held", held.len());
            if t + 1 == 1200.min(next + chunks.clone().next().unwrap()) {
                chunks.next();
                mixed.update_and_fetch(&cut(&x[0], next, t + 1), &cut(&x[1], next, t + 1)).unwrap();
                next = t + 1;
                assert_eq!(positions(&mixed), held, "{what}");
                assert_eq!(mixed.fetch().unwrap(), single.fetch().unwrap(), "{what}");
            }
        }
        assert_eq!(next, 1200);
        holds(&mixed, &x, recipe);
    }
}

#[test]
fn t17_a_trim_after_eviction_goes_back_in_positions() {
    for recipe in [FOUR_BITS, EXACT] {
        for n in [1, 3, 40, 200, 300, 600, 1198] {
            let x = rows(3);
            let mut one = limited(recipe);
            one.append(&x[0], &x[1]).unwrap();
            let before = positions(&one);
            let what = format!("{recipe}, {n} of 1200");
            assert_eq!(one.trim(n).unwrap(), n);
            assert_eq!(one.offset(), 1200 - n, "{what}");
            // What was held and is not trimmed is still there. What came back left with the trimmed tokens: a cache that never saw them
            // holds it too.
            let held = positions(&one);
            assert!(before.iter().filter(|&&p| p < 1200 - n).all(|p| held.contains(p)), "{what}: {held:?}");
            let mut fresh = limited(recipe);
            fresh.append(&cut(&x[0], 0, 1200 - n), &cut(&x[1], 0, 1200 - n)).unwrap();
            let fresh = positions(&fresh);
            assert!(held.iter().all(|p| fresh.contains(p)), "{what}: {held:?}");
            assert!(n > 16 || held == fresh, "{what}: within the tokens of a draft nothing is lost");
            holds(&one, &x, &what);
            // Other tokens take the places of the trimmed ones.
            let other = rows(5);
            let mixed = [0, 1].map(|i| {
                Tensor::concat(2, &[cut(&x[i], 0, 1200 - n), cut(&other[i], 1200 - n, 1200)]).unwrap()
            });
            for t in 1200 - n..1200 {
                one.append(&cut(&mixed[0], t, t + 1), &cut(&mixed[1], t, t + 1)).unwrap();
                assert_eq!(positions(&one).last(), Some(&t), "{what}");
                assert!(one.len() <= MOST, "{what}: {} held", one.len());
            }
            holds(&one, &mixed, &what);
        }
    }
}

#[test]
fn t53_a_limit_on_packed_tokens_bounds_rows_and_bytes() {
    for recipe in [FOUR_BITS, EXACT] {
        let x = rows(7);
        let q = gauss(&[1, 4, 1200, D], 9);
        let mut one = limited(recipe);
        let mut free = cache(&Cpu, recipe, D);
        // A model whose layers look back no farther than the limit does not see that there is one.
        let rules = Rules { sliding_window: Some(LIMIT), exact: true, ..Rules::causal(0.125) };
        let mut bytes = vec![];
        for t in 0..1200 {
            let [q, k, v] = [&q, &x[0], &x[1]].map(|x| cut(x, t, t + 1));
            let a = one.update_and_attend(&q, &k, &v, &rules).unwrap();
            let b = free.update_and_attend(&q, &k, &v, &rules).unwrap();
            assert!(greatest_difference(&a.to_f32().unwrap(), &b.to_f32().unwrap()) < 1e-5, "{recipe}, {t}");
            assert!(one.len() <= MOST, "{recipe}: {} tokens held", one.len());
            bytes.push(one.nbytes());
        }
        // Full for the first time after the sinks, the limit, a block and the window.
        let full = MOST + 32;
        for t in full..1200 - 128 {
            assert_eq!(bytes[t], bytes[t + 128], "{recipe}: {t} tokens");
        }
        let report = one.report().unwrap();
        assert_eq!((report.limit, report.tokens(), report.bytes()), (Some(LIMIT), one.len(), one.nbytes()));
        let body: Vec<_> = report.parts.iter().filter(|p| p.tier == "tier 0").collect();
        let bits = if recipe == EXACT { 32.0 } else { 4.0 };
        assert!(
            !body.is_empty() && body.iter().all(|p| [p.key_bits, p.value_bits] == [bits; 2]),
            "{report:?}"
        );
        assert_eq!(free.report().unwrap().limit, None);
    }
}

#[test]
fn a_limit_that_cannot_hold_is_refused_before_anything_is_kept() {
    let policy: TierPolicy = "progressive:256=4/4,rest=drop".parse().unwrap();
    let x = gauss(&[1, 1, 1, D], 1);
    let mut late = cache(&Cpu, FOUR_BITS, D);
    late.append(&x, &x).unwrap();
    assert!(matches!(late.with_tiers(&policy, 1), Err(Error::Unsupported { field: "tiers", .. })));
    assert!(matches!(
        cache(&Cpu, FOUR_BITS, D).with_tiers(&policy, 0),
        Err(Error::Unsupported { field: "observe_every", .. })
    ));
    // Exempt layers stay exact under the limit of the others.
    let recipe: Recipe = FOUR_BITS.parse().unwrap();
    let shape = Some(LayerShape { key_dim: D, value_dim: D });
    let mut model =
        KvCache::new(Cpu, &recipe, &[shape, shape], &[KvLayer(0)]).unwrap().with_tiers(&policy, 1).unwrap();
    let [k, v] = rows(11);
    model.layers_mut().iter_mut().for_each(|layer| layer.append(&k, &v).unwrap());
    let [exact, packed] = model.layers() else { panic!("two layers") };
    assert_eq!(positions(exact), positions(packed));
    let held = positions(exact);
    let newest = cut(&k, held[SINKS], 1200);
    assert_eq!(cut(&exact.fetch().unwrap().0, SINKS, held.len()), newest);
}

/// Rows of a batch accept different numbers of drafts: what all reject is trimmed, the rest is hidden by a mask, and each row
/// answers as a cache of its own.
#[test]
fn t20_rows_of_a_batch_that_accept_different_drafts() {
    let (h, lengths, accepted, padding) = (2, [5, 7], [1, 3], [2, 0]);
    for recipe in [EXACT, "best@4/4"] {
        let x: [Tensor; 2] = [0, 1].map(|i| gauss(&[2, h, 12, D], 20 + i));
        let row = |x: &Tensor, b: usize| x.slice(0, b, b + 1).unwrap();
        let mut batch = cache(&Cpu, recipe, D);
        // Columns 0..7 are the prompts, padded on the left, 7..11 the drafts.
        batch.append(&cut(&x[0], 0, 11), &cut(&x[1], 0, 11)).unwrap();
        let reject = accepted.map(|n| 4 - n);
        let common = reject[0].min(reject[1]);
        assert_eq!(batch.trim(common).unwrap(), common);
        let end = batch.offset();
        assert_eq!(end, 11 - common);
        // The next token of both rows stands in the same column; the hidden tail of a row is before it.
        let q = gauss(&[2, 2 * h, 1, D], 22);
        let seen = |b: usize, t: usize| t >= padding[b] && (t == end || t < 7 + accepted[b]);
        let mask: Vec<u8> = (0..2).flat_map(|b| (0..=end).map(move |t| u8::from(seen(b, t)))).collect();
        let rules = Rules {
            mask: Some(Tensor::new(&[2, 1, 1, end + 1], mask).unwrap()),
            exact: true,
            ..Rules::causal(0.125)
        };
        let next = [&x[0], &x[1]].map(|x| cut(x, 11, 12));
        let out = batch.update_and_attend(&q, &next[0], &next[1], &rules).unwrap();
        for b in 0..2 {
            let mut alone = cache(&Cpu, recipe, D);
            let from = padding[b];
            let mine = |x: &Tensor| cut(&row(x, b), from, 7 + accepted[b]);
            alone.append(&mine(&x[0]), &mine(&x[1])).unwrap();
            assert_eq!(alone.offset(), lengths[b] + accepted[b]);
            let expected = alone
                .update_and_attend(&row(&q, b), &row(&next[0], b), &row(&next[1], b), &Rules::causal(0.125))
                .unwrap();
            let [a, b_] = [row(&out, b), expected].map(|x| x.to_f32().unwrap());
            assert!(greatest_difference(&a, &b_) < 1e-5, "{recipe}, row {b}");
        }
    }
}

/// There is no context shift: what is evicted leaves a gap, and no key is taken for one of another position.
#[test]
fn t35_tokens_keep_their_positions_when_others_are_evicted() {
    let [k, v] = rows(13);
    let mut one = limited(EXACT);
    one.append(&k, &v).unwrap();
    let held = positions(&one);
    assert!(held[SINKS] > 500 && one.offset() == 1200, "{held:?}");
    // Relative distances are those of positions: a window of 10 shows the last 10, wherever they are stored.
    let q = gauss(&[1, 4, 1, D], 15);
    let rules = Rules { sliding_window: Some(10), exact: true, ..Rules::causal(0.125) };
    let got = one.attend(&q, &rules).unwrap().to_f32().unwrap();
    let expected = exact(&q, &k, &v, 0.125, |_, _, _, j| j < 1190);
    assert!(greatest_difference(&got, &expected) < 1e-5);
    let Mask::Array(mask) = one.make_mask(1, true, Some(10), &[]).unwrap() else { panic!("an array") };
    let mask = mask.to_vec::<u8>().unwrap();
    assert!(mask.iter().rev().enumerate().all(|(back, &shown)| (shown == 1) == (back < 10)), "{mask:?}");
}
