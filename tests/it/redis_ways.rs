//! The ways to one server: TLS, users, databases, sockets. Whoever can't get in is told why.

use crate::support::SOON;
use crate::support::client::Ask;
use crate::support::cluster::Cluster;
use crate::support::process::{run, tidegate};
use crate::support::proxy::Proxy;
use crate::support::redis::{Server, ready};
use crate::support::sentinel::{MASTER, Watched};
use crate::support::tls::Authority;
use crate::support::upstream::Upstream;
use redis::Value;
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::redis::{Login, Password, RedisSettings, Topology};
use tidegate::store::{Store, Unavailable};
use tokio::time::sleep;

/// Sentinels that vote at once elect nobody, and try again after a while.
const ELECTION: Duration = Duration::from_secs(30);

/// Counters all over the slots.
const SEVERAL: &str =
    "[[policy]]\nname = 'p'\nkey = 'header:x-user-id'\nlimit = { requests = 2, per = '1h' }\n";

const POLICY: &str = "[[policy]]\nname = 'p'\nlimit = { requests = 2, per = '1h' }\n";

/// A proxy with these lines in `[store.redis]`.
async fn proxy(settings: &str, policies: &str) -> (Proxy, Upstream) {
    let upstream = Upstream::echo().await;
    let text = config(settings, policies);
    (
        Proxy::builder()
            .config(&text)
            .upstream(upstream.address)
            .start()
            .await,
        upstream,
    )
}

fn config(settings: &str, policies: &str) -> String {
    format!(
        "listen = {{ threads = 1 }}\n[store]\nkind = 'redis'\n[store.redis]\nkey_prefix = 'orders'\n\
         timeout = '1s'\nconnect_timeout = '2s'\n{settings}\n{policies}"
    )
}

/// Whether Redis decides: the third request is one too many.
async fn counts(settings: &str) {
    let (proxy, _upstream) = proxy(settings, POLICY).await;
    assert_eq!(
        proxy.statuses("/", 3).await,
        [200, 200, 429],
        "{settings}\n{}",
        proxy.log()
    );
}

/// Whether the proxy says so if it can't get in, and why.
async fn is_kept_out(settings: &str, kind: &str, reason: &str) {
    let (proxy, _upstream) = proxy(settings, POLICY).await;
    let down = proxy
        .wait_for_log("a word about it", 0, SOON, |line| {
            line.says("Redis is down")
        })
        .await;
    assert_eq!(down.field("kind"), kind, "{settings}\n{}", proxy.log());
    assert!(
        down.field("reason").contains(reason),
        "{settings}: {}",
        down.field("reason")
    );
    assert_eq!(
        proxy.statuses("/", 3).await,
        [200; 3],
        "{settings}: the policy is open"
    );
    let metrics = Ask::new(proxy.admin(), "GET", "/metrics")
        .header("Host", "localhost")
        .send()
        .await
        .text();
    let counted = |line: &str| {
        line.strip_prefix(&format!("tidegate_store_errors_total{{kind=\"{kind}\"}} "))
            .is_some_and(|n| n != "0")
    };
    assert!(metrics.lines().any(counted), "{settings}\n{metrics}");
}

/// A server that speaks TLS on a second port.
fn tls_server(authority: &Authority, clients: &str) -> (Server, u16) {
    authority.sign("server", "127.0.0.1");
    let server = Server::with_tls(authority, &["--tls-auth-clients", clients]);
    let port = server.tls_port();
    (server, port)
}

/// The lines of one who trusts an authority and shows a certificate of a second one's.
fn certified(trusted: &Authority, own: &Authority) -> String {
    own.sign("client", "sidecar");
    let [ca, cert, key] = [
        trusted.text("ca.pem"),
        own.text("client.pem"),
        own.text("client.key"),
    ];
    format!("ca = '{ca}'\ncert = '{cert}'\nkey = '{key}'\n")
}

/// Nodes ask each other and their clients for certificates.
#[tokio::test]
async fn tls_to_a_cluster() {
    let authority = Authority::new();
    let cluster = Cluster::with_tls(&authority).await;
    let settings = |lines: &str| format!("{}\n{lines}", cluster.lines());
    let own = certified(&authority, &authority);
    let (proxy, _upstream) = proxy(&settings(&own), SEVERAL).await;
    for user in 0..20 {
        let ask = async || {
            proxy
                .ask("GET", "/")
                .header("x-user-id", &user.to_string())
                .status()
                .await
        };
        assert_eq!(
            [ask().await, ask().await, ask().await],
            [200, 200, 429],
            "{}",
            proxy.log()
        );
    }
    let used = cluster.each::<u64>("DBSIZE").await;
    assert!(
        used.iter().all(|keys| *keys > 0),
        "all nodes are used: {used:?}"
    );
    assert_eq!(proxy.metric("tidegate_store_up").await, 1.0);

    is_kept_out(
        &settings(&format!("ca = '{}'", authority.text("ca.pem"))),
        "tls",
        "ertificate",
    )
    .await;
    let stranger = Authority::new();
    is_kept_out(
        &settings(&certified(&stranger, &authority)),
        "tls",
        "invalid peer certificate",
    )
    .await;
    is_kept_out(&settings(&certified(&authority, &stranger)), "tls", "").await;
}

/// Sentinels, master and replica among each other and to us.
#[tokio::test]
async fn tls_to_sentinels_and_the_master_they_name() {
    let authority = Authority::new();
    let mut watched = Watched::with_tls(&authority, 1).await;
    let lines = watched.lines();
    let own = certified(&authority, &authority);
    let (proxy, _upstream) = proxy(&format!("{lines}\n{own}"), POLICY).await;
    assert_eq!(proxy.statuses("/", 1).await, [200], "{}", proxy.log());
    assert_eq!(
        proxy
            .metric("tidegate_decision_seconds_count{source=\"redis\"}")
            .await,
        1.0
    );

    let old = watched.master().await;
    watched.server(old).kill();
    let deadline = Instant::now() + ELECTION;
    // The next but one is too many: by then somebody counts again.
    while proxy.get("/").await.status != 429 {
        assert!(Instant::now() < deadline, "nobody follows: {}", proxy.log());
        sleep(Duration::from_millis(20)).await;
    }
    assert_ne!(watched.master().await, old);

    is_kept_out(
        &format!("{lines}\nca = '{}'", authority.text("ca.pem")),
        "tls",
        "ertificate",
    )
    .await;
    let stranger = Authority::new();
    is_kept_out(
        &format!("{lines}\n{}", certified(&stranger, &authority)),
        "tls",
        "sentinel",
    )
    .await;
}

#[tokio::test]
async fn tls_with_a_ca_of_our_own() {
    let authority = Authority::new();
    let (server, port) = tls_server(&authority, "no");
    let ca = authority.text("ca.pem");
    counts(&format!("url = 'rediss://127.0.0.1:{port}/3'\nca = '{ca}'")).await;
    let keyspace: String = server.command("INFO keyspace").await;
    assert!(keyspace.contains("db3:"), "{keyspace}");

    let stranger = Authority::new();
    let wrong = format!(
        "url = 'rediss://127.0.0.1:{port}'\nca = '{}'",
        stranger.text("ca.pem")
    );
    is_kept_out(&wrong, "tls", "invalid peer certificate").await;
    let other_name = format!("url = 'rediss://localhost:{port}'\nca = '{ca}'");
    is_kept_out(&other_name, "tls", "not valid for name").await;
    // In database 0, where nothing is yet.
    counts(&format!("{other_name}\nserver_name = '127.0.0.1'")).await;
    let plain = format!("url = 'rediss://127.0.0.1:{}'\nca = '{ca}'", server.port());
    is_kept_out(&plain, "timeout", "TLS").await;
}

#[tokio::test]
async fn tls_with_a_certificate_of_our_own() {
    let authority = Authority::new();
    let (_server, port) = tls_server(&authority, "yes");
    authority.sign("client", "sidecar");
    let url = format!(
        "url = 'rediss://127.0.0.1:{port}'\nca = '{}'",
        authority.text("ca.pem")
    );
    let with = |cert: String, key: String| format!("{url}\ncert = '{cert}'\nkey = '{key}'");
    counts(&with(
        authority.text("client.pem"),
        authority.text("client.key"),
    ))
    .await;
    is_kept_out(&url, "tls", "ertificate").await;
    let stranger = Authority::new();
    stranger.sign("client", "sidecar");
    is_kept_out(
        &with(stranger.text("client.pem"), stranger.text("client.key")),
        "tls",
        "",
    )
    .await;
}

#[tokio::test]
async fn a_unix_socket_and_a_database() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("redis.sock");
    let server = Server::with(&["--unixsocket", socket.to_str().unwrap()]);
    counts(&format!("url = 'unix://{}?db=2'", socket.display())).await;
    let keyspace: String = server.command("INFO keyspace").await;
    assert!(
        keyspace.contains("db2:") && !keyspace.contains("db0:"),
        "{keyspace}"
    );
    is_kept_out(
        &format!("url = 'unix://{}/none.sock'", folder.path().display()),
        "refused",
        "",
    )
    .await;
    is_kept_out(
        &format!("url = 'redis://127.0.0.1:{}/99'", server.port()),
        "other",
        "DB index",
    )
    .await;
}

/// All kinds of counters, and all that is done to them.
const EVERYTHING: &str = r#"
[[policy]]
name = "many"
block_for = "1m"
limits = [
  { requests = 2, per = "1m" },
  { requests = 9, per = "1h", algorithm = "sliding_window" },
  { requests = 9, per = "1d", algorithm = "fixed_window" },
  { requests = 9, per = "1s", algorithm = "token_bucket" },
  { requests = 9, per = "1s", algorithm = "leaky_bucket" },
]
[[policy]]
name = "slots"
limit = { requests = 5, algorithm = "concurrency" }
"#;

/// The rule as the page gives it for a user.
fn rule(user: &str) -> String {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/OPERATIONS.md")).unwrap();
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("ACL SETUSER {user} ")))
        .unwrap();
    line.replace("PASSWORD", "s3cret")
}

fn login(user: &str) -> Login {
    Login {
        username: Some(user.to_owned()),
        password: Some(Password::new("s3cret".to_owned())),
    }
}

/// One decision by a handle with these settings.
async fn decides(settings: RedisSettings) -> Result<bool, Unavailable> {
    let settings = RedisSettings {
        key_prefix: "orders".to_owned(),
        ..settings
    };
    let (_shared, redis) = ready(settings).await;
    let limit = Limit {
        requests: 10,
        per_us: 60_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let keys: Vec<_> = (0..16)
        .map(|number| KeyBuilder::new(&format!("p{number}")).finish())
        .collect();
    let charges: Vec<_> = keys.iter().map(|key| Charge::new(&limit, key, 1)).collect();
    Store::redis(redis)
        .decide(&charges)
        .await
        .map(|decision| decision.admitted)
}

#[tokio::test]
async fn the_acl_rules_are_enough_for_a_cluster_and_for_sentinels() {
    let cluster = Cluster::start().await;
    let with = |settings: RedisSettings| RedisSettings {
        login: login("tidegate"),
        ..settings
    };
    assert_eq!(
        decides(with(cluster.settings())).await.unwrap_err().kind,
        "clusterdown"
    );
    let _: Vec<()> = cluster.each(&rule("tidegate")).await;
    assert_eq!(decides(with(cluster.settings())).await, Ok(true));

    let watched = Watched::start(0).await;
    let with = |settings: RedisSettings| RedisSettings {
        topology: Topology::Sentinel {
            master: MASTER.to_owned(),
            login: login("tidegate-watch"),
        },
        login: login("tidegate"),
        ..settings
    };
    assert_eq!(
        decides(with(watched.settings())).await.unwrap_err().kind,
        "noauth"
    );
    for sentinel in &watched.sentinels {
        let _: () = sentinel.command(&rule("tidegate-watch")).await;
    }
    assert_eq!(
        decides(with(watched.settings())).await.unwrap_err().kind,
        "noauth",
        "the master's is missing"
    );
    let _: () = watched.servers[0].command(&rule("tidegate")).await;
    assert_eq!(decides(with(watched.settings())).await, Ok(true));
}

#[tokio::test]
async fn the_acl_rule_of_the_page_is_enough_and_gives_no_more() {
    let server = Server::start();
    let mut admin = server.connection().await;
    let _: () = server.command(&rule("tidegate")).await;
    let folder = TempDir::new().unwrap();
    let password = folder.path().join("password");
    fs::write(&password, "s3cret\n").unwrap();
    let login = format!(
        "url = 'redis://127.0.0.1:{}'\nusername = 'tidegate'\npassword_file = '{}'",
        server.port(),
        password.display()
    );
    let (proxy, _upstream) = proxy(&login, EVERYTHING).await;
    assert_eq!(
        proxy.statuses("/", 4).await,
        [200, 200, 429, 429],
        "{}",
        proxy.log()
    );
    let file = folder.path().join("config.toml");
    fs::write(&file, config(&login, EVERYTHING)).unwrap();
    for words in [&["list"][..], &["show", "many"], &["reset", "many"]] {
        let mut command = tidegate();
        command
            .args(["keys", words[0], "--config"])
            .arg(&file)
            .args(&words[1..]);
        let ended = run(&mut command).await;
        assert!(
            ended.status.success() && ended.stdout.contains("many"),
            "{words:?}: {ended:?}"
        );
    }
    let denied: Vec<HashMap<String, Value>> = redis::cmd("ACL")
        .arg("LOG")
        .query_async(&mut admin)
        .await
        .unwrap();
    assert!(denied.is_empty(), "{denied:?}");
    assert!(proxy.metric("tidegate_redis_memory_bytes").await > 100_000.0);

    for forbidden in [
        "FLUSHALL",
        "KEYS *",
        "GET other",
        "CONFIG SET maxmemory 1",
        "SHUTDOWN",
        "ACL LIST",
    ] {
        let user: redis::RedisResult<Value> = as_user(&server, forbidden).await;
        assert_eq!(user.unwrap_err().code(), Some("NOPERM"), "{forbidden}");
    }

    fs::write(&password, "wrong").unwrap();
    is_kept_out(&login, "noauth", "Password authentication failed").await;
    is_kept_out(
        &format!("url = 'redis://tidegate@127.0.0.1:{}'", server.port()),
        "noauth",
        "",
    )
    .await;
    let _: () = server.command("ACL SETUSER tidegate -evalsha").await;
    fs::write(&password, "s3cret").unwrap();
    is_kept_out(&login, "noauth", "no permissions").await;
}

#[tokio::test]
async fn who_may_not_ask_for_the_memory_misses_that_and_nothing_else() {
    let server = Server::with(&["--maxmemory-policy", "allkeys-lru"]);
    let login = |user: &str| format!("url = 'redis://{user}127.0.0.1:{}'", server.port());
    let (proxy, _upstream) = proxy(&login(""), EVERYTHING).await;
    let warns = proxy
        .wait_for_log("the warning", 0, SOON, |line| {
            line.says("Redis may evict counters")
        })
        .await;
    assert_eq!(warns.field("maxmemory_policy"), "allkeys-lru");
    assert_eq!(proxy.metric("tidegate_redis_may_evict").await, 1.0);
    let _: () = server
        .command("ACL SETUSER blind on >s3cret allkeys +@all -info")
        .await;
    let (blind, _upstream) = self::proxy(&login("blind:s3cret@"), EVERYTHING).await;
    let page = Ask::new(blind.admin(), "GET", "/metrics")
        .header("Host", "localhost")
        .send();
    let deadline = Instant::now() + SOON;
    while blind.metric("tidegate_redis_clock_skew_seconds").await == 0.0 {
        assert!(Instant::now() < deadline, "{}", blind.log());
        sleep(Duration::from_millis(20)).await;
    }
    let page = page.await.text();
    assert!(
        !page.contains("tidegate_redis_memory") && !page.contains("tidegate_redis_may_evict"),
        "{page}"
    );
    assert_eq!(blind.metric("tidegate_store_up").await, 1.0);
    assert_eq!(
        blind
            .metric("tidegate_store_errors_total{kind=\"noauth\"}")
            .await,
        0.0
    );
}

async fn as_user(server: &Server, words: &str) -> redis::RedisResult<Value> {
    let client = redis::Client::open(format!(
        "redis://tidegate:s3cret@127.0.0.1:{}",
        server.port()
    ))
    .unwrap();
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    command.arg(words.collect::<Vec<_>>());
    command
        .query_async(&mut client.get_multiplexed_async_connection().await.unwrap())
        .await
}
