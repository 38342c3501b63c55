use super::exposition::{ExpositionWriter, MetricKind, MetricOutput, SampleValue};
use super::histogram::{DECISION_TIME_BOUNDS, RESPONSE_TIME_BOUNDS};
use super::*;
use std::net::IpAddr;
use std::time::Duration;

const ALLOWED_INDEX: usize = 0;
const REJECTED_INDEX: usize = 1;
const DEGRADED_INDEX: usize = 2;
const DEGRADED_CLOSED_INDEX: usize = 3;

fn sample_labels() -> MetricLabels {
    MetricLabels {
        decision_sources: &["redis", "memory", "deny_cache", "lease", "degraded"],
        policy_decisions: &[
            ("allowed", &[ALLOWED_INDEX]),
            ("rejected", &[REJECTED_INDEX]),
            ("degraded", &[DEGRADED_INDEX, DEGRADED_CLOSED_INDEX]),
        ],
        degraded_outcomes: &[("open", &[15]), ("closed", &[DEGRADED_CLOSED_INDEX])],
        upstream_errors: &["dns", "tls"],
        tls_errors: &["closed", "invalid"],
        proxy_header_errors: &["absent"],
        close_reasons: &["flood", "protocol"],
        ..MetricLabels::default()
    }
}

fn sample_status() -> ProcessStatus {
    ProcessStatus {
        phase: ProcessPhase::Serving,
        uptime_s: 60,
        policy_count: 2,
        connections: ConnectionCounts {
            open: 3,
            max: 10,
            full: 6,
        },
        panics: 1,
        store: StoreStatus {
            up: true,
            lease_units_lost: Some(70),
            instances: Some(3),
            memory: Some(MemoryStoreUsage {
                keys: 5,
                bytes: 700,
                evictions: 1,
            }),
            ..StoreStatus::default()
        },
        store_errors: vec![("timeout", 2)],
        redis: Some(RedisServerMetrics {
            calls: 9,
            sentinel_disagreements: 8,
            override_changes: 11,
            foreign_overrides: 12,
            memory_bytes: Some(1000),
            memory_max_bytes: None,
            may_evict: Some(true),
            clock_skew_us: Some(-1_250_000),
        }),
        config_generation: 4,
        spans: Some([("exported", 8), ("dropped", 1), ("failed", 2)]),
        key_fetches: vec![KeyFetchCounts {
            url: "https://issuer/keys".to_owned(),
            succeeded: 7,
            failed: 1,
        }],
        last_reload: LastReload {
            at_s: 1_700_000_000,
            refused: 2,
            ..LastReload::default()
        },
        config_json: "{}".into(),
        config_applied_at_s: 1_700_000_000,
        config_hash: 77,
        config_warnings: Vec::new(),
        certificates: vec![CertificateExpiry {
            file: "a.crt".to_owned(),
            ends_s: 1_800_000_000,
        }],
    }
}

#[track_caller]
fn assert_has_line(page: &str, line: &str) {
    assert!(
        page.lines().any(|known| known == line),
        "{line:?} is not in\n{page}"
    );
}

#[test]
fn sums_counts_of_all_workers() {
    let metrics = Metrics::new(3, sample_labels());
    let counters = metrics.get_or_create_policy_counters(["a", "b"].into_iter());
    for worker in 0..3 {
        let worker_metrics = metrics.worker_metrics(worker);
        for _ in 0..=worker {
            worker_metrics.record_policy_decision(&counters[0], ALLOWED_INDEX);
            worker_metrics.upstream_errors.increment(1);
            worker_metrics.tls_errors.increment(0);
            worker_metrics.proxy_header_errors.increment(0);
            worker_metrics.close_reasons.increment(0);
            worker_metrics.record_untrusted_forwarding(IpAddr::from([10, 0, 0, 1]));
            worker_metrics.rejected_tokens.add(1);
            worker_metrics.lost_settlements.add(2);
        }
        worker_metrics.record_policy_decision(&counters[1], DEGRADED_CLOSED_INDEX);
        worker_metrics.record_policy_decision(&counters[1], DEGRADED_INDEX);
    }
    metrics
        .worker_metrics(3)
        .record_untrusted_forwarding(IpAddr::from([10, 0, 0, 2]));
    let page = metrics.render_page(&sample_status(), ExpositionFormat::PrometheusText);
    for line in [
        "tidegate_requests_total{policy=\"a\",decision=\"allowed\"} 6",
        "tidegate_requests_total{policy=\"b\",decision=\"allowed\"} 0",
        "tidegate_requests_total{policy=\"b\",decision=\"degraded\"} 6",
        "tidegate_degraded_total{policy=\"b\",outcome=\"closed\"} 3",
        "tidegate_degraded_total{policy=\"b\",outcome=\"open\"} 0",
        "tidegate_upstream_errors_total{kind=\"tls\"} 6",
        "tidegate_tls_handshake_errors_total{kind=\"closed\"} 6",
        "tidegate_tls_handshake_errors_total{kind=\"invalid\"} 0",
        "tidegate_proxy_protocol_errors_total{kind=\"absent\"} 6",
        "tidegate_certificate_expiry_seconds{file=\"a.crt\"} 1800000000",
        "tidegate_untrusted_forwarding_total 6",
        "tidegate_tokens_refused_total 6",
        "tidegate_settlements_lost_total 12",
        "tidegate_connections_active 3",
        "tidegate_connections_max 10",
        "tidegate_connections_full_total 6",
        "tidegate_panics_total 1",
        "tidegate_connections_closed_total{reason=\"flood\"} 6",
        "tidegate_connections_closed_total{reason=\"protocol\"} 0",
        "tidegate_instances 3",
        "tidegate_lease_units_lost_total 70",
        "tidegate_store_errors_total{kind=\"timeout\"} 2",
        "tidegate_store_memory_evictions_total 1",
        "tidegate_config_reloads_total{result=\"success\"} 3",
        "tidegate_config_reloads_total{result=\"failure\"} 2",
        "tidegate_redis_calls_total 9",
        "tidegate_redis_sentinel_disagreements_total 8",
        "tidegate_override_changes_total 11",
        "tidegate_foreign_overrides_total 12",
        "tidegate_redis_memory_bytes 1000",
        "tidegate_redis_may_evict 1",
        "tidegate_redis_clock_skew_seconds -1.250000",
        "tidegate_config_generation 4",
        "tidegate_trace_spans_total{result=\"dropped\"} 1",
        "tidegate_config_last_reload_success_timestamp_seconds 1700000000",
        "tidegate_config_last_reload_successful 1",
        "tidegate_config_hash 77",
        concat!(
            "tidegate_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1"
        ),
    ] {
        assert_has_line(&page, line);
    }
}

#[test]
fn counters_survive_a_policy_reload() {
    let metrics = Metrics::new(1, sample_labels());
    let worker_metrics = metrics.worker_metrics(0);
    worker_metrics.record_policy_decision(
        &metrics.get_or_create_policy_counters(["a", "gone"].into_iter())[1],
        REJECTED_INDEX,
    );
    let reloaded = metrics.get_or_create_policy_counters(["new", "a"].into_iter());
    worker_metrics.record_policy_decision(&reloaded[1], REJECTED_INDEX);
    let page = metrics.render_page(&sample_status(), ExpositionFormat::PrometheusText);
    for policy in ["a", "gone"] {
        assert_has_line(
            &page,
            &format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"rejected\"}} 1"),
        );
    }
}

#[test]
fn buckets_count_durations_up_to_their_bound() {
    let metrics = Metrics::new(2, sample_labels());
    let times = [0, 2_000, 2_001, 50_000_000, 3_000_000_000].map(Duration::from_nanos);
    for (at, time) in times.into_iter().enumerate() {
        metrics.worker_metrics(at % 2).record_decision_time(1, time);
    }
    let page = metrics.render_page(&sample_status(), ExpositionFormat::PrometheusText);
    let bucket = |le: &str, count: u64| {
        assert_has_line(
            &page,
            &format!("tidegate_decision_seconds_bucket{{source=\"memory\",le=\"{le}\"}} {count}"),
        );
    };
    bucket("0.000002", 2);
    bucket("0.000005", 3);
    bucket("0.025", 3);
    bucket("0.05", 4);
    bucket("1", 4);
    bucket("+Inf", 5);
    assert_has_line(
        &page,
        "tidegate_decision_seconds_sum{source=\"memory\"} 3.050004001",
    );
    assert_has_line(
        &page,
        "tidegate_decision_seconds_count{source=\"memory\"} 5",
    );
    assert_has_line(&page, "tidegate_decision_seconds_count{source=\"redis\"} 0");
}

#[test]
fn bounds_ascend_and_match_their_labels() {
    for bounds in [&DECISION_TIME_BOUNDS, &RESPONSE_TIME_BOUNDS] {
        assert!(bounds.is_sorted_by(|a, b| a < b));
        let histogram = HistogramSnapshot::from_histograms(bounds, [].into_iter());
        for (bound, (label, _)) in bounds.iter().zip(histogram.cumulative_buckets()) {
            let text = label.to_string();
            assert!(text.len() <= 8, "{text}");
            let bound_s = Duration::from_micros(*bound).as_secs_f64();
            assert_eq!(text.parse::<f64>().unwrap(), bound_s);
        }
    }
}

#[test]
fn bounds_include_objectives_and_default_timeouts() {
    for bounds in [&DECISION_TIME_BOUNDS, &RESPONSE_TIME_BOUNDS] {
        for pair in bounds.windows(2) {
            assert!(pair[1] <= pair[0] * 3, "from {} to {}", pair[0], pair[1]);
        }
    }
    let has_bound = |bounds: &[u64], ms: u64| bounds.contains(&(ms * 1000));
    for ms in [1, 5, 10, 25, 50, 100, 250, 500, 1000] {
        assert!(
            has_bound(&DECISION_TIME_BOUNDS, ms) && has_bound(&RESPONSE_TIME_BOUNDS, ms),
            "{ms} ms"
        );
    }
    for ms in [2_500, 5_000, 10_000, 30_000, 60_000] {
        assert!(has_bound(&RESPONSE_TIME_BOUNDS, ms), "{ms} ms");
    }
}

#[test]
fn only_observed_status_codes_have_a_line() {
    let metrics = Metrics::new(1, sample_labels());
    let worker_metrics = metrics.worker_metrics(0);
    for code in [100, 200, 200, 999] {
        worker_metrics.record_response(code, Duration::ZERO);
    }
    let page = metrics.render_page(&sample_status(), ExpositionFormat::PrometheusText);
    let lines: Vec<&str> = page
        .lines()
        .filter(|line| line.contains("{code="))
        .collect();
    let line = |code, count| format!("tidegate_http_requests_total{{code=\"{code}\"}} {count}");
    assert_eq!(lines, [line(100, 1), line(200, 2), line(999, 1)]);
}

#[test]
fn escapes_label_values() {
    let mut page = ExpositionWriter::new(ExpositionFormat::OpenMetrics);
    page.write_family(MetricKind::Gauge, "x", "Help.");
    page.write_sample(&[("l", "a\"} 9\n\\")], SampleValue::Number(1));
    assert_eq!(
        page.finish(),
        "# HELP x Help.\n# TYPE x gauge\nx{l=\"a\\\"} 9\\n\\\\\"} 1\n# EOF\n"
    );
}

#[test]
fn formats_differ_in_counter_names_and_the_end_marker() {
    let metrics = Metrics::new(1, sample_labels());
    let classic = metrics.render_page(
        &sample_status(),
        ExpositionFormat::from_accept_header("text/plain"),
    );
    let open = metrics.render_page(
        &sample_status(),
        ExpositionFormat::from_accept_header(
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2",
        ),
    );
    assert_has_line(&classic, "# TYPE tidegate_requests_total counter");
    assert_has_line(&open, "# TYPE tidegate_requests counter");
    assert!(open.ends_with("} 1\n# EOF\n") && !classic.contains("EOF"));
}
