//! Questions of one worker on their way to Redis.
//!
//! A question that finds fewer than [`CALLS`] calls under way goes out as soon as the worker has run what else is
//! ready; others wait until a call comes back and then go together ([`Batch`]). No timer makes anybody wait for
//! company. A call that takes long makes room for the next, so a slow network delays no question twice.

use super::batch::{Answer, Answers, Batch};
use super::failure::Failure;
use super::link::{Context, Link, State};
use crate::limiter::{Charge, Decision};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// Calls under way at a time: one that Redis works on, and one that is on its way.
const CALLS: usize = 2;

/// For so long a call counts as under way.
const PATIENCE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Queue {
    context: Arc<Context>,
    link: Arc<Link>,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// As many as there are requests that wait for a decision, so it is bounded where they are.
    waiting: VecDeque<Party>,
    calls: usize,
}

/// Those who go together.
#[derive(Debug, Default)]
struct Party {
    batch: Batch,
    callers: Vec<Caller>,
}

#[derive(Debug)]
struct Caller {
    question: usize,
    deadline: Instant,
    tell: oneshot::Sender<Result<Answer, Failure>>,
}

impl Queue {
    pub(super) fn new(context: Arc<Context>, link: Arc<Link>) -> Self {
        Self {
            context,
            link,
            line: Mutex::default(),
        }
    }

    /// Asks with others. The charges name different counters.
    ///
    /// # Errors
    /// Why there is no decision at `deadline`; the connection is replaced if that may help.
    pub(super) async fn ask(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, Failure> {
        let answer = timeout_at(deadline, self.enter(charges, deadline)).await?;
        // Nobody drops what he should tell, but with the runtime.
        let decision = answer
            .unwrap_or(Err(Failure::Connection))?
            .decision(charges);
        if let Err(failure) = &decision
            && let State::Up(live) = &*self.link.state()
        {
            live.failed(*failure);
        }
        decision
    }

    fn enter(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> oneshot::Receiver<Result<Answer, Failure>> {
        let (tell, answer) = oneshot::channel();
        let mut line = self.line.lock();
        if line
            .waiting
            .back()
            .is_none_or(|party| party.batch.is_full())
        {
            line.waiting.push_back(Party::default());
        }
        if let Some(party) = line.waiting.back_mut() {
            let question = party.batch.add(&self.context.script, charges);
            party.callers.push(Caller {
                question,
                deadline,
                tell,
            });
        }
        self.set_out(&mut line);
        answer
    }

    /// Has somebody call who takes along what is there when he is run.
    fn set_out(self: &Arc<Self>, line: &mut Line) {
        if line.calls < CALLS && !line.waiting.is_empty() {
            line.calls += 1;
            drop(tokio::spawn(Arc::clone(self).work()));
        }
    }

    async fn work(self: Arc<Self>) {
        let mut going = Some(Going(Arc::clone(&self)));
        while going.is_some() {
            let Some(party) = self.line.lock().waiting.pop_front() else {
                return;
            };
            self.call(party, &mut going).await;
        }
    }

    /// Asks for a party, and counts no more as under way if that takes long.
    async fn call(&self, mut party: Party, going: &mut Option<Going>) {
        let state = self.link.state();
        let live = match &*state {
            State::Up(live) => live,
            State::Down(failure) => return party.fail(*failure),
        };
        let times = party.times();
        let Some(deadline) = party.callers.iter().map(|caller| caller.deadline).max() else {
            return;
        };
        let command = party.batch.command(&self.context.script, &times, None);
        let mut call = pin!(live.run(&command));
        let reply = match timeout(PATIENCE, &mut call).await {
            Ok(reply) => reply,
            Err(_) => {
                *going = None;
                timeout_at(deadline, call)
                    .await
                    .unwrap_or_else(|late| Err(late.into()))
            }
        };
        match reply.and_then(|reply| party.batch.answers(reply, &times).ok_or(Failure::Reply)) {
            Ok(answers) => party.tell(&answers),
            Err(failure) => {
                party.callers.iter().for_each(|_| live.failed(failure));
                party.fail(failure);
            }
        }
    }
}

/// Counts as a call under way.
struct Going(Arc<Queue>);

impl Drop for Going {
    fn drop(&mut self) {
        let mut line = self.0.line.lock();
        line.calls -= 1;
        // Somebody may have come when it was clear already that nobody is left to be taken along.
        self.0.set_out(&mut line);
    }
}

impl Party {
    /// How often each question is asked. Who has left is not asked for.
    fn times(&mut self) -> Vec<u32> {
        let mut times = vec![0; self.batch.len()];
        self.callers.retain(|caller| {
            let is_there = !caller.tell.is_closed();
            if let Some(times) = times.get_mut(caller.question) {
                *times += u32::from(is_there);
            }
            is_there
        });
        times
    }

    /// Tells everybody, in the order of arrival.
    fn tell(self, answers: &Answers) {
        let mut told = vec![0; self.batch.len()];
        for caller in self.callers {
            let Some(nth) = told.get_mut(caller.question) else {
                continue;
            };
            if let Some(answer) = answers.of(caller.question, *nth) {
                drop(caller.tell.send(Ok(answer)));
            }
            *nth += 1;
        }
    }

    fn fail(self, failure: Failure) {
        for caller in self.callers {
            drop(caller.tell.send(Err(failure)));
        }
    }
}
