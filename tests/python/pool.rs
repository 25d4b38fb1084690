//! mlx/python/turbomoq_mlx with the real mlx-lm 0.31.3 and 0.32.2 against `turbomoq serve` (tests/interop/pool.py).
//!
//! Needs the virtual environments that mlx/setup.sh makes, as tests/python/prompt_caches.rs does.
#![cfg(unix)]

use crate::common::python::{check, pythons};
use crate::common::server::{PROGRAM, Running};
use turbomoq::Compressor;
use turbomoq::archive::Archive;
use turbomoq::prompt_cache::PromptCache;

const RECIPE: &str = "turboquant-mse@4,sinks=4,window=64";

#[test]
fn every_class_of_cache_comes_back_from_the_pool() {
    let Some(pythons) = pythons() else { return };
    for (python, _) in pythons {
        let folder = tempfile::tempdir().unwrap();
        let server = Running::start(folder.path(), "64MiB", RECIPE, false);
        check(&python, "pool.py", &[&"classes", &folder.path()]);
        server.terminate();
    }
}

#[test]
fn a_resumed_cache_goes_on_as_a_saved_one() {
    let Some(pythons) = pythons() else { return };
    for (python, layout) in pythons {
        let folder = tempfile::tempdir().unwrap();
        let server = Running::start(folder.path(), "64MiB", RECIPE, true);
        check(&python, "pool.py", &[&"start", &folder.path(), &folder.path()]);
        let compressor = Compressor::new(RECIPE.parse().unwrap());
        let plain = PromptCache::read(folder.path().join("plain.safetensors")).unwrap();
        let packed = Archive::compress(&plain, &compressor, || {}).unwrap();
        let restored = packed.restore(&compressor, || {}).unwrap();
        restored.write(folder.path().join("restored.safetensors"), layout).unwrap();
        check(&python, "pool.py", &[&"go_on", &folder.path(), &folder.path()]);
        server.terminate();
    }
}

#[test]
fn a_pool_outlives_its_server_and_an_interrupted_call() {
    let Some(pythons) = pythons() else { return };
    for (python, _) in pythons {
        let folder = tempfile::tempdir().unwrap();
        check(&python, "pool.py", &[&"ends", &folder.path(), &PROGRAM]);
    }
}
