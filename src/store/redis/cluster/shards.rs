//! Policies whose keys are spread over several counters: one is asked after the other until one admits.

use super::{Charge, Cluster, Decision, Failure, Instant, Standing};
use crate::limiter::{Key, Limit, Refusal};
use smallvec::SmallVec;
use tokio::time::timeout_at;

/// What those who were asked before say, and what their clock showed.
#[derive(Default)]
struct Earlier {
    now_us: u64,
    standings: SmallVec<[Option<Standing>; 4]>,
}

impl Earlier {
    /// Puts it beside what another says, on that one's clock. Only refusals matter later.
    fn join(&mut self, decision: &mut Decision) {
        let now_us = decision.now_us;
        for (at, standing) in decision.standings.iter_mut().enumerate() {
            let earlier = self.standings.get(at).copied().flatten();
            *standing = either(
                earlier.map(|earlier| earlier.on_clock(self.now_us, now_us)),
                *standing,
            );
        }
        let is_refusal = |standing: &Standing| standing.refusal.is_some();
        let standings = decision
            .standings
            .iter()
            .map(|standing| standing.filter(is_refusal))
            .collect();
        *self = Self { now_us, standings };
    }
}

/// Where a policy's search stands.
struct Search {
    policy: (u32, bool),
    shards: u16,
    /// The shard that is asked now.
    at: u16,
    /// Asked before.
    tried: u16,
}

impl Cluster {
    /// Decides charges some of which are spread. Where several shards refuse, the earliest end counts; what remains is
    /// at least what the answer says.
    pub(super) async fn decide_over_shards(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, Failure> {
        if charges.iter().all(|charge| charge.cost == 0) {
            return self.look_at_shards(charges, deadline).await;
        }
        let mut searches = searches(charges);
        let mut earlier = Earlier::default();
        loop {
            let shard = |charge: &Charge<'_>| {
                let search = searches
                    .iter()
                    .find(|search| search.policy == (charge.group, charge.shadow));
                search.map(|search| (search.at, search.shards))
            };
            let parts: SmallVec<[(Key, Limit); 4]> = charges
                .iter()
                .map(|charge| part(charge, shard(charge)))
                .collect();
            let asked: SmallVec<[Charge<'_>; 4]> = charges
                .iter()
                .zip(&parts)
                .map(|(charge, (key, limit))| Charge {
                    key,
                    limit,
                    ..*charge
                })
                .collect();
            let (mut decision, giving_back) = self.decide_whole(&asked, deadline).await?;
            let refusing = |search: &Search| {
                let mut own = charges.iter().zip(&decision.standings);
                own.any(|(charge, standing)| {
                    (charge.group, charge.shadow) == search.policy
                        && standing.is_some_and(|standing| standing.refusal.is_some())
                })
            };
            // Another shard may admit it, but only if nobody else refuses.
            let is_spread = |charge: &Charge<'_>| charge.shards > 1;
            let others_refuse =
                charges
                    .iter()
                    .zip(&decision.standings)
                    .any(|(charge, standing)| {
                        !charge.shadow
                            && !is_spread(charge)
                            && standing.is_some_and(|standing| standing.refusal.is_some())
                    });
            let mut stuck = decision.admitted || others_refuse;
            let mut next: SmallVec<[&mut Search; 2]> = searches
                .iter_mut()
                .filter(|search| !search.policy.1 && refusing(search))
                .collect();
            stuck |= next.is_empty();
            for search in &mut next {
                search.tried += 1;
                search.at = (search.at + 1) % search.shards;
                stuck |= search.tried >= search.shards;
            }
            earlier.join(&mut decision);
            if stuck {
                return Ok(decision);
            }
            // What this try has taken from others must not refuse the next.
            if let Some(giving_back) = giving_back {
                drop(timeout_at(deadline, giving_back).await);
            }
        }
    }

    /// Where spread charges stand as a whole.
    async fn look_at_shards(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, Failure> {
        let all = charges.iter().enumerate().flat_map(|(place, charge)| {
            let shards = charge.shards.max(1);
            (0..shards).map(move |at| {
                (
                    place,
                    part(charge, Some((at, shards)).filter(|_| shards > 1)),
                )
            })
        });
        let all: Vec<(usize, (Key, Limit))> = all.collect();
        let asked = all.iter().filter_map(|(place, (key, limit))| {
            Some(Charge {
                key,
                limit,
                ..*charges.get(*place)?
            })
        });
        let asked: Vec<Charge<'_>> = asked.collect();
        let (parts, _) = self.decide_whole(&asked, deadline).await?;
        let mut whole = Decision {
            standings: SmallVec::from_elem(None, charges.len()),
            stands_us: SmallVec::new(),
            ..parts.clone()
        };
        for ((place, _), standing) in all.iter().zip(parts.standings) {
            if let (Some(sum), Some(standing)) = (whole.standings.get_mut(*place), standing) {
                let remaining = sum.map_or(0, |sum: Standing| sum.remaining) + standing.remaining;
                *sum = either(*sum, Some(standing)).map(|either| Standing {
                    remaining,
                    ..either
                });
            }
        }
        Ok(whole)
    }
}

/// A search for each policy that is spread, each from a shard of its own choice.
fn searches(charges: &[Charge<'_>]) -> SmallVec<[Search; 2]> {
    let mut searches: SmallVec<[Search; 2]> = SmallVec::new();
    for charge in charges.iter().filter(|charge| charge.shards > 1) {
        let policy = (charge.group, charge.shadow);
        if !searches.iter().any(|search| search.policy == policy) {
            let (shards, at) = (charge.shards, fastrand::u16(..charge.shards));
            searches.push(Search {
                policy,
                shards,
                at,
                tried: 0,
            });
        }
    }
    searches
}

/// The counter of one shard, and its share.
fn part(charge: &Charge<'_>, shard: Option<(u16, u16)>) -> (Key, Limit) {
    match shard {
        Some((at, of)) => (charge.key.shard(at), charge.limit.shard(at, of)),
        None => (charge.key.clone(), *charge.limit),
    }
}

/// What is known of a limit from two of its shards: what either has, whenever either frees.
fn either(one: Option<Standing>, other: Option<Standing>) -> Option<Standing> {
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
    Some(Standing {
        remaining: one.remaining.max(other.remaining),
        grows_at_us: earlier(one.grows_at_us, other.grows_at_us),
        refusal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(now_us: u64, after_us: u64) -> Decision {
        let at_us = now_us + after_us;
        let standing = Standing {
            remaining: 1,
            grows_at_us: Some(at_us),
            refusal: Some(Refusal::Until(at_us)),
        };
        Decision {
            now_us,
            admitted: false,
            standings: SmallVec::from_iter([Some(standing), None]),
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::new(),
        }
    }

    #[test]
    fn the_earliest_end_is_found_whatever_the_clocks_of_the_nodes_show() {
        for clocks_us in [
            [1_000, 9_000_000, 5_000],
            [9_000_000, 1_000, 1_000],
            [7, 7, 7],
        ] {
            for waits_us in [[50, 40, 60], [40, 50, 60], [60, 50, 40]] {
                let (mut earlier, mut last) = (Earlier::default(), refused(1, 1));
                for (now_us, wait_us) in clocks_us.into_iter().zip(waits_us) {
                    last = refused(now_us, wait_us);
                    earlier.join(&mut last);
                }
                let until_us = last.now_us + 40;
                let whole = last.standings[0].unwrap();
                assert_eq!(
                    (whole.refusal, whole.grows_at_us),
                    (Some(Refusal::Until(until_us)), Some(until_us)),
                    "{clocks_us:?} {waits_us:?}"
                );
                assert_eq!(last.standings[1], None);
            }
        }
    }
}
