//! The one seeded generator: every random table is a pure function of a seed, bit for bit, on every machine.
//!
//! ChaCha8 supplies the bits (its stream is stable by promise) and pure-Rust `libm` the transcendental functions, so no
//! platform's C library can change a table. No global generator is ever touched.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

/// A deterministic source of uniform and normal numbers and of random signs.
pub struct Rng {
    source: ChaCha8Rng,
    spare: Option<f64>,
}

impl Rng {
    /// A generator whose whole future is fixed by `seed` and the purpose of the table, `stream`.
    pub fn new(seed: u64, stream: u64) -> Rng {
        let mut source = ChaCha8Rng::seed_from_u64(seed);
        source.set_stream(stream);
        Rng { source, spare: None }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.source.next_u64()
    }

    /// Uniform in (0, 1], never zero.
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box-Muller; the second value of a pair is kept for the next call).
    pub fn normal(&mut self) -> f64 {
        if let Some(z) = self.spare.take() {
            return z;
        }
        let radius = (-2.0 * libm::log(self.uniform())).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * self.uniform());
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// `n` random signs, +1 or -1.
    pub fn signs(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| if self.bits() >> 63 == 0 { 1.0 } else { -1.0 }).collect()
    }
}

/// A seed for a named part of a model, so that no two layers or sides share a rotation.
pub fn derive(seed: u64, layer: u64, side: u64) -> u64 {
    // SplitMix64's finaliser: neighbouring inputs give unrelated outputs.
    let mut z = seed ^ (layer * 2 + side + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_unit_variance_and_are_reproducible() {
        let mut rng = Rng::new(7, 0);
        let xs: Vec<f64> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = xs.iter().sum::<f64>() / 2e4;
        let var = xs.iter().map(|x| x * x).sum::<f64>() / 2e4;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.04, "mean {mean}, variance {var}");
        let mut again = Rng::new(7, 0);
        assert!(xs.iter().all(|x| x.to_bits() == again.normal().to_bits()));
        assert_ne!(Rng::new(7, 1).bits(), Rng::new(7, 0).bits());
        assert_ne!(derive(7, 0, 0), derive(7, 0, 1));
    }
}
