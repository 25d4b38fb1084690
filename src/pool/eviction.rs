//! Which caches leave a pool: lowest priority first, among equals the least recently used, pinned ones never.
//!
//! A quota is met first, by caches of its own type; then the budget, by caches of any type. The choice is a pure function of the
//! facts and of what each departure frees, which depends on the departures before it where caches share blocks.

/// What the choice sees of a cache in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resident {
    /// Caches of low priority leave first.
    pub priority: f32,
    /// Time of the last use on the pool's own clock.
    pub last_used: u64,
    /// Whether it must stay.
    pub pinned: bool,
    /// Whether it counts against the quota in question.
    pub in_quota: bool,
    /// Bytes that count against the quota.
    pub charge: usize,
}

/// What has to become free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Bytes of the quota.
    pub quota: usize,
    /// Bytes of the budget.
    pub budget: usize,
}

/// The most that could be freed, where that is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortfall {
    /// Of the quota.
    Quota(usize),
    /// Of the budget.
    Budget(usize),
}

/// Indices of the caches that leave, in the order in which they do. `frees` is asked once for each of them, in that order, and gives
/// the bytes of the budget that its departure frees.
///
/// # Errors
/// [`Shortfall`] if all that may leave is not enough.
pub fn evict(
    residents: &[Resident],
    need: Need,
    mut frees: impl FnMut(usize) -> usize,
) -> Result<Vec<usize>, Shortfall> {
    let mut order: Vec<usize> = (0..residents.len()).filter(|&i| !residents[i].pinned).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&residents[a], &residents[b]);
        a.priority.total_cmp(&b.priority).then(a.last_used.cmp(&b.last_used))
    });
    let (mut leaving, mut charge, mut freed) = (vec![], 0, 0);
    for &i in order.iter().filter(|&&i| residents[i].in_quota) {
        if charge >= need.quota {
            break;
        }
        charge += residents[i].charge;
        freed += frees(i);
        leaving.push(i);
    }
    if charge < need.quota {
        return Err(Shortfall::Quota(charge));
    }
    for i in order {
        if freed >= need.budget {
            break;
        }
        if !leaving.contains(&i) {
            freed += frees(i);
            leaving.push(i);
        }
    }
    if freed < need.budget { Err(Shortfall::Budget(freed)) } else { Ok(leaving) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(priority: f32, last_used: u64) -> Resident {
        Resident { priority, last_used, pinned: false, in_quota: false, charge: 10 }
    }

    #[test]
    fn priority_then_age_and_no_more_than_needed() {
        let list = [resident(1.0, 1), resident(0.5, 9), resident(0.5, 3), resident(2.0, 0)];
        let need = |budget| Need { quota: 0, budget };
        for (budget, leaving) in
            [(0, vec![]), (1, vec![2]), (11, vec![2, 1]), (30, vec![2, 1, 0]), (40, vec![2, 1, 0, 3])]
        {
            assert_eq!(evict(&list, need(budget), |_| 10), Ok(leaving), "{budget}");
        }
        assert_eq!(evict(&list, need(41), |_| 10), Err(Shortfall::Budget(40)));
    }

    #[test]
    fn pins_stay_and_quotas_take_their_own() {
        let mut list = [resident(0.0, 0), resident(1.0, 1), resident(1.0, 2)];
        list[0].pinned = true;
        list[2].in_quota = true;
        assert_eq!(evict(&list, Need { quota: 10, budget: 5 }, |_| 10), Ok(vec![2]));
        assert_eq!(evict(&list, Need { quota: 10, budget: 15 }, |_| 10), Ok(vec![2, 1]));
        assert_eq!(evict(&list, Need { quota: 11, budget: 0 }, |_| 10), Err(Shortfall::Quota(10)));
        assert_eq!(evict(&list, Need { quota: 0, budget: 21 }, |_| 10), Err(Shortfall::Budget(20)));
    }

    #[test]
    fn what_frees_nothing_does_not_count() {
        let list = [resident(0.0, 0), resident(1.0, 1)];
        // Two forks: only the second departure frees the blocks.
        let mut left = 2;
        let frees = |_| {
            left -= 1;
            if left == 0 { 100 } else { 1 }
        };
        assert_eq!(evict(&list, Need { quota: 0, budget: 50 }, frees), Ok(vec![0, 1]));
    }
}
