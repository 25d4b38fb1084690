//! How far the next-token distributions of two runs are apart: KL divergence, agreement of the first choice, perplexity.
//!
//! KL(p || q) = sum p (a - b) - log Za + log Zb for logits a, b, with all sums over the vocabulary in f64: in f32 the error of
//! one such sum (1e-4 in MLX on the CPU) is more than what an 8-bit cache loses.

use rayon::prelude::*;

/// Logits of some positions, row by row, with what is needed of them more than once.
pub struct Logits<'a> {
    rows: Vec<Row<'a>>,
}

struct Row<'a> {
    logits: &'a [f32],
    log_z: f64,
    top: usize,
}

/// Sums over positions, which come window by window.
#[derive(Default)]
pub struct Measure {
    kl: Vec<f64>,
    /// Positions before each window but the first.
    borders: Vec<usize>,
    same: usize,
    loss: f64,
}

impl<'a> Logits<'a> {
    /// Rows of `vocabulary` logits.
    pub fn new(logits: &'a [f32], vocabulary: usize) -> Logits<'a> {
        let rows = logits.par_chunks_exact(vocabulary).map(|logits| {
            let top = (1..vocabulary).fold(0, |top, i| if logits[i] > logits[top] { i } else { top });
            let max = f64::from(logits[top]);
            let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
            Row { logits, log_z: max + sum.ln(), top }
        });
        Logits { rows: rows.collect() }
    }
}

impl Measure {
    /// Adds positions whose next tokens are `targets`; there may be one fewer of them at the end of a text.
    pub fn add(&mut self, reference: &Logits, other: &Logits, targets: &[u32]) {
        let rows: Vec<_> = reference.rows.iter().zip(&other.rows).zip(targets).collect();
        let divergence = |((a, b), _): &((&Row, &Row), &u32)| {
            let terms = a.logits.iter().zip(b.logits).map(|(&x, &y)| {
                let (x, y) = (f64::from(x), f64::from(y));
                (x - a.log_z).exp() * (x - y)
            });
            // Rounding can leave a KL of zero a little below it.
            (terms.sum::<f64>() - a.log_z + b.log_z).max(0.0)
        };
        self.kl.par_extend(rows.par_iter().map(divergence));
        for ((a, b), target) in rows {
            self.same += usize::from(a.top == b.top);
            self.loss += b.log_z - f64::from(b.logits[*target as usize]);
        }
    }

    /// Says that the positions from here on belong to another window.
    pub fn next_window(&mut self) {
        self.borders.push(self.kl.len());
    }

    /// The least and the greatest mean KL of a window.
    pub fn spread(&self) -> [f64; 2] {
        let ends = self.borders.iter().copied().chain([self.kl.len()]);
        let mut start = 0;
        ends.fold([f64::INFINITY, f64::NEG_INFINITY], |[least, most], end| {
            let window = &self.kl[start..end];
            start = end;
            let mean = window.iter().sum::<f64>() / window.len() as f64;
            [least.min(mean), most.max(mean)]
        })
    }

    /// Mean, median and 99th percentile of the KL divergence, in nats.
    pub fn kl(&self) -> [f64; 3] {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |fraction: f64| {
            let place = fraction * (sorted.len().max(1) - 1) as f64;
            let (low, high) = (sorted.get(place as usize), sorted.get(place.ceil() as usize));
            low.zip(high).map_or(f64::NAN, |(low, high)| low + (high - low) * place.fract())
        };
        [sorted.iter().sum::<f64>() / sorted.len() as f64, at(0.5), at(0.99)]
    }

    /// Share of positions where both runs have the same likeliest token.
    pub fn same_top1(&self) -> f64 {
        self.same as f64 / self.kl.len() as f64
    }

    /// Perplexity of the other run.
    pub fn perplexity(&self) -> f64 {
        (self.loss / self.kl.len() as f64).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_coins() {
        let (fair, biased) = ([0.0, 0.0], [(0.9f32 / 0.1).ln(), 0.0]);
        let [fair, biased] = [&fair, &biased].map(|x| Logits::new(x, 2));
        let mut measure = Measure::default();
        measure.add(&fair, &biased, &[0]);
        let expected = 0.5 * (0.5f64 / 0.9).ln() + 0.5 * (0.5f64 / 0.1).ln();
        assert!((measure.kl()[0] - expected).abs() < 1e-7);
        assert!((measure.perplexity() - 1.0 / 0.9).abs() < 1e-6);
        measure.add(&biased, &biased, &[1]);
        assert_eq!((measure.kl()[0], measure.same_top1()), (expected / 2.0, 1.0));
    }
}
