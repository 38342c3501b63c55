//! Reloads the configuration without a restart, when a file changes or on SIGHUP.
//!
//! Polls the files twice a second and compares their contents. File system events would need this
//! too: a ConfigMap's `..data` swap, a rename and an edit in place differ on every file system, and
//! watches fail on busy nodes. Reading a few small files is cheap.

use crate::clock;
use crate::config::{
    self, Config, ConfigDiagnostic, ConfigErrors, ConfigSources, CredentialSource, Credentials,
    FileSet, RestartOnlySettings,
};
use crate::enforcer::ActivePolicies;
use crate::policy::Policy;
use crate::proxy::describe_spawn_error;
use crate::telemetry::metrics::LastReload;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;
use std::{io, thread};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::Instant;

/// Interval between two checks of the files.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long new contents must stay unchanged before they are loaded, so that a file is complete.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// Stack of the thread, as by default. `RUST_MIN_STACK` is for the workers.
const STACK_BYTES: usize = 2 << 20;

/// Reload status, as the admin API reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReloadStatus {
    /// Number of configurations applied, including the one at start.
    pub(crate) generation: u64,
    pub(crate) last: LastReload,
    /// Warnings of the configuration in effect, one line each.
    pub(crate) warnings: Vec<String>,
    /// The effective configuration as JSON.
    pub(crate) effective_json: Arc<str>,
    /// Time when it was applied, in seconds since the Unix epoch.
    pub(crate) applied_at_unix_s: u64,
    /// [`Config::shared_settings_hash`] of the effective configuration.
    pub(crate) config_hash: u64,
}

/// Applies the reloadable settings beside the policies, such as certificates.
pub(crate) type ConfigPublisher = Box<dyn Fn(&Config) + Send>;

/// Applies credentials whose files have changed.
pub(crate) type CredentialPublisher = Box<dyn Fn(&Credentials) + Send>;

/// Polls the configuration files and applies new configurations.
pub(crate) struct ConfigReloader {
    sources: ConfigSources,
    /// The settings that this process keeps until it ends.
    restart_only: RestartOnlySettings,
    active_policies: ActivePolicies,
    publish: ConfigPublisher,
    publish_credentials: CredentialPublisher,
    credentials: Credentials,
    /// Where the logins to the Redis servers in use come from, also while newer configurations are
    /// invalid. `None` if these files have belonged to other servers since.
    redis_source: Option<CredentialSource>,
    /// Where the admin token comes from, also while newer configurations are invalid.
    admin_source: CredentialSource,
    files: FileSet,
    debouncer: ChangeDebouncer<FilesFingerprint>,
    status: Arc<Mutex<ReloadStatus>>,
}

/// Hash of the names and contents of all files. An unreadable file has a hash too.
type FilesFingerprint = [u8; 32];

impl ConfigReloader {
    /// Creates a reloader. `config` was loaded from `sources` at start. New policy tables are
    /// published to `active_policies`, other settings and credentials to the two publishers.
    pub(crate) fn new(
        sources: ConfigSources,
        config: &Config,
        active_policies: ActivePolicies,
        publish: ConfigPublisher,
        publish_credentials: CredentialPublisher,
    ) -> Self {
        let files = config.files.clone();
        let debouncer = ChangeDebouncer::new(hash_files(&files));
        let restart_only = config.restart_only_settings();
        let mut status = ReloadStatus::default();
        status.record_applied(config, &restart_only);
        Self {
            sources,
            restart_only,
            active_policies,
            publish,
            publish_credentials,
            credentials: config.credentials(),
            redis_source: Some(config.credential_source()),
            admin_source: config.credential_source(),
            files,
            debouncer,
            status: Arc::new(Mutex::new(status)),
        }
    }

    /// The shared reload status.
    pub(crate) fn status(&self) -> Arc<Mutex<ReloadStatus>> {
        Arc::clone(&self.status)
    }

    /// Starts a thread that polls the files and then calls `after_check`, until the returned task
    /// is aborted. It is a thread because disks may be slow: `after_check` waits for them, and
    /// requests do not. SIGHUP triggers an immediate check.
    ///
    /// # Errors
    /// Fails if the system has no more threads.
    pub(crate) fn start(
        self,
        after_check: impl FnMut() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        // Requests before the next check need only that one.
        let (check_request, check_requests) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("tidegate-reload".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || self.watch_files(&check_requests, after_check))
            .map_err(|error| describe_spawn_error("the thread that reads files", &error))?;
        Ok(spawn_local(async move {
            match signal(SignalKind::hangup()) {
                Ok(mut hangup) => {
                    while hangup.recv().await.is_some() {
                        _ = check_request.try_send(());
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to listen for SIGHUP; configuration files are still polled");
                    std::future::pending().await
                }
            }
        }))
    }

    /// Polls the files until the sender of `check_requests` is dropped. After a panic, only
    /// `after_check` goes on.
    fn watch_files(mut self, check_requests: &Receiver<()>, mut after_check: impl FnMut()) {
        let mut has_stopped = false;
        loop {
            let mut pause = POLL_INTERVAL;
            if !has_stopped {
                match catch_unwind(AssertUnwindSafe(|| self.check_files())) {
                    Ok(next_pause) => pause = next_pause,
                    Err(_panic) => {
                        has_stopped = true;
                        tracing::error!("configuration reloader stopped");
                    }
                }
            }
            after_check();
            match check_requests.recv_timeout(pause) {
                Ok(()) => tracing::info!("SIGHUP received; checking the configuration files"),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Reads the files once and loads them if they are new and settled. Returns the time until the
    /// next check.
    fn check_files(&mut self) -> Duration {
        let content = hash_files(&self.files);
        if let Some(pause) = self.debouncer.observe(content, Instant::now()) {
            return pause;
        }
        let loaded = config::load(&self.sources);
        let files = loaded
            .as_ref()
            .map_or_else(|errors| &errors.files, |config| &config.files);
        let mut files = files.clone();
        // An invalid configuration may not name them.
        for source in self.redis_source.iter().chain([&self.admin_source]) {
            files.extend(&source.files);
        }
        if files != self.files {
            // The configuration includes other files than those observed. They must settle first.
            self.files = files;
            return Duration::ZERO;
        }
        if hash_files(&self.files) != content {
            // A file changed during the load, so the loaded configuration may be incomplete.
            return SETTLE_TIME;
        }
        self.debouncer.accept(content);
        match loaded {
            Ok(config) => {
                self.update_credentials(Some(&config));
                self.apply_config(config);
            }
            Err(errors) => {
                self.record_rejection(&errors);
                self.update_credentials(None);
            }
        }
        POLL_INTERVAL
    }

    /// Publishes changed credentials: those of a valid configuration, else those that the last such
    /// configuration names. Logins of other Redis servers than those in use wait for a restart.
    fn update_credentials(&mut self, config: Option<&Config>) {
        let mut newer = self.credentials.clone();
        let mut is_redis_current = false;
        if let Some(config) = config {
            let configured = config.credentials();
            self.admin_source = config.credential_source();
            is_redis_current = self.credentials.is_for_same_servers(&configured);
            if is_redis_current {
                self.redis_source = Some(config.credential_source());
                newer.redis = configured.redis;
            } else {
                // The files may contain the logins of the other servers already.
                self.redis_source
                    .take_if(|source| source.shares_login_files_with(config));
            }
            newer.admin_token = configured.admin_token;
        } else {
            match self.admin_source.load_admin_token() {
                Ok(token) => newer.admin_token = token,
                Err(errors) => tracing::debug!(%errors, "the admin token stays unchanged"),
            }
        }
        if !is_redis_current && let Some(source) = &self.redis_source {
            match source.load_redis() {
                Ok(redis) => newer.redis = redis,
                Err(errors) => tracing::debug!(%errors, "the logins to Redis stay unchanged"),
            }
        }
        if newer != self.credentials {
            (self.publish_credentials)(&newer);
            self.credentials = newer;
        }
    }

    fn apply_config(&self, config: Config) {
        let changes = describe_changes(
            self.active_policies.load_snapshot().table.policies(),
            config.policy_table.policies(),
        );
        // First, because the new table may read keys of tokens that were fetched before.
        (self.publish)(&config);
        self.active_policies.activate_table(&config.policy_table);
        let (generation, pending_restart) = {
            let mut status = self.status.lock();
            status.record_applied(&config, &self.restart_only);
            (status.generation, status.last.pending_restart.clone())
        };
        tracing::info!(
            generation,
            policies = config.policy_table.policies().len(),
            "configuration reloaded: {changes}"
        );
        for warning in config.warning_lines() {
            tracing::warn!("{warning}");
        }
        for setting in pending_restart {
            tracing::warn!(setting, "changed setting takes effect only after a restart");
        }
    }

    fn record_rejection(&self, errors: &ConfigErrors) {
        let lines: Vec<String> = errors
            .diagnostics
            .iter()
            .map(ConfigDiagnostic::to_log_line)
            .collect();
        {
            let mut status = self.status.lock();
            status.last.refused += 1;
            status.last.at_s = clock::unix_time_s();
            status.last.errors.clone_from(&lines);
        }
        tracing::error!(
            errors = lines.len(),
            "new configuration rejected; the previous one stays in effect"
        );
        for line in &lines {
            tracing::error!("{line}");
        }
    }
}

impl ReloadStatus {
    /// Records that `config` was applied. Settings in `restart_only` keep their running values.
    fn record_applied(&mut self, config: &Config, restart_only: &RestartOnlySettings) {
        self.generation += 1;
        self.last.errors.clear();
        self.warnings = config.warning_lines();
        self.last.pending_restart = restart_only.changed_keys(config);
        self.effective_json = config.effective_json(restart_only).into();
        self.applied_at_unix_s = clock::unix_time_s();
        self.last.at_s = self.applied_at_unix_s;
        self.config_hash = config.shared_settings_hash(restart_only);
    }
}

/// Lists the names of added, removed and changed policies.
fn describe_changes(old: &[Policy], new: &[Policy]) -> String {
    /// Maximum names in each of the lists of added, removed and changed policies.
    const MAX_LISTED_NAMES: usize = 20;
    fn by_name(policies: &[Policy]) -> BTreeMap<&str, &Policy> {
        let policies = policies.iter();
        policies.map(|policy| (&*policy.name, policy)).collect()
    }
    let (old, new) = (by_name(old), by_name(new));
    let added = new.keys().filter(|name| !old.contains_key(*name));
    let removed = old.keys().filter(|name| !new.contains_key(*name));
    let changed = new
        .iter()
        .filter(|(name, policy)| old.get(*name).is_some_and(|old| old != *policy));
    let kinds: [(&str, Vec<&str>); 3] = [
        ("added", added.copied().collect()),
        ("removed", removed.copied().collect()),
        ("changed", changed.map(|(name, _)| *name).collect()),
    ];
    let parts = kinds.iter().filter(|(_, names)| !names.is_empty());
    let parts = parts.map(|(kind, names)| {
        let (shown, more) = names.split_at(names.len().min(MAX_LISTED_NAMES));
        let more = match more.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{kind} {}{more}", shown.join(", "))
    });
    let text = parts.collect::<Vec<_>>().join("; ");
    if text.is_empty() {
        "policies unchanged".to_owned()
    } else {
        text
    }
}

/// Hashes the files. Follows symbolic links each time, to detect a swap of any link in a path.
fn hash_files(files: &FileSet) -> FilesFingerprint {
    let mut hash = Sha256::new();
    for path in files.expand_paths() {
        hash.update(path.as_os_str().as_encoded_bytes());
        // No contents hash to zeros, and a path contains no NUL.
        let content = config::read_config_file(&path)
            .map_or([0; 32], |content| Sha256::digest(&content).into());
        hash.update([0]);
        hash.update(content);
    }
    hash.finalize().into()
}

/// Detects new content that has stopped changing.
#[derive(Debug)]
struct ChangeDebouncer<T> {
    accepted: T,
    candidate: Option<(T, Instant)>,
}

impl<T: PartialEq> ChangeDebouncer<T> {
    fn new(accepted: T) -> Self {
        Self {
            accepted,
            candidate: None,
        }
    }

    /// Returns the time until the next observation. `None` if the content is new and has settled.
    fn observe(&mut self, content: T, now: Instant) -> Option<Duration> {
        if content == self.accepted {
            self.candidate = None;
            return Some(POLL_INTERVAL);
        }
        match &self.candidate {
            Some((candidate, first_seen)) if *candidate == content => {
                let age = now.saturating_duration_since(*first_seen);
                SETTLE_TIME.checked_sub(age).filter(|rest| !rest.is_zero())
            }
            _ => {
                self.candidate = Some((content, now));
                Some(SETTLE_TIME)
            }
        }
    }

    /// Accepts content, so that it is no longer new.
    fn accept(&mut self, content: T) {
        self.accepted = content;
        self.candidate = None;
    }
}

#[cfg(test)]
mod tests;
