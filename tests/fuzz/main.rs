//! Damaged inputs of every door: files, tables, texts and lines that nobody made by hand. Each is refused with a typed error or
//! understood; none panics, hangs or costs memory that its size does not explain.
//!
//! `TURBOMOQ_FUZZ=1000000 TURBOMOQ_SEED=7 cargo test --release --test fuzz` tries more of them.

#[path = "../common/counting.rs"]
mod counting;
#[cfg(unix)]
#[path = "../common/server.rs"]
mod server;

mod limits;
mod mutate;

use limits::fuzz;
use mutate::Mutator;
use std::path::{Path, PathBuf};
use turbomoq::Codec;
use turbomoq::PRESETS;
use turbomoq::allocation::calibration::{Calibration, Unit};
use turbomoq::archive::{Archive, SpillFolder};
use turbomoq::policy::{ModelShape, TierPolicy};
use turbomoq::pool::{Label, Spill};
use turbomoq::prompt_cache::{Layout, PromptCache};
use turbomoq::{CodecSpec, Side};
use turbomoq::{Compressor, Recipe};

fn fixtures(names: &[&str]) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    names.iter().map(|name| std::fs::read(folder.join(name)).unwrap()).collect()
}

/// A file for inputs, in memory where there is a file system for that.
fn place() -> (tempfile::TempDir, PathBuf) {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let path = folder.path().join("input");
    (folder, path)
}

fn compressor(recipe: &str) -> Compressor {
    Compressor::new(recipe.parse().unwrap())
}

/// Compressed forms of a small cache: every kind of grid, frames, exact tokens.
fn archives(folder: &Path) -> Vec<Vec<u8>> {
    let path = folder.join("good");
    std::fs::write(&path, &fixtures(&["pc031_mixed.safetensors"])[0]).unwrap();
    let cache = PromptCache::read(&path).unwrap();
    let pack = |recipe: &str| {
        let archive = Archive::compress(&cache, &compressor(recipe), || {}).unwrap();
        archive.write(&path).unwrap();
        std::fs::read(&path).unwrap()
    };
    let dense = "key=d128:b4:dense:lloyd:unbiased:log8,value=d128:b3:dense:lloyd:least-squares,centred,sinks=1,window=2";
    [dense, "key=d128:b2:identity:uniform:qjl128x1,value=exact"].map(pack).to_vec()
}

#[test]
fn prompt_caches() {
    let inputs = fixtures(&[
        "pc031_mixed.safetensors",
        "pc032_mixed.safetensors",
        "pc031_chunked.safetensors",
        "pc032_batch.safetensors",
        "pc_affine.safetensors",
    ]);
    let (folder, path) = place();
    let compressor = compressor("turboquant-mse@4,sinks=1,window=1");
    fuzz(
        "prompt-cache",
        |m| m.safetensors(&inputs),
        |input| {
            std::fs::write(&path, input).unwrap();
            let Ok(cache) = PromptCache::read(&path) else { return false };
            // What was read can be written, or is refused by name; what was written is read as it was.
            for layout in [Layout::V031, Layout::V032] {
                let copy = folder.path().join("copy");
                if cache.write(&copy, layout).is_ok() {
                    let again = PromptCache::read(&copy).expect("a file of our own");
                    assert_eq!(again.layers.len(), cache.layers.len());
                }
            }
            drop(Archive::compress(&cache, &compressor, || {}));
            true
        },
    );
}

#[test]
fn compressed_files() {
    let (folder, path) = place();
    let inputs = archives(folder.path());
    let take = |archive: Archive| {
        archive.stats();
        drop(archive.restore(&Compressor::new(archive.recipe.clone()), || {}));
    };
    fuzz(
        "tmq",
        |m| m.safetensors(&inputs),
        |input| {
            std::fs::write(&path, input).unwrap();
            // Without the checksums the damage reaches what lies behind them.
            drop(Archive::read_unverified(&path).map(take));
            Archive::read(&path).map(take).is_ok()
        },
    );
}

#[test]
fn spill_files() {
    let (folder, _) = place();
    let spill = folder.path().join("spill");
    let inputs = {
        let disk = SpillFolder::open(&spill).unwrap();
        let label =
            |version| Label { id: format!("agent-{version}"), kind: "chat".into(), priority: 1.0, version };
        for (version, bytes) in (1..).zip(archives(folder.path())) {
            let path = folder.path().join("good");
            std::fs::write(&path, bytes).unwrap();
            disk.save(&label(version), &Archive::read(&path).unwrap()).unwrap();
        }
        let files = std::fs::read_dir(&spill).unwrap().map(|entry| entry.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|e| e == "tmq"))
            .map(|path| std::fs::read(path).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(inputs.len(), 2);
    std::fs::remove_dir_all(&spill).unwrap();
    let disk = SpillFolder::open(&spill).unwrap();
    fuzz(
        "spill",
        |m| m.safetensors(&inputs),
        |input| {
            std::fs::write(spill.join("0000000000000001-1.tmq"), input).unwrap();
            let found = disk.list().unwrap();
            for (label, _) in &found {
                drop(disk.load(label));
                disk.remove(label).unwrap();
            }
            for entry in std::fs::read_dir(&spill).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|e| e == "tmq" || e == "damaged") {
                    std::fs::remove_file(path).unwrap();
                }
            }
            !found.is_empty()
        },
    );
}

#[test]
fn calibration_tables() {
    let shape = ModelShape { layers: 3, kv_heads: 2, key_dim: 64, value_dim: 64 };
    let losses = |price: f64| vec![std::array::from_fn(|bits| price / f64::from(1 << bits)); 6];
    let table = Calibration::new(shape, "a fuzzer", losses(3.0), losses(1.0)).unwrap();
    let inputs = [table.to_bytes().unwrap()];
    fuzz(
        "calibration",
        |m| m.safetensors(&inputs),
        |input| {
            let Ok(table) = Calibration::from_bytes(input) else { return false };
            for unit in [Unit::Head, Unit::Layer] {
                drop(table.plan(unit, 3.0, 2, 8));
            }
            true
        },
    );
}

#[test]
fn texts_of_recipes_codecs_and_policies() {
    let mut inputs: Vec<Vec<u8>> =
        PRESETS.iter().map(|(name, _)| format!("{name}@4/3,sinks=4").into_bytes()).collect();
    inputs.extend(
        [
            "best@3,sinks=4,window=128,key-bits=3-2.4-8,value-bits=2-2-16",
            "key=d128:b3:equalised:hadamard:trellis10:unbiased:log8,value=exact,centred,sinks=4,window=64",
            "d128:b2+64x2:dense:lloyd:matched:f16:qjl128x2",
            "d64:b4:identity:affine32",
            "progressive:1024=16/16,8192=4/4,rest=2/2",
            "attention",
        ]
        .map(|text| text.as_bytes().to_vec()),
    );
    fuzz(
        "text",
        |m| m.text(&inputs),
        |input| {
            let Ok(text) = std::str::from_utf8(input) else { return false };
            drop(text.parse::<TierPolicy>());
            if let Ok(spec) = text.parse::<CodecSpec>() {
                // Tables are made for what is written down, as long as they are small.
                drop(Codec::new(spec));
            }
            let Ok(recipe) = text.parse::<Recipe>() else { return false };
            assert_eq!(recipe.to_string().parse::<Recipe>().unwrap(), recipe, "{text}");
            for (side, dim) in [(Side::Key, 64), (Side::Value, 40)] {
                if let Ok(Some(spec)) = recipe.spec(side, 0, dim) {
                    drop(Codec::new(spec));
                }
            }
            true
        },
    );
}

#[cfg(unix)]
#[test]
fn lines_at_the_socket() {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    let (folder, _) = place();
    let root = folder.path().join("server");
    let server = server::Running::start(&root, "16MiB", "uniform@4", false);
    let inputs: Vec<Vec<u8>> = [
        r#"{"op":"ping"}"#,
        r#"{"op":"park","id":"a","segment":"1","kind":"chat","priority":2.0,"recipe":"best@4"}"#,
        r#"{"op":"resume","id":"a","layout":"0.31"}"#,
        r#"{"op":"fork","from":"a","to":"b"}"#,
        r#"{"op":"pin","id":"a"}"#,
        r#"{"op":"drop","id":"a"}"#,
        r#"{"op":"stats"}"#,
    ]
    .map(|line| line.as_bytes().to_vec())
    .to_vec();
    let connect = || {
        let stream = UnixStream::connect(root.join("socket")).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        BufReader::new(stream)
    };
    let mut stream = connect();
    let mut reply = String::new();
    stream.read_line(&mut reply).unwrap(); // the greeting
    fuzz(
        "line",
        |m: &mut Mutator| m.text(&inputs),
        |input| {
            // A line is one request; every request has one answer, or ends the connection.
            let mut line: Vec<u8> = input.iter().copied().filter(|b| *b != b'\n').collect();
            line.push(b'\n');
            reply.clear();
            let answered = stream.get_mut().write_all(&line).and_then(|()| stream.read_line(&mut reply));
            if !matches!(answered, Ok(n) if n > 0) {
                stream = connect();
                stream.read_line(&mut reply).unwrap();
                return false;
            }
            let answer: serde_json::Value = serde_json::from_str(&reply).expect("an answer in JSON");
            answer["reply"] != "error"
        },
    );
    assert!(server.client().call(&turbomoq::serve::Request::Ping).is_ok(), "the server lives");
    server.terminate();
}
