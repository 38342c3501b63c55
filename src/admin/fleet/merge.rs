//! Adds up the summaries of all instances.
//!
//! Summaries come from other processes, possibly of other versions: a missing or malformed field
//! counts as absent, and every text is bounded by the size of a summary.

use super::summary::MAX_SUMMARY_ENTRIES;
use crate::admin::{AdminBackend, FleetInstance};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;

/// An instance, and its answer.
#[derive(Debug)]
pub(super) struct AskedInstance {
    instance: FleetInstance,
    answer: Result<InstanceAnswer, String>,
}

/// The answers of all instances, not yet merged.
#[derive(Debug)]
pub(super) struct FleetAnswers {
    pub(super) instances: Vec<AskedInstance>,
    /// The number of instances, of which not all may be listed.
    pub(super) total: usize,
    /// Why the heartbeats could not be read.
    pub(super) problem: Option<String>,
}

#[derive(Debug)]
enum InstanceAnswer {
    /// The summary of this process.
    Own(Value),
    /// A response body, not yet parsed.
    Body(Bytes),
}

/// A ranking of the fleet. The text of an entry is a key or a path.
#[derive(Debug, Default)]
struct RankingSum {
    /// By policy and text.
    entries: HashMap<(String, String), RankedSum>,
    refused: u64,
    unseen: u64,
    since_s: Option<u64>,
}

/// One ranked key or path of the fleet.
#[derive(Debug, Default)]
struct RankedSum {
    count: u64,
    error: u64,
    /// Sum of `unseen_at_most` over the instances that list the entry.
    seen_bounds: u64,
}

impl AskedInstance {
    pub(super) fn from_own_summary(instance: FleetInstance, summary: Value) -> Self {
        Self {
            instance,
            answer: Ok(InstanceAnswer::Own(summary)),
        }
    }

    pub(super) fn from_answer(instance: FleetInstance, answer: Result<Bytes, String>) -> Self {
        Self {
            instance,
            answer: answer.map(InstanceAnswer::Body),
        }
    }

    /// Parses the answer. `own_host` is the host of this process.
    fn read_summary(&self, own_host: &str) -> Result<Value, String> {
        self.parse_answer().map_err(|reason| {
            let address = self.instance.admin_address.as_deref().unwrap_or_default();
            match is_loopback(address) && self.instance.name.as_deref() != Some(own_host) {
                true => format!("{reason} (its address is loopback: see admin.advertise)"),
                false => reason,
            }
        })
    }

    fn parse_answer(&self) -> Result<Value, String> {
        let summary = match &self.answer {
            Ok(InstanceAnswer::Own(summary)) => return Ok(summary.clone()),
            Ok(InstanceAnswer::Body(body)) => serde_json::from_slice::<Value>(body)
                .map_err(|_invalid| "its answer is not a summary".to_owned())?,
            Err(reason) => return Err(reason.clone()),
        };
        // Another process may have the address by now.
        if summary.get("id").and_then(Value::as_str) == Some(self.instance.id.as_str()) {
            Ok(summary)
        } else {
            Err("another instance answered at its address".to_owned())
        }
    }
}

fn is_loopback(address: &str) -> bool {
    let ip = address.parse::<SocketAddr>().map(|address| address.ip());
    ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Builds the body of `GET /fleet`, with rankings of [`MAX_SUMMARY_ENTRIES`].
pub(super) fn build_fleet_view(view: &AdminBackend, answers: &FleetAnswers) -> Value {
    let FleetAnswers {
        instances: asked,
        total,
        problem,
    } = answers;
    let (mut keys, mut paths) = (RankingSum::default(), RankingSum::default());
    let (mut answered, mut rate) = (0_usize, 0.0);
    // One summary is parsed at a time: as a tree it takes sixteen times its bytes.
    let mut read_instance = |one: &AskedInstance| {
        let summary = one.read_summary(&view.instance.host);
        if let Ok(summary) = &summary {
            answered += 1;
            rate += decisions_per_s(summary).unwrap_or_default();
            keys.add(summary.get("keys"), "key");
            paths.add(summary.get("paths"), "path");
        }
        instance_json(view, &one.instance, &summary, *total)
    };
    let instances: Vec<Value> = asked.iter().map(&mut read_instance).collect();
    json!({
        "store": view.instance.store,
        "shared": view.instance.store != "memory",
        "total": total,
        "listed": instances.len(),
        "answered": answered,
        "problem": problem,
        "decisions_per_s": rate,
        "instances": instances,
        "keys": keys.into_json("key"),
        "paths": paths.into_json("path"),
    })
}

fn decisions_per_s(summary: &Value) -> Option<f64> {
    summary.get("decisions_per_s")?.as_f64()
}

fn instance_json(
    view: &AdminBackend,
    instance: &FleetInstance,
    summary: &Result<Value, String>,
    total: usize,
) -> Value {
    let field = |name: &str| {
        let value = summary.as_ref().ok().and_then(|summary| summary.get(name));
        let value = value.filter(|value| !value.is_array() && !value.is_object());
        value.cloned().unwrap_or(Value::Null)
    };
    let counted = field("instances").as_u64();
    #[allow(clippy::cast_precision_loss, reason = "a count of instances is small")]
    let share = 1.0 / counted.unwrap_or(total as u64).max(1) as f64;
    let state = match field("status") {
        Value::String(status) => status,
        _ if instance.heartbeat_age.is_none() => "unknown".to_owned(),
        _ if instance.is_pending => "recovering".to_owned(),
        _ => "alive".to_owned(),
    };
    json!({
        "id": instance.id,
        "name": instance.name,
        "version": instance.version,
        "admin": instance.admin_address,
        "self": instance.id == view.instance.id,
        "heartbeat_age_s": instance.heartbeat_age.map(|age| age.as_secs_f64()),
        "state": state,
        "store": field("store"),
        "share": share,
        "decisions_per_s": field("decisions_per_s"),
        "uptime_s": field("uptime_s"),
        "generation": field("generation"),
        "config_hash": field("config_hash"),
        "not_asked": summary.as_ref().err(),
    })
}

impl RankingSum {
    /// Adds the ranking of one instance.
    fn add(&mut self, ranking: Option<&Value>, text_key: &str) {
        let Some(ranking) = ranking else { return };
        let number = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
        let bound = number(ranking, "unseen_at_most");
        self.refused = self.refused.saturating_add(number(ranking, "refused"));
        self.unseen = self.unseen.saturating_add(bound);
        let since_s = ranking.get("since_s").and_then(Value::as_u64);
        self.since_s = [self.since_s, since_s].into_iter().flatten().min();
        let entries = ranking.get("entries").and_then(Value::as_array);
        for entry in entries.into_iter().flatten().take(MAX_SUMMARY_ENTRIES) {
            let text = |key| Some(entry.get(key)?.as_str()?.to_owned());
            let Some(key) = text("policy").zip(text(text_key)) else {
                continue;
            };
            let sum = self.entries.entry(key).or_default();
            sum.count = sum.count.saturating_add(number(entry, "count"));
            sum.error = sum.error.saturating_add(number(entry, "error"));
            sum.seen_bounds = sum.seen_bounds.saturating_add(bound);
        }
    }

    /// As in the ranking of an instance, the true count of an entry lies between `count - error`
    /// and `count`: an instance that does not list an entry may have seen it up to
    /// `unseen_at_most` times.
    fn into_json(self, text_key: &str) -> Value {
        let mut entries: Vec<_> = self.entries.into_iter().collect();
        for (_, sum) in &mut entries {
            let unlisted = self.unseen.saturating_sub(sum.seen_bounds);
            sum.count = sum.count.saturating_add(unlisted);
            sum.error = sum.error.saturating_add(unlisted);
        }
        entries.sort_by(|(a_key, a), (b_key, b)| b.count.cmp(&a.count).then(a_key.cmp(b_key)));
        entries.truncate(MAX_SUMMARY_ENTRIES);
        let entries: Vec<Value> = entries
            .into_iter()
            .map(|((policy, text), sum)| {
                let mut fields = Map::new();
                fields.insert("policy".to_owned(), json!(policy));
                fields.insert(text_key.to_owned(), json!(text));
                fields.insert("count".to_owned(), json!(sum.count));
                fields.insert("error".to_owned(), json!(sum.error));
                Value::Object(fields)
            })
            .collect();
        json!({ "since_s": self.since_s.unwrap_or(0), "refused": self.refused, "unseen_at_most": self.unseen, "entries": entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_instances_are_added_with_their_errors() {
        let first = json!({ "keys": {
            "since_s": 100, "refused": 12, "unseen_at_most": 2,
            "entries": [
                { "policy": "api", "key": "ann", "count": 7, "error": 1 },
                { "policy": "api", "key": "bob", "count": 3, "error": 0 },
            ],
        }});
        let second = json!({ "keys": {
            "since_s": 90, "refused": 5, "unseen_at_most": 1,
            "entries": [{ "policy": "api", "key": "bob", "count": 5, "error": 0 }, { "key": 1 }],
        }});
        let malformed = json!({ "keys": [] });
        let mut sum = RankingSum::default();
        for summary in [&first, &second, &malformed] {
            sum.add(summary.get("keys"), "key");
        }
        assert_eq!(
            sum.into_json("key"),
            json!({
                "since_s": 90, "refused": 17, "unseen_at_most": 3,
                "entries": [
                    { "policy": "api", "key": "ann", "count": 8, "error": 2 },
                    { "policy": "api", "key": "bob", "count": 8, "error": 0 },
                ],
            })
        );
    }

    #[test]
    fn another_instance_at_the_address_is_not_counted() {
        let answer_with = |body: &'static str| {
            let instance = FleetInstance {
                id: "a".to_owned(),
                ..FleetInstance::default()
            };
            AskedInstance::from_answer(instance, Ok(Bytes::from(body))).read_summary("")
        };
        assert!(answer_with(r#"{"id": "a"}"#).is_ok());
        for (body, part) in [
            (r#"{"id": "b"}"#, "another instance"),
            ("<html>", "not a summary"),
            ("[]", "another instance"),
        ] {
            assert!(answer_with(body).unwrap_err().contains(part), "{body}");
        }
    }
}
