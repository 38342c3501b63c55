//! A simulated Redis: one node of any topology, with a clock of its own.

pub(crate) mod cluster;
pub(crate) mod commands;
pub(crate) mod dataset;
pub(crate) mod lua;

use crate::sim::network::ConnectionId;
use crate::sim::resp::{Command, Reply};
use commands::{KeySpace, number};
use dataset::Dataset;
use lua::ScriptEngine;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The epoch of the simulated clocks, a multiple of one hour.
pub(crate) const EPOCH_US: u64 = 1_800_000_000_000_000;

/// Service times in µs: of any command, of a script, and of each element that it touches.
const COMMAND_US: u64 = 10;
const SCRIPT_US: u64 = 60;
const ELEMENT_US: u64 = 2;

/// The passwords before and after a rotation.
pub(crate) const PASSWORD: &str = "first";
pub(crate) const NEW_PASSWORD: &str = "second";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Master,
    Replica,
    Sentinel,
}

/// A clock with an offset and a rate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServerClock {
    pub(crate) offset_us: i64,
    pub(crate) rate_ppm: i64,
}

impl ServerClock {
    pub(crate) fn time_us(&self, world_us: u64) -> u64 {
        let drift = world_us as i64 * self.rate_ppm / 1_000_000;
        (EPOCH_US + world_us).saturating_add_signed(self.offset_us + drift)
    }
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) role: Role,
    pub(crate) is_alive: bool,
    pub(crate) clock: ServerClock,
    pub(crate) dataset: Dataset,
    scripts: BTreeMap<String, Vec<u8>>,
    /// Commands in the order of their arrival.
    pub(crate) queue: VecDeque<(ConnectionId, Command)>,
    pub(crate) busy_until_us: u64,
    /// Whether a run of the queue is scheduled.
    pub(crate) is_run_scheduled: bool,
    /// Every command is answered by this error until a time.
    pub(crate) error: Option<(&'static str, u64)>,
    /// Connections that sent ASKING before their next command.
    asking: BTreeSet<ConnectionId>,
    /// `None`: no login is needed.
    pub(crate) password: Option<&'static str>,
    /// Connections that have logged in. They stay so when the password changes.
    logged_in: BTreeSet<ConnectionId>,
    pub(crate) script_calls: u64,
}

/// What a command may read of the deployment.
pub(crate) struct Deployment<'w> {
    pub(crate) engine: &'w mut ScriptEngine,
    pub(crate) cluster: Option<&'w cluster::ClusterState>,
    /// The master that sentinels name.
    pub(crate) sentinel_master: &'w str,
    pub(crate) world_us: u64,
}

impl Server {
    pub(crate) fn new(address: String, role: Role, clock: ServerClock) -> Self {
        Self {
            address,
            role,
            is_alive: true,
            clock,
            dataset: Dataset::default(),
            scripts: BTreeMap::new(),
            queue: VecDeque::new(),
            busy_until_us: 0,
            is_run_scheduled: false,
            error: None,
            asking: BTreeSet::new(),
            password: None,
            logged_in: BTreeSet::new(),
            script_calls: 0,
        }
    }

    /// Stops the process. Memory stays: the caller decides what the disk or a replica has.
    pub(crate) fn kill(&mut self) {
        self.is_alive = false;
        self.queue.clear();
        self.asking.clear();
        self.scripts.clear();
    }

    pub(crate) fn flush_scripts(&mut self) {
        self.scripts.clear();
    }

    /// Runs one command of the server at `index`. Returns the reply and the service time in µs.
    pub(crate) fn run(
        &mut self,
        index: usize,
        connection: ConnectionId,
        command: &Command,
        deployment: &mut Deployment<'_>,
    ) -> (Reply, u64) {
        let name = command[0].to_ascii_uppercase();
        let is_asking = self.asking.remove(&connection);
        if let Some(error) = self.current_error(deployment.world_us, &name) {
            return (Reply::error(error), COMMAND_US);
        }
        let needs_login = self.password.is_some() && self.role != Role::Sentinel;
        if needs_login && name != b"AUTH" && !self.logged_in.contains(&connection) {
            return (Reply::error("NOAUTH Authentication required."), COMMAND_US);
        }
        let reply = match name.as_slice() {
            b"PING" => Reply::Status("PONG"),
            b"AUTH" => self.log_in(connection, command),
            b"CLIENT" | b"SELECT" | b"READONLY" => Reply::OK,
            b"ASKING" => {
                self.asking.insert(connection);
                Reply::OK
            }
            b"INFO" => Reply::text(
                "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n",
            ),
            b"DBSIZE" => Reply::Int(1_000),
            b"MEMORY" => Reply::Int(120),
            b"CONFIG" => Reply::Array(vec![
                Reply::text("maxmemory-policy"),
                Reply::text("noeviction"),
            ]),
            b"SCRIPT" => self.load_script(command),
            b"SENTINEL" => {
                let (host, port) = deployment
                    .sentinel_master
                    .split_once(':')
                    .expect("an address with a port");
                Reply::Array(vec![Reply::text(host), Reply::text(port)])
            }
            b"CLUSTER" => match deployment.cluster {
                Some(cluster) => cluster.slots_reply(),
                None => Reply::error("ERR This instance has cluster support disabled"),
            },
            _ => return self.run_on_keys(index, &name, command, is_asking, deployment),
        };
        (reply, COMMAND_US)
    }

    fn current_error(&self, world_us: u64, name: &[u8]) -> Option<&'static str> {
        let (error, until_us) = self.error?;
        let is_affected = !matches!(
            name,
            b"CLIENT" | b"AUTH" | b"SELECT" | b"ASKING" | b"CLUSTER"
        );
        (world_us < until_us && is_affected).then_some(error)
    }

    fn log_in(&mut self, connection: ConnectionId, command: &Command) -> Reply {
        let password = command.last().map(Vec::as_slice);
        if password != self.password.map(str::as_bytes) {
            return Reply::error("WRONGPASS invalid username-password pair or user is disabled.");
        }
        self.logged_in.insert(connection);
        Reply::OK
    }

    fn load_script(&mut self, command: &Command) -> Reply {
        let sha = redis::Script::new(&String::from_utf8_lossy(&command[2]))
            .get_hash()
            .to_owned();
        self.scripts.insert(sha.clone(), command[2].clone());
        Reply::text(sha)
    }

    fn run_on_keys(
        &mut self,
        index: usize,
        name: &[u8],
        command: &Command,
        is_asking: bool,
        deployment: &mut Deployment<'_>,
    ) -> (Reply, u64) {
        let is_script = matches!(name, b"EVAL" | b"EVALSHA");
        let keys = match (is_script, name) {
            (true, _) => &command[3..3 + number(&command[2]) as usize],
            (false, b"TIME" | b"SCAN") => &[],
            (false, _) => &command[1..2],
        };
        if let Some(cluster) = deployment.cluster {
            let now_ms = self.clock.time_us(deployment.world_us) / 1000;
            let exists = |key: &[u8]| self.dataset.get(key, now_ms).is_some();
            if let Err(redirection) = cluster.check(index, keys, is_asking, exists) {
                return (Reply::error(redirection), COMMAND_US);
            }
        }
        let mut keyspace = KeySpace {
            dataset: std::mem::take(&mut self.dataset),
            time_us: self.clock.time_us(deployment.world_us),
            world_us: deployment.world_us,
            work: 0,
            write_error: (self.role == Role::Replica)
                .then_some("READONLY You can't write against a read only replica."),
        };
        let reply = match is_script {
            false => keyspace.run(command),
            true => {
                self.script_calls += 1;
                let (sha, text) = self.find_script(name, &command[1]);
                match text {
                    None => Reply::error("NOSCRIPT No matching script. Please use EVAL."),
                    Some(text) => {
                        let arguments = &command[3 + keys.len()..];
                        let (reply, after) = deployment
                            .engine
                            .run(&sha, &text, keys, arguments, keyspace);
                        keyspace = after;
                        reply
                    }
                }
            }
        };
        self.dataset = keyspace.dataset;
        let base_us = if is_script { SCRIPT_US } else { COMMAND_US };
        (reply, base_us + ELEMENT_US * keyspace.work)
    }

    /// The SHA-1 of a script, and its text if it is known.
    fn find_script(&self, name: &[u8], argument: &[u8]) -> (String, Option<Vec<u8>>) {
        let text = String::from_utf8_lossy(argument);
        if name == b"EVALSHA" {
            return (text.to_string(), self.scripts.get(&*text).cloned());
        }
        (
            redis::Script::new(&text).get_hash().to_owned(),
            Some(argument.to_vec()),
        )
    }
}
