//! The rate limit algorithms: pure functions of (state, limit, cost, now).
//!
//! This module uses no clock, network, HTTP or file format. The top comment of each algorithm's
//! file has its formula, worst case and memory per key. A store (see [`crate::store`]) keeps the
//! states, supplies the time, and makes the decision over several limits atomic.
//!
//! Times are microseconds since the Unix epoch, on the store's clock. Returned times are absolute:
//! the caller subtracts its own reading of the store's clock.

mod block;
mod calendar;
mod charge;
mod concurrency;
mod counter_state;
mod decision;
mod effects;
mod fixed_window;
mod key;
mod key_override;
mod key_text;
mod leaky_bucket;
mod limit;
mod overridden_charges;
mod sliding_log;
mod sliding_window;
mod token_bucket;

pub use calendar::{Calendar, CalendarUnit, TimeWindow, time_zone_names};
pub use charge::{
    Amendment, Charge, CounterRef, LeaseTerms, LimitCharge, PolicyCharges, each_charge,
};
pub use counter_state::{CounterState, CounterView};
pub use decision::{
    ChargeOutcome, Decision, LeaseGrant, LimitStatus, PolicyOutcome, Refusal, RequestPart,
};
pub use effects::{ChargeEffect, compute_lease_grant, determine_effects};
pub use key::{CounterScope, Key, KeyBuilder, SOURCES_BYTES};
pub use key_override::{KeyOverride, LimitAmounts, LimitName, OverrideInEffect};
pub use key_text::{DIGEST_BYTES, ListedValue, format_digest};
pub use limit::{Algorithm, Limit};
pub use overridden_charges::OverriddenCharges;

/// The largest `requests` and cost. Integers up to here are exact in a double, the number type of
/// Lua.
pub const MAX_UNITS: u64 = 1 << 53;

/// The latest time that an algorithm returns: exact in a double, in the year 2255.
const MAX_TIME_US: u64 = 1 << 53;

/// The longest warm-up: a day. The arithmetic of warm-ups is exact up to some weeks.
pub const MAX_WARM_UP_US: u64 = 86_400_000_000;
