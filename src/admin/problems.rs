//! Problems that need attention: one rule each, for `/readyz`, the overview, the dashboard and
//! `tidegate top`. docs/operations/observe.md lists the rules.

use super::{AdminBackend, Problem, REFUSED_SERIES};
use crate::telemetry::metrics::{ProcessStatus, RedisServerMetrics, StoreStatus};
use crate::telemetry::top_rejections::RejectionDimension;
use std::borrow::Cow;

/// Number of seconds that the rules about traffic cover. The current, incomplete second is added.
const TRAFFIC_WINDOW_S: usize = 60;
/// Smallest number of forwarded requests, and smallest percentage of failures among them, that are
/// reported.
const UPSTREAM_ERRORS_MIN_REQUESTS: u64 = 5;
const UPSTREAM_ERRORS_MIN_PERCENT: u64 = 50;
/// Smallest number of requests, and smallest percentage of refusals among them, that are reported.
const REFUSALS_MIN_REQUESTS: u64 = 20;
const REFUSALS_MIN_PERCENT: u64 = 60;
/// Minimum number of requests decided without the store, while it is up, that is reported.
const DEGRADED_MIN_REQUESTS: u64 = 5;
/// Percentage of `maxmemory` from which the memory of Redis is reported.
const REDIS_MEMORY_PERCENT: u64 = 90;
/// Maximum number of policies that a text about an outage names for each effect.
const MAX_NAMED_POLICIES: usize = 5;
/// Maximum number of paths that a text about the app's errors names.
const MAX_NAMED_PATHS: usize = 3;
/// Largest difference to the clock of Redis that is not reported.
const MAX_CLOCK_SKEW_US: u64 = 5_000_000;

/// Counts of the requests in the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RecentTraffic {
    requests: u64,
    /// Requests that a limit or a policy refused.
    refused: u64,
    /// Requests that were decided without the store.
    degraded: u64,
    /// Requests that were forwarded to the upstream, or should have been.
    forwarded: u64,
    /// Forwarded requests without a response.
    failed: u64,
    /// Forwarded requests that the app answered with a status from 500 on.
    app_errors: u64,
}

impl Problem {
    fn error(
        id: &'static str,
        title: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            id: id.into(),
            level: "error".into(),
            title: title.into(),
            remedy: remedy.into(),
        }
    }

    fn warning(
        id: &'static str,
        title: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            level: "warning".into(),
            ..Self::error(id, title, remedy)
        }
    }

    /// Problem and remedy as one sentence.
    pub(super) fn to_hint(&self) -> String {
        format!("{}: {}", self.title, self.remedy)
    }
}

/// Returns the problems of this instance, those that affect most requests first.
pub(super) fn find_problems(view: &AdminBackend, status: &ProcessStatus) -> Vec<Problem> {
    let mut problems = Vec::new();
    problems.extend(find_store_problem(&status.store));
    let rejections = &view.metrics.top_rejections;
    let app_errors = rejections.ranking(RejectionDimension::AppErrors, None, MAX_NAMED_PATHS);
    let paths: Vec<&str> = app_errors
        .entries
        .iter()
        .map(|entry| entry.text.as_str())
        .collect();
    let recent = RecentTraffic::read(view);
    problems.extend(find_traffic_problems(recent, &paths));
    if status.store.outage.is_none() && status.store.up {
        problems.extend(find_degraded_requests(recent));
    }
    problems.extend(find_configuration_problems(status));
    if view.metrics.untrusted_forwarding_count() > 0 {
        problems.push(Problem::warning(
            "untrusted_forwarding",
            "a peer that is not in client.trusted_proxies sends forwarding headers",
            "if it is your ingress, all clients behind it share one quota until you list it, e.g. [client] \
             trusted_proxies = [\"10.0.0.0/8\"]; the log and the dashboard say which peer",
        ));
    }
    problems.extend(status.redis.iter().flat_map(find_redis_problems));
    problems
}

/// The outage of Redis, if there is one. Other stores are always up.
fn find_store_problem(store: &StoreStatus) -> Option<Problem> {
    let address = &store.address;
    let Some(outage) = &store.outage else {
        let title =
            format!("the store is unavailable: Redis at {address} has not been reached yet");
        let remedy = "policies decide by on_store_failure until then";
        return (!store.up).then(|| Problem::error("store", title, remedy));
    };
    let title = format!(
        "the store is unavailable: Redis at {address} for {} s ({}: {})",
        outage.lasts_s, outage.kind, outage.reason
    );
    let mut remedy = format!("{}; until it is back, ", outage.remedy);
    let effects = [
        ("requests get 503 by", &outage.closed),
        ("this process counts alone for", &outage.local),
        ("nothing is limited by", &outage.open),
    ];
    for (effect, policies) in effects.iter().filter(|(_, policies)| !policies.is_empty()) {
        let named = policies.iter().take(MAX_NAMED_POLICIES).map(String::as_str);
        let named = named.collect::<Vec<_>>().join(", ");
        let more = policies.len().saturating_sub(MAX_NAMED_POLICIES);
        let more = (more > 0).then(|| format!(" and {more} more"));
        remedy.push_str(&format!("{effect} {named}{}; ", more.unwrap_or_default()));
    }
    let remedy = remedy
        .trim_end_matches("until it is back, ")
        .trim_end_matches("; ")
        .to_owned();
    Some(Problem::error("store", title, remedy))
}

/// Requests that the proxy decided without the store although it is up. For example, their counters
/// are in two hash slots of a cluster, which is configured as one server.
fn find_degraded_requests(recent: RecentTraffic) -> Option<Problem> {
    let RecentTraffic {
        requests, degraded, ..
    } = recent;
    let title = format!(
        "{degraded} of the {requests} requests of the last minute were decided without the store, which is up now"
    );
    let remedy = "if this goes on, `tidegate doctor` names the cause; tidegate_store_errors_total counts errors by kind";
    (degraded >= DEGRADED_MIN_REQUESTS).then(|| Problem::warning("degraded", title, remedy))
}

/// `app_error_paths` are the paths with the most errors of the app.
fn find_traffic_problems(recent: RecentTraffic, app_error_paths: &[&str]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let RecentTraffic {
        requests,
        refused,
        forwarded,
        failed,
        app_errors,
        ..
    } = recent;
    let is_frequent = |errors| {
        forwarded >= UPSTREAM_ERRORS_MIN_REQUESTS
            && percent(errors, forwarded) >= UPSTREAM_ERRORS_MIN_PERCENT
    };
    if is_frequent(failed) {
        problems.push(Problem::error(
            "upstream_errors",
            format!(
                "the upstream fails: {} % of the forwarded requests of the last minute ({failed} of {forwarded}) got no \
                 response",
                percent(failed, forwarded)
            ),
            "check the app and upstream.url; the log (\"requests are not forwarded\") and \
             tidegate_upstream_errors_total name the cause",
        ));
    }
    if is_frequent(app_errors) {
        problems.push(Problem::error(
            "app_errors",
            format!(
                "the app at the upstream fails: {} % of the forwarded requests of the last minute ({app_errors} of {forwarded}) \
                 got a status from 500 on from the app itself",
                percent(app_errors, forwarded)
            ),
            format!(
                "the connection works: look at the log of the app; most errors: {}",
                app_error_paths.join(", ")
            ),
        ));
    }
    if requests >= REFUSALS_MIN_REQUESTS && percent(refused, requests) >= REFUSALS_MIN_PERCENT {
        problems.push(Problem::warning(
            "refusals",
            format!(
                "{} % of the requests of the last minute were refused ({refused} of {requests})",
                percent(refused, requests)
            ),
            "unless this is an attack, a limit is too low or many clients share one key; the list of the keys \
             refused most says which",
        ));
    }
    problems
}

fn find_configuration_problems(status: &ProcessStatus) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !status.last_reload.errors.is_empty() {
        problems.push(Problem::error(
            "reload",
            "the newest configuration is invalid",
            "the last valid one is in effect",
        ));
    }
    if !status.last_reload.pending_restart.is_empty() {
        problems.push(Problem::warning(
            "restart",
            "changed settings wait for a restart",
            format!(
                "the running values stay in effect until then: {}",
                status.last_reload.pending_restart.join(", ")
            ),
        ));
    }
    if status.policy_count == 0 {
        problems.push(Problem::warning(
            "no_policies",
            "no policies are in effect",
            "every request passes; add a [[policy]], or correct include if your policies are in other files",
        ));
    }
    problems
}

fn find_redis_problems(redis: &RedisServerMetrics) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let (Some(used), Some(max)) = (redis.memory_bytes, redis.memory_max_bytes)
        && percent(used, max) >= REDIS_MEMORY_PERCENT
    {
        problems.push(Problem::warning(
            "redis_memory",
            format!("Redis uses {} % of its maxmemory", percent(used, max)),
            "a full Redis refuses new counters (oom) or evicts them; raise maxmemory, or find what fills it",
        ));
    }
    if redis.may_evict == Some(true) {
        problems.push(Problem::warning(
            "redis_eviction",
            "Redis may evict counters",
            "each eviction admits more than the limits; set maxmemory-policy noeviction",
        ));
    }
    if let Some(skew_us) = redis
        .clock_skew_us
        .filter(|skew_us| skew_us.unsigned_abs() > MAX_CLOCK_SKEW_US)
    {
        problems.push(Problem::warning(
            "clock_skew",
            format!(
                "the clocks of this machine and of Redis differ by {} s",
                skew_us.unsigned_abs() / 1_000_000
            ),
            "without Redis, fixed windows follow the clock of this machine; synchronize both clocks",
        ));
    }
    problems
}

impl RecentTraffic {
    fn read(view: &AdminBackend) -> Self {
        let (_, seconds) = view.history.last_seconds(TRAFFIC_WINDOW_S + 1);
        let labels = view.metrics.labels.request_decisions;
        let sum = |names: &[&str]| -> u64 {
            let columns = labels
                .iter()
                .enumerate()
                .filter(|(_, (label, _))| names.contains(label));
            columns
                .flat_map(|(at, _)| seconds.iter().filter_map(move |s| s.decisions.get(at)))
                .map(|count| u64::from(*count))
                .sum()
        };
        let (degraded, degraded_refused) = (sum(&["degraded"]), sum(&["degraded_refused"]));
        let refused = sum(&REFUSED_SERIES).saturating_sub(degraded_refused);
        let admitted = sum(&["allowed", "delayed"]) + degraded;
        let forwarded = admitted.saturating_sub(degraded_refused);
        let [failed, app_errors] = seconds.iter().fold([0u64; 2], |[a, b], second| {
            let [failed, app_errors] = second.failures;
            [a + u64::from(failed), b + u64::from(app_errors)]
        });
        Self {
            requests: admitted + refused + sum(&["malformed"]),
            refused,
            degraded,
            forwarded,
            failed: failed.min(forwarded),
            app_errors: app_errors.min(forwarded),
        }
    }
}

/// A share in percent, rounded down.
fn percent(part: u64, all: u64) -> u64 {
    part.saturating_mul(100) / all.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(problems: &[Problem]) -> Vec<&str> {
        problems.iter().map(|problem| &*problem.id).collect()
    }

    fn traffic(requests: u64, refused: u64, failed: u64) -> Vec<Problem> {
        let recent = RecentTraffic {
            requests,
            refused,
            degraded: 0,
            forwarded: requests - refused,
            failed,
            app_errors: 0,
        };
        find_traffic_problems(recent, &[])
    }

    #[test]
    fn traffic_is_judged_by_share_and_only_from_a_minimum_of_requests() {
        assert_eq!(ids(&traffic(10, 0, 5)), ["upstream_errors"]);
        assert_eq!(ids(&traffic(10, 0, 4)), [""; 0]);
        assert_eq!(ids(&traffic(4, 0, 4)), [""; 0]);
        assert_eq!(ids(&traffic(100, 81, 0)), ["refusals"]);
        assert_eq!(ids(&traffic(100, 59, 0)), [""; 0]);
        assert_eq!(ids(&traffic(19, 19, 0)), [""; 0]);
        assert_eq!(ids(&traffic(100, 81, 19)), ["upstream_errors", "refusals"]);
        assert!(
            traffic(100, 81, 0)[0]
                .to_hint()
                .starts_with("81 % of the requests of the last minute were refused (81 of 100): ")
        );
    }

    #[test]
    fn redis_is_judged_by_memory_eviction_policy_and_clock() {
        let healthy = RedisServerMetrics {
            memory_bytes: Some(89),
            memory_max_bytes: Some(100),
            may_evict: Some(false),
            clock_skew_us: Some(-5_000_000),
            ..RedisServerMetrics::default()
        };
        assert_eq!(ids(&find_redis_problems(&healthy)), [""; 0]);
        assert_eq!(
            ids(&find_redis_problems(&RedisServerMetrics::default())),
            [""; 0]
        );
        let unhealthy = RedisServerMetrics {
            memory_bytes: Some(90),
            may_evict: Some(true),
            clock_skew_us: Some(-5_000_001),
            ..healthy
        };
        assert_eq!(
            ids(&find_redis_problems(&unhealthy)),
            ["redis_memory", "redis_eviction", "clock_skew"]
        );
    }
}
