//! Describes each policy in one sentence, so that its author can check what it does.

use super::table_reader::TableReader;
use super::values::format_duration;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{
    ActualCostSource, CostSource, EstimateCost, HeaderCost, LimitOverride, Matcher,
    MissingKeyAction, NamedLimit, OnStoreFailure, OverrideRule, Policy, PolicyAction, Quota,
    SlotRelease,
};
use figment::value::{Num, Value};
use std::fmt;
use std::time::Duration;

/// A policy described in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDescription {
    pub policy: Box<str>,
    /// The policy has `mode = "off"`.
    pub is_off: bool,
    pub sentence: String,
}

impl fmt::Display for PolicyDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// Describes a policy in one sentence. Conditions are taken from the TOML values, because a
/// compiled policy does not keep their source text.
pub(super) fn describe_policy(
    policy: &Policy,
    reader: &TableReader<'_>,
    is_off: bool,
) -> PolicyDescription {
    let mode = match is_off {
        true => " (off)",
        false => policy.mode.suffix(),
    };
    let matches_descriptors = policy.matcher.is_for_descriptors();
    let requests = match matches_descriptors {
        false => describe_conditions(reader.get("match").map(|item| item.value)),
        true => format!(
            "descriptors{}",
            describe_descriptors(reader.get("match").map(|item| item.value))
        ),
    };
    let action = match &policy.action {
        PolicyAction::Allow => ": exempt, no later policy applies".to_owned(),
        PolicyAction::Deny => ": denied".to_owned(),
        PolicyAction::Limit(quota) => {
            format!(
                ", {}{}",
                describe_quota(quota, &policy.matcher),
                match quota.is_instance_scoped() {
                    true => "; counted per instance, in memory",
                    false => describe_store_failure(policy.on_store_failure, matches_descriptors),
                }
            )
        }
    };
    let report = match policy.is_reported {
        true => "",
        false => "; not reported to clients",
    };
    let priority = match policy.priority {
        0 => String::new(),
        priority => format!("; priority {priority}"),
    };
    // Values from the file may contain control characters.
    let sentence = format!(
        "{}{mode}: {requests}{action}{report}{priority}",
        policy.name
    )
    .chars()
    .map(|c| if c.is_control() { '\u{fffd}' } else { c })
    .collect();
    PolicyDescription {
        policy: policy.name.clone(),
        is_off,
        sentence,
    }
}

fn describe_store_failure(mode: OnStoreFailure, matches_descriptors: bool) -> &'static str {
    match mode {
        OnStoreFailure::Open => "; if the store fails: allow",
        OnStoreFailure::Closed if matches_descriptors => "; if the store fails: Envoy decides",
        OnStoreFailure::Closed => "; if the store fails: reject",
        OnStoreFailure::Local => "; if the store fails: limit by this instance's share",
    }
}

fn describe_quota(quota: &Quota, matcher: &Matcher) -> String {
    let parts = quota.key.components().iter().map(ToString::to_string);
    let parts: Vec<String> = parts.collect();
    let per = match parts.is_empty() {
        true => "in total".to_owned(),
        false => format!("per {}", parts.join(" and ")),
    };
    let cost = match &quota.cost {
        CostSource::Fixed(1) => String::new(),
        CostSource::Fixed(units) => format!(", cost {units}"),
        CostSource::Header(cost) => {
            let HeaderCost {
                name,
                default,
                min,
                max,
            } = &**cost;
            format!(", cost from header {name} ({min} to {max}; {default} if absent)")
        }
        CostSource::Estimate(cost) => {
            let EstimateCost {
                estimate,
                actual_source: actual,
            } = &**cost;
            match actual {
                ActualCostSource::Status(counted) => {
                    format!(", cost {estimate} if the response has status {counted}, else 0")
                }
                _ => format!(", cost from the response ({actual}; estimate {estimate})"),
            }
        }
    };
    let block = quota.block.map_or_else(String::new, |block| {
        let text = describe_limit(&block, None);
        match quota.counts_responses() {
            true => format!("; {text} if responses with such a status fill the limit"),
            false => format!("; {text}"),
        }
    });
    let overrides = quota.overrides.as_slice().iter();
    let overrides = overrides.map(|entry| describe_override(quota, entry));
    let counter = quota.key.counter_name();
    let counter = counter.map_or_else(String::new, |counter| {
        format!("; one quota for all policies with the counter {counter}")
    });
    let dynamic = match quota.is_dynamic {
        true => "; overrides of single keys in the store",
        false => "",
    };
    let rejected = if quota.count_rejected {
        "; rejected requests count"
    } else {
        ""
    };
    let lease = quota.lease.map_or_else(String::new, |lease| {
        let size = lease.size.map_or_else(
            || "units leased as needed".to_owned(),
            |size| format!("up to {size} units leased"),
        );
        let ttl = format_duration(Duration::from_micros(lease.ttl_us));
        format!("; {size} for {ttl}")
    });
    format!(
        "{per}: {}{cost}{}{counter}{dynamic}{block}{rejected}{lease}{}",
        describe_limits(&quota.limits),
        overrides.collect::<String>(),
        describe_missing_key(quota, matcher),
    )
}

fn describe_override(quota: &Quota, entry: &LimitOverride) -> String {
    let values = entry.values.iter().enumerate();
    let values = values.map(|(position, value)| quota.key.format_pattern(position, value));
    let rule = match entry.rule {
        OverrideRule::Limit(mode) => {
            let mode = mode.map_or_else(String::new, |mode| format!(" (mode {})", mode.name()));
            let limits = match entry.limits.is_empty() {
                true => "the same limits".to_owned(),
                false => describe_limits(&entry.limits),
            };
            format!("{limits}{mode}")
        }
        OverrideRule::Allow => "exempt from this policy, others still apply".to_owned(),
        OverrideRule::Deny => "denied".to_owned(),
        OverrideRule::Off => "off".to_owned(),
    };
    format!("; for {}: {rule}", values.collect::<Vec<_>>().join(", "))
}

/// What happens to requests without a part of the key.
fn describe_missing_key(quota: &Quota, matcher: &Matcher) -> String {
    let optional = quota.key.parts().filter(|part| part.may_be_absent(matcher));
    let optional: Vec<String> = optional.map(ToString::to_string).collect();
    if optional.is_empty() {
        return String::new();
    }
    let action = match quota.missing_key {
        MissingKeyAction::Shared => "one quota for all such requests",
        MissingKeyAction::Skip => "not limited by this policy",
        MissingKeyAction::Reject => "rejected",
    };
    format!("; without {}: {action}", optional.join(" or "))
}

fn describe_limits(limits: &[NamedLimit]) -> String {
    let limits = limits.iter().map(|named| {
        let mut text = describe_limit(&named.limit, named.unit.as_deref());
        if named.release == SlotRelease::Upstream {
            text.push_str(", until the upstream's response ends");
        }
        match &named.amount {
            None => text,
            Some(source) => format!(
                "{text} (or the number in the {}, at most {})",
                source.field, source.max
            ),
        }
    });
    limits.collect::<Vec<_>>().join(" and ")
}

fn describe_limit(limit: &Limit, unit: Option<&str>) -> String {
    let Limit {
        requests,
        per_us,
        algorithm,
    } = *limit;
    let unit = unit.unwrap_or(if requests == 1 { "request" } else { "requests" });
    let duration = |us| format_duration(Duration::from_micros(us));
    let per = duration(per_us);
    match algorithm {
        Algorithm::SlidingLog => format!("at most {requests} {unit} in any {per} window"),
        Algorithm::SlidingWindow { buckets } => {
            format!("at most {requests} {unit} in any {per} window, counted in {buckets} buckets")
        }
        Algorithm::Concurrency { max_duration_us } => {
            let most = match max_duration_us {
                0 => String::new(),
                us => format!(", each for at most {}", duration(us)),
            };
            format!("at most {requests} {unit} at a time{most}")
        }
        Algorithm::Block => format!("after a rejection, blocked for {per}"),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            let (cold, warm_up) = (limit.cold_capacity(), duration(warm_up_us));
            let after_idle = match warm_up_us {
                0 => String::new(),
                _ => format!(
                    "; after {warm_up} idle, {cold} at once and a third of the rate, growing to the full rate in {warm_up}"
                ),
            };
            format!("{requests} {unit} per {per} on average, at most {burst} at once{after_idle}")
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            let delay = duration(max_delay_us);
            format!("{requests} {unit} per {per} one at a time, each delayed by at most {delay}")
        }
        Algorithm::CalendarWindow { calendar } => format!(
            "at most {requests} {unit} in each calendar {} ({})",
            calendar.unit().as_str(),
            calendar.zone_name()
        ),
        Algorithm::FixedWindow { offset_us } => {
            let offset = match offset_us {
                0 => String::new(),
                us => format!(", offset {}", duration(us)),
            };
            format!("at most {requests} {unit} in each fixed {per} window{offset}")
        }
    }
}

fn describe_conditions(value: Option<&Value>) -> String {
    let Some(table) = value
        .and_then(Value::as_dict)
        .filter(|table| !table.is_empty())
    else {
        return "all requests".to_owned();
    };
    let mut parts = Vec::new();
    let start = ["methods", "hosts", "path"];
    parts.extend(
        start
            .iter()
            .filter_map(|key| table.get(*key))
            .map(format_value),
    );
    for (key, value) in table
        .iter()
        .filter(|(key, _)| !start.contains(&key.as_str()))
    {
        parts.push(match (key.as_str(), value) {
            ("path_regex", value) => format!("path matching {}", format_value(value)),
            ("client_ips", value) => format!("from {}", format_value(value)),
            ("any", Value::Array(_, alternatives)) => {
                let alternatives = alternatives.iter();
                let alternatives = alternatives.map(|one| describe_conditions(Some(one)));
                format!("({})", alternatives.collect::<Vec<_>>().join(") or ("))
            }
            ("not", value) => format!("but not ({})", describe_conditions(Some(value))),
            (key, Value::Dict(_, entries)) => {
                let kind = match key {
                    "headers" => "header",
                    "cookies" => "cookie",
                    "jwt" => "claim",
                    "query" => "query parameter",
                    other => other,
                };
                let conditions = entries.iter().map(|(name, condition)| {
                    format!("with {kind} {name}{}", describe_value_condition(condition))
                });
                conditions.collect::<Vec<_>>().join(" and ")
            }
            (_, value) => format_value(value),
        });
    }
    parts.join(" ")
}

fn describe_descriptors(value: Option<&Value>) -> String {
    let Some(table) = value.and_then(Value::as_dict) else {
        return String::new();
    };
    let domain = table.get("domain").map_or_else(String::new, |domain| {
        format!(" of {}", format_value(domain))
    });
    let entries = match table.get("descriptors").and_then(Value::as_dict) {
        None => String::new(),
        Some(entries) if entries.is_empty() => " without entries".to_owned(),
        Some(entries) => {
            let entries = entries
                .iter()
                .map(|(name, condition)| match condition.as_str() {
                    Some("*") => name.clone(),
                    _ => format!("{name}{}", describe_value_condition(condition)),
                });
            let accepts_more =
                table.get("descriptors_match").and_then(Value::as_str) == Some("subset");
            let rest = if accepts_more {
                ""
            } else {
                " and nothing else"
            };
            format!(" with {}{rest}", entries.collect::<Vec<_>>().join(", "))
        }
    };
    let any = table.get("any").and_then(Value::as_array);
    let any = any.map_or_else(String::new, |alternatives| {
        let alternatives = alternatives.iter();
        let alternatives =
            alternatives.map(|one| format!("({})", describe_descriptors(Some(one)).trim_start()));
        format!(" {}", alternatives.collect::<Vec<_>>().join(" or "))
    });
    let not = table.get("not").map_or_else(String::new, |not| {
        format!(" but not descriptors{}", describe_descriptors(Some(not)))
    });
    format!("{domain}{entries}{any}{not}")
}

fn describe_value_condition(condition: &Value) -> String {
    match (
        condition.as_str(),
        condition.find_ref("regex"),
        condition.find_ref("present").and_then(Value::to_bool),
    ) {
        (Some(text), ..) => format!(" = \"{text}\""),
        (_, Some(regex), _) => format!(" matching {}", format_value(regex)),
        (_, _, Some(false)) => " absent".to_owned(),
        _ if condition.as_dict().is_none() => format!(" = {}", format_value(condition)),
        _ => String::new(),
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::String(_, text) => text.clone(),
        Value::Bool(_, flag) => flag.to_string(),
        Value::Num(_, Num::I64(number)) => number.to_string(),
        Value::Array(_, items) => items
            .iter()
            .map(format_value)
            .collect::<Vec<_>>()
            .join(" or "),
        _ => String::new(),
    }
}
