//! Four proxies of an earlier commit are replaced one by one under load, and back; see `make
//! upgrade`. The limits hold, and every unit is used.
//!
//! `TIDEGATE_UPGRADE_FROM` is a binary of the earlier commit. Requires redis-server.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::large_futures,
    clippy::print_stdout,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "it stops at any error, and its helpers are those of the tests"
)]

#[allow(dead_code, unused_imports, reason = "the tests use the rest")]
#[path = "../tests/it/support/mod.rs"]
mod support;

use hyper::Response;
use hyper::header::HeaderValue;
use std::path::PathBuf;
use std::time::Duration;
use support::TEST_TIMEOUT;
use support::proxy::Proxy;
use support::redis::RedisServer;
use support::upgrade::{
    INSTANCE_COUNT, PHASES, REQUESTS_PER_PHASE, TOTAL_UNITS, client_request, upgrade_config,
};
use support::upstream::{Upstream, full_body};
use tokio::time::sleep;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let previous = PathBuf::from(
        std::env::var_os("TIDEGATE_UPGRADE_FROM").expect("TIDEGATE_UPGRADE_FROM is a binary"),
    );
    let server = RedisServer::start();
    let upstream = Upstream::with_handler(async |_| {
        let mut response = Response::new(full_body(""));
        let cost = HeaderValue::from_static("1");
        response.headers_mut().insert("x-cost", cost);
        response
    })
    .await;
    let config = upgrade_config(&server);
    let start = async |is_current: bool| {
        let builder = Proxy::setup(&config).upstream(upstream.address);
        let builder = if is_current {
            builder
        } else {
            builder.program(&previous)
        };
        let proxy = builder.start().await;
        proxy.wait_for_store().await;
        proxy
    };
    let mut proxies = Vec::new();
    for _ in 0..INSTANCE_COUNT {
        proxies.push((start(false).await, false));
    }
    let paths = ["log", "window", "fixed", "bucket", "leased", "settled"];
    let mut admitted = [0_u64; 6];
    for current_count in PHASES {
        let running = proxies.iter().filter(|(_, is_current)| *is_current).count();
        if running != current_count {
            let adds_current = current_count > running;
            let at = proxies
                .iter()
                .position(|(_, is_current)| *is_current != adds_current);
            let replacement = (start(adds_current).await, adds_current);
            let (mut stopped, _) = std::mem::replace(&mut proxies[at.unwrap()], replacement);
            stopped.send_sigterm();
            let requests = send_to_all(&proxies, &paths, REQUESTS_PER_PHASE).await;
            stopped.wait_for_exit(3 * TEST_TIMEOUT).await;
            paths
                .iter()
                .enumerate()
                .for_each(|(at, _)| admitted[at] += requests[at]);
        }
        let requests = send_to_all(&proxies, &paths, REQUESTS_PER_PHASE).await;
        paths
            .iter()
            .enumerate()
            .for_each(|(at, _)| admitted[at] += requests[at]);
    }
    // Uses up what remains, also in leases.
    for _ in 0..4 {
        sleep(Duration::from_millis(1_100)).await;
        let requests = send_to_all(&proxies, &paths, 20).await;
        paths
            .iter()
            .enumerate()
            .for_each(|(at, _)| admitted[at] += requests[at]);
    }
    println!("{paths:?}: {admitted:?} of {TOTAL_UNITS} admitted");
    for (path, admitted) in paths.iter().zip(admitted) {
        let expected = match *path {
            // An estimate of three is settled to the one unit that the response reports.
            "settled" => TOTAL_UNITS - 2,
            _ => TOTAL_UNITS,
        };
        assert_eq!(admitted, expected, "{path}");
    }
}

/// Sends requests to every path of all proxies at once. Returns the 200 responses of each path.
async fn send_to_all(proxies: &[(Proxy, bool)], paths: &[&str], requests_each: u64) -> Vec<u64> {
    let send = async |proxy: &Proxy, path: &str| {
        let mut admitted = 0;
        for _ in 0..requests_each {
            let request = client_request(proxy, &format!("/{path}"), "192.0.2.1");
            match request.send().await.status {
                200 => admitted += 1,
                429 => {}
                other => panic!("{other} from /{path}: {}", proxy.log_text()),
            }
        }
        admitted
    };
    let mut counts = Vec::new();
    for path in paths {
        let calls = proxies.iter().map(|(proxy, _)| send(proxy, path));
        counts.push(futures_util::future::join_all(calls).await.iter().sum());
    }
    counts
}
