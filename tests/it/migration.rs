//! What `docs/migration/` calls the same is the same: nginx and the proxy get the same requests.

use super::documentation::{CodeBlock, read_code_blocks};
use super::support::TEST_TIMEOUT;
use super::support::client::{ClientRequest, RawClient};
use super::support::nginx::Nginx;
use super::support::proxy::Proxy;
use futures_util::future::join_all;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const NGINX_PAGE: &str = "docs/migration/nginx-limit-req.md";

/// nginx and the proxy, each as a section of the page says; the proxy in front of an nginx without limits.
struct ProxyPair {
    nginx: Nginx,
    proxy: Proxy,
    upstream: Nginx,
}

impl ProxyPair {
    async fn from_page_section(heading: &str) -> Self {
        let blocks = read_code_blocks(NGINX_PAGE);
        let find = |language: &str| -> CodeBlock {
            let found = blocks
                .iter()
                .find(|block| block.heading == heading && block.language == language);
            found
                .unwrap_or_else(|| panic!("{NGINX_PAGE} has no {language} below {heading:?}"))
                .clone()
        };
        let (zones, limits): (Vec<_>, Vec<_>) = {
            let text = find("nginx").text;
            let is_zone = |line: &String| {
                ["limit_req_zone", "limit_conn_zone", "geo", "map"]
                    .iter()
                    .any(|word| line.starts_with(word))
            };
            text.lines().map(str::to_owned).partition(is_zone)
        };
        let nginx = Nginx::start_with_config(&zones.join("\n"), &limits.join("\n")).await;
        nginx.write_file("x", b"ok");
        let behind = Nginx::start().await;
        behind.write_file("x", b"ok");
        let proxy = Proxy::start(&find("toml").text, behind.address).await;
        Self {
            nginx,
            proxy,
            upstream: behind,
        }
    }

    fn targets(&self) -> [(&'static str, SocketAddr); 2] {
        [
            ("nginx", self.nginx.address),
            ("tidegate", self.proxy.address),
        ]
    }
}

/// How many of so many requests, one right after the other, get in, and how long that took.
async fn count_admitted(address: SocketAddr, times: usize) -> (usize, Duration) {
    let (began, mut admitted) = (Instant::now(), 0);
    for _ in 0..times {
        admitted +=
            usize::from(ClientRequest::new(address, "GET", "/x").send().await.status == 200);
    }
    (admitted, began.elapsed())
}

/// What flows in during the burst is the only difference, and both have the same of it per time.
async fn assert_burst_admitted(pair: &ProxyPair, at_once: usize, per_s: f64) {
    for (who, address) in pair.targets() {
        let (admitted, took) = count_admitted(address, at_once + 10).await;
        let more = (took.as_secs_f64() * per_s).ceil() as usize;
        assert!(
            (at_once..=at_once + more).contains(&admitted),
            "{who}: {admitted} in {took:?}"
        );
    }
}

#[tokio::test]
async fn nginx_without_burst_equals_a_token_bucket_of_one() {
    assert_burst_admitted(
        &ProxyPair::from_page_section("Without burst").await,
        1,
        10.0,
    )
    .await;
}

#[tokio::test]
async fn nginx_with_burst_and_nodelay_equals_a_token_bucket_of_burst_plus_one() {
    assert_burst_admitted(
        &ProxyPair::from_page_section("Burst, nodelay").await,
        21,
        10.0,
    )
    .await;
}

#[tokio::test]
async fn nginx_with_burst_equals_a_leaky_bucket() {
    let pair = ProxyPair::from_page_section("Burst, delayed").await;
    for (who, address) in pair.targets() {
        let began = Instant::now();
        let one = || async {
            let status = ClientRequest::new(address, "GET", "/x").send().await.status;
            (status, began.elapsed())
        };
        let replies = join_all((0..9).map(|_| one())).await;
        let mut held: Vec<Duration> = replies
            .iter()
            .filter(|(status, _)| *status == 200)
            .map(|(_, took)| *took)
            .collect();
        held.sort();
        // On a machine so slow that a place came free meanwhile, one more.
        let spread = replies
            .iter()
            .filter(|(status, _)| *status != 200)
            .map(|(_, took)| *took)
            .max();
        let more = spread.map_or(3, |took| took.as_millis() / 200) as usize;
        assert!((6..=6 + more).contains(&held.len()), "{who}: {replies:?}");
        for (place, took) in held.iter().enumerate() {
            // nginx counts in milliseconds, and not all requests came at the beginning.
            let least =
                Duration::from_millis(200 * place as u64).saturating_sub(Duration::from_millis(20));
            assert!(*took >= least, "{who}: {place} after {took:?}: {held:?}");
        }
    }
}

#[tokio::test]
async fn clients_exempt_in_nginx_are_exempt_and_others_get_status_503() {
    let pair = ProxyPair::from_page_section("Exemptions, overrides and status 503").await;
    for (who, address) in pair.targets() {
        let mut statuses = Vec::new();
        for _ in 0..40 {
            statuses.push(ClientRequest::new(address, "GET", "/x").send().await.status);
        }
        assert!(
            statuses.contains(&200) && statuses.contains(&503),
            "{who}: {statuses:?}"
        );
        assert!(
            statuses.iter().all(|status| [200, 503].contains(status)),
            "{who}: {statuses:?}"
        );
    }
}

#[tokio::test]
async fn requests_beyond_the_limit_conn_of_nginx_are_refused() {
    let pair = ProxyPair::from_page_section("Requests in flight").await;
    // More than sockets hold, for clients that don't read on.
    let large = vec![0; 32 << 20];
    pair.nginx.write_file("large", &large);
    pair.upstream.write_file("large", &large);
    for (who, address) in pair.targets() {
        let mut holders = Vec::new();
        for _ in 0..4 {
            let mut client = RawClient::connect(address).await;
            client.send("GET /large HTTP/1.1\r\nHost: a\r\n\r\n").await;
            client.read_past(b"200 OK").await;
            holders.push(client);
        }
        let one_more = async || ClientRequest::new(address, "GET", "/x").send().await.status;
        let refused = one_more().await;
        assert!([429, 503].contains(&refused), "{who}: {refused}");
        drop(holders.pop());
        let deadline = Instant::now() + TEST_TIMEOUT;
        while one_more().await != 200 {
            assert!(
                Instant::now() < deadline,
                "{who}: who has left keeps his slot"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
