//! The displayed data of the admin API responses.
//!
//! Missing or malformed fields are no error, so that the responses of an older or newer proxy can
//! be shown. All texts are escaped here, so that clients cannot send control characters to the
//! terminal.

use serde_json::Value;

/// Length of a policy's history in minutes.
pub(super) const HISTORY_MINUTES: usize = 60;

/// Counters of refused requests. `degraded_refused` is a part of `degraded`.
const REFUSED_COUNTERS: [&str; 6] = [
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
    "marked",
    "degraded_refused",
];
/// Counters that add up to all decisions of a policy.
const ALL_COUNTERS: [&str; 9] = [
    "allowed",
    "exempt",
    "delayed",
    "degraded",
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
    "marked",
];

/// The displayed data of the admin API at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct AdminApiSnapshot {
    pub(super) version: String,
    pub(super) instance: String,
    /// Host name, or an empty text.
    pub(super) host: String,
    pub(super) uptime_s: u64,
    pub(super) status: String,
    pub(super) generation: u64,
    /// Problems that need attention.
    pub(super) alerts: Vec<TopAlert>,
    /// Length of the window of `requests`, `refused` and `degraded`: a minute, or less soon after
    /// the start.
    pub(super) window_s: u64,
    pub(super) requests: u64,
    pub(super) refused: u64,
    pub(super) degraded: u64,
    /// Mean rate of requests over the last 5 s.
    pub(super) requests_per_s: f64,
    pub(super) store: String,
    pub(super) store_up: bool,
    pub(super) instances: Option<u64>,
    pub(super) connections: (u64, u64),
    pub(super) latency: Vec<TopLatencyEntry>,
    pub(super) policies: Vec<TopPolicyEntry>,
    /// Number of policies that were not fetched.
    pub(super) omitted_policies: u64,
    pub(super) keys: Vec<TopRankedEntry>,
    pub(super) paths: Vec<TopRankedEntry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TopAlert {
    pub(super) is_error: bool,
    pub(super) text: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TopLatencyEntry {
    pub(super) source: String,
    pub(super) count: u64,
    pub(super) p50_s: Option<f64>,
    pub(super) p99_s: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TopPolicyEntry {
    pub(super) name: String,
    /// `shadow`, `mark`, `off`, `deny`, `exempt`, or empty.
    pub(super) kind: &'static str,
    /// Number of passed requests since the start of the process.
    pub(super) passed: u64,
    pub(super) refused: u64,
    /// Passed and refused requests per second since the previous snapshot, if there was one.
    pub(super) rates_per_s: Option<(f64, f64)>,
    /// Number of passed requests in the last hour.
    pub(super) hour_passed: u64,
    pub(super) hour_refused: u64,
    /// All and refused requests by minute, oldest first.
    pub(super) minutes: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TopRankedEntry {
    pub(super) policy: String,
    pub(super) text: String,
    /// Number of refusals; the true number lies between `count - error` and `count`.
    pub(super) count: u64,
    pub(super) error: u64,
}

impl AdminApiSnapshot {
    /// Parses `{"overview", "policies", "top"}`. Rates are relative to `previous`, if that is an
    /// earlier snapshot of the same process.
    pub(super) fn from_json(response: &Value, previous: Option<&Self>) -> Self {
        let [overview, policies, top] = ["overview", "policies", "top"].map(|name| &response[name]);
        let instance = escaped_text_or_empty(value_or_null(overview, "/instance/id"));
        let uptime_s = number_or_zero(value_or_null(overview, "/instance/uptime_s"));
        let previous = previous
            .filter(|previous| previous.instance == instance && previous.uptime_s < uptime_s);
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let seconds = value_or_null(overview, "/requests/seconds");
        let outcome_counters = [
            "allowed",
            "delayed",
            "rejected",
            "blocked",
            "denied",
            "degraded",
            "malformed",
        ];
        // The window excludes the last second, which is incomplete.
        let window = list(value_or_null(seconds, "/at")).len().saturating_sub(1);
        let sum_counters = |names: &[&str], last: usize| -> u64 {
            names
                .iter()
                .map(|name| sum_last_complete_values(seconds[*name].as_array(), window, last))
                .sum()
        };
        let recent_s = window.clamp(1, 5);
        let store = value_or_null(overview, "/store");
        let policy_entries = list(value_or_null(policies, "/policies"));
        let parsed_policies: Vec<_> = policy_entries
            .iter()
            .map(|entry| parse_policy(entry, previous, uptime_s))
            .collect();
        let parse_ranking = |text_key: &str, entries: &str| -> Vec<TopRankedEntry> {
            list(value_or_null(top, entries))
                .iter()
                .map(|entry| parse_ranked_entry(entry, text_key, &parsed_policies))
                .collect()
        };
        let latency = value_or_null(overview, "/latency/decisions")
            .as_object()
            .into_iter()
            .flatten();
        Self {
            version: escaped_text_or_empty(value_or_null(overview, "/instance/version")),
            host: escaped_text_or_empty(value_or_null(overview, "/instance/host")),
            status: escaped_text_or_empty(value_or_null(overview, "/status")),
            generation: number_or_zero(value_or_null(overview, "/generation")),
            alerts: collect_alerts(overview),
            window_s: window as u64,
            requests: sum_counters(&outcome_counters, window),
            refused: sum_counters(
                &["rejected", "blocked", "denied", "degraded_refused"],
                window,
            ),
            degraded: sum_counters(&["degraded"], window),
            requests_per_s: sum_counters(&outcome_counters, recent_s) as f64 / recent_s as f64,
            store: describe_store(store),
            store_up: value_or_null(store, "/up") == true
                && value_or_null(store, "/breaker_open") != true,
            instances: value_or_null(store, "/instances").as_u64(),
            connections: (
                number_or_zero(value_or_null(overview, "/connections/open")),
                number_or_zero(value_or_null(overview, "/connections/max")),
            ),
            latency: latency
                .map(|(source, times)| parse_latency(source, times))
                .collect(),
            omitted_policies: number_or_zero(value_or_null(policies, "/total"))
                .saturating_sub(policy_entries.len() as u64),
            keys: parse_ranking("key", "/keys/entries"),
            paths: parse_ranking("path", "/paths/entries"),
            policies: parsed_policies,
            instance,
            uptime_s,
        }
    }
}

fn parse_policy(
    entry: &Value,
    previous: Option<&AdminApiSnapshot>,
    uptime_s: u64,
) -> TopPolicyEntry {
    let name = escaped_text_or_empty(value_or_null(entry, "/name"));
    let total = |names: &[&str]| {
        names
            .iter()
            .map(|name| number_or_zero(&entry[*name]))
            .sum::<u64>()
    };
    // Since-start totals of degraded decisions are counted by outcome in `degraded_by`.
    let degraded_by = value_or_null(entry, "/degraded_by");
    let refused = total(&REFUSED_COUNTERS)
        + number_or_zero(&degraded_by["closed"])
        + number_or_zero(&degraded_by["local_rejected"]);
    let passed = total(&ALL_COUNTERS).saturating_sub(refused);
    let rates = previous.and_then(|previous| {
        let earlier = previous
            .policies
            .iter()
            .find(|policy| policy.name == name)?;
        let elapsed_s = uptime_s.saturating_sub(previous.uptime_s) as f64;
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed_s;
        Some((
            per_s(passed, earlier.passed),
            per_s(refused, earlier.refused),
        ))
    });
    let hour = value_or_null(entry, "/last_hour");
    let in_minute = |names: &[&str], minute: usize| -> u64 {
        names
            .iter()
            .map(|name| number_or_zero(hour[*name].get(minute).unwrap_or(&Value::Null)))
            .sum()
    };
    let minutes: Vec<(u64, u64)> = (0..HISTORY_MINUTES)
        .map(|minute| {
            (
                in_minute(&ALL_COUNTERS, minute),
                in_minute(&REFUSED_COUNTERS, minute),
            )
        })
        .collect();
    let hour_refused: u64 = minutes.iter().map(|(_, refused)| refused).sum();
    let hour_all: u64 = minutes.iter().map(|(all, _)| all).sum();
    let kind = match (
        value_or_null(entry, "/mode").as_str(),
        value_or_null(entry, "/action").as_str(),
    ) {
        (Some("off"), _) => "off",
        (Some("shadow"), _) => "shadow",
        (Some("mark"), _) => "mark",
        (_, Some("deny")) => "deny",
        (_, Some("allow")) => "exempt",
        _ => "",
    };
    TopPolicyEntry {
        name,
        kind,
        passed,
        refused,
        rates_per_s: rates,
        hour_passed: hour_all.saturating_sub(hour_refused),
        hour_refused,
        minutes,
    }
}

/// Parses the entries of a ranking, of policies whose kind is unknown.
pub(super) fn parse_ranking(entries: &Value, text_key: &str) -> Vec<TopRankedEntry> {
    let entries = entries.as_array().into_iter().flatten();
    entries
        .map(|entry| parse_ranked_entry(entry, text_key, &[]))
        .collect()
}

fn parse_ranked_entry(
    entry: &Value,
    text_key: &str,
    policies: &[TopPolicyEntry],
) -> TopRankedEntry {
    let (mut policy, entry_text) = (
        escaped_text_or_empty(value_or_null(entry, "/policy")),
        escaped_text_or_empty(&entry[text_key]),
    );
    // The entry shows the mode of a policy that refuses no requests.
    let seen = policies.iter().find(|seen| seen.name == policy);
    if let Some(mode @ ("shadow" | "mark")) = seen.map(|seen| seen.kind) {
        policy.push_str(&format!(" ({mode})"));
    }
    // The policy's name at the start of a key is removed, because it has its own column.
    let entry_text = match (text_key, entry_text.split_once('/')) {
        ("key", Some((_, values))) => values.to_owned(),
        ("key", None) => "(no key)".to_owned(),
        _ => entry_text,
    };
    TopRankedEntry {
        policy,
        text: entry_text,
        count: number_or_zero(value_or_null(entry, "/count")),
        error: number_or_zero(value_or_null(entry, "/error")),
    }
}

fn collect_alerts(overview: &Value) -> Vec<TopAlert> {
    let texts = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .map(escaped_text_or_empty)
            .collect()
    };
    let peers = texts(value_or_null(overview, "/untrusted_peers"));
    let peers = (!peers.is_empty()).then(|| {
        format!(
            "forwarding headers from untrusted peers: {}",
            peers.join(", ")
        )
    });
    let errors = texts(value_or_null(overview, "/last_reload/errors"));
    // The problems are the hints with their levels, which older versions do not send.
    let is_error: Vec<bool> = value_or_null(overview, "/problems")
        .as_array()
        .into_iter()
        .flatten()
        .map(|problem| value_or_null(problem, "/level") != "warning")
        .collect();
    let hints = texts(value_or_null(overview, "/hints")).into_iter();
    let hints = hints.enumerate().map(|(at, text)| TopAlert {
        is_error: is_error.get(at).copied().unwrap_or(true),
        text,
    });
    let errors = errors.into_iter().map(|text| TopAlert {
        is_error: true,
        text,
    });
    let peers = peers.map(|text| TopAlert {
        is_error: false,
        text,
    });
    hints.chain(errors).chain(peers).collect()
}

fn describe_store(store: &Value) -> String {
    let location = [
        value_or_null(store, "/kind"),
        value_or_null(store, "/address"),
    ]
    .map(escaped_text_or_empty)
    .join(" ");
    let state = match (
        value_or_null(store, "/up").as_bool(),
        value_or_null(store, "/breaker_open").as_bool(),
    ) {
        (Some(true), Some(true)) => "breaker open",
        (Some(true), _) => "up",
        _ => "DOWN",
    };
    format!("{} {state}", location.trim_end())
}

fn parse_latency(source: &str, times: &Value) -> TopLatencyEntry {
    TopLatencyEntry {
        source: escape_text(source),
        count: number_or_zero(value_or_null(times, "/count")),
        p50_s: value_or_null(times, "/p50_s").as_f64(),
        p99_s: value_or_null(times, "/p99_s").as_f64(),
    }
}

/// Sums the last `last_count` complete values. Values after the first `complete_count` are
/// incomplete and ignored.
fn sum_last_complete_values(
    column: Option<&Vec<Value>>,
    complete_count: usize,
    last_count: usize,
) -> u64 {
    let column = column.map(Vec::as_slice).unwrap_or_default();
    column
        .iter()
        .take(complete_count)
        .skip(complete_count.saturating_sub(last_count))
        .map(number_or_zero)
        .sum()
}

/// Returns the value at a JSON pointer, or null.
pub(super) fn value_or_null<'v>(value: &'v Value, path: &str) -> &'v Value {
    value.pointer(path).unwrap_or(&Value::Null)
}

pub(super) fn number_or_zero(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

pub(super) fn escaped_text_or_empty(value: &Value) -> String {
    escape_text(value.as_str().unwrap_or_default())
}

/// Escapes all characters except printable ASCII. Each character of the result is one column wide,
/// and none controls the terminal.
fn escape_text(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            ' '..='~' => clean.push(letter),
            _ => clean.extend(letter.escape_default()),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn escapes_control_characters_in_all_texts() {
        let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\r\nü";
        let response = json!({
            "overview": {
                "instance": { "id": hostile, "version": hostile }, "status": hostile, "hints": [hostile], "untrusted_peers": [hostile],
                "last_reload": { "errors": [hostile] }, "store": { "kind": hostile, "address": hostile },
                "latency": { "decisions": { hostile: { "count": 1 } } },
            },
            "policies": { "policies": [{ "name": hostile }] },
            "top": { "keys": { "entries": [{ "policy": hostile, "key": hostile }] }, "paths": { "entries": [{ "policy": hostile, "path": hostile }] } },
        });
        let snapshot = format!("{:?}", AdminApiSnapshot::from_json(&response, None));
        assert!(
            snapshot.chars().all(|letter| (' '..='~').contains(&letter)),
            "{snapshot}"
        );
        assert_eq!(escape_text("\u{1b}[31mé"), "\\u{1b}[31m\\u{e9}");
    }

    #[test]
    fn rates_are_relative_to_the_previous_snapshot_of_the_same_process() {
        let response = |id: &str, uptime_s: u64, allowed: u64, rejected: u64| {
            json!({
                "overview": { "instance": { "id": id, "uptime_s": uptime_s } },
                "policies": { "policies": [{ "name": "p", "allowed": allowed, "rejected": rejected }] },
            })
        };
        let first = AdminApiSnapshot::from_json(&response("a", 10, 100, 4), None);
        assert_eq!(first.policies[0].rates_per_s, None);
        let rates = |value: &Value| {
            AdminApiSnapshot::from_json(value, Some(&first)).policies[0].rates_per_s
        };
        assert_eq!(rates(&response("a", 12, 120, 5)), Some((10.0, 0.5)));
        assert_eq!(
            rates(&response("a", 10, 120, 5)),
            None,
            "no time has passed"
        );
        assert_eq!(
            rates(&response("b", 12, 1, 0)),
            None,
            "the process has restarted"
        );
    }

    #[test]
    fn marks_ranked_entries_of_shadow_policies() {
        let ranked =
            |policy: &str| json!({ "policy": policy, "key": "p/ann", "path": "/a", "count": 1 });
        let response = json!({
            "policies": { "policies": [{ "name": "api" }, { "name": "candidate", "mode": "shadow" }] },
            "top": { "keys": { "entries": [ranked("candidate"), ranked("api")] }, "paths": { "entries": [ranked("candidate")] } },
        });
        let snapshot = AdminApiSnapshot::from_json(&response, None);
        let policies: Vec<_> = snapshot
            .keys
            .iter()
            .chain(&snapshot.paths)
            .map(|ranked| ranked.policy.as_str())
            .collect();
        assert_eq!(
            policies,
            ["candidate (shadow)", "api", "candidate (shadow)"]
        );
    }

    #[test]
    fn accepts_missing_and_malformed_fields() {
        for odd in [
            json!(null),
            json!([]),
            json!({ "overview": 3, "policies": { "policies": [1, null] } }),
        ] {
            let snapshot = AdminApiSnapshot::from_json(&odd, None);
            assert_eq!((snapshot.requests, snapshot.store.as_str()), (0, " DOWN"));
        }
    }
}
