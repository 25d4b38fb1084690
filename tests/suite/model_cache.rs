//! The cache of a whole model: every kind of layer against what it stands for, files, prompt caches, threads and both kinds of arrays.

use crate::common::gauss;
use turbomoq::cache::{HeadGroups, LayerShape, Mask};
use turbomoq::prompt_cache::{Layer, Layout, Pair, PromptCache};
use turbomoq::{Cache, Cpu, Error, LayerKind, Rules, Tensor};

const D: usize = 64;
const SCALE: f32 = 0.125;

/// Queries of 4 heads, keys and values of 2, for tokens that begin at a position.
fn rows(layer: usize, start: usize, tokens: usize) -> [Tensor; 3] {
    let stream = (1000 * layer + start) as u64;
    let part = |heads: usize, side: u64| gauss(&[1, heads, tokens, D], 10 * stream + side);
    [part(4, 0), part(2, 1), part(2, 2)]
}

/// Runs a pass of every layer and gives what the layers answer.
fn pass(cache: &mut Cache<Cpu>, tokens: usize) -> Vec<Tensor> {
    let start = cache.offset() as usize;
    let layers = 0..cache.kinds().len();
    let answer = |layer: usize| {
        assert_eq!(cache.offset() as usize, start, "the offset stays while a pass goes through the layers");
        let [q, k, v] = rows(layer, start, tokens);
        cache.update_and_attend(layer, &q, &k, &v, SCALE).unwrap()
    };
    layers.map(answer).collect()
}

#[test]
fn full_layers_answer_as_the_groups_of_heads_below_them() {
    let text = "best@4,window=64,key-bits=3-4.2,value-bits=2-3";
    let mut cache = Cache::on(Cpu, text, 2).unwrap();
    let shape = LayerShape { key_dim: D, value_dim: D };
    let below = |layer| HeadGroups::new(Cpu, &text.parse().unwrap(), layer, shape, 2).unwrap();
    let mut below = [below(0), below(1)];
    for tokens in [300, 1, 1, 40] {
        let start = cache.offset() as usize;
        for (layer, out) in pass(&mut cache, tokens).into_iter().enumerate() {
            let [q, k, v] = rows(layer, start, tokens);
            assert_eq!(out, below[layer].update_and_attend(&q, &k, &v, &Rules::causal(SCALE)).unwrap());
        }
    }
    assert_eq!((cache.offset(), cache.nbytes()), (342, below.iter().map(HeadGroups::nbytes).sum()));
    // A fork goes its own way.
    let mut fork = cache.clone();
    assert_eq!(fork.trim(3).unwrap(), 3);
    pass(&mut fork, 5);
    assert_eq!((fork.offset(), cache.offset()), (344, 342));
    assert_eq!(cache.layer(0).unwrap().fetch().unwrap(), below[0].fetch().unwrap());
    // Another number of layers than the plan's is refused.
    assert!(matches!(Cache::on(Cpu, text, 3), Err(Error::Unsupported { .. })));
}

#[test]
fn a_sliding_layer_sees_its_window_and_holds_little_more() {
    let window = 100;
    let kinds = vec![LayerKind::Sliding { window }, LayerKind::Exact];
    let mut cache = Cache::on_layers(Cpu, "best@2", kinds).unwrap();
    let mut whole =
        HeadGroups::new(Cpu, &"exact".parse().unwrap(), 0, LayerShape { key_dim: D, value_dim: D }, 2)
            .unwrap();
    let rules = Rules { sliding_window: Some(window), ..Rules::causal(SCALE) };
    for tokens in [90, 1, 400, 1, 1, 130, 7] {
        let start = cache.offset() as usize;
        let [q, k, v] = rows(0, start, tokens);
        let expected = whole.update_and_attend(&q, &k, &v, &rules).unwrap();
        let got = pass(&mut cache, tokens).swap_remove(0);
        let (a, b) = (got.to_f32().unwrap(), expected.to_f32().unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{tokens} tokens from {start} on");
    }
    assert_eq!((cache.layer(0).unwrap().offset(), cache.layer(1).unwrap().len()), (630, 630));
    assert!(cache.layer(0).unwrap().len() <= window + 128);
    // Tokens that have left the window do not come back, so a trim that needs them is refused and changes nothing.
    let before = cache.layer(0).unwrap().fetch().unwrap();
    assert!(matches!(cache.trim(300), Err(Error::Unsupported { field: "trim", .. })));
    assert_eq!((cache.offset(), cache.layer(0).unwrap().fetch().unwrap()), (630, before));
    assert_eq!(cache.trim(5).unwrap(), 5);
    assert_eq!(cache.offset(), 625);
}

#[test]
fn layers_share_or_have_none() {
    let kinds = vec![LayerKind::State, LayerKind::Full, LayerKind::Shares { layer: 1 }];
    let mut cache = Cache::on_layers(Cpu, "best@3", kinds).unwrap();
    let [q, k, v] = rows(1, 0, 200);
    assert!(cache.update_and_attend(2, &q, &k, &v, SCALE).is_err(), "there is nothing to share yet");
    let first = cache.update_and_attend(1, &q, &k, &v, SCALE).unwrap();
    let other = rows(5, 0, 200);
    assert_eq!(cache.update_and_attend(2, &q, &other[1], &other[2], SCALE).unwrap(), first);
    assert_eq!(cache.update_and_fetch(2, &k, &v).unwrap().0.shape(), [1, 2, 200, D]);
    for layer in [0, 3] {
        assert!(matches!(
            cache.update_and_attend(layer, &q, &k, &v, SCALE),
            Err(Error::Unsupported { field: "layer", .. })
        ));
    }
    assert_eq!(cache.offset(), 200);
    for bad in [LayerKind::Shares { layer: 0 }, LayerKind::Sliding { window: 0 }] {
        assert!(Cache::on_layers(Cpu, "best@3", vec![bad]).is_err());
    }
}

#[test]
fn a_first_call_that_fails_leaves_no_cache_of_a_wrong_shape() {
    let mut cache = Cache::on(Cpu, "best@3|progressive:256=4/4,rest=2/2", 1).unwrap();
    let [q, k, v] = rows(0, 0, 10);
    assert!(cache.update_and_attend(0, &q, &k, &gauss(&[1, 2, 9, D], 1), SCALE).is_err());
    assert!(cache.update_and_attend(0, &gauss(&[10, D], 1), &gauss(&[10, D], 1), &v, SCALE).is_err());
    assert!(cache.layer(0).is_none());
    assert_eq!(cache.nbytes() + cache.offset() as usize, 0);
    assert!(cache.update_and_attend(0, &q, &k, &v, SCALE).is_ok());
    assert!(Cache::on(Cpu, "bset", 1).is_err() && Cache::on(Cpu, "best|often", 1).is_err());
}

#[test]
fn masks_fit_what_fetch_gives() {
    let kinds = vec![LayerKind::Full, LayerKind::Sliding { window: 8 }];
    let mut cache = Cache::on_layers(Cpu, "exact", kinds).unwrap();
    let mask = |cache: &Cache<Cpu>, layer, n| cache.make_mask::<Tensor>(layer, n).unwrap();
    assert!(matches!(mask(&cache, 0, 1), Mask::None) && matches!(mask(&cache, 0, 9), Mask::Causal));
    assert!(matches!(mask(&cache, 1, 9), Mask::Array(array) if array.shape() == [1, 1, 9, 9]));
    pass(&mut cache, 20);
    assert!(matches!(mask(&cache, 0, 4), Mask::Causal));
    let Mask::Array(array) = mask(&cache, 1, 2) else { panic!() };
    let [_, k, v] = rows(1, 20, 2);
    assert_eq!(array.shape()[3], cache.update_and_fetch(1, &k, &v).unwrap().0.shape()[2]);
    let seen: Vec<u8> = array.to_vec().unwrap();
    assert_eq!(seen.iter().map(|&x| usize::from(x)).sum::<usize>(), 16, "each query sees its window");
    let padded = Cache::on(Cpu, "exact", 1).unwrap().with_left_padding(vec![0, 3]).unwrap();
    assert!(matches!(mask(&padded, 0, 5), Mask::Array(array) if array.shape() == [2, 1, 5, 5]));
    assert!(cache.with_left_padding(vec![1]).is_err());
}

#[test]
fn a_saved_cache_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let kinds = vec![LayerKind::Full, LayerKind::Sliding { window: 64 }, LayerKind::State, LayerKind::Exact];
    let mut cache = Cache::on_layers(Cpu, "best@3,window=32|progressive:256=4/4,rest=2/2", kinds).unwrap();
    let empty = cache.save(&path).unwrap();
    assert_eq!(Cache::load_on(Cpu, &path).unwrap().offset(), 0);
    let run = |cache: &mut Cache<Cpu>, tokens| {
        let start = cache.offset() as usize;
        [0, 1, 3].map(|layer| {
            let [q, k, v] = rows(layer, start, tokens);
            cache.update_and_attend(layer, &q, &k, &v, SCALE).unwrap()
        })
    };
    run(&mut cache, 700);
    let bytes = cache.save(&path).unwrap();
    assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());
    assert!(bytes > empty && bytes < cache.nbytes() as u64 + 20_000);
    let mut again = Cache::load_on(Cpu, &path).unwrap();
    assert_eq!((again.kinds(), again.recipe(), again.offset()), (cache.kinds(), cache.recipe(), 700));
    for tokens in [1, 150, 1] {
        assert_eq!(run(&mut again, tokens), run(&mut cache, tokens));
    }
    // Damage is an error that names the file.
    let whole = std::fs::read(&path).unwrap();
    for (what, bytes) in [
        ("cut", whole[..whole.len() - 100].to_vec()),
        (
            "version",
            String::from_utf8_lossy(&whole)
                .replacen("\\\"version\\\":1", "\\\"version\\\":7", 1)
                .into_bytes(),
        ),
        ("empty", vec![]),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = Cache::load_on(Cpu, &path).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{what}: {error}");
    }
    let prompt = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/smollm2_250.safetensors");
    assert!(Cache::load_on(Cpu, prompt).unwrap_err().to_string().contains("not a cache"));
}

#[test]
fn prompt_caches_of_mlx_lm_come_and_go() {
    let sample = PromptCache::read("examples/data/smollm2_250.safetensors").unwrap();
    let exact = Cache::from_prompt_cache(Cpu, "exact", &sample).unwrap();
    assert_eq!((exact.offset(), exact.kinds().len()), (250, 30));
    assert_eq!(exact.to_prompt_cache(sample.layout, None).unwrap().layers, sample.layers);
    let packed = Cache::from_prompt_cache(Cpu, "best@2,window=0", &sample).unwrap();
    assert!(packed.used_bytes() < exact.used_bytes() * 3 / 4);
    // A rotating layer that has lost tokens goes on at its position and comes back the same.
    let mixed = PromptCache::read("tests/fixtures/pc032_mixed.safetensors").unwrap();
    for layer in
        mixed.layers.iter().filter(|layer| matches!(layer, Layer::Rotating { ring, .. } if ring.keep == 0))
    {
        let one = PromptCache { layers: vec![layer.clone()], ..mixed.clone() };
        let cache = Cache::from_prompt_cache(Cpu, "best@3", &one).unwrap();
        assert_eq!(Some(cache.offset() as usize), layer.offset());
        let back = cache.to_prompt_cache(Layout::V032, None).unwrap();
        let kv = |layer: &Layer| -> Pair<Tensor> { layer.attention_kv().unwrap().unwrap() };
        let (a, b) = (kv(layer), kv(&back.layers[0]));
        let tail = |x: &Tensor| x.slice(2, x.shape()[2] - b.keys.shape()[2], x.shape()[2]).unwrap().compact();
        assert_eq!((tail(&a.keys), tail(&a.values)), (b.keys.clone(), b.values.clone()));
    }
}

#[test]
fn sessions_move_between_threads() {
    let mut sessions: Vec<Cache<Cpu>> = (0..3).map(|_| Cache::on(Cpu, "best@3", 2).unwrap()).collect();
    for _ in 0..2 {
        let threads = sessions.into_iter().map(|mut cache| {
            std::thread::spawn(move || {
                pass(&mut cache, 150);
                cache
            })
        });
        sessions = threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect();
    }
    assert!(sessions.iter().all(|cache| cache.offset() == 300));
}

#[cfg(feature = "mlx")]
mod mlx {
    use super::*;
    use mlx_rs::Array;
    use mlx_rs::error::Exception;
    use turbomoq::Mlx;
    use turbomoq::mlx::{get, put};

    /// A function of an application, whose errors are those of mlx-rs.
    fn decode(cache: &mut Cache<impl Clone + turbomoq::Bridge<Array>>) -> Result<Vec<Array>, Exception> {
        let mut outs = vec![];
        for tokens in [300, 1, 1] {
            let start = cache.offset() as usize;
            for layer in 0..2 {
                let [q, k, v] = rows(layer, start, tokens).map(|x| put(&x).unwrap());
                outs.push(cache.update_and_attend(layer, &q, &k, &v, SCALE)?);
            }
        }
        Ok(outs)
    }

    #[test]
    fn mlx_arrays_go_into_both_engines_and_a_cache_moves_between_them() {
        let mut cpu = Cache::on(Cpu, "turboquant-mse@4,sinks=4,window=64", 2).unwrap();
        let mut mlx = Cache::on(Mlx::new(), "turboquant-mse@4,sinks=4,window=64", 2).unwrap();
        let (a, b) = (decode(&mut cpu).unwrap(), decode(&mut mlx).unwrap());
        for (a, b) in a.iter().zip(&b) {
            let (a, b) = (get(a).unwrap().to_f32().unwrap(), get(b).unwrap().to_f32().unwrap());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.02));
        }
        assert_eq!(cpu.used_bytes(), mlx.used_bytes());
        let moved = mlx.to_engine(Cpu).unwrap();
        assert_eq!((moved.offset(), moved.used_bytes()), (302, cpu.used_bytes()));
        let folder = tempfile::tempdir().unwrap();
        mlx.save(folder.path().join("c")).unwrap();
        assert_eq!(Cache::load_on(Cpu, folder.path().join("c")).unwrap().offset(), 302);
        // What is wrong with an array comes out as an error of mlx-rs.
        let mut wrong = Cache::on(Cpu, "best@3", 1).unwrap();
        let message = decode(&mut wrong).unwrap_err().what().to_string();
        assert!(message.contains("layer = 1"), "{message}");
    }

    #[test]
    fn masks_are_booleans_of_mlx() {
        let cache = Cache::on_layers(Cpu, "exact", vec![LayerKind::Sliding { window: 4 }]).unwrap();
        let Mask::Array(mask) = cache.make_mask::<Array>(0, 6).unwrap() else { panic!() };
        assert_eq!(mask.dtype(), mlx_rs::Dtype::Bool);
    }
}
