//! Damaged and inconsistent prompt-cache files (T41): a typed error at load that names the file and the value.

use proptest::prelude::*;
use std::path::{Path, PathBuf};
use turbomoq::Error;
use turbomoq::prompt_cache::{Layout, PromptCache};

/// One plain, one 4-bit and one rotating layer in the layout of 0.32; two tokens, 2 and 32 wide.
const HEADER: &str = r#"{"__metadata__":{"0.model":"m","1.0":"KVCache","1.1":"QuantizedKVCache","1.2":"RotatingKVCache",
"2.0":"","2.1.0":"0.2","2.1.1":"scalar","2.2.0":"1.2","2.2.1":"scalar","2.3.0":"1.3","2.3.1":"scalar",
"2.4.0":"1.4","2.4.1":"scalar","2.5.0":"2.2","2.5.1":"scalar","2.6.0":"2.3","2.6.1":"scalar",
"2.7.0":"2.4","2.7.1":"scalar","2.8.0":"2.5","2.8.1":"scalar"},
"0.0":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[0,8]},
"0.1":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[8,16]},
"0.2":{"dtype":"I32","shape":[],"data_offsets":[16,20]},
"1.0.0":{"dtype":"U32","shape":[1,1,2,4],"data_offsets":[20,52]},
"1.0.1":{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[52,56]},
"1.0.2":{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[56,60]},
"1.1.0":{"dtype":"U32","shape":[1,1,2,4],"data_offsets":[60,92]},
"1.1.1":{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[92,96]},
"1.1.2":{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[96,100]},
"1.2":{"dtype":"I32","shape":[],"data_offsets":[100,104]},
"1.3":{"dtype":"I32","shape":[],"data_offsets":[104,108]},
"1.4":{"dtype":"I32","shape":[],"data_offsets":[108,112]},
"2.0":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[112,120]},
"2.1":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[120,128]},
"2.2":{"dtype":"I32","shape":[],"data_offsets":[128,132]},
"2.3":{"dtype":"I32","shape":[],"data_offsets":[132,136]},
"2.4":{"dtype":"I32","shape":[],"data_offsets":[136,140]},
"2.5":{"dtype":"I32","shape":[],"data_offsets":[140,144]}}"#;

/// (byte of the data section, value) of every counter.
const COUNTERS: [(usize, i32); 8] =
    [(16, 2), (100, 2), (104, 32), (108, 4), (128, 3), (132, 0), (136, 2), (140, 1)];

fn file(header: &[u8], counters: &[(usize, i32)]) -> Vec<u8> {
    let mut data = [0; 144];
    for &(at, value) in COUNTERS.iter().chain(counters) {
        data[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    [&(header.len() as u64).to_le_bytes(), header, &data].concat()
}

fn load(bytes: &[u8]) -> (PathBuf, Result<PromptCache, Error>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    (file.path().to_path_buf(), PromptCache::read(file.path()))
}

/// The error must be about the format, name the file and contain `value`.
fn refused(bytes: &[u8], value: &str) {
    let (path, result) = load(bytes);
    let error = result.expect_err(value);
    let text = error.to_string();
    assert!(matches!(&error, Error::Format { path: p, .. } if *p == path), "{error:?}");
    assert!(text.contains(value) && text.contains(path.to_str().unwrap()), "{value:?} is not in: {text}");
}

#[test]
fn the_file_that_the_cases_damage_is_good() {
    let (_, cache) = load(&file(HEADER.as_bytes(), &[]));
    assert_eq!(cache.unwrap().layers.len(), 3);
}

#[test]
fn cut_anywhere() {
    let good = file(HEADER.as_bytes(), &[]);
    let header_end = 8 + HEADER.len();
    for (len, value) in [
        (0, "0 bytes"),
        (4, "4 bytes"),
        (8, "header length"),
        (8 + HEADER.len() / 2, "header length"),
        (header_end, "data_offsets [0, 8]"),
        (good.len() - 1, "data_offsets [140, 144]"),
    ] {
        refused(&good[..len], value);
    }
    refused(&[&good[..], b"x"].concat(), "145");
}

#[test]
fn header_length_is_wrong() {
    let good = file(HEADER.as_bytes(), &[]);
    for len in [1u64 << 63, u64::MAX, 0, 1, good.len() as u64, good.len() as u64 - 7] {
        refused(&[&len.to_le_bytes(), &good[8..]].concat(), &format!("header length {len} "));
    }
    let shorter = HEADER.len() as u64 - 1;
    refused(&[&shorter.to_le_bytes(), &good[8..]].concat(), "header: ");
}

#[test]
fn header_is_no_text() {
    let mut header = HEADER.as_bytes().to_vec();
    header[20] = 0xff;
    refused(&file(&header, &[]), "utf-8");
    refused(&file(b"[]", &[]), "header: ");
    let deep = "[".repeat(100_000);
    refused(&file(deep.as_bytes(), &[]), "header: ");
}

/// What is replaced in the header, by what, and what the error must say.
const CASES: [(&str, &str, &str); 38] = [
    (
        r#""0.0":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[0,8]"#,
        r#""0.0":{"dtype":"F16","shape":[1,1,2,2],"data_offsets":[8,0]"#,
        "data_offsets [8, 0]",
    ),
    ("[8,16]", "[4,16]", "data_offsets [4, 16]"),
    ("[8,16]", "[12,20]", "data_offsets [12, 20]"),
    ("[140,144]", "[140,148]", "data_offsets [140, 148]"),
    ("[140,144]", "[140,18446744073709551615]", "18446744073709551615"),
    ("[140,144]", "[140,-4]", "-4"),
    ("[8,16]", "[8,16,24]", "\"0.1\""),
    (
        r#""0.0":{"dtype":"F16","shape":[1,1,2,2]"#,
        r#""0.0":{"dtype":"F16","shape":[4294967296,4294967296,2,2]"#,
        "4294967296",
    ),
    (
        r#""0.0":{"dtype":"F16","shape":[1,1,2,2]"#,
        r#""0.0":{"dtype":"F16","shape":[1,1,2,3]"#,
        "12 bytes, not 8",
    ),
    (r#""0.0":{"dtype":"F16","shape":[1,1,2,2]"#, r#""0.0":{"dtype":"F16","shape":[1,1,-2,2]"#, "-2"),
    (r#""0.0":{"dtype":"F16","#, r#""0.0":{"dtype":"F13","#, "F13"),
    (r#""0.0":{"dtype":"F16","#, r#""0.0":{"dtype":"I16","#, "I16"),
    (r#""0.1":"#, r#""0.0":"#, "duplicate key \"0.0\""),
    (r#""1.1":"QuantizedKVCache""#, r#""1.0":"QuantizedKVCache""#, "duplicate metadata key \"1.0\""),
    (r#""0.model":"m""#, r#""0.model":7"#, "integer `7`"),
    (r#""0.1":"#, r#""0.3":"#, "[\"0\", \"2\", \"3\"]"),
    (r#""0.1":"#, r#""3.1":"#, "layer 3"),
    (r#""0.1":"#, r#""x":"#, "\"x\""),
    (r#""0.1":"#, r#""0.0.0":"#, "\"0.0.0\""),
    (r#""1.1.1":"#, r#""1.1.3":"#, "codes, scales and biases"),
    (
        r#""1.0.1":{"dtype":"F16","shape":[1,1,2,1]"#,
        r#""1.0.1":{"dtype":"F16","shape":[1,1,1,2]"#,
        "scales [1, 1, 1, 2]",
    ),
    (r#""1.0.1":{"dtype":"F16","#, r#""1.0.1":{"dtype":"BF16","#, "BF16"),
    (r#""1.0.0":{"dtype":"U32","#, r#""1.0.0":{"dtype":"I32","#, "I32"),
    (r#""1.0.0":{"dtype":"U32","shape":[1,1,2,4]"#, r#""1.0.0":{"dtype":"U32","shape":[2,4]"#, "[2, 4]"),
    (
        r#""1.0.0":{"dtype":"U32","shape":[1,1,2,4]"#,
        r#""1.0.0":{"dtype":"U32","shape":[1,1,1,8]"#,
        "[1, 1, 1, 8]",
    ),
    (r#""0.0":{"dtype":"F16","shape":[1,1,2,2]"#, r#""0.0":{"dtype":"F16","shape":[4]"#, "[4]"),
    (
        r#""0.0":{"dtype":"F16","shape":[1,1,2,2]"#,
        r#""0.0":{"dtype":"F16","shape":[1,2,2,1]"#,
        "[1, 2, 2, 1]",
    ),
    (r#""0.2":{"dtype":"I32","shape":[]"#, r#""0.2":{"dtype":"F32","shape":[]"#, "F32"),
    (r#""1.2":{"dtype":"I32","shape":[]"#, r#""1.2":{"dtype":"I32","shape":[1,1]"#, ""),
    (r#""2.1.1":"scalar""#, r#""2.1.1":"float""#, "\"float\""),
    (r#""2.1.1":"scalar""#, r#""2.1.1":"string""#, "offset is not stored as a scalar"),
    (r#""2.1.0":"0.2""#, r#""2.1.0":"0.7""#, "\"0.7\""),
    (r#""2.1.0":"0.2""#, r#""2.1.0":"0.0""#, ""),
    (r#""2.0":"","#, "", "metadata 2.0 is missing"),
    (r#""2.0":"","#, r#""2.0":"","3.0":"new","#, "\"3.0\""),
    (r#""2.0":"","#, r#""2.0":"KVCache","#, "not a prompt cache of mlx-lm 0.31 or 0.32"),
    (r#""1.0":"KVCache","#, "", "no list of class names"),
    (r#""1.2":"RotatingKVCache","#, "", "layer 2"),
];

#[test]
fn header_is_inconsistent() {
    for (from, to, value) in CASES {
        assert!(HEADER.contains(from), "{from}");
        let header = HEADER.replacen(from, to, 1);
        if value.is_empty() {
            let (_, result) = load(&file(header.as_bytes(), &[]));
            // A scalar of shape [1, 1] is the same number; a table entry for keys is not.
            assert_eq!(result.is_ok(), to.contains("[1,1]"), "{to}");
        } else {
            refused(&file(header.as_bytes(), &[]), value);
        }
    }
    refused(&file(HEADER.replace("__metadata__", "0.9").as_bytes(), &[]), "0.9");
}

#[test]
fn counters_do_not_fit() {
    for (at, value, text) in [
        (16, 3, "offset = 3"),
        (16, -1, "offset = \"-1\""),
        (16, i32::MAX, "offset = 2147483647"),
        (100, 3, "offset = 3"),
        (100, -2, "offset = \"-2\""),
        (104, 0, "group_size = 0"),
        (104, 48, "group_size = 48"),
        (104, 64, "groups of 64"),
        (104, -32, "group_size = \"-32\""),
        (108, 0, "bits = 0"),
        (108, 33, "bits = 33"),
        (108, 7, "bits = 7"),
        (108, 8, "8 bits"),
        (108, -4, "bits = \"-4\""),
        (128, 1, "offset = 1"),
        (128, -3, "offset = \"-3\""),
        (132, 9, "keep = 9"),
        (136, 0, "max_size = 0"),
        (140, 3, "idx = 3"),
        (140, -1, "idx = \"-1\""),
    ] {
        // offset = 1 of the ring cuts its rows to one, and idx = 1 fits that; idx = 2 does not.
        let mut counters = vec![(at, value)];
        if at == 128 && value == 1 {
            counters.push((140, 2));
            refused(&file(HEADER.as_bytes(), &counters), "idx = 2");
        } else {
            refused(&file(HEADER.as_bytes(), &counters), text);
        }
    }
}

#[test]
fn old_layout_with_wrong_meta_states() {
    let header = |meta: &str| {
        format!(
            r#"{{"__metadata__":{{{meta},"2.0":"QuantizedKVCache"}},
"0.0.0":{{"dtype":"U32","shape":[1,1,2,4],"data_offsets":[0,32]}},"0.0.1":{{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[32,36]}},
"0.0.2":{{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[36,40]}},"0.1.0":{{"dtype":"U32","shape":[1,1,2,4],"data_offsets":[40,72]}},
"0.1.1":{{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[72,76]}},"0.1.2":{{"dtype":"F16","shape":[1,1,2,1],"data_offsets":[76,80]}},
"pad":{{"dtype":"U8","shape":[64],"data_offsets":[80,144]}}}}"#
        )
        .replace(",\n\"pad\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[80,144]}", "")
    };
    let bytes = |meta: &str| {
        let header = header(meta);
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 80]].concat()
    };
    let good = r#""0.0.0":"2","0.0.1":"32","0.0.2":"4""#;
    assert!(load(&bytes(good)).1.is_ok());
    for (from, to, value) in [
        ("\"2\"", "\"3\"", "offset = 3"),
        ("\"2\"", "\"-2\"", "offset = \"-2\""),
        ("\"2\"", "\"99999999999999999999\"", "99999999999999999999"),
        ("\"4\"", "\"33\"", "bits = 33"),
        ("\"32\"", "\"0\"", "group_size = 0"),
        (",\"0.0.2\":\"4\"", "", "meta state"),
        ("\"0.0.2\"", "\"0.0.x\"", "\"x\""),
        ("\"0.0.2\"", "\"5.0.2\"", "5.0.2"),
        ("\"0.0.2\"", "\"0.4\"", "layer 4"),
    ] {
        assert!(good.contains(from));
        refused(&bytes(&good.replacen(from, to, 1)), value);
    }
}

#[test]
fn foreign_files_say_what_was_found() {
    let header =
        br#"{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[144],"data_offsets":[0,144]}}"#;
    refused(&file(header, &[]), "\"format\"");
    let header = br#"{"__metadata__":null,"w":{"dtype":"U8","shape":[144],"data_offsets":[0,144]}}"#;
    refused(&file(header, &[]), "metadata 2.0 is missing");
    let missing = PromptCache::read("/nowhere/x.safetensors").unwrap_err();
    assert!(matches!(&missing, Error::Io { path, .. } if path == Path::new("/nowhere/x.safetensors")));
}

/// A file of the layout of 0.31: metadata as given, and tensors F16 [1, 1, 2, 4] of these names.
fn old_file(metadata: &str, tensors: &[&str]) -> Vec<u8> {
    let tensor = |(i, name): (usize, &&str)| {
        format!(
            r#","{name}":{{"dtype":"F16","shape":[1,1,2,4],"data_offsets":[{},{}]}}"#,
            16 * i,
            16 * i + 16
        )
    };
    let tensors_text: String = tensors.iter().enumerate().map(tensor).collect();
    let header = format!(r#"{{"__metadata__":{{{metadata}}}{tensors_text}}}"#);
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; 16 * tensors.len()]].concat()
}

#[test]
fn files_of_swift_apps_are_refused_by_name_and_nothing_is_lost() {
    let cases: [(&str, &[&str]); 10] = [
        (r#""0.0.0":"","2.0":"KVCache""#, &["0.0", "0.1"]),
        (r#""0.0.0":"","2.0":"KVCache""#, &[]),
        (
            r#""0.0.0":"0","0.0.1":"8","0.0.2":"256","0.0.3":"2","0.0.4":"2","2.0":"RotatingKVCache""#,
            &["0.0", "0.1"],
        ),
        (
            r#""0.0.0":"0","0.0.1":"8","0.0.2":"256","0.0.3":"2","0.0.4":"2","0.0.5":"model","2.0":"RotatingKVCache""#,
            &["0.0", "0.1"],
        ),
        (
            r#""0.0.0":"256","0.0.1":"2","0.0.2":"64","0.0.3":"4","2.0":"QuantizedKVCache""#,
            &["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"],
        ),
        // Of two arrays only the second is there.
        (r#""0.0.0":"2","0.0.1":"1","2.0":"ArraysCache""#, &["0.0"]),
        (r#""0.0.0":"2","0.0.1":"1","2.0":"MambaCache""#, &["0.0"]),
        (r#""0.0.0":"2","0.0.1":"KVCache","0.0.2":"2","2.0":"CacheList""#, &["0.0", "0.1"]),
        (r#""0.0.0":"","1.__mlx_lm_state_count":"1","2.0":"__mlx_lm_state_v1__:KVCache""#, &["0.0", "0.1"]),
        (
            r#""0.0":"","1.__mlx_lm_state_count":"1","2.0":"__mlx_lm_state_v1__:KVCache""#,
            &["0.0", "0.1", "__mlx_lm_state_tensor_0"],
        ),
    ];
    for (metadata, tensors) in cases {
        refused(&old_file(metadata, tensors), "written by mlx-swift-lm: ");
    }
    // The same arrays with mlx-lm's own meta states are read.
    let (_, cache) =
        load(&old_file(r#""0.0":"","0.1":"","2.0":"KVCache","2.1":"ArraysCache""#, &["0.0", "0.1", "1.0"]));
    assert_eq!(cache.unwrap().layers.len(), 2);
}

#[test]
fn deep_lists_do_not_overflow_the_stack() {
    let name = vec!["0"; 200_000].join(".");
    let header = format!(
        r#"{{"__metadata__":{{"2.0":"CacheList","0.{name}":""}},"{name}":{{"dtype":"U8","shape":[144],"data_offsets":[0,144]}}}}"#
    );
    refused(&file(header.as_bytes(), &[]), "deeper than");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is done to a good file: an error or a cache that can be used and written, never a panic.
    #[test]
    fn no_damage_panics(
        which in 0usize..4,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 0..6),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..3),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let names = ["pc031_mixed", "pc032_mixed", "pc032_empty", "pc031_chunked"];
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let mut bytes = std::fs::read(folder.join(names[which]).with_extension("safetensors")).unwrap();
        let header = 8 + usize::from(bytes[0]) + 256 * usize::from(bytes[1]);
        for (at, value, everywhere) in flips {
            // Three of four go to the header, where they do more.
            let at = at.index(if everywhere == 0 { bytes.len() } else { header });
            bytes[at] = value;
        }
        let places: Vec<_> = (8..header).filter(|&i| bytes[i].is_ascii_digit()).collect();
        for (at, digit) in digits {
            bytes[places[at.index(places.len())]] = digit;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let (_, result) = load(&bytes);
        if let Ok(cache) = result {
            let out = tempfile::NamedTempFile::new().unwrap();
            for layout in [Layout::V031, Layout::V032] {
                if cache.write(out.path(), layout).is_ok() {
                    let again = PromptCache::read(out.path()).unwrap();
                    prop_assert_eq!(again.layers.len(), cache.layers.len());
                }
            }
            for layer in &cache.layers {
                if let Some(kv) = layer.attention_kv().unwrap() {
                    let _ = layer.with_kv(&kv);
                }
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn neither_a_sparse_file_nor_a_fifo_in_the_place_of_a_file_costs_memory_or_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let header: u64 = (4 << 30) - 8;
    std::fs::write(&path, header.to_le_bytes()).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4 << 30).unwrap();
    match PromptCache::read(&path) {
        Err(Error::Format { detail, .. }) => assert!(detail.contains("header length"), "{detail}"),
        other => panic!("{other:?}"),
    }
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    match PromptCache::read(&path) {
        Err(Error::Io { source, .. }) => assert!(source.to_string().contains("regular"), "{source}"),
        other => panic!("{other:?}"),
    }
}
