//! The server under faults: a disk that fails, fills up, is slow or read-only, kill -9 at every step, threads and descriptors that
//! run short, files that are removed, and strangers at either end of the socket. An oracle knows what was answered: nothing that was
//! answered as being on the disk is lost or older afterwards, and nothing that was dropped comes back.
#![cfg(unix)]
#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, unused_imports, reason = "the disk that fails is made for Linux")
)]

use crate::common::server::{PROGRAM, Running};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use turbomoq::archive::Archive;
use turbomoq::internals::math::rng::Rng;
use turbomoq::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
use turbomoq::serve::{Client, Reply, Request, socket_path};
use turbomoq::{Compressor, Dtype, Error, Tensor};

const RECIPE: &str = "turboquant-mse@4,sinks=2,window=0";
/// Room for two caches and a bit.
const BUDGET: &str = "72KiB";
const TOKENS: usize = 140;

/// A prompt cache of two layers that follows from a number.
fn cache(seed: u64) -> PromptCache {
    let rows = |stream: u64| {
        let mut rng = Rng::new(seed, stream);
        let data = (0..TOKENS * 64).map(|_| rng.normal() as f32).collect();
        Tensor::from_f32(Dtype::F16, &[1, 1, TOKENS, 64], data).unwrap()
    };
    let layer = |i: u64| Layer::Kv {
        class: KvClass::Kv,
        kv: Some(Pair { keys: rows(2 * i), values: rows(2 * i + 1) }),
    };
    let metadata = BTreeMap::from([("seed".to_string(), seed.to_string())]);
    PromptCache { layout: Layout::V032, metadata, layers: vec![layer(0), layer(1)] }
}

/// Waits until something holds, within a bound that no working machine reaches.
fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        thread_rest();
    }
}

fn thread_rest() {
    std::thread::sleep(Duration::from_millis(3));
}

fn serve(folder: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--budget", BUDGET, "--recipe", RECIPE, "--folder"]).arg(folder);
    command.arg("--spill").arg(folder.join("spill"));
    command
}

/// Asks a server to end; whether it ended well, and what it said on standard error.
fn end(mut server: Running) -> (bool, String) {
    let id = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let mut text = String::new();
    if let Some(mut stderr) = server.child.stderr.take() {
        stderr.read_to_string(&mut text).unwrap();
    }
    (server.child.wait().unwrap().success(), text)
}

/// What is allowed to be there: contents by their seeds, `None` for nothing.
#[derive(Default)]
struct Agent {
    may: Vec<Option<u64>>,
    on_disk: bool,
}

/// What a server has answered.
#[derive(Default)]
struct Oracle {
    agents: BTreeMap<&'static str, Agent>,
    /// The packed form of a content decodes to this.
    decoded: BTreeMap<u64, PromptCache>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Park(&'static str, u64),
    Spill(&'static str),
    Resume(&'static str),
    Drop(&'static str),
}

use Step::*;

/// Every way to and from the disk: a spill, a park over what lies there, one that makes room, one over what others sent there, drops.
const STEPS: [Step; 14] = [
    Park("a", 1),
    Spill("a"),
    Park("a", 2),
    Resume("a"),
    Park("b", 3),
    Park("c", 4),
    Park("a", 5),
    Park("b", 6),
    Spill("c"),
    Drop("a"),
    Park("a", 7),
    Spill("a"),
    Drop("c"),
    Resume("b"),
];

impl Oracle {
    fn agent(&mut self, id: &'static str) -> &mut Agent {
        let nothing = || Agent { may: vec![None], on_disk: false };
        self.agents.entry(id).or_insert_with(nothing)
    }

    /// Takes a step and notes what it may have done. `false` if there is no server any more.
    fn take(&mut self, client: &mut Client, step: Step) -> bool {
        let (result, id, next) = match step {
            Park(id, seed) => (client.park(id, "", 1.0, &cache(seed)).map(Some), id, Some(Some(seed))),
            Spill(id) => (client.call(&Request::Spill { id: id.into() }).map(Some), id, None),
            Drop(id) => (client.call(&Request::Drop { id: id.into() }).map(Some), id, Some(None)),
            Resume(id) => (client.resume(id).map(|_| None), id, None),
        };
        let agent = self.agent(id);
        let lives = !matches!(&result, Err(Error::Io { .. }));
        match (result, next) {
            (Ok(_), Some(next)) => {
                agent.may = vec![next];
                agent.on_disk &= next.is_some();
            }
            (Ok(_), None) => agent.on_disk |= matches!(step, Spill(_)),
            (Err(_), Some(next)) => agent.may.push(next),
            (Err(_), None) => {}
        }
        lives
    }

    /// Every agent has what it may have; `crashed` says that what was in memory only may be gone.
    fn check(&mut self, client: &mut Client, crashed: bool, context: &str) {
        for (id, agent) in &mut self.agents {
            let found = match client.resume(id) {
                Ok(cache) => Some(cache),
                Err(Error::Refused { code, .. }) if code == "not-held" || code == "evicted" => None,
                Err(other) => panic!("{context}: {id}: {other}"),
            };
            let Some(found) = found else {
                assert!(
                    agent.may.contains(&None) || (crashed && !agent.on_disk),
                    "{context}: {id} is lost, it may be {:?}",
                    agent.may
                );
                agent.may = vec![None];
                continue;
            };
            let seed: u64 = found.metadata["seed"].parse().unwrap();
            assert!(
                agent.may.contains(&Some(seed)),
                "{context}: {id} is {seed}, it may only be {:?}",
                agent.may
            );
            let want = self.decoded.entry(seed).or_insert_with(|| {
                let compressor = Compressor::new(RECIPE.parse().unwrap());
                Archive::compress(&cache(seed), &compressor, || ())
                    .unwrap()
                    .restore(&compressor, || ())
                    .unwrap()
            });
            assert!(&found == want, "{context}: {id} has other rows than those of {seed}");
            agent.may = vec![Some(seed)];
        }
    }

    /// Forgets every agent, here and there.
    fn clear(&mut self, client: &mut Client) {
        for id in std::mem::take(&mut self.agents).into_keys() {
            drop(client.call(&Request::Drop { id: id.into() }));
        }
    }
}

#[cfg(target_os = "linux")]
mod injected {
    //! Faults that a library loaded into the server makes, see tests/faults/shim.c.

    use super::*;
    use std::os::unix::fs::FileExt;

    const CREATE: u64 = 1;
    const WRITE: u64 = 2;
    const SYNC: u64 = 4;
    const REMOVE: u64 = 8;
    const OPEN: u64 = 16;
    const THREAD: u64 = 32;
    const ACCEPT: u64 = 64;
    const DISK: u64 = CREATE | WRITE | SYNC | REMOVE | OPEN;
    const EVER: u64 = u64::MAX;

    /// What happens at a step.
    enum Act {
        Fail(i32),
        Kill,
        Delay(u64),
    }

    struct Faults {
        folder: tempfile::TempDir,
        control: fs::File,
    }

    /// The library, or `None` (said aloud) where there is no C compiler.
    fn library() -> Option<&'static Path> {
        static LIBRARY: OnceLock<Option<(tempfile::TempDir, PathBuf)>> = OnceLock::new();
        let made = LIBRARY.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("faults.so");
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/shim.c");
            let mut command = Command::new("cc");
            command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&out).arg(source).arg("-ldl");
            match command.status() {
                Ok(status) => assert!(status.success(), "cc fails"),
                Err(_) => {
                    assert!(std::env::var_os("CI").is_none(), "a C compiler is needed");
                    eprintln!("NOT RUN: faults of a disk, there is no cc");
                    return None;
                }
            }
            Some((folder, out))
        });
        made.as_ref().map(|(_, path)| path.as_path())
    }

    impl Faults {
        fn new() -> Option<Faults> {
            library()?;
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("control");
            let control = fs::File::options().create_new(true).read(true).write(true).open(path).unwrap();
            control.set_len(48).unwrap();
            Some(Faults { folder, control })
        }

        fn path(&self) -> &Path {
            self.folder.path()
        }

        fn start(&self) -> Running {
            let mut command = serve(self.path());
            command.env("LD_PRELOAD", library().unwrap());
            command.env("FAULTS_CONTROL", self.path().join("control"));
            command.env("FAULTS_FOLDER", self.path().join("spill"));
            command.stderr(Stdio::piped());
            Running::of(command, self.path())
        }

        /// From now on steps of these kinds are counted, and something happens at those `from..=to`.
        fn arm(&self, kinds: u64, from: u64, to: u64, act: Act) {
            let (action, value) = match act {
                Act::Fail(errno) => (1, errno as u64),
                Act::Kill => (2, 0),
                Act::Delay(ms) => (3, ms),
            };
            let words = [0, from, to, kinds, action, value];
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
            self.control.write_all_at(&bytes, 0).unwrap();
        }

        fn disarm(&self) {
            self.arm(0, EVER, EVER, Act::Kill);
        }

        /// Steps so far.
        fn steps(&self) -> u64 {
            let mut word = [0; 8];
            self.control.read_exact_at(&mut word, 0).unwrap();
            u64::from_ne_bytes(word)
        }
    }

    #[test]
    fn a_kill_at_any_step_loses_nothing_that_was_answered() {
        let Some(faults) = Faults::new() else { return };
        let (mut oracle, mut killed) = (Oracle::default(), 0);
        let mut server = faults.start();
        for n in 1.. {
            let mut client = server.client();
            faults.arm(DISK, n, n, Act::Kill);
            let all = STEPS.iter().all(|&step| oracle.take(&mut client, step));
            let ended = faults.steps() < n;
            faults.disarm();
            if ended {
                assert!(all, "the server is gone without a kill");
                break;
            }
            killed += 1;
            server.child.wait().unwrap();
            server = faults.start();
            let left: Vec<_> = fs::read_dir(faults.path().join("spill")).unwrap().collect();
            assert!(left.len() <= 3, "unfinished files are left: {left:?}");
            let mut client = server.client();
            oracle.check(&mut client, true, &format!("killed at step {n}"));
            oracle.clear(&mut client);
        }
        assert!(killed >= 20, "{killed} steps only");
        oracle.check(&mut server.client(), false, "in the end");
    }

    #[test]
    fn an_error_at_any_step_is_that_requests_error() {
        let Some(faults) = Faults::new() else { return };
        let mut oracle = Oracle::default();
        let mut server = faults.start();
        for (errno, forever) in [(5, false), (28, true)] {
            // EIO once, or ENOSPC from there on.
            let mut failed = 0;
            for n in 1.. {
                let mut client = server.client();
                let to = if forever { EVER } else { n };
                faults.arm(CREATE | WRITE | SYNC, n, to, Act::Fail(errno));
                assert!(STEPS.iter().all(|&step| oracle.take(&mut client, step)), "step {n} ends the server");
                let ended = faults.steps() < n;
                faults.disarm();
                let context = format!("errno {errno} at step {n}");
                oracle.check(&mut client, false, &context);
                if n % 8 == 0 {
                    // What was in memory only is on the disk after a clean end.
                    drop(client);
                    assert!(end(server).0);
                    server = faults.start();
                    client = server.client();
                    oracle.check(&mut client, false, &context);
                }
                oracle.clear(&mut client);
                if ended {
                    break;
                }
                failed += 1;
            }
            assert!(failed >= 15, "{failed} steps only");
        }
    }

    #[test]
    fn one_cache_that_cannot_be_written_keeps_no_other_from_the_disk() {
        let Some(faults) = Faults::new() else { return };
        let (mut oracle, server) = (Oracle::default(), faults.start());
        let mut client = server.client();
        assert!([Park("a", 1), Park("b", 2)].iter().all(|&step| oracle.take(&mut client, step)));
        drop(client);
        // The first file cannot be made, the others can.
        faults.arm(CREATE, 1, 1, Act::Fail(28));
        let (well, text) = end(server);
        faults.disarm();
        assert!(!well && text.contains("1 agent not written: \"a\""), "{text} {well}");
        let server = faults.start();
        let mut client = server.client();
        assert!(client.resume("a").is_err());
        oracle.agent("a").may = vec![None];
        oracle.check(&mut client, false, "after the end");
    }

    #[test]
    fn a_disk_that_became_read_only_is_reported_for_every_agent() {
        let Some(faults) = Faults::new() else { return };
        let (mut oracle, server) = (Oracle::default(), faults.start());
        let mut client = server.client();
        oracle.take(&mut client, Park("a", 1));
        oracle.take(&mut client, Spill("a"));
        faults.arm(CREATE | REMOVE, 1, EVER, Act::Fail(30));
        for step in [Park("a", 2), Drop("a"), Park("b", 3), Park("c", 4), Spill("b"), Resume("b")] {
            assert!(oracle.take(&mut client, step), "{step:?}");
        }
        oracle.agent("b").may.retain(Option::is_some);
        oracle.check(&mut client, false, "read-only");
        drop(client);
        let (well, text) = end(server);
        assert!(!well && text.contains("2 agents not written: \"b\"") && text.contains("\"c\""), "{text}");
        faults.disarm();
    }

    #[test]
    fn nothing_older_comes_back_from_a_slow_disk() {
        let Some(faults) = Faults::new() else { return };
        let mut oracle = Oracle::default();
        // A spill of the first version is under way while another client parks the second one or drops the agent.
        for (round, step) in [Park("x", 2), Drop("x")].into_iter().enumerate() {
            let mut server = faults.start();
            let mut client = server.client();
            oracle.take(&mut client, Park("x", 1));
            faults.arm(SYNC, 1, 1, Act::Delay(150));
            std::thread::scope(|scope| {
                let mut other = server.client();
                let spill = scope.spawn(move || other.call(&Request::Spill { id: "x".into() }).is_ok());
                until("the spill has begun", || faults.steps() > 0);
                oracle.take(&mut client, step);
                server.child.kill().unwrap();
                server.child.wait().unwrap();
                spill.join().unwrap();
            });
            faults.disarm();
            let server = faults.start();
            let mut client = server.client();
            oracle.check(&mut client, true, &format!("round {round}"));
            oracle.clear(&mut client);
        }
    }

    #[test]
    fn no_error_of_accept_and_no_missing_thread_ends_a_server() {
        let Some(faults) = Faults::new() else { return };
        let (mut oracle, server) = (Oracle::default(), faults.start());
        let mut client = server.client();
        oracle.take(&mut client, Park("a", 1));
        // ENOMEM, EPROTO, EPERM, EMFILE, ENFILE, EINVAL: three times each, then the client is let in.
        for errno in [12, 71, 1, 24, 23, 22] {
            faults.arm(ACCEPT, 1, 2, Act::Fail(errno));
            assert!(matches!(server.client().call(&Request::Ping), Ok(Reply::Done)), "{errno}");
        }
        faults.arm(THREAD, 1, EVER, Act::Fail(11));
        match Client::connect(faults.path()) {
            Err(Error::Refused { code, .. }) => assert_eq!(code, "threads"),
            other => panic!("{other:?}"),
        }
        faults.disarm();
        oracle.check(&mut client, false, "after threads ran short");
        drop(client);
        assert!(end(server).0);
        let server = faults.start();
        oracle.check(&mut server.client(), false, "after the end");
    }
}

#[test]
fn idle_clients_and_few_descriptors_keep_nobody_out() {
    for (limit, idle) in [("40", 60), ("400", 300)] {
        let folder = tempfile::tempdir().unwrap();
        let plain = serve(folder.path());
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n $0; exec \"$@\"", limit]).arg(plain.get_program());
        command.args(plain.get_args());
        let server = Running::of(command, folder.path());
        let (mut oracle, mut first) = (Oracle::default(), server.client());
        oracle.take(&mut first, Park("a", 1));
        oracle.take(&mut first, Park("b", 2));
        let mut held = vec![];
        for i in 0..idle {
            let mut stream = UnixStream::connect(socket_path(folder.path())).unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            assert!(line.contains("hello"), "client {i} of {limit} descriptors: {line}");
            if i % 3 == 0 {
                stream.write_all(b"{\"op\":").unwrap(); // and never the rest
            }
            held.push(stream);
        }
        let mut last = server.client();
        oracle.take(&mut last, Park("c", 3));
        oracle.take(&mut last, Spill("c"));
        oracle.check(&mut last, false, "the last client");
        // The first one was hung up on meanwhile, and comes again by itself.
        oracle.check(&mut first, false, "the first client");
        drop(held);
        assert!(end(server).0);
    }
}

#[test]
fn what_is_removed_under_a_server_does_not_keep_it_from_ending() {
    let folder = tempfile::tempdir().unwrap();
    let (mut oracle, server) = (Oracle::default(), Running::of(serve(folder.path()), folder.path()));
    let mut client = server.client();
    oracle.take(&mut client, Park("a", 1));
    fs::remove_file(socket_path(folder.path())).unwrap();
    for held in [folder.path().to_path_buf(), folder.path().join("spill")] {
        drop(fs::remove_file(held.join("lock")));
    }
    // No second server on the folder, nor on its spill folder from elsewhere.
    let elsewhere = tempfile::tempdir().unwrap();
    for second in [folder.path(), elsewhere.path()] {
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--budget", "1MiB", "--folder"]).arg(second);
        let second = command.arg("--spill").arg(folder.path().join("spill")).output().unwrap();
        assert!(!second.status.success());
        assert!(String::from_utf8_lossy(&second.stderr).contains("another process"), "{second:?}");
    }
    assert!(client.folder().exists());
    oracle.check(&mut client, false, "after the second server");
    until("the socket is made anew", || socket_path(folder.path()).exists());
    oracle.take(&mut server.client(), Park("b", 2));
    // The clients' folder: it is made again.
    fs::remove_dir_all(client.folder()).unwrap();
    oracle.check(&mut client, false, "without the client's folder");
    fs::remove_file(socket_path(folder.path())).unwrap();
    assert!(end(server).0);
    let server = Running::of(serve(folder.path()), folder.path());
    let mut client = server.client();
    oracle.check(&mut client, false, "after the end");
    // The whole folder: what is in memory stays there, and the end says what could not be written.
    oracle.take(&mut client, Park("c", 3));
    let moved = elsewhere.path().join("moved");
    fs::rename(folder.path(), &moved).unwrap();
    fs::create_dir(folder.path()).unwrap();
    assert!(client.resume("c").is_ok());
    drop(client);
    assert!(!end(server).0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written into another folder");
}

#[test]
fn folders_that_were_there_are_not_changed() {
    let root = tempfile::tempdir().unwrap();
    let refused = |folder: &Path, spill: &Path| {
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--budget", "1MiB", "--folder"]).arg(folder).arg("--spill").arg(spill);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let (open, private) = (root.path().join("open"), root.path().join("private"));
    fs::create_dir(&open).unwrap();
    fs::create_dir(&private).unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let new = root.path().join("new");
    for mode in [0o775, 0o1777] {
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        let names_mode = |text: String| assert!(text.contains(&format!("mode {mode:o}")), "{text}");
        names_mode(refused(&open, &new.join("spill")));
        names_mode(refused(&new, &open));
        assert_eq!(fs::metadata(&open).unwrap().mode() & 0o7777, mode);
    }
    let mine = ["notes.tmq", ".turbomoq-a1b2c3", "lock", "c1"];
    mine.iter().for_each(|name| fs::write(private.join(name), name).unwrap());
    // A command that is writing a file there holds a lock on it.
    let writing = fs::File::open(private.join(mine[1])).unwrap();
    writing.lock().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--budget", "1MiB", "--folder"]).arg(&new).arg("--spill").arg(&private);
    assert!(end(Running::of(command, &new)).0);
    // What a server writes into a folder that others may read is not for them.
    fs::set_permissions(&private, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--budget", "1MiB", "--folder"]).arg(&new).arg("--spill").arg(&private);
    let server = Running::of(command, &new);
    server.client().park("a", "", 1.0, &cache(1)).unwrap();
    assert!(end(server).0);
    let list = fs::read_dir(&private).unwrap().map(|e| e.unwrap());
    let made = list.filter(|e| !mine.contains(&e.file_name().to_str().unwrap()));
    let modes: Vec<_> = made.map(|e| e.metadata().unwrap().mode() & 0o777).collect();
    assert_eq!(modes, [0o600]);
    fs::write(private.join("socket"), b"mine").unwrap();
    assert!(refused(&private, &new.join("spill")).contains("no socket"));
    assert_eq!(fs::read(private.join("socket")).unwrap(), b"mine");
    for name in mine {
        assert_eq!(fs::read(private.join(name)).unwrap(), name.as_bytes(), "{name}");
    }
}

/// A server that is none: answers every connection with the lines that it is given.
fn answering(folder: &Path, lines: Vec<Vec<String>>) -> std::thread::JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(socket_path(folder)).unwrap();
    std::thread::spawn(move || {
        let mut heard = vec![];
        for lines in lines {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut lines = lines.into_iter();
            stream.write_all(lines.next().unwrap().as_bytes()).unwrap();
            for line in lines {
                let mut text = String::new();
                reader.read_line(&mut text).unwrap();
                heard.push(text);
                drop(stream.write_all(line.as_bytes()));
            }
            // Until the client has gone.
            let mut rest = String::new();
            drop(reader.read_to_string(&mut rest));
            heard.push(rest);
        }
        heard
    })
}

fn hello(folder: &Path) -> String {
    serde_json::to_string(&Reply::Hello { version: 1, server: 1, folder: folder.into() }).unwrap() + "\n"
}

#[test]
fn a_client_believes_no_stranger() {
    let root = tempfile::tempdir().unwrap();
    let (mine, open) = (root.path().join("mine"), root.path().join("open"));
    for (folder, mode) in [(&mine, 0o700), (&open, 0o755)] {
        fs::create_dir(folder).unwrap();
        fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
    }
    symlink(&mine, root.path().join("link")).unwrap();
    // The folder that is named in the greeting: open to others, a link, not there.
    let bad = [open.clone(), root.path().join("link"), root.path().join("none")];
    let server = answering(root.path(), bad.iter().map(|f| vec![hello(f)]).collect());
    for folder in &bad {
        let error = Client::connect(root.path()).unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path == folder), "{error}");
    }
    assert!(server.join().unwrap().iter().all(String::is_empty), "nothing is sent");
    // The folder of the socket itself: anybody may write to it, a link, another user's.
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    let _listener = UnixListener::bind(socket_path(&open)).unwrap();
    for folder in [&open, &root.path().join("link")] {
        let error = Client::connect(folder).unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path == folder), "{error}");
    }
}

#[test]
fn a_server_of_another_user_is_not_spoken_to() {
    let root = tempfile::tempdir().unwrap();
    if fs::metadata(root.path()).unwrap().uid() != 0 {
        return eprintln!("NOT RUN: only root can start a server of another user");
    }
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (folder, program) = (root.path().join("f"), root.path().join("turbomoq"));
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(65534), Some(65534)).unwrap();
    fs::copy(PROGRAM, &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["serve", "--budget", "1MiB", "--folder"]).arg(&folder);
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    let _server = Running::of(command, &folder);
    assert!(Client::connect(&folder).unwrap_err().to_string().contains("a folder of user 65534"));
    // The folder is mine, the process that answers is not.
    std::os::unix::fs::chown(&folder, Some(0), Some(0)).unwrap();
    let error = Client::connect(&folder).unwrap_err().to_string();
    assert!(error.contains("a server of user 65534, not of user 0"), "{error}");
}

#[test]
fn a_client_never_reads_the_reply_to_another_request() {
    let folder = tempfile::tempdir().unwrap();
    let done = "{\"reply\":\"done\"}\n".to_string();
    let stale = "{\"reply\":\"resumed\",\"segment\":\"old\",\"bytes\":1}\n".to_string();
    let idle = "{\"reply\":\"error\",\"code\":\"idle\",\"message\":\"\"}\n".to_string();
    let mine = folder.path().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::set_permissions(&mine, fs::Permissions::from_mode(0o700)).unwrap();
    let greeting = hello(&mine);
    let server = answering(
        folder.path(),
        vec![
            vec![greeting.clone(), String::new()], // no reply in time
            vec![greeting.clone(), idle],          // hung up on with the request under way
            vec![greeting.clone(), done.clone(), "{\"reply\":".into()], // half a reply
            vec![greeting.clone() + &stale],       // a reply that nobody has asked for
            vec![greeting, done],
        ],
    );
    let mut client = Client::connect(folder.path()).unwrap();
    client.set_timeout(Some(Duration::from_millis(100)));
    let error = client.call(&Request::Pin { id: "a".into() }).unwrap_err();
    assert!(error.to_string().contains("no reply within 0.1 s"), "{error}");
    client.set_timeout(Some(Duration::from_secs(60)));
    assert!(matches!(client.call(&Request::Ping), Ok(Reply::Done)), "sent again after the hang-up");
    client.set_timeout(Some(Duration::from_millis(100)));
    assert!(client.call(&Request::Ping).is_err(), "half a reply");
    drop(client);
    let mut client = Client::connect(folder.path()).unwrap();
    assert!(matches!(client.call(&Request::Ping), Ok(Reply::Done)));
    drop(client);
    let heard = server.join().unwrap();
    assert_eq!(heard.iter().filter(|line| line.contains("\"pin\"")).count(), 1, "{heard:?}");
}

#[test]
fn a_client_finds_the_server_that_was_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut oracle, server) = (Oracle::default(), Running::of(serve(folder.path()), folder.path()));
    let mut client = server.client();
    oracle.take(&mut client, Park("a", 1));
    oracle.take(&mut client, Spill("a"));
    drop(server); // kill -9
    assert!(client.call(&Request::Ping).is_err(), "there is no server");
    let _server = Running::of(serve(folder.path()), folder.path());
    oracle.check(&mut client, true, "after the restart");
    assert!(oracle.take(&mut client, Park("a", 2)));
    oracle.check(&mut client, false, "parked through the new connection");
}
