//! Prompt caches of the real mlx-lm (tests/interop/make_fixtures.py): content, conversion, classes, packing.

use half::f16;
use std::path::PathBuf;
use turbomoq::prompt_cache::affine::{BITS, GROUP_SIZES};
use turbomoq::prompt_cache::{KvClass, KvKind, Layer, Layout, Packed, Pair, PromptCache, Ring};
use turbomoq::{Error, Tensor};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).with_extension("safetensors")
}

fn read(name: &str) -> PromptCache {
    PromptCache::read(fixture(name)).unwrap()
}

/// Writes, checks the predicted size, reads again.
fn through(cache: &PromptCache, layout: Layout) -> (PromptCache, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let written = cache.write(&path, layout).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(written, bytes.len() as u64);
    assert_eq!(cache.file_size(layout).unwrap(), written);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
    (PromptCache::read(&path).unwrap(), bytes)
}

#[test]
fn both_layouts_give_the_same_thirteen_layers() {
    let (old, new) = (read("pc031_mixed"), read("pc032_mixed"));
    assert_eq!((old.layout, new.layout), (Layout::V031, Layout::V032));
    let classes: Vec<_> = old.layers.iter().map(Layer::class).collect();
    let (kv, ring, list) = ("KVCache", "RotatingKVCache", "CacheList");
    let arrays = ["QuantizedKVCache", "ArraysCache", "ConcatenateKVCache", "ChunkedKVCache"];
    let [quantized, arrays, concatenate, chunked] = arrays;
    let expected = [kv, quantized, ring, list, kv, arrays, ring, list, concatenate, chunked, kv, kv, ring];
    assert_eq!(classes, expected);
    for (i, (a, b)) in old.layers.iter().zip(&new.layers).enumerate() {
        assert_eq!(a, b, "layer {i}");
        assert_eq!(a.nbytes(), b.nbytes());
    }
    // T43: user metadata, with a dot, a number, a line end and a control character.
    assert_eq!(old.metadata, new.metadata);
    let metadata: Vec<_> = old.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let expected = [("0", "zero"), ("a", "1"), ("a.b", "dot"), ("note", "x=y\n"), ("uni", "é漢\u{7}")];
    assert_eq!(metadata, expected);
}

#[test]
fn values_are_those_that_mlx_lm_holds() {
    let cache = read("pc032_mixed");
    let first = cache.layers[0].attention_kv().unwrap().unwrap();
    assert_eq!(first.keys.shape(), [1, 2, 3, 32]);
    assert_eq!(first.keys.dtype(), "F16");
    assert_eq!(first.keys.to_f32().unwrap()[..3], FIRST);
    let brain = cache.layers[4].attention_kv().unwrap().unwrap();
    assert_eq!((brain.values.dtype(), brain.values.shape()), ("BF16", &[1, 2, 9, 32][..]));
    assert_eq!(brain.values.to_f32().unwrap()[2 * 9 * 32 - 3..], BRAIN);
    let ring = Ring { keep: 2, max_size: 8, offset: 23, idx: 5 };
    assert_eq!(cache.layers[2].kind(), Some(KvKind::Rotating(ring)));
    let turned = cache.layers[2].attention_kv().unwrap().unwrap().keys;
    let firsts: Vec<_> = turned.to_f32().unwrap().into_iter().step_by(32).take(8).collect();
    assert_eq!(firsts, TURNED);
    let decoded = cache.layers[1].attention_kv().unwrap().unwrap().keys;
    let close = decoded.to_f32().unwrap().iter().zip(DECODED).all(|(a, b)| (a - b).abs() < 2e-3);
    assert!(close, "{:?}", &decoded.to_f32().unwrap()[..3]);
    assert_eq!(cache.layers[9].offset(), Some(6));
    assert_eq!(cache.layers[11].offset(), Some(0));
    assert_eq!(cache.layers[12].offset(), Some(12));
    assert_eq!(cache.layers[5].offset(), None);
}
const FIRST: [f32; 3] = [1.1123047, 1.0625, 1.0849609];
const BRAIN: [f32; 3] = [-1.2265625, 0.73046875, 0.25195312];
const TURNED: [f32; 8] =
    [0.052459717, -0.082092285, 0.58984375, 0.09033203, -0.640625, -1.3251953, -0.5727539, 0.50341797];
const DECODED: [f32; 3] = [1.3847656, -0.69140625, 0.0];

#[test]
fn saving_twice_gives_the_same_bytes_and_conversion_loses_nothing() {
    let names = ["pc031_mixed", "pc031_nometa", "pc031_sample", "pc032_mixed", "pc032_nometa", "pc_affine"];
    for name in names {
        let cache = read(name);
        for layout in [Layout::V031, Layout::V032] {
            let (again, bytes) = through(&cache, layout);
            assert_eq!(again.layout, layout);
            assert_eq!((&again.layers, &again.metadata), (&cache.layers, &cache.metadata), "{name} {layout}");
            assert_eq!(through(&again, layout).1, bytes, "{name} {layout}");
            let back = if layout == Layout::V031 { Layout::V032 } else { Layout::V031 };
            assert_eq!(through(&again, back).0.layers, cache.layers, "{name} {layout} and back");
        }
    }
}

#[test]
fn widths_and_lengths_do_not_pad() {
    // T39, and lengths around mlx-lm's step of 256.
    for width in [80, 96, 112, 192, 576] {
        for tokens in [0, 1, 255, 256, 257] {
            let len = 2 * tokens * width;
            let data: Vec<_> = (0..len).map(|i| f16::from_f32((i % 2039) as f32 - 1000.)).collect();
            let keys = Tensor::new(&[1, 2, tokens, width], data).unwrap();
            let values = keys.slice(3, 1, 17).unwrap(); // a view: its bytes are not its values (T42)
            let layer = Layer::Kv { class: KvClass::Kv, kv: Some(Pair { keys, values }) };
            let cache = PromptCache { layout: Layout::V031, metadata: [].into(), layers: vec![layer] };
            for layout in [Layout::V031, Layout::V032] {
                let (again, bytes) = through(&cache, layout);
                assert_eq!(again.layers, cache.layers);
                assert!(bytes.len() - cache.layers[0].nbytes() < 800, "only the header beside the data");
            }
        }
    }
}

#[test]
fn empty_layers_are_kept_and_refused_where_they_cannot_be_loaded() {
    let cache = read("pc032_empty");
    for (layer, class) in cache.layers.iter().zip(["KVCache", "QuantizedKVCache", "RotatingKVCache"]) {
        assert_eq!((layer.class(), layer.offset(), layer.nbytes()), (class, Some(0), 0));
        assert!(layer.attention_kv().unwrap().is_none());
    }
    assert_eq!(cache.layers[1].kind(), Some(KvKind::Quantized { group_size: 32, bits: 4 }));
    let Layer::Arrays { arrays, .. } = &cache.layers[4] else { panic!("{}", cache.layers[4]) };
    assert!(arrays[0].is_none() && arrays[1].is_some());
    let (again, bytes) = through(&cache, Layout::V032);
    assert_eq!(again, cache);
    assert_eq!(through(&again, Layout::V032).1, bytes);
    let path = tempfile::tempdir().unwrap().path().join("x");
    for i in [0, 1, 2, 4, 5] {
        let one =
            PromptCache { layers: vec![cache.layers[3].clone(), cache.layers[i].clone()], ..cache.clone() };
        let error = one.write(&path, Layout::V031).unwrap_err().to_string();
        assert!(error.contains("0.31") && error.contains("layer = 1"), "{error}");
    }
    let none = PromptCache { layers: vec![], ..cache };
    assert!(none.write(&path, Layout::V031).is_err());
    assert_eq!(through(&none, Layout::V032).0, none);
}

#[test]
fn unknown_and_batched_classes_are_named() {
    for name in ["pc031_unknown", "pc032_unknown"] {
        let error = PromptCache::read(fixture(name)).unwrap_err();
        let Error::UnknownClass { layer: 4, class, path } = &error else { panic!("{error}") };
        assert_eq!((class.as_str(), path), ("FooCache", &fixture(name)));
        let known = PromptCache::read_known(fixture(name)).unwrap();
        assert_eq!(known.layers.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 5]);
        assert_eq!(known.skipped.into_iter().collect::<Vec<_>>(), [(4, "FooCache".to_string())]);
    }
    for name in ["pc031_batch", "pc032_batch"] {
        let error = PromptCache::read(fixture(name)).unwrap_err();
        assert!(matches!(error, Error::BatchCache { layer: 1, .. }), "{error}");
        assert!(error.to_string().contains("BatchKVCache"));
        assert_eq!(PromptCache::read_known(fixture(name)).unwrap().layers.len(), 1);
    }
}

#[test]
fn chunked_layers_that_dropped_tokens_stay_in_their_layout() {
    let new = read("pc032_chunked");
    let class = KvClass::Chunked { chunk_size: 8, start_position: 16 };
    assert!(matches!(&new.layers[0], Layer::Kv { class: c, .. } if *c == class), "{:?}", new.layers[0]);
    assert_eq!(new.layers[0].offset(), Some(28));
    assert_eq!(through(&new, Layout::V032).0, new);
    let old = read("pc031_chunked");
    assert!(matches!(old.layers[0], Layer::Opaque { .. }));
    assert_eq!((old.layers[0].class(), old.layers[0].kind()), ("ChunkedKVCache", None));
    assert_eq!(through(&old, Layout::V031).0, old);
    let path = tempfile::tempdir().unwrap().path().join("x");
    assert!(matches!(new.write(&path, Layout::V031), Err(Error::Unsupported { .. })));
    assert!(matches!(old.write(&path, Layout::V032), Err(Error::Unsupported { .. })));
}

#[test]
fn packing_equals_mx_quantize_and_decodes_within_a_step() {
    let cache = read("pc_affine");
    assert_eq!(cache.layers.len(), 2 * BITS.len() * GROUP_SIZES.len());
    for pair in cache.layers.chunks_exact(2) {
        let plain = pair[0].attention_kv().unwrap().unwrap();
        let Layer::Quantized { kv: Some(kv), group_size, bits } = &pair[1] else { panic!("{}", pair[1]) };
        let what = format!("{bits} bits, group {group_size}, {}", plain.keys.dtype());
        for (x, packed) in [(&plain.keys, &kv.keys), (&plain.values, &kv.values)] {
            assert_eq!(Packed::quantize(x, *group_size, *bits).unwrap(), *packed, "{what}");
            let decoded = packed.dequantize(*group_size, *bits).unwrap().to_f32().unwrap();
            let x = x.to_f32().unwrap();
            // MLX moves the step so that zero is a code: the far end may be clipped by up to one step of the plain
            // (max - min) / bins. Rounding scale and bias to bf16 adds 2^-8 of the magnitude of the group.
            for (group, decoded) in x.chunks(*group_size).zip(decoded.chunks(*group_size)) {
                let max = group.iter().copied().fold(f32::MIN, f32::max);
                let min = group.iter().copied().fold(f32::MAX, f32::min);
                let bound =
                    1.001 * (max - min) / (2f32.powi(*bits as i32) - 1.0) + max.abs().max(min.abs()) / 128.0;
                let worst = group.iter().zip(decoded).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(worst <= bound + 1e-7, "{what}: {worst} > {bound}");
            }
        }
        assert_eq!(pair[1].with_kv(&plain).unwrap(), pair[1], "{what}");
    }
    let x = Tensor::new(&[1, 1, 1, 64], vec![1f32; 64]).unwrap();
    assert!(matches!(Packed::quantize(&x, 64, 7), Err(Error::Unsupported { field: "bits", .. })));
    assert!(matches!(Packed::quantize(&x, 48, 4), Err(Error::Unsupported { field: "group_size", .. })));
    assert!(matches!(Packed::quantize(&x, 128, 4), Err(Error::Shape { .. })));
    let nan = Tensor::new(&[1, 1, 1, 32], vec![f32::NAN; 32]).unwrap();
    assert!(matches!(Packed::quantize(&nan, 32, 4), Err(Error::NonFinite { index: 0, .. })));
}

#[test]
fn contents_can_be_replaced() {
    let cache = read("pc032_mixed");
    for i in [0, 2, 4, 6, 8, 9, 10, 11, 12] {
        let kv = cache.layers[i].attention_kv().unwrap().unwrap();
        assert_eq!(cache.layers[i].with_kv(&kv).unwrap(), cache.layers[i], "layer {i}");
    }
    let plain = cache.layers[0].attention_kv().unwrap().unwrap();
    let wide = |x: &Tensor| Tensor::new(x.shape(), vec![1e9f32; x.len()]).unwrap();
    let big = Pair { keys: wide(&plain.keys), values: plain.values.clone() };
    let saturated = cache.layers[0].with_kv(&big).unwrap().attention_kv().unwrap().unwrap();
    assert_eq!(saturated.keys.to_f32().unwrap()[0], 65504.0, "rounded to the dtype of the layer");
    let swapped = Pair { keys: plain.keys.slice(2, 0, 2).unwrap(), values: plain.values };
    assert!(matches!(cache.layers[0].with_kv(&swapped), Err(Error::Shape { .. })));
    assert!(matches!(cache.layers[5].with_kv(&swapped), Err(Error::Unsupported { .. })));
}

#[test]
fn a_failed_write_leaves_the_file_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let cache = read("pc032_mixed");
    cache.write(&path, Layout::V032).unwrap();
    let before = std::fs::read(&path).unwrap();
    let mut broken = cache.clone();
    let Layer::Rotating { ring, .. } = &mut broken.layers[2] else { panic!("layer 2 is a ring") };
    ring.idx = 9;
    let error = broken.write(&path, Layout::V032).unwrap_err().to_string();
    assert!(error.contains("2 (RotatingKVCache)") && error.contains("idx = 9"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let error = cache.write(folder.path().join("missing/x"), Layout::V032).unwrap_err();
    assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("missing/x"), "{error}");
    // Its own input may be replaced.
    PromptCache::read(&path).unwrap().write(&path, Layout::V031).unwrap();
    assert_eq!(PromptCache::read(&path).unwrap().layers, cache.layers);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn the_mamba_cache_of_older_releases_is_an_arrays_cache() {
    let mut bytes = std::fs::read(fixture("pc031_mixed")).unwrap();
    let at = bytes.windows(13).position(|w| w == b"\"ArraysCache\"").unwrap();
    bytes[at..at + 13].copy_from_slice(b"\"MambaCache\" ");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let known = PromptCache::read_known(file.path()).unwrap();
    // Which of the two in the file comes first is the order of mlx's hash map: the other is inside a list.
    assert!(known.skipped.is_empty(), "{:?}", known.skipped);
    assert_eq!(known.layers.into_values().collect::<Vec<_>>(), read("pc031_mixed").layers);
}

#[test]
fn layouts_have_names() {
    for layout in [Layout::V031, Layout::V032] {
        assert_eq!(layout.to_string().parse::<Layout>().unwrap(), layout);
    }
    assert!(matches!("0.33".parse::<Layout>(), Err(Error::Parse { .. })));
}
