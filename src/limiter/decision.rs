//! The result of a decision: admitted or refused, and the status of each limit. A part of a
//! request's charges can be decided apart from the others.

use super::{Charge, Limit, MAX_UNITS, OverrideInEffect, PolicyCharges};
use smallvec::{SmallVec, smallvec};

/// The decision about one request. Either all enforced charges were made, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The store's clock at the decision.
    pub now_us: u64,
    /// Whether all enforced charges were admitted, and so made.
    pub admitted: bool,
    /// One per policy of the request, in order.
    pub policies: SmallVec<[PolicyOutcome; 1]>,
    /// How long an admitted request must be delayed: the longest delay of its enforced limits,
    /// usually 0.
    pub delay_us: u64,
    /// Of a refusal: whether a call of the store, which gave no answer, may have made charges.
    pub may_have_charged: bool,
}

/// What a decision did with the charges of one policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyOutcome {
    /// One per charge, in order.
    pub limits: SmallVec<[ChargeOutcome; 1]>,
    /// Leased units granted with this decision.
    pub grant: Option<LeaseGrant>,
}

/// The status of one limit after the decision. By default: no units are left, and nothing else is
/// known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitStatus {
    /// Units that a further request could take now.
    pub remaining: u64,
    /// When `remaining` next grows (µs, store's clock); `None` if it is at its maximum.
    pub next_growth_us: Option<u64>,
    /// `None` if this limit admits the charge, regardless of other limits.
    pub refusal: Option<Refusal>,
    /// The override of the key by which the limit was decided.
    pub in_effect: Option<OverrideInEffect>,
}

/// Why a limit refuses, and until when. Ordered by how long the refusal certainly lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Until a request in flight ends, at an unknown time.
    Unknown,
    /// From this time on (µs, store's clock) the same cost fits, if no other request takes the
    /// units.
    Until(u64),
    /// The cost exceeds the capacity of the limit.
    Never,
}

/// Units leased on all limits of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseGrant {
    /// At least 1.
    pub units: u64,
    /// The last microsecond (store's clock) in which the units may be used. All of them count as
    /// used then.
    pub until_us: u64,
}

/// What a decision did with one charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChargeOutcome {
    /// `None` if unknown because a cached refusal answered the request. At least one enforced
    /// charge of that request then has a status with the refusal.
    pub status: Option<LimitStatus>,
    /// The time (µs) under which a charge that will be settled is recorded, on the clock of its
    /// server. A later [`super::Amendment::Credit`] names it. Usually the time of the decision; if
    /// the newest charge is a lease, the lease's end; in a queue, the end of the position. `None`
    /// if the charge was not made or will not be settled. A refusal has the times of charges that
    /// are being returned.
    pub charged_at_us: Option<u64>,
    /// When the override in effect ends by itself (ms, store's clock).
    pub override_expires_at_ms: Option<u64>,
    /// Whether the value at the key of the override is no override. Then the limit of the file
    /// applies.
    pub has_foreign_override: bool,
}

impl ChargeOutcome {
    /// Why the limit refuses, if it is known to.
    pub fn refusal(&self) -> Option<Refusal> {
        self.status.and_then(|status| status.refusal)
    }

    /// Whether nothing is known about the limit. A charge with a time was admitted.
    pub fn is_unknown(&self) -> bool {
        self.status.is_none() && self.charged_at_us.is_none()
    }

    /// The limit that was decided: `limit`, or with the amounts of the key's override.
    pub fn limit_in_effect(&self, limit: &Limit) -> Limit {
        limit.with_override(self.status.and_then(|status| status.in_effect))
    }

    /// Whether the limit admitted the charge and counts it. A key without limits counts nothing.
    pub fn is_charged(&self) -> bool {
        let status = self.status;
        status.is_some_and(|status| status.refusal.is_none() && !status.is_unlimited())
    }
}

impl Decision {
    /// A refusal of a request, without the outcomes of its charges.
    pub fn without_outcomes(request: &[PolicyCharges<'_>]) -> Self {
        let policies = request.iter().map(|policy| PolicyOutcome {
            limits: smallvec![ChargeOutcome::default(); policy.limits.len()],
            grant: None,
        });
        Self {
            policies: policies.collect(),
            ..Self::default()
        }
    }

    /// The outcomes of all charges, in order.
    pub fn outcomes(&self) -> impl Iterator<Item = &ChargeOutcome> + Clone {
        self.policies.iter().flat_map(|policy| &policy.limits)
    }

    pub fn outcomes_mut(&mut self) -> impl Iterator<Item = &mut ChargeOutcome> {
        let policies = self.policies.iter_mut();
        policies.flat_map(|policy| &mut policy.limits)
    }

    /// The known statuses, in order.
    pub fn statuses(&self) -> impl Iterator<Item = LimitStatus> {
        self.outcomes().filter_map(|outcome| outcome.status)
    }

    /// Merges the decision of another part of the store about this request's remaining charges.
    /// Both must be expanded to the request. Statuses use the clock of `self`; charge times keep
    /// theirs.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        let now_us = self.now_us;
        for (outcome, added) in self.outcomes_mut().zip(other.outcomes()) {
            let status = added.status;
            let status = status.map(|status| status.convert_clock(other.now_us, now_us));
            outcome.status = outcome.status.or(status);
            outcome.charged_at_us = outcome.charged_at_us.or(added.charged_at_us);
        }
        self.admitted &= other.admitted;
        self.delay_us = if self.admitted {
            self.delay_us.max(other.delay_us)
        } else {
            0
        };
        self
    }

    /// Adds the refusals of another reading of this request's counters to a refusal. Both must be
    /// expanded to the request. Of two refusals of a limit, the longer one counts.
    #[must_use]
    pub fn merge_refusals(mut self, other: Self) -> Self {
        let now_us = self.now_us;
        for (outcome, added) in self.outcomes_mut().zip(other.outcomes()) {
            let added = added.status.filter(|added| added.refusal.is_some());
            let added = added.map(|added| added.convert_clock(other.now_us, now_us));
            if added.and_then(|added| added.refusal) > outcome.refusal() {
                outcome.status = added;
            }
        }
        self
    }
}

impl LimitStatus {
    /// The limit that was decided: `limit`, or with the amounts of the key's override.
    pub fn limit_in_effect(&self, limit: &Limit) -> Limit {
        limit.with_override(self.in_effect)
    }

    /// Whether the status has a time after `ends_us`, or none.
    pub(super) fn has_times_after(&self, ends_us: u64) -> bool {
        self.refusal >= Some(Refusal::Until(ends_us))
            || self.next_growth_us.is_none_or(|at_us| at_us >= ends_us)
    }

    /// Replaces the times after `ends_us`, when the override ends, by those of `later`, the status
    /// of the counter without the override.
    pub(super) fn apply_override_end(&mut self, ends_us: u64, later: &Self) {
        if self.refusal >= Some(Refusal::Until(ends_us)) {
            self.refusal = later.refusal.max(Some(Refusal::Until(ends_us)));
        }
        if self.next_growth_us.is_none_or(|at_us| at_us >= ends_us) {
            self.next_growth_us = if later.remaining > self.remaining {
                Some(ends_us)
            } else {
                later.next_growth_us.map(|at_us| at_us.max(ends_us))
            };
        }
    }

    /// Converts the times to another clock, which showed `to_us` when this one showed `from_us`.
    pub fn convert_clock(self, from_us: u64, to_us: u64) -> Self {
        let convert = |at_us: u64| to_us.saturating_add(at_us.saturating_sub(from_us));
        let refusal = match self.refusal {
            Some(Refusal::Until(until_us)) => Some(Refusal::Until(convert(until_us))),
            refusal => refusal,
        };
        Self {
            next_growth_us: self.next_growth_us.map(convert),
            refusal,
            ..self
        }
    }

    /// The status of a charge that was not made because its key is unlimited.
    pub const UNLIMITED: Self = Self {
        remaining: MAX_UNITS,
        next_growth_us: None,
        refusal: None,
        in_effect: Some(OverrideInEffect::Unlimited),
    };

    pub fn is_unlimited(&self) -> bool {
        self.in_effect.is_some_and(OverrideInEffect::is_unlimited)
    }
}

/// The charges of a request that one part of the store decides, in the order of the request.
#[derive(Debug)]
pub struct RequestPart<'c> {
    /// Only policies with charges in this part, each with these charges only.
    pub policies: SmallVec<[PolicyCharges<'c>; 2]>,
    /// For each policy of the request: which of its charges are in this part.
    included: SmallVec<[SmallVec<[bool; 4]>; 2]>,
}

impl<'c> RequestPart<'c> {
    /// Selects charges of a request. `is_included` is called once for each, in order.
    pub fn new(
        request: &[PolicyCharges<'c>],
        mut is_included: impl FnMut(&Charge<'_, '_>) -> bool,
    ) -> Self {
        let mut part = Self {
            policies: SmallVec::new(),
            included: SmallVec::new(),
        };
        for policy in request {
            let included = policy.charges().map(|charge| is_included(&charge));
            let included: SmallVec<[bool; 4]> = included.collect();
            if included.contains(&true) {
                let mut selected = policy.clone();
                let mut flags = included.iter();
                selected.limits.retain(|_| flags.next() == Some(&true));
                part.policies.push(selected);
            }
            part.included.push(included);
        }
        part
    }

    pub fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    /// For each charge of the request, in order: whether it is in this part.
    pub fn included(&self) -> impl Iterator<Item = bool> {
        self.included.iter().flatten().copied()
    }

    /// The decision about the whole request, from the one about this part. All other charges have
    /// no outcome.
    #[must_use]
    pub fn expand(&self, decision: Decision) -> Decision {
        let mut answered = decision.policies.into_iter();
        let policies = self.included.iter().map(|included| {
            let own = included.contains(&true).then(|| answered.next());
            let PolicyOutcome { limits, grant } = own.flatten().unwrap_or_default();
            let mut outcomes = limits.into_iter();
            let limits = included
                .iter()
                .map(|is_included| is_included.then(|| outcomes.next()).flatten());
            PolicyOutcome {
                limits: limits.map(Option::unwrap_or_default).collect(),
                grant,
            }
        });
        Decision {
            policies: policies.collect(),
            ..decision
        }
    }
}
