//! The metrics page for Prometheus.

use super::exposition::{ExpositionFormat, ExpositionWriter};
use super::output::MetricOutput;
use super::process::write_process_metrics;
use super::registry::Metrics;
use super::status::ProcessStatus;
use super::store::write_store_metrics;
use crate::telemetry::log_writer::dropped_log_lines;
use std::sync::atomic::Ordering;

impl Metrics {
    /// Renders all metrics as a page for Prometheus.
    pub fn render_page(&self, status: &ProcessStatus, format: ExpositionFormat) -> String {
        let mut page = ExpositionWriter::new(format);
        self.write_metrics(&mut page, status);
        page.finish()
    }

    /// Writes all metrics that tidegate defines itself.
    pub(super) fn write_metrics(&self, page: &mut dyn MetricOutput, status: &ProcessStatus) {
        self.write_policy_metrics(page);
        self.write_request_metrics(page);
        self.write_connection_metrics(page, status);
        self.write_client_trust_metrics(page);
        self.write_rate_limit_service_metrics(page);
        write_store_metrics(page, status);
        page.counter(
            "tidegate_settlements_lost",
            "Settlements of actual costs that could not be sent to the store. The estimate stands.",
        )
        .write_sample(&[], self.sum_counter(|worker| &worker.lost_settlements));
        self.write_export_metrics(page);
        write_process_metrics(page, status);
    }

    fn write_export_metrics(&self, page: &mut dyn MetricOutput) {
        let Some(counts) = &self.export_counts else {
            return;
        };
        let results = [
            ("success", counts.successes.load(Ordering::Relaxed)),
            ("failure", counts.failures.load(Ordering::Relaxed)),
        ];
        page.counter(
            "tidegate_metric_exports",
            "Exports of metrics by OTLP, by result.",
        )
        .write_counts("result", results);
    }

    fn write_policy_metrics(&self, page: &mut dyn MetricOutput) {
        // A copy: the lock is not held while an export waits for its collector.
        let counters = self.policy_counters.lock().clone();
        let mut requests = page.counter(
            "tidegate_requests",
            "Requests by policy and decision. A shadow policy counts requests that it would admit as allowed.",
        );
        for (policy, policy_counters) in counters.iter() {
            for (decision, count) in policy_counters.requests_by_label(self.labels.policy_decisions)
            {
                requests.write_sample(&[("policy", policy), ("decision", decision)], count);
            }
        }
        let mut degraded = page.counter(
            "tidegate_degraded",
            "Requests that an enforced policy decided without the store, by the outcome of its on_store_failure.",
        );
        for (policy, policy_counters) in counters.iter() {
            for (outcome, count) in policy_counters.requests_by_label(self.labels.degraded_outcomes)
            {
                degraded.write_sample(&[("policy", policy), ("outcome", outcome)], count);
            }
        }
        drop(counters);
        let mut seconds = page.histogram(
            "tidegate_decision_seconds",
            "Time from a request's arrival to the decision on its limits, by decision source.",
        );
        for (source, durations) in self.decision_durations() {
            seconds.write_histogram(&[("source", source)], &durations);
        }
    }

    fn write_request_metrics(&self, page: &mut dyn MetricOutput) {
        let mut requests = page.counter("tidegate_http_requests", "Responses by status code.");
        for (code, count) in self.status_counts() {
            requests.write_sample(&[("code", itoa::Buffer::new().format(code))], count);
        }
        let mut seconds = page.histogram(
            "tidegate_http_request_seconds",
            "Time from a request's arrival to the head of its response.",
        );
        seconds.write_histogram(&[], &self.response_durations());
        page.counter(
            "tidegate_app_errors",
            "Responses of the upstream with a status from 500 on.",
        )
        .write_sample(&[], self.app_error_count());
        page.counter(
            "tidegate_upstream_errors",
            "Requests without a response from the upstream, by kind.",
        )
        .write_counts("kind", self.upstream_error_counts());
    }

    fn write_connection_metrics(&self, page: &mut dyn MetricOutput, status: &ProcessStatus) {
        page.gauge("tidegate_connections_active", "Open client connections.")
            .write_sample(&[], status.open_connections as u64);
        let counts = self.sum_by_label(|worker| &worker.tls_errors);
        page.counter(
            "tidegate_tls_handshake_errors",
            "Client connections that failed in the TLS handshake, by kind.",
        )
        .write_counts("kind", counts);
        let counts = self.sum_by_label(|worker| &worker.proxy_header_errors);
        page.counter(
            "tidegate_proxy_protocol_errors",
            "Client connections that were closed because of their PROXY header, by kind.",
        )
        .write_counts("kind", counts);
        page.gauge(
            "tidegate_connections_max",
            "Maximum number of open client connections (listen.max_connections).",
        )
        .write_sample(&[], status.max_connections as u64);
        page.counter(
            "tidegate_connections_full",
            "New connections that found listen.max_connections open: another one was closed, or they waited.",
        )
        .write_sample(&[], status.connection_limit_hits);
        page.counter(
            "tidegate_panics",
            "Connections and HTTP/2 requests that ended in a panic. Each panic is a bug in tidegate.",
        )
        .write_sample(&[], status.panics);
        page.counter(
            "tidegate_log_lines_dropped",
            "Log lines dropped because stderr was read too slowly.",
        )
        .write_sample(&[], dropped_log_lines());
        let counts = self.sum_by_label(|worker| &worker.close_reasons);
        page.counter(
            "tidegate_connections_closed",
            "Client connections and HTTP/2 streams that tidegate closed, by reason.",
        )
        .write_counts("reason", counts);
    }

    fn write_client_trust_metrics(&self, page: &mut dyn MetricOutput) {
        page.counter(
            "tidegate_untrusted_forwarding",
            "Requests with a forwarding header from a peer outside client.trusted_proxies, while a policy depends on the client's address.",
        )
        .write_sample(&[], self.untrusted_forwarding_count());
        page.counter(
            "tidegate_tokens_refused",
            "Requests with a rejected token, while a policy reads a claim.",
        )
        .write_sample(&[], self.sum_counter(|worker| &worker.rejected_tokens));
    }

    fn write_rate_limit_service_metrics(&self, page: &mut dyn MetricOutput) {
        let counts = self.sum_by_label(|worker| &worker.rls_calls);
        page.counter(
            "tidegate_rls_calls",
            "Calls of the rate-limit service by result. given_up: cancelled before the answer. It is less than the calls that Envoy let pass: Envoy counts those in cluster.NAME.ratelimit.failure_mode_allowed.",
        )
        .write_counts("result", counts);
        page.counter(
            "tidegate_rls_descriptors_unmet",
            "Descriptors in calls of the rate-limit service that no policy matches, or that cannot be decided: negative hits, more than 64 entries, or beyond the first 64 of a call. They are not limited.",
        )
        .write_sample(
            &[],
            self.sum_counter(|worker| &worker.unmatched_descriptors),
        );
    }
}
