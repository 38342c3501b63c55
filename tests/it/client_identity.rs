//! Client identification: a header of an untrusted peer must not decide the client address.

use crate::support::prelude::*;

const PER_CLIENT_POLICY: &str = r#"
[[policy]]
name = "per-client"
key = ["client_ip"]
limit = { requests = 1, per = "1h" }
"#;

/// A proxy with one request per client, so that a refused client was seen before.
struct OneRequestProxy(Proxy);

impl OneRequestProxy {
    async fn start(client: &str) -> Self {
        let config = format!("[client]\n{client}\n{PER_CLIENT_POLICY}");
        Self(Proxy::with_echo(&config).await)
    }

    async fn is_new_client(&self, headers: &[(&str, &str)]) -> bool {
        let mut ask = self.0.request("GET", "/");
        for (name, value) in headers {
            ask = ask.header(name, value);
        }
        match ask.send_for_status().await {
            200 => true,
            429 => false,
            status => panic!("{status} for {headers:?}"),
        }
    }

    /// Sends a request with each value, and asserts whether its client is new.
    async fn assert_clients(&self, header: &str, values: &[(&str, Client)]) {
        for (value, expected) in values {
            let is_new = self.is_new_client(&[(header, value)]).await;
            assert_eq!(
                is_new,
                *expected == New,
                "{header}: {value} is not {expected:?}"
            );
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    New,
    Known,
}
use Client::{Known, New};

const XFF: &str = "X-Forwarded-For";

#[tokio::test]
async fn trap_23_a_header_from_an_untrusted_peer_is_ignored_and_logged_once() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['10.0.0.0/8']").await;
    let values = [
        ("1.1.1.1", New),
        ("2.2.2.2", Known),
        ("10.0.0.1", Known),
        ("3.3.3.3, 10.0.0.1", Known),
    ];
    fixture.assert_clients(XFF, &values).await;
    let real_ip = [("4.4.4.4", Known)];
    fixture.assert_clients("X-Real-IP", &real_ip).await;
    fixture.0.wait_for_text("trusted_proxies", 0).await;
    let log = fixture.0.log_text();
    assert_eq!(log.matches("trusted_proxies").count(), 1, "{log}");
}

#[tokio::test]
async fn trap_23_the_list_is_read_from_the_right() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']").await;
    let values = [
        ("1.1.1.1, 2.2.2.2, 10.0.0.1", New),
        ("2.2.2.2", Known),
        ("9.9.9.9,2.2.2.2", Known),
        ("2.2.2.2 ,10.0.0.1,10.0.0.2", Known),
        ("2.2.2.2, 3.3.3.3", New),
        // The address to the left of the untrusted one was not used.
        ("1.1.1.1", New),
    ];
    fixture.assert_clients(XFF, &values).await;
}

#[tokio::test]
async fn trap_23_addresses_may_carry_a_port() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    let values = [
        ("2.2.2.2:1234", New),
        ("2.2.2.2", Known),
        ("2.2.2.2:9", Known),
        ("::ffff:2.2.2.2", Known),
        ("[2001:db8::1]:443", New),
        ("2001:db8::1", Known),
        ("[2001:db8::1]", Known),
        ("[2001:DB8:0::1]:9", Known),
    ];
    fixture.assert_clients(XFF, &values).await;
}

#[tokio::test]
async fn trap_23_repeated_header_lines_form_one_list() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']").await;
    for (lines, expected) in [
        (&["1.1.1.1", "2.2.2.2", "10.0.0.1"][..], New),
        (&["8.8.8.8, 2.2.2.2", "10.0.0.1"], Known),
        (&["2.2.2.2", "3.3.3.3"], New),
    ] {
        let lines: Vec<_> = lines.iter().map(|line| (XFF, *line)).collect();
        let is_new = fixture.is_new_client(&lines).await;
        assert_eq!(is_new, expected == New, "{lines:?}");
    }
}

#[tokio::test]
async fn trap_23_an_invalid_address_does_not_hide_the_client() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    let values = [
        ("1.1.1.1, nonsense", New),
        ("7.7.7.7, nonsense", Known),
        ("8.8.8.8, 999.1.1.1", Known),
        ("9.9.9.9, ,nonsense,", Known),
    ];
    fixture.assert_clients(XFF, &values).await;
}

#[tokio::test]
async fn trap_22_an_ipv6_client_is_identified_by_its_prefix() {
    let fixture = OneRequestProxy::start("trusted_proxies = ['127.0.0.0/8']").await;
    let values = [
        ("2001:db8:1:1::1", New),
        ("2001:db8:1:1::2", Known),
        ("2001:db8:1:1:ffff:ffff:ffff:ffff", Known),
        ("2001:db8:1:2::1", New),
    ];
    fixture.assert_clients(XFF, &values).await;
}

#[tokio::test]
async fn a_client_behind_a_translator_is_identified_by_its_ipv4_address() {
    let settings = "trusted_proxies = ['127.0.0.0/8', '64:ff9b::198.51.100.250']\nnat64_prefixes = ['2001:db8:64::/48']";
    let fixture = OneRequestProxy::start(settings).await;
    let values = [
        ("64:ff9b::203.0.113.1", New),
        ("64:ff9b::198.51.100.7", New),
        ("::ffff:0:203.0.113.9", New),
        ("2001:db8:64:cb00:71:200::", New),
        ("203.0.113.1", Known),
        ("198.51.100.7:1234", Known),
        ("\"[64:ff9b::cb00:7101]:99\"", Known),
        ("203.0.113.9", Known),
        ("203.0.113.2", Known),
        ("64:ff9b::203.0.113.2, 64:ff9b::198.51.100.250", Known),
        // 6to4 and an address beside the prefix share the /64 of their own.
        ("2002:cb00:7101::1", New),
        ("64:ff9b:1::203.0.113.1", New),
    ];
    fixture.assert_clients(XFF, &values).await;
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
    let settings = "trusted_proxies = ['127.0.0.0/8']\nipv6_prefix = 48\nipv4_prefix = 24";
    let fixture = OneRequestProxy::start(settings).await;
    let values = [
        ("2001:db8:1:1::1", New),
        ("5.5.5.5", New),
        ("2001:db8:1:2::1", Known),
        ("5.5.5.200", Known),
        ("5.5.6.5", New),
    ];
    fixture.assert_clients(XFF, &values).await;
}

#[tokio::test]
async fn the_forwarded_header_is_supported() {
    let settings = "trusted_proxies = ['127.0.0.0/8', '10.0.0.0/8']\nip_header = 'forwarded'";
    let fixture = OneRequestProxy::start(settings).await;
    let values = [
        (
            "for=1.1.1.1, for=2.2.2.2;proto=https;by=10.0.0.9, For=10.0.0.1",
            New,
        ),
        ("for=2.2.2.2", Known),
        ("for=\"2.2.2.2:80\"", Known),
        ("proto=http;for=2.2.2.2", Known),
        ("for=\"[2001:db8::1]:443\"", New),
        ("for=\"[2001:db8::1]\"", Known),
        ("for=3.3.3.3, for=\"4.4.4.4\";host=\"a,b;for=5.5.5.5\"", New),
        ("for=4.4.4.4", Known),
    ];
    fixture.assert_clients("Forwarded", &values).await;
}

#[tokio::test]
async fn x_real_ip_and_custom_headers_are_supported() {
    for name in ["x-real-ip", "x-client-address"] {
        let settings = format!("trusted_proxies = ['127.0.0.0/8']\nip_header = '{name}'");
        let fixture = OneRequestProxy::start(&settings).await;
        let values = [
            ("1.1.1.1", New),
            ("2.2.2.2", New),
            ("1.1.1.1", Known),
            ("2.2.2.2", Known),
        ];
        fixture.assert_clients(name, &values).await;
        // Without the header, the peer is the client.
        let values = [("3.3.3.3", New), ("4.4.4.4", Known)];
        fixture.assert_clients(XFF, &values).await;
    }
}
