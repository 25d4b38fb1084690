//! Two steps that move data inside a register: the first Walsh-Hadamard steps of eight neighbours, and the search for a code
//! among up to fifteen borders.
//!
//! No portable loop is compiled well to them, so x86 has a form of its own, in safe calls of `pulp`; it gives the bits of the
//! plain form. Everything else in the codec is plain loops that the compiler turns into vectors.

#[cfg(target_arch = "x86_64")]
use pulp::x86::V3;

/// Borders of a code by the bits already known, from the highest down: the border that halves what is left.
pub type Tree = [[f32; 8]; 4];

/// The search tree of `2^bits - 1` ascending borders, at most four bits.
pub fn tree(borders: &[f32], bits: u8) -> Tree {
    let mut tree = [[f32::INFINITY; 8]; 4];
    for (k, level) in tree.iter_mut().enumerate().take(bits.into()) {
        for (known, border) in level.iter_mut().enumerate().take(1 << k) {
            *border = borders[((2 * known + 1) << (bits as usize - 1 - k)) - 1];
        }
    }
    tree
}

/// The first `STEPS` of steps 1, 2 and 4 of the unnormalised Walsh-Hadamard transform, on every eight elements.
#[inline(always)]
pub fn walsh8<const STEPS: usize>(x: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V3::try_new() {
        return simd.vectorize(avx2::Walsh8::<STEPS> { simd, x });
    }
    plain_walsh8::<STEPS>(x);
}

/// How many borders are at or below each coordinate; `codes` is as long as `u`, the tree has `B` levels.
#[inline(always)]
pub fn search<const B: usize>(tree: &Tree, u: &[f32], codes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V3::try_new() {
        return simd.vectorize(avx2::LaneSearch::<B> { simd, tree, u, codes });
    }
    plain_search::<B>(tree, u, codes);
}

#[inline(always)]
fn plain_walsh8<const STEPS: usize>(x: &mut [f32]) {
    #[inline(always)]
    fn step<const H: usize>(b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| if i & H == 0 { b[i] + b[i ^ H] } else { b[i ^ H] - b[i] })
    }
    for b in x.as_chunks_mut().0 {
        *b = step::<2>(step::<1>(*b));
        if STEPS == 3 {
            *b = step::<4>(*b);
        }
    }
}

#[inline(always)]
fn plain_search<const B: usize>(tree: &Tree, u: &[f32], codes: &mut [u8]) {
    for (code, &u) in codes.iter_mut().zip(u) {
        let mut known = 0;
        for level in &tree[..B] {
            known = 2 * known + usize::from(u >= level[known % 8]);
        }
        *code = known as u8;
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Tree, plain_search};
    use pulp::x86::V3;
    use pulp::{NullaryFnOnce, cast};
    use std::arch::x86_64::{__m256, __m256i, _CMP_GE_OQ};

    pub(super) struct Walsh8<'a, const STEPS: usize> {
        pub simd: V3,
        pub x: &'a mut [f32],
    }

    impl<const STEPS: usize> NullaryFnOnce for Walsh8<'_, STEPS> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let (avx, n) = (self.simd.avx, -0.0f32);
            let signs =
                [[0., n, 0., n, 0., n, 0., n], [0., 0., n, n, 0., 0., n, n], [0., 0., 0., 0., n, n, n, n]];
            let signs = signs.map(cast::<[f32; 8], __m256>);
            for b in self.x.as_chunks_mut::<8>().0 {
                let x: __m256 = cast(*b);
                // The partner, plus the element with the sign that a difference needs.
                let x = avx
                    ._mm256_add_ps(avx._mm256_permute_ps::<0b10_11_00_01>(x), avx._mm256_xor_ps(x, signs[0]));
                let x = avx
                    ._mm256_add_ps(avx._mm256_permute_ps::<0b01_00_11_10>(x), avx._mm256_xor_ps(x, signs[1]));
                if STEPS == 2 {
                    *b = cast(x);
                    continue;
                }
                let x =
                    avx._mm256_add_ps(avx._mm256_permute2f128_ps::<1>(x, x), avx._mm256_xor_ps(x, signs[2]));
                *b = cast(x);
            }
        }
    }

    pub(super) struct LaneSearch<'a, const B: usize> {
        pub simd: V3,
        pub tree: &'a Tree,
        pub u: &'a [f32],
        pub codes: &'a mut [u8],
    }

    impl<const B: usize> NullaryFnOnce for LaneSearch<'_, B> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let avx2 = self.simd.avx2;
            let tree = self.tree.map(cast::<[f32; 8], __m256>);
            let order: __m256i = cast([0u32, 4, 1, 5, 2, 6, 3, 7]);
            let (u, u_rest) = self.u.as_chunks::<32>();
            let (codes, codes_rest) = self.codes.as_chunks_mut::<32>();
            for (u, codes) in u.iter().zip(codes) {
                let u = u.as_chunks::<8>().0;
                // Not a closure: it would be compiled for the plain instruction set.
                let (a, b) = (eight::<B>(self.simd, &tree, u[0]), eight::<B>(self.simd, &tree, u[1]));
                let (c, d) = (eight::<B>(self.simd, &tree, u[2]), eight::<B>(self.simd, &tree, u[3]));
                let (ab, cd) = (avx2._mm256_packs_epi32(a, b), avx2._mm256_packs_epi32(c, d));
                // The packs work on halves of a register: groups of four codes come out in another order.
                *codes = cast(avx2._mm256_permutevar8x32_epi32(avx2._mm256_packus_epi16(ab, cd), order));
            }
            let (u, u_rest) = u_rest.as_chunks::<8>();
            let (codes, codes_rest) = codes_rest.as_chunks_mut::<8>();
            for (u, codes) in u.iter().zip(codes) {
                let known: [u32; 8] = cast(eight::<B>(self.simd, &tree, *u));
                *codes = known.map(|code| code as u8);
            }
            plain_search::<B>(self.tree, u_rest, codes_rest);
        }
    }

    #[inline(always)]
    fn eight<const B: usize>(simd: V3, tree: &[__m256; 4], u: [f32; 8]) -> __m256i {
        let (avx, avx2, u) = (simd.avx, simd.avx2, cast(u));
        let mut known: __m256i = cast([0u32; 8]);
        for &level in &tree[..B] {
            let border = avx2._mm256_permutevar8x32_ps(level, known);
            // All ones where the coordinate reaches the border: minus one.
            let above: __m256i = cast(avx._mm256_cmp_ps::<_CMP_GE_OQ>(u, border));
            known = avx2._mm256_sub_epi32(avx2._mm256_add_epi32(known, known), above);
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    #[test]
    fn every_form_gives_the_same_bits() {
        let mut rng = Rng::new(1, 2);
        for len in [0, 1, 7, 8, 10, 31, 32, 40, 64, 80, 96, 112, 128, 136] {
            let x: Vec<f32> = (0..len).map(|_| rng.normal() as f32).collect();
            let (mut fast, mut plain) = (x.clone(), x.clone());
            walsh8::<2>(&mut fast);
            plain_walsh8::<2>(&mut plain);
            assert_eq!(fast, plain, "two steps, {len} elements");
            walsh8::<3>(&mut fast);
            plain_walsh8::<3>(&mut plain);
            assert_eq!(fast, plain, "three steps, {len} elements");
            for bits in 1..=4u8 {
                let borders: Vec<f32> =
                    (1..1 << bits).map(|i| (i as f32 - (1 << (bits - 1)) as f32) * 0.25).collect();
                // Coordinates on the borders and equal borders too.
                for borders in [borders.clone(), borders.iter().map(|b| b.round()).collect()] {
                    let u: Vec<f32> = x
                        .iter()
                        .enumerate()
                        .map(|(i, &x)| if i % 3 == 0 { (4.0 * x).round() / 4.0 } else { x })
                        .collect();
                    let tree = tree(&borders, bits);
                    let (mut fast, mut plain) = (vec![9; len], vec![9; len]);
                    match bits {
                        1 => (search::<1>(&tree, &u, &mut fast), plain_search::<1>(&tree, &u, &mut plain)),
                        2 => (search::<2>(&tree, &u, &mut fast), plain_search::<2>(&tree, &u, &mut plain)),
                        3 => (search::<3>(&tree, &u, &mut fast), plain_search::<3>(&tree, &u, &mut plain)),
                        _ => (search::<4>(&tree, &u, &mut fast), plain_search::<4>(&tree, &u, &mut plain)),
                    };
                    let counted: Vec<u8> =
                        u.iter().map(|u| borders.iter().filter(|&b| u >= b).count() as u8).collect();
                    assert_eq!(fast, counted, "{bits} bits, {len} coordinates");
                    assert_eq!(plain, counted, "{bits} bits, {len} coordinates");
                }
            }
        }
    }
}
