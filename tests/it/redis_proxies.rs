//! Redis behind proxies, and servers that allow no SCRIPT.

use crate::support::fake_redis::{ProxyRefusal, start_redis_proxy, start_redis_proxy_for};
use crate::support::prelude::*;

/// Starts a proxy whose policy allows one request per user.
async fn start_proxy(url: &str) -> Proxy {
    let config = format!(
        "listen = {{ threads = 1 }}\n[store]\nkind = 'redis'\n[store.redis]\nurl = '{url}'\ntimeout = '5s'\nkey_prefix = 'test'\n\
         [[policy]]\nname = 'p'\nkey = ['header:x-user']\nlimit = {{ requests = 1, per = '1h' }}\non_store_failure = 'closed'\n"
    );
    Proxy::echo_connected(&config).await
}

async fn request_twice(proxy: &Proxy, user: &str) -> [u16; 2] {
    let request = || proxy.request("GET", "/").header("x-user", user);
    [
        request().send_for_status().await,
        request().send_for_status().await,
    ]
}

async fn run_doctor(proxy: &Proxy) -> String {
    let report = proxy.run_command(&["doctor"]).await.stdout;
    report.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn a_redis_proxy_is_recognized_and_decides() {
    for (refusal, finding) in [
        (
            ProxyRefusal::CloseWithoutKey,
            "this looks like a Redis proxy",
        ),
        (
            ProxyRefusal::ErrorWithoutKey,
            "this looks like a Redis proxy",
        ),
        (
            ProxyRefusal::OnlyEval,
            "with each call without EVALSHA, for lack of: EVALSHA, SCRIPT",
        ),
    ] {
        let server = RedisServer::start();
        let port = start_redis_proxy(server.port(), refusal).await;
        let proxy = start_proxy(&format!("valkey://127.0.0.1:{port}")).await;
        let answer = request_twice(&proxy, "ann").await;
        assert_eq!(answer, [200, 429], "{refusal:?}");
        server.run("SCRIPT FLUSH").await;
        let answer = request_twice(&proxy, "bob").await;
        assert_eq!(answer, [200, 429], "{refusal:?}");
        let log = proxy.log_text();
        let count = log.matches("this looks like a Redis proxy, or").count();
        assert_eq!(count, 1, "{refusal:?}: {log}");
        let report = run_doctor(&proxy).await;
        assert!(report.contains(finding), "{refusal:?}: {report}");
        assert!(!report.contains(" fault "), "{refusal:?}: {report}");
        let answer = request_twice(&proxy, "eve").await;
        assert_eq!(answer, [200, 429], "{refusal:?}");
    }
}

#[tokio::test]
async fn a_user_without_script_load_decides_by_texts() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    server
        .run("ACL SETUSER ann on >s3cret ~* &* +@all -script")
        .await;
    let proxy = start_proxy(&format!("redis://ann:s3cret@127.0.0.1:{}", server.port())).await;
    assert_eq!(request_twice(&proxy, "ann").await, [200, 429]);
    server.run("SCRIPT FLUSH").await;
    assert_eq!(request_twice(&proxy, "bob").await, [200, 429]);
    let calls: String = server.command("INFO commandstats").await;
    let count = |command: &str| {
        let name = format!("cmdstat_{command}:calls=");
        let rest = calls.split(&name).nth(1).unwrap_or("0");
        rest.split(',').next().unwrap().parse::<u64>().unwrap()
    };
    assert!(count("evalsha") > 0, "{calls}");
    assert_eq!(
        proxy
            .log_text()
            .matches("SCRIPT LOAD is not allowed")
            .count(),
        1
    );
    let report = run_doctor(&proxy).await;
    assert!(report.contains("EVAL sends some KiB of script"), "{report}");
    assert!(report.contains("+script|load"), "{report}");
    assert!(!report.contains(" fault "), "{report}");
}

#[tokio::test]
async fn an_ordinary_server_receives_no_script_text() {
    let server = RedisServer::start();
    let proxy = start_proxy(&format!("valkey://127.0.0.1:{}", server.port())).await;
    assert_eq!(request_twice(&proxy, "ann").await, [200, 429]);
    assert!(!proxy.log_text().contains("EVAL"));
    let calls: String = server.command("INFO commandstats").await;
    assert!(calls.contains("cmdstat_script|load:calls="), "{calls}");
}

/// A server that restarts closes a connection, too: only two refusals in a row are those of a proxy, and
/// they count until a connection accepts the call.
#[tokio::test]
async fn a_server_that_closes_one_connection_is_no_proxy() {
    const REFUSES: &str = "this looks like a Redis proxy: it refuses script calls without keys";
    const ACCEPTS: &str =
        "redis accepts script calls without keys; no longer treated as a Redis proxy";
    for closed_connections in [1, 2] {
        let server = RedisServer::start();
        let refusal = ProxyRefusal::CloseWithoutKey;
        let port = start_redis_proxy_for(server.port(), refusal, closed_connections).await;
        let proxy = start_proxy(&format!("redis://127.0.0.1:{port}")).await;
        assert_eq!(request_twice(&proxy, "ann").await, [200, 429]);
        let (log, is_proxy) = (proxy.log_text(), closed_connections == 2);
        if !is_proxy {
            let port = start_redis_proxy_for(server.port(), refusal, 1).await;
            let config = format!(
                "[store]\nkind = 'redis'\nredis = {{ url = 'redis://127.0.0.1:{port}', key_prefix = 'test' }}"
            );
            let report = ConfigFile::new(&config).run(&["doctor"]).await.stdout;
            assert!(report.contains("ok       version"), "{report}");
        }
        for message in [REFUSES, "this looks like a Redis proxy"] {
            assert_eq!(
                log.contains(message),
                is_proxy,
                "{closed_connections}: {log}"
            );
        }
        if is_proxy {
            let _: u64 = server.command("CLIENT KILL TYPE normal").await;
            proxy.wait_for_message(ACCEPTS, 0).await;
            proxy.wait_for_store().await;
            assert_eq!(request_twice(&proxy, "bob").await, [200, 429]);
        }
    }
}
