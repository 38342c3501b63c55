//! Decides policies that are spread over shards: tries one shard after the other until one admits.

use super::router::RedisRouter;
use super::split_decision::SplitResult;
use crate::limiter::{Charge, Decision, Key, Limit, LimitStatus, Refusal};
use smallvec::SmallVec;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// The statuses of the shards tried before, and the clock of the last one.
#[derive(Default)]
struct EarlierShardStatuses {
    now_us: u64,
    statuses: SmallVec<[Option<LimitStatus>; 4]>,
}

impl EarlierShardStatuses {
    /// Merges the earlier statuses into a decision, on its clock. Keeps only refusals for later
    /// shards.
    fn merge_into(&mut self, decision: &mut Decision) {
        let now_us = decision.now_us;
        for (at, status) in decision.statuses.iter_mut().enumerate() {
            let earlier = self.statuses.get(at).copied().flatten();
            *status = merge_shard_statuses(
                earlier.map(|earlier| earlier.convert_clock(self.now_us, now_us)),
                *status,
            );
        }
        let is_refusal = |status: &LimitStatus| status.refusal.is_some();
        let statuses = decision
            .statuses
            .iter()
            .map(|status| status.filter(is_refusal))
            .collect();
        *self = Self { now_us, statuses };
    }
}

/// The progress of one policy's search.
struct ShardSearch<'c> {
    /// The first sharded charge of the policy.
    first_charge: &'c Charge<'c>,
    /// The shard that is tried now.
    current_shard: u16,
    /// Shards that were tried before.
    shards_tried: u16,
}

impl RedisRouter {
    /// Decides charges of which some are sharded. If several shards refuse, the result has the
    /// earliest end of their refusals. At least the remaining units of the result are left.
    pub(super) async fn decide_across_shards(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> SplitResult {
        let is_read = |charge: &Charge<'_>| charge.cost == 0 || charge.is_counted;
        if charges.iter().all(is_read) {
            return self.read_all_shards(charges, deadline).await;
        }
        let mut searches = start_searches(charges);
        let mut earlier = EarlierShardStatuses::default();
        loop {
            let assigned_shard = |charge: &Charge<'_>| {
                let search = find_search(&searches, charge)?;
                Some((search.current_shard, search.first_charge.shard_count))
            };
            let shard_counters: SmallVec<[(Key, Limit); 4]> = charges
                .iter()
                .map(|charge| shard_key_and_limit(charge, assigned_shard(charge)))
                .collect();
            let shard_charges: SmallVec<[Charge<'_>; 4]> = charges
                .iter()
                .zip(&shard_counters)
                .map(|(charge, (key, limit))| Charge {
                    key,
                    limit,
                    ..*charge
                })
                .collect();
            let decided = self.decide_by_hash_slot(&shard_charges, deadline);
            let (result, return_task) = decided.await;
            let mut decision = result?;
            let refusing: SmallVec<[&Charge<'_>; 4]> = charges
                .iter()
                .zip(&decision.statuses)
                .filter(|(_, status)| status.is_some_and(|status| status.refusal.is_some()))
                .map(|(charge, _)| charge)
                .collect();
            // Another shard may admit the request, but only if no other policy refuses.
            let mut enforced = refusing.iter().filter(|charge| !charge.shadow);
            let others_refuse = enforced.any(|charge| charge.shard_count <= 1);
            let (mut is_continued, mut is_exhausted) = (false, false);
            for search in &mut searches {
                let policy_charge = search.first_charge;
                if policy_charge.shadow
                    || !refusing.iter().any(|one| one.is_same_policy(policy_charge))
                {
                    continue;
                }
                is_continued = true;
                search.shards_tried += 1;
                search.current_shard = (search.current_shard + 1) % policy_charge.shard_count;
                is_exhausted |= search.shards_tried >= policy_charge.shard_count;
            }
            let is_final = decision.admitted || others_refuse || is_exhausted || !is_continued;
            earlier.merge_into(&mut decision);
            if is_final {
                hide_statuses_of_unfinished_searches(charges, &searches, &mut decision);
                return Ok(decision);
            }
            // Waits until the charges of this attempt are returned, so that they do not use up the
            // limits of the next attempt.
            if let Some(return_task) = return_task {
                drop(timeout_at(deadline, return_task).await);
            }
        }
    }

    /// Reads all shards of sharded charges, and merges their statuses to one per charge.
    async fn read_all_shards(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> SplitResult {
        let shard_counters = charges.iter().enumerate().flat_map(|(position, charge)| {
            let shards = charge.shard_count.max(1);
            (0..shards).map(move |at| {
                (
                    position,
                    shard_key_and_limit(charge, Some((at, shards)).filter(|_| shards > 1)),
                )
            })
        });
        let shard_counters: Vec<(usize, (Key, Limit))> = shard_counters.collect();
        let shard_charges = shard_counters
            .iter()
            .filter_map(|(position, (key, limit))| {
                Some(Charge {
                    key,
                    limit,
                    is_held_back: false,
                    ..*charges.get(*position)?
                })
            });
        let shard_charges: Vec<Charge<'_>> = shard_charges.collect();
        let (result, _) = self.decide_by_hash_slot(&shard_charges, deadline).await;
        // A partial decision is dropped: it has the statuses of shards, and charged nothing.
        let shard_decision = result.map_err(|(failure, _)| (failure, None))?;
        let mut merged = Decision {
            statuses: SmallVec::from_elem(None, charges.len()),
            charged_at_us: SmallVec::new(),
            ..shard_decision.clone()
        };
        for ((position, _), status) in shard_counters.iter().zip(shard_decision.statuses) {
            if let (Some(sum), Some(status)) = (merged.statuses.get_mut(*position), status) {
                let remaining = sum.map_or(0, |sum: LimitStatus| sum.remaining) + status.remaining;
                *sum = merge_shard_statuses(*sum, Some(status)).map(|either| LimitStatus {
                    remaining,
                    ..either
                });
            }
        }
        Ok(merged)
    }
}

/// Starts a search for each sharded policy, from a random shard.
fn start_searches<'c>(charges: &'c [Charge<'c>]) -> SmallVec<[ShardSearch<'c>; 2]> {
    let mut searches: SmallVec<[ShardSearch<'_>; 2]> = SmallVec::new();
    for charge in charges.iter().filter(|charge| charge.shard_count > 1) {
        if find_search(&searches, charge).is_none() {
            searches.push(ShardSearch {
                first_charge: charge,
                current_shard: fastrand::u16(..charge.shard_count),
                shards_tried: 0,
            });
        }
    }
    searches
}

/// The search of a charge's policy.
fn find_search<'s, 'c>(
    searches: &'s [ShardSearch<'c>],
    charge: &Charge<'_>,
) -> Option<&'s ShardSearch<'c>> {
    let mut searches = searches.iter();
    searches.find(|search| charge.is_same_policy(search.first_charge))
}

/// Removes the statuses of policies that did not ask all their shards from a refusal, because a
/// shard that was not asked may admit the request.
fn hide_statuses_of_unfinished_searches(
    charges: &[Charge<'_>],
    searches: &[ShardSearch<'_>],
    decision: &mut Decision,
) {
    for (charge, status) in charges.iter().zip(&mut decision.statuses) {
        let is_unfinished = find_search(searches, charge)
            .is_some_and(|search| search.shards_tried < search.first_charge.shard_count);
        if !decision.admitted && is_unfinished {
            *status = None;
        }
    }
}

/// The key and the limit of one shard.
fn shard_key_and_limit(charge: &Charge<'_>, shard: Option<(u16, u16)>) -> (Key, Limit) {
    match shard {
        Some((at, of)) => (charge.key.shard_key(at), charge.limit.shard_limit(at, of)),
        None => (charge.key.clone(), *charge.limit),
    }
}

/// Merges the statuses of two shards of a limit: the larger remainder, and the earlier times.
fn merge_shard_statuses(
    one: Option<LimitStatus>,
    other: Option<LimitStatus>,
) -> Option<LimitStatus> {
    let (Some(one), Some(other)) = (one, other) else {
        return other.or(one);
    };
    let earlier =
        |a: Option<u64>, b: Option<u64>| a.zip(b).map_or(a.or(b), |(a, b)| Some(a.min(b)));
    let refusal = match (one.refusal, other.refusal) {
        (Some(Refusal::Until(one)), Some(Refusal::Until(other))) => {
            Some(Refusal::Until(one.min(other)))
        }
        // The limit of a shard may be too small for a cost that a larger one admits.
        (Some(Refusal::Never), refusal) | (refusal, Some(Refusal::Never)) => refusal,
        (one, other) => one.and(other),
    };
    Some(LimitStatus {
        remaining: one.remaining.max(other.remaining),
        next_growth_us: earlier(one.next_growth_us, other.next_growth_us),
        refusal,
        in_effect: one.in_effect,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused_decision(now_us: u64, after_us: u64) -> Decision {
        let at_us = now_us + after_us;
        let status = LimitStatus {
            remaining: 1,
            next_growth_us: Some(at_us),
            refusal: Some(Refusal::Until(at_us)),
            in_effect: None,
        };
        Decision {
            override_expiries_ms: Box::default(),
            now_us,
            admitted: false,
            statuses: SmallVec::from_iter([Some(status), None]),
            delay_us: 0,
            grants: SmallVec::new(),
            charged_at_us: SmallVec::new(),
        }
    }

    #[test]
    fn finds_the_earliest_refusal_end_across_nodes_with_different_clocks() {
        for clocks_us in [
            [1_000, 9_000_000, 5_000],
            [9_000_000, 1_000, 1_000],
            [7, 7, 7],
        ] {
            for waits_us in [[50, 40, 60], [40, 50, 60], [60, 50, 40]] {
                let (mut earlier, mut last) =
                    (EarlierShardStatuses::default(), refused_decision(1, 1));
                for (now_us, wait_us) in clocks_us.into_iter().zip(waits_us) {
                    last = refused_decision(now_us, wait_us);
                    earlier.merge_into(&mut last);
                }
                let until_us = last.now_us + 40;
                let merged = last.statuses[0].unwrap();
                assert_eq!(
                    (merged.refusal, merged.next_growth_us),
                    (Some(Refusal::Until(until_us)), Some(until_us)),
                    "{clocks_us:?} {waits_us:?}"
                );
                assert_eq!(last.statuses[1], None);
            }
        }
    }
}
