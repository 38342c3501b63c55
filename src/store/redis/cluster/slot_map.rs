//! The slot map: which node of a cluster holds which slot.

use crate::limiter::{Key, KeyBuilder};
use crate::store::redis::connection::SupervisedConnection;
use crate::store::redis::connection_target::PROBE_POLICY_NAME;
use crate::store::redis::scripts::push_hex_id;
use crate::store::redis::settings::RedisAddress;
use redis::{Value, from_redis_value_ref};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Number of hash slots of every Redis Cluster.
const HASH_SLOT_COUNT: u16 = 16_384;

/// Maximum number of keys tried to find a counter in one of a node's slots: almost certainly enough
/// for a node with a single slot.
const MAX_PROBE_KEY_CANDIDATES: u32 = 200_000;

/// Keys tried before yielding to other tasks. Each key takes about a microsecond.
const PROBE_KEY_CANDIDATES_PER_YIELD: usize = 100;

/// How long a call waits for a node that is still connecting, as far as its deadline allows. After
/// this time the node counts as unreachable.
const NEW_NODE_WAIT: Duration = Duration::from_secs(1);

/// A master, with this worker's connection to it.
#[derive(Debug)]
pub(super) struct ClusterNode {
    pub(super) address: RedisAddress,
    pub(super) connection: SupervisedConnection,
    /// Consecutive failures, after which the connection is replaced and probed: the circuit breaker
    /// of this node.
    pub(super) consecutive_failures: AtomicU32,
    /// When the slot map first contained the node.
    pub(super) discovered_at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct ClusterSlotMap {
    pub(super) nodes: Vec<Arc<ClusterNode>>,
    pub(super) ranges: Vec<HashSlotRange>,
    /// The index of the node of each slot, if it has one.
    node_indexes: Vec<Option<u16>>,
}

/// First and last slot, both included, and the address of their node.
pub(super) type HashSlotRange = (u16, u16, RedisAddress);

impl ClusterNode {
    /// Whether the node is new and not connected yet. Calls wait for a connecting node, so that no
    /// call fails because of a slot migration.
    pub(super) fn is_connecting(&self) -> bool {
        !self.connection.was_ready() && self.discovered_at.elapsed() < NEW_NODE_WAIT
    }

    /// Whether calls would be sent to the node, or wait for it.
    pub(super) fn is_available(&self) -> bool {
        self.connection.live().is_ok() || self.is_connecting()
    }

    pub(super) fn reset_failures(&self) {
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }
}

impl ClusterSlotMap {
    pub(super) fn new(nodes: Vec<Arc<ClusterNode>>, ranges: Vec<HashSlotRange>) -> Self {
        let mut hash_slots = vec![None; usize::from(HASH_SLOT_COUNT)];
        for (first, last, address) in &ranges {
            let node_index = nodes.iter().position(|node| node.address == *address);
            let node_index = node_index.and_then(|index| u16::try_from(index).ok());
            if let Some(hash_slots) = hash_slots.get_mut(usize::from(*first)..=usize::from(*last)) {
                hash_slots.fill(node_index);
            }
        }
        Self {
            nodes,
            ranges,
            node_indexes: hash_slots,
        }
    }

    pub(super) fn node_for_hash_slot(&self, hash_slot: u16) -> Option<&Arc<ClusterNode>> {
        let node_index = (*self.node_indexes.get(usize::from(hash_slot))?)?;
        self.nodes.get(usize::from(node_index))
    }

    /// All slots without a node for which `is_serving` holds.
    pub(super) fn hash_slots_not_served_by(
        &self,
        is_serving: impl Fn(&ClusterNode) -> bool,
    ) -> Vec<u16> {
        let serving: Vec<bool> = self.nodes.iter().map(|node| is_serving(node)).collect();
        let is_served = |node_index: Option<u16>| {
            node_index.is_some_and(|index| serving.get(usize::from(index)) == Some(&true))
        };
        let node_index = |hash_slot: u16| *self.node_indexes.get(usize::from(hash_slot))?;
        (0..HASH_SLOT_COUNT)
            .filter(|hash_slot| !is_served(node_index(*hash_slot)))
            .collect()
    }

    pub(super) fn find_node_by_address(&self, address: &RedisAddress) -> Option<&Arc<ClusterNode>> {
        self.nodes.iter().find(|node| node.address == *address)
    }
}

/// Parses the reply to `CLUSTER SLOTS`: the ranges of the masters, in order. A node without a host
/// has the host of the queried node. Returns `Retry` if the reply is invalid.
pub(super) fn parse_cluster_slots(
    reply: &Value,
    queried_node: &RedisAddress,
) -> Option<Vec<HashSlotRange>> {
    let Value::Array(entries) = reply else {
        return None;
    };
    let ranges = entries
        .iter()
        .map(|entry| parse_slot_range(entry, queried_node));
    let mut ranges: Vec<HashSlotRange> = ranges.collect::<Option<_>>()?;
    ranges.sort_unstable_by_key(|(first, last, _)| (*first, *last));
    Some(ranges)
}

fn parse_slot_range(entry: &Value, queried_node: &RedisAddress) -> Option<HashSlotRange> {
    let [first, last, master, ..] = entry.as_sequence()? else {
        return None;
    };
    let [host, port, ..] = master.as_sequence()? else {
        return None;
    };
    // redis-rs truncates a number that is too large for its type.
    let number = |value| u16::try_from(from_redis_value_ref::<i64>(value).ok()?).ok();
    let (first, last, port) = (number(first)?, number(last)?, number(port)?);
    let host: Option<String> = from_redis_value_ref(host).ok()?;
    (first <= last && last < HASH_SLOT_COUNT).then(|| {
        let address = resolve_node_address(host.unwrap_or_default(), port, queried_node);
        (first, last, address)
    })
}

/// Makes a node's address of the host and port in a reply or redirection. Without a host, the node
/// has the host of the queried node.
pub(super) fn resolve_node_address(
    host: String,
    port: u16,
    queried_node: &RedisAddress,
) -> RedisAddress {
    match (host.as_str(), queried_node) {
        ("" | "?", RedisAddress::Tcp { host, .. }) => RedisAddress::Tcp {
            host: host.clone(),
            port,
        },
        _ => RedisAddress::Tcp { host, port },
    }
}

/// Finds a key whose counter is in a slot of the node at `address`, for the probe of the node.
pub(super) async fn find_probe_key(ranges: &[HashSlotRange], address: &RedisAddress) -> Key {
    let is_hash_slot_of_node = |hash_slot: u16| {
        ranges
            .iter()
            .any(|(first, last, owner)| owner == address && (*first..=*last).contains(&hash_slot))
    };
    let probe_key = |number: u32| {
        let mut key = KeyBuilder::new(PROBE_POLICY_NAME);
        key.push_key_value(Some(number.to_string().as_bytes()));
        key.finish()
    };
    let mut candidates = (0..MAX_PROBE_KEY_CANDIDATES).map(probe_key).peekable();
    while candidates.peek().is_some() {
        if let Some(key) = candidates
            .by_ref()
            .take(PROBE_KEY_CANDIDATES_PER_YIELD)
            .find(|key| is_hash_slot_of_node(hash_slot_for_key(key)))
        {
            return key;
        }
        tokio::task::yield_now().await;
    }
    probe_key(0)
}

/// The slot of all counters of a key.
pub(in crate::store::redis) fn hash_slot_for_key(key: &Key) -> u16 {
    let mut tag = String::with_capacity(32);
    push_hex_id(&mut tag, key.id());
    crc16(tag.as_bytes()) % HASH_SLOT_COUNT
}

/// The slot of a Redis key: the hash of the text in its first braces, or of the whole key without
/// one.
pub(in crate::store::redis) fn hash_slot_for_name(name: &str) -> u16 {
    let tag = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    crc16(
        tag.map_or(name, |(tag, _)| if tag.is_empty() { name } else { tag })
            .as_bytes(),
    ) % HASH_SLOT_COUNT
}

/// CRC-16/XMODEM, as Redis Cluster requires.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            (crc << 1) ^ ((crc >> 15) * 0x1021)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn tcp_address(host: &str, port: u16) -> RedisAddress {
        RedisAddress::Tcp {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn computes_slots_as_the_redis_cluster_specification_does() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(hash_slot_for_name("foo"), 12_182);
        assert_eq!(
            hash_slot_for_name("{user1000}.following"),
            hash_slot_for_name("user1000")
        );
        assert_eq!(
            hash_slot_for_name("foo{}{bar}"),
            crc16(b"foo{}{bar}") % HASH_SLOT_COUNT
        );
        let key = KeyBuilder::new("p").finish();
        assert_eq!(
            hash_slot_for_key(&key),
            hash_slot_for_name(&format!("t:v1:{{{:032x}}}:sliding_log:1", key.id()))
        );
    }

    #[test]
    fn nodes_without_a_host_use_the_host_of_the_queried_node() {
        let node = |host, port| {
            Value::Array(vec![
                host,
                Value::Int(port),
                Value::BulkString(b"id".into()),
            ])
        };
        let range =
            |first, last, node| Value::Array(vec![Value::Int(first), Value::Int(last), node]);
        let reply = Value::Array(vec![
            range(0, 99, node(Value::Nil, 1)),
            range(100, 199, node(Value::BulkString(b"".into()), 2)),
            range(200, 16_383, node(Value::BulkString(b"c".into()), 3)),
        ]);
        let expected = vec![
            (0, 99, tcp_address("a", 1)),
            (100, 199, tcp_address("a", 2)),
            (200, 16_383, tcp_address("c", 3)),
        ];
        assert_eq!(
            parse_cluster_slots(&reply, &tcp_address("a", 9)),
            Some(expected)
        );
        for invalid in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(5, 4, node(Value::Nil, 1))]),
            Value::Array(vec![range(0, 16_384, node(Value::Nil, 1))]),
            Value::Array(vec![range(0, 1, node(Value::Nil, 65_536))]),
            Value::Array(vec![range(0, 1, Value::Array(Vec::new()))]),
        ] {
            assert_eq!(
                parse_cluster_slots(&invalid, &tcp_address("a", 9)),
                None,
                "{invalid:?}"
            );
        }
    }

    #[tokio::test]
    async fn finds_a_probe_key_for_each_node_without_blocking_other_tasks() {
        let ranges = [
            (0, 99, tcp_address("a", 1)),
            (100, 16_382, tcp_address("b", 1)),
            (16_383, 16_383, tcp_address("c", 1)),
        ];
        for (first, last, address) in &ranges {
            let (mut probe, mut others) = (pin!(find_probe_key(&ranges, address)), 0);
            let key = loop {
                tokio::select! {
                    biased;
                    key = &mut probe => break key,
                    () = tokio::task::yield_now() => others += 1,
                }
            };
            assert!((*first..=*last).contains(&hash_slot_for_key(&key)));
            assert!(others > 10 || first < last, "{others}");
        }
    }
}
