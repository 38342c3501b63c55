//! Decisions of the fallback store with the last known overrides of keys.

use super::{FallbackStore, uses_fallback};
use crate::limiter::{Charge, Decision, OverriddenCharges};
use crate::store::memory::counter_id;
use std::time::Instant;

impl FallbackStore {
    /// Decides the charges of `local` policies without Redis, all or nothing; other charges have no
    /// status. Admitted charges will be written back.
    pub fn decide(&self, charges: &[Charge<'_>], requested_at: Instant) -> Decision {
        match self.find_overrides(charges, requested_at) {
            Some(overridden) => overridden.decide(
                |limited| self.decide_by_limits(limited, requested_at),
                |late| self.decide_by_share(late, |_| true, requested_at),
            ),
            None => self.decide_by_limits(charges, requested_at),
        }
    }

    /// The last known overrides of the keys of charges that this process decides in an outage.
    fn find_overrides<'c>(
        &self,
        charges: &'c [Charge<'c>],
        requested_at: Instant,
    ) -> Option<OverriddenCharges<'c>> {
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

    /// Checks the share in addition to Redis while an outage ends. Returns `None` if Redis decides
    /// no charge that is affected by the outage. Charges that are held back are left to
    /// [`FallbackStore::decide`], which would count them in the share again.
    pub fn check_share_during_recovery(
        &self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Option<Decision> {
        let Some(overridden) = self.find_overrides(charges, requested_at) else {
            return self.check_share(charges, requested_at);
        };
        let limited = overridden.limited_charges();
        let checked = self.check_share(&limited.charges, requested_at)?;
        Some(overridden.complete_decision(&limited, checked))
    }
}
