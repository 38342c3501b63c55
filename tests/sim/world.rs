//! The discrete-event loop: instances, network and servers on one virtual time.
//!
//! Each instance has a paused runtime. The loop always advances what is furthest behind: an
//! instance, up to the next event, or the next event itself. An instance that sends something
//! stops, so that the event of its arrival is known before anything later happens.

use crate::sim::instance::{Instance, RequestLog};
use crate::sim::network::{ClientAction, ConnectionId, Delivery, SharedInbox};
use crate::sim::redis_server::cluster::ClusterState;
use crate::sim::redis_server::lua::ScriptEngine;
use crate::sim::redis_server::{Deployment, PASSWORD, Role, Server, ServerClock};
use crate::sim::resp::take_commands;
use crate::sim::scenario::{FaultKind, RequestSpec, Scenario, Topology};
use crate::sim::trace::Trace;
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// How long an instance has between SIGTERM and its end.
pub(crate) const TERMINATION_US: u64 = 3_000_000;

/// The time from the close of a socket to its peer's knowledge, if no other delay is known.
const CLOSE_US: u64 = 1_000;

#[derive(Debug)]
pub(crate) enum Event {
    /// Something from an instance arrives at its server.
    Arrive(ConnectionId, ClientAction),
    /// A server runs its next command.
    Run(usize),
    Fault(FaultKind),
    /// The later part of a fault.
    Continue(FaultStep),
}

#[derive(Debug)]
pub(crate) enum FaultStep {
    StartServer(usize),
    Promote {
        server: usize,
        lost_us: u64,
    },
    Thaw {
        instance: usize,
        is_suspended: bool,
    },
    StartInstance(usize),
    EndInstance {
        instance: usize,
        restart_us: u64,
    },
    MoveKey {
        slots: Vec<u16>,
        to: usize,
        key_us: u64,
    },
    FinishSlots {
        slots: Vec<u16>,
        to: usize,
    },
    /// The instances load the new password.
    LoadLogin,
    /// The servers accept only the new password.
    ChangeLogin,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) instance: usize,
    pub(crate) server: usize,
    inbox: SharedInbox,
    /// Bytes of commands that are not complete.
    received: Vec<u8>,
    /// Messages keep their order.
    last_arrival_us: u64,
    last_delivery_us: u64,
    /// Nothing arrives any more, and neither side knows.
    pub(crate) is_half_open: bool,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) now_us: u64,
    events: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    pub(crate) servers: Vec<Server>,
    pub(crate) cluster: Option<ClusterState>,
    /// The index of the master that sentinels name.
    pub(crate) sentinel_master: usize,
    pub(crate) connections: BTreeMap<ConnectionId, Connection>,
    pub(crate) instances: Vec<Instance>,
    /// Requests not yet given to a process, by instance.
    pending: Vec<Vec<(usize, RequestSpec)>>,
    pub(crate) log: RequestLog,
    /// Until when nothing passes between an instance and a server.
    pub(crate) blocked_until: BTreeMap<(usize, usize), u64>,
    /// Additional delay of a server, until a time.
    pub(crate) slow_until: BTreeMap<usize, (u64, u64)>,
    pub(crate) rng: Rng,
    engine: ScriptEngine,
    pub(crate) trace: Trace,
    processes: u64,
    /// For `store.state_dir`, in scenarios that end processes in an outage.
    state_dir: Option<TempDir>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        fastrand::seed(scenario.seed);
        let servers = build_servers(&scenario);
        let addresses = servers
            .iter()
            .map(|server| server.address.clone())
            .collect();
        let cluster = match scenario.topology {
            Topology::Cluster { masters } => Some(ClusterState::new(addresses, masters)),
            _ => None,
        };
        let mut pending = vec![Vec::new(); scenario.instances];
        for (index, request) in scenario.requests.iter().enumerate() {
            pending[request.instance].push((index, request.clone()));
        }
        let mut world = Self {
            now_us: 0,
            events: BTreeMap::new(),
            next_event: 0,
            servers,
            cluster,
            sentinel_master: 0,
            connections: BTreeMap::new(),
            instances: Vec::new(),
            pending,
            log: Arc::new(Mutex::new(vec![
                Default::default();
                scenario.requests.len()
            ])),
            blocked_until: BTreeMap::new(),
            slow_until: BTreeMap::new(),
            rng: Rng::with_seed(scenario.seed),
            engine: ScriptEngine::new(),
            trace: Trace::default(),
            processes: 0,
            state_dir: scenario.stores_usage().then(|| TempDir::new().unwrap()),
            scenario,
        };
        for fault in world.scenario.faults.clone() {
            world.schedule(fault.at_us, Event::Fault(fault.kind));
        }
        for instance in 0..world.scenario.instances {
            let started = world.start_process(instance);
            world.instances.push(started);
        }
        world
    }

    /// Starts a process that serves the requests of an instance from now on.
    pub(crate) fn start_process(&mut self, instance: usize) -> Instance {
        let now_us = self.now_us;
        self.pending[instance].retain(|(_, request)| request.at_us >= now_us);
        self.processes += 1;
        let requests = self.pending[instance].clone();
        // The lowest 8 bits of a process number are its instance.
        let process = self.processes << 8 | instance as u64;
        Instance::start(
            &self.scenario,
            (process, now_us),
            self.state_dir_of(instance),
            requests,
            Arc::clone(&self.log),
        )
    }

    /// The directory that keeps an instance's usage between two of its processes.
    fn state_dir_of(&self, instance: usize) -> Option<PathBuf> {
        let path = self.state_dir.as_ref()?.path().join(instance.to_string());
        std::fs::create_dir_all(&path).unwrap();
        Some(path)
    }

    pub(crate) fn schedule(&mut self, at_us: u64, event: Event) {
        self.events
            .insert((at_us.max(self.now_us), self.next_event), event);
        self.next_event += 1;
    }

    /// Runs until the end of the scenario.
    pub(crate) fn run(&mut self) {
        let end_us = self.scenario.end_us;
        loop {
            let next_us = self
                .events
                .first_key_value()
                .map_or(end_us, |((at_us, _), _)| (*at_us).min(end_us));
            let behind = (0..self.instances.len())
                .filter(|index| {
                    self.instances[*index].is_running() && !self.instances[*index].is_frozen
                })
                .map(|index| (self.instances[index].now_us(), index))
                .min()
                .filter(|(time_us, _)| *time_us < next_us);
            if let Some((_, index)) = behind {
                self.instances[index].run_until(next_us);
                self.take_actions(index);
                continue;
            }
            if next_us >= end_us {
                break;
            }
            if let Some(((at_us, _), event)) = self.events.pop_first() {
                self.now_us = at_us;
                self.handle(event);
            }
        }
        self.now_us = end_us;
    }

    pub(crate) fn take_actions(&mut self, index: usize) {
        for (at_us, id, action) in self.instances[index].network.take_actions() {
            self.trace.record_action(at_us, id, &action);
            if let ClientAction::Connect(address, inbox) = &action {
                let server = self
                    .servers
                    .iter()
                    .position(|server| server.address == *address);
                let server = server.expect("a known address");
                let connection = Connection {
                    instance: index,
                    server,
                    inbox: Arc::clone(inbox),
                    received: Vec::new(),
                    last_arrival_us: at_us,
                    last_delivery_us: at_us,
                    is_half_open: false,
                };
                self.connections.insert(id, connection);
            }
            let Some(connection) = self.connections.get(&id) else {
                continue;
            };
            let arrives_us = match action {
                ClientAction::Close => at_us.max(self.now_us) + CLOSE_US,
                _ => self.arrival_us(index, connection.server, at_us),
            };
            if let Some(connection) = self.connections.get_mut(&id) {
                let arrives_us = arrives_us.max(connection.last_arrival_us);
                connection.last_arrival_us = arrives_us;
                self.schedule(arrives_us, Event::Arrive(id, action));
            }
        }
    }

    /// When a message sent now arrives. Messages in a partition arrive after its end.
    fn arrival_us(&mut self, instance: usize, server: usize, sent_us: u64) -> u64 {
        let blocked_us = self
            .blocked_until
            .get(&(instance, server))
            .copied()
            .unwrap_or(0);
        let (slow_until_us, extra_us) = self.slow_until.get(&server).copied().unwrap_or((0, 0));
        let extra_us = if sent_us < slow_until_us { extra_us } else { 0 };
        let jitter_us = self.rng.u64(0..=self.scenario.delay_us / 4);
        sent_us.max(blocked_us) + self.scenario.delay_us.max(1_000) + jitter_us + extra_us
    }

    pub(crate) fn deliver(&mut self, id: ConnectionId, sent_us: u64, delivery: Delivery) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if connection.is_half_open {
            return;
        }
        let (instance, server) = (connection.instance, connection.server);
        let at_us = self.arrival_us(instance, server, sent_us);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.last_delivery_us = connection.last_delivery_us.max(at_us);
            connection
                .inbox
                .lock()
                .unwrap()
                .push(connection.last_delivery_us, delivery);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive(id, action) => self.arrive(id, action),
            Event::Run(server) => self.run_server(server),
            Event::Fault(kind) => {
                self.trace.record_fault(self.now_us, &kind);
                self.apply_fault(kind);
            }
            Event::Continue(step) => self.continue_fault(step),
        }
    }

    fn arrive(&mut self, id: ConnectionId, action: ClientAction) {
        let now_us = self.now_us;
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let server = connection.server;
        match action {
            ClientAction::Close => drop(self.connections.remove(&id)),
            _ if connection.is_half_open => {}
            ClientAction::Connect(..) => {
                let is_alive = self.servers[server].is_alive;
                let reply = if is_alive {
                    Delivery::Established
                } else {
                    Delivery::Refused
                };
                self.deliver(id, now_us, reply);
            }
            ClientAction::Send(_) if !self.servers[server].is_alive => self.reset(id),
            ClientAction::Send(bytes) => {
                connection.received.extend(bytes);
                let commands = take_commands(&mut connection.received);
                self.servers[server]
                    .queue
                    .extend(commands.into_iter().map(|command| (id, command)));
                self.schedule_run(server);
            }
        }
    }

    pub(crate) fn schedule_run(&mut self, index: usize) {
        let server = &mut self.servers[index];
        if server.queue.is_empty() || std::mem::replace(&mut server.is_run_scheduled, true) {
            return;
        }
        let at_us = server.busy_until_us.max(self.now_us);
        self.schedule(at_us, Event::Run(index));
    }

    fn run_server(&mut self, index: usize) {
        self.servers[index].is_run_scheduled = false;
        if self.servers[index].busy_until_us > self.now_us {
            return self.schedule_run(index);
        }
        let Some((id, command)) = self.servers[index].queue.pop_front() else {
            return;
        };
        let master = self.servers[self.sentinel_master].address.clone();
        let mut deployment = Deployment {
            engine: &mut self.engine,
            cluster: self.cluster.as_ref(),
            sentinel_master: &master,
            world_us: self.now_us,
        };
        let (reply, service_us) = self.servers[index].run(index, id, &command, &mut deployment);
        let ends_us = self.now_us + service_us;
        self.servers[index].busy_until_us = ends_us;
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.trace
            .record_command(self.now_us, index, &command, &bytes);
        self.deliver(id, ends_us, Delivery::Bytes(bytes));
        self.schedule_run(index);
    }

    /// Resets a connection: the instance notices after a delay.
    pub(crate) fn reset(&mut self, id: ConnectionId) {
        self.deliver(id, self.now_us, Delivery::Reset);
        self.connections.remove(&id);
    }

    /// The connections to a server, or those from one instance to it.
    pub(crate) fn connections_to(
        &self,
        server: usize,
        instance: Option<usize>,
    ) -> BTreeSet<ConnectionId> {
        self.connections
            .iter()
            .filter(|(_, connection)| {
                connection.server == server
                    && instance.is_none_or(|instance| connection.instance == instance)
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// Runs a command on a server outside the simulation, to inspect its counters.
    pub(crate) fn inspect(
        &mut self,
        index: usize,
        command: &crate::sim::resp::Command,
    ) -> crate::sim::resp::Reply {
        let mut deployment = Deployment {
            engine: &mut self.engine,
            cluster: None,
            sentinel_master: "",
            world_us: self.now_us,
        };
        (self.servers[index].error, self.servers[index].password) = (None, None);
        self.servers[index]
            .run(index, u64::MAX, command, &mut deployment)
            .0
    }
}

fn build_servers(scenario: &Scenario) -> Vec<Server> {
    let roles = match scenario.topology {
        Topology::Memory { .. } => Vec::new(),
        Topology::Standalone => vec![Role::Master],
        Topology::Sentinel => {
            vec![
                Role::Master,
                Role::Replica,
                Role::Sentinel,
                Role::Sentinel,
                Role::Sentinel,
            ]
        }
        Topology::Cluster { masters } => {
            [vec![Role::Master; masters], vec![Role::Replica; masters]].concat()
        }
    };
    roles
        .into_iter()
        .enumerate()
        .map(|(index, role)| {
            let rate_ppm = scenario.rates_ppm.get(index).copied().unwrap_or(0);
            let clock = ServerClock {
                offset_us: 0,
                rate_ppm,
            };
            let mut server = Server::new(Scenario::server_address(index), role, clock);
            server.password = scenario.has_login().then_some(PASSWORD);
            server
        })
        .collect()
}
