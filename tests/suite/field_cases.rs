//! Behaviour learned from defects of other KV-cache compressors, at the level of codec and compressor (../shared/field-cases.md).

use crate::common::*;
use proptest::prelude::*;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::PRESETS;
use turbomoq::internals::codec::frame::RowFrame;
use turbomoq::internals::math::rng::Rng;
use turbomoq::internals::math::rotation::Rotation;
use turbomoq::{CodecSpec, Grid, RotationKind, ScaleFormat, ScaleRule, Side};
use turbomoq::{Codes, Frame};
use turbomoq::{Compressor, Dtype, Error, Recipe, Tensor};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn spec(text: &str) -> CodecSpec {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn encode(spec: CodecSpec, x: &Tensor) -> Codes<Tensor> {
    let codec = codec(spec).unwrap();
    let frame = Cpu.frame(&codec, false, x, None).unwrap();
    Cpu.encode(&codec, frame, x).unwrap()
}

fn decode(codes: &Codes<Tensor>) -> Vec<f32> {
    Cpu.decode(codes, Dtype::F32).unwrap().to_f32().unwrap()
}

fn through(spec: CodecSpec, x: &Tensor) -> Vec<f32> {
    decode(&encode(spec, x))
}

fn tensor(shape: &[usize], values: Vec<f32>) -> Tensor {
    Tensor::new(shape, values).unwrap()
}

/// The preset with nothing exact, so that every token is packed.
fn bare(name: &str) -> Recipe {
    Recipe { sinks: 0, window: 0, ..name.parse().unwrap() }
}

#[test]
fn t02_every_head_dim_works_or_is_refused_at_construction() {
    let refused = |dim, rotation| {
        let spec = CodecSpec { rotation, ..CodecSpec::new(dim, 8, Grid::Lloyd) };
        match Codec::new(spec) {
            Ok(codec) => {
                // The blocks together are the head, and the rotation keeps every inner product.
                let sizes: usize = codec.bands().iter().map(|b| b.dim).sum();
                assert_eq!(sizes, dim, "{spec}");
                let (q, k) = (gauss(&[dim], 1).to_f32().unwrap(), gauss(&[dim], 2).to_f32().unwrap());
                let turn =
                    |x: &[f32]| codec.prepare_row(RowFrame::default(), x, &mut codec.scratch()).rotated;
                let (qr, kr) = (turn(&q), turn(&k));
                let size = (dot(&q, &q) * dot(&k, &k)).sqrt();
                assert!((dot(&qr, &kr) - dot(&q, &k)).abs() < 1e-5 * size, "{spec}: <q, k>");
                assert!((dot(&kr, &kr) / dot(&k, &k) - 1.0).abs() < 1e-5, "{spec}: norm");
                let x = gauss(&[1, 1, 3, dim], 3);
                let error = relative_mse(&x.to_f32().unwrap(), &through(spec, &x));
                assert!(error < 1e-4, "{spec}: {error}");
                false
            }
            Err(Error::Unsupported { field: "head_dim", value, .. }) => {
                assert_eq!(value, dim.to_string());
                true
            }
            Err(other) => panic!("{spec}: {other}"),
        }
    };
    for dim in [64, 80, 96, 112, 128, 192, 256, 576] {
        assert!(!refused(dim, RotationKind::Hadamard), "{dim}");
    }
    assert!(refused(120, RotationKind::Hadamard), "112 + 8: the rest is too short to rotate");
    for dim in [64, 72, 80, 96, 112, 120, 128, 192, 256, 576] {
        assert!(!refused(dim, RotationKind::Dense), "{dim}");
    }
    for dim in (0..640).step_by(6).chain([1, 7, 33, 8194]) {
        let bad = !(8..=8192).contains(&dim) || dim % 2 != 0;
        assert!(!bad || refused(dim, RotationKind::Hadamard), "{dim}");
        if !bad {
            refused(dim, RotationKind::Hadamard);
        }
    }
}

#[test]
fn t03_energy_in_the_last_channels_is_kept() {
    for dim in [192, 576] {
        for (bits, least) in [(3, 0.97), (4, 0.99)] {
            let spec = CodecSpec::new(dim, bits, Grid::Lloyd);
            let cosines = [0..64, dim - 64..dim, 0..dim].map(|loud| {
                let mut x = gauss(&[1, 1, 64, dim], 4).to_f32().unwrap();
                x.iter_mut()
                    .enumerate()
                    .filter(|(i, _)| !loud.contains(&(i % dim)))
                    .for_each(|(_, x)| *x = 0.0);
                let back = through(spec, &tensor(&[1, 1, 64, dim], x.clone()));
                // A level sum may be zero by chance, a channel that was dropped always is.
                let zeros =
                    back.iter().enumerate().filter(|(i, x)| loud.contains(&(i % dim)) && **x == 0.0).count();
                assert!(zeros < 64 * loud.len() / 100, "{spec}: {zeros} zeros in channels {loud:?}");
                cosine(&x, &back)
            });
            assert!(cosines.iter().all(|c| *c > least), "{spec}: {cosines:?}");
            let spread = cosines.iter().fold(0f64, |s, a| s.max((a - cosines[0]).abs()));
            assert!(spread < 0.01, "{spec}: {cosines:?}");
        }
    }
}

#[test]
fn t05_a_common_bias_of_the_keys_does_not_drown_the_scores() {
    let (d, tokens) = (128, 256);
    let mut k = gauss(&[1, 1, tokens, d], 5).to_f32().unwrap();
    for row in k.chunks_exact_mut(d) {
        for (c, b) in [(3, 480.0), (17, -300.0), (64, 180.0), (99, -120.0)] {
            row[c] += b;
        }
    }
    let keys = tensor(&[1, 1, tokens, d], k.clone());
    let q = gauss(&[64, d], 6).to_f32().unwrap();
    let logits = |k: &[f32]| -> Vec<f32> {
        q.chunks_exact(d).flat_map(|q| k.chunks_exact(d).map(move |k| dot(q, k) as f32)).collect()
    };
    let centre = |x: &[f32]| -> Vec<f32> {
        let rows = x.chunks_exact(tokens).map(|r| (r, r.iter().map(|x| f64::from(*x)).sum::<f64>()));
        rows.flat_map(|(r, sum)| r.iter().map(move |x| x - (sum / tokens as f64) as f32)).collect()
    };
    let exact = logits(&k);
    let measure = |recipe: Recipe| {
        let compressor = Compressor::new(recipe);
        let layer = compressor.compress_layer(0, &keys, &keys).unwrap();
        let back = logits(&compressor.decompress_side(&layer.key).unwrap().to_f32().unwrap());
        (cosine(&centre(&exact), &centre(&back)), mean_kl(&exact, &back, tokens, d))
    };
    for (name, least, most) in [("best@3", 0.98, 0.05), ("best@4", 0.99, 0.02)] {
        let (correlation, kl) = measure(bare(name));
        assert!(correlation >= least && kl <= most, "{name}: correlation {correlation}, KL {kl}");
        let (correlation, kl) = measure(Recipe { centred: false, ..bare(name) });
        assert!(correlation < 0.5 && kl > 1.0, "{name} without centring: correlation {correlation}, KL {kl}");
    }
}

#[test]
fn t06_zero_vectors_come_back_as_zeros() {
    for (name, _) in PRESETS {
        let recipe = Recipe { centred: false, ..bare(name) };
        let tile = recipe.tile();
        for dtype in DTYPES {
            let (d, tokens) = (128, 8 * tile);
            let loud = gauss(&[1, 1, tokens, d], 7).to_f32().unwrap();
            // Rows that are zero, of either sign; for KIVI's keys a tile is what is encoded together.
            let zero = |t: usize| t / tile == 3 || t / tile == 6;
            let mixed: Vec<f32> = loud
                .iter()
                .enumerate()
                .map(|(i, x)| if zero(i / d) { if i / d / tile == 3 { 0.0 } else { -0.0 } } else { *x })
                .collect();
            let make = |x: &[f32], t| Tensor::from_f32(dtype, &[1, 1, t, d], x.to_vec()).unwrap();
            let compressor = Compressor::new(recipe.clone());
            let pack = |x: &Tensor| compressor.compress_layer(0, x, x).unwrap();
            let (a, b) = (pack(&make(&loud, tokens)), pack(&make(&mixed, tokens)));
            for (side, a, b) in [(Side::Key, &a.key, &b.key), (Side::Value, &a.value, &b.value)] {
                let what = format!("{name} {side} {dtype:?}");
                let back = compressor.decompress_side(b).unwrap();
                assert_eq!(back.float(), Some(dtype));
                let back = back.to_f32().unwrap();
                for (t, row) in back.chunks_exact(d).enumerate() {
                    assert!(row.iter().all(|x| x.is_finite()), "{what}: row {t}");
                    assert_eq!(row.iter().all(|x| *x == 0.0), zero(t), "{what}: row {t} {:?}", &row[..4]);
                }
                // The neighbours are what they are without the zero rows.
                let (a, b) = (a.body.as_ref().unwrap(), b.body.as_ref().unwrap());
                for t in (0..tokens).filter(|t| !zero(*t)) {
                    let tile = t / tile * tile..(t / tile + 1) * tile;
                    let cut = |c: &Codes<Tensor>| {
                        let part = c.slice(tile.start, tile.end).unwrap();
                        (part.words().to_vec::<u32>().unwrap(), scale_codes(&part))
                    };
                    assert_eq!(cut(a), cut(b), "{what}: row {t}");
                }
                let scales = scale_codes(b);
                assert!(scales.iter().all(|s| b.codec().format().value(*s).is_finite()), "{what}");
                // A zero key has a score of zero.
                let scores = Cpu.scores(b, &gauss(&[1, 1, 1, d], 8)).unwrap().to_f32().unwrap();
                assert!((0..tokens).filter(|t| zero(*t)).all(|t| scores[t] == 0.0), "{what}: {scores:?}");
            }
            let nothing = make(&vec![0.0; tile * d], tile);
            let packed = pack(&nothing);
            assert_eq!(compressor.decompress_side(&packed.key).unwrap(), nothing, "{name}: all zero");
        }
    }
}

#[test]
fn t06_centred_zero_keys_are_zero_within_the_bound_of_the_codec() {
    // Taking the mean off makes a zero row an ordinary one; only a cache of zeros is exactly zero again.
    let compressor = Compressor::new(bare("best@4"));
    let mut x = keys(&[1, 1, 64, 128], 9).to_f32().unwrap();
    x[20 * 128..21 * 128].fill(0.0);
    let packed = |x: Vec<f32>| {
        let x = tensor(&[1, 1, 64, 128], x);
        compressor
            .decompress_side(&compressor.compress_layer(0, &x, &x).unwrap().key)
            .unwrap()
            .to_f32()
            .unwrap()
    };
    let back = packed(x.clone());
    let mean: f64 =
        (0..128).map(|c| (0..64).map(|t| f64::from(x[t * 128 + c])).sum::<f64>() / 64.0).map(|m| m * m).sum();
    let row = &back[20 * 128..21 * 128];
    assert!(dot(row, row) < 2.0 * 0.0094 * mean, "{} for a centre of {mean}", dot(row, row));
    assert!(packed(vec![0.0; 64 * 128]).iter().all(|x| *x == 0.0));
}

#[test]
fn t07_constant_groups_and_rows() {
    for bits in [2, 3, 4, 8] {
        let codec = format!("d128:b{bits}:identity:affine32");
        for constant in [0.0f32, 5.0, -9.0, 500.0, 6e4] {
            for dtype in [Dtype::F16, Dtype::F32] {
                let x = Tensor::from_f32(dtype, &[1, 1, 2, 128], vec![constant; 256]).unwrap();
                let back = through(spec(&codec), &x);
                let worst = back.iter().map(|b| (b - constant).abs()).fold(0.0, f32::max);
                assert!(worst <= 1e-3 * constant.abs(), "{codec}: {constant} is off by {worst}");
            }
        }
        // One constant group among four: the others are what they are alone.
        let mut x = gauss(&[1, 1, 1, 128], 10).to_f32().unwrap();
        let loud = through(spec(&codec), &tensor(&[1, 1, 1, 128], x.clone()));
        x[32..64].fill(-9.0);
        let mixed = through(spec(&codec), &tensor(&[1, 1, 1, 128], x));
        assert_eq!((&loud[..32], &loud[64..]), (&mixed[..32], &mixed[64..]), "{bits} bits");
    }
    // A constant row is spread by the signs of the rotation like any other.
    for (bits, d) in [(2, 0.1175), (3, 0.03455), (4, 0.0095)] {
        let x = tensor(&[1, 1, 1, 128], vec![500.0; 128]);
        let errors = (0..32).map(|seed| {
            let spec = CodecSpec { seed, ..CodecSpec::new(128, bits, Grid::Lloyd) };
            relative_mse(&x.to_f32().unwrap(), &through(spec, &x))
        });
        let mean = errors.sum::<f64>() / 32.0;
        assert!(mean < 1.2 * d, "{bits} bits: {mean}");
    }
}

#[test]
fn t08_no_lane_beyond_the_data_takes_part_in_a_range() {
    let mut rng = Rng::new(3, 1);
    for sign in [1.0f32, -1.0] {
        let x: Vec<f32> = (0..32 * 96).map(|_| sign * (5.0 + rng.uniform() as f32)).collect();
        let narrow = encode(spec("d96:b4:identity:affine32"), &tensor(&[1, 1, 32, 96], x.clone()));
        // (max - min) / 30, and rounding the step to half precision.
        let worst = greatest_difference(&x, &decode(&narrow));
        assert!(worst < 0.0334 + 15.0 * 0.067 / 2048.0 + 6.0 / 2048.0, "{worst}");
        // The same channels as the head of a wider row.
        let wide: Vec<f32> = x.chunks_exact(96).flat_map(|r| r.iter().copied().chain([9.0; 32])).collect();
        let wide = through(spec("d128:b4:identity:affine32"), &tensor(&[1, 1, 32, 128], wide));
        let cut: Vec<f32> = wide.chunks_exact(128).flat_map(|r| r[..96].to_vec()).collect();
        assert_eq!(cut, decode(&narrow));
    }
}

#[test]
fn t09_bytes_are_those_of_the_buffers() {
    let (heads, tokens) = (8, 4096);
    let x = gauss(&[1, heads, tokens, 128], 11);
    for (bits, want) in [(2, 34), (3, 50), (4, 66), (5, 82), (6, 98), (8, 130)] {
        let compressor = Compressor::new(format!("turboquant-mse@{bits}").parse().unwrap());
        let cache = compressor.compress([(&x, &x)]).unwrap();
        let stats = cache.stats();
        assert_eq!(stats.bytes, 2 * heads * tokens * want, "{bits} bits");
        assert_eq!(stats.fp16_bytes, 2 * heads * tokens * 256);
        assert_eq!(stats.avg_k_bits, want as f64 / 16.0);
        let body = cache.layers[0].key.body.as_ref().unwrap();
        assert_eq!(body.words().nbytes() + body.scales().nbytes(), heads * tokens * want);
        assert_eq!(body.codec().row_bytes(), want);
    }
    // Exact tokens, centre and scales count too.
    let stats = Compressor::new("best@4".parse().unwrap()).compress([(&x, &x)]).unwrap().stats();
    let (exact, packed) = (heads * 132 * 128 * 4, heads * (tokens - 132) * 65);
    assert_eq!(stats.bytes, 2 * (exact + packed) + heads * 128 * 4);
}

#[test]
fn t10_packed_widths() {
    for dim in [64, 80, 96, 112, 128, 192, 256, 576] {
        let x = gauss(&[1, 2, 3, dim], 12);
        let mut last = f64::INFINITY;
        for bits in [2, 3, 4, 5, 6, 8] {
            let codes = encode(CodecSpec::new(dim, bits, Grid::Lloyd), &x);
            assert_eq!(
                codes.words().shape(),
                [1, 2, 3, (dim * bits as usize).div_ceil(32)],
                "d {dim}, {bits} bits"
            );
            let error = relative_mse(&x.to_f32().unwrap(), &decode(&codes));
            assert!(error < last && error < 0.2, "d {dim}, {bits} bits: {error}");
            last = error;
        }
    }
    let words =
        [2, 3, 4, 5, 6, 8].map(|b| Codec::new(CodecSpec::new(80, b, Grid::Lloyd)).unwrap().row_words());
    assert_eq!(words, [5, 8, 10, 13, 15, 20]);
}

#[test]
fn t11_wide_heads_on_a_small_stack() {
    let work = || {
        for dim in [32, 64, 128, 160, 256, 320, 512, 576, 1024] {
            for at in [0, dim - 1] {
                let mut x = vec![0.0; dim];
                x[at] = 3.0;
                let codec = codec(CodecSpec::new(dim, 4, Grid::Lloyd)).unwrap();
                let (w, s, row) = encode_rows(&codec, &Frame::default(), &tensor(&[1, 1, 1, dim], x.clone()));
                // A half-precision scale keeps the norm to 2^-11.
                let norm = dot(&row, &row).sqrt();
                assert!((norm - 3.0).abs() < 3.0 / 2048.0 + 1e-4, "d {dim}, channel {at}: {norm}");
                let codes = Cpu.encode(&codec, Frame::default(), &tensor(&[1, 1, 1, dim], x)).unwrap();
                assert_eq!((codes.words().to_vec::<u32>().unwrap(), scale_codes(&codes)), (w, s));
                assert_eq!(decode(&codes), row);
            }
        }
    };
    let small = 256 * 1024;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).stack_size(small).build().unwrap();
    std::thread::Builder::new().stack_size(small).spawn(move || pool.install(work)).unwrap().join().unwrap();
}

/// FNV-1a of the bits of a rotation, applied to the unit vectors.
fn fingerprint(rotation: &Rotation, dim: usize) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let (mut row, mut scratch) = (vec![0.0; dim], vec![0.0; dim]);
    for i in 0..dim {
        row.fill(0.0);
        row[i] = 1.0;
        rotation.forward(&mut row, &mut scratch);
        for byte in row.iter().flat_map(|x| x.to_bits().to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

/// Rotations and their fingerprints, the same on every machine.
fn goldens() -> [(Rotation, usize, u64); 4] {
    [
        (Rotation::dense(64, 1), 64, 2583014362092738657),
        (Rotation::hadamard(128, 42).unwrap(), 128, 15355271981274970917),
        (Rotation::dense(576, 7), 576, 13765413711915462098),
        (Rotation::hadamard(1536, 9).unwrap(), 1536, 5943178254189290277),
    ]
}

#[test]
fn t12_rotations_are_the_same_on_every_thread_and_machine() {
    let hashes: Vec<u64> = goldens().iter().map(|(r, d, _)| fingerprint(r, *d)).collect();
    if std::env::var_os("TURBOMOQ_T12_CHILD").is_some() {
        return println!("hashes {hashes:?}");
    }
    assert_eq!(hashes, goldens().map(|(_, _, golden)| golden));
    for threads in [1, 2, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let again = pool.broadcast(|_| {
            [
                fingerprint(&Rotation::dense(64, 1), 64),
                fingerprint(&Rotation::hadamard(128, 42).unwrap(), 128),
            ]
        });
        assert!(again.iter().all(|h| h[..] == hashes[..2]), "{threads} threads");
        // The codes too, whatever the number of threads that made them.
        let x = gauss(&[1, 4, 300, 128], 13);
        let codes = |()| encode(CodecSpec::new(128, 3, Grid::Beta), &x).words().to_vec::<u32>().unwrap();
        assert_eq!(pool.install(|| codes(())), codes(()), "{threads} threads");
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "field_cases::t12_rotations_are_the_same_on_every_thread_and_machine",
            "--nocapture",
        ])
        .env("TURBOMOQ_T12_CHILD", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(text.contains(&format!("hashes {hashes:?}")), "{text}");
}

#[test]
fn t22_padding_rows_do_not_change_the_tokens_beside_them() {
    for spec in specs(64).into_iter().filter(|s| s.tile() == 1 && !s.equalised && s.outliers == 0) {
        let real = gauss(&[1, 2, 37, 64], 14);
        let alone = encode(spec, &real);
        for fill in [0.0, 1e3, f32::NAN] {
            // Ninety-one columns of padding on the left, and another sequence in the batch.
            let pad = tensor(&[1, 2, 91, 64], vec![fill; 2 * 91 * 64]);
            let padded = Tensor::concat(2, &[pad, real.clone()]).unwrap();
            let batch = Tensor::concat(0, &[gauss(&[1, 2, 128, 64], 15), padded]).unwrap();
            let codes = Cpu.encode(alone.codec(), Frame::default(), &batch).unwrap();
            let cut = |t: &Tensor| t.slice(0, 1, 2).unwrap().slice(2, 91, 128).unwrap();
            assert_eq!(cut(codes.words()).compact(), *alone.words(), "{spec}, padding {fill}");
            let same =
                Codes::new(codes.codec().clone(), Frame::default(), cut(codes.words()), cut(codes.scales()));
            assert_eq!(scale_codes(&same.unwrap()), scale_codes(&alone), "{spec}, padding {fill}");
        }
    }
}

#[test]
fn t59_names_in_files_never_change() {
    let names: Vec<&str> = PRESETS.iter().map(|p| p.0).collect();
    let golden = [
        "best",
        "turbomoq",
        "turboquant-mse",
        "turboquant-prod",
        "rotation-only",
        "uniform",
        "mlx-affine",
        "kivi",
    ];
    assert_eq!(names, golden);
    for text in [
        "d128:b4:hadamard:lloyd:matched:f16:seed42",
        "d64:b2+32:equalised:dense:beta:unbiased:log8:qjl64x2:seed7",
        "d96:b8:identity:affine32:plain:f16:seed0",
        "d128:b2:identity:channel-affine32:least-squares:f16:seed1",
        "d80:b1:hadamard:uniform:matched:f16:seed18446744073709551615",
        "d80:b3:hadamard:fitted:matched:f16:seed42",
    ] {
        assert_eq!(spec(text).to_string(), text);
    }
    let recipe = "key=d128:b3:hadamard:beta:unbiased:log8:seed42,value=exact,centred,sinks=4,window=128";
    assert_eq!(recipe.parse::<Recipe>().unwrap().to_string(), recipe);
    assert!(matches!("d64:b4:hadamard:lattice".parse::<CodecSpec>(), Err(Error::Parse { .. })));
}

#[test]
fn t61_groups_that_do_not_divide_the_head_are_refused_with_those_that_do() {
    for dim in [64, 80, 96, 112, 120, 128, 192, 256, 576] {
        for group in [32u16, 64, 128] {
            let spec = CodecSpec {
                rotation: RotationKind::Identity,
                ..CodecSpec::new(dim, 4, Grid::Affine { group })
            };
            if dim % usize::from(group) == 0 {
                let codec = Codec::new(spec).unwrap();
                assert_eq!(codec.row_bytes(), dim / 2 + 4 * dim / usize::from(group), "{spec}");
                continue;
            }
            let Err(Error::Unsupported { field: "group", reason, .. }) = Codec::new(spec) else {
                panic!("{spec}")
            };
            for g in [32, 64, 128] {
                assert_eq!(
                    reason.split(['[', ']', ',', ' ']).any(|w| w == g.to_string()),
                    dim % g == 0,
                    "{reason}"
                );
            }
        }
        // The preset takes the smaller group where only that divides, and says no before the first token otherwise.
        let made = Compressor::new("mlx-affine@4".parse().unwrap()).codec(Side::Key, 0, dim);
        assert_eq!(made.is_ok(), dim % 32 == 0, "{dim}");
    }
}

#[test]
fn t63_every_reader_gets_the_scales() {
    // Head h is 2^h times as loud, keys are halved and values doubled: a scale that is lost, swapped between the sides or
    // taken from another head changes a norm by a factor of two.
    let (heads, tokens, d) = (4, 40, 64);
    let loud = |stream, side: f32| {
        let mut x = gauss(&[2, heads, tokens, d], stream).to_f32().unwrap();
        x.iter_mut().enumerate().for_each(|(i, x)| *x *= side * (1 << (i / (tokens * d) % heads)) as f32);
        tensor(&[2, heads, tokens, d], x)
    };
    let (k, v) = (loud(16, 0.5), loud(17, 2.0));
    let norms = |x: &[f32]| -> Vec<f64> { x.chunks_exact(tokens * d).map(|x| dot(x, x).sqrt()).collect() };
    let close = |a: &[f64], b: &[f64], what: &str| {
        for (a, b) in a.iter().zip(b) {
            assert!((a / b - 1.0).abs() < 0.05, "{what}: {a} for {b}");
        }
    };
    for (name, _) in PRESETS {
        let compressor =
            Compressor::new(Recipe { window: 0, sinks: 0, ..format!("{name}@6").parse().unwrap() });
        let layer = compressor.compress_layer(0, &k, &v).unwrap();
        for (side, packed, x) in [("key", &layer.key, &k), ("value", &layer.value, &v)] {
            let back = compressor.decompress_side(packed).unwrap().to_f32().unwrap();
            let x = x.to_f32().unwrap();
            close(&norms(&back), &norms(&x), &format!("{name} {side} decoded"));
            let body = packed.body.as_ref().unwrap();
            let t = body.shape()[2];
            for l in [1, 3] {
                let q = gauss(&[2, heads, l, d], 18);
                let scores = Cpu.scores(body, &q).unwrap().to_f32().unwrap();
                let w = gauss(&[2, heads, l, t], 19);
                let sums = Cpu.weighted_sum(body, &w).unwrap().to_f32().unwrap();
                let (q, w) = (q.to_f32().unwrap(), w.to_f32().unwrap());
                for head in 0..2 * heads {
                    let x = &x[head * tokens * d..][..t * d];
                    let of = |a: &[f32], n: usize| a[head * l * n..][..l * n].to_vec();
                    let want: Vec<f32> = of(&q, d)
                        .chunks_exact(d)
                        .flat_map(|q| x.chunks_exact(d).map(|k| dot(q, k) as f32).collect::<Vec<_>>())
                        .collect();
                    let size = |x: &[f32]| dot(x, x).sqrt();
                    close(&[size(&of(&scores, t))], &[size(&want)], &format!("{name} {side} scores"));
                    let want: Vec<f32> = of(&w, t)
                        .chunks_exact(t)
                        .flat_map(|w| {
                            (0..d)
                                .map(|c| (0..t).map(|t| w[t] * x[t * d + c]).sum::<f32>())
                                .collect::<Vec<_>>()
                        })
                        .collect();
                    close(&[size(&of(&sums, d))], &[size(&want)], &format!("{name} {side} sums"));
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_are_refused_by_name() {
    let x = gauss(&[1, 2, 5, 64], 20);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for dtype in DTYPES {
            let mut y = x.to_f32().unwrap();
            y[100] = bad;
            // `from_f32` saturates; what arrives from outside does not.
            let y = match dtype {
                Dtype::F32 => tensor(x.shape(), y),
                Dtype::F16 => {
                    Tensor::new(x.shape(), y.into_iter().map(half::f16::from_f32).collect()).unwrap()
                }
                Dtype::BF16 => {
                    Tensor::new(x.shape(), y.into_iter().map(half::bf16::from_f32).collect()).unwrap()
                }
            };
            let x = Tensor::from_f32(dtype, x.shape(), x.to_f32().unwrap()).unwrap();
            let compressor = Compressor::new("turboquant-mse@4".parse().unwrap());
            for (k, v, name) in [(&y, &x, "layer 1 keys"), (&x, &y, "layer 1 values")] {
                match compressor.compress([(&x, &x), (k, v)]) {
                    Err(Error::NonFinite { what, index: 100, value }) => {
                        assert!(what.starts_with(name) && what.contains(", head 0, token "), "{what}");
                        assert!(value == bad || (value.is_nan() && bad.is_nan()));
                    }
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_decodes_to_nan_and_spoils_no_other() {
    for spec in specs(64).into_iter().filter(|s| s.tile() == 1 && !s.equalised && s.outliers == 0) {
        let good = gauss(&[1, 1, 5, 64], 21);
        let want = through(spec, &good);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = good.to_f32().unwrap();
            x[2 * 64 + 7] = bad;
            let got = through(spec, &tensor(&[1, 1, 5, 64], x));
            assert!(got[2 * 64..3 * 64].iter().all(|x| x.is_nan()), "{spec}: {bad} vanished");
            for t in [0, 1, 3, 4] {
                assert_eq!(got[t * 64..][..64], want[t * 64..][..64], "{spec}: row {t} beside {bad}");
            }
        }
    }
}

#[test]
fn norms_beyond_eight_bits_of_a_scale_saturate() {
    for (format, top) in [(ScaleFormat::Wide8, 416_128.0), (ScaleFormat::Log8, 704.6)] {
        for dtype in [Dtype::F32, Dtype::BF16] {
            let spec = CodecSpec { format, ..CodecSpec::new(64, 4, Grid::Lloyd) };
            let x = gauss(&[1, 1, 4, 64], 22).to_f32().unwrap();
            // The last row is louder than the format can say.
            let loud: Vec<f32> =
                x.iter().enumerate().map(|(i, x)| if i < 192 { *x } else { x * 1e10 }).collect();
            let make = |x: Vec<f32>| Tensor::from_f32(dtype, &[1, 1, 4, 64], x).unwrap();
            let codes = encode(spec, &make(loud.clone()));
            let back = decode(&codes);
            assert!(back.iter().all(|x| x.is_finite()), "{format} {dtype:?}");
            let stored = format.value(*scale_codes(&codes).last().unwrap());
            assert!((stored / top - 1.0).abs() < 0.01, "{format}: {stored}");
            // The direction is kept; the size is the greatest that the format holds.
            let (loud, row) = (&loud[192..], &back[192..]);
            assert!(cosine(loud, row) > 0.98, "{format} {dtype:?}");
            let rms = (dot(row, row) / 64.0).sqrt();
            assert!((rms / f64::from(top) - 1.0).abs() < 0.2, "{format}: {rms}");
            assert_eq!(back[..192], through(spec, &make(x))[..192], "the rows beside it");
            // In half precision the decoded values themselves saturate.
            let half = Cpu.decode(&codes, Dtype::F16).unwrap().to_f32().unwrap();
            assert!(half.iter().all(|x| x.is_finite()));
        }
    }
    // A norm that overflows single precision is not finite: NaN, as the definition says.
    let x = tensor(&[1, 1, 1, 64], vec![1e30; 64]);
    assert!(through(CodecSpec::new(64, 4, Grid::Lloyd), &x).iter().all(|x| x.is_nan()));
}

#[test]
fn empty_and_one_token_caches_in_every_dtype() {
    for (name, _) in PRESETS {
        for tokens in [0, 1, 5] {
            for dtype in DTYPES {
                let recipe = Recipe { sinks: 0, window: 0, ..name.parse().unwrap() };
                let tile = recipe.tile();
                let compressor = Compressor::new(recipe);
                let shape = [2, 2, tokens, 64];
                let x = Tensor::from_f32(dtype, &shape, gauss(&shape, 23).to_f32().unwrap()).unwrap();
                let cache = compressor.compress([(&x, &x)]).unwrap();
                let stats = cache.stats();
                assert_eq!(stats.fp16_bytes, 2 * 2 * x.len());
                assert_eq!(stats.bytes == 0, tokens == 0, "{name}");
                assert!(stats.compression_ratio.is_finite());
                let (k, v) = compressor.decompress(&cache).unwrap().remove(0);
                for (side, back) in [(&cache.layers[0].key, &k), (&cache.layers[0].value, &v)] {
                    assert_eq!((back.shape(), back.float()), (&shape[..], Some(dtype)), "{name}");
                    assert_eq!(side.split().iter().sum::<usize>(), tokens);
                    if tokens > 0 && tokens < tile {
                        assert_eq!(back, &x, "{name}: fewer tokens than a tile stay exact");
                    } else if tokens > 0 {
                        let error = relative_mse(&x.to_f32().unwrap(), &back.to_f32().unwrap());
                        assert!(error < 0.05, "{name} {dtype:?}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn exact_tokens_are_exact_and_layouts_do_not_matter() {
    // Sinks and window bit for bit; T42: strided keys are their values, not their bytes.
    let compressor = Compressor::new("best@3,sinks=4,window=8".parse().unwrap());
    let whole =
        Tensor::from_f32(Dtype::F16, &[1, 40, 3, 64], gauss(&[1, 40, 3, 64], 24).to_f32().unwrap()).unwrap();
    let strided = whole.permute(&[0, 2, 1, 3]).unwrap();
    let plain = strided.compact();
    let (a, b) = (
        compressor.compress_layer(0, &strided, &plain).unwrap(),
        compressor.compress_layer(0, &plain, &strided).unwrap(),
    );
    for (a, b) in [(&a.key, &b.key), (&a.value, &b.value)] {
        let (a, b) = (compressor.decompress_side(a).unwrap(), compressor.decompress_side(b).unwrap());
        assert_eq!(a, b);
        for (start, end) in [(0, 4), (32, 40)] {
            assert_eq!(a.slice(2, start, end).unwrap(), plain.slice(2, start, end).unwrap());
        }
        assert_ne!(a.slice(2, 4, 32).unwrap(), plain.slice(2, 4, 32).unwrap());
    }
    let views = [strided.slice(2, 3, 20).unwrap(), strided.slice(1, 1, 3).unwrap()];
    for view in views {
        let codec = codec(CodecSpec::new(64, 4, Grid::Lloyd)).unwrap();
        let words = |x: &Tensor| Cpu.encode(&codec, Frame::default(), x).unwrap().words().clone();
        assert_eq!(words(&view), words(&view.compact()));
    }
}

#[test]
fn codes_refuse_what_is_not_theirs() {
    let x = gauss(&[1, 2, 6, 64], 25);
    let base = CodecSpec::new(64, 4, Grid::Lloyd);
    let codes = encode(base, &x);
    for (start, end) in [(0, 7), (4, 3), (7, 7), (usize::MAX, usize::MAX)] {
        assert!(matches!(codes.slice(start, end), Err(Error::Range { .. })), "{start}..{end}");
    }
    assert_eq!(codes.slice(6, 6).unwrap().shape(), [1, 2, 0]);
    for other in [
        CodecSpec { seed: 43, ..base },
        CodecSpec { grid: Grid::Beta, ..base },
        CodecSpec { scale: ScaleRule::Plain, ..base },
        CodecSpec { rotation: RotationKind::Dense, ..base },
    ] {
        let error = Codes::concat(&[codes.clone(), encode(other, &x)]).unwrap_err();
        let Error::CodecMismatch { expected, got } = error else { panic!("{other}: {error}") };
        assert_eq!((expected, got), (base.to_string(), other.to_string()));
    }
    // Fitted levels are part of a codec.
    let fitted = |top: f32| {
        let spec = CodecSpec { bits: 1, grid: Grid::Fitted, ..base };
        Arc::new(Codec::with_levels(spec, [-1.0, top].into()).unwrap())
    };
    let pack = |c: &Arc<Codec>| Cpu.encode(c, Frame::default(), &x).unwrap();
    let error = Codes::concat(&[pack(&fitted(1.0)), pack(&fitted(2.0))]).unwrap_err();
    assert!(matches!(error, Error::CodecMismatch { .. }), "{error}");
    assert!(Codes::concat(&[pack(&fitted(1.0)), pack(&fitted(1.0))]).is_ok());
    assert!(matches!(Codes::<Tensor>::concat(&[]), Err(Error::Shape { what: "parts", .. })));
    assert!(matches!(
        Codes::concat(&[codes.clone(), encode(base, &gauss(&[1, 3, 6, 64], 1))]),
        Err(Error::Shape { .. })
    ));

    let (w, s) = (codes.words(), codes.scales());
    let shape = |what: &str, made: turbomoq::Result<Codes<Tensor>>| match made {
        Err(Error::Shape { what: got, .. }) => assert_eq!(got, what),
        other => panic!("{what}: {other:?}"),
    };
    let put = |frame, w: Tensor, s: Tensor| Codes::new(codes.codec().clone(), frame, w, s);
    shape("words", put(Frame::default(), w.slice(3, 0, 7).unwrap(), s.clone()));
    shape("words", put(Frame::default(), w.reshape(&[2, 6, 8]).unwrap(), s.clone()));
    shape("scales", put(Frame::default(), w.clone(), s.slice(2, 0, 5).unwrap()));
    let centre = |shape: &[usize]| Frame { centre: Some(gauss(shape, 2)), ..Frame::default() };
    shape("frame centre", put(centre(&[1, 2, 63]), w.clone(), s.clone()));
    shape(
        "frame gain",
        put(Frame { gain: Some(gauss(&[1, 2, 64], 3)), ..Frame::default() }, w.clone(), s.clone()),
    );
    let equalised = codec(CodecSpec { equalised: true, ..base }).unwrap();
    shape("frame gain", Codes::new(equalised, Frame::default(), w.clone(), s.clone()));

    // The engine says the same of vectors, queries and weights.
    let c = codes.codec();
    assert!(matches!(Cpu.encode(c, Frame::default(), &gauss(&[1, 2, 6, 32], 1)), Err(Error::Shape { .. })));
    assert!(matches!(Cpu.encode(c, Frame::default(), &gauss(&[2, 6, 64], 1)), Err(Error::Shape { .. })));
    assert!(matches!(Cpu.encode(c, Frame::default(), w), Err(Error::Shape { .. } | Error::Dtype { .. })));
    let words = Tensor::new(&[1, 1, 1, 64], vec![1u32; 64]).unwrap();
    assert!(matches!(Cpu.encode(c, Frame::default(), &words), Err(Error::Dtype { .. })));
    for shape in [[1, 3, 1, 64], [2, 2, 1, 64], [1, 2, 1, 32], [1, 0, 1, 64]] {
        assert!(matches!(Cpu.scores(&codes, &gauss(&shape, 1)), Err(Error::Shape { .. })), "{shape:?}");
    }
    assert!(matches!(Cpu.weighted_sum(&codes, &gauss(&[1, 2, 1, 5], 1)), Err(Error::Shape { .. })));
    let compressor = Compressor::new("best@4".parse().unwrap());
    assert!(matches!(compressor.compress_layer(0, &x, &gauss(&[1, 2, 5, 64], 1)), Err(Error::Shape { .. })));
    assert!(matches!(compressor.compress_layer(0, &words, &words), Err(Error::Dtype { what: "keys", .. })));
    assert!(matches!(
        compressor.compress_layer(0, &gauss(&[2, 5, 64], 1), &x),
        Err(Error::Shape { what: "keys", .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// What is sliced and joined again is the same, and so is what it decodes to.
    #[test]
    fn slices_join_to_the_whole(cuts in proptest::collection::vec(0usize..=40, 0..5), turn in 0usize..30) {
        let list = specs(64);
        let spec = list[turn % list.len()];
        let x = keys(&[1, 2, 40 / spec.tile() * spec.tile().max(1), 64], 26);
        let codes = encode(spec, &x);
        let (t, tile) = (codes.shape()[2], spec.tile());
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(t) / tile * tile).chain([0, t]).collect();
        cuts.sort_unstable();
        let parts: Vec<_> = cuts.windows(2).map(|w| codes.slice(w[0], w[1]).unwrap()).collect();
        let joined = Codes::concat(&parts).unwrap();
        prop_assert_eq!(joined.words(), codes.words());
        prop_assert_eq!(joined.nbytes(), codes.nbytes());
        prop_assert_eq!(decode(&joined), decode(&codes));
    }
}
