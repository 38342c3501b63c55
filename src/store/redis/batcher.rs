//! Questions of one worker on their way to Redis.
//!
//! A question that finds fewer than [`MAX_CALLS_IN_FLIGHT`] calls under way goes out as soon as the worker has run what else is
//! ready; others wait until a call comes back and then go together ([`DecisionBatch`]). No timer makes anybody wait for
//! company. A call that takes long makes room for the next, so a slow network delays no question twice.

use super::batch::{BatchReply, CallerReply, DecisionBatch};
use super::connection::{RedisConnectionState, RedisContext, SupervisedConnection};
use super::error::RedisErrorKind;
use crate::limiter::{Charge, Decision};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// Calls under way at a time: one that Redis works on, and one that is on its way.
const MAX_CALLS_IN_FLIGHT: usize = 2;

/// For so long a call counts as under way.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct DecisionBatcher {
    context: Arc<RedisContext>,
    connection: Arc<SupervisedConnection>,
    state: Mutex<BatcherState>,
}

#[derive(Debug, Default)]
struct BatcherState {
    /// As many as there are requests that wait for a decision, so it is bounded where they are.
    pending: VecDeque<PendingBatch>,
    calls_in_flight: usize,
}

/// Those who go together.
#[derive(Debug, Default)]
struct PendingBatch {
    batch: DecisionBatch,
    callers: Vec<BatchCaller>,
}

#[derive(Debug)]
struct BatchCaller {
    request_index: usize,
    deadline: Instant,
    reply_sender: oneshot::Sender<Result<CallerReply, RedisErrorKind>>,
}

impl DecisionBatcher {
    pub(super) fn new(context: Arc<RedisContext>, link: Arc<SupervisedConnection>) -> Self {
        Self {
            context,
            connection: link,
            state: Mutex::default(),
        }
    }

    /// Asks with others. The charges name different counters.
    ///
    /// # Errors
    /// Why there is no decision at `deadline`; the connection is replaced if that may help.
    pub(super) async fn request_decision(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, RedisErrorKind> {
        let answer = timeout_at(deadline, self.enqueue(charges, deadline)).await?;
        // Nobody drops what he should tell, but with the runtime.
        let decision = answer
            .unwrap_or(Err(RedisErrorKind::Connection))?
            .parse_decision(charges);
        if let Err(failure) = &decision
            && let RedisConnectionState::Up(live) = &*self.connection.state()
        {
            live.record_failure(*failure);
        }
        decision
    }

    fn enqueue(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> oneshot::Receiver<Result<CallerReply, RedisErrorKind>> {
        let (reply_sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        if state
            .pending
            .back()
            .is_none_or(|pending| pending.batch.is_full())
        {
            state.pending.push_back(PendingBatch::default());
        }
        if let Some(pending) = state.pending.back_mut() {
            let request_index = pending.batch.add_request(&self.context.scripts, charges);
            pending.callers.push(BatchCaller {
                request_index,
                deadline,
                reply_sender,
            });
        }
        self.spawn_call(&mut state);
        answer
    }

    /// Has somebody call who takes along what is there when he is run.
    fn spawn_call(self: &Arc<Self>, state: &mut BatcherState) {
        if state.calls_in_flight < MAX_CALLS_IN_FLIGHT && !state.pending.is_empty() {
            state.calls_in_flight += 1;
            drop(tokio::spawn(Arc::clone(self).run_calls()));
        }
    }

    async fn run_calls(self: Arc<Self>) {
        let mut in_flight = Some(InFlightGuard(Arc::clone(&self)));
        while in_flight.is_some() {
            let Some(pending) = self.state.lock().pending.pop_front() else {
                return;
            };
            self.send_batch(pending, &mut in_flight).await;
        }
    }

    /// Asks for a party, and counts no more as under way if that takes long.
    async fn send_batch(&self, mut pending: PendingBatch, in_flight: &mut Option<InFlightGuard>) {
        let state = self.connection.state();
        let live = match &*state {
            RedisConnectionState::Up(live) => live,
            RedisConnectionState::Down(failure) => return pending.fail_callers(*failure),
        };
        let repeat_counts = pending.count_waiting_callers();
        let Some(deadline) = pending.callers.iter().map(|caller| caller.deadline).max() else {
            return;
        };
        let command = pending
            .batch
            .build_command(&self.context.scripts, &repeat_counts, None);
        let mut call = pin!(live.run_command(&command));
        let reply = match timeout(IN_FLIGHT_TIMEOUT, &mut call).await {
            Ok(reply) => reply,
            Err(_) => {
                *in_flight = None;
                timeout_at(deadline, call)
                    .await
                    .unwrap_or_else(|late| Err(late.into()))
            }
        };
        match reply.and_then(|reply| {
            pending
                .batch
                .parse_reply(reply, &repeat_counts)
                .ok_or(RedisErrorKind::InvalidReply)
        }) {
            Ok(answers) => pending.notify_callers(&answers),
            Err(failure) => {
                pending
                    .callers
                    .iter()
                    .for_each(|_| live.record_failure(failure));
                pending.fail_callers(failure);
            }
        }
    }
}

/// Counts as a call under way.
struct InFlightGuard(Arc<DecisionBatcher>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.calls_in_flight -= 1;
        // Somebody may have come when it was clear already that nobody is left to be taken along.
        self.0.spawn_call(&mut state);
    }
}

impl PendingBatch {
    /// How often each question is asked. Who has left is not asked for.
    fn count_waiting_callers(&mut self) -> Vec<u32> {
        let mut repeat_counts = vec![0; self.batch.len()];
        self.callers.retain(|caller| {
            let is_waiting = !caller.reply_sender.is_closed();
            if let Some(times) = repeat_counts.get_mut(caller.request_index) {
                *times += u32::from(is_waiting);
            }
            is_waiting
        });
        repeat_counts
    }

    /// Tells everybody, in the order of arrival.
    fn notify_callers(self, answers: &BatchReply) {
        let mut notified = vec![0; self.batch.len()];
        for caller in self.callers {
            let Some(caller_index) = notified.get_mut(caller.request_index) else {
                continue;
            };
            if let Some(answer) = answers.caller_reply(caller.request_index, *caller_index) {
                drop(caller.reply_sender.send(Ok(answer)));
            }
            *caller_index += 1;
        }
    }

    fn fail_callers(self, failure: RedisErrorKind) {
        for caller in self.callers {
            drop(caller.reply_sender.send(Err(failure)));
        }
    }
}
