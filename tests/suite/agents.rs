//! The run of examples/agents.rs at a small size: agents that park, leave for the disk and resume at once, bit for bit.
#![allow(dead_code, unused_imports)] // the example's own main

#[path = "../../examples/agents.rs"]
mod example;

use clap::Parser;

fn run(memory: &str) -> Result<(), String> {
    let size = [
        "agents",
        "--agents=12",
        "--tokens=300",
        "--layers=2",
        "--of-layers=2",
        "--kv-heads=2",
        "--head-dim=64",
    ];
    let rest = ["--threads=3", "--turns=16", memory];
    example::run(&example::Arguments::parse_from(size.into_iter().chain(rest))).map_err(|e| e.to_string())
}

#[test]
fn a_small_run_holds() {
    run("--memory=1000000").unwrap();
}

#[test]
fn a_memory_that_cannot_hold_them_is_an_error() {
    let error = run("--memory=100000").unwrap_err();
    assert!(error.contains("one bit everywhere takes"), "{error}");
}
