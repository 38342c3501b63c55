//! Connections to Redis: TLS, users, databases and Unix sockets. Failures are logged with the
//! reason.

use crate::support::prelude::*;
use crate::support::sentinel::MASTER_NAME;
use redis::Value;
use tidegate::store::StoreUnavailable;
use tidegate::store::redis::{RedisCredentials, RedisPassword};

/// Sentinels that vote at the same time elect no leader and retry after a delay.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Keys spread over all hash slots.
const PER_USER_POLICY: &str =
    "[[policy]]\nname = 'p'\nkey = 'header:x-user-id'\nlimit = { requests = 2, per = '1h' }\n";

const POLICY: &str = "[[policy]]\nname = 'p'\nlimit = { requests = 2, per = '1h' }\n";

/// A proxy with these lines in `[store.redis]`.
async fn start_proxy(settings: &str, policies: &str) -> Proxy {
    let text = redis_config(settings, policies);
    Proxy::with_echo(&text).await
}

fn redis_config(settings: &str, policies: &str) -> String {
    format!(
        "listen = {{ threads = 1 }}\n[store]\nkind = 'redis'\n[store.redis]\nkey_prefix = 'orders'\n\
         timeout = '1s'\nconnect_timeout = '2s'\n{settings}\n{policies}"
    )
}

/// Checks that Redis decides: the third request exceeds the limit.
async fn assert_redis_decides(settings: &str) {
    let proxy = start_proxy(settings, POLICY).await;
    let statuses = proxy.get_statuses("/", 3).await;
    assert_eq!(statuses, [200, 200, 429], "{settings}");
}

/// Checks that the proxy logs the failed connection with its kind and reason.
async fn assert_connection_rejected(settings: &str, kind: &str, reason: &str) {
    let proxy = start_proxy(settings, POLICY).await;
    let line = proxy.wait_for_message("redis unavailable", 0).await;
    assert_eq!(line.field("kind"), kind, "{settings}");
    assert!(
        line.field("reason").contains(reason),
        "{settings}: {}",
        line.field("reason")
    );
    let statuses = proxy.get_statuses("/", 3).await;
    assert_eq!(statuses, [200; 3], "{settings}: the policy fails open");
    let metrics = proxy.read_metrics_page().await;
    let counted = |line: &str| {
        line.strip_prefix(&format!("tidegate_store_errors_total{{kind=\"{kind}\"}} "))
            .is_some_and(|n| n != "0")
    };
    assert!(metrics.lines().any(counted), "{settings}\n{metrics}");
}

/// A server with TLS on a second port.
fn start_tls_server(authority: &CertificateAuthority, clients: &str) -> (RedisServer, u16) {
    authority.sign("server", "127.0.0.1");
    let server = RedisServer::start_with_tls(authority, &["--tls-auth-clients", clients]);
    let port = server.tls_port();
    (server, port)
}

/// Settings that trust one authority and present a client certificate signed by another.
fn client_certificate_settings(
    trusted: &CertificateAuthority,
    own: &CertificateAuthority,
) -> String {
    own.sign("client", "sidecar");
    let [ca, cert, key] = [
        trusted.path_string("ca.pem"),
        own.path_string("client.pem"),
        own.path_string("client.key"),
    ];
    format!("ca = '{ca}'\ncert = '{cert}'\nkey = '{key}'\n")
}

/// Nodes require certificates from each other and from clients.
#[tokio::test]
async fn a_cluster_is_reached_over_tls() {
    let authority = CertificateAuthority::new();
    let cluster = RedisCluster::with_tls(&authority).await;
    let settings = |lines: &str| format!("{}\n{lines}", cluster.config_lines());
    let own = client_certificate_settings(&authority, &authority);
    let proxy = start_proxy(&settings(&own), PER_USER_POLICY).await;
    for user in 0..20 {
        let ask = async || {
            proxy
                .get_with("/", "x-user-id", &user.to_string())
                .await
                .status
        };
        assert_eq!(
            [ask().await, ask().await, ask().await],
            [200, 200, 429],
            "{}",
            proxy.log_text()
        );
    }
    let used = cluster.command_on_each_node::<u64>("DBSIZE").await;
    assert!(
        used.iter().all(|keys| *keys > 0),
        "every node must hold keys: {used:?}"
    );
    assert_eq!(proxy.read_metric("tidegate_store_up").await, 1.0);

    assert_connection_rejected(
        &settings(&format!("ca = '{}'", authority.path_string("ca.pem"))),
        "tls",
        "ertificate",
    )
    .await;
    let stranger = CertificateAuthority::new();
    assert_connection_rejected(
        &settings(&client_certificate_settings(&stranger, &authority)),
        "tls",
        "invalid peer certificate",
    )
    .await;
    assert_connection_rejected(
        &settings(&client_certificate_settings(&authority, &stranger)),
        "tls",
        "",
    )
    .await;
}

/// TLS with client certificates among Sentinels, master, replica and the proxy.
#[tokio::test]
async fn sentinels_and_their_master_are_reached_over_tls() {
    let authority = CertificateAuthority::new();
    let mut watched = SentinelDeployment::with_tls(&authority, 1).await;
    let lines = watched.config_lines();
    let own = client_certificate_settings(&authority, &authority);
    let proxy = start_proxy(&format!("{lines}\n{own}"), POLICY).await;
    let statuses = proxy.get_statuses("/", 1).await;
    assert_eq!(statuses, [200], "{}", proxy.log_text());
    proxy
        .assert_metric("tidegate_decision_seconds_count{source=\"redis\"}", 1.0)
        .await;

    let old = watched.master_port().await;
    watched.server_by_port(old).kill();
    // The limit is two, so 429 means that a new master counts requests.
    wait_until_within("the promotion", ELECTION_TIMEOUT, async || {
        proxy.get("/").await.status == 429
    })
    .await;
    // The other sentinels learn of the promotion after the one that tidegate asked.
    wait_until("the sentinels to agree", async || {
        watched.master_port().await != old
    })
    .await;

    assert_connection_rejected(
        &format!("{lines}\nca = '{}'", authority.path_string("ca.pem")),
        "tls",
        "ertificate",
    )
    .await;
    let stranger = CertificateAuthority::new();
    assert_connection_rejected(
        &format!(
            "{lines}\n{}",
            client_certificate_settings(&stranger, &authority)
        ),
        "tls",
        "sentinel",
    )
    .await;
}

#[tokio::test]
async fn a_custom_ca_is_trusted() {
    let authority = CertificateAuthority::new();
    let (server, port) = start_tls_server(&authority, "no");
    let ca = authority.path_string("ca.pem");
    assert_redis_decides(&format!("url = 'rediss://127.0.0.1:{port}/3'\nca = '{ca}'")).await;
    let keyspace: String = server.command("INFO keyspace").await;
    assert!(keyspace.contains("db3:"), "{keyspace}");

    let stranger = CertificateAuthority::new();
    let wrong = format!(
        "url = 'rediss://127.0.0.1:{port}'\nca = '{}'",
        stranger.path_string("ca.pem")
    );
    assert_connection_rejected(&wrong, "tls", "invalid peer certificate").await;
    let other_name = format!("url = 'rediss://localhost:{port}'\nca = '{ca}'");
    assert_connection_rejected(&other_name, "tls", "not valid for name").await;
    // Database 0 has no keys yet.
    assert_redis_decides(&format!("{other_name}\nserver_name = '127.0.0.1'")).await;
    let plain = format!("url = 'rediss://127.0.0.1:{}'\nca = '{ca}'", server.port());
    assert_connection_rejected(&plain, "timeout", "TLS").await;
}

#[tokio::test]
async fn a_client_certificate_is_presented() {
    let authority = CertificateAuthority::new();
    let (_server, port) = start_tls_server(&authority, "yes");
    authority.sign("client", "sidecar");
    let url = format!(
        "url = 'rediss://127.0.0.1:{port}'\nca = '{}'",
        authority.path_string("ca.pem")
    );
    let with = |cert: String, key: String| format!("{url}\ncert = '{cert}'\nkey = '{key}'");
    assert_redis_decides(&with(
        authority.path_string("client.pem"),
        authority.path_string("client.key"),
    ))
    .await;
    assert_connection_rejected(&url, "tls", "ertificate").await;
    let stranger = CertificateAuthority::new();
    stranger.sign("client", "sidecar");
    assert_connection_rejected(
        &with(
            stranger.path_string("client.pem"),
            stranger.path_string("client.key"),
        ),
        "tls",
        "",
    )
    .await;
}

#[tokio::test]
async fn a_unix_socket_and_a_database_number_are_supported() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("redis.sock");
    let server = RedisServer::start_with(&["--unixsocket", socket.to_str().unwrap()]);
    assert_redis_decides(&format!("url = 'unix://{}?db=2'", socket.display())).await;
    let keyspace: String = server.command("INFO keyspace").await;
    assert_contains(&keyspace, &["db2:"]);
    assert_lacks(&keyspace, &["db0:"]);
    assert_connection_rejected(
        &format!("url = 'unix://{}/none.sock'", folder.path().display()),
        "refused",
        "",
    )
    .await;
    assert_connection_rejected(
        &format!("url = 'redis://127.0.0.1:{}/99'", server.port()),
        "other",
        "DB index",
    )
    .await;
}

/// Policies that use every kind of counter and every operation on it.
const ALL_ALGORITHM_POLICIES: &str = r#"
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

/// The ACL rule for this user from `docs/operations/redis.md`.
fn documented_acl_rule(user: &str) -> String {
    let page = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/docs/operations/redis.md"
    ))
    .unwrap();
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("ACL SETUSER {user} ")))
        .unwrap();
    line.replace("PASSWORD", "s3cret")
}

fn make_login(user: &str) -> RedisCredentials {
    RedisCredentials {
        username: Some(user.to_owned()),
        password: Some(RedisPassword::new("s3cret".to_owned())),
    }
}

/// One decision by a store with these settings.
async fn decide_once(settings: RedisSettings) -> Result<bool, StoreUnavailable> {
    let settings = RedisSettings {
        key_prefix: "orders".to_owned(),
        ..settings
    };
    let (_shared, redis) = connect_redis(settings).await;
    let limit = sliding_log(10, 60_000_000);
    let keys: Vec<_> = (0..16)
        .map(|number| KeyBuilder::new(&format!("p{number}")).finish())
        .collect();
    let charges: Vec<_> = keys
        .iter()
        .map(|key| PolicyCharges::new(&limit, key, 1))
        .collect();
    Store::from_redis(redis)
        .decide(&charges)
        .await
        .map(|decision| decision.admitted)
}

#[tokio::test]
async fn the_documented_acl_rules_suffice_for_cluster_and_sentinels() {
    let cluster = RedisCluster::start().await;
    let with = |settings: RedisSettings| RedisSettings {
        credentials: make_login("tidegate"),
        ..settings
    };
    assert_eq!(
        decide_once(with(cluster.settings()))
            .await
            .unwrap_err()
            .kind,
        "clusterdown"
    );
    let _: Vec<()> = cluster
        .command_on_each_node(&documented_acl_rule("tidegate"))
        .await;
    assert_eq!(decide_once(with(cluster.settings())).await, Ok(true));

    let watched = SentinelDeployment::start(0).await;
    let with = |settings: RedisSettings| RedisSettings {
        topology: RedisTopology::Sentinel {
            master: MASTER_NAME.to_owned(),
            credentials: make_login("tidegate-watch"),
        },
        credentials: make_login("tidegate"),
        ..settings
    };
    assert_eq!(
        decide_once(with(watched.settings()))
            .await
            .unwrap_err()
            .kind,
        "noauth"
    );
    for sentinel in &watched.sentinels {
        sentinel.run(&documented_acl_rule("tidegate-watch")).await;
    }
    assert_eq!(
        decide_once(with(watched.settings()))
            .await
            .unwrap_err()
            .kind,
        "noauth",
        "the master's credentials are missing"
    );
    watched.servers[0]
        .run(&documented_acl_rule("tidegate"))
        .await;
    assert_eq!(decide_once(with(watched.settings())).await, Ok(true));
}

#[tokio::test]
async fn the_documented_acl_rule_grants_what_is_needed_and_no_more() {
    let server = RedisServer::start();
    let mut admin = server.connection().await;
    server.run(&documented_acl_rule("tidegate")).await;
    let (_folder, password) = write_temp_file("password", "s3cret\n");
    let login = format!(
        "url = 'redis://127.0.0.1:{}'\nusername = 'tidegate'\npassword_file = '{}'",
        server.port(),
        password.display()
    );
    let proxy = start_proxy(&login, ALL_ALGORITHM_POLICIES).await;
    let statuses = proxy.get_statuses("/", 4).await;
    assert_eq!(statuses, [200, 200, 429, 429], "{}", proxy.log_text());
    let config = ConfigFile::new(&redis_config(&login, ALL_ALGORITHM_POLICIES));
    for words in [&["list"][..], &["show", "many"], &["reset", "many"]] {
        let ended = config.run(&[&["keys"], words].concat()).await;
        assert!(ended.status.success(), "{words:?}: {ended:?}");
        assert!(ended.stdout.contains("many"), "{words:?}: {ended:?}");
    }
    let denied: Vec<HashMap<String, Value>> = redis::cmd("ACL")
        .arg("LOG")
        .query_async(&mut admin)
        .await
        .unwrap();
    assert!(denied.is_empty(), "{denied:?}");
    assert!(proxy.read_metric("tidegate_redis_memory_bytes").await > 100_000.0);

    for forbidden in [
        "FLUSHALL",
        "KEYS *",
        "GET other",
        "CONFIG SET maxmemory 1",
        "SHUTDOWN",
        "ACL LIST",
    ] {
        let user: redis::RedisResult<Value> = run_as_restricted_user(&server, forbidden).await;
        assert_eq!(user.unwrap_err().code(), Some("NOPERM"), "{forbidden}");
    }

    fs::write(&password, "wrong").unwrap();
    assert_connection_rejected(&login, "noauth", "WRONGPASS").await;
    assert_connection_rejected(
        &format!("url = 'redis://tidegate@127.0.0.1:{}'", server.port()),
        "noauth",
        "",
    )
    .await;
    server.run("ACL SETUSER tidegate -evalsha").await;
    fs::write(&password, "s3cret").unwrap();
    assert_connection_rejected(&login, "noauth", "no permissions").await;
}

#[tokio::test]
async fn without_info_permission_only_the_memory_metrics_are_missing() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]);
    let login = |user: &str| format!("url = 'redis://{user}127.0.0.1:{}'", server.port());
    let proxy = start_proxy(&login(""), ALL_ALGORITHM_POLICIES).await;
    let warns = proxy.wait_for_message("redis may evict counters", 0).await;
    assert_eq!(warns.field("maxmemory_policy"), "allkeys-lru");
    assert_eq!(proxy.read_metric("tidegate_redis_may_evict").await, 1.0);
    server
        .run("ACL SETUSER blind on >s3cret allkeys +@all -info")
        .await;
    let blind = self::start_proxy(&login("blind:s3cret@"), ALL_ALGORITHM_POLICIES).await;
    let page = blind.admin_request("GET", "/metrics").send();
    let skew = "tidegate_redis_clock_skew_seconds";
    wait_until("the clock skew", async || {
        blind.read_metric(skew).await != 0.0
    })
    .await;
    let page = page.await.text();
    assert_lacks(
        &page,
        &["tidegate_redis_memory", "tidegate_redis_may_evict"],
    );
    assert_eq!(blind.read_metric("tidegate_store_up").await, 1.0);
    blind
        .assert_metric("tidegate_store_errors_total{kind=\"noauth\"}", 0.0)
        .await;
}

async fn run_as_restricted_user(server: &RedisServer, words: &str) -> redis::RedisResult<Value> {
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
