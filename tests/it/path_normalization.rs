//! Trap 24: policies must match the path that the upstream serves.

use crate::support::client::RawClient;
use crate::support::proxy::Proxy;
use crate::support::upstream::{RawUpstream, Upstream};

const GUARD_POLICY: &str = r#"
[[policy]]
name = "guard"
match = { path = ["/admin/**", "/exact", "/one/{word}"] }
action = "deny"
"#;

/// The response status of each target. 403 means that the guard policy matched.
async fn get_statuses<'a>(path_settings: &str, targets: &[&'a str]) -> Vec<(&'a str, u16)> {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(
        &format!("[path]\n{path_settings}\n{GUARD_POLICY}"),
        upstream.address,
    )
    .await;
    let mut statuses = Vec::new();
    for target in targets {
        statuses.push((*target, proxy.get(target).await.status));
    }
    statuses
}

#[tokio::test]
async fn trap_24_no_path_spelling_bypasses_a_policy() {
    let targets = [
        "/admin",
        "/admin/",
        "/admin/x",
        "//admin/x",
        "/admin//x",
        "/./admin/x",
        "/a/../admin/x",
        "/a/b/../../admin",
        "/../admin/x",
        "/%61dmin/x",
        "/%61%64%6D%69%6e/x",
        "/%2e/admin/x",
        "/a/%2e%2E/admin/x",
        "/a/.%2e/admin/x",
        "/admin%2Fx",
        "/admin%2fx",
        "/%2Fadmin/x",
        "/a%2F..%2Fadmin/x",
        "/a/..%2Fadmin/x",
        "/admin%5Cx",
        "/admin;v=1/x",
        "/admin;/x",
        "/;x=1/admin/x",
        "/.;x/admin/y",
        "/a/..;/admin/x",
        // Spellings resolved by WHATWG URL parsers, by routers without path parameters, and by
        // Tomcat.
        "/admin/..;/x",
        "/admin/..;a=b/x",
        "/admin/%2e%2e;/x",
        "/admin/.;/x",
        "/admin//../x",
        "/admin/;x/../y",
        "/.%2e;x=y/admin/z",
        "/a;%2f..%2fadmin/x",
        "/a/%2e%2e%2fadmin/x",
        "/a%5c..%5cadmin/y",
        "/a\\..\\admin/y",
        "/admin/x%2f..%2f..%2fy",
        // Spellings that matter to apps that route by the unnormalized path.
        "/admin/../x",
        "/admin/x/../../y",
        "/admin/..",
        "/admin/%2e%2e/x",
        "/admin;x/../y",
        "/one/;word",
        "/one/.",
        // Encoded slashes and backslashes: each server decodes one or both kinds.
        "/admin%2Fx%5C..%5C..%5C..",
        "/admin%5Cx%2F..%2F..%2F..",
        "/admin%2Fx\\..\\..",
        "/admin?x=1",
        "/admin/x?/../../other",
        "/exact",
        "/exact/",
        "/exact;x",
        "/exac%74",
    ];
    for (target, status) in get_statuses("", &targets).await {
        assert_eq!(status, 403, "{target} bypassed the guard policy");
    }
}

#[tokio::test]
async fn trap_24_other_paths_do_not_match_the_policy() {
    let targets = [
        "/",
        "/administrator",
        "/ADMIN/x",
        "/x/admin",
        "/%2561dmin/x",
        "/exact/x",
        "/a/admin/../x",
        "/one/two/../three/four",
        "/one/two/three;x",
        "/x?/admin/x",
    ];
    for (target, status) in get_statuses("", &targets).await {
        assert_eq!(status, 200, "{target}");
    }
}

#[tokio::test]
async fn trap_24_path_normalization_is_configurable() {
    let cases = [
        ("escaped_slashes = 'reject'", "/admin%2Fx", 400),
        ("escaped_slashes = 'reject'", "/other%5Cx", 400),
        ("escaped_slashes = 'keep'", "/admin%2Fx", 200),
        ("escaped_slashes = 'decode'", "/admin%2Fx", 403),
        ("trailing_slash = 'significant'", "/exact/", 200),
        ("trailing_slash = 'significant'", "/exact", 403),
        ("path_parameters = 'keep'", "/exact;x", 200),
        ("merge_slashes = false", "//admin/x", 200),
        ("case_sensitive = false", "/ADMIN/x", 403),
        ("normalize = false", "/./admin/x", 200),
        ("normalize = false", "/admin/x", 403),
    ];
    for (settings, target, expected) in cases {
        assert_eq!(
            get_statuses(settings, &[target]).await,
            [(target, expected)],
            "{settings}"
        );
    }
}

#[tokio::test]
async fn trap_24_captures_are_read_from_the_normalized_path() {
    let config = r#"
[[policy]]
name = "p"
key = ["path:/t/{tenant}/**"]
limit = { requests = 1, per = "1h" }
"#;
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(config, upstream.address).await;
    assert_eq!(proxy.get("/t/acme/x").await.status, 200);
    for equivalent in [
        "/t/%61cme/y",
        "//t//acme",
        "/t/acme;v=2/x",
        "/t/other/../acme/",
    ] {
        assert_eq!(proxy.get(equivalent).await.status, 429, "{equivalent}");
    }
    assert_eq!(proxy.get("/t/other/x").await.status, 200);
}

#[tokio::test]
async fn the_request_target_is_forwarded_unchanged() {
    let upstream = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let proxy = Proxy::start(GUARD_POLICY, upstream.address).await;
    let targets = [
        "//a/./b/%2e%2e/c%2Fd;p=1/?q=%20//&r=a+b",
        "/%41/~x",
        "/a/../b/",
        "/?",
        "/x??y",
        "/a|b[c]",
    ];
    for target in targets {
        let mut client = RawClient::connect(proxy.address).await;
        client
            .send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        assert_eq!(client.read_response().await.status, 200, "{target}");
        let received = String::from_utf8(upstream.received_bytes()).unwrap();
        assert!(
            received.contains(&format!("GET {target} HTTP/1.1\r\n")),
            "{target} was forwarded as {received}"
        );
    }
}
