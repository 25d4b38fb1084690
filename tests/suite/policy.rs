//! Laws that the tier policies keep on any facts: never up, never more bits for less attention, pins, idempotence, determinism.

use proptest::prelude::*;
use turbomoq::cache::CapacityPlan;
use turbomoq::policy::{Action, BlockFacts, ModelShape, TierPolicy};

const POLICIES: [&str; 5] = [
    "progressive",
    "progressive:256=8/8,512=6/4,rest=1/1",
    "attention",
    "attention:0.5=8/8,0.25=4/4,rest=2/2,patience=2",
    "attention:0.9=8/8,0.5=4/4,rest=2/1,patience=1,evict=0.01",
];

fn blocks(tiers: usize) -> impl Strategy<Value = Vec<BlockFacts>> {
    // Few distinct masses, so that ties are common.
    let fact = (0u8..12, 0u32..8, 0..tiers, prop::bool::weighted(0.15), 1usize..=128, 0usize..2000);
    prop::collection::vec(fact, 0..80).prop_map(|facts| {
        let mut at = 4;
        let end = 4 + facts.iter().map(|f| f.4 + f.5 % 3 * 64).sum::<usize>();
        let block = |(mass, observed, tier, pinned, len, gap): (u8, u32, usize, bool, usize, usize)| {
            let start = at + gap % 3 * 64;
            at = start + len;
            let age = (end - at) * (1 + gap);
            BlockFacts { start, len, age, mass: f32::from(mass) * 0.003, observed, tier, pinned }
        };
        facts.into_iter().map(block).collect()
    })
}

/// The facts after the cache has done what it was told.
fn applied(blocks: &[BlockFacts], actions: &[Action]) -> Vec<BlockFacts> {
    let pairs = blocks.iter().zip(actions);
    let after = pairs.filter_map(|(b, a)| match a {
        Action::Keep => Some(*b),
        Action::Recode(tier) => Some(BlockFacts { tier: *tier, ..*b }),
        Action::Drop => None,
    });
    after.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decisions_keep_the_laws(which in 0..POLICIES.len(), blocks in blocks(3)) {
        let policy: TierPolicy = POLICIES[which].parse().unwrap();
        let bits = policy.bits();
        let actions = policy.decide(&blocks);
        prop_assert_eq!(actions.len(), blocks.len());
        prop_assert_eq!(&actions, &policy.decide(&blocks), "deterministic");
        for (b, a) in blocks.iter().zip(&actions) {
            if let Action::Recode(tier) = a {
                prop_assert!(*tier > b.tier && *tier < bits.len(), "only down");
                prop_assert!(bits[*tier].key <= bits[b.tier].key && bits[*tier].value <= bits[b.tier].value);
            }
            prop_assert!(!b.pinned || *a == Action::Keep, "pins");
            prop_assert!(b.observed > 0 || *a == Action::Keep || policy.to_string().starts_with("prog"));
        }
        let after = applied(&blocks, &actions);
        prop_assert!(policy.decide(&after).iter().all(|a| *a == Action::Keep), "idempotent");
        // The order in which blocks are shown does not matter.
        let mut turned = blocks.clone();
        turned.reverse();
        let mut back = policy.decide(&turned);
        back.reverse();
        prop_assert_eq!(back, actions);
    }

    #[test]
    fn less_attention_never_has_more_bits(which in 2..POLICIES.len(), blocks in blocks(1)) {
        let policy: TierPolicy = POLICIES[which].parse().unwrap();
        let blocks: Vec<BlockFacts> =
            blocks.into_iter().map(|b| BlockFacts { observed: 9, pinned: false, tier: 0, ..b }).collect();
        let rank = |a: &Action| match a {
            Action::Keep => 0,
            Action::Recode(tier) => *tier,
            Action::Drop => usize::MAX,
        };
        let actions = policy.decide(&blocks);
        for (a, x) in blocks.iter().zip(&actions) {
            for (b, y) in blocks.iter().zip(&actions) {
                // Eviction looks at the share of a block, tiers at the share of a token.
                let least = a.mass <= b.mass && a.mass / a.len as f32 <= b.mass / b.len as f32;
                prop_assert!(!least || rank(x) >= rank(y), "{a:?} {x:?}, {b:?} {y:?}");
            }
        }
    }

    #[test]
    fn older_blocks_never_have_more_bits(ages in prop::collection::vec(0usize..200_000, 2..40)) {
        let TierPolicy::Progressive(policy) = "progressive".parse().unwrap() else { panic!() };
        for w in ages.windows(2) {
            let (young, old) = (w[0].min(w[1]), w[0].max(w[1]));
            prop_assert!(policy.tier(young) <= policy.tier(old));
        }
    }

    #[test]
    fn capacity_is_the_longest_that_fits(megabytes in 1usize..2000, heads in 1usize..9) {
        let TierPolicy::Progressive(policy) = "progressive".parse().unwrap() else { panic!() };
        let shape = ModelShape { layers: 4, kv_heads: heads, key_dim: 128, value_dim: 64 };
        let (recipe, budget) = ("best".parse().unwrap(), megabytes << 20);
        let plan = CapacityPlan::new(&recipe, &TierPolicy::Progressive(policy.clone()), &shape).unwrap();
        let tokens = policy.capacity(&recipe, &shape, budget).unwrap();
        prop_assert!(plan.bytes(tokens) <= budget && plan.bytes(tokens + 1) > budget);
        prop_assert!(policy.capacity(&recipe, &shape, budget + (1 << 20)).unwrap() >= tokens);
    }
}
