//! Errors of Redis, by kind. The names of the kinds are stable.

use crate::tls;
use redis::{ErrorKind, RedisError, ServerErrorKind};
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use strum::{IntoStaticStr, VariantNames};
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tokio_rustls::rustls;

/// The remedy of a user that may not run a command.
pub const PERMISSION_REMEDY: &str = "the user lacks a permission: `tidegate doctor` lists which, ACL LOG of the server shows what it refused";

/// Why Redis gave no useful reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum RedisErrorKind {
    /// No reply within the deadline. The command may have been executed.
    Timeout,
    /// Not connected, or the connection broke.
    Connection,
    /// The address refuses connections.
    #[strum(serialize = "refused")]
    ConnectionRefused,
    /// The name does not resolve.
    Dns,
    /// A certificate was rejected, or the server does not speak TLS.
    Tls,
    /// The server is a replica.
    ReadOnly,
    /// The server is loading its data from disk.
    Loading,
    MasterDown,
    ClusterDown,
    /// The slot moves, and the keys of the call are on two nodes. Calls with one key work.
    TryAgain,
    /// The server redirects to another server: it is in a cluster, and the topology is not
    /// `cluster`.
    Moved,
    /// The user or password is wrong, missing or lacks a permission.
    NoAuth,
    #[strum(serialize = "oom")]
    OutOfMemory,
    /// Redis can't persist or replicate, and is configured to reject writes then.
    #[strum(serialize = "misconf")]
    Misconfigured,
    /// Another script has been running for too long.
    Busy,
    /// The n-th key of the call, from 1, holds a foreign value. Only this key is affected.
    WrongType(usize),
    /// The clock of the server is in none of the periods of a calendar that the proxy named: it
    /// differs from the proxy's clock by more than a period. Only limits per period are affected.
    #[strum(serialize = "period")]
    WrongPeriod,
    /// The reply is invalid.
    #[strum(serialize = "reply")]
    InvalidReply,
    /// Redis has not cached the script. This is an error only if loading the script again fails.
    NoScript,
    Other,
}

/// Why a server gave no useful reply: the kind, and the message of the server or the operating
/// system.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Redis gave no answer ({}){}", kind.into_str(), self.text_after_kind())]
pub struct RedisConnectionError {
    pub kind: RedisErrorKind,
    pub message: String,
}

impl RedisConnectionError {
    pub(super) fn new(kind: RedisErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// The cause in the operator's terms, and what to do about it.
    pub fn remedy(&self) -> &'static str {
        let has = |words: &str| self.message.contains(words);
        match self.kind {
            RedisErrorKind::NoAuth => self.login_remedy(),
            RedisErrorKind::Dns => "check the host name in store.redis.url",
            RedisErrorKind::ConnectionRefused => {
                "check host and port, or path, in store.redis.url, and that the server runs"
            }
            RedisErrorKind::Connection if has("max number of clients") => {
                "the server has maxclients connections: raise it to at least 2 × instances × workers + 100"
            }
            RedisErrorKind::Connection => {
                "check that the server runs, and its log; a port for TLS also closes connections without TLS: use rediss:// there"
            }
            RedisErrorKind::Tls if has("corrupt message") => {
                "the port does not speak TLS: use redis://, or the server's tls-port"
            }
            RedisErrorKind::Tls if has("set cert and key") => {
                "set store.redis.cert and store.redis.key to a client certificate that the server trusts"
            }
            RedisErrorKind::Tls => {
                "check store.redis.ca (the certificate of the issuer, or the server's own), and the names in the certificate"
            }
            RedisErrorKind::Timeout if has("TLS handshake") => {
                "a port without TLS does not answer a handshake: use redis://, or the server's tls-port; otherwise check \
                 that the server runs"
            }
            RedisErrorKind::Timeout => {
                "check that the server runs and that no firewall drops packets; SLOWLOG shows slow commands"
            }
            RedisErrorKind::ReadOnly => {
                "the server is a replica: set url to the master, or use topology = \"sentinel\""
            }
            RedisErrorKind::MasterDown => {
                "check sentinel_master, and that the replica reaches its master"
            }
            RedisErrorKind::Loading => "wait until the server has loaded its data",
            RedisErrorKind::Busy => "another script runs too long: find its client, or SCRIPT KILL",
            RedisErrorKind::OutOfMemory => {
                "raise maxmemory: the server is full and accepts no write"
            }
            RedisErrorKind::Misconfigured => {
                "check the server's disk, log and replicas: it rejects writes because it cannot persist or replicate"
            }
            RedisErrorKind::ClusterDown => {
                "some slots of the cluster have no master: restore the missing masters, or set \
                 cluster-require-full-coverage no; a cluster also needs topology = \"cluster\""
            }
            RedisErrorKind::Moved => "the server is in a cluster: set topology = \"cluster\"",
            RedisErrorKind::InvalidReply => {
                "check that store.redis.url is the address of Redis, not of another service"
            }
            _ if has("unknown command") && has("SENTINEL") => {
                "the server is no sentinel: set url to the sentinels (often port 26379), or topology = \"standalone\""
            }
            // Envoy; twemproxy, which states the error of its socket.
            _ if [
                "upstream failure",
                "no upstream host",
                "Connection refused",
                "Host is down",
            ]
            .into_iter()
            .any(has) =>
            {
                "this looks like a Redis proxy that does not reach Redis: check the server behind it"
            }
            _ if has("cluster support disabled") => {
                "the server is not in a cluster: set topology = \"standalone\""
            }
            _ if has("DB index") => {
                "the server has no database of this number: change it in store.redis.url, or raise databases"
            }
            _ if has("SELECT is not allowed") => {
                "a server in a cluster has only database 0: set topology = \"cluster\" and remove the number from \
                 store.redis.url"
            }
            _ => "see the server's log",
        }
    }

    /// [`Self::remedy`] if Redis denies the login or a command.
    fn login_remedy(&self) -> &'static str {
        let has = |words: &str| self.message.contains(words);
        if has("NOAUTH") || has("unauthenticated") {
            "Redis wants a password: set store.redis.password_file, and username unless the user is \"default\""
        } else if has("without any password") {
            "the user \"default\" of the server has no password: remove store.redis.password_file, or set requirepass"
        } else if has("WRONGPASS") || has("invalid password") {
            "the server knows no such user, or its password is another one: check store.redis.username and password_file"
        } else if has("DENIED") {
            "the server is in protected mode: without a password it serves only its own machine; set requirepass \
             there, and store.redis.password_file here"
        } else {
            PERMISSION_REMEDY
        }
    }

    fn text_after_kind(&self) -> String {
        if self.message == self.kind.into_str() {
            String::new()
        } else {
            format!(": {}", self.message)
        }
    }
}

impl From<RedisErrorKind> for RedisConnectionError {
    fn from(kind: RedisErrorKind) -> Self {
        let message = match kind {
            RedisErrorKind::Timeout => "no reply before the timeout",
            RedisErrorKind::Connection => "the connection was closed",
            _ => kind.into_str(),
        };
        Self::new(kind, message)
    }
}

impl From<Elapsed> for RedisConnectionError {
    fn from(elapsed: Elapsed) -> Self {
        RedisErrorKind::from(elapsed).into()
    }
}

impl From<io::Error> for RedisConnectionError {
    fn from(error: io::Error) -> Self {
        Self::from(RedisError::from(error))
    }
}

impl From<RedisError> for RedisConnectionError {
    fn from(error: RedisError) -> Self {
        let tls_remedy = find_tls_error(&error).and_then(tls::suggest_remedy);
        let message = match (tls_remedy, error.code(), error.detail()) {
            (Some(remedy), ..) => format!("{error}; {remedy}"),
            _ if error.kind() == ErrorKind::Parse => {
                "the answer is not of the Redis protocol".to_owned()
            }
            // As Redis wrote it.
            (None, Some(code), Some(detail)) => format!("{code} {detail}"),
            _ => error.to_string(),
        };
        Self::new(RedisErrorKind::from(&error), message)
    }
}

impl RedisErrorKind {
    /// Whether a new connection may help: the old one is closed, out of step or leads to the wrong
    /// server.
    pub(super) fn requires_reconnect(self) -> bool {
        matches!(
            self,
            Self::Connection
                | Self::ReadOnly
                | Self::Loading
                | Self::MasterDown
                | Self::NoAuth
                | Self::InvalidReply
        )
    }

    /// Classifies the text of an error. Redis 6 puts the position in the script before an error
    /// that a script met. If the script did not catch it, the position and the name of the script
    /// precede it again.
    pub(super) fn from_error_text(text: &str) -> Self {
        let has_location = text.starts_with('@') || text.starts_with("ERR Error running script");
        let without_location = text.rsplit_once(": -").or_else(|| text.rsplit_once(": "));
        let text = without_location
            .filter(|_| has_location)
            .map_or(text, |(_, text)| text);
        let (code, detail) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        match code {
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "MASTERDOWN" => Self::MasterDown,
            "CLUSTERDOWN" => Self::ClusterDown,
            "TRYAGAIN" => Self::TryAgain,
            "MOVED" | "ASK" | "CROSSSLOT" => Self::Moved,
            "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" => Self::NoAuth,
            "OOM" => Self::OutOfMemory,
            "MISCONF" | "NOREPLICAS" => Self::Misconfigured,
            "BUSY" => Self::Busy,
            "PERIOD" => Self::WrongPeriod,
            "FOREIGN" => Self::WrongType(detail.parse().unwrap_or(0)),
            // Redis reports this for the keys of the membership script.
            "WRONGTYPE" => Self::WrongType(0),
            // Redis before 7.2 has no error code for this inside scripts.
            _ if text.contains("The user executing the script can't") => Self::NoAuth,
            // Redis reads no long argument from a client that has not logged in.
            _ if detail.contains("unauthenticated") => Self::NoAuth,
            // The server closes the connection then, so the reply is not always read.
            _ if detail.starts_with("max number of clients") => Self::Connection,
            _ => Self::Other,
        }
    }
}

impl From<Elapsed> for RedisErrorKind {
    fn from(_: Elapsed) -> Self {
        Self::Timeout
    }
}

impl From<&RedisError> for RedisErrorKind {
    fn from(error: &RedisError) -> Self {
        if error.is_connection_refusal() {
            return Self::ConnectionRefused;
        }
        match error.kind() {
            ErrorKind::AuthenticationFailed => return Self::NoAuth,
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => return Self::InvalidReply,
            ErrorKind::Io if find_tls_error(error).is_some() => return Self::Tls,
            ErrorKind::Io if error.is_timeout() => return Self::Timeout,
            ErrorKind::Io => return Self::Connection,
            ErrorKind::Server(ServerErrorKind::NoScript) => return Self::NoScript,
            _ => {}
        }
        Self::from_error_text(
            &[error.code(), error.detail()]
                .map(Option::unwrap_or_default)
                .join(" "),
        )
    }
}

/// Runs an attempt for at most `max_time`.
pub(super) async fn within<T, E: From<Elapsed>>(
    max_time: Duration,
    attempt: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    timeout(max_time, attempt).await?
}

/// Finds the error of rustls that caused an error: it is wrapped in an I/O error.
fn find_tls_error(error: &RedisError) -> Option<&rustls::Error> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let io_error: Option<&io::Error> = error.downcast_ref().or_else(|| {
            let shared = error.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
            shared.downcast_ref()
        });
        let inner = io_error.and_then(io::Error::get_ref);
        if let Some(tls_error) = inner.and_then(|inner| inner.downcast_ref()) {
            return Some(tls_error);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::Value;

    #[test]
    fn a_server_at_its_client_limit_closes_the_connection() {
        let kind = RedisErrorKind::from_error_text("ERR max number of clients reached");
        assert_eq!(kind, RedisErrorKind::Connection);
    }

    /// Errors of commands in a script, as Redis 6.2 and 7 word them; errors of the script call;
    /// and errors of the script itself.
    #[test]
    fn classifies_script_errors_with_and_without_a_source_location() {
        let classify = |text: &str| {
            let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
            let Value::ServerError(error) = reply else {
                panic!("{reply:?}")
            };
            (
                RedisErrorKind::from_error_text(text),
                RedisErrorKind::from(&RedisError::from(error)),
            )
        };
        for (text, failure) in [
            (
                "@user_script: 9: -OOM command not allowed when used memory > 'maxmemory'.  ",
                RedisErrorKind::OutOfMemory,
            ),
            (
                "@user_script: 9: -READONLY You can't write against a read only replica.  ",
                RedisErrorKind::ReadOnly,
            ),
            (
                "@user_script: 12: -MISCONF Redis is configured to save RDB snapshots, but it is currently not able to \
                 persist on disk.",
                RedisErrorKind::Misconfigured,
            ),
            (
                "@user_script: 3: -NOREPLICAS Not enough good replicas to write.",
                RedisErrorKind::Misconfigured,
            ),
            (
                "ERR Error running script (call to f_d1b3bbfd2f5b5f0ad2cb1b1e3b4a52e93b6eb1f5): @user_script:140: \
                 @user_script: 140: -READONLY You can't write against a read only replica.  ",
                RedisErrorKind::ReadOnly,
            ),
            (
                "@user_script: 5: The user executing the script can't run this command or subcommand",
                RedisErrorKind::NoAuth,
            ),
            (
                "ERR The user executing the script can't run this command or subcommand",
                RedisErrorKind::NoAuth,
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'. script: d1b3bb, on @user_script:9.",
                RedisErrorKind::OutOfMemory,
            ),
            (
                "NOPERM this user has no permissions to run the 'evalsha' command",
                RedisErrorKind::NoAuth,
            ),
            ("FOREIGN 3", RedisErrorKind::WrongType(3)),
            ("PERIOD the clocks differ", RedisErrorKind::WrongPeriod),
            (
                "@user_script:7: attempt to index a nil value",
                RedisErrorKind::Other,
            ),
            ("ERR unknown command", RedisErrorKind::Other),
        ] {
            assert_eq!(classify(text), (failure, failure), "{text}");
        }
    }
}
