//! Metrics of the process and its configuration.

use super::output::MetricOutput;
use super::status::{KeyFetchCounts, ProcessStatus, SpanExportCounts};

pub(super) fn write_process_metrics(page: &mut dyn MetricOutput, status: &ProcessStatus) {
    let mut expiry = page.gauge(
        "tidegate_certificate_expiry_seconds",
        "Expiry of a server certificate, or of its chain if that expires earlier, in seconds since the Unix epoch.",
    );
    for (file, at) in &status.certificates {
        expiry.write_sample(&[("file", file)], *at);
    }
    if let Some(SpanExportCounts {
        exported,
        dropped,
        failed,
    }) = status.spans
    {
        let counts = [
            ("exported", exported),
            ("dropped", dropped),
            ("failed", failed),
        ];
        page.counter("tidegate_trace_spans", "Spans by export result.")
            .write_counts("result", counts);
    }
    write_key_fetches(page, &status.key_fetches);
    let successes = status.config_generation.saturating_sub(1);
    let results = [("success", successes), ("failure", status.rejected_reloads)];
    page.counter(
        "tidegate_config_reloads",
        "New configurations by result: success took effect, failure changed nothing.",
    )
    .write_counts("result", results);
    page.gauge(
        "tidegate_config_generation",
        "Number of the configuration in effect, starting at 1.",
    )
    .write_sample(&[], status.config_generation);
    page.gauge(
        "tidegate_config_last_reload_success_timestamp_seconds",
        "Time when the configuration in effect was applied, in seconds since the Unix epoch.",
    )
    .write_sample(&[], status.config_applied_at_s);
    page.gauge(
        "tidegate_config_last_reload_successful",
        "Whether the newest configuration files are in effect (1) or not (0).",
    )
    .write_sample(&[], status.reload_errors.is_empty().into());
    page.gauge(
        "tidegate_config_hash",
        "Hash of the configuration in effect, without listen, admin, log, trace, metrics and shutdown. Equal configurations have equal hashes.",
    )
    .write_sample(&[], status.config_hash);
    page.gauge(
        "tidegate_build_info",
        "Always 1; the labels identify the build.",
    )
    .write_sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
}

fn write_key_fetches(page: &mut dyn MetricOutput, fetches: &[KeyFetchCounts]) {
    if fetches.is_empty() {
        return;
    }
    let mut family = page.counter(
        "tidegate_jwks_fetches",
        "Fetches of the keys of token issuers, by configured URL and result.",
    );
    for KeyFetchCounts {
        url,
        succeeded,
        failed,
    } in fetches
    {
        family.write_sample(&[("url", url), ("result", "success")], *succeeded);
        family.write_sample(&[("url", url), ("result", "failure")], *failed);
    }
}
