//! From `[[policy]]` tables to policies.

use super::build::{ALGORITHM, MISSING_KEY, ON_STORE_FAILURE};
use super::cursor::Cursor;
use super::diagnostic::Place;
use super::doubts::Placed;
use super::{Words, leases, matches, words};
use crate::limiter::{Algorithm, Limit, MAX_UNITS};
use crate::policy::{
    Action, Actual, Cost, EstimateCost, HeaderCost, KeyPart, KeyTemplate, MissingKey, NamedLimit,
    OnStoreFailure, Override, Overrides, Policy, Quota, Reject, client, path,
};
use http::{HeaderName, HeaderValue, StatusCode, header};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Above this, a log of single entries is an expensive way to count.
const LARGE_LOG: u64 = 100_000;

/// How long a slot is kept for a sidecar that doesn't renew it.
const LEASE_TTL: Duration = Duration::from_secs(10);

/// What all policies share.
pub(super) struct Scope {
    /// Counters are in a Redis Cluster.
    pub has_cluster: bool,
    pub client: client::Settings,
    pub path: path::Settings,
    pub on_store_failure: OnStoreFailure,
    pub algorithm: Algorithm,
    pub missing_key: MissingKey,
    /// Whether clients are asked for certificates.
    pub asks_for_certificates: bool,
    pub counts_in_memory: bool,
    /// Whose word a claim is, if it is anybody's.
    pub claims: Option<Claims>,
    /// Others may ask what the policies would do.
    pub is_checked: bool,
}

/// Whether tokens are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claims {
    Signed,
    Unverified,
}

impl Scope {
    pub(super) fn is_client_chosen(&self, part: &KeyPart) -> bool {
        let is_claim = matches!(part, KeyPart::Claim(_));
        part.is_client_chosen() || (is_claim && self.claims == Some(Claims::Unverified))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Enforce,
    Shadow,
    Off,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    Limit,
    Allow,
    Deny,
}

/// Builds all policies in file order, and says each in words. Those that are off are checked and left out.
pub(super) fn all<'a>(
    tables: impl Iterator<Item = Cursor<'a>>,
    scope: &Scope,
) -> (Vec<Placed<'a>>, Vec<Words>) {
    let mut names = BTreeMap::new();
    let (mut placed, mut sentences) = (Vec::new(), Vec::new());
    for at in tables {
        refuse_known_name(&at, &mut names);
        let mode = at.word("mode", &MODE);
        let Some(policy) = policy(&at, scope, mode == Some(Mode::Shadow)) else {
            continue;
        };
        let off = mode == Some(Mode::Off);
        let sentence = words::sentence(&policy, &at, off);
        sentences.push(Words {
            policy: policy.name.clone(),
            off,
            sentence,
        });
        if !off {
            placed.push(Placed { policy, at });
        }
    }
    (placed, sentences)
}

const MODE: [(&str, Mode); 3] = [
    ("enforce", Mode::Enforce),
    ("shadow", Mode::Shadow),
    ("off", Mode::Off),
];

/// Names are unique over all files, also those of policies that are off or wrong.
fn refuse_known_name(at: &Cursor<'_>, names: &mut BTreeMap<String, Place>) {
    let Some(item) = at.item("name") else { return };
    let Some(name) = item.value.as_str() else {
        return;
    };
    match names.get(name) {
        Some(first) => {
            item.fail::<()>(&format!(
                "another policy has this name, at {first}; expected a unique one"
            ));
        }
        None => {
            names.insert(name.to_owned(), item.place());
        }
    }
}

fn policy(at: &Cursor<'_>, scope: &Scope, shadow: bool) -> Option<Policy> {
    let name = at.parsed("name", name);
    let does = at.word(
        "action",
        &[
            ("limit", Does::Limit),
            ("allow", Does::Allow),
            ("deny", Does::Deny),
        ],
    )?;
    let conditions = at
        .optional_table("match")
        .map(|table| matches::matcher(&table, &scope.path, scope.claims.is_some()));
    let is_of_descriptors = conditions
        .as_ref()
        .is_some_and(|matcher| matcher.described.is_some());
    let action = match does {
        Does::Limit => quota(at, scope, name.as_deref().unwrap_or("policy"))
            .map(|quota| Action::Limit(Box::new(quota))),
        Does::Allow => without_quota(at, "allow").map(|()| Action::Allow),
        Does::Deny => without_quota(at, "deny").map(|()| Action::Deny),
    };
    let reject = at.optional_table("reject").and_then(|table| {
        if does == Does::Allow {
            at.fail("reject", "a policy with action = \"allow\" refuses nobody");
        }
        if is_of_descriptors && table.has("status") {
            table.fail(
                "status",
                "Envoy chooses it; expected none here, and rate_limited_status in Envoy's filter",
            );
        }
        reject(
            &table,
            if does == Does::Deny {
                StatusCode::FORBIDDEN
            } else {
                StatusCode::TOO_MANY_REQUESTS
            },
        )
    });
    if let Some(Action::Limit(quota)) = &action {
        match is_of_descriptors {
            true => refuse_what_needs_a_request(at, quota),
            false => refuse_descriptors(at, quota),
        }
        if scope.is_checked && !is_of_descriptors {
            refuse_what_needs_the_end(at, quota);
        }
    }
    Some(Policy {
        priority: at.whole("priority")?,
        matcher: conditions.unwrap_or_default(),
        shadow,
        on_store_failure: when_away(at, scope, is_of_descriptors),
        reject,
        // Last: what is wrong with the others has been said by now.
        action: action?,
        name: name?.into(),
    })
}

/// Who asks about descriptors has a failure mode of his own: what isn't decided here is left to him, by an error.
fn when_away(at: &Cursor<'_>, scope: &Scope, is_of_descriptors: bool) -> OnStoreFailure {
    let written = at.word("on_store_failure", &ON_STORE_FAILURE);
    if !is_of_descriptors {
        return written.unwrap_or(scope.on_store_failure);
    }
    if written.is_some_and(|mode| mode != OnStoreFailure::Local) {
        at.fail(
            "on_store_failure",
            "a call is then answered UNAVAILABLE, and Envoy's failure_mode_deny decides; expected \"local\" or nothing",
        );
    }
    match written.unwrap_or(scope.on_store_failure) {
        OnStoreFailure::Local => OnStoreFailure::Local,
        OnStoreFailure::Open | OnStoreFailure::Closed => OnStoreFailure::Closed,
    }
}

/// What a call of the rate-limit service doesn't bring: a request, its end, its response, somebody who waits.
fn refuse_what_needs_a_request(at: &Cursor<'_>, quota: &Quota) {
    let expected = "expected descriptor:NAME, descriptor or const:TEXT";
    if let Some(part) = quota
        .key
        .parts()
        .iter()
        .find(|part| part.is_of_descriptor() == Some(false))
    {
        at.fail(
            "key",
            &format!("a call of the rate-limit service has no {part}; {expected}"),
        );
    }
    match &quota.cost {
        Cost::Fixed(_) => {}
        Cost::Header(_) => {
            at.fail("cost", "a call of the rate-limit service has no header; expected a number, by which its hits_addend is multiplied");
        }
        Cost::Estimate(_) => {
            at.fail("cost", "a call of the rate-limit service has no response; expected a number, by which its hits_addend is multiplied");
        }
    }
    let key = if at.has("limits") { "limits" } else { "limit" };
    if all_limits(quota).any(takes_slots) {
        at.fail(key, "a call of the rate-limit service doesn't tell when its request ends; expected no algorithm = \"concurrency\"");
    }
    if all_limits(quota).any(|named| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. }))
    {
        at.fail(key, "a call of the rate-limit service can't be held; expected no algorithm = \"leaky_bucket\", perhaps \"token_bucket\" with burst = 1");
    }
}

fn all_limits(quota: &Quota) -> impl Iterator<Item = &NamedLimit> {
    quota.limits.iter().chain(
        quota
            .overrides
            .list()
            .iter()
            .flat_map(|entry| &entry.limits),
    )
}

fn refuse_descriptors(at: &Cursor<'_>, quota: &Quota) {
    if let Some(part) = quota
        .key
        .parts()
        .iter()
        .find(|part| part.is_of_descriptor() == Some(true))
    {
        at.fail(
            "key",
            &format!("a request has no {part}; expected domain or descriptors in match beside it"),
        );
    }
}

/// What whoever asks `[check]` never tells.
fn refuse_what_needs_the_end(at: &Cursor<'_>, quota: &Quota) {
    if quota.cost.estimate().is_some() {
        at.fail(
            "cost",
            "who asks at check.address doesn't tell of the response; expected no estimate, or no [check]",
        );
    }
    if all_limits(quota).any(takes_slots) {
        let key = if at.has("limits") { "limits" } else { "limit" };
        at.fail(key, "who asks at check.address doesn't tell when a request ends; expected no algorithm = \"concurrency\", or no [check]");
    }
}

/// `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`.
fn name(text: &str) -> Result<String, String> {
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts_well
        && text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    {
        return Ok(text.to_owned());
    }
    Err(
        "expected a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""
            .to_owned(),
    )
}

fn without_quota(at: &Cursor<'_>, action: &str) -> Option<()> {
    for key in [
        "key",
        "limit",
        "limits",
        "cost",
        "block_for",
        "count_rejected",
        "lease",
        "missing_key",
        "on_store_failure",
        "override",
    ] {
        if at.has(key) {
            at.fail(
                key,
                &format!("a policy with action = \"{action}\" counts nothing"),
            );
        }
    }
    Some(())
}

fn quota(at: &Cursor<'_>, scope: &Scope, name: &str) -> Option<Quota> {
    let parts = at.list("key", |text| match KeyPart::parse(text, &scope.path)? {
        KeyPart::Claim(_) if scope.claims.is_none() => Err(matches::NO_TOKENS.to_owned()),
        part => Ok(part),
    });
    // With a part left out, overrides could not be counted.
    let is_whole = parts.len() == at.items("key").len();
    let key = KeyTemplate::new(parts);
    let cost = cost(at);
    let limits = limits(at, scope, name);
    if cost.as_ref().is_some_and(|cost| cost.least() == 0) {
        at.warn("cost", "requests that take nothing are never limited");
    }
    if let (Some(Cost::Estimate(_)), Some(limits)) = (&cost, &limits)
        && limits.iter().all(takes_slots)
    {
        at.fail("cost", "nothing is ever settled: of concurrency a request takes one, whatever it costs; expected another limit too");
    }
    let overrides = at.tables("override");
    let overrides = overrides
        .iter()
        .filter_map(|table| over(table, scope, name, is_whole.then_some(&key)));
    let overrides = Overrides::new(name, overrides.collect());
    if let (Some(cost), Some(limits)) = (&cost, &limits) {
        warn_of_impossible(at, cost.least(), limits);
    }
    let all_limits = || {
        limits
            .iter()
            .flatten()
            .chain(overrides.list().iter().flat_map(|entry| &entry.limits))
    };
    if let Some(cost) = &cost {
        refuse_too_much_for_cold(at, cost.most(), all_limits());
    }
    let count_rejected = at.flag("count_rejected");
    if count_rejected == Some(true) && all_limits().any(takes_slots) {
        at.fail(
            "count_rejected",
            "who is refused is not in flight: algorithm = \"concurrency\" can't count it",
        );
    }
    let shards = at.whole("shards").unwrap_or(1);
    if shards > 1 {
        check_shards(at, scope, shards, cost.as_ref(), all_limits());
    }
    let block_for = at.duration("block_for");
    if block_for.is_some() && at.word("mode", &MODE) == Some(Mode::Shadow) {
        at.warn(
            "block_for",
            "a shadow policy blocks nobody: what it measures are its limits alone",
        );
    }
    let quota = Quota {
        key,
        lease: None,
        block: block_for.map(|time| Limit {
            requests: 1,
            per_us: micros(time),
            algorithm: Algorithm::Block,
        }),
        missing_key: at
            .word("missing_key", &MISSING_KEY)
            .unwrap_or(scope.missing_key),
        count_rejected: count_rejected?,
        shards,
        cost: cost?,
        limits: limits?,
        overrides,
    };
    let is_shadow = at.word("mode", &MODE) == Some(Mode::Shadow);
    Some(Quota {
        lease: leases::lease(at, &quota, is_shadow, scope.counts_in_memory),
        ..quota
    })
}

/// Spread limits are decided by whichever counter is asked: what needs to know all of them can't be.
fn check_shards<'a>(
    at: &Cursor<'_>,
    scope: &Scope,
    shards: u16,
    cost: Option<&Cost>,
    limits: impl Iterator<Item = &'a NamedLimit> + Clone,
) {
    if !scope.has_cluster {
        at.warn(
            "shards",
            "without a Redis Cluster it has no effect: there is one counter per key",
        );
    }
    if at.word("mode", &MODE) == Some(Mode::Shadow) {
        at.warn(
            "shards",
            "a shadow policy asks one shard only: it seems to refuse more than it would",
        );
    }
    let when_away = at
        .word("on_store_failure", &ON_STORE_FAILURE)
        .unwrap_or(scope.on_store_failure);
    if scope.has_cluster && when_away == OnStoreFailure::Local {
        let expected = "expected on_store_failure = \"open\" or \"closed\" beside it";
        at.fail(
            "shards",
            &format!("what is admitted without Redis is written back to one counter; {expected}"),
        );
    }
    let least = |limit: &Limit| match limit.algorithm {
        Algorithm::TokenBucket { burst, .. } => limit.requests.min(burst),
        _ => limit.requests,
    };
    if let Some(few) = limits
        .clone()
        .find(|named| least(&named.limit) < u64::from(shards))
    {
        let most = least(&few.limit);
        at.fail(
            "shards",
            &format!(
                "each needs a unit, and the limit \"{}\" has {most}; expected at most {most}",
                few.name
            ),
        );
    } else if let Some(few) = limits
        .clone()
        .find(|named| least(&named.limit) / u64::from(shards) < cost.map_or(0, Cost::most))
    {
        at.warn(
            "shards",
            &format!(
                "a request may take more than one shard of the limit \"{}\" has: such a one never passes",
                few.name
            ),
        );
    }
    for (algorithm, is_used) in [
        ("concurrency", limits.clone().any(takes_slots)),
        (
            "leaky_bucket",
            limits
                .clone()
                .any(|named| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. })),
        ),
    ] {
        if is_used {
            at.fail(
                "shards",
                &format!(
                    "algorithm = \"{algorithm}\" can't be spread; expected another, or no shards"
                ),
            );
        }
    }
    for key in ["block_for", "count_rejected"] {
        if at.has(key)
            && at
                .item(key)
                .is_some_and(|item| item.value.to_bool() != Some(false))
        {
            at.fail(
                key,
                "needs one counter that knows of every refusal; expected no shards beside it",
            );
        }
    }
    if at.has("lease") {
        at.fail(
            "lease",
            "units are lent by one counter; expected no shards beside it",
        );
    }
    if cost.is_some_and(|cost| cost.estimate().is_some()) {
        at.fail(
            "shards",
            "an estimate is settled on one counter; expected no shards beside it",
        );
    }
}

/// A number, or what says it: a header of the request, or the response.
fn cost(at: &Cursor<'_>) -> Option<Cost> {
    if at
        .item("cost")
        .is_none_or(|item| item.value.as_dict().is_none())
    {
        return units(at, "cost").map(Cost::Fixed);
    }
    let table = at.optional_table("cost")?;
    if table.has("estimate") || table.has("actual") {
        return estimate(&table);
    }
    let name = table.parsed("header", matches::header_name);
    let (default, min, max) = (
        units(&table, "default")?,
        units(&table, "min")?,
        units(&table, "max")?,
    );
    if min > max {
        table.fail("min", &format!("more than max; expected at most {max}"));
    } else if default < min {
        table.warn(
            "default",
            "less than min: without the header a request takes less than with any",
        );
    }
    Some(Cost::Header(Box::new(HeaderCost {
        name: name?,
        default,
        min,
        max,
    })))
}

fn estimate(at: &Cursor<'_>) -> Option<Cost> {
    for key in ["header", "default", "min", "max"] {
        if at.has(key) {
            at.fail(
                key,
                "beside an estimate; expected either header, or estimate and actual",
            );
        }
    }
    let (estimate, actual) = (units(at, "estimate"), at.parsed("actual", Actual::parse));
    Some(Cost::Estimate(Arc::new(EstimateCost {
        estimate: estimate?,
        actual: actual?,
    })))
}

/// The schema lets only what isn't negative through.
fn units(at: &Cursor<'_>, name: &str) -> Option<u64> {
    at.whole::<i64>(name)
        .and_then(|units| u64::try_from(units).ok())
}

/// Who only ever asks for more than a cold bucket holds would never warm it up.
fn refuse_too_much_for_cold<'a>(
    at: &Cursor<'_>,
    cost: u64,
    mut limits: impl Iterator<Item = &'a NamedLimit>,
) {
    let is_too_small =
        |limit: &Limit| limit.capacity() > limit.cold_capacity() && limit.cold_capacity() < cost;
    if let Some(limit) = limits.find(|limit| is_too_small(&limit.limit)) {
        let most = limit.limit.cold_capacity();
        at.fail("cost", &format!("up to {cost}, but before its warm_up the limit \"{}\" has {most} at once, a third of burst; expected at most {most}", limit.name));
    }
}

/// Of these a request takes one, whatever it costs.
fn takes_slots(named: &NamedLimit) -> bool {
    matches!(named.limit.algorithm, Algorithm::Concurrency { .. })
}

fn warn_of_impossible(at: &Cursor<'_>, cost: u64, limits: &[NamedLimit]) {
    let mut limits = limits.iter().filter(|named| !takes_slots(named));
    if let Some(limit) =
        limits.find(|limit| limit.limit.requests > 0 && limit.limit.capacity() < cost)
    {
        let most = limit.limit.capacity();
        at.warn(
            "cost",
            &format!("no request ever passes: it takes {cost} of at most {most}"),
        );
    }
}

/// The limits of a policy or of an override, with distinct names and counters.
fn limits(at: &Cursor<'_>, scope: &Scope, policy: &str) -> Option<Vec<NamedLimit>> {
    let tables = match (at.has("limit"), at.has("limits")) {
        (true, true) => {
            at.fail("limits", "beside limit; expected one of them");
            return None;
        }
        (false, false) => {
            at.fail(
                "limit",
                "missing; expected a limit such as { requests = 100, per = \"1m\" }",
            );
            return None;
        }
        (true, false) => at.optional_table("limit").into_iter().collect(),
        (false, true) => at.tables("limits"),
    };
    if tables.is_empty()
        && at
            .item("limits")
            .is_some_and(|item| item.value.as_array().is_some_and(<[_]>::is_empty))
    {
        at.fail(
            "limits",
            "expected at least one limit such as { requests = 100, per = \"1m\" }",
        );
    }
    let mut limits: Vec<NamedLimit> = Vec::new();
    let mut unnamed = 0_usize;
    for table in &tables {
        let name = table.parsed("name", name).unwrap_or_else(|| {
            unnamed += 1;
            if unnamed == 1 {
                policy.to_owned()
            } else {
                format!("{policy}-{unnamed}")
            }
        });
        let Some(limit) = limit(table, scope) else {
            continue;
        };
        if limits.iter().any(|other| *other.name == *name) {
            table.fail(
                "name",
                &format!(
                    "another limit of this policy is called \"{name}\"; expected a unique name"
                ),
            );
        }
        if limits
            .iter()
            .any(|other| other.limit.identity() == limit.identity())
        {
            table.fail("per", "another limit of this policy has the same period and algorithm: they would share one counter");
        }
        limits.push(NamedLimit {
            name: name.into(),
            unit: table.parsed("unit", unit),
            limit,
        });
    }
    (limits.len() == tables.len() && !limits.is_empty()).then_some(limits)
}

fn unit(text: &str) -> Result<Box<str>, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if (1..=32).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(text.into());
    }
    Err("expected 1 to 32 letters, digits, \"_\" or \"-\"".to_owned())
}

fn limit(at: &Cursor<'_>, scope: &Scope) -> Option<Limit> {
    let requests = at
        .whole::<i64>("requests")
        .and_then(|requests| u64::try_from(requests).ok());
    let (per, lease_ttl) = (at.duration("per"), at.duration("lease_ttl"));
    let written = at.word("algorithm", &ALGORITHM);
    let offset = at.duration("offset");
    if written.is_none() && at.has("algorithm") {
        // What is right for an algorithm that nobody knows?
        return None;
    }
    let (buckets, burst) = (units(at, "buckets"), units(at, "burst"));
    let (max_delay, max_duration) = (at.duration("max_delay"), at.duration("max_duration"));
    let algorithm = match written.unwrap_or(scope.algorithm) {
        algorithm @ (Algorithm::SlidingLog | Algorithm::Block) => algorithm,
        Algorithm::SlidingWindow { buckets: usual } => Algorithm::SlidingWindow {
            buckets: buckets.unwrap_or(usual),
        },
        Algorithm::FixedWindow { .. } => Algorithm::FixedWindow {
            offset_us: micros(offset.unwrap_or_default()),
        },
        Algorithm::TokenBucket { .. } => {
            let warm_up_us = at.duration("warm_up").map_or(0, micros);
            Algorithm::TokenBucket {
                burst: burst.or(requests).unwrap_or_default(),
                warm_up_us,
            }
        }
        Algorithm::LeakyBucket {
            max_delay_us: usual,
        } => Algorithm::LeakyBucket {
            max_delay_us: max_delay.map_or(usual, micros),
        },
        Algorithm::Concurrency { .. } => Algorithm::Concurrency {
            max_duration_us: micros(max_duration.unwrap_or_default()),
        },
    };
    let counts_slots = matches!(algorithm, Algorithm::Concurrency { .. });
    for (key, of, right) in [
        (
            "buckets",
            "sliding_window",
            matches!(algorithm, Algorithm::SlidingWindow { .. }),
        ),
        (
            "offset",
            "fixed_window",
            matches!(algorithm, Algorithm::FixedWindow { .. }),
        ),
        (
            "burst",
            "token_bucket",
            matches!(algorithm, Algorithm::TokenBucket { .. }),
        ),
        (
            "warm_up",
            "token_bucket",
            matches!(algorithm, Algorithm::TokenBucket { .. }),
        ),
        (
            "max_delay",
            "leaky_bucket",
            matches!(algorithm, Algorithm::LeakyBucket { .. }),
        ),
        ("lease_ttl", "concurrency", counts_slots),
        ("max_duration", "concurrency", counts_slots),
    ] {
        if at.has(key) && !right {
            at.fail(
                key,
                &format!("only for algorithm = \"{of}\", which is expected beside it"),
            );
        }
    }
    let per = match (counts_slots, at.has("per")) {
        (true, is_written) => {
            if is_written {
                at.fail(
                    "per",
                    "not for algorithm = \"concurrency\", which counts requests in flight",
                );
            }
            Some(lease_ttl.unwrap_or(LEASE_TTL))
        }
        (false, true) => per,
        (false, false) => {
            at.fail("per", "missing; expected a duration such as \"1m\"");
            None
        }
    };
    if let (Some(offset), Some(per)) = (offset, per)
        && offset >= per
    {
        at.fail("offset", "expected less than per");
    }
    if let (Some(requests), Some(per)) = (requests, per) {
        refuse_inexact(at, algorithm, requests, micros(per));
    }
    match requests {
        Some(0) => at.warn("requests", "0 refuses everything"),
        Some(requests) if requests > LARGE_LOG && algorithm == Algorithm::SlidingLog => at.warn(
            "requests",
            "sliding_log keeps one entry per request; \"sliding_window\" needs no more memory for a large limit",
        ),
        _ => {}
    }
    Some(Limit {
        requests: requests?,
        per_us: micros(per?),
        algorithm,
    })
}

/// What a bucket counts in has to stay whole in a double.
fn refuse_inexact(at: &Cursor<'_>, algorithm: Algorithm, requests: u64, per_us: u64) {
    let (key, most) = match algorithm {
        Algorithm::TokenBucket { burst, .. } if burst > requests => {
            ("burst", MAX_UNITS / per_us.max(1))
        }
        Algorithm::TokenBucket { .. } => ("requests", MAX_UNITS / per_us.max(1)),
        Algorithm::LeakyBucket { max_delay_us } => (
            "requests",
            (MAX_UNITS - per_us.min(MAX_UNITS)) / max_delay_us.max(1),
        ),
        _ => return,
    };
    let burst = if let Algorithm::TokenBucket { burst, .. } = algorithm {
        burst
    } else {
        0
    };
    if burst.max(requests) > most {
        let what = if burst > 0 { "a period" } else { "a max_delay" };
        at.fail(
            key,
            &format!("too many to be counted exactly in {what} this long; expected at most {most}"),
        );
    }
}

/// The schema bounds periods to some hundred days.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn over(
    at: &Cursor<'_>,
    scope: &Scope,
    policy: &str,
    key: Option<&KeyTemplate>,
) -> Option<Override> {
    let limits = limits(at, scope, policy);
    if !at.has("key") {
        at.fail(
            "key",
            "missing; expected one value per position of the policy's key",
        );
        return None;
    }
    let items = at.items("key");
    let key = key?;
    if items.len() != key.width() {
        let width = key.width();
        at.fail(
            "key",
            &format!(
                "{} values; expected {width}, as many as the policy's key has positions",
                items.len()
            ),
        );
        return None;
    }
    let mut values = Vec::new();
    for (position, item) in items.iter().enumerate() {
        match item.value.as_str() {
            Some("*") => values.push(None),
            Some(text) => match key.canonical_value(position, text, &scope.client, &scope.path) {
                Ok(value) => values.push(Some(value)),
                Err(reason) => return item.fail(&reason),
            },
            None => return item.fail("expected a text; \"*\" is any value"),
        }
    }
    Some(Override {
        values,
        limits: limits?,
    })
}

fn reject(at: &Cursor<'_>, status: StatusCode) -> Option<Reject> {
    let status = at
        .whole::<u16>("status")
        .and_then(|code| StatusCode::from_u16(code).ok())
        .unwrap_or(status);
    let headers = at
        .entries("headers")
        .into_iter()
        .filter_map(|(name, item)| {
            let Some(text) = item.value.as_str() else {
                return item.fail("expected a text");
            };
            match (reject_header(name), HeaderValue::from_str(text)) {
                (Ok(name), Ok(value)) => Some((name, value)),
                (Err(reason), _) => item.fail(&reason),
                (_, Err(_)) => item.fail("expected a text that a header can hold"),
            }
        });
    Some(Reject {
        status,
        headers: headers.collect(),
        body: at.text("body")?.into(),
        content_type: at.parsed("content_type", |text| match HeaderValue::from_str(text) {
            Ok(value) if text.contains('/') => Ok(value),
            _ => Err("expected a media type such as \"application/json\"".to_owned()),
        })?,
    })
}

/// Fields that frame or route a message are not the owner's to set.
fn reject_header(text: &str) -> Result<HeaderName, String> {
    const OURS: [HeaderName; 8] = [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::RETRY_AFTER,
    ];
    match matches::header_name(text)? {
        header::CONTENT_TYPE => Err("expected content_type beside headers instead".to_owned()),
        name if OURS.contains(&name) => Err(format!("{name} is set by tidegate")),
        name => Ok(name),
    }
}
