//! The graph's calls of kernels: an engine whose launches run on the host machine, against the same engine without kernels.

use super::bench::{Bench, Call, Input, compiler, floats, halves, words};
use super::common::{gauss, greatest_difference, keys};
use half::f16;
use mlx_rs::Array;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Engine;
use turbomoq::Mlx;
use turbomoq::internals::engine::mlx::kernels::plan::{ElementType, Launch};
use turbomoq::internals::engine::mlx::kernels::{Gpu, Kernels};
use turbomoq::mlx::{get, put};
use turbomoq::{CodecSpec, Grid};
use turbomoq::{Dtype, Tensor};
use turbomoq::{Rules, Segment, Stored};

fn input(array: &Array) -> Input {
    let tensor = get(array).unwrap();
    let element = match tensor {
        Tensor::F32(_) => ElementType::F32,
        Tensor::F16(_) => ElementType::F16,
        Tensor::BF16(_) => ElementType::BF16,
        Tensor::U32(_) => ElementType::U32,
        Tensor::U8(_) => ElementType::U8,
        Tensor::I32(_) => ElementType::I32,
    };
    Input::new(element, tensor.shape(), tensor.row_major_bytes().into_owned())
}

fn output((element, shape): &(ElementType, Vec<usize>), bytes: &[u8]) -> Array {
    let tensor = match element {
        ElementType::F32 => Tensor::new(shape, floats(bytes)),
        ElementType::F16 => Tensor::new(shape, halves(bytes).into_iter().map(f16::from_bits).collect()),
        ElementType::U32 => Tensor::new(shape, words(bytes)),
        ElementType::U8 => Tensor::new(shape, bytes.to_vec()),
        other => panic!("no output of {other:?} here"),
    };
    put(&tensor.unwrap()).unwrap()
}

/// An engine whose kernels run on the host, and the names of those that it called.
fn host() -> (Mlx, Rc<RefCell<Vec<&'static str>>>) {
    let called = Rc::new(RefCell::new(vec![]));
    let names = called.clone();
    let programs = RefCell::new(HashMap::new());
    let run = move |launch: &Launch, inputs: &[&Array]| {
        names.borrow_mut().push(launch.source.name);
        let calls = [Call { launch: launch.clone(), inputs: inputs.iter().map(|a| input(a)).collect() }];
        let mut programs = programs.borrow_mut();
        let program =
            programs.entry(calls[0].key()).or_insert_with(|| Bench::new(&calls).expect("a compiler"));
        let out = program.run(&calls).expect("a kernel that runs");
        Ok(launch.outputs.iter().zip(&out[0]).map(|(o, bytes)| output(o, bytes)).collect())
    };
    (Mlx::with_kernels(Kernels::elsewhere(Gpu::Metal, run)), called)
}

fn values(mlx: &Mlx, array: &Array) -> Vec<f32> {
    mlx.get(array).unwrap().to_f32().unwrap()
}

#[test]
fn stages_with_kernels_give_what_the_plain_graph_gives() {
    if compiler().is_none() {
        return;
    }
    let (plain, (fused, called)) = (Mlx::plain(), host());
    let (b, h, group, dim, l) = (2, 1, 2, 64, 2);
    let specs = [
        CodecSpec { equalised: true, ..CodecSpec::new(dim, 4, Grid::Lloyd) },
        CodecSpec::new(dim, 2, Grid::Trellis { states: 8 }),
        CodecSpec { outliers: 16, equalised: true, ..CodecSpec::new(dim, 3, Grid::Lloyd) },
    ];
    let exact = |t: usize, seed: u64| {
        let rows = Tensor::from_f32(
            Dtype::F16,
            &[b, h, t + 3, dim],
            keys(&[b, h, t + 3, dim], seed).to_f32().unwrap(),
        );
        Stored::Exact { rows: put(&rows.unwrap()).unwrap(), len: t }
    };
    let (mut packed, mut names) = (vec![], BTreeSet::new());
    for (i, spec) in specs.into_iter().enumerate() {
        let codec = Arc::new(Codec::new(spec).unwrap());
        let x = put(&keys(&[b, h, 24, dim], 7 + i as u64)).unwrap();
        let frame = plain.frame(&codec, true, &x, None).unwrap();
        let (ours, theirs) =
            (fused.encode(&codec, frame.clone(), &x).unwrap(), plain.encode(&codec, frame, &x).unwrap());
        // Searches of the trellis differ in rounding, so it is the error that is compared.
        let error = |codes| relative_error(&plain, &x, codes);
        let (a, b) = (error(&ours), error(&theirs));
        assert!((a / b - 1.0).abs() < 0.05, "{spec}: relative error {a} with kernels, {b} without");
        let rows = [&fused, &plain].map(|g| values(g, &g.decode(&ours, Dtype::F32).unwrap()));
        assert!(greatest_difference(&rows[0], &rows[1]) < 1e-4, "{spec}: decoded rows");
        packed.push(Stored::Packed(ours.slice(2, 22).unwrap()));
        packed.push(Stored::Packed(ours.slice(1, 21).unwrap()));
    }
    names.extend(called.borrow().iter().copied());
    let mut packed = packed.into_iter();
    let mut next = || packed.next().unwrap();
    let [k, _, v, _, two_k, two_v] = std::array::from_fn(|_| next());
    let segment = |start, keys: &Stored<Array>, values: &Stored<Array>| Segment {
        start,
        keys: keys.clone(),
        values: values.clone(),
    };
    let (sinks, window) = ([exact(3, 1), exact(3, 2)], [exact(5, 3), exact(5, 4)]);
    let first = || segment(0, &sinks[0], &sinks[1]);
    let last = |start| segment(start, &window[0], &window[1]);
    // What a cache mostly holds, with one band and with two; several packed segments; exact rows alone.
    let around =
        [vec![first(), segment(3, &k, &v), last(23)], vec![first(), segment(3, &two_k, &two_v), last(23)]];
    let more = vec![first(), segment(3, &k, &v), segment(23, &two_k, &two_v), last(43)];
    let bare = vec![first(), last(3)];
    for (segments, launches) in around.iter().chain([&more, &bare]).zip([5, 5, 9, 3]) {
        let tokens = segments.last().unwrap().start + 5;
        let all = rules(b, h * group, l, dim, tokens);
        // All rules where all kernels take part, the first and the last for the other caches.
        for rules in all.iter().step_by(if launches == 5 { 1 } else { 4 }) {
            called.borrow_mut().clear();
            let q = put(&gauss(&[b, h * group, l, dim], 5)).unwrap();
            let out = [&fused, &plain].map(|g| values(g, &g.attend(segments, &q, rules).unwrap()));
            let far = greatest_difference(&out[0], &out[1]);
            assert!(far < 5e-3, "{rules:?}: off by {far}");
            assert!(out[0].iter().all(|x| x.is_finite()));
            assert_eq!(called.borrow().len(), launches, "{:?}", called.borrow());
            names.extend(called.borrow().iter().copied());
        }
    }
    let names: Vec<&str> = names.into_iter().collect();
    assert_eq!(
        names,
        ["attend", "dequantize", "encode", "encode_trellis", "enter", "finish", "merge"],
        "every kernel was called"
    );
}

fn rules(b: usize, heads: usize, l: usize, dim: usize, tokens: usize) -> [Rules<Array>; 5] {
    let base = Rules::causal((dim as f32).powf(-0.5));
    let hide = |x: &f32| if *x > 1.2 { f32::NEG_INFINITY } else { *x };
    let mask: Vec<f32> = gauss(&[1, 1, l, tokens], 6).to_f32().unwrap().iter().map(hide).collect();
    let mask = Some(put(&Tensor::new(&[1, 1, l, tokens], mask).unwrap()).unwrap());
    let bits: Vec<u8> = (0..b * l * tokens).map(|i| u8::from(i % 5 != 0)).collect();
    let bits = Some(put(&Tensor::new(&[b, 1, l, tokens], bits).unwrap()).unwrap());
    let sinks = Some(put(&Tensor::new(&[heads], vec![1.5f32, -2.0]).unwrap()).unwrap());
    [
        base.clone(),
        Rules { causal: false, mask: bits, ..base.clone() },
        Rules { left_padding: vec![2, 7], sliding_window: Some(9), ..base.clone() },
        Rules { left_padding: vec![0, tokens], sink_logits: sinks.clone(), ..base.clone() },
        Rules { mask, soft_cap: Some(3.0), sink_logits: sinks, sliding_window: Some(12), ..base },
    ]
}

/// Squared error of decoded codes over the squared norm.
fn relative_error(mlx: &Mlx, x: &Array, codes: &turbomoq::Codes<Array>) -> f64 {
    let back = values(mlx, &mlx.decode(codes, Dtype::F32).unwrap());
    super::common::relative_mse(&values(mlx, x), &back)
}
