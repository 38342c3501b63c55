use super::*;

const KINDS: Kinds = Kinds {
    upstream_errors: &["dns", "tls"],
    tls_faults: &["closed", "invalid"],
    proxy_header_faults: &["absent"],
};

fn observed() -> Observed {
    Observed {
        phase: Phase::Serving,
        uptime_s: 60,
        policies: 2,
        connections: 3,
        connections_max: 10,
        connections_full: 6,
        panics: 1,
        store_up: true,
        breaker_open: false,
        store_errors: vec![("timeout", 2)],
        lease_units_lost: Some(70),
        instances: Some(3),
        redis: Some(RedisVitals {
            calls: 9,
            memory_bytes: Some(1000),
            memory_max_bytes: None,
            may_evict: Some(true),
            clock_skew_us: Some(-1_250_000),
        }),
        memory: Some(MemoryUse {
            keys: 5,
            bytes: 700,
            evictions: 1,
        }),
        generation: 4,
        spans: Some(Spans {
            exported: 8,
            dropped: 1,
            failed: 2,
        }),
        reloads_refused: 2,
        loaded_s: 1_700_000_000,
        configured_at_s: 1_700_000_000,
        config_hash: 77,
        reload_errors: Vec::new(),
        certificates: vec![("a.crt".to_owned(), 1_800_000_000)],
    }
}

#[track_caller]
fn has(page: &str, line: &str) {
    assert!(
        page.lines().any(|known| known == line),
        "{line:?} is not in\n{page}"
    );
}

#[test]
fn what_workers_count_alone_is_added_up() {
    let metrics = Metrics::new(3, KINDS);
    let tallies = metrics.tallies(["a", "b"].into_iter());
    for worker in 0..3 {
        let shard = metrics.shard(worker);
        for _ in 0..=worker {
            shard.policy(&tallies[0], Decision::Allowed);
            shard.upstream_error(1);
            shard.tls_fault(0);
            shard.proxy_header_fault(0);
            shard.closed(Closed::Flood);
            shard.forwarding_not_trusted(IpAddr::from([10, 0, 0, 1]));
            shard.token_refused();
            shard.settlements_lost(2);
        }
        shard.policy(&tallies[1], Decision::DegradedClosed);
        shard.policy(&tallies[1], Decision::Degraded);
    }
    metrics
        .shard(3)
        .forwarding_not_trusted(IpAddr::from([10, 0, 0, 2]));
    let page = metrics.page(&observed(), Format::Classic);
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
        has(&page, line);
    }
}

#[test]
fn counters_outlive_the_table_that_named_them() {
    let metrics = Metrics::new(1, KINDS);
    let shard = metrics.shard(0);
    shard.policy(
        &metrics.tallies(["a", "gone"].into_iter())[1],
        Decision::Rejected,
    );
    let again = metrics.tallies(["new", "a"].into_iter());
    shard.policy(&again[1], Decision::Rejected);
    let page = metrics.page(&observed(), Format::Classic);
    for policy in ["a", "gone"] {
        has(
            &page,
            &format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"rejected\"}} 1"),
        );
    }
}

#[test]
fn buckets_hold_what_is_at_most_their_end() {
    let metrics = Metrics::new(2, KINDS);
    let times = [0, 2_000, 2_001, 50_000_000, 3_000_000_000].map(Duration::from_nanos);
    for (at, time) in times.into_iter().enumerate() {
        metrics.shard(at % 2).decided(Source::Memory, time);
    }
    let page = metrics.page(&observed(), Format::Classic);
    let bucket = |le: &str, count: u64| {
        has(
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
    has(
        &page,
        "tidegate_decision_seconds_sum{source=\"memory\"} 3.050004001",
    );
    has(
        &page,
        "tidegate_decision_seconds_count{source=\"memory\"} 5",
    );
    has(&page, "tidegate_decision_seconds_count{source=\"redis\"} 0");
}

#[test]
fn bounds_ascend_and_are_written_as_they_are() {
    for bounds in [&DECISION_BOUNDS, &REQUEST_BOUNDS] {
        assert!(bounds.is_sorted_by(|a, b| a.0 < b.0));
        for (bound, text) in bounds {
            assert_eq!(text.parse::<f64>().unwrap(), bound.as_secs_f64());
        }
    }
}

#[test]
fn bounds_tell_objectives_and_default_timeouts_exactly_and_leave_no_gap() {
    for bounds in [&DECISION_BOUNDS, &REQUEST_BOUNDS] {
        for pair in bounds.windows(2) {
            assert!(
                pair[1].0 <= pair[0].0 * 3,
                "from {} to {}",
                pair[0].1,
                pair[1].1
            );
        }
    }
    let has =
        |bounds: &[histogram::Bound], ms| bounds.iter().any(|(bound, _)| bound.as_millis() == ms);
    for ms in [1, 5, 10, 25, 50, 100, 250, 500, 1000] {
        assert!(
            has(&DECISION_BOUNDS, ms) && has(&REQUEST_BOUNDS, ms),
            "{ms} ms"
        );
    }
    for ms in [2_500, 5_000, 10_000, 30_000, 60_000] {
        assert!(has(&REQUEST_BOUNDS, ms), "{ms} ms");
    }
}

#[test]
fn only_codes_that_occurred_have_a_line() {
    let metrics = Metrics::new(1, KINDS);
    let shard = metrics.shard(0);
    for code in [100, 200, 200, 999] {
        shard.responded(code, Duration::ZERO);
    }
    let page = metrics.page(&observed(), Format::Classic);
    let lines: Vec<&str> = page
        .lines()
        .filter(|line| line.contains("{code="))
        .collect();
    let line = |code, count| format!("tidegate_http_requests_total{{code=\"{code}\"}} {count}");
    assert_eq!(lines, [line(100, 1), line(200, 2), line(999, 1)]);
}

#[test]
fn a_label_cannot_end_before_its_time() {
    let mut page = Page::new(Format::OpenMetrics);
    page.family(Kind::Gauge, "x", "Help.")
        .sample(&[("l", "a\"} 9\n\\")], 1);
    assert_eq!(
        page.finish(),
        "# HELP x Help.\n# TYPE x gauge\nx{l=\"a\\\"} 9\\n\\\\\"} 1\n# EOF\n"
    );
}

#[test]
fn the_two_formats_differ_in_the_names_of_counters_and_the_end() {
    let metrics = Metrics::new(1, KINDS);
    let classic = metrics.page(&observed(), Format::accepted("text/plain"));
    let open = metrics.page(
        &observed(),
        Format::accepted("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"),
    );
    has(&classic, "# TYPE tidegate_requests_total counter");
    has(&open, "# TYPE tidegate_requests counter");
    assert!(open.ends_with("} 1\n# EOF\n") && !classic.contains("EOF"));
}
