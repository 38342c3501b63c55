//! The task that refreshes the slot map: periodically, and when a call contradicted it.

use super::router::ClusterRouter;
use super::slot_map::{self, ClusterNode, ClusterSlotMap, HashSlotRange};
use crate::store::redis::connection::SupervisedConnection;
use crate::store::redis::connection_target::RedisConnectionTarget;
use crate::store::redis::connector;
use crate::store::redis::context::RedisContext;
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::settings::RedisAddress;
use redis::{Cmd, Value};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Interval of refreshes that no call has requested.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Bounds of the pause between requested refreshes. The pause doubles while the map does not
/// change.
const INITIAL_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// Refreshes the slot map periodically, and on request.
pub(super) async fn run_slot_map_refresh(router: Arc<ClusterRouter>) {
    let breaker = &router.context.breaker;
    let (mut is_lost, mut backoff) = (false, INITIAL_BACKOFF);
    loop {
        let map = router.slot_map.get();
        match fetch_slot_ranges(&router.context, &map).await {
            Ok(ranges) if ranges.is_empty() => breaker.count_failure(RedisErrorKind::ClusterDown),
            Ok(ranges) => {
                if std::mem::take(&mut is_lost) {
                    breaker.record_connection_restored();
                }
                if ranges != map.ranges {
                    let map = build_slot_map_with_connections(&router.context, &map, ranges).await;
                    router.slot_map.set(Arc::new(map));
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
    context: &Arc<RedisContext>,
    previous_map: &ClusterSlotMap,
    ranges: Vec<HashSlotRange>,
) -> ClusterSlotMap {
    let mut nodes: Vec<Arc<ClusterNode>> = Vec::new();
    for (_, _, address) in &ranges {
        if nodes.iter().any(|node| node.address == *address) {
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
        nodes.push(Arc::new(ClusterNode {
            address: address.clone(),
            connection: SupervisedConnection::start(Arc::clone(context), target),
            consecutive_failures: AtomicU32::new(0),
            discovered_at: Instant::now(),
        }));
    }
    for known in &previous_map.nodes {
        if nodes.iter().any(|node| Arc::ptr_eq(node, known)) {
            continue;
        }
        let (removed_node, call_timeout) = (Arc::clone(known), context.settings.timeout);
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
    context: &RedisContext,
    slot_map: &ClusterSlotMap,
) -> Result<Vec<HashSlotRange>, RedisConnectionError> {
    let settings = &context.settings;
    let mut command = Cmd::new();
    command.arg("CLUSTER").arg("SLOTS");
    let mut nodes = slot_map.nodes.clone();
    fastrand::shuffle(&mut nodes);
    for node in nodes {
        if let Ok(live) = node.connection.live()
            && let Ok(Ok(reply)) = timeout(settings.timeout, live.run_command(&command)).await
            && let Some(ranges) = slot_map::parse_cluster_slots(&reply, &node.address)
        {
            return Ok(ranges);
        }
    }
    let mut last_error = RedisConnectionError::new(RedisErrorKind::Dns, "no node address is known");
    let timeout_per_server = settings.connect_timeout / 2;
    for address in &settings.servers {
        let fetched = timeout(
            timeout_per_server,
            query_configured_server(context, address, &command),
        )
        .await;
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

async fn query_configured_server(
    context: &RedisContext,
    address: &RedisAddress,
    command: &Cmd,
) -> Result<Vec<HashSlotRange>, RedisConnectionError> {
    let settings = &context.settings;
    let (mut connection, _driver) =
        connector::open_connection(address, settings, &settings.credentials, settings.database)
            .await?;
    let reply: Value = command.query_async(&mut connection).await?;
    slot_map::parse_cluster_slots(&reply, address).ok_or_else(|| {
        RedisConnectionError::new(
            RedisErrorKind::InvalidReply,
            "the reply to CLUSTER SLOTS is invalid",
        )
    })
}
