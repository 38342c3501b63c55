//! Decisions of the fallback store with the last known overrides of keys.

use super::{FallbackStore, uses_fallback};
use crate::limiter::{Charge, Decision, OverriddenCharges};
use crate::store::memory::counter_id;
use crate::store::override_end_us;
use smallvec::SmallVec;
use std::time::Instant;

impl FallbackStore {
    /// Decides the charges of `local` policies without Redis, all or nothing; other charges have no
    /// status. Admitted charges will be written back.
    pub fn decide(&self, charges: &[Charge<'_>], requested_at: Instant) -> Decision {
        match self.find_overrides(charges, requested_at) {
            Some(overridden) => {
                let limited = overridden.limited_charges(charges);
                let (positions, limited): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) =
                    limited.into_iter().unzip();
                let decision = self.decide_by_limits(&limited, requested_at);
                let mut decision = overridden.complete_decision(&positions, decision);
                let reads = overridden.charges_after_ends(&decision, charges);
                if !reads.is_empty() {
                    let read: SmallVec<[_; 4]> = reads.iter().map(|(_, charge)| *charge).collect();
                    let all: SmallVec<[_; 4]> = (0..read.len()).collect();
                    let later = self.decide_by_share(&read, self.share(), requested_at, &all);
                    overridden.apply_ends(&mut decision, &reads, &later);
                }
                decision
            }
            None => self.decide_by_limits(charges, requested_at),
        }
    }

    /// The last known overrides of the keys of charges that this process decides in an outage.
    fn find_overrides(
        &self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Option<OverriddenCharges> {
        let now_us = self.clock.instant_to_unix_us(requested_at);
        OverriddenCharges::resolve(charges, |charge| {
            if !uses_fallback(charge) {
                return None;
            }
            let id = counter_id(charge.limit, charge.key);
            let cached = self.override_cache.find(id)?;
            let is_current = cached.ends_us.is_none_or(|ends_us| now_us < ends_us);
            is_current.then(|| {
                // Decisions report the wall clock.
                let shift_us = self.clock.known_wall_shift_us();
                let ends_us = cached
                    .ends_us
                    .map(|at_us| at_us.saturating_add_signed(shift_us));
                (cached.in_effect.clamp_to(charge.limit), ends_us)
            })
        })
    }

    /// When the override of the charge at `index` ends by itself, by the local clock (µs).
    pub(super) fn override_end_us(
        &self,
        decision: &Decision,
        index: usize,
        received_at: Instant,
    ) -> Option<u64> {
        let mut expiries = decision.override_expiries.iter();
        let (_, at_ms) = expiries.find(|(at, _)| *at == index)?;
        let left_us = override_end_us(*at_ms).saturating_sub(decision.now_us);
        let received_us = self.clock.instant_to_unix_us(received_at);
        Some(received_us.saturating_add(left_us))
    }

    /// Checks the share in addition to Redis while an outage ends. Returns `None` if Redis decides
    /// no charge that is affected by the outage. The charges at the positions of `held_back` are
    /// left to [`FallbackStore::decide`], which would count them in the share again.
    pub fn check_share_during_recovery(
        &self,
        charges: &[Charge<'_>],
        held_back: &[usize],
        requested_at: Instant,
    ) -> Option<Decision> {
        let Some(overridden) = self.find_overrides(charges, requested_at) else {
            return self.check_share(charges, held_back, requested_at);
        };
        let limited = overridden.limited_charges(charges);
        let (positions, limited): (SmallVec<[usize; 4]>, SmallVec<[_; 4]>) =
            limited.into_iter().unzip();
        let numbered = positions.iter().enumerate();
        let held_back: SmallVec<[usize; 4]> = numbered
            .filter(|(_, position)| held_back.contains(position))
            .map(|(index, _)| index)
            .collect();
        let checked = self.check_share(&limited, &held_back, requested_at)?;
        Some(overridden.complete_decision(&positions, checked))
    }
}
