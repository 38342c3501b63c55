//! The summary of one instance: state, rate, and rankings.

use crate::admin::AdminBackend;
use crate::admin::health::phase_label;
use crate::admin::queries::ranking_json;
use crate::telemetry::top_rejections::RejectionDimension;
use serde_json::{Value, json};

/// Maximum number of entries in each ranking of a summary.
pub(super) const MAX_SUMMARY_ENTRIES: usize = 100;

/// A part of the decisions with another label.
const PARTIAL_LABEL: &str = "degraded_refused";

/// Complete seconds over which the rate is averaged.
const RATE_SECONDS: usize = 5;

pub(super) fn build_summary(view: &AdminBackend, max_entries: usize) -> Value {
    let observed = view.state.read_status();
    let rank = |dimension| {
        let rejections = view.metrics.top_rejections();
        ranking_json(&rejections.ranking(dimension, None, max_entries), dimension)
    };
    json!({
        "id": view.instance.id,
        "name": view.instance.host,
        "version": env!("CARGO_PKG_VERSION"),
        "status": phase_label(observed.phase),
        "store": if observed.store_up { "up" } else { "degraded" },
        "instances": observed.instance_count.unwrap_or(1),
        "decisions_per_s": mean_rate(view),
        "uptime_s": observed.uptime_s,
        "generation": observed.config_generation,
        "config_hash": observed.config_hash,
        "keys": rank(RejectionDimension::Keys),
        "paths": rank(RejectionDimension::Paths),
    })
}

/// The mean number of decisions per second. The last second is incomplete and left out.
fn mean_rate(view: &AdminBackend) -> f64 {
    let (_, seconds) = view.history.last_seconds(RATE_SECONDS + 1);
    let labels = view.metrics.labels().request_decisions;
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
