//! Every command's screen at 80 columns, as files under `tests/screens`, and the JSON of each, as `docs/json.md` says.
//!
//! `UPDATE_SCREENS=1 cargo test --bin turbomoq` writes the screens anew; look at them before they are kept.

use super::screen::AnyAnswer;
use super::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use turbomoq::internals::io::files;

/// What is run on the sample, in an order in which later ones may read what earlier ones wrote.
const RUNS: [(&str, &str); 22] = [
    ("compress", "compress in.safetensors --engine cpu"),
    (
        "compress-verbose",
        "compress in.safetensors -o v.tmq --engine cpu --recipe turboquant-mse@3/2 --verbose",
    ),
    ("inspect", "inspect in.tmq"),
    ("inspect-verbose", "inspect v.tmq --verbose"),
    ("inspect-cache", "inspect in.safetensors"),
    ("restore", "restore in.tmq --engine cpu"),
    ("verify", "verify in.safetensors --engine cpu"),
    ("compare", "compare in.safetensors --engine cpu --recipes mlx-affine@4 best@4 best@2"),
    ("calibrate", "calibrate in.safetensors --out table"),
    ("plan", "plan --budget-mib 4096"),
    ("plan-budget", "plan --budget 3 --calibration table"),
    ("plan-layers", "plan --budget 3 --by layer --calibration table"),
    ("plan-stored", "plan --stored 3 --calibration table"),
    ("plan-budget-verbose", "plan --budget 3 --calibration table --verbose"),
    ("capacity", "capacity"),
    ("capacity-original", "capacity --original --model qwen3-8b"),
    ("capacity-config", "capacity --config qwen3-next/config.json --weights 4.5GB --recipe best@3"),
    ("recipes", "recipes"),
    ("recipes-verbose", "recipes --verbose"),
    ("recipes-best", "recipes best@3"),
    ("recipes-kivi", "recipes kivi@2"),
    ("recipes-plan", "recipes best@4,key-bits=3-4,value-bits=2-16"),
];
/// A run whose screen is full of times, for its JSON alone.
const UNSEEN: [&str; 1] = ["turbomoq plan --measure --layers 1 --kv-heads 1 --head-dim 64 --tokens 600"];
/// Runs whose tables once more go into a window of 40 columns.
const NARROW: [&str; 4] = ["compress", "inspect", "capacity-config", "recipes"];
const CONFIG: &str = r#"{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "model_type": "qwen3_next"}"#;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/screens")
}

/// The text with the digits of every time as `#`.
fn without_times(text: &str) -> String {
    let mut out: Vec<String> = vec![];
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let timed = |i: usize| {
            let number = words[i].parse::<f64>().is_ok();
            number && words.get(i + 1).is_some_and(|next| next.trim_end_matches([',', '.']) == "ms")
        };
        let word = |(i, word): (usize, &&str)| if timed(i) { "#".to_string() } else { word.to_string() };
        out.push(words.iter().enumerate().map(word).collect::<Vec<_>>().join(" "));
    }
    out.join("\n") + "\n"
}

/// Compares with the file of that name, or writes it.
fn hold(name: &str, screen: &str, wrong: &mut String) {
    let path = folder().join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_SCREENS").is_some() {
        files::replace(&path, &[screen.as_bytes()]).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if kept != screen {
        let _ = write!(wrong, "\n{}:\n{kept}\nis now\n{screen}", path.display());
    }
}

fn answers() -> Vec<(String, Box<dyn AnyAnswer>, bool)> {
    let mut answers = vec![];
    for (name, line) in RUNS {
        let words = std::iter::once("turbomoq").chain(line.split(' '));
        let Cli { wishes, command } = Cli::try_parse_from(words).unwrap();
        let answer = compute(command, wishes).unwrap_or_else(|e| panic!("{line}: {e}")).unwrap();
        answers.push((name.to_string(), answer, wishes.verbose));
    }
    for (i, line) in UNSEEN.into_iter().enumerate() {
        let Cli { wishes, command } = Cli::try_parse_from(line.split(' ')).unwrap();
        answers.push((format!("plan-unseen-{i}"), compute(command, wishes).unwrap().unwrap(), false));
    }
    answers.extend(samples().into_iter().map(|(name, answer)| (name.to_string(), answer, false)));
    answers
}

/// Answers with given figures, of the commands that time or ask a server.
fn samples() -> Vec<(&'static str, Box<dyn AnyAnswer>)> {
    let cell = |recipe: &str, ms: f64| bench::Cell {
        engine: "cpu",
        recipe: recipe.into(),
        tokens: 8192,
        ms,
        times_exact: 2.5 / ms,
        bytes: 33_554_432,
        gb_per_s: 13.4,
    };
    let timed = bench::Output {
        batch: 1,
        heads: 8,
        group: 4,
        head_dim: 128,
        threads: 2,
        gpu: false,
        checks: vec![bench::Check { engine: "cpu", recipe: "best@3".into(), error: 1e-3, bound: 3e-3 }],
        cells: vec![cell("exact fp16", 2.5), cell("best@3", 1.0)],
        crossovers: vec![
            bench::FasterFrom { engine: "cpu", recipe: "best@3".into(), tokens: Some(8192) },
            bench::FasterFrom { engine: "cpu", recipe: "kivi@2".into(), tokens: None },
        ],
    };
    #[allow(unused_mut)] // some commands are not built everywhere
    let mut samples: Vec<(&'static str, Box<dyn AnyAnswer>)> = vec![("bench", Box::new(timed))];
    #[cfg(feature = "mlx")]
    {
        use turbomoq::internals::engine::crossover::Crossover;
        let text = r#"{"device": "cpu", "points": [
            {"work": "encode", "head_dim": 64, "rows": 256, "cpu_ms": 0.7, "mlx_ms": 2.1},
            {"work": "attend", "head_dim": 64, "rows": 256, "cpu_ms": 0.06, "mlx_ms": 1.9}]}"#;
        let times = Crossover::from_json(text).unwrap();
        samples.push(("tune", Box::new(tune::Tuned { file: "crossover.json".into(), times })));
    }
    #[cfg(unix)]
    {
        let text = r#"{"pool": {"budget": 8589934592, "used": 3221225472, "saved_by_sharing": 1073741824, "agents": 2,
            "in_memory": 1, "on_disk": 1, "disk_bytes": 536870912, "stores": 12, "hits": 7, "loads": 2, "evictions": 0, "spills": 1},
            "agents": [{"id": "planner", "kind": "reasoning", "priority": 0.5, "pinned": true, "bytes": 3221225472,
            "shared_bytes": 1073741824, "disk_bytes": null, "idle": 0}, {"id": "a reviewer with a long name", "kind": "coding",
            "priority": 1.0, "pinned": false, "bytes": null, "shared_bytes": 0, "disk_bytes": 536870912, "idle": 5}]}"#;
        let held: Value = serde_json::from_str(text).unwrap();
        let part = |name: &str| held[name].clone();
        samples.push((
            "stats",
            Box::new(top::Held {
                recipe: "best@4,window=0".into(),
                pool: serde_json::from_value(part("pool")).unwrap(),
                agents: serde_json::from_value(part("agents")).unwrap(),
            }),
        ));
    }
    samples
}

#[test]
fn screens_are_those_that_were_looked_at_and_json_is_what_its_page_says() {
    let place = tempfile::tempdir().unwrap();
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/smollm2_250.safetensors");
    std::fs::copy(sample, place.path().join("in.safetensors")).unwrap();
    std::fs::create_dir(place.path().join("qwen3-next")).unwrap();
    std::fs::write(place.path().join("qwen3-next/config.json"), CONFIG).unwrap();
    // Screens show paths as they were given; no other test of this program depends on where it runs.
    std::env::set_current_dir(place.path()).unwrap();
    let mut wrong = String::new();
    let mut json: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for (name, answer, verbose) in answers() {
        let screen = without_times(&answer.screen(Some(80), verbose));
        // A recipe is one word, to be copied; nothing else is wider than the window.
        let wide = screen.lines().find(|line| line.chars().count() > 80 && line.trim().contains(' '));
        assert_eq!(wide, None, "{name}");
        if !name.contains("unseen") {
            hold(&name, &screen, &mut wrong);
        }
        if NARROW.contains(&name.as_str()) {
            let screen = answer.screen(Some(40), verbose);
            assert!(screen.lines().all(|line| line.chars().count() <= 40), "{name}:\n{screen}");
            hold(&format!("{name}-40"), &without_times(&screen), &mut wrong);
        }
        let command = name.split('-').next().unwrap_or(&name).to_string();
        json.entry(command).or_default().push(serde_json::from_str(&answer.json().unwrap()).unwrap());
    }
    assert!(wrong.is_empty(), "{wrong}");
    check_json(&json);
}

/// Holds what commands print to the page, and the page to what they print.
fn check_json(json: &BTreeMap<String, Vec<Value>>) {
    let (documented, mut wrong) = (documented(), String::new());
    for (command, values) in json {
        let mut seen = BTreeMap::new();
        values.iter().for_each(|value| walk("", value, &mut seen));
        let none = BTreeMap::new();
        let page = documented.get(command).unwrap_or(&none);
        let fits = |(field, kinds): (&String, &BTreeSet<&str>)| {
            let allowed = |kind: &str| page.get(field).is_some_and(|allowed| allowed.contains(kind));
            kinds.iter().all(|kind| allowed(kind) || (*kind == "integer" && allowed("number")))
        };
        if !seen.iter().all(fits) || !page.keys().all(|field| seen.contains_key(field)) {
            let _ = write!(wrong, "\n\n## {command}\n{}", draft(&seen));
        }
    }
    assert!(wrong.is_empty(), "docs/json.md is not what these commands print:{wrong}");
}

/// Fields and kinds of the page's tables, by command.
fn documented() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let mut commands: BTreeMap<String, BTreeMap<_, _>> = BTreeMap::new();
    let mut command = String::new();
    for line in include_str!("../../docs/json.md").lines() {
        if let Some(name) = line.strip_prefix("## ") {
            command = name.split_whitespace().next().unwrap_or_default().to_string();
        } else if let Some((field, rest)) = line.strip_prefix("| `").and_then(|l| l.split_once("` | ")) {
            let kinds = rest.split(" | ").next().unwrap_or_default();
            let kinds = kinds.split(" or ").map(|kind| kind.trim().to_string()).collect();
            commands.entry(command.clone()).or_default().insert(field.to_string(), kinds);
        }
    }
    commands
}

/// Every field below a value, with the kinds it was seen with; `[]` is any element, and `*` any key of a map of names.
fn walk(path: &str, value: &Value, seen: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(list) => return list.iter().for_each(|item| walk(&format!("{path}[]"), item, seen)),
        Value::Object(map) => {
            let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
            let name = |key: &str| if path == "metadata" { below("*") } else { below(key) };
            return map.iter().for_each(|(key, item)| walk(&name(key), item, seen));
        }
    };
    seen.entry(path.to_string()).or_default().insert(kind);
}

/// The table that a page would need.
fn draft(seen: &BTreeMap<String, BTreeSet<&'static str>>) -> String {
    let row = |(field, kinds): (&String, &BTreeSet<&str>)| {
        format!("| `{field}` | {} | |", kinds.iter().copied().collect::<Vec<_>>().join(" or "))
    };
    seen.iter().map(row).collect::<Vec<_>>().join("\n")
}
