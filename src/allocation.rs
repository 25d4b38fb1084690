//! Bits over layers, heads and sides at a budget: what is lost is the sum of every part's own loss at its width.
//!
//! A loss that falls ever more slowly with the bits is spent best one step at a time, always where a bit buys most. A measured loss
//! need not be convex, so steps go along its lower convex hull. Parts of equal size and curve shape get bits in the order of their
//! importance; ties go to the part that comes first.

pub mod calibration;
pub mod head_scores;

pub use head_scores::{HeadScorer, HeadScores};

use crate::error::{Error, Result};
use crate::spec::Side;
use crate::spec::bit_plan::{BitPlan, Widths};

/// Widest code that is given out.
pub const MOST_BITS: usize = 8;

/// Mean squared error of a unit-variance coordinate at 1 to 8 bits: trellis codes of 2^8 states (tests/suite/laws.rs holds the trellis to
/// them), above 4 bits the Beta-law grid that takes their place.
pub const DISTORTION: [f64; MOST_BITS] =
    [0.2765, 0.0737, 0.0194, 0.0052, 2.5047e-3, 6.4424e-4, 1.6348e-4, 4.1185e-5];

/// One side of one KV head: what its noise does.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSide {
    /// Ordinal of the layer among those with keys and values.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Keys or values.
    pub side: Side,
    /// Scalars of a token.
    pub channels: usize,
    /// Loss at 1 to 8 bits.
    pub losses: [f64; MOST_BITS],
}

impl HeadSide {
    /// A part whose loss is proportional to the distortion of its codes; `price` is the loss when the noise has the energy of the
    /// vectors themselves.
    pub fn by_price(layer: usize, head: usize, side: Side, channels: usize, price: f64) -> HeadSide {
        HeadSide { layer, head, side, channels, losses: DISTORTION.map(|d| price * d) }
    }

    /// Vertices of the lower convex hull of the losses from `least` to `most` bits: widths that can be reached, with the loss.
    fn hull(&self, least: usize, most: usize) -> Vec<(usize, f64)> {
        let mut hull: Vec<(usize, f64)> = vec![];
        for bits in least..=most {
            let loss = self.losses[bits - 1];
            let slope = |a: (usize, f64)| (loss - a.1) / (bits - a.0) as f64;
            while let [.., a, b] = hull[..]
                && slope(b) <= slope(a)
            {
                hull.pop();
            }
            hull.push((bits, loss));
        }
        // Bits that lose more are not worth having.
        let falling = hull.windows(2).take_while(|w| w[1].1 < w[0].1).count();
        hull.truncate(falling + 1);
        hull
    }
}

/// Most channels of all heads of a model together, far from overflow in every count of bits.
const MOST_SCALARS: usize = 1 << 40;

/// Widths of all parts, in their order, with `average` bits per scalar at most and each from `least` to `most` bits.
///
/// # Errors
/// [`Error::Unsupported`] if the average is below `least`, the range is not within 1 to 8 bits, or a loss is not a finite number.
pub fn allocate(parts: &[HeadSide], average: f64, least: u8, most: u8) -> Result<Vec<u8>> {
    let no = |field, value: String, reason: String| Err(Error::Unsupported { field, value, reason });
    if !(1..=most).contains(&least) || usize::from(most) > MOST_BITS {
        return no("bits of a head", format!("{least} to {most}"), "a range within 1 to 8".into());
    }
    if !average.is_finite() || average < f64::from(least) {
        return no("budget", average.to_string(), format!("at least {least} bits, the floor of every head"));
    }
    if let Some(bad) = parts.iter().find(|p| p.losses.iter().any(|x| !x.is_finite())) {
        let value = format!("layer {}, head {}, {}", bad.layer, bad.head, bad.side);
        return no("loss", value, "finite numbers".into());
    }
    let scalars = parts.iter().try_fold(0usize, |sum, p| sum.checked_add(p.channels));
    let Some(scalars) = scalars.filter(|scalars| *scalars <= MOST_SCALARS) else {
        let widest = parts.iter().map(|p| p.channels).max().unwrap_or_default();
        return no("channels", widest.to_string(), format!("at most {MOST_SCALARS} in all heads together"));
    };
    let mut left = average * scalars as f64 - (scalars * usize::from(least)) as f64;
    let hulls: Vec<_> = parts.iter().map(|p| p.hull(least.into(), most.into())).collect();
    let mut steps: Vec<(f64, usize, usize)> = vec![];
    for (i, hull) in hulls.iter().enumerate() {
        for (n, pair) in hull.windows(2).enumerate() {
            let bits = ((pair[1].0 - pair[0].0) * parts[i].channels) as f64;
            steps.push(((pair[0].1 - pair[1].1) / bits, i, n));
        }
    }
    // Along a hull the gain only falls, so a part's own steps stay in order.
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)).then(a.1.cmp(&b.1)));
    let mut widths = vec![least; parts.len()];
    for (_, i, n) in steps {
        let (from, to) = (hulls[i][n].0, hulls[i][n + 1].0);
        let cost = ((to - from) * parts[i].channels) as f64;
        // A part that could not take a step takes none behind it.
        if usize::from(widths[i]) == from && cost <= left + 1e-9 {
            widths[i] = to as u8;
            left -= cost;
        }
    }
    Ok(widths)
}

/// The loss of parts at given widths.
pub fn loss(parts: &[HeadSide], widths: &[u8]) -> f64 {
    parts.iter().zip(widths).map(|(p, &b)| p.losses[usize::from(b).clamp(1, MOST_BITS) - 1]).sum()
}

/// The plan of a model from the widths of its parts.
///
/// # Errors
/// [`Error::Unsupported`] if a layer, head or side is missing or named twice.
pub fn plan(parts: &[HeadSide], widths: &[u8]) -> Result<BitPlan> {
    let side = |side: Side| -> Result<Widths> {
        let mut layers: Vec<Vec<u8>> = vec![];
        let mut mine: Vec<_> = parts.iter().zip(widths).filter(|(p, _)| p.side == side).collect();
        mine.sort_by_key(|(p, _)| (p.layer, p.head));
        for (part, &bits) in mine {
            if part.layer == layers.len() {
                layers.push(vec![]);
            }
            let count = layers.len();
            match layers.last_mut() {
                Some(layer) if part.layer + 1 == count && part.head == layer.len() => layer.push(bits),
                _ => {
                    let value = format!("layer {}, head {}, {side}", part.layer, part.head);
                    let reason = "every layer, head and side has to come once".into();
                    return Err(Error::Unsupported { field: "part", value, reason });
                }
            }
        }
        Widths::new(layers)
    };
    Ok(BitPlan { key: side(Side::Key)?, value: side(Side::Value)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(head: usize, price: f64) -> HeadSide {
        HeadSide::by_price(0, head, Side::Key, 64, price)
    }

    #[test]
    fn equal_prices_give_equal_bits() {
        let parts: Vec<_> = (0..8).map(|h| part(h, 1.0)).collect();
        assert_eq!(allocate(&parts, 3.0, 1, 8).unwrap(), [3; 8]);
        assert_eq!(allocate(&parts, 2.5, 2, 8).unwrap(), [3, 3, 3, 3, 2, 2, 2, 2], "ties go to the first");
        assert_eq!(allocate(&parts, 9.0, 1, 8).unwrap(), [8; 8]);
    }

    #[test]
    fn a_loss_that_is_not_convex_is_taken_by_its_hull() {
        // Two bits are no better than one, three are.
        let mut bumpy = part(0, 0.0);
        bumpy.losses = [1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1];
        assert_eq!(bumpy.hull(1, 8), [(1, 1.0), (3, 0.1)]);
        assert_eq!(allocate(&[bumpy.clone()], 2.0, 1, 8).unwrap(), [1], "a half step buys nothing");
        assert_eq!(allocate(&[bumpy], 8.0, 1, 8).unwrap(), [3]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let parts = [part(0, 1.0)];
        assert!(matches!(allocate(&parts, 1.5, 2, 8), Err(Error::Unsupported { field: "budget", .. })));
        assert!(matches!(allocate(&parts, f64::NAN, 2, 8), Err(Error::Unsupported { field: "budget", .. })));
        assert!(allocate(&parts, 4.0, 0, 8).is_err() && allocate(&parts, 4.0, 2, 9).is_err());
        assert!(matches!(
            allocate(&[part(0, f64::NAN)], 4.0, 2, 8),
            Err(Error::Unsupported { field: "loss", .. })
        ));
        let wide = HeadSide { channels: usize::MAX, ..part(0, 1.0) };
        for parts in [vec![wide.clone()], vec![wide.clone(), wide]] {
            assert!(matches!(allocate(&parts, 4.0, 2, 8), Err(Error::Unsupported { field: "channels", .. })));
        }
        assert!(plan(&[part(0, 1.0), part(0, 1.0)], &[2, 2]).is_err(), "a head named twice");
        assert!(plan(&[part(1, 1.0)], &[2]).is_err(), "no head 0");
    }
}
