//! Importance of heads from three signals, for models of which no sample run has measured the prices.
//!
//! Spectral: how far the keys of a head lie along few directions. Sensitivity: how much the output changes by noise on the head,
//! where the caller has gradients or has measured it. Position: exp(-2 x^2) with x from -1 to 1 over the layers. The weights .4, .3
//! and .3 are the original system's; measured prices (see `turbomoq::allocation::calibration`) replace all of this where there are any.

use super::{HeadSide, MOST_BITS, allocate};
use crate::error::{Error, Result};
use crate::spec::Side;

/// Weights of spectral, sensitivity and position.
const WEIGHTS: [f64; 3] = [0.4, 0.3, 0.3];

/// Scores the KV heads of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadScorer {
    layers: usize,
    heads: usize,
    head_dim: usize,
}

/// Importance of each head, 0 to 1, by layer and head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadScores {
    scorer: HeadScorer,
    scores: Vec<f64>,
}

impl HeadScorer {
    /// A scorer for `layers` layers of `heads` KV heads of `head_dim` channels.
    pub fn new(layers: usize, heads: usize, head_dim: usize) -> HeadScorer {
        HeadScorer { layers, heads, head_dim }
    }

    /// Importance from the spectral signal of each head (see [`spectral`]) and its sensitivity, if known; both by layer and head.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not one number for each head, [`Error::NonFinite`] if one is no number of zero or more.
    pub fn score(&self, spectral: &[f64], sensitivity: Option<&[f64]>) -> Result<HeadScores> {
        let count = self.layers * self.heads;
        for (what, signal) in [("spectral", Some(spectral)), ("sensitivity", sensitivity)] {
            let Some(signal) = signal else { continue };
            if signal.len() != count {
                let expected = format!("{} layers of {} heads", self.layers, self.heads);
                return Err(Error::Shape { what, expected, got: vec![signal.len()] });
            }
            if let Some(index) = signal.iter().position(|x| !x.is_finite() || *x < 0.0) {
                return Err(Error::NonFinite { what: what.into(), index, value: signal[index] as f32 });
            }
        }
        let relative = |signal: &[f64]| -> Vec<f64> {
            let most = signal.iter().fold(0.0f64, |a, &b| a.max(b));
            signal.iter().map(|x| if most > 0.0 { x / most } else { 0.0 }).collect()
        };
        let (spectral, sensitivity) = (relative(spectral), sensitivity.map(relative));
        let score = |i: usize| {
            let signals = [
                Some(spectral[i]),
                sensitivity.as_ref().map(|s| s[i]),
                Some(position(i / self.heads, self.layers)),
            ];
            // A signal that is not there gives its weight to the others.
            let known = || WEIGHTS.iter().zip(signals).filter_map(|(w, s)| Some((w, s?)));
            known().map(|(w, s)| w * s).sum::<f64>() / known().map(|(w, _)| w).sum::<f64>()
        };
        Ok(HeadScores { scorer: *self, scores: (0..count).map(score).collect() })
    }
}

impl HeadScores {
    /// Importance by layer and head.
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// One side of every head, as the allocator takes it.
    pub fn parts(&self, side: Side) -> Vec<HeadSide> {
        let HeadScorer { heads, head_dim, .. } = self.scorer;
        let part =
            |(i, &score): (usize, &f64)| HeadSide::by_price(i / heads, i % heads, side, head_dim, score);
        self.scores.iter().enumerate().map(part).collect()
    }

    /// Bits of each head at `average` bits, 1 to 8.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an average below 1.
    pub fn allocate_bits(&self, average: f64) -> Result<Vec<u8>> {
        allocate(&self.parts(Side::Key), average, 1, MOST_BITS as u8)
    }

    /// The rule that the original system describes: hub heads get 8 bits, the periphery 2 (1 below an average of 2), as many hubs as
    /// `average` allows. It is here to be compared with.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an average that is not from 1 to 8.
    pub fn hubs_and_periphery(&self, average: f64) -> Result<Vec<u8>> {
        if !(1.0..=8.0).contains(&average) {
            let reason = "1 to 8 bits".into();
            return Err(Error::Unsupported { field: "budget", value: average.to_string(), reason });
        }
        let low = if average < 2.0 { 1u8 } else { 2 };
        let share = (average - f64::from(low)) / f64::from(8 - low);
        let hubs = (share * self.scores.len() as f64 + 1e-9) as usize;
        let mut order: Vec<usize> = (0..self.scores.len()).collect();
        order.sort_by(|&a, &b| self.scores[b].total_cmp(&self.scores[a]));
        let mut bits = vec![low; order.len()];
        order[..hubs].iter().for_each(|&i| bits[i] = 8);
        Ok(bits)
    }
}

/// How far a symmetric `dim` x `dim` covariance lies along few directions, 0 to 1: the mean of the relative gap between its two
/// greatest eigenvalues and of one less its entropy. The entropy is Renyi's of order two, -ln(tr C^2 / (tr C)^2) / ln dim, which
/// needs no eigenvalues.
pub fn spectral(covariance: &[f64], dim: usize) -> f64 {
    let trace: f64 = (0..dim).map(|i| covariance[i * dim + i]).sum();
    let squares: f64 = covariance.iter().map(|x| x * x).sum();
    if trace <= 0.0 || squares <= 0.0 || dim < 2 {
        return 0.0;
    }
    let entropy = libm::log(trace * trace / squares) / libm::log(dim as f64);
    let [first, second] = greatest_two(covariance, dim);
    (((first - second) / first.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0) + (1.0 - entropy).clamp(0.0, 1.0))
        / 2.0
}

/// The two greatest eigenvalues of a positive matrix, by power iteration on two orthogonal directions.
fn greatest_two(matrix: &[f64], dim: usize) -> [f64; 2] {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let image = |x: &[f64]| matrix.chunks_exact(dim).map(|row| dot(row, x)).collect::<Vec<_>>();
    let scaled = |x: Vec<f64>| {
        let norm = dot(&x, &x).sqrt().max(f64::MIN_POSITIVE);
        x.into_iter().map(|x| x / norm).collect::<Vec<_>>()
    };
    let mut a = scaled((0..dim).map(|i| 1.0 + 1.0 / (i + 1) as f64).collect());
    let mut b =
        scaled((0..dim).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 } + i as f64 / dim as f64).collect());
    for _ in 0..100 {
        a = scaled(image(&a));
        let next = image(&b);
        let along = dot(&next, &a);
        b = scaled(next.iter().zip(&a).map(|(x, a)| x - along * a).collect());
    }
    let value = |x: &[f64]| dot(x, &image(x));
    [value(&a), value(&b)]
}

/// exp(-2 x^2), x from -1 to 1 over the layers.
fn position(layer: usize, layers: usize) -> f64 {
    let x = if layers > 1 { 2.0 * layer as f64 / (layers - 1) as f64 - 1.0 } else { 0.0 };
    libm::exp(-2.0 * x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spectra_are_told_apart() {
        let diagonal = |values: &[f64]| {
            let n = values.len();
            (0..n * n).map(|i| if i % (n + 1) == 0 { values[i / n] } else { 0.0 }).collect::<Vec<_>>()
        };
        assert!(spectral(&diagonal(&[1.0; 8]), 8) < 1e-9, "isotropic");
        assert!(spectral(&diagonal(&[1.0, 0.0, 0.0, 0.0]), 4) > 0.999, "one direction");
        let [first, second] = greatest_two(&diagonal(&[1.0, 7.0, 3.0, 2.0]), 4);
        assert!((first - 7.0).abs() < 1e-9 && (second - 3.0).abs() < 1e-6, "{first} {second}");
        assert_eq!(spectral(&[0.0; 16], 4), 0.0);
    }

    #[test]
    fn a_signal_that_is_missing_gives_its_weight_to_the_others() {
        let scorer = HeadScorer::new(3, 1, 64);
        let flat = scorer.score(&[1.0; 3], None).unwrap();
        assert!((flat.scores()[1] - 1.0).abs() < 1e-12, "the middle has every signal: {flat:?}");
        assert!(flat.scores()[0] < flat.scores()[1] && flat.scores()[0] == flat.scores()[2]);
        let felt = scorer.score(&[1.0; 3], Some(&[1.0, 0.0, 0.0])).unwrap();
        assert!(felt.scores()[0] > felt.scores()[2]);
        assert!(scorer.score(&[1.0; 2], None).is_err());
        assert!(scorer.score(&[1.0, f64::NAN, 1.0], None).is_err());
    }

    #[test]
    fn both_rules_keep_the_budget() {
        let scorer = HeadScorer::new(8, 4, 64);
        let spectra: Vec<f64> = (0..32).map(|i| f64::from((i * 13) % 32)).collect();
        let scores = scorer.score(&spectra, None).unwrap();
        for average in [1.0, 1.5, 2.25, 3.0, 4.0] {
            for bits in [scores.allocate_bits(average).unwrap(), scores.hubs_and_periphery(average).unwrap()]
            {
                let sum: f64 = bits.iter().map(|&b| f64::from(b)).sum();
                assert!(sum <= average * 32.0 + 1e-9 && sum > average * 32.0 - 8.0, "{average}: {bits:?}");
                for (i, j) in (0..32).flat_map(|i| (0..32).map(move |j| (i, j))) {
                    assert!(
                        scores.scores()[i] <= scores.scores()[j] || bits[i] >= bits[j],
                        "not monotone: {i} {j}"
                    );
                }
            }
        }
    }
}
