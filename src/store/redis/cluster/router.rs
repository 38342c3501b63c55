//! Sends calls to the node of a slot, and follows redirections.

use super::slot_charges::{SlotCharges, merge_slot_decisions};
use super::slot_map::{self, ClusterNode, ClusterSlotMap};
use crate::limiter::{Algorithm, Amendment, Charge, ChargeEffect, Decision, determine_effect};
use crate::store::Settlement;
use crate::store::redis::connection::{LiveConnection, RedisConnectionState};
use crate::store::redis::context::RedisContext;
use crate::store::redis::error::RedisErrorKind;
use crate::store::redis::scripts::ScriptLibrary;
use crate::store::redis::settings::RedisAddress;
use crate::store::redis::watched_value::WatchedValue;
use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

/// Maximum redirections of one call. More mean that the nodes disagree.
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

impl ClusterRouter {
    /// Runs one command on the node of a slot.
    ///
    /// # Errors
    /// At once if that node is disconnected, else within the deadline. The failure is counted.
    pub(super) async fn run_on_slot(
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
    pub(super) async fn send_amendments(
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
                None => self.slot_map.get().node_for_slot(slot).cloned(),
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
    pub(super) async fn decide_across_slots(
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

    pub(super) async fn request_decision(
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
        if let Some(node) = self.slot_map.get().node_at(address) {
            return Ok(Arc::clone(node));
        }
        self.refresh_requested.notify_one();
        let known_node = async {
            let map = self.slot_map.wait_for(|map| map.node_at(address).is_some());
            let node = map.await.node_at(address).cloned()?;
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

    pub(super) fn count_failure(&self, failure: RedisErrorKind) -> RedisErrorKind {
        self.context.breaker.count_failure(failure);
        failure
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
