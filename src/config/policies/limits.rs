//! The keys `limit` and `limits` of a policy or of an override.

use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use super::{ClaimTrust, PolicyContext};
use crate::config::suggestions::suggest_time_zone;
use crate::config::table_reader::{TableReader, report};
use crate::config::values::{self, to_micros};
use crate::limiter::{Algorithm, Calendar, CalendarUnit, Limit, MAX_UNITS};
use crate::policy::{AmountSource, KeyPart, NamedLimit, SlotRelease};
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
    report! { reader;
        Error("offset") if is_late => "expected less than per";
    }
    if let (Some(amount), Some(per)) = (&amount, per) {
        reject_inexact_limit(reader, algorithm, amount, to_micros(per));
    }
    let source = amount.as_ref().and_then(|amount| amount.source.as_ref());
    report! { reader;
        Error("requests_from") if source.is_some() && counts_slots => "not with algorithm = \"concurrency\", whose slots need a fixed amount; expected requests";
        Error("warm_up") if source.is_some() && reader.contains_key("warm_up") => "not with requests_from: a third of a small amount may be less than the cost of a request; expected no warm_up";
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

/// The amount of a limit.
struct LimitAmount {
    /// `requests`, or `default` beside `requests_from`.
    requests: u64,
    source: Option<Box<AmountSource>>,
}

impl LimitAmount {
    /// The largest amount of a request.
    fn max(&self) -> u64 {
        let source = self.source.as_ref();
        source.map_or(self.requests, |source| source.max)
    }
}

/// Reads `requests`, or `requests_from` with its `default` and `max`.
fn read_amount(reader: &TableReader<'_>, context: &PolicyContext) -> Option<LimitAmount> {
    let has = |key: &str| reader.contains_key(key);
    let is_requested = has("requests_from");
    report! { reader;
        Error("default") if has("default") && !is_requested => "needs requests_from; expected requests_from, or no such key";
        Error("max") if has("max") && !is_requested => "needs requests_from; expected requests_from, or no such key";
        Error("requests") if !has("requests") && !is_requested => "missing; expected a whole number, or requests_from with default and max";
        Error("requests") if has("requests") && is_requested => "not beside requests_from; expected default, the amount of a request that states none";
        Error("default") if !has("default") && is_requested => "missing; expected the amount of a request that states none beside requests_from";
        Error("max") if !has("max") && is_requested => "missing; expected the largest amount that a request may state beside requests_from";
    }
    if !is_requested {
        return Some(LimitAmount {
            requests: reader.read("requests")?,
            source: None,
        });
    }
    let field = reader.get_parsed("requests_from", AmountSource::parse_field);
    if let Some(field) = &field {
        reject_untrusted_field(reader, context, field);
    }
    let (default, max) = (reader.read("default"), reader.read("max"));
    if let (Some(default), Some(max)) = (default, max) {
        report! { reader;
            Error("default") if default > max => "more than max; expected at most {max}";
        }
    }
    Some(LimitAmount {
        requests: default?,
        source: Some(Box::new(AmountSource {
            field: field?,
            max: max?,
            sets_burst: !has("burst"),
        })),
    })
}

/// Reports a field that a client could write.
fn reject_untrusted_field(reader: &TableReader<'_>, context: &PolicyContext, field: &KeyPart) {
    let key = "requests_from";
    match field {
        KeyPart::Claim(_) => report! { reader;
            Error(key) if context.claim_trust.is_none() => "{NO_TRUSTED_TOKENS_ERROR}";
            Error(key) if context.claim_trust == Some(ClaimTrust::Unverified) => "with client.jwt.verify = false, each client writes its own amount; expected verified tokens";
        },
        KeyPart::Header(name) => {
            let has_proxy = !context.client.trusted_proxies.is_empty();
            let is_removed = context.is_removed_header(name);
            let is_trusted = context.trusted_headers.contains(name);
            report! { reader;
                Error(key) if !has_proxy => "no proxy is trusted to send {name}; expected client.trusted_proxies with the networks of the gateway in front";
                Error(key) if has_proxy && is_removed => "{name} is never present: tidegate removes it before policies see it; expected another header";
                Warning(key) if has_proxy && !is_removed && !is_trusted => "a client that sends {name} through the trusted proxy states its own amount; expected client.trusted_headers = [\"{name}\"] if the proxy sets or removes this header";
            }
        }
        _ => report! { reader;
            Error(key) if !context.requests_client_certificates => "the listener requests no client certificates; expected listen.tls.client_auth = \"optional\" or \"require\"";
        },
    }
}

/// The time zone without the key `tz`.
const DEFAULT_TIME_ZONE: &str = "UTC";

/// The unit of the calendar in `per`, unless it is a duration.
fn read_calendar_unit(reader: &TableReader<'_>) -> Option<CalendarUnit> {
    let item = reader.get("per")?;
    item.value.as_str()?.parse().ok()
}

/// Builds the limit per period of a calendar.
fn build_calendar_limit(
    reader: &TableReader<'_>,
    unit: CalendarUnit,
    algorithm: Algorithm,
    requests: Option<u64>,
) -> Option<Limit> {
    let is_fixed_window = matches!(algorithm, Algorithm::FixedWindow { .. });
    let counts_slots = algorithm.counts_slots();
    let name = unit.as_str();
    let duration = match unit {
        CalendarUnit::Day => "1d",
        CalendarUnit::Week => "7d",
        CalendarUnit::Month => "30d",
    };
    report! { reader;
        Error("per") if counts_slots => "{PERIOD_OF_SLOTS_ERROR}";
        Error("per") if !is_fixed_window && !counts_slots => "a {name} of the calendar is counted by algorithm = \"fixed_window\" only; expected that algorithm, or a duration such as \"{duration}\"";
        Error("offset") if is_fixed_window && reader.contains_key("offset") => "a {name} of the calendar starts at midnight of its time zone; expected tz instead, such as \"Europe/Berlin\"";
    }
    let calendar = if reader.contains_key("tz") {
        reader.get_parsed("tz", |name| parse_calendar(unit, name))
    } else {
        Calendar::new(unit, DEFAULT_TIME_ZONE)
    };
    let limit = Limit::per_calendar_period(requests?, calendar?);
    is_fixed_window.then_some(limit)
}

/// Error of `per` in a limit of requests in flight.
const PERIOD_OF_SLOTS_ERROR: &str =
    "not for algorithm = \"concurrency\", which counts requests in flight; expected no such key";

fn parse_calendar(unit: CalendarUnit, zone_name: &str) -> Result<Calendar, String> {
    Calendar::new(unit, zone_name).ok_or_else(|| {
        let meant = suggest_time_zone(zone_name);
        format!("expected the IANA name of a time zone such as \"Europe/Berlin\" or \"UTC\"{meant}")
    })
}
