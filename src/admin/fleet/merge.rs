//! Adds up the summaries of all instances.
//!
//! Summaries come from other processes, possibly of other versions: a missing field counts as
//! absent, and every text is bounded by the size of a summary.

use super::summary::MAX_SUMMARY_ENTRIES;
use crate::admin::{AdminBackend, FleetDocument, FleetInstanceDocument, InstanceSummary};
use crate::telemetry::top_rejections::{RejectedText, RejectionEntry, RejectionRanking};
use bytes::Bytes;
use std::collections::HashMap;
use std::net::SocketAddr;

/// An instance, and its answer.
#[derive(Debug)]
pub(super) struct AskedInstance {
    instance: FleetInstanceDocument,
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
    Own(Box<InstanceSummary>),
    /// A response body, not yet parsed.
    Body(Bytes),
}

/// A ranking of the fleet. The text of an entry is a key or a path.
#[derive(Debug, Default)]
struct RankingSum {
    /// By policy and text.
    entries: HashMap<(String, RejectedText), RankedSum>,
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
    pub(super) fn from_own_summary(
        instance: FleetInstanceDocument,
        summary: InstanceSummary,
    ) -> Self {
        Self {
            instance,
            answer: Ok(InstanceAnswer::Own(Box::new(summary))),
        }
    }

    pub(super) fn from_answer(
        instance: FleetInstanceDocument,
        answer: Result<Bytes, String>,
    ) -> Self {
        Self {
            instance,
            answer: answer.map(InstanceAnswer::Body),
        }
    }

    /// Parses the answer. `own_host` is the host of this process.
    fn read_summary(&self, own_host: &str) -> Result<InstanceSummary, String> {
        self.parse_answer().map_err(|reason| {
            let address = self.instance.admin.as_deref().unwrap_or_default();
            match is_loopback(address) && self.instance.name.as_deref() != Some(own_host) {
                true => format!("{reason} (its address is loopback: see admin.advertise)"),
                false => reason,
            }
        })
    }

    fn parse_answer(&self) -> Result<InstanceSummary, String> {
        let summary = match &self.answer {
            Ok(InstanceAnswer::Own(summary)) => return Ok((**summary).clone()),
            Ok(InstanceAnswer::Body(body)) => serde_json::from_slice::<InstanceSummary>(body)
                .map_err(|_invalid| "its answer is not a summary".to_owned())?,
            Err(reason) => return Err(reason.clone()),
        };
        // Another process may have the address by now.
        if summary.id == self.instance.id {
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
#[allow(clippy::cast_precision_loss, reason = "a count of instances is small")]
pub(super) fn build_fleet_view(view: &AdminBackend, answers: &FleetAnswers) -> FleetDocument {
    let FleetAnswers {
        instances: asked,
        total,
        problem,
    } = answers;
    let (mut keys, mut paths) = (RankingSum::default(), RankingSum::default());
    let (mut answered, mut decisions_per_s) = (0_usize, 0.0);
    // One summary is parsed at a time, because it takes more memory than its bytes.
    let mut read_instance = |one: &AskedInstance| {
        let (summary, not_asked) = match one.read_summary(&view.instance.host) {
            Ok(summary) => (summary, None),
            Err(reason) => (InstanceSummary::default(), Some(reason)),
        };
        answered += usize::from(not_asked.is_none());
        decisions_per_s += summary.figures.decisions_per_s.unwrap_or_default();
        keys.add(&summary.keys);
        paths.add(&summary.paths);
        let share = 1.0 / summary.instances.unwrap_or(*total as u64).max(1) as f64;
        let instance = one.instance.clone();
        FleetInstanceDocument {
            is_self: instance.id == view.instance.id,
            state: summary.status.unwrap_or(instance.state),
            share,
            figures: summary.figures,
            not_asked,
            ..instance
        }
    };
    let instances: Vec<_> = asked.iter().map(&mut read_instance).collect();
    FleetDocument {
        store: view.instance.store.to_owned(),
        shared: view.instance.store != "memory",
        total: *total,
        listed: instances.len(),
        answered,
        problem: problem.clone(),
        decisions_per_s,
        instances,
        keys: keys.into_ranking(),
        paths: paths.into_ranking(),
    }
}

impl RankingSum {
    /// Adds the ranking of one instance, unless it has none.
    fn add(&mut self, ranking: &RejectionRanking) {
        if *ranking == RejectionRanking::default() {
            return;
        }
        let bound = ranking.unseen_at_most;
        self.refused = self.refused.saturating_add(ranking.refused);
        self.unseen = self.unseen.saturating_add(bound);
        self.since_s = Some(self.since_s.unwrap_or(u64::MAX).min(ranking.since_s));
        for entry in ranking.entries.iter().take(MAX_SUMMARY_ENTRIES) {
            let key = (entry.policy.clone(), entry.text.clone());
            let sum = self.entries.entry(key).or_default();
            sum.count = sum.count.saturating_add(entry.count);
            sum.error = sum.error.saturating_add(entry.error);
            sum.seen_bounds = sum.seen_bounds.saturating_add(bound);
        }
    }

    /// As in the ranking of an instance, the true count of an entry lies between `count - error`
    /// and `count`: an instance that does not list an entry may have seen it up to
    /// `unseen_at_most` times.
    fn into_ranking(self) -> RejectionRanking {
        let entries = self.entries.into_iter().map(|((policy, text), sum)| {
            let unlisted = self.unseen.saturating_sub(sum.seen_bounds);
            RejectionEntry {
                policy,
                text,
                count: sum.count.saturating_add(unlisted),
                error: sum.error.saturating_add(unlisted),
            }
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by(|a, b| {
            let by_name = (&a.policy, &a.text).cmp(&(&b.policy, &b.text));
            b.count.cmp(&a.count).then(by_name)
        });
        entries.truncate(MAX_SUMMARY_ENTRIES);
        RejectionRanking {
            since_s: self.since_s.unwrap_or(0),
            refused: self.refused,
            unseen_at_most: self.unseen,
            entries,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn counts_of_instances_are_added_with_their_errors() {
        let first = json!({
            "since_s": 100, "refused": 12, "unseen_at_most": 2,
            "entries": [
                { "policy": "api", "key": "ann", "count": 7, "error": 1 },
                { "policy": "api", "key": "bob", "count": 3, "error": 0 },
            ],
        });
        let second = json!({
            "since_s": 90, "refused": 5, "unseen_at_most": 1, "of_a_newer_version": [1],
            "entries": [{ "policy": "api", "key": "bob", "count": 5 }],
        });
        let mut sum = RankingSum::default();
        for ranking in [first, second, json!({})] {
            sum.add(&serde_json::from_value(ranking).unwrap());
        }
        assert_eq!(
            json!(sum.into_ranking()),
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
            let instance = FleetInstanceDocument {
                id: "a".to_owned(),
                ..FleetInstanceDocument::default()
            };
            AskedInstance::from_answer(instance, Ok(Bytes::from(body))).read_summary("")
        };
        assert!(answer_with(r#"{"id": "a"}"#).is_ok());
        for (body, part) in [
            (r#"{"id": "b"}"#, "another instance"),
            ("<html>", "not a summary"),
            ("[]", "not a summary"),
            (r#"{"id": "a", "keys": 3}"#, "not a summary"),
        ] {
            assert!(answer_with(body).unwrap_err().contains(part), "{body}");
        }
    }
}
