//! Decides requests of the past: the same walk, the same charges, the same rules, with counters in memory and nobody
//! who waits for an answer.

use super::{Did, Outcome, Plan, taken};
use crate::limiter::{Key, Limit};
use crate::policy::{Facts, NamedLimit, PolicyTable};
use crate::store::Memory;
use smallvec::SmallVec;
use std::time::Instant;

/// What one policy did with a request.
#[derive(Debug)]
pub struct Told<'a, 't> {
    /// The policy's place in the table.
    pub at: usize,
    pub did: Did,
    /// `None` for a policy without limits, and for a request that it cannot key.
    pub claim: Option<Claimed<'a, 't>>,
}

/// The quota that a request used at one policy, or would have.
#[derive(Debug)]
pub struct Claimed<'a, 't> {
    pub key: &'a Key,
    pub limits: &'t [NamedLimit],
    pub cost: u64,
}

/// What would have become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    Forwarded,
    /// 429
    Limited,
    /// 403
    Denied,
    /// 400: it cannot be keyed.
    BadKey,
}

/// A request that was rehearsed.
#[derive(Debug)]
pub struct Rehearsed {
    pub past: Past,
    /// How long it would have been held (µs).
    pub delay_us: u64,
    /// The slots that it took, to be renewed and given back by who knows how long it lasted.
    pub places: SmallVec<[(Limit, Key); 1]>,
    /// After what time it would have been ended (µs), if ever.
    pub longest_us: Option<u64>,
}

/// Decides a request at the time that `memory`'s clock tells. `slot` is unique among those of this memory; `asked` is any
/// moment, as that clock is moved by hand. `tell` hears what each policy that matches did.
pub fn rehearse<'t>(
    memory: &Memory,
    table: &'t PolicyTable,
    facts: &Facts<'_>,
    (slot, asked): (u128, Instant),
    mut tell: impl FnMut(Told<'_, 't>),
) -> Rehearsed {
    let ended = |past| Rehearsed {
        past,
        delay_us: 0,
        places: SmallVec::new(),
        longest_us: None,
    };
    let plan = match Plan::of(table, facts, |at, _, did| {
        tell(Told {
            at,
            did,
            claim: None,
        })
    }) {
        Ok(plan) if plan.claims.is_empty() => return ended(Past::Forwarded),
        Ok(plan) => plan,
        Err(Outcome::BadKey { .. }) => return ended(Past::BadKey),
        Err(_) => return ended(Past::Denied),
    };
    let charges = plan.charges(1, slot);
    let decision = memory.decide_at(&charges, asked);
    plan.count(&decision, |at, _, did| {
        let claim = plan.claims.iter().find(|claim| claim.at == at);
        let claim = claim.map(|claim| Claimed {
            key: &claim.key,
            limits: claim.limits,
            cost: claim.cost,
        });
        tell(Told { at, did, claim });
    });
    let (taken, longest_us) = taken(&charges, &decision);
    Rehearsed {
        past: if decision.admitted {
            Past::Forwarded
        } else {
            Past::Limited
        },
        delay_us: decision.delay_us,
        places: taken
            .iter()
            .map(|charge| (*charge.limit, charge.key.clone()))
            .collect(),
        longest_us,
    }
}
