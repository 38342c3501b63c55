//! Client identification: a header of an untrusted peer must not decide the client address.

use crate::support::prelude::*;

const PER_CLIENT_POLICY: &str = r#"
[[policy]]
name = "per-client"
key = ["client_ip"]
limit = { requests = 1, per = "1h" }
"#;

/// A proxy with one request per client, so that a refused client was seen before.
struct OneRequestProxy {
    proxy: Proxy,
    _upstream: Upstream,
}

impl OneRequestProxy {
    async fn start(client: &str) -> Self {
        let upstream = Upstream::echo().await;
        let proxy = Proxy::start(
            &format!("[client]\n{client}\n{PER_CLIENT_POLICY}"),
            upstream.address,
        )
        .await;
        Self {
            proxy,
            _upstream: upstream,
        }
    }

    async fn is_new_client(&self, headers: &[(&str, &str)]) -> bool {
        let mut ask = self.proxy.request("GET", "/");
        for (name, value) in headers {
            ask = ask.header(name, value);
        }
        match ask.send_for_status().await {
            200 => true,
            429 => false,
            status => panic!("{status} for {headers:?}"),
        }
    }

    async fn assert_known_client(&self, header: &str, values: &[&str]) {
        for value in values {
            assert!(
                !self.is_new_client(&[(header, value)]).await,
                "{header}: {value} was taken for a new client"
            );
        }
    }
}

const XFF: &str = "X-Forwarded-For";

#[tokio::test]
async fn trap_23_a_header_from_an_untrusted_peer_is_ignored_and_logged_once() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['10.0.0.0/8']").await;
    assert!(fixture.is_new_client(&[(XFF, "1.1.1.1")]).await);
    fixture
        .assert_known_client(XFF, &["2.2.2.2", "10.0.0.1", "3.3.3.3, 10.0.0.1"])
        .await;
    fixture.assert_known_client("X-Real-IP", &["4.4.4.4"]).await;
    let hint = |line: &LogLine| line.contains("trusted_proxies");
    fixture
        .proxy
        .wait_for_log("the hint about trusted_proxies", 0, TEST_TIMEOUT, hint)
        .await;
    assert_eq!(
        fixture.proxy.log_text().matches("trusted_proxies").count(),
        1,
        "{}",
        fixture.proxy.log_text()
    );
}

#[tokio::test]
async fn trap_23_the_list_is_read_from_the_right() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']").await;
    assert!(
        fixture
            .is_new_client(&[(XFF, "1.1.1.1, 2.2.2.2, 10.0.0.1")])
            .await
    );
    fixture
        .assert_known_client(
            XFF,
            &["2.2.2.2", "9.9.9.9,2.2.2.2", "2.2.2.2 ,10.0.0.1,10.0.0.2"],
        )
        .await;
    assert!(fixture.is_new_client(&[(XFF, "2.2.2.2, 3.3.3.3")]).await);
    assert!(
        fixture.is_new_client(&[(XFF, "1.1.1.1")]).await,
        "an address to the left of the untrusted one was used"
    );
}

#[tokio::test]
async fn trap_23_addresses_may_carry_a_port() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    assert!(fixture.is_new_client(&[(XFF, "2.2.2.2:1234")]).await);
    fixture
        .assert_known_client(XFF, &["2.2.2.2", "2.2.2.2:9", "::ffff:2.2.2.2"])
        .await;
    assert!(fixture.is_new_client(&[(XFF, "[2001:db8::1]:443")]).await);
    fixture
        .assert_known_client(XFF, &["2001:db8::1", "[2001:db8::1]", "[2001:DB8:0::1]:9"])
        .await;
}

#[tokio::test]
async fn trap_23_repeated_header_lines_form_one_list() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']").await;
    assert!(
        fixture
            .is_new_client(&[(XFF, "1.1.1.1"), (XFF, "2.2.2.2"), (XFF, "10.0.0.1")])
            .await
    );
    assert!(
        !fixture
            .is_new_client(&[(XFF, "8.8.8.8, 2.2.2.2"), (XFF, "10.0.0.1")])
            .await
    );
    assert!(
        fixture
            .is_new_client(&[(XFF, "2.2.2.2"), (XFF, "3.3.3.3")])
            .await
    );
}

#[tokio::test]
async fn trap_23_an_invalid_address_does_not_hide_the_client() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    assert!(fixture.is_new_client(&[(XFF, "1.1.1.1, nonsense")]).await);
    fixture
        .assert_known_client(
            XFF,
            &[
                "7.7.7.7, nonsense",
                "8.8.8.8, 999.1.1.1",
                "9.9.9.9, ,nonsense,",
            ],
        )
        .await;
}

#[tokio::test]
async fn trap_22_an_ipv6_client_is_identified_by_its_prefix() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    assert!(fixture.is_new_client(&[(XFF, "2001:db8:1:1::1")]).await);
    fixture
        .assert_known_client(
            XFF,
            &["2001:db8:1:1::2", "2001:db8:1:1:ffff:ffff:ffff:ffff"],
        )
        .await;
    assert!(fixture.is_new_client(&[(XFF, "2001:db8:1:2::1")]).await);
}

#[tokio::test]
async fn a_client_behind_a_translator_is_identified_by_its_ipv4_address() {
    let settings = "trusted_proxies = ['127.0.0.0/8', '64:ff9b::198.51.100.250']\nnat64_prefixes = ['2001:db8:64::/48']";
    let fixture = OneRequestProxy::start(settings).await;
    for new in [
        "64:ff9b::203.0.113.1",
        "64:ff9b::198.51.100.7",
        "::ffff:0:203.0.113.9",
        "2001:db8:64:cb00:71:200::",
    ] {
        assert!(fixture.is_new_client(&[(XFF, new)]).await, "{new}");
    }
    let known = [
        "203.0.113.1",
        "198.51.100.7:1234",
        "\"[64:ff9b::cb00:7101]:99\"",
        "203.0.113.9",
        "203.0.113.2",
        "64:ff9b::203.0.113.2, 64:ff9b::198.51.100.250",
    ];
    fixture.assert_known_client(XFF, &known).await;
    // 6to4 and an address beside the prefix share the /64 of their own.
    assert!(fixture.is_new_client(&[(XFF, "2002:cb00:7101::1")]).await);
    assert!(
        fixture
            .is_new_client(&[(XFF, "64:ff9b:1::203.0.113.1")])
            .await
    );
}

#[tokio::test]
async fn conditions_and_overrides_use_the_embedded_address() {
    let policy = r#"
[[policy]]
name = "blocked"
match = { client_ips = ["203.0.113.0/24"] }
action = "deny"
[[policy]]
name = "client"
key = ["client_ip"]
limit = { requests = 1, per = "1h" }
override = [{ key = ["64:ff9b::198.51.100.7"], limit = { requests = 2, per = "1h" } }]
"#;
    let config =
        format!("[client]\ntrusted_proxies = ['127.0.0.0/8']\nip_header = 'forwarded'\n{policy}");
    let proxy = Proxy::with_echo(&config).await;
    for (client, status) in [
        ("64:ff9b::203.0.113.5", 403),
        ("64:ff9b::198.51.100.7", 200),
        ("::ffff:0:198.51.100.7", 200),
        ("64:ff9b::198.51.100.7", 429),
        ("64:ff9b::198.51.100.8", 200),
    ] {
        let request = proxy.request("GET", "/");
        let forwarded = format!("for=\"[{client}]:4711\";proto=https");
        let request = request.header("Forwarded", &forwarded);
        assert_eq!(request.send_for_status().await, status, "{client}");
    }
}

#[tokio::test]
async fn prefix_lengths_are_configurable() {
    let fixture = OneRequestProxy::start(
        "trusted_proxies = ['127.0.0.0/8']\nipv6_prefix = 48\nipv4_prefix = 24",
    )
    .await;
    assert!(fixture.is_new_client(&[(XFF, "2001:db8:1:1::1")]).await);
    assert!(fixture.is_new_client(&[(XFF, "5.5.5.5")]).await);
    fixture
        .assert_known_client(XFF, &["2001:db8:1:2::1", "5.5.5.200"])
        .await;
    assert!(fixture.is_new_client(&[(XFF, "5.5.6.5")]).await);
}

#[tokio::test]
async fn the_forwarded_header_is_supported() {
    let fixture = OneRequestProxy::start(
        "trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']\nip_header = 'forwarded'",
    )
    .await;
    let name = "Forwarded";
    assert!(
        fixture
            .is_new_client(&[(
                name,
                "for=1.1.1.1, for=2.2.2.2;proto=https;by=10.0.0.9, For=10.0.0.1"
            )])
            .await
    );
    fixture
        .assert_known_client(
            name,
            &[
                "for=2.2.2.2",
                "for=\"2.2.2.2:80\"",
                "proto=http;for=2.2.2.2",
            ],
        )
        .await;
    assert!(
        fixture
            .is_new_client(&[(name, "for=\"[2001:db8::1]:443\"")])
            .await
    );
    fixture
        .assert_known_client(name, &["for=\"[2001:db8::1]\""])
        .await;
    assert!(
        fixture
            .is_new_client(&[(
                name,
                "for=3.3.3.3, for=\"4.4.4.4\";host=\"a,b;for=5.5.5.5\""
            )])
            .await
    );
    fixture.assert_known_client(name, &["for=4.4.4.4"]).await;
}

#[tokio::test]
async fn x_real_ip_and_custom_headers_are_supported() {
    for name in ["x-real-ip", "x-client-address"] {
        let fixture = OneRequestProxy::start(&format!(
            "trusted_proxies = ['127.0.0.0/8']\nip_header = '{name}'"
        ))
        .await;
        assert!(fixture.is_new_client(&[(name, "1.1.1.1")]).await);
        assert!(fixture.is_new_client(&[(name, "2.2.2.2")]).await);
        fixture
            .assert_known_client(name, &["1.1.1.1", "2.2.2.2"])
            .await;
        assert!(
            fixture.is_new_client(&[(XFF, "3.3.3.3")]).await,
            "without the header, the peer is the client"
        );
        fixture.assert_known_client(XFF, &["4.4.4.4"]).await;
    }
}
