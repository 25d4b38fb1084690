//! Trains the levels of the trellis grids: `train_trellis OUT [CANDIDATES]` writes the `trellis_tables.bin` of `src/math`.
//!
//! Start: level = Gaussian quantile whose rank is an invertible GF(2)-affine map of the window, each output bit the parity of an odd number of
//! window bits (so that complementing the window negates the level). Good maps keep branches that leave or enter one state far apart; they are
//! found by drawing a third of the candidates at random and the rest as mutants of the best, each judged after a few small Lloyd rounds.
//! A Lloyd round encodes fresh Gaussian vectors and moves every level to the mean of the samples that chose it. The survivors get larger rounds;
//! errors are always those of one common held-out sample.

use std::{env, fs, process::ExitCode, thread};

use turbomoq::internals::math::trellis::Trellis;
use turbomoq::internals::math::trellis_search::SearchScratch;

const DIM: usize = 128;

/// Standard deviation of good levels at 1 to 4 bits: fewer bits shrink towards zero, more reach into the tails.
const SPREAD: [f32; 4] = [0.88, 1.05, 1.12, 1.2];

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn normals(&mut self, count: usize) -> Vec<f32> {
        let draw = |r: &mut Self| (-2.0 * r.unit().ln()).sqrt() * (std::f64::consts::TAU * r.unit()).cos();
        (0..count).map(|_| draw(self) as f32).collect()
    }
}

#[derive(Clone)]
struct Candidate {
    /// Rank of window `w`: bit `k` is the parity of `rows[k] & w`, the whole xor `flip`.
    rows: Vec<usize>,
    flip: usize,
    levels: Vec<f32>,
    error: f64,
}

fn parity(x: usize) -> usize {
    x.count_ones() as usize & 1
}

impl Candidate {
    fn random(quantiles: &[f32], rng: &mut Rng) -> Candidate {
        let n = quantiles.len();
        loop {
            let mut draw = || loop {
                let row = rng.next() as usize % n;
                if parity(row) == 1 {
                    break row;
                }
            };
            let rows = (0..n.ilog2()).map(|_| draw()).collect();
            if let Some(c) = Candidate::from_map(rows, rng.next() as usize % n, quantiles) {
                return c;
            }
        }
    }

    /// A neighbour: two bits of one row change, or one bit of `flip`.
    fn mutant(&self, quantiles: &[f32], rng: &mut Rng) -> Candidate {
        let log2 = self.rows.len() as u64;
        loop {
            let (mut rows, mut flip) = (self.rows.clone(), self.flip);
            if rng.next().is_multiple_of(8) {
                flip ^= 1 << (rng.next() % log2);
            } else {
                let k = (rng.next() % log2) as usize;
                rows[k] ^= 1 << (rng.next() % log2);
                rows[k] ^= 1 << (rng.next() % log2);
            }
            if (&rows, flip) != (&self.rows, self.flip)
                && let Some(c) = Candidate::from_map(rows, flip, quantiles)
            {
                return c;
            }
        }
    }

    /// `None` if the map is not invertible.
    fn from_map(rows: Vec<usize>, flip: usize, quantiles: &[f32]) -> Option<Candidate> {
        let rank = |w: usize| rows.iter().enumerate().fold(0, |r, (k, row)| r | parity(row & w) << k);
        if (1..quantiles.len()).any(|w| rank(w) == 0) {
            return None;
        }
        let levels = (0..quantiles.len()).map(|w| quantiles[rank(w) ^ flip]).collect();
        Some(Candidate { rows, flip, levels, error: f64::INFINITY })
    }
}

/// Sum and count of the samples of every window, and the mean squared error.
fn assign(t: &Trellis, bits: usize, samples: &[f32]) -> (Vec<(f64, f64)>, f64) {
    let mut words = vec![0; t.words(DIM)];
    let mut scratch = SearchScratch::default();
    let (mut cells, mut error) = (vec![(0.0, 0.0); t.levels().len()], 0.0);
    for y in samples.chunks_exact(DIM) {
        t.encode(y, &mut words, &mut scratch);
        let mut w = t.window(&words, DIM, DIM - 1);
        for (i, &v) in y.iter().enumerate() {
            let at = i * bits;
            let pair = u64::from(words[at / 32]) | words.get(at / 32 + 1).map_or(0, |&h| u64::from(h) << 32);
            w = (w >> bits) + ((pair >> (at % 32)) as usize % (1 << bits)) * (cells.len() >> bits);
            cells[w].0 += f64::from(v);
            cells[w].1 += 1.0;
            error += f64::from(v - t.levels()[w]).powi(2);
        }
    }
    (cells, error / samples.len() as f64)
}

/// Lloyd rounds on fresh samples, then the error on a sample that is the same for all candidates.
fn lloyd(c: &mut Candidate, states_log2: u8, bits: u8, rounds: usize, vectors: usize, rng: &mut Rng) {
    let n = c.levels.len();
    let trellis = |levels: &[f32]| Trellis::with_levels(states_log2, bits, levels).expect("8 or 10, 1 to 4");
    for _ in 0..rounds {
        let (cells, _) = assign(&trellis(&c.levels), usize::from(bits), &rng.normals(vectors * DIM));
        for w in 0..n / 2 {
            let (a, b) = (cells[w], cells[n - 1 - w]);
            if a.1 + b.1 > 0.0 {
                c.levels[w] = ((a.0 - b.0) / (a.1 + b.1)) as f32;
                c.levels[n - 1 - w] = -c.levels[w];
            }
        }
    }
    c.error =
        assign(&trellis(&c.levels), usize::from(bits), &Rng(!0).normals((2 * vectors).max(512) * DIM)).1;
}

fn train(states_log2: u8, bits: u8, candidates: usize) -> Vec<f32> {
    let mut rng = Rng(u64::from(states_log2) << 8 | u64::from(bits));
    let n = 1 << states_log2;
    let mut draws = rng.normals(256 * n);
    draws.sort_by(f32::total_cmp);
    let spread = SPREAD[usize::from(bits) - 1];
    let quantiles: Vec<f32> =
        (0..n).map(|k| spread * (draws[256 * k + 128] - draws[256 * (n - 1 - k) + 127]) / 2.0).collect();
    let report = |what: &str, field: &[Candidate]| {
        println!(
            "L {states_log2} b {bits} {what}: best {:.5}, median {:.5}",
            field[0].error,
            field[field.len() / 2].error
        );
    };
    let by_error = |a: &Candidate, b: &Candidate| a.error.total_cmp(&b.error);
    let mut pool: Vec<Candidate> = Vec::new();
    for k in 0..candidates {
        let mut c = if k < candidates / 3 {
            Candidate::random(&quantiles, &mut rng)
        } else {
            pool[rng.next() as usize % pool.len()].mutant(&quantiles, &mut rng)
        };
        lloyd(&mut c, states_log2, bits, 2 + usize::from(bits), 128, &mut rng);
        if pool.iter().all(|p| p.rows != c.rows || p.flip != c.flip) {
            pool.push(c);
            pool.sort_by(by_error);
            pool.truncate(24);
        }
        if (k + 1) % (candidates / 6) == 0 {
            report("maps", &pool);
        }
    }
    for (keep, rounds, vectors) in [(24, 8, 400), (6, 20, 2000), (1, 40, 10_000)] {
        pool.truncate(keep);
        for c in &mut pool {
            lloyd(c, states_log2, bits, rounds, vectors, &mut rng);
        }
        pool.sort_by(by_error);
        report("Lloyd", &pool);
    }
    pool.swap_remove(0).levels[..n / 2].to_vec()
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().collect();
    let (Some(out), candidates) = (args.get(1), args.get(2).and_then(|c| c.parse().ok()).unwrap_or(1500))
    else {
        eprintln!("usage: train_trellis OUT [CANDIDATES]");
        return ExitCode::FAILURE;
    };
    let tables = [(8, candidates), (10, candidates / 2)];
    let table: Vec<u8> = thread::scope(|scope| {
        let runs: Vec<_> = tables
            .iter()
            .flat_map(|&(log2, candidates)| (1..=4).map(move |bits| (log2, bits, candidates)))
            .map(|(log2, bits, candidates)| scope.spawn(move || train(log2, bits, candidates)))
            .collect();
        runs.into_iter()
            .flat_map(|run| run.join().expect("training does not panic"))
            .flat_map(|t| ((t * 8192.0).round_ties_even() as i16).to_le_bytes())
            .collect()
    });
    match fs::write(out, table) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{out}: {e}");
            ExitCode::FAILURE
        }
    }
}
