//! What `docs/migration/` calls the same is the same: nginx and the proxy get the same requests.

use super::pages::{Block, blocks};
use super::support::SOON;
use super::support::client::{Ask, RawClient};
use super::support::nginx::Nginx;
use super::support::proxy::Proxy;
use futures_util::future::join_all;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const PAGE: &str = "docs/migration/nginx-limit-req.md";

/// nginx and the proxy, each as a section of the page says; the proxy in front of an nginx without limits.
struct Pair {
    nginx: Nginx,
    proxy: Proxy,
    behind: Nginx,
}

impl Pair {
    async fn of(heading: &str) -> Self {
        let blocks = blocks(PAGE);
        let find = |language: &str| -> Block {
            let found = blocks
                .iter()
                .find(|block| block.heading == heading && block.language == language);
            found
                .unwrap_or_else(|| panic!("{PAGE} has no {language} below {heading:?}"))
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
        let nginx = Nginx::limited(&zones.join("\n"), &limits.join("\n")).await;
        nginx.file("x", b"ok");
        let behind = Nginx::start().await;
        behind.file("x", b"ok");
        let proxy = Proxy::start(&find("toml").text, behind.address).await;
        Self {
            nginx,
            proxy,
            behind,
        }
    }

    fn both(&self) -> [(&'static str, SocketAddr); 2] {
        [
            ("nginx", self.nginx.address),
            ("tidegate", self.proxy.address),
        ]
    }
}

/// How many of so many requests, one right after the other, get in, and how long that took.
async fn admitted(address: SocketAddr, times: usize) -> (usize, Duration) {
    let (began, mut admitted) = (Instant::now(), 0);
    for _ in 0..times {
        admitted += usize::from(Ask::new(address, "GET", "/x").send().await.status == 200);
    }
    (admitted, began.elapsed())
}

/// What flows in during the burst is the only difference, and both have the same of it per time.
async fn gets(pair: &Pair, at_once: usize, per_s: f64) {
    for (who, address) in pair.both() {
        let (admitted, took) = admitted(address, at_once + 10).await;
        let more = (took.as_secs_f64() * per_s).ceil() as usize;
        assert!(
            (at_once..=at_once + more).contains(&admitted),
            "{who}: {admitted} in {took:?}"
        );
    }
}

#[tokio::test]
async fn nginx_without_burst_is_a_bucket_of_one() {
    gets(&Pair::of("Without burst").await, 1, 10.0).await;
}

#[tokio::test]
async fn nginx_with_burst_and_nodelay_is_a_bucket_of_one_more() {
    gets(&Pair::of("Burst, nodelay").await, 21, 10.0).await;
}

#[tokio::test]
async fn nginx_with_burst_is_a_line() {
    let pair = Pair::of("Burst, delayed").await;
    for (who, address) in pair.both() {
        let began = Instant::now();
        let one = || async {
            let status = Ask::new(address, "GET", "/x").send().await.status;
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
async fn who_is_exempt_in_nginx_is_exempt_here_and_others_get_the_old_status() {
    let pair = Pair::of("Who is exempt, who has more, and the old status").await;
    for (who, address) in pair.both() {
        let mut statuses = Vec::new();
        for _ in 0..40 {
            statuses.push(Ask::new(address, "GET", "/x").send().await.status);
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
async fn who_has_as_many_in_flight_as_nginx_lets_him_is_refused_here_too() {
    let pair = Pair::of("In flight at a time").await;
    // More than sockets hold, for clients that don't read on.
    let large = vec![0; 32 << 20];
    pair.nginx.file("large", &large);
    pair.behind.file("large", &large);
    for (who, address) in pair.both() {
        let mut holders = Vec::new();
        for _ in 0..4 {
            let mut client = RawClient::connect(address).await;
            client.send("GET /large HTTP/1.1\r\nHost: a\r\n\r\n").await;
            client.read_past(b"200 OK").await;
            holders.push(client);
        }
        let one_more = async || Ask::new(address, "GET", "/x").send().await.status;
        let refused = one_more().await;
        assert!([429, 503].contains(&refused), "{who}: {refused}");
        drop(holders.pop());
        let deadline = Instant::now() + SOON;
        while one_more().await != 200 {
            assert!(
                Instant::now() < deadline,
                "{who}: who has left keeps his slot"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
