//! The server as a process: what goes in comes out, bad clients harm nobody, and kill -9 of either side loses and leaks nothing.
#![cfg(unix)]

use crate::common::server::{PROGRAM, Running};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use turbomoq::archive::Archive;
use turbomoq::internals::math::rng::Rng;
use turbomoq::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
use turbomoq::serve::{Client, Reply, Request, socket_path};
use turbomoq::{Compressor, Dtype, Error, Recipe, Tensor};

const RECIPE: &str = "turboquant-mse@4,sinks=2,window=16";

/// A prompt cache of two layers that follows from a number; more tokens go on where fewer end.
fn cache(seed: u64, tokens: usize) -> PromptCache {
    let rows = |stream: u64| {
        let mut heads = vec![];
        for head in 0..2 {
            let mut rng = Rng::new(seed, 10 * stream + head);
            let data = (0..tokens * 64).map(|_| rng.normal() as f32).collect();
            heads.push(Tensor::from_f32(Dtype::F16, &[1, 1, tokens, 64], data).unwrap());
        }
        Tensor::concat(1, &heads).unwrap()
    };
    let layer = |i: u64| Layer::Kv {
        class: KvClass::Kv,
        kv: Some(Pair { keys: rows(2 * i), values: rows(2 * i + 1) }),
    };
    let metadata = BTreeMap::from([("tokens".to_string(), format!("{seed}:{tokens}"))]);
    PromptCache { layout: Layout::V032, metadata, layers: vec![layer(0), layer(1)] }
}

/// What comes out of packing and unpacking once.
fn packed_once(cache: &PromptCache) -> PromptCache {
    let compressor = Compressor::new(RECIPE.parse::<Recipe>().unwrap());
    Archive::compress(cache, &compressor, || ()).unwrap().restore(&compressor, || ()).unwrap()
}

/// Waits until something holds, within a bound that no working machine reaches.
fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn entries(folder: &Path) -> Vec<String> {
    let list = std::fs::read_dir(folder).into_iter().flatten();
    list.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn layers_at_different_tokens_are_parked_only_if_that_is_meant() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "64MiB", RECIPE, false);
    let mut client = server.client();
    let mut uneven = cache(1, 100);
    uneven.layers[1] = cache(1, 99).layers[1].clone();
    let refused = client.park("a", "", 1.0, &uneven).unwrap_err().to_string();
    assert!(refused.contains("100") && refused.contains("99"), "{refused}");
    uneven.write(client.folder().join("x"), Layout::V032).unwrap();
    let (id, segment, kind) = ("a".into(), "x".into(), String::new());
    client.call(&Request::Park { id, segment, kind, priority: 1.0, recipe: None, uneven: true }).unwrap();
    assert_eq!(client.resume("a").unwrap().layers.len(), 2);
}

#[test]
fn caches_come_back_and_keep_their_codes() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "8MiB", RECIPE, false);
    let mut client = server.client();
    let (short, long) = (cache(1, 300), cache(1, 420));
    let Reply::Parked { outcome, fp16_bytes, bits } = client.park("a", "chat", 0.5, &short).unwrap() else {
        panic!()
    };
    assert_eq!(fp16_bytes, 2 * 2 * 2 * 300 * 64 * 2);
    assert!(outcome.bytes < fp16_bytes / 2 && bits[0] < 6.0, "{outcome:?} {bits:?}");
    assert!(entries(client.folder()).is_empty(), "the segment is gone");
    let once = packed_once(&short);
    assert_eq!(client.resume("a").unwrap(), once);

    // What was resumed, continued and parked again loses nothing more: its packed tokens are those of the first time.
    let mut next = long.clone();
    for (layer, old) in next.layers.iter_mut().zip(&once.layers) {
        let (new, old) = (layer.attention_kv().unwrap().unwrap(), old.attention_kv().unwrap().unwrap());
        let go_on = |old: &Tensor, new: &Tensor| {
            Tensor::concat(2, &[old.clone(), new.slice(2, 300, 420).unwrap()]).unwrap()
        };
        *layer = layer
            .with_kv(&Pair { keys: go_on(&old.keys, &new.keys), values: go_on(&old.values, &new.values) })
            .unwrap();
    }
    client.call(&Request::Fork { from: "a".into(), to: "b".into() }).unwrap();
    client.park("b", "chat", 0.5, &next).unwrap();
    let twice = client.resume("b").unwrap();
    for (a, b) in once.layers.iter().zip(&twice.layers) {
        let (a, b) = (a.attention_kv().unwrap().unwrap(), b.attention_kv().unwrap().unwrap());
        let packed = |x: &Tensor| x.slice(2, 0, 284).unwrap().compact();
        assert_eq!((packed(&a.keys), packed(&a.values)), (packed(&b.keys), packed(&b.values)));
    }
    // From one pass over the whole they would be the same, and two agents share what they have in common.
    assert_eq!(client.resume("b").unwrap(), packed_once(&next));
    let Reply::Stats { pool, agents, recipe } = client.call(&Request::Stats).unwrap() else { panic!() };
    assert!(pool.saved_by_sharing > 0 && pool.in_memory == 2, "{pool:?}");
    assert_eq!(recipe, RECIPE.parse::<Recipe>().unwrap().to_string());
    assert_eq!((agents[0].id.as_str(), agents[0].kind.as_str(), agents[0].priority), ("a", "chat", 0.5));

    let refused = |result: turbomoq::Result<Reply>| match result {
        Err(Error::Refused { code, message }) => (code, message),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(client.call(&Request::Pin { id: "x".into() })).0, "not-held");
    assert_eq!(refused(client.call(&Request::Spill { id: "a".into() })).0, "not-held");
    client.call(&Request::Pin { id: "a".into() }).unwrap();
    client.call(&Request::Drop { id: "b".into() }).unwrap();
    let (code, message) =
        refused(client.park("huge", "chat", 9.0, &cache(2, 40_000)).map(|r| panic!("{r:?}")));
    assert_eq!(code, "over-budget", "{message}");
    let Reply::Stats { agents, .. } = client.call(&Request::Stats).unwrap() else { panic!() };
    assert_eq!(agents.len(), 1, "a refused agent leaves no trace");
    for arguments in [&["top", "--count", "2", "--every", "0.01"][..], &["stats"], &["stats", "--json"]] {
        let output =
            Command::new(PROGRAM).args(arguments).arg("--folder").arg(folder.path()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        // People are told a recipe by its name, programs in full.
        let named = text.contains("turboquant-mse@4") != arguments.contains(&"--json");
        assert!(output.status.success() && text.contains("chat") && named, "{text}");
        if arguments.len() == 2 && arguments[1] == "--json" {
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["agents"][0]["pinned"], true);
        }
    }
    assert!(client.call(&Request::Shutdown).is_ok());
    let mut server = server;
    assert!(server.child.wait().unwrap().success());
    assert!(!client.folder().parent().unwrap().exists() && !socket_path(folder.path()).exists());
}

#[test]
fn bad_clients_harm_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "64MiB", RECIPE, false);
    // One that never ends its line, and one that vanishes in the middle of a transfer.
    let mut slow = UnixStream::connect(socket_path(folder.path())).unwrap();
    slow.write_all(b"{\"op\":").unwrap();
    let vanished = server.client();
    let left = vanished.folder().to_path_buf();
    std::fs::write(left.join("p1.safetensors"), vec![0; 1 << 20]).unwrap();
    drop(vanished);
    until("the folder of a client that is gone", || !left.exists());

    let raw = |lines: &[u8]| -> Vec<String> {
        let mut stream = UnixStream::connect(socket_path(folder.path())).unwrap();
        // A server that hangs up on too long a line does so before all of it is sent.
        drop(stream.write_all(lines));
        drop(stream.shutdown(std::net::Shutdown::Write));
        let mut text = String::new();
        drop(stream.read_to_string(&mut text));
        text.lines().skip(1).map(String::from).collect()
    };
    for bad in [
        "",
        "{}",
        "[]",
        "{\"op\":\"pin\"}",
        "{\"op\":\"ping\"",
        "\u{0}",
        "{\"op\":\"park\",\"id\":\"a\",\"segment\":\"../x\"}",
    ] {
        let replies = raw(format!("{bad}\n{{\"op\":\"ping\"}}\n").as_bytes());
        assert!(replies[0].contains("\"reply\":\"error\""), "{bad}: {replies:?}");
        assert_eq!(replies[1], "{\"reply\":\"done\"}", "{bad}");
    }
    let deep = "[".repeat(60_000) + "\n";
    assert!(raw(deep.as_bytes())[0].contains("error"));
    raw(&vec![b'x'; 1 << 20]);
    assert!(raw(b"\xff\xfe\n")[0].contains("error"));

    let mut client = server.client();
    for (name, bytes) in [("empty", vec![]), ("lies", [&u64::MAX.to_le_bytes()[..], b"{}"].concat())] {
        std::fs::write(client.folder().join(name), bytes).unwrap();
        let (id, segment, kind) = ("a".into(), name.into(), String::new());
        let refused =
            client.call(&Request::Park { id, segment, kind, priority: 1.0, recipe: None, uneven: false });
        assert!(matches!(&refused, Err(Error::Refused { code, .. }) if code == "format"), "{refused:?}");
    }
    assert!(client.park("a", "", 1.0, &cache(3, 100)).is_ok());
    assert_eq!(client.resume("a").unwrap(), packed_once(&cache(3, 100)));
    // A second server keeps away.
    let second =
        Command::new(PROGRAM).args(["serve", "--budget", "1MiB", "--folder"]).arg(folder.path()).output();
    let second = second.unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another process"), "{second:?}");
    assert!(client.call(&Request::Ping).is_ok());
    drop(slow);
}

#[test]
fn a_clean_end_keeps_everything_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "200KiB", RECIPE, true);
    let mut client = server.client();
    for i in 0..6 {
        client.park(&format!("agent {i}/é"), "", 1.0, &cache(i, 260)).unwrap();
    }
    let Reply::Stats { pool, .. } = client.call(&Request::Stats).unwrap() else { panic!() };
    assert!(pool.spills > 0 && pool.evictions == 0 && pool.in_memory < 6, "{pool:?}");
    server.terminate();
    let server = Running::start(folder.path(), "200KiB", RECIPE, true);
    let mut client = server.client();
    for i in 0..6 {
        assert_eq!(client.resume(&format!("agent {i}/é")).unwrap(), packed_once(&cache(i, 260)));
    }
}

/// Not a test by itself: the client process of the next one.
#[test]
fn client_process() {
    let Some(folder) = std::env::var_os("TURBOMOQ_TEST_CLIENT") else { return };
    let round: u64 = std::env::var("TURBOMOQ_TEST_ROUND").unwrap().parse().unwrap();
    let mut out = std::io::stdout();
    // Whatever fails here fails because one of the two was killed.
    let Ok(mut client) = Client::connect(Path::new(&folder)) else { return };
    for i in 0.. {
        let seed = 1000 * round + i;
        let id = seed.to_string();
        if client.park(&id, "", 1.0, &cache(seed, 200)).is_err() {
            return;
        }
        if i % 2 == 0 && client.call(&Request::Spill { id: id.clone() }).is_ok() {
            writeln!(out, "spilled {id}").unwrap();
            out.flush().unwrap();
        }
        if client.resume(&id).is_err() {
            return;
        }
    }
}

#[test]
fn a_hundred_kills_lose_and_leak_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(9, 9);
    let mut kept: Vec<u64> = vec![];
    let mut data = PathBuf::new();
    for round in 0..100 {
        let server = Running::start(folder.path(), "150KiB", RECIPE, true);
        let mut client = server.client();
        data = client.folder().parent().unwrap().to_path_buf();
        assert_eq!(
            entries(&data).len(),
            1,
            "segments of dead clients of a dead server: {:?}",
            entries(&data)
        );
        let spilled = entries(&folder.path().join("spill"));
        assert!(spilled.iter().all(|n| n == "lock" || n.ends_with(".tmq")), "{spilled:?}");
        if let Some(&seed) = kept.get((rng.uniform() * kept.len() as f64) as usize) {
            assert_eq!(client.resume(&seed.to_string()).unwrap(), packed_once(&cache(seed, 200)), "{seed}");
        }
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["clients::client_process", "--exact", "--nocapture"])
            .env("TURBOMOQ_TEST_CLIENT", folder.path())
            .env("TURBOMOQ_TEST_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(10 + (rng.uniform() * 60.0) as u64));
        // Now the one, now the other dies first.
        if round % 2 == 0 {
            process.kill().unwrap();
            process.wait().unwrap();
            until("the folder of a killed client", || entries(&data).len() == 1);
            drop(server);
        } else {
            drop(server);
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let mut text = String::new();
        process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        // A line that was cut is an acknowledgement that nobody has seen.
        let whole = text.rsplit_once('\n').map_or("", |t| t.0);
        kept.extend(whole.lines().filter_map(|l| l.split_once("spilled ")?.1.parse::<u64>().ok()));
    }
    assert!(kept.len() >= 30, "only {} agents were acknowledged as spilled", kept.len());
    let server = Running::start(folder.path(), "150KiB", RECIPE, true);
    let mut client = server.client();
    for seed in kept {
        assert_eq!(client.resume(&seed.to_string()).unwrap(), packed_once(&cache(seed, 200)), "{seed}");
    }
    drop(client);
    server.terminate();
    assert!(!data.exists());
}

#[test]
fn a_refused_park_or_fork_leaves_agents_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "1MiB", RECIPE, false);
    let (mut client, mut other) = (server.client(), server.client());
    client.park("a", "chat", 0.5, &cache(1, 300)).unwrap();
    client.call(&Request::Pin { id: "a".into() }).unwrap();
    let agents = |client: &mut Client| match client.call(&Request::Stats).unwrap() {
        Reply::Stats { agents, .. } => agents,
        other => panic!("{other:?}"),
    };
    let before = agents(&mut client);
    let huge = cache(2, 20_000);
    for id in ["a", "new"] {
        assert!(matches!(client.park(id, "coding", 9.0, &huge), Err(Error::Refused { .. })));
    }
    assert!(client.call(&Request::Fork { from: "nobody".into(), to: "fork".into() }).is_err());
    assert_eq!(agents(&mut client), before);
    // Two clients with one new id: whatever the order, what was accepted is there.
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| other.park("twice", "coding", 9.0, &huge).is_err());
        client.park("twice", "chat", 0.5, &cache(3, 100)).unwrap();
        assert!(refused.join().unwrap());
    });
    assert_eq!(
        agents(&mut client).iter().map(|a| (a.id.as_str(), a.kind.as_str())).collect::<Vec<_>>(),
        [("a", "chat"), ("twice", "chat")]
    );
    // What a recipe costs is known before anything is built for it.
    let park = |recipe: &str, client: &mut Client| {
        cache(4, 10).write(client.folder().join("p"), Layout::V032).unwrap();
        let recipe = Some(recipe.to_string());
        let (id, segment, kind) = ("dear".into(), "p".into(), String::new());
        match client.call(&Request::Park { id, segment, kind, priority: 1.0, recipe, uneven: false }) {
            Err(Error::Refused { code, message }) => (code, message),
            other => panic!("{other:?}"),
        }
    };
    for recipe in ["key=d128:b1:identity:uniform:qjl512x8,value=exact", "key=d8192:dense,value=exact"] {
        assert_eq!(park(recipe, &mut client).0, "unsupported", "{recipe}");
    }
}

/// A line of /proc/PID/status in bytes.
#[cfg(target_os = "linux")]
fn memory(server: &Running, name: &str) -> i64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn a_park_or_resume_holds_two_layers_dense_at_most_and_gives_back_what_is_free() {
    const LAYERS: usize = 24;
    const MIB: i64 = 1 << 20;
    let rows = |stream: u64| {
        let mut rng = Rng::new(9, stream);
        let data = (0..2048 * 256).map(|_| half::f16::from_f64(rng.normal())).collect();
        Tensor::new(&[1, 4, 2048, 64], data).unwrap()
    };
    let kv = Pair { keys: rows(0), values: rows(1) };
    let layer = Layer::Kv { class: KvClass::Kv, kv: Some(kv) };
    let large = PromptCache { layout: Layout::V032, metadata: BTreeMap::new(), layers: vec![layer; LAYERS] };
    let dense_layer = 2 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let server = Running::start(folder.path(), "1GiB", "uniform@4", true);
    let mut client = server.client();
    // Threads and tables come with the first caches.
    let small = PromptCache { layers: large.layers[..2].to_vec(), ..large.clone() };
    for id in ["x", "y"] {
        client.park(id, "", 1.0, &small).unwrap();
        client.resume(id).unwrap();
    }
    client.call(&Request::Spill { id: "x".into() }).unwrap();
    // All layers are alike, so that the pool holds one of them and what is above that is the server's own.
    let slack = 3 * MIB;
    let mut step = |what: &str, packed: i64, request: &mut dyn FnMut(&mut Client)| {
        let idle = memory(&server, "VmRSS");
        std::fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").unwrap();
        request(&mut client);
        let (peak, after) = (memory(&server, "VmHWM") - idle, memory(&server, "VmRSS") - idle);
        println!("{what}: {peak} at its peak, {after} after it");
        assert!(peak <= packed + 2 * dense_layer + slack, "{what}: {peak} bytes at its peak");
        assert!(after <= slack, "{what}: {after} bytes stay");
    };
    // The blocks of a park are there before those that are equal are found in the pool.
    let packed = LAYERS as i64 * dense_layer * 9 / 32;
    step("park", packed, &mut |client| drop(client.park("a", "", 1.0, &large).unwrap()));
    step("park again", packed, &mut |client| drop(client.park("a", "", 1.0, &large).unwrap()));
    step("resume", 0, &mut |client| drop(client.resume("a").unwrap()));
    step("spill", 0, &mut |client| drop(client.call(&Request::Spill { id: "a".into() }).unwrap()));
    assert_eq!(client.resume("a").unwrap().layers.len(), LAYERS);
}
