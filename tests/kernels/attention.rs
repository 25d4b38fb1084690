//! Attention and unpacking: grids x widths x head dims x GQA x lengths x rules against the row form.

use super::bench::{Bench, Call, Input, floats, halves};
use super::common::{codec, gauss, keys};
use half::{bf16, f16};
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::internals::codec::frame::RowFrame;
use turbomoq::internals::engine::mlx::kernels::plan::{self, ElementType, Pass};
use turbomoq::internals::engine::mlx::kernels::{Form, table};
use turbomoq::{CodecSpec, Grid, RotationKind, ScaleFormat};

/// Rows of one side [B, H, T, D] in a buffer of more capacity, and what the row form says of them.
pub struct Side {
    pub form: Form,
    pub codec: Option<Arc<Codec>>,
    /// Words, scales and levels.
    pub inputs: [Input; 3],
    packed: Vec<(Vec<u32>, Vec<u16>)>,
    /// Rows in the domain of the kernel's sums.
    pub rows: Vec<Vec<f32>>,
}

/// What lies behind the tokens of a buffer: read, it would show.
fn garbage<T: Copy>(
    rows: &[Vec<T>],
    width: usize,
    [b, h, t]: [usize; 3],
    capacity: usize,
    poison: T,
) -> Vec<T> {
    let mut out = vec![poison; b * h * capacity * width];
    for (i, row) in rows.iter().enumerate() {
        out[(i / t * capacity + i % t) * width..][..width].copy_from_slice(row);
    }
    out
}

impl Side {
    pub fn packed(spec: CodecSpec, shape: [usize; 3], seed: u64) -> Side {
        let [b, h, t] = shape;
        let codec = codec(spec).expect("a spec with a form");
        let form = Form::of(&codec).expect("a kernel form");
        let mut scratch = codec.scratch();
        let mut packed = vec![];
        let mut rows = vec![];
        let x = keys(&[b, h, t, spec.head_dim], seed).to_f32().unwrap();
        for x in x.chunks_exact(spec.head_dim) {
            let (mut w, mut s) = (vec![0; codec.row_words()], vec![0; codec.row_scales()]);
            codec.encode_row(RowFrame::default(), x, &mut w, &mut s, &mut scratch);
            let mut row = vec![0.0; spec.head_dim];
            codec.add_weighted_row(&w, &s, 1.0, &mut row, &mut scratch);
            packed.push((w, s));
            rows.push(row);
        }
        let capacity = t + 5;
        let words: Vec<_> = packed.iter().map(|p| p.0.clone()).collect();
        let scales: Vec<_> = packed.iter().map(|p| p.1.clone()).collect();
        let n = codec.row_words();
        let words = Input::u32(&[b, h, capacity, n], &garbage(&words, n, shape, capacity, 0xdead_beef));
        let each = codec.row_scales();
        let scales = garbage(&scales, each, shape, capacity, 0x7e00);
        let scales = match codec.format() {
            ScaleFormat::F16 => Input::f16(&[b, h, capacity, each], &scales),
            // The low byte of the poison is no NaN in the log form.
            ScaleFormat::Log8 | ScaleFormat::Wide8 => {
                let bytes: Vec<u8> =
                    scales.iter().map(|&s| if s == 0x7e00 { 255 } else { s as u8 }).collect();
                Input::u8(&[b, h, capacity, each], &bytes)
            }
        };
        let levels = table(&codec, form);
        let levels = Input::f32(&[levels.len()], &levels);
        Side { form, codec: Some(codec), inputs: [words, scales, levels], packed, rows }
    }

    pub fn exact(element: ElementType, dim: usize, shape: [usize; 3], seed: u64) -> Side {
        let [b, h, t] = shape;
        let x = keys(&[b, h, t, dim], seed).to_f32().unwrap();
        let rows: Vec<Vec<f32>> = x.chunks_exact(dim).map(<[f32]>::to_vec).collect();
        let sizes = [b, h, t + 5, dim];
        let (words, round): (Input, fn(f32) -> f32) = match element {
            ElementType::F16 => {
                let bits: Vec<Vec<u16>> =
                    rows.iter().map(|r| r.iter().map(|&x| f16::from_f32(x).to_bits()).collect()).collect();
                (Input::f16(&sizes, &garbage(&bits, dim, shape, t + 5, 0x7e00)), |x| {
                    f16::from_f32(x).to_f32()
                })
            }
            ElementType::BF16 => {
                let bits: Vec<Vec<u16>> =
                    rows.iter().map(|r| r.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()).collect();
                (Input::bf16(&sizes, &garbage(&bits, dim, shape, t + 5, 0x7fc0)), |x| {
                    bf16::from_f32(x).to_f32()
                })
            }
            _ => (Input::f32(&sizes, &garbage(&rows, dim, shape, t + 5, f32::NAN)), |x| x),
        };
        let rows = rows.into_iter().map(|r| r.into_iter().map(round).collect()).collect();
        let inputs = [words, Input::f16(&[1], &[0]).strided(&[0, 0, 0, 0]), Input::f32(&[1], &[0.0])];
        Side { form: Form::exact(dim), codec: None, inputs, packed: vec![], rows }
    }

    /// The query as the kernel gets it: in the domain of the keys.
    fn query(&self, q: &[f32]) -> Vec<f32> {
        match &self.codec {
            Some(codec) => codec.prepare_row(RowFrame::default(), q, &mut codec.scratch()).rotated,
            None => q.to_vec(),
        }
    }

    fn score(&self, q: &[f32], row: usize) -> f64 {
        match &self.codec {
            Some(codec) => {
                let mut scratch = codec.scratch();
                let prepared = codec.prepare_row(RowFrame::default(), q, &mut scratch);
                let (words, scales) = &self.packed[row];
                f64::from(codec.score_row(&prepared, words, scales, &mut scratch))
            }
            None => super::common::dot(q, &self.rows[row]),
        }
    }
}

/// One query over one head.
pub const ONE: Pass = Pass {
    batch: 1,
    heads: 1,
    group: 1,
    queries: 1,
    tokens: 0,
    position: 0,
    window: 0,
    causal: false,
    masked: false,
};

/// Everything that a first pass is asked beside its rows.
#[derive(Clone)]
pub struct Rules {
    pub pass: Pass,
    pub first: Vec<i32>,
    pub cap: f32,
    pub sparse: f32,
}

/// One call with what it must give.
pub struct Case {
    pub name: String,
    pub call: Call,
    pub pass: Pass,
    /// For every row: greatest score, sum of weights, sum of weighted values.
    pub want: Vec<(f64, f64, Vec<f64>)>,
    /// Greatest entry of the values.
    size: f64,
    /// Scaled queries as they came.
    pub query: Vec<f32>,
}

pub fn case(k: &Side, v: &Side, rules: &Rules, seed: u64) -> Case {
    let p = rules.pass;
    let (hq, d, vd) = (p.heads * p.group, k.form.channels(), v.form.channels());
    let scale = (d as f32).powf(-0.5);
    let q: Vec<f32> =
        gauss(&[p.batch, hq, p.queries, d], seed).to_f32().unwrap().iter().map(|x| x * scale).collect();
    let bias = gauss(&[p.batch, hq, p.queries, 1], seed + 1).to_f32().unwrap();
    let hide = |x: f32| if x > 1.0 { f32::NEG_INFINITY } else { x };
    let mask: Vec<f32> = gauss(&[p.batch, 1, p.queries, p.tokens.max(1)], seed + 2)
        .to_f32()
        .unwrap()
        .into_iter()
        .map(hide)
        .collect();
    let rotated: Vec<f32> = q.chunks_exact(d).flat_map(|q| k.query(q)).collect();
    let (launch, place) = plan::attend(k.form, v.form, &p).expect("queries fit");
    let mask_strides = if p.masked { [p.queries * p.tokens, 0, p.tokens, 1] } else { [0; 4] };
    let [kw, ks, kl] = k.inputs.clone();
    let [vw, vs, vl] = v.inputs.clone();
    let inputs = vec![
        Input::f32(&[p.batch, hq, p.queries, d], &rotated),
        kw,
        ks,
        kl,
        vw,
        vs,
        vl,
        Input::f32(&[p.batch, hq, p.queries, 1], &bias),
        Input::f32(&[mask.len()], &mask).strided(&mask_strides),
        Input::i32(&[p.batch], &rules.first),
        Input::i32(&[], &[p.tokens as i32]),
        Input::f32(&[2], &[rules.cap, rules.sparse]),
        Input::i32(&[place.len()], &place),
    ];
    let mut want = vec![];
    for row in 0..p.batch * hq * p.queries {
        let (b, head, l) = (row / p.queries / hq, row / p.queries % hq, row % p.queries);
        let at = p.position + l as i64;
        let sees = |t: usize| {
            let t64 = t as i64;
            t64 >= i64::from(rules.first[b])
                && (!p.causal || t64 <= at)
                && (p.window == 0 || t64 > at - p.window as i64)
        };
        let mut scores = vec![];
        for t in (0..p.tokens).filter(|&t| sees(t)) {
            let kv = (b * p.heads + head / p.group) * p.tokens + t;
            let mut s = k.score(&q[row * d..][..d], kv) + f64::from(bias[row]);
            if rules.cap > 0.0 {
                s = f64::from(rules.cap) * (s / f64::from(rules.cap)).tanh();
            }
            if p.masked {
                s += f64::from(mask[(b * p.queries + l) * p.tokens + t]);
            }
            if s > f64::NEG_INFINITY {
                scores.push((kv, s));
            }
        }
        let top = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
        let (mut total, mut sums) = (0.0, vec![0.0; vd]);
        for (kv, s) in scores {
            let w = (s - top).exp();
            total += w;
            sums.iter_mut().zip(&v.rows[kv]).for_each(|(sum, &x)| *sum += w * f64::from(x));
        }
        want.push((top, total, sums));
    }
    let size = v.rows.iter().flatten().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
    let name = format!("{:?} / {:?}, {p:?}, first {:?}, cap {}", k.form, v.form, rules.first, rules.cap);
    Case { name, call: Call { launch, inputs }, pass: p, want, size, query: q }
}

/// The second pass over the shares that a first pass gave.
pub fn merge_call(case: &Case, out: &[Vec<u8>], element: ElementType, divide: bool) -> Call {
    let p = case.pass;
    let shape = &case.call.launch.outputs[0].1;
    let rows = [p.batch, p.heads * p.group, p.queries];
    let (launch, counts) = plan::merge(rows, shape[3], shape[4], element, false, divide);
    let inputs = vec![
        Input::f32(shape, &floats(&out[0])),
        Input::f32(&case.call.launch.outputs[1].1, &floats(&out[1])),
        Input::f32(&[1], &[0.0]),
        Input::i32(&[5], &counts),
    ];
    Call { launch, inputs }
}

/// Whether joined shares are what the row form says.
pub fn close(case: &Case, merged: &[Vec<u8>]) -> Result<(), String> {
    let (sums, state) = (floats(&merged[0]), floats(&merged[1]));
    let dim = case.want.first().map_or(1, |w| w.2.len());
    for (row, (top, total, want)) in case.want.iter().enumerate() {
        let (got_top, got_total) = (f64::from(state[2 * row]), f64::from(state[2 * row + 1]));
        let lowest = f64::from(f32::NEG_INFINITY);
        let near = |a: f64, b: f64| a == b || (a - b).abs() <= 2e-4 * (1.0 + b.abs());
        if (*top == lowest) != (got_top == lowest) || !near(got_top, *top) || !near(got_total, *total) {
            return Err(format!(
                "{}: row {row}: state {got_top} {got_total}, wanted {top} {total}",
                case.name
            ));
        }
        for (c, w) in want.iter().enumerate() {
            let (got, want) = (f64::from(sums[row * dim + c]), if *total > 0.0 { w / total } else { 0.0 });
            let bound = 3e-4 * case.size;
            if got.is_nan() || (got - want).abs() > bound {
                return Err(format!("{}: row {row} channel {c}: {got}, wanted {want}", case.name));
            }
        }
    }
    Ok(())
}

/// Codecs and exact rows of all kinds, a width and a head dim each.
fn sides() -> Vec<(Option<CodecSpec>, ElementType, usize)> {
    let mut list = vec![];
    let dims = [128, 64, 80, 96, 112, 32, 192, 256];
    for bits in 1..=8u8 {
        let dim = dims[usize::from(bits) % 8];
        let spec = CodecSpec::new(dim, bits, Grid::Uniform);
        list.push((Some(CodecSpec { format: ScaleFormat::Wide8, ..spec }), ElementType::F32, dim));
        let dim = dims[usize::from(bits * 3 + 1) % 8];
        list.push((Some(CodecSpec::new(dim, bits, Grid::Lloyd)), ElementType::F32, dim));
    }
    for bits in 1..=4u8 {
        let dim = [128, 64, 80, 96][usize::from(bits) - 1];
        list.push((Some(CodecSpec::new(dim, bits, Grid::Trellis { states: 8 })), ElementType::F32, dim));
        list.push((Some(CodecSpec::new(128, bits, Grid::Trellis { states: 10 })), ElementType::F32, 128));
    }
    for bits in [2, 3, 4] {
        list.push((Some(CodecSpec::new(128, bits, Grid::Uniform)), ElementType::F32, 128));
        list.push((Some(CodecSpec::new(128, bits, Grid::Beta)), ElementType::F32, 128));
    }
    let base = CodecSpec::new(64, 3, Grid::Fitted);
    list.push((Some(base), ElementType::F32, 64));
    list.push((
        Some(CodecSpec { rotation: RotationKind::Dense, grid: Grid::Beta, ..base }),
        ElementType::F32,
        64,
    ));
    // Two bands: outliers, and a head dim that is rotated in blocks.
    for (dim, bits, grid, outliers, lead, format) in [
        (128, 2, Grid::Lloyd, 32, 1, ScaleFormat::F16),
        (64, 3, Grid::Uniform, 16, 1, ScaleFormat::Wide8),
        (128, 2, Grid::Trellis { states: 8 }, 64, 2, ScaleFormat::Wide8),
        (144, 4, Grid::Uniform, 0, 1, ScaleFormat::F16),
    ] {
        let spec = CodecSpec { outliers, lead, format, ..CodecSpec::new(dim, bits, grid) };
        list.push((Some(spec), ElementType::F32, dim));
    }
    list.push((None, ElementType::F16, 128));
    list.push((None, ElementType::BF16, 80));
    list.push((None, ElementType::F32, 64));
    list
}

fn side(spec: &(Option<CodecSpec>, ElementType, usize), shape: [usize; 3], seed: u64) -> Side {
    match spec.0 {
        Some(packed) => Side::packed(packed, shape, seed),
        None => Side::exact(spec.1, spec.2, shape, seed),
    }
}

#[test]
fn attention_follows_the_row_form() {
    let sides = sides();
    let n = sides.len();
    let (groups, lengths, queries) =
        ([1, 2, 4, 8, 3, 6, 16], [1, 5, 31, 33, 64, 100, 257], [1, 1, 2, 5, 1, 8, 16]);
    let mut cases = vec![];
    for i in 0..n {
        // Each kind meets the next one and one far away, once as keys and once as values.
        let (ks, vs) = (&sides[i], &sides[(i * 7 + 3) % n]);
        let group = groups[i % 7];
        for turn in 0..3 {
            let j = i + turn;
            let (batch, heads) = (1 + j % 2, 1 + (j / 2) % 2);
            let tokens = lengths[(i * 2 + turn * 3) % 7];
            let mut l = queries[(j * 3) % 7];
            let limit = |l: usize| {
                plan::attend(
                    Form::exact(ks.2),
                    Form::exact(vs.2),
                    &Pass { batch, heads, group, queries: l, tokens, ..ONE },
                )
                .is_none()
            };
            while limit(l) {
                l /= 2;
            }
            // Rules by turns: all alone, then together.
            let kind = (i * 3 + turn) % 8;
            let pass = Pass {
                batch,
                heads,
                group,
                queries: l,
                tokens,
                position: tokens as i64 - l as i64
                    + if kind == 6 {
                        3
                    } else if kind == 7 {
                        -2
                    } else {
                        0
                    },
                window: if matches!(kind, 2 | 5 | 6) { 7 } else { 0 },
                causal: kind != 0 && kind != 3,
                masked: matches!(kind, 4 | 5),
            };
            let first =
                (0..batch as i32).map(|b| if matches!(kind, 3 | 5) { b * 2 + 1 } else { -b }).collect();
            let rules =
                Rules { pass, first, cap: if kind == 1 || kind == 5 { 2.5 } else { 0.0 }, sparse: 0.0 };
            let shape = [batch, heads, tokens];
            let (k, v) = (side(ks, shape, j as u64), side(vs, shape, 100 + j as u64));
            cases.push(case(&k, &v, &rules, 200 + j as u64));
        }
    }
    check(&cases);
}

fn check(cases: &[Case]) {
    let calls: Vec<Call> = cases.iter().map(|c| c.call.clone()).collect();
    let Some(bench) = Bench::new(&calls) else { return };
    let parts = bench.run(&calls).unwrap();
    let merges: Vec<Call> =
        cases.iter().zip(&parts).map(|(c, out)| merge_call(c, out, ElementType::F32, true)).collect();
    let merged = Bench::new(&merges).unwrap().run(&merges).unwrap();
    let wrong: Vec<String> = cases.iter().zip(&merged).filter_map(|(c, out)| close(c, out).err()).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Keys and values as [B, T, H, W] in memory, as a cache could keep them.
#[test]
fn strides_are_followed() {
    let (b, h, t) = (2, 2, 19);
    let spec = CodecSpec::new(64, 4, Grid::Uniform);
    let pass = Pass { batch: b, heads: h, group: 2, tokens: t, position: 18, causal: true, ..ONE };
    let rules = Rules { pass, first: vec![0, 4], cap: 0.0, sparse: 0.0 };
    let turn = |input: &Input, width: usize, bytes: usize, capacity: usize| {
        let mut out = input.clone();
        for (i, row) in input.bytes.chunks_exact(width * bytes).enumerate() {
            let (n, c) = (i / capacity, i % capacity);
            let to = (n / h * capacity + c) * h + n % h;
            out.bytes[to * width * bytes..][..width * bytes].copy_from_slice(row);
        }
        out.strided(&[capacity * h * width, width, h * width, 1])
    };
    let mut k = Side::packed(spec, [b, h, t], 1);
    let mut v = Side::packed(spec, [b, h, t], 2);
    for side in [&mut k, &mut v] {
        side.inputs[0] = turn(&side.inputs[0], 8, 4, t + 5);
        side.inputs[1] = turn(&side.inputs[1], 1, 2, t + 5);
    }
    check(&[case(&k, &v, &rules, 3)]);
}

/// Exact sinks, packed tokens and an exact window, with a learned sink: what a cache holds, joined at the end.
#[test]
#[allow(clippy::too_many_lines)] // one scenario, from the rows to the joined sum
fn segments_and_sinks_join_by_their_state() {
    let (b, h, group, l, dim) = (1, 2, 2, 2, 64);
    let spec = CodecSpec::new(dim, 3, Grid::Beta);
    let (lens, mut start) = ([4, 60, 9], 0i64);
    let total: usize = lens.iter().sum();
    let sides: Vec<[Side; 2]> = lens
        .iter()
        .enumerate()
        .map(|(i, &t)| {
            let make = |seed| {
                if i == 1 {
                    Side::packed(spec, [b, h, t], seed)
                } else {
                    Side::exact(ElementType::F16, dim, [b, h, t], seed)
                }
            };
            [make(i as u64), make(10 + i as u64)]
        })
        .collect();
    let mut cases = vec![];
    for ([k, v], &tokens) in sides.iter().zip(&lens) {
        let position = (total - l) as i64 - start;
        let pass = Pass { batch: b, heads: h, group, queries: l, tokens, position, causal: true, ..ONE };
        cases.push(case(k, v, &Rules { pass, first: vec![1 - start as i32], cap: 0.0, sparse: 0.0 }, 7));
        start += tokens as i64;
    }
    let calls: Vec<Call> = cases.iter().map(|c| c.call.clone()).collect();
    let Some(bench) = Bench::new(&calls) else { return };
    let parts = bench.run(&calls).unwrap();
    let merges: Vec<Call> =
        cases.iter().zip(&parts).map(|(c, out)| merge_call(c, out, ElementType::F32, false)).collect();
    let joined = Bench::new(&merges).unwrap().run(&merges).unwrap();
    // Sums of the packed part leave the rotated domain before they meet the others.
    let rows = b * h * group * l;
    let codec = sides[1][1].codec.as_ref().unwrap();
    let out_of = |sums: &[f64]| {
        let (mut sum, mut out) = (sums.iter().map(|x| *x as f32).collect::<Vec<_>>(), vec![0.0; dim]);
        codec.finish_sum(RowFrame::default(), &mut sum, 1.0, &mut out, &mut codec.scratch());
        out
    };
    let (mut sums, mut state) = (vec![], vec![]);
    for row in 0..rows {
        for (i, part) in joined.iter().enumerate() {
            let own: Vec<f64> = floats(&part[0])[row * dim..][..dim].iter().map(|x| f64::from(*x)).collect();
            sums.extend(if i == 1 { out_of(&own) } else { own.iter().map(|x| *x as f32).collect() });
            state.extend(&floats(&part[1])[2 * row..][..2]);
        }
    }
    let sinks = [0.5f32, -1.0, 30.0, f32::NEG_INFINITY];
    let kinds = [(ElementType::F32, 1e-3), (ElementType::F16, 1e-2), (ElementType::BF16, 5e-2)];
    let calls: Vec<Call> = kinds
        .iter()
        .map(|(element, _)| {
            let (launch, counts) = plan::merge([b, h * group, l], 3, dim, *element, true, true);
            let (sums, state) = (Input::f32(&[rows, 3, dim], &sums), Input::f32(&[rows, 3, 2], &state));
            Call { launch, inputs: vec![sums, state, Input::f32(&[4], &sinks), Input::i32(&[5], &counts)] }
        })
        .collect();
    let results = Bench::new(&calls).unwrap().run(&calls).unwrap();
    for ((element, bound), out) in kinds.into_iter().zip(&results) {
        let got: Vec<f32> = match element {
            ElementType::F32 => floats(&out[0]),
            ElementType::F16 => halves(&out[0]).iter().map(|&x| f16::from_bits(x).to_f32()).collect(),
            _ => halves(&out[0]).iter().map(|&x| bf16::from_bits(x).to_f32()).collect(),
        };
        for row in 0..rows {
            let sink = f64::from(sinks[row / l]);
            let top = cases.iter().map(|c| c.want[row].0).fold(sink, f64::max);
            let weight: f64 = cases.iter().map(|c| c.want[row].1 * (c.want[row].0 - top).exp()).sum::<f64>()
                + (sink - top).exp();
            for c in 0..dim {
                let want: f64 = cases
                    .iter()
                    .enumerate()
                    .map(|(i, case)| {
                        let sums = &case.want[row].2;
                        let x = if i == 1 { f64::from(out_of(sums)[c]) } else { sums[c] };
                        x * (case.want[row].0 - top).exp() / weight
                    })
                    .sum();
                let got = f64::from(got[row * dim + c]);
                assert!(
                    (got - want).abs() < bound * (1.0 + want.abs()),
                    "{element:?} row {row} channel {c}: {got}, wanted {want}"
                );
            }
        }
    }
}

/// Values of tokens that weigh less than the bound beside the greatest token that their simdgroup has seen, their own tile of 32
/// included, do not count.
#[test]
fn light_values_are_skipped() {
    let (t, dim, sparse) = (600, 64, 0.3f32);
    let spec = CodecSpec::new(dim, 4, Grid::Uniform);
    let (k, mut v) = (Side::packed(spec, [1, 1, t], 1), Side::packed(spec, [1, 1, t], 2));
    let pass = Pass { tokens: t, position: 599, causal: true, ..ONE };
    let rules = Rules { pass, first: vec![0], cap: 0.0, sparse };
    let mut case = case(&k, &v, &rules, 5);
    let (_, place) = plan::attend(k.form, v.form, &pass).unwrap();
    let (shares, stripes) = (place[1] as usize, place[2] as usize);
    let each = t.div_ceil(shares);
    let q = case.query.clone();
    let scores: Vec<f64> = (0..t).map(|row| k.score(&q, row)).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut skipped = 0;
    let mut sums = vec![0.0; dim];
    for (row, &score) in scores.iter().enumerate() {
        let tile = |row: usize| row % each / 32;
        let share = row / each * each..(row / each * each + each).min(t);
        let before = share.filter(|&o| tile(o) <= tile(row) && tile(o) % stripes == tile(row) % stripes);
        let weight = (score - before.map(|o| scores[o]).fold(f64::NEG_INFINITY, f64::max)).exp();
        assert!((weight - f64::from(sparse)).abs() > 1e-5, "token {row} is too near the bound for a test");
        if weight <= f64::from(sparse) {
            v.inputs[1].bytes[2 * row..][..2].copy_from_slice(&0x7e00u16.to_le_bytes());
            skipped += 1;
        } else {
            sums.iter_mut().zip(&v.rows[row]).for_each(|(s, x)| *s += (score - top).exp() * f64::from(*x));
        }
    }
    assert!(skipped > 5, "{skipped} tokens are light: the test would show little");
    case.call.inputs[5] = v.inputs[1].clone();
    case.want[0].2 = sums;
    check(&[case]);
}

/// A row of NaN behind a mask stays hidden, one in sight shows.
#[test]
fn nan_shows_where_it_is_seen_and_only_there() {
    let spec = CodecSpec::new(64, 4, Grid::Lloyd);
    let pass = Pass { group: 2, tokens: 40, position: 39, window: 20, causal: true, ..ONE };
    let rules = Rules { pass, first: vec![0], cap: 0.0, sparse: 0.0 };
    let nan = |side: &mut Side, row: usize| {
        side.inputs[1].bytes[2 * row..][..2].copy_from_slice(&0x7e00u16.to_le_bytes())
    };
    let (mut k, mut v) = (Side::packed(spec, [1, 1, 40], 1), Side::packed(spec, [1, 1, 40], 2));
    nan(&mut k, 3);
    nan(&mut v, 19);
    let hidden = case(&k, &v, &rules, 9);
    check(std::slice::from_ref(&hidden));
    nan(&mut k, 25);
    let seen = [case(&k, &v, &rules, 9).call];
    let Some(bench) = Bench::new(&seen) else { return };
    let parts = bench.run(&seen).unwrap();
    let merges = [merge_call(&hidden, &parts[0], ElementType::F32, true)];
    let merged = Bench::new(&merges).unwrap().run(&merges).unwrap();
    assert!(floats(&merged[0][0]).iter().all(|x| x.is_nan()));
}

pub fn dequantize_call(side: &Side, shape: [usize; 3], element: ElementType) -> Call {
    let [words, scales, levels] = side.inputs.clone();
    let tokens = Input::i32(&[], &[shape[2] as i32]);
    Call { launch: plan::dequantize(side.form, shape, element), inputs: vec![words, scales, levels, tokens] }
}

#[test]
fn dequantized_rows_are_those_of_the_row_form() {
    let mut calls = vec![];
    let mut wants = vec![];
    for (i, spec) in sides().into_iter().enumerate() {
        let Some(spec) = spec.0.filter(|spec| Form::of(&codec(*spec).unwrap()).unwrap().second.is_none())
        else {
            continue;
        };
        let shape = [1 + i % 2, 2, [1, 8, 13][i % 3]];
        let side = Side::packed(spec, shape, i as u64);
        let element = if i % 2 == 0 { ElementType::F32 } else { ElementType::F16 };
        calls.push(dequantize_call(&side, shape, element));
        wants.push((spec, element, side.rows.concat()));
    }
    let Some(bench) = Bench::new(&calls) else { return };
    for (out, (spec, element, want)) in bench.run(&calls).unwrap().iter().zip(&wants) {
        let got: Vec<f32> = match element {
            ElementType::F32 => floats(&out[0]),
            _ => halves(&out[0]).iter().map(|&x| f16::from_bits(x).to_f32()).collect(),
        };
        assert_eq!(got.len(), want.len());
        let bound = if *element == ElementType::F32 { 1e-5 } else { 1e-3 };
        for (a, b) in got.iter().zip(want) {
            assert!((a - b).abs() <= bound * (0.1 + b.abs()), "{spec}: {a} for {b}");
        }
    }
}

/// CUDA gives a thread at most 255 of the 65,536 registers of a block, so 256 threads always fit; every query head of every query
/// token has a place.
#[test]
fn launches_fit_whatever_registers_they_take() {
    for group in 1..=16 {
        for queries in 1..=16 {
            for dim in [64, 80, 96, 112, 128, 192, 256, 512] {
                let form = Form::exact(dim);
                let pass = Pass { group, queries, heads: 3, tokens: 5000, ..ONE };
                let (launch, place) = plan::attend(form, form, &pass).expect("up to 16 query tokens");
                let [_, shares, stripes, chunks, .., units, groups] = place.map(|n| n as usize);
                let threads: usize = launch.group.iter().product();
                assert!(threads <= 256, "{threads} threads for {group} heads, {queries} tokens, d {dim}");
                assert_eq!(threads, 32 * units * stripes);
                assert!(units * groups >= chunks * queries && units * (groups - 1) < chunks * queries);
                assert_eq!(group % chunks, 0);
                assert_eq!(launch.grid, [32 * shares, units * stripes * groups * 3, 1]);
            }
        }
    }
}
