//! Adds up the summaries of all instances.
//!
//! Summaries come from other processes, possibly of other versions: a missing field counts as
//! absent, and every text is bounded by the size of a summary.

use super::peer_client::MAX_SUMMARY_ENTRIES;
use crate::admin::{
    AdvertisedAddress, FleetDocument, FleetInstanceDocument, InstanceSummary, OverviewInstance,
};
use crate::telemetry::top_rejections::{RankingSum, RejectionRanking, hash_text};

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
        add_ranking(&mut self.keys, &summary.keys);
        add_ranking(&mut self.paths, &summary.paths);
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
        let is_loopback = AdvertisedAddress::parse(address).is_ok_and(|to| to.is_loopback());
        if is_loopback && instance.name.as_ref() != Some(&self.own.host) {
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
            keys: self.keys.into_ranking(MAX_SUMMARY_ENTRIES, |_| 0),
            paths: self.paths.into_ranking(MAX_SUMMARY_ENTRIES, |_| 0),
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

/// Adds the ranking of one instance, unless it has none.
fn add_ranking(sum: &mut RankingSum, ranking: &RejectionRanking) {
    if *ranking == RejectionRanking::default() {
        return;
    }
    let bound = ranking.unseen_at_most;
    sum.add_part(ranking.since_s, ranking.refused, bound);
    for entry in ranking.entries.iter().take(MAX_SUMMARY_ENTRIES) {
        let id = hash_text(&entry.policy, entry.text.as_str());
        sum.add_entry(id, bound, (entry.count, entry.error), || {
            (entry.policy.clone(), entry.text.clone())
        });
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
            add_ranking(&mut sum, &serde_json::from_value(ranking).unwrap());
        }
        assert_eq!(
            json!(sum.into_ranking(MAX_SUMMARY_ENTRIES, |_| 0)),
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
