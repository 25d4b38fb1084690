//! What theory says a codec loses, measured through the real codec: distortion, bias, variance, and what each option buys.
//!
//! With c the grid's unit-variance form of u, E[cu] = E[c^2] = 1 - D (levels are the means of their cells). So a relative
//! squared error of D for the plain and the least-squares scale, 2(1 - sqrt(1 - D)) for matched, D / (1 - D) for unbiased.

use crate::common::*;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::PRESETS;
use turbomoq::internals::math::codebook::{Law, distortion, lloyd_max};
use turbomoq::internals::math::rng::Rng;
use turbomoq::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat, ScaleRule};
use turbomoq::{Dtype, Recipe, Tensor};

/// D(b) of Lloyd-Max for a normal coordinate, b = 1..8.
const NORMAL: [f64; 8] =
    [0.36338, 0.117482, 0.034548, 0.009501, 0.0025047, 0.00064424, 0.00016348, 0.000041185];
/// D(b), b = 1..4, for a coordinate of a random unit vector.
const BETA: [(usize, [f64; 4]); 3] = [
    (64, [0.35839, 0.11453, 0.03339, 0.00913]),
    (128, [0.36089, 0.11600, 0.03397, 0.00931]),
    (256, [0.36214, 0.11674, 0.03426, 0.00941]),
];

/// Vectors of `x` after encoding and decoding.
fn through(spec: CodecSpec, x: &Tensor) -> Vec<f32> {
    let codec = codec(spec).unwrap();
    let frame = Cpu.frame(&codec, false, x, None).unwrap();
    let codes = Cpu.encode(&codec, frame, x).unwrap();
    Cpu.decode(&codes, Dtype::F32).unwrap().to_f32().unwrap()
}

fn error(spec: CodecSpec, x: &Tensor) -> f64 {
    relative_mse(&x.to_f32().unwrap(), &through(spec, x))
}

fn near(got: f64, want: f64, within: f64, what: &str) {
    assert!((got / want - 1.0).abs() < within, "{what}: {got}, the law says {want}");
}

/// Mean and standard error of the mean.
fn mean(x: &[f64]) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    (mean, (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0) / n).sqrt())
}

fn law(rule: ScaleRule, d: f64) -> f64 {
    match rule {
        ScaleRule::Plain | ScaleRule::LeastSquares => d,
        ScaleRule::Matched => 2.0 * (1.0 - (1.0 - d).sqrt()),
        ScaleRule::Unbiased => d / (1.0 - d),
    }
}

const RULES: [ScaleRule; 4] =
    [ScaleRule::Plain, ScaleRule::Matched, ScaleRule::Unbiased, ScaleRule::LeastSquares];

#[test]
fn lloyd_max_meets_its_distortion_under_every_rule() {
    // A row of 1024 Gaussian coordinates divided by its norm is normal to well under a percent.
    let wide = gauss(&[1, 1, 256, 1024], 1);
    for (bits, d) in (1..).zip(NORMAL) {
        for scale in RULES {
            let base = CodecSpec::new(1024, bits, Grid::Lloyd);
            let spec = CodecSpec { scale, ..base };
            let got = error(spec, &wide);
            near(got, law(scale, d), 0.02, &spec.to_string());
            assert!(got > 0.25f64.powi(bits.into()), "{spec}: below the bound of any quantizer: {got}");
        }
        // A row of 128 has lighter tails; by how much its own law says.
        let want = distortion(Law::Sphere(128), &lloyd_max(Law::Gaussian, bits));
        let spec = CodecSpec { scale: ScaleRule::Plain, ..CodecSpec::new(128, bits, Grid::Lloyd) };
        near(error(spec, &gauss(&[1, 1, 2048, 128], 2)), want, 0.02, &spec.to_string());
    }
}

#[test]
fn beta_grids_meet_their_distortion_and_beat_the_normal_grid() {
    for (dim, table) in BETA {
        let x = gauss(&[1, 2, 262_144 / dim, dim], 3);
        for (bits, d) in (1..).zip(table) {
            let spec = |grid| CodecSpec { scale: ScaleRule::Plain, ..CodecSpec::new(dim, bits, grid) };
            let beta = error(spec(Grid::Beta), &x);
            near(beta, d, 0.01, &spec(Grid::Beta).to_string());
            assert!(beta < error(spec(Grid::Lloyd), &x), "d {dim}, {bits} bits");
        }
    }
}

#[test]
fn uniform_grids_meet_their_distortion() {
    // The step is the best one, which also makes E[cu] = E[c^2].
    let x = gauss(&[1, 1, 256, 1024], 4);
    for (bits, d) in [(2, 0.11885), (3, 0.03744), (4, 0.01154)] {
        for scale in RULES {
            let spec = CodecSpec { scale, ..CodecSpec::new(1024, bits, Grid::Uniform) };
            near(error(spec, &x), law(scale, d), 0.02, &spec.to_string());
        }
    }
}

/// Errors <q, khat> - <q, k> of keys of norm one and queries `lean k + noise` with noise of norm one: those that lean on
/// their key show a bias along it.
fn score_errors(spec: CodecSpec, pairs: usize, lean: f32) -> Vec<f64> {
    let d = spec.head_dim;
    let codec = codec(spec).unwrap();
    let k = gauss(&[pairs, d], 5 + spec.seed).to_f32().unwrap();
    let k: Vec<f32> = k
        .chunks_exact(d)
        .flat_map(|k| {
            let norm = dot(k, k).sqrt() as f32;
            k.iter().map(move |x| x / norm)
        })
        .collect();
    let noise = gauss(&[pairs, d], 99 + spec.seed).to_f32().unwrap();
    let q: Vec<f32> = k.iter().zip(&noise).map(|(k, n)| lean * k + n / (d as f32).sqrt()).collect();
    let (mut words, mut scales) = (vec![0; codec.row_words()], vec![0; codec.row_scales()]);
    let mut scratch = codec.scratch();
    let rows = k.chunks_exact(d).zip(q.chunks_exact(d));
    rows.map(|(k, q)| {
        codec.encode_row(Default::default(), k, &mut words, &mut scales, &mut scratch);
        let prepared = codec.prepare_row(Default::default(), q, &mut scratch);
        f64::from(codec.score_row(&prepared, &words, &scales, &mut scratch)) - dot(q, k)
    })
    .collect()
}

#[test]
fn the_unbiased_rule_has_no_bias_and_the_plain_rule_has_its_own() {
    for bits in 1..=4 {
        let spec = |scale| CodecSpec { scale, ..CodecSpec::new(128, bits, Grid::Beta) };
        let (bias, error) = mean(&score_errors(spec(ScaleRule::Unbiased), 4000, 1.0));
        assert!(bias.abs() < 3.0 * error, "{bits} bits: bias {bias}, standard error {error}");
        // <q, k> is one on average: the plain rule shrinks it by D.
        let (bias, error) = mean(&score_errors(spec(ScaleRule::Plain), 4000, 1.0));
        let d = BETA[1].1[bits as usize - 1];
        assert!((bias + d).abs() < 0.02 * d + 3.0 * error, "{bits} bits: bias {bias} for -{d}");
    }
}

/// The form for inner products: `bits` with a sign bit a channel on top.
fn prod(bits: u8, projections: u16, rounds: u8, seed: u64) -> CodecSpec {
    let base = CodecSpec::new(128, bits, Grid::Beta);
    let residual = if rounds > 0 { Residual::Qjl { projections, rounds } } else { Residual::None };
    CodecSpec { residual, scale: ScaleRule::Plain, seed, ..base }
}

#[test]
fn residual_signs_score_without_bias_and_with_their_variance() {
    // T04, parts 1 and 2. Eight seeds, because one matrix of projections is itself a sample.
    for bits in 1..=3 {
        let errors = |rounds, lean| -> Vec<f64> {
            (0..8).flat_map(|seed| score_errors(prod(bits, 128, rounds, seed), 1000, lean)).collect()
        };
        let (with, without) = (errors(1, 1.0), errors(0, 1.0));
        assert!(with.iter().zip(&without).all(|(a, b)| a != b), "the sign stage is part of every score");
        let ((bias, error), (dead, _)) = (mean(&with), mean(&without));
        assert!(bias.abs() < 3.0 * error, "{bits} + 1 bits: bias {bias}, standard error {error}");
        assert!(dead.abs() > 10.0 * error, "without signs the plain rule is biased: {dead}");
        let d = BETA[1].1[bits as usize - 1];
        let variance = mean(&errors(1, 0.0)).1.powi(2) * with.len() as f64;
        near(variance, std::f64::consts::FRAC_PI_2 * d / 128.0, 0.1, &format!("{bits} + 1 bits, variance"));
    }
}

#[test]
fn shrunk_residuals_never_add_error() {
    let x = gauss(&[1, 1, 512, 128], 6);
    for bits in 1..=4 {
        let plain = error(prod(bits, 0, 0, 1), &x);
        for projections in [32, 64, 96, 128] {
            let mut last = plain;
            for rounds in 1..=4 {
                let got = error(prod(bits, projections, rounds, 1), &x);
                assert!(got < last, "{bits} bits, {projections} x {rounds}: {got} after {last}");
                last = got;
            }
            // One round takes what least squares gives: 1 / (1 - 1/m + (pi/2) d/m) of the error.
            let m = f64::from(projections);
            let left = 1.0 - 1.0 / (1.0 - 1.0 / m + std::f64::consts::FRAC_PI_2 * 128.0 / m);
            near(
                error(prod(bits, projections, 1, 1), &x),
                plain * left,
                0.02,
                &format!("{bits} bits, m {m}"),
            );
        }
    }
}

#[test]
fn residual_signs_lose_to_a_better_grid_so_they_are_off_by_default() {
    // T04, parts 3 and 4. From 4 bits in all the cosine keeps up within .01; at 2 and 3 bits it cannot (D(b-1) * .61 against
    // D(b)), and the KL is worse at every width: nothing but `turboquant-prod` has a residual.
    let (d, tokens) = (128, 256);
    let x = gauss(&[1, 1, tokens, d], 7);
    let flat = x.to_f32().unwrap();
    let q = gauss(&[1, 1, 64, d], 8);
    for bits in 2..=5u8 {
        let (signs, grid) = (prod(bits - 1, 128, 1, 1), prod(bits, 0, 0, 1));
        let loss = cosine(&flat, &through(grid, &x)) - cosine(&flat, &through(signs, &x));
        let bound = [0.07, 0.025, 0.01, 0.01][bits as usize - 2];
        assert!((0.0..bound).contains(&loss), "{bits} bits: {loss}");
        let kl = |spec: CodecSpec| {
            let codec = codec(spec).unwrap();
            let codes = Cpu.encode(&codec, Default::default(), &x).unwrap();
            let scores = Cpu.scores(&codes, &q).unwrap().to_f32().unwrap();
            let exact: Vec<f32> = q
                .to_f32()
                .unwrap()
                .chunks_exact(d)
                .flat_map(|q| flat.chunks_exact(d).map(|k| dot(q, k) as f32).collect::<Vec<_>>())
                .collect();
            mean_kl(&exact, &scores, tokens, d)
        };
        let (signs, grid) = (kl(signs), kl(grid));
        assert!(signs > grid, "{bits} bits: KL {signs} with signs, {grid} with a better grid");
    }
    for (name, _) in PRESETS {
        let recipe: Recipe = name.parse().unwrap();
        for spec in [recipe.key, recipe.value].into_iter().flatten() {
            assert_eq!(spec.residual != Residual::None, name == "turboquant-prod", "{name}");
        }
    }
}

/// Rows of 64 channels whose norms fill the steps of a log scale evenly.
fn loud_and_quiet() -> Tensor {
    let mut x = gauss(&[1, 1, 4096, 64], 9).to_f32().unwrap();
    let mut rng = Rng::new(1, 2);
    for row in x.chunks_exact_mut(64) {
        let size = (6.0 * rng.uniform() - 3.0).exp2() as f32;
        row.iter_mut().for_each(|x| *x *= size);
    }
    Tensor::new(&[1, 1, 4096, 64], x).unwrap()
}

#[test]
fn trellis_codes_take_up_the_rounding_of_the_scale() {
    // A rounded scale is off by ln 2 / 13 / sqrt(12) = .0154 (root mean square), and so would be the norms of keys.
    let x = loud_and_quiet();
    let flat = x.to_f32().unwrap();
    let norm = |row: &[f32]| row.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let off = |grid| {
        let spec = CodecSpec { format: ScaleFormat::Wide8, ..CodecSpec::new(64, 4, grid) };
        let y = through(spec, &x);
        let rows = flat.chunks_exact(64).zip(y.chunks_exact(64));
        (rows.map(|(x, y)| (norm(y) / norm(x) - 1.0).powi(2)).sum::<f64>() / 4096.0).sqrt()
    };
    near(off(Grid::Beta), 0.0154, 0.05, "norms on a scalar grid");
    // What is left is the spread of the norms of codes.
    near(off(Grid::Trellis { states: 8 }), 0.009, 0.2, "norms on a trellis");
}

#[test]
fn a_scale_in_eight_bits_costs_what_is_said() {
    // 13 steps an octave are (ln 2 / 13)^2 / 12 = 2.4e-4, over norms that fill the steps evenly.
    let x = loud_and_quiet();
    let flat = x.to_f32().unwrap();
    let added = |bits| {
        let spec = |format| CodecSpec {
            format,
            scale: ScaleRule::LeastSquares,
            ..CodecSpec::new(64, bits, Grid::Beta)
        };
        // Mean of the rows' errors, so that the loudest rows do not decide.
        let error = |spec| {
            let y = through(spec, &x);
            flat.chunks_exact(64).zip(y.chunks_exact(64)).map(|(a, b)| relative_mse(a, b)).sum::<f64>()
                / 4096.0
        };
        error(spec(ScaleFormat::Wide8)) - error(spec(ScaleFormat::F16))
    };
    for bits in [3, 4, 8] {
        near(added(bits), 2.4e-4, 0.06, &format!("log scale at {bits} bits"));
    }
}

#[test]
fn half_bits_are_real_and_pay_on_outlier_channels() {
    for (name, bits, bytes) in [("turboquant-mse@2.5", 2u8, 44), ("turboquant-mse@3.5", 3, 60)] {
        let spec = name.parse::<Recipe>().unwrap().key.unwrap();
        assert_eq!((spec.bits, spec.outliers), (bits, 64));
        let codec = Codec::new(spec).unwrap();
        // 64 channels at b + 1 bits, 64 at b, a scale each.
        assert_eq!(codec.row_bytes(), bytes);
        let (d, tokens) = (128, 512);
        let mut x = gauss(&[1, 2, tokens, d], 10).to_f32().unwrap();
        for row in x.chunks_exact_mut(d) {
            (0..16).for_each(|i| row[8 * i + 5] *= 8.0);
        }
        let x = Tensor::new(&[1, 2, tokens, d], x).unwrap();
        let whole = |bits| error(CodecSpec::new(d, bits, Grid::Beta), &x);
        let half = error(spec, &x);
        assert!(half < 0.5 * whole(bits), "{name}: {half}, a whole {bits} bits {}", whole(bits));
        // Nothing is gained for nothing: half of the channels, picked by energy, carry D(b + 1) of nearly all energy.
        assert!(
            half > 0.95 * whole(bits + 1),
            "{name}: {half}, a whole {} bits {}",
            bits + 1,
            whole(bits + 1)
        );
    }
}

#[test]
fn equalised_keys_lose_what_theory_says() {
    // Channels of energies e_i, tied over pairs: the noise of all scores falls by (sum sqrt e)^2 / (d sum e).
    let (d, tokens) = (128, 2048);
    let energy = |i: usize| [0.1f64, 1.0, 1.0, 4.0, 25.0, 1.0, 0.3, 1.0][i % 64 % 8];
    let mut x = gauss(&[1, 1, tokens, d], 11).to_f32().unwrap();
    for row in x.chunks_exact_mut(d) {
        row.iter_mut().enumerate().for_each(|(i, x)| *x *= energy(i).sqrt() as f32);
    }
    let x = Tensor::new(&[1, 1, tokens, d], x).unwrap();
    let (root, sum) = (0..d).fold((0.0, 0.0), |(r, s), i| (r + energy(i).sqrt(), s + energy(i)));
    for bits in [2, 3, 4] {
        let base = CodecSpec::new(d, bits, Grid::Beta);
        let even = error(CodecSpec { equalised: true, ..base }, &x);
        // Fewer channels count than 128, and the coordinates of shorter vectors have lighter tails.
        near(even, NORMAL[bits as usize - 1] * root * root / (d as f64 * sum), 0.08, &format!("{bits} bits"));
        assert!(even < 0.6 * error(base, &x), "{bits} bits");
    }
}

#[test]
fn a_rotation_makes_spiky_vectors_normal() {
    // One loud channel: without a rotation the grid is wasted on it, with one the law holds again.
    let (d, tokens) = (128, 1024);
    let mut x = gauss(&[1, 1, tokens, d], 12).to_f32().unwrap();
    x.chunks_exact_mut(d).for_each(|row| row[17] *= 30.0);
    let x = Tensor::new(&[1, 1, tokens, d], x).unwrap();
    for (rotation, law) in
        [(RotationKind::Hadamard, true), (RotationKind::Dense, true), (RotationKind::Identity, false)]
    {
        let spec = CodecSpec { rotation, ..CodecSpec::new(d, 4, Grid::Lloyd) };
        let got = error(spec, &x);
        assert_eq!((0.5..1.5).contains(&(got / NORMAL[3])), law, "{spec}: {got}");
    }
}
