//! The libraries of the C API, built beside the tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The shared library's name.
pub const SHARED: &str = if cfg!(target_os = "macos") { "libturbomoq_c.dylib" } else { "libturbomoq_c.so" };

/// Builds the static and the shared library; gives their folder.
pub fn build() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let target = exe.ancestors().nth(3).unwrap();
    let build = ["build", "--release", "-p", "turbomoq-c", "--target-dir"];
    run(Command::new(env!("CARGO"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .args(build)
        .arg(target));
    target.join("release")
}

/// Runs a command, which must succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    output
}
