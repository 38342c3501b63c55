//! The task of one source: when its keys are fetched, and how long they are used.

use super::FetchCounters;
use super::key_cache::KeyCache;
use super::key_request;
use crate::clock;
use crate::policy::jwt::{KeyCell, KeySource, VerificationKeys};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Bounds of `Cache-Control: max-age`: an issuer can neither be polled all the time nor keep a
/// revoked key in use for days.
const MIN_MAX_AGE: Duration = Duration::from_secs(5);
const MAX_MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Bounds of the pause after a failed fetch. It doubles up to the maximum.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Fetches the keys of one source.
pub(super) struct KeyRefresher {
    source: KeySource,
    cell: Arc<KeyCell>,
    counters: Arc<FetchCounters>,
    cache: Option<KeyCache>,
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
    pub(super) fn new(source: KeySource, cell: Arc<KeyCell>, counters: Arc<FetchCounters>) -> Self {
        let now = Instant::now();
        Self {
            cache: source
                .cache_dir
                .as_ref()
                .map(|directory| KeyCache::new(directory, &source.url)),
            source,
            cell,
            counters,
            text: String::new(),
            backoff: MIN_BACKOFF,
            next_fetch: now,
            refresh_allowed: now,
            stale_end: None,
        }
    }

    pub(super) async fn run(mut self) {
        self.load_cached_keys().await;
        loop {
            self.fetch().await;
            self.wait_for_next_fetch().await;
        }
    }

    /// Uses the keys that an earlier process fetched, if they are not too old.
    async fn load_cached_keys(&mut self) {
        let Some(cache) = &self.cache else { return };
        let Some((text, fetched_unix_s)) = cache.load().await else {
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
        let fetched = key_request::fetch_key_set(&self.source).await;
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
                self.counters.succeeded.fetch_add(1, Ordering::Relaxed);
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
                if let Some(cache) = &self.cache {
                    cache.store(self.text.clone()).await;
                }
            }
            Err(error) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
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
    cell.clear_refresh_request();
    cell.wait_for_refresh_request().await;
}
