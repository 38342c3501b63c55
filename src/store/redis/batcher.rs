//! Queues the requests of one worker and sends them to Redis in batches.
//!
//! With fewer than [`MAX_CALLS_IN_FLIGHT`] calls in flight, a request is sent as soon as the worker
//! has run its other ready tasks. Otherwise the request waits until a call returns, and all waiting
//! requests are sent together ([`DecisionBatch`]). No timer delays a request to fill a batch. A
//! call counts as in flight only for [`IN_FLIGHT_TIMEOUT`], so on a slow network no request waits
//! for the whole time of an earlier call.

use super::connection::RedisNode;
use super::error::RedisErrorKind;
use super::live_connection::LiveConnection;
use super::script_batch::{CallerReply, DecisionBatch};
use super::shared_state::SharedRedisState;
use crate::limiter::{Decision, PolicyCharges};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// Maximum calls in flight: Redis runs one call while the next is on its way.
const MAX_CALLS_IN_FLIGHT: usize = 2;

/// A call counts as in flight for at most this long.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct DecisionBatcher {
    shared: Arc<SharedRedisState>,
    node: Arc<RedisNode>,
    /// Locked by one worker only. It is a mutex because `Store` is `Send`.
    state: Mutex<BatcherState>,
}

#[derive(Debug, Default)]
struct BatcherState {
    /// Batches to be sent: at most one per undecided request, of which the number is bounded
    /// elsewhere.
    pending: VecDeque<PendingBatch>,
    calls_in_flight: usize,
}

/// A batch, and the callers of each of its requests in the order of arrival.
#[derive(Debug)]
struct PendingBatch {
    /// The connection when the first request arrived. The batch is not sent on a later one: the
    /// requests were checked before the outage between the two, and the share was not charged.
    live: Arc<LiveConnection>,
    batch: DecisionBatch,
    callers: Vec<SmallVec<[BatchCaller; 1]>>,
}

#[derive(Debug)]
struct BatchCaller {
    deadline: Instant,
    reply_sender: oneshot::Sender<Result<CallerReply, RedisErrorKind>>,
}

impl DecisionBatcher {
    pub(super) fn new(shared: Arc<SharedRedisState>, node: Arc<RedisNode>) -> Self {
        Self {
            shared,
            node,
            state: Mutex::default(),
        }
    }

    /// Decides charges in a batch with other requests. The charges name different counters.
    ///
    /// # Errors
    /// When there is no decision at `deadline`. The connection is replaced if that may help.
    pub(super) async fn request_decision(
        self: &Arc<Self>,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let reply = timeout_at(deadline, self.enqueue_request(request, deadline)?).await?;
        // The sender of the reply is dropped only when the runtime shuts down.
        let decision = reply
            .unwrap_or(Err(RedisErrorKind::Connection))?
            .parse_decision(request);
        if let Err(failure) = &decision
            && let Ok(live) = self.node.live()
        {
            live.record_failure(*failure);
        }
        decision
    }

    fn enqueue_request(
        self: &Arc<Self>,
        request: &[PolicyCharges<'_>],
        deadline: Instant,
    ) -> Result<oneshot::Receiver<Result<CallerReply, RedisErrorKind>>, RedisErrorKind> {
        let (reply_sender, reply_receiver) = oneshot::channel();
        let mut state = self.state.lock();
        let last = state.pending.back();
        if last.is_none_or(|pending| pending.batch.is_full()) {
            state.pending.push_back(PendingBatch {
                live: self.node.live()?,
                batch: DecisionBatch::default(),
                callers: Vec::new(),
            });
        }
        if let Some(pending) = state.pending.back_mut() {
            let request_index = pending
                .batch
                .add_or_merge_request(&self.shared.scripts, request);
            pending
                .callers
                .resize_with(pending.batch.len(), SmallVec::new);
            if let Some(callers) = pending.callers.get_mut(request_index) {
                callers.push(BatchCaller {
                    deadline,
                    reply_sender,
                });
            }
        }
        self.spawn_call_if_allowed(&mut state);
        Ok(reply_receiver)
    }

    /// Spawns a task that sends waiting batches, oldest first, if another call may be in flight.
    fn spawn_call_if_allowed(self: &Arc<Self>, state: &mut BatcherState) {
        if state.calls_in_flight < MAX_CALLS_IN_FLIGHT && !state.pending.is_empty() {
            state.calls_in_flight += 1;
            drop(tokio::spawn(Arc::clone(self).send_pending_batches()));
        }
    }

    async fn send_pending_batches(self: Arc<Self>) {
        let mut in_flight = Some(InFlightGuard(Arc::clone(&self)));
        while in_flight.is_some() {
            let Some(pending) = self.state.lock().pending.pop_front() else {
                return;
            };
            self.send_batch(pending, &mut in_flight).await;
        }
    }

    /// Sends a batch, and clears `in_flight` if the call takes long.
    async fn send_batch(&self, mut pending: PendingBatch, in_flight: &mut Option<InFlightGuard>) {
        let repeat_counts = pending.retain_and_count_waiting_callers();
        let callers = pending.callers.iter().flatten();
        let Some(deadline) = callers.map(|caller| caller.deadline).max() else {
            return;
        };
        let command = pending
            .batch
            .build_command(&self.shared.scripts, &repeat_counts, None);
        let live = Arc::clone(&pending.live);
        let mut call = pin!(live.run_command(&command));
        let reply = match timeout(IN_FLIGHT_TIMEOUT, &mut call).await {
            Ok(reply) => reply,
            Err(_) => {
                *in_flight = None;
                let reply = timeout_at(deadline, call).await;
                reply.unwrap_or_else(|elapsed| Err(elapsed.into()))
            }
        };
        let replies = reply.and_then(|reply| {
            let reply = live.server_clock.date_reply(reply);
            DecisionBatch::parse_reply(reply, &repeat_counts).ok_or(RedisErrorKind::InvalidReply)
        });
        match replies {
            Ok(replies) => pending.send_replies(&replies),
            Err(failure) => {
                for caller in pending.callers.into_iter().flatten() {
                    live.record_failure(failure);
                    drop(caller.reply_sender.send(Err(failure)));
                }
            }
        }
    }
}

/// Counts a call as in flight until dropped.
struct InFlightGuard(Arc<DecisionBatcher>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.calls_in_flight -= 1;
        // A request may have arrived after the call found no further batch.
        self.0.spawn_call_if_allowed(&mut state);
    }
}

impl PendingBatch {
    /// Removes callers that have disconnected, and counts the waiting ones of each request.
    fn retain_and_count_waiting_callers(&mut self) -> Vec<u32> {
        let counts = self.callers.iter_mut().map(|callers| {
            callers.retain(|caller| !caller.reply_sender.is_closed());
            u32::try_from(callers.len()).unwrap_or(u32::MAX)
        });
        counts.collect()
    }

    /// Sends each caller its part of its request's reply.
    fn send_replies(self, replies: &[CallerReply]) {
        for (callers, reply) in self.callers.into_iter().zip(replies) {
            for (index, caller) in (0..).zip(callers) {
                drop(caller.reply_sender.send(Ok(reply.for_caller(index))));
            }
        }
    }
}
