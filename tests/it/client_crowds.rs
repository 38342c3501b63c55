//! Many connections of few clients: new clients are served, and one client has a share at most.

use crate::support::prelude::*;
use std::future::pending;

const GET: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const CLOSED_FOR_LIMIT: &str = "tidegate_connections_closed_total{reason=\"connection_limit\"}";

#[tokio::test]
async fn the_connection_idle_longest_is_closed_for_a_new_one() {
    let config = "[listen]\nthreads = 2\nmax_connections = 4";
    let proxy = Proxy::with_echo(config).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = RawClient::connect(proxy.address).await;
        assert_eq!(client.request(GET).await.status, 200);
        clients.push(client);
        sleep(Duration::from_millis(20)).await;
    }
    // The first two get another request, so the third is idle longest.
    for client in &mut clients[..2] {
        assert_eq!(client.request(GET).await.status, 200);
    }
    assert_eq!(proxy.get("/").await.status, 200);
    assert!(clients[2].closes_within(TEST_TIMEOUT).await);
    for index in [0, 1, 3] {
        let still_open = clients[index].request(GET).await.status;
        assert_eq!(still_open, 200, "{index}");
    }
    assert_eq!(proxy.read_metric(CLOSED_FOR_LIMIT).await, 1.0);
}

#[tokio::test]
async fn active_connections_are_not_closed_for_new_ones() {
    let upstream = Upstream::with_handler(|request| async move {
        if request.uri().path() == "/never" {
            pending::<()>().await;
        }
        Response::default()
    })
    .await;
    let proxy = Proxy::start("[listen]\nmax_connections = 2", upstream.address).await;
    let mut active = Vec::new();
    for _ in 0..2 {
        let client = proxy
            .send_raw("GET /never HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        active.push(client);
    }
    wait_until("both requests to arrive", async || {
        upstream.requests().len() == 2
    })
    .await;
    let mut waiting = proxy.send_raw(GET).await;
    assert!(!waiting.closes_within(Duration::from_millis(300)).await);
    assert_eq!(upstream.requests().len(), 2);
    drop(active.pop());
    assert_eq!(waiting.read_response().await.status, 200);
    assert!(!active[0].closes_within(Duration::from_millis(50)).await);
}

/// Connections without a byte, with a part of a head, with a part of a TLS-like greeting, and idle
/// HTTP/2 connections fill the limit. New clients are served at once.
#[tokio::test]
async fn a_crowd_of_idle_connections_stops_no_new_client() {
    let config = "[listen]\nmax_connections = 300";
    let proxy = Proxy::with_echo(config).await;
    let mut crowd = Vec::new();
    for n in 0..330 {
        let mut client = RawClient::connect(proxy.address).await;
        match n % 3 {
            0 => {}
            1 => drop(client.send("GET / HT").await),
            _ => drop(client.send(crate::support::h2_frames::PREFACE).await),
        }
        crowd.push(client);
    }
    let mut times = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        let status = proxy.request("GET", "/").send_for_status().await;
        assert_eq!(status, 200);
        times.push(start.elapsed());
    }
    times.sort();
    println!("p50 {:?}, p99 {:?}", times[100], times[198]);
    assert!(times[198] < Duration::from_secs(1), "{:?}", times[198]);
}

#[tokio::test]
async fn connections_of_one_client_are_limited_except_of_trusted_proxies() {
    for (trusted, served) in [("", 3), ("client.trusted_proxies = ['127.0.0.1']", 5)] {
        let config = format!("{trusted}\n[listen]\nmax_connections_per_client = 3");
        let proxy = Proxy::with_echo(&config).await;
        let (mut open, mut closed) = (Vec::new(), 0);
        for _ in 0..5 {
            let mut client = RawClient::connect(proxy.address).await;
            match client.send(GET).await.read_response_or_close().await {
                Some(reply) => {
                    assert_eq!(reply.status, 200);
                    open.push(client);
                }
                None => closed += 1,
            }
        }
        assert_eq!((open.len(), closed), (served, 5 - served), "{trusted}");
        let series = "tidegate_connections_closed_total{reason=\"client_limit\"}";
        assert_eq!(proxy.read_metric(series).await, closed as f64);
        open.clear();
        wait_until("the closed connections to be forgotten", async || {
            let mut client = proxy.send_raw(GET).await;
            client.read_response_or_close().await.is_some()
        })
        .await;
    }
}
