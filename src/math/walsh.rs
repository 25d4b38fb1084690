//! The fast transforms inside the Hadamard rotation, on one vector of m x n elements: Walsh-Hadamard along n, a small factor along m.
//!
//! The Walsh steps 1, 2, 4, ... double the distance of the two elements that are added and subtracted, H_2n = [[H, H], [H, -H]].
//! Steps of eight and more add whole registers. Two steps a pass save half of the loads and leave every sum as it is, so the
//! bits are the same as one step at a time gives.

use crate::math::lanes::walsh8;

/// Lanes of a block: a length that every vector width divides.
const LANES: usize = 16;

/// Unnormalised Walsh-Hadamard transform of every run of `n` elements, n a power of two.
#[inline(always)]
pub fn walsh(x: &mut [f32], n: usize) {
    // Sizes known to the compiler for the common heads, so that the passes unroll.
    match n {
        4 => walsh8::<2>(x),
        8 => walsh8::<3>(x),
        64 => passes::<64>(x),
        128 => passes::<128>(x),
        256 => passes::<256>(x),
        _ => {
            walsh8::<3>(x);
            x.chunks_exact_mut(n).for_each(steps);
        }
    }
}

#[inline(always)]
fn passes<const N: usize>(x: &mut [f32]) {
    walsh8::<3>(x);
    for run in x.as_chunks_mut::<N>().0 {
        steps(run);
    }
}

/// The steps from eight on.
#[inline(always)]
fn steps(run: &mut [f32]) {
    let mut h = 8;
    while 4 * h <= run.len() {
        quadruple(run, h);
        h *= 4;
    }
    if h < run.len() {
        double(run, h);
    }
}

/// Step `h`.
#[inline(always)]
fn double(run: &mut [f32], h: usize) {
    for pair in run.chunks_exact_mut(2 * h) {
        let (low, high) = pair.split_at_mut(h);
        for i in 0..h {
            (low[i], high[i]) = (low[i] + high[i], low[i] - high[i]);
        }
    }
}

/// Steps `h` and `2 h`.
#[inline(always)]
fn quadruple(run: &mut [f32], h: usize) {
    for four in run.chunks_exact_mut(4 * h) {
        let (low, high) = four.split_at_mut(2 * h);
        let ((a, b), (c, d)) = (low.split_at_mut(h), high.split_at_mut(h));
        for i in 0..h {
            let (p, q) = (a[i] + b[i], a[i] - b[i]);
            let (r, s) = (c[i] + d[i], c[i] - d[i]);
            (a[i], b[i], c[i], d[i]) = (p + r, q + s, p - r, q - s);
        }
    }
}

/// Multiplies the m rows of `x` (m x n) by an m x m matrix, whose table [`entries`] made.
#[inline(always)]
pub fn mix(x: &mut [f32], table: &[f32], m: usize, scratch: &mut [f32]) {
    scratch.copy_from_slice(x);
    match x.len() / m {
        4 => short::<4>(x, table, m, scratch),
        8 => short::<8>(x, table, m, scratch),
        n => {
            for (at, y) in x.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let (i, lane) = (at * LANES / n, at * LANES % n);
                let mut sum = [0f32; LANES];
                for (s, f) in scratch.chunks_exact(n).zip(&table[i * m..][..m]) {
                    let s = &s[lane..][..LANES];
                    for k in 0..LANES {
                        sum[k] += f * s[k];
                    }
                }
                *y = sum;
            }
        }
    }
}

/// Rows of less than a block: a block holds several.
#[inline(always)]
fn short<const N: usize>(x: &mut [f32], table: &[f32], m: usize, rows: &[f32]) {
    for (y, entries) in x.as_chunks_mut::<LANES>().0.iter_mut().zip(table.chunks_exact(m * LANES)) {
        let mut sum = [0f32; LANES];
        for (row, entries) in rows.as_chunks::<N>().0.iter().zip(entries.as_chunks::<LANES>().0) {
            for k in 0..LANES {
                sum[k] += entries[k] * row[k % N];
            }
        }
        *y = sum;
    }
}

/// The table of a matrix (m x m, row-major) or of its transpose for rows of `n` elements: as it is for rows of a block and
/// more; for shorter ones the entries that the lanes of a block meet, column after column.
pub fn entries(matrix: &[f32], m: usize, n: usize, transpose: bool) -> Vec<f32> {
    let entry = |i: usize, j: usize| if transpose { matrix[j * m + i] } else { matrix[i * m + j] };
    let (blocks, lanes) = if n < LANES { (m * n / LANES, LANES) } else { (m, 1) };
    let mut table = Vec::with_capacity(m * blocks * lanes);
    for block in 0..blocks {
        for j in 0..m {
            table.extend(
                (0..lanes).map(|k| entry(if n < LANES { (block * LANES + k) / n } else { block }, j)),
            );
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    #[test]
    fn the_fast_transforms_are_the_products_that_they_stand_for() {
        let mut rng = Rng::new(7, 7);
        for (m, n) in
            [4, 8, 16, 32, 64, 128, 256, 512].into_iter().flat_map(|n| [1, 12, 20, 28].map(|m| (m, n)))
        {
            if m * n < 8 {
                continue;
            }
            let x: Vec<f32> = (0..m * n).map(|_| rng.normal() as f32).collect();
            let mut y = x.clone();
            walsh(&mut y, n);
            for (i, y) in y.iter().enumerate() {
                let sign = |j: usize| if ((i % n) & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let want: f64 = (0..n).map(|j| sign(j) * f64::from(x[i / n * n + j])).sum();
                assert!(
                    (f64::from(*y) - want).abs() < 1e-5 * n as f64,
                    "walsh {n}, element {i}: {y} for {want}"
                );
            }
            if m == 1 {
                continue;
            }
            let matrix: Vec<f32> = (0..m * m).map(|_| rng.normal() as f32).collect();
            for transpose in [false, true] {
                let (mut y, mut scratch) = (x.clone(), vec![0.0; m * n]);
                mix(&mut y, &entries(&matrix, m, n, transpose), m, &mut scratch);
                for (at, y) in y.iter().enumerate() {
                    let entry = |j: usize| matrix[if transpose { j * m + at / n } else { at / n * m + j }];
                    // The same order of the same products.
                    let want = (0..m).fold(0.0, |sum, j| sum + entry(j) * x[j * n + at % n]);
                    assert_eq!(*y, want, "{m} x {n}, element {at}");
                }
            }
        }
    }
}
