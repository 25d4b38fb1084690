//! The house: folders of `src` are floors, a file imports its own floor and lower ones, no two files import each other in a circle,
//! and the few things that few files may do stay in those files. A new file needs no edit here, a new floor gets its place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Floors from the ground up.
const FLOORS: [&str; 17] = [
    "error",
    "tensor",
    "spec",
    "math",
    "codec",
    "recipe",
    "policy",
    "engine",
    "allocation",
    "compressor",
    "quality",
    "cache",
    "pool",
    "io",
    "serve",
    "cli",
    "main",
];

/// Words, and the files or folders that may hold them.
const RESERVED: [(&[&str], &[&str]); 5] = [
    (&["mlx_rs", "mlx_sys"], &["error", "engine/mlx"]),
    (&["unsafe "], &["engine/mlx/arrays", "engine/mlx/kernels", "engine/cpu/simd", "serve/trim"]),
    // C symbols are in mlx/capi, so that a Rust program that uses the crate does not export them.
    (&["no_mangle", "extern \"C\" fn"], &[]),
    // They panic when a line cannot be written; `cli/say.rs` has the words for it.
    (&["println!", "print!", "dbg!"], &[]),
    (&["std::fs", "fs::File", "process::exit"], &["io", "serve", "pool", "cli", "main"]),
];

/// Lines that a file may have, unit tests included.
const LINES: usize = 400;

/// A file of `src`.
struct Source {
    /// `engine/cpu` for `src/engine/cpu.rs`.
    module: String,
    /// Without unit tests and comments.
    code: String,
    lines: usize,
}

fn sources() -> Vec<Source> {
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
        let tests = ["\n#[cfg(test)]\nmod tests", "\n#[cfg(test)]\npub"]
            .into_iter()
            .filter_map(|t| text.find(t))
            .min();
        let body = &text[..tests.unwrap_or(text.len())];
        let code = body.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
        let module = path.strip_prefix(&root).unwrap().with_extension("");
        Source { module: module.to_string_lossy().replace('\\', "/"), code, lines: text.lines().count() }
    };
    let sources: Vec<_> = paths.into_iter().map(read).filter(|s| s.module != "lib").collect();
    assert!(sources.len() > 30, "{} files", sources.len());
    sources
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|f| module.split('/').next() == Some(f))
}

/// Paths that a text names behind `prefix::`, braces resolved: `a::{b, c::d}` is `a/b` and `a/c/d`.
fn paths(code: &str, prefix: &str) -> Vec<String> {
    fn tree(text: &str, base: &str, out: &mut Vec<String>) -> usize {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let name: String = text.chars().take_while(|c| is_name(*c)).collect();
        let here = if base.is_empty() { name.clone() } else { format!("{base}/{name}") };
        let rest = &text[name.len()..];
        let Some(below) = rest.strip_prefix("::") else {
            out.push(here);
            return name.len();
        };
        let Some(group) = below.strip_prefix('{') else { return name.len() + 2 + tree(below, &here, out) };
        let mut at = 0;
        while !group[at..].starts_with('}') {
            at += match group[at..].starts_with(is_name) {
                true => tree(&group[at..], &here, out),
                false => group[at..].chars().next().map_or(1, char::len_utf8),
            };
        }
        name.len() + 3 + at + 1
    }
    let mut out = vec![];
    for (at, found) in code.match_indices(&format!("{prefix}::")) {
        let before = code[..at].chars().next_back();
        if !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            tree(&code[at + found.len()..], "", &mut out);
        }
    }
    out
}

/// Files that a file imports. Of names that `lib.rs` exports, the floor that they are on.
fn imports(source: &Source, files: &BTreeSet<&str>, exports: &BTreeMap<String, String>) -> BTreeSet<String> {
    let parent = source.module.rsplit_once('/').map_or("", |(parent, _)| parent);
    let mut named: Vec<String> = paths(&source.code, "crate");
    named.extend(paths(&source.code, "super").iter().map(|p| format!("{parent}/{p}")));
    named
        .into_iter()
        .map(|path| path.split('/').next().and_then(|name| exports.get(name)).cloned().unwrap_or(path))
        .map(|path| {
            // The file that holds the name: the longest beginning of the path that is one.
            let mut at = path.as_str();
            while !files.contains(at) {
                let Some((shorter, _)) = at.rsplit_once('/') else { break };
                at = shorter;
            }
            at.to_string()
        })
        .filter(|path| *path != source.module)
        .collect()
}

/// What `lib.rs` exports at its root, and the file of each name.
fn exports() -> BTreeMap<String, String> {
    let lib = include_str!("../src/lib.rs");
    let uses: Vec<&str> = lib.split("pub use ").skip(1).map(|u| u.split(';').next().unwrap()).collect();
    let named = uses.iter().flat_map(|u| paths(&format!("crate::{u}"), "crate"));
    named
        .filter_map(|p| Some((p.rsplit_once('/')?.1.to_string(), p.rsplit_once('/')?.0.to_string())))
        .collect()
}

#[test]
fn imports_are_read() {
    let code =
        "use crate::error::{Error, sub::{A, B}};\nuse crate::Tensor; let x = crate::grid::f(mycrate::no);";
    assert_eq!(paths(code, "crate"), ["error/Error", "error/sub/A", "error/sub/B", "Tensor", "grid/f"]);
    assert_eq!(exports()["Tensor"], "tensor");
}

#[test]
fn no_file_imports_upward() {
    let (sources, exports) = (sources(), exports());
    let files: BTreeSet<&str> = sources.iter().map(|s| s.module.as_str()).collect();
    let mut wrong = vec![];
    for source in &sources {
        let Some(here) = floor(&source.module) else {
            wrong.push(format!("{} is on no floor", source.module));
            continue;
        };
        for import in imports(source, &files, &exports) {
            match floor(&import) {
                None => wrong.push(format!("{} imports {import}, which is on no floor", source.module)),
                Some(there) if there > here => {
                    wrong.push(format!("{} imports {import} above it", source.module))
                }
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Files of one folder do not import each other in a circle. A file and the folder of its own name are one room: what is in the
/// folder may use the room's own types.
#[test]
fn no_circle() {
    let (sources, exports) = (sources(), exports());
    let files: BTreeSet<&str> = sources.iter().map(|s| s.module.as_str()).collect();
    // From a child of a folder to another child of the same folder, whatever lies below them.
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in &sources {
        for import in imports(source, &files, &exports) {
            let (a, b): (Vec<&str>, Vec<&str>) =
                (source.module.split('/').collect(), import.split('/').collect());
            let shared = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            if shared < a.len() && shared < b.len() {
                edges.entry(a[..=shared].join("/")).or_default().insert(b[..=shared].join("/"));
            }
        }
    }
    let mut circles = vec![];
    for start in edges.keys() {
        let (mut stack, mut seen) = (vec![vec![start.clone()]], BTreeSet::new());
        while let Some(road) = stack.pop() {
            for next in edges.get(road.last().unwrap()).into_iter().flatten() {
                let mut road = road.clone();
                road.push(next.clone());
                if next == start {
                    circles.push(road.join(" -> "));
                }
                if seen.insert(next.clone()) {
                    stack.push(road);
                }
            }
        }
    }
    assert!(circles.is_empty(), "\n{}", circles.join("\n"));
}

#[test]
fn few_files_may_do_some_things() {
    let mut wrong = vec![];
    for source in sources() {
        for (words, rooms) in RESERVED {
            let within = |room: &&str| {
                source.module.strip_prefix(room).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            if rooms.iter().any(within) {
                continue;
            }
            for word in words.iter().filter(|w| source.code.contains(**w)) {
                wrong.push(format!("{}: `{}` belongs into {rooms:?}", source.module, word.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_are_short() {
    let long: Vec<_> =
        sources().into_iter().filter(|s| s.lines > LINES).map(|s| (s.module, s.lines)).collect();
    assert!(long.is_empty(), "longer than {LINES} lines, a second idea is a second file: {long:?}");
}
