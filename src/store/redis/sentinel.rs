//! Finds the present master by asking the sentinels.
//!
//! Sentinels can name different masters: after a failover some learn of it late, and one that is
//! partitioned never does. All instances have to count in one master, so all sentinels are asked,
//! and [`choose_master`] decides. See `docs/decisions/0022-redis-connections.md`.

use super::access::{LoginRotation, RedisAccess};
use super::connector::{self, AbortOnDropTask};
use super::error::{RedisConnectionError, RedisErrorKind};
use super::settings::{RedisAddress, RedisSettings, RedisTopology};
use crate::telemetry::LogThrottle;
use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::cmd;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How often a sentinel is asked for the present master, each in turn. An old master accepts
/// commands for some seconds after a failover, or as long as it is partitioned, and its counts are
/// lost. A query on an open connection costs no more than a subscription to `+switch-master`, and
/// can't miss a change.
const MASTER_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Minimum time between log lines about sentinels that disagree.
const DISAGREEMENT_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The sentinels of one master.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentinelGroup<'a> {
    settings: &'a RedisSettings,
    /// The master's name in the sentinels' configuration.
    master_name: &'a str,
    login: &'a LoginRotation,
}

/// The master that a sentinel names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedMaster {
    pub(super) address: RedisAddress,
    /// The epoch of the sentinel's configuration, which grows with each failover; 0 if the sentinel
    /// does not state it.
    config_epoch: u64,
}

/// Checks that found sentinels with different masters.
#[derive(Debug)]
pub(super) struct SentinelDisagreements {
    count: AtomicU64,
    log_throttle: LogThrottle,
}

/// A sentinel, and its last answer.
struct SentinelPoll<'a> {
    sentinel: &'a RedisAddress,
    /// `None` after a failed query.
    connection: Option<(MultiplexedConnection, AbortOnDropTask)>,
    /// Stays after a failed query, so that a single sentinel left over does not decide alone.
    answer: Option<NamedMaster>,
}

impl Default for SentinelDisagreements {
    fn default() -> Self {
        Self {
            count: AtomicU64::new(0),
            log_throttle: LogThrottle::new(DISAGREEMENT_LOG_INTERVAL),
        }
    }
}

impl SentinelDisagreements {
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Records a check whose sentinels name different masters.
    fn record_check(&self, answers: &[(&RedisAddress, &NamedMaster)], master: &RedisAddress) {
        let mut named = answers.iter().map(|(_, named)| &named.address);
        if named.all(|named| named == master) {
            return;
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let now = std::time::Instant::now();
        if let Some(checks) = self.log_throttle.record_occurrence(now) {
            let answers: Vec<String> = answers
                .iter()
                .map(|(sentinel, named)| {
                    format!(
                        "{sentinel}: {} (epoch {})",
                        named.address, named.config_epoch
                    )
                })
                .collect();
            let answers = answers.join(", ");
            tracing::warn!(%master, answers, checks, "the sentinels name different masters");
        }
    }
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

impl<'a> SentinelGroup<'a> {
    /// The configured sentinels. Returns `None` for other topologies.
    pub(super) fn from_access(access: &'a RedisAccess) -> Option<Self> {
        match &access.settings.topology {
            RedisTopology::Sentinel { master, .. } => Some(Self {
                settings: &access.settings,
                master_name: master,
                login: &access.sentinel_login,
            }),
            RedisTopology::Standalone | RedisTopology::Cluster => None,
        }
    }

    /// Asks all sentinels, and chooses a master from those that answer.
    pub(super) async fn resolve_master(
        self,
        disagreements: &SentinelDisagreements,
    ) -> Result<RedisAddress, RedisConnectionError> {
        let mut polls = self.new_polls();
        let errors = join_all(polls.iter_mut().map(|poll| self.poll_sentinel(poll))).await;
        let last_error = errors.into_iter().filter_map(Result::err).next_back();
        choose_and_record(&polls, disagreements)
            .cloned()
            .ok_or_else(|| {
                last_error.unwrap_or_else(|| {
                    let message = "no sentinels are configured";
                    RedisConnectionError::new(RedisErrorKind::Connection, message)
                })
            })
    }

    /// Returns when the sentinels name another master than `known_master`. Keeps a connection to
    /// each of them.
    pub(super) async fn wait_for_master_change(
        self,
        known_master: &RedisAddress,
        disagreements: &SentinelDisagreements,
    ) {
        let mut polls = self.new_polls();
        join_all(polls.iter_mut().map(|poll| self.poll_sentinel(poll))).await;
        // Starts anywhere, so that the workers of a fleet ask different sentinels.
        for index in (0..polls.len()).cycle().skip(fastrand::usize(..64)) {
            let master = choose_and_record(&polls, disagreements);
            if master.is_some_and(|master| master != known_master) {
                return;
            }
            // Jitter keeps the workers of a fleet from connecting to the next sentinel at once.
            sleep(MASTER_CHECK_INTERVAL.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            if let Some(poll) = polls.get_mut(index) {
                // Without an answer, the previous one counts.
                drop(self.poll_sentinel(poll).await);
            }
        }
    }

    fn new_polls(self) -> Vec<SentinelPoll<'a>> {
        let polls = self.settings.servers.iter().map(|sentinel| SentinelPoll {
            sentinel,
            connection: None,
            answer: None,
        });
        polls.collect()
    }

    /// The timeout for one sentinel. All are asked at once; the rest of `connect_timeout` is for
    /// the master.
    fn timeout_per_sentinel(&self) -> Duration {
        self.settings.connect_timeout / 2
    }

    /// Asks one sentinel for the master.
    pub(super) async fn query_sentinel(
        self,
        sentinel: &RedisAddress,
    ) -> Result<NamedMaster, RedisConnectionError> {
        let (_, master) = self.connect_and_query(sentinel).await?;
        Ok(master)
    }

    /// Asks a sentinel on its connection, or on a new one.
    async fn poll_sentinel(&self, poll: &mut SentinelPoll<'a>) -> Result<(), RedisConnectionError> {
        poll.answer = Some(match poll.connection.take() {
            Some((mut connection, driver)) => {
                let query = self.query_master(&mut connection);
                let master = timeout(self.timeout_per_sentinel(), query).await??;
                poll.connection = Some((connection, driver));
                master
            }
            None => {
                let (connection, master) = self.connect_and_query(poll.sentinel).await?;
                poll.connection = Some(connection);
                master
            }
        });
        Ok(())
    }

    /// Connects to a sentinel and asks it for the master: with the newest login, or while the
    /// sentinel rejects that with the previous one.
    async fn connect_and_query(
        &self,
        sentinel: &RedisAddress,
    ) -> Result<((MultiplexedConnection, AbortOnDropTask), NamedMaster), RedisConnectionError> {
        let attempt = |login| async move {
            let connected = async {
                let (mut connection, driver) =
                    connector::open_connection(sentinel, self.settings, login, 0).await?;
                let master = self.query_master(&mut connection).await?;
                Ok(((connection, driver), master))
            };
            let connected = timeout(self.timeout_per_sentinel(), connected).await;
            connected
                .unwrap_or_else(|elapsed| Err(elapsed.into()))
                .map_err(|error: RedisConnectionError| {
                    let message = format!("sentinel {sentinel}: {}", error.message);
                    RedisConnectionError::new(error.kind, message)
                })
        };
        let (connected, login) = self.login.try_logins(attempt).await?;
        self.login.record_accepted(login);
        Ok(connected)
    }

    /// The epoch is read first: an address that is newer than its epoch is corrected by the next
    /// query, and an address that is older could win by the epoch of a newer one.
    async fn query_master(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<NamedMaster, RedisConnectionError> {
        let mut command = cmd("SENTINEL");
        command.arg("MASTER").arg(self.master_name);
        let details = command.query_async::<HashMap<String, String>>(connection);
        let details = match details.await {
            Ok(details) => details,
            // An error reply: the user may lack the permission.
            Err(error) if error.code().is_some() => HashMap::new(),
            Err(error) => return Err(error.into()),
        };
        let config_epoch = details
            .get("config-epoch")
            .and_then(|epoch| epoch.parse().ok());
        let mut command = cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(self.master_name);
        let reply: Option<(String, u16)> = command.query_async(connection).await?;
        let unknown = || {
            RedisConnectionError::new(
                RedisErrorKind::MasterDown,
                format!("unknown master name {:?}", self.master_name),
            )
        };
        let (host, port) = reply.ok_or_else(unknown)?;
        Ok(NamedMaster {
            address: RedisAddress::Tcp { host, port },
            config_epoch: config_epoch.unwrap_or_default(),
        })
    }
}

/// Chooses a master from the last answers.
fn choose_and_record<'p>(
    polls: &'p [SentinelPoll<'_>],
    disagreements: &SentinelDisagreements,
) -> Option<&'p RedisAddress> {
    let master = choose_master(polls.iter().filter_map(|poll| poll.answer.as_ref()))?;
    let answering = polls.iter().filter(|poll| poll.connection.is_some());
    let answers: Vec<(&RedisAddress, &NamedMaster)> = answering
        .filter_map(|poll| Some((poll.sentinel, poll.answer.as_ref()?)))
        .collect();
    disagreements.record_check(&answers, master);
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
