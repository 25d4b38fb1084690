//! The graph's calls of kernels: an engine whose launches run on the host machine, against the same engine without kernels.

use super::bench::{Bench, Call, Input, compiler, floats, halves, words};
use super::common::{gauss, greatest_difference, keys};
use half::f16;
use mlx_rs::Array;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use turbomoq::attention::{Rules, Segment, Stored};
use turbomoq::codec::Codec;
use turbomoq::engine::Engine;
use turbomoq::graph::Graph;
use turbomoq::kernels::plan::{Element, Launch};
use turbomoq::kernels::{Device, Kernels};
use turbomoq::mlx_ops::{get, put};
use turbomoq::spec::{CodecSpec, Grid};
use turbomoq::{Dtype, Tensor};

fn input(array: &Array) -> Input {
    let tensor = get(array).unwrap();
    let element = match tensor {
        Tensor::F32(_) => Element::F32,
        Tensor::F16(_) => Element::F16,
        Tensor::BF16(_) => Element::BF16,
        Tensor::U32(_) => Element::U32,
        Tensor::U8(_) => Element::U8,
        Tensor::I32(_) => Element::I32,
    };
    Input::new(element, tensor.shape(), tensor.row_major_bytes().into_owned())
}

fn output((element, shape): &(Element, Vec<usize>), bytes: &[u8]) -> Array {
    let tensor = match element {
        Element::F32 => Tensor::new(shape, floats(bytes)),
        Element::F16 => Tensor::new(shape, halves(bytes).into_iter().map(f16::from_bits).collect()),
        Element::U32 => Tensor::new(shape, words(bytes)),
        Element::U8 => Tensor::new(shape, bytes.to_vec()),
        other => panic!("no output of {other:?} here"),
    };
    put(&tensor.unwrap()).unwrap()
}

/// An engine whose kernels run on the host, and the names of those that it called.
fn host() -> (Graph, Rc<RefCell<BTreeSet<&'static str>>>) {
    let called = Rc::new(RefCell::new(BTreeSet::new()));
    let names = called.clone();
    let programs = RefCell::new(HashMap::new());
    let run = move |launch: &Launch, inputs: &[&Array]| {
        names.borrow_mut().insert(launch.source.name);
        let calls = [Call { launch: launch.clone(), inputs: inputs.iter().map(|a| input(a)).collect() }];
        let mut programs = programs.borrow_mut();
        let program =
            programs.entry(calls[0].key()).or_insert_with(|| Bench::new(&calls).expect("a compiler"));
        let out = program.run(&calls).expect("a kernel that runs");
        Ok(launch.outputs.iter().zip(&out[0]).map(|(o, bytes)| output(o, bytes)).collect())
    };
    (Graph::with_kernels(Kernels::elsewhere(Device::Metal, run)), called)
}

fn values(graph: &Graph, array: &Array) -> Vec<f32> {
    graph.get(array).unwrap().to_f32().unwrap()
}

#[test]
fn stages_with_kernels_give_what_the_plain_graph_gives() {
    if compiler().is_none() {
        return;
    }
    let (plain, (fused, called)) = (Graph::plain(), host());
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
    let mut packed = vec![];
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
    let mut packed = packed.into_iter();
    let mut next = || packed.next().unwrap();
    let [k, _, v, _, two_k, two_v] = std::array::from_fn(|_| next());
    let segments = [
        Segment { start: 0, keys: exact(3, 1), values: exact(3, 2) },
        Segment { start: 3, keys: k, values: v },
        // Keys and values of two bands.
        Segment { start: 23, keys: two_k, values: two_v },
        Segment { start: 43, keys: exact(5, 3), values: exact(5, 4) },
    ];
    let tokens = 48;
    let q = put(&gauss(&[b, h * group, l, dim], 5)).unwrap();
    let base = Rules::causal((dim as f32).powf(-0.5));
    let hide = |x: &f32| if *x > 1.2 { f32::NEG_INFINITY } else { *x };
    let mask: Vec<f32> = gauss(&[1, 1, l, tokens], 6).to_f32().unwrap().iter().map(hide).collect();
    let mask = Some(put(&Tensor::new(&[1, 1, l, tokens], mask).unwrap()).unwrap());
    let bits: Vec<u8> = (0..b * l * tokens).map(|i| u8::from(i % 5 != 0)).collect();
    let bits = Some(put(&Tensor::new(&[b, 1, l, tokens], bits).unwrap()).unwrap());
    let sinks = Some(put(&Tensor::new(&[h * group], vec![1.5f32, -2.0]).unwrap()).unwrap());
    let all = [
        base.clone(),
        Rules { causal: false, mask: bits, ..base.clone() },
        Rules { left_padding: vec![2, 7], sliding_window: Some(9), ..base.clone() },
        Rules { left_padding: vec![0, 48], sink_logits: sinks.clone(), ..base.clone() },
        Rules { mask, soft_cap: Some(3.0), sink_logits: sinks, sliding_window: Some(12), ..base },
    ];
    for rules in &all {
        let out = [&fused, &plain].map(|g| values(g, &g.attend(&segments, &q, rules).unwrap()));
        let far = greatest_difference(&out[0], &out[1]);
        assert!(far < 5e-3, "{rules:?}: off by {far}");
        assert!(out[0].iter().all(|x| x.is_finite()));
    }
    let names: Vec<&str> = called.borrow().iter().copied().collect();
    assert_eq!(
        names,
        ["attend", "dequantize", "encode", "encode_trellis", "merge"],
        "every kernel was called"
    );
}

/// Squared error of decoded codes over the squared norm.
fn relative_error(graph: &Graph, x: &Array, codes: &turbomoq::codes::Codes<Array>) -> f64 {
    let back = values(graph, &graph.decode(codes, Dtype::F32).unwrap());
    super::common::relative_mse(&values(graph, x), &back)
}
