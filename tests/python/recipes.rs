//! Any recipe in mlx-lm's process (tests/interop/recipes.py), and mlx-lm's own commands with it (tests/interop/commands.py).
#![cfg(unix)]

use super::cache::{BOTH, each, passes_through_an_archive, run};
use crate::common::capi::{SHARED, build};
use crate::common::python::pythons;
use std::collections::BTreeMap;
use turbomoq::prompt_cache::{Layer, Layout, PromptCache, RawTensor};

#[test]
fn any_recipe_packs_a_layer_as_the_library_does() {
    each(&["one_layer"], &[Layout::V032]);
}

#[test]
fn what_cannot_be_packed_is_refused_by_name() {
    each(&["refusals", "settings"], BOTH);
}

#[test]
fn plans_files_copies_and_drafts_work_on_a_whole_model() {
    each(&["model_wide"], BOTH);
}

#[test]
fn sequences_of_a_batch_are_what_each_is_alone() {
    each(&["batches"], BOTH);
}

#[test]
fn every_architecture_is_packed_passed_through_or_refused() {
    each(&["every_architecture"], BOTH);
}

#[test]
fn requests_at_once_are_answered_as_one_by_one() {
    each(&["serve"], BOTH);
}

#[test]
fn commands_take_a_recipe() {
    each(&["commands"], &[Layout::V032]);
}

#[test]
fn files_of_recipe_caches_are_carried_between_layouts_and_unpacked() {
    let Some(pythons) = pythons() else { return };
    let library = build().join(SHARED);
    for (maker, made) in &pythons {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        run(maker, &library, "saved_recipes", folder.path());
        let cache = PromptCache::read(at("recipes.safetensors")).unwrap();
        assert_eq!(cache.layout, *made);
        let offsets: Vec<_> = cache.layers.iter().take(2).map(Layer::offset).collect();
        assert_eq!(offsets, [Some(300), Some(300)]);
        let words = cache.layers[0].describe_packed().unwrap().keys;
        assert!(words.contains("trellis") && words.ends_with("(300 tokens)"), "{words}");
        passes_through_an_archive(&cache, folder.path());
        for (reader, layout) in &pythons {
            let two = PromptCache { layers: cache.layers[..2].to_vec(), ..cache.clone() };
            two.write(at("recipes.safetensors"), *layout).unwrap();
            run(reader, &library, "carried_recipes", folder.path());
            let layers = two.layers.iter().map(|layer| layer.unpacked().unwrap()).collect();
            PromptCache { layers, ..two }.write(at("plain.safetensors"), *layout).unwrap();
            run(reader, &library, "unpacked_recipes", folder.path());
        }
        damaged_recipe_caches_are_refused(&cache.layers[0]);
    }
}

/// Arrays missing, one too many or of another kind, and a header that says something else.
fn damaged_recipe_caches_are_refused(layer: &Layer) {
    let Layer::Opaque { class, tensors, meta } = layer else { panic!("{layer:?}") };
    let refused = |change: &dyn Fn(&mut BTreeMap<String, RawTensor>)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        let layer = Layer::Opaque { class: class.clone(), tensors, meta: meta.clone() };
        assert!(layer.unpacked().is_err());
    };
    refused(&|t| drop(t.remove("0")));
    refused(&|t| drop(t.remove("1")));
    refused(&|t| drop(t.insert("3".into(), t["1"].clone())));
    refused(&|t| t.get_mut("1").unwrap().bytes.truncate(100));
    refused(&|t| t.get_mut("1").unwrap().shape.push(1));
    for (at, value) in [(0, 2), (2, 301), (2, -1), (6, 3), (7, -1), (8, 300), (8, 120)] {
        refused(&|t| {
            t.get_mut("0").unwrap().bytes[4 * at..4 * at + 4].copy_from_slice(&i32::to_le_bytes(value))
        });
    }
}
