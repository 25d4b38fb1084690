//! Orthogonal rotations that spread a vector's energy evenly over its coordinates.
//!
//! `dense`: Q of the QR decomposition of a Gaussian matrix, column signs such that diag(R) > 0 (Haar measure).
//! `hadamard`: y = (H_m x H_n)(s * x) / sqrt(d) with random signs s, d = m n, n a power of two, m in {1, 12, 20, 28};
//! O(d log d) and nothing stored but the signs. Without the signs structured vectors would pass through unspread.
//! Every step is plain f32 add and multiply in a fixed order: the same bits on every machine and thread count.

use crate::math::rng::Rng;
use crate::math::walsh::{entries, mix, walsh};
use std::sync::LazyLock;

/// Streams of the generator, so that tables of one seed are independent.
const SIGNS: u64 = 1;
const GAUSSIAN: u64 = 2;

/// An orthogonal matrix of one size, ready to apply.
#[derive(Clone, Debug)]
pub enum Rotation {
    /// Leaves the vector as it is.
    Identity,
    /// Row-major d x d matrix; `y_i = sum_j matrix[i d + j] x_j`.
    Dense {
        /// Size.
        dim: usize,
        /// The matrix.
        matrix: Vec<f32>,
    },
    /// Randomized Hadamard transform.
    Hadamard {
        /// Random signs, length d.
        signs: Vec<f32>,
        /// Row-major m x m Hadamard matrix of the factor that is no power of two; empty for m = 1.
        factor: Vec<f32>,
        /// m.
        order: usize,
    },
}

/// m of d = m 2^k with m in {1, 12, 20, 28}, or `None` if d has no such form or is below 8, the length of a step of the transform.
pub fn hadamard_order(dim: usize) -> Option<usize> {
    [1, 12, 20, 28].into_iter().find(|m| {
        let least = if *m == 1 { 8 } else { 4 };
        dim.is_multiple_of(*m) && (dim / m).is_power_of_two() && dim / m >= least
    })
}

impl Rotation {
    /// A Haar-distributed dense rotation.
    pub fn dense(dim: usize, seed: u64) -> Rotation {
        Rotation::Dense { dim, matrix: haar(dim, seed) }
    }

    /// A randomized Hadamard rotation, or `None` where [`hadamard_order`] has none.
    pub fn hadamard(dim: usize, seed: u64) -> Option<Rotation> {
        let order = hadamard_order(dim)?;
        let factor = if order == 1 { vec![] } else { hadamard_matrix(order) };
        Some(Rotation::Hadamard { signs: Rng::new(seed, SIGNS).signs(dim), factor, order })
    }

    /// `y = R x`, in place. `scratch` is overwritten and must be as long as `x`.
    #[inline(always)]
    pub fn forward(&self, x: &mut [f32], scratch: &mut [f32]) {
        match self {
            Rotation::Identity => {}
            Rotation::Dense { dim, matrix } => {
                scratch.copy_from_slice(x);
                for (y, row) in x.iter_mut().zip(matrix.chunks_exact(*dim)) {
                    *y = dot(row, scratch);
                }
            }
            Rotation::Hadamard { signs, order, .. } => {
                let norm = 1.0 / (x.len() as f32).sqrt();
                for (x, s) in x.iter_mut().zip(signs) {
                    *x *= norm * s;
                }
                walsh(x, x.len() / order);
                multiply(x, *order, false, scratch);
            }
        }
    }

    /// `x = R^T y`, in place: the inverse of [`Rotation::forward`].
    #[inline(always)]
    pub fn inverse(&self, y: &mut [f32], scratch: &mut [f32]) {
        match self {
            Rotation::Identity => {}
            Rotation::Dense { dim, matrix } => {
                scratch.copy_from_slice(y);
                y.fill(0.0);
                for (&s, row) in scratch.iter().zip(matrix.chunks_exact(*dim)) {
                    for (y, m) in y.iter_mut().zip(row) {
                        *y += s * m;
                    }
                }
            }
            Rotation::Hadamard { signs, order, .. } => {
                multiply(y, *order, true, scratch);
                walsh(y, y.len() / order);
                let norm = 1.0 / (y.len() as f32).sqrt();
                for (y, s) in y.iter_mut().zip(signs) {
                    *y *= norm * s;
                }
            }
        }
    }
}

/// Inner product with sixteen running sums joined pairwise, so that the result does not depend on the vector width.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a16.zip(b16) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0] + tail
}

/// Tables of the factors of order 12, 20 and 28 for rows of 4, 8 and more elements, and of their transposes.
static FACTORS: LazyLock<[[[Vec<f32>; 2]; 3]; 3]> = LazyLock::new(|| {
    [12, 20, 28].map(|m| {
        let h = hadamard_matrix(m);
        [4, 8, 16].map(|n| [false, true].map(|transpose| entries(&h, m, n, transpose)))
    })
});

/// Multiplies by the factor of order m, or its transpose.
#[inline(always)]
fn multiply(x: &mut [f32], m: usize, transpose: bool, scratch: &mut [f32]) {
    if m > 1 {
        let factor = &FACTORS[(m - 12) / 8];
        let tables = match x.len() / m {
            4 => &factor[0],
            8 => &factor[1],
            _ => &factor[2],
        };
        mix(x, &tables[usize::from(transpose)], m, scratch);
    }
}

/// A Hadamard matrix of order 12, 20 (Paley's first construction) or 28 (his second, over GF(13)).
pub fn hadamard_matrix(order: usize) -> Vec<f32> {
    let chi = |q: usize, a: usize| match a % q {
        0 => 0i32,
        a if (1..q).any(|x| x * x % q == a) => 1,
        _ => -1,
    };
    let mut h = vec![0f32; order * order];
    if order == 28 {
        // Symmetric conference matrix C of order 14; H = [[C + I, C - I], [C - I, -C - I]].
        let (q, n) = (13, 14);
        let c = |i: usize, j: usize| match (i, j) {
            (0, 0) => 0,
            (0, _) | (_, 0) => 1,
            _ => chi(q, q + i - j),
        };
        for i in 0..n {
            for j in 0..n {
                let (cij, unit) = (c(i, j), i32::from(i == j));
                h[i * order + j] = (cij + unit) as f32;
                h[i * order + n + j] = (cij - unit) as f32;
                h[(n + i) * order + j] = (cij - unit) as f32;
                h[(n + i) * order + n + j] = (-cij - unit) as f32;
            }
        }
    } else {
        // H = I + S with S skew: first row +1, first column -1, quadratic residues of q = order - 1 inside.
        let q = order - 1;
        for i in 0..order {
            for j in 0..order {
                let s = match (i, j) {
                    _ if i == j => 1,
                    (0, _) => 1,
                    (_, 0) => -1,
                    _ => chi(q, q + i - j),
                };
                h[i * order + j] = s as f32;
            }
        }
    }
    h
}

/// Q of a Gaussian matrix by Householder reflections in f64, signs such that diag(R) > 0. Row-major f32.
fn haar(dim: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed, GAUSSIAN);
    // Column-major: a[j] is column j.
    let mut a: Vec<Vec<f64>> = (0..dim).map(|_| (0..dim).map(|_| rng.normal()).collect()).collect();
    let mut reflectors: Vec<Vec<f64>> = Vec::with_capacity(dim);
    let mut signs = Vec::with_capacity(dim);
    let reflect = |v: &[f64], x: &mut [f64]| {
        let projection = 2.0 * v.iter().zip(x.iter()).map(|(v, x)| v * x).sum::<f64>();
        x.iter_mut().zip(v).for_each(|(x, v)| *x -= projection * v);
    };
    for k in 0..dim {
        let mut v = a[k][k..].to_vec();
        let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt();
        // The reflection maps the column to alpha e_k, alpha of the opposite sign to avoid cancellation.
        let alpha = if v[0] > 0.0 { -norm } else { norm };
        v[0] -= alpha;
        let length = v.iter().map(|x| x * x).sum::<f64>().sqrt();
        if length > 0.0 {
            v.iter_mut().for_each(|x| *x /= length);
        }
        for column in &mut a[k + 1..] {
            reflect(&v, &mut column[k..]);
        }
        signs.push(if alpha < 0.0 { -1.0 } else { 1.0 });
        reflectors.push(v);
    }
    let mut matrix = vec![0f32; dim * dim];
    for j in 0..dim {
        let mut column = vec![0f64; dim];
        column[j] = signs[j];
        for k in (0..dim).rev() {
            reflect(&reflectors[k], &mut column[k..]);
        }
        for i in 0..dim {
            matrix[i * dim + j] = column[i] as f32;
        }
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(dim: usize, seed: u64) -> Vec<Rotation> {
        let mut list = vec![Rotation::dense(dim, seed)];
        list.extend(Rotation::hadamard(dim, seed));
        list
    }

    #[test]
    fn rotations_are_orthogonal() {
        // T02, on every size that is used whole; 120 and 576 have no Hadamard form and are cut into bands by the codec.
        for dim in [8, 16, 32, 48, 64, 80, 96, 112, 120, 128, 192, 256, 576] {
            for rotation in all(dim, 42) {
                let mut scratch = vec![0.0; dim];
                let mut rows = vec![];
                for i in 0..dim {
                    let mut e = vec![0.0; dim];
                    e[i] = 1.0;
                    rotation.forward(&mut e, &mut scratch);
                    rows.push(e);
                }
                let mut worst = 0f64;
                for i in 0..dim {
                    for j in 0..=i {
                        let p: f64 = rows[i].iter().zip(&rows[j]).map(|(a, b)| *a as f64 * *b as f64).sum();
                        worst = worst.max((p - f64::from(u8::from(i == j))).abs());
                    }
                }
                assert!(worst < 1e-6, "dim {dim}: {worst}");
                let mut rng = Rng::new(3, 9);
                for _ in 0..100 {
                    let x: Vec<f32> = (0..dim).map(|_| rng.normal() as f32).collect();
                    let mut y = x.clone();
                    rotation.forward(&mut y, &mut scratch);
                    let (nx, ny) = (dot(&x, &x).sqrt(), dot(&y, &y).sqrt());
                    assert!((nx - ny).abs() < 1e-5 * nx, "norm, dim {dim}");
                    rotation.inverse(&mut y, &mut scratch);
                    assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5 * nx), "inverse, dim {dim}");
                }
            }
        }
    }

    #[test]
    fn sizes_without_a_hadamard_form_are_named() {
        assert_eq!([64, 80, 96, 112, 192, 1536].map(hadamard_order), [1, 20, 12, 28, 12, 12].map(Some));
        assert_eq!([0, 36, 72, 100, 120, 144, 288, 576].map(hadamard_order), [None; 8]);
        // Shorter ones are refused: the transform would leave them as they are, halved.
        for dim in 0..8 {
            assert!(Rotation::hadamard(dim, 1).is_none(), "{dim}");
        }
    }

    #[test]
    fn haar_matches_the_sign_convention() {
        // With diag(R) > 0, R = Q^T A has a positive diagonal for the Gaussian matrix of the same stream.
        let (dim, seed) = (24, 5);
        let Rotation::Dense { matrix, .. } = Rotation::dense(dim, seed) else { unreachable!() };
        let mut rng = Rng::new(seed, GAUSSIAN);
        for j in 0..dim {
            let column: Vec<f64> = (0..dim).map(|_| rng.normal()).collect();
            let r: f64 = (0..dim).map(|i| matrix[i * dim + j] as f64 * column[i]).sum();
            assert!(r > 0.0, "diagonal {j}");
        }
    }
}
