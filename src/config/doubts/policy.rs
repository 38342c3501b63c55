//! What one policy says that has no effect, or another than it seems.

use super::{Around, Placed, regexes};
use crate::config::cursor::Cursor;
use crate::config::duration_words;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{Cost, KeyPart, Matcher, MissingKey, NamedLimit, Override, Quota};
use crate::proxy::is_taken_away;
use http::HeaderName;
use ipnet::IpNet;
use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

/// In memory, counters for longer than this seldom see the end of their period.
const LONG_FOR_MEMORY: Duration = Duration::from_secs(86_400);
/// Clients and load balancers seldom wait longer than this.
const LONG_DELAY: Duration = Duration::from_secs(60);

pub(super) fn look(one: &Placed<'_>, around: &Around<'_>) {
    let at = &one.at;
    if one.policy.matcher.is_void() {
        at.warn(
            "match",
            "no request is ever matched: its `not` takes away all that the rest lets through",
        );
    }
    if one.policy.matcher.described.is_some() && !around.is_called {
        at.warn(
            "match",
            "never used: nobody can call the rate-limit service; expected [rls] with its address",
        );
    }
    if let Some(table) = at.optional_table("match") {
        conditions(&table, &one.policy.matcher);
    }
    if one.policy.shadow {
        for (key, why) in [
            ("reject", "refuses nobody"),
            ("on_store_failure", "lets every request through"),
        ] {
            if at.has(key) {
                at.warn(key, &format!("without effect: a shadow policy {why}"));
            }
        }
    }
    let Some(quota) = one.quota() else { return };
    key(at, quota, around);
    limits(at, &quota.limits, quota, around);
    overrides(at, &one.policy.matcher, quota, around);
    if let Some(block) = quota.block {
        too_long_for_memory(at, "block_for", &block, around);
    }
}

fn conditions(at: &Cursor<'_>, matcher: &Matcher) {
    if let Some(pattern) = matcher
        .path_regex
        .as_ref()
        .and_then(|regex| regexes::as_pattern(regex.as_str()))
    {
        at.warn(
            "path_regex",
            &format!("path = \"{pattern}\" says the same, and is found without being tried on each request"),
        );
    }
    for (name, item) in at.entries("headers") {
        if name.parse().is_ok_and(|name| is_taken_away(&name)) {
            item.warn(NEVER_SEEN);
        }
    }
    if let (Some(table), Some(not)) = (at.optional_table("not"), &matcher.not) {
        conditions(&table, not);
    }
}

const NEVER_SEEN: &str = "no policy ever sees this header: it is about the connection to us alone, and is taken away first";

fn key(at: &Cursor<'_>, quota: &Quota, around: &Around<'_>) {
    let is_never_seen = |name: &HeaderName| is_taken_away(name);
    if quota
        .key
        .parts()
        .iter()
        .any(|part| matches!(part, KeyPart::Header(name) if is_never_seen(name)))
    {
        at.warn("key", NEVER_SEEN);
    }
    if matches!(&quota.cost, Cost::Header(cost) if is_never_seen(&cost.name)) {
        at.warn("cost", NEVER_SEEN);
    }
    if !around.scope.asks_for_certificates
        && quota.key.parts().iter().any(KeyPart::is_of_certificate)
    {
        at.warn("key", "clients are not asked for certificates, so this part is always missing; expected listen.tls.client_auth = \"optional\" or \"require\"");
    }
}

/// The limits of a policy or of an override.
fn limits(at: &Cursor<'_>, limits: &[NamedLimit], quota: &Quota, around: &Around<'_>) {
    let tables = match at.has("limit") {
        true => at.optional_table("limit").into_iter().collect(),
        false => at.tables("limits"),
    };
    let mut idle: Vec<&NamedLimit> = Vec::new();
    for (table, named) in tables.iter().zip(limits) {
        let limit = &named.limit;
        too_long_for_memory(table, "per", limit, around);
        match limit.algorithm {
            Algorithm::Concurrency { .. } => {
                if let Some(most) = around
                    .most_at_a_time()
                    .filter(|most| limit.requests > *most)
                {
                    table.warn("requests", &format!("never reached: upstream.max_connections lets {most} requests through at a time; the others wait there, and then get 503"));
                }
            }
            Algorithm::LeakyBucket { max_delay_us } => line(table, limit, max_delay_us, around),
            _ => {}
        }
        // What is settled later may pass a limit, so nothing is certain.
        let binds = |other: &&NamedLimit| {
            !std::ptr::eq(*other, named)
                && !idle.iter().any(|one| std::ptr::eq(*one, *other))
                && most_within(&other.limit, limit).is_some_and(|most| most <= limit.requests)
        };
        if quota.cost.estimate().is_none()
            && let Some(other) = limits.iter().find(binds)
        {
            table.warn(
                "requests",
                &format!(
                    "never reached: the limit \"{}\" beside it allows no more in the same time",
                    other.name
                ),
            );
            idle.push(named);
        }
    }
}

/// How much `tight` lets through at most in any time over which `wide` counts.
fn most_within(tight: &Limit, wide: &Limit) -> Option<u64> {
    let is_hard = matches!(
        tight.algorithm,
        Algorithm::SlidingLog | Algorithm::SlidingWindow { .. }
    );
    if !is_hard || tight.requests == 0 || tight.per_us == 0 {
        return None;
    }
    let counted_us = match wide.algorithm {
        Algorithm::SlidingLog | Algorithm::FixedWindow { .. } => wide.per_us,
        // Its oldest part counts as a whole.
        Algorithm::SlidingWindow { buckets } => wide
            .per_us
            .saturating_add(wide.per_us.div_ceil(buckets.max(1))),
        _ => return None,
    };
    tight
        .requests
        .checked_mul(counted_us.div_ceil(tight.per_us))
}

fn line(at: &Cursor<'_>, limit: &Limit, max_delay_us: u64, around: &Around<'_>) {
    let places =
        u128::from(limit.requests) * u128::from(max_delay_us) / u128::from(limit.per_us.max(1));
    let most = around.upstream.max_requests_waiting;
    if places > u128::try_from(most).unwrap_or(u128::MAX) {
        at.warn("max_delay", &format!("one key's requests alone would be {places} in line, and listen.http.max_requests_waiting has room for {most} of all keys; the others are refused"));
    }
    let delay = Duration::from_micros(max_delay_us);
    if delay > LONG_DELAY {
        let long = duration_words(LONG_DELAY);
        at.warn(
            "max_delay",
            &format!("few clients, and few load balancers, wait longer than {long} for an answer"),
        );
    }
}

fn too_long_for_memory(at: &Cursor<'_>, key: &str, limit: &Limit, around: &Around<'_>) {
    let per = Duration::from_micros(limit.per_us);
    if around.scope.counts_in_memory && per > LONG_FOR_MEMORY {
        at.warn(key, "counters in memory end with the process, and few live this long; expected store.kind = \"redis\"");
    }
}

fn overrides(at: &Cursor<'_>, matcher: &Matcher, quota: &Quota, around: &Around<'_>) {
    let mut exact: HashSet<&[Option<Box<str>>]> = HashSet::new();
    let mut wild: Vec<&Override> = Vec::new();
    for (table, entry) in at.tables("override").iter().zip(quota.overrides.list()) {
        limits(table, &entry.limits, quota, around);
        if exact.contains(&*entry.values) || wild.iter().any(|before| before.covers(entry)) {
            table.warn(
                "key",
                "never used: one before it fits every key that this one does",
            );
        } else if let Some(position) = impossible_position(entry, matcher, quota) {
            table.warn(
                "key",
                &format!(
                    "never used: no request that the policy matches has value {} there",
                    position + 1
                ),
            );
        }
        if entry.values.contains(&None) {
            wild.push(entry);
        } else {
            exact.insert(&entry.values);
        }
    }
}

/// From 0.
fn impossible_position(entry: &Override, matcher: &Matcher, quota: &Quota) -> Option<usize> {
    entry
        .values
        .iter()
        .enumerate()
        .position(|(position, value)| {
            let (Some(value), Some(part)) = (value, quota.key.part_at(position)) else {
                return false;
            };
            is_impossible(value, part, matcher, quota.missing_key)
        })
}

fn is_impossible(value: &str, part: &KeyPart, matcher: &Matcher, missing: MissingKey) -> bool {
    if value.is_empty() {
        return missing != MissingKey::Shared;
    }
    match part {
        KeyPart::Const(text) => **text != *value,
        KeyPart::Host => {
            !matcher.hosts.is_empty() && !matcher.hosts.iter().any(|host| host.matches(value))
        }
        KeyPart::Method => value
            .parse()
            .is_ok_and(|method| !matcher.methods.contains(&method)),
        KeyPart::ClientIp => {
            let net = value
                .parse::<IpNet>()
                .or_else(|_| value.parse::<IpAddr>().map(IpNet::from));
            let meets = |net: &IpNet| {
                matcher
                    .client_ips
                    .iter()
                    .any(|allowed| allowed.contains(net) || net.contains(allowed))
            };
            !matcher.client_ips.is_empty() && net.is_ok_and(|net| !meets(&net))
        }
        _ => false,
    }
}
