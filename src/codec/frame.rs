//! What a sequence adds to a codec: the centre, the gains and the channel order of each head, from its first block of keys.
//!
//! Centre: softmax does not change when one vector is taken from all keys of a head, so the mean of the first block costs
//! nothing at decode time and removes what key bias adds. Gains: noise that is isotropic after z = D (k - mu) costs
//! tr(Sq D^-2) tr(D Sk D), least for D_i^2 proportional to sqrt(Sq_ii / Sk_ii); D is tied over the RoPE pair (i, i + d/2) so
//! that it commutes with RoPE and does not drift with position. Order: the channels of greatest energy come first.
//!
//! Rows that are not finite. A row with NaN or infinity in it, or whose squared norm is no finite f32 (above 3.4e38), takes no part in
//! a frame, nor a query in gains. It decodes to NaN in every channel, and its neighbours as if it were not there: also those of its
//! tile where tokens are packed together, see [`crate::codec::tile`]. A block without a finite row gives the neutral frame (centre zero,
//! gains one, channels in order), with which later rows are packed as by a recipe without centring. So says this file for
//! every engine; the `Compressor` and files refuse such rows by name instead.

use crate::math::rotation::dot;

/// The tables of one head, as slices of f32 and channel indices; each is absent where the codec does not use it.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowFrame<'a> {
    /// Taken from every vector.
    pub centre: Option<&'a [f32]>,
    /// Multiplies every centred vector.
    pub gain: Option<&'a [f32]>,
    /// Channel that comes at each place.
    pub order: Option<&'a [u32]>,
}

/// Whether a row takes part in a frame.
pub fn finite(row: &[f32]) -> bool {
    dot(row, row).is_finite()
}

/// The rows of a block that take part.
fn rows(block: &[f32], dim: usize) -> impl Iterator<Item = &[f32]> {
    block.chunks_exact(dim).filter(|row| finite(row))
}

/// Mean of each channel over the finite rows of a block (`rows` x `dim`, row-major); zero if there is none.
pub fn mean(block: &[f32], dim: usize) -> Vec<f32> {
    let (mut sums, mut count) = (vec![0f64; dim], 0);
    for row in rows(block, dim) {
        sums.iter_mut().zip(row).for_each(|(s, &x)| *s += f64::from(x));
        count += 1;
    }
    sums.iter().map(|s| (s / f64::from(count.max(1))) as f32).collect()
}

/// Mean square of each channel about a centre, over the finite rows.
pub fn energy(block: &[f32], dim: usize, centre: Option<&[f32]>) -> Vec<f32> {
    let (mut sums, mut count) = (vec![0f64; dim], 0);
    for row in rows(block, dim) {
        for i in 0..dim {
            let x = f64::from(row[i] - centre.map_or(0.0, |c| c[i]));
            sums[i] += x * x;
        }
        count += 1;
    }
    sums.iter().map(|s| (s / f64::from(count.max(1))) as f32).collect()
}

/// Covariance of the channels over the finite rows of a block, `dim` x `dim`, row-major.
pub fn covariance(block: &[f32], dim: usize) -> Vec<f64> {
    let mean = mean(block, dim);
    let (mut sums, mut row) = (vec![0f64; dim * dim], vec![0f64; dim]);
    for x in rows(block, dim) {
        row.iter_mut().zip(x).zip(&mean).for_each(|((r, x), m)| *r = f64::from(x - m));
        for (sums, a) in sums.chunks_exact_mut(dim).zip(&row) {
            sums.iter_mut().zip(&row).for_each(|(sum, b)| *sum += a * b);
        }
    }
    let count = rows(block, dim).count().max(1) as f64;
    sums.iter_mut().for_each(|sum| *sum /= count);
    sums
}

/// Gains from the energies of keys and, where they are known, of queries; geometric mean one.
pub fn gains(keys: &[f32], queries: Option<&[f32]>) -> Vec<f32> {
    let half = keys.len() / 2;
    let pair = |e: &[f32], i: usize| f64::from(e[i]) + f64::from(e[i + half]);
    // A floor keeps a channel that was silent in the first block from being blown up later.
    let floor = 1e-3 * keys.iter().map(|&x| f64::from(x)).sum::<f64>() / half.max(1) as f64 + 1e-30;
    let q_floor = queries
        .map_or(0.0, |q| 1e-3 * q.iter().map(|&x| f64::from(x)).sum::<f64>() / half.max(1) as f64 + 1e-30);
    let logs: Vec<f64> = (0..half)
        .map(|i| {
            let q = queries.map_or(1.0, |q| pair(q, i) + q_floor);
            0.25 * libm::log(q / (pair(keys, i) + floor))
        })
        .collect();
    let mean = logs.iter().sum::<f64>() / half.max(1) as f64;
    (0..keys.len()).map(|i| libm::exp(logs[i % half] - mean) as f32).collect()
}

/// Channel order with the `outliers` channels of greatest energy first, each part in ascending order; ties go to the lower channel.
pub fn order(energy: &[f32], outliers: usize) -> Vec<u32> {
    let mut by_energy: Vec<u32> = (0..energy.len() as u32).collect();
    by_energy.sort_by(|&a, &b| energy[b as usize].total_cmp(&energy[a as usize]).then(a.cmp(&b)));
    by_energy[..outliers].sort_unstable();
    by_energy[outliers..].sort_unstable();
    by_energy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_follow_the_law_and_are_tied_over_pairs() {
        let keys = [16.0, 1.0, 16.0, 1.0];
        let g = gains(&keys, None);
        assert_eq!((g[0], g[1]), (g[2], g[3]));
        // D^2 ~ Sk^-1/2: energies 16 : 1 give D 1 : 2.
        assert!((g[1] / g[0] - 2.0).abs() < 1e-2, "{g:?}");
        assert!((g[0] * g[1] - 1.0).abs() < 1e-5, "geometric mean");
        let even = gains(&keys, Some(&keys));
        assert!(even.iter().all(|x| (x - 1.0).abs() < 1e-2), "queries like keys: {even:?}");
        assert!(gains(&[0.0; 4], None).iter().all(|x| x.is_finite()));
    }

    #[test]
    fn order_puts_the_loud_channels_first() {
        assert_eq!(order(&[1.0, 5.0, 1.0, 9.0], 2), [1, 3, 0, 2]);
        assert_eq!(order(&[1.0; 4], 2), [0, 1, 2, 3]);
        assert_eq!(mean(&[1.0, 2.0, 3.0, 4.0], 2), [2.0, 3.0]);
        assert_eq!(energy(&[1.0, 2.0, 3.0, 4.0], 2, Some(&[2.0, 2.0])), [1.0, 2.0]);
        assert_eq!(covariance(&[1.0, 2.0, 3.0, 6.0], 2), [1.0, 2.0, 2.0, 4.0]);
    }
}
