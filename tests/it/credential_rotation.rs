//! Credentials in files: rotated while the proxy runs, in every order of file and server.

use crate::support::prelude::*;
use crate::support::secret_volume::SecretVolume;
use crate::support::sentinel::MASTER_NAME;
use tidegate::store::redis::{RedisCredentials, RedisPassword};

/// The documented maximum until a rotated password is in use.
const MAX_ROTATION_TIME: Duration = Duration::from_secs(10);
/// The documented maximum until a rotated admin token is in use; the rest is for a busy machine.
const MAX_TOKEN_ROTATION_TIME: Duration = Duration::from_millis(2_500);

/// A degraded decision is a 503.
const POLICY: &str = "[[policy]]\nname = \"p\"\non_store_failure = \"closed\"\nlimit = { requests = 1000000, per = \"1h\" }\n";

/// A server with the ACL user `app` and its first password, `p0`.
async fn start_server() -> RedisServer {
    let server = RedisServer::start();
    server.run("ACL SETUSER app on >p0 ~* &* +@all").await;
    server
}

async fn start_proxy(server: &RedisServer, secret: &SecretVolume, upstream: &Upstream) -> Proxy {
    let config = format!(
        "listen.threads = 2\n[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{}/0'\ntimeout = '5s'\n\
         key_prefix = 'test'\nusername = 'app'\npassword_file = {:?}\n{POLICY}",
        server.port(),
        secret.path("password"),
    );
    Proxy::start_connected(&config, upstream.address).await
}

async fn wait_for_message(proxy: &Proxy, mark: usize, message: &str) -> Duration {
    let started = Instant::now();
    proxy
        .wait_for_log(message, mark, MAX_ROTATION_TIME, |line| {
            line.message_starts_with(message)
        })
        .await;
    started.elapsed()
}

/// Waits until several requests in sequence are decided by Redis, so that all workers have lost
/// and replaced a killed connection.
async fn wait_until_decided(proxy: &Proxy) {
    sleep(Duration::from_millis(100)).await;
    wait_until_within("ten decisions", MAX_ROTATION_TIME, async || {
        proxy.get_statuses("/", 10).await == [200; 10]
    })
    .await;
}

/// Clients that send requests until [`Self::finish`].
struct ConstantLoad {
    is_done: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl ConstantLoad {
    fn start(proxy: &Proxy) -> Self {
        let (is_done, sent, failed) = (
            Arc::<AtomicBool>::default(),
            Arc::<AtomicU64>::default(),
            Arc::<AtomicU64>::default(),
        );
        let clients = (0..4).map(|_| {
            let (is_done, sent, failed) =
                (Arc::clone(&is_done), Arc::clone(&sent), Arc::clone(&failed));
            let address = proxy.address;
            tokio::spawn(async move {
                while !is_done.load(Ordering::Relaxed) {
                    let reply = ClientRequest::new(address, "GET", "/").send().await;
                    sent.fetch_add(1, Ordering::Relaxed);
                    if reply.status != 200 {
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            })
        });
        Self {
            clients: clients.collect(),
            is_done,
            sent,
            failed,
        }
    }

    /// Stops the clients. Returns how many requests they sent and how many failed.
    async fn finish(self) -> (u64, u64) {
        self.is_done.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.unwrap();
        }
        (
            self.sent.load(Ordering::Relaxed),
            self.failed.load(Ordering::Relaxed),
        )
    }
}

#[tokio::test]
async fn ten_rotations_under_load_in_both_orders_degrade_nothing() {
    let (server, upstream) = (start_server().await, Upstream::echo().await);
    let secret = SecretVolume::mount(&[("password", "p0")]);
    let proxy = start_proxy(&server, &secret, &upstream).await;
    let load = ConstantLoad::start(&proxy);
    let mut slowest = Duration::ZERO;
    for rotation in 1..=10 {
        let (old, new) = (format!("p{}", rotation - 1), format!("p{rotation}"));
        let mark = proxy.log_mark();
        if rotation % 2 == 0 {
            // The file first: until the server knows the new password, connections keep the old.
            secret.swap(&[("password", &new)]);
            wait_for_message(&proxy, mark, "redis rejected the new login").await;
            server.run(&format!("ACL SETUSER app >{new}")).await;
        } else {
            server.run(&format!("ACL SETUSER app >{new}")).await;
            secret.swap(&[("password", &new)]);
        }
        slowest = slowest.max(wait_for_message(&proxy, mark, "redis accepted the new login").await);
        server.run(&format!("ACL SETUSER app <{old}")).await;
    }
    let (sent, failed) = load.finish().await;
    let degraded = "tidegate_degraded_total{policy=\"p\",outcome=\"rejected\"}";
    assert_eq!(
        (failed, proxy.read_metric(degraded).await),
        (0, 0.0),
        "of {sent} requests"
    );
    assert!(sent > 100, "{sent}");
    assert_eq!(proxy.read_metric("tidegate_store_up").await, 1.0);
    println!("{sent} requests, the slowest rotation took {slowest:?}");
}

#[tokio::test]
async fn a_reconnect_uses_the_old_password_until_redis_accepts_the_new_one() {
    let (server, upstream) = (start_server().await, Upstream::echo().await);
    let secret = SecretVolume::mount(&[("password", "p0")]);
    let proxy = start_proxy(&server, &secret, &upstream).await;
    let mark = proxy.log_mark();
    secret.swap(&[("password", "p1")]);
    wait_for_message(&proxy, mark, "redis rejected the new login").await;
    let _: u64 = server.command("CLIENT KILL USER app").await;
    wait_until_decided(&proxy).await;
    server.run("ACL SETUSER app >p1").await;
    wait_for_message(&proxy, mark, "redis accepted the new login").await;
    // Each worker logs in again within a second of its own.
    sleep(Duration::from_secs(2)).await;
    server.run("ACL SETUSER app <p0").await;
    let _: u64 = server.command("CLIENT KILL USER app").await;
    wait_until_decided(&proxy).await;
}

#[tokio::test]
async fn a_new_user_without_permissions_degrades_nothing() {
    let (server, upstream) = (start_server().await, Upstream::echo().await);
    server.run("ACL SETUSER weak on >p1 +auth").await;
    let secret = SecretVolume::mount(&[("username", "app"), ("password", "p0")]);
    let config = format!(
        "listen.threads = 2\n[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{}/0'\ntimeout = '5s'\n\
         key_prefix = 'test'\nusername_file = {:?}\npassword_file = {:?}\n{POLICY}",
        server.port(),
        secret.path("username"),
        secret.path("password"),
    );
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    let load = ConstantLoad::start(&proxy);
    let mark = proxy.log_mark();
    secret.swap(&[("username", "weak"), ("password", "p1")]);
    wait_for_message(&proxy, mark, "redis rejected the new login").await;
    let (sent, failed) = load.finish().await;
    assert_eq!(failed, 0, "of {sent}");
    let _: u64 = server.command("CLIENT KILL USER app").await;
    wait_until_decided(&proxy).await;
    server.run("ACL SETUSER weak ~* &* +@all").await;
    wait_for_message(&proxy, mark, "redis accepted the new login").await;
}

#[tokio::test]
async fn operators_read_counters_and_the_fleet_before_and_after_redis_accepts_the_new_password() {
    let (server, upstream) = (start_server().await, Upstream::echo().await);
    let secret = SecretVolume::mount(&[("password", "p0")]);
    let proxy = start_proxy(&server, &secret, &upstream).await;
    let read = async |target: &str| {
        let request = ClientRequest::new(proxy.admin_address(), "GET", target);
        request.header("Host", "localhost").send().await
    };
    let mark = proxy.log_mark();
    secret.swap(&[("password", "p1")]);
    wait_for_message(&proxy, mark, "redis rejected the new login").await;
    let reply = read("/keys?policy=p").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(read("/fleet").await.json()["problem"], Value::Null);
    assert!(!proxy.log_text().contains("redis unavailable"));

    server.run("ACL SETUSER app >p1").await;
    wait_for_message(&proxy, mark, "redis accepted the new login").await;
    server.run("ACL SETUSER app <p0").await;
    // A view is returned for one second.
    sleep(Duration::from_millis(1_100)).await;
    assert_eq!(read("/fleet").await.json()["problem"], Value::Null);
    let report = read("/doctor").await.text();
    assert!(!report.contains("WRONGPASS"), "{report}");
}

#[tokio::test]
async fn a_wrong_password_is_logged_in_the_words_of_redis_and_its_correction_is_used() {
    let (server, upstream) = (start_server().await, Upstream::echo().await);
    let secret = SecretVolume::mount(&[("password", "p0")]);
    let proxy = start_proxy(&server, &secret, &upstream).await;
    let mark = proxy.log_mark();
    // The server alone changes, and closes the connections.
    server.run("ACL SETUSER app resetpass >p1").await;
    let _: u64 = server.command("CLIENT KILL USER app").await;
    proxy
        .wait_for_log("the refused password", mark, TEST_TIMEOUT, |line| {
            line.field("kind") == "noauth" && line.field("reason").contains("WRONGPASS")
        })
        .await;
    assert_eq!(proxy.get("/").await.status, 503);
    // The last good file is followed even while the configuration is invalid.
    proxy.write_config("not TOML");
    proxy
        .wait_for_message("new configuration rejected", mark)
        .await;
    secret.swap(&[("password", "p1")]);
    let swapped = Instant::now();
    proxy.wait_for_store().await;
    assert!(swapped.elapsed() < MAX_ROTATION_TIME);
    assert_eq!(proxy.get("/").await.status, 200);
}

#[tokio::test]
async fn a_rotated_user_and_authority_are_used_for_new_connections() {
    let old = CertificateAuthority::new();
    old.sign("server", "127.0.0.1");
    old.sign("client", "tidegate");
    let read = |authority: &CertificateAuthority, file: &str| {
        fs::read_to_string(authority.path(file)).unwrap()
    };
    let files = |authority: &CertificateAuthority, user: &str| {
        [
            ("ca.pem", read(authority, "ca.pem")),
            ("client.pem", read(authority, "client.pem")),
            ("client.key", read(authority, "client.key")),
            ("username", user.to_owned()),
            ("password", "s3cret".to_owned()),
        ]
    };
    let server = RedisServer::start_with_tls(&old, &["--tls-auth-clients", "yes"]);
    server.run("ACL SETUSER ann on >s3cret ~* &* +@all").await;
    let secret = SecretVolume::mount(&files(&old, "ann"));
    let path = |name: &str| secret.path(name);
    let config = format!(
        "[store]\nkind = 'redis'\n[store.redis]\nurl = 'rediss://127.0.0.1:{}/0'\ntimeout = '5s'\nkey_prefix = 'test'\n\
         ca = {:?}\ncert = {:?}\nkey = {:?}\nusername_file = {:?}\npassword_file = {:?}\n{POLICY}",
        server.tls_port(),
        path("ca.pem"),
        path("client.pem"),
        path("client.key"),
        path("username"),
        path("password"),
    );
    let proxy = Proxy::echo_connected(&config).await;
    assert_eq!(proxy.get("/").await.status, 200);

    let new = CertificateAuthority::new();
    new.sign("server", "127.0.0.1");
    new.sign("client", "tidegate");
    server.run("ACL SETUSER bob on >s3cret ~* &* +@all").await;
    secret.swap(&files(&new, "bob"));
    let [cert, key, ca] = ["server.pem", "server.key", "ca.pem"].map(|file| new.path_string(file));
    server
        .run(&format!(
            "CONFIG SET tls-cert-file {cert} tls-key-file {key} tls-ca-cert-file {ca}"
        ))
        .await;
    wait_until_within("a connection of bob", MAX_ROTATION_TIME, async || {
        let clients: String = server.command("CLIENT LIST").await;
        clients.contains("user=bob")
    })
    .await;
    server.run("ACL SETUSER ann off").await;
    let _: u64 = server.command("CLIENT KILL USER bob").await;
    wait_until_decided(&proxy).await;
    // Each worker logs in again by itself.
    wait_until_within("only connections of bob", MAX_ROTATION_TIME, async || {
        let clients: String = server.command("CLIENT LIST").await;
        clients.contains("user=bob") && !clients.contains("user=ann")
    })
    .await;
}

#[tokio::test]
async fn a_rotated_admin_token_is_in_use_within_two_seconds_and_the_old_one_is_refused() {
    let secret = SecretVolume::mount(&[("token", "first")]);
    let config = format!("admin.token_file = {:?}\n", secret.path("token"));
    let proxy = Proxy::with_echo(&config).await;
    let status = async |token: &str| {
        proxy
            .admin_request("PUT", "/log-level")
            .header("Authorization", &format!("Bearer {token}"))
            .header("Content-Type", "application/json")
            .body("{\"level\":\"info\"}")
            .send_for_status()
            .await
    };
    assert_eq!(status("first").await / 100, 2);
    assert_eq!(status("second").await, 401);
    for (old, new) in [("first", "second"), ("second", "third")] {
        secret.swap(&[("token", new)]);
        wait_until_within("the new token", MAX_TOKEN_ROTATION_TIME, async || {
            status(new).await != 401
        })
        .await;
        assert_eq!(status(old).await, 401);
        assert_eq!(status(new).await / 100, 2);
        // An invalid configuration does not keep the old token alive.
        proxy.write_config("not TOML");
    }
}

fn login(password: &str) -> RedisCredentials {
    RedisCredentials {
        username: Some("app".to_owned()),
        password: Some(RedisPassword::new(password.to_owned())),
    }
}

/// Settings with one login for the sentinels and the master.
fn with_login(deployment: &SentinelDeployment, password: &str) -> RedisSettings {
    RedisSettings {
        topology: RedisTopology::Sentinel {
            master: MASTER_NAME.to_owned(),
            credentials: login(password),
        },
        credentials: login(password),
        ..deployment.settings()
    }
}

async fn is_admitted(store: &Store, number: u32) -> bool {
    let limit = sliding_log(10, 60_000_000);
    let key = KeyBuilder::new(&format!("p{number}")).finish();
    let decision = store.decide(&[PolicyCharges::new(&limit, &key, 1)]).await;
    decision.is_ok_and(|decision| decision.admitted)
}

#[tokio::test]
async fn connections_to_all_nodes_of_a_cluster_log_in_again() {
    let cluster = RedisCluster::start().await;
    let rule = "ACL SETUSER app on >p0 >p1 ~* &* +@all";
    let _: Vec<()> = cluster.command_on_each_node(rule).await;
    let with = |password: &str| RedisSettings {
        credentials: login(password),
        ..cluster.settings()
    };
    let shared = SharedRedisState::new(with("p0"));
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    for number in 0..16 {
        assert!(is_admitted(&store, number).await);
    }
    shared.update_logins(&with("p1"));
    let _: Vec<()> = cluster.command_on_each_node("ACL SETUSER app <p0").await;
    let _: Vec<u64> = cluster.command_on_each_node("CLIENT KILL USER app").await;
    for number in 0..16 {
        let decides = async || is_admitted(&store, number).await;
        wait_until_within("a decision", MAX_ROTATION_TIME, decides).await;
    }
}

#[tokio::test]
async fn new_logins_for_sentinels_and_master_are_used() {
    let deployment = SentinelDeployment::start(0).await;
    let rule = "ACL SETUSER app on >p0 ~* &* +@all";
    let command_on_all = async |words: &str| {
        for server in &deployment.servers {
            let _: redis::Value = server.command(words).await;
        }
        for sentinel in &deployment.sentinels {
            let _: redis::Value = sentinel.command(words).await;
        }
    };
    command_on_all(rule).await;
    let with = |password: &str| with_login(&deployment, password);
    let shared = SharedRedisState::new(with("p0"));
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    assert!(is_admitted(&store, 0).await);
    command_on_all("ACL SETUSER app resetpass >p1").await;
    command_on_all("CLIENT KILL USER app").await;
    shared.update_logins(&with("p1"));
    wait_until_within("a decision", MAX_ROTATION_TIME, async || {
        is_admitted(&store, 1).await
    })
    .await;
}

#[tokio::test]
async fn the_previous_login_is_used_if_the_new_one_is_accepted_and_may_not_decide() {
    let server = start_server().await;
    let with = |credentials: RedisCredentials| RedisSettings {
        credentials,
        ..server.settings()
    };
    let shared = SharedRedisState::new(with(login("p0")));
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    assert!(is_admitted(&store, 0).await);
    // Connections without a login have the default user.
    server
        .run("ACL SETUSER default -evalsha -eval -script")
        .await;
    shared.update_logins(&with(RedisCredentials::default()));
    let _: u64 = server.command("CLIENT KILL USER app").await;
    wait_until_within("a decision", MAX_ROTATION_TIME, async || {
        is_admitted(&store, 1).await
    })
    .await;
}

#[tokio::test]
async fn sentinels_are_asked_with_the_previous_login_until_they_accept_the_new_one() {
    let deployment = SentinelDeployment::start(0).await;
    for server in &deployment.servers {
        let rule = "ACL SETUSER app on >p0 >p1 ~* &* +@all";
        let _: redis::Value = server.command(rule).await;
    }
    for sentinel in &deployment.sentinels {
        let rule = "ACL SETUSER app on >p0 ~* &* +@all";
        let _: redis::Value = sentinel.command(rule).await;
    }
    let with = |password: &str| with_login(&deployment, password);
    let shared = SharedRedisState::new(with("p0"));
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    assert!(is_admitted(&store, 0).await);
    shared.update_logins(&with("p1"));
    // A reconnect has to find the master.
    let _: u64 = deployment.servers[0].command("CLIENT KILL USER app").await;
    wait_until_within("a decision", MAX_ROTATION_TIME, async || {
        is_admitted(&store, 1).await
    })
    .await;
}
