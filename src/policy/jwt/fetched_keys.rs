//! Keys that a URL serves. A task outside of this module fetches them; requests only read them.

use super::TokenError;
use super::keys::VerificationKeys;
use crate::http_client::HttpUrl;
use crate::tls::ClientTls;
use arc_swap::ArcSwapOption;
use futures_util::task::AtomicWaker;
use serde_json::Value;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

/// A URL of keys, and how they are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySource {
    pub url: HttpUrl,
    /// Present exactly if the scheme is https.
    pub tls: Option<ClientTls>,
    /// Directory for fetched keys, which the next process starts with.
    pub cache_dir: Option<PathBuf>,
    /// Interval between two fetches if the response does not specify one.
    pub refresh_interval: Duration,
    /// Minimum time between two fetches because of unknown keys.
    pub cooldown: Duration,
    /// How long keys are used after the last successful fetch.
    pub max_stale: Duration,
}

/// The keys of one source, as one policy table reads them. Tables with an equal source share a
/// [`KeyCell`].
#[derive(Debug)]
pub struct FetchedKeys {
    pub source: KeySource,
    cell: OnceLock<Arc<KeyCell>>,
}

/// The present keys of a source, and whether a request missed one.
#[derive(Debug, Default)]
pub struct KeyCell {
    keys: ArcSwapOption<VerificationKeys>,
    /// Incremented with every change of `keys`.
    version: AtomicU64,
    is_refresh_requested: AtomicBool,
    refresh_waker: AtomicWaker,
}

/// Parses the URL of a JWK set.
///
/// # Errors
/// Returns a message that states the expected form.
pub fn parse_key_url(text: &str) -> Result<HttpUrl, String> {
    let url = HttpUrl::parse(text, [80, 443])
        .ok_or("expected a URL such as \"https://issuer/.well-known/jwks.json\"")?;
    if url.has_credentials() {
        Err("a URL of keys has no login; expected https://host/path".to_owned())
    } else {
        Ok(url)
    }
}

impl FetchedKeys {
    pub fn new(source: KeySource) -> Self {
        Self {
            source,
            cell: OnceLock::new(),
        }
    }

    /// Connects these keys to the task that fetches them. Only the first call has an effect.
    pub fn attach(&self, cell: Arc<KeyCell>) {
        self.cell.get_or_init(|| cell);
    }

    pub(super) fn version(&self) -> u64 {
        let cell = self.cell.get();
        cell.map_or(0, |cell| cell.version.load(Ordering::Acquire))
    }

    /// Verifies a token with the present keys. Requests other keys if none of these fits.
    pub(super) fn verify_token(&self, token: &str) -> Result<Value, TokenError> {
        let cell = self.cell.get().ok_or(TokenError::KeysUnavailable)?;
        let keys = cell.keys.load();
        let Some(keys) = keys.as_ref() else {
            return Err(TokenError::KeysUnavailable);
        };
        let verified = keys.verify_token(token);
        if let Err(TokenError::UnknownKey | TokenError::InvalidSignature) = verified {
            cell.request_refresh();
        }
        verified
    }
}

impl KeyCell {
    /// Replaces the keys. `None`: no token is accepted.
    pub fn replace(&self, keys: Option<VerificationKeys>) {
        self.keys.store(keys.map(Arc::new));
        self.version.fetch_add(1, Ordering::Release);
    }

    pub fn has_keys(&self) -> bool {
        self.keys.load().is_some()
    }

    fn request_refresh(&self) {
        // Reads first: a client may send many tokens with unknown keys.
        if !self.is_refresh_requested.load(Ordering::Relaxed)
            && !self.is_refresh_requested.swap(true, Ordering::AcqRel)
        {
            self.refresh_waker.wake();
        }
    }

    /// Waits for a token with an unknown key. Only one task may wait.
    pub async fn wait_for_refresh_request(&self) {
        poll_fn(|task| {
            self.refresh_waker.register(task.waker());
            if self.is_refresh_requested.load(Ordering::Acquire) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Discards earlier requests for a refresh.
    pub fn clear_refresh_request(&self) {
        self.is_refresh_requested.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_urls_and_shows_them_without_query() {
        let url = parse_key_url("https://issuer.example/keys?token=secret").unwrap();
        assert_eq!(
            (url.is_tls, &*url.host, url.port),
            (true, "issuer.example", 443)
        );
        assert_eq!(url.path_and_query, "/keys?token=secret");
        assert_eq!(url.to_string(), "https://issuer.example/keys");
        let url = parse_key_url("http://[::1]:8080").unwrap();
        assert_eq!(
            (&*url.host, url.port, &*url.authority),
            ("::1", 8080, "[::1]:8080")
        );
        assert_eq!(url.path_and_query, "/");
        assert!(url.is_loopback());
        for (text, is_loopback) in [
            ("http://localhost/", true),
            ("http://127.1.2.3/", true),
            ("http://localhost.example/", false),
            ("http://10.0.0.1/", false),
        ] {
            assert_eq!(
                parse_key_url(text).unwrap().is_loopback(),
                is_loopback,
                "{text}"
            );
        }
        for invalid in [
            "",
            "issuer",
            "/keys",
            "ftp://issuer/",
            "https://",
            "https://ann:secret@issuer/",
            "https://issuer:0/",
            "https://issuer:99999/",
            "unix:/keys",
        ] {
            assert!(parse_key_url(invalid).is_err(), "{invalid}");
        }
    }
}
