//! Fetches the keys of token issuers in the background.
//!
//! One task per URL fetches the keys and publishes them in a [`KeyCell`]. No request waits for a
//! fetch. [Decision 63](../docs/decisions/0063-keys-by-url.md) gives the reasons.

use crate::clock;
use crate::http_client;
use crate::policy::PolicyTable;
use crate::policy::jwt::{KeyCell, KeySource, VerificationKeys};
use crate::telemetry::metrics::KeyFetchCounts;
use http::header::{ACCEPT, AGE, CACHE_CONTROL, CONNECTION, HOST, USER_AGENT};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How long the start waits for the first keys. Without them, tokens count as unverified.
const START_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two checks for missing keys during the start.
const START_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Bounds of `Cache-Control: max-age`: an issuer can neither be polled all the time nor keep a
/// revoked key in use for days.
const MIN_MAX_AGE: Duration = Duration::from_secs(5);
const MAX_MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Bounds of the pause after a failed fetch. It doubles up to the maximum.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Timeout of a fetch, with name resolution, connection and body.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a JWK set. Sets of large issuers have some ten KiB.
const MAX_KEY_SET_BYTES: usize = 1 << 20;

/// The tasks that fetch keys: one per source. Cheap to clone.
#[derive(Clone, Debug)]
pub struct KeyFetcher {
    /// The runtime of the tasks.
    runtime: Handle,
    sources: Arc<Mutex<Vec<FetchedSource>>>,
    /// By URL. A URL that the configuration no longer has keeps its counters: if they returned with
    /// lower values, Prometheus would assume a restart.
    counts: FetchCounts,
}

type FetchCounts = Arc<Mutex<BTreeMap<String, KeyFetchCounts>>>;

#[derive(Debug)]
struct FetchedSource {
    source: KeySource,
    cell: Arc<KeyCell>,
    /// Aborts its task on drop.
    _task: JoinSet<()>,
}

impl KeyFetcher {
    /// Creates a fetcher without sources. Its tasks run on the present runtime.
    pub fn on_current_runtime() -> Self {
        Self {
            runtime: Handle::current(),
            sources: Arc::default(),
            counts: Arc::default(),
        }
    }

    /// Fetches the keys that a policy table needs, from now on. Keys that an earlier table fetched
    /// from the same source are used at once. Sources that the table does not need are dropped.
    /// Call it before the table is used.
    pub fn attach_table(&self, table: &PolicyTable) {
        let mut sources = self.sources.lock();
        let mut needed: Vec<FetchedSource> = Vec::new();
        let readers = table.token_reader.iter();
        for keys in readers.flat_map(|reader| reader.issuer_keys()) {
            let Some(source) = &keys.source else { continue };
            let is_same = |one: &FetchedSource| one.source == *source;
            let cell = match needed.iter().find(|one| is_same(one)) {
                Some(shared) => Arc::clone(&shared.cell),
                None => {
                    let known = sources.iter().position(is_same);
                    let known = known.map(|position| sources.swap_remove(position));
                    let fetched = known.unwrap_or_else(|| self.start_source(source));
                    let cell = Arc::clone(&fetched.cell);
                    needed.push(fetched);
                    cell
                }
            };
            keys.attach(cell);
        }
        *sources = needed;
    }

    fn start_source(&self, source: &KeySource) -> FetchedSource {
        let (cell, now) = (Arc::<KeyCell>::default(), Instant::now());
        self.counts
            .lock()
            .entry(source.url.to_string())
            .or_insert_with_key(|url| KeyFetchCounts {
                url: url.clone(),
                succeeded: 0,
                failed: 0,
            });
        let refresher = KeyRefresher {
            source: source.clone(),
            cell: Arc::clone(&cell),
            counts: Arc::clone(&self.counts),
            cache_file: cache_file(source),
            text: String::new(),
            backoff: MIN_BACKOFF,
            next_fetch: now,
            refresh_allowed: now,
            stale_end: None,
        };
        let mut task = JoinSet::new();
        task.spawn_on(refresher.run(), &self.runtime);
        FetchedSource {
            source: source.clone(),
            cell,
            _task: task,
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
        self.counts.lock().values().cloned().collect()
    }
}

/// Fetches the keys of one source.
struct KeyRefresher {
    source: KeySource,
    cell: Arc<KeyCell>,
    counts: FetchCounts,
    /// The file of the keys, with which the next process starts.
    cache_file: Option<PathBuf>,
    /// The JWK set of the keys in use.
    text: String,
    backoff: Duration,
    next_fetch: Instant,
    /// When tokens with unknown keys may cause the next fetch.
    refresh_allowed: Instant,
    /// When the keys in use are too old. `None` without keys.
    stale_end: Option<Instant>,
}

impl KeyRefresher {
    async fn run(mut self) {
        self.load_cached_keys().await;
        loop {
            self.fetch().await;
            self.wait_for_next_fetch().await;
        }
    }

    /// Uses the keys that an earlier process fetched, if they are not too old.
    async fn load_cached_keys(&mut self) {
        let Some(file) = self.cache_file.clone() else {
            return;
        };
        let read = spawn_blocking(move || read_cache_file(&file)).await;
        let Ok(Some((text, fetched_unix_s))) = read else {
            return;
        };
        let age = Duration::from_secs(clock::unix_time_s().saturating_sub(fetched_unix_s));
        let remaining = self.source.max_stale.saturating_sub(age);
        if !remaining.is_zero() && self.use_key_set(text).is_ok() {
            self.stale_end = Some(Instant::now() + remaining);
            tracing::info!(url = %self.source.url, age_s = age.as_secs(), "cached token keys loaded");
        }
    }

    async fn fetch(&mut self) {
        let fetched = timeout(FETCH_TIMEOUT, fetch_key_set(&self.source)).await;
        let fetched =
            fetched.unwrap_or_else(|_elapsed| Err("no complete response within 5 s".to_owned()));
        let fetched = fetched.and_then(|(text, max_age)| {
            let is_new = text != self.text;
            if is_new {
                self.use_key_set(text)?;
            }
            Ok((is_new, max_age))
        });
        let url = self.source.url.clone();
        match fetched {
            Ok((is_new, max_age)) => {
                self.count(|counts| counts.succeeded += 1);
                if is_new || self.backoff > MIN_BACKOFF {
                    tracing::info!(%url, changed = is_new, "token keys fetched");
                }
                self.backoff = MIN_BACKOFF;
                let interval = max_age.map_or(self.source.refresh_interval, |max_age| {
                    max_age.clamp(MIN_MAX_AGE, MAX_MAX_AGE)
                });
                // The jitter spreads the fetches of a fleet.
                self.next_fetch = Instant::now() + interval.mul_f64(0.9 + fastrand::f64() / 10.0);
                self.stale_end = Some(Instant::now() + self.source.max_stale);
                if let Some(file) = self.cache_file.clone() {
                    let text = self.text.clone();
                    drop(spawn_blocking(move || write_cache_file(&file, &text)).await);
                }
            }
            Err(error) => {
                self.count(|counts| counts.failed += 1);
                if self.backoff == MIN_BACKOFF {
                    let has_keys = self.stale_end.is_some();
                    tracing::warn!(%url, error, has_keys, "failed to fetch token keys; retrying");
                }
                self.next_fetch =
                    Instant::now() + self.backoff.mul_f64(0.5 + fastrand::f64() / 2.0);
                self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
            }
        }
    }

    fn count(&self, add: impl FnOnce(&mut KeyFetchCounts)) {
        if let Some(counts) = self.counts.lock().get_mut(&self.source.url.to_string()) {
            add(counts);
        }
    }

    /// Parses a JWK set and publishes its keys.
    fn use_key_set(&mut self, text: String) -> Result<(), String> {
        let (keys, warnings) = VerificationKeys::from_jwks(&text, true)?;
        for warning in warnings {
            tracing::warn!(url = %self.source.url, "token keys: {warning}");
        }
        self.cell.replace(Some(keys));
        self.text = text;
        Ok(())
    }

    /// Waits until the next fetch is due, or a token with an unknown key causes one. Keys that
    /// become too old meanwhile are dropped.
    async fn wait_for_next_fetch(&mut self) {
        loop {
            let stale_end = self.stale_end.unwrap_or(self.next_fetch);
            tokio::select! {
                () = sleep_until(self.next_fetch) => return,
                () = sleep_until(stale_end), if self.stale_end.is_some() => {
                    self.stale_end = None;
                    self.text.clear();
                    self.cell.replace(None);
                    tracing::error!(url = %self.source.url, "token keys are too old; no token is accepted");
                }
                () = wait_for_allowed_request(&self.cell, self.refresh_allowed) => {
                    self.refresh_allowed = Instant::now() + self.source.cooldown;
                    return;
                }
            }
        }
    }
}

/// Waits for a token with an unknown key. Such tokens before `allowed` are ignored.
async fn wait_for_allowed_request(cell: &KeyCell, allowed: Instant) {
    sleep_until(allowed).await;
    cell.wait_for_refresh_request().await;
}

/// Fetches the JWK set of a source. Returns its text, and how long it may be used without another
/// fetch; `None` if the response does not say.
///
/// # Errors
/// Returns a message without any content of the response.
async fn fetch_key_set(source: &KeySource) -> Result<(String, Option<Duration>), String> {
    let stream = http_client::connect(&source.url, source.tls.as_ref(), &[]).await?;
    let request = Request::get(&source.url.path_and_query)
        .header(HOST, &source.url.authority)
        .header(ACCEPT, "application/jwk-set+json, application/json")
        .header(USER_AGENT, concat!("tidegate/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Full::default())
        .map_err(|error| error.to_string())?;
    let is_read = |status| status == StatusCode::OK;
    let response = http_client::fetch(stream, request, MAX_KEY_SET_BYTES, is_read)
        .await
        .map_err(|error| error.to_string())?;
    match response.status() {
        StatusCode::OK => {}
        status if status.is_redirection() => {
            return Err(format!("status {status}: redirections are not followed"));
        }
        status => return Err(format!("status {status}")),
    }
    let max_age = read_max_age(response.headers());
    let text = String::from_utf8(response.into_body().into())
        .map_err(|_invalid| "the body is not UTF-8".to_owned())?;
    Ok((text, max_age))
}

/// The remaining freshness by `Cache-Control` and `Age`. `no-store` and `no-cache` are a freshness
/// of zero.
fn read_max_age(headers: &HeaderMap) -> Option<Duration> {
    let values = headers.get_all(CACHE_CONTROL).iter();
    let directives: Vec<String> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|directive| directive.trim().to_ascii_lowercase())
        .collect();
    if directives.iter().any(|directive| {
        let name = directive.split('=').next().unwrap_or_default();
        matches!(name.trim(), "no-store" | "no-cache")
    }) {
        return Some(Duration::ZERO);
    }
    let seconds = directives.iter().find_map(|directive| {
        let (name, value) = directive.split_once('=')?;
        (name.trim() == "max-age").then_some(())?;
        value.trim().trim_matches('"').parse::<u64>().ok()
    })?;
    let age = headers
        .get(AGE)
        .and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Some(Duration::from_secs(
        seconds.saturating_sub(age.unwrap_or(0)),
    ))
}

/// The file of the keys of a source, if it has a directory for them.
fn cache_file(source: &KeySource) -> Option<PathBuf> {
    let directory = source.cache_dir.as_ref()?;
    let digest = Sha256::digest(format!(
        "{}{}",
        source.url.authority, source.url.path_and_query
    ));
    let id = u128::from_be_bytes(*digest.first_chunk()?);
    Some(directory.join(format!("keys-{id:032x}.json")))
}

/// Reads cached keys, and when they were stored, in seconds since the Unix epoch. A time in the
/// future counts as now.
fn read_cache_file(path: &Path) -> Option<(String, u64)> {
    let read = || -> io::Result<_> {
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > MAX_KEY_SET_BYTES as u64 {
            return Err(io::Error::other("not a file of keys"));
        }
        let stored = metadata.modified()?.duration_since(UNIX_EPOCH);
        let stored_s = stored.map_or(0, |since| since.as_secs());
        Ok((
            fs::read_to_string(path)?,
            stored_s.min(clock::unix_time_s()),
        ))
    };
    match read() {
        Ok(loaded) => Some(loaded),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "cannot read cached token keys");
            None
        }
    }
}

/// Writes keys. Instances may share the directory: the file is replaced as a whole.
fn write_cache_file(path: &Path, text: &str) {
    let new = path.with_extension(format!("{}.tmp", fastrand::u32(..)));
    if let Err(error) = fs::write(&new, text).and_then(|()| fs::rename(&new, path)) {
        drop(fs::remove_file(&new));
        tracing::warn!(file = %path.display(), %error, "cannot store token keys");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    #[test]
    fn reads_the_remaining_freshness() {
        let max_age_s = |lines: &[(HeaderName, &str)]| {
            let headers: HeaderMap = lines
                .iter()
                .map(|(name, value)| (name.clone(), value.parse().unwrap()))
                .collect();
            read_max_age(&headers).map(|age| age.as_secs())
        };
        let control = |value: &'static str| (CACHE_CONTROL, value);
        assert_eq!(max_age_s(&[]), None);
        assert_eq!(max_age_s(&[control("public")]), None);
        assert_eq!(max_age_s(&[control("public, Max-Age=300")]), Some(300));
        assert_eq!(
            max_age_s(&[control("public"), control("max-age=\"7\"")]),
            Some(7)
        );
        assert_eq!(
            max_age_s(&[control("max-age=300"), (AGE, "100")]),
            Some(200)
        );
        assert_eq!(max_age_s(&[control("max-age=300"), (AGE, "900")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=300, no-store")]), Some(0));
        assert_eq!(max_age_s(&[control("no-cache")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=x")]), None);
        assert_eq!(max_age_s(&[control("s-maxage=5")]), None);
    }
}
