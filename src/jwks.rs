//! Fetches the keys of token issuers in the background.
//!
//! One task per URL fetches the keys and publishes them in a [`KeyCell`]. No request waits for a
//! fetch. [Decision 63](../docs/decisions/0063-keys-by-url.md) gives the reasons.

mod key_cache;
mod key_request;
mod refresh;

use crate::policy::PolicyTable;
use crate::policy::jwt::{KeyCell, KeySource};
use crate::telemetry::metrics::KeyFetchCounts;
use parking_lot::Mutex;
use refresh::KeyRefresher;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// How long the start waits for the first keys. Without them, tokens count as unverified.
const START_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two checks for missing keys during the start.
const START_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The tasks that fetch keys: one per source. Cheap to clone.
#[derive(Clone, Debug)]
pub struct KeyFetcher {
    /// The runtime of the tasks.
    runtime: Handle,
    sources: Arc<Mutex<Vec<FetchedSource>>>,
    /// Counters by URL. A URL that the configuration no longer has keeps its counters: if they
    /// returned with lower values, Prometheus would assume a restart.
    counters: Arc<Mutex<BTreeMap<String, Arc<FetchCounters>>>>,
}

/// Fetches of one URL since the start, by result.
#[derive(Debug, Default)]
struct FetchCounters {
    succeeded: AtomicU64,
    failed: AtomicU64,
}

#[derive(Debug)]
struct FetchedSource {
    source: KeySource,
    cell: Arc<KeyCell>,
    task: JoinHandle<()>,
}

impl KeyFetcher {
    /// Creates a fetcher without sources. Its tasks run on the present runtime.
    pub fn on_current_runtime() -> Self {
        Self {
            runtime: Handle::current(),
            sources: Arc::default(),
            counters: Arc::default(),
        }
    }

    /// Fetches the keys that a policy table needs, from now on. Keys that an earlier table fetched
    /// from the same source are used at once. Sources that the table does not need are dropped.
    /// Call it before the table is used.
    pub fn attach_table(&self, table: &PolicyTable) {
        let mut sources = self.sources.lock();
        let mut needed: Vec<FetchedSource> = Vec::new();
        for keys in table
            .token_reader
            .iter()
            .flat_map(|reader| reader.fetched_keys())
        {
            let is_same = |one: &FetchedSource| one.source == keys.source;
            let cell = match needed.iter().find(|one| is_same(one)) {
                Some(shared) => Arc::clone(&shared.cell),
                None => {
                    let known = sources.iter().position(is_same);
                    let known = known.map(|position| sources.swap_remove(position));
                    let source = known.unwrap_or_else(|| self.start_source(&keys.source));
                    let cell = Arc::clone(&source.cell);
                    needed.push(source);
                    cell
                }
            };
            keys.attach(cell);
        }
        *sources = needed;
    }

    fn start_source(&self, source: &KeySource) -> FetchedSource {
        let cell = Arc::<KeyCell>::default();
        let mut counters = self.counters.lock();
        let counters = Arc::clone(counters.entry(source.url.to_string()).or_default());
        let refresher = KeyRefresher::new(source.clone(), Arc::clone(&cell), counters);
        FetchedSource {
            source: source.clone(),
            cell,
            task: self.runtime.spawn(refresher.run()),
        }
    }

    /// Waits until all sources have keys, at most two seconds.
    pub async fn wait_for_first_keys(&self) {
        let deadline = Instant::now() + START_TIMEOUT;
        let has_all_keys = || {
            self.sources
                .lock()
                .iter()
                .all(|source| source.cell.has_keys())
        };
        while !has_all_keys() && Instant::now() < deadline {
            sleep(START_POLL_INTERVAL).await;
        }
    }

    /// The fetches since the start, by URL.
    pub fn fetch_counts(&self) -> Vec<KeyFetchCounts> {
        let counters = self.counters.lock();
        let counts = counters.iter().map(|(url, counters)| KeyFetchCounts {
            url: url.clone(),
            succeeded: counters.succeeded.load(Ordering::Relaxed),
            failed: counters.failed.load(Ordering::Relaxed),
        });
        counts.collect()
    }
}

impl Drop for FetchedSource {
    fn drop(&mut self) {
        self.task.abort();
    }
}
