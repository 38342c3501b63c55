//! The slot map: which node of a cluster holds which slot, and the task that refreshes it.

use crate::limiter::{Key, KeyBuilder};
use crate::store::redis::RedisStore;
use crate::store::redis::access::RedisAccess;
use crate::store::redis::connection::{PROBE_POLICY_NAME, RedisConnectionTarget, RedisNode};
use crate::store::redis::connector;
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind, within};
use crate::store::redis::hash_slot::{HASH_SLOT_COUNT, hash_slot_for_key};
use crate::store::redis::settings::RedisAddress;
use crate::store::redis::shared_state::SharedRedisState;
use redis::{Cmd, Value, from_redis_value_ref};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Maximum number of keys tried to find a counter in one of a node's slots: almost certainly enough
/// for a node with a single slot.
const MAX_PROBE_KEY_CANDIDATES: u32 = 200_000;

/// Keys tried before yielding to other tasks. Each key takes about a microsecond.
const PROBE_KEY_CANDIDATES_PER_YIELD: u32 = 100;

/// Interval of refreshes that no call has requested.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// How long a call waits for a node that is still connecting, as far as its deadline allows. After
/// this time the node counts as unreachable.
const NEW_NODE_WAIT: Duration = Duration::from_secs(1);

/// Bounds of the pause between requested refreshes. The pause doubles while the map does not
/// change.
const INITIAL_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

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
    pub(crate) fn from_single_node(node: Arc<RedisNode>) -> Self {
        Self {
            nodes: vec![node],
            ranges: Vec::new(),
            node_indexes: vec![Some(0)],
        }
    }

    pub(crate) fn new(nodes: Vec<Arc<RedisNode>>, ranges: Vec<HashSlotRange>) -> Self {
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

fn cluster_slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Parses the reply to `CLUSTER SLOTS`: the ranges of the masters, in order. A node without a host
/// has the host of the queried node. Returns `None` if the reply is invalid.
fn parse_cluster_slots(reply: &Value, queried_node: &RedisAddress) -> Option<Vec<HashSlotRange>> {
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

/// Refreshes the slot map periodically, and on request.
pub(crate) async fn run_slot_map_refresh(store: RedisStore) {
    let breaker = &store.breaker;
    let (mut is_lost, mut backoff) = (false, INITIAL_BACKOFF);
    loop {
        let map = store.worker.slot_map.get();
        let ranges = fetch_slot_ranges(&store.shared, &map).await;
        let ranges = match ranges {
            Ok(ranges) if ranges.is_empty() => Err(RedisConnectionError::new(
                RedisErrorKind::ClusterDown,
                "no slot has a master",
            )),
            ranges => ranges,
        };
        match ranges {
            Ok(ranges) => {
                if std::mem::take(&mut is_lost) {
                    breaker.record_connection_restored();
                }
                if ranges != map.ranges {
                    let map = build_slot_map_with_connections(&store.shared, &map, ranges).await;
                    drop(store.worker.slot_map.set(Arc::new(map)));
                    backoff = INITIAL_BACKOFF;
                }
            }
            Err(error) => {
                breaker.count_failure(error.kind);
                // Once nodes are known, their connections report the loss of Redis.
                if map.ranges.is_empty() && !std::mem::replace(&mut is_lost, true) {
                    breaker.record_connection_down(&error);
                }
            }
        }
        sleep(backoff.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
        if !store.worker.slot_map.get().ranges.is_empty()
            && timeout(REFRESH_INTERVAL, store.worker.refresh_requested.notified())
                .await
                .is_err()
        {
            backoff = INITIAL_BACKOFF;
        }
    }
}

/// Builds a slot map and connects to its new nodes. Known nodes keep their connections. The
/// connections of removed nodes are stopped after `timeout`.
async fn build_slot_map_with_connections(
    shared: &Arc<SharedRedisState>,
    previous_map: &ClusterSlotMap,
    ranges: Vec<HashSlotRange>,
) -> ClusterSlotMap {
    let mut nodes: Vec<Arc<RedisNode>> = Vec::new();
    for (_, _, address) in &ranges {
        if nodes.iter().any(|node| node.address() == Some(address)) {
            continue;
        }
        if let Some(known) = previous_map.find_node_by_address(address) {
            nodes.push(Arc::clone(known));
            continue;
        }
        let target = RedisConnectionTarget {
            address: Some(address.clone()),
            probe_key: find_probe_key(&ranges, address).await,
        };
        let connect_by = Instant::now() + NEW_NODE_WAIT;
        nodes.push(Arc::new(RedisNode::start(shared, target, connect_by)));
    }
    for known in &previous_map.nodes {
        if nodes.iter().any(|node| Arc::ptr_eq(node, known)) {
            continue;
        }
        let (removed_node, call_timeout) = (Arc::clone(known), shared.settings.timeout);
        // Calls in flight are still answered, if only with a redirection.
        tokio::spawn(async move {
            sleep(call_timeout).await;
            removed_node.stop();
        });
    }
    ClusterSlotMap::new(nodes, ranges)
}

/// Fetches the slot map: from a connected node, in random order, else from a configured server.
async fn fetch_slot_ranges(
    shared: &SharedRedisState,
    slot_map: &ClusterSlotMap,
) -> Result<Vec<HashSlotRange>, RedisConnectionError> {
    let settings = &shared.settings;
    let command = cluster_slots_command();
    let mut nodes = slot_map.nodes.clone();
    fastrand::shuffle(&mut nodes);
    for node in nodes {
        if let (Ok(live), Some(address)) = (node.live(), node.address())
            && let Ok(Ok(reply)) = timeout(settings.timeout, live.run_command(&command)).await
            && let Some(ranges) = parse_cluster_slots(&reply, address)
        {
            return Ok(ranges);
        }
    }
    let mut last_error = RedisConnectionError::new(RedisErrorKind::Dns, "no node address is known");
    let timeout_per_server = settings.connect_timeout / 2;
    for address in &settings.servers {
        let access = shared.access.get();
        let query = query_configured_server(&access, address);
        match within(timeout_per_server, query).await {
            Ok(ranges) => return Ok(ranges),
            Err(error) => {
                last_error =
                    RedisConnectionError::new(error.kind, format!("{address}: {}", error.message))
            }
        }
    }
    Err(last_error)
}

/// Asks a configured server for the slot map, with the logins that `access` has.
pub(crate) async fn query_configured_server(
    access: &RedisAccess,
    address: &RedisAddress,
) -> Result<Vec<HashSlotRange>, RedisConnectionError> {
    let settings = &access.settings;
    let attempt = |login| async move {
        let (mut connection, _driver) =
            connector::open_connection(address, settings, login, settings.database).await?;
        let reply: Value = cluster_slots_command().query_async(&mut connection).await?;
        parse_cluster_slots(&reply, address).ok_or_else(|| {
            let reason = "the reply to CLUSTER SLOTS is invalid";
            RedisConnectionError::new(RedisErrorKind::InvalidReply, reason)
        })
    };
    let (ranges, _login) = access.server_login.try_logins(attempt).await?;
    Ok(ranges)
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
