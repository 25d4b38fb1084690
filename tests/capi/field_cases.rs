//! Behaviour learned from defects of other KV-cache compressors, where caches leave the process: pool, disk, server, C API
//! (../shared/field-cases.md).
#![cfg(unix)]

use crate::capi::*;
use crate::common::attention::{cache, exact};
use crate::common::server::{PROGRAM, Running};
use crate::common::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use turbomoq::Codes;
use turbomoq::Cpu;
use turbomoq::archive::{Archive, SpillFolder};
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::pool::MemoryPool;
use turbomoq::prompt_cache::{KvClass, Layer, Layout, Pair, PromptCache};
use turbomoq::serve::Request;
use turbomoq::{Compressor, Dtype, Error, Recipe, Tensor};
use turbomoq::{Rules, Stored};

/// A prompt cache of these layers.
fn prompt(layers: &[(Tensor, Tensor)]) -> PromptCache {
    let layer = |(k, v): &(Tensor, Tensor)| Layer::Kv {
        class: KvClass::Kv,
        kv: Some(Pair { keys: k.clone(), values: v.clone() }),
    };
    let layers = layers.iter().map(layer).collect();
    PromptCache { layout: Layout::V032, metadata: BTreeMap::new(), layers }
}

fn pack(cache: &PromptCache, recipe: &str) -> Archive {
    Archive::compress(cache, &Compressor::new(recipe.parse().unwrap()), || ()).unwrap()
}

fn unpack(archive: &Archive) -> PromptCache {
    archive.restore(&Compressor::new(archive.recipe.clone()), || ()).unwrap()
}

fn rows(cache: &PromptCache) -> Vec<(Tensor, Tensor)> {
    let kv = |l: &Layer| l.attention_kv().unwrap().map(|kv| (kv.keys, kv.values));
    cache.layers.iter().filter_map(kv).collect()
}

fn half(shape: &[usize], stream: u64) -> Tensor {
    Tensor::from_f32(Dtype::F16, shape, gauss(shape, stream).to_f32().unwrap()).unwrap()
}

fn files(folder: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let list = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    list.filter(|p| p.to_string_lossy().ends_with(ending)).collect()
}

const RECIPE: &str = "turboquant-mse@4,sinks=2,window=0";

#[test]
fn t54_what_a_dead_server_left_half_written_is_no_cache() {
    let folder = tempfile::tempdir().unwrap();
    let spill = folder.path().join("spill");
    let good = prompt(&[(half(&[1, 2, 300, 64], 1), half(&[1, 2, 300, 64], 2))]);
    let server = Running::start(folder.path(), "8MiB", RECIPE, true);
    let mut client = server.client();
    client.park("a", "", 1.0, &good).unwrap();
    client.call(&Request::Spill { id: "a".into() }).unwrap();
    let data = client.folder().parent().unwrap().to_path_buf();
    std::fs::write(client.folder().join("p9.safetensors"), b"half a segm").unwrap();
    drop(server); // kill -9, with a client attached

    let [file] = &files(&spill, ".tmq")[..] else { panic!("{spill:?}") };
    let bytes = std::fs::read(file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // Killed before the header, in it, behind it, and in the data; and a file that was never renamed.
    for (i, len) in [0, 5, header / 2, header, header + 100, bytes.len() - 1].into_iter().enumerate() {
        std::fs::write(spill.join(format!("00000000000000{i:02}-9.tmq")), &bytes[..len]).unwrap();
    }
    std::fs::write(spill.join(".turbomoq-x1"), &bytes[..header]).unwrap();
    // A later version of the format, of another agent.
    let text = String::from_utf8(bytes[8..header].to_vec()).unwrap();
    let changed = text.replace(r#"\"version\":2,"#, r#"\"version\":9,"#);
    let changed = changed.replace(r#"\\\"id\\\":\\\"a\\\""#, r#"\\\"id\\\":\\\"z\\\""#);
    assert!(changed.contains("9,") && changed.contains('z') && changed.len() == text.len(), "{text}");
    let newer = [&bytes[..8], changed.as_bytes(), &bytes[header..]].concat();
    let version = file.to_string_lossy().rsplit_once('-').unwrap().1.to_string();
    let name = format!("{:016x}-{version}", turbomoq::internals::io::files::stable_hash(b"z"));
    std::fs::write(spill.join(name), newer).unwrap();

    let server = Running::start(folder.path(), "8MiB", RECIPE, true);
    let mut client = server.client();
    assert_eq!(
        std::fs::read_dir(&data).unwrap().count(),
        1,
        "segments of the dead: only this client's folder"
    );
    assert_eq!(files(&spill, ".damaged").len(), 6);
    assert!(files(&spill, "-x1").is_empty());
    assert_eq!(client.resume("a").unwrap(), unpack(&pack(&good, RECIPE)));
    let refused = client.resume("z");
    assert!(
        matches!(&refused, Err(Error::Refused { code, message }) if code == "format" && message.contains("version 9")),
        "{refused:?}"
    );

    // While it lives, another one keeps its hands off.
    let listing = |p: &Path| {
        let mut list: Vec<_> = std::fs::read_dir(p).unwrap().map(|e| e.unwrap().path()).collect();
        list.sort();
        list
    };
    let before = (listing(&data), listing(&spill));
    let mut second = Command::new(PROGRAM);
    second.args(["serve", "--budget", "1MiB", "--folder"]).arg(folder.path());
    assert!(!second.output().unwrap().status.success());
    let mut third = Command::new(PROGRAM);
    let other = tempfile::tempdir().unwrap();
    third.args(["serve", "--budget", "1MiB", "--folder"]).arg(other.path()).arg("--spill").arg(&spill);
    assert!(!third.output().unwrap().status.success());
    assert_eq!(before, (listing(&data), listing(&spill)));
    assert!(client.call(&Request::Ping).is_ok());
}

#[test]
fn t54_no_room_for_a_segment_is_an_error_and_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "turboquant-mse@2,sinks=0,window=0";
    // No file may be longer than this, as on a file system that is full; the signal that comes with it is ignored.
    let script = r#"trap '' XFSZ; ulimit -f 400; exec "$0" "$@""#;
    let mut command = Command::new("sh");
    command.args(["-c", script, PROGRAM, "serve", "--budget", "8MiB", "--recipe", recipe, "--spill"]);
    command.arg(folder.path().join("spill")).arg("--folder").arg(folder.path());
    let server = Running::of(command, folder.path());
    let mut client = server.client();
    let cache = |tokens: usize| {
        let rows = |stream| half(&[1, 4, tokens, 128], stream);
        prompt(&[(rows(1), rows(2))])
    };
    // 8 MiB of rows, one of codes.
    let (large, small) = (cache(4096), cache(40));
    client.park("large", "", 1.0, &large).unwrap();
    client.park("small", "", 1.0, &small).unwrap();
    let io = |result: turbomoq::Result<_>| match result {
        Err(Error::Refused { code, message }) => assert_eq!(code, "io", "{message}"),
        other => panic!("{other:?}"),
    };
    io(client.resume("large").map(|_| ()));
    io(client.call(&Request::Spill { id: "large".into() }).map(|_| ()));
    let left = std::fs::read_dir(client.folder()).unwrap().count();
    assert_eq!((left, files(&folder.path().join("spill"), ".tmq").len()), (0, 0));
    assert_eq!(client.resume("small").unwrap(), unpack(&pack(&small, recipe)));
}

/// All packed tokens of one side of a cache.
fn packed(cache: &LayerCache<Cpu>, keys: bool) -> Codes<Tensor> {
    let side = |s: turbomoq::Segment<Tensor>| match if keys { s.keys } else { s.values } {
        Stored::Packed(codes) => Some(codes),
        Stored::Exact { .. } => None,
    };
    Codes::concat(&cache.segments().into_iter().filter_map(side).collect::<Vec<_>>()).unwrap()
}

fn same_codes(a: &Codes<Tensor>, b: &Codes<Tensor>) -> bool {
    (a.words().to_vec::<u32>().unwrap(), scale_codes(a))
        == (b.words().to_vec::<u32>().unwrap(), scale_codes(b))
}

#[test]
fn t60_rows_have_one_way_in_and_come_out_in_the_basis_of_the_model() {
    // Token by token, in chunks, and as a whole prompt cache: one basis, the model's, and the same codes.
    let (h, t, d) = (2, 700, 64);
    let (k, v) = (keys(&[1, h, t, d], 3), gauss(&[1, h, t, d], 4));
    let mut codes = vec![];
    for chunk in [1, 300, t] {
        let mut one = cache(&Cpu, "best@3", d);
        for a in (0..t).step_by(chunk) {
            let cut = |x: &Tensor| x.slice(2, a, t.min(a + chunk)).unwrap();
            one.append(&cut(&k), &cut(&v)).unwrap();
        }
        codes.push([packed(&one, true), packed(&one, false)]);
    }
    let layer = Compressor::new("best@3".parse().unwrap()).compress_layer(1, &k, &v).unwrap();
    let n = codes[0][0].shape()[2];
    assert!(n >= 384);
    for (i, side) in [&layer.key, &layer.value].into_iter().enumerate() {
        let whole = side.body.as_ref().unwrap().slice(0, n).unwrap();
        assert!(codes.iter().all(|c| same_codes(&c[i], &whole)), "side {i}");
    }
}

#[test]
fn t60_sides_are_turned_and_turned_back_each_for_itself() {
    let (h, t) = (2, 420);
    let attend = |recipe: &str, k: &Tensor, v: &Tensor| {
        let (d, dv) = (k.shape()[3], v.shape()[3]);
        let shape = LayerShape { key_dim: d, value_dim: dv };
        let recipe: Recipe = recipe.parse().unwrap();
        let mut cache = LayerCache::new(Cpu, &recipe, 1, shape).unwrap();
        cache.append(k, v).unwrap();
        let (q, scale) = (gauss(&[1, 2 * h, 3, d], 9), (d as f32).powf(-0.5));
        let got = cache.attend(&q, &Rules::causal(scale)).unwrap().to_f32().unwrap();
        let want = exact(&q, k, v, scale, |_, _, _, _| false);
        assert!(relative_mse(&want, &got) < 1e-3, "{recipe}: {}", relative_mse(&want, &got));
        [packed(&cache, true), packed(&cache, false)]
    };
    let (k, v) = (gauss(&[1, h, t, 64], 5), gauss(&[1, h, t, 64], 6));
    let recipe = |key: &str, value: &str| {
        format!("key=d128:b8:{key}:lloyd,value=d128:b8:{value}:lloyd,centred,sinks=4,window=32")
    };
    let [both, only_keys, only_values] =
        [["hadamard", "hadamard"], ["hadamard", "identity"], ["identity", "hadamard"]]
            .map(|[key, value]| attend(&recipe(key, value), &k, &v));
    // What one side does is nothing to the other.
    assert!(same_codes(&both[0], &only_keys[0]) && same_codes(&both[1], &only_values[1]));
    assert!(!same_codes(&both[1], &only_keys[1]) && !same_codes(&both[0], &only_values[0]));
    // Values that are the first channels of the keys: the output is turned back once.
    let k = gauss(&[1, h, t, 576], 7);
    attend(&recipe("hadamard", "hadamard"), &k, &k.slice(3, 0, 512).unwrap());
}

#[test]
fn t63_scales_come_through_every_door() {
    // Head h is 2^h times as loud, keys are halved and values doubled: a scale that is lost, taken from another head or from the
    // other side changes a norm by a factor of two.
    let (heads, t, d) = (4, 420, 64);
    let loud = |stream, side: f32| {
        let mut x = gauss(&[1, heads, t, d], stream).to_f32().unwrap();
        x.iter_mut().enumerate().for_each(|(i, x)| *x *= side * (1 << (i / (t * d))) as f32);
        Tensor::from_f32(Dtype::F16, &[1, heads, t, d], x).unwrap()
    };
    let (k, v) = (loud(11, 0.5), loud(12, 2.0));
    let close = |a: &Tensor, b: &Tensor| {
        let [a, b] = [a, b].map(|x| x.to_f32().unwrap());
        let heads = a.chunks_exact(t * d).zip(b.chunks_exact(t * d));
        heads.into_iter().all(|(a, b)| ((dot(a, a) / dot(b, b)).sqrt() - 1.0).abs() < 0.05)
    };
    assert!(!close(&k, &v) && !close(&v, &k), "exchanged sides are seen");
    let recipe = "best@4,sinks=4,window=0";
    let cache = prompt(&[(k.clone(), v.clone())]);
    let packed = pack(&cache, recipe);
    let once = unpack(&packed);
    let [(dk, dv)] = &rows(&once)[..] else { panic!() };
    assert!(close(dk, &k) && close(dv, &v), "decoded");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.tmq");
    packed.write(&path).unwrap();
    assert_eq!(unpack(&Archive::read(&path).unwrap()), once, "saved and loaded");

    let disk = SpillFolder::open(folder.path().join("pool")).unwrap();
    let pool = MemoryPool::with_spill(1 << 30, Box::new(disk)).unwrap();
    pool.allocate("a", "", 1.0).unwrap();
    pool.store("a", packed).unwrap();
    pool.spill("a").unwrap();
    assert_eq!(pool.stats().in_memory, 0);
    assert_eq!(unpack(&pool.get("a").unwrap()), once, "spilled");

    let home = tempfile::tempdir().unwrap();
    let server = Running::start(home.path(), "8MiB", recipe, false);
    let mut client = server.client();
    client.park("a", "", 1.0, &cache).unwrap();
    assert_eq!(client.resume("a").unwrap(), once, "through shared memory");

    // Attention reads packed rows as what they decode to, for one query and for several, in Rust and through C.
    let shape = LayerShape { key_dim: d, value_dim: d };
    let recipe: Recipe = recipe.parse().unwrap();
    let mut live = LayerCache::new(Cpu, &recipe, 0, shape).unwrap();
    live.append(&k, &v).unwrap();
    let (dk, dv) = live.fetch().unwrap();
    assert!(close(&dk, &k) && close(&dv, &v), "a live cache, dense");
    let scale = 0.01; // so that loud heads attend to many tokens too
    for l in [1, 3] {
        let q = gauss(&[1, heads, l, d], 13);
        let want = exact(&q, &dk, &dv, scale, |_, _, _, _| false);
        let got = live.attend(&q, &Rules::causal(scale)).unwrap().to_f32().unwrap();
        for (want, got) in want.chunks_exact(l * d).zip(got.chunks_exact(l * d)) {
            assert!(relative_mse(want, got) < 1e-4, "{l} queries: {}", relative_mse(want, got));
        }
        let by_token = |x: Vec<f32>| {
            Tensor::new(&[1, heads, l, d], x).unwrap().permute(&[0, 2, 1, 3]).unwrap().to_f32().unwrap()
        };
        assert_eq!(
            through_c(&recipe.to_string(), [&k, &v, &q], scale),
            by_token(got),
            "{l} queries through C"
        );
    }
}

/// Keys, values and queries [1, H, T, D] through the C API: the output by token, head and channel, in a buffer of its exact size.
fn through_c(recipe: &str, parts: [&Tensor; 3], scale: f32) -> Vec<f32> {
    let data = parts.map(|x| x.to_f32().unwrap());
    let [k, v, q] = [0, 1, 2].map(|i| {
        let [_, heads, tokens, head_dim] = *parts[i].shape() else { panic!() };
        tmq_rows {
            struct_size: size_of::<tmq_rows>(),
            data: data[i].as_ptr().cast(),
            dtype: TMQ_F32,
            heads,
            tokens,
            head_dim,
            token_stride: head_dim,
            head_stride: tokens * head_dim,
        }
    });
    let len = q.heads * q.tokens * v.head_dim;
    let mut out = vec![7f32; len + 8];
    let recipe = std::ffi::CString::new(recipe).unwrap();
    let mut cache = std::ptr::null_mut();
    // SAFETY: the rows lie inside `data`, `out` has more than `len` floats, the handle is freed once.
    unsafe {
        assert_eq!(tmq_cache_new(recipe.as_ptr(), 0, k.head_dim, v.head_dim, &mut cache), tmq_status::TMQ_OK);
        assert_eq!(tmq_cache_append(cache, &k, &v), tmq_status::TMQ_OK);
        assert_eq!(tmq_cache_attend(cache, &q, scale, out.as_mut_ptr(), len), tmq_status::TMQ_OK);
        tmq_cache_free(cache);
    }
    assert!(out.drain(len..).all(|x| x == 7.0), "written past the end");
    out
}

#[test]
fn a_spill_file_that_was_renamed_is_found_by_its_label() {
    let folder = tempfile::tempdir().unwrap();
    let open =
        || MemoryPool::with_spill(1 << 20, Box::new(SpillFolder::open(folder.path()).unwrap())).unwrap();
    let kv = |stream| half(&[1, 2, 300, 64], stream);
    let cache = pack(&prompt(&[(kv(1), kv(2))]), "turboquant-mse@4");
    let pool = open();
    pool.park("a", "chat", 2.0, cache.clone()).unwrap();
    pool.spill("a").unwrap();
    drop(pool);
    let file = files(folder.path(), ".tmq").remove(0);
    std::fs::rename(&file, folder.path().join("backup.tmq")).unwrap();
    let pool = open();
    assert_eq!((pool.stats().on_disk, pool.agents()[0].id.as_str()), (1, "a"));
    assert_eq!(rows(&unpack(&pool.get("a").unwrap())), rows(&unpack(&cache)));
    pool.remove("a").unwrap();
    assert!(files(folder.path(), ".tmq").is_empty());
}
