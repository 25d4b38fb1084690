//! Tiers by age: the older a block, the fewer its bits. By default to 1K tokens 16/16, to 8K 4/4, to 64K 3/2, then 2/1.
//!
//! The age of a block is the age of its newest token, so no token is packed for a tier before its time. Where the last tier has an end,
//! older blocks are evicted: a size limit for layers with a sliding window. It leaves the sinks and pinned blocks alone.

use super::{Action, Bits, BlockFacts, check_bits, parse_error, terms};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A tier of [`ProgressivePolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgeTier {
    /// The tier ends before blocks of this age. What is older than a last tier with an end is evicted.
    pub until: Option<usize>,
    /// Bits of its blocks.
    pub bits: Bits,
}

/// Tiers by age.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgressivePolicy {
    tiers: Vec<AgeTier>,
}

impl Default for ProgressivePolicy {
    fn default() -> Self {
        let tier = |until, key, value| AgeTier { until, bits: Bits { key, value } };
        let tiers = vec![
            tier(Some(1 << 10), 16, 16),
            tier(Some(8 << 10), 4, 4),
            tier(Some(64 << 10), 3, 2),
            tier(None, 2, 1),
        ];
        ProgressivePolicy { tiers }
    }
}

impl ProgressivePolicy {
    /// A policy with given tiers, youngest first.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless ages rise, bits do not, and no tier but the last is without an end.
    pub fn new(tiers: Vec<AgeTier>) -> Result<ProgressivePolicy> {
        check_bits(&tiers.iter().map(|t| t.bits).collect::<Vec<_>>())?;
        let ends: Vec<usize> = tiers.iter().map(|t| t.until.unwrap_or(usize::MAX)).collect();
        if ends.windows(2).any(|w| w[0] >= w[1]) {
            let reason = "ages rise from tier to tier, and no tier but the last is without an end".into();
            return Err(Error::Unsupported { field: "tiers", value: format!("{ends:?}"), reason });
        }
        Ok(ProgressivePolicy { tiers })
    }

    /// The tiers, youngest first.
    pub fn tiers(&self) -> &[AgeTier] {
        &self.tiers
    }

    /// The tier of a block of this age; the number of tiers where the block is evicted.
    pub fn tier(&self, age: usize) -> usize {
        self.tiers.partition_point(|t| t.until.is_some_and(|until| until <= age))
    }

    /// One action a block.
    pub fn decide(&self, blocks: &[BlockFacts]) -> Vec<Action> {
        let action = |b: &BlockFacts| match self.tier(b.age) {
            tier if tier == self.tiers.len() && !b.pinned => Action::Drop,
            tier if tier > b.tier && !b.pinned => Action::Recode(tier),
            _ => Action::Keep,
        };
        blocks.iter().map(action).collect()
    }
}

impl fmt::Display for ProgressivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, tier) in self.tiers.iter().enumerate() {
            f.write_str(if i == 0 { "progressive:" } else { "," })?;
            match tier.until {
                Some(age) => write!(f, "{age}={}", tier.bits)?,
                None => write!(f, "rest={}", tier.bits)?,
            }
        }
        let open = self.tiers.last().is_none_or(|t| t.until.is_none());
        f.write_str(if open { "" } else { ",rest=drop" })
    }
}

impl FromStr for ProgressivePolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<ProgressivePolicy> {
        const WHAT: &str = "progressive policy";
        let Some(terms) = terms(WHAT, "progressive", text)? else { return Ok(Self::default()) };
        let (mut tiers, mut rest) = (vec![], false);
        for (left, right) in terms {
            if rest {
                return Err(parse_error(WHAT, text, format!("{left:?} after the rest")));
            }
            rest = left == "rest";
            if rest && right == "drop" {
                continue;
            }
            let age = |age: &str| age.parse().map_err(|_| parse_error(WHAT, text, format!("age {age:?}")));
            let until = if rest { None } else { Some(age(left)?) };
            tiers.push(AgeTier { until, bits: right.parse()? });
        }
        if !rest || tiers.is_empty() {
            let reason = "tiers are needed, and a last term rest=K/V or rest=drop".into();
            return Err(parse_error(WHAT, text, reason));
        }
        ProgressivePolicy::new(tiers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_fall_into_their_tiers() {
        let policy = ProgressivePolicy::default();
        for (age, tier) in
            [(0, 0), (1023, 0), (1024, 1), (8191, 1), (8192, 2), (65535, 2), (65536, 3), (usize::MAX, 3)]
        {
            assert_eq!(policy.tier(age), tier, "age {age}");
        }
    }

    #[test]
    fn a_block_falls_once_and_never_rises() {
        let policy = ProgressivePolicy::default();
        let block =
            |age, tier, pinned| BlockFacts { start: 0, len: 128, age, mass: 0.0, observed: 0, tier, pinned };
        let blocks =
            [block(9000, 0, false), block(9000, 2, false), block(10, 3, false), block(90000, 1, true)];
        assert_eq!(policy.decide(&blocks), [Action::Recode(2), Action::Keep, Action::Keep, Action::Keep]);
        let limit: ProgressivePolicy = "progressive:1024=16/16,9000=4/4,rest=drop".parse().unwrap();
        let blocks =
            [block(8999, 0, false), block(9000, 1, false), block(9000, 1, true), block(10, 1, false)];
        assert_eq!(limit.decide(&blocks), [Action::Recode(1), Action::Drop, Action::Keep, Action::Keep]);
    }
}
