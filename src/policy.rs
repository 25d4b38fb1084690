//! Decisions on the blocks of a cache from numbers only: which stay, which are packed with fewer bits, which are dropped.
//! `pool::eviction` decides likewise on whole caches of a pool.
//!
//! A policy is plain data and its decision a pure function of the [`BlockFacts`] facts: equal facts give equal actions. Quality only
//! falls, since a block that has lost its bits cannot get them back; a pinned block keeps what it has. Deciding again on facts that
//! already follow the decision gives [`Action::Keep`] for all of them.

mod attention;
mod progressive;

pub use attention::{AttentionDemotionPolicy, AttentionTier, Ema};
pub use progressive::{AgeTier, ProgressivePolicy};

use crate::error::{Error, Result};
use crate::spec::stored_as_text;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Bits of keys and values in a tier: 1 to 8, or 16 for half floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bits {
    /// Of keys.
    pub key: u8,
    /// Of values.
    pub value: u8,
}

/// What a policy knows of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockFacts {
    /// Position of the first token.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// Tokens that came after the last one of the block.
    pub age: usize,
    /// Share of all attention that the block receives.
    pub mass: f32,
    /// Observations behind `mass`.
    pub observed: u32,
    /// Index of the tier that the block is in.
    pub tier: usize,
    /// Whether a token of the block is pinned.
    pub pinned: bool,
}

/// What is to be done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Keep,
    /// Pack it for the tier of this index.
    Recode(usize),
    /// Evict it, for good.
    Drop,
}

/// Sizes of a model's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Layers that have keys and values.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

/// The policy of a cache. Its text form is `none`, or the name of a policy with its tiers:
/// `progressive:1024=16/16,8192=4/4,65536=3/2,rest=2/1`; the name alone stands for the default tiers. A last term `rest=drop` evicts
/// what is older, so that memory has a bound: `progressive:4096=4/4,rest=drop`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum TierPolicy {
    /// Every block stays as it was packed.
    #[default]
    None,
    /// By age.
    Progressive(ProgressivePolicy),
    /// By received attention.
    Attention(AttentionDemotionPolicy),
}

impl TierPolicy {
    /// One action a block.
    pub fn decide(&self, blocks: &[BlockFacts]) -> Vec<Action> {
        match self {
            TierPolicy::None => vec![Action::Keep; blocks.len()],
            TierPolicy::Progressive(policy) => policy.decide(blocks),
            TierPolicy::Attention(policy) => policy.decide(blocks),
        }
    }

    /// Bits of every tier, best first.
    pub fn bits(&self) -> Vec<Bits> {
        match self {
            TierPolicy::None => vec![],
            TierPolicy::Progressive(policy) => policy.tiers().iter().map(|t| t.bits).collect(),
            TierPolicy::Attention(policy) => policy.tiers().iter().map(|t| t.bits).collect(),
        }
    }

    /// The age from which blocks are evicted, where age alone decides that.
    pub fn limit(&self) -> Option<usize> {
        match self {
            TierPolicy::Progressive(policy) => policy.tiers().last().and_then(|t| t.until),
            TierPolicy::None | TierPolicy::Attention(_) => None,
        }
    }

    /// Whether a block may be evicted.
    pub fn drops(&self) -> bool {
        match self {
            TierPolicy::Attention(policy) => policy.evict().is_some(),
            TierPolicy::None | TierPolicy::Progressive(_) => self.limit().is_some(),
        }
    }

    /// Name of a tier.
    pub fn name(&self, tier: usize) -> String {
        let names: &[&str] = match self {
            TierPolicy::None => &["packed"],
            TierPolicy::Progressive(_) => &["active", "warm", "cold", "archive"],
            TierPolicy::Attention(_) => &["critical", "high", "medium", "low", "archive"],
        };
        match names.get(tier) {
            Some(name) if names.len() == self.bits().len().max(1) => (*name).into(),
            _ => format!("tier {tier}"),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.key, self.value)
    }
}

impl FromStr for Bits {
    type Err = Error;
    fn from_str(text: &str) -> Result<Bits> {
        let fail = || parse_error("bits of a tier", text, "expected K/V, each 1 to 8 or 16".into());
        let (key, value) = text.split_once('/').ok_or_else(fail)?;
        let bits = Bits { key: key.parse().map_err(|_| fail())?, value: value.parse().map_err(|_| fail())? };
        if [bits.key, bits.value].iter().all(|b| matches!(b, 1..=8 | 16)) { Ok(bits) } else { Err(fail()) }
    }
}

impl fmt::Display for TierPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierPolicy::None => f.write_str("none"),
            TierPolicy::Progressive(policy) => write!(f, "{policy}"),
            TierPolicy::Attention(policy) => write!(f, "{policy}"),
        }
    }
}

impl FromStr for TierPolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<TierPolicy> {
        match text.split(':').next() {
            Some("none") if text == "none" => Ok(TierPolicy::None),
            Some("progressive") => text.parse().map(TierPolicy::Progressive),
            Some("attention") => text.parse().map(TierPolicy::Attention),
            _ => {
                Err(parse_error("tier policy", text, "the policies are none, progressive, attention".into()))
            }
        }
    }
}

stored_as_text!(TierPolicy);

fn parse_error(what: &'static str, text: &str, reason: String) -> Error {
    Error::Parse { what, text: text.into(), reason }
}

/// The `left=right` terms behind the name of a policy; `None` if there is only the name.
fn terms<'a>(what: &'static str, name: &str, text: &'a str) -> Result<Option<Vec<(&'a str, &'a str)>>> {
    let fail = |reason: String| parse_error(what, text, reason);
    match text.strip_prefix(name).map(|rest| (rest, rest.strip_prefix(':'))) {
        Some(("", _)) => Ok(None),
        Some((_, Some(list))) => list
            .split(',')
            .map(|t| t.split_once('=').ok_or_else(|| fail(format!("{t:?} is no left=right"))))
            .collect::<Result<_>>()
            .map(Some),
        _ => Err(fail(format!("expected {name} or {name}:..."))),
    }
}

/// Checks that there are tiers and that none has more bits than the one before.
fn check_bits(bits: &[Bits]) -> Result<()> {
    let refuse = |value: String, reason: &str| {
        Err(Error::Unsupported { field: "tiers", value, reason: reason.into() })
    };
    let known = |b: &Bits| [b.key, b.value].iter().all(|b| matches!(b, 1..=8 | 16));
    if let Some(bad) = bits.iter().find(|b| !known(b)) {
        return refuse(bad.to_string(), "a side has 1 to 8 bits, or 16");
    }
    if let Some(w) = bits.windows(2).find(|w| w[1].key > w[0].key || w[1].value > w[0].value) {
        return refuse(format!("{} after {}", w[1], w[0]), "a tier has no more bits than the one before");
    }
    if bits.is_empty() { refuse("none".into(), "at least one tier is needed") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_read_back_what_they_write() {
        for text in [
            "none",
            "progressive",
            "attention",
            "progressive:512=8/8,rest=2/2",
            "progressive:512=8/8,4096=4/4,rest=drop",
            "attention:0.9=8/8,rest=2/1,alpha=0.5,patience=2,evict=0.001",
        ] {
            let policy: TierPolicy = text.parse().unwrap();
            assert_eq!(policy.to_string().parse::<TierPolicy>().unwrap(), policy, "{text}");
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<TierPolicy>(&json).unwrap(), policy);
        }
        assert_eq!(
            "progressive".parse::<TierPolicy>().unwrap().to_string(),
            "progressive:1024=16/16,8192=4/4,65536=3/2,rest=2/1"
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for text in [
            "",
            "nones",
            "progressive:",
            "progressive:1024=16/16",
            "progressive:rest=9/4",
            "progressive:rest=drop",
            "progressive:rest=drop,1024=4/4",
            "progressive:1024=drop,rest=2/2",
        ] {
            assert!(matches!(text.parse::<TierPolicy>(), Err(Error::Parse { .. })), "{text}");
        }
        for text in [
            "progressive:1024=4/4,rest=8/8",
            "progressive:1024=4/4,512=3/3,rest=2/2",
            "attention:0.5=8/8,0.8=4/4,rest=2/2",
            "attention:1.5=8/8,rest=2/2",
            "attention:0.5=8/8,rest=2/2,alpha=0",
            "attention:0.5=8/8,rest=2/2,evict=-1",
            "attention:0.5=8/8,rest=2/2,alpha=NaN",
        ] {
            assert!(matches!(text.parse::<TierPolicy>(), Err(Error::Unsupported { .. })), "{text}");
        }
    }

    #[test]
    fn names_follow_the_default_tables() {
        let policy: TierPolicy = "progressive".parse().unwrap();
        assert_eq!((policy.name(0), policy.name(3)), ("active".into(), "archive".into()));
        assert_eq!("progressive:9=8/8,rest=2/2".parse::<TierPolicy>().unwrap().name(1), "tier 1");
    }
}
