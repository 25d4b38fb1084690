//! The built program on a real cache: what each command prints and writes, exit codes, and what an error says.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use turbomoq::PRESETS;
use turbomoq::prompt_cache::{Layout, PromptCache};

/// A folder of its own with the sample in it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/smollm2_250.safetensors");
        std::fs::copy(sample, place.path("in.safetensors")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.0.path()).unwrap().map(|e| e.unwrap().file_name());
        let mut names: Vec<String> = names.map(|n| n.into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn run(&self, arguments: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_turbomoq"));
        command.current_dir(self.0.path()).args(arguments.split_whitespace()).output().unwrap()
    }

    fn good(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments}: {}", text(output.stderr));
        assert!(output.stderr.is_empty(), "{arguments}: {}", text(output.stderr));
        text(output.stdout)
    }

    fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.good(&format!("{arguments} --json"))).unwrap()
    }

    /// A command that fails with `code`, prints nothing to standard output, and whose message has every one of `words`.
    fn bad(&self, arguments: &str, code: i32, words: &[&str]) {
        let before = self.names();
        let output = self.run(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments}: {error}");
        assert!(output.stdout.is_empty(), "{arguments}");
        for word in words {
            assert!(error.contains(word), "{arguments}: {word:?} is not in: {error}");
        }
        assert_eq!(self.names(), before, "{arguments}: a failed command leaves no file");
    }
}

#[test]
fn a_damaged_file_is_refused_and_what_it_holds_comes_back_without_verification() {
    let place = Place::new();
    place.good("compress in.safetensors -o a.tmq");
    let mut bytes = std::fs::read(place.path("a.tmq")).unwrap();
    // The last bytes are codes or scales of some layer.
    let at = bytes.len() - 5000;
    bytes[at] ^= 4;
    std::fs::write(place.path("b.tmq"), bytes).unwrap();
    for command in ["restore b.tmq -o x", "inspect b.tmq"] {
        place.bad(command, 1, &["b.tmq", "is damaged", "checksum"]);
    }
    place.good("restore b.tmq --no-verify -o x");
    place.good("inspect b.tmq --no-verify");
}

#[test]
fn a_restored_file_is_packed_with_the_frames_it_came_from() {
    let place = Place::new();
    let options = "--recipe best@4,sinks=0,window=0";
    place.good(&format!("compress in.safetensors -o 0.tmq {options}"));
    for i in 0..2 {
        place.good(&format!("restore {i}.tmq -o {i}.safetensors"));
        place.good(&format!("compress {i}.safetensors -o {}.tmq {options}", i + 1));
    }
    let centre = |name: &str| {
        let archive = turbomoq::archive::Archive::read(place.path(name)).unwrap();
        let (_, _, layer) = archive.packed()[7];
        layer.key.body.as_ref().unwrap().frame().centre.clone().unwrap()
    };
    assert_eq!(centre("2.tmq"), centre("0.tmq"));
    // With the first file at hand the codes stay as they are, by any recipe.
    let prod = "--recipe turboquant-prod@3,sinks=0,window=0";
    place.good(&format!("compress in.safetensors -o a.tmq {prod}"));
    place.good("restore a.tmq -o b.safetensors");
    place.good(&format!("compress b.safetensors -o b.tmq {prod} --after a.tmq"));
    assert!(std::fs::read(place.path("a.tmq")).unwrap() == std::fs::read(place.path("b.tmq")).unwrap());
}

#[test]
fn layers_at_different_tokens_are_shown_and_packed_only_if_that_is_meant() {
    let place = Place::new();
    let mut cache = PromptCache::read(place.path("in.safetensors")).unwrap();
    let turbomoq::prompt_cache::Layer::Kv { kv: Some(kv), .. } = &mut cache.layers[1] else { panic!() };
    (kv.keys, kv.values) = (kv.keys.slice(2, 0, 249).unwrap(), kv.values.slice(2, 0, 249).unwrap());
    cache.write(place.path("odd.safetensors"), cache.layout).unwrap();
    place.bad("compress odd.safetensors -o x.tmq", 1, &["249 in layer 1 (KVCache)", "250", "--uneven"]);
    let text = place.good("inspect odd.safetensors");
    assert!(text.contains("249 (!)") && text.matches("(!)").count() == 2, "{text}");
    place.good("compress odd.safetensors -o x.tmq --uneven");
    let packed = place.json("inspect x.tmq");
    let odd = |i: usize| (packed["layers"][i]["offset"].as_u64(), packed["layers"][i]["odd"].as_bool());
    assert_eq!([odd(0), odd(1)], [(Some(250), Some(false)), (Some(249), Some(true))]);
}

#[test]
fn compress_inspect_and_restore() {
    let place = Place::new();
    let text = place.good("compress in.safetensors");
    for word in ["30 of 30 layers", "recipe: key=", "in.tmq", "cpu engine"] {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    let figures = place
        .json("compress in.safetensors -o b.tmq --recipe turboquant-mse --bits 4/2 --sinks 2 --window 0");
    let file = std::fs::metadata(place.path("b.tmq")).unwrap().len();
    assert_eq!(figures["file_bytes"], file);
    assert_eq!((&figures["layers"], &figures["packed_layers"]), (&Value::from(30), &Value::from(30)));
    let recipe = figures["recipe"].as_str().unwrap();
    assert!(recipe.contains("d128:b4") && recipe.contains("d128:b2") && recipe.ends_with("sinks=2,window=0"));
    // The same bytes every time.
    let again = "compress in.safetensors -o c.tmq --recipe turboquant-mse@4/2,sinks=2 --window 0";
    place.good(again);
    assert!(std::fs::read(place.path("b.tmq")).unwrap() == std::fs::read(place.path("c.tmq")).unwrap());

    let (source, packed) = (place.json("inspect in.safetensors"), place.json("inspect b.tmq"));
    assert_eq!(source["format"], "mlx-lm prompt cache");
    assert_eq!(packed["layers"].as_array().unwrap().len(), 30);
    assert_eq!(source["layout"], packed["layout"]);
    assert!(packed["bytes"].as_u64().unwrap() * 4 < source["bytes"].as_u64().unwrap());
    assert!(place.good("inspect in.tmq").contains("KVCache"));

    let restored = place.json("restore in.tmq");
    assert_eq!(restored["layers"], 30);
    let (a, b) = (
        PromptCache::read(place.path("in.safetensors")).unwrap(),
        PromptCache::read(place.path("in.restored.safetensors")).unwrap(),
    );
    assert_eq!((a.layout, &a.metadata, a.layers.len()), (b.layout, &b.metadata, b.layers.len()));
    // The other release's layout, and an exact recipe, which loses nothing.
    for layout in [Layout::V031, Layout::V032] {
        place.good("compress in.safetensors -o exact.tmq --bits 16");
        place.good(&format!("restore exact.tmq -o exact.safetensors --layout {layout}"));
        let exact = PromptCache::read(place.path("exact.safetensors")).unwrap();
        assert_eq!(exact.layout, layout);
        assert_eq!(exact.layers, a.layers);
    }
}

#[test]
fn verify_says_what_every_layer_lost() {
    let place = Place::new();
    let report = place.json("verify in.safetensors --recipe turboquant-mse --sinks 0 --window 0");
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("{v} is no number"));
    assert!(report["recipe"].is_string());
    let rows = report["layers"].as_array().unwrap();
    assert_eq!(rows.len(), 60);
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(row["layer"], (i / 2).to_string());
        assert_eq!(row["side"], ["key", "value"][i % 2]);
        assert!((0.994..1.0).contains(&number(&row["cosine"])), "{row}");
        assert!((0.0..0.012).contains(&number(&row["relative_mse"])), "{row}");
        assert!((0.9..1.0).contains(&number(&row["logit_correlation"])), "{row}");
    }
    let [reported, file, fp16] = ["reported_bytes", "file_bytes", "fp16_bytes"].map(|k| number(&report[k]));
    assert!(file >= reported && file < 1.02 * reported, "{file} bytes of file, {reported} reported");
    assert_eq!(number(&report["ratio"]), fp16 / reported);
    assert!(number(&report["ratio"]) > 3.7, "{}", report["ratio"]);
    assert!(number(&report["encode_ms"]) > 0.0 && number(&report["decode_ms"]) > 0.0);
    // Nothing is written beside the input, and the figures are those of `compress`.
    assert_eq!(place.names(), ["in.safetensors"]);
    let packed = place.json("compress in.safetensors --recipe turboquant-mse --sinks 0 --window 0");
    assert_eq!(
        (&packed["file_bytes"], &packed["reported_bytes"]),
        (&report["file_bytes"], &report["reported_bytes"])
    );

    let table = place.good("verify in.safetensors --bits 3");
    for word in ["logit correlation", "mean", "recipe: key=", "ratio"] {
        assert!(table.contains(word), "{word:?} is not in: {table}");
    }
    // Queries from a file: rows of zeros correlate with nothing, so they must change the figure of their layer and no other.
    let zeros = turbomoq::Tensor::new(&[1, 9, 2, 64], vec![0f32; 9 * 2 * 64]).unwrap();
    let bytes = zeros.row_major_bytes();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1, 9, 2, 64], &bytes).unwrap();
    std::fs::write(place.path("q.safetensors"), safetensors::serialize([("3", view)], None).unwrap())
        .unwrap();
    let with = place
        .json("verify in.safetensors --recipe turboquant-mse --sinks 0 --window 0 --queries q.safetensors");
    for (i, (a, b)) in rows.iter().zip(with["layers"].as_array().unwrap()).enumerate() {
        assert_eq!(a["logit_correlation"] != b["logit_correlation"], i == 6, "{a} {b}");
    }
    place.bad("verify in.safetensors --queries nowhere.safetensors", 1, &["nowhere.safetensors"]);
}

#[test]
fn a_budget_is_spread_over_heads() {
    let place = Place::new();
    let plan = place.json("plan --budget 3 in.safetensors");
    let text = |plan: &Value, key: &str| plan[key].as_str().unwrap().to_string();
    assert!(text(&plan, "source").contains("in.safetensors"));
    let mean = (plan["mean"][0].as_f64().unwrap() + plan["mean"][1].as_f64().unwrap()) / 2.0;
    assert!(mean <= 3.0 && mean > 2.9, "{mean}");
    assert!(plan["mean"][0].as_f64() > plan["mean"][1].as_f64(), "keys count more");
    assert!(plan["loss"].as_f64() < plan["uniform_loss"].as_f64());
    // The same from a table on disk, and the recipe packs the cache where the heads of a layer share a width.
    place.good("calibrate in.safetensors --out table");
    let again = place.json("plan --budget 3 --calibration table");
    assert_eq!(text(&again, "recipe"), text(&plan, "recipe"));
    let layers = place.json("plan --budget 3 --by layer --least 2 --calibration table in.safetensors");
    place.good(&format!("compress in.safetensors -o packed --recipe {}", text(&layers, "recipe")));
    assert_eq!(text(&place.json("inspect packed"), "recipe"), text(&layers, "recipe"));
    // The original's rule keeps the budget and loses more.
    let hubs = place.json("plan --budget 3 --rule hubs in.safetensors");
    assert!(hubs["loss"].as_f64() > plan["loss"].as_f64());
    assert!(place.good("plan --budget 2.5 --calibration table").contains('▃'));
    place.bad("plan --budget 0.5 in.safetensors", 1, &["budget", "0.5"]);
    place.bad("plan --budget 3", 1, &["budget", "--calibration"]);
    place.bad("plan --budget 3 --calibration in.safetensors", 1, &["in.safetensors", "format"]);
    place.bad("plan --budget 3 --rule hubs --calibration table", 1, &["hubs"]);
    place.bad(&format!("compress in.safetensors -o other --recipe {}", text(&plan, "recipe")), 1, &["layer"]);
}

#[test]
fn recipes_lists_every_preset() {
    let place = Place::new();
    let text = place.good("recipes");
    for (name, what) in PRESETS {
        assert!(
            text.contains(name) && what.split(' ').next().is_some_and(|w| text.contains(w)),
            "{name}: {text}"
        );
        place.good(&format!("compress in.safetensors --recipe {name} -o {name}.tmq"));
    }
}

#[test]
fn errors_name_the_file_and_the_value() {
    let place = Place::new();
    std::fs::write(place.path("cut.tmq"), b"12345").unwrap();
    let mut bytes = std::fs::read(place.path("in.safetensors")).unwrap();
    bytes.truncate(100_000);
    std::fs::write(place.path("cut.safetensors"), bytes).unwrap();
    place.good("compress in.safetensors -o good.tmq");

    for (arguments, words) in [
        ("compress nowhere.safetensors", &["nowhere.safetensors"][..]),
        ("compress cut.safetensors", &["cut.safetensors", "data_offsets"]),
        ("compress cut.tmq -o x", &["cut.tmq", "5 bytes"]),
        ("compress good.tmq -o x", &["good.tmq"]),
        ("compress in.safetensors -o nowhere/x.tmq", &["nowhere/x.tmq"]),
        ("compress in.safetensors -o in.safetensors/x.tmq", &["in.safetensors/x.tmq"]),
        ("compress in.safetensors --recipe bset", &["recipe", "bset", "turboquant-mse"]),
        ("compress in.safetensors --recipe best@4/4/4", &["bits", "4/4/4"]),
        ("compress in.safetensors --recipe best,sink=4", &["sink=4"]),
        ("compress in.safetensors --recipe key=d128:b4:hadamart", &["hadamart"]),
        ("compress in.safetensors --bits 3.3", &["bits", "3.3"]),
        ("compress in.safetensors --bits 9", &["bits", "9"]),
        ("compress in.safetensors --bits four", &["bits", "four"]),
        ("restore nowhere.tmq", &["nowhere.tmq"]),
        ("restore cut.tmq", &["cut.tmq", "5 bytes"]),
        ("restore in.safetensors", &["in.safetensors", "not a turbomoq file"]),
        ("inspect cut.tmq", &["cut.tmq", "5 bytes"]),
        ("verify good.tmq", &["good.tmq"]),
    ] {
        place.bad(arguments, 1, words);
    }
    for (arguments, word) in [
        ("", "Usage"),
        ("pack in.safetensors", "pack"),
        ("compress", "INPUT"),
        ("compress in.safetensors --engine tpu", "tpu"),
        ("compress in.safetensors --sinks -1", "-1"),
        ("restore good.tmq --layout 0.40", "0.40"),
        ("compress in.safetensors --window many", "many"),
    ] {
        place.bad(arguments, 2, &[word]);
    }
}

#[test]
fn an_input_is_never_its_own_output() {
    let place = Place::new();
    let before = std::fs::read(place.path("in.safetensors")).unwrap();
    std::fs::create_dir(place.path("d")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(place.path("in.safetensors"), place.path("link")).unwrap();
    for same in [
        "in.safetensors",
        "./in.safetensors",
        "d/../in.safetensors",
        #[cfg(unix)]
        "link",
    ] {
        place.bad(&format!("compress in.safetensors -o {same}"), 1, &[same, "same file"]);
    }
    place.good("compress in.safetensors");
    place.bad("restore in.tmq -o in.tmq", 1, &["in.tmq", "same file"]);
    assert_eq!(std::fs::read(place.path("in.safetensors")).unwrap(), before);
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_old_file() {
    // A limit on the size of files stands for the disk; with the signal ignored the write fails as on a full one.
    let place = Place::new();
    place.good("compress in.safetensors -o out.tmq --bits 2");
    let before = std::fs::read(place.path("out.tmq")).unwrap();
    let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" compress in.safetensors -o out.tmq --bits 4";
    let mut shell = Command::new("sh");
    let output =
        shell.current_dir(place.0.path()).args(["-c", script, env!("CARGO_BIN_EXE_turbomoq")]).output();
    let output = output.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("out.tmq"), "{error}");
    assert_eq!(std::fs::read(place.path("out.tmq")).unwrap(), before);
    assert_eq!(place.names(), ["in.safetensors", "out.tmq"], "no temporary file is left");
}

#[test]
fn bench_checks_before_it_times_and_draws_what_it_timed() {
    let place = Place::new();
    let sizes =
        "bench --recipes turbomoq@4 best@3 --tokens 300 40 --heads 1 --group 2 --head-dim 64 --budget-ms 1";
    let output = place.json(&format!("{sizes} --svg times.svg"));
    let list = |name: &str| output[name].as_array().unwrap().clone();
    let engines = if cfg!(feature = "mlx") { 2 } else { 1 };
    // Exact rows and two recipes: two checks and two lengths each on every engine.
    assert_eq!((list("checks").len(), list("cells").len()), (engines * 6, engines * 6));
    assert!(list("checks").iter().all(|c| c["error"].as_f64() <= c["bound"].as_f64()));
    assert!(list("cells").iter().all(|c| c["ms"].as_f64() > Some(0.0) && c["bytes"].as_u64() > Some(0)));
    assert_eq!(list("crossovers").len(), engines * 2);
    let svg = std::fs::read_to_string(place.path("times.svg")).unwrap();
    assert!(svg.contains("best@3") && svg.contains("polyline"));
    let table = place.good(sizes);
    assert!(table.contains("checks passed") && table.contains("exact fp16"), "{table}");
    place.bad("bench --heads 0", 1, &["heads = 0"]);
    place.bad("bench --recipes nothing@4", 1, &["nothing"]);
}

/// Commands that print without a server, on the sample.
const PRINTERS: [&str; 7] = [
    "recipes",
    "inspect in.safetensors",
    "inspect in.safetensors --json",
    "compare in.safetensors --recipes uniform@4",
    "plan in.safetensors",
    "capacity --model qwen3-8b",
    "verify in.safetensors",
];

#[cfg(unix)]
#[test]
fn a_reader_that_has_gone_ends_a_command_quietly() {
    let place = Place::new();
    place.good("compress in.safetensors");
    for arguments in PRINTERS {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_turbomoq"));
        command.current_dir(place.0.path()).args(arguments.split_whitespace()).stdout(writer);
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && error.is_empty(), "{arguments}: {} {error}", output.status);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_the_output_is_an_error_like_others() {
    let place = Place::new();
    place.good("compress in.safetensors");
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for arguments in PRINTERS {
        let mut command = Command::new(env!("CARGO_BIN_EXE_turbomoq"));
        command.current_dir(place.0.path()).args(arguments.split_whitespace()).stdout(full());
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments}: {error}");
        assert!(
            error.starts_with("turbomoq: standard output:") && error.lines().count() == 1,
            "{arguments}: {error}"
        );
    }
    // Not even the complaint can be written.
    let mut command = Command::new(env!("CARGO_BIN_EXE_turbomoq"));
    let status = command.args(["inspect", "absent"]).stdout(full()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn names_in_files_do_not_steer_the_terminal() {
    let place = Place::new();
    let mut cache = PromptCache::read(place.path("in.safetensors")).unwrap();
    cache.metadata.insert("a\u{1b}[31m".into(), "b\n\u{9b}2Jc\u{202e}".into());
    cache.write(place.path("odd.safetensors"), Layout::V031).unwrap();
    let text = place.good("inspect odd.safetensors");
    assert!(text.contains(r"a\u{1b}[31m: b\n\u{9b}2Jc\u{202e}"), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
}

#[test]
fn numbers_without_bound_are_refused_and_not_wrapped() {
    let place = Place::new();
    place.bad("compress in.safetensors --recipe best@4,window=18446744073709551615", 1, &["window"]);
    place.bad("compress in.safetensors --recipe best@4,sinks=18446744073709551615", 1, &["sinks"]);
    place.bad("compress in.safetensors --window 18446744073709551615", 1, &["window"]);
    place.bad("compress in.safetensors --sinks 18446744073709551615", 1, &["sinks"]);
    place.bad(
        "plan --tokens 67108864 --layers 67108864 --kv-heads 67108864",
        1,
        &["67108864 layers", "heads"],
    );
    let plan =
        place.json("plan --tokens 67108864 --layers 65536 --kv-heads 65536 --head-dim 512 --policy none");
    assert!(
        plan["fp16_bytes"].as_u64().unwrap() == u64::MAX && plan["bytes"].as_u64().unwrap() > 1 << 60,
        "{plan}"
    );
    // More memory than there is, answered at once.
    let rows = place.json("capacity --memory 1e17");
    assert!(
        rows["rows"].as_array().unwrap().iter().all(|row| row["context"].as_u64().unwrap() >= 1 << 25),
        "{rows}"
    );
}
