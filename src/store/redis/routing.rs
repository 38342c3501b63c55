//! Finds the server that holds a key, sends calls to it, and follows redirections.
//!
//! A single server, also one that sentinels name, is a map of one node and one slot. It never
//! redirects, and the map is never refreshed.
//!
//! redis-rs' own `ClusterConnection` is not used: it retries and waits by its own rules although a
//! request has a deadline, it does not probe connections, and it has its own TLS setup. Only the
//! slot map, two redirections and one refresh task are needed beside `RedisNode`.
//!
//! Charges of several slots are reserved by one call per slot (`split_decision`). A refused request
//! returns its reservations. Until then, a limit is too strict, never too lax.

mod shard_search;
mod slot_map;
mod split_decision;

pub(super) use slot_map::{
    ClusterSlotMap, find_probe_key, query_configured_server, run_slot_map_refresh,
};
pub(super) use split_decision::AdmissionHints;

use super::RedisStore;
use super::connection::RedisNode;
use super::error::RedisErrorKind;
use super::hash_slot::group_by_hash_slot;
use super::live_connection::LiveConnection;
use super::scripts::ScriptLibrary;
use super::settings::RedisAddress;
use crate::limiter::{Algorithm, Amendment, Decision, PolicyCharges, each_charge};
use crate::store::{DecisionFailure, PendingSettlement, Settlement, wait_until_drained};
use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use split_decision::{HashSlotPart, to_creditable_charges};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

/// Maximum redirections of one call. More redirections mean that the nodes disagree.
const MAX_REDIRECTIONS: u32 = 8;

/// Pause before a call is repeated because its keys are being migrated.
const TRY_AGAIN_DELAY: Duration = Duration::from_millis(2);

/// Maximum settlements per call: a few hundred microseconds of the server's time.
const MAX_SETTLEMENTS_PER_CALL: usize = 64;

/// Maximum settlement calls in flight on one connection, which keeps their order. With one call per
/// round trip, settlements could arrive faster than they are sent. Decisions of the same worker
/// wait behind these calls, for some milliseconds at most.
const MAX_PIPELINED_CALLS: usize = 16;

/// A call without a useful reply, and the node and the connection that it was sent on, if it was.
struct FailedRedisCall {
    kind: RedisErrorKind,
    sent_on: Option<(Arc<RedisNode>, Arc<LiveConnection>)>,
}

impl From<RedisErrorKind> for FailedRedisCall {
    fn from(kind: RedisErrorKind) -> Self {
        Self {
            kind,
            sent_on: None,
        }
    }
}

impl RedisStore {
    /// Waits until all reservations of requests that are not forwarded are returned, for a bounded
    /// time.
    pub(crate) async fn wait_until_reservations_returned(&self) {
        let is_drained = || self.worker.split_task_count.load(Ordering::Relaxed) == 0;
        wait_until_drained(&self.worker.split_tasks_ended, is_drained).await;
    }

    /// Decides charges without a search among shards: charges of one hash slot share a script
    /// call. If the charges are refused, the returned task ends when all reservations are returned.
    pub(super) async fn decide_by_hash_slot(
        &self,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> (Result<Decision, DecisionFailure>, Option<JoinHandle<()>>) {
        let common_hash_slot = self.find_common_hash_slot(request);
        if let Some(hash_slot) = common_hash_slot {
            let decision = if request.iter().any(|policy| policy.is_held_back) {
                Err(self.refuse_held_back(hash_slot))
            } else {
                self.request_decision(hash_slot, request, deadline).await
            };
            match decision {
                // The slot moves.
                Err(RedisErrorKind::TryAgain) if self.is_cluster() => {}
                result => return (result.map_err(|kind| self.decision_failure(kind)), None),
            }
        }
        let request = to_creditable_charges(request);
        let mut parts = HashSlotPart::from_request(&request);
        if common_hash_slot.is_some() {
            let moving = parts.iter().flat_map(|part| part.split_by_charge(&request));
            parts = moving.collect();
        }
        let (result_sender, result_receiver) = oneshot::channel();
        // A separate task, so that a client that disconnects does not leave reservations.
        let decided = self
            .clone()
            .decide_parts(request, parts, deadline, result_sender);
        let task = self.spawn_split_task(decided);
        // The sender is dropped only when the runtime shuts down.
        let connection_lost = Err(self.decision_failure(RedisErrorKind::Connection));
        (result_receiver.await.unwrap_or(connection_lost), Some(task))
    }

    /// The slot of all charges; `None` if they are in several.
    fn find_common_hash_slot(&self, request: &[PolicyCharges<'_>]) -> Option<u16> {
        let mut slots = request
            .iter()
            .map(|policy| self.hash_slot_for_key(&policy.key));
        let first = slots.next().unwrap_or(0);
        slots.all(|hash_slot| hash_slot == first).then_some(first)
    }

    fn decision_failure(&self, kind: RedisErrorKind) -> DecisionFailure {
        self.unavailable_error(kind.into_str()).into()
    }

    /// Sends the settlements that return the charges of a request that is not forwarded.
    pub(crate) fn return_charges(&self, returns: Vec<PendingSettlement>) {
        let store = self.clone();
        self.spawn_split_task(async move {
            let returns: Vec<_> = returns.iter().map(Settlement::from_pending).collect();
            drop(store.send_settlements(&returns).await);
        });
    }

    fn spawn_split_task(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let store = self.clone();
        self.worker.split_task_count.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            work.await;
            if store
                .worker
                .split_task_count
                .fetch_sub(1, Ordering::Relaxed)
                == 1
            {
                store.worker.split_tasks_ended.notify_waiters();
            }
        })
    }

    /// Runs one command on the node of a slot, outside of the request path. Repeats a call whose
    /// keys are being migrated.
    ///
    /// # Errors
    /// Returns an error at once if the node is disconnected, otherwise by the deadline at the
    /// latest. The failure is counted, without an effect on the circuit breaker.
    pub(crate) async fn run_on_hash_slot(
        &self,
        hash_slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisErrorKind> {
        loop {
            let failed_call = match self.try_command(hash_slot, command, deadline).await {
                Ok((reply, _)) => return Ok(reply),
                Err(failed_call) => failed_call,
            };
            let kind = failed_call.kind;
            if kind == RedisErrorKind::TryAgain && Instant::now() + TRY_AGAIN_DELAY < deadline {
                sleep(TRY_AGAIN_DELAY).await;
                continue;
            }
            // An instance without the permission for this command may still be allowed to decide.
            if let Some((_, live)) = &failed_call.sent_on
                && kind != RedisErrorKind::NoAuth
            {
                self.record_connection_failure(live, kind);
            }
            return Err(self.breaker.count_failure(kind));
        }
    }

    /// Runs one command on the node of a slot. The caller records a failure.
    async fn try_command(
        &self,
        hash_slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<(Value, Arc<LiveConnection>), FailedRedisCall> {
        let mut next_node = self
            .worker
            .slot_map
            .get()
            .node_for_hash_slot(hash_slot)
            .cloned();
        let mut is_asking = false;
        for _ in 0..MAX_REDIRECTIONS {
            let Some(node) = next_node else { break };
            let live = self.wait_for_connection(&node, deadline).await?;
            let answer = timeout_at(deadline, live.send_command(command, is_asking)).await;
            let kind = match answer {
                Ok(Ok(value)) => {
                    node.reset_failures();
                    return Ok((value, live));
                }
                Ok(Err(error)) => match self.parse_redirection(&error, &node) {
                    Some((address, is_importing)) => {
                        if !is_importing {
                            self.worker.refresh_requested.notify_one();
                        }
                        is_asking = is_importing;
                        next_node = Some(self.wait_for_node(&address, deadline).await?);
                        continue;
                    }
                    None => RedisErrorKind::from(&error),
                },
                Err(elapsed) => elapsed.into(),
            };
            return Err(FailedRedisCall {
                kind,
                sent_on: Some((node, live)),
            });
        }
        self.worker.refresh_requested.notify_one();
        Err(RedisErrorKind::ClusterDown.into())
    }

    /// Returns the connection to a node. Waits for it while the node is new.
    async fn wait_for_connection(
        &self,
        node: &RedisNode,
        deadline: Instant,
    ) -> Result<Arc<LiveConnection>, RedisErrorKind> {
        if node.is_connecting() {
            // After the deadline, the state of the connection has the reason.
            drop(timeout_at(deadline, node.wait_until_ready()).await);
        }
        node.live()
            .inspect_err(|_| self.worker.refresh_requested.notify_one())
    }

    /// Returns the node at an address from a redirection. Waits for a node that is not in the slot
    /// map yet.
    async fn wait_for_node(
        &self,
        address: &RedisAddress,
        deadline: Instant,
    ) -> Result<Arc<RedisNode>, RedisErrorKind> {
        let find_node = |map: &Arc<ClusterSlotMap>| map.find_node_by_address(address).cloned();
        if let Some(node) = find_node(&self.worker.slot_map.get()) {
            return Ok(node);
        }
        self.worker.refresh_requested.notify_one();
        let map = self
            .worker
            .slot_map
            .wait_for(|map| find_node(map).is_some());
        let map = timeout_at(deadline, map).await.ok();
        map.and_then(|map| find_node(&map))
            .ok_or(RedisErrorKind::ClusterDown)
    }

    /// Settles charges, and returns the settlements that were not confirmed. Settlements of one
    /// counter stay in order.
    pub(super) async fn send_settlements<'a>(
        &self,
        settlements: &[Settlement<'a>],
    ) -> Vec<(Settlement<'a>, RedisErrorKind)> {
        let hash_slot_of = |one: &Settlement<'_>| self.hash_slot_for_key(one.key);
        let groups = group_by_hash_slot(settlements.iter().copied(), hash_slot_of);
        let failures = groups.iter().map(|(hash_slot, group)| async move {
            let mut failures = Vec::new();
            for calls in split_into_calls(group).chunks(MAX_PIPELINED_CALLS) {
                let results = self.send_settlement_calls(*hash_slot, calls).await;
                for (call, result) in calls.iter().zip(results) {
                    let failure = result.err().into_iter();
                    failures
                        .extend(failure.flat_map(|kind| call.iter().map(move |one| (*one, kind))));
                }
            }
            failures
        });
        join_all(failures).await.concat()
    }

    /// Runs settlement calls of one slot in order, and repeats those that name several keys of a
    /// slot that moves: it accepts only calls with one key. A repeated call comes after the later
    /// calls. That is safe: a list never has a renewal and a release of the same slot, and units
    /// that are charged late are at worst too strict.
    async fn send_settlement_calls(
        &self,
        hash_slot: u16,
        calls: &[&[Settlement<'_>]],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let mut results = self.try_settlements(hash_slot, calls).await;
        for (call, result) in calls.iter().zip(&mut results) {
            if *result == Err(RedisErrorKind::TryAgain) {
                let singles: Vec<&[Settlement<'_>]> = call.chunks(1).collect();
                let each = self.try_settlements(hash_slot, &singles).await;
                *result = each.into_iter().collect();
            }
        }
        results
    }

    /// Runs settlement calls of one slot in order. Calls that fail together count as one failure.
    async fn try_settlements(
        &self,
        hash_slot: u16,
        calls: &[&[Settlement<'_>]],
    ) -> Vec<Result<(), RedisErrorKind>> {
        let (start, call_timeout) = (Instant::now(), self.settings.timeout);
        let answers = (1..).zip(calls).map(|(turn, call)| async move {
            let command = self.scripts.settle_command(call, None);
            let deadline = start + call_timeout * turn;
            self.try_command(hash_slot, &command, deadline).await
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

    /// Decides charges of one slot in one script call. A failure is recorded.
    pub(crate) async fn request_decision(
        &self,
        hash_slot: u16,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let (breaker, scripts) = (&self.breaker, &self.scripts);
        let batcher = self.worker.batcher.as_ref();
        let result = match batcher {
            Some(batcher) => batcher.request_decision(request, deadline).await,
            None => {
                let command = scripts.decide_command(request, None);
                // Boxed, because the future of every request would include its size otherwise.
                let reply = Box::pin(self.request_reply(hash_slot, &command, deadline)).await;
                reply.and_then(|(reply, live)| {
                    let reply = live.server_clock.date_reply(reply);
                    ScriptLibrary::parse_decision_reply(&reply, request)
                        .ok_or_else(|| breaker.count_failure(RedisErrorKind::InvalidReply))
                })
            }
        };
        match &result {
            Ok(decision) => {
                breaker.record_success();
                let mut outcomes = each_charge(request).zip(decision.outcomes());
                let foreign = outcomes.find(|(_, outcome)| outcome.has_foreign_override);
                if let Some((charge, _)) = foreign {
                    breaker.record_foreign_override(|| scripts.override_key(charge.key));
                }
            }
            // The position counts from 1.
            Err(RedisErrorKind::WrongType(position)) => {
                let charge = each_charge(request).nth(position.wrapping_sub(1));
                let name = charge.map(|charge| scripts.counter_name(charge.counter()));
                breaker.record_foreign_value(name.unwrap_or_default());
            }
            Err(RedisErrorKind::WrongPeriod) => breaker.record_wrong_period(),
            Err(kind) if batcher.is_some() => breaker.record_failure(*kind),
            // A call of a cluster is recorded where it failed.
            Err(_) => {}
        }
        result
    }

    /// Runs one command of the request path on the node of a slot. A failure is recorded.
    pub(super) async fn request_reply(
        &self,
        hash_slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<(Value, Arc<LiveConnection>), RedisErrorKind> {
        let reply = self.try_command(hash_slot, command, deadline).await;
        reply.map_err(|failed_call| self.record_failed_call(&failed_call))
    }

    /// Counts a decision that is not sent to its slot, and returns why the slot was unreachable.
    pub(crate) fn refuse_held_back(&self, hash_slot: u16) -> RedisErrorKind {
        let map = self.worker.slot_map.get();
        let node = map.node_for_hash_slot(hash_slot);
        let failure = node.and_then(|node| node.live().err());
        let kind = failure.unwrap_or(RedisErrorKind::Connection);
        if self.is_cluster() {
            self.worker.refresh_requested.notify_one();
            return self.breaker.count_failure(kind);
        }
        self.breaker.record_failure(kind);
        kind
    }

    /// Counts a failed call, also for the node that it was sent to. Returns the kind of failure.
    fn record_failed_call(&self, call: &FailedRedisCall) -> RedisErrorKind {
        let kind = call.kind;
        let Some((node, live)) = &call.sent_on else {
            return self.breaker.count_failure(kind);
        };
        // A slot that moves is no failure. A foreign value affects only one key, and a wrong period
        // only some limits; the caller counts them.
        if let RedisErrorKind::TryAgain
        | RedisErrorKind::WrongType(_)
        | RedisErrorKind::WrongPeriod = kind
        {
            return kind;
        }
        self.record_connection_failure(live, kind);
        if !self.is_cluster() {
            self.breaker.record_failure(kind);
            return kind;
        }
        if node.record_failure() >= self.settings.breaker_failures {
            node.reset_failures();
            live.request_replacement(kind);
        }
        self.breaker.count_failure(kind)
    }

    /// Replaces the connection or refreshes the slot map if that may help after a failure.
    fn record_connection_failure(&self, live: &LiveConnection, kind: RedisErrorKind) {
        if kind == RedisErrorKind::ClusterDown || kind.requires_reconnect() {
            self.worker.refresh_requested.notify_one();
        }
        live.record_failure(kind);
    }

    /// The node of the cluster to which an error redirects a call, and whether that node is
    /// importing the slot.
    fn parse_redirection(
        &self,
        error: &RedisError,
        source: &RedisNode,
    ) -> Option<(RedisAddress, bool)> {
        let is_asking = match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => false,
            ErrorKind::Server(ServerErrorKind::Ask) => true,
            _ => return None,
        };
        let source_address = source.address().filter(|_| self.is_cluster())?;
        let (host, port) = parse_host_and_port(error.redirect_node()?.0)?;
        let address = slot_map::resolve_node_address(host, port, source_address);
        Some((address, is_asking))
    }
}

/// Parses an address as a server writes it: `host:port`, IPv6 with or without brackets.
fn parse_host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    Some((bare.unwrap_or(host).to_owned(), port.parse().ok()?))
}

/// Splits settlements into calls, in order.
fn split_into_calls<'l, 'a>(settlements: &'l [Settlement<'a>]) -> Vec<&'l [Settlement<'a>]> {
    let runs = settlements.chunk_by(|one, next| {
        if is_expensive(one) {
            is_expensive(next) && one.limit == next.limit && one.key.id() == next.key.id()
        } else {
            !is_expensive(next)
        }
    });
    runs.flat_map(|run| run.chunks(MAX_SETTLEMENTS_PER_CALL))
        .collect()
}

/// Whether a settlement takes Redis as long as a dozen others: it changes many entries of a log.
/// Several of one counter change them once.
fn is_expensive(settlement: &Settlement<'_>) -> bool {
    settlement.limit.algorithm == Algorithm::SlidingLog
        && matches!(settlement.amendment, Amendment::Credit { .. })
}
