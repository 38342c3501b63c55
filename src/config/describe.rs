//! Describes each policy in one sentence, so that its author can check what it does.

use super::diagnostic::replace_control_characters;
use super::schema::{self, ValueKind};
use super::table_reader::TableReader;
use super::value_tree::{ValueContent, ValueNode};
use super::values::format_duration;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{
    ActualCost, CostSource, LimitOverride, MissingKeyAction, NamedLimit, OnStoreFailure,
    OverrideRule, Policy, PolicyAction, Quota, SlotRelease,
};
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

/// Describes a policy in one sentence. Conditions are taken from the file's values, because a
/// compiled policy does not keep their source text.
pub(super) fn describe_policy(
    policy: &Policy,
    reader: &TableReader<'_>,
    is_off: bool,
) -> PolicyDescription {
    let mode = if is_off {
        " (off)"
    } else {
        policy.mode.suffix()
    };
    let table = reader.get("match").map(|item| item.value);
    let matches_descriptors = policy.matcher.is_for_descriptors();
    let requests = if matches_descriptors {
        format!("descriptors{}", describe_descriptors(table))
    } else {
        describe_conditions(table)
    };
    let mut clauses = match &policy.action {
        PolicyAction::Allow => vec![": exempt, no later policy applies".to_owned()],
        PolicyAction::Deny => vec![": denied".to_owned()],
        PolicyAction::Limit(quota) => describe_quota(quota, policy),
    };
    if !policy.is_reported {
        clauses.push("not reported to clients".to_owned());
    }
    if policy.priority != 0 {
        clauses.push(format!("priority {}", policy.priority));
    }
    let sentence = format!("{}{mode}: {requests}{}", policy.name, clauses.join("; "));
    PolicyDescription {
        policy: policy.name.clone(),
        is_off,
        // Values from the file may contain control characters.
        sentence: replace_control_characters(&sentence),
    }
}

/// The clauses about a quota, and about a failure of the store.
fn describe_quota(quota: &Quota, policy: &Policy) -> Vec<String> {
    let parts = quota.key.components().iter().map(ToString::to_string);
    let parts: Vec<String> = parts.collect();
    let per = if parts.is_empty() {
        "in total".to_owned()
    } else {
        format!("per {}", parts.join(" and "))
    };
    let (limits, cost) = (describe_limits(&quota.limits), describe_cost(&quota.cost));
    let mut clauses = vec![format!(", {per}: {limits}{cost}")];
    let overrides = quota.overrides.as_slice().iter();
    clauses.extend(overrides.map(|entry| describe_override(quota, entry)));
    let mut add = |clause: String| clauses.push(clause);
    if let Some(counter) = quota.key.counter_name() {
        add(format!(
            "one quota for all policies with the counter {counter}"
        ));
    }
    if quota.is_dynamic {
        add("overrides of single keys in the store".to_owned());
    }
    if let Some(block) = &quota.block {
        let condition = if quota.counts_responses() {
            " if responses with such a status fill the limit"
        } else {
            ""
        };
        add(describe_limit(block, None) + condition);
    }
    if quota.count_rejected {
        add("rejected requests count".to_owned());
    }
    if !quota.notify.is_empty() {
        let thresholds = join(quota.notify.iter().map(ToString::to_string), ", ");
        add(format!("notifies once a period at {thresholds} of a limit"));
    }
    if let Some(lease) = quota.lease {
        let ttl = format_duration(Duration::from_micros(lease.ttl_us));
        add(match lease.size {
            None => format!("units leased as needed for {ttl}"),
            Some(size) => format!("up to {size} units leased for {ttl}"),
        });
    }
    let optional = quota
        .key
        .parts()
        .filter(|part| part.may_be_absent(&policy.matcher));
    let optional = join(optional.map(ToString::to_string), " or ");
    if !optional.is_empty() {
        let action = match quota.missing_key {
            MissingKeyAction::Shared => "one quota for all such requests",
            MissingKeyAction::Skip => "not limited by this policy",
            MissingKeyAction::Reject => "rejected",
        };
        add(format!("without {optional}: {action}"));
    }
    let is_for_envoy = policy.matcher.is_for_descriptors();
    add(match policy.on_store_failure {
        _ if quota.is_instance_scoped() => "counted per instance, in memory",
        OnStoreFailure::Open => "if the store fails: allow",
        OnStoreFailure::Closed if is_for_envoy => "if the store fails: Envoy decides",
        OnStoreFailure::Closed => "if the store fails: reject",
        OnStoreFailure::Local => "if the store fails: limit by this instance's share",
    }
    .to_owned());
    clauses
}

fn describe_cost(cost: &CostSource) -> String {
    match cost {
        CostSource::Fixed(1) => String::new(),
        CostSource::Fixed(units) => format!(", cost {units}"),
        CostSource::Header(cost) => format!(
            ", cost from header {} ({} to {}; {} if absent)",
            cost.name, cost.min, cost.max, cost.default
        ),
        CostSource::Estimate(cost) => match (&cost.actual, &cost.estimate) {
            (ActualCost::Status(counted), estimate) => {
                format!(", cost {estimate} if the response has status {counted}, else 0")
            }
            (actual, estimate) => {
                format!(", cost from the response ({actual}; estimate {estimate})")
            }
        },
    }
}

fn describe_override(quota: &Quota, entry: &LimitOverride) -> String {
    let values = entry.values.iter().enumerate();
    let values = values.map(|(position, value)| quota.key.format_pattern(position, value));
    let rule = match entry.rule {
        OverrideRule::Limit(mode) => {
            let mode = mode.map_or_else(String::new, |mode| format!(" (mode {})", mode.name()));
            if entry.limits.is_empty() {
                format!("the same limits{mode}")
            } else {
                describe_limits(&entry.limits) + &mode
            }
        }
        OverrideRule::Allow => "exempt from this policy, others still apply".to_owned(),
        OverrideRule::Deny => "denied".to_owned(),
        OverrideRule::Off => "off".to_owned(),
    };
    format!("for {}: {rule}", join(values, ", "))
}

fn describe_limits(limits: &[NamedLimit]) -> String {
    let limits = limits.iter().map(|named| {
        let mut text = describe_limit(&named.limit, named.unit.as_deref());
        if named.release == SlotRelease::Upstream {
            text.push_str(", until the upstream's response ends");
        }
        if let Some(source) = &named.amount {
            let (field, max) = (&source.field, source.max);
            text += &format!(" (or the number in the {field}, at most {max})");
        }
        text
    });
    join(limits, " and ")
}

fn describe_limit(limit: &Limit, unit: Option<&str>) -> String {
    let requests = limit.requests;
    let unit = unit.unwrap_or(if requests == 1 { "request" } else { "requests" });
    let duration = |us| format_duration(Duration::from_micros(us));
    // 0 is the default, which needs no words.
    let unless_zero = |before: &str, us| match us {
        0 => String::new(),
        us => format!("{before}{}", duration(us)),
    };
    let per = duration(limit.per_us);
    match limit.algorithm {
        Algorithm::SlidingLog => format!("at most {requests} {unit} in any {per} window"),
        Algorithm::SlidingWindow { buckets } => {
            format!("at most {requests} {unit} in any {per} window, counted in {buckets} buckets")
        }
        Algorithm::Concurrency { max_duration_us } => {
            let most = unless_zero(", each for at most ", max_duration_us);
            format!("at most {requests} {unit} at a time{most}")
        }
        Algorithm::Block => format!("after a rejection, blocked for {per}"),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            let text = format!("{requests} {unit} per {per} on average, at most {burst} at once");
            let (cold, warm_up) = (limit.cold_capacity(), duration(warm_up_us));
            match warm_up_us {
                0 => text,
                _ => format!(
                    "{text}; after {warm_up} idle, {cold} at once and a third of the rate, growing to the full rate in {warm_up}"
                ),
            }
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            let delay = duration(max_delay_us);
            format!("{requests} {unit} per {per} one at a time, each delayed by at most {delay}")
        }
        Algorithm::CalendarWindow { calendar } => {
            let (period, zone) = (calendar.unit().as_str(), calendar.zone_name());
            format!("at most {requests} {unit} in each calendar {period} ({zone})")
        }
        Algorithm::FixedWindow { offset_us } => {
            let offset = unless_zero(", offset ", offset_us);
            format!("at most {requests} {unit} in each fixed {per} window{offset}")
        }
    }
}

fn describe_conditions(table: Option<&ValueNode>) -> String {
    /// The keys of `match` that come first in the sentence, and have no words before the value.
    const FIRST_KEYS: [&str; 3] = ["methods", "hosts", "path"];
    let Some(table) = table
        .and_then(ValueNode::as_table)
        .filter(|table| !table.is_empty())
    else {
        return "all requests".to_owned();
    };
    let first = FIRST_KEYS
        .into_iter()
        .filter_map(|key| table.get_key_value(key));
    let is_later = |(key, _): &(&String, _)| !FIRST_KEYS.contains(&key.as_str());
    let described = first
        .chain(table.iter().filter(is_later))
        .map(|(key, value)| {
            let named = |kind: &str| {
                let entries = value.as_table().into_iter().flatten();
                let entries = entries.map(|(name, condition)| {
                    format!("with {kind} {name}{}", describe_value_condition(condition))
                });
                join(entries, " and ")
            };
            match key.as_str() {
                "path_regex" => format!("path matching {}", format_value(value)),
                "client_ips" => format!("from {}", format_value(value)),
                "any" => {
                    let alternatives = value.as_list().into_iter().flatten();
                    let alternatives = alternatives.map(|one| describe_conditions(Some(one)));
                    format!("({})", join(alternatives, ") or ("))
                }
                "not" => format!("but not ({})", describe_conditions(Some(value))),
                key => match schema::find_key(&schema::MATCH, key).map(|key| &key.kind) {
                    Some(ValueKind::Conditions { noun, .. }) => named(noun),
                    _ => format_value(value),
                },
            }
        });
    join(described, " ")
}

fn describe_descriptors(table: Option<&ValueNode>) -> String {
    let get = |key: &str| table?.get(key);
    let mut text = get("domain").map_or_else(String::new, |domain| {
        format!(" of {}", format_value(domain))
    });
    match get("descriptors").and_then(ValueNode::as_table) {
        None => {}
        Some(entries) if entries.is_empty() => text += " without entries",
        Some(entries) => {
            let entries = entries
                .iter()
                .map(|(name, condition)| match condition.as_str() {
                    Some("*") => name.clone(),
                    _ => format!("{name}{}", describe_value_condition(condition)),
                });
            text += &format!(" with {}", join(entries, ", "));
            if get("descriptors_match").and_then(ValueNode::as_str) != Some("subset") {
                text += " and nothing else";
            }
        }
    }
    if let Some(alternatives) = get("any").and_then(ValueNode::as_list) {
        let describe = |one| format!("({})", describe_descriptors(Some(one)).trim_start());
        text += &format!(" {}", join(alternatives.iter().map(describe), " or "));
    }
    if let Some(not) = get("not") {
        text += &format!(" but not descriptors{}", describe_descriptors(Some(not)));
    }
    text
}

fn describe_value_condition(condition: &ValueNode) -> String {
    match (
        &condition.content,
        condition.get("regex"),
        condition.get("present"),
    ) {
        (ValueContent::Text(text), ..) => format!(" = \"{text}\""),
        (_, Some(regex), _) => format!(" matching {}", format_value(regex)),
        (.., Some(present)) if present.content == ValueContent::Bool(false) => " absent".to_owned(),
        (ValueContent::Table(_), ..) => String::new(),
        _ => format!(" = {}", format_value(condition)),
    }
}

fn format_value(value: &ValueNode) -> String {
    match &value.content {
        ValueContent::Text(text) => text.clone(),
        ValueContent::Bool(flag) => flag.to_string(),
        ValueContent::Integer(number) => number.to_string(),
        ValueContent::List(items) => join(items.iter().map(format_value), " or "),
        _ => String::new(),
    }
}

fn join(texts: impl Iterator<Item = String>, separator: &str) -> String {
    texts.collect::<Vec<_>>().join(separator)
}
