//! `TurboMoqCache` of mlx/python/turbomoq_mlx with the real mlx-lm 0.31.3 and 0.32.2 (tests/interop/cache_contract.py).
//!
//! Needs the virtual environments that mlx/setup.sh makes, as tests/python_pool.rs does; the model's part needs
//! examples/smollm2/setup.sh too.
#![cfg(unix)]

mod common;

use common::capi::{SHARED, build};
use common::python::{check_with, pythons};

/// Runs parts of the script with the newest so many of the environments.
fn each(parts: &[&str], most: usize) {
    let Some(pythons) = pythons() else { return };
    let library = build().join(SHARED);
    for (python, _) in pythons.into_iter().rev().take(most) {
        let folder = tempfile::tempdir().unwrap();
        for part in parts {
            check_with(
                &python,
                "cache_contract.py",
                &[part, &folder.path()],
                &[("TURBOMOQ_LIBRARY", &library)],
            );
        }
    }
}

#[test]
fn mlx_lms_own_caches_and_ours_keep_one_contract() {
    each(&["contract", "again"], 2);
}

#[test]
fn packed_words_are_those_of_the_c_library() {
    each(&["words"], 2);
}

#[test]
fn attention_on_the_packed_form_is_that_on_the_fetched_arrays() {
    each(&["attends"], 2);
}

#[test]
fn no_call_keeps_its_prompt_alive() {
    each(&["prompts"], 2);
}

#[test]
fn one_row_that_is_not_finite_leaves_the_others_alone() {
    each(&["odd_rows"], 2);
}

#[test]
fn a_cache_is_saved_over_the_file_it_was_loaded_from() {
    each(&["files"], 2);
}

#[test]
fn models_that_share_rows_between_layers_and_hybrids_take_packed_caches() {
    each(&["architectures"], 2);
}

#[test]
fn active_memory_is_what_the_cache_reports() {
    each(&["memory"], 2);
}

#[test]
fn a_model_says_the_same_on_a_packed_cache() {
    // A minute each on two cores: one is enough here.
    each(&["model"], 1);
}
