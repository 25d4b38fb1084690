//! A weight of exact zero hides what is in a row, NaN and infinities included, in every form of every engine.

use crate::common::{codec, gauss};
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Tensor;
use turbomoq::{CodecSpec, Grid, Residual, RotationKind, ScaleFormat};
use turbomoq::{Rules, Segment, Stored};

const DIM: usize = 64;
const TOKENS: usize = 64;
/// The token whose value is not finite.
const BAD: usize = 37;

/// Values with one row that is not finite in its first channel.
fn values(bad: f32) -> Tensor {
    let mut x = gauss(&[1, 1, TOKENS, DIM], 5).to_f32().unwrap();
    x[BAD * DIM] = bad;
    Tensor::new(&[1, 1, TOKENS, DIM], x).unwrap()
}

/// Values in which the bad row is like the first of its tile of 32, so that a tile has the ranges of its other tokens.
fn left_out() -> Tensor {
    let mut x = values(0.0).to_f32().unwrap();
    x.copy_within(32 * DIM..33 * DIM, BAD * DIM);
    Tensor::new(&[1, 1, TOKENS, DIM], x).unwrap()
}

/// A codec for each form of a weighted sum: levels, uniform steps, bands, a trellis, a residual, groups, channels.
fn forms() -> Vec<CodecSpec> {
    let base = CodecSpec::new(DIM, 4, Grid::Lloyd);
    let identity = RotationKind::Identity;
    vec![
        base,
        CodecSpec { grid: Grid::Uniform, ..base },
        CodecSpec { grid: Grid::Uniform, bits: 8, format: ScaleFormat::Log8, rotation: identity, ..base },
        CodecSpec { grid: Grid::Uniform, bits: 3, ..base },
        CodecSpec { bits: 2, outliers: 32, ..base },
        CodecSpec { bits: 2, grid: Grid::Trellis { states: 8 }, ..base },
        CodecSpec { bits: 2, residual: Residual::Qjl { projections: 64, rounds: 1 }, ..base },
        CodecSpec { grid: Grid::Affine { group: 32 }, rotation: identity, ..base },
        CodecSpec { grid: Grid::Affine { group: 64 }, ..base },
        CodecSpec { grid: Grid::ChannelAffine { group: 32 }, rotation: identity, ..base },
    ]
}

/// Weights of two queries: the first takes every token but the bad one, the second takes it too.
fn weights() -> Tensor {
    let one = |q: usize, t: usize| if q == 0 && t == BAD { 0.0 } else { 0.01 * (1 + t % 7) as f32 };
    let list = (0..2).flat_map(|q| (0..TOKENS).map(move |t| one(q, t))).collect();
    Tensor::new(&[1, 2, 1, TOKENS], list).unwrap()
}

fn weight_zero_hides<E: Engine>(engine: &E) {
    for spec in forms() {
        let codec = codec(spec).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let what = format!("{spec}, {bad}, {}", engine.name());
            let x = engine.put(&values(bad)).unwrap();
            let clean =
                engine.put(&if codec.channel().is_some() { left_out() } else { values(0.5) }).unwrap();
            let frame = engine.frame(&codec, false, &clean, None).unwrap();
            let codes = engine.encode(&codec, frame.clone(), &x).unwrap();
            let sums = engine.weighted_sum(&codes, &engine.put(&weights()).unwrap()).unwrap();
            let got = engine.get(&sums).unwrap().to_f32().unwrap();
            let clean = engine.encode(&codec, frame, &clean).unwrap();
            let want =
                engine.get(&engine.weighted_sum(&clean, &engine.put(&weights()).unwrap()).unwrap()).unwrap();
            let want = want.to_f32().unwrap();
            for c in 0..DIM {
                assert!((got[c] - want[c]).abs() < 1e-4, "{what}: {} for {} in channel {c}", got[c], want[c]);
            }
            assert!(!got[DIM].is_finite(), "{what}: the second query takes the row");
            attended(engine, Stored::Packed(codes), &what);
        }
    }
    let bad = engine.put(&values(f32::NAN)).unwrap();
    let out = attended(engine, Stored::Exact { rows: bad, len: TOKENS }, "exact rows");
    assert!(
        out[DIM..].iter().filter(|x| !x.is_finite()).count() == 1,
        "the other channels of an exact row are there"
    );
}

/// Attention over values of which a mask hides the bad row from the first query only.
fn attended<E: Engine>(engine: &E, values: Stored<E::Tensor>, what: &str) -> Vec<f32> {
    let rows = engine.put(&gauss(&[1, 1, TOKENS, DIM], 6)).unwrap();
    let keys = Stored::Exact { rows, len: TOKENS };
    let mask: Vec<u8> = (0..2 * TOKENS).map(|i| u8::from(i != BAD)).collect();
    let mask = Some(engine.put(&Tensor::new(&[1, 2, 1, TOKENS], mask).unwrap()).unwrap());
    let rules = Rules { mask, ..Rules::causal(0.01) };
    let q = engine.put(&gauss(&[1, 2, 1, DIM], 7)).unwrap();
    let out = engine.attend(&[Segment { start: 0, keys, values }], &q, &rules).unwrap();
    let out = engine.get(&out).unwrap().to_f32().unwrap();
    assert!(out[..DIM].iter().all(|x| x.is_finite()), "{what}: the mask hides the row");
    assert!(!out[DIM].is_finite(), "{what}: the second query sees the row");
    out
}

#[test]
fn a_weight_of_zero_hides_a_row_that_is_not_finite_on_the_cpu() {
    weight_zero_hides(&Cpu);
}

#[cfg(feature = "mlx")]
#[test]
fn a_weight_of_zero_hides_a_row_that_is_not_finite_on_mlx() {
    weight_zero_hides(&turbomoq::Mlx::new());
}
