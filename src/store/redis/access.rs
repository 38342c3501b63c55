//! Logins and TLS settings in use, which are replaced when their files change.
//!
//! [Decision 22](../../../docs/decisions/0022-redis-connections.md) gives the reasons.

use super::circuit_breaker::PROBLEM_LOG_INTERVAL;
use super::error::{RedisConnectionError, RedisErrorKind};
use super::settings::{RedisCredentials, RedisSettings, RedisTopology};
use crate::clock::monotonic_now;
use crate::telemetry::LogThrottle;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// The settings with the newest logins and TLS, and the logins that worked before.
#[derive(Debug)]
pub(super) struct RedisAccess {
    pub(super) settings: RedisSettings,
    /// The login for the servers that hold counters.
    pub(super) server_login: LoginRotation,
    /// The login for the sentinels.
    pub(super) sentinel_login: LoginRotation,
    /// Limits trials of a new login to one at a time, so that a fleet whose file changes before the
    /// server does not flood the server with connections.
    pub(super) trial_permit: Semaphore,
}

/// The newest login, and the one that worked before.
#[derive(Debug)]
pub(super) struct LoginRotation {
    newest: RedisCredentials,
    /// Credentials that worked before the newest ones. Used while a server rejects these.
    previous: Option<RedisCredentials>,
    /// The last two credentials that worked, the newest one last.
    accepted_logins: Mutex<Vec<RedisCredentials>>,
    rejection_log: LogThrottle,
}

impl RedisAccess {
    pub(super) fn new(settings: RedisSettings) -> Self {
        Self {
            server_login: LoginRotation::new(settings.credentials.clone()),
            sentinel_login: LoginRotation::new(sentinel_credentials(&settings)),
            trial_permit: Semaphore::new(1),
            settings,
        }
    }

    /// The access after `newer` was loaded: its logins and TLS, and everything else unchanged.
    /// Returns `None` if nothing changes.
    pub(super) fn with_logins_of(&self, newer: &RedisSettings) -> Option<Self> {
        let mut settings = RedisSettings {
            credentials: newer.credentials.clone(),
            tls: newer.tls.clone(),
            ..self.settings.clone()
        };
        if let RedisTopology::Sentinel { credentials, .. } = &mut settings.topology {
            *credentials = sentinel_credentials(newer);
        }
        (settings != self.settings).then(|| Self {
            server_login: self.server_login.rotate(settings.credentials.clone()),
            sentinel_login: self.sentinel_login.rotate(sentinel_credentials(&settings)),
            trial_permit: Semaphore::new(1),
            settings,
        })
    }
}

/// The login for the sentinels. Empty for other topologies.
fn sentinel_credentials(settings: &RedisSettings) -> RedisCredentials {
    match &settings.topology {
        RedisTopology::Sentinel { credentials, .. } => credentials.clone(),
        RedisTopology::Standalone | RedisTopology::Cluster => RedisCredentials::default(),
    }
}

impl LoginRotation {
    fn new(newest: RedisCredentials) -> Self {
        Self {
            newest,
            previous: None,
            accepted_logins: Mutex::default(),
            rejection_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
        }
    }

    /// The logins after `newest` was loaded.
    fn rotate(&self, newest: RedisCredentials) -> Self {
        let accepted_logins = self.accepted_logins.lock().clone();
        let mut working = accepted_logins.iter().rev();
        Self {
            previous: working.find(|login| **login != newest).cloned(),
            accepted_logins: Mutex::new(accepted_logins),
            ..Self::new(newest)
        }
    }

    /// Runs an attempt with the newest login, and if that is rejected with the previous one.
    /// Returns the credentials that worked, too.
    pub(super) async fn try_logins<'a, T, F>(
        &'a self,
        attempt: impl Fn(&'a RedisCredentials) -> F,
    ) -> Result<(T, &'a RedisCredentials), RedisConnectionError>
    where
        F: Future<Output = Result<T, RedisConnectionError>>,
    {
        let error = match attempt(&self.newest).await {
            Ok(value) => return Ok((value, &self.newest)),
            Err(error) => error,
        };
        if error.kind == RedisErrorKind::NoAuth
            && let Some(previous) = &self.previous
            && let Ok(value) = attempt(previous).await
        {
            self.log_rejection(&error);
            return Ok((value, previous));
        }
        // The first error names the credentials that the operator has to correct.
        Err(error)
    }

    /// Records that credentials work: a server ran the commands that tidegate needs.
    pub(super) fn record_accepted(&self, login: &RedisCredentials) {
        let mut logins = self.accepted_logins.lock();
        if *login != self.newest || logins.last() == Some(login) {
            return;
        }
        if !logins.is_empty() {
            tracing::info!("redis accepted the new login");
        }
        logins.push(login.clone());
        let outdated = logins.len().saturating_sub(2);
        logins.drain(..outdated);
    }

    /// Logs that a server rejected the newest credentials while the previous ones work.
    pub(super) fn log_rejection(&self, error: &RedisConnectionError) {
        let is_due = self.rejection_log.record_occurrence(monotonic_now());
        if is_due.is_some() {
            let (kind, reason) = (error.kind.into_str(), &error.message);
            tracing::warn!(
                kind,
                reason,
                "redis rejected the new login; connections keep the previous one"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemorySettings;
    use crate::store::redis::{RedisDialer, RedisPassword};
    use std::time::Duration;

    fn make_settings(password: &str) -> RedisSettings {
        RedisSettings {
            credentials: RedisCredentials {
                username: None,
                password: Some(RedisPassword::new(password.to_owned())),
            },
            topology: RedisTopology::Standalone,
            servers: Vec::new(),
            database: 0,
            tls: None,
            key_prefix: "t".to_owned(),
            initial_instances: 1,
            instance_counter_bounds: MemorySettings {
                max_keys: 1,
                max_bytes: 1,
            },
            state_dir: None,
            timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            breaker_failures: 5,
            probe_interval: Duration::from_millis(500),
            dialer: RedisDialer::Network,
        }
    }

    fn previous_password(access: &RedisAccess) -> Option<&str> {
        let login = access.server_login.previous.as_ref()?;
        login.password.as_ref().map(RedisPassword::expose)
    }

    #[test]
    fn the_previous_login_is_the_last_that_a_server_accepted() {
        let first = RedisAccess::new(make_settings("a"));
        assert!(first.with_logins_of(&make_settings("a")).is_none());
        first
            .server_login
            .record_accepted(&first.settings.credentials);
        let second = first.with_logins_of(&make_settings("b")).unwrap();
        assert_eq!(previous_password(&second), Some("a"));
        // No server has accepted "b".
        let third = second.with_logins_of(&make_settings("c")).unwrap();
        assert_eq!(previous_password(&third), Some("a"));
        let back = third.with_logins_of(&make_settings("a")).unwrap();
        assert_eq!(previous_password(&back), None);
        // "a" worked before.
        let fourth = back.with_logins_of(&make_settings("d")).unwrap();
        assert_eq!(previous_password(&fourth), Some("a"));
    }

    #[test]
    fn a_login_of_the_servers_changes_nothing_for_the_sentinels() {
        let with = |password: &str, sentinel: &str| RedisSettings {
            topology: RedisTopology::Sentinel {
                master: "shop".to_owned(),
                credentials: make_settings(sentinel).credentials,
            },
            ..make_settings(password)
        };
        let first = RedisAccess::new(with("a", "s"));
        let newest = &first.sentinel_login.newest;
        first.sentinel_login.record_accepted(newest);
        let second = first.with_logins_of(&with("b", "s")).unwrap();
        assert_eq!(second.sentinel_login.previous, None);
        let third = second.with_logins_of(&with("b", "t")).unwrap();
        assert_eq!(third.sentinel_login.previous.as_ref(), Some(newest));
    }

    #[test]
    fn everything_but_logins_and_tls_stays() {
        let access = RedisAccess::new(make_settings("a"));
        let newer = RedisSettings {
            database: 7,
            key_prefix: "other".to_owned(),
            ..make_settings("b")
        };
        let settings = access.with_logins_of(&newer).unwrap().settings;
        assert_eq!((settings.database, &*settings.key_prefix), (0, "t"));
        assert_eq!(settings.credentials, newer.credentials);
    }
}
