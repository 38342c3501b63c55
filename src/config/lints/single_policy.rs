//! Lints about settings of one policy that have no effect or a surprising one.

use super::LintContext;
use super::path_regex;
use crate::config::policies::PolicyWithReader;
use crate::config::table_reader::{TableReader, report};
use crate::config::values::format_duration;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{
    CostSource, KeyPart, LimitOverride, Matcher, MissingKeyAction, NamedLimit, PartCondition,
    PolicyAction, PolicyMode, Quota, ValueCondition,
};
use http::HeaderName;
use http::header::AUTHORIZATION;
use ipnet::IpNet;
use std::net::IpAddr;
use std::time::Duration;

/// The longest period that a counter in the memory store usually survives.
const LONG_MEMORY_PERIOD: Duration = Duration::from_secs(86_400);
/// The longest delay that clients and load balancers usually accept.
const LONG_DELAY: Duration = Duration::from_secs(60);

pub(super) fn check_policy(spanned: &PolicyWithReader<'_>, context: &LintContext<'_>) {
    let PolicyWithReader { reader, policy } = spanned;
    let (matcher, mode) = (&policy.matcher, policy.mode.name());
    let overrides = spanned.quota().map(|quota| &quota.overrides);
    let enforces_override = overrides.is_some_and(|all| all.modes().any(PolicyMode::is_enforced));
    let is_watching = !policy.is_enforced() && !enforces_override;
    let is_exemption = matches!(policy.action, PolicyAction::Allow);
    let is_shown = !is_exemption && policy.mode != PolicyMode::Shadow;
    let is_for_envoy = matcher.is_for_descriptors();
    report! { reader;
        Warning("match") if matcher.never_matches() => "matches no request: `not` excludes everything that the other conditions match";
        Warning("match") if is_for_envoy && !context.has_rls => "never used: the rate-limit service is not configured; expected [rls] with its address";
        Warning("reject") if is_watching && reader.contains_key("reject") => "without effect: a policy in mode \"{mode}\" rejects no request";
        Warning("on_store_failure") if is_watching && reader.contains_key("on_store_failure") => "without effect: a policy in mode \"{mode}\" admits every request";
        Warning("report") if !policy.is_reported && !is_shown => "without effect: no response has this policy";
    }
    if let Some(table) = reader.get_optional_table("match") {
        check_conditions(&table, matcher, context);
    }
    let Some(quota) = spanned.quota() else { return };
    check_key(reader, quota, context);
    check_limits(reader, &quota.limits, quota, context);
    for (table, entry) in reader
        .get_tables("override")
        .iter()
        .zip(quota.overrides.as_slice())
    {
        check_limits(table, &entry.limits, quota, context);
        if let Some(index) = find_impossible_value_index(entry, matcher, quota) {
            let position = index + 1;
            report! { table;
                Warning("key") => "never used: no request that the policy matches has this value at position {position}";
            }
        }
    }
    if let Some(block) = quota.block {
        check_memory_period(reader, "block_for", &block, quota, context);
    }
}

fn check_conditions(reader: &TableReader<'_>, matcher: &Matcher, context: &LintContext<'_>) {
    let settings = &context.policy_context.path;
    let path_regex =
        (matcher.conditions.iter()).find_map(|one| match (&one.part, &one.condition) {
            (KeyPart::WholePath, ValueCondition::Regex(regex)) => Some(regex.0.as_str()),
            _ => None,
        });
    if let Some(regex) = path_regex {
        if let Some(pattern) = path_regex::path_pattern_from_regex(regex) {
            report! { reader;
                Warning("path_regex") => "path = \"{pattern}\" is equivalent and faster: patterns are indexed, expressions are tried on each request";
            }
        }
        let unusual = path_regex::find_unusual_spelling(regex, settings);
        if let Some((part, canonical)) = unusual.filter(|_| settings.normalize) {
            report! { reader;
                Warning("path_regex") => "no path contains \"{part}\": expressions are tried on normalized paths, in which it is \"{canonical}\"";
            }
        }
    }
    for PartCondition { part, condition } in &matcher.conditions {
        let has_escape = condition.texts().any(path_regex::has_escape);
        let (key, problem) = match (part, condition) {
            (KeyPart::Query(_), _) if has_escape => ("query", DECODED_VALUE_WARNING),
            (KeyPart::Cookie(_), _) if has_escape => ("cookies", DECODED_VALUE_WARNING),
            (KeyPart::Header(name), ValueCondition::Regex(regex))
                if needs_removed_space(name, regex.0.as_str()) =>
            {
                ("headers", REMOVED_SPACE_WARNING)
            }
            _ => continue,
        };
        reader.report_warning(key, problem);
    }
    for item in reader.get_items("methods") {
        let method = item.value.as_str().unwrap_or_default();
        if let Some(meant) = find_misspelled_method(method) {
            let problem = format!("\"{method}\" is no standard method; did you mean \"{meant}\"?");
            item.report_warning(problem);
        }
    }
    for item in reader.get_items("path") {
        if let Some(meant) = item.value.as_str().and_then(braced_path_pattern) {
            item.report_warning(format!("matches only this text; did you mean \"{meant}\"?"));
        }
    }
    for (name, item) in reader.get_entries("headers") {
        let is_removed = |name: HeaderName| context.policy_context.is_removed_header(&name);
        if name.parse().is_ok_and(is_removed) {
            item.report_warning(STRIPPED_HEADER_WARNING);
        }
    }
    if let (Some(table), Some(not)) = (reader.get_optional_table("not"), &matcher.not) {
        check_conditions(&table, not, context);
    }
    for (table, one) in reader.get_tables("any").iter().zip(&matcher.any) {
        check_conditions(table, one, context);
    }
}

const REMOVED_SPACE_WARNING: &str = "an expression matches no value: headers are compared without spaces at their start and end, and authorization with one space after the scheme";

/// Whether an expression certainly matches only values with a space that no canonical value has.
fn needs_removed_space(name: &HeaderName, regex: &str) -> bool {
    let second_space = if *name == AUTHORIZATION {
        regex.split_once("  ").map(|(_, rest)| rest)
    } else {
        None
    };
    let mut rests = regex.strip_prefix("^ ").into_iter().chain(second_space);
    let is_required = |rest: &str| !rest.starts_with(['*', '?', '{']);
    let has_choice = regex.contains('|') || regex.contains("(?x");
    !has_choice && (rests.any(is_required) || regex.ends_with(" $"))
}

const DECODED_VALUE_WARNING: &str = "values of query parameters and cookies are compared decoded; expected the text without percent-encoding";

/// Methods of HTTP and of common extensions.
const KNOWN_METHODS: &str = "GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH PROPFIND PROPPATCH MKCOL COPY MOVE LOCK UNLOCK SEARCH REPORT PURGE QUERY";

/// The known method that an unknown one probably means. Other methods are extensions.
fn find_misspelled_method(method: &str) -> Option<&'static str> {
    let known = || KNOWN_METHODS.split(' ');
    let distance = |known: &str| strsim::osa_distance(known, method);
    let max_distance = if method.len() > 5 { 2 } else { 1 };
    let closest = known().min_by_key(|known| distance(known));
    closest.filter(|known| (1..=max_distance).contains(&distance(known)))
}

/// Rewrites segments such as `:id` and `<id>` of other routers as `{id}`. `None` if there is none.
fn braced_path_pattern(path: &str) -> Option<String> {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let braced = |segment: &str| {
        let angled = || segment.strip_prefix('<')?.strip_suffix('>');
        let name = segment.strip_prefix(':').or_else(angled)?;
        is_name(name).then(|| format!("{{{name}}}"))
    };
    let segments = path
        .split('/')
        .map(|segment| braced(segment).unwrap_or_else(|| segment.to_owned()));
    let pattern = segments.collect::<Vec<_>>().join("/");
    (pattern != path).then_some(pattern)
}

const STRIPPED_HEADER_WARNING: &str =
    "never present: tidegate removes this header before policies see it";

fn check_key(reader: &TableReader<'_>, quota: &Quota, context: &LintContext<'_>) {
    let is_stripped = |name: &HeaderName| context.policy_context.is_removed_header(name);
    let mut parts = quota.key.sources();
    let has_stripped = quota
        .key
        .sources()
        .any(|part| matches!(part, KeyPart::Header(name) if is_stripped(name)));
    let has_stripped_cost =
        matches!(&quota.cost, CostSource::Header(cost) if is_stripped(&cost.name));
    let has_certificates = context.policy_context.requests_client_certificates;
    report! { reader;
        Warning("key") if has_stripped => "{STRIPPED_HEADER_WARNING}";
        Warning("cost") if has_stripped_cost => "{STRIPPED_HEADER_WARNING}";
        Warning("key") if !has_certificates && parts.any(KeyPart::is_from_client_certificate) => "the listener requests no client certificates, so this part is always missing; expected listen.tls.client_auth = \"optional\" or \"require\"";
    }
}

/// Checks the limits of a policy or of an override.
fn check_limits(
    reader: &TableReader<'_>,
    limits: &[NamedLimit],
    quota: &Quota,
    context: &LintContext<'_>,
) {
    let tables = reader.get_one_or_more_tables("limit", "limits");
    let mut unreachable_limits: Vec<&NamedLimit> = Vec::new();
    for (table, named) in tables.iter().zip(limits) {
        let limit = &named.limit;
        check_memory_period(table, "per", limit, quota, context);
        check_capacity(table, limit, context);
        // A settlement may exceed a limit, so with estimates no order of limits is certain.
        let is_stricter = |other: &&NamedLimit| {
            let is_unreachable = unreachable_limits
                .iter()
                .any(|one| std::ptr::eq(*one, *other));
            let most = max_admitted_within(&other.limit, limit);
            !std::ptr::eq(*other, named)
                && other.amount.is_none()
                && named.amount.is_none()
                && !is_unreachable
                && most.is_some_and(|most| most <= limit.requests)
        };
        if quota.cost.as_estimate().is_none()
            && let Some(other) = limits.iter().find(is_stricter)
        {
            let name = &other.name;
            report! { table;
                Warning("requests") => "never reached: the limit \"{name}\" admits no more in the same time";
            }
            unreachable_limits.push(named);
        }
    }
}

/// Largest number of units that `tight` admits in any interval counted by `wide`. `None` if
/// unknown.
fn max_admitted_within(tight: &Limit, wide: &Limit) -> Option<u64> {
    let is_hard = matches!(
        tight.algorithm,
        Algorithm::SlidingLog | Algorithm::SlidingWindow { .. }
    );
    if !is_hard || tight.requests == 0 || tight.per_us == 0 {
        return None;
    }
    let counted_us = match wide.algorithm {
        Algorithm::SlidingLog
        | Algorithm::FixedWindow { .. }
        | Algorithm::CalendarWindow { .. } => wide.period_range_us().1,
        // The oldest bucket counts as a whole.
        Algorithm::SlidingWindow { buckets } => wide
            .per_us
            .saturating_add(wide.per_us.div_ceil(buckets.max(1))),
        _ => return None,
    };
    tight
        .requests
        .checked_mul(counted_us.div_ceil(tight.per_us))
}

/// Checks that the upstream's connections and the queue of requests suffice for a limit.
fn check_capacity(reader: &TableReader<'_>, limit: &Limit, context: &LintContext<'_>) {
    match limit.algorithm {
        Algorithm::Concurrency { .. } => {
            let most = context.max_upstream_concurrency();
            if let Some(most) = most.filter(|most| limit.requests > *most) {
                report! { reader;
                    Warning("requests") => "never reached: upstream.max_connections admits {most} requests at a time; further ones wait, then get 503";
                }
            }
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            let per_us = u128::from(limit.per_us.max(1));
            let max_queued = u128::from(limit.requests) * u128::from(max_delay_us) / per_us;
            let most = context.upstream.max_requests_waiting;
            let is_long = Duration::from_micros(max_delay_us) > LONG_DELAY;
            report! { reader;
                Warning("max_delay") if u128::try_from(most).is_ok_and(|most| max_queued > most) => "one key can queue {max_queued} requests, but listen.http.max_requests_waiting is {most} for all keys; further ones get 503";
                Warning("max_delay") if is_long => "few clients and load balancers wait longer than {} for a response", format_duration(LONG_DELAY);
            }
        }
        _ => {}
    }
}

fn check_memory_period(
    reader: &TableReader<'_>,
    key: &str,
    limit: &Limit,
    quota: &Quota,
    context: &LintContext<'_>,
) {
    let expected = match quota.is_instance_scoped() {
        true => "scope = \"shared\"",
        false if context.policy_context.uses_memory_store => "store.kind = \"redis\"",
        false => return,
    };
    report! { reader;
        Warning(key) if Duration::from_micros(limit.per_us) > LONG_MEMORY_PERIOD => "counters in memory are lost when the process ends, usually before this period does; expected {expected}";
    }
}

/// Index of the first value that no matched request has.
fn find_impossible_value_index(
    entry: &LimitOverride,
    matcher: &Matcher,
    quota: &Quota,
) -> Option<usize> {
    let mut values = entry.values.iter().enumerate();
    values.position(|(position, value)| {
        let value = value.as_exact();
        let source = value.and_then(|one| quota.key.value_source(position, one.as_bytes()));
        source.is_some_and(|(source, value)| {
            let value = String::from_utf8_lossy(value);
            is_impossible_value(&value, &source.part, matcher, quota.missing_key)
        })
    })
}

fn is_impossible_value(
    value: &str,
    part: &KeyPart,
    matcher: &Matcher,
    missing: MissingKeyAction,
) -> bool {
    if value.is_empty() {
        return missing != MissingKeyAction::Shared;
    }
    match (part, matcher.condition_on(part)) {
        (KeyPart::Const(text), _) => **text != *value,
        (KeyPart::Host, Some(ValueCondition::Hosts(hosts))) => {
            !hosts.iter().any(|host| host.matches(value))
        }
        (KeyPart::Method, Some(ValueCondition::OneOf(methods))) => {
            !methods.iter().any(|method| **method == *value)
        }
        (KeyPart::ClientIp, Some(ValueCondition::Networks(networks))) => {
            let net = value
                .parse::<IpNet>()
                .or_else(|_| value.parse::<IpAddr>().map(IpNet::from));
            let overlaps = |net: &IpNet| {
                let mut networks = networks.iter();
                networks.any(|allowed| allowed.contains(net) || net.contains(allowed))
            };
            net.is_ok_and(|net| !overlaps(&net))
        }
        (KeyPart::Query(_) | KeyPart::Cookie(_), _) => path_regex::has_escape(value),
        _ => false,
    }
}
