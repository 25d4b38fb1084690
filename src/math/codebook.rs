//! Scalar grids for a rotated coordinate of unit variance: Lloyd-Max (Gaussian and exact Beta law), uniform, fitted.
//!
//! A coordinate of a random unit vector in R^d, times sqrt(d), has density proportional to (1 - x^2/d)^((d-3)/2), which tends to
//! the standard normal. Lloyd-Max levels are the fixed point of "level = mean of its cell, cell border = middle of two levels".
//! All integrals are Gauss-Legendre in f64 with pure-Rust `libm`, so a table is the same on every machine.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};

/// The law of a coordinate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Law {
    /// Standard normal.
    Gaussian,
    /// Coordinate of a random unit vector in this many dimensions, times their square root.
    Sphere(usize),
}

impl Law {
    /// Unnormalised density.
    fn density(self, x: f64) -> f64 {
        match self {
            Law::Gaussian => libm::exp(-0.5 * x * x),
            Law::Sphere(d) => {
                let rest = 1.0 - x * x / d as f64;
                if rest <= 0.0 { 0.0 } else { libm::exp(0.5 * (d as f64 - 3.0) * libm::log(rest)) }
            }
        }
    }

    /// Where the density has fallen to nothing.
    fn end(self) -> f64 {
        match self {
            Law::Gaussian => 9.0,
            Law::Sphere(d) => (d as f64).sqrt().min(9.0),
        }
    }

    /// Moments 0, 1 and 2 of the unnormalised density over `a..b`.
    fn moments(self, a: f64, b: f64) -> [f64; 3] {
        // Eight-point Gauss-Legendre on panels of at most a quarter.
        const NODES: [(f64, f64); 4] = [
            (0.183_434_642_495_649_8, 0.362_683_783_378_362),
            (0.525_532_409_916_329, 0.313_706_645_877_887_3),
            (0.796_666_477_413_626_7, 0.222_381_034_453_374_5),
            (0.960_289_856_497_536_3, 0.101_228_536_290_376_3),
        ];
        let panels = ((b - a) / 0.25).ceil().max(1.0);
        let half = (b - a) / panels / 2.0;
        let mut sums = [0.0; 3];
        for p in 0..panels as usize {
            let middle = a + half * (2 * p + 1) as f64;
            for (node, weight) in NODES {
                for x in [middle - half * node, middle + half * node] {
                    let w = weight * half * self.density(x);
                    sums[0] += w;
                    sums[1] += w * x;
                    sums[2] += w * x * x;
                }
            }
        }
        sums
    }
}

/// Ascending Lloyd-Max levels of `law` at `bits` bits; computed once per process.
pub fn lloyd_max(law: Law, bits: u8) -> Arc<[f32]> {
    type Cached = BTreeMap<(Law, u8), Arc<[f32]>>;
    static TABLES: LazyLock<Mutex<Cached>> = LazyLock::new(Mutex::default);
    let mut tables = TABLES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    tables.entry((law, bits)).or_insert_with(|| mirror(&solve(law, bits))).clone()
}

/// Positive Lloyd-Max levels.
fn solve(law: Law, bits: u8) -> Vec<f64> {
    let n = 1usize << (bits - 1);
    // Start from the asymptotically optimal point density, the cube root of the law: for the normal law, a normal law
    // of variance three. Quantiles come from bisection of the error function.
    let mut levels: Vec<f64> = (0..n)
        .map(|i| {
            let p = (i as f64 + 0.5) / n as f64;
            let (mut low, mut high) = (0.0, 6.0);
            for _ in 0..60 {
                let middle = 0.5 * (low + high);
                if libm::erf(middle / 6f64.sqrt()) < p { low = middle } else { high = middle }
            }
            low.min(law.end() * (1.0 - 1e-3 * (n - i) as f64))
        })
        .collect();
    // Plain Lloyd steps contract slowly when there are many levels; a step twice as long halves the work and still contracts.
    for _ in 0..20_000 {
        let mut moved = 0f64;
        let mut border = 0.0;
        for i in 0..n {
            let next = if i + 1 < n { 0.5 * (levels[i] + levels[i + 1]) } else { law.end() };
            let [mass, first, _] = law.moments(border, next);
            let step = if mass > 0.0 { first / mass - levels[i] } else { 0.0 };
            moved = moved.max(step.abs());
            let room = if i + 1 < n { 0.5 * (next - levels[i]) } else { f64::INFINITY };
            levels[i] += (1.8 * step).min(room);
            border = next;
        }
        if moved < 1e-7 {
            break;
        }
    }
    levels
}

/// Levels of the uniform grid: `step * (code - (2^bits - 1) / 2)`.
pub fn uniform(bits: u8) -> (f32, Arc<[f32]>) {
    let step = uniform_step(bits);
    let middle = 0.5 * ((1u32 << bits) - 1) as f32;
    (step, (0..1u32 << bits).map(|code| step * (code as f32 - middle)).collect())
}

/// The step of the uniform grid with the least squared error on a standard normal coordinate.
pub fn uniform_step(bits: u8) -> f32 {
    static STEPS: LazyLock<[f32; 8]> = LazyLock::new(|| std::array::from_fn(|i| golden_step(i as u8 + 1)));
    STEPS[bits as usize - 1]
}

fn golden_step(bits: u8) -> f32 {
    let n = 1usize << (bits - 1);
    let error = |step: f64| {
        let levels: Vec<f64> = (0..n).map(|i| step * (i as f64 + 0.5)).collect();
        half_error(Law::Gaussian, &levels)
    };
    let ratio = 0.5 * (5f64.sqrt() - 1.0);
    let (mut low, mut high) = (0.5 / n as f64, 8.0 / n as f64);
    for _ in 0..80 {
        let (a, b) = (high - ratio * (high - low), low + ratio * (high - low));
        if error(a) < error(b) { high = b } else { low = a }
    }
    (0.5 * (low + high)) as f32
}

/// Mean squared error of ascending levels on a coordinate of `law`.
pub fn distortion(law: Law, levels: &[f32]) -> f64 {
    // Both halves, so that a table that is not symmetric is judged rightly too.
    let up: Vec<f64> = levels.iter().map(|&x| x as f64).collect();
    let whole = law.moments(-law.end(), law.end())[0];
    cells(law, &up, -law.end()) / whole
}

/// Unnormalised squared error on the positive half-line divided by its mass.
fn half_error(law: Law, levels: &[f64]) -> f64 {
    cells(law, levels, 0.0) / law.moments(0.0, law.end())[0]
}

fn cells(law: Law, levels: &[f64], start: f64) -> f64 {
    let mut border = start;
    let mut sum = 0.0;
    for (i, &level) in levels.iter().enumerate() {
        let next = levels.get(i + 1).map_or(law.end(), |&up| (0.5 * (level + up)).min(law.end()));
        let [m0, m1, m2] = law.moments(border, next.max(border));
        sum += m2 - 2.0 * level * m1 + level * level * m0;
        border = next.max(border);
    }
    sum
}

/// Ascending k-means levels of one-dimensional samples: quantile start, then Lloyd to convergence.
///
/// Samples that are not finite are left out; with fewer samples than levels the grid is the Gaussian one.
pub fn fit(samples: &[f32], bits: u8) -> Arc<[f32]> {
    let n = 1usize << bits;
    let mut sorted: Vec<f64> = samples.iter().filter(|x| x.is_finite()).map(|&x| x as f64).collect();
    if sorted.len() < n {
        return lloyd_max(Law::Gaussian, bits);
    }
    sorted.sort_unstable_by(f64::total_cmp);
    let mut prefix = vec![0.0];
    prefix.extend(sorted.iter().scan(0.0, |sum, x| {
        *sum += x;
        Some(*sum)
    }));
    let mut levels: Vec<f64> = (0..n).map(|i| sorted[(2 * i + 1) * sorted.len() / (2 * n)]).collect();
    let mut cuts = vec![0; n + 1];
    loop {
        let mut next = cuts.clone();
        next[n] = sorted.len();
        for i in 1..n {
            let border = 0.5 * (levels[i - 1] + levels[i]);
            next[i] = sorted.partition_point(|&x| x < border);
        }
        if next == cuts {
            break;
        }
        cuts = next;
        for i in 0..n {
            let count = cuts[i + 1] - cuts[i];
            if count > 0 {
                levels[i] = (prefix[cuts[i + 1]] - prefix[cuts[i]]) / count as f64;
            }
        }
        levels.sort_unstable_by(f64::total_cmp);
    }
    levels.iter().map(|&x| x as f32).collect()
}

fn mirror(positive: &[f64]) -> Arc<[f32]> {
    positive.iter().rev().map(|&x| -x as f32).chain(positive.iter().map(|&x| x as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    /// D(b) of the Gaussian Lloyd-Max quantizer, b = 1..8 (Max 1960 and later tables).
    const D: [f64; 8] =
        [0.36338, 0.117482, 0.034548, 0.009501, 0.0025047, 0.00064424, 0.00016348, 0.000041185];

    #[test]
    fn gaussian_tables_are_golden() {
        for bits in 1..=8u8 {
            let found = distortion(Law::Gaussian, &lloyd_max(Law::Gaussian, bits));
            assert!((found / D[bits as usize - 1] - 1.0).abs() < 1e-3, "{bits} bits: {found}");
        }
        for (bits, golden) in [
            (1, &[0.79788][..]),
            (2, &[0.45278, 1.51042]),
            (3, &[0.24509, 0.75601, 1.34391, 2.15195]),
            (4, &[0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259]),
        ] {
            let levels = lloyd_max(Law::Gaussian, bits);
            for (got, want) in levels[golden.len()..].iter().zip(golden) {
                assert!((got - want).abs() < 1e-4, "{bits} bits: {got} for {want}");
            }
        }
    }

    #[test]
    fn sphere_tables_are_golden() {
        for (dim, want) in [
            (64, [0.35839, 0.11453, 0.03339, 0.00913]),
            (128, [0.36089, 0.11600, 0.03397, 0.00931]),
            (256, [0.36214, 0.11674, 0.03426, 0.00941]),
        ] {
            for bits in 1..=4 {
                let found = distortion(Law::Sphere(dim), &lloyd_max(Law::Sphere(dim), bits));
                let want: f64 = want[bits as usize - 1];
                assert!((found - want).abs() < 1e-5, "d {dim}, {bits} bits: {found}");
            }
        }
        assert!((lloyd_max(Law::Sphere(128), 4)[15] - 2.689).abs() < 1e-3);
        for dim in [8, 16, 24] {
            assert!(lloyd_max(Law::Sphere(dim), 8).windows(2).all(|w| w[0] < w[1]), "d {dim}");
        }
    }

    #[test]
    fn uniform_steps_are_optimal() {
        for (bits, want) in [(2, 0.11885), (3, 0.03744), (4, 0.01154)] {
            let found = distortion(Law::Gaussian, &uniform(bits).1);
            assert!((found - want).abs() < 1e-5, "{bits} bits: {found}");
        }
    }

    #[test]
    fn a_table_with_the_wrong_outer_level_is_rejected() {
        // A widely copied 4-bit table ends at 1.97 instead of 2.73; its distortion is twice the optimum.
        let squeezed: Vec<f32> = lloyd_max(Law::Gaussian, 4).iter().map(|x| x * 1.97 / 2.73259).collect();
        assert!(distortion(Law::Gaussian, &squeezed) > 1.5 * D[3]);
    }

    #[test]
    fn fitted_levels_converge_and_one_outlier_does_not_ruin_them() {
        let mut rng = Rng::new(1, 0);
        let mut samples: Vec<f32> = (0..40_000).map(|_| rng.normal() as f32).collect();
        samples.push(1000.0);
        samples.push(f32::NAN);
        let levels = fit(&samples, 4);
        let inner: Vec<f32> = levels.iter().copied().filter(|x| x.abs() < 10.0).collect();
        let error = distortion(Law::Gaussian, &inner);
        assert!(error < 1.25 * D[3], "{error}");
        assert_eq!(fit(&[1.0; 3], 4), lloyd_max(Law::Gaussian, 4), "too few samples");
        assert!(fit(&[0.5; 100], 2).iter().all(|x| *x == 0.5));
    }
}
