//! Random questions to live caches, held to one slow oracle: the row form of the codec with a plain f64 softmax.
//!
//! `TURBOMOQ_DIFFERENTIAL_SEED=N` runs the case N alone, as a failure names it; `TURBOMOQ_LONG=1` runs for about an hour, a million
//! random queries at every level among it.

#[path = "../common/mod.rs"]
mod common;

mod cases;
mod hidden;
mod levels;
mod oracle;
mod queries;
mod refusals;
mod sequences;
mod subject;
mod values;

use turbomoq::internals::engine::cpu::probe::{self, Path};

/// The seed of the environment, or else this one.
fn seed(default: u64) -> u64 {
    asked_seed().unwrap_or(default)
}

fn asked_seed() -> Option<u64> {
    let text = std::env::var("TURBOMOQ_DIFFERENTIAL_SEED").ok()?;
    Some(text.parse().expect("TURBOMOQ_DIFFERENTIAL_SEED is a number"))
}

/// How many cases: of the ordinary run, or of the long one.
fn cases(ordinary: u64, long: u64) -> u64 {
    match asked_seed() {
        Some(_) => 1,
        None if std::env::var_os("TURBOMOQ_LONG").is_some() => long,
        None => ordinary,
    }
}

#[test]
fn any_calls_on_a_cpu_cache_answer_as_the_row_form_does_and_every_form_runs() {
    let count = cases(CPU_CASES, 40_000);
    let seen = sequences::on_cpu(seed(0), count);
    println!("{seen:?}, {:.2} of the channels with sharp bounds", seen.sharp / seen.attended.max(1) as f64);
    if count == 1 {
        return;
    }
    assert!(seen.attended >= 5_000, "{seen:?}");
    // Packed tokens of numbers that a cache rarely has.
    levels::each_level(|_| {
        queries::ask(seed(11), 1);
    });
    let avx512 = probe::levels()[0] == "Avx512";
    let missing: Vec<&Path> =
        Path::ALL.iter().filter(|p| probe::count(**p) == 0 && (avx512 || !p.needs_avx512())).collect();
    assert!(missing.is_empty(), "never ran: {missing:?}");
}

/// Cases of an ordinary run: each asks about forty times.
const CPU_CASES: u64 = 200;

#[cfg(feature = "mlx")]
#[test]
fn any_calls_on_an_mlx_cache_answer_as_the_row_form_does() {
    let seen = sequences::on_mlx(seed(100_000), cases(12, 2000));
    println!("{seen:?}");
}
