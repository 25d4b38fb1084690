//! The command line: packs, restores, inspects and verifies prompt caches.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
