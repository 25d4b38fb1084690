//! The encoders against the row form: codes equal but for ties, scales within a step, special rows, and the trellis search.

use super::bench::{Bench, Call, Input, halves, words};
use super::common::{codec, keys};
use half::f16;
use turbomoq::internals::codec::frame::RowFrame;
use turbomoq::internals::engine::mlx::kernels::{Form, Gpu, Stage, encode_tables, find, plan};
use turbomoq::{CodecSpec, Grid, RotationKind, ScaleFormat, ScaleRule};

/// A call that packs `x` [B, H, T, D], and what the row form gives: words, scale codes.
pub struct Case {
    pub spec: CodecSpec,
    pub call: Call,
    pub words: Vec<u32>,
    pub scales: Vec<u16>,
}

pub fn case(spec: CodecSpec, shape: [usize; 3], seed: u64, edit: impl Fn(&mut [f32])) -> Case {
    let [b, h, t] = shape;
    let (codec, d) = (codec(spec).expect("a spec with a form"), spec.head_dim);
    let form = find(Stage::Encode, &codec, Some(Gpu::Metal)).expect("an encoder");
    assert_eq!(Form::of(&codec), Some(form));
    let mut x = keys(&[b, h, t, d], seed).to_f32().unwrap();
    edit(&mut x);
    let (mut all, mut scales, mut scratch) = (vec![], vec![], codec.scratch());
    for x in x.chunks_exact(d) {
        let (mut w, mut s) = (vec![0; codec.row_words()], vec![0; 1]);
        codec.encode_row(RowFrame::default(), x, &mut w, &mut s, &mut scratch);
        all.extend(w);
        scales.extend(s);
    }
    let tables = encode_tables(&codec).expect("tables");
    let rotated = !tables.signs.is_empty();
    let (launch, place) = plan::encode(form, tables.order, rotated, spec.scale, spec.format, shape);
    let line = |x: &[f32]| Input::f32(&[x.len()], x);
    let signs = if rotated { tables.signs.clone() } else { vec![1.0] };
    let mut inputs =
        vec![Input::f32(&[b, h, t, d], &x), line(&signs), line(&tables.factor), line(&tables.levels)];
    if !matches!(spec.grid, Grid::Trellis { .. }) {
        inputs.push(line(&tables.borders));
    }
    inputs.push(Input::i32(&[2], &place));
    Case { spec, call: Call { launch, inputs }, words: all, scales }
}

/// Whether codes are those of the row form but for a few ties, and scales within one step of their format.
pub fn close(case: &Case, out: &[Vec<u8>]) -> Result<(), String> {
    let got = words(&out[0]);
    let different = got.iter().zip(&case.words).filter(|(a, b)| a != b).count();
    // A tie needs a coordinate within rounding of a border; in a trellis it can move a run of neighbours.
    let trellis = matches!(case.spec.grid, Grid::Trellis { .. });
    let allowed = if trellis { 2 + got.len() / 50 } else { 1 + got.len() / 500 };
    if got.len() != case.words.len() || different > allowed {
        return Err(format!("{}: {different} of {} words differ", case.spec, got.len()));
    }
    let scales: Vec<u16> = match case.spec.format {
        ScaleFormat::F16 => halves(&out[1]),
        ScaleFormat::Log8 | ScaleFormat::Wide8 => out[1].iter().map(|&x| x.into()).collect(),
    };
    for (row, (a, b)) in scales.iter().zip(&case.scales).enumerate() {
        let nan = |c: u16| match case.spec.format {
            ScaleFormat::F16 => f16::from_bits(c).is_nan(),
            ScaleFormat::Log8 | ScaleFormat::Wide8 => c == 255,
        };
        if nan(*a) != nan(*b) || (!nan(*a) && a.abs_diff(*b) > 1) {
            return Err(format!("{}: row {row}: scale {a:#x}, wanted {b:#x}", case.spec));
        }
    }
    Ok(())
}

fn check(cases: &[Case]) {
    let calls: Vec<Call> = cases.iter().map(|c| c.call.clone()).collect();
    let Some(bench) = Bench::new(&calls) else { return };
    let results = bench.run(&calls).unwrap();
    let wrong: Vec<String> = cases.iter().zip(&results).filter_map(|(c, out)| close(c, out).err()).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

const RULES: [ScaleRule; 4] =
    [ScaleRule::Plain, ScaleRule::Matched, ScaleRule::Unbiased, ScaleRule::LeastSquares];

#[test]
fn scalar_codes_follow_the_row_form() {
    let dims = [32, 64, 80, 96, 112, 128, 192, 256, 512];
    let mut cases = vec![];
    for (i, dim) in dims.into_iter().enumerate() {
        for turn in 0..3 {
            let bits = ((i * 3 + turn) % 8 + 1) as u8;
            let grid = [Grid::Lloyd, Grid::Uniform, Grid::Beta][turn];
            let format = if i % 2 == 0 { ScaleFormat::F16 } else { ScaleFormat::Wide8 };
            let spec = CodecSpec { scale: RULES[(i + turn) % 4], format, ..CodecSpec::new(dim, bits, grid) };
            cases.push(case(spec, [1 + i % 2, 2, 5], i as u64, |_| {}));
        }
    }
    let base = CodecSpec::new(64, 3, Grid::Fitted);
    cases.push(case(base, [1, 1, 20], 60, |_| {}));
    cases.push(case(CodecSpec { rotation: RotationKind::Identity, ..base }, [1, 1, 20], 61, |_| {}));
    check(&cases);
}

/// Zeros, a lone channel, what is not finite, what is too large for a half, and what is tiny.
fn odd_rows(x: &mut [f32]) {
    let d = x.len() / 8;
    for (i, row) in x.chunks_exact_mut(d).enumerate() {
        match i {
            0 => row.fill(0.0),
            1 => row.iter_mut().enumerate().for_each(|(c, x)| *x = if c + 1 == d { 3.0 } else { 0.0 }),
            2 => row[d / 2] = f32::NAN,
            3 => row[0] = f32::INFINITY,
            4 => row.iter_mut().for_each(|x| *x *= 1e6),
            5 => row.iter_mut().for_each(|x| *x *= 1e-6),
            6 => row.fill(-2.0),
            _ => {}
        }
    }
}

#[test]
fn odd_rows_have_the_codes_of_the_row_form() {
    let mut cases = vec![];
    for (grid, bits) in [(Grid::Uniform, 4), (Grid::Lloyd, 3), (Grid::Trellis { states: 8 }, 2)] {
        for format in [ScaleFormat::F16, ScaleFormat::Wide8] {
            for scale in RULES {
                let spec = CodecSpec { scale, format, ..CodecSpec::new(64, bits, grid) };
                let case = case(spec, [1, 2, 4], 3, odd_rows);
                // One channel is many channels of equal size after the rotation, all of them near the same border: ties.
                cases.push(case);
            }
        }
    }
    let calls: Vec<Call> = cases.iter().map(|c| c.call.clone()).collect();
    let Some(bench) = Bench::new(&calls) else { return };
    for (case, out) in cases.iter().zip(bench.run(&calls).unwrap()) {
        let (got, n) = (words(&out[0]), case.words.len() / 8);
        for row in [0, 2, 3] {
            assert!(got[row * n..][..n].iter().all(|w| *w == 0), "{}: words of row {row}", case.spec);
        }
        close(
            &Case {
                words: got,
                ..Case {
                    spec: case.spec,
                    call: case.call.clone(),
                    words: vec![],
                    scales: case.scales.clone(),
                }
            },
            &out,
        )
        .unwrap();
    }
}

#[test]
fn trellis_search_follows_the_row_form() {
    let mut cases = vec![];
    for bits in 1..=4u8 {
        for (i, dim) in [64, 80, 128, 256].into_iter().enumerate() {
            let spec = CodecSpec::new(dim, bits, Grid::Trellis { states: 8 });
            let spec = CodecSpec { scale: RULES[(i + usize::from(bits)) % 4], ..spec };
            cases.push(case(spec, [1, 1, 4], i as u64, |_| {}));
            let spec = CodecSpec { format: ScaleFormat::Wide8, ..spec };
            cases.push(case(spec, [1, 1, 4], 10 + i as u64, |_| {}));
        }
        cases.push(case(CodecSpec::new(128, bits, Grid::Trellis { states: 10 }), [1, 1, 2], 50, |_| {}));
    }
    check(&cases);
}
