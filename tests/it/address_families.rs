//! Machines and pods with only one address family, and listeners for both.

use crate::support::prelude::*;
use tokio::process::Command;

/// Runs the proxy with default addresses in a network namespace, and prints the responses.
const SCRIPT: &str = r#"
set -eu
ip link set lo up
$SETUP
"$TIDEGATE" run --config "$CONFIG" &
until "$TIDEGATE" health --config "$CONFIG" >/dev/null 2>&1; do
  kill -0 $!
  sleep 0.05
done
for url in $URLS; do
  curl --globoff --silent --output /dev/null --write-out "$url %{http_code}\n" "http://$url"
done
kill -TERM $!
wait $!
"#;

const CONFIG: &str = "
upstream.url = 'http://[::1]:3000'
admin = { address = 'ADMIN', probes = '[::]:9091' }
log.access = 'all'
rls = {}
check = {}
[[policy]]
name = 'nobody'
match = { client_ips = ['CLIENT'] }
action = 'deny'
";

/// Runs [`SCRIPT`]. Returns its output, or `None` where namespaces are not permitted.
async fn run_in_namespace(setup: &str, [client, admin]: [&str; 2], urls: &str) -> Option<String> {
    let in_namespace = || {
        let mut command = Command::new("unshare");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.args(["--user", "--map-root-user", "--net"]);
        command
    };
    let permitted = run_command(in_namespace().arg("true")).await;
    if !permitted.status.success() {
        println!("not checked: network namespaces are not permitted here");
        return None;
    }
    let (_dir, config) = write_temp_file(
        "config.toml",
        CONFIG.replace("CLIENT", client).replace("ADMIN", admin),
    );
    let mut command = in_namespace();
    command.args(["sh", "-c", SCRIPT]);
    command.env("TIDEGATE", env!("CARGO_BIN_EXE_tidegate"));
    command.env("CONFIG", &config);
    command.env("SETUP", setup).env("URLS", urls);
    let ended = run_command(&mut command).await;
    let output = format!("{}{}", ended.stdout, ended.stderr);
    assert!(ended.status.success(), "{output}");
    Some(output)
}

#[tokio::test]
async fn the_defaults_work_without_ipv4() {
    let setup = "ip address delete 127.0.0.1/8 dev lo";
    let urls = "[::1]:8080/ [::1]:9091/readyz [::1]:9090/livez";
    let Some(output) = run_in_namespace(setup, ["::1", "127.0.0.1:9090"], urls).await else {
        return;
    };
    for expected in [
        "[::1]:8080/ 403",
        "[::1]:9091/readyz 200",
        "[::1]:9090/livez 200",
        r#""address":"[::]:8080""#,
        r#""address":"[::1]:8081""#,
        r#""address":"[::1]:8082""#,
    ] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
}

#[tokio::test]
async fn the_defaults_work_without_ipv6() {
    let setup = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1";
    let urls = "127.0.0.1:8080/ 127.0.0.1:9091/readyz 127.0.0.1:9090/livez";
    let settings = ["::ffff:127.0.0.0/104", "[::1]:9090"];
    let Some(output) = run_in_namespace(setup, settings, urls).await else {
        return;
    };
    assert_contains(
        &output,
        &[
            "127.0.0.1:8080/ 403",
            "127.0.0.1:9091/readyz 200",
            "127.0.0.1:9090/livez 200",
            r#""address":"127.0.0.1:8081""#,
            r#""client_ip":"127.0.0.1""#,
        ],
    );
}

#[tokio::test]
async fn an_ipv4_client_of_a_dual_stack_listener_counts_as_ipv4() {
    let upstream = Upstream::echo().await;
    let url = format!("http://{}", upstream.address);
    let text = "listen.proxy_protocol = 'require'\nlisten.proxy_protocol_from = ['127.0.0.1']\n\
                client.trusted_proxies = ['127.0.0.1']";
    for (settings, greeting, expected) in [
        ("", "", "127.0.0.1"),
        (
            "client.trusted_proxies = ['127.0.0.1']",
            "",
            "203.0.113.9, 127.0.0.1",
        ),
        (
            text,
            "PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n",
            "203.0.113.9, 127.0.0.1",
        ),
    ] {
        let file = ConfigFile::new(settings);
        let proxy = file.start(&["--listen", "[::]:0", "--upstream", &url]);
        let port = proxy.wait_for_address("listening").await.port();
        let mut client = RawClient::connect(SocketAddr::from(([127, 0, 0, 1], port))).await;
        client.send(greeting).await;
        client
            .send("GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 203.0.113.9\r\n\r\n")
            .await;
        assert_eq!(client.read_response().await.status, 200, "{settings}");
        let seen = upstream.last_request();
        let forwarded = seen
            .headers
            .iter()
            .find(|(name, _)| name == "x-forwarded-for");
        assert_eq!(forwarded.unwrap().1, expected, "{settings}");
    }
}
