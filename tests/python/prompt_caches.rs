//! What this crate writes, loaded and continued by the real mlx-lm 0.31.3 and 0.32.2 (tests/interop/check.py).
//!
//! Needs the virtual environments that mlx/setup.sh makes. Without them the test fails under CI and says
//! elsewhere that it did not run.

use crate::common::python::pythons;
use std::path::Path;
use turbomoq::Compressor;
use turbomoq::archive::Archive;
use turbomoq::prompt_cache::{Layer, Layout, Packed, Pair, PromptCache};

fn check(python: &Path, args: &[&dyn AsRef<std::ffi::OsStr>]) {
    crate::common::python::check(python, "check.py", args);
}

#[test]
fn rewritten_caches_hold_and_continue_the_same_in_both_releases() {
    let Some(pythons) = pythons() else { return };
    for (maker, made) in &pythons {
        let folder = tempfile::tempdir().unwrap();
        check(maker, &[&"make", &folder.path()]);
        for (reader, layout) in &pythons {
            let out = folder.path().join(format!("as-{layout}"));
            std::fs::create_dir(&out).unwrap();
            for entry in std::fs::read_dir(folder.path()).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|e| e != "safetensors") {
                    continue;
                }
                let cache = PromptCache::read(&path).unwrap();
                assert_eq!(cache.layout, *made);
                let name = path.file_name().unwrap();
                if name.to_str().unwrap().starts_with("new_") && *layout == Layout::V031 {
                    assert!(cache.write(out.join(name), *layout).is_err(), "0.31 has no such caches");
                    continue;
                }
                // Replacing all contents by themselves must not change a bit of plain and ring layers.
                let rebuilt = |layer: &Layer| match layer.attention_kv().unwrap() {
                    Some(kv) if !matches!(layer, Layer::Quantized { .. }) => layer.with_kv(&kv).unwrap(),
                    _ => layer.clone(),
                };
                let layers: Vec<_> = cache.layers.iter().map(rebuilt).collect();
                PromptCache { layers, ..cache }.write(out.join(name), *layout).unwrap();
            }
            check(reader, &[&"verify", &folder.path(), &out]);
        }
    }
}

#[test]
fn quantization_equals_mx_quantize() {
    let Some(pythons) = pythons() else { return };
    for (python, layout) in &pythons {
        let folder = tempfile::tempdir().unwrap();
        check(python, &[&"floats", &folder.path()]);
        let plain = PromptCache::read(folder.path().join("floats.safetensors")).unwrap();
        let mut layers = Vec::new();
        for layer in &plain.layers {
            let kv = layer.attention_kv().unwrap().unwrap();
            for bits in [2, 3, 4, 5, 6, 8] {
                for group_size in [32, 64, 128] {
                    let pack = |x| Packed::quantize(x, group_size, bits).unwrap();
                    let kv = Some(Pair { keys: pack(&kv.keys), values: pack(&kv.values) });
                    layers.push(Layer::Quantized { kv, group_size, bits });
                }
            }
        }
        let ours = PromptCache { layers, ..plain };
        ours.write(folder.path().join("ours.safetensors"), *layout).unwrap();
        check(python, &[&"quantize", &folder.path()]);
    }
}

/// Recipes and the names that their files carry for check.py, which wants the errors of `b8` well below those of `b4`.
const RECIPES: [(&str, &str); 5] = [
    ("exact", "uniform@16/16"),
    ("best", "best@4"),
    ("b4", "turboquant-mse@4,sinks=0,window=0"),
    ("b8", "turboquant-mse@8,sinks=0,window=0"),
    ("affine", "mlx-affine@4"),
];
/// For widths that the rotations of the presets do not take.
const DENSE: &str = "key=d128:b4:dense:lloyd,value=d128:b4:dense:lloyd,centred,sinks=1,window=2";

#[test]
fn restored_caches_give_the_logits_of_the_uncompressed_one() {
    let Some(pythons) = pythons() else { return };
    // The other release has the same models, and files that are compared bit for bit above.
    for (python, layout) in pythons.iter().filter(|(_, layout)| *layout == Layout::V032) {
        let folder = tempfile::tempdir().unwrap();
        check(python, &[&"make", &folder.path()]);
        let out = folder.path().join("restored");
        std::fs::create_dir(&out).unwrap();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_string();
            // One token and a cache without any have nothing to lose; 255 and 256 are 257 for this purpose.
            let skip =
                ["plain1", "plain255", "plain256", "trimmed", "new_empty"].iter().any(|s| name.ends_with(s));
            if path.extension().is_none_or(|e| e != "safetensors") || skip {
                continue;
            }
            let recipes = if name.starts_with("model") { &RECIPES[..] } else { &[("dense", DENSE)] };
            for (short, recipe) in recipes {
                let compressor = Compressor::new(recipe.parse().unwrap());
                let cache = PromptCache::read(&path).unwrap();
                let packed = folder.path().join("packed.tmq");
                Archive::compress(&cache, &compressor, || {}).unwrap().write(&packed).unwrap();
                let restored = Archive::read(&packed).unwrap().restore(&compressor, || {}).unwrap();
                restored.write(out.join(format!("{name}@{short}.safetensors")), *layout).unwrap();
            }
        }
        check(python, &[&"agree", &folder.path(), &out]);
    }
}
