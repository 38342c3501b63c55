//! Decides policies that are spread over shards: tries one shard after the other until one admits.

use crate::limiter::{
    ChargeOutcome, Decision, LimitStatus, PolicyCharges, PolicyOutcome, Refusal, each_charge,
};
use crate::store::DecisionFailure;
use crate::store::redis::RedisStore;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// The decision of the shards tried before, with their refusals only.
#[derive(Default)]
struct EarlierShardRefusals(Decision);

impl EarlierShardRefusals {
    /// Merges the earlier statuses into a decision, on its clock.
    fn merge_into(&mut self, decision: &mut Decision) {
        let now_us = decision.now_us;
        for (outcome, earlier) in decision.outcomes_mut().zip(self.0.outcomes()) {
            let earlier = earlier.status;
            let earlier = earlier.map(|earlier| earlier.convert_clock(self.0.now_us, now_us));
            outcome.status = match (earlier, outcome.status) {
                (Some(earlier), Some(status)) => Some(merge_shard_statuses(earlier, status)),
                (earlier, status) => status.or(earlier),
            };
        }
        self.0 = decision.clone();
        let outcomes = self.0.outcomes_mut();
        (outcomes.filter(|outcome| outcome.refusal().is_none()))
            .for_each(|outcome| outcome.status = None);
    }
}

/// One policy of a request, and the shard of it that is tried now.
struct ShardSearch<'r, 'c> {
    policy: &'r PolicyCharges<'c>,
    current_shard: u16,
    /// Shards that were tried before.
    shards_tried: u16,
}

impl<'r, 'c> ShardSearch<'r, 'c> {
    /// Starts from a random shard.
    fn new(policy: &'r PolicyCharges<'c>) -> Self {
        Self {
            policy,
            current_shard: fastrand::u16(..policy.shard_count.max(1)),
            shards_tried: 0,
        }
    }

    fn has_tried_all(&self) -> bool {
        self.shards_tried >= self.policy.shard_count.max(1)
    }

    fn try_next_shard(&mut self) {
        self.shards_tried += 1;
        self.current_shard = (self.current_shard + 1) % self.policy.shard_count.max(1);
    }
}

impl RedisStore {
    /// Decides charges of which some are sharded. If several shards refuse, the result has the
    /// earliest end of their refusals. At least the remaining units of the result are left.
    pub(crate) async fn decide_across_shards(
        &self,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<Decision, DecisionFailure> {
        if each_charge(request).all(|charge| charge.cost == 0 || charge.is_read) {
            return self.read_all_shards(request, deadline).await;
        }
        let mut searches: SmallVec<[_; 2]> = request.iter().map(ShardSearch::new).collect();
        let mut earlier = EarlierShardRefusals::default();
        loop {
            let shards = searches
                .iter()
                .map(|search| shard_of_policy(search.policy, search.current_shard));
            let shards: SmallVec<[_; 2]> = shards.collect();
            let (result, return_task) = self.decide_by_hash_slot(&shards, deadline).await;
            let mut decision = result?;
            // Another shard may admit the request, but only if no other policy refuses.
            let (mut is_continued, mut is_final) = (false, decision.admitted);
            for (search, outcome) in searches.iter_mut().zip(&decision.policies) {
                let mut limits = outcome.limits.iter();
                if search.policy.shadow || limits.all(|outcome| outcome.refusal().is_none()) {
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

    /// Reads all shards of sharded policies, and merges their statuses to one per charge.
    async fn read_all_shards(
        &self,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<Decision, DecisionFailure> {
        let shards = request.iter().flat_map(|policy| {
            let shards = 0..policy.shard_count.max(1);
            shards.map(|shard| PolicyCharges {
                is_held_back: false,
                ..shard_of_policy(policy, shard)
            })
        });
        let shards: Vec<PolicyCharges<'_>> = shards.collect();
        let (result, _) = self.decide_by_hash_slot(&shards, deadline).await;
        // A partial decision is dropped: it has the statuses of shards, and charged nothing.
        let mut decision = result.map_err(|failure| failure.unavailable)?;
        let mut answers = std::mem::take(&mut decision.policies).into_iter();
        let policies = request.iter().map(|policy| {
            let own = answers.by_ref().take(policy.shard_count.max(1).into());
            own.reduce(merge_shard_readings).unwrap_or_default()
        });
        decision.policies = policies.collect();
        Ok(decision)
    }
}

/// Removes the statuses of policies that did not ask all their shards from a refusal, because a
/// shard that was not asked may admit the request.
fn hide_statuses_of_unfinished_searches(searches: &[ShardSearch<'_, '_>], decision: &mut Decision) {
    if decision.admitted {
        return;
    }
    for (search, outcome) in searches.iter().zip(&mut decision.policies) {
        if search.policy.shard_count > 1 && !search.has_tried_all() {
            let limits = outcome.limits.iter_mut();
            limits.for_each(|outcome| outcome.status = None);
        }
    }
}

/// The charges of a policy on one of its shards.
fn shard_of_policy<'c>(policy: &PolicyCharges<'c>, shard: u16) -> PolicyCharges<'c> {
    if policy.shard_count <= 1 {
        return policy.clone();
    }
    let shards = policy.shard_count;
    let limited =
        policy.map_limits(|charge| charge.limit = charge.limit.shard_limit(shard, shards));
    let response_key = policy.response_key.as_ref();
    PolicyCharges {
        key: Cow::Owned(policy.key.shard_key(shard)),
        response_key: response_key.map(|key| Arc::new(key.shard_key(shard))),
        ..limited
    }
}

/// Adds the reading of another shard of a policy: the remaining units of all shards count.
fn merge_shard_readings(mut sum: PolicyOutcome, shard: PolicyOutcome) -> PolicyOutcome {
    for (outcome, added) in sum.limits.iter_mut().zip(shard.limits) {
        let statuses = [outcome.status, added.status].into_iter().flatten();
        let status = statuses.reduce(|sum, status| LimitStatus {
            remaining: sum.remaining + status.remaining,
            ..merge_shard_statuses(sum, status)
        });
        *outcome = ChargeOutcome {
            status,
            charged_at_us: None,
            ..*outcome
        };
    }
    sum
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
        let refused = ChargeOutcome {
            status: Some(status),
            ..ChargeOutcome::default()
        };
        let decision = Decision {
            now_us,
            ..Decision::default()
        };
        decision.with_outcomes([refused, ChargeOutcome::default()])
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
                let merged = last.outcomes().next().unwrap().status.unwrap();
                assert_eq!(
                    (merged.refusal, merged.next_growth_us),
                    (Some(Refusal::Until(until_us)), Some(until_us)),
                    "{clocks_us:?} {waits_us:?}"
                );
                assert_eq!(last.outcomes().nth(1).unwrap().status, None);
            }
        }
    }
}
