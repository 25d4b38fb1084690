//! Tiers by received attention: blocks are ranked by an exponential mean of the attention that each of their tokens receives.
//!
//! m_t = (1 - a) m_(t-1) + a x_t, divided by 1 - (1 - a)^t so that early means are not biased to zero. A block's percentile is the
//! share of the other blocks that receive less, those that receive the same counted by half: equal attention gives equal tiers, and
//! less attention never more bits. A block has no rank before it was observed often enough. What falls below the eviction
//! threshold leaves before the others are ranked, so that deciding twice changes nothing.

use super::{Action, Bits, BlockFacts, check_bits, parse_error, terms};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A tier of [`AttentionDemotionPolicy`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionTier {
    /// Least percentile of its blocks, 0 to 1; the last tier takes all that is left.
    pub least: f32,
    /// Bits of its blocks.
    pub bits: Bits,
}

/// Tiers by received attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionDemotionPolicy {
    tiers: Vec<AttentionTier>,
    alpha: f32,
    patience: u32,
    evict: Option<f32>,
}

/// An exponential mean without bias to its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ema {
    sum: f32,
    weight: f32,
    steps: u32,
}

impl Ema {
    /// The mean after one more value.
    #[must_use]
    pub fn with(self, alpha: f32, x: f32) -> Ema {
        let mix = |old: f32, new: f32| old + alpha * (new - old);
        Ema { sum: mix(self.sum, x), weight: mix(self.weight, 1.0), steps: self.steps.saturating_add(1) }
    }

    /// The mean; zero before the first value.
    pub fn value(self) -> f32 {
        if self.steps == 0 { 0.0 } else { self.sum / self.weight }
    }

    /// Values seen.
    pub fn steps(self) -> u32 {
        self.steps
    }
}

impl Default for AttentionDemotionPolicy {
    fn default() -> Self {
        let tier = |least, key, value| AttentionTier { least, bits: Bits { key, value } };
        let tiers =
            vec![tier(0.95, 8, 8), tier(0.8, 6, 6), tier(0.4, 4, 4), tier(0.1, 3, 2), tier(0.0, 2, 1)];
        AttentionDemotionPolicy { tiers, alpha: 0.2, patience: 4, evict: None }
    }
}

impl AttentionDemotionPolicy {
    /// A policy with given tiers, best first; `alpha` is the weight of a new observation, `patience` the observations before a
    /// block may fall, `evict` the share of all attention below which a block is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless percentiles fall to zero, bits do not rise, 0 < alpha <= 1 and 0 <= evict < 1.
    pub fn new(
        tiers: Vec<AttentionTier>,
        alpha: f32,
        patience: u32,
        evict: Option<f32>,
    ) -> Result<AttentionDemotionPolicy> {
        let refuse = |field, value: String, reason: &str| {
            Err(Error::Unsupported { field, value, reason: reason.into() })
        };
        check_bits(&tiers.iter().map(|t| t.bits).collect::<Vec<_>>())?;
        let least: Vec<f32> = tiers.iter().map(|t| t.least).collect();
        let inside = least.iter().all(|p| (0.0..=1.0).contains(p)) && least[least.len() - 1] == 0.0;
        if !inside || !least.windows(2).all(|w| w[0] > w[1]) {
            return refuse(
                "tiers",
                format!("{least:?}"),
                "percentiles fall from tier to tier, the last is 0",
            );
        }
        if !(alpha > 0.0 && alpha <= 1.0) {
            return refuse("alpha", alpha.to_string(), "above 0, at most 1");
        }
        if let Some(share) = evict.filter(|share| !(0.0..1.0).contains(share)) {
            return refuse("evict", share.to_string(), "a share of all attention, 0 to 1");
        }
        Ok(AttentionDemotionPolicy { tiers, alpha, patience, evict })
    }

    /// The tiers, best first.
    pub fn tiers(&self) -> &[AttentionTier] {
        &self.tiers
    }

    /// Weight of a new observation.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// Observations before a block may fall.
    pub fn patience(&self) -> u32 {
        self.patience
    }

    /// Share of all attention below which a block is dropped.
    pub fn evict(&self) -> Option<f32> {
        self.evict
    }

    /// One action a block.
    pub fn decide(&self, blocks: &[BlockFacts]) -> Vec<Action> {
        let known = |b: &BlockFacts| b.observed >= self.patience.max(1) && b.mass.is_finite() && b.len > 0;
        let dropped =
            |b: &BlockFacts| known(b) && !b.pinned && self.evict.is_some_and(|least| b.mass < least);
        let density = |b: &BlockFacts| b.mass / b.len as f32;
        let mut ranked: Vec<f32> = blocks.iter().filter(|b| known(b) && !dropped(b)).map(density).collect();
        ranked.sort_unstable_by(f32::total_cmp);
        let action = |b: &BlockFacts| {
            if dropped(b) {
                return Action::Drop;
            }
            if !known(b) || b.pinned {
                return Action::Keep;
            }
            let x = density(b);
            let less = ranked.partition_point(|y| *y < x);
            let same = ranked.partition_point(|y| *y <= x) - less;
            let others = ranked.len().saturating_sub(1);
            let place = less as f32 + 0.5 * same.saturating_sub(1) as f32;
            let percentile = if others == 0 { 1.0 } else { place / others as f32 };
            let tier = self.tiers.partition_point(|t| t.least > percentile);
            if tier > b.tier { Action::Recode(tier) } else { Action::Keep }
        };
        blocks.iter().map(action).collect()
    }
}

impl fmt::Display for AttentionDemotionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attention:")?;
        for tier in &self.tiers {
            match tier.least {
                0.0 => write!(f, "rest={}", tier.bits)?,
                least => write!(f, "{least}={},", tier.bits)?,
            }
        }
        write!(f, ",alpha={},patience={}", self.alpha, self.patience)?;
        self.evict.map_or(Ok(()), |share| write!(f, ",evict={share}"))
    }
}

impl FromStr for AttentionDemotionPolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<AttentionDemotionPolicy> {
        const WHAT: &str = "attention policy";
        let base = AttentionDemotionPolicy::default();
        let Some(terms) = terms(WHAT, "attention", text)? else { return Ok(base) };
        let number = |t: &str| -> Result<f32> {
            t.parse().map_err(|_| parse_error(WHAT, text, format!("{t:?} is no number")))
        };
        let (mut tiers, mut alpha, mut patience, mut evict) = (vec![], base.alpha, base.patience, None);
        for (left, right) in terms {
            match left {
                "alpha" => alpha = number(right)?,
                "evict" => evict = Some(number(right)?),
                "patience" => {
                    let fail = |_| parse_error(WHAT, text, format!("patience {right:?}"));
                    patience = right.parse().map_err(fail)?;
                }
                "rest" => tiers.push(AttentionTier { least: 0.0, bits: right.parse()? }),
                least => tiers.push(AttentionTier { least: number(least)?, bits: right.parse()? }),
            }
        }
        let tiers = if tiers.is_empty() { base.tiers } else { tiers };
        AttentionDemotionPolicy::new(tiers, alpha, patience, evict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(i: usize, mass: f32) -> BlockFacts {
        BlockFacts { start: 128 * i, len: 128, age: 0, mass, observed: 9, tier: 0, pinned: false }
    }

    #[test]
    fn the_mean_is_not_biased_to_its_start() {
        let mut ema = Ema::default();
        for steps in 1..50 {
            ema = ema.with(0.2, 3.0);
            assert!((ema.value() - 3.0).abs() < 1e-5 && ema.steps() == steps);
        }
        assert!((Ema::default().with(0.2, 1.0).with(0.2, 0.0).value() - 0.16 / 0.36).abs() < 1e-6);
    }

    #[test]
    fn percentiles_fall_into_their_tiers() {
        let policy = AttentionDemotionPolicy::default();
        let blocks: Vec<BlockFacts> = (0..101).map(|i| block(i, i as f32)).collect();
        let actions = policy.decide(&blocks);
        for (i, tier) in [(100, 0), (95, 0), (94, 1), (80, 1), (79, 2), (40, 2), (39, 3), (10, 3), (9, 4)] {
            let want = if tier == 0 { Action::Keep } else { Action::Recode(tier) };
            assert_eq!(actions[i], want, "percentile {i}");
        }
        let even: Vec<BlockFacts> = (0..10).map(|i| block(i, 0.1)).collect();
        assert!(policy.decide(&even).iter().all(|a| *a == Action::Recode(2)), "ties are medium");
    }

    #[test]
    fn pins_and_strangers_stay_and_what_is_hardly_seen_goes() {
        let text = "attention:0.95=8/8,rest=2/1,evict=0.01,patience=4";
        let policy: AttentionDemotionPolicy = text.parse().unwrap();
        let pinned = BlockFacts { pinned: true, ..block(0, 0.0) };
        let fresh = BlockFacts { observed: 3, ..block(1, 0.0) };
        let nan = block(4, f32::NAN);
        let blocks = [pinned, fresh, block(2, 0.001), block(3, 0.9), nan];
        let keep = Action::Keep;
        assert_eq!(policy.decide(&blocks), [keep, keep, Action::Drop, keep, keep]);
    }
}
