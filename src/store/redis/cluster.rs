//! One worker's client of a Redis Cluster: a connection to each master, and the slot map.
//!
//! redis-rs' own `ClusterConnection` is not used: it retries and waits by its own rules although a
//! request has a deadline, it does not probe connections, and it has its own TLS setup. Only the
//! slot map, two redirections and one refresh task are needed beside [`SupervisedConnection`].
//!
//! Charges of several slots are decided at once, one call per slot. If an enforced charge is
//! refused, the charges of the other slots are credited: too strict for a moment, never too lax.

mod shard_search;
mod slot_charges;
mod slot_map;
mod slot_map_refresh;

use super::connection::{LiveConnection, RedisConnectionState, RedisContext, SupervisedConnection};
use super::connector::{AbortOnDropTask, RedisAddress};
use super::error::RedisErrorKind;
use super::scripts::ScriptLibrary;
use super::{MAX_PIPELINED_CALLS, collect_failed_calls, split_into_calls};
use crate::limiter::{
    Algorithm, Amendment, Charge, ChargeEffect, Decision, LimitStatus, determine_effect,
};
use crate::store::Settlement;
use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use slot_charges::{SlotCharges, group_by_slot, merge_slot_decisions};
use slot_map::{ClusterNode, ClusterSlotMap};
use slot_map_refresh::run_slot_map_refresh;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(super) use slot_map::{slot_for_key, slot_for_name};

/// Maximum redirections of one call. More mean that the nodes disagree.
const MAX_REDIRECTIONS: u32 = 8;

/// How long a call waits for a node that is still connecting, as far as its deadline allows. Later
/// the node counts as unreachable.
const NEW_NODE_WAIT: Duration = Duration::from_secs(1);

/// Pause before a call is repeated because its keys are being migrated.
const TRY_AGAIN_DELAY: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct ClusterClient {
    router: ClusterRouter,
    _refresh_task: AbortOnDropTask,
}

/// Finds the node of a slot and sends calls to it.
#[derive(Clone, Debug)]
struct ClusterRouter {
    context: Arc<RedisContext>,
    slot_map: watch::Receiver<Arc<ClusterSlotMap>>,
    /// Requests a refresh of the slot map after a call contradicted it.
    refresh_requested: Arc<Notify>,
}

/// A call without a useful reply, and the node that failed with its state, if it was sent.
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

/// Whether charges are in several slots, or spread over shards.
pub(super) fn is_split(charges: &[Charge<'_>]) -> bool {
    is_sharded(charges) || spans_several_slots(charges)
}

fn is_sharded(charges: &[Charge<'_>]) -> bool {
    charges.iter().any(|charge| charge.shard_count > 1)
}

/// Whether charges are in several slots.
fn spans_several_slots(charges: &[Charge<'_>]) -> bool {
    let mut keys = charges.iter().map(|charge| charge.key);
    keys.next().is_some_and(|first| {
        keys.any(|key| key.id() != first.id() && slot_for_key(key) != slot_for_key(first))
    })
}

impl ClusterClient {
    /// Fetches the slot map, connects to all masters, and stays connected as long as the value
    /// lives.
    pub(super) fn start(context: Arc<RedisContext>) -> Self {
        let (map_sender, slot_map) = watch::channel(Arc::default());
        let refresh_requested = Arc::new(Notify::new());
        let refresh_loop = run_slot_map_refresh(
            Arc::clone(&context),
            map_sender,
            Arc::clone(&refresh_requested),
        );
        Self {
            router: ClusterRouter {
                context,
                slot_map,
                refresh_requested,
            },
            _refresh_task: AbortOnDropTask(tokio::spawn(refresh_loop)),
        }
    }

    /// Waits for the first probed connection to every master.
    pub(super) async fn wait_until_ready(&self) {
        let mut slot_map = self.router.slot_map.clone();
        let nodes = match slot_map.wait_for(|map| !map.nodes.is_empty()).await {
            Ok(map) => map.nodes.clone(),
            // The refresh task ended with the runtime: nothing to wait for.
            Err(_) => return,
        };
        join_all(nodes.iter().map(|node| node.connection.wait_until_ready())).await;
    }

    /// Decides charges in any slots.
    ///
    /// # Errors
    /// When a slot gave no reply, and no other slot refuses. The charges of the other slots then
    /// remain: the request is decided without the store, and policies that were reached must still
    /// count it.
    pub(super) async fn decide(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        match is_sharded(charges) {
            true => self.decide_across_shards(charges, deadline).await,
            false => self
                .decide_by_slot(charges, deadline)
                .await
                .map(|(decision, _)| decision),
        }
    }

    /// Decides charges, each on the counter of its key. If they are refused, the returned task ends
    /// when all are credited.
    async fn decide_by_slot(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<(Decision, Option<JoinHandle<()>>), RedisErrorKind> {
        if !spans_several_slots(charges) {
            let slot = charges.first().map_or(0, |charge| slot_for_key(charge.key));
            return Ok((
                self.router
                    .request_decision(slot, charges, deadline)
                    .await?,
                None,
            ));
        }
        let (decision_sender, decision_receiver) = oneshot::channel();
        // A separate task, so that a disconnected client does not leave charges of one slot that
        // another refuses.
        let task = self.router.clone().decide_across_slots(
            group_by_slot(charges),
            charges.len(),
            deadline,
            decision_sender,
        );
        let task = tokio::spawn(task);
        // The sender is dropped only when the runtime shuts down.
        Ok((
            decision_receiver
                .await
                .unwrap_or(Err(RedisErrorKind::Connection))?,
            Some(task),
        ))
    }

    /// Settles charges. Settlements of one counter stay in order. Returns the indexes of the
    /// settlements in each failed call; the others were made.
    pub(super) async fn amend(
        &self,
        settlements: &[Settlement<'_>],
    ) -> Vec<(Vec<usize>, RedisErrorKind)> {
        let mut slots: SmallVec<[(u16, Vec<usize>); 4]> = SmallVec::new();
        for (position, settlement) in settlements.iter().enumerate() {
            let slot = slot_for_key(settlement.key);
            match slots.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, positions)) => positions.push(position),
                None => slots.push((slot, vec![position])),
            }
        }
        let slots = slots.iter().map(|(slot, positions)| async move {
            let slot_settlements: Vec<Settlement<'_>> = positions
                .iter()
                .filter_map(|position| settlements.get(*position))
                .copied()
                .collect();
            let (calls, mut results) = (split_into_calls(&slot_settlements), Vec::new());
            for calls in calls.chunks(MAX_PIPELINED_CALLS) {
                let script = &self.router.context.scripts;
                let commands: Vec<Cmd> = calls
                    .iter()
                    .map(|call| script.amend_command(call, None))
                    .collect();
                results.extend(self.router.send_amendments(*slot, &commands).await);
            }
            let original_position = |nth: &usize| positions.get(*nth).copied();
            let failed = collect_failed_calls(&calls, results).into_iter();
            failed
                .map(|(nth, failure)| (nth.iter().filter_map(original_position).collect(), failure))
                .collect::<Vec<(Vec<usize>, RedisErrorKind)>>()
        });
        join_all(slots).await.into_iter().flatten().collect()
    }

    /// Runs one command on the node of a slot.
    ///
    /// # Errors
    /// As [`Self::decide`]. The failure is counted.
    pub(super) async fn run_on_slot(
        &self,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisErrorKind> {
        self.router.run_on_slot(slot, command, deadline).await
    }

    /// Whether calls would be sent to any master.
    pub(super) fn is_any_master_reachable(&self) -> bool {
        self.master_connections()
            .iter()
            .any(|master| matches!(&*master.state(), RedisConnectionState::Up(_)))
    }

    /// Whether calls would be sent to all nodes of these charges; for a sharded key, to all nodes.
    pub(super) fn is_reachable_for(&self, charges: &[Charge<'_>]) -> bool {
        let map = self.router.slot_map.borrow();
        let is_available = |charge: &Charge<'_>| match charge.shard_count {
            0 | 1 => map
                .node_for_slot(slot_for_key(charge.key))
                .is_some_and(|node| node.is_available()),
            _ => map.nodes.iter().all(|node| node.is_available()),
        };
        charges.iter().all(is_available)
    }

    /// The slots that no call would be sent for.
    pub(super) fn unreachable_slots(&self) -> Vec<u16> {
        self.router
            .slot_map
            .borrow()
            .slots_not_served_by(|node| node.is_available())
    }

    /// The slots of masters that are connected and don't answer. Without this check, only calls to
    /// a hung node detect it.
    pub(super) async fn find_unresponsive_slots(&self) -> Vec<u16> {
        let nodes = self.router.slot_map.borrow().nodes.clone();
        let call_timeout = self.router.context.settings.connect_timeout;
        let find_unresponsive = async |node: &Arc<ClusterNode>| {
            let state = node.connection.state();
            let RedisConnectionState::Up(live) = &*state else {
                return None;
            };
            let answer = timeout(
                call_timeout,
                live.send_with_script_reload(&redis::cmd("PING"), false),
            )
            .await;
            let elapsed = answer.err()?;
            live.request_replacement(self.router.count_failure(elapsed.into()));
            Some(Arc::clone(node))
        };
        let unresponsive: Vec<_> = join_all(nodes.iter().map(find_unresponsive))
            .await
            .into_iter()
            .flatten()
            .collect();
        match unresponsive.is_empty() {
            true => Vec::new(),
            false => {
                let is_responsive = |node: &ClusterNode| {
                    unresponsive
                        .iter()
                        .all(|silent| silent.address != node.address)
                };
                self.router
                    .slot_map
                    .borrow()
                    .slots_not_served_by(is_responsive)
            }
        }
    }

    /// The connections to all masters in the slot map.
    pub(super) fn master_connections(&self) -> Vec<Arc<SupervisedConnection>> {
        self.router
            .slot_map
            .borrow()
            .nodes
            .iter()
            .map(|node| Arc::clone(&node.connection))
            .collect()
    }
}

impl ClusterRouter {
    /// Runs one command on the node of a slot.
    ///
    /// # Errors
    /// At once if that node is disconnected, else within the deadline. The failure is counted.
    async fn run_on_slot(
        &self,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisErrorKind> {
        self.try_on_slot(slot, command, deadline)
            .await
            .map_err(|failed_call| self.record_failure(&failed_call))
    }

    /// Runs settlement calls of one slot in order. Calls that fail together count as one failure.
    async fn send_amendments(
        &self,
        slot: u16,
        commands: &[Cmd],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let (start, call_timeout) = (Instant::now(), self.context.settings.timeout);
        let answers = (1..)
            .zip(commands)
            .map(|(turn, command)| self.try_on_slot(slot, command, start + call_timeout * turn));
        let results = join_all(answers).await;
        if let Some(failed_call) = results.iter().find_map(|result| result.as_ref().err()) {
            self.record_failure(failed_call);
        }
        results
            .into_iter()
            .map(|result| result.map(drop).map_err(|failed_call| failed_call.kind))
            .collect()
    }

    /// [`Self::run_on_slot`] without counting the failure.
    async fn try_on_slot(
        &self,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, FailedClusterCall> {
        let mut redirected_to: Option<(RedisAddress, bool)> = None;
        let mut redirections = 0;
        while redirections < MAX_REDIRECTIONS {
            let node = match &redirected_to {
                None => self.slot_map.borrow().node_for_slot(slot).cloned(),
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
                Some(ClusterRedirection::ToNode(address, asking)) => {
                    if !asking {
                        self.refresh_requested.notify_one();
                    }
                    redirected_to = Some((address, asking));
                    redirections += 1;
                }
                Some(ClusterRedirection::TryAgain)
                    if Instant::now() + TRY_AGAIN_DELAY < deadline =>
                {
                    sleep(TRY_AGAIN_DELAY).await
                }
                Some(ClusterRedirection::TryAgain) => return Err(RedisErrorKind::Timeout.into()),
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

    /// Decides all slots at once, and sends the merged decision. If a slot refuses, the charges of
    /// the others are credited.
    async fn decide_across_slots(
        self,
        slots: SmallVec<[SlotCharges; 4]>,
        charge_count: usize,
        deadline: Instant,
        decision_sender: oneshot::Sender<Result<Decision, RedisErrorKind>>,
    ) {
        let decide_slot = async |part: &SlotCharges| {
            self.request_decision(part.slot, &part.borrow_charges(), deadline)
                .await
        };
        let answers = join_all(slots.iter().map(decide_slot)).await;
        let decision = merge_slot_decisions(charge_count, &slots, &answers);
        let is_refused = decision.as_ref().is_ok_and(|decision| !decision.admitted);
        // The caller may have disconnected.
        drop(decision_sender.send(decision));
        if is_refused {
            let made = slots
                .iter()
                .zip(&answers)
                .filter_map(|(part, answer)| Some((part, answer.as_ref().ok()?)));
            join_all(made.map(|(part, answer)| self.credit_slot(part, answer))).await;
        }
    }

    /// Credits the charges of one slot. If that fails, they remain.
    async fn credit_slot(&self, part: &SlotCharges, decision: &Decision) {
        let refusals: SmallVec<[_; 4]> = decision
            .statuses
            .iter()
            .map(|status| status.and_then(|status| status.refusal))
            .collect();
        let charges = part.borrow_charges();
        let made_charges = charges.iter().enumerate().filter(|(at, charge)| {
            // A block stays, because its own policy refused.
            !charge.is_block() && determine_effect(&charges, &refusals, *at) == ChargeEffect::Charge
        });
        let settlements = made_charges.filter_map(|(at, charge)| {
            let at_us = decision.charged_at_us.get(at).copied().flatten()?;
            let amendment = match charge.limit.algorithm {
                Algorithm::Concurrency { .. } => Amendment::Release {
                    slot: charge.slot_id,
                },
                _ => Amendment::Credit {
                    units: charge.cost,
                    at_us,
                },
            };
            Some(Settlement {
                limit: charge.limit,
                key: charge.key,
                amendment,
            })
        });
        let settlements: SmallVec<[Settlement<'_>; 4]> = settlements.collect();
        if !settlements.is_empty() {
            let command = self.context.scripts.amend_command(&settlements, None);
            let deadline = Instant::now() + self.context.settings.timeout;
            drop(self.run_on_slot(part.slot, &command, deadline).await);
        }
    }

    async fn request_decision(
        &self,
        slot: u16,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let script = &self.context.scripts;
        match self
            .run_on_slot(slot, &script.decide_command(charges, None), deadline)
            .await
        {
            Ok(reply) => ScriptLibrary::parse_decision_reply(&reply, charges)
                .ok_or_else(|| self.count_failure(RedisErrorKind::InvalidReply)),
            Err(RedisErrorKind::WrongType(position)) => {
                self.context
                    .breaker
                    .record_foreign_value(|| script.counter_name_at(charges, position));
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
        if let Some(node) = self.slot_map.borrow().node_at(address) {
            return Ok(Arc::clone(node));
        }
        self.refresh_requested.notify_one();
        let mut map = self.slot_map.clone();
        let known_node = async {
            let node = map
                .wait_for(|map| map.node_at(address).is_some())
                .await
                .ok()?
                .node_at(address)
                .cloned()?;
            node.connection.wait_until_ready().await;
            Some(node)
        };
        match timeout_at(deadline, known_node).await {
            Ok(Some(node)) => Ok(node),
            Ok(None) | Err(_) => Err(RedisErrorKind::ClusterDown.into()),
        }
    }

    /// Records a failed call.
    fn record_failure(&self, call: &FailedClusterCall) -> RedisErrorKind {
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
            // Only one key is affected. The caller counts it.
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

    fn count_failure(&self, failure: RedisErrorKind) -> RedisErrorKind {
        self.context.breaker.count_failure(failure);
        failure
    }
}

impl ClusterNode {
    /// Whether the node is new and not connected yet. Calls wait for it, so that a slot migration
    /// fails none.
    fn is_connecting(&self) -> bool {
        !self.connection.was_ready() && self.discovered_at.elapsed() < NEW_NODE_WAIT
    }

    /// Whether calls would be sent to the node, or wait for it.
    fn is_available(&self) -> bool {
        matches!(&*self.connection.state(), RedisConnectionState::Up(_)) || self.is_connecting()
    }

    fn record_success(&self) {
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }
}

enum ClusterRedirection {
    /// Another node holds the slot; `true`: is importing it.
    ToNode(RedisAddress, bool),
    /// The keys are being migrated, and are on two nodes.
    TryAgain,
}

fn parse_redirection(
    error: &RedisError,
    source_address: &RedisAddress,
) -> Option<ClusterRedirection> {
    let is_asking = match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => false,
        ErrorKind::Server(ServerErrorKind::Ask) => true,
        ErrorKind::Server(ServerErrorKind::TryAgain) => return Some(ClusterRedirection::TryAgain),
        _ => return None,
    };
    match RedisAddress::parse(error.redirect_node()?.0)? {
        RedisAddress::Tcp { host, port } => Some(ClusterRedirection::ToNode(
            slot_map::resolve_node_address(host, port, source_address),
            is_asking,
        )),
        RedisAddress::Unix(_) => None,
    }
}
