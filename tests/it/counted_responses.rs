//! `count_when`: a request counts only if its response has one of the listed statuses.

use crate::support::h2_frames::{FrameClient, HEADERS, request_head_frame};
use crate::support::login_app;
use crate::support::prelude::*;

/// The period is so long that no unit returns by itself.
const LOGIN_POLICY: &str = "[[policy]]
name = 'login'
key = ['header:x-user']
limit = { requests = 5, per = '100d' }
count_when = { status = [401, 403] }\n";

async fn log_in(proxy: &Proxy, user: &str, password: &str) -> (u16, Option<u64>) {
    let reply = login_app::log_in(proxy, "/", user, password).await;
    (reply.status, reply.remaining("login"))
}

#[tokio::test]
async fn of_64_parallel_wrong_passwords_exactly_5_reach_the_app_and_right_ones_cost_nothing() {
    let algorithms = [
        "sliding_log",
        "sliding_window",
        "fixed_window",
        "token_bucket",
    ];
    for (algorithm, in_redis) in algorithms
        .into_iter()
        .flat_map(|algorithm| [(algorithm, false), (algorithm, true)])
    {
        let redis = in_redis.then(RedisServer::start);
        let store = redis
            .as_ref()
            .map(RedisServer::store_config)
            .unwrap_or_default();
        let config = format!("{store}\ndefaults.algorithm = '{algorithm}'\n{LOGIN_POLICY}");
        let app = Upstream::with_handler(check_password).await;
        let proxy = Proxy::start(&config, app.address).await;
        // Credits reach Redis soon: more right passwords than the limit has units.
        for _ in 0..13 {
            let is_credited = async || log_in(&proxy, "ann", "right").await == (200, Some(4));
            wait_until("the credit", is_credited).await;
        }
        let before = app.requests().len();
        let replies = join_all((0..64).map(|_| log_in(&proxy, "bob", "wrong"))).await;
        let failed = replies.iter().filter(|(status, _)| *status == 401).count();
        let refused = replies.iter().filter(|(status, _)| *status == 429).count();
        assert_eq!((failed, refused), (5, 59), "{algorithm} {in_redis}");
        assert_eq!(app.requests().len() - before, 5);
        assert_eq!(log_in(&proxy, "bob", "right").await.0, 429);
    }
}

#[tokio::test]
async fn our_own_502_gives_the_unit_back_unless_it_is_listed() {
    let closed = RawUpstream::with_script(|_, _| async {}).await;
    let address = closed.address;
    drop(closed);
    for (counted, expected) in [
        ("401, '4xx'", [502; 8].to_vec()),
        ("'5xx'", [vec![502; 5], vec![429; 3]].concat()),
    ] {
        let config = LOGIN_POLICY.replace("401, 403", counted);
        let proxy = Proxy::start(&config, address).await;
        assert_eq!(proxy.get_statuses("/", 8).await, expected, "{counted}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_response_is_counted() {
    let silent = RawUpstream::silent().await;
    let config = LOGIN_POLICY.replace("requests = 5", "requests = 1");
    let proxy = Proxy::start(&config, silent.address).await;
    let client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    wait_until("the request", async || silent.connection_count() > 0).await;
    drop(client);
    assert_eq!(proxy.get("/").await.status, 429);
}

/// After a request was sent, only the app's own status returns a unit.
#[tokio::test]
async fn replies_of_the_proxy_to_a_sent_request_return_no_unit() {
    let switches = "Connection: upgrade\r\nUpgrade: websocket\r\n";
    let wrong_switch = format!("HTTP/1.1 101 Switching Protocols\r\n{switches}\r\n");
    let long_field = "x".repeat(400_000);
    let long_head = format!("HTTP/1.1 200 OK\r\nX-Long: {long_field}\r\n\r\n");
    for (response, expected) in [
        ("", 502),
        ("HTTP/1.1 200 OK\r\nContent-Le", 502),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 502),
        ("SSH-2.0-OpenSSH_9.2\r\n", 502),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            502,
        ),
        (&wrong_switch, 502),
        (&long_head, 502),
        ("wait", 504),
        (
            "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
            500,
        ),
    ] {
        let bytes = response.to_owned();
        let app = RawUpstream::with_script(move |_, mut socket| {
            let bytes = bytes.clone();
            async move {
                socket.read_request().await;
                match bytes.as_str() {
                    "wait" => socket.read_to_close().await,
                    bytes => socket.send(bytes.as_bytes()).await,
                }
            }
        })
        .await;
        for counted in ["'2xx'", "401", "'2xx', 404"] {
            let config = LOGIN_POLICY
                .replace("requests = 5", "requests = 1")
                .replace("401, 403", counted);
            let config = format!("upstream.response_timeout = '200ms'\n{config}");
            let proxy = Proxy::start(&config, app.address).await;
            let case = format!("{counted} {:?}", response.get(..40).unwrap_or(response));
            let own = [expected, if expected == 500 { 500 } else { 429 }];
            assert_eq!(proxy.get_statuses("/", 2).await, own, "{case}");
        }
    }
}

#[tokio::test]
async fn a_request_that_outlasts_its_max_duration_is_counted_once_it_was_sent() {
    let silent = RawUpstream::silent().await;
    let slots = "[[policy]]\nname = 'slots'\nkey = ['header:x-user']\n\
        limit = { algorithm = 'concurrency', requests = 9, max_duration = '300ms' }\n";
    let config = LOGIN_POLICY
        .replace("requests = 5", "requests = 1")
        .replace("401, 403", "'2xx'");
    let proxy = Proxy::start(&format!("{config}{slots}"), silent.address).await;
    assert_eq!(proxy.get_statuses("/", 2).await, [504, 429]);
}

#[tokio::test]
async fn an_extended_connect_that_opens_no_websocket_is_counted() {
    let app = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    let config = LOGIN_POLICY
        .replace("requests = 5", "requests = 1")
        .replace("401, 403", "'2xx'");
    let proxy = Proxy::start(&config, app.address).await;
    let fields = [
        (":method", "CONNECT"),
        (":protocol", "websocket"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/"),
        ("sec-websocket-version", "13"),
    ];
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(request_head_frame(1, &fields)).await;
    client.wait_for_kind(HEADERS).await;
    assert_eq!(proxy.get("/").await.status, 429);
}

#[tokio::test]
async fn check_names_what_does_not_go_with_it() {
    for (wrong, expected) in [
        ("count_rejected = true", "not with count_when"),
        (
            "lease = 'auto'",
            "not with an estimate as cost or count_when",
        ),
        (
            "cost = { header = 'x-cost' }",
            "expected a number from 1 as cost",
        ),
        ("cost = 0", "expected a number from 1 as cost"),
        ("shards = 2", "also of count_when"),
        ("match = { domain = 'a' }", "has no response"),
    ] {
        let output = check_output(&format!("{LOGIN_POLICY}{wrong}\n")).await;
        assert!(output.contains(expected), "{wrong}: {output}");
    }
    let with_check = format!("check.address = '127.0.0.1:0'\n{LOGIN_POLICY}");
    assert_contains(&check_output(&with_check).await, &["carry no response"]);
    for status in ["[]", "[99]", "['6xx']", "[401.5]", "[-1]"] {
        let config = LOGIN_POLICY.replace("[401, 403]", status);
        assert!(check_output(&config).await.contains("expected"), "{status}");
    }
    let described = check_output(LOGIN_POLICY).await;
    assert_contains(&described, &["if the response has status 401, 403, else 0"]);
}

async fn check_output(config: &str) -> String {
    let output = run_check(config).await;
    output.stdout + &output.stderr
}
