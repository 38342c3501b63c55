//! What happened lately, for people who look: per policy the last hour by minute and the last day by hour, for all
//! requests the last minutes by second.
//!
//! Requests are not asked for it. Somebody calls [`History::sample`] about once a second, and what the workers have
//! counted since the last time belongs to that second. A policy that did nothing for a day takes no room; one that did
//! takes 3 KiB.

use super::metrics::{Answer, Buckets, Metrics, PAST, Tally};
use foldhash::HashMap;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

const MINUTES: usize = 60;
const HOURS: usize = 24;
/// Ten minutes by second: as much as a curve on a screen shows.
pub const SECONDS: usize = 600;

/// Durations are told of the last minute: so many looks, so many seconds apart.
const LOOKS: usize = 7;
const LOOK_EVERY_S: u64 = 10;

/// Classes of status codes, from 1xx to 5xx.
pub const CLASSES: usize = 5;

/// What a policy did in some time, by [`PAST`]. What is more than a u32 stays at its end.
pub type Did = [u32; PAST.len()];

/// The past, as far as it is kept.
#[derive(Debug)]
pub struct History {
    metrics: Arc<Metrics>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of the last sample: seconds since the Unix epoch. It never goes back.
    now_s: u64,
    policies: HashMap<Arc<str>, Followed>,
    seconds: Ring<Second, SECONDS>,
    answers: [u64; Answer::ALL.len()],
    classes: [u64; CLASSES],
    looks: VecDeque<Look>,
}

/// A policy's counts at the last sample, and its past if there is something in it.
#[derive(Debug, Default)]
struct Followed {
    requests: [u64; PAST.len()],
    past: Option<Box<Rings>>,
    /// When it was last sampled.
    seen_s: u64,
}

#[derive(Clone, Debug, Default)]
struct Rings {
    minutes: Ring<Did, MINUTES>,
    hours: Ring<Did, HOURS>,
}

/// What happened to all requests in one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Second {
    /// By [`Answer::ALL`].
    pub answers: [u32; Answer::ALL.len()],
    /// Responses by class of status, from 1xx to 5xx.
    pub classes: [u32; CLASSES],
}

/// How long things had taken at some time.
#[derive(Clone, Debug)]
struct Look {
    at_s: u64,
    times: Times,
}

/// How long things took.
#[derive(Clone, Debug)]
pub struct Times {
    /// Decisions, by who answered.
    pub decisions: Vec<(&'static str, Buckets)>,
    /// From a request's arrival to the head of its response.
    pub responses: Buckets,
}

/// A policy's past, oldest first; the last of each is not over yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    pub minutes: Vec<Did>,
    pub hours: Vec<Did>,
}

/// When each part of the past began: seconds since the Unix epoch, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    pub minutes: Vec<u64>,
    pub hours: Vec<u64>,
}

impl History {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            state: Mutex::default(),
        }
    }

    /// Notes what was counted since the last time. `live` are the policies in effect: the past of others is dropped.
    pub fn sample<'t>(&self, now_s: u64, live: impl Iterator<Item = &'t Arc<Tally>>) {
        let mut state = self.state.lock();
        let before_s = state.now_s;
        let now_s = now_s.max(before_s);
        state.now_s = now_s;
        state.follow(before_s, live);
        state.note_second(before_s, &self.metrics);
        if state
            .looks
            .back()
            .is_none_or(|look| now_s >= look.at_s.saturating_add(LOOK_EVERY_S))
        {
            let look = Look {
                at_s: now_s,
                times: times(&self.metrics),
            };
            state.looks.push_back(look);
            let more = state.looks.len().saturating_sub(LOOKS);
            state.looks.drain(..more);
        }
    }

    /// The parts of the past of each policy that is asked for. `None`: nothing happened.
    pub fn policies<'n>(&self, names: impl Iterator<Item = &'n str>) -> (Axis, Vec<Option<Past>>) {
        let state = self.state.lock();
        let axis = Axis {
            minutes: starts(state.now_s, 60, MINUTES),
            hours: starts(state.now_s, 3600, HOURS),
        };
        let past = |name| {
            let rings = state.policies.get(name)?.past.as_ref()?;
            Some(Past {
                minutes: rings.minutes.last(MINUTES, state.now_s / 60),
                hours: rings.hours.last(HOURS, state.now_s / 3600),
            })
        };
        let pasts = names.map(past).collect();
        (axis, pasts)
    }

    /// The last `most` seconds, oldest first, and when the first of them was.
    pub fn seconds(&self, most: usize) -> (u64, Vec<Second>) {
        let state = self.state.lock();
        let seconds = state.seconds.last(most, state.now_s);
        (
            state
                .now_s
                .saturating_sub(seconds.len().saturating_sub(1) as u64),
            seconds,
        )
    }

    /// How long things took in the last minute, or since the start if that is less, and how many seconds that is.
    pub fn times(&self) -> (u64, Times) {
        let mut now = times(&self.metrics);
        let state = self.state.lock();
        let Some(oldest) = state.looks.front() else {
            return (0, now);
        };
        for ((_, decisions), (_, earlier)) in now.decisions.iter_mut().zip(&oldest.times.decisions)
        {
            *decisions = decisions.clone().since(earlier);
        }
        now.responses = now.responses.since(&oldest.times.responses);
        (state.now_s.saturating_sub(oldest.at_s), now)
    }
}

fn times(metrics: &Metrics) -> Times {
    Times {
        decisions: metrics.decisions().into(),
        responses: metrics.responses(),
    }
}

/// When the last `count` steps began, oldest first.
fn starts(now_s: u64, step_s: u64, count: usize) -> Vec<u64> {
    let newest = now_s / step_s;
    (0..count as u64)
        .rev()
        .map(|back| newest.saturating_sub(back) * step_s)
        .collect()
}

impl State {
    fn follow<'t>(&mut self, before_s: u64, live: impl Iterator<Item = &'t Arc<Tally>>) {
        let now_s = self.now_s;
        let mut count = 0;
        for tally in live {
            count += 1;
            let followed = match self.policies.get_mut(tally.policy()) {
                Some(followed) => followed,
                None => self.policies.entry(Arc::clone(tally.policy())).or_default(),
            };
            followed.sample(before_s, now_s, tally.past());
        }
        let hour_began = before_s / 3600 != now_s / 3600;
        if count == self.policies.len() && !hour_began {
            return;
        }
        // A reload took some away. What they had counted is kept: should they come back, their counts go on.
        for followed in self.policies.values_mut() {
            let is_gone = followed.seen_s != now_s;
            followed
                .past
                .take_if(|past| is_gone || (hour_began && past.is_empty()));
        }
    }

    fn note_second(&mut self, before_s: u64, metrics: &Metrics) {
        let mut classes = [0; CLASSES];
        for (code, count) in metrics.codes() {
            if let Some(class) = classes.get_mut(usize::from(code / 100).saturating_sub(1)) {
                *class += count;
            }
        }
        let answers = metrics.answers();
        self.seconds.enter(before_s, self.now_s);
        if let Some(second) = self.seconds.at(self.now_s) {
            grow(&mut second.answers, &answers, &self.answers);
            grow(&mut second.classes, &classes, &self.classes);
        }
        (self.answers, self.classes) = (answers, classes);
    }
}

impl Followed {
    fn sample(&mut self, before_s: u64, now_s: u64, requests: [u64; PAST.len()]) {
        self.seen_s = now_s;
        if let Some(past) = &mut self.past {
            past.minutes.enter(before_s / 60, now_s / 60);
            past.hours.enter(before_s / 3600, now_s / 3600);
        }
        if requests == self.requests {
            return;
        }
        let past = self.past.get_or_insert_default();
        for did in past
            .minutes
            .at(now_s / 60)
            .into_iter()
            .chain(past.hours.at(now_s / 3600))
        {
            grow(did, &requests, &self.requests);
        }
        self.requests = requests;
    }
}

impl Rings {
    fn is_empty(&self) -> bool {
        self.hours
            .0
            .iter()
            .chain(&self.minutes.0)
            .all(|did| *did == Did::default())
    }
}

/// Adds what was counted since `before`.
fn grow<const N: usize>(sums: &mut [u32; N], now: &[u64; N], before: &[u64; N]) {
    for ((sum, now), before) in sums.iter_mut().zip(now).zip(before) {
        let more = u32::try_from(now.saturating_sub(*before)).unwrap_or(u32::MAX);
        *sum = sum.saturating_add(more);
    }
}

/// The last `N` steps of time, each at its number modulo `N`.
#[derive(Clone, Debug)]
struct Ring<T, const N: usize>([T; N]);

impl<T: Copy + Default, const N: usize> Default for Ring<T, N> {
    fn default() -> Self {
        Self([T::default(); N])
    }
}

impl<T: Copy + Default, const N: usize> Ring<T, N> {
    /// Time has come from one step to another: what was there N steps ago makes room.
    fn enter(&mut self, before: u64, now: u64) {
        for step in (before + 1..=now).rev().take(N) {
            if let Some(part) = self.at(step) {
                *part = T::default();
            }
        }
    }

    fn at(&mut self, step: u64) -> Option<&mut T> {
        self.0.get_mut(place::<N>(step))
    }

    /// The last `most` steps up to `now`, oldest first.
    fn last(&self, most: usize, now: u64) -> Vec<T> {
        let steps = (0..most.min(N) as u64)
            .rev()
            .filter_map(|back| now.checked_sub(back));
        steps
            .filter_map(|step| self.0.get(place::<N>(step)).copied())
            .collect()
    }
}

fn place<const N: usize>(step: u64) -> usize {
    usize::try_from(step % N as u64).unwrap_or_default()
}

#[cfg(test)]
mod tests;
