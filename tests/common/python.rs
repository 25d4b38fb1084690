//! The interpreters of both releases of mlx-lm, and scripts of tests/interop run by them.

use super::capi::run;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use turbomoq::prompt_cache::Layout;

const RELEASES: [(&str, Layout); 2] = [("venv-0.31", Layout::V031), ("venv-0.32", Layout::V032)];

/// The interpreters of both releases, or `None` (said aloud) where they are not installed.
pub fn pythons() -> Option<Vec<(PathBuf, Layout)>> {
    let runtime = std::env::var_os("TURBOMOQ_MLX_RUNTIME")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("mlx/.runtime"), PathBuf::from);
    let found: Vec<_> = RELEASES.map(|(venv, layout)| (runtime.join(venv).join("bin/python"), layout)).into();
    let missing: Vec<_> = found.iter().filter(|(python, _)| !python.exists()).map(|(p, _)| p).collect();
    if missing.is_empty() {
        return Some(found);
    }
    assert!(std::env::var_os("CI").is_none(), "{missing:?} missing: run mlx/setup.sh");
    // Past the capture of the test harness, which hides what a passing test prints.
    let line = format!("NOT RUN: interop with mlx-lm, {missing:?} missing (mlx/setup.sh makes them)\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    None
}

/// Runs a script, which must succeed.
pub fn check(python: &Path, script: &str, args: &[&dyn AsRef<OsStr>]) {
    check_with(python, script, args, &[]);
}

/// As [`check`], with variables of the environment.
pub fn check_with(python: &Path, script: &str, args: &[&dyn AsRef<OsStr>], variables: &[(&str, &Path)]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let mut command = Command::new(python);
    command.arg(script).args(args).envs(variables.iter().copied());
    print!("{}", String::from_utf8_lossy(&run(&mut command).stdout));
}
