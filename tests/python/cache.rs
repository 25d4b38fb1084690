//! `TurboMoqCache` of mlx/python/turbomoq_mlx with the real mlx-lm 0.31.3 and 0.32.2 (tests/interop/cache_contract.py).
//!
//! Needs the virtual environments that mlx/setup.sh makes, as tests/python/pool.rs does; the model's part needs
//! examples/smollm2/setup.sh too.
#![cfg(unix)]

use crate::common::capi::{SHARED, build};
use crate::common::python::{check_with, pythons};
use std::collections::BTreeMap;
use std::path::Path;
use turbomoq::Compressor;
use turbomoq::archive::Archive;
use turbomoq::prompt_cache::{Layer, Layout, PromptCache, RawTensor};

pub const BOTH: &[Layout] = &[Layout::V031, Layout::V032];

/// Runs parts of the script with the environments of some releases: what does not touch mlx-lm's own classes is asked of one.
pub fn each(parts: &[&str], releases: &[Layout]) {
    let Some(pythons) = pythons() else { return };
    let library = build().join(SHARED);
    for (python, _) in pythons.into_iter().filter(|(_, layout)| releases.contains(layout)) {
        let folder = tempfile::tempdir().unwrap();
        parts.iter().for_each(|part| run(&python, &library, part, folder.path()));
    }
}

/// Runs a part of the script.
pub fn run(python: &Path, library: &Path, part: &str, folder: &Path) {
    check_with(python, "cache_contract.py", &[&part, &folder], &[("TURBOMOQ_LIBRARY", library)]);
}

/// A compressed file, and so the pool, has packed layers as they are.
pub fn passes_through_an_archive(cache: &PromptCache, folder: &Path) {
    let (compressor, file) = (Compressor::new("best@4".parse().unwrap()), folder.join("passed.tmq"));
    Archive::compress(cache, &compressor, || {}).unwrap().write(&file).unwrap();
    let passed = Archive::read(&file).unwrap().restore(&compressor, || {}).unwrap();
    assert_eq!(passed.layers, cache.layers);
}

#[test]
fn mlx_lms_own_caches_and_ours_keep_one_contract() {
    each(&["contract", "again"], BOTH);
}

#[test]
fn packed_words_are_those_of_the_c_library() {
    each(&["words"], BOTH);
}

#[test]
fn attention_on_the_packed_form_is_that_on_the_fetched_arrays() {
    each(&["attends"], &[Layout::V032]);
}

#[test]
fn no_call_keeps_its_prompt_alive() {
    each(&["prompts"], BOTH);
}

#[test]
fn one_row_that_is_not_finite_leaves_the_others_alone() {
    each(&["odd_rows"], BOTH);
}

#[test]
fn a_cache_is_saved_over_the_file_it_was_loaded_from() {
    each(&["files"], BOTH);
}

#[test]
fn models_that_share_rows_between_layers_and_hybrids_take_packed_caches() {
    // The older release has the models that take the state of a cache for its rows.
    each(&["architectures"], &[Layout::V031]);
}

#[test]
fn files_with_packed_layers_are_carried_between_layouts_and_unpacked() {
    let Some(pythons) = pythons() else { return };
    let library = build().join(SHARED);
    for (maker, made) in &pythons {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        run(maker, &library, "saved", folder.path());
        for name in ["full.safetensors", "empty.safetensors"] {
            let cache = PromptCache::read(at(name)).unwrap();
            assert_eq!(cache.layout, *made);
            assert!(cache.layers.iter().any(Layer::is_packed));
            for layer in cache.layers.iter().filter(|layer| matches!(layer, Layer::Opaque { .. })) {
                let one = PromptCache { layers: vec![layer.clone()], ..cache.clone() };
                passes_through_an_archive(&one, folder.path());
            }
            let offsets: Vec<_> = cache.layers.iter().map(Layer::offset).collect();
            assert_eq!(offsets[0], Some(if name.starts_with("full") { 700 } else { 0 }));
        }
        for (reader, layout) in &pythons {
            for name in ["full.safetensors", "empty.safetensors"] {
                let cache = PromptCache::read(at(name)).unwrap();
                cache.write(at(name), *layout).unwrap();
            }
            run(reader, &library, "carried", folder.path());
            let mut cache = PromptCache::read(at("full.safetensors")).unwrap();
            cache.layers = cache.layers.iter().map(|layer| layer.unpacked().unwrap()).collect();
            assert!(!cache.layers.iter().any(Layer::is_packed));
            cache.write(at("plain.safetensors"), *layout).unwrap();
            run(reader, &library, "unpacked", folder.path());
        }
        damaged_packed_layers_are_refused(&at("full.safetensors"));
    }
}

/// Every array of a packed layer missing, of another shape or dtype, and every number of a header another one.
fn damaged_packed_layers_are_refused(path: &Path) {
    let cache = PromptCache::read(path).unwrap();
    let Layer::Opaque { class, tensors, meta } = &cache.layers[0] else { panic!("{:?}", cache.layers[0]) };
    let refused = |tensors: BTreeMap<String, RawTensor>, what: &str| {
        let layer = Layer::Opaque { class: class.clone(), tensors, meta: meta.clone() };
        assert!(layer.unpacked().is_err(), "{what}");
        let other = PromptCache { layers: vec![layer], ..cache.clone() };
        assert!(other.write(path.with_extension("no"), Layout::V032).is_err(), "{what}");
    };
    for (name, x) in tensors {
        let mut without = tensors.clone();
        without.remove(name);
        refused(without, name);
        let mut flat = tensors.clone();
        flat.insert(name.clone(), RawTensor { shape: vec![x.shape.iter().product(), 1], ..x.clone() });
        refused(flat, name);
    }
    for side in ["0.0", "1.0"] {
        for (at, value) in
            [(0, 1), (0, 3), (1, -1), (1, 9), (5, 7), (6, 0), (6, 96), (7, 2), (7, 9), (8, 0), (9, 511)]
        {
            let mut other = tensors.clone();
            let header = other.get_mut(side).unwrap();
            header.bytes[4 * at..4 * at + 4].copy_from_slice(&i32::to_le_bytes(value));
            refused(other, &format!("{side} with {value} at {at}"));
        }
    }
    let mut more = tensors.clone();
    more.insert("2".into(), tensors["0.0"].clone());
    refused(more, "an array more");
}

#[test]
fn active_memory_is_what_the_cache_reports() {
    each(&["memory"], &[Layout::V032]);
}

#[test]
fn a_model_says_the_same_on_a_packed_cache() {
    // Some minutes on two cores, so it is for the long form; tiny random models ask the same of every release.
    if std::env::var_os("TURBOMOQ_LONG").is_some() {
        each(&["model"], BOTH);
    }
}
