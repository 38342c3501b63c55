//! New policies without a restart: what changed on disk, or by signal, is loaded, and used or kept out.
//!
//! The files are read again and again and compared by content. Watching for events would need all that too:
//! a ConfigMap's `..data` swap, a rename over the file and an edit in place look different to every file
//! system, and watches fail on busy nodes. Reading a few small files twice a second costs nothing.

use crate::clock;
use crate::config::{self, Config, Diagnostic, FileSet, Fixed, Report, Sources};
use crate::enforcer::Live;
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
const INTERVAL: Duration = Duration::from_millis(500);
/// How long they must stay the same before they count: a half-written file is no configuration.
const SETTLED: Duration = Duration::from_millis(100);

/// How reloading went so far, for people who look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Grows by one with every configuration that took effect; that of the start is 1.
    pub generation: u64,
    /// Configurations that did not.
    pub refused: u64,
    /// When a configuration was last loaded, in effect or not: seconds since the Unix epoch.
    pub loaded_s: u64,
    /// Why the newest files are not in effect, in lines; empty if they are.
    pub last_error: Vec<String>,
    /// What is in effect, as JSON.
    pub effective: Arc<str>,
    /// Since when, in seconds since the Unix epoch.
    pub taken_at_s: u64,
    /// [`Config::hash`] of what is in effect.
    pub hash: u64,
}

/// What else a new configuration brings into effect, beside the policies: certificates.
pub type Publish = Box<dyn Fn(&Config) + Send>;

/// Keeps a policy table up to date, and what is published with it.
pub struct Reloader {
    sources: Sources,
    /// What the process started with and runs until its end.
    running: Fixed,
    live: Live,
    publish: Publish,
    files: FileSet,
    settling: Settling<Fingerprint>,
    status: Arc<Mutex<Status>>,
}

/// The contents of all files, hashed; names and failures count.
type Fingerprint = [u8; 32];

impl fmt::Debug for Reloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader")
            .field("files", &self.files)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl Reloader {
    /// `config` is what `sources` gave at the start; `live` is what requests are decided by.
    pub fn new(sources: Sources, config: &Config, live: Live, publish: Publish) -> Self {
        let files = config.files.clone();
        let settling = Settling::new(fingerprint(&files));
        let running = config.fixed();
        let mut status = Status::default();
        status.take(config, &running);
        Self {
            sources,
            running,
            live,
            publish,
            files,
            settling,
            status: Arc::new(Mutex::new(status)),
        }
    }

    /// How it goes, readable from anywhere.
    pub fn status(&self) -> Arc<Mutex<Status>> {
        Arc::clone(&self.status)
    }

    /// Watches for ever; SIGHUP makes it look at once.
    pub async fn run(self) {
        match signal(SignalKind::hangup()) {
            Ok(mut hangup) => self.watch(async || _ = hangup.recv().await).await,
            Err(error) => {
                tracing::warn!(%error, "SIGHUP can't be listened for; the configuration is still watched");
                self.watch(std::future::pending).await;
            }
        }
    }

    /// `asked` completes when somebody wants a look now.
    async fn watch(mut self, mut asked: impl AsyncFnMut()) {
        loop {
            // On a thread of its own: disks may be slow and configurations large, and this one accepts connections.
            let looked = spawn_blocking(move || {
                let pause = self.look();
                (self, pause)
            });
            let pause;
            (self, pause) = match looked.await {
                Ok(looked) => looked,
                Err(error) => {
                    return tracing::error!(%error, "the configuration is no longer watched");
                }
            };
            if timeout(pause, asked()).await.is_ok() {
                tracing::info!("SIGHUP: looking for a new configuration");
            }
        }
    }

    /// Reads the files once, and loads them if they are new and settled. Returns how long to wait for the next look.
    fn look(&mut self) -> Duration {
        let seen = fingerprint(&self.files);
        match self.settling.see(seen, Instant::now()) {
            Step::Known => return INTERVAL,
            Step::Settling(rest) => return rest,
            Step::New => {}
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
        if fingerprint(&self.files) != seen {
            // Written while it was loaded: what was loaded may be half of it.
            return SETTLED;
        }
        self.settling.know(seen);
        match loaded {
            Ok(config) => self.accept(config),
            Err(report) => self.refuse(&report),
        }
        INTERVAL
    }

    fn accept(&self, config: Config) {
        let changes = changes(self.live.rules().table.policies(), config.table.policies());
        self.live.publish(Arc::clone(&config.table));
        (self.publish)(&config);
        let generation = {
            let mut status = self.status.lock();
            status.take(&config, &self.running);
            status.generation
        };
        tracing::info!(
            generation,
            policies = config.table.policies().len(),
            "new configuration: {changes}"
        );
        for warning in &config.warnings {
            tracing::warn!("{}", warning.line());
        }
        for setting in self.running.changed_in(&config) {
            tracing::warn!(
                setting,
                "changed in the configuration, but takes effect only after a restart"
            );
        }
    }

    fn refuse(&self, report: &Report) {
        let lines: Vec<String> = report.diagnostics.iter().map(Diagnostic::line).collect();
        {
            let mut status = self.status.lock();
            status.refused += 1;
            status.loaded_s = clock::unix_s();
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

impl Status {
    /// A configuration takes effect beside what `running` says.
    fn take(&mut self, config: &Config, running: &Fixed) {
        self.generation += 1;
        self.last_error.clear();
        self.effective = config.effective(running).into();
        self.taken_at_s = clock::unix_s();
        self.loaded_s = self.taken_at_s;
        self.hash = config.hash(running);
    }
}

/// Which policies are new, gone or different, by name.
fn changes(old: &[Policy], new: &[Policy]) -> String {
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
fn fingerprint(files: &FileSet) -> Fingerprint {
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
struct Settling<T> {
    known: T,
    candidate: Option<(T, Instant)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Nothing new.
    Known,
    /// New, but it has to stay this much longer.
    Settling(Duration),
    /// New, and settled.
    New,
}

impl<T: PartialEq> Settling<T> {
    fn new(known: T) -> Self {
        Self {
            known,
            candidate: None,
        }
    }

    fn see(&mut self, seen: T, now: Instant) -> Step {
        if seen == self.known {
            self.candidate = None;
            return Step::Known;
        }
        match &self.candidate {
            Some((candidate, since)) if *candidate == seen => {
                let age = now.saturating_duration_since(*since);
                if age < SETTLED {
                    return Step::Settling(SETTLED.saturating_sub(age));
                }
                Step::New
            }
            _ => {
                self.candidate = Some((seen, now));
                Step::Settling(SETTLED)
            }
        }
    }

    /// What is known is not new again.
    fn know(&mut self, seen: T) {
        self.known = seen;
        self.candidate = None;
    }
}

#[cfg(test)]
mod tests;
