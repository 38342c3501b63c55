//! Sends calls to the node of a slot, and follows redirections.

use super::admission_hints::AdmissionHints;
use super::slot_map::{self, ClusterNode, ClusterSlotMap, hash_slot_for_key};
use crate::limiter::{Charge, Decision};
use crate::store::Settlement;
use crate::store::redis::connection::{LiveConnection, RedisConnectionState};
use crate::store::redis::context::RedisContext;
use crate::store::redis::error::RedisErrorKind;
use crate::store::redis::scripts::ScriptLibrary;
use crate::store::redis::settings::RedisAddress;
use crate::store::redis::settlement_calls::{
    MAX_PIPELINED_CALLS, collect_failed_calls, split_into_calls,
};
use crate::store::redis::watched_value::WatchedValue;
use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

/// Maximum redirections of one call. More redirections mean that the nodes disagree.
const MAX_REDIRECTIONS: u32 = 8;

/// Pause before a call is repeated because its keys are being migrated.
const TRY_AGAIN_DELAY: Duration = Duration::from_millis(2);

/// Finds the node of a slot and sends calls to it.
#[derive(Clone, Debug)]
pub(super) struct ClusterRouter {
    pub(super) context: Arc<RedisContext>,
    pub(super) slot_map: WatchedValue<Arc<ClusterSlotMap>>,
    /// Requests a refresh of the slot map after a call contradicted it.
    pub(super) refresh_requested: Arc<Notify>,
    pub(super) hints: Arc<AdmissionHints>,
}

/// A call without a useful reply. If the call was sent, `node_state` has the node and its
/// connection.
struct FailedClusterCall {
    kind: RedisErrorKind,
    node_state: Option<(Arc<ClusterNode>, Arc<RedisConnectionState>)>,
}

impl From<RedisErrorKind> for FailedClusterCall {
    fn from(failure: RedisErrorKind) -> Self {
        Self {
            kind: failure,
            node_state: None,
        }
    }
}

impl ClusterRouter {
    /// Runs one command on the node of a slot. Repeats a call whose keys are being migrated.
    ///
    /// # Errors
    /// Returns an error at once if the node is disconnected, otherwise by the deadline at the
    /// latest. The failure is counted.
    pub(super) async fn run_on_hash_slot(
        &self,
        hash_slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisErrorKind> {
        loop {
            match self
                .try_command_on_hash_slot(hash_slot, command, deadline)
                .await
            {
                Err(failed_call)
                    if failed_call.kind == RedisErrorKind::TryAgain
                        && Instant::now() + TRY_AGAIN_DELAY < deadline =>
                {
                    sleep(TRY_AGAIN_DELAY).await;
                }
                result => {
                    return result.map_err(|failed_call| self.record_failed_call(&failed_call));
                }
            }
        }
    }

    /// Runs settlement calls of one slot in order. Calls that fail together count as one failure.
    async fn send_settlements(
        &self,
        hash_slot: u16,
        calls: &[&[Settlement<'_>]],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let (start, call_timeout) = (Instant::now(), self.context.settings.timeout);
        let script = &self.context.scripts;
        let commands: Vec<Cmd> = calls
            .iter()
            .map(|call| script.settle_command(call, None))
            .collect();
        let answers = (1..).zip(&commands).map(|(turn, command)| {
            self.try_command_on_hash_slot(hash_slot, command, start + call_timeout * turn)
        });
        let results = join_all(answers).await;
        if let Some(failed_call) = results.iter().find_map(|result| result.as_ref().err()) {
            self.record_failed_call(failed_call);
        }
        results
            .into_iter()
            .map(|result| result.map(drop).map_err(|failed_call| failed_call.kind))
            .collect()
    }

    /// Like [`Self::run_on_hash_slot`], without repeating the call and without counting the
    /// failure.
    async fn try_command_on_hash_slot(
        &self,
        hash_slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, FailedClusterCall> {
        let mut redirected_to: Option<(RedisAddress, bool)> = None;
        let mut redirections = 0;
        while redirections < MAX_REDIRECTIONS {
            let node = match &redirected_to {
                None => self.slot_map.get().node_for_hash_slot(hash_slot).cloned(),
                Some((address, _)) => Some(self.wait_for_node(address, deadline).await?),
            };
            let Some(node) = node else { break };
            let state = node.connection.state();
            let live = match &*state {
                RedisConnectionState::Up(live) => live,
                RedisConnectionState::Down(_)
                    if node.is_connecting()
                        && timeout_at(deadline, node.connection.wait_until_ready())
                            .await
                            .is_ok() =>
                {
                    continue;
                }
                RedisConnectionState::Down(failure) => {
                    self.refresh_requested.notify_one();
                    return Err((*failure).into());
                }
            };
            let asking = redirected_to.as_ref().is_some_and(|(_, asking)| *asking);
            let error =
                match timeout_at(deadline, live.send_with_script_reload(command, asking)).await {
                    Ok(Ok(value)) => {
                        node.record_success();
                        return Ok(value);
                    }
                    Ok(Err(error)) => error,
                    Err(elapsed) => {
                        return Err(FailedClusterCall {
                            kind: elapsed.into(),
                            node_state: Some((node, state)),
                        });
                    }
                };
            match parse_redirection(&error, &node.address) {
                Some((address, asking)) => {
                    if !asking {
                        self.refresh_requested.notify_one();
                    }
                    redirected_to = Some((address, asking));
                    redirections += 1;
                }
                None => {
                    return Err(FailedClusterCall {
                        kind: RedisErrorKind::from(&error),
                        node_state: Some((node, state)),
                    });
                }
            }
        }
        self.refresh_requested.notify_one();
        Err(RedisErrorKind::ClusterDown.into())
    }

    /// Settles charges. Settlements of one counter stay in order. Returns the indexes of the
    /// settlements in each failed call; all other settlements were made.
    pub(super) async fn apply_settlements(
        &self,
        settlements: &[Settlement<'_>],
    ) -> Vec<(Vec<usize>, RedisErrorKind)> {
        let mut hash_slots: SmallVec<[(u16, Vec<usize>); 4]> = SmallVec::new();
        for (position, settlement) in settlements.iter().enumerate() {
            let hash_slot = hash_slot_for_key(settlement.key);
            match hash_slots.iter_mut().find(|(other, _)| *other == hash_slot) {
                Some((_, positions)) => positions.push(position),
                None => hash_slots.push((hash_slot, vec![position])),
            }
        }
        let hash_slots = hash_slots.iter().map(|(hash_slot, positions)| async move {
            let slot_settlements: Vec<Settlement<'_>> = positions
                .iter()
                .filter_map(|position| settlements.get(*position))
                .copied()
                .collect();
            let failed = self
                .apply_settlements_on_hash_slot(*hash_slot, &slot_settlements)
                .await
                .into_iter();
            let original_position = |nth: &usize| positions.get(*nth).copied();
            failed
                .map(|(nth, failure)| (nth.iter().filter_map(original_position).collect(), failure))
                .collect::<Vec<(Vec<usize>, RedisErrorKind)>>()
        });
        join_all(hash_slots).await.into_iter().flatten().collect()
    }

    /// [`Self::apply_settlements`] for settlements of one slot.
    async fn apply_settlements_on_hash_slot(
        &self,
        hash_slot: u16,
        settlements: &[Settlement<'_>],
    ) -> Vec<(Vec<usize>, RedisErrorKind)> {
        let (calls, mut results) = (split_into_calls(settlements), Vec::new());
        for calls in calls.chunks(MAX_PIPELINED_CALLS) {
            results.extend(self.send_settlements(hash_slot, calls).await);
        }
        // A slot that moves accepts only calls with one key.
        for (call, result) in calls.iter().zip(&mut results) {
            if *result == Err(RedisErrorKind::TryAgain) {
                let singles: Vec<&[Settlement<'_>]> = call.chunks(1).collect();
                let each = self.send_settlements(hash_slot, &singles).await;
                *result = each.into_iter().collect();
            }
        }
        collect_failed_calls(&calls, results)
    }

    pub(super) async fn request_decision(
        &self,
        hash_slot: u16,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let script = &self.context.scripts;
        let command = script.decide_command(charges, None);
        let reply = self
            .try_command_on_hash_slot(hash_slot, &command, deadline)
            .await;
        match reply.map_err(|failed_call| self.record_failed_call(&failed_call)) {
            Ok(reply) => ScriptLibrary::parse_decision_reply(&reply, charges)
                .ok_or_else(|| self.count_failure(RedisErrorKind::InvalidReply)),
            Err(RedisErrorKind::WrongType(position)) => {
                self.context
                    .breaker
                    .record_foreign_value(|| script.counter_name_by_position(charges, position));
                Err(RedisErrorKind::WrongType(position))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Returns the node at an address from a redirection. Waits for a node that is not in the slot
    /// map yet.
    async fn wait_for_node(
        &self,
        address: &RedisAddress,
        deadline: Instant,
    ) -> Result<Arc<ClusterNode>, FailedClusterCall> {
        if let Some(node) = self.slot_map.get().find_node_by_address(address) {
            return Ok(Arc::clone(node));
        }
        self.refresh_requested.notify_one();
        let known_node = async {
            let map = self
                .slot_map
                .wait_for(|map| map.find_node_by_address(address).is_some());
            let node = map.await.find_node_by_address(address).cloned()?;
            node.connection.wait_until_ready().await;
            Some(node)
        };
        match timeout_at(deadline, known_node).await {
            Ok(Some(node)) => Ok(node),
            Ok(None) | Err(_) => Err(RedisErrorKind::ClusterDown.into()),
        }
    }

    /// Counts a failed call, also for its node if the node was connected. Returns the kind of
    /// failure. A call that failed because its slot moves is not counted.
    fn record_failed_call(&self, call: &FailedClusterCall) -> RedisErrorKind {
        if call.kind == RedisErrorKind::TryAgain {
            return call.kind;
        }
        match &call.node_state {
            Some((node, state)) => match &**state {
                RedisConnectionState::Up(live) => self.record_node_failure(node, live, call.kind),
                RedisConnectionState::Down(_) => self.count_failure(call.kind),
            },
            None => self.count_failure(call.kind),
        }
    }

    /// Records a failed call of a node.
    fn record_node_failure(
        &self,
        node: &ClusterNode,
        live: &LiveConnection,
        failure: RedisErrorKind,
    ) -> RedisErrorKind {
        if matches!(failure, RedisErrorKind::WrongType(_)) {
            // Only one key is affected, and the caller counts the failure.
            return failure;
        }
        if failure == RedisErrorKind::ClusterDown || failure.requires_reconnect() {
            self.refresh_requested.notify_one();
        }
        live.record_failure(failure);
        let failures = node
            .consecutive_failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if failures >= self.context.settings.breaker_failures {
            node.consecutive_failures.store(0, Ordering::Relaxed);
            live.request_replacement(failure);
        }
        self.count_failure(failure)
    }

    pub(super) fn count_failure(&self, failure: RedisErrorKind) -> RedisErrorKind {
        self.context.breaker.count_failure(failure);
        failure
    }
}

/// The node to which an error redirects a call, and whether that node is importing the slot.
fn parse_redirection(
    error: &RedisError,
    source_address: &RedisAddress,
) -> Option<(RedisAddress, bool)> {
    let is_asking = match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => false,
        ErrorKind::Server(ServerErrorKind::Ask) => true,
        _ => return None,
    };
    match RedisAddress::parse(error.redirect_node()?.0)? {
        RedisAddress::Tcp { host, port } => Some((
            slot_map::resolve_node_address(host, port, source_address),
            is_asking,
        )),
        RedisAddress::Unix(_) => None,
    }
}
