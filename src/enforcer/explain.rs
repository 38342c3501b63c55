//! Why a request gets what it gets: the walk of [`super::Plan`], told policy by policy, with nothing charged.

use super::{Claim, Plan};
use crate::limiter::{Key, Limit, Standing};
use crate::policy::{Action, Facts, KeyFault, NamedLimit, Policy, PolicyTable, Unmet};
use crate::store::{Store, Unavailable};
use smallvec::SmallVec;

/// What one policy does with a request.
#[derive(Debug)]
pub enum Step<'t> {
    /// It does not apply.
    Unmet(Unmet<'t>),
    /// A policy before it has ended the walk.
    NotReached,
    Exempts,
    Denies,
    /// A part of its key is missing, and so it does not apply.
    Skipped,
    /// The request is refused: it cannot be keyed.
    CannotKey(KeyFault),
    Limits(Limits<'t>),
}

/// The limits that a request uses at one policy.
#[derive(Debug)]
pub struct Limits<'t> {
    pub key: Key,
    pub cost: u64,
    pub limits: &'t [NamedLimit],
    pub block: Option<&'t Limit>,
    /// The end of the block that holds (µs, store's clock), if one does.
    pub blocked_until_us: Option<u64>,
    /// Where each limit stands now; empty if the store does not tell.
    pub standings: Vec<Standing>,
}

/// What every policy does with a request, in the order in which they apply.
#[derive(Debug)]
pub struct Explanation<'t> {
    pub steps: Vec<(&'t Policy, Step<'t>)>,
    /// The store's clock (µs since the epoch), or why it does not tell where the limits stand.
    pub store: Result<u64, Unavailable>,
}

/// Explains what `table` does with a request. Reads the counters and changes none.
pub async fn explain<'t>(
    store: &Store,
    table: &'t PolicyTable,
    facts: &Facts<'_>,
) -> Explanation<'t> {
    let mut steps = walk(table, facts);
    let claims = steps
        .iter()
        .enumerate()
        .filter_map(|(at, (policy, step))| match step {
            Step::Limits(limits) => {
                let Limits {
                    key, limits, block, ..
                } = limits;
                Some(Claim {
                    at,
                    policy,
                    key: key.clone(),
                    limits,
                    block: *block,
                    cost: 0,
                    estimate: None,
                    counts_rejected: false,
                    shards: if let Action::Limit(quota) = &policy.action {
                        quota.shards
                    } else {
                        1
                    },
                    lease: None,
                })
            }
            _ => None,
        });
    let plan = Plan {
        claims: claims.collect(),
        shadow_denied: SmallVec::new(),
    };
    let decision = match store.decide(&plan.charges(0, 0)).await {
        Ok(decision) => decision,
        Err(unavailable) => {
            return Explanation {
                steps,
                store: Err(unavailable),
            };
        }
    };
    let mut standings = decision.standings.into_iter();
    for (_, step) in &mut steps {
        if let Step::Limits(limits) = step {
            let block = limits.block.and_then(|_| standings.next().flatten());
            limits.blocked_until_us = block.and_then(|block| block.grows_at_us);
            limits.standings = standings
                .by_ref()
                .take(limits.limits.len())
                .flatten()
                .collect();
        }
    }
    Explanation {
        steps,
        store: Ok(decision.now_us),
    }
}

fn walk<'t>(table: &'t PolicyTable, facts: &Facts<'_>) -> Vec<(&'t Policy, Step<'t>)> {
    let mut ended = false;
    let told = table.policies().iter().map(|policy| {
        let step = match policy.unmet(facts) {
            _ if ended => Step::NotReached,
            Some(unmet) => Step::Unmet(unmet),
            None => apply(policy, table, facts),
        };
        ended |=
            !policy.shadow && matches!(step, Step::Exempts | Step::Denies | Step::CannotKey(_));
        (policy, step)
    });
    told.collect()
}

fn apply<'t>(policy: &'t Policy, table: &'t PolicyTable, facts: &Facts<'_>) -> Step<'t> {
    let quota = match &policy.action {
        Action::Allow => return Step::Exempts,
        Action::Deny => return Step::Denies,
        Action::Limit(quota) => quota,
    };
    match quota.select(&policy.name, facts, &table.client) {
        Ok(Some((key, limits))) => {
            let block = quota.block.as_ref().filter(|_| !policy.shadow);
            let cost = quota.cost.of(facts);
            Step::Limits(Limits {
                key,
                cost,
                limits,
                block,
                blocked_until_us: None,
                standings: Vec::new(),
            })
        }
        Ok(None) => Step::Skipped,
        Err(fault) => Step::CannotKey(fault),
    }
}
