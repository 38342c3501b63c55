//! Adds up the summaries of all instances.
//!
//! Summaries come from other processes, possibly of other versions: a missing field counts as
//! absent, and every text is bounded by the size of a summary.

use super::summary::MAX_SUMMARY_ENTRIES;
use crate::admin::{FleetDocument, FleetInstanceDocument, InstanceSummary, OverviewInstance};
use crate::telemetry::top_rejections::{RejectedText, RejectionEntry, RejectionRanking};
use std::collections::HashMap;
use std::net::SocketAddr;

/// The instances that have answered or failed so far, added up.
#[derive(Debug)]
pub(super) struct FleetSum {
    own: OverviewInstance,
    document: FleetDocument,
    /// The instances with their positions in the list.
    instances: Vec<(usize, FleetInstanceDocument)>,
    keys: RankingSum,
    paths: RankingSum,
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

impl FleetSum {
    /// `problem` is why the heartbeats could not be read.
    pub(super) fn new(
        own: OverviewInstance,
        store: &str,
        total: usize,
        problem: Option<String>,
    ) -> Self {
        Self {
            document: FleetDocument {
                store: store.to_owned(),
                shared: store != "memory",
                total,
                problem,
                ..FleetDocument::default()
            },
            own,
            instances: Vec::new(),
            keys: RankingSum::default(),
            paths: RankingSum::default(),
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "a count of instances is small")]
    pub(super) fn add(
        &mut self,
        position: usize,
        instance: FleetInstanceDocument,
        answer: Result<InstanceSummary, String>,
    ) {
        let (summary, not_asked) = match answer {
            Ok(summary) => (summary, None),
            Err(reason) => (
                InstanceSummary::default(),
                Some(self.explain_failure(&instance, reason)),
            ),
        };
        let fleet = &mut self.document;
        fleet.answered += usize::from(not_asked.is_none());
        fleet.decisions_per_s += summary.figures.decisions_per_s.unwrap_or_default();
        self.keys.add(&summary.keys);
        self.paths.add(&summary.paths);
        let instance = FleetInstanceDocument {
            is_self: instance.id == self.own.id,
            state: summary.status.unwrap_or(instance.state),
            share: 1.0 / summary.instances.unwrap_or(fleet.total as u64).max(1) as f64,
            figures: summary.figures,
            not_asked,
            ..instance
        };
        self.instances.push((position, instance));
    }

    fn explain_failure(&self, instance: &FleetInstanceDocument, reason: String) -> String {
        let address = instance.admin.as_deref().unwrap_or_default();
        if is_loopback(address) && instance.name.as_ref() != Some(&self.own.host) {
            format!("{reason} (its address is loopback: see admin.advertise)")
        } else {
            reason
        }
    }

    /// Returns the body of `GET /fleet`, with rankings of [`MAX_SUMMARY_ENTRIES`].
    pub(super) fn into_document(mut self) -> FleetDocument {
        self.instances.sort_by_key(|(position, _)| *position);
        let instances = self.instances.into_iter().map(|(_, instance)| instance);
        let instances: Vec<_> = instances.collect();
        FleetDocument {
            listed: instances.len(),
            instances,
            keys: self.keys.into_ranking(),
            paths: self.paths.into_ranking(),
            ..self.document
        }
    }
}

/// Parses the answer of the instance `id`.
///
/// # Errors
/// Returns the reason, as a sentence about the instance.
pub(super) fn parse_summary(body: &[u8], id: &str) -> Result<InstanceSummary, String> {
    let summary = serde_json::from_slice::<InstanceSummary>(body);
    let summary = summary.map_err(|_invalid| "its answer is not a summary".to_owned())?;
    // Another process may have the address by now.
    if summary.id == id {
        Ok(summary)
    } else {
        Err("another instance answered at its address".to_owned())
    }
}

fn is_loopback(address: &str) -> bool {
    let ip = address.parse::<SocketAddr>().map(|address| address.ip());
    ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
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
        let answer_with = |body: &str| parse_summary(body.as_bytes(), "a");
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
