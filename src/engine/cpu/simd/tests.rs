//! Every form of a kernel gives what the plain loops give.

use super::level::{LEVELS, MOST};
use super::*;
use crate::math::rng::Rng;

/// Runs the forms of a kernel into a buffer each, the plain one last.
fn all(len: usize, kernel: impl Fn(&mut [f32])) -> Vec<(Level, Vec<f32>)> {
    let run = |most| {
        MOST.set(most);
        let mut out = vec![0.25; len];
        kernel(&mut out);
        MOST.set(LEVELS[0]);
        (most, out)
    };
    LEVELS.iter().copied().map(run).collect()
}

fn close(what: &str, mut forms: Vec<(Level, Vec<f32>)>) {
    let (_, plain) = forms.pop().unwrap();
    for (level, fast) in forms {
        for (i, (a, b)) in fast.iter().zip(&plain).enumerate() {
            let small = (a - b).abs() <= 2e-5 * b.abs().max(1.0);
            assert!(small, "{level:?}, {what}: {a} and {b} at {i}");
        }
    }
}

fn same(what: &str, mut forms: Vec<(Level, Vec<f32>)>) {
    let (_, plain) = forms.pop().unwrap();
    forms.iter().for_each(|(level, fast)| assert_eq!(*fast, plain, "{level:?}, {what}"));
}

#[test]
fn forms_agree() {
    let mut rng = Rng::new(1, 2);
    let mut normals = |n: usize| (0..n).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
    for dim in [8, 24, 64, 80, 128, 256] {
        for (rows, n) in [(1, 1), (2, 3), (3, 32), (4, 7), (9, 32)] {
            let (q, tile, weights) = (normals(rows * dim), normals(n * dim), normals(rows * 32));
            let what = format!("{dim} channels, {rows} rows, {n} tokens");
            let tile = LaneBlock { rows: &tile[..], width: dim, n, stride: 32 };
            close(&what, all(rows * 32, |out| scores(&q, tile, out)));
            close(&what, all(rows * dim, |out| accumulate(&weights, tile, out)));
        }
    }
    for len in [1, 8, 13, 32] {
        let x: Vec<f32> = normals(len).iter().map(|x| 20.0 * x).collect();
        close(
            "exp",
            all(len + 2, |out| {
                out[..len].copy_from_slice(&x);
                let (sum, least) = exponentials(&mut out[..len], 30.0);
                out[len..].copy_from_slice(&[sum.ln(), least]);
            }),
        );
        let factors: Vec<f32> = x.iter().map(|x| 0.1 * x + 1.0).collect();
        let logits = |x: &[f32]| {
            all(len + 1, |out| {
                out[..len].copy_from_slice(x);
                out[len] = logits(&mut out[..len], &factors, 0.3, 0.7);
            })
        };
        same("logits", logits(&x));
        let mut bad = x.clone();
        bad[len / 2] = f32::NAN;
        assert!(logits(&bad).iter().all(|(_, out)| out[len].is_nan()));
    }
    let mut x = [f32::NEG_INFINITY, 1.0, 0.0, -200.0, f32::NAN, 0.5, 0.0, 1.0];
    assert!(exponentials(&mut x, 1.0).0.is_nan() && x[4].is_nan());
    assert!(x[0] == 0.0 && x[3] == 0.0 && (x[1] - 1.0).abs() < 1e-6);
    let half: Vec<f16> = (0..0x7c00).map(f16::from_bits).collect();
    same("half floats", all(half.len(), |out| halves(&half, out)));
}

#[test]
fn forms_of_levels_and_integer_scores_give_the_same_bits() {
    let mut rng = Rng::new(3, 4);
    for bits in 1..=4u8 {
        for channels in [8, 32, 40, 64, 128, 512] {
            let (w, n) = (crate::math::bits::words(channels, bits), 5);
            let words: Vec<u32> = (0..n * w).map(|_| rng.bits() as u32).collect();
            for middle in [0.0, 7.5] {
                let bytes = |c: usize| if middle == 0.0 { (17 * c as i32 - 127) as i8 } else { c as i8 };
                let code = |c: usize| c % (1 << bits);
                let grid = Small {
                    bits,
                    levels: std::array::from_fn(|c| code(c) as f32 - 1.25),
                    bytes: std::array::from_fn(|c| bytes(code(c))),
                    unit: 0.1,
                    middle,
                    error: 0.0,
                    wide: [0; 16],
                    wide_unit: 0.0,
                };
                let picks = [4, 0, 3];
                let what = format!("{bits} bits, {channels} channels");
                let place = BandPlace { word: 0, words: w, channel: 0, channels };
                let rows = Picked { words: &words, row_words: w, picks: &picks, dim: channels, place };
                same(&what, all(3 * channels, |out| levels(&grid, rows, out)));
                if !integer_form(bits, channels) {
                    continue;
                }
                // The greatest sums of all too.
                let full = vec![u32::MAX; n * w];
                for (rows, words, most) in [(1, &words, 0), (3, &words, 0), (6, &words, 0), (2, &full, 127)] {
                    let mut byte = || if most > 0 { most } else { (rng.bits() as u8 as i8).max(-127) };
                    let q: Vec<i8> = (0..rows * channels).map(|_| byte()).collect();
                    let sums = q.chunks(channels).map(|q| q.iter().map(|&q| i32::from(q)).sum()).collect();
                    let queries = Bytes { rows: q, steps: vec![0.5; rows], sums };
                    let codes = LaneBlock { rows: &words[..], width: w, n, stride: 8 };
                    let scores = |out: &mut [f32]| integer_scores(&grid, &queries, codes, out);
                    same(&format!("{what}, {rows} rows"), all(rows * 8, scores));
                }
            }
        }
    }
}

#[test]
fn forms_of_trellis_levels_give_the_same_bits() {
    let mut rng = Rng::new(5, 6);
    for grid in crate::math::trellis::tests::all() {
        for channels in [16, 40, 64, 128, 192, 256, 576] {
            let (w, picks) = (grid.words(channels), [3, 0, 2]);
            let words: Vec<u32> = (0..4 * w).map(|_| rng.bits() as u32).collect();
            let place = BandPlace { word: 0, words: w, channel: 0, channels };
            let rows = Picked { words: &words, row_words: w, picks: &picks, dim: channels, place };
            let what = format!("{} and {} bits, {channels}", grid.states_log2, grid.bits);
            same(&what, all(3 * channels, |out| trellis_levels(&grid, rows, out)));
        }
    }
}
