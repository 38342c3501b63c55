//! Who only asks whether a request may pass: by the words of nginx, Traefik and Envoy, and by nginx itself.
//! `tests/envoy.sh` has Traefik and Envoy themselves ask.

use super::pages::blocks;
use crate::support::client::{Ask, Reply};
use crate::support::nginx::Nginx;
use crate::support::proxy::Proxy;
use crate::support::upstream::Upstream;
use std::net::SocketAddr;

const CHECK: &str = "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n";

const API: &str = "[[policy]]
name = 'api'
match = { methods = ['POST'], hosts = ['shop.example'], path = '/api/**' }
key = ['client_ip']
limit = { requests = 2, per = '1h' }\n";

async fn start(config: &str) -> (Proxy, SocketAddr) {
    let proxy = Proxy::builder().config(config).start().await;
    let check = proxy.logged_address("check listening").expect("an address to ask at");
    (proxy, check)
}

fn traefik(at: SocketAddr, method: &str, target: &str) -> Ask {
    Ask::new(at, "GET", "/check/traefik")
        .header("Host", "tidegate:8082")
        .header("X-Forwarded-Method", method)
        .header("X-Forwarded-Proto", "https")
        .header("X-Forwarded-Host", "Shop.Example:443")
        .header("X-Forwarded-Uri", target)
        .header("X-Forwarded-For", "10.1.1.1")
}

fn nginx(at: SocketAddr, method: &str, target: &str) -> Ask {
    Ask::new(at, "GET", "/check/nginx")
        .header("Host", "shop.example")
        .header("X-Original-Method", method)
        .header("X-Original-URI", target)
        .header("X-Forwarded-For", "10.1.1.1")
}

fn envoy(at: SocketAddr, method: &str, target: &str) -> Ask {
    Ask::new(at, method, &format!("/check/envoy{target}"))
        .header("Host", "shop.example")
        .header("Content-Length", "0")
        .header("X-Forwarded-For", "10.1.1.1")
}

#[tokio::test]
async fn each_tells_of_a_request_in_its_own_way() {
    for question in [traefik, nginx, envoy] {
        let (proxy, at) = start(&format!("{CHECK}{API}")).await;
        let passes = question(at, "POST", "/api/x?y=1").send().await;
        assert_eq!((passes.status, passes.text().as_str()), (200, ""), "{passes:?}");
        assert!(told(&passes, "ratelimit").starts_with("\"api\";r=1;t="), "{passes:?}");
        assert_eq!(question(at, "POST", "/x/..//api/%78").send().await.status, 200);
        for spelling in ["/api/x", "/API/../api/x", "/%61pi/", "/api", "/x/%2e%2e/api/y", "/x%2f..%2fapi%2fy"]
        {
            let refused = question(at, "POST", spelling).send().await;
            assert_eq!((refused.status, told(&refused, "x-tidegate-status")), (429, "429"), "{spelling}");
            assert!(!told(&refused, "retry-after").is_empty(), "{refused:?}");
        }
        for (method, target) in [("GET", "/api/x"), ("POST", "/other"), ("PUT", "/api")] {
            assert_eq!(question(at, method, target).send().await.status, 200, "{method} {target}");
        }
        // The quota is the proxy's.
        let proxied = proxy.ask("POST", "/api/x").header("Host", "shop.example");
        assert_eq!(proxied.header("X-Forwarded-For", "10.1.1.1").send().await.status, 429);
    }
}

/// Each passes on what clients write into the headers that are the others' own.
#[tokio::test]
async fn who_asks_is_told_by_the_path_and_by_no_header() {
    let (_proxy, at) = start(&format!("{CHECK}{API}")).await;
    let statuses = |asks: Vec<Ask>| async {
        let mut statuses = Vec::new();
        for ask in asks {
            statuses.push(ask.send().await.status);
        }
        statuses
    };
    let forged = |ask: Ask| ask.header("X-Original-URI", "/free").header("X-Original-Method", "GET");
    let asks = (0..3).map(|_| forged(traefik(at, "POST", "/api/x")));
    assert_eq!(statuses(asks.collect()).await, [200, 200, 429]);
    let forged = |ask: Ask| ask.header("X-Forwarded-Uri", "/free").header("X-Forwarded-Method", "GET");
    assert_eq!(statuses(vec![forged(nginx(at, "POST", "/api/x"))]).await, [429]);
    assert_eq!(statuses(vec![forged(envoy(at, "POST", "/api/x"))]).await, [429]);
    // Twice is none.
    assert_eq!(statuses(vec![nginx(at, "POST", "/api/x").header("X-Original-URI", "/free")]).await, [400]);
}

#[tokio::test]
async fn a_question_that_says_too_little_is_no_pass() {
    let (_proxy, at) = start(&format!("{CHECK}refused_status = 403\n{API}")).await;
    let ask = |path: &str| Ask::new(at, "GET", path).header("Host", "shop.example");
    let bare = ask("/check/nginx").send().await;
    assert_eq!((bare.status, bare.text().as_str()), (400, "the header x-original-uri must be there, once\n"));
    assert_eq!(ask("/check/nginx").header("X-Original-URI", "/").send().await.status, 400);
    assert_eq!(ask("/check/traefik").send().await.status, 400);
    for path in ["/", "/check", "/check/", "/check/other", "/check/envoy", "/check/envoyapi", "/api/x"] {
        assert_eq!(ask(path).send().await.status, 404, "{path}");
    }
    // What the client did wrong is its own refusal, in the status that the proxy understands.
    for (method, target) in [("post", "/api"), ("CONNECT", "/"), ("GET", "no-path"), ("GET", "/%00")] {
        let refused = nginx(at, method, target).send().await;
        assert_eq!(refused.status, 403, "{method} {target}: {refused:?}");
        assert!(["400", "405"].contains(&told(&refused, "x-tidegate-status")), "{refused:?}");
    }
}

/// Empty if it isn't there.
fn told<'r>(reply: &'r Reply, header: &str) -> &'r str {
    reply.header(header).unwrap_or_default()
}

async fn asks(nginx: &Nginx, path: &str) -> Reply {
    Ask::new(nginx.address, "GET", path).send().await
}

/// As `docs/ENVOY.md` says.
#[tokio::test]
async fn nginx_asks_and_refuses_as_told() {
    let page = blocks("docs/ENVOY.md");
    let text = |language: &str, word: &str| {
        let found = page.iter().find(|block| block.language == language && block.text.contains(word));
        found.expect("it is on the page").text.clone()
    };
    let config = text("toml", "[check]").replace("127.0.0.1:8082", "127.0.0.1:0");
    let denied = "[[policy]]\nname = 'no'\nmatch = { path = '/api/no' }\naction = 'deny'\n";
    let app = Upstream::echo().await;
    let config = format!("{config}\n{denied}");
    let proxy = Proxy::builder().config(&config).upstream(app.address).start().await;
    let check = proxy.logged_address("check listening").unwrap();
    let server = text("nginx", "auth_request").replace("127.0.0.1:8082", &check.to_string());
    let server = server.replace(
        "auth_request /tidegate;",
        &format!("auth_request /tidegate; proxy_pass http://{};", app.address),
    );
    let nginx = Nginx::limited("", &server).await;
    for left in (0..10).rev() {
        let passes = asks(&nginx, "/api/x").await;
        assert_eq!(passes.status, 200, "{passes:?} {}", proxy.log());
        assert!(told(&passes, "ratelimit").contains(&format!("r={left}")), "{passes:?}");
    }
    let forged = |name: &str, value: &str| Ask::new(nginx.address, "GET", "/api/x").header(name, value);
    for ask in [
        forged("X-Original-URI", "/free"),
        forged("X-Forwarded-Uri", "/free"),
        forged("X-Original-Method", "HEAD"),
        forged("X-Forwarded-For", "10.9.9.9"),
        Ask::new(nginx.address, "GET", "/free/../api/x"),
        Ask::new(nginx.address, "GET", "/api%2fx"),
        Ask::new(nginx.address, "POST", "/api/x").body("some"),
    ] {
        let refused = ask.send().await;
        assert_eq!(refused.status, 429, "{refused:?}");
        assert!(!told(&refused, "retry-after").is_empty() && told(&refused, "ratelimit").contains("r=0"));
    }
    assert_eq!(asks(&nginx, "/api/no").await.status, 403);
    assert_eq!(asks(&nginx, "/free").await.status, 200);
    assert!(app.seen().iter().all(|request| !request.target.contains("check")));
}
