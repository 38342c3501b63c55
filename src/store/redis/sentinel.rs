//! Finds the present master by asking the sentinels.
//!
//! Sentinels can name different masters: after a failover some learn of it late, and one that is
//! partitioned never does. All instances have to count in one master, so all sentinels are asked,
//! and [`choose_master`] decides. See `docs/decisions/0022-redis-connections.md`.

use super::access::RedisAccess;
use super::connector;
use super::error::{RedisConnectionError, RedisErrorKind, within};
use super::settings::RedisAddress;
use super::shared_state::SharedRedisState;
use crate::clock::monotonic_now;
use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::cmd;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

/// How often a sentinel is asked for the present master, each in turn. An old master accepts
/// commands for some seconds after a failover, or as long as it is partitioned, and its counts are
/// lost. A query on an open connection costs no more than a subscription to `+switch-master`, and
/// can't miss a change.
const MASTER_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The master that a sentinel names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedMaster {
    pub(super) address: RedisAddress,
    /// The epoch of the sentinel's configuration, which grows with each failover; 0 if the sentinel
    /// does not state it.
    config_epoch: u64,
}

/// A sentinel, and its last answer.
struct SentinelPoll<'a> {
    sentinel: &'a RedisAddress,
    /// `None` after a failed query.
    connection: Option<(MultiplexedConnection, AbortOnDropHandle<()>)>,
    /// Stays after a failed query, so that a single sentinel left over does not decide alone.
    answer: Option<NamedMaster>,
}

/// The master to use: that of the newest configuration, of equal ones that of most sentinels, of
/// equally many the first by address. All instances choose the same from the same answers.
pub(super) fn choose_master<'n>(
    answers: impl Iterator<Item = &'n NamedMaster>,
) -> Option<&'n RedisAddress> {
    let mut sentinel_counts: HashMap<(u64, &RedisAddress), usize> = HashMap::new();
    for named in answers {
        let candidate = (named.config_epoch, &named.address);
        *sentinel_counts.entry(candidate).or_default() += 1;
    }
    let best = sentinel_counts
        .into_iter()
        .max_by_key(|((epoch, address), count)| (*epoch, *count, Reverse(address.to_string())))?;
    Some(best.0.1)
}

/// Asks all sentinels, and chooses a master from those that answer.
pub(super) async fn resolve_master(
    shared: &SharedRedisState,
    access: &RedisAccess,
) -> Result<RedisAddress, RedisConnectionError> {
    let mut polls = new_polls(access);
    let errors = join_all(polls.iter_mut().map(|poll| poll.ask(access))).await;
    let last_error = errors.into_iter().filter_map(Result::err).next_back();
    choose_and_record(&polls, shared).cloned().ok_or_else(|| {
        last_error.unwrap_or_else(|| {
            let message = "no sentinels are configured";
            RedisConnectionError::new(RedisErrorKind::Connection, message)
        })
    })
}

/// Returns when the sentinels name another master than `known_master`. Keeps a connection to each
/// of them.
pub(super) async fn wait_for_master_change(
    shared: &SharedRedisState,
    access: &RedisAccess,
    known_master: &RedisAddress,
) {
    let mut polls = new_polls(access);
    join_all(polls.iter_mut().map(|poll| poll.ask(access))).await;
    // Starts anywhere, so that the workers of a fleet ask different sentinels.
    for index in (0..polls.len()).cycle().skip(fastrand::usize(..64)) {
        let master = choose_and_record(&polls, shared);
        if master.is_some_and(|master| master != known_master) {
            return;
        }
        // Jitter keeps the workers of a fleet from connecting to the next sentinel at once.
        sleep(MASTER_CHECK_INTERVAL.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
        if let Some(poll) = polls.get_mut(index) {
            // Without an answer, the previous one counts.
            drop(poll.ask(access).await);
        }
    }
}

fn new_polls(access: &RedisAccess) -> Vec<SentinelPoll<'_>> {
    let polls = access.settings.servers.iter().map(|sentinel| SentinelPoll {
        sentinel,
        connection: None,
        answer: None,
    });
    polls.collect()
}

/// The timeout for one sentinel. All are asked at once; the rest of `connect_timeout` is for the
/// master.
fn timeout_per_sentinel(access: &RedisAccess) -> Duration {
    access.settings.connect_timeout / 2
}

impl SentinelPoll<'_> {
    /// Asks the sentinel on its connection, or on a new one.
    async fn ask(&mut self, access: &RedisAccess) -> Result<(), RedisConnectionError> {
        let (connection, master) = match self.connection.take() {
            Some((mut connection, driver)) => {
                let query = query_master(access, &mut connection);
                let master = within(timeout_per_sentinel(access), query).await?;
                ((connection, driver), master)
            }
            None => connect_and_query(access, self.sentinel).await?,
        };
        self.connection = Some(connection);
        self.answer = Some(master);
        Ok(())
    }
}

/// Connects to a sentinel and asks it for the master: with the newest login, or while the sentinel
/// rejects that with the previous one.
pub(super) async fn connect_and_query(
    access: &RedisAccess,
    sentinel: &RedisAddress,
) -> Result<((MultiplexedConnection, AbortOnDropHandle<()>), NamedMaster), RedisConnectionError> {
    let attempt = |login| async move {
        let connected = async {
            let (mut connection, driver) =
                connector::open_connection(sentinel, &access.settings, login, 0).await?;
            let master = query_master(access, &mut connection).await?;
            Ok(((connection, driver), master))
        };
        let connected = within(timeout_per_sentinel(access), connected).await;
        connected.map_err(|error: RedisConnectionError| {
            let message = format!("sentinel {sentinel}: {}", error.message);
            RedisConnectionError::new(error.kind, message)
        })
    };
    let (connected, login) = access.sentinel_login.try_logins(attempt).await?;
    access.sentinel_login.record_accepted(login);
    Ok(connected)
}

/// The epoch is read first: an address that is newer than its epoch is corrected by the next query,
/// and an address that is older could win by the epoch of a newer one.
async fn query_master(
    access: &RedisAccess,
    connection: &mut MultiplexedConnection,
) -> Result<NamedMaster, RedisConnectionError> {
    let name = access.settings.sentinel_master();
    let mut command = cmd("SENTINEL");
    command.arg("MASTER").arg(name);
    let details = command.query_async::<HashMap<String, String>>(connection);
    let details = match details.await {
        Ok(details) => details,
        // An error reply: the user may lack the permission.
        Err(error) if error.code().is_some() => HashMap::new(),
        Err(error) => return Err(error.into()),
    };
    let config_epoch = details.get("config-epoch").map(|epoch| epoch.parse());
    let mut command = cmd("SENTINEL");
    command.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    let reply: Option<(String, u16)> = command.query_async(connection).await?;
    let (host, port) = reply.ok_or_else(|| {
        let message = format!("unknown master name {:?}", name.unwrap_or_default());
        RedisConnectionError::new(RedisErrorKind::MasterDown, message)
    })?;
    Ok(NamedMaster {
        address: RedisAddress::Tcp { host, port },
        config_epoch: config_epoch.and_then(Result::ok).unwrap_or_default(),
    })
}

/// Chooses a master from the last answers, and records if answering sentinels name others.
fn choose_and_record<'p>(
    polls: &'p [SentinelPoll<'_>],
    shared: &SharedRedisState,
) -> Option<&'p RedisAddress> {
    let master = choose_master(polls.iter().filter_map(|poll| poll.answer.as_ref()))?;
    let answering = polls.iter().filter(|poll| poll.connection.is_some());
    let answers = answering.filter_map(|poll| Some((poll.sentinel, poll.answer.as_ref()?)));
    if answers.clone().all(|(_, named)| named.address == *master) {
        return Some(master);
    }
    let count = &shared.sentinel_disagreement_count;
    count.fetch_add(1, Ordering::Relaxed);
    let log = &shared.sentinel_disagreement_log;
    if let Some(checks) = log.record_occurrence(monotonic_now()) {
        let answers = answers.map(|(sentinel, named)| {
            let NamedMaster {
                address,
                config_epoch,
            } = named;
            format!("{sentinel}: {address} (epoch {config_epoch})")
        });
        let answers = answers.collect::<Vec<_>>().join(", ");
        tracing::warn!(%master, answers, checks, "the sentinels name different masters");
    }
    Some(master)
}

#[cfg(test)]
mod tests {
    use super::{NamedMaster, choose_master};
    use crate::store::redis::RedisAddress;

    /// The master that sentinels choose, whatever the order of their answers.
    fn choose(answers: &[(&str, u64)]) -> String {
        let named = answers.iter().map(|(host, config_epoch)| NamedMaster {
            address: RedisAddress::Tcp {
                host: (*host).to_owned(),
                port: 6379,
            },
            config_epoch: *config_epoch,
        });
        let mut named: Vec<NamedMaster> = named.collect();
        let first = choose_master(named.iter()).unwrap().to_string();
        named.reverse();
        assert_eq!(choose_master(named.iter()).unwrap().to_string(), first);
        first
    }

    #[test]
    fn the_newest_epoch_wins_then_the_majority_then_the_address() {
        assert_eq!(choose(&[("a", 1), ("a", 1), ("b", 2)]), "b:6379");
        assert_eq!(choose(&[("a", 2), ("b", 1), ("b", 1)]), "a:6379");
        assert_eq!(choose(&[("a", 0), ("b", 0), ("b", 0)]), "b:6379");
        assert_eq!(choose(&[("a", 3), ("a", 3), ("b", 3)]), "a:6379");
        assert_eq!(choose(&[("b", 0), ("a", 0)]), "a:6379");
        assert_eq!(
            choose(&[("c", 1), ("b", 2), ("a", 2), ("b", 2), ("c", 1)]),
            "b:6379"
        );
        assert_eq!(choose_master([].into_iter()), None);
    }
}
