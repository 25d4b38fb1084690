//! What the forms with registers have in common: rows taken four at a time, the loops of the weighted sum, and the constants of the
//! exponential.

/// Four rows from `first` on, in runs of a register's size; where there are fewer, the last is repeated.
#[inline(always)]
pub(super) fn four<const N: usize>(x: &[f32], dim: usize, first: usize, rows: usize) -> [&[[f32; N]]; 4] {
    let mut four: [&[[f32; N]]; 4] = [&[]; 4];
    for (i, row) in four.iter_mut().enumerate() {
        *row = &x[(first + i).min(rows - 1) * dim..][..dim].as_chunks().0[..dim / N];
    }
    four
}

/// Defines `accumulate`, see the parent, for registers of `$lanes` floats: up to four query rows go together, and `$wide` registers
/// of their channels, `$narrow` where fewer are left. The file has `load` and `store`; `$zero` is a register of zeros, and the last
/// argument adds a weight times a register of values to a register of sums.
macro_rules! accumulate {
    ($feature:literal, $lanes:literal x [$wide:literal, $narrow:literal], $zero:expr, |$w:ident, $v:ident, $sum:ident| $add:expr) => {
        /// See [`super::accumulate`].
        #[target_feature(enable = $feature)]
        pub(super) fn accumulate(weights: &[f32], tile: LaneBlock<f32>, sums: &mut [f32]) {
            let LaneBlock { width: dim, stride, .. } = tile;
            for (weights, sums) in weights.chunks(4 * stride).zip(sums.chunks_mut(4 * dim)) {
                let mut at = 0;
                while at < dim {
                    let wide = at + $lanes * $wide <= dim;
                    match (sums.len() / dim, wide) {
                        (1, true) => accumulate_of::<1, $wide>(weights, tile, at, sums),
                        (2, true) => accumulate_of::<2, $wide>(weights, tile, at, sums),
                        (3, true) => accumulate_of::<3, $wide>(weights, tile, at, sums),
                        (_, true) => accumulate_of::<4, $wide>(weights, tile, at, sums),
                        (1, false) => accumulate_of::<1, $narrow>(weights, tile, at, sums),
                        (2, false) => accumulate_of::<2, $narrow>(weights, tile, at, sums),
                        (3, false) => accumulate_of::<3, $narrow>(weights, tile, at, sums),
                        (_, false) => accumulate_of::<4, $narrow>(weights, tile, at, sums),
                    }
                    at += $lanes * if wide { $wide } else { $narrow };
                }
            }
        }

        /// `R` query rows, `C` registers of channels from `at` on.
        #[inline]
        #[target_feature(enable = $feature)]
        fn accumulate_of<const R: usize, const C: usize>(
            weights: &[f32],
            tile: LaneBlock<f32>,
            at: usize,
            sums: &mut [f32],
        ) {
            let LaneBlock { width: dim, n, stride, .. } = tile;
            let mut x = [[$zero; C]; R];
            let mut w: [&[f32]; R] = [&[]; R];
            for r in 0..R {
                w[r] = &weights[r * stride..][..n];
                let sums = sums[r * dim + at..].as_chunks().0;
                for c in 0..C {
                    x[r][c] = load(&sums[c]);
                }
            }
            for (t, row) in tile.rows.chunks_exact(dim).take(n).enumerate() {
                let row = row[at..][..$lanes * C].as_chunks().0;
                for c in 0..C {
                    let $v = load(&row[c]);
                    for r in 0..R {
                        let ($w, $sum) = (w[r][t], x[r][c]);
                        x[r][c] = $add;
                    }
                }
            }
            for r in 0..R {
                let sums = sums[r * dim + at..].as_chunks_mut().0;
                for c in 0..C {
                    store(&mut sums[c], x[r][c]);
                }
            }
        }
    };
}
pub(super) use accumulate;

/// exp(d) = 2^n exp(r) with n = round(d / ln 2), |r| <= ln 2 / 2: 2e-7 relative.
pub(super) mod exp {
    /// Below this exp counts as zero.
    pub const LOW: f32 = -87.0;
    /// ln 2 in two parts, of which the first times any n here is exact.
    pub const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// exp(r), from the power six down.
    pub const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
}
