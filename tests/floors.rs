//! The house of design.md: a file imports downward only, and the few things that few files may do stay in those files.

use std::path::{Path, PathBuf};

/// The floors from the ground up, with the modules on each. A new module gets a name here.
const FLOORS: [(&str, &[&str]); 6] = [
    ("words", &["bit_plan", "error", "spec", "tensor"]),
    (
        "mathematics",
        &[
            "bits",
            "codebook",
            "lanes",
            "qjl",
            "rng",
            "rotation",
            "scale",
            "transform",
            "trellis",
            "trellis_search",
        ],
    ),
    ("definition", &["attention", "codec", "codes", "frame", "grid", "recipe", "tile"]),
    ("engines", &["cpu", "engine", "graph", "kernels", "mlx_ops"]),
    ("caches", &["cache", "calibration", "compressor", "policy", "pool"]),
    ("edges", &["archive", "cli", "files", "folders", "lib", "main", "prompt_cache", "report", "serve"]),
];

/// Names that lib.rs exports, and the modules they come from.
const EXPORTS: [(&str, &str); 6] = [
    ("Compressor", "compressor"),
    ("Dtype", "tensor"),
    ("Error", "error"),
    ("Recipe", "recipe"),
    ("Result", "error"),
    ("Tensor", "tensor"),
];

/// Words and the modules that may hold them; an empty list stands for the floor of edges.
const RESERVED: [(&[&str], &[&str]); 5] = [
    (&["mlx_rs", "mlx_sys"], &["error", "graph", "kernels", "mlx_ops"]),
    (
        &["unsafe "],
        &[
            "kernels",
            "mlx_ops",
            "serve/trim",
            "cpu/simd",
            "cpu/simd/avx2",
            "cpu/simd/avx512",
            "cpu/simd/neon",
            "cpu/simd/softmax",
            "cpu/simd/trellis",
            "cpu/simd/weighted",
        ],
    ),
    // C symbols are in mlx/capi, so that a Rust program that uses the crate does not export them.
    (&["no_mangle", "extern \"C\" fn"], &["none"]),
    // They panic when a line cannot be written; `cli/say.rs` has the words for it.
    (&["println!", "print!", "dbg!"], &["none"]),
    (&["std::fs", "fs::File", "process::exit"], &[]),
];

/// Lines that a file may have, unit tests included.
const LINES: usize = 400;

/// Files of src/ by their path in it, with their text up to the unit tests and without comments.
fn sources() -> Vec<(String, String, usize)> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = vec![];
    walk(&root, &mut paths);
    paths.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        let body = text.split("\n#[cfg(test)]\nmod tests").next().unwrap();
        let code = body.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
        (path.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/"), code, text.lines().count())
    };
    let sources: Vec<_> = paths.into_iter().map(read).collect();
    assert!(sources.len() > 30, "{} files", sources.len());
    sources
}

fn module(path: &str) -> &str {
    path.split('/').next().unwrap().trim_end_matches(".rs")
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|(_, modules)| modules.contains(&module))
}

/// Modules of this crate that a text names: `crate::a`, `crate::{a, b::c}`, `crate::Tensor`.
fn named(code: &str) -> Vec<String> {
    let mut out = vec![];
    for part in code.split("crate::").skip(1) {
        let identifier = |s: &str| -> String {
            s.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
        };
        let Some(group) = part.strip_prefix('{') else {
            out.push(identifier(part));
            continue;
        };
        // The names at depth zero of the braces.
        let (mut depth, mut item) = (0, String::new());
        for c in group.chars() {
            match c {
                '}' if depth == 0 => break,
                ',' if depth == 0 => out.push(identifier(&std::mem::take(&mut item))),
                _ => {
                    depth += i32::from(c == '{') - i32::from(c == '}');
                    item.push(c);
                }
            }
        }
        out.push(identifier(&item));
    }
    out.retain(|name| !name.is_empty());
    out.iter().map(|name| EXPORTS.iter().find(|e| e.0 == name).map_or(name.clone(), |e| e.1.into())).collect()
}

#[test]
fn imports_are_read() {
    let code = "use crate::{error::{Error, Result},\n spec, Tensor};\nuse crate::cpu::Cpu; let x = crate::grid::f();";
    assert_eq!(named(code), ["error", "spec", "tensor", "cpu", "grid"]);
}

#[test]
fn no_file_imports_upward() {
    let mut wrong = vec![];
    for (path, code, _) in sources() {
        let Some(here) = floor(module(&path)) else {
            wrong.push(format!("{path}: add `{}` to a floor in tests/floors.rs", module(&path)));
            continue;
        };
        if path == "lib.rs" {
            continue; // names every module
        }
        for name in named(&code) {
            match floor(&name) {
                None => wrong.push(format!("{path}: `{name}` is on no floor; add it in tests/floors.rs")),
                Some(there) if there > here => wrong.push(format!(
                    "{path} ({}) imports {name} ({}) above it",
                    FLOORS[here].0, FLOORS[there].0
                )),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn few_files_may_do_some_things() {
    let mut wrong = vec![];
    for (path, code, _) in sources() {
        for (words, modules) in RESERVED {
            let allowed = modules.iter().any(|m| path.trim_end_matches(".rs") == *m || module(&path) == *m)
                || (modules.is_empty() && floor(module(&path)) == Some(FLOORS.len() - 1));
            for word in words.iter().filter(|w| !allowed && code.contains(**w)) {
                wrong.push(format!("{path}: `{}` belongs into {modules:?}", word.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_are_short() {
    let long: Vec<_> =
        sources().into_iter().filter(|(_, _, lines)| *lines > LINES).map(|(p, _, n)| (p, n)).collect();
    assert!(long.is_empty(), "longer than {LINES} lines, a second idea is a second file: {long:?}");
}
