//! Any recipe in mlx-lm's process (tests/interop/recipes.py), and mlx-lm's own commands with it (tests/interop/commands.py).
#![cfg(unix)]

use super::cache::{BOTH, each};
use turbomoq::prompt_cache::Layout;

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
