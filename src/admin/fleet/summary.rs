//! The summary of one instance: state, rate, and rankings.

use crate::admin::{AdminBackend, InstanceFigures, InstanceSummary};
use crate::telemetry::top_rejections::RejectionDimension;

/// Maximum number of entries in each ranking of a summary.
pub(super) const MAX_SUMMARY_ENTRIES: usize = 100;

/// A part of the decisions with another label.
const PARTIAL_LABEL: &str = "degraded_refused";

/// Complete seconds over which the rate is averaged.
const RATE_SECONDS: usize = 5;

pub(super) fn build_summary(view: &AdminBackend, max_entries: usize) -> InstanceSummary {
    let observed = view.state.read_status();
    let rejections = &view.metrics.top_rejections;
    let rank = |dimension| rejections.ranking(dimension, None, max_entries);
    InstanceSummary {
        id: view.instance.id.clone(),
        name: view.instance.host.clone(),
        version: view.instance.version.clone(),
        status: Some(observed.phase.to_string()),
        instances: Some(observed.store.instances.unwrap_or(1).into()),
        figures: InstanceFigures {
            store: Some(observed.store.availability().to_owned()),
            decisions_per_s: Some(mean_rate(view)),
            uptime_s: Some(observed.uptime_s),
            generation: Some(observed.config_generation),
            config_hash: Some(observed.config_hash),
        },
        keys: rank(RejectionDimension::Keys),
        paths: rank(RejectionDimension::Paths),
    }
}

/// The mean number of decisions per second. The last second is incomplete and left out.
fn mean_rate(view: &AdminBackend) -> f64 {
    let (_, seconds) = view.history.last_seconds(RATE_SECONDS + 1);
    let labels = view.metrics.labels.request_decisions;
    let complete = seconds
        .split_last()
        .map_or(&[][..], |(_, complete)| complete);
    let decisions: u64 = complete
        .iter()
        .flat_map(|second| labels.iter().zip(second.decisions))
        .filter(|((label, _), _)| *label != PARTIAL_LABEL)
        .map(|(_, count)| u64::from(count))
        .sum();
    #[allow(clippy::cast_precision_loss, reason = "the counts are below 2^52")]
    let rate = decisions as f64 / complete.len().max(1) as f64;
    rate
}
