//! What one input may cost: no panic, a bound of memory, a bound of time.

use super::counting::{Counting, LIVE, PEAK};
use super::mutate::Mutator;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of memory that an input may cost: a fixed part for tables of codecs, and a multiple of its own size.
const FIXED_BYTES: usize = 48 << 20;
const BYTES_PER_BYTE: usize = 256;

/// Far more than any input needs, even on a machine that does other work: what is found is a hang.
const MOST_TIME: Duration = Duration::from_secs(20);

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Tries `TURBOMOQ_FUZZ` (5000) inputs of `make`, from the seed `TURBOMOQ_SEED`; `take` says whether the input was accepted.
pub fn fuzz(kind: &str, make: impl Fn(&mut Mutator) -> Vec<u8>, mut take: impl FnMut(&[u8]) -> bool) {
    // One kind at a time: memory is counted for the whole process.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (count, seed) = (number("TURBOMOQ_FUZZ", 5000), number("TURBOMOQ_SEED", 1));
    let mut mutator = Mutator::new(seed, kind.bytes().fold(0, |hash, byte| hash * 31 + u64::from(byte)));
    let mut accepted = 0;
    for i in 0..count {
        let input = make(&mut mutator);
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let clock = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| take(&input)));
        let (time, memory) = (clock.elapsed(), PEAK.load(Relaxed).saturating_sub(before));
        let bound = FIXED_BYTES + BYTES_PER_BYTE * input.len();
        if outcome.is_err() || time > MOST_TIME || memory > bound {
            let path = std::env::temp_dir().join(format!("turbomoq-fuzz-{kind}-{seed}-{i}"));
            std::fs::write(&path, &input).expect("the input to look at");
            panic!(
                "{kind}: input {i} of seed {seed} ({} bytes, kept as {}) {}, {time:?}, {memory} bytes where {bound} are allowed",
                input.len(),
                path.display(),
                if outcome.is_err() { "panics" } else { "is answered" },
            );
        }
        accepted += u64::from(outcome.unwrap_or(false));
    }
    println!("{kind}: {accepted} of {count} inputs were accepted, seed {seed}");
}
