//! A Redis Cluster of real servers.

use super::prelude::*;
use super::redis::local_address;
use http::HeaderName;
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, cmd};
use tidegate::policy::{KeyPart, KeyTemplate};

const HASH_SLOT_COUNT: u16 = 16_384;

pub struct RedisCluster {
    pub nodes: Vec<RedisServer>,
    uses_tls: bool,
}

impl RedisCluster {
    /// Starts three masters with a third of the slots each. They keep serving their slots if one
    /// node is down.
    pub async fn start() -> Self {
        Self::form_cluster(
            (0..3)
                .map(|_| RedisServer::start_with(&cluster_args()))
                .collect(),
            false,
        )
        .await
    }

    /// As [`Self::start`], with clocks that the test sets.
    pub async fn with_clocks() -> Self {
        let start = |_| RedisServer::start_with_clock_and(&cluster_args());
        Self::form_cluster((0..3).map(start).collect(), false).await
    }

    /// As [`Self::start`], with TLS ports that require a client certificate.
    pub async fn with_tls(authority: &CertificateAuthority) -> Self {
        authority.sign("server", "127.0.0.1");
        let args = || {
            let mut args = cluster_args();
            args.extend(["--tls-cluster", "yes", "--tls-replication", "yes"].map(str::to_owned));
            args
        };
        Self::form_cluster(
            (0..3)
                .map(|_| RedisServer::start_with_tls(authority, &args()))
                .collect(),
            true,
        )
        .await
    }

    async fn form_cluster(nodes: Vec<RedisServer>, speaks_tls: bool) -> Self {
        let cluster = Self {
            nodes,
            uses_tls: speaks_tls,
        };
        for (at, node) in cluster.nodes.iter().enumerate() {
            let first = HASH_SLOT_COUNT / 3 * at as u16;
            let last = if at == 2 {
                HASH_SLOT_COUNT - 1
            } else {
                HASH_SLOT_COUNT / 3 * (at as u16 + 1) - 1
            };
            let _: () = node
                .command(&format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1))
                .await;
            let _: () = node
                .command(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"))
                .await;
        }
        for other in &cluster.nodes[1..] {
            meet_node(&cluster.nodes[0], other).await;
        }
        cluster.wait_until_consistent().await;
        cluster
    }

    /// Waits until all nodes report a healthy cluster and see the same slots.
    pub async fn wait_until_consistent(&self) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let mut views = Vec::new();
            for node in &self.nodes {
                let info: String = node.command("CLUSTER INFO").await;
                let slots: redis::Value = node.command("CLUSTER SLOTS").await;
                let text = format!("{slots:?}");
                views.push((
                    info.contains("cluster_state:ok") && info.contains("assigned:16384"),
                    text.len(),
                ));
            }
            if views.iter().all(|view| view.0 && *view == views[0]) {
                return;
            }
            assert!(Instant::now() < deadline, "the nodes did not agree in time");
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn settings(&self) -> RedisSettings {
        RedisSettings {
            topology: RedisTopology::Cluster,
            servers: self
                .nodes
                .iter()
                .take(2)
                .map(|node| local_address(node.port()))
                .collect(),
            // Four servers and the test share the machine with other tests.
            timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(3),
            ..redis_settings(0)
        }
    }

    /// The same settings as lines of a configuration file.
    pub fn config_lines(&self) -> String {
        let url = |node: &RedisServer| match self.uses_tls {
            true => format!("\"rediss://127.0.0.1:{}\"", node.tls_port()),
            false => format!("\"redis://127.0.0.1:{}\"", node.port()),
        };
        let urls: Vec<_> = self.nodes.iter().take(2).map(url).collect();
        format!("topology = \"cluster\"\nurls = [{}]", urls.join(", "))
    }

    /// Moves a slot and its keys to another node. `meanwhile` runs when half of the keys are moved.
    pub async fn move_slot(
        &self,
        slot: u16,
        from: usize,
        to: usize,
        meanwhile: impl AsyncFnOnce(),
    ) {
        let (from, to) = (&self.nodes[from], &self.nodes[to]);
        let (old, new): (String, String) = (
            from.command("CLUSTER MYID").await,
            to.command("CLUSTER MYID").await,
        );
        let _: () = to
            .command(&format!("CLUSTER SETSLOT {slot} IMPORTING {old}"))
            .await;
        let _: () = from
            .command(&format!("CLUSTER SETSLOT {slot} MIGRATING {new}"))
            .await;
        let mut meanwhile = Some(meanwhile);
        let mut source = from.connection().await;
        loop {
            let keys: Vec<String> = from
                .command(&format!("CLUSTER GETKEYSINSLOT {slot} 1"))
                .await;
            let Some(key) = keys.first() else { break };
            let mut migrate = cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(to.port())
                .arg(key)
                .arg(0)
                .arg(5000);
            migrate.exec_async(&mut source).await.unwrap();
            if let Some(meanwhile) = meanwhile.take() {
                meanwhile().await;
            }
        }
        if let Some(meanwhile) = meanwhile {
            meanwhile().await;
        }
        for node in [to, from].into_iter().chain(&self.nodes) {
            let _: () = node
                .command(&format!("CLUSTER SETSLOT {slot} NODE {new}"))
                .await;
        }
    }

    /// Starts to move a slot and moves some of its keys, as a reshard that was interrupted.
    pub async fn open_slot(&self, slot: u16, from: usize, to: usize, moved_keys: usize) {
        let (from, to) = (&self.nodes[from], &self.nodes[to]);
        let (old, new): (String, String) = (
            from.command("CLUSTER MYID").await,
            to.command("CLUSTER MYID").await,
        );
        let _: () = to
            .command(&format!("CLUSTER SETSLOT {slot} IMPORTING {old}"))
            .await;
        let _: () = from
            .command(&format!("CLUSTER SETSLOT {slot} MIGRATING {new}"))
            .await;
        for _ in 0..moved_keys {
            let keys: Vec<String> = from
                .command(&format!("CLUSTER GETKEYSINSLOT {slot} 1"))
                .await;
            let port = to.port();
            let _: () = from
                .command(&format!("MIGRATE 127.0.0.1 {port} {} 0 5000", keys[0]))
                .await;
        }
    }

    /// Runs a command on every node and returns the replies.
    pub async fn command_on_each_node<T: FromRedisValue>(&self, words: &str) -> Vec<T> {
        let mut answers = Vec::new();
        for node in &self.nodes {
            answers.push(node.command(words).await);
        }
        answers
    }

    /// Adds a node without slots as a replica of one of the masters.
    pub async fn add_replica(&mut self, master: usize) -> usize {
        let replica = RedisServer::start_with(&cluster_args());
        meet_node(&self.nodes[0], &replica).await;
        let id: String = self.nodes[master].command("CLUSTER MYID").await;
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut connection = replica.connection().await;
        let follow = async |connection: &mut MultiplexedConnection| {
            cmd("CLUSTER")
                .arg("REPLICATE")
                .arg(&id)
                .exec_async(connection)
                .await
        };
        while follow(&mut connection).await.is_err() {
            assert!(
                Instant::now() < deadline,
                "the replica did not discover its master in time"
            );
            sleep(Duration::from_millis(20)).await;
        }
        self.nodes.push(replica);
        let at = self.nodes.len() - 1;
        while !self.nodes[at]
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
        {
            assert!(
                Instant::now() < deadline,
                "the replica did not synchronize in time"
            );
            sleep(Duration::from_millis(20)).await;
        }
        // A failover needs the votes of the other nodes.
        self.wait_until_consistent().await;
        at
    }
}

/// The hash slot of a key's counters.
pub fn hash_slot(key: &Key) -> u16 {
    crc16_slot(&format!("{:032x}", key.id()))
}

/// The node that owns the slot of this key at the start.
pub fn initial_node(key: &Key) -> usize {
    usize::from(hash_slot(key) / (HASH_SLOT_COUNT / 3)).min(2)
}

/// The node that owns the slot of a name without braces at the start.
pub fn initial_node_for_name(name: &str) -> usize {
    usize::from(crc16_slot(name) / (HASH_SLOT_COUNT / 3)).min(2)
}

fn crc16_slot(tag: &str) -> u16 {
    let crc = tag.bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            }
        })
    });
    crc % HASH_SLOT_COUNT
}

fn cluster_args() -> Vec<String> {
    [
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &free_port().to_string(),
        "--cluster-node-timeout",
        "1000",
        "--cluster-require-full-coverage",
        "no",
        "--repl-diskless-sync-delay",
        "0",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The key of a policy with `key = ["header:x-user-id"]`.
pub(crate) fn user_key(policy: &str, user: &str) -> Key {
    let part = KeyPart::Header(HeaderName::from_static("x-user-id"));
    let mut key = KeyTemplate::new(vec![part]).start_key(policy);
    key.push_key_value(Some(user.as_bytes()));
    key.finish()
}

async fn meet_node(one: &RedisServer, other: &RedisServer) {
    let mut connection = other.connection().await;
    let (_, bus): (String, u16) = cmd("CONFIG")
        .arg("GET")
        .arg("cluster-port")
        .query_async(&mut connection)
        .await
        .unwrap();
    let _: () = one
        .command(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", other.port()))
        .await;
}
