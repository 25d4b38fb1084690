//! One decode step of attention, 32 query heads on 8 KV heads of 128 channels: packed caches beside the same engine on exact fp16
//! rows, and the read bandwidth of the same run. Shortest of many runs each; `--json` gives one object a line, `--tokens` and
//! `--only` with a comma between leave the rest out (`-- --tokens 2048 --only fp16,uniform-4`).

use half::f16;
use rayon::prelude::*;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turbomoq::Codec;
#[cfg(feature = "mlx")]
use turbomoq::Codes;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Frame;
use turbomoq::Tensor;
use turbomoq::internals::math::rng::Rng;
use turbomoq::{CodecSpec, Grid};
use turbomoq::{Rules, Segment, Stored};

const HEADS: usize = 8;
const DIM: usize = 128;
/// Tokens of a segment, as the cache joins them.
const SEGMENT: usize = 2048;

fn vectors(shape: [usize; 4], stream: u64) -> Tensor {
    let mut rng = Rng::new(1, stream);
    Tensor::new(&shape, (0..shape.iter().product()).map(|_| f16::from_f64(rng.normal())).collect())
        .expect("shape")
}

/// A cache of `tokens`, packed if there is a spec.
fn cache(tokens: usize, spec: Option<CodecSpec>) -> Vec<Segment<Tensor>> {
    let codec = spec.map(|spec| Arc::new(Codec::new(spec).expect("spec")));
    let side = |rows: Tensor| match &codec {
        Some(codec) => Stored::Packed(Cpu.encode(codec, Frame::default(), &rows).expect("encode")),
        None => Stored::Exact { len: rows.shape()[2], rows },
    };
    let segment = |start: usize| {
        let shape = [1, HEADS, SEGMENT.min(tokens - start), DIM];
        Segment {
            start,
            keys: side(vectors(shape, 2 * start as u64)),
            values: side(vectors(shape, 2 * start as u64 + 1)),
        }
    };
    (0..tokens).step_by(SEGMENT).map(segment).collect()
}

fn bytes(segments: &[Segment<Tensor>]) -> usize {
    let side = |s: &Stored<Tensor>| match s {
        Stored::Exact { rows, .. } => rows.nbytes(),
        Stored::Packed(codes) => codes.nbytes(),
    };
    segments.iter().map(|s| side(&s.keys) + side(&s.values)).sum()
}

/// Bytes a nanosecond that all threads read together.
fn bandwidth() -> f64 {
    let data = vec![1u64; 32 << 20];
    let read =
        || data.par_chunks(1 << 16).map(|c| c.iter().fold(0u64, |a, b| a ^ b)).reduce(|| 0, |a, b| a ^ b);
    8.0 * data.len() as f64 / least(8, read).as_nanos() as f64
}

fn least<T>(times: usize, f: impl Fn() -> T) -> Duration {
    let once = || {
        let start = Instant::now();
        black_box(f());
        start.elapsed()
    };
    (0..times).map(|_| once()).min().expect("at least one")
}

fn cases() -> Vec<(String, Option<CodecSpec>, bool)> {
    let spec = |bits, grid| Some(CodecSpec::new(DIM, bits, grid));
    let mut cases = vec![("fp16".to_string(), None, false)];
    for exact in [false, true] {
        for (name, spec) in [
            ("uniform-4", spec(4, Grid::Uniform)),
            ("beta-4", spec(4, Grid::Beta)),
            ("lloyd-4", spec(4, Grid::Lloyd)),
        ] {
            cases.push((format!("{name}{}", if exact { "-exact" } else { "" }), spec, exact));
        }
    }
    for bits in [2, 3] {
        cases.push((format!("beta-{bits}"), spec(bits, Grid::Beta), false));
        cases.push((format!("trellis-{bits}"), spec(bits, Grid::Trellis { states: 8 }), false));
    }
    cases
}

/// One line of the table.
struct Line {
    engine: &'static str,
    name: String,
    tokens: usize,
    time: Duration,
    bytes: usize,
}

/// What follows a flag of the command line, at its commas.
fn listed(flag: &str) -> Option<Vec<String>> {
    let text = std::env::args().skip_while(|a| a != flag).nth(1)?;
    Some(text.split(',').map(str::to_string).collect())
}

fn wanted(name: &str) -> bool {
    listed("--only").is_none_or(|only| only.iter().any(|n| n == name))
}

fn cpu(tokens: usize, lines: &mut Vec<Line>) {
    let q = vectors([1, 32, 1, DIM], 999);
    let rules = |exact| Rules { exact, ..Rules::causal((DIM as f32).powf(-0.5)) };
    let cases: Vec<_> = cases()
        .into_iter()
        .filter(|(name, ..)| wanted(name))
        .map(|(n, spec, exact)| (n, cache(tokens, spec), rules(exact)))
        .collect();
    // In rounds, so that what else the machine does at a time meets every case.
    let mut times = vec![Duration::MAX; cases.len()];
    for _ in 0..if tokens < 10_000 { 60 } else { 10 } {
        for (time, (_, segments, rules)) in times.iter_mut().zip(&cases) {
            *time = least(3, || Cpu.attend(segments, &q, rules).expect("attend")).min(*time);
        }
    }
    for (time, (name, segments, _)) in times.into_iter().zip(cases) {
        lines.push(Line { engine: "cpu", name, tokens, time, bytes: bytes(&segments) });
    }
}

#[cfg(feature = "mlx")]
fn on_mlx(tokens: usize, lines: &mut Vec<Line>) {
    use turbomoq::Mlx;
    use turbomoq::mlx::evaluate;
    let engine = Mlx::new();
    let put = |t: &Tensor| engine.put(t).expect("put");
    let side = |s: &Stored<Tensor>| match s {
        Stored::Exact { rows, len } => Stored::Exact { rows: put(rows), len: *len },
        Stored::Packed(codes) => {
            let (words, scales) = (put(codes.words()), put(codes.scales()));
            Stored::Packed(Codes::new(codes.codec().clone(), Frame::default(), words, scales).expect("codes"))
        }
    };
    let q = put(&vectors([1, 32, 1, DIM], 999));
    let rules = Rules::causal((DIM as f32).powf(-0.5));
    let spec = |bits, grid| Some(CodecSpec::new(DIM, bits, grid));
    for (name, spec) in
        [("fp16", None), ("uniform-4", spec(4, Grid::Uniform)), ("lloyd-4", spec(4, Grid::Lloyd))]
    {
        if !wanted(name) {
            continue;
        }
        let host = cache(tokens, spec);
        let segments: Vec<_> = host
            .iter()
            .map(|s| Segment { start: s.start, keys: side(&s.keys), values: side(&s.values) })
            .collect();
        let step = || evaluate(&[&engine.attend(&segments, &q, &rules).expect("attend")]).expect("evaluate");
        let times = if tokens < 10_000 { 20 } else { 5 };
        let (name, time) = (name.to_string(), least(times, step));
        lines.push(Line { engine: "mlx", name, tokens, time, bytes: bytes(&host) });
    }
}

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let threads = rayon::current_num_threads();
    let mut lines = vec![];
    let before = bandwidth();
    let lengths = listed("--tokens").unwrap_or_else(|| vec!["2048".into(), "32768".into()]);
    for tokens in lengths {
        let tokens = tokens.parse().expect("--tokens are numbers");
        cpu(tokens, &mut lines);
        #[cfg(feature = "mlx")]
        on_mlx(tokens, &mut lines);
    }
    let speed = bandwidth().max(before);
    if !json {
        println!("{threads} threads, {speed:.1} GB/s read; ns per key of a KV head (its value included)");
    }
    for line in &lines {
        let keys = (line.tokens * HEADS) as f64;
        let (ms, ns) = (line.time.as_secs_f64() * 1e3, line.time.as_nanos() as f64 / keys);
        let (limit, Line { engine, name, tokens, .. }) = (line.bytes as f64 / speed / keys, line);
        let exact = lines.iter().find(|l| l.engine == *engine && l.tokens == *tokens && l.name == "fp16");
        let ratio = exact.map_or(f64::NAN, |l| l.time.as_secs_f64() / line.time.as_secs_f64());
        if json {
            println!(
                "{{\"engine\":\"{engine}\",\"name\":\"{name}\",\"tokens\":{tokens},\"ms\":{ms},\"ns\":{ns},\"limit\":{limit}}}"
            );
        } else {
            println!(
                "T {tokens:5} {engine} {name:16} {ms:8.3} ms {ns:6.1} ns a key, bandwidth limit {limit:5.1}, {ratio:5.2} x fp16"
            );
        }
    }
}
