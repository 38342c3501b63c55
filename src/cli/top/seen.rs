//! What the admin port told, as far as it is shown. Nothing that is missing or odd is an error: an older or newer
//! proxy is shown as well as it goes. Every text is made harmless here, so nothing after this can write what a client
//! chose to a terminal.

use serde_json::Value;

/// Of one policy, by the minute.
pub(super) const MINUTES: usize = 60;

/// The last is a part of what is degraded.
const REFUSED: [&str; 5] = [
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
    "degraded_refused",
];
const ALL: [&str; 8] = [
    "allowed",
    "exempt",
    "delayed",
    "degraded",
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
];

/// One look.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) version: String,
    pub(super) instance: String,
    pub(super) uptime_s: u64,
    pub(super) status: String,
    pub(super) generation: u64,
    /// What somebody should look at.
    pub(super) alerts: Vec<String>,
    /// Of all requests in the last minute, or less right after the start.
    pub(super) window_s: u64,
    pub(super) requests: u64,
    pub(super) refused: u64,
    pub(super) degraded: u64,
    /// Requests per second: of the last seconds.
    pub(super) rate: f64,
    pub(super) store: String,
    pub(super) store_up: bool,
    pub(super) instances: Option<u64>,
    pub(super) connections: (u64, u64),
    pub(super) latency: Vec<Times>,
    pub(super) policies: Vec<Policy>,
    /// There are more that were not asked for.
    pub(super) more_policies: u64,
    pub(super) keys: Vec<Ranked>,
    pub(super) paths: Vec<Ranked>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Times {
    pub(super) source: String,
    pub(super) count: u64,
    pub(super) p50_s: Option<f64>,
    pub(super) p99_s: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Policy {
    pub(super) name: String,
    /// `shadow`, `off`, `deny`, `exempt`, or empty.
    pub(super) kind: &'static str,
    /// Since the start.
    pub(super) passed: u64,
    pub(super) refused: u64,
    /// Per second since the look before, if there was one.
    pub(super) rates: Option<(f64, f64)>,
    /// In the last hour.
    pub(super) hour_passed: u64,
    pub(super) hour_refused: u64,
    /// By minute, oldest first: all, and refused.
    pub(super) minutes: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranked {
    pub(super) policy: String,
    pub(super) text: String,
    /// So often, or less by at most `error`.
    pub(super) count: u64,
    pub(super) error: u64,
}

impl Seen {
    /// `before` is an earlier look at the same process: rates are since then.
    pub(super) fn of(told: &Value, before: Option<&Self>) -> Self {
        let [overview, policies, top] = ["overview", "policies", "top"].map(|name| &told[name]);
        let instance = text(at(overview, "/instance/id"));
        let uptime_s = number(at(overview, "/instance/uptime_s"));
        let before =
            before.filter(|before| before.instance == instance && before.uptime_s < uptime_s);
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let seconds = at(overview, "/requests/seconds");
        let answers = [
            "allowed",
            "delayed",
            "rejected",
            "blocked",
            "denied",
            "degraded",
            "malformed",
        ];
        // The last second is not over yet.
        let window = list(at(seconds, "/at")).len().saturating_sub(1);
        let of = |names: &[&str], last: usize| -> u64 {
            names
                .iter()
                .map(|name| sum(seconds[*name].as_array(), window, last))
                .sum()
        };
        let lately = window.clamp(1, 5);
        let store = at(overview, "/store");
        let policies_told = list(at(policies, "/policies"));
        let policies_seen: Vec<_> = policies_told
            .iter()
            .map(|told| policy(told, before, uptime_s))
            .collect();
        let most = |what: &str, entries: &str| -> Vec<Ranked> {
            list(at(top, entries))
                .iter()
                .map(|entry| ranked(entry, what, &policies_seen))
                .collect()
        };
        let latency = at(overview, "/latency/decisions")
            .as_object()
            .into_iter()
            .flatten();
        Self {
            version: text(at(overview, "/instance/version")),
            status: text(at(overview, "/status")),
            generation: number(at(overview, "/generation")),
            alerts: alerts(overview),
            window_s: window as u64,
            requests: of(&answers, window),
            refused: of(
                &["rejected", "blocked", "denied", "degraded_refused"],
                window,
            ),
            degraded: of(&["degraded"], window),
            rate: of(&answers, lately) as f64 / lately as f64,
            store: store_words(store),
            store_up: at(store, "/up") == true && at(store, "/breaker_open") != true,
            instances: at(store, "/instances").as_u64(),
            connections: (
                number(at(overview, "/connections/open")),
                number(at(overview, "/connections/max")),
            ),
            latency: latency
                .map(|(source, times)| times_of(source, times))
                .collect(),
            more_policies: number(at(policies, "/total"))
                .saturating_sub(policies_told.len() as u64),
            keys: most("key", "/keys/entries"),
            paths: most("path", "/paths/entries"),
            policies: policies_seen,
            instance,
            uptime_s,
        }
    }
}

fn policy(told: &Value, before: Option<&Seen>, uptime_s: u64) -> Policy {
    let name = text(at(told, "/name"));
    let total = |names: &[&str]| names.iter().map(|name| number(&told[*name])).sum::<u64>();
    // What came of those that were decided without the store since the start stands by its outcome.
    let alone = at(told, "/degraded_by");
    let refused = total(&REFUSED) + number(&alone["closed"]) + number(&alone["local_rejected"]);
    let passed = total(&ALL).saturating_sub(refused);
    let rates = before.and_then(|before| {
        let then = before.policies.iter().find(|policy| policy.name == name)?;
        let past_s = uptime_s.saturating_sub(before.uptime_s) as f64;
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / past_s;
        Some((per_s(passed, then.passed), per_s(refused, then.refused)))
    });
    let hour = at(told, "/last_hour");
    let in_minute = |names: &[&str], minute: usize| -> u64 {
        names
            .iter()
            .map(|name| number(hour[*name].get(minute).unwrap_or(&Value::Null)))
            .sum()
    };
    let minutes: Vec<(u64, u64)> = (0..MINUTES)
        .map(|minute| (in_minute(&ALL, minute), in_minute(&REFUSED, minute)))
        .collect();
    let hour_refused: u64 = minutes.iter().map(|(_, refused)| refused).sum();
    let hour_all: u64 = minutes.iter().map(|(all, _)| all).sum();
    let kind = match (at(told, "/mode").as_str(), at(told, "/action").as_str()) {
        (Some("off"), _) => "off",
        (Some("shadow"), _) => "shadow",
        (_, Some("deny")) => "deny",
        (_, Some("allow")) => "exempt",
        _ => "",
    };
    Policy {
        name,
        kind,
        passed,
        refused,
        rates,
        hour_passed: hour_all.saturating_sub(hour_refused),
        hour_refused,
        minutes,
    }
}

fn ranked(entry: &Value, what: &str, policies: &[Policy]) -> Ranked {
    let (mut policy, written) = (text(at(entry, "/policy")), text(&entry[what]));
    // Nobody was refused by it yet.
    if policies
        .iter()
        .any(|seen| seen.name == policy && seen.kind == "shadow")
    {
        policy.push_str(" (shadow)");
    }
    // A key begins with its policy's name, which has a column of its own.
    let written = match (what, written.split_once('/')) {
        ("key", Some((_, values))) => values.to_owned(),
        ("key", None) => "(one for all)".to_owned(),
        _ => written,
    };
    Ranked {
        policy,
        text: written,
        count: number(at(entry, "/count")),
        error: number(at(entry, "/error")),
    }
}

fn alerts(overview: &Value) -> Vec<String> {
    let each = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(text).collect()
    };
    let peers = each(at(overview, "/untrusted_peers"));
    let peers = (!peers.is_empty())
        .then(|| format!("not trusted, and names clients: {}", peers.join(", ")));
    let breaker = (at(overview, "/store/breaker_open") == true)
        .then(|| "the breaker is open: requests don't ask the store".to_owned());
    let errors = each(at(overview, "/last_reload/errors"));
    each(at(overview, "/hints"))
        .into_iter()
        .chain(breaker)
        .chain(errors)
        .chain(peers)
        .collect()
}

fn store_words(store: &Value) -> String {
    let place = [at(store, "/kind"), at(store, "/address")]
        .map(text)
        .join(" ");
    let state = match (
        at(store, "/up").as_bool(),
        at(store, "/breaker_open").as_bool(),
    ) {
        (Some(true), Some(true)) => "breaker open",
        (Some(true), _) => "up",
        _ => "AWAY",
    };
    format!("{} {state}", place.trim_end())
}

fn times_of(source: &str, times: &Value) -> Times {
    Times {
        source: clean(source),
        count: number(at(times, "/count")),
        p50_s: at(times, "/p50_s").as_f64(),
        p99_s: at(times, "/p99_s").as_f64(),
    }
}

/// The last `last` of the first `of`.
fn sum(column: Option<&Vec<Value>>, of: usize, last: usize) -> u64 {
    let column = column.map(Vec::as_slice).unwrap_or_default();
    column
        .iter()
        .take(of)
        .skip(of.saturating_sub(last))
        .map(number)
        .sum()
}

/// Null where there is none.
fn at<'v>(told: &'v Value, path: &str) -> &'v Value {
    told.pointer(path).unwrap_or(&Value::Null)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn text(value: &Value) -> String {
    clean(value.as_str().unwrap_or_default())
}

/// Printable ASCII only: each letter is one column wide, and none is an order to a terminal.
fn clean(text: &str) -> String {
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
    fn nothing_that_is_told_can_give_orders_to_a_terminal() {
        let evil = "\u{1b}[2J\u{9b}31m\u{202e}\r\nü";
        let told = json!({
            "overview": {
                "instance": { "id": evil, "version": evil }, "status": evil, "hints": [evil], "untrusted_peers": [evil],
                "last_reload": { "errors": [evil] }, "store": { "kind": evil, "address": evil },
                "latency": { "decisions": { evil: { "count": 1 } } },
            },
            "policies": { "policies": [{ "name": evil }] },
            "top": { "keys": { "entries": [{ "policy": evil, "key": evil }] }, "paths": { "entries": [{ "policy": evil, "path": evil }] } },
        });
        let seen = format!("{:?}", Seen::of(&told, None));
        assert!(
            seen.chars().all(|letter| (' '..='~').contains(&letter)),
            "{seen}"
        );
        assert_eq!(clean("\u{1b}[31mé"), "\\u{1b}[31m\\u{e9}");
    }

    #[test]
    fn rates_are_since_the_look_before_at_the_same_process() {
        let told = |id: &str, uptime_s: u64, allowed: u64, rejected: u64| {
            json!({
                "overview": { "instance": { "id": id, "uptime_s": uptime_s } },
                "policies": { "policies": [{ "name": "p", "allowed": allowed, "rejected": rejected }] },
            })
        };
        let first = Seen::of(&told("a", 10, 100, 4), None);
        assert_eq!(first.policies[0].rates, None);
        let rates = |value: &Value| Seen::of(value, Some(&first)).policies[0].rates;
        assert_eq!(rates(&told("a", 12, 120, 5)), Some((10.0, 0.5)));
        assert_eq!(rates(&told("a", 10, 120, 5)), None, "no time has passed");
        assert_eq!(rates(&told("b", 12, 1, 0)), None, "it was started anew");
    }

    #[test]
    fn who_would_have_been_refused_by_a_shadow_policy_is_told_apart() {
        let ranked =
            |policy: &str| json!({ "policy": policy, "key": "p/ann", "path": "/a", "count": 1 });
        let told = json!({
            "policies": { "policies": [{ "name": "api" }, { "name": "candidate", "mode": "shadow" }] },
            "top": { "keys": { "entries": [ranked("candidate"), ranked("api")] }, "paths": { "entries": [ranked("candidate")] } },
        });
        let seen = Seen::of(&told, None);
        let policies: Vec<_> = seen
            .keys
            .iter()
            .chain(&seen.paths)
            .map(|ranked| ranked.policy.as_str())
            .collect();
        assert_eq!(
            policies,
            ["candidate (shadow)", "api", "candidate (shadow)"]
        );
    }

    #[test]
    fn what_is_missing_or_odd_is_no_error() {
        for odd in [
            json!(null),
            json!([]),
            json!({ "overview": 3, "policies": { "policies": [1, null] } }),
        ] {
            let seen = Seen::of(&odd, None);
            assert_eq!((seen.requests, seen.store.as_str()), (0, " AWAY"));
        }
    }
}
