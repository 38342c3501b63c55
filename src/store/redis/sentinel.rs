//! Who is the master now, by asking the sentinels.

use super::RedisSettings;
use super::connect::{self, Address, How, Login};
use super::failure::{Failure, Trouble};
use redis::aio::MultiplexedConnection;
use redis::cmd;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How often a sentinel is asked whether the master is still the same. An old master goes on as if nothing had
/// happened, for some seconds after a failover or as long as it is cut off, and what it counts then is lost. Asking
/// again on a connection that is there costs no more than listening for `+switch-master`, and can't miss it.
const CHECK: Duration = Duration::from_millis(250);

/// The sentinels of one master.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sentinels<'a> {
    pub(super) settings: &'a RedisSettings,
    /// What they call the master.
    pub(super) master: &'a str,
    pub(super) login: &'a Login,
}

impl Sentinels<'_> {
    /// Asks one sentinel after the other, starting with the `first`-th, until one names the master.
    pub(super) async fn master(&self, first: usize) -> Result<Address, Trouble> {
        let mut trouble = Trouble::new(Failure::Connection, "no sentinels to ask");
        for sentinel in self.from(first).take(self.settings.servers.len()) {
            match self.introduced(sentinel).await {
                Ok((_, master)) => return Ok(master),
                Err(error) => trouble = error,
            }
        }
        Err(trouble)
    }

    /// Ends when a sentinel names another master than `known`.
    pub(super) async fn moved(&self, known: &Address, first: usize) {
        for sentinel in self.from(first) {
            sleep(CHECK).await;
            let Ok(((mut connection, _driver), mut master)) = self.introduced(sentinel).await
            else {
                continue;
            };
            while master == *known {
                sleep(CHECK).await;
                match timeout(self.patience(), self.ask(&mut connection)).await {
                    Ok(Ok(now)) => master = now,
                    Ok(Err(_)) | Err(_) => break,
                }
            }
            if master != *known {
                return;
            }
        }
    }

    /// All sentinels, again and again.
    fn from(&self, first: usize) -> impl Iterator<Item = &Address> {
        let sentinels = &self.settings.servers;
        sentinels
            .iter()
            .cycle()
            .skip(first.checked_rem(sentinels.len()).unwrap_or_default())
    }

    /// What one sentinel may take: together they have half of `connect_timeout`, the rest is for the master.
    fn patience(&self) -> Duration {
        let count = u32::try_from(self.settings.servers.len()).unwrap_or(u32::MAX);
        self.settings.connect_timeout / 2 / count.max(1)
    }

    /// A connection to a sentinel, and whom it names.
    async fn introduced(
        &self,
        sentinel: &Address,
    ) -> Result<((MultiplexedConnection, connect::Task), Address), Trouble> {
        let how = How {
            login: self.login,
            database: 0,
            ..self.settings.how()
        };
        let introduced = async {
            let (mut connection, driver) = connect::open(sentinel, how).await?;
            let master = self.ask(&mut connection).await?;
            Ok(((connection, driver), master))
        };
        let introduced = timeout(self.patience(), introduced).await;
        introduced
            .unwrap_or_else(|late| Err(late.into()))
            .map_err(|error: Trouble| {
                Trouble::new(error.failure, format!("sentinel {sentinel}: {}", error.why))
            })
    }

    async fn ask(&self, connection: &mut MultiplexedConnection) -> Result<Address, Trouble> {
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(self.master);
        let answer: Option<(String, u16)> = question.query_async(connection).await?;
        let unknown = || {
            Trouble::new(
                Failure::MasterDown,
                format!("it knows no master {:?}", self.master),
            )
        };
        answer
            .map(|(host, port)| Address::Tcp { host, port })
            .ok_or_else(unknown)
    }
}
