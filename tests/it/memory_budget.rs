//! `listen.max_memory`: the memory of all client connections stays below a limit.

use crate::support::client::{ClientRequest, RawClient};
use crate::support::proxy::Proxy;
use crate::support::upstream::Upstream;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Sends requests on new connections until `stop`. All are answered with 200.
async fn keep_requesting(address: SocketAddr, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let status = ClientRequest::new(address, "GET", "/")
            .send_for_status()
            .await;
        assert_eq!(status, 200);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The process stays below 256 MiB. Without a limit, the heads take 400 MiB.
#[tokio::test]
async fn partial_heads_on_all_connections_stay_below_the_memory_limit() {
    const CONNECTIONS: usize = 5_000;
    let upstream = Upstream::echo().await;
    let config = format!(
        "[listen]\nmax_memory = '153MiB'\nmax_connections = {CONNECTIONS}\n[listen.http]\nheader_timeout = '60s'"
    );
    let mut proxy = Proxy::start(&config, upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let stop = Arc::new(AtomicBool::new(false));
    let good = tokio::spawn(keep_requesting(proxy.address, Arc::clone(&stop)));
    let head = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(60_000));
    let (mut attackers, mut largest_kib) = (Vec::new(), 0);
    for n in 0..CONNECTIONS {
        let mut attacker = RawClient::connect(proxy.address).await;
        attacker.send(&head).await;
        attackers.push(attacker);
        if n % 100 == 0 {
            largest_kib = largest_kib.max(proxy.rss_kib());
        }
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    stop.store(true, Ordering::Relaxed);
    largest_kib = largest_kib.max(proxy.rss_kib());
    good.await.unwrap();
    let mut times = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        assert_eq!(proxy.get("/").await.status, 200);
        times.push(start.elapsed());
    }
    times.sort();
    println!(
        "{largest_kib} KiB, good clients: p50 {:?}, p99 {:?}",
        times[50], times[98]
    );
    assert!(proxy.is_running());
    assert!(largest_kib < 256 << 10, "{largest_kib} KiB");
    assert!(times[98] < Duration::from_secs(1), "{:?}", times[98]);
    let closed = "tidegate_connections_closed_total{reason=\"memory\"}";
    assert!(proxy.read_metric(closed).await > 1_000.0);
}
