//! A cache is made of its own tokens only: padding, rejected drafts and what a call evicts leave no trace in what stays.

use crate::common::attention::{cache, exact};
use crate::common::*;
use turbomoq::Buffer;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::cache::{HeadGroups, KvCache, LayerCache, LayerShape, Mask};
use turbomoq::{Error, Recipe, Tensor};

const D: usize = 64;
const SHAPE: LayerShape = LayerShape { key_dim: D, value_dim: D };

fn cut(x: &Tensor, from: usize, to: usize) -> Tensor {
    x.slice(2, from, to).unwrap()
}

/// Sequence `b` of a batch.
fn of(x: &Tensor, b: usize) -> Tensor {
    x.slice(0, b, b + 1).unwrap().compact()
}

/// The same rows with NaN in the padding of each sequence.
fn soiled(x: &Tensor, padding: &[usize]) -> Tensor {
    let ([_, h, t, d], mut rows) = (<[usize; 4]>::try_from(x.shape()).unwrap(), x.to_f32().unwrap());
    for (i, row) in rows.chunks_exact_mut(d).enumerate() {
        if i % t < padding[i / (h * t)] {
            row.fill(f32::NAN);
        }
    }
    Tensor::new(x.shape(), rows).unwrap()
}

/// A left padded batch in chunks beside each of its sequences alone: attention, fetched rows and bytes.
fn padded_as_alone<E: Engine + Clone>(engine: &E, recipe: &str, padding: &[usize], chunk: usize, far: f32) {
    let (b, h, rep, t) = (padding.len(), 2, 2, 460);
    let (k, v) = (soiled(&keys(&[b, h, t, D], 1), padding), soiled(&gauss(&[b, h, t, D], 2), padding));
    let q = gauss(&[b, h * rep, t, D], 3);
    let put = |x: &Tensor| engine.put(x).unwrap();
    let host = |x: &E::Tensor| engine.get(x).unwrap().to_f32().unwrap();
    let mut batch = cache(engine, recipe, D).with_left_padding(padding.to_vec()).unwrap();
    let mut alone: Vec<LayerCache<E>> = padding.iter().map(|_| cache(engine, recipe, D)).collect();
    let rules = Rules::causal(0.125);
    for from in (0..t).step_by(chunk) {
        let to = (from + chunk).min(t);
        let part = |x: &Tensor| put(&cut(x, from, to));
        let out =
            engine.get(&batch.update_and_attend(&part(&q), &part(&k), &part(&v), &rules).unwrap()).unwrap();
        for (i, one) in alone.iter_mut().enumerate() {
            let first = padding[i].clamp(from, to);
            let zeros = cut(&of(&out, i), 0, first - from).to_f32().unwrap();
            assert!(zeros.iter().all(|x| *x == 0.0), "{recipe}: padding is no query");
            if first < to {
                let part = |x: &Tensor| put(&of(&cut(x, first, to), i));
                let want = one.update_and_attend(&part(&q), &part(&k), &part(&v), &rules).unwrap();
                let got = cut(&of(&out, i), first - from, to - from).to_f32().unwrap();
                assert!(
                    greatest_difference(&got, &host(&want)) <= far,
                    "{recipe}, sequence {i}, tokens {from}..{to}"
                );
            }
        }
    }
    assert_eq!((batch.offset(), batch.len()), (t, t));
    let (fk, fv) = batch.fetch().unwrap();
    for (i, one) in alone.iter().enumerate() {
        if padding[i] >= t {
            assert!(one.is_empty());
            continue;
        }
        let (wk, wv) = one.fetch().unwrap();
        for (got, want) in [(&fk, wk), (&fv, wv)] {
            let got = of(&engine.get(got).unwrap(), i);
            assert!(cut(&got, 0, padding[i]).to_f32().unwrap().iter().all(|x| *x == 0.0));
            assert_eq!(cut(&got, padding[i], t).to_f32().unwrap(), host(&want), "{recipe}, sequence {i}");
        }
    }
    if padding.iter().collect::<std::collections::BTreeSet<_>>().len() == padding.len() {
        assert_eq!(
            batch.nbytes(),
            alone.iter().map(LayerCache::nbytes).sum::<usize>(),
            "padding takes no bytes"
        );
    }
    assert_eq!(batch.report().unwrap().bytes(), batch.nbytes());
}

#[test]
fn a_left_padded_sequence_is_packed_as_it_would_be_alone() {
    let equalised = "key=d128:b3:equalised,value=d128:b3,centred,sinks=4,window=64";
    for recipe in ["best@3", "best@2.5/2,sinks=0,window=0", "kivi@2/2,sinks=2,window=32", equalised] {
        padded_as_alone(&Cpu, recipe, &[260, 0, 37, 260], 91, 0.0);
        padded_as_alone(&Cpu, recipe, &[5, 3], 460, 0.0);
    }
    padded_as_alone(&Cpu, "mlx-affine@4/3,sinks=4,window=32", &[129, 700], 7, 0.0);
}

#[test]
fn padding_of_the_cache_and_of_the_rules_is_hidden_up_to_the_greater() {
    let (h, t, padding) = (2, 400, [70, 0]);
    let (k, v) = (soiled(&keys(&[2, h, t, D], 1), &padding), gauss(&[2, h, t, D], 2));
    let mut batch = cache(&Cpu, "best@4", D).with_left_padding(padding.to_vec()).unwrap();
    batch.append(&k, &v).unwrap();
    let q = gauss(&[2, 2 * h, 3, D], 3);
    let (fk, fv) = batch.fetch().unwrap();
    let rules = Rules { exact: true, ..Rules::causal(0.125) };
    for more in [[0, 0], [10, 9], [90, 380]] {
        let rules = Rules { left_padding: more.to_vec(), ..rules.clone() };
        let out = batch.attend(&q, &rules).unwrap().to_f32().unwrap();
        let want = exact(&q, &fk, &fv, 0.125, |b, _, _, j| j < padding[b].max(more[b]));
        assert!(greatest_difference(&out, &want) < 1e-4, "{more:?}");
    }
    // A mask has a column for every position, padding included, and is dealt out by sequence.
    for rows in [1, 2] {
        let hidden = |b: usize, i: usize, j: usize| (i + 2 * j + b % rows) % 3 == 0;
        let bits = (0..rows * 3 * t).map(|n| u8::from(!hidden(n / (3 * t), n / t % 3, n % t))).collect();
        let mask = Some(Tensor::new(&[rows, 1, 3, t], bits).unwrap());
        let out = batch.attend(&q, &Rules { mask, ..rules.clone() }).unwrap().to_f32().unwrap();
        let want = exact(&q, &fk, &fv, 0.125, |b, _, i, j| j < padding[b] || hidden(b, i, j));
        assert!(greatest_difference(&out, &want) < 1e-4, "a mask of {rows} sequences");
    }
    let misfit = Rules { left_padding: vec![1], ..rules };
    assert!(matches!(batch.attend(&q, &misfit), Err(Error::Shape { what: "left padding", .. })));
    assert!(matches!(batch.append(&of(&k, 0), &of(&v, 0)), Err(Error::Shape { what: "keys", .. })));
    assert_eq!(batch.offset(), t);
    assert!(matches!(
        batch.with_left_padding(vec![1, 2]),
        Err(Error::Unsupported { field: "left padding", .. })
    ));
}

#[test]
fn a_padded_batch_is_trimmed_cloned_and_goes_on_from_its_state() {
    let (h, t, padding) = (2, 500, vec![200, 13]);
    let (k, v) = (soiled(&keys(&[2, h, t, D], 1), &padding), soiled(&gauss(&[2, h, t, D], 2), &padding));
    let policy = "progressive:128=16/16,256=6/6,rest=3/2".parse().unwrap();
    for tiered in [false, true] {
        let new = || {
            let cache = cache(&Cpu, "best@4,sinks=2,window=16", D);
            let cache = if tiered { cache.with_tiers(&policy, 16).unwrap() } else { cache };
            cache.with_left_padding(padding.clone()).unwrap()
        };
        let mut one = new();
        one.append(&cut(&k, 0, 430), &cut(&v, 0, 430)).unwrap();
        let mut two = LayerCache::from_state(Cpu, &one.state().unwrap()).unwrap();
        assert_eq!((two.left_padding(), two.offset(), two.len()), (&padding[..], 430, one.len()));
        let mut three = one.clone();
        // Into the padding of one sequence, and on.
        assert_eq!(three.trim(300).unwrap(), 300);
        assert_eq!((three.offset(), three.len()), (130, 130));
        for (cache, from) in [(&mut one, 430), (&mut two, 430), (&mut three, 130)] {
            let got = cache.update_and_fetch(&cut(&k, from, t), &cut(&v, from, t)).unwrap();
            let mut fresh = new();
            let want = fresh.update_and_fetch(&k, &v).unwrap();
            // What a trim took from the middle of packed blocks came back as it decodes.
            let exact = (from == 430, 0.3);
            for (got, want) in [(got.0, want.0), (got.1, want.1)] {
                assert!(
                    got == want
                        || (!exact.0
                            && relative_mse(&want.to_f32().unwrap(), &got.to_f32().unwrap()) < exact.1)
                );
            }
        }
        assert_eq!(three.trim(usize::MAX).unwrap(), t);
        assert!(three.is_empty());
    }
    let mut bad = cache(&Cpu, "best@4", D).with_left_padding(vec![1, 2]).unwrap().state().unwrap();
    bad.meta = bad.meta.replace("[1,2]", "[1,1]");
    assert!(matches!(LayerCache::from_state(Cpu, &bad), Err(Error::Parse { .. })));
}

#[test]
fn head_groups_and_models_know_the_padding_too() {
    let (t, padding) = (300, vec![90, 0]);
    let (k, v) = (soiled(&keys(&[2, 3, t, D], 1), &padding), soiled(&gauss(&[2, 3, t, D], 2), &padding));
    let q = gauss(&[2, 6, t, D], 3);
    let recipe: Recipe = "best@4,sinks=2,window=16,key-bits=4.2.4,value-bits=4.4.2".parse().unwrap();
    let groups = || HeadGroups::new(Cpu, &recipe, 0, SHAPE, 3).unwrap();
    let mut batch = groups().with_left_padding(padding.clone()).unwrap();
    let out = batch.update_and_attend(&q, &k, &v, &Rules::causal(0.125)).unwrap();
    let again = HeadGroups::from_state(Cpu, &batch.state().unwrap()).unwrap();
    let last = cut(&q, t - 1, t);
    assert_eq!(
        again.attend(&last, &Rules::causal(0.125)).unwrap(),
        batch.attend(&last, &Rules::causal(0.125)).unwrap()
    );
    for (b, &from) in padding.iter().enumerate() {
        let own = |x: &Tensor| of(&cut(x, from, t), b);
        let want = groups().update_and_attend(&own(&q), &own(&k), &own(&v), &Rules::causal(0.125)).unwrap();
        assert_eq!(of(&cut(&out, from, t), b).to_f32().unwrap(), want.to_f32().unwrap());
    }
    let model = KvCache::new(Cpu, &"best@4".parse().unwrap(), &[Some(SHAPE), None], &[]).unwrap();
    let mut model = model.with_left_padding(padding.clone()).unwrap();
    model.at(0).unwrap().append(&k, &v).unwrap();
    let again = KvCache::from_state(Cpu, &model.state().unwrap()).unwrap();
    assert_eq!(again.layers()[0].left_padding(), padding);
    assert_eq!(again.layers()[0].fetch().unwrap(), model.layers()[0].fetch().unwrap());
}

#[test]
fn masks_hide_the_padding_of_the_cache() {
    let (t, n) = (260, 5);
    for (own, more) in [(vec![40, 0], vec![]), (vec![40, 0], vec![3, 9]), (vec![7, 7], vec![])] {
        let (k, v) = (soiled(&keys(&[2, 2, t, D], 1), &own), soiled(&gauss(&[2, 2, t, D], 2), &own));
        let q = gauss(&[2, 4, n, D], 3);
        let mut by_rules = cache(&Cpu, "best@4", D).with_left_padding(own.clone()).unwrap();
        by_rules.append(&cut(&k, 0, t - n), &cut(&v, 0, t - n)).unwrap();
        let mut by_mask = by_rules.clone();
        let Mask::Array(mask) = by_mask.make_mask(n, false, Some(200), &more).unwrap() else {
            panic!("padding is hidden by an array")
        };
        assert_eq!(mask.shape(), [2, 1, n, t]);
        let last = |x: &Tensor| cut(x, t - n, t);
        let (fk, fv) = by_mask.update_and_fetch(&last(&k), &last(&v)).unwrap();
        let bits = mask.to_vec::<u8>().unwrap();
        let want = exact(&q, &fk, &fv, 0.125, |b, _, i, j| bits[(b * n + i) * t + j] == 0);
        let rules =
            Rules { sliding_window: Some(200), left_padding: more, exact: true, ..Rules::causal(0.125) };
        let out = by_rules.update_and_attend(&q, &last(&k), &last(&v), &rules).unwrap();
        assert!(greatest_difference(&out.to_f32().unwrap(), &want) < 1e-4);
    }
}

/// Tiers that a test of a few hundred tokens passes through.
const SHORT: &str = "progressive:256=16/16,384=4/4,512=3/2,rest=2/1";

fn tiered<E: Engine + Clone>(engine: &E, recipe: &str, policy: &str, every: usize) -> LayerCache<E> {
    cache(engine, recipe, D).with_tiers(&policy.parse().unwrap(), every).unwrap()
}

/// Whether two caches are the same, bit for bit, and say the same of what they hold.
fn assert_same<E: Engine + Clone>(one: &LayerCache<E>, two: &LayerCache<E>, q: &Tensor, what: &str) {
    let engine = one.engine();
    let host = |x: &E::Tensor| engine.get(x).unwrap().to_f32().unwrap();
    assert_eq!((one.offset(), one.len()), (two.offset(), two.len()), "{what}");
    assert_eq!((one.blocks(), one.used_bytes()), (two.blocks(), two.used_bytes()), "{what}");
    let spans =
        |c: &LayerCache<E>| -> Vec<_> { c.segments().iter().map(|s| (s.start, s.keys.len())).collect() };
    assert_eq!(spans(one), spans(two), "{what}");
    let ((k, v), (wk, wv)) = (one.fetch().unwrap(), two.fetch().unwrap());
    assert!(host(&k) == host(&wk) && host(&v) == host(&wv), "{what}: rows");
    let q = engine.put(q).unwrap();
    let rules = Rules::causal(0.125);
    assert_eq!(
        host(&one.attend(&q, &rules).unwrap()),
        host(&two.attend(&q, &rules).unwrap()),
        "{what}: attention"
    );
}

/// Speculative decoding: drafts come in pieces, some of their tokens are taken back in pieces, and the cache is the one that only ever
/// saw the accepted tokens.
fn rejected_drafts_leave_no_trace<E: Engine + Clone>(
    engine: &E,
    recipe: &str,
    policy: &str,
    t: usize,
    draft: usize,
) {
    let (h, rep) = (2, 2);
    let (k, v, q) = (keys(&[1, h, t, D], 1), gauss(&[1, h, t, D], 2), gauss(&[1, h * rep, t, D], 3));
    let wrong = keys(&[1, h, draft, D], 4);
    let mut rng = turbomoq::internals::math::rng::Rng::new(7, 7);
    let mut random = |n: usize| (rng.bits() % n as u64) as usize;
    let rules = Rules::causal(0.125);
    let [mut spoken, mut clean] = [0, 1].map(|_| tiered(engine, recipe, policy, 16));
    let push = |cache: &mut LayerCache<E>, x: [&Tensor; 3], from: usize, to: usize, attends: bool| {
        if from == to {
            return;
        }
        let [q, k, v] = x.map(|x| engine.put(&cut(x, from, to)).unwrap());
        match attends {
            true => drop(cache.update_and_attend(&q, &k, &v, &rules).unwrap()),
            false => cache.append(&k, &v).unwrap(),
        }
    };
    let (mut at, mut round) = (0, 0);
    while at < t {
        let what = format!("{recipe}, {policy}, round {round}, {at} tokens");
        // A long run now and then, so that the border comes in every way.
        let n = if round % 9 == 8 { 60 } else { 1 + random(draft) }.min(t - at);
        let accepted = if n > draft { n } else { random(n + 1) };
        push(&mut clean, [&q, &k, &v], at, at + accepted, true);
        let mut done = 0;
        while done < accepted {
            let piece = 1 + random(accepted - done);
            push(&mut spoken, [&q, &k, &v], at + done, at + done + piece, true);
            done += piece;
        }
        at += accepted;
        let mut rejected = n - accepted;
        while rejected > 0 {
            let piece = 1 + random(rejected);
            push(
                &mut spoken,
                [&cut(&q, 0, draft), &wrong, &wrong],
                rejected - piece,
                rejected,
                round % 2 == 0,
            );
            rejected -= piece;
        }
        if round % 5 == 0 {
            spoken = LayerCache::from_state(engine.clone(), &spoken.state().unwrap()).unwrap();
        }
        let mut rejected = n - accepted;
        while rejected > 0 {
            let piece = 1 + random(rejected);
            assert_eq!(spoken.trim(piece).unwrap(), piece);
            rejected -= piece;
        }
        assert_eq!(spoken.report().unwrap().bytes(), spoken.nbytes(), "{what}");
        if at > 0 && (at % 128 < 40 || at == t) {
            assert_same(&spoken, &clean, &cut(&q, at - 1, at), &what);
        }
        round += 1;
    }
}

#[test]
fn a_rejected_draft_across_a_block_border_leaves_no_trace() {
    let equalised = "key=d128:b3:equalised,value=d128:b3,centred,sinks=4,window=64";
    for recipe in ["best@4", "best@2,sinks=0,window=0", "kivi@2/2,sinks=3,window=32", equalised] {
        rejected_drafts_leave_no_trace(&Cpu, recipe, "none", 460, 16);
    }
    rejected_drafts_leave_no_trace(&Cpu, "turboquant-mse@16/4,sinks=2,window=0,draft=100", "none", 600, 100);
    for policy in [SHORT, "progressive:128=16/16,rest=drop", "progressive:140=8/8,300=4/4,rest=drop"] {
        rejected_drafts_leave_no_trace(&Cpu, "best@4,sinks=2,window=16", policy, 900, 16);
    }
}

#[test]
fn what_a_rejected_query_attended_to_is_forgotten() {
    let (h, t) = (1, 700);
    let (k, v, q) = (keys(&[1, h, t, D], 1), gauss(&[1, h, t, D], 2), gauss(&[1, h, t, D], 3));
    for policy in ["attention", "attention:0.5=8/8,rest=4/4,patience=2,evict=0.05"] {
        for every in [1, 5, 16] {
            let mut spoken = tiered(&Cpu, "turboquant-mse@4,sinks=2,window=16", policy, every);
            let mut clean = spoken.clone();
            let step = |cache: &mut LayerCache<Cpu>, from: usize, to: usize| {
                let part = |x: &Tensor| cut(x, from, to);
                cache.update_and_attend(&part(&q), &part(&k), &part(&v), &Rules::causal(0.125)).unwrap();
            };
            for at in (0..t - 20).step_by(4) {
                step(&mut spoken, at + 5, at + 6 + at % 15);
                step(&mut spoken, at + 7, at + 7 + (15 - at % 15));
                spoken.trim(7).unwrap();
                spoken.trim(9).unwrap();
                step(&mut spoken, at, at + 4);
                step(&mut clean, at, at + 4);
            }
            assert_same(&spoken, &clean, &cut(&q, 0, 1), &format!("{policy}, every {every}"));
        }
    }
}

#[test]
fn rejected_drafts_leave_no_trace_in_head_groups_and_padded_batches() {
    let (t, padding) = (300, vec![37, 0]);
    let (k, v, q) = (gauss(&[2, 3, t, D], 1), gauss(&[2, 3, t, D], 2), gauss(&[2, 3, t, D], 3));
    let recipe: Recipe = "best@4,sinks=2,window=0,key-bits=4.2.4,value-bits=4.4.2".parse().unwrap();
    let new =
        || HeadGroups::new(Cpu, &recipe, 0, SHAPE, 3).unwrap().with_left_padding(padding.clone()).unwrap();
    let (mut spoken, mut clean) = (new(), new());
    for at in (0..t - 16).step_by(8) {
        spoken.append(&cut(&k, at, at + 3), &cut(&v, at, at + 3)).unwrap();
        spoken.append(&cut(&k, at, at + 13), &cut(&v, at, at + 13)).unwrap();
        assert_eq!(spoken.trim(16).unwrap(), 16);
        for cache in [&mut spoken, &mut clean] {
            cache.append(&cut(&k, at, at + 8), &cut(&v, at, at + 8)).unwrap();
        }
        let (q, rules) = (cut(&q, at, at + 1), Rules::causal(0.125));
        assert_eq!(spoken.attend(&q, &rules).unwrap(), clean.attend(&q, &rules).unwrap(), "{at} tokens");
    }
}

#[test]
fn what_is_kept_for_drafts_is_one_block_for_a_while_and_is_counted() {
    let x =
        Tensor::from_f32(turbomoq::Dtype::F16, &[1, 2, 400, D], gauss(&[1, 2, 400, D], 1).to_f32().unwrap())
            .unwrap();
    let block = 128 * 2 * 2 * 2 * D;
    for (draft, policy) in [(0, "none"), (1, "none"), (16, "none"), (16, "progressive:100=8/8,rest=2/2")] {
        let recipe = format!("turboquant-mse@4,sinks=0,window=0,draft={draft}");
        let mut cache = tiered(&Cpu, &recipe, policy, 16);
        for t in 0..400 {
            cache.append(&cut(&x, t, t + 1), &cut(&x, t, t + 1)).unwrap();
            let (_, kept) = cache.report().unwrap().of("draft");
            let behind = if t < 128 { usize::MAX } else { t % 128 + 1 };
            // The tier border is crossed by one block of 8 bits and a scale of two bytes at a time.
            let recoded = if policy == "none" || t < 256 { 0 } else { 128 * 2 * 2 * (D + 2) };
            assert_eq!(
                kept,
                if behind <= 2 * draft { block + recoded } else { 0 },
                "draft {draft}, {policy}, {t}"
            );
        }
    }
    assert_eq!("best@4".parse::<Recipe>().unwrap().draft, 16);
    let text = "best@4,draft=7".parse::<Recipe>().unwrap().to_string();
    assert_eq!(text.parse::<Recipe>().unwrap().draft, 7, "{text}");
    assert!("best@4,draft=129".parse::<Recipe>().is_err() && "best@4,draft=-1".parse::<Recipe>().is_err());
}

/// Calls that evict: rows for the call that brings them, a mask that fits them, and the attention of both forms is the same.
fn a_call_that_evicts_gives_its_own_rows<E: Engine + Clone>(
    engine: &E,
    recipe: &str,
    policy: &str,
    padding: &[usize],
) {
    let (b, h, rep, calls) = (padding.len().max(1), 2, 2, [300, 1, 7, 150, 40, 1, 290]);
    let t = calls.iter().sum();
    let (k, v, q) = (keys(&[b, h, t, D], 1), gauss(&[b, h, t, D], 2), gauss(&[b, h * rep, t, D], 3));
    let put = |x: &Tensor| engine.put(x).unwrap();
    let mut by_rows = tiered(engine, recipe, policy, 16).with_left_padding(padding.to_vec()).unwrap();
    let mut by_attention = by_rows.clone();
    let (mut at, mut arrays) = (0, 0);
    for n in calls {
        let part = |x: &Tensor| cut(x, at, at + n);
        let held = by_rows.len();
        let mask = by_rows.make_mask(n, false, None, &[]).unwrap();
        let (fk, fv) = by_rows.update_and_fetch(&put(&part(&k)), &put(&part(&v))).unwrap();
        assert_eq!(fk.shape()[2], held + n, "{policy}, {n} tokens behind {at}");
        let bits = match mask {
            Mask::Array(mask) => engine.get(&mask).unwrap(),
            _ => Tensor::new(&[1, 1, n, held + n], vec![1u8; n * (held + n)]).unwrap(),
        };
        arrays += usize::from(bits.to_vec::<u8>().unwrap().contains(&0));
        let (rows, bits) = (bits.shape()[0], bits.to_vec::<u8>().unwrap());
        let hide = |b: usize, _: usize, i: usize, j: usize| bits[((b % rows) * n + i) * (held + n) + j] == 0;
        let want = exact(&part(&q), &engine.get(&fk).unwrap(), &engine.get(&fv).unwrap(), 0.125, hide);
        let rules = Rules { exact: true, ..Rules::causal(0.125) };
        let out = by_attention
            .update_and_attend(&put(&part(&q)), &put(&part(&k)), &put(&part(&v)), &rules)
            .unwrap();
        let far = greatest_difference(&engine.get(&out).unwrap().to_f32().unwrap(), &want);
        assert!(far < 1e-3, "{policy}, {n} tokens behind {at}: {far}");
        at += n;
    }
    assert!(arrays > 0, "{policy}: nothing was evicted");
    assert_eq!(by_rows.len(), by_attention.len());
}

#[test]
fn a_call_that_evicts_gives_all_rows_that_it_brought() {
    // Nothing is packed, so that what a query sees does not depend on when a block was.
    for policy in ["progressive:128=16/16,rest=drop", "progressive:400=16/16,rest=drop"] {
        a_call_that_evicts_gives_its_own_rows(&Cpu, "turboquant-mse@16/16,sinks=2,window=16", policy, &[]);
        a_call_that_evicts_gives_its_own_rows(&Cpu, "best@16/16", policy, &[]);
        a_call_that_evicts_gives_its_own_rows(
            &Cpu,
            "turboquant-mse@16/16,sinks=2,window=0",
            policy,
            &[70, 0],
        );
    }
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use mlx_rs::Array;
    use mlx_rs::fast::scaled_dot_product_attention;
    use turbomoq::Mlx;

    #[test]
    fn a_left_padded_sequence_is_packed_as_it_would_be_alone_on_the_graph() {
        let mlx = Mlx::new();
        padded_as_alone(&mlx, "best@3,window=32", &[260, 0, 260], 230, 1e-5);
        padded_as_alone(&mlx, "kivi@2/2,sinks=2,window=32", &[40, 0], 230, 1e-5);
    }

    #[test]
    fn a_rejected_draft_across_a_block_border_leaves_no_trace_on_the_graph() {
        let mlx = Mlx::new();
        rejected_drafts_leave_no_trace(&mlx, "turboquant-mse@4,sinks=2,window=16", "none", 300, 16);
        let policy = "progressive:128=16/16,256=4/4,rest=drop";
        rejected_drafts_leave_no_trace(&mlx, "turboquant-mse@4,sinks=0,window=0", policy, 420, 16);
    }

    #[test]
    fn a_call_that_evicts_gives_all_rows_that_it_brought_on_the_graph() {
        let policy = "progressive:128=16/16,rest=drop";
        a_call_that_evicts_gives_its_own_rows(
            &Mlx::new(),
            "turboquant-mse@16/16,sinks=2,window=16",
            policy,
            &[],
        );
    }

    #[test]
    fn mlx_s_own_attention_takes_the_mask_as_one() {
        let (t, n, mlx) = (90, 4, Mlx::new());
        let (k, v, q) = (keys(&[2, 2, t, D], 1), gauss(&[2, 2, t, D], 2), gauss(&[2, 4, n, D], 3));
        let put = |x: &Tensor| mlx.put(x).unwrap();
        for (window, padding) in [(None, vec![30, 0]), (Some(20), vec![]), (Some(50), vec![80, 3])] {
            let mut cache = cache(&mlx, "best@4", D);
            cache.append(&put(&cut(&k, 0, t - n)), &put(&cut(&v, 0, t - n))).unwrap();
            let Mask::Array(mask) = cache.make_mask(n, false, window, &padding).unwrap() else {
                panic!("no array")
            };
            assert_eq!(mask.dtype(), mlx_rs::Dtype::Bool);
            let (fk, fv) =
                cache.update_and_fetch(&put(&cut(&k, t - n, t)), &put(&cut(&v, t - n, t))).unwrap();
            let attend = |mask: &Array| {
                let out = scaled_dot_product_attention(put(&q), &fk, &fv, 0.125, mask, None).unwrap();
                mlx.get(&out).unwrap().to_f32().unwrap()
            };
            let hide = |b: usize, _: usize, i: usize, j: usize| {
                let position = t - n + i;
                padding.get(b).is_some_and(|&p| j < p) || window.is_some_and(|w| j + w <= position)
            };
            let want = exact(&q, &mlx.get(&fk).unwrap(), &mlx.get(&fv).unwrap(), 0.125, hide);
            assert!(greatest_difference(&attend(&mask), &want) < 1e-4, "{window:?}, {padding:?}");
            // The engine's own attention takes it too.
            let rules = Rules { mask: Some(mask), causal: false, ..Rules::causal(0.125) };
            let out = mlx.get(&cache.attend(&put(&q), &rules).unwrap()).unwrap().to_f32().unwrap();
            assert!(greatest_difference(&out, &want) < 1e-3, "{window:?}, {padding:?}");
        }
    }
}
