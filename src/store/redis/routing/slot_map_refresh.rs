//! The task that refreshes the slot map: periodically, and when a call contradicted it.

use super::router::RedisRouter;
use super::slot_map::{self, ClusterSlotMap, HashSlotRange};
use crate::store::redis::access::RedisAccess;
use crate::store::redis::connection::RedisConnectionTarget;
use crate::store::redis::connection::SupervisedConnection;
use crate::store::redis::connector;
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::node::RedisNode;
use crate::store::redis::settings::RedisAddress;
use crate::store::redis::shared_state::SharedRedisState;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Interval of refreshes that no call has requested.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// How long a call waits for a node that is still connecting, as far as its deadline allows. After
/// this time the node counts as unreachable.
const NEW_NODE_WAIT: Duration = Duration::from_secs(1);

/// Bounds of the pause between requested refreshes. The pause doubles while the map does not
/// change.
const INITIAL_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// Refreshes the slot map periodically, and on request.
pub(super) async fn run_slot_map_refresh(router: Arc<RedisRouter>) {
    let breaker = &router.shared.breaker;
    let (mut is_lost, mut backoff) = (false, INITIAL_BACKOFF);
    loop {
        let map = router.slot_map.get();
        let ranges = fetch_slot_ranges(&router.shared, &map).await;
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
                    let map = build_slot_map_with_connections(&router.shared, &map, ranges).await;
                    drop(router.slot_map.set(Arc::new(map)));
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
        if !router.slot_map.get().ranges.is_empty()
            && timeout(REFRESH_INTERVAL, router.refresh_requested.notified())
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
            probe_key: slot_map::find_probe_key(&ranges, address).await,
        };
        let connection = SupervisedConnection::start(Arc::clone(shared), target);
        let connect_by = Instant::now() + NEW_NODE_WAIT;
        nodes.push(Arc::new(RedisNode::new(connection, connect_by)));
    }
    for known in &previous_map.nodes {
        if nodes.iter().any(|node| Arc::ptr_eq(node, known)) {
            continue;
        }
        let (removed_node, call_timeout) = (Arc::clone(known), shared.settings.timeout);
        // Calls in flight are still answered, if only with a redirection.
        tokio::spawn(async move {
            sleep(call_timeout).await;
            removed_node.connection.stop();
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
    let command = slot_map::cluster_slots_command();
    let mut nodes = slot_map.nodes.clone();
    fastrand::shuffle(&mut nodes);
    for node in nodes {
        if let (Ok(live), Some(address)) = (node.connection.live(), node.address())
            && let Ok(Ok(reply)) = timeout(settings.timeout, live.run_command(&command)).await
            && let Some(ranges) = slot_map::parse_cluster_slots(&reply, address)
        {
            return Ok(ranges);
        }
    }
    let mut last_error = RedisConnectionError::new(RedisErrorKind::Dns, "no node address is known");
    let timeout_per_server = settings.connect_timeout / 2;
    for address in &settings.servers {
        let access = shared.access.get();
        let query = query_configured_server(&access, address);
        let fetched = timeout(timeout_per_server, query).await;
        match fetched.unwrap_or_else(|elapsed| Err(elapsed.into())) {
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
        slot_map::query_slot_ranges(&mut connection, address).await
    };
    let (ranges, _login) = access.server_login.try_logins(attempt).await?;
    Ok(ranges)
}
