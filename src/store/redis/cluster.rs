//! One worker's way to a Redis Cluster: a link to each master, and the map that says which slot is whose.
//!
//! redis-rs' own `ClusterConnection` was not taken: it repeats and waits by rules of its own while a request has a
//! deadline, keeps no connection that has proven itself, and speaks TLS its own way. What is needed beside
//! [`Link`] is little: the map, two redirections, and one task that renews the map.
//!
//! Charges of several slots are asked at once, one call per slot. If any enforced one is refused, what the other slots
//! have charged is given back: too strict for a moment, never too lax.

mod map;
mod shards;

use super::connect::{self, Address, Task};
use super::failure::{Failure, Trouble};
use super::link::{Context, Link, Live, State, Target};
use super::script::Script;
use super::{LATE_CALLS, calls, untold};
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Effect, Key, Limit, Standing, effect};
use crate::store::Late;
use futures_util::future::join_all;
use map::{Map, Node, Range};
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(super) use map::{slot_of, slot_of_name};

/// The map is renewed this often, if nothing asks for it before.
const RENEWAL: Duration = Duration::from_secs(5);

/// Pause between two renewals that are asked for: doubled up to the largest while nothing new comes of it.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LARGEST_PAUSE: Duration = Duration::from_millis(500);

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

/// The charges of one question that are kept in one slot.
struct Part {
    slot: u16,
    charges: SmallVec<[Owned; 2]>,
    /// Where they stand in the question.
    places: SmallVec<[usize; 4]>,
}

/// A charge that outlives who asks for it.
struct Owned {
    limit: Limit,
    key: Key,
    cost: u64,
    group: u32,
    shadow: bool,
    counts_rejected: bool,
    slot: u128,
}

impl Part {
    fn charges(&self) -> SmallVec<[Charge<'_>; 4]> {
        self.charges.iter().map(Owned::charge).collect()
    }
}

impl Owned {
    fn of(charge: &Charge<'_>) -> Self {
        let Charge { limit, key, cost, group, shadow, counts_rejected, slot, .. } = *charge;
        Self { limit: *limit, key: key.clone(), cost, group, shadow, counts_rejected, slot }
    }

    /// It says that it may be given back. It comes without a lease: what one slot lends, another's refusal could not take
    /// back.
    fn charge(&self) -> Charge<'_> {
        Charge {
            group: self.group,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            settles: true,
            slot: self.slot,
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
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
    keys.next().is_some_and(|first| keys.any(|key| key.id() != first.id() && slot_of(key) != slot_of(first)))
}

impl Cluster {
    /// Learns who is there, connects to all masters, and stays connected as long as the value lives.
    pub(super) fn start(context: Arc<Context>) -> Self {
        let (publish, map) = watch::channel(Arc::default());
        let stale = Arc::new(Notify::new());
        let keeper = keep(Arc::clone(&context), publish, Arc::clone(&stale));
        Self { nodes: Nodes { context, map, stale }, _keeper: Task(tokio::spawn(keeper)) }
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
            false => self.decide_whole(charges, deadline).await.map(|(decision, _)| decision),
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
        let task = self.nodes.clone().reserve(parts(charges), charges.len(), deadline, tell);
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
            let late: Vec<Late<'_>> = places.iter().filter_map(|place| late.get(*place)).copied().collect();
            let (calls, mut told) = (calls(&late), Vec::new());
            for calls in calls.chunks(LATE_CALLS) {
                let script = &self.nodes.context.script;
                let commands: Vec<Cmd> = calls.iter().map(|late| script.amend(late, None)).collect();
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
    pub(super) async fn call(&self, slot: u16, command: &Cmd, deadline: Instant) -> Result<Value, Failure> {
        self.nodes.call(slot, command, deadline).await
    }

    /// Whether any master would be asked.
    pub(super) fn is_reachable(&self) -> bool {
        self.masters().iter().any(|master| matches!(&*master.state(), State::Up(_)))
    }

    /// Whether all nodes that keep these charges would be asked; of a key that is spread, all nodes.
    pub(super) fn reaches(&self, charges: &[Charge<'_>]) -> bool {
        let map = self.nodes.map.borrow();
        let is_there = |charge: &Charge<'_>| match charge.shards {
            0 | 1 => map.of_slot(slot_of(charge.key)).is_some_and(|node| node.is_there()),
            _ => map.nodes.iter().all(|node| node.is_there()),
        };
        charges.iter().all(is_there)
    }

    /// The slots that nobody would be asked about.
    pub(super) fn slots_away(&self) -> Vec<u16> {
        self.nodes.map.borrow().slots_without(|node| node.is_there())
    }

    /// The slots of masters that seem to be there and don't answer: a node that hangs is missed only by those who ask it.
    pub(super) async fn slots_silent(&self) -> Vec<u16> {
        let nodes = self.nodes.map.borrow().nodes.clone();
        let within = self.nodes.context.settings.connect_timeout;
        let is_silent = async |node: &Arc<Node>| {
            let state = node.link.state();
            let State::Up(live) = &*state else { return None };
            let answer = timeout(within, live.answer(&redis::cmd("PING"), false)).await;
            let late = answer.err()?;
            live.give_up(self.nodes.counted(late.into()));
            Some(Arc::clone(node))
        };
        let silent: Vec<_> = join_all(nodes.iter().map(is_silent)).await.into_iter().flatten().collect();
        match silent.is_empty() {
            true => Vec::new(),
            false => {
                let answers = |node: &Node| silent.iter().all(|silent| silent.address != node.address);
                self.nodes.map.borrow().slots_without(answers)
            }
        }
    }

    /// The links to all masters that are known.
    pub(super) fn masters(&self) -> Vec<Arc<Link>> {
        self.nodes.map.borrow().nodes.iter().map(|node| Arc::clone(&node.link)).collect()
    }
}

impl Nodes {
    /// Runs one program on whichever node holds a slot.
    ///
    /// # Errors
    /// At once if that node is away; else within the deadline. It is counted.
    async fn call(&self, slot: u16, command: &Cmd, deadline: Instant) -> Result<Value, Failure> {
        self.attempt(slot, command, deadline).await.map_err(|lost| self.note(&lost))
    }

    /// Runs some programs that put charges of a slot right, in order. Those that fail together are counted once.
    async fn tell(&self, slot: u16, commands: &[Cmd]) -> Vec<Result<(), Failure>> {
        let (start, within) = (Instant::now(), self.context.settings.timeout);
        let answers =
            (1..).zip(commands).map(|(turn, command)| self.attempt(slot, command, start + within * turn));
        let told = join_all(answers).await;
        if let Some(lost) = told.iter().find_map(|told| told.as_ref().err()) {
            self.note(lost);
        }
        told.into_iter().map(|told| told.map(drop).map_err(|lost| lost.failure)).collect()
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
                    if node.is_connecting() && timeout_at(deadline, node.link.ready()).await.is_ok() =>
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
                Err(late) => return Err(Lost { failure: late.into(), by: Some((node, state)) }),
            };
            match redirection(&error, &node.address) {
                Some(Redirection::To(address, asking)) => {
                    if !asking {
                        self.stale.notify_one();
                    }
                    hop = Some((address, asking));
                    hops += 1;
                }
                Some(Redirection::Again) if Instant::now() + MOVING < deadline => sleep(MOVING).await,
                Some(Redirection::Again) => return Err(Failure::Timeout.into()),
                None => return Err(Lost { failure: Failure::from(&error), by: Some((node, state)) }),
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
            let made =
                parts.iter().zip(&answers).filter_map(|(part, answer)| Some((part, answer.as_ref().ok()?)));
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
                _ => Amendment::Credit { units: charge.cost, at_us },
            };
            Some(Late { limit: charge.limit, key: charge.key, amendment })
        });
        let late: SmallVec<[Late<'_>; 4]> = late.collect();
        if !late.is_empty() {
            let command = self.context.script.amend(&late, None);
            let deadline = Instant::now() + self.context.settings.timeout;
            drop(self.call(part.slot, &command, deadline).await);
        }
    }

    async fn ask(&self, slot: u16, charges: &[Charge<'_>], deadline: Instant) -> Result<Decision, Failure> {
        let script = &self.context.script;
        match self.call(slot, &script.decide(charges, None), deadline).await {
            Ok(reply) => Script::decision(&reply, charges).ok_or_else(|| self.counted(Failure::Reply)),
            Err(Failure::WrongType(position)) => {
                self.context.health.foreign(|| script.counter_at(charges, position));
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
            let node = map.wait_for(|map| map.at(address).is_some()).await.ok()?.at(address).cloned()?;
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
        let failures = node.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
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

/// The charges by their slots.
fn parts(charges: &[Charge<'_>]) -> SmallVec<[Part; 4]> {
    let mut parts: SmallVec<[Part; 4]> = SmallVec::new();
    for (place, charge) in charges.iter().enumerate() {
        let (slot, charge) = (slot_of(charge.key), Owned::of(charge));
        match parts.iter_mut().find(|part| part.slot == slot) {
            Some(part) => {
                part.charges.push(charge);
                part.places.push(place);
            }
            None => parts.push(Part {
                slot,
                charges: SmallVec::from_iter([charge]),
                places: SmallVec::from_iter([place]),
            }),
        }
    }
    parts
}

/// What the answers of several slots come to, on one clock: that of the first that answered.
fn together(
    count: usize,
    parts: &[Part],
    answers: &[Result<Decision, Failure>],
) -> Result<Decision, Failure> {
    let mut whole: Option<Decision> = None;
    let mut away = None;
    for (part, answer) in parts.iter().zip(answers) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // Shadow policies stop nobody, not even by being away.
                if !part.charges.iter().all(|charge| charge.shadow) {
                    away.get_or_insert(*failure);
                }
                continue;
            }
        };
        let whole = whole.get_or_insert_with(|| Decision {
            now_us: answer.now_us,
            admitted: true,
            standings: SmallVec::from_elem(None, count),
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::from_elem(None, count),
        });
        whole.admitted &= answer.admitted;
        whole.delay_us = whole.delay_us.max(answer.delay_us);
        for (place, standing) in part.places.iter().zip(&answer.standings) {
            if let Some(into) = whole.standings.get_mut(*place) {
                *into = standing.map(|standing| standing.on_clock(answer.now_us, whole.now_us));
            }
        }
        for (place, at_us) in part.places.iter().zip(&answer.stands_us) {
            if let Some(into) = whole.stands_us.get_mut(*place) {
                *into = *at_us;
            }
        }
    }
    match (whole, away) {
        // Whatever the others would have said.
        (Some(whole), _) if !whole.admitted => Ok(Decision { delay_us: 0, ..whole }),
        (_, Some(failure)) => Err(failure),
        (Some(whole), None) => Ok(whole),
        (None, None) => Err(Failure::ClusterDown),
    }
}

/// Renews the map when somebody finds it stale, and now and then.
async fn keep(context: Arc<Context>, publish: watch::Sender<Arc<Map>>, stale: Arc<Notify>) {
    let health = &context.health;
    let (mut known, mut lost, mut pause): (Vec<Range>, _, _) = (Vec::new(), false, FIRST_PAUSE);
    loop {
        let before = publish.borrow().clone();
        match ranges(&context, &before).await {
            Ok(ranges) if ranges.is_empty() => health.count(Failure::ClusterDown),
            Ok(ranges) => {
                if std::mem::take(&mut lost) {
                    health.link_restored();
                }
                if ranges != known {
                    publish.send_replace(Arc::new(renewed(&context, &before, &ranges).await));
                    (known, pause) = (ranges, FIRST_PAUSE);
                }
            }
            Err(trouble) => {
                health.count(trouble.failure);
                // Whoever knows nodes knows it from their links.
                if known.is_empty() && !std::mem::replace(&mut lost, true) {
                    health.link_lost(&trouble);
                }
            }
        }
        sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(LARGEST_PAUSE);
        if !known.is_empty() && timeout(RENEWAL, stale.notified()).await.is_err() {
            pause = FIRST_PAUSE;
        }
    }
}

/// A map in which nodes that stay keep their connections.
async fn renewed(context: &Arc<Context>, before: &Map, ranges: &[Range]) -> Map {
    let mut nodes: Vec<Arc<Node>> = Vec::new();
    for (_, _, address) in ranges {
        if nodes.iter().any(|node| node.address == *address) {
            continue;
        }
        if let Some(known) = before.at(address) {
            nodes.push(Arc::clone(known));
            continue;
        }
        let target = Target::node(address.clone(), map::probe(ranges, address).await);
        let link = Arc::new(Link::start(Arc::clone(context), target));
        let failures = AtomicU32::new(0);
        nodes.push(Arc::new(Node { address: address.clone(), link, failures, since: Instant::now() }));
    }
    for gone in before.nodes.iter().filter(|node| !nodes.iter().any(|other| Arc::ptr_eq(other, node))) {
        let (gone, patience) = (Arc::clone(gone), context.settings.timeout);
        // What is on the way is still answered, if only with where to go.
        tokio::spawn(async move {
            sleep(patience).await;
            gone.link.retire();
        });
    }
    Map::new(nodes, ranges)
}

/// Asks for the map: first those who are connected, one after the other, then whoever was configured.
async fn ranges(context: &Context, map: &Map) -> Result<Vec<Range>, Trouble> {
    let settings = &context.settings;
    let mut command = Cmd::new();
    command.arg("CLUSTER").arg("SLOTS");
    let mut nodes = map.nodes.clone();
    fastrand::shuffle(&mut nodes);
    for node in nodes {
        if let State::Up(live) = &*node.link.state()
            && let Ok(Ok(reply)) = timeout(settings.timeout, live.answer(&command, false)).await
            && let Some(ranges) = map::ranges(&reply, &node.address)
        {
            return Ok(sorted(ranges));
        }
    }
    let mut trouble = Trouble::new(Failure::Dns, "no address is known");
    let each = settings.connect_timeout / 2;
    for address in &settings.servers {
        let asked = timeout(each, ask_stranger(context, address, &command)).await;
        match asked.unwrap_or_else(|late| Err(late.into())) {
            Ok(ranges) => return Ok(sorted(ranges)),
            Err(error) => trouble = Trouble::new(error.failure, format!("{address}: {}", error.why)),
        }
    }
    Err(trouble)
}

async fn ask_stranger(context: &Context, address: &Address, command: &Cmd) -> Result<Vec<Range>, Trouble> {
    let (mut connection, _driver) = connect::open(address, context.settings.how()).await?;
    let reply = match connection.send_packed_command(command).await? {
        Value::ServerError(error) => return Err(RedisError::from(error).into()),
        reply => reply,
    };
    map::ranges(&reply, address).ok_or_else(|| Trouble::new(Failure::Reply, "the answer makes no sense"))
}

/// So that two answers that say the same are the same.
fn sorted(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable_by_key(|(first, last, _)| (*first, *last));
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{KeyBuilder, Refusal, Standing};

    const LIMIT: Limit = Limit { requests: 9, per_us: 1_000_000, algorithm: Algorithm::SlidingLog };

    fn decision(now_us: u64, until_us: Option<u64>) -> Decision {
        let refusal = until_us.map(Refusal::Until);
        let standing = Standing { remaining: 3, grows_at_us: Some(now_us + 500), refusal };
        Decision {
            now_us,
            admitted: until_us.is_none(),
            standings: SmallVec::from_iter([Some(standing)]),
            delay_us: 0,
            grants: SmallVec::new(),
            stands_us: SmallVec::new(),
        }
    }

    fn merged(shadow: bool, answers: [Result<Decision, Failure>; 2]) -> Result<Decision, Failure> {
        // In slots of their own.
        let (one, other) = (KeyBuilder::new("one").finish(), KeyBuilder::new("other").finish());
        let charges =
            [Charge::new(&LIMIT, &one, 1), Charge { group: 1, shadow, ..Charge::new(&LIMIT, &other, 1) }];
        assert!(is_split(&charges) && parts(&charges).len() == 2);
        together(2, &parts(&charges), &answers)
    }

    #[test]
    fn several_clocks_become_one() {
        let whole = merged(false, [Ok(decision(1_000_000, None)), Ok(decision(5_000, Some(7_000)))]).unwrap();
        assert_eq!((whole.now_us, whole.admitted), (1_000_000, false));
        let other = whole.standings[1].unwrap();
        assert_eq!(other.refusal, Some(Refusal::Until(1_002_000)));
        assert_eq!(other.grows_at_us, Some(1_000_500));
    }

    #[test]
    fn a_slot_that_is_away_degrades_who_needs_it_and_nobody_who_is_refused_anyhow() {
        let away = || Err(Failure::Timeout);
        assert_eq!(merged(false, [Ok(decision(1000, None)), away()]).unwrap_err(), Failure::Timeout);
        let refused = merged(false, [away(), Ok(decision(1000, Some(2000)))]).unwrap();
        assert!(!refused.admitted && refused.standings[0].is_none());
        let without_shadow = merged(true, [Ok(decision(1000, None)), away()]).unwrap();
        assert!(without_shadow.admitted && without_shadow.standings[1].is_none());
        assert_eq!(merged(true, [away(), Ok(decision(1000, None))]).unwrap_err(), Failure::Timeout);
    }
}
