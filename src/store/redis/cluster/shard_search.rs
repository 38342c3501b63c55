//! Policies whose keys are spread over several counters: one is asked after the other until one admits.

use super::{Charge, ClusterClient, Decision, Instant, LimitStatus, RedisErrorKind};
use crate::limiter::{Key, Limit, Refusal};
use smallvec::SmallVec;
use tokio::time::timeout_at;

/// What those who were asked before say, and what their clock showed.
#[derive(Default)]
struct EarlierShardStatuses {
    now_us: u64,
    standings: SmallVec<[Option<LimitStatus>; 4]>,
}

impl EarlierShardStatuses {
    /// Puts it beside what another says, on that one's clock. Only refusals matter later.
    fn merge_into(&mut self, decision: &mut Decision) {
        let now_us = decision.now_us;
        for (at, standing) in decision.statuses.iter_mut().enumerate() {
            let earlier = self.standings.get(at).copied().flatten();
            *standing = merge_statuses(
                earlier.map(|earlier| earlier.convert_clock(self.now_us, now_us)),
                *standing,
            );
        }
        let is_refusal = |standing: &LimitStatus| standing.refusal.is_some();
        let standings = decision
            .statuses
            .iter()
            .map(|standing| standing.filter(is_refusal))
            .collect();
        *self = Self { now_us, standings };
    }
}

/// Where a policy's search stands.
struct ShardSearch {
    policy_group: (u32, bool),
    shard_count: u16,
    /// The shard that is asked now.
    current_shard: u16,
    /// Asked before.
    shards_tried: u16,
}

impl ClusterClient {
    /// Decides charges some of which are spread. Where several shards refuse, the earliest end counts; what remains is
    /// at least what the answer says.
    pub(super) async fn decide_across_shards(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        if charges.iter().all(|charge| charge.cost == 0) {
            return self.read_shards(charges, deadline).await;
        }
        let mut searches = start_searches(charges);
        let mut earlier = EarlierShardStatuses::default();
        loop {
            let assigned_shard = |charge: &Charge<'_>| {
                let search = searches
                    .iter()
                    .find(|search| search.policy_group == (charge.group, charge.shadow));
                search.map(|search| (search.current_shard, search.shard_count))
            };
            let shard_counters: SmallVec<[(Key, Limit); 4]> = charges
                .iter()
                .map(|charge| shard_counter(charge, assigned_shard(charge)))
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
            let (mut decision, credit_task) = self.decide_by_slot(&shard_charges, deadline).await?;
            let has_refusal = |search: &ShardSearch| {
                let mut own = charges.iter().zip(&decision.statuses);
                own.any(|(charge, standing)| {
                    (charge.group, charge.shadow) == search.policy_group
                        && standing.is_some_and(|standing| standing.refusal.is_some())
                })
            };
            // Another shard may admit it, but only if nobody else refuses.
            let is_spread = |charge: &Charge<'_>| charge.shard_count > 1;
            let others_refuse = charges
                .iter()
                .zip(&decision.statuses)
                .any(|(charge, standing)| {
                    !charge.shadow
                        && !is_spread(charge)
                        && standing.is_some_and(|standing| standing.refusal.is_some())
                });
            let mut is_final = decision.admitted || others_refuse;
            let mut next: SmallVec<[&mut ShardSearch; 2]> = searches
                .iter_mut()
                .filter(|search| !search.policy_group.1 && has_refusal(search))
                .collect();
            is_final |= next.is_empty();
            for search in &mut next {
                search.shards_tried += 1;
                search.current_shard = (search.current_shard + 1) % search.shard_count;
                is_final |= search.shards_tried >= search.shard_count;
            }
            earlier.merge_into(&mut decision);
            if is_final {
                return Ok(decision);
            }
            // What this try has taken from others must not refuse the next.
            if let Some(giving_back) = credit_task {
                drop(timeout_at(deadline, giving_back).await);
            }
        }
    }

    /// Where spread charges stand as a whole.
    async fn read_shards(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let shard_counters = charges.iter().enumerate().flat_map(|(place, charge)| {
            let shards = charge.shard_count.max(1);
            (0..shards).map(move |at| {
                (
                    place,
                    shard_counter(charge, Some((at, shards)).filter(|_| shards > 1)),
                )
            })
        });
        let shard_counters: Vec<(usize, (Key, Limit))> = shard_counters.collect();
        let shard_charges = shard_counters.iter().filter_map(|(place, (key, limit))| {
            Some(Charge {
                key,
                limit,
                ..*charges.get(*place)?
            })
        });
        let shard_charges: Vec<Charge<'_>> = shard_charges.collect();
        let (shard_decision, _) = self.decide_by_slot(&shard_charges, deadline).await?;
        let mut merged = Decision {
            statuses: SmallVec::from_elem(None, charges.len()),
            charged_at_us: SmallVec::new(),
            ..shard_decision.clone()
        };
        for ((place, _), standing) in shard_counters.iter().zip(shard_decision.statuses) {
            if let (Some(sum), Some(standing)) = (merged.statuses.get_mut(*place), standing) {
                let remaining =
                    sum.map_or(0, |sum: LimitStatus| sum.remaining) + standing.remaining;
                *sum = merge_statuses(*sum, Some(standing)).map(|either| LimitStatus {
                    remaining,
                    ..either
                });
            }
        }
        Ok(merged)
    }
}

/// A search for each policy that is spread, each from a shard of its own choice.
fn start_searches(charges: &[Charge<'_>]) -> SmallVec<[ShardSearch; 2]> {
    let mut searches: SmallVec<[ShardSearch; 2]> = SmallVec::new();
    for charge in charges.iter().filter(|charge| charge.shard_count > 1) {
        let policy = (charge.group, charge.shadow);
        if !searches.iter().any(|search| search.policy_group == policy) {
            let (shards, at) = (charge.shard_count, fastrand::u16(..charge.shard_count));
            searches.push(ShardSearch {
                policy_group: policy,
                shard_count: shards,
                current_shard: at,
                shards_tried: 0,
            });
        }
    }
    searches
}

/// The counter of one shard, and its share.
fn shard_counter(charge: &Charge<'_>, shard: Option<(u16, u16)>) -> (Key, Limit) {
    match shard {
        Some((at, of)) => (charge.key.shard_key(at), charge.limit.shard_limit(at, of)),
        None => (charge.key.clone(), *charge.limit),
    }
}

/// What is known of a limit from two of its shards: what either has, whenever either frees.
fn merge_statuses(one: Option<LimitStatus>, other: Option<LimitStatus>) -> Option<LimitStatus> {
    let (Some(one), Some(other)) = (one, other) else {
        return other.or(one);
    };
    let earlier =
        |a: Option<u64>, b: Option<u64>| a.zip(b).map_or(a.or(b), |(a, b)| Some(a.min(b)));
    let refusal = match (one.refusal, other.refusal) {
        (Some(Refusal::Until(one)), Some(Refusal::Until(other))) => {
            Some(Refusal::Until(one.min(other)))
        }
        // A share may be too small for what a larger one admits.
        (Some(Refusal::Never), refusal) | (refusal, Some(Refusal::Never)) => refusal,
        (one, other) => one.and(other),
    };
    Some(LimitStatus {
        remaining: one.remaining.max(other.remaining),
        next_growth_us: earlier(one.next_growth_us, other.next_growth_us),
        refusal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused_decision(now_us: u64, after_us: u64) -> Decision {
        let at_us = now_us + after_us;
        let standing = LimitStatus {
            remaining: 1,
            next_growth_us: Some(at_us),
            refusal: Some(Refusal::Until(at_us)),
        };
        Decision {
            now_us,
            admitted: false,
            statuses: SmallVec::from_iter([Some(standing), None]),
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
