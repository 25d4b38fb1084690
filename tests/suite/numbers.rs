//! Numbers that are not ordinary: rows that are not finite, tiny and huge norms in one head, values beyond a dtype, odd head dims.

use crate::common::*;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::PRESETS;
use turbomoq::Rules;
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::policy::TierPolicy;
use turbomoq::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, Side};
use turbomoq::{Compressor, Dtype, Error, Recipe, Tensor, quality};

/// Channels of the heads here.
const D: usize = 64;

fn layer<E: Engine + Clone>(engine: &E, recipe: &str, dim: usize) -> LayerCache<E> {
    let shape = LayerShape { key_dim: dim, value_dim: dim };
    LayerCache::new(engine.clone(), &recipe.parse().unwrap(), 0, shape).unwrap()
}

fn f32s<E: Engine>(engine: &E, x: &E::Tensor) -> Vec<f32> {
    engine.get(x).unwrap().to_f32().unwrap()
}

/// Appends keys (values are the same) and gives the keys that come back.
fn append<E: Engine + Clone>(cache: &mut LayerCache<E>, x: &Tensor) -> Vec<f32> {
    let rows = cache.engine().put(x).unwrap();
    cache.append(&rows, &rows).unwrap();
    let keys = cache.fetch().unwrap().0;
    f32s(cache.engine(), &keys)
}

/// The tensor with other values in some rows, by head and token.
fn with_rows(x: &Tensor, rows: &[(usize, usize)], edit: impl Fn(&mut [f32])) -> Tensor {
    let (t, d) = (x.shape()[2], x.shape()[3]);
    let mut all = x.to_f32().unwrap();
    rows.iter().for_each(|(head, token)| edit(&mut all[(head * t + token) * d..][..d]));
    x.like(x.shape(), all).unwrap()
}

const LIVE: [&str; 8] = [
    "best@4,sinks=0,window=0",
    "best@3,sinks=0,window=0",
    "key=d128:b3:equalised:hadamard:beta,value=exact,centred,sinks=0,window=0",
    "turboquant-mse@2.5",
    "turboquant-prod@4",
    "uniform@4",
    "kivi@4,sinks=0,window=0",
    "mlx-affine@4,centred",
];

fn one_bad_key<E: Engine + Clone>(engine: &E, recipes: &[&str]) {
    let x = keys(&[1, 2, 256, D], 1);
    for recipe in recipes {
        let clean = append(&mut layer(engine, recipe, D), &x);
        let usual = relative_mse(&x.to_f32().unwrap(), &clean);
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let spoilt = with_rows(&x, &[(1, 5), (1, 9)], |row| row[3] = bad);
            let mut cache = layer(engine, recipe, D);
            let got = append(&mut cache, &spoilt);
            let row = |head: usize, token: usize| (head * 256 + token) * D..(head * 256 + token + 1) * D;
            for token in [5, 9] {
                assert!(got[row(1, token)].iter().all(|x| x.is_nan()), "{recipe}: {bad} vanished");
            }
            assert_eq!(got[..256 * D], clean[..256 * D], "{recipe}: the other head");
            let good: Vec<usize> = (0..256).filter(|t| ![5, 9].contains(t)).collect();
            let rows = |x: &[f32]| good.iter().flat_map(|&t| x[row(1, t)].to_vec()).collect::<Vec<_>>();
            let error = relative_mse(&rows(&x.to_f32().unwrap()), &rows(&got));
            assert!(error < 1.3 * usual, "{recipe}: {error} beside {bad}, {usual} without");
            // What comes later meets the same frame.
            cache.trim(200).unwrap();
            let more = keys(&[1, 2, 256, D], 2);
            let got = append(&mut cache, &more);
            for head in 0..2 {
                let want = &more.to_f32().unwrap()[head * 256 * D..][..256 * D];
                let error = relative_mse(want, &got[(head * 312 + 56) * D..][..256 * D]);
                assert!(error < 2.0 * usual, "{recipe}: later tokens of head {head}: {error}");
            }
        }
    }
}

#[test]
fn one_nan_key_leaves_the_other_rows_alone() {
    one_bad_key(&Cpu, &LIVE);
}

/// A block in which nothing is finite, as a padded sequence has it.
fn block_of_nan<E: Engine + Clone>(engine: &E, recipes: &[&str]) {
    let x = keys(&[1, 2, 384, D], 3);
    for recipe in recipes {
        let padding: Vec<(usize, usize)> = (0..128).map(|t| (1, t)).collect();
        let got = append(&mut layer(engine, recipe, D), &with_rows(&x, &padding, |row| row.fill(f32::NAN)));
        let usual = relative_mse(&x.to_f32().unwrap(), &append(&mut layer(engine, recipe, D), &x));
        let (want, got) = (&x.to_f32().unwrap()[(384 + 128) * D..], &got[384 * D..]);
        assert!(got[..128 * D].iter().all(|x| x.is_nan()), "{recipe}");
        let error = relative_mse(want, &got[128 * D..]);
        // Without its centre a key has the norm of its mean too.
        assert!(error < 8.0 * usual && error < 0.2, "{recipe}: {error}, {usual} with a frame of its own");
    }
}

#[test]
fn a_block_without_a_finite_row_leaves_a_frame_for_those_that_come() {
    block_of_nan(&Cpu, &LIVE);
}

#[test]
fn frames_are_those_of_the_finite_rows() {
    let x = keys(&[1, 2, 128, D], 4);
    let q = gauss(&[1, 4, 9, D], 5);
    let codec = codec("d64:b2+32:equalised".parse().unwrap()).unwrap();
    let rest = |x: &Tensor, at: usize, n: usize| {
        Tensor::concat(2, &[x.slice(2, 0, at).unwrap(), x.slice(2, at + 1, n).unwrap()]).unwrap()
    };
    let want = Cpu.frame(&codec, true, &rest(&x, 7, 128), Some(&rest(&q, 2, 9))).unwrap();
    for bad in [f32::NAN, f32::INFINITY, 1e20] {
        let spoilt = with_rows(&x, &[(0, 7), (1, 7)], |row| row[60] = bad);
        let queries = with_rows(&q, &[(0, 2), (1, 2), (2, 2), (3, 2)], |row| row[0] = bad);
        let got = Cpu.frame(&codec, true, &spoilt, Some(&queries)).unwrap();
        assert_eq!(got.centre, want.centre, "{bad}");
        assert_eq!(got.gain, want.gain, "{bad}");
        assert_eq!(got.order, want.order, "{bad}");
    }
}

/// Tiles of kivi: tokens that are not finite are left out of the ranges of their channels.
fn kivi_neighbours<E: Engine + Clone>(engine: &E) {
    for (dim, group, bits) in [(64, 32, 2), (16, 32, 4), (32, 64, 1), (192, 128, 4)] {
        let spec = format!("d{dim}:b{bits}:identity:channel-affine{group}");
        let codec = codec(spec.parse().unwrap()).unwrap();
        let through = |x: &Tensor| {
            let x = engine.put(x).unwrap();
            let frame = engine.frame(&codec, true, &x, None).unwrap();
            let codes = engine.encode(&codec, frame, &x).unwrap();
            f32s(engine, &engine.decode(&codes, Dtype::F32).unwrap())
        };
        let x = keys(&[1, 1, 2 * group, dim], 6);
        for bad in [vec![3], vec![0, 5, group - 1], (0..group).collect()] {
            // The same ranges and the same centre, from rows that stand twice: those of token 7.
            let seven = x.slice(2, 7, 8).unwrap().to_f32().unwrap();
            let rows: Vec<(usize, usize)> = bad.iter().map(|&t| (0, t)).collect();
            let uncentred = |x: &Tensor| {
                let x = engine.put(x).unwrap();
                let codes = engine.encode(&codec, Default::default(), &x).unwrap();
                f32s(engine, &engine.decode(&codes, Dtype::F32).unwrap())
            };
            let spoilt = with_rows(&x, &rows, |row| row[dim / 2] = f32::NAN);
            let want = uncentred(&with_rows(&x, &rows, |row| row.copy_from_slice(&seven)));
            let got = uncentred(&spoilt);
            for token in 0..2 * group {
                let at = token * dim..(token + 1) * dim;
                // Half as many channels as tokens: two tokens share a mark.
                let shared = dim < group && bad.iter().any(|b| b % dim == token % dim && token < group);
                if bad.contains(&token) || shared {
                    assert!(got[at].iter().all(|x| x.is_nan()), "{spec}: token {token} of {bad:?}");
                } else {
                    assert_eq!(got[at.clone()], want[at], "{spec}: token {token} beside {bad:?}");
                }
            }
            assert!(through(&spoilt)[group * dim..].iter().all(|x| x.is_finite()), "{spec}: with a centre");
        }
    }
}

#[test]
fn kivi_neighbours_of_a_nan_token_are_packed_without_it() {
    kivi_neighbours(&Cpu);
    // What attention reads is what is decoded.
    let x = keys(&[1, 1, 256, D], 7);
    let q = gauss(&[1, 2, 1, D], 8);
    let out = |x: &Tensor| {
        let mut cache = layer(&Cpu, "kivi@4,sinks=0,window=0", D);
        cache.append(x, x).unwrap();
        let shown = |t: usize| u8::from(t != 40);
        let mask = Tensor::new(&[1, 1, 1, 256], (0..256).map(shown).collect()).unwrap();
        let seen = Rules { mask: Some(mask), ..Rules::causal(0.125) };
        [cache.attend(&q, &seen).unwrap(), cache.attend(&q, &Rules::causal(0.125)).unwrap()]
            .map(|out| out.to_f32().unwrap())
    };
    let row = x.slice(2, 41, 42).unwrap().to_f32().unwrap();
    let [hidden, seen] = out(&with_rows(&x, &[(0, 40)], |row| row[1] = f32::NAN));
    let [want, _] = out(&with_rows(&x, &[(0, 40)], |x| x.copy_from_slice(&row)));
    assert_eq!(hidden, want);
    assert!(seen.iter().all(|x| x.is_nan()));
}

/// What a preset may lose on rows of independent normal channels, with a margin: twice a uniform grid's distortion at its norm rule,
/// or what equal steps between the ends of 32 to 64 channels lose.
fn bound(name: &str, bits: f32) -> f64 {
    let uniform = [0.3634, 0.11885, 0.03744, 0.01154, 0.0035, 0.00104, 0.0003043, 0.0000878];
    if name == "mlx-affine" || name == "kivi" {
        return 1.6 * (5.5 / (2f64.powf(bits.floor().into()) - 1.0)).powi(2) / 12.0;
    }
    let whole = (bits - if name == "turboquant-prod" { 1.0 } else { 0.0 }).floor();
    // Three bits of `best` are four for one half of the channels and two for the other.
    let whole = if name == "best" && bits == 3.0 { 2.0 } else { whole };
    let law: f64 = uniform[whole as usize - 1];
    // Eight bits of a scale add 2.4e-4 where the codes do not take them up.
    1.2 * 2.0 * (1.0 - (1.0 - law).sqrt()) + if name == "best" { 2.6e-4 } else { 0.0 }
}

/// Rows of a head whose sizes are far apart: lone subnormals, tiny rows, ordinary rows, the greatest half floats.
fn far_apart(dim: usize) -> (Tensor, Vec<f32>) {
    let sizes = [1.5e-6f32, 2e-5, 5e-4, 1.0, 700.0, 1000.0, 6000.0, 1.6e4];
    let mut x = gauss(&[1, 1, 4 * sizes.len(), dim], 9).to_f32().unwrap();
    for (i, row) in x.chunks_exact_mut(dim).enumerate() {
        row.iter_mut().for_each(|x| *x *= sizes[i % sizes.len()]);
    }
    // Half floats round the tiny ones: what is to be kept is what the cache was given.
    let x = Tensor::from_f32(Dtype::F16, &[1, 1, 4 * sizes.len(), dim], x).unwrap();
    let flat = x.to_f32().unwrap();
    (x, flat)
}

fn tiny_and_huge<E: Engine>(engine: &E, specs: &[CodecSpec]) {
    for spec in specs {
        let (x, want) = far_apart(spec.head_dim);
        let codec = codec(*spec).unwrap();
        let x = engine.put(&x).unwrap();
        let codes = engine.encode(&codec, Default::default(), &x).unwrap();
        let got = f32s(engine, &engine.decode(&codes, Dtype::F32).unwrap());
        // Four rows of each size together: one row is a small sample.
        let error = |size: usize| {
            let rows = |x: &[f32]| {
                x.chunks_exact(spec.head_dim).skip(size).step_by(8).flatten().copied().collect::<Vec<_>>()
            };
            relative_mse(&rows(&want), &rows(&got))
        };
        // Codes that take up a coarse scale lose a little.
        let most = (1.3 * bound("", spec.bits.into())).max(1.4 * error(3));
        for size in 0..8 {
            assert!(error(size) < most, "{spec}, size {size}: {}, at most {most}", error(size));
        }
    }
}

fn range_specs() -> Vec<CodecSpec> {
    let mut list = vec![];
    for format in [ScaleFormat::F16, ScaleFormat::Wide8] {
        for (grid, bits) in [
            (Grid::Uniform, 4),
            (Grid::Beta, 1),
            (Grid::Beta, 6),
            (Grid::Lloyd, 8),
            (Grid::Trellis { states: 8 }, 2),
            (Grid::Trellis { states: 8 }, 4),
        ] {
            list.push(CodecSpec { format, ..CodecSpec::new(128, bits, grid) });
        }
    }
    list
}

#[test]
fn tiny_and_huge_rows_of_one_head_lose_what_ordinary_rows_lose() {
    tiny_and_huge(&Cpu, &range_specs());
    for (name, _) in PRESETS.iter().filter(|p| !["mlx-affine", "kivi"].contains(&p.0)) {
        let recipe: Recipe = format!("{name}@4").parse().unwrap();
        for side in [Side::Key, Side::Value] {
            tiny_and_huge(&Cpu, &[recipe.spec(side, 0, 64).unwrap().unwrap()]);
        }
    }
}

#[test]
fn one_subnormal_channel_and_rows_of_the_greatest_half_float_are_kept() {
    for spec in range_specs() {
        for dim in [64, 512] {
            let spec = CodecSpec { head_dim: dim, ..spec };
            let mut lone = vec![0f32; dim];
            lone[dim / 3] = 5.960_464_5e-8;
            for row in [lone, (0..dim).map(|i| if i % 3 == 0 { 65504.0 } else { -65504.0 }).collect()] {
                let codec = codec(spec).unwrap();
                let x = Tensor::new(&[1, 1, 1, dim], row.clone()).unwrap();
                let codes = Cpu.encode(&codec, Default::default(), &x).unwrap();
                let back = Cpu.decode(&codes, Dtype::F32).unwrap().to_f32().unwrap();
                // All coordinates are of one size after the rotation of a lone channel: no law, but the norm and the direction stay.
                let (along, norm) = (cosine(&row, &back), (dot(&back, &back) / dot(&row, &row)).sqrt());
                assert!(
                    along > 0.75 && (0.85..1.15).contains(&norm),
                    "{spec}: {along}, {norm} of {}",
                    row[0]
                );
            }
        }
    }
    // Brain floats reach further than half floats, and a scale of 16 bits with them.
    for size in [1e-15f32, 1e-6, 1e10, 1e16] {
        let x = gauss(&[1, 1, 4, 64], 10).to_f32().unwrap();
        let x = Tensor::from_f32(Dtype::BF16, &[1, 1, 4, 64], x.iter().map(|x| x * size).collect()).unwrap();
        let codec =
            codec("turboquant-mse@4".parse::<Recipe>().unwrap().spec(Side::Key, 0, 64).unwrap().unwrap())
                .unwrap();
        let codes = Cpu.encode(&codec, Default::default(), &x).unwrap();
        let error =
            relative_mse(&x.to_f32().unwrap(), &Cpu.decode(&codes, Dtype::F32).unwrap().to_f32().unwrap());
        assert!(error < bound("", 4.0), "{size}: {error}");
    }
}

#[test]
fn attention_reads_the_scales_that_decoding_reads() {
    // The packed road has its own ways to scales: bytes, half floats by the vector, and picked rows.
    for recipe in
        ["turboquant-mse@4,sinks=0,window=0", "best@4,not-centred,sinks=0,window=0", "turboquant-prod@3"]
    {
        let (x, _) = far_apart(64);
        let x = Tensor::concat(2, &vec![x; 8]).unwrap();
        let mut cache = layer(&Cpu, recipe, 64);
        cache.append(&x, &x).unwrap();
        let (keys, values) = cache.fetch().unwrap();
        let q = gauss(&[1, 2, 1, 64], 11);
        // So small that rows of every size have weight.
        let rules = Rules::causal(1e-6);
        let got = cache.attend(&q, &rules).unwrap().to_f32().unwrap();
        let exact = turbomoq::Stored::Exact { rows: keys, len: 256 };
        let values = turbomoq::Stored::Exact { rows: values, len: 256 };
        let want = Cpu
            .attend(&[turbomoq::Segment { start: 0, keys: exact, values }], &q, &rules)
            .unwrap()
            .to_f32()
            .unwrap();
        assert!(relative_mse(&want, &got) < 1e-3, "{recipe}: {}", relative_mse(&want, &got));
    }
}

#[test]
fn what_was_packed_before_reads_as_it_did() {
    // `log8` and positive half floats are what files of format version 1 hold.
    assert_eq!(ScaleFormat::Log8.value(1), 2f32.powi(-10));
    assert_eq!(ScaleFormat::Log8.value(131), 1.0);
    assert!((ScaleFormat::Log8.value(254) - 705.0).abs() < 1.0);
    for code in (0..0x7c00u16).step_by(7) {
        assert_eq!(ScaleFormat::F16.value(code), half::f16::from_bits(code).to_f32());
    }
    let spec: CodecSpec = "d64:b3:hadamard:trellis8:matched:log8:seed7".parse().unwrap();
    assert_eq!((spec.format, spec.to_string().parse::<CodecSpec>().unwrap()), (ScaleFormat::Log8, spec));
    // On ordinary rows the new form of a scale stands for the same numbers.
    let x = gauss(&[1, 1, 64, 64], 12);
    let decoded = |spec: CodecSpec| {
        let codes = Cpu.encode(&codec(spec).unwrap(), Default::default(), &x).unwrap();
        (codes.words().clone(), Cpu.decode(&codes, Dtype::F32).unwrap())
    };
    assert_eq!(decoded(spec), decoded(CodecSpec { format: ScaleFormat::Wide8, ..spec }));
}

/// A cache of half floats that is given rows of another type.
fn saturates<E: Engine + Clone>(engine: &E) -> (Vec<f32>, Vec<f32>) {
    let half = |x: Vec<f32>| Tensor::from_f32(Dtype::F16, &[1, 1, 1, 8], x).unwrap();
    let mut cache = layer(engine, "exact", 8);
    append(&mut cache, &half(vec![1.0; 8]));
    let odd = vec![1e30, -1e30, 65520.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.0, -0.0];
    let brain = Tensor::from_f32(Dtype::BF16, &[1, 1, 1, 8], odd.clone()).unwrap();
    append(&mut cache, &brain);
    let got = append(&mut cache, &Tensor::new(&[1, 1, 1, 8], odd).unwrap());
    // f32 rows of 1e6 that a tier of half floats holds, and that fall to one of 4 bits.
    let shape = LayerShape { key_dim: D, value_dim: D };
    let recipe = "turboquant-mse@4".parse().unwrap();
    let policy: TierPolicy = "progressive:128=16/16,rest=4/4".parse().unwrap();
    let mut tiers =
        LayerCache::new(engine.clone(), &recipe, 0, shape).unwrap().with_tiers(&policy, 16).unwrap();
    let loud = gauss(&[1, 1, 512, D], 13).to_f32().unwrap().into_iter().map(|x| x.signum() * 1e6).collect();
    (got, append(&mut tiers, &Tensor::new(&[1, 1, 512, D], loud).unwrap()))
}

fn check_saturation((rows, tiers): (Vec<f32>, Vec<f32>)) {
    for row in [&rows[8..16], &rows[16..]] {
        assert_eq!((row[0], row[1], row[2]), (65504.0, -65504.0, 65504.0));
        assert!(row[3].is_nan());
        assert_eq!(row[4..], [f32::INFINITY, f32::NEG_INFINITY, 3.0, 0.0]);
    }
    // The oldest block has been half floats and is 4 bits now.
    let want: Vec<f32> = tiers[..128 * D].iter().map(|x| x.signum() * 65504.0).collect();
    assert!(relative_mse(&want, &tiers[..128 * D]) < 0.15, "{}", relative_mse(&want, &tiers[..128 * D]));
    assert!(tiers.iter().all(|x| x.is_finite()));
}

#[test]
fn values_beyond_a_dtype_become_its_largest_finite_value() {
    check_saturation(saturates(&Cpu));
}

#[test]
fn queries_that_do_not_fit_a_report_are_refused() {
    let x = keys(&[1, 2, 40, D], 14);
    let compressor = Compressor::new("turboquant-mse@4".parse().unwrap());
    let packed = compressor.compress_layer(0, &x, &x).unwrap().key;
    let back = compressor.decompress_side(&packed).unwrap();
    let ask = |before: &Tensor, after: &Tensor, q: Option<&Tensor>| {
        quality::compare("0".into(), Side::Key, &packed, before, after, q)
    };
    assert!(ask(&x, &back, Some(&gauss(&[1, 4, 3, D], 15))).unwrap().logit_correlation > 0.9);
    for shape in
        [&[1, 4, 3, 2 * D][..], &[1, 4, 3, D / 2], &[1, 3, 4, D], &[2, 4, 3, D], &[4, 3, D], &[1, 4, 0, D]]
    {
        let refused = ask(&x, &back, Some(&gauss(shape, 15)));
        assert!(matches!(refused, Err(Error::Shape { what: "queries", .. })), "{shape:?}: {refused:?}");
    }
    let nan = with_rows(&x, &[(1, 2)], |row| row[0] = f32::NAN);
    assert!(matches!(ask(&nan, &back, None), Err(Error::NonFinite { .. })));
    assert!(matches!(ask(&x, &nan, None), Err(Error::NonFinite { .. })));
    let q = with_rows(&gauss(&[1, 4, 3, D], 15), &[(0, 0)], |row| row[0] = f32::INFINITY);
    assert!(matches!(ask(&x, &back, Some(&q)), Err(Error::NonFinite { .. })));
    assert!(matches!(
        ask(&x.slice(2, 0, 39).unwrap(), &back, None),
        Err(Error::Shape { what: "before", .. })
    ));
}

#[test]
fn exact_is_a_recipe() {
    assert_eq!("exact".parse::<Recipe>().unwrap(), Recipe::exact());
    assert_eq!("exact,window=32".parse::<Recipe>().unwrap().window, 32);
    assert!("exact@4".parse::<Recipe>().is_err());
}

/// Bits that a preset takes.
fn widths(name: &str) -> Vec<f32> {
    let least = if name == "turboquant-prod" { 2 } else { 1 };
    let halves = !["mlx-affine", "kivi"].contains(&name);
    let mut list: Vec<f32> = (least..9).map(|b| b as f32).collect();
    if halves {
        list.extend((least..8).map(|b| b as f32 + 0.5));
    }
    list
}

#[test]
fn every_head_dim_has_a_form_or_an_error_that_names_it() {
    let odd = [9, 33, 36, 50, 66, 90, 100, 129, 250, 255, 510];
    for (name, _) in PRESETS {
        for bits in widths(name) {
            let recipe = Recipe::preset(name, bits, bits).unwrap();
            for dim in (0..=576).step_by(8).chain(odd).chain([8193, 100_000]) {
                for side in [Side::Key, Side::Value] {
                    let grouped = dim % 32 != 0 && (name == "mlx-affine" || name == "kivi");
                    let narrow = dim == 8 && bits.fract() > 0.0;
                    let fits = (8..=8192).contains(&dim) && dim % 2 == 0 && !grouped && !narrow;
                    match recipe.spec(side, 0, dim) {
                        Ok(spec) => {
                            let spec = spec.unwrap();
                            assert_eq!(spec.head_dim, dim);
                            Codec::check(&spec).unwrap();
                            let nominal = spec.nominal_bits();
                            // Outliers and signs are counted in steps of 8 to 32 channels.
                            assert!(
                                (nominal - bits).abs() <= 1.0 || dim < 32,
                                "{name}@{bits}: {spec} has {nominal} bits"
                            );
                        }
                        Err(Error::Unsupported { value, field, .. }) => {
                            assert!(!fits, "{name}@{bits} at {dim}: {field} {value}");
                            // Keys of kivi go by tokens and may have less.
                            assert!(
                                field == "group" || value == dim.to_string(),
                                "{name}@{bits} at {dim}: {field} = {value}"
                            );
                        }
                        Err(error) => panic!("{name}@{bits} at {dim}: {error}"),
                    }
                }
            }
        }
    }
    let message = |recipe: &str, dim| {
        recipe.parse::<Recipe>().unwrap().spec(Side::Key, 0, dim).unwrap_err().to_string()
    };
    assert!(message("mlx-affine@4", 80).starts_with("head_dim = 80"), "{}", message("mlx-affine@4", 80));
    assert!(message("best@2.5", 8).starts_with("head_dim = 8"));
    assert!(message("best@3", 41).starts_with("head_dim = 41"));
}

/// Encodes and decodes with the spec of one side of a preset.
fn within_the_law<E: Engine>(engine: &E, name: &str, bits: f32, dim: usize, side: Side) {
    let Ok(Some(spec)) = Recipe::preset(name, bits, bits).unwrap().spec(side, 0, dim) else { return };
    let codec = codec(spec).unwrap();
    let tokens = (2048 / dim).max(8).next_multiple_of(codec.spec().tile());
    let x = gauss(&[1, 2, tokens, dim], 16);
    let put = engine.put(&x).unwrap();
    let frame = engine.frame(&codec, false, &put, None).unwrap();
    let codes = engine.encode(&codec, frame, &put).unwrap();
    let got = f32s(engine, &engine.decode(&codes, Dtype::F32).unwrap());
    let error = relative_mse(&x.to_f32().unwrap(), &got);
    // Half bits and signs are at least the whole bits below; steps of a dozen channels have a share of luck.
    let most = bound(name, bits) * if dim < 32 { 1.6 } else { 1.1 };
    assert!(error < most, "{} at {}: {spec}: {error}, at most {most}", name, engine.name());
    // Scores and sums go the same way.
    let q = gauss(&[1, 2, 1, dim], 17);
    let scores = f32s(engine, &engine.scores(&codes, &engine.put(&q).unwrap()).unwrap());
    if spec.residual == Residual::None {
        let q = q.to_f32().unwrap();
        for (i, score) in scores.iter().enumerate() {
            let (q, k) = (&q[i / tokens * dim..][..dim], &got[i * dim..][..dim]);
            assert!((f64::from(*score) - dot(q, k)).abs() < 1e-3, "{spec}: score {score} for {}", dot(q, k));
        }
    }
}

#[test]
fn every_head_dim_keeps_the_distortion_law() {
    for (turn, dim) in (8..=576).step_by(8).chain([36, 50, 66, 90, 100, 250]).enumerate() {
        let (name, _) = PRESETS[turn % PRESETS.len()];
        // Tables of many levels take long to make; they are tried below.
        let bits = [4.0, 3.0, 2.0, 2.5][turn / PRESETS.len() % 4];
        let side = if turn % 3 == 0 { Side::Value } else { Side::Key };
        let bits = if bits == 2.5 && ["mlx-affine", "kivi"].contains(&name) { 2.0 } else { bits };
        within_the_law(&Cpu, name, bits, dim, side);
    }
    for (name, _) in PRESETS {
        for bits in widths(name) {
            within_the_law(&Cpu, name, bits, 40, Side::Key);
        }
        for bits in [2.0, 3.0, 4.0] {
            within_the_law(&Cpu, name, bits, 72, Side::Value);
        }
    }
    let dense = Recipe::preset("best", 4.0, 4.0).unwrap().spec(Side::Key, 0, 40).unwrap().unwrap();
    assert_eq!((dense.rotation, dense.grid), (RotationKind::Dense, Grid::Trellis { states: 8 }));
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use turbomoq::Mlx;

    /// The trellis search of a graph is slow; one recipe has one.
    const FEW: [&str; 6] = [
        "best@3,sinks=0,window=0",
        "key=d128:b3:equalised:hadamard:beta,value=exact,centred,sinks=0,window=0",
        "turboquant-mse@2.5",
        "turboquant-prod@4",
        "kivi@4,sinks=0,window=0",
        "mlx-affine@4,centred",
    ];

    #[test]
    fn one_nan_key_leaves_the_other_rows_alone_on_mlx() {
        one_bad_key(&Mlx::new(), &FEW[1..]);
    }

    #[test]
    fn a_block_without_a_finite_row_leaves_a_frame_on_mlx() {
        block_of_nan(&Mlx::new(), &FEW);
    }

    #[test]
    fn frames_and_scales_of_odd_rows_equal_those_of_the_cpu() {
        let mlx = Mlx::new();
        let x = with_rows(&keys(&[1, 2, 65, D], 18), &[(0, 3), (1, 64)], |row| row[5] = f32::INFINITY);
        let codec = codec("d64:b2+32:equalised".parse().unwrap()).unwrap();
        let host = Cpu.frame(&codec, true, &x, Some(&x)).unwrap();
        let put = mlx.put(&x).unwrap();
        let device = mlx.frame(&codec, true, &put, Some(&put)).unwrap();
        for (a, b) in [(&host.centre, &device.centre), (&host.gain, &device.gain)] {
            let (a, b) = (a.as_ref().unwrap().to_f32().unwrap(), f32s(&mlx, b.as_ref().unwrap()));
            assert!(greatest_difference(&a, &b) < 1e-4);
        }
    }

    #[test]
    fn kivi_neighbours_of_a_nan_token_are_packed_without_it_on_mlx() {
        kivi_neighbours(&Mlx::new());
    }

    #[test]
    fn tiny_and_huge_rows_lose_what_ordinary_rows_lose_on_mlx() {
        let scalar: Vec<_> =
            range_specs().into_iter().filter(|s| !matches!(s.grid, Grid::Trellis { .. })).collect();
        tiny_and_huge(&Mlx::new(), &scalar);
        // Scales are the same as those of the CPU engine, but for ties.
        let mlx = Mlx::new();
        for spec in scalar {
            let (x, _) = far_apart(128);
            let host = scale_codes(&Cpu.encode(&codec(spec).unwrap(), Default::default(), &x).unwrap());
            let codes = mlx.encode(&codec(spec).unwrap(), Default::default(), &mlx.put(&x).unwrap()).unwrap();
            let device = mlx.get(codes.scales()).unwrap();
            let device: Vec<u16> = match &device {
                Tensor::U8(a) => a.iter().map(|&c| c.into()).collect(),
                halves => halves.to_vec::<half::f16>().unwrap().iter().map(|s| s.to_bits()).collect(),
            };
            let far = host.iter().zip(&device).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(far <= 1, "{spec}: {host:?} {device:?}");
        }
        let trellis =
            CodecSpec { format: ScaleFormat::Wide8, ..CodecSpec::new(64, 4, Grid::Trellis { states: 8 }) };
        tiny_and_huge(&mlx, &[trellis]);
    }

    #[test]
    fn values_beyond_a_dtype_become_its_largest_finite_value_on_mlx() {
        check_saturation(saturates(&Mlx::new()));
    }

    #[test]
    fn some_head_dims_keep_the_distortion_law_on_mlx() {
        let mlx = Mlx::new();
        for (name, bits, dim) in [
            ("turboquant-mse", 4.0, 40),
            ("turbomoq", 3.0, 72),
            ("turboquant-prod", 3.0, 88),
            ("best", 6.0, 104),
            ("rotation-only", 4.0, 50),
            ("uniform", 4.0, 90),
            ("turboquant-mse", 2.5, 16),
            ("kivi", 4.0, 96),
            ("mlx-affine", 4.0, 160),
            ("best", 2.0, 40),
        ] {
            within_the_law(&mlx, name, bits, dim, Side::Key);
        }
    }
}
