//! The keys `limit` and `limits` of a policy or of an override.

use super::amounts::{LimitAmount, read_amount, reject_options_with_one_amount};
use super::calendar::{build_calendar_limit, read_calendar_unit, reject_time_zone};
use super::context::PolicyContext;
use crate::config::keywords::ALGORITHMS;
use crate::config::table_reader::TableReader;
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
    let tables = match (reader.contains_key("limit"), reader.contains_key("limits")) {
        (true, true) => {
            reader.report_error(
                "limits",
                "both limit and limits are set; expected one of them",
            );
            return None;
        }
        (false, false) => {
            reader.report_error(
                "limit",
                "missing; expected a limit such as { requests = 100, per = \"1m\" }",
            );
            return None;
        }
        (true, false) => reader.get_optional_table("limit").into_iter().collect(),
        (false, true) => reader.get_tables("limits"),
    };
    if tables.is_empty()
        && reader
            .get("limits")
            .is_some_and(|item| item.value.as_list().is_some_and(<[_]>::is_empty))
    {
        reader.report_error(
            "limits",
            "expected at least one limit such as { requests = 100, per = \"1m\" }",
        );
    }
    let mut limits: Vec<NamedLimit> = Vec::new();
    let mut unnamed = 0_usize;
    for table in &tables {
        let name = table
            .get_parsed("name", values::parse_name)
            .unwrap_or_else(|| {
                unnamed += 1;
                if unnamed == 1 {
                    policy.to_owned()
                } else {
                    format!("{policy}-{unnamed}")
                }
            });
        let Some((limit, amount)) = build_limit(table, context) else {
            continue;
        };
        if limits.iter().any(|other| *other.name == *name) {
            table.report_error(
                "name",
                &format!(
                    "another limit of this policy has the name \"{name}\"; expected a unique name"
                ),
            );
        }
        if limits
            .iter()
            .any(|other| other.limit.counter_identity() == limit.counter_identity())
        {
            table.report_error("per", "another limit of this policy has the same period and algorithm, so they would share a counter; expected another period or algorithm");
        }
        limits.push(NamedLimit {
            name: name.into(),
            unit: table.get_parsed("unit", parse_unit),
            limit,
            amount,
            is_reported: true,
            release: read_slot_release(table, limit.algorithm),
        });
    }
    (limits.len() == tables.len() && !limits.is_empty()).then_some(limits)
}

fn parse_unit(text: &str) -> Result<Box<str>, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if (1..=32).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(text.into());
    }
    Err("expected 1 to 32 letters, digits, \"_\" or \"-\"".to_owned())
}

fn build_limit(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> Option<(Limit, Option<Box<AmountSource>>)> {
    let amount = read_amount(reader, context);
    let requests = amount.as_ref().map(|amount| amount.requests);
    let calendar_unit = read_calendar_unit(reader);
    let per = match calendar_unit {
        None => reader.read("per"),
        Some(_) => None,
    };
    let slot_ttl = reader.read("lease_ttl");
    let configured_algorithm = reader.get_mapped_keyword("algorithm", &ALGORITHMS);
    let offset = reader.read("offset");
    if configured_algorithm.is_none() && reader.contains_key("algorithm") {
        // Without a valid algorithm, the other keys cannot be checked.
        return None;
    }
    let algorithm = read_algorithm_options(
        reader,
        configured_algorithm.unwrap_or(context.algorithm),
        requests,
        offset,
    );
    reject_keys_of_other_algorithms(reader, algorithm);
    if let Some(amount) = &amount {
        warn_about_amount(reader, amount.max(), algorithm);
    }
    if let Some(unit) = calendar_unit {
        let limit = build_calendar_limit(reader, unit, algorithm, requests)?;
        return Some((limit, amount?.source));
    }
    reject_time_zone(reader);
    let counts_slots = matches!(algorithm, Algorithm::Concurrency { .. });
    let per = match (counts_slots, reader.contains_key("per")) {
        (true, is_written) => {
            if is_written {
                reader.report_error(
                    "per",
                    "not for algorithm = \"concurrency\", which counts requests in flight; expected no such key",
                );
            }
            Some(slot_ttl.unwrap_or(DEFAULT_SLOT_TTL))
        }
        (false, true) => per,
        (false, false) => {
            reader.report_error(
                "per",
                "missing; expected a duration such as \"1m\", or \"day\", \"week\" or \"month\"",
            );
            None
        }
    };
    if let (Some(offset), Some(per)) = (offset, per)
        && offset >= per
    {
        reader.report_error("offset", "expected less than per");
    }
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
    let release = reader.get_keyword("release");
    if release == Some(SlotRelease::Upstream)
        && algorithm == (Algorithm::Concurrency { max_duration_us: 0 })
    {
        reader.report_error(
            "release",
            "a slot stays taken after its client has left; expected max_duration beside it, the longest such time",
        );
    }
    release.unwrap_or_default()
}

/// Warns of a largest amount that is probably a mistake.
fn warn_about_amount(reader: &TableReader<'_>, largest: u64, algorithm: Algorithm) {
    let key = match reader.contains_key("requests_from") {
        true => "max",
        false => "requests",
    };
    if largest == 0 {
        reader.report_warning(key, "0 rejects every request");
    }
    if largest > LARGE_SLIDING_LOG && algorithm == Algorithm::SlidingLog {
        reader.report_warning(
            key,
            "sliding_log keeps one entry per request; \"sliding_window\" needs less memory for a large limit",
        );
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
    let (max_delay, max_duration) = (reader.read("max_delay"), reader.read("max_duration"));
    match algorithm {
        Algorithm::SlidingLog | Algorithm::Block => algorithm,
        Algorithm::SlidingWindow { buckets: default } => Algorithm::SlidingWindow {
            buckets: buckets.unwrap_or(default),
        },
        // The period decides later whether the windows are those of a calendar.
        Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => {
            Algorithm::FixedWindow {
                offset_us: to_micros(offset.unwrap_or_default()),
            }
        }
        Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
            burst: burst.or(requests).unwrap_or_default(),
            warm_up_us: reader.read("warm_up").map_or(0, to_micros),
        },
        Algorithm::LeakyBucket {
            max_delay_us: default,
        } => Algorithm::LeakyBucket {
            max_delay_us: max_delay.map_or(default, to_micros),
        },
        Algorithm::Concurrency { .. } => Algorithm::Concurrency {
            max_duration_us: to_micros(max_duration.unwrap_or_default()),
        },
    }
}

fn reject_keys_of_other_algorithms(reader: &TableReader<'_>, algorithm: Algorithm) {
    for key in reader.present_keys() {
        if let Some(owner) = key.algorithm.filter(|owner| *owner != algorithm.into_str()) {
            reader.report_error(
                key.name,
                &format!(
                    "only for algorithm = \"{owner}\"; expected that algorithm, or no such key"
                ),
            );
        }
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
    if units > most {
        reader.report_error(
            key,
            &format!(
                "too large to count exactly with {interval} this long; expected at most {most}"
            ),
        );
    }
}

/// Whether the limit counts requests in flight. A request takes one slot, whatever its cost.
pub(super) fn is_concurrency_limit(named: &NamedLimit) -> bool {
    matches!(named.limit.algorithm, Algorithm::Concurrency { .. })
}

/// Converts a duration to microseconds. The schema bounds durations to 400 days.
pub(super) fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
