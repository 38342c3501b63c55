//! The arguments of `decide.lua` and `settle.lua`.

use super::counter_key::push_hex_id;
use crate::limiter::{Algorithm, Amendment, Charge, Limit};
use crate::store::Settlement;
use redis::{Cmd, RedisWrite};

pub(crate) fn push_time_argument(command: &mut Cmd, time_us: Option<u64>) {
    let mut number = itoa::Buffer::new();
    command.write_arg(
        time_us
            .map_or("", |time_us| number.format(time_us))
            .as_bytes(),
    );
}

/// Appends the argument of a charge. `policy_number` is that of its policy within the request.
/// `follows`: the charge belongs to the same request as the charge before it. `read_clock` is
/// called for a period of a calendar only.
pub(crate) fn push_charge_argument(
    text: &mut String,
    charge: &Charge<'_, '_>,
    (policy_number, follows): (u64, bool),
    rate: u64,
    read_clock: impl Fn() -> u64,
) {
    let policy = charge.policy;
    let options = u64::from(policy.shadow)
        + 2 * u64::from(policy.counts_rejected)
        + 4 * u64::from(charge.is_estimate)
        + 8 * u64::from(follows)
        + 16 * u64::from(charge.is_read);
    text.push_str(algorithm_letter(charge.limit));
    push_numbers(text, ' ', &[policy_number * 32 + options, charge.cost]);
    if let Some(lease) = policy.requested_lease() {
        let units = policy.requested_lease_units;
        push_numbers(text, '+', &[units, lease.ttl_us, lease.divisor()]);
    }
    push_numbers(text, ' ', &[charge.limit.capacity(), charge.limit.per_us]);
    text.push(' ');
    push_algorithm_parameters(text, charge.limit, rate, policy.slot_id, read_clock);
    if let Some(limit_name) = charge.name {
        let limit = charge.limit;
        push_numbers(text, '|', &[limit.max_amount(), limit.max_delay_us()]);
        text.push('|');
        text.push_str(limit_name);
    }
}

/// Appends numbers, each after a separator.
fn push_numbers(text: &mut String, separator: char, numbers: &[u64]) {
    let mut buffer = itoa::Buffer::new();
    for number in numbers {
        text.push(separator);
        text.push_str(buffer.format(*number));
    }
}

pub(super) fn push_settlement_arguments(
    command: &mut Cmd,
    settlement: &Settlement<'_>,
    read_clock: impl Fn() -> u64,
) {
    let mut number = itoa::Buffer::new();
    let mut parameters = String::new();
    push_algorithm_parameters(
        &mut parameters,
        settlement.limit,
        settlement.limit.requests,
        0,
        read_clock,
    );
    for text in [
        algorithm_letter(settlement.limit),
        number.format(settlement.limit.per_us),
        &parameters,
    ] {
        command.write_arg(text.as_bytes());
    }
    let (operation, units, slot, at_us) = match settlement.amendment {
        Amendment::Charge(units) => ("charge", units, None, 0),
        Amendment::BackdatedCharge { units, age_us } => ("charge", units, None, age_us),
        Amendment::Credit { units, at_us } => ("credit", units, None, at_us),
        Amendment::Renew { slot } => ("renew", 0, Some(slot), 0),
        Amendment::Release { slot } => ("release", 0, Some(slot), 0),
    };
    let mut subject = String::new();
    match slot {
        Some(slot) => push_slot_id(&mut subject, slot),
        None => subject.push_str(number.format(units)),
    }
    for text in [operation, &subject, number.format(at_us)] {
        command.write_arg(text.as_bytes());
    }
}

fn algorithm_letter(limit: &Limit) -> &'static str {
    match limit.algorithm {
        Algorithm::SlidingLog => "l",
        Algorithm::SlidingWindow { .. } => "s",
        Algorithm::FixedWindow { .. } => "w",
        Algorithm::CalendarWindow { .. } => "p",
        Algorithm::TokenBucket { .. } => "t",
        Algorithm::LeakyBucket { .. } => "d",
        Algorithm::Concurrency { .. } => "c",
        Algorithm::Block => "b",
    }
}

/// Appends the parameters of a limit's algorithm. `rate`: units that a bucket pays back per period,
/// unless its last charge used a higher rate.
fn push_algorithm_parameters(
    text: &mut String,
    limit: &Limit,
    rate: u64,
    slot: u128,
    read_clock: impl Fn() -> u64,
) {
    let mut push = |first: u64, further: &[u64]| {
        text.push_str(itoa::Buffer::new().format(first));
        push_numbers(text, '+', further);
    };
    match limit.algorithm {
        Algorithm::LeakyBucket { .. } => push(rate, &[limit.max_delay_remainder()]),
        Algorithm::Concurrency { .. } => push_slot_id(text, slot),
        Algorithm::SlidingWindow { .. } => push(limit.sub_window_width_us(), &[]),
        Algorithm::FixedWindow { offset_us } => push(offset_us, &[]),
        Algorithm::CalendarWindow { calendar } => {
            let [first_us, further_us @ ..] = calendar.boundaries_around(read_clock());
            push(first_us, &further_us);
        }
        Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
            push(rate, &[warm_up_us, burst - limit.cold_capacity()]);
        }
        Algorithm::TokenBucket { .. } => push(rate, &[]),
        Algorithm::SlidingLog | Algorithm::Block => push(0, &[]),
    }
}

/// Appends a slot id. The colon distinguishes the id from a number.
fn push_slot_id(text: &mut String, slot: u128) {
    push_hex_id(text, slot);
    text.push(':');
}
