//! Tiers by age: the older a block, the fewer its bits. By default to 1K tokens 16/16, to 8K 4/4, to 64K 3/2, then 2/1.
//!
//! The age of a block is that of its newest token, so no token is packed for a tier before its time.

use super::{Action, Bits, Block, check_bits, parse_error, terms};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A tier of [`ProgressivePolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgeTier {
    /// The tier ends before blocks of this age; the last tier has no end.
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
    /// [`Error::Unsupported`] unless ages rise, bits do not, and just the last tier has no end.
    pub fn new(tiers: Vec<AgeTier>) -> Result<ProgressivePolicy> {
        check_bits(&tiers.iter().map(|t| t.bits).collect::<Vec<_>>())?;
        let ends: Vec<usize> = tiers.iter().map(|t| t.until.unwrap_or(usize::MAX)).collect();
        let open = tiers.iter().filter(|t| t.until.is_none()).count();
        if open != 1 || ends[ends.len() - 1] != usize::MAX || ends.windows(2).any(|w| w[0] >= w[1]) {
            let reason = "ages rise from tier to tier, and just the last tier has no end".into();
            return Err(Error::Unsupported { field: "tiers", value: format!("{ends:?}"), reason });
        }
        Ok(ProgressivePolicy { tiers })
    }

    /// The tiers, youngest first.
    pub fn tiers(&self) -> &[AgeTier] {
        &self.tiers
    }

    /// The tier of a block of this age.
    pub fn tier(&self, age: usize) -> usize {
        self.tiers.partition_point(|t| t.until.is_some_and(|until| until <= age))
    }

    /// One action a block.
    pub fn decide(&self, blocks: &[Block]) -> Vec<Action> {
        let action = |b: &Block| match self.tier(b.age) {
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
        Ok(())
    }
}

impl FromStr for ProgressivePolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<ProgressivePolicy> {
        const WHAT: &str = "progressive policy";
        let Some(terms) = terms(WHAT, "progressive", text)? else { return Ok(Self::default()) };
        let mut tiers = vec![];
        for (left, right) in terms {
            let until = match left {
                "rest" => None,
                age => Some(age.parse().map_err(|_| parse_error(WHAT, text, format!("age {age:?}")))?),
            };
            tiers.push(AgeTier { until, bits: right.parse()? });
        }
        if tiers.iter().all(|t| t.until.is_some()) {
            return Err(parse_error(WHAT, text, "a last term rest=K/V is needed".into()));
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
            |age, tier, pinned| Block { start: 0, len: 128, age, mass: 0.0, observed: 0, tier, pinned };
        let blocks =
            [block(9000, 0, false), block(9000, 2, false), block(10, 3, false), block(90000, 1, true)];
        assert_eq!(policy.decide(&blocks), [Action::Recode(2), Action::Keep, Action::Keep, Action::Keep]);
    }
}
