//! `turbomoq serve` with its clients, and under faults.
#![cfg(unix)]

#[path = "../common/mod.rs"]
mod common;

mod clients;
mod faults;
