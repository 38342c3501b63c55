//! Examines the servers for `tidegate doctor`: facts without a judgement.
//!
//! Unlike the other connections, these need no probe to succeed: a server that lacks a permission
//! or is a replica is examined as far as it answers. All commands are bounded in number and time.

mod key_sample;
mod permission_trial;
mod server_facts;

pub use key_sample::{KeySample, PolicyKeySample};
pub use permission_trial::{DenialReason, DeniedCommand};
pub(super) use server_facts::parse_time_reply;
pub use server_facts::{ClockReading, InfoFields, ScriptLatency, ServerFacts};

use super::access::RedisAccess;
use super::connection::PROBE_POLICY_NAME;
use super::connector;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::hash_slot::HASH_SLOT_COUNT;
use super::live_connection::is_proxy_refusal;
use super::routing;
use super::scripts::ScriptLibrary;
use super::sentinel::{self, SentinelGroup};
use super::{RedisAddress, RedisSettings, RedisTopology};
use crate::limiter::{Algorithm, Key, KeyBuilder};
use futures_util::future::join_all;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

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
    let scripts = ScriptLibrary::new(&settings.key_prefix);
    let checks = targets.into_iter().map(|(address, probe_key)| {
        let scripts = &scripts;
        async move {
            let result = diagnose_server(settings, scripts, &address, &probe_key, algorithms).await;
            let result = match result {
                Ok(facts) => Ok(facts),
                Err(error) => Err(connector::find_refusal(&address, settings, error).await),
            };
            ServerDiagnosis {
                address: address.to_string(),
                result,
            }
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
    let access = RedisAccess::new(settings.clone());
    let Some(group) = SentinelGroup::from_access(&access) else {
        return Vec::new();
    };
    let answers = settings.servers.iter().map(|sentinel| async move {
        let master = timeout(connect_time(settings), group.query_sentinel(sentinel)).await;
        (
            sentinel,
            master.unwrap_or_else(|elapsed| Err(elapsed.into())),
        )
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
        let ranges = timeout(connect_time(settings), query).await;
        (server, ranges.unwrap_or_else(|elapsed| Err(elapsed.into())))
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

/// Runs all checks of a server. After [`MAX_CHECK_TIME`], the facts that are still missing are
/// errors, and the others stay.
async fn diagnose_server(
    settings: &RedisSettings,
    scripts: &ScriptLibrary,
    address: &RedisAddress,
    probe_key: &Key,
    algorithms: &[Algorithm],
) -> Result<Box<ServerFacts>, RedisConnectionError> {
    let deadline = Instant::now() + MAX_CHECK_TIME;
    let open =
        || connector::open_connection(address, settings, &settings.credentials, settings.database);
    let (mut connection, mut _driver) = timeout(connect_time(settings), open()).await??;
    let is_cluster = settings.topology == RedisTopology::Cluster;
    let empty_call = scripts.decide_command(&[], None);
    let mut is_refused = false;
    // A server may close one connection for other reasons than a proxy.
    for _ in 0..2 {
        let empty_reply = timeout_at(deadline, empty_call.exec_async(&mut connection)).await;
        let empty_reply = empty_reply.map_err(|_elapsed| deadline_error())?;
        // After these, the connection is closed or out of step, and a later error would hide the
        // cause.
        if let Err(error) = &empty_reply {
            let error = RedisConnectionError::from(error);
            let kinds = [RedisErrorKind::Tls, RedisErrorKind::InvalidReply];
            if kinds.contains(&error.kind) || error.message.starts_with("NOAUTH") {
                return Err(error);
            }
        }
        is_refused = !is_cluster && empty_reply.is_err_and(|error| is_proxy_refusal(&error));
        if !is_refused {
            break;
        }
        (connection, _driver) = timeout(connect_time(settings), open()).await??;
    }
    let info = if is_refused {
        Ok(InfoFields::default())
    } else {
        finish_check(deadline, server_facts::read_info(&mut connection)).await
    };
    let info = match info {
        // Without a reply to the first command, there are no facts.
        Err(error)
            if matches!(
                error.kind,
                RedisErrorKind::Timeout | RedisErrorKind::Connection
            ) =>
        {
            return Err(error);
        }
        Ok(info) if is_refused || info.is_from_proxy() => {
            let latency = server_facts::measure_latency(
                &mut connection,
                scripts,
                probe_key,
                algorithms,
                deadline,
            );
            return Ok(Box::new(ServerFacts::from_proxy(latency.await?)));
        }
        info => info,
    };
    let clock = server_facts::read_clock(&mut connection, deadline).await;
    let trials = permission_trial::try_commands(&mut connection, scripts, probe_key, is_cluster);
    let denied_commands = finish_check(deadline, trials).await;
    let latency =
        server_facts::measure_latency(&mut connection, scripts, probe_key, algorithms, deadline)
            .await;
    let keys = key_sample::sample_keys(&mut connection, scripts, deadline).await;
    Ok(Box::new(ServerFacts {
        is_proxy: false,
        info,
        clock,
        denied_commands,
        latency,
        keys,
    }))
}

/// Runs a check, or a step of one, until the deadline. After the deadline, it sends nothing.
async fn finish_check<T, E: Into<RedisConnectionError>>(
    deadline: Instant,
    check: impl Future<Output = Result<T, E>>,
) -> Result<T, RedisConnectionError> {
    if Instant::now() >= deadline {
        return Err(deadline_error());
    }
    let result = timeout_at(deadline, check).await;
    result
        .map_err(|_elapsed| deadline_error())?
        .map_err(Into::into)
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
