//! Finds the present master by asking the sentinels.

use super::access::{LoginRotation, RedisAccess};
use super::connector::{self, AbortOnDropTask};
use super::error::{RedisConnectionError, RedisErrorKind};
use super::settings::{RedisAddress, RedisSettings, RedisTopology};
use redis::aio::MultiplexedConnection;
use redis::cmd;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How often a sentinel is asked for the present master. An old master accepts commands for some
/// seconds after a failover, or as long as it is partitioned, and its counts are lost. A query on
/// an open connection costs no more than a subscription to `+switch-master`, and can't miss a
/// change.
const MASTER_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The sentinels of one master.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentinelGroup<'a> {
    settings: &'a RedisSettings,
    /// The master's name in the sentinels' configuration.
    master_name: &'a str,
    login: &'a LoginRotation,
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

    /// Asks the sentinels in turn until one names the master.
    pub(super) async fn resolve_master(self) -> Result<RedisAddress, RedisConnectionError> {
        let mut last_error =
            RedisConnectionError::new(RedisErrorKind::Connection, "no sentinels are configured");
        let sentinel_count = self.settings.servers.len();
        for sentinel in self.cycle_sentinels().take(sentinel_count) {
            match self.connect_and_query(sentinel).await {
                Ok((_, master)) => return Ok(master),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// Returns when a sentinel names another master than `known_master`.
    pub(super) async fn wait_for_master_change(self, known_master: &RedisAddress) {
        for sentinel in self.cycle_sentinels() {
            sleep(draw_check_pause()).await;
            let Ok(((mut connection, _driver), mut master)) =
                self.connect_and_query(sentinel).await
            else {
                continue;
            };
            while master == *known_master {
                sleep(draw_check_pause()).await;
                let answer = self.query_master(&mut connection);
                match timeout(self.timeout_per_sentinel(), answer).await {
                    Ok(Ok(current_master)) => master = current_master,
                    Ok(Err(_)) | Err(_) => break,
                }
            }
            if master != *known_master {
                return;
            }
        }
    }

    /// Repeats all sentinels endlessly, starting with a random one.
    fn cycle_sentinels(self) -> impl Iterator<Item = &'a RedisAddress> {
        let sentinels = &self.settings.servers;
        let first_sentinel = fastrand::usize(..sentinels.len().max(1));
        sentinels.iter().cycle().skip(first_sentinel)
    }

    /// The timeout for one sentinel. All together have half of `connect_timeout`; the rest is for
    /// the master.
    fn timeout_per_sentinel(&self) -> Duration {
        let count = u32::try_from(self.settings.servers.len()).unwrap_or(u32::MAX);
        self.settings.connect_timeout / 2 / count.max(1)
    }

    /// Asks one sentinel for the master.
    pub(super) async fn query_sentinel(
        self,
        sentinel: &RedisAddress,
    ) -> Result<RedisAddress, RedisConnectionError> {
        let (_, master) = self.connect_and_query(sentinel).await?;
        Ok(master)
    }

    /// Connects to a sentinel and asks it for the master: with the newest login, or while the
    /// sentinel rejects that with the previous one.
    async fn connect_and_query(
        &self,
        sentinel: &RedisAddress,
    ) -> Result<((MultiplexedConnection, AbortOnDropTask), RedisAddress), RedisConnectionError>
    {
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

    async fn query_master(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<RedisAddress, RedisConnectionError> {
        let mut command = cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(self.master_name);
        let reply: Option<(String, u16)> = command.query_async(connection).await?;
        let unknown = || {
            RedisConnectionError::new(
                RedisErrorKind::MasterDown,
                format!("unknown master name {:?}", self.master_name),
            )
        };
        reply
            .map(|(host, port)| RedisAddress::Tcp { host, port })
            .ok_or_else(unknown)
    }
}

/// Draws the pause before the next check of the master. Its jitter keeps the workers of a fleet
/// from connecting to the next sentinel at the same time.
fn draw_check_pause() -> Duration {
    MASTER_CHECK_INTERVAL.mul_f64(0.75 + fastrand::f64() / 2.0)
}
