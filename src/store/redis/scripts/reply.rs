//! Parsers of the replies of `decide.lua` and of the plain sections before it.

use super::ScriptLibrary;
use crate::clock::{monotonic_now, saturating_micros};
use crate::limiter::{
    Algorithm, Charge, ChargeOutcome, Decision, LeaseGrant, LeaseTerms, Limit, LimitStatus,
    OverrideInEffect, PolicyCharges, PolicyOutcome, Refusal,
};
use redis::Value;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Latest time that a script can return: later times are not exact in a double.
const MAX_EXACT_TIME_US: u64 = 1 << 53;

/// In a reply: the expiry of an override follows.
const OVERRIDE_EXPIRES: i64 = -4;

/// In a reply: the value at the key of the override is no override.
const FOREIGN_OVERRIDE: i64 = -5;

/// The smallest number in which Redis stores the start and the units of a window.
const MIN_WINDOW_VALUE: u64 = 1_000_000_000_000_000;

/// Before the value of a fixed window, in a dated reply.
const WINDOW_VALUE: &str = "window ";

/// The clock of a server, from the times in its replies.
///
/// The plain section of a fixed window calls TIME for the first and for the last unit of a window
/// only. Its other replies are dated by this clock, which decides nothing: it says how long the
/// window still lasts.
#[derive(Debug)]
pub(crate) struct ServerClock {
    start: Instant,
    /// The time of the server at `start` by its last reply (µs); 0: unknown.
    start_us: AtomicU64,
}

impl Default for ServerClock {
    fn default() -> Self {
        Self {
            start: monotonic_now(),
            start_us: AtomicU64::new(0),
        }
    }
}

impl ServerClock {
    /// Puts the time before the reply of a fixed window, and reads the time of another reply.
    pub(crate) fn date_reply(&self, reply: Value) -> Value {
        let elapsed_us = saturating_micros(monotonic_now().saturating_duration_since(self.start));
        match reply {
            Value::Int(value) => {
                let now_us = self
                    .start_us
                    .load(Ordering::Relaxed)
                    .saturating_add(elapsed_us);
                Value::BulkString(format!("{now_us} {WINDOW_VALUE}{value}").into_bytes())
            }
            Value::BulkString(text) => {
                let time = text.split(|byte| *byte == b' ').next().unwrap_or_default();
                let now_us = std::str::from_utf8(time).ok().and_then(parse_now_us);
                if let Some(start_us) = now_us.and_then(|now_us| now_us.checked_sub(elapsed_us)) {
                    self.start_us.store(start_us, Ordering::Relaxed);
                }
                Value::BulkString(text)
            }
            reply => reply,
        }
    }
}

/// The position of a caller among those with the same request, from 0 in the order of arrival.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerPosition {
    pub(crate) index: u32,
    pub(crate) total: u32,
}

impl ScriptLibrary {
    /// Parses the reply to [`ScriptLibrary::decide_command`]. Returns `None` if it is invalid.
    pub fn parse_decision_reply(reply: &Value, request: &[PolicyCharges<'_>]) -> Option<Decision> {
        let Value::BulkString(text) = reply else {
            return None;
        };
        let text = std::str::from_utf8(text).ok()?;
        let (now, text) = text.split_once(' ').unwrap_or((text, ""));
        Self::parse_request_decision(
            parse_now_us(now)?,
            text,
            request,
            CallerPosition { index: 0, total: 1 },
        )
    }

    /// Parses the part of a reply that belongs to one request. Returns `None` if it is invalid.
    pub(crate) fn parse_request_decision(
        now_us: u64,
        text: &str,
        request: &[PolicyCharges<'_>],
        position: CallerPosition,
    ) -> Option<Decision> {
        let window = match text.strip_prefix(WINDOW_VALUE) {
            Some(value) => Some(parse_window_value(value, now_us, request)?),
            None => None,
        };
        let (now_us, text) = match &window {
            Some((now_us, text)) => (*now_us, text.as_str()),
            None => (now_us, text),
        };
        let mut numbers = parse_numbers(text);
        let mut next_number = || numbers.next().flatten();
        let (mut admitted, mut max_allowed_delay_us) = (true, 0);
        let mut policies: SmallVec<[PolicyOutcome; 1]> = SmallVec::new();
        for policy in request {
            let mut limits = SmallVec::new();
            for charge in policy.charges() {
                let mut outcome =
                    parse_charge_outcome(&charge, now_us, position, &mut next_number)?;
                if charge.is_estimate {
                    // 0 if the charge was not made.
                    let at_us = to_time_us(next_number()?)?;
                    let is_possible = at_us == 0 || at_us >= now_us;
                    outcome.charged_at_us =
                        is_possible.then_some(Some(at_us).filter(|at| *at > 0))?;
                }
                admitted &= !charge.is_enforced() || outcome.refusal().is_none();
                limits.push(outcome);
                if !policy.shadow {
                    max_allowed_delay_us = charge.limit.max_delay_us().max(max_allowed_delay_us);
                }
            }
            policies.push(PolicyOutcome {
                limits,
                grant: None,
            });
        }
        for (policy, outcome) in request.iter().zip(&mut policies) {
            if let Some(lease) = policy.requested_lease() {
                let numbers = [next_number()?, next_number()?];
                outcome.grant = parse_grant(policy, lease, now_us, numbers)?;
            }
        }
        // A reply without a delay leaves it out.
        let delay_us = match numbers.next() {
            None => 0,
            Some(delay) => to_time_us(delay?).filter(|delay_us| *delay_us > 0)?,
        };
        let is_valid_delay = delay_us == 0 || (admitted && delay_us <= max_allowed_delay_us);
        (is_valid_delay && numbers.next().is_none()).then_some(Decision {
            now_us,
            admitted,
            policies,
            delay_us,
            may_have_charged: false,
        })
    }
}

/// The integers of a reply, in order; `None` for a word that is no integer.
fn parse_numbers(text: &str) -> impl Iterator<Item = Option<i64>> {
    let words = text.split(' ').filter(|_| !text.is_empty());
    words.map(|word| word.parse().ok())
}

/// Derives the numbers of a reply from the value of a fixed window, which admits the only charge
/// and has further units. The time, `now_us`, is corrected to the window.
fn parse_window_value(
    value: &str,
    now_us: u64,
    request: &[PolicyCharges<'_>],
) -> Option<(u64, String)> {
    let value: u64 = value.parse().ok()?;
    let limit = request.first()?.charges().next()?.limit;
    let Algorithm::FixedWindow { offset_us } = limit.algorithm else {
        return None;
    };
    let used = (value.checked_sub(offset_us))
        .filter(|_| value >= MIN_WINDOW_VALUE)?
        .checked_rem(limit.per_us)?;
    let (start_us, remaining) = (value - used, limit.capacity().checked_sub(used)?);
    let end_us = start_us.checked_add(limit.per_us)?;
    let now_us = now_us.clamp(start_us, end_us.saturating_sub(1));
    Some((now_us, format!("0 {remaining} {end_us}")))
}

/// Parses the server's time in a reply.
pub(crate) fn parse_now_us(text: &str) -> Option<u64> {
    to_time_us(text.parse().ok()?).filter(|now_us| *now_us > 0)
}

/// Parses the status of one charge for one of its callers, and the expiry of its override.
fn parse_charge_outcome(
    charge: &Charge<'_, '_>,
    now_us: u64,
    position: CallerPosition,
    mut next_number: impl FnMut() -> Option<i64>,
) -> Option<ChargeOutcome> {
    let (mut in_effect, mut expires_at_ms, mut has_foreign_override) = (None, None, false);
    if charge.name.is_some() {
        let mut requests = next_number()?;
        if requests == OVERRIDE_EXPIRES {
            expires_at_ms = Some(u64::try_from(next_number()?).ok()?);
            requests = next_number()?;
        }
        has_foreign_override = requests == FOREIGN_OVERRIDE;
        in_effect = parse_override([requests, next_number()?])?;
    }
    let limit = charge.limit.with_override(in_effect);
    let numbers = [next_number()?, next_number()?, next_number()?];
    let admitted = if position.total > 1 {
        Some(next_number()?)
    } else {
        None
    };
    let mut status = LimitStatus::UNLIMITED;
    if in_effect != Some(OverrideInEffect::Unlimited) {
        // After an override, another limit applies.
        let is_final = expires_at_ms.is_none();
        status = parse_limit_status(&limit, (charge.cost, is_final), now_us, numbers)?;
        if let Some(admitted) = admitted {
            status = derive_caller_status(position, status, (&limit, charge.cost), admitted)?;
        }
        status.in_effect = in_effect;
    }
    Some(ChargeOutcome {
        status: Some(status),
        charged_at_us: None,
        override_expires_at_ms: expires_at_ms,
        has_foreign_override,
    })
}

/// Parses the override of a charge; `Some(None)` without one. Returns `None` for impossible values.
fn parse_override([requests, burst]: [i64; 2]) -> Option<Option<OverrideInEffect>> {
    Some(match (requests, burst) {
        (-1 | FOREIGN_OVERRIDE, 0) => None,
        (-2, 0) => Some(OverrideInEffect::Unlimited),
        (-3, 0) => Some(OverrideInEffect::Blocked),
        _ => Some(OverrideInEffect::Amounts {
            requests: u64::try_from(requests).ok()?,
            burst: u64::try_from(burst).ok()?,
        }),
    })
}

/// Parses the numbers of one charge. Returns `None` for impossible values, which must not take
/// effect. `is_final`: no other limit applies later.
fn parse_limit_status(
    limit: &Limit,
    (cost, is_final): (u64, bool),
    now_us: u64,
    [until, remaining, next_growth]: [i64; 3],
) -> Option<LimitStatus> {
    let to_future_us = |number| to_time_us(number).filter(|time_us| *time_us > now_us);
    let refusal = match until {
        -2 if matches!(
            limit.algorithm,
            Algorithm::Concurrency { .. } | Algorithm::TokenBucket { .. }
        ) =>
        {
            Some(Refusal::Unknown)
        }
        -1 => Some(Refusal::Never),
        0 => None,
        until => Some(Refusal::Until(to_future_us(until)?)),
    };
    let next_growth_us = match next_growth {
        0 => None,
        next_growth => Some(to_future_us(next_growth)?),
    };
    let remaining = u64::try_from(remaining)
        .ok()
        .filter(|remaining| *remaining <= limit.capacity())?;
    let is_never_admitted = cost > limit.capacity() || limit.capacity() == 0;
    let is_valid = !is_final || is_never_admitted == (refusal == Some(Refusal::Never));
    is_valid.then_some(LimitStatus {
        remaining,
        next_growth_us,
        refusal,
        in_effect: None,
    })
}

/// Derives the status for one of several callers with the same request. `admitted` of them were
/// admitted, and `last_status` is that of the last one.
fn derive_caller_status(
    position: CallerPosition,
    last_status: LimitStatus,
    (limit, cost): (&Limit, u64),
    admitted: i64,
) -> Option<LimitStatus> {
    let admitted = u32::try_from(admitted)
        .ok()
        .filter(|admitted| *admitted <= position.total)?;
    if (admitted == position.total) != last_status.refusal.is_none() {
        return None;
    }
    let Some(callers_after) = admitted.checked_sub(position.index + 1) else {
        return Some(last_status);
    };
    let remaining = last_status
        .remaining
        .checked_add(cost.checked_mul(callers_after.into())?)?;
    let is_possible = remaining <= limit.capacity();
    is_possible.then_some(LimitStatus {
        remaining,
        refusal: None,
        ..last_status
    })
}

/// Parses a grant; `Some(None)` without one. Returns `None` for an impossible value.
fn parse_grant(
    policy: &PolicyCharges<'_>,
    lease: LeaseTerms,
    now_us: u64,
    [units, until]: [i64; 2],
) -> Option<Option<LeaseGrant>> {
    let (units, until_us) = (u64::try_from(units).ok()?, to_time_us(until)?);
    if units == 0 {
        return Some(None);
    }
    let remaining_us = (until_us + 1).checked_sub(now_us)?;
    let is_valid =
        units <= policy.requested_lease_units && (1..=lease.ttl_us).contains(&remaining_us);
    is_valid.then_some(Some(LeaseGrant { units, until_us }))
}

fn to_time_us(number: i64) -> Option<u64> {
    u64::try_from(number)
        .ok()
        .filter(|time_us| *time_us <= MAX_EXACT_TIME_US)
}
