//! New policies without a restart: what changed on disk, or by signal, is loaded, and used or kept out.
//!
//! The files are read again and again and compared by content. Watching for events would need all that too:
//! a ConfigMap's `..data` swap, a rename over the file and an edit in place look different to every file
//! system, and watches fail on busy nodes. Reading a few small files twice a second costs nothing.

use crate::clock;
use crate::config::{
    self, Config, ConfigDiagnostic, ConfigErrors, ConfigSources, FileSet, RestartOnlySettings,
};
use crate::enforcer::ActivePolicies;
use crate::policy::Policy;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

/// How often the files are read.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long they must stay the same before they count: a half-written file is no configuration.
const SETTLE_TIME: Duration = Duration::from_millis(100);

/// How reloading went so far, for people who look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadStatus {
    /// Grows by one with every configuration that took effect; that of the start is 1.
    pub generation: u64,
    /// Configurations that did not.
    pub rejected_count: u64,
    /// When a configuration was last loaded, in effect or not: seconds since the Unix epoch.
    pub last_load_unix_s: u64,
    /// Why the newest files are not in effect, in lines; empty if they are.
    pub last_error: Vec<String>,
    /// What is in effect, as JSON.
    pub effective_json: Arc<str>,
    /// Since when, in seconds since the Unix epoch.
    pub applied_at_unix_s: u64,
    /// [`Config::hash`] of what is in effect.
    pub config_hash: u64,
}

/// What else a new configuration brings into effect, beside the policies: certificates.
pub type ConfigPublisher = Box<dyn Fn(&Config) + Send>;

/// Keeps a policy table up to date, and what is published with it.
pub struct ConfigReloader {
    sources: ConfigSources,
    /// What the process started with and runs until its end.
    restart_only: RestartOnlySettings,
    active_policies: ActivePolicies,
    publish: ConfigPublisher,
    files: FileSet,
    debouncer: ChangeDebouncer<FilesFingerprint>,
    status: Arc<Mutex<ReloadStatus>>,
}

/// The contents of all files, hashed; names and failures count.
type FilesFingerprint = [u8; 32];

impl fmt::Debug for ConfigReloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader")
            .field("files", &self.files)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl ConfigReloader {
    /// `config` is what `sources` gave at the start; `live` is what requests are decided by.
    pub fn new(
        sources: ConfigSources,
        config: &Config,
        active_policies: ActivePolicies,
        publish: ConfigPublisher,
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
            files,
            debouncer,
            status: Arc::new(Mutex::new(status)),
        }
    }

    /// How it goes, readable from anywhere.
    pub fn status(&self) -> Arc<Mutex<ReloadStatus>> {
        Arc::clone(&self.status)
    }

    /// Watches for ever; SIGHUP makes it look at once.
    pub async fn run(self) {
        match signal(SignalKind::hangup()) {
            Ok(mut hangup) => self.watch_files(async || _ = hangup.recv().await).await,
            Err(error) => {
                tracing::warn!(%error, "SIGHUP can't be listened for; the configuration is still watched");
                self.watch_files(std::future::pending).await;
            }
        }
    }

    /// `asked` completes when somebody wants a look now.
    async fn watch_files(mut self, mut check_requested: impl AsyncFnMut()) {
        loop {
            // On a thread of its own: disks may be slow and configurations large, and this one accepts connections.
            let check_task = spawn_blocking(move || {
                let pause = self.check_files();
                (self, pause)
            });
            let pause;
            (self, pause) = match check_task.await {
                Ok(looked) => looked,
                Err(error) => {
                    return tracing::error!(%error, "the configuration is no longer watched");
                }
            };
            if timeout(pause, check_requested()).await.is_ok() {
                tracing::info!("SIGHUP: looking for a new configuration");
            }
        }
    }

    /// Reads the files once, and loads them if they are new and settled. Returns how long to wait for the next look.
    fn check_files(&mut self) -> Duration {
        let content = hash_files(&self.files);
        match self.debouncer.observe(content, Instant::now()) {
            FileChangeState::Unchanged => return POLL_INTERVAL,
            FileChangeState::Settling(rest) => return rest,
            FileChangeState::Settled => {}
        }
        let loaded = config::load(&self.sources);
        let files = loaded
            .as_ref()
            .map_or_else(|report| &report.files, |config| &config.files);
        if *files != self.files {
            // It reads other files than those that were seen to settle: these have to settle first.
            self.files = files.clone();
            return Duration::ZERO;
        }
        if hash_files(&self.files) != content {
            // Written while it was loaded: what was loaded may be half of it.
            return SETTLE_TIME;
        }
        self.debouncer.accept(content);
        match loaded {
            Ok(config) => self.apply_config(config),
            Err(report) => self.record_rejection(&report),
        }
        POLL_INTERVAL
    }

    fn apply_config(&self, config: Config) {
        let changes = describe_changes(
            self.active_policies.load_snapshot().table.policies(),
            config.policy_table.policies(),
        );
        self.active_policies
            .publish(Arc::clone(&config.policy_table));
        (self.publish)(&config);
        let generation = {
            let mut status = self.status.lock();
            status.record_applied(&config, &self.restart_only);
            status.generation
        };
        tracing::info!(
            generation,
            policies = config.policy_table.policies().len(),
            "new configuration: {changes}"
        );
        for warning in &config.warnings {
            tracing::warn!("{}", warning.to_line());
        }
        for setting in self.restart_only.changed_keys(&config) {
            tracing::warn!(
                setting,
                "changed in the configuration, but takes effect only after a restart"
            );
        }
    }

    fn record_rejection(&self, report: &ConfigErrors) {
        let lines: Vec<String> = report
            .diagnostics
            .iter()
            .map(ConfigDiagnostic::to_line)
            .collect();
        {
            let mut status = self.status.lock();
            status.rejected_count += 1;
            status.last_load_unix_s = clock::unix_time_s();
            status.last_error.clone_from(&lines);
        }
        tracing::error!(
            errors = lines.len(),
            "the new configuration is wrong; the last good one stays in effect"
        );
        for line in &lines {
            tracing::error!("{line}");
        }
    }
}

impl ReloadStatus {
    /// A configuration takes effect beside what `running` says.
    fn record_applied(&mut self, config: &Config, restart_only: &RestartOnlySettings) {
        self.generation += 1;
        self.last_error.clear();
        self.effective_json = config.effective_json(restart_only).into();
        self.applied_at_unix_s = clock::unix_time_s();
        self.last_load_unix_s = self.applied_at_unix_s;
        self.config_hash = config.shared_settings_hash(restart_only);
    }
}

/// Which policies are new, gone or different, by name.
fn describe_changes(old: &[Policy], new: &[Policy]) -> String {
    /// Longest list of names in a line of the log.
    const MAX_NAMES: usize = 20;
    // Their debug text holds all that a policy is.
    let by_name = |policies: &[Policy]| -> BTreeMap<String, String> {
        policies
            .iter()
            .map(|policy| (policy.name.to_string(), format!("{policy:?}")))
            .collect()
    };
    let (old, new) = (by_name(old), by_name(new));
    let kinds = [
        (
            "added",
            new.keys()
                .filter(|name| !old.contains_key(*name))
                .collect::<Vec<_>>(),
        ),
        (
            "removed",
            old.keys().filter(|name| !new.contains_key(*name)).collect(),
        ),
        (
            "changed",
            new.iter()
                .filter(|(name, text)| old.get(*name).is_some_and(|old| old != *text))
                .map(|(name, _)| name)
                .collect(),
        ),
    ];
    let parts = kinds
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| {
            let shown = names
                .iter()
                .take(MAX_NAMES)
                .map(|name| name.as_str())
                .collect::<Vec<_>>()
                .join(", ");
            match names.len() {
                n if n > MAX_NAMES => format!("{kind} {shown} and {} more", n - MAX_NAMES),
                _ => format!("{kind} {shown}"),
            }
        });
    let text = parts.collect::<Vec<_>>().join("; ");
    if text.is_empty() {
        "the policies are the same".to_owned()
    } else {
        text
    }
}

/// Links are followed anew each time, so that a swap anywhere on the way is seen.
fn hash_files(files: &FileSet) -> FilesFingerprint {
    let mut hash = Sha256::new();
    for path in files.paths() {
        hash.update(path.as_os_str().as_encoded_bytes());
        // No content hashes to this, and a name holds no NUL.
        let content = fs::read(&path).map_or([0; 32], |content| Sha256::digest(&content).into());
        hash.update([0]);
        hash.update(content);
    }
    hash.finalize().into()
}

/// Tells new content that stays from content that is still being written.
#[derive(Debug)]
struct ChangeDebouncer<T> {
    accepted: T,
    candidate: Option<(T, Instant)>,
}

#[derive(Debug, PartialEq, Eq)]
enum FileChangeState {
    /// Nothing new.
    Unchanged,
    /// New, but it has to stay this much longer.
    Settling(Duration),
    /// New, and settled.
    Settled,
}

impl<T: PartialEq> ChangeDebouncer<T> {
    fn new(accepted: T) -> Self {
        Self {
            accepted,
            candidate: None,
        }
    }

    fn observe(&mut self, content: T, now: Instant) -> FileChangeState {
        if content == self.accepted {
            self.candidate = None;
            return FileChangeState::Unchanged;
        }
        match &self.candidate {
            Some((candidate, since)) if *candidate == content => {
                let age = now.saturating_duration_since(*since);
                if age < SETTLE_TIME {
                    return FileChangeState::Settling(SETTLE_TIME.saturating_sub(age));
                }
                FileChangeState::Settled
            }
            _ => {
                self.candidate = Some((content, now));
                FileChangeState::Settling(SETTLE_TIME)
            }
        }
    }

    /// What is known is not new again.
    fn accept(&mut self, content: T) {
        self.accepted = content;
        self.candidate = None;
    }
}

#[cfg(test)]
mod tests;
