//! A call of the rate-limit service: several descriptors, decided together, each with a status of its own.

use super::{Did, Enforcer, Outcome, Plan, Reported, Rules, Verdict};
use crate::limiter::{Decision, Key, Refusal};
use crate::policy::{Descriptor, Facts};
use crate::telemetry::metrics::Source;
use smallvec::SmallVec;
use std::mem::take;
use tokio::time::Instant;

/// What is to become of a call.
#[derive(Debug)]
pub struct Called<'t> {
    pub verdict: Verdict<'t>,
    /// One per descriptor.
    pub statuses: Vec<Status<'t>>,
}

/// How one descriptor stands.
#[derive(Debug, Default)]
pub struct Status<'t> {
    /// Any policy is about it.
    pub is_met: bool,
    pub is_over: bool,
    /// Of its limits the one that refused, or that is nearest to refusing.
    pub tightest: Option<Reported<'t>>,
}

impl Enforcer {
    /// Decides a call, which arrived just now, by `rules`: all descriptors are charged, or none is.
    pub async fn decide_call<'t>(
        &self,
        rules: &'t Rules,
        descriptors: &'t [Descriptor<'t>],
        arrived: Instant,
    ) -> Called<'t> {
        let mut plan = Plan::default();
        let mut statuses: Vec<Status<'t>> = Vec::with_capacity(descriptors.len());
        // Whose quotas each uses.
        let mut keys: SmallVec<[SmallVec<[u128; 2]>; 4]> = SmallVec::new();
        let domain = descriptors
            .first()
            .map_or("", |descriptor| descriptor.domain);
        let count =
            |at, key: Option<&Key>, did: Did| rules.count(at, &self.shard, did, (key, domain));
        for descriptor in descriptors {
            let mut alone = Plan::default();
            match alone.add(
                &rules.table,
                &Facts::of(descriptor),
                Some(descriptor),
                count,
            ) {
                Ok(is_met) => statuses.push(Status {
                    is_met,
                    ..Status::default()
                }),
                Err(outcome) => {
                    statuses.push(Status {
                        is_met: true,
                        is_over: true,
                        tightest: None,
                    });
                    statuses.resize_with(descriptors.len(), || Status {
                        is_met: true,
                        ..Status::default()
                    });
                    return Called {
                        verdict: Verdict::of(outcome),
                        statuses,
                    };
                }
            }
            keys.push(alone.claims.iter().map(|claim| claim.key.id()).collect());
            plan.shadow_denied.extend(alone.shadow_denied);
            alone.claims.into_iter().for_each(|claim| plan.claim(claim));
        }
        let looks = plan.claims.iter().any(|claim| claim.cost == 0);
        let verdict = match looks {
            true => self.look(&mut plan, count, arrived).await,
            false => self.ask(&mut plan, count, arrived).await,
        };
        for (status, keys) in statuses.iter_mut().zip(&keys) {
            let mut own: SmallVec<[Reported<'t>; 4]> = verdict.limits.clone();
            own.retain(|reported| keys.contains(&reported.key));
            status.tightest = Reported::tightest(&own).copied();
            status.is_over = own
                .iter()
                .any(|reported| reported.standing.refusal.is_some());
        }
        Called { verdict, statuses }
    }

    /// Decides a plan that asks of some counters only whether anything is left. If nothing is, nobody is charged; else
    /// the others are charged at a second question.
    async fn look<'t>(
        &self,
        plan: &mut Plan<'t>,
        count: impl Fn(usize, Option<&Key>, Did) + Copy,
        arrived: Instant,
    ) -> Verdict<'t> {
        let mut charges = plan.charges(0, 0);
        for charge in &mut charges {
            (charge.cost, charge.lease) = (0, None);
        }
        let answer = match self.store.answer(&charges, arrived).await {
            Ok(answer) => Some(answer),
            Err(_) if plan.goes_on() => self
                .store
                .decide_alone(&charges)
                .map(|alone| (alone, Source::Degraded)),
            Err(_) => None,
        };
        drop(charges);
        let is_all = plan.claims.iter().all(|claim| claim.cost == 0);
        let Some((mut decision, source)) = answer else {
            return self.ask(plan, count, arrived).await;
        };
        let degraded = source == Source::Degraded;
        if !plan.refuse_empty(&mut decision) && (degraded || !is_all) {
            return self.ask(plan, count, arrived).await;
        }
        match degraded {
            true => plan.count_degraded(Some(&decision), count),
            false => plan.count(&decision, count),
        }
        let at = Instant::now();
        self.shard
            .decided(source, at.saturating_duration_since(arrived));
        Verdict {
            at: Some(at),
            source: Some(source),
            degraded,
            ..take(plan).into_verdict(&decision)
        }
    }
}

impl Plan<'_> {
    /// Turns a look at all counters into the refusal that it would be, if one that is only looked at has nothing left.
    fn refuse_empty(&self, decision: &mut Decision) -> bool {
        let mut is_empty = false;
        let mut standings = decision.standings.iter_mut();
        for claim in &self.claims {
            // A block is asked nothing by who only looks; that it ends tells that it holds.
            let mut is_over = false;
            if claim.block.is_some()
                && let Some(Some(block)) = standings.next()
                && let Some(until_us) = block.grows_at_us
            {
                block.refusal = Some(Refusal::Until(until_us));
                is_over = true;
            }
            for standing in standings.by_ref().take(claim.limits.len()).flatten() {
                if standing.refusal.is_none() && standing.remaining < claim.cost.max(1) {
                    standing.refusal =
                        Some(standing.grows_at_us.map_or(Refusal::Never, Refusal::Until));
                }
                is_over |= standing.refusal.is_some();
            }
            is_empty |= is_over && claim.cost == 0 && !claim.policy.shadow;
        }
        decision.admitted &= !is_empty;
        is_empty
    }
}

impl Outcome<'_> {
    /// Whether it is the client who is refused, and not we who can't tell.
    pub fn is_over_limit(&self) -> bool {
        matches!(
            self,
            Self::Limited(_) | Self::Denied { .. } | Self::BadKey { .. }
        )
    }
}
