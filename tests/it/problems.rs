//! The problems that `/readyz` states in words. Readiness itself does not depend on them.

use crate::support::prelude::*;

const ONE_POLICY: &str = "[[policy]]\nname = \"p\"\nlimit = { requests = 19, per = \"1h\" }\n";

async fn get_readiness(proxy: &Proxy, accept: &str) -> RawResponse {
    proxy
        .admin_request("GET", "/readyz")
        .header("Accept", accept)
        .send()
        .await
}

/// Waits until `/readyz` has a hint that contains `words`. It always answers 200.
async fn wait_for_hint(proxy: &Proxy, words: &str) -> String {
    // The history is sampled once a second.
    eventually(format!("the hint {words:?}"), TEST_TIMEOUT, async || {
        let reply = get_readiness(proxy, "*/*").await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let hints: Vec<String> = serde_json::from_value(reply.json()["hints"].clone()).unwrap();
        hints.into_iter().find(|hint| hint.contains(words))
    })
    .await
}

/// An address that refuses connections.
async fn closed_address() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

#[tokio::test]
async fn an_upstream_that_is_down_and_many_refusals_are_stated() {
    let proxy = Proxy::start(ONE_POLICY, closed_address().await).await;
    let statuses = proxy.get_statuses("/", 100).await;
    assert_eq!(statuses.iter().filter(|status| **status == 502).count(), 19);
    let hint = wait_for_hint(&proxy, "upstream fails").await;
    assert_contains(&hint, &["100 %", "(19 of 19)"]);
    let hint = wait_for_hint(&proxy, "were refused").await;
    assert!(hint.starts_with("81 % of the requests"), "{hint}");
    let text = get_readiness(&proxy, "text/plain").await;
    text.expect_header("content-type", "text/plain; charset=utf-8");
    let text = text.text();
    assert!(
        text.starts_with("ready; store up\n- the upstream fails: 100 %")
            && text.contains("\n- 81 % of the requests"),
        "{text}"
    );
}

/// A decision about two keys fails in a cluster that is configured as one server; the probe, of one
/// key, succeeds.
#[tokio::test]
async fn requests_without_an_answer_of_a_store_that_is_up_are_stated() {
    let server = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    server.run("CLUSTER ADDSLOTSRANGE 0 16383").await;
    let config = format!(
        "{}\n[[policy]]\nname = 'a'\nlimit = {{ requests = 1, per = '1h' }}
        on_store_failure = 'closed'
        [[policy]]\nname = 'b'\nlimit = {{ requests = 1, per = '1m' }}",
        server.store_config()
    );
    let proxy = Proxy::start(&config, Upstream::echo().await.address).await;
    let statuses = proxy.get_statuses("/", 30).await;
    assert!(statuses.iter().all(|status| *status == 503), "{statuses:?}");
    let hint = wait_for_hint(&proxy, "decided without the store").await;
    assert_contains(&hint, &["30 of the 30 requests", "tidegate doctor"]);
    let hints = get_readiness(&proxy, "*/*").await.text();
    assert!(!hints.contains("a limit is too low"), "{hints}");
}

#[tokio::test]
async fn errors_of_the_app_itself_are_told_apart_from_failed_connections() {
    for (status, reason) in [(504, "Gateway Timeout"), (500, "Internal Server Error")] {
        let answer = format!("HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\n\r\n");
        let upstream = RawUpstream::with_response(answer.leak()).await;
        let proxy = Proxy::start(ONE_POLICY, upstream.address).await;
        assert_eq!(proxy.get_statuses("/broken?x=1", 6).await, [status; 6]);
        let hint = wait_for_hint(&proxy, "the app at the upstream fails").await;
        assert!(hint.contains("(6 of 6)"), "{hint}");
        assert!(hint.ends_with("most errors: /broken"), "{hint}");
        let hints = get_readiness(&proxy, "*/*").await.json()["hints"].clone();
        assert_eq!(hints.as_array().unwrap().len(), 1, "{hints}");
    }
}

#[tokio::test]
async fn missing_policies_and_settings_that_wait_for_a_restart_are_stated() {
    let proxy = Proxy::with_echo("").await;
    wait_for_hint(&proxy, "no policies are in effect").await;
    proxy.write_config("shutdown.grace = \"3s\"\nlisten.max_connections = 77\n");
    let hint = wait_for_hint(&proxy, "wait for a restart").await;
    assert_contains(&hint, &["listen.max_connections", "shutdown.grace"]);
    proxy.write_config(ONE_POLICY);
    wait_until("the end of the hints", async || {
        get_readiness(&proxy, "application/json").await.json()["hints"] == json!([])
    })
    .await;
}

#[tokio::test]
async fn policies_are_searched_and_sorted_before_they_are_paged() {
    let policies: String = (0..30)
        .map(|n| {
            format!("[[policy]]\nname = \"p{n:02}\"\nmatch = {{ path = \"/{n}\" }}\nlimit = {{ requests = 2, per = \"1h\" }}\n")
        })
        .collect();
    let proxy = Proxy::with_token(&policies).await;
    for (path, count) in [("/21", 3), ("/07", 1), ("/9", 5), ("/12", 2)] {
        for _ in 0..count {
            proxy.status_for_user("u", path).await;
        }
    }
    proxy
        .wait_for_policy("p12", |policy| policy["last_hour"]["allowed"].is_array())
        .await;
    let names = async |query: &str| -> Vec<String> {
        let json = proxy.get_json(&format!("/policies?{query}")).await;
        let policies = json["policies"].as_array().unwrap().iter();
        policies
            .map(|policy| policy["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names("sort=refused&limit=3").await, ["p09", "p21", "p00"]);
    let answer = names("sort=requests&limit=4").await;
    assert_eq!(answer, ["p09", "p21", "p12", "p00"]);
    let answer = names("sort=requests&limit=2&offset=2").await;
    assert_eq!(answer, ["p12", "p00"]);
    assert_eq!(names("search=P1&limit=2&offset=9").await, ["p19"]);
    assert_eq!(names("limit=1").await, ["p00"]);
    assert_eq!(
        proxy.get_json("/policies?search=p1").await["total"],
        json!(10)
    );
}
