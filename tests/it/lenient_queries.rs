//! Queries with characters that URLs should escape, and the responses to targets that no parser
//! accepts.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

const RAW_QUERY: &str = "/q?query=up{job=\"x\"}&a=<b>|`^\\c";
const ESCAPED_QUERY: &str = "/q?query=up{job=%22x%22}&a=%3Cb%3E|`^\\c";

#[tokio::test]
async fn raw_characters_in_a_query_reach_the_app_escaped() {
    let proxy = Proxy::with_echo("").await;
    let mut client = RawClient::connect(proxy.address).await;
    // The body is not changed, and the connection is reused.
    let body = "GET /?\"<> HTTP/1.1\r\n\r\n";
    for _ in 0..3 {
        let head = format!(
            "POST {RAW_QUERY} HTTP/1.1\r\nHost: a\r\nX: ?\"<>\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        client.send(head).await;
        client.send(body).await;
        let reply = client.read_response().await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["target"], ESCAPED_QUERY);
        assert_eq!(reply.json()["body_len"], body.len());
        assert!(reply.text().contains("?\\\"<>"), "{}", reply.text());
    }
    // In small parts, as a request with an absolute target.
    let request = format!("GET http://a{RAW_QUERY} HTTP/1.1\r\nHost: a\r\n\r\n");
    for part in request.as_bytes().chunks(7) {
        client.send(part).await;
        tokio::task::yield_now().await;
    }
    let reply = client.read_response().await;
    assert_eq!((reply.status, proxy.echo().requests().len()), (200, 4));
    assert_eq!(reply.json()["target"], ESCAPED_QUERY);
}

#[tokio::test]
async fn a_raw_query_shares_the_quota_of_the_escaped_one_and_meets_its_conditions() {
    let config = r#"
[[policy]]
name = "deny"
match = { query = { role = "<admin>" } }
action = "deny"
[[policy]]
name = "key"
key = ["query:user"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get("/?user=%22a%22").await.status, 200);
    assert_eq!(proxy.get("/?user=\"a\"").await.status, 429);
    assert_eq!(proxy.get("/?user=\"a%22").await.status, 429);
    assert_eq!(proxy.get("/?user=b&role=<admin>").await.status, 403);
}

#[tokio::test]
async fn a_pipelined_request_changes_no_body() {
    let proxy = Proxy::with_echo("").await;
    let mut client = RawClient::connect(proxy.address).await;
    let second = "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n";
    let body = "GET /?<<<<<<<<<< HTTP/1.1\r\n\"\"\"";
    assert_eq!(body.len(), 30);
    let (first_part, rest) = body.split_at(5);
    client
        .send(format!(
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n{second}{first_part}"
        ))
        .await;
    assert_eq!(client.read_response().await.status, 200);
    client.send(rest).await;
    let reply = client.read_response().await;
    assert_eq!(reply.json()["body_len"], 30, "{}", reply.text());
    client.send("GET /?\" HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(client.read_response().await.json()["target"], "/?%22");
}

/// A read may begin within a pipelined head, whose start arrived with the request before it: the
/// rest is no request line, whatever it looks like.
#[tokio::test]
async fn the_rest_of_a_pipelined_head_is_not_changed() {
    let proxy = Proxy::with_echo("").await;
    let value = "see GET /p?q=\"v\"<w> HTTP/1.1";
    let second = format!("GET /second HTTP/1.1\r\nHost: a\r\nX-Note: {value}\r\n\r\n");
    let post = "POST /first HTTP/1.1\r\nHost: a\r\n";
    for first in [
        "GET /first HTTP/1.1\r\nHost: a\r\n\r\n",
        &format!("{post}Content-Length: 4\r\n\r\nbody"),
        &format!("{post}Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"),
        &format!("{post}Content-Length: 4\r\n\r\nbody{post}Content-Length: 4\r\n\r\n\r\n\r\n"),
    ] {
        let responses = first.matches("/first").count();
        // Before the value, before its word "GET", and before its query.
        for behind in ["X-Note: ", "see ", "see GET /p?q"] {
            let at = second.find(behind).unwrap() + behind.len();
            let (front, back) = second.split_at(at);
            let mut client = RawClient::connect(proxy.address).await;
            client.send(format!("{first}{front}")).await;
            for _ in 0..responses {
                assert_eq!(client.read_response().await.json()["target"], "/first");
            }
            client.send(back).await;
            let text = client.read_response().await.text();
            let value = value.replace('"', "\\\"");
            assert!(text.contains(&value), "{first:?}, {behind:?}: {text}");
        }
    }
}

/// The line of a request that arrived with the one before it is found as well.
#[tokio::test]
async fn a_raw_query_of_a_pipelined_request_is_escaped() {
    let proxy = Proxy::with_echo("").await;
    let mut client = RawClient::connect(proxy.address).await;
    let request = format!("GET {RAW_QUERY} HTTP/1.1\r\nHost: a\r\n\r\n");
    let (front, back) = request.split_at(7);
    client.send(format!("{request}{front}")).await;
    for rest in [back, ""] {
        assert_eq!(client.read_response().await.json()["target"], ESCAPED_QUERY);
        client.send(rest).await;
    }
}

#[tokio::test]
async fn a_target_that_cannot_be_parsed_has_a_reason_and_a_log_line() {
    let proxy = Proxy::with_echo("log.access = 'all'\n").await;
    for target in ["/a<b", "/a>b", "/a`b", "/\u{1}"] {
        let mark = proxy.log_mark();
        let mut client = proxy
            .send_raw(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        let reply = client.read_response().await;
        assert_eq!(reply.status, 400, "{target:?}");
        assert!(
            reply.json()["detail"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
        let line = proxy.wait_for_text("malformed", mark).await;
        assert_eq!(line.field("status"), "400");
    }
    assert_eq!(proxy.echo().requests().len(), 0);
}

/// A policy, the log and the app see the same query as over HTTP/1.
#[tokio::test]
async fn http2_queries_are_escaped_as_over_http1() {
    let config = "[[policy]]\nname = 'q'\nmatch = { query = { user = '<a>' } }\naction = 'deny'\n";
    let proxy = Proxy::with_echo(config).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let mut stream = 1;
    for (path, expected) in [
        ("/q?query={a}|`^\\b'", "/q?query={a}|`^\\b'"),
        ("/q?query=up{job=\"x\"}", "/q?query=up{job=%22x%22}"),
        ("/q?a=<b>&c=\">\"", "/q?a=%3Cb%3E&c=%22%3E%22"),
        ("/\"a\"?b", "/\"a\"?b"),
        ("/q", "/q"),
    ] {
        let get = get_fields_with(":path", path);
        let (front, last) = get.split_at(3);
        let [(name, value)] = last else {
            panic!("{last:?}")
        };
        // A literal, an entry of the dynamic table, and the same entry again.
        let indexed = [
            encode_header_block(front),
            encode_indexed_literal(name, value),
        ]
        .concat();
        let repeated = [encode_header_block(front), vec![0xbe]].concat();
        for block in [encode_header_block(&get), indexed, repeated] {
            client.send(headers_frame(END_STREAM, stream, block)).await;
            let answer = client.wait_for_frame("an answer", |frame| {
                frame.stream == stream && matches!(frame.kind, HEADERS | RST_STREAM)
            });
            assert_eq!(answer.await.status(), Some(200), "{path}");
            assert_eq!(proxy.echo().last_request().target, expected);
            stream += 2;
        }
    }
    client.send(get_frame(stream, "/q?user=<a>")).await;
    client
        .wait_for_frame("a denial", |frame| {
            frame.stream == stream && frame.kind == HEADERS
        })
        .await;
    assert_eq!(proxy.echo().last_request().target, "/q");
}

/// Every visible character, in path and query, over both versions.
#[tokio::test]
async fn both_versions_accept_the_same_targets() {
    let proxy = Proxy::with_echo("").await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(window_update_frame(0, 1 << 30)).await;
    let mut stream = 1;
    for byte in 0x21..0x7f_u8 {
        for target in [
            format!("/a{}b", char::from(byte)),
            format!("/a?b{}c", char::from(byte)),
        ] {
            let mut http1 = proxy
                .send_raw(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"))
                .await;
            let expected = http1.read_response().await.status;
            client.send(get_frame(stream, &target)).await;
            let answer = client.wait_for_frame("an answer", |frame| {
                frame.stream == stream && matches!(frame.kind, HEADERS | RST_STREAM)
            });
            assert_eq!(answer.await.status(), Some(expected), "{target}");
            stream += 2;
        }
    }
}

#[tokio::test]
async fn the_check_accepts_raw_queries() {
    let config = "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n[[policy]]\nname = 'q'\nmatch = { query = { user = '<a>' } }\naction = 'deny'\n";
    let proxy = Proxy::setup(config).start().await;
    let check = proxy.logged_address("check listening").unwrap();
    for (target, expected) in [("/q?user=\"b\"", 200), ("/q?user=<a>", 403), ("/q<", 400)] {
        let nginx = ClientRequest::new(check, "GET", "/check/nginx")
            .header("Host", "shop.example")
            .header("X-Original-Method", "GET")
            .header("X-Original-URI", target);
        assert_eq!(nginx.send_for_status().await, expected, "{target}");
    }
}
