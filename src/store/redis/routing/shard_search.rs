//! Decides policies that are spread over shards: tries one shard after the other until one admits.

use super::router::RedisRouter;
use crate::limiter::{Charge, ChargeOutcome, Decision, Key, Limit, LimitStatus, Refusal};
use crate::store::DecisionFailure;
use smallvec::SmallVec;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// The decision of the shards tried before, with their refusals only.
#[derive(Default)]
struct EarlierShardRefusals(Decision);

impl EarlierShardRefusals {
    /// Merges the earlier statuses into a decision, on its clock.
    fn merge_into(&mut self, decision: &mut Decision) {
        for (outcome, earlier) in decision.outcomes.iter_mut().zip(&self.0.outcomes) {
            let earlier = earlier.status;
            let earlier =
                earlier.map(|earlier| earlier.convert_clock(self.0.now_us, decision.now_us));
            outcome.status = match (earlier, outcome.status) {
                (Some(earlier), Some(status)) => Some(merge_shard_statuses(earlier, status)),
                (earlier, status) => status.or(earlier),
            };
        }
        self.0 = decision.clone();
        let outcomes = self.0.outcomes.iter_mut();
        (outcomes.filter(|outcome| outcome.refusal().is_none()))
            .for_each(|outcome| outcome.status = None);
    }
}

/// One policy of a request, and the shard of it that is tried now.
struct ShardSearch<'c> {
    policy: &'c [Charge<'c>],
    /// 1 or less: the policy is not sharded.
    shard_count: u16,
    current_shard: u16,
    /// Shards that were tried before.
    shards_tried: u16,
}

impl<'c> ShardSearch<'c> {
    /// Starts from a random shard.
    fn new(policy: &'c [Charge<'c>]) -> Self {
        let shard_count = policy.iter().map(|charge| charge.shard_count).max();
        let shard_count = shard_count.unwrap_or(1).max(1);
        Self {
            policy,
            shard_count,
            current_shard: fastrand::u16(..shard_count),
            shards_tried: 0,
        }
    }

    fn is_shadow(&self) -> bool {
        self.policy.first().is_some_and(|charge| charge.shadow)
    }

    fn has_tried_all(&self) -> bool {
        self.shards_tried >= self.shard_count
    }

    fn try_next_shard(&mut self) {
        self.shards_tried += 1;
        self.current_shard = (self.current_shard + 1) % self.shard_count;
    }

    /// The keys and the limits of the current shard.
    fn shard_counters(&self) -> impl Iterator<Item = (Key, Limit)> {
        let charges = self.policy.iter();
        charges.map(|charge| shard_key_and_limit(charge, self.current_shard, self.shard_count))
    }
}

impl RedisRouter {
    /// Decides charges of which some are sharded. If several shards refuse, the result has the
    /// earliest end of their refusals. At least the remaining units of the result are left.
    pub(super) async fn decide_across_shards(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, DecisionFailure> {
        let is_read = |charge: &Charge<'_>| charge.cost == 0 || charge.is_counted;
        if charges.iter().all(is_read) {
            return self.read_all_shards(charges, deadline).await;
        }
        let policies = charges.chunk_by(Charge::is_same_policy);
        let mut searches: SmallVec<[_; 2]> = policies.map(ShardSearch::new).collect();
        let mut earlier = EarlierShardRefusals::default();
        loop {
            let counters = searches.iter().flat_map(ShardSearch::shard_counters);
            let counters: SmallVec<[(Key, Limit); 4]> = counters.collect();
            let shard_charges: SmallVec<[Charge<'_>; 4]> = (charges.iter().zip(&counters))
                .map(|(charge, (key, limit))| Charge {
                    key,
                    limit,
                    ..*charge
                })
                .collect();
            let decided = self.decide_by_hash_slot(&shard_charges, deadline);
            let (result, return_task) = decided.await;
            let mut decision = result?;
            // Another shard may admit the request, but only if no other policy refuses.
            let (mut is_continued, mut is_final) = (false, decision.admitted);
            let mut outcomes = decision.outcomes.iter();
            for search in &mut searches {
                let own = outcomes.by_ref().take(search.policy.len());
                let refusal_count = own.filter(|outcome| outcome.refusal().is_some()).count();
                if search.is_shadow() || refusal_count == 0 {
                    continue;
                }
                search.try_next_shard();
                is_continued = true;
                is_final |= search.has_tried_all();
            }
            earlier.merge_into(&mut decision);
            if is_final || !is_continued {
                hide_statuses_of_unfinished_searches(&searches, &mut decision);
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
    ) -> Result<Decision, DecisionFailure> {
        let by_shard = charges.iter().flat_map(|charge| {
            let shard_count = charge.shard_count.max(1);
            (0..shard_count)
                .map(move |shard| (charge, shard_key_and_limit(charge, shard, shard_count)))
        });
        let by_shard: Vec<(&Charge<'_>, (Key, Limit))> = by_shard.collect();
        let shard_charges = by_shard.iter().map(|(charge, (key, limit))| Charge {
            key,
            limit,
            is_held_back: false,
            ..**charge
        });
        let shard_charges: Vec<Charge<'_>> = shard_charges.collect();
        let (result, _) = self.decide_by_hash_slot(&shard_charges, deadline).await;
        // A partial decision is dropped: it has the statuses of shards, and charged nothing.
        let mut decision = result.map_err(|failure| failure.unavailable)?;
        let mut shards = std::mem::take(&mut decision.outcomes).into_iter();
        let outcomes = charges.iter().map(|charge| {
            let own = shards.by_ref().take(charge.shard_count.max(1).into());
            let own: SmallVec<[ChargeOutcome; 4]> = own.collect();
            let statuses = own.iter().filter_map(|shard| shard.status);
            ChargeOutcome {
                status: statuses.reduce(|sum, status| LimitStatus {
                    remaining: sum.remaining + status.remaining,
                    ..merge_shard_statuses(sum, status)
                }),
                charged_at_us: None,
                ..own.first().copied().unwrap_or_default()
            }
        });
        decision.outcomes = outcomes.collect();
        Ok(decision)
    }
}

/// Removes the statuses of policies that did not ask all their shards from a refusal, because a
/// shard that was not asked may admit the request.
fn hide_statuses_of_unfinished_searches(searches: &[ShardSearch<'_>], decision: &mut Decision) {
    if decision.admitted {
        return;
    }
    let mut outcomes = decision.outcomes.iter_mut();
    for search in searches {
        let own = outcomes.by_ref().take(search.policy.len());
        let is_hidden = search.shard_count > 1 && !search.has_tried_all();
        own.filter(|_| is_hidden)
            .for_each(|outcome| outcome.status = None);
    }
}

/// The key and the limit of one shard.
fn shard_key_and_limit(charge: &Charge<'_>, shard: u16, shard_count: u16) -> (Key, Limit) {
    match shard_count {
        0 | 1 => (charge.key.clone(), *charge.limit),
        _ => (
            charge.key.shard_key(shard),
            charge.limit.shard_limit(shard, shard_count),
        ),
    }
}

/// Merges the statuses of two shards of a limit: the larger remainder, and the earlier times.
fn merge_shard_statuses(one: LimitStatus, other: LimitStatus) -> LimitStatus {
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
    LimitStatus {
        remaining: one.remaining.max(other.remaining),
        next_growth_us: earlier(one.next_growth_us, other.next_growth_us),
        refusal,
        in_effect: one.in_effect,
    }
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
        let mut decision = Decision {
            now_us,
            ..Decision::without_outcomes(2)
        };
        decision.outcomes[0].status = Some(status);
        decision
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
                    (EarlierShardRefusals::default(), refused_decision(1, 1));
                for (now_us, wait_us) in clocks_us.into_iter().zip(waits_us) {
                    last = refused_decision(now_us, wait_us);
                    earlier.merge_into(&mut last);
                }
                let until_us = last.now_us + 40;
                let merged = last.outcomes[0].status.unwrap();
                assert_eq!(
                    (merged.refusal, merged.next_growth_us),
                    (Some(Refusal::Until(until_us)), Some(until_us)),
                    "{clocks_us:?} {waits_us:?}"
                );
                assert_eq!(last.outcomes[1].status, None);
            }
        }
    }
}
