//! One worker's way to a Redis Cluster: a link to each master, and the map that says which slot is whose.
//!
//! redis-rs' own `ClusterConnection` was not taken: it repeats and waits by rules of its own while a request has a
//! deadline, keeps no connection that has proven itself, and speaks TLS its own way. What is needed beside
//! [`Link`] is little: the map, two redirections, and one task that renews the map.
//!
//! Charges of several slots are asked at once, one call per slot. If any enforced one is refused, what the other slots
//! have charged is given back: too strict for a moment, never too lax.

mod map;
mod parts;
mod renewal;
mod shards;

use super::connect::{Address, Task};
use super::failure::Failure;
use super::link::{Context, Link, Live, State};
use super::script::Script;
use super::{LATE_CALLS, calls, untold};
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Effect, Standing, effect};
use crate::store::Late;
use futures_util::future::join_all;
use map::{Map, Node};
use parts::{Part, parts, together};
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use renewal::keep;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(super) use map::{slot_of, slot_of_name};

/// Redirections followed for one question: more mean that the nodes don't agree.
const HOPS: u32 = 8;

/// So long a node that has not been connected to yet is waited for, as far as a deadline allows; then it is away.
const NEWCOMER: Duration = Duration::from_secs(1);

/// Pause before a question is repeated whose keys are just being moved.
const MOVING: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Cluster {
    nodes: Nodes,
    _keeper: Task,
}

/// How a node is found and asked.
#[derive(Clone, Debug)]
struct Nodes {
    context: Arc<Context>,
    map: watch::Receiver<Arc<Map>>,
    /// Somebody has met what the map doesn't say.
    stale: Arc<Notify>,
}

/// A call without a useful answer, and which node failed to give it, in which state, if one was asked.
struct Lost {
    failure: Failure,
    by: Option<(Arc<Node>, Arc<State>)>,
}

impl From<Failure> for Lost {
    fn from(failure: Failure) -> Self {
        Self { failure, by: None }
    }
}

/// Whether one counter does not know all: charges are in several slots, or spread over shards.
pub(super) fn is_split(charges: &[Charge<'_>]) -> bool {
    is_spread(charges) || are_apart(charges)
}

fn is_spread(charges: &[Charge<'_>]) -> bool {
    charges.iter().any(|charge| charge.shards > 1)
}

/// Whether charges are in several slots.
fn are_apart(charges: &[Charge<'_>]) -> bool {
    let mut keys = charges.iter().map(|charge| charge.key);
    keys.next().is_some_and(|first| {
        keys.any(|key| key.id() != first.id() && slot_of(key) != slot_of(first))
    })
}

impl Cluster {
    /// Learns who is there, connects to all masters, and stays connected as long as the value lives.
    pub(super) fn start(context: Arc<Context>) -> Self {
        let (publish, map) = watch::channel(Arc::default());
        let stale = Arc::new(Notify::new());
        let keeper = keep(Arc::clone(&context), publish, Arc::clone(&stale));
        Self {
            nodes: Nodes {
                context,
                map,
                stale,
            },
            _keeper: Task(tokio::spawn(keeper)),
        }
    }

    /// Waits for the first proven connection to every master.
    pub(super) async fn ready(&self) {
        let mut map = self.nodes.map.clone();
        let nodes = match map.wait_for(|map| !map.nodes.is_empty()).await {
            Ok(map) => map.nodes.clone(),
            // The keeper is gone, and with it the runtime: nothing to wait for.
            Err(_) => return,
        };
        join_all(nodes.iter().map(|node| node.link.ready())).await;
    }

    /// Decides charges, in whatever slots they are.
    ///
    /// # Errors
    /// When a slot gave no answer, and none that answered refuses. What the others have charged stands then: the
    /// request is decided without the store, and policies that were reached shall not be passed by for that.
    pub(super) async fn decide(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, Failure> {
        match is_spread(charges) {
            true => self.decide_over_shards(charges, deadline).await,
            false => self
                .decide_whole(charges, deadline)
                .await
                .map(|(decision, _)| decision),
        }
    }

    /// Decides charges as they stand, each on the counter of its key. When the task ends what was refused is given back.
    async fn decide_whole(
        &self,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<(Decision, Option<JoinHandle<()>>), Failure> {
        if !are_apart(charges) {
            let slot = charges.first().map_or(0, |charge| slot_of(charge.key));
            return Ok((self.nodes.ask(slot, charges, deadline).await?, None));
        }
        let (tell, told) = oneshot::channel();
        // By itself: who leaves meanwhile would leave behind what one slot has charged and another refuses.
        let task = self
            .nodes
            .clone()
            .reserve(parts(charges), charges.len(), deadline, tell);
        let task = tokio::spawn(task);
        // It is always told, but when the runtime ends.
        Ok((told.await.unwrap_or(Err(Failure::Connection))?, Some(task)))
    }

    /// Puts charges right. Those of one counter stay in order. Returns the places that each call that failed had in the
    /// list; the others were made.
    pub(super) async fn amend(&self, late: &[Late<'_>]) -> Vec<(Vec<usize>, Failure)> {
        let mut slots: SmallVec<[(u16, Vec<usize>); 4]> = SmallVec::new();
        for (place, late) in late.iter().enumerate() {
            let slot = slot_of(late.key);
            match slots.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, places)) => places.push(place),
                None => slots.push((slot, vec![place])),
            }
        }
        let slots = slots.iter().map(|(slot, places)| async move {
            let late: Vec<Late<'_>> = places
                .iter()
                .filter_map(|place| late.get(*place))
                .copied()
                .collect();
            let (calls, mut told) = (calls(&late), Vec::new());
            for calls in calls.chunks(LATE_CALLS) {
                let script = &self.nodes.context.script;
                let commands: Vec<Cmd> =
                    calls.iter().map(|late| script.amend(late, None)).collect();
                told.extend(self.nodes.tell(*slot, &commands).await);
            }
            let own = |nth: &usize| places.get(*nth).copied();
            let failed = untold(&calls, told).into_iter();
            failed
                .map(|(nth, failure)| (nth.iter().filter_map(own).collect(), failure))
                .collect::<Vec<(Vec<usize>, Failure)>>()
        });
        join_all(slots).await.into_iter().flatten().collect()
    }

    /// Runs one program on whichever node holds a slot.
    ///
    /// # Errors
    /// As [`Cluster::decide`]; it is counted.
    pub(super) async fn call(
        &self,
        slot: u16,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        self.nodes.call(slot, command, deadline).await
    }

    /// Whether any master would be asked.
    pub(super) fn is_reachable(&self) -> bool {
        self.masters()
            .iter()
            .any(|master| matches!(&*master.state(), State::Up(_)))
    }

    /// Whether all nodes that keep these charges would be asked; of a key that is spread, all nodes.
    pub(super) fn reaches(&self, charges: &[Charge<'_>]) -> bool {
        let map = self.nodes.map.borrow();
        let is_there = |charge: &Charge<'_>| match charge.shards {
            0 | 1 => map
                .of_slot(slot_of(charge.key))
                .is_some_and(|node| node.is_there()),
            _ => map.nodes.iter().all(|node| node.is_there()),
        };
        charges.iter().all(is_there)
    }

    /// The slots that nobody would be asked about.
    pub(super) fn slots_away(&self) -> Vec<u16> {
        self.nodes
            .map
            .borrow()
            .slots_without(|node| node.is_there())
    }

    /// The slots of masters that seem to be there and don't answer: a node that hangs is missed only by those who ask it.
    pub(super) async fn slots_silent(&self) -> Vec<u16> {
        let nodes = self.nodes.map.borrow().nodes.clone();
        let within = self.nodes.context.settings.connect_timeout;
        let is_silent = async |node: &Arc<Node>| {
            let state = node.link.state();
            let State::Up(live) = &*state else {
                return None;
            };
            let answer = timeout(within, live.answer(&redis::cmd("PING"), false)).await;
            let late = answer.err()?;
            live.give_up(self.nodes.counted(late.into()));
            Some(Arc::clone(node))
        };
        let silent: Vec<_> = join_all(nodes.iter().map(is_silent))
            .await
            .into_iter()
            .flatten()
            .collect();
        match silent.is_empty() {
            true => Vec::new(),
            false => {
                let answers =
                    |node: &Node| silent.iter().all(|silent| silent.address != node.address);
                self.nodes.map.borrow().slots_without(answers)
            }
        }
    }

    /// The links to all masters that are known.
    pub(super) fn masters(&self) -> Vec<Arc<Link>> {
        self.nodes
            .map
            .borrow()
            .nodes
            .iter()
            .map(|node| Arc::clone(&node.link))
            .collect()
    }
}

impl Nodes {
    /// Runs one program on whichever node holds a slot.
    ///
    /// # Errors
    /// At once if that node is away; else within the deadline. It is counted.
    async fn call(&self, slot: u16, command: &Cmd, deadline: Instant) -> Result<Value, Failure> {
        self.attempt(slot, command, deadline)
            .await
            .map_err(|lost| self.note(&lost))
    }

    /// Runs some programs that put charges of a slot right, in order. Those that fail together are counted once.
    async fn tell(&self, slot: u16, commands: &[Cmd]) -> Vec<Result<(), Failure>> {
        let (start, within) = (Instant::now(), self.context.settings.timeout);
        let answers = (1..)
            .zip(commands)
            .map(|(turn, command)| self.attempt(slot, command, start + within * turn));
        let told = join_all(answers).await;
        if let Some(lost) = told.iter().find_map(|told| told.as_ref().err()) {
            self.note(lost);
        }
        told.into_iter()
            .map(|told| told.map(drop).map_err(|lost| lost.failure))
            .collect()
    }

    /// As [`Nodes::call`], but what fails has still to be noted.
    async fn attempt(&self, slot: u16, command: &Cmd, deadline: Instant) -> Result<Value, Lost> {
        let mut hop: Option<(Address, bool)> = None;
        let mut hops = 0;
        while hops < HOPS {
            let node = match &hop {
                None => self.map.borrow().of_slot(slot).cloned(),
                Some((address, _)) => Some(self.newcomer(address, deadline).await?),
            };
            let Some(node) = node else { break };
            let state = node.link.state();
            let live = match &*state {
                State::Up(live) => live,
                State::Down(_)
                    if node.is_connecting()
                        && timeout_at(deadline, node.link.ready()).await.is_ok() =>
                {
                    continue;
                }
                State::Down(failure) => {
                    self.stale.notify_one();
                    return Err((*failure).into());
                }
            };
            let asking = hop.as_ref().is_some_and(|(_, asking)| *asking);
            let error = match timeout_at(deadline, live.answer(command, asking)).await {
                Ok(Ok(value)) => {
                    node.answered();
                    return Ok(value);
                }
                Ok(Err(error)) => error,
                Err(late) => {
                    return Err(Lost {
                        failure: late.into(),
                        by: Some((node, state)),
                    });
                }
            };
            match redirection(&error, &node.address) {
                Some(Redirection::To(address, asking)) => {
                    if !asking {
                        self.stale.notify_one();
                    }
                    hop = Some((address, asking));
                    hops += 1;
                }
                Some(Redirection::Again) if Instant::now() + MOVING < deadline => {
                    sleep(MOVING).await
                }
                Some(Redirection::Again) => return Err(Failure::Timeout.into()),
                None => {
                    return Err(Lost {
                        failure: Failure::from(&error),
                        by: Some((node, state)),
                    });
                }
            }
        }
        self.stale.notify_one();
        Err(Failure::ClusterDown.into())
    }

    /// Asks all slots at once, and tells what that comes to. If one refuses, the others are given back what they took.
    async fn reserve(
        self,
        parts: SmallVec<[Part; 4]>,
        count: usize,
        deadline: Instant,
        tell: oneshot::Sender<Result<Decision, Failure>>,
    ) {
        let ask = async |part: &Part| self.ask(part.slot, &part.charges(), deadline).await;
        let answers = join_all(parts.iter().map(ask)).await;
        let decision = together(count, &parts, &answers);
        let is_refused = decision.as_ref().is_ok_and(|decision| !decision.admitted);
        // Perhaps nobody is there any more.
        drop(tell.send(decision));
        if is_refused {
            let made = parts
                .iter()
                .zip(&answers)
                .filter_map(|(part, answer)| Some((part, answer.as_ref().ok()?)));
            join_all(made.map(|(part, answer)| self.give_back(part, answer))).await;
        }
    }

    /// Gives back what one slot has charged. If that fails, it stands.
    async fn give_back(&self, part: &Part, decision: &Decision) {
        let refusals: SmallVec<[_; 4]> = decision
            .standings
            .iter()
            .map(|standing| standing.and_then(|standing| standing.refusal))
            .collect();
        let charges = part.charges();
        let made = charges.iter().enumerate().filter(|(at, charge)| {
            // A block begins because its own policy refuses.
            !charge.is_block() && effect(&charges, &refusals, *at) == Effect::Charge
        });
        let late = made.filter_map(|(at, charge)| {
            let at_us = decision.stands_us.get(at).copied().flatten()?;
            let amendment = match charge.limit.algorithm {
                Algorithm::Concurrency { .. } => Amendment::Release { slot: charge.slot },
                _ => Amendment::Credit {
                    units: charge.cost,
                    at_us,
                },
            };
            Some(Late {
                limit: charge.limit,
                key: charge.key,
                amendment,
            })
        });
        let late: SmallVec<[Late<'_>; 4]> = late.collect();
        if !late.is_empty() {
            let command = self.context.script.amend(&late, None);
            let deadline = Instant::now() + self.context.settings.timeout;
            drop(self.call(part.slot, &command, deadline).await);
        }
    }

    async fn ask(
        &self,
        slot: u16,
        charges: &[Charge<'_>],
        deadline: Instant,
    ) -> Result<Decision, Failure> {
        let script = &self.context.script;
        match self
            .call(slot, &script.decide(charges, None), deadline)
            .await
        {
            Ok(reply) => {
                Script::decision(&reply, charges).ok_or_else(|| self.counted(Failure::Reply))
            }
            Err(Failure::WrongType(position)) => {
                self.context
                    .health
                    .foreign(|| script.counter_at(charges, position));
                Err(Failure::WrongType(position))
            }
            Err(failure) => Err(failure),
        }
    }

    /// The node at an address that another has named. One that isn't known yet is waited for: it is the map that is
    /// late.
    async fn newcomer(&self, address: &Address, deadline: Instant) -> Result<Arc<Node>, Lost> {
        if let Some(node) = self.map.borrow().at(address) {
            return Ok(Arc::clone(node));
        }
        self.stale.notify_one();
        let mut map = self.map.clone();
        let known = async {
            let node = map
                .wait_for(|map| map.at(address).is_some())
                .await
                .ok()?
                .at(address)
                .cloned()?;
            node.link.ready().await;
            Some(node)
        };
        match timeout_at(deadline, known).await {
            Ok(Some(node)) => Ok(node),
            Ok(None) | Err(_) => Err(Failure::ClusterDown.into()),
        }
    }

    /// Notes that there was no useful answer.
    fn note(&self, lost: &Lost) -> Failure {
        match &lost.by {
            Some((node, state)) => match &**state {
                State::Up(live) => self.failed(node, live, lost.failure),
                State::Down(_) => self.counted(lost.failure),
            },
            None => self.counted(lost.failure),
        }
    }

    /// The same of a node that was asked.
    fn failed(&self, node: &Node, live: &Live, failure: Failure) -> Failure {
        if matches!(failure, Failure::WrongType(_)) {
            // One key's fault; it is counted where it is told.
            return failure;
        }
        if failure == Failure::ClusterDown || failure.ends_connection() {
            self.stale.notify_one();
        }
        live.failed(failure);
        let failures = node
            .failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if failures >= self.context.settings.breaker_failures {
            node.failures.store(0, Ordering::Relaxed);
            live.give_up(failure);
        }
        self.counted(failure)
    }

    fn counted(&self, failure: Failure) -> Failure {
        self.context.health.count(failure);
        failure
    }
}

impl Node {
    /// Whether it was heard of just now. Slots that move to it shall cost nobody an answer.
    fn is_connecting(&self) -> bool {
        !self.link.was_ready() && self.since.elapsed() < NEWCOMER
    }

    /// Whether it would be asked, or waited for.
    fn is_there(&self) -> bool {
        matches!(&*self.link.state(), State::Up(_)) || self.is_connecting()
    }

    fn answered(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }
}

enum Redirection {
    /// Another node has the slot; `true`: is just getting it.
    To(Address, bool),
    /// The keys are partly here and partly there.
    Again,
}

fn redirection(error: &RedisError, from: &Address) -> Option<Redirection> {
    let asking = match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => false,
        ErrorKind::Server(ServerErrorKind::Ask) => true,
        ErrorKind::Server(ServerErrorKind::TryAgain) => return Some(Redirection::Again),
        _ => return None,
    };
    match Address::parse(error.redirect_node()?.0)? {
        Address::Tcp { host, port } => Some(Redirection::To(map::named(host, port, from), asking)),
        Address::Unix(_) => None,
    }
}
