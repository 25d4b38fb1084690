//! QJL (2406.03482): signs of random projections of a residual, and its norm.
//!
//! For S with m Gaussian rows, <q, r> is estimated without bias by sqrt(pi/2)/m |r| <S q, sign(S r)>. As a reconstruction the
//! same sum S^T sign(S r) has too much energy for every m up to d and must be shrunk by its least-squares factor,
//! 1 / (1 - 1/m + (pi/2) d/m); unshrunk it adds error. Every round projects what the rounds before it left, with fresh rows.

use crate::math::rng::Rng;
use crate::math::rotation::dot;

/// First generator stream of the projections; round r uses stream `PROJECTIONS + r`, disjoint from the rotations' streams.
const PROJECTIONS: u64 = 16;

/// The projections of every round.
#[derive(Clone, Debug)]
pub struct Qjl {
    dim: usize,
    projections: usize,
    rounds: Vec<Vec<f32>>,
}

impl Qjl {
    /// `rounds` independent Gaussian matrices of `projections` rows and `dim` columns.
    pub fn new(dim: usize, projections: usize, rounds: usize, seed: u64) -> Qjl {
        let matrix = |round: usize| {
            let mut rng = Rng::new(seed, PROJECTIONS + round as u64);
            (0..projections * dim).map(|_| rng.normal() as f32).collect()
        };
        Qjl { dim, projections, rounds: (0..rounds).map(matrix).collect() }
    }

    /// Number of rounds.
    pub fn rounds(&self) -> usize {
        self.rounds.len()
    }

    /// Sign bits per round.
    pub fn projections(&self) -> usize {
        self.projections
    }

    /// Row-major matrix of one round.
    pub fn matrix(&self, round: usize) -> &[f32] {
        &self.rounds[round]
    }

    /// Factor of the unbiased score estimator, for a residual of norm one.
    pub fn score_factor(&self) -> f32 {
        std::f32::consts::FRAC_PI_2.sqrt() / self.projections as f32
    }

    /// Factor of the shrunk reconstruction, for a residual of norm one.
    pub fn shrunk_factor(&self) -> f32 {
        let (m, d) = (self.projections as f32, self.dim as f32);
        self.score_factor() / (1.0 - 1.0 / m + std::f32::consts::FRAC_PI_2 * d / m)
    }

    /// Whether a score uses the shrunk factor for this round: all but the last, whose estimate makes the sum unbiased.
    pub fn factor_for_score(&self, round: usize) -> f32 {
        if round + 1 < self.rounds.len() { self.shrunk_factor() } else { self.score_factor() }
    }

    /// Signs of `S x` of one round, one bit each, LSB first; bit 1 is a positive sign.
    pub fn signs(&self, round: usize, x: &[f32], words: &mut [u32]) {
        words.fill(0);
        for (i, row) in self.rounds[round].chunks_exact(self.dim).enumerate() {
            if dot(row, x) > 0.0 {
                words[i / 32] |= 1 << (i % 32);
            }
        }
    }

    /// `out += w S^T sign`, the sum of rows with their signs.
    pub fn add_rows(&self, round: usize, words: &[u32], w: f32, out: &mut [f32]) {
        for (i, row) in self.rounds[round].chunks_exact(self.dim).enumerate() {
            let w = w * sign(words, i);
            for (o, r) in out.iter_mut().zip(row) {
                *o += w * r;
            }
        }
    }

    /// `S q` of one round.
    pub fn project(&self, round: usize, q: &[f32], out: &mut [f32]) {
        for (o, row) in out.iter_mut().zip(self.rounds[round].chunks_exact(self.dim)) {
            *o = dot(row, q);
        }
    }

    /// `<p, sign>` for a projected query p.
    pub fn dot_signs(&self, words: &[u32], p: &[f32]) -> f32 {
        p.iter().enumerate().map(|(i, p)| p * sign(words, i)).sum()
    }
}

fn sign(words: &[u32], i: usize) -> f32 {
    if words[i / 32] >> (i % 32) & 1 == 1 { 1.0 } else { -1.0 }
}
