//! What scripts in a browser may read of our own answers.

use crate::support::client::{Ask, Reply};
use crate::support::proxy::Proxy;
use crate::support::upstream::{Upstream, full};
use hyper::Response;

const APP: &str = "https://app.example";

const POLICIES: &str = r#"
[[policy]]
name = "closed"
match = { path = "/denied" }
action = "deny"
[[policy]]
name = "p"
match = { path = "/limited" }
limit = { requests = 0, per = "1h" }
[[policy]]
name = "own"
match = { path = "/own" }
limit = { requests = 0, per = "1h" }
reject = { status = 420, body = "no", headers = { access-control-allow-origin = "https://own.example" } }
"#;

fn told(reply: &Reply) -> [Option<&str>; 3] {
    [
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "vary",
    ]
    .map(|name| reply.header(name))
}

fn from(proxy: &Proxy, target: &str, origin: &str) -> Ask {
    proxy.ask("GET", target).header("Origin", origin)
}

#[tokio::test]
async fn listed_origins_may_read_our_answers_and_no_others() {
    let upstream = Upstream::serving(|_| async {
        let mut answer = Response::new(full("ok"));
        answer
            .headers_mut()
            .insert("vary", "Accept".parse().unwrap());
        answer
    })
    .await;
    let cors =
        format!("[response.cors]\nallow_origins = ['{APP}', 'http://localhost:3000']\n{POLICIES}");
    let proxy = Proxy::start(&cors, upstream.address).await;
    for (target, status) in [("/limited", 429), ("/denied", 403), ("/a%00", 400)] {
        let reply = from(&proxy, target, APP).send().await;
        assert_eq!(
            (reply.status, told(&reply)),
            (status, [Some(APP), Some("true"), Some("Origin")]),
            "{target}"
        );
        let exposed = reply.header("access-control-expose-headers").unwrap();
        for name in [
            "Retry-After",
            "RateLimit",
            "RateLimit-Policy",
            "X-RateLimit-Limit",
            "X-RateLimit-Remaining",
            "X-RateLimit-Reset",
        ] {
            assert!(
                exposed.split(", ").any(|exposed| exposed == name),
                "{exposed}"
            );
        }
        for stranger in [
            "https://app.example.evil",
            "https://app.example:8443",
            "http://app.example",
            "null",
            "",
        ] {
            let reply = from(&proxy, target, stranger).send().await;
            assert_eq!(
                told(&reply),
                [None, None, Some("Origin")],
                "{target} {stranger}"
            );
            assert_eq!(reply.header("access-control-expose-headers"), None);
        }
        assert_eq!(told(&proxy.get(target).await), [None, None, Some("Origin")]);
    }
    let own = from(&proxy, "/own", APP).send().await;
    assert_eq!(
        (own.status, told(&own)),
        (420, [Some("https://own.example"), None, None])
    );
    let theirs = from(&proxy, "/", APP).send().await;
    assert_eq!(
        (theirs.status, told(&theirs)),
        (200, [None, None, Some("Accept")]),
        "the app's own answer"
    );
}

#[tokio::test]
async fn any_origin_may_without_credentials() {
    let any = format!("[response.cors]\nallow_origins = ['*']\n{POLICIES}");
    // Nobody listens there.
    let proxy = Proxy::builder().config(&any).start().await;
    for (target, status) in [("/limited", 429), ("/", 502)] {
        let reply = from(&proxy, target, "https://anywhere.example")
            .send()
            .await;
        assert_eq!(
            (reply.status, told(&reply)),
            (status, [Some("*"), None, Some("Origin")]),
            "{target}"
        );
    }
    let proxy = Proxy::builder().config(POLICIES).start().await;
    assert_eq!(
        told(&from(&proxy, "/limited", APP).send().await),
        [None; 3],
        "nothing is said unless asked for"
    );
}

#[tokio::test]
async fn a_refusal_while_the_store_is_away_is_read_too() {
    let config = format!(
        "[response.cors]\nallow_origins = '{APP}'\n[store]\nkind = 'redis'\nredis.url = 'redis://127.0.0.1:9'\n\
         [[policy]]\nname = 'p'\nlimit = {{ requests = 9, per = '1h' }}\non_store_failure = 'closed'\n"
    );
    let proxy = Proxy::builder().config(&config).start().await;
    let reply = from(&proxy, "/", APP).send().await;
    assert_eq!(
        (reply.status, told(&reply)),
        (503, [Some(APP), Some("true"), Some("Origin")])
    );
}
