//! Decides a charge with an override while its slot moves.
//!
//! Redis then accepts only calls with one key, but such a charge has two: the counter and the
//! override. So the override is read first, and the charge is decided with the amounts in effect.

use super::router::RedisRouter;
use crate::limiter::{Decision, OverriddenCharges, OverrideInEffect, PolicyCharges};
use crate::store::redis::error::RedisErrorKind;
use crate::store::stored_override::split_rule_and_expiry;
use crate::store::{override_end_us, parse_override_rule};
use redis::{Value, cmd, from_redis_value};
use tokio::time::Instant;

impl RedisRouter {
    /// Decides one charge by a call about its override and one about its counter.
    pub(super) async fn decide_in_moving_slot(
        &self,
        hash_slot: u16,
        charge: &PolicyCharges<'_>,
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let in_effect = self.read_override(hash_slot, charge, deadline).await?;
        let request = async |charge: &PolicyCharges<'_>| {
            let charge = [charge.map_limits(|limit| limit.name = None)];
            self.request_decision(hash_slot, &charge, deadline).await
        };
        let charges = std::slice::from_ref(charge);
        let Some(overridden) = OverriddenCharges::resolve(charges, |_| in_effect) else {
            return request(charge).await;
        };
        let limited = overridden.limited_charges();
        // An unlimited key is not charged. A call of cost 0 returns the server's time.
        let without_cost = charge.map_limits(|limit| limit.cost = 0);
        let limited_charge = limited.policies.first();
        let mut decision = request(limited_charge.unwrap_or(&without_cost)).await?;
        decision.admitted |= limited.is_empty();
        let mut decision = overridden.complete_decision(&limited, decision);
        let late = overridden.charges_after_ends(&decision);
        // As in the script, the times of the override stay if the counter can't be read: the charge
        // is made.
        if let Some(read) = late.policies.first()
            && let Ok(later) = request(read).await
        {
            overridden.apply_ends(&mut decision, &late, later);
        }
        Ok(decision)
    }

    /// Reads the override of a charge's key, as the script does: a value of another type is none.
    async fn read_override(
        &self,
        hash_slot: u16,
        policy: &PolicyCharges<'_>,
        deadline: Instant,
    ) -> Result<Option<(OverrideInEffect, Option<u64>)>, RedisErrorKind> {
        let mut command = cmd("MGET");
        command.arg(self.shared.scripts.override_key(&policy.key));
        let reply = self.request_reply(hash_slot, &command, deadline).await?;
        let values: Vec<Value> =
            from_redis_value(reply).map_err(|_other| RedisErrorKind::InvalidReply)?;
        let Some(Value::BulkString(text)) = values.into_iter().next() else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&text);
        let Some((rule, expiry)) = split_rule_and_expiry(&text) else {
            return Ok(None);
        };
        let rule = parse_override_rule(rule);
        let charge = policy.charges().next();
        let in_effect = rule
            .zip(charge)
            .and_then(|(rule, charge)| rule.for_charge(&charge));
        Ok(in_effect.map(|in_effect| (in_effect, expiry.map(override_end_us))))
    }
}
