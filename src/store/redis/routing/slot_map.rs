//! The slot map: which node of a cluster holds which slot.

use crate::limiter::{Key, KeyBuilder};
use crate::store::redis::connection::PROBE_POLICY_NAME;
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::hash_slot::{HASH_SLOT_COUNT, hash_slot_for_key};
use crate::store::redis::node::RedisNode;
use crate::store::redis::settings::RedisAddress;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Value, from_redis_value_ref};
use std::sync::Arc;

/// Maximum number of keys tried to find a counter in one of a node's slots: almost certainly enough
/// for a node with a single slot.
const MAX_PROBE_KEY_CANDIDATES: u32 = 200_000;

/// Keys tried before yielding to other tasks. Each key takes about a microsecond.
const PROBE_KEY_CANDIDATES_PER_YIELD: u32 = 100;

#[derive(Debug)]
pub(crate) struct ClusterSlotMap {
    pub(crate) nodes: Vec<Arc<RedisNode>>,
    pub(super) ranges: Vec<HashSlotRange>,
    /// The index of the node of each slot, if it has one.
    node_indexes: Vec<Option<u16>>,
}

/// First and last slot, both included, and the address of their node.
pub(crate) type HashSlotRange = (u16, u16, RedisAddress);

impl ClusterSlotMap {
    /// The map of a single server, which holds the only slot.
    pub(super) fn from_single_node(node: Arc<RedisNode>) -> Self {
        Self {
            nodes: vec![node],
            ranges: Vec::new(),
            node_indexes: vec![Some(0)],
        }
    }

    pub(super) fn new(nodes: Vec<Arc<RedisNode>>, ranges: Vec<HashSlotRange>) -> Self {
        let mut hash_slots = vec![None; usize::from(HASH_SLOT_COUNT)];
        for (first, last, address) in &ranges {
            let node_index = nodes
                .iter()
                .position(|node| node.address() == Some(address));
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

    pub(crate) fn node_for_hash_slot(&self, hash_slot: u16) -> Option<&Arc<RedisNode>> {
        let node_index = (*self.node_indexes.get(usize::from(hash_slot))?)?;
        self.nodes.get(usize::from(node_index))
    }

    /// All slots without a node for which `is_serving` holds.
    pub(crate) fn hash_slots_not_served_by(
        &self,
        is_serving: impl Fn(&Arc<RedisNode>) -> bool,
    ) -> Vec<u16> {
        let serving: Vec<bool> = self.nodes.iter().map(is_serving).collect();
        let is_served = |node_index: Option<u16>| {
            node_index.is_some_and(|index| serving.get(usize::from(index)) == Some(&true))
        };
        (0..)
            .zip(&self.node_indexes)
            .filter_map(|(hash_slot, node_index)| (!is_served(*node_index)).then_some(hash_slot))
            .collect()
    }

    pub(super) fn find_node_by_address(&self, address: &RedisAddress) -> Option<&Arc<RedisNode>> {
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.address() == Some(address))
    }
}

/// Asks a node for the slot map.
pub(crate) async fn query_slot_ranges(
    connection: &mut MultiplexedConnection,
    address: &RedisAddress,
) -> Result<Vec<HashSlotRange>, RedisConnectionError> {
    let reply: Value = cluster_slots_command().query_async(connection).await?;
    parse_cluster_slots(&reply, address).ok_or_else(|| {
        let reason = "the reply to CLUSTER SLOTS is invalid";
        RedisConnectionError::new(RedisErrorKind::InvalidReply, reason)
    })
}

pub(super) fn cluster_slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Parses the reply to `CLUSTER SLOTS`: the ranges of the masters, in order. A node without a host
/// has the host of the queried node. Returns `None` if the reply is invalid.
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
pub(crate) async fn find_probe_key(ranges: &[HashSlotRange], address: &RedisAddress) -> Key {
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
    for number in 0..MAX_PROBE_KEY_CANDIDATES {
        let key = probe_key(number);
        if is_hash_slot_of_node(hash_slot_for_key(&key)) {
            return key;
        }
        if number % PROBE_KEY_CANDIDATES_PER_YIELD == PROBE_KEY_CANDIDATES_PER_YIELD - 1 {
            tokio::task::yield_now().await;
        }
    }
    probe_key(0)
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
