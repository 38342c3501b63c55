//! The metrics that tidegate defines itself, and the page of them for Prometheus.

use super::exposition::{
    ExpositionFormat, ExpositionWriter, MetricKind, MetricOutput, SampleValue, write_metrics,
};
use super::registry::Metrics;
use super::status::{ProcessStatus, RedisServerMetrics};
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
        write_store_metrics(page, status);
        write_metrics! { page;
            Counter "tidegate_settlements_lost" = self.sum_counter(|worker| &worker.lost_settlements),
                "Settlements of actual costs that could not be sent to the store. The estimate stands.";
            Counter "tidegate_costs_unreported" = self.sum_counter(|worker| &worker.unreported_costs),
                "Responses that did not report the actual cost of a request. The estimate stands, or what was used (cut_off).";
            Counter "tidegate_responses_cut_off" = self.sum_counter(|worker| &worker.cut_offs),
                "Responses that were ended because their key had nothing left (cut_off).";
        }
        if let Some(counts) = &self.export_counts {
            let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
            write_metrics! { page;
                Counter "tidegate_metric_exports" by "result" = ["success", "failure"].into_iter().zip(counts),
                    "Exports of metrics by OTLP, by result.";
            }
        }
        write_process_metrics(page, status);
    }

    fn write_policy_metrics(&self, page: &mut dyn MetricOutput) {
        // A copy: the lock is not held while an export waits for its collector.
        let counters = self.policy_counters.lock().clone();
        let families = [
            (
                "tidegate_requests",
                "Requests by policy and decision. A shadow policy counts requests that it would admit as allowed.",
                ("decision", self.labels.policy_decisions),
            ),
            (
                "tidegate_degraded",
                "Requests that an enforced policy decided without the store, by the outcome of its on_store_failure.",
                ("outcome", self.labels.degraded_outcomes),
            ),
        ];
        for (name, help, (label, indices)) in families {
            page.write_family(MetricKind::Counter, name, help);
            for (policy, counts) in &counters {
                for (value, count) in counts.requests_by_label(indices) {
                    let labels = [("policy", &**policy), (label, value)];
                    page.write_sample(&labels, SampleValue::Number(count));
                }
            }
        }
        drop(counters);
        let help =
            "First requests by which a key reached a threshold of a limit (notify) in a period.";
        page.write_family(MetricKind::Counter, "tidegate_policy_notifications", help);
        for ([policy, limit, threshold], count) in &self.notifications.counts() {
            let labels = [
                ("policy", &**policy),
                ("limit", limit),
                ("threshold", threshold),
            ];
            page.write_sample(&labels, SampleValue::Number(*count));
        }
        page.write_family(
            MetricKind::Histogram,
            "tidegate_decision_seconds",
            "Time from a request's arrival to the decision on its limits, by decision source.",
        );
        for (source, durations) in self.decision_durations() {
            page.write_sample(&[("source", source)], SampleValue::Histogram(&durations));
        }
    }

    fn write_request_metrics(&self, page: &mut dyn MetricOutput) {
        let help = "Responses by status code.";
        page.write_family(MetricKind::Counter, "tidegate_http_requests", help);
        for (code, count) in self.status_counts() {
            let mut digits = itoa::Buffer::new();
            let labels = [("code", digits.format(code))];
            page.write_sample(&labels, SampleValue::Number(count));
        }
        let help = "Time from a request's arrival to the head of its response.";
        page.write_family(MetricKind::Histogram, "tidegate_http_request_seconds", help);
        page.write_sample(&[], SampleValue::Histogram(&self.response_durations()));
        write_metrics! { page;
            Counter "tidegate_app_errors" = self.app_error_count(),
                "Responses of the upstream with a status from 500 on.";
            Counter "tidegate_upstream_errors" by "kind" = self.upstream_error_counts(),
                "Requests without a response from the upstream, by kind.";
        }
    }

    fn write_connection_metrics(&self, page: &mut dyn MetricOutput, status: &ProcessStatus) {
        let labels = &self.labels;
        write_metrics! { page;
            Gauge "tidegate_connections_active" = status.connections.open as u64,
                "Open client connections.";
            Counter "tidegate_tls_handshake_errors" by "kind" = labels.tls_errors.iter().copied().zip(self.sum_counters(|worker| &worker.tls_errors.0)),
                "Client connections that failed in the TLS handshake, by kind.";
            Counter "tidegate_proxy_protocol_errors" by "kind" = labels.proxy_header_errors.iter().copied().zip(self.sum_counters(|worker| &worker.proxy_header_errors.0)),
                "Client connections that were closed because of their PROXY header, by kind.";
            Gauge "tidegate_connections_max" = status.connections.max as u64,
                "Maximum number of open client connections (listen.max_connections).";
            Counter "tidegate_connections_full" = status.connections.full,
                "New connections that found listen.max_connections open: another one was closed, or they waited.";
            Counter "tidegate_panics" = status.panics,
                "Connections and HTTP/2 requests that ended in a panic. Each panic is a bug in tidegate.";
            Counter "tidegate_log_lines_dropped" = dropped_log_lines(),
                "Log lines dropped because stderr was read too slowly.";
            Counter "tidegate_connections_closed" by "reason" = labels.close_reasons.iter().copied().zip(self.sum_counters(|worker| &worker.close_reasons.0)),
                "Client connections and HTTP/2 streams that tidegate closed, by reason.";
            Counter "tidegate_untrusted_forwarding" = self.untrusted_forwarding_count(),
                "Requests with a forwarding header from a peer outside client.trusted_proxies, while a policy depends on the client's address.";
            Counter "tidegate_tokens_refused" = self.sum_counter(|worker| &worker.rejected_tokens),
                "Requests with a rejected token, while a policy reads a claim.";
            Counter "tidegate_rls_calls" by "result" = labels.rls_call_results.iter().copied().zip(self.sum_counters(|worker| &worker.rls_calls.0)),
                "Calls of the rate-limit service by result. given_up: cancelled before the answer. It is less than the calls that Envoy let pass: Envoy counts those in cluster.NAME.ratelimit.failure_mode_allowed.";
            Counter "tidegate_rls_descriptors_unmet" = self.sum_counter(|worker| &worker.unmatched_descriptors),
                "Descriptors in calls of the rate-limit service that no policy matches, or that cannot be decided: negative hits, more than 64 entries, or beyond the first 64 of a call. They are not limited.";
        }
    }
}

fn write_store_metrics(page: &mut dyn MetricOutput, status: &ProcessStatus) {
    write_metrics! { page;
        Gauge "tidegate_store_up" = status.store.up.into(),
            "Whether the store is available (1) or not (0).";
        Gauge "tidegate_breaker_open" = status.store.breaker_open.into(),
            "Whether the circuit breaker blocks calls to Redis (1) or not (0).";
        Counter "tidegate_store_errors" by "kind" = status.store_errors.iter().copied(),
            "Store errors by kind.";
    }
    write_metrics! { page;
        Gauge "tidegate_instances" if status.store.instances.map(u64::from),
            "Instances that share the limits, as last read from Redis; before the first read, store.redis.instances.";
        Counter "tidegate_lease_units_lost" if status.store.lease_units_lost,
            "Unused leased units that could not be returned to Redis. They stay charged until they expire.";
    }
    if let Some(redis) = &status.redis {
        write_redis_metrics(page, redis);
    }
    if let Some(memory) = status.store.memory {
        write_metrics! { page;
            Gauge "tidegate_store_memory_keys" = memory.keys as u64,
                "Counters in the memory store.";
            Gauge "tidegate_store_memory_bytes" = memory.bytes as u64,
                "Estimated size of the counters in the memory store in bytes.";
            Counter "tidegate_store_memory_evictions" = memory.evictions,
                "Counters that the memory store evicted before they expired.";
        }
    }
}

fn write_redis_metrics(page: &mut dyn MetricOutput, redis: &RedisServerMetrics) {
    write_metrics! { page;
        Counter "tidegate_redis_calls" = redis.calls,
            "Calls of this instance to Redis, for requests and in the background. One call may decide several requests.";
        Counter "tidegate_redis_sentinel_disagreements" = redis.sentinel_disagreements,
            "Checks, four per second and worker, that found sentinels with different masters.";
        Counter "tidegate_override_changes" = redis.override_changes,
            "Changes of key overrides that this instance noticed in Redis: set, replaced, removed, expired, or seen for the first time since the start or an eviction from its cache.";
        Counter "tidegate_foreign_overrides" = redis.foreign_overrides,
            "Decisions that ignored a foreign value in the Redis key of an override.";
        Gauge "tidegate_redis_memory_bytes" if redis.memory_bytes,
            "Memory used by Redis in bytes; in a cluster, the sum over its masters.";
        Gauge "tidegate_redis_memory_max_bytes" if redis.memory_max_bytes,
            "maxmemory of Redis in bytes, if configured; in a cluster, the sum over its masters.";
        Gauge "tidegate_redis_may_evict" if redis.may_evict.map(u64::from),
            "Whether the maxmemory-policy of Redis may evict counters when memory is full (1) or not (0).";
    }
    if let Some(skew_us) = redis.clock_skew_us {
        let help = "Clock of this machine minus the clock of Redis, corrected by half a round trip; in a cluster, the largest difference.";
        page.write_family(MetricKind::Gauge, "tidegate_redis_clock_skew_seconds", help);
        page.write_sample(&[], SampleValue::Micros(skew_us));
    }
}

fn write_process_metrics(page: &mut dyn MetricOutput, status: &ProcessStatus) {
    let expiries = status.certificates.iter();
    write_metrics! { page;
        Gauge "tidegate_certificate_expiry_seconds" by "file" = expiries.map(|one| (&*one.file, one.ends_s)),
            "Expiry of a server certificate, or of its chain if that expires earlier, in seconds since the Unix epoch.";
    }
    if let Some(spans) = status.spans {
        write_metrics! { page;
            Counter "tidegate_trace_spans" by "result" = spans, "Spans by export result.";
        }
    }
    if !status.key_fetches.is_empty() {
        let help = "Fetches of the keys of token issuers, by configured URL and result.";
        page.write_family(MetricKind::Counter, "tidegate_jwks_fetches", help);
    }
    for fetches in &status.key_fetches {
        for (result, count) in [("success", fetches.succeeded), ("failure", fetches.failed)] {
            let labels = [("url", &*fetches.url), ("result", result)];
            page.write_sample(&labels, SampleValue::Number(count));
        }
    }
    let successes = status.config_generation.saturating_sub(1);
    let reloads = [
        ("success", successes),
        ("failure", status.last_reload.refused),
    ];
    write_metrics! { page;
        Counter "tidegate_config_reloads" by "result" = reloads,
            "New configurations by result: success took effect, failure changed nothing.";
        Gauge "tidegate_config_generation" = status.config_generation,
            "Number of the configuration in effect, starting at 1.";
        Gauge "tidegate_config_last_reload_success_timestamp_seconds" = status.config_applied_at_s,
            "Time when the configuration in effect was applied, in seconds since the Unix epoch.";
        Gauge "tidegate_config_last_reload_successful" = status.last_reload.errors.is_empty().into(),
            "Whether the newest configuration files are in effect (1) or not (0).";
        Gauge "tidegate_config_hash" = status.config_hash,
            "Hash of the configuration in effect, without listen, admin, log, trace, metrics and shutdown. Equal configurations have equal hashes.";
        Gauge "tidegate_build_info" by "version" = [(env!("CARGO_PKG_VERSION"), 1)],
            "Always 1; the labels identify the build.";
    }
}
