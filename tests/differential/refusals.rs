//! Calls that cannot be answered: each is refused by a typed error on both engines, and none panics.

use crate::common::gauss;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Frame;
use turbomoq::internals::engine::cpu::{dense_scores, dense_sum};
use turbomoq::{CodecSpec, Grid};
use turbomoq::{Dtype, Error, Tensor};
use turbomoq::{Rules, Segment, Stored};

fn is_shape<T>(got: turbomoq::Result<T>) -> bool {
    matches!(got, Err(Error::Shape { .. }))
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::from_f32(Dtype::F32, shape, vec![0.0; shape.iter().product()]).unwrap()
}

fn exact<E: Engine>(engine: &E, rows: &Tensor, len: usize) -> Stored<E::Tensor> {
    Stored::Exact { rows: engine.put(rows).unwrap(), len }
}

fn refuses<E: Engine + Clone + 'static>(engine: &E) {
    let put = |x: &Tensor| engine.put(x).unwrap();
    let rows = gauss(&[1, 1, 5, 64], 1);
    let parts =
        |len, start| [Segment { start, keys: exact(engine, &rows, len), values: exact(engine, &rows, len) }];
    let ask = |parts: &[Segment<E::Tensor>], l: usize, rules: &Rules<E::Tensor>| {
        engine.attend(parts, &put(&gauss(&[1, 2, l, 64], 3)), rules)
    };
    let causal = Rules::causal(0.125);
    // More queries than tokens: the first would stand before the first token.
    assert!(is_shape(ask(&parts(5, 0), 9, &causal)), "{}", engine.name());
    assert!(is_shape(ask(&parts(5, 0), 6, &causal)));
    assert!(ask(&parts(5, 0), 5, &causal).is_ok());
    assert!(ask(&parts(5, 10), 9, &causal).is_ok(), "tokens before these were evicted");
    assert!(is_shape(engine.masses(&parts(5, 0), &put(&gauss(&[1, 2, 9, 64], 3)), &causal)));
    let window = Rules { causal: false, sliding_window: Some(3), ..Rules::causal(0.125) };
    assert!(is_shape(ask(&parts(5, 0), 9, &window)));
    // Where no rule asks for positions, every query sees every token.
    let all = Rules { causal: false, ..Rules::causal(0.125) };
    let out = engine.get(&ask(&parts(5, 0), 9, &all).unwrap()).unwrap().to_f32().unwrap();
    let one = |i: usize| {
        engine.attend(&parts(5, 0), &put(&gauss(&[1, 2, 9, 64], 3).slice(2, i, i + 1).unwrap()), &all)
    };
    for i in 0..9 {
        let alone = engine.get(&one(i).unwrap()).unwrap().to_f32().unwrap();
        let far = (0..64).map(|c| (out[i * 64 + c] - alone[c]).abs()).fold(0.0, f32::max);
        assert!(far < 1e-5, "query {i}: {far}");
    }
    assert!(is_shape(ask(&parts(5, 0), 0, &causal)), "no query");
    // Exact rows that are said to hold more tokens than they have, and positions beyond what can be counted.
    for len in [6, 64, usize::MAX] {
        assert!(is_shape(ask(&parts(len, 0), 1, &causal)), "{len} of 5");
    }
    assert!(is_shape(ask(&parts(5, usize::MAX - 2), 1, &causal)));
    let flat =
        [Segment { start: 0, keys: exact(engine, &gauss(&[5, 64], 1), 5), values: exact(engine, &rows, 5) }];
    assert!(is_shape(ask(&flat, 1, &causal)), "rows of two axes");
    let none = zeros(&[1, 1, 5, 0]);
    let empty = [Segment { start: 0, keys: exact(engine, &none, 5), values: exact(engine, &rows, 5) }];
    assert!(is_shape(engine.attend(&empty, &put(&zeros(&[1, 2, 1, 0])), &causal)), "keys without channels");
    assert!(matches!(exact(engine, &rows, 3).cut(0, 5), Err(Error::Range { end: 5, len: 3, .. })));
    // Products of packed rows.
    let codec = Arc::new(Codec::new(CodecSpec::new(64, 4, Grid::Lloyd)).unwrap());
    let codes = engine.encode(&codec, Frame::default(), &put(&rows)).unwrap();
    assert!(is_shape(engine.scores(&codes, &put(&zeros(&[1, 2, 0, 64])))), "scores of no query");
    assert!(is_shape(engine.weighted_sum(&codes, &put(&zeros(&[1, 2, 0, 5])))), "sums of no query");
    // Frames.
    for shape in [[1, 0, 5, 64], [0, 1, 5, 64], [1, 1, 0, 64]] {
        assert!(is_shape(engine.frame(&codec, true, &put(&zeros(&shape)), None)), "{shape:?}");
    }
    let equalised = Codec::new(CodecSpec { equalised: true, ..*codec.spec() }).unwrap();
    let two_heads = put(&gauss(&[1, 2, 5, 64], 1));
    for shape in [[1, 0, 5, 64], [1, 3, 4, 64], [2, 1, 5, 64], [1, 2, 0, 64]] {
        assert!(
            is_shape(engine.frame(&equalised, true, &two_heads, Some(&put(&zeros(&shape))))),
            "{shape:?}"
        );
    }
    // Writes beyond a buffer leave it alone.
    for start in [usize::MAX, usize::MAX - 1, 1, 1 << 31, 1 << 32] {
        let mut buffer = put(&rows);
        assert!(is_shape(engine.write(&mut buffer, start, &put(&gauss(&[1, 1, 5, 64], 2)))), "{start}");
        assert_eq!(engine.get(&buffer).unwrap(), rows);
    }
}

#[test]
fn a_cpu_engine_refuses_what_it_cannot_answer() {
    refuses(&Cpu);
    let mut buffer = gauss(&[1, 1, 5, 64], 1);
    assert!(is_shape(buffer.write_rows(usize::MAX, &gauss(&[1, 1, 1, 64], 2))));
    assert!(is_shape(Cpu.zeros(Dtype::F32, &[usize::MAX, 2])));
}

#[test]
fn dense_products_refuse_arrays_that_do_not_fit() {
    let keys = gauss(&[1, 2, 5, 64], 1);
    for shape in [&[2, 1, 64][..], &[1, 3, 1, 64], &[2, 2, 1, 64], &[1, 2, 1, 63], &[], &[64]] {
        assert!(is_shape(dense_scores(&keys, &zeros(shape))), "{shape:?}");
        assert!(is_shape(dense_scores(&zeros(shape), &keys)), "{shape:?}");
        assert!(is_shape(dense_sum(&keys, &zeros(shape))), "{shape:?}");
    }
    assert!(is_shape(dense_scores(&zeros(&[1, 0, 5, 64]), &zeros(&[1, 2, 1, 64]))));
    assert!(dense_scores(&keys, &zeros(&[1, 4, 3, 64])).is_ok());
    assert!(dense_sum(&keys, &zeros(&[1, 4, 3, 5])).is_ok());
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use turbomoq::Mlx;

    #[test]
    fn an_mlx_engine_refuses_what_it_cannot_answer() {
        refuses(&Mlx::new());
        assert!(is_shape(Mlx::new().zeros(Dtype::F32, &[1 << 31, 1])));
    }

    /// Zeros that no one reads take no memory.
    #[test]
    fn more_elements_than_mlx_can_count_are_refused() {
        for shape in [&[1 << 31][..], &[1 << 16, 1 << 15], &[1 << 16, 1 << 16]] {
            let tensor = Tensor::new(shape, vec![0u8; shape.iter().product()]).unwrap();
            assert!(is_shape(Mlx::new().put(&tensor)), "{shape:?}");
        }
    }
}
