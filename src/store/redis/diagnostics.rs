//! Examines the servers for `tidegate doctor`: facts without a judgement.
//!
//! Unlike the other connections, these need no probe to succeed: a server that lacks a permission
//! or is a replica is examined as far as it answers. All commands are bounded in number and time.

mod key_sample;
mod permission_trial;
mod server_facts;

pub use key_sample::{KeySample, PolicyKeySample};
pub use permission_trial::{DenialReason, DeniedCommand};
pub(super) use server_facts::read_clock_once;
pub use server_facts::{ClockReading, InfoFields, ScriptLatency, ServerFacts};

use super::access::RedisAccess;
use super::connection::{self, OpenedConnection, PROBE_POLICY_NAME};
use super::connector;
use super::error::{RedisConnectionError, RedisErrorKind, within};
use super::hash_slot::HASH_SLOT_COUNT;
use super::live_connection::is_proxy_refusal;
use super::routing;
use super::scripts::ScriptLibrary;
use super::sentinel;
use super::{RedisAddress, RedisSettings, RedisTopology, SharedRedisState};
use crate::limiter::{Algorithm, Key, KeyBuilder};
use futures_util::future::join_all;
use redis::{Cmd, FromRedisValue, InfoDict, Pipeline, RedisError, Value, cmd, from_redis_value};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Maximum time for connecting to one server, even if `connect_timeout` is longer.
const MAX_CONNECT_TIME: Duration = Duration::from_secs(2);

/// Maximum time for the checks of one server. With the search for the servers, all checks end
/// before the admin API's limit of 10 s per request.
const MAX_CHECK_TIME: Duration = Duration::from_secs(5);

/// Maximum number of masters that are examined.
const MAX_SERVERS: usize = 64;

/// What the servers of a store reported.
#[derive(Debug, Default)]
pub struct RedisDiagnosis {
    /// The answers of the configured sentinels.
    pub sentinels: Vec<SentinelAnswer>,
    /// Why no server is known, if so.
    pub discovery_error: Option<RedisConnectionError>,
    /// Hash slots of the cluster without a master; `None` for other topologies.
    pub unassigned_slots: Option<usize>,
    /// Masters that were not examined, because there are too many.
    pub omitted_servers: usize,
    pub servers: Vec<ServerDiagnosis>,
}

/// The master that one sentinel names.
#[derive(Debug)]
pub struct SentinelAnswer {
    pub sentinel: String,
    pub master: Result<String, RedisConnectionError>,
}

/// What one server reported.
#[derive(Debug)]
pub struct ServerDiagnosis {
    pub address: String,
    pub result: Result<Box<ServerFacts>, RedisConnectionError>,
}

/// Examines all masters. `algorithms` are those of the configured limits; the latency is that of a
/// decision with one limit of each.
pub async fn diagnose_redis(settings: &RedisSettings, algorithms: &[Algorithm]) -> RedisDiagnosis {
    let mut diagnosis = RedisDiagnosis::default();
    let mut targets = match settings.topology {
        RedisTopology::Standalone => {
            let key = KeyBuilder::new(PROBE_POLICY_NAME).finish();
            let server = settings.servers.first().cloned();
            server.map(|address| (address, key)).into_iter().collect()
        }
        RedisTopology::Sentinel { .. } => find_master(settings, &mut diagnosis).await,
        RedisTopology::Cluster => find_cluster_masters(settings, &mut diagnosis).await,
    };
    diagnosis.omitted_servers = targets.len().saturating_sub(MAX_SERVERS);
    targets.truncate(MAX_SERVERS);
    let shared = &SharedRedisState::new(settings.clone()).for_inspection();
    let checks = targets.into_iter().map(|(address, probe_key)| async move {
        let result = match diagnose_server(shared, &address, &probe_key, algorithms).await {
            Ok(facts) => Ok(Box::new(facts)),
            Err(error) => Err(connector::find_refusal(&address, settings, error).await),
        };
        ServerDiagnosis {
            address: address.to_string(),
            result,
        }
    });
    diagnosis.servers = join_all(checks).await;
    diagnosis
}

/// Asks every sentinel for the master, and chooses it as the connections do.
async fn find_master(
    settings: &RedisSettings,
    diagnosis: &mut RedisDiagnosis,
) -> Vec<(RedisAddress, Key)> {
    let access = &RedisAccess::new(settings.clone());
    let answers = settings.servers.iter().map(|sentinel| async move {
        let query = sentinel::connect_and_query(access, sentinel);
        let answer = within(connect_time(settings), query).await;
        (sentinel, answer.map(|(_connection, master)| master))
    });
    let answers = join_all(answers).await;
    let named = answers
        .iter()
        .filter_map(|(_, master)| master.as_ref().ok());
    let master = sentinel::choose_master(named).cloned();
    diagnosis.sentinels = answers
        .into_iter()
        .map(|(sentinel, master)| SentinelAnswer {
            sentinel: sentinel.to_string(),
            master: master.map(|master| master.address.to_string()),
        })
        .collect();
    let key = KeyBuilder::new(PROBE_POLICY_NAME).finish();
    master.map(|master| (master, key)).into_iter().collect()
}

/// Asks all configured servers for the slot map. The first one in their order that has it decides.
async fn find_cluster_masters(
    settings: &RedisSettings,
    diagnosis: &mut RedisDiagnosis,
) -> Vec<(RedisAddress, Key)> {
    let access = &RedisAccess::new(settings.clone());
    let queries = settings.servers.iter().take(MAX_SERVERS);
    let queries = queries.map(|server| async move {
        let query = routing::query_configured_server(access, server);
        (server, within(connect_time(settings), query).await)
    });
    let mut slot_ranges = None;
    for (server, ranges) in join_all(queries).await {
        match ranges {
            Ok(ranges) => {
                slot_ranges = Some(ranges);
                diagnosis.discovery_error = None;
                break;
            }
            Err(mut error) => {
                error.message = format!("{server}: {}", error.message);
                diagnosis.discovery_error = Some(error);
            }
        }
    }
    let Some(ranges) = slot_ranges else {
        return Vec::new();
    };
    let assigned: usize = ranges
        .iter()
        .map(|(first, last, _)| usize::from(last - first) + 1)
        .sum();
    diagnosis.unassigned_slots = Some(usize::from(HASH_SLOT_COUNT).saturating_sub(assigned));
    let mut masters: Vec<(RedisAddress, Key)> = Vec::new();
    for (_, _, address) in &ranges {
        if masters.iter().all(|(known, _)| known != address) {
            let key = routing::find_probe_key(&ranges, address).await;
            masters.push((address.clone(), key));
        }
    }
    masters
}

/// The connection for the checks of one server. After the deadline, the facts that are still
/// missing are errors, and nothing is sent.
struct ServerCheck<'a> {
    scripts: &'a ScriptLibrary,
    opened: OpenedConnection,
    probe_key: &'a Key,
    deadline: Instant,
}

impl ServerCheck<'_> {
    /// Runs one command.
    async fn run<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisConnectionError> {
        let call = async {
            let reply = self.opened.live.send_command(command, false).await?;
            from_redis_value(reply).map_err(RedisError::from)
        };
        self.finish(call).await
    }

    /// Runs commands of which each may fail, and returns their replies.
    async fn run_pipeline(&self, pipeline: &Pipeline) -> Result<Vec<Value>, RedisConnectionError> {
        let mut connection = self.opened.live.connection.clone();
        let call = connection.send_packed_commands(pipeline, 0, pipeline.len());
        self.finish(call).await
    }

    async fn finish<T>(
        &self,
        call: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisConnectionError> {
        if Instant::now() >= self.deadline {
            return Err(deadline_error());
        }
        let result = timeout_at(self.deadline, call).await;
        Ok(result.map_err(|_elapsed| deadline_error())??)
    }
}

/// Runs all checks of a server within [`MAX_CHECK_TIME`].
async fn diagnose_server(
    shared: &Arc<SharedRedisState>,
    address: &RedisAddress,
    probe_key: &Key,
    algorithms: &[Algorithm],
) -> Result<ServerFacts, RedisConnectionError> {
    let settings = &shared.settings;
    // A proxy may close the connection at SCRIPT, so the texts of scripts are sent.
    let open = async || {
        let opened = connection::open(shared, settings, address, &settings.credentials, true);
        within(connect_time(settings), opened).await
    };
    let deadline = Instant::now() + MAX_CHECK_TIME;
    let mut check = ServerCheck {
        scripts: &shared.scripts,
        opened: open().await?,
        probe_key,
        deadline,
    };
    let empty_call = shared.scripts.decide_command(&[], None);
    let mut is_refused = false;
    // A server may close one connection for other reasons than a proxy.
    for _ in 0..2 {
        let empty_reply = timeout_at(deadline, check.opened.live.send_once(&empty_call, false));
        let empty_reply = empty_reply.await.map_err(|_elapsed| deadline_error())?;
        // After these, the connection is closed or out of step, and a later error would hide the
        // cause.
        if let Err(error) = &empty_reply {
            let error = RedisConnectionError::from(error.clone());
            let kinds = [RedisErrorKind::Tls, RedisErrorKind::InvalidReply];
            if kinds.contains(&error.kind) || error.message.starts_with("NOAUTH") {
                return Err(error);
            }
        }
        is_refused =
            !shared.is_cluster() && empty_reply.is_err_and(|error| is_proxy_refusal(&error));
        if !is_refused {
            break;
        }
        check.opened = open().await?;
    }
    let info = if is_refused {
        Ok(InfoFields(InfoDict::new("")))
    } else {
        check.run(&cmd("INFO")).await.map(InfoFields)
    };
    match info {
        // Without a reply to the first command, there are no facts.
        Err(
            error @ RedisConnectionError {
                kind: RedisErrorKind::Timeout | RedisErrorKind::Connection,
                ..
            },
        ) => Err(error),
        Ok(info) if is_refused || info.is_from_proxy() => {
            let latency = check.measure_latency(algorithms).await?;
            Ok(ServerFacts::from_proxy(latency))
        }
        info => Ok(ServerFacts {
            is_proxy: false,
            info,
            clock: check.read_clock().await,
            denied_commands: check.try_commands(shared.is_cluster()).await,
            latency: check.measure_latency(algorithms).await,
            keys: check.sample_keys().await,
        }),
    }
}

fn deadline_error() -> RedisConnectionError {
    let message = format!(
        "no reply within {} s, the limit for all checks of a server",
        MAX_CHECK_TIME.as_secs()
    );
    RedisConnectionError::new(RedisErrorKind::Timeout, message)
}

fn connect_time(settings: &RedisSettings) -> Duration {
    settings.connect_timeout.min(MAX_CONNECT_TIME)
}
