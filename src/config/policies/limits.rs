//! The keys `limit` and `limits` of a policy or of an override.

use super::amounts::{LimitAmount, read_amount, reject_options_with_one_amount};
use super::calendar::{PERIOD_OF_SLOTS_ERROR, build_calendar_limit, read_calendar_unit};
use super::context::PolicyContext;
use crate::config::table_reader::{TableReader, report};
use crate::config::values;
use crate::limiter::{Algorithm, Limit, MAX_UNITS};
use crate::policy::{AmountSource, NamedLimit, SlotRelease};
use std::time::Duration;

/// A `sliding_log` with more `requests` needs much memory, because it keeps one entry per request.
const LARGE_SLIDING_LOG: u64 = 100_000;

/// Default lifetime of a concurrency slot that its sidecar does not renew.
const DEFAULT_SLOT_TTL: Duration = Duration::from_secs(10);

/// Builds the limits of a policy or of an override. Names and counters must be distinct.
pub(super) fn build_limits(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
) -> Option<Vec<NamedLimit>> {
    let (has_one, has_list) = (reader.contains_key("limit"), reader.contains_key("limits"));
    let list = reader.get("limits").and_then(|item| item.value.as_list());
    report! { reader;
        Error("limits") if has_one && has_list => "both limit and limits are set; expected one of them";
        Error("limit") if !has_one && !has_list => "missing; expected a limit such as {{ requests = 100, per = \"1m\" }}";
        Error("limits") if !has_one && list.is_some_and(<[_]>::is_empty) => "expected at least one limit such as {{ requests = 100, per = \"1m\" }}";
    }
    if has_one == has_list {
        return None;
    }
    let tables = reader.get_one_or_more_tables("limit", "limits");
    let mut limits: Vec<NamedLimit> = Vec::new();
    let mut unnamed = 0_usize;
    for table in &tables {
        let name = table.get_text("name", values::parse_name);
        let name = name.unwrap_or_else(|| {
            unnamed += 1;
            match unnamed {
                1 => policy.to_owned(),
                number => format!("{policy}-{number}"),
            }
        });
        let Some((limit, amount)) = build_limit(table, context) else {
            continue;
        };
        let has_name = limits.iter().any(|other| *other.name == *name);
        let identities = limits.iter().map(|other| other.limit.counter_identity());
        let has_counter = identities
            .into_iter()
            .any(|other| other == limit.counter_identity());
        report! { table;
            Error("name") if has_name => "another limit of this policy has the name \"{name}\"; expected a unique name";
            Error("per") if has_counter => "another limit of this policy has the same period and algorithm, so they would share a counter; expected another period or algorithm";
        }
        limits.push(NamedLimit {
            name: name.into(),
            unit: table.get_text("unit", parse_unit),
            limit,
            amount,
            is_reported: true,
            release: read_slot_release(table, limit.algorithm),
        });
    }
    (limits.len() == tables.len() && !limits.is_empty()).then_some(limits)
}

fn parse_unit(text: &str) -> Option<Box<str>> {
    values::is_word(text, b"_-", 32).then(|| text.into())
}

fn build_limit(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> Option<(Limit, Option<Box<AmountSource>>)> {
    let amount = read_amount(reader, context);
    let requests = amount.as_ref().map(|amount| amount.requests);
    let calendar_unit = read_calendar_unit(reader);
    let per: Option<Duration> = match calendar_unit {
        None => reader.read("per"),
        Some(_) => None,
    };
    let slot_ttl = reader.read("lease_ttl");
    let configured_algorithm: Option<Algorithm> = reader.read("algorithm");
    let offset: Option<Duration> = reader.read("offset");
    if configured_algorithm.is_none() && reader.contains_key("algorithm") {
        // Without a valid algorithm, the other keys cannot be checked.
        return None;
    }
    let algorithm = configured_algorithm.unwrap_or(context.algorithm);
    let algorithm = read_algorithm_options(reader, algorithm, requests, offset);
    for key in reader.present_keys() {
        if let Some(owner) = key.algorithm.filter(|owner| *owner != algorithm.into_str()) {
            report! { reader;
                Error(key.name) => "only for algorithm = \"{owner}\"; expected that algorithm, or no such key";
            }
        }
    }
    if let Some(amount) = &amount {
        warn_about_amount(reader, amount.max(), algorithm);
    }
    if let Some(unit) = calendar_unit {
        let limit = build_calendar_limit(reader, unit, algorithm, requests)?;
        return Some((limit, amount?.source));
    }
    let counts_slots = algorithm.counts_slots();
    let has_period = reader.contains_key("per");
    report! { reader;
        Error("tz") if reader.contains_key("tz") => "only beside per = \"day\", \"week\" or \"month\"; expected one of them, or no such key";
        Error("per") if counts_slots && has_period => "{PERIOD_OF_SLOTS_ERROR}";
        Error("per") if !counts_slots && !has_period => "missing; expected a duration such as \"1m\", or \"day\", \"week\" or \"month\"";
    }
    let per = if counts_slots {
        Some(slot_ttl.unwrap_or(DEFAULT_SLOT_TTL))
    } else {
        per
    };
    let is_late = offset.zip(per).is_some_and(|(offset, per)| offset >= per);
    reader.error_if(is_late, "offset", "expected less than per");
    if let (Some(amount), Some(per)) = (&amount, per) {
        reject_inexact_limit(reader, algorithm, amount, to_micros(per));
    }
    if amount
        .as_ref()
        .is_some_and(|amount| amount.source.is_some())
    {
        reject_options_with_one_amount(reader, counts_slots);
    }
    let limit = Limit {
        requests: requests?,
        per_us: to_micros(per?),
        algorithm,
    };
    Some((limit, amount?.source))
}

/// Reads what ends a request in flight. A slot that outlives its client needs an end.
fn read_slot_release(reader: &TableReader<'_>, algorithm: Algorithm) -> SlotRelease {
    let release = reader.read("release").unwrap_or_default();
    let is_endless = algorithm == (Algorithm::Concurrency { max_duration_us: 0 });
    report! { reader;
        Error("release") if release == SlotRelease::Upstream && is_endless => "a slot stays taken after its client has left; expected max_duration beside it, the longest such time";
    }
    release
}

/// Warns of a largest amount that is probably a mistake.
fn warn_about_amount(reader: &TableReader<'_>, largest: u64, algorithm: Algorithm) {
    let key = if reader.contains_key("requests_from") {
        "max"
    } else {
        "requests"
    };
    let is_large_log = largest > LARGE_SLIDING_LOG && algorithm == Algorithm::SlidingLog;
    report! { reader;
        Warning(key) if largest == 0 => "0 rejects every request";
        Warning(key) if is_large_log => "sliding_log keeps one entry per request; \"sliding_window\" needs less memory for a large limit";
    }
}

/// Reads the keys of `algorithm`. The values in `algorithm` are the defaults.
fn read_algorithm_options(
    reader: &TableReader<'_>,
    algorithm: Algorithm,
    requests: Option<u64>,
    offset: Option<Duration>,
) -> Algorithm {
    let (buckets, burst) = (reader.read("buckets"), reader.read("burst"));
    let micros = |key| reader.read(key).map(to_micros);
    let (max_delay_us, max_duration_us) = (micros("max_delay"), micros("max_duration"));
    match algorithm {
        Algorithm::SlidingLog | Algorithm::Block => algorithm,
        Algorithm::SlidingWindow { buckets: default } => Algorithm::SlidingWindow {
            buckets: buckets.unwrap_or(default),
        },
        // The period decides later whether the windows are those of a calendar.
        Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => {
            let offset_us = offset.map_or(0, to_micros);
            Algorithm::FixedWindow { offset_us }
        }
        Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
            burst: burst.or(requests).unwrap_or_default(),
            warm_up_us: micros("warm_up").unwrap_or_default(),
        },
        Algorithm::LeakyBucket {
            max_delay_us: default,
        } => Algorithm::LeakyBucket {
            max_delay_us: max_delay_us.unwrap_or(default),
        },
        Algorithm::Concurrency { .. } => Algorithm::Concurrency {
            max_duration_us: max_duration_us.unwrap_or_default(),
        },
    }
}

/// Reports a limit that makes bucket arithmetic exceed the integers exact in a double.
fn reject_inexact_limit(
    reader: &TableReader<'_>,
    algorithm: Algorithm,
    amount: &LimitAmount,
    per_us: u64,
) {
    let requests = amount.max();
    let requests_key = match amount.source {
        Some(_) => "max",
        None => "requests",
    };
    let most_per_period = MAX_UNITS / per_us.max(1);
    let (key, units, most, interval) = match algorithm {
        Algorithm::TokenBucket { burst, .. } if burst > requests => {
            ("burst", burst, most_per_period, "a period")
        }
        Algorithm::TokenBucket { .. } => (requests_key, requests, most_per_period, "a period"),
        Algorithm::LeakyBucket { max_delay_us } => {
            let most = (MAX_UNITS - per_us.min(MAX_UNITS)) / max_delay_us.max(1);
            (requests_key, requests, most, "a max_delay")
        }
        _ => return,
    };
    report! { reader;
        Error(key) if units > most => "too large to count exactly with {interval} this long; expected at most {most}";
    }
}

/// Whether the limit counts requests in flight. A request takes one slot, whatever its cost.
pub(crate) fn is_concurrency_limit(named: &NamedLimit) -> bool {
    named.limit.algorithm.counts_slots()
}

/// Converts a duration to microseconds. The schema bounds durations to 400 days.
pub(super) fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
