//! Tokens that are packed together: how a tile of a channel-affine codec keeps a token that is not finite from its neighbours.
//!
//! A tile holds a scale and a bias for each channel over its tokens. Tokens that are not finite (see [`crate::codec::frame`]) are left out of
//! the ranges and marked: token `j` is not finite where channel `j` (modulo the number of channels, which may be half of the tokens)
//! is marked. MLX's rule gives a scale and a bias of opposite signs, or a bias of plus zero, or for a constant channel below zero two
//! minus signs and a scale below [`LEAST`]. So two plus signs are a mark, and two minus signs with a larger scale; without the mark
//! the bias has the other sign. A tile without a finite token has NaN for scales.

use crate::codec::frame;

/// Replaces rows of a tile (`tokens` x `dim`, row-major) that are not finite by one that is, so that they leave all ranges as they
/// are, and says which; `None` if all are finite. Without a finite row all become NaN.
pub fn leave_out(tile: &mut [f32], dim: usize) -> Option<Vec<bool>> {
    let bad: Vec<bool> = tile.chunks_exact(dim).map(|row| !frame::finite(row)).collect();
    if !bad.contains(&true) {
        return None;
    }
    match bad.iter().position(|bad| !bad) {
        None => tile.fill(f32::NAN),
        Some(good) => {
            for at in (0..bad.len()).filter(|&at| bad[at]) {
                tile.copy_within(good * dim..(good + 1) * dim, at * dim);
            }
        }
    }
    Some(bad)
}

/// Half-float bits of the least scale that is marked with a minus sign: 2.4e-7. Smaller ones, from ranges of which half floats hold
/// hardly a step, become this.
pub const LEAST: u16 = 4;

/// Marks tokens in the half-float bits of a tile: scale and bias of each channel in turn.
pub fn mark(pairs: &mut [u16], bad: &[bool]) {
    let dim = pairs.len() / 2;
    for channel in (0..dim.min(bad.len())).filter(|c| bad[*c..].iter().step_by(dim).any(|bad| *bad)) {
        let [scale, bias] = &mut pairs[2 * channel..][..2] else { continue };
        let (size, minus) = (*scale & 0x7fff, *scale & 0x8000 != 0);
        (*scale, *bias) = if *bias & 0x7fff == 0 {
            // All codes are zero, so the sign of the scale is free.
            (0x8000 | size.max(LEAST), 0x8000)
        } else if minus && *bias & 0x8000 == 0 {
            (0x8000 | size.max(LEAST), *bias | 0x8000)
        } else {
            (size, *bias & 0x7fff)
        };
    }
}

/// Takes the marks of a tile of `tokens` tokens away and says which it had; `None` if there was none.
pub fn take_marks(pairs: &mut [u16], tokens: usize) -> Option<Vec<bool>> {
    let dim = pairs.len() / 2;
    let mut bad: Option<Vec<bool>> = None;
    for (channel, pair) in pairs.chunks_exact_mut(2).enumerate().take(tokens) {
        let (scale, bias) = (pair[0], pair[1]);
        if (scale ^ bias) & 0x8000 == 0 && bias != 0 && (scale & 0x8000 == 0 || scale & 0x7fff >= LEAST) {
            pair[1] ^= 0x8000;
            let bad = bad.get_or_insert_with(|| vec![false; tokens]);
            bad[channel..].iter_mut().step_by(dim).for_each(|bad| *bad = true);
        }
    }
    bad
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::grid::affine_range;
    use half::f16;

    #[test]
    fn marks_come_back_and_leave_every_scale_and_bias_as_it_was() {
        let ranges: Vec<Vec<f32>> = vec![
            vec![0.0; 4],
            vec![-1.0, 2.0, 0.5, 0.0],
            vec![1.0, -2.0, 0.5, 0.0],
            vec![3.0; 4],
            vec![-3.0; 4],
            vec![-4e-8, 1e-8, 0.0, 0.0],
            vec![6e-8, 0.0, -6e-8, 1e-8],
            vec![65504.0, -65504.0, 0.0, 1.0],
        ];
        for bits in 1..=8 {
            let halves = |x: f32| f16::from_f32(x).to_bits();
            let plain: Vec<u16> = ranges
                .iter()
                .map(|x| affine_range(x, bits))
                .flat_map(|(s, z)| [halves(s), halves(z)])
                .collect();
            assert_eq!(take_marks(&mut plain.clone(), 8), None, "{bits} bits: nothing is marked by itself");
            for tokens in [8, 16] {
                for token in 0..tokens {
                    let mut bad = vec![false; tokens];
                    bad[token] = true;
                    let mut pairs = plain.clone();
                    mark(&mut pairs, &bad);
                    let back = take_marks(&mut pairs, tokens).unwrap();
                    assert!(
                        (0..tokens).all(|t| back[t] == (t % 8 == token % 8)),
                        "{bits} bits, token {token}"
                    );
                    for (got, want) in pairs.chunks_exact(2).zip(plain.chunks_exact(2)) {
                        // A bias of zero goes with codes of zero, so its scale does not count; a constant has no use for one.
                        let small = want[0] & 0x7fff < LEAST && got[0] & 0x7fff <= LEAST;
                        assert_eq!(got[1], want[1], "{bits} bits, token {token}");
                        assert!(got[0] == want[0] || small || want[1] == 0, "{got:?} {want:?}");
                    }
                }
            }
        }
    }
}
