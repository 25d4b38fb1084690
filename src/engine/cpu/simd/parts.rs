//! What the forms with registers have in common: rows taken four at a time, and the constants of the exponential.

/// Four rows from `first` on, in runs of a register's size; those that there are not are the last one.
#[inline(always)]
pub(super) fn four<const N: usize>(x: &[f32], dim: usize, first: usize, rows: usize) -> [&[[f32; N]]; 4] {
    let mut four: [&[[f32; N]]; 4] = [&[]; 4];
    for (i, row) in four.iter_mut().enumerate() {
        *row = &x[(first + i).min(rows - 1) * dim..][..dim].as_chunks().0[..dim / N];
    }
    four
}

/// exp(d) = 2^n exp(r) with n = round(d / ln 2), |r| <= ln 2 / 2: 2e-7 relative.
pub(super) mod exp {
    /// Below this exp counts as zero.
    pub const LOW: f32 = -87.0;
    /// ln 2 in two parts, of which the first times any n here is exact.
    pub const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// exp(r), from the power six down.
    pub const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
}
