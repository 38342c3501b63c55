//! The displayed data of the admin API responses.
//!
//! All texts of a response are escaped, so that clients cannot send control characters to the
//! terminal.

use crate::admin::{REFUSED_REQUEST_COUNTERS, REFUSED_SERIES};
use crate::telemetry::top_rejections::{RejectedText, RejectionRanking};
use serde::Deserialize;
use serde_json::Value;

/// Length of a policy's history in minutes.
pub(super) const HISTORY_MINUTES: usize = 60;

/// Counters of the requests of one second, which add up to all requests.
const REQUEST_COUNTERS: [&str; 7] = [
    "allowed",
    "delayed",
    "rejected",
    "blocked",
    "denied",
    "degraded",
    "malformed",
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
    /// Length of the window of the following counts: a minute, or less soon after the start.
    pub(super) window_s: u64,
    pub(super) requests: u64,
    pub(super) refused: u64,
    /// Requests decided without the store: the admitted and the refused ones.
    pub(super) without_store: [u64; 2],
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
        let [process, requests, latency, store, connections] =
            ["instance", "requests", "latency", "store", "connections"].map(|name| &overview[name]);
        let instance = to_text(&process["id"]).to_owned();
        let uptime_s = to_number(&process["uptime_s"]);
        let previous = previous
            .filter(|previous| previous.instance == instance && previous.uptime_s < uptime_s);
        let seconds = &requests["seconds"];
        // The window excludes the last second, which is incomplete.
        let window = to_list(&seconds["at"]).len().saturating_sub(1);
        let sum_counters = |names: &[&str], last: usize| -> u64 {
            names
                .iter()
                .map(|name| sum_last_complete_values(to_list(&seconds[*name]), window, last))
                .sum()
        };
        // A part of `degraded`.
        let degraded_refused = sum_counters(&["degraded_refused"], window);
        let recent_s = window.clamp(1, 5);
        let entries = to_list(&policies["policies"]);
        let parsed_policies: Vec<_> = entries
            .iter()
            .map(|entry| parse_policy(entry, previous, uptime_s))
            .collect();
        let list_ranking = |name: &str| {
            let ranking = RejectionRanking::deserialize(&top[name]).unwrap_or_default();
            list_refused(&ranking, &parsed_policies)
        };
        Self {
            version: to_text(&process["version"]).to_owned(),
            host: to_text(&process["host"]).to_owned(),
            status: to_text(&overview["status"]).to_owned(),
            generation: to_number(&overview["generation"]),
            alerts: collect_alerts(overview),
            window_s: window as u64,
            requests: sum_counters(&REQUEST_COUNTERS, window),
            refused: sum_counters(&REFUSED_REQUEST_COUNTERS, window),
            without_store: [
                sum_counters(&["degraded"], window).saturating_sub(degraded_refused),
                degraded_refused,
            ],
            requests_per_s: sum_counters(&REQUEST_COUNTERS, recent_s) as f64 / recent_s as f64,
            store: describe_store(overview),
            store_up: store["up"] == true && store["breaker_open"] != true,
            instances: store["instances"].as_u64(),
            connections: (
                to_number(&connections["open"]),
                to_number(&connections["max"]),
            ),
            latency: latency["decisions"]
                .as_object()
                .into_iter()
                .flatten()
                .map(parse_latency)
                .collect(),
            omitted_policies: to_number(&policies["total"]).saturating_sub(entries.len() as u64),
            keys: list_ranking("keys"),
            paths: list_ranking("paths"),
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
    let name = to_text(&entry["name"]).to_owned();
    let total = |names: &[&str]| -> u64 { names.iter().map(|name| to_number(&entry[*name])).sum() };
    // Since-start totals of degraded decisions are counted by outcome in `degraded_by`.
    let degraded = &entry["degraded_by"];
    let degraded_refused =
        ["closed", "local_rejected"].map(|outcome| to_number(&degraded[outcome]));
    let refused = total(&REFUSED_SERIES) + degraded_refused.iter().sum::<u64>();
    let passed = total(&ALL_COUNTERS).saturating_sub(refused);
    let rates_per_s = previous.and_then(|previous| {
        let mut policies = previous.policies.iter();
        let earlier = policies.find(|policy| policy.name == name)?;
        let elapsed_s = uptime_s.saturating_sub(previous.uptime_s) as f64;
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed_s;
        Some((
            per_s(passed, earlier.passed),
            per_s(refused, earlier.refused),
        ))
    });
    let hour = &entry["last_hour"];
    let in_minute = |names: &[&str], minute: usize| -> u64 {
        let counts = names.iter().filter_map(|name| hour[*name].get(minute));
        counts.map(to_number).sum()
    };
    let minutes: Vec<(u64, u64)> = (0..HISTORY_MINUTES)
        .map(|minute| {
            (
                in_minute(&ALL_COUNTERS, minute),
                in_minute(&REFUSED_SERIES, minute),
            )
        })
        .collect();
    let hour_refused: u64 = minutes.iter().map(|(_, refused)| refused).sum();
    let hour_all: u64 = minutes.iter().map(|(all, _)| all).sum();
    let kind = match (to_text(&entry["mode"]), to_text(&entry["action"])) {
        ("off", _) => "off",
        ("shadow", _) => "shadow",
        ("mark", _) => "mark",
        (_, "deny") => "deny",
        (_, "allow") => "exempt",
        _ => "",
    };
    TopPolicyEntry {
        name,
        kind,
        passed,
        refused,
        rates_per_s,
        hour_passed: hour_all.saturating_sub(hour_refused),
        hour_refused,
        minutes,
    }
}

/// The entries of a ranking as they are shown. An entry shows the mode of a policy that refuses no
/// requests, if it is one of `policies`.
pub(super) fn list_refused(
    ranking: &RejectionRanking,
    policies: &[TopPolicyEntry],
) -> Vec<TopRankedEntry> {
    let entries = ranking.entries.iter().map(|entry| {
        let seen = policies.iter().find(|seen| seen.name == entry.policy);
        let policy = match seen.map(|seen| seen.kind) {
            Some(mode @ ("shadow" | "mark")) => format!("{} ({mode})", entry.policy),
            _ => entry.policy.clone(),
        };
        // The policy's name at the start of a key is removed, because it has its own column.
        let text = match &entry.text {
            RejectedText::Path(path) => path,
            RejectedText::Key(key) => key.split_once('/').map_or("(no key)", |(_, values)| values),
        };
        TopRankedEntry {
            policy,
            text: text.to_owned(),
            count: entry.count,
            error: entry.error,
        }
    });
    entries.collect()
}

fn collect_alerts(overview: &Value) -> Vec<TopAlert> {
    let texts = |list| to_list(list).iter().map(|text| to_text(text).to_owned());
    // The problems are the hints with their levels, which older versions do not send.
    let problems = to_list(&overview["problems"]);
    let is_error = |at: usize| {
        let problem = problems.get(at);
        problem.is_none_or(|problem| to_text(&problem["level"]) != "warning")
    };
    let hints = texts(&overview["hints"]).enumerate();
    let hints = hints.map(|(at, text)| (is_error(at), text));
    let reload = &overview["last_reload"];
    let errors = texts(&reload["errors"]).map(|text| (true, text));
    let peers = texts(&overview["untrusted_peers"])
        .collect::<Vec<_>>()
        .join(", ");
    let peers = (!peers.is_empty()).then(|| {
        (
            false,
            format!("forwarding headers from untrusted peers: {peers}"),
        )
    });
    let alerts = hints.chain(errors).chain(peers);
    alerts
        .map(|(is_error, text)| TopAlert { is_error, text })
        .collect()
}

fn describe_store(overview: &Value) -> String {
    let store = &overview["store"];
    let location = ["kind", "address"].map(|part| to_text(&store[part]));
    let state = match (store["up"] == true, store["breaker_open"] == true) {
        (true, true) => "breaker open",
        (true, false) => "up",
        (false, _) => "DOWN",
    };
    format!("{} {state}", location.join(" ").trim_end())
}

fn parse_latency((source, times): (&String, &Value)) -> TopLatencyEntry {
    TopLatencyEntry {
        source: source.clone(),
        count: to_number(&times["count"]),
        p50_s: times["p50_s"].as_f64(),
        p99_s: times["p99_s"].as_f64(),
    }
}

/// Sums the last `last_count` complete values. Values after the first `complete_count` are
/// incomplete and ignored.
fn sum_last_complete_values(column: &[Value], complete_count: usize, last_count: usize) -> u64 {
    column
        .iter()
        .take(complete_count)
        .skip(complete_count.saturating_sub(last_count))
        .map(to_number)
        .sum()
}

// A missing or malformed field is no error, so that an older or newer proxy can be shown.

fn to_number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn to_text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn to_list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Escapes all texts of a response.
pub(super) fn escape_texts(value: &mut Value) {
    match value {
        Value::String(text) => *text = escape_text(text),
        Value::Array(values) => values.iter_mut().for_each(escape_texts),
        Value::Object(fields) => {
            let escape = |(name, mut value): (String, Value)| {
                escape_texts(&mut value);
                (escape_text(&name), value)
            };
            *fields = std::mem::take(fields).into_iter().map(escape).collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
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
        let mut response = json!({
            "overview": {
                "instance": { "id": hostile, "version": hostile }, "status": hostile, "hints": [hostile], "untrusted_peers": [hostile],
                "last_reload": { "errors": [hostile] }, "store": { "kind": hostile, "address": hostile },
                "latency": { "decisions": { hostile: { "count": 1 } } },
            },
            "policies": { "policies": [{ "name": hostile }] },
            "top": { "keys": { "entries": [{ "policy": hostile, "key": hostile }] }, "paths": { "entries": [{ "policy": hostile, "path": hostile }] } },
        });
        escape_texts(&mut response);
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
