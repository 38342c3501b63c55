//! nginx and the proxy get the same requests and must behave as `docs/migration/` describes.

use super::documentation::{CodeBlock, read_code_blocks};
use super::migration_products::SeededChoices;
use super::support::nginx::Nginx;
use crate::support::prelude::*;

const NGINX_PAGE: &str = "docs/migration/nginx-limit-req.md";

/// nginx and the proxy, configured from one section of the page. The proxy forwards to an nginx
/// without limits.
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
        let upstream = Nginx::start().await;
        upstream.write_file("x", b"ok");
        let proxy = Proxy::start(&find("toml").text, upstream.address).await;
        Self {
            nginx,
            proxy,
            upstream,
        }
    }

    fn targets(&self) -> [(&'static str, SocketAddr); 2] {
        [
            ("nginx", self.nginx.address),
            ("tidegate", self.proxy.address),
        ]
    }
}

/// Sends requests one after the other. Returns the number admitted and the elapsed time.
async fn count_admitted(address: SocketAddr, times: usize) -> (usize, Duration) {
    let (began, mut admitted) = (Instant::now(), 0);
    for _ in 0..times {
        admitted +=
            usize::from(ClientRequest::new(address, "GET", "/x").send().await.status == 200);
    }
    (admitted, began.elapsed())
}

/// Both may admit more than the burst only by the units refilled while the requests were sent.
async fn assert_burst_admitted(pair: &ProxyPair, at_once: usize, per_s: f64) {
    for (target, address) in pair.targets() {
        let (admitted, took) = count_admitted(address, at_once + 10).await;
        let refilled = (took.as_secs_f64() * per_s).ceil() as usize;
        assert!(
            (at_once..=at_once + refilled).contains(&admitted),
            "{target}: {admitted} in {took:?}"
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
    for (target, address) in pair.targets() {
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
        // A slow machine may free a queue position before all requests arrive; allow one more per
        // 200 ms.
        let spread = replies
            .iter()
            .filter(|(status, _)| *status != 200)
            .map(|(_, took)| *took)
            .max();
        let freed = spread.map_or(3, |took| took.as_millis() / 200) as usize;
        assert!(
            (6..=6 + freed).contains(&held.len()),
            "{target}: {replies:?}"
        );
        for (position, took) in held.iter().enumerate() {
            // nginx counts in milliseconds, and not all requests arrive at the same moment.
            let least = Duration::from_millis(200 * position as u64)
                .saturating_sub(Duration::from_millis(20));
            assert!(
                *took >= least,
                "{target}: {position} after {took:?}: {held:?}"
            );
        }
    }
}

/// Sends requests at the same time. Returns when each response came, and whether it was 200.
async fn send_at_once(address: SocketAddr, times: usize) -> Vec<(Duration, bool)> {
    let began = Instant::now();
    let one = || async {
        let status = ClientRequest::new(address, "GET", "/x").send().await.status;
        (began.elapsed(), status == 200)
    };
    let mut replies = join_all((0..times).map(|_| one())).await;
    replies.sort();
    replies
}

#[tokio::test]
async fn a_max_delay_that_is_rounded_up_admits_the_burst_of_nginx() {
    let pair = ProxyPair::from_page_section("Burst, delayed, rounded up").await;
    for (target, address) in pair.targets() {
        let replies = send_at_once(address, 7).await;
        let admitted: Vec<_> = replies.iter().filter(|(_, admitted)| *admitted).collect();
        let rejected = replies.iter().filter(|(_, admitted)| !admitted);
        // A slow machine may free positions before all requests arrive.
        let freed = rejected
            .map(|(took, _)| took.as_millis() / 333)
            .max()
            .unwrap_or(4) as usize;
        assert!(
            (3..=3 + freed).contains(&admitted.len()),
            "{target}: {replies:?}"
        );
        let last = admitted[2].0;
        assert!(last >= Duration::from_millis(640), "{target}: {replies:?}");
    }
}

/// nginx delays what exceeds `delay` at its rate; the proxy rejects that.
#[tokio::test]
async fn a_delay_of_nginx_keeps_the_pace_and_a_token_bucket_does_not() {
    let pair = ProxyPair::from_page_section("Burst, partly delayed").await;
    let nginx = send_at_once(pair.nginx.address, 10).await;
    let admitted: Vec<_> = nginx.iter().filter(|(_, admitted)| *admitted).collect();
    assert!((6..=7).contains(&admitted.len()), "{nginx:?}");
    for (position, (took, _)) in admitted.iter().enumerate().skip(3) {
        let least = Duration::from_millis(200 * (position as u64 - 2));
        let least = least.saturating_sub(Duration::from_millis(20));
        assert!(*took >= least, "{position}: {nginx:?}");
    }
    let proxy = send_at_once(pair.proxy.address, 10).await;
    let slowest = proxy.iter().map(|(took, _)| *took).max().unwrap();
    let admitted = proxy.iter().filter(|(_, admitted)| *admitted).count();
    let refilled = (slowest.as_secs_f64() * 5.0).ceil() as usize;
    assert!((3..=3 + refilled).contains(&admitted), "{proxy:?}");
}

/// Seeded requests to locations that share a zone, and to others. Both decide each one equally.
#[tokio::test]
async fn nginx_locations_that_share_a_zone_have_one_quota() {
    let pair = ProxyPair::from_page_section("Location prefixes and shared zones").await;
    let limited = ["/api/", "/api/a", "/api/b/c", "/login", "/img", "/imgs/x"];
    let free = ["/apix", "/login/x", "/images/x", "/x"];
    let mut decisions = Vec::new();
    for (_, address) in pair.targets() {
        let (mut seed, mut refused) = (7_u32, Vec::new());
        for _ in 0..60 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let targets: &[&str] = if seed >> 31 == 0 { &limited } else { &free };
            let target = targets[(seed >> 16) as usize % targets.len()];
            let status = ClientRequest::new(address, "GET", target)
                .send()
                .await
                .status;
            refused.push((target, [429, 503].contains(&status)));
        }
        decisions.push(refused);
    }
    assert_eq!(decisions[0], decisions[1]);
    let admitted = |(target, refused): &&(&str, bool)| limited.contains(target) && !refused;
    assert_eq!(decisions[0].iter().filter(admitted).count(), 5);
}

#[tokio::test]
async fn nginx_locations_with_several_bursts_of_one_zone_share_a_counter() {
    let pair = ProxyPair::from_page_section("One zone with several bursts").await;
    let mut decisions = Vec::new();
    for (_, address) in pair.targets() {
        let mut refused = Vec::new();
        for target in [
            "/login", "/api/a", "/login", "/api/b", "/login", "/login", "/api/a",
        ]
        .into_iter()
        .chain(["/login", "/api/b", "/api/c", "/login", "/api/a", "/api/a"])
        {
            let request = ClientRequest::new(address, "GET", target);
            refused.push((target, [429, 503].contains(&request.send().await.status)));
        }
        decisions.push(refused);
    }
    assert_eq!(decisions[0], decisions[1]);
    let admitted = decisions[0].iter().filter(|(_, refused)| !refused).count();
    assert_eq!(admitted, 9);
}

#[tokio::test]
async fn clients_exempt_in_nginx_are_exempt_and_others_get_status_503() {
    let pair = ProxyPair::from_page_section("Exemptions, overrides and status 503").await;
    for (target, address) in pair.targets() {
        let mut statuses = Vec::new();
        for _ in 0..40 {
            statuses.push(ClientRequest::new(address, "GET", "/x").send().await.status);
        }
        assert!(statuses.contains(&200), "{target}: {statuses:?}");
        assert!(statuses.contains(&503), "{target}: {statuses:?}");
        assert!(
            statuses.iter().all(|status| [200, 503].contains(status)),
            "{target}: {statuses:?}"
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
    for (target, address) in pair.targets() {
        let mut holders = Vec::new();
        for _ in 0..4 {
            let mut client =
                RawClient::connect_and_send(address, "GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
                    .await;
            client.read_past(b"200 OK").await;
            holders.push(client);
        }
        let one_more = async || ClientRequest::new(address, "GET", "/x").send().await.status;
        let refused = one_more().await;
        assert!([429, 503].contains(&refused), "{target}: {refused}");
        drop(holders.pop());
        let is_free = async || one_more().await == 200;
        wait_until(
            format!("{target}: the slot of the disconnected client"),
            is_free,
        )
        .await;
    }
}

/// Requests of several clients, with and without API keys, to all locations of one server. Both
/// give each one the same answer.
#[tokio::test]
async fn a_whole_server_of_nginx_is_translated() {
    let pair = ProxyPair::from_page_section("A whole server").await;
    let mut answers = Vec::new();
    for (target, address) in pair.targets() {
        let mut choices = SeededChoices(11);
        let mut seen = Vec::new();
        for _ in 0..300 {
            let path =
                *choices.choose(&["/api/", "/api/a", "/api/b", "/beta/x", "/downloads/x", "/x"]);
            let client = *choices.choose(&["192.0.2.1", "192.0.2.2", "10.1.2.3", "198.51.100.7"]);
            let key = *choices.choose(&["", "", "one", "two"]);
            let mut request =
                ClientRequest::new(address, "GET", path).header("x-forwarded-for", client);
            if !key.is_empty() {
                request = request.header("x-api-key", key);
            }
            let answer = request.send().await;
            let refusal = (answer.status == 429).then(|| answer.text());
            seen.push((path, client, key, refusal));
        }
        let logins = (0..8).map(|_| ClientRequest::new(address, "GET", "/login").send());
        let logins = join_all(logins).await;
        let refused = logins.iter().filter(|answer| answer.status == 429);
        assert_eq!(refused.count(), 4, "{target}: one at once, and three later");
        answers.push(seen);
    }
    for (number, (nginx, tidegate)) in answers[0].iter().zip(&answers[1]).enumerate() {
        assert_eq!(nginx, tidegate, "request {number}");
    }
    for path in ["/api/a", "/x", "/downloads/x"] {
        let is_refusal = |one: &&(_, _, _, Option<String>)| {
            one.0 == path && one.3.as_deref() == Some("{\"error\":\"slow down\"}")
        };
        assert!(answers[0].iter().any(|one| is_refusal(&one)), "{path}");
    }
}
