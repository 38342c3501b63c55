//! Issuers of tokens, the keys that verify their tokens, and the algorithms of each key (RFC 7515,
//! 7517, 8725).

use super::TokenError;
use crate::http_client::HttpUrl;
use crate::tls::ClientTls;
use arc_swap::ArcSwapOption;
use futures_util::task::AtomicWaker;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use serde_json::Value;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Poll;
use std::time::Duration;

/// Maximum number of keys tried for one token. An invalid token without a key id must not cost one
/// verification per key of a large set.
const MAX_KEYS_TRIED: usize = 4;
/// Maximum number of keys in a set. Each one takes memory, and a log line if it cannot be used.
const MAX_KEYS: usize = 1000;
/// Minimum secret size for HMAC with SHA-256 (RFC 7518, section 3.2).
const MIN_SECRET_BYTES: usize = 32;

/// An issuer of tokens.
#[derive(Debug)]
pub struct TokenIssuer {
    /// The `iss` of its tokens. `None` accepts any; then it is the only issuer.
    pub name: Option<Box<str>>,
    /// A token must be for one of these audiences (`aud`). Empty accepts any.
    pub audiences: Vec<String>,
    pub keys: IssuerKeys,
}

/// The keys of an issuer.
#[derive(Debug)]
pub struct IssuerKeys {
    /// The URL of the keys. `None` for keys from a file, which never change.
    pub source: Option<KeySource>,
    /// Tables with an equal source share a cell.
    cell: OnceLock<Arc<KeyCell>>,
}

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

/// The present keys of an issuer, and whether a request missed one. A task outside of this module
/// fetches them; requests only read them.
#[derive(Debug, Default)]
pub struct KeyCell {
    keys: ArcSwapOption<VerificationKeys>,
    is_refresh_requested: AtomicBool,
    refresh_waker: AtomicWaker,
}

/// The keys that a token was verified with, and the position of their issuer.
#[derive(Clone, Debug)]
pub(super) struct UsedKeys {
    issuer: usize,
    keys: Weak<VerificationKeys>,
}

impl UsedKeys {
    /// Whether the keys are still those of their issuer.
    pub(super) fn are_current(&self, issuers: &[TokenIssuer]) -> bool {
        let cell = issuers.get(self.issuer).and_then(|one| one.keys.cell.get());
        cell.is_some_and(|cell| {
            let keys = cell.keys.load();
            let is_same = |keys: &Arc<_>| Arc::as_ptr(keys) == self.keys.as_ptr();
            keys.as_ref().is_some_and(is_same)
        })
    }
}

/// Returns the claims of a token that a trusted issuer has signed for an expected audience.
/// Requests other keys of the issuer if none of the present ones fits.
pub(super) fn verify_token(
    issuers: &[TokenIssuer],
    token: &str,
) -> Result<(Value, UsedKeys), TokenError> {
    let (position, issuer) = find_issuer(issuers, token)?;
    let cell = issuer.keys.cell.get().ok_or(TokenError::KeysUnavailable)?;
    let keys = cell.keys.load_full().ok_or(TokenError::KeysUnavailable)?;
    let verified = keys.verify_token(token);
    if let Err(TokenError::UnknownKey | TokenError::InvalidSignature) = verified {
        cell.request_refresh();
    }
    let claims = verified?;
    if !issuer.accepts_audience(&claims) {
        return Err(TokenError::WrongAudience);
    }
    let used = UsedKeys {
        issuer: position,
        keys: Arc::downgrade(&keys),
    };
    Ok((claims, used))
}

/// Finds the issuer that a token names. Its keys then decide whether that is true.
fn find_issuer<'i>(
    issuers: &'i [TokenIssuer],
    token: &str,
) -> Result<(usize, &'i TokenIssuer), TokenError> {
    if let [only] = issuers
        && only.name.is_none()
    {
        return Ok((0, only));
    }
    let claims = decode_unverified_claims(token)?;
    let name = claims.get("iss").and_then(Value::as_str);
    let mut issuers = issuers.iter().enumerate();
    issuers
        .find(|(_, issuer)| issuer.name.is_some() && issuer.name.as_deref() == name)
        .ok_or(TokenError::UnknownIssuer)
}

impl TokenIssuer {
    fn accepts_audience(&self, claims: &Value) -> bool {
        let is_expected = |audience: &Value| {
            let audience = audience.as_str();
            audience.is_some_and(|audience| self.audiences.iter().any(|own| own == audience))
        };
        self.audiences.is_empty()
            || match claims.get("aud") {
                Some(Value::Array(audiences)) => audiences.iter().any(is_expected),
                Some(audience) => is_expected(audience),
                None => false,
            }
    }
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

/// Keys that never change.
impl From<VerificationKeys> for IssuerKeys {
    fn from(keys: VerificationKeys) -> Self {
        let cell = KeyCell::default();
        cell.replace(Some(keys));
        Self {
            source: None,
            cell: Arc::new(cell).into(),
        }
    }
}

/// Keys of a URL, which are absent until a task is attached.
impl From<KeySource> for IssuerKeys {
    fn from(source: KeySource) -> Self {
        Self {
            source: Some(source),
            cell: OnceLock::new(),
        }
    }
}

impl IssuerKeys {
    /// Connects these keys to the task that fetches them. Only the first call has an effect.
    pub fn attach(&self, cell: Arc<KeyCell>) {
        self.cell.get_or_init(|| cell);
    }
}

impl KeyCell {
    /// Replaces the keys. `None`: no token is accepted.
    pub fn replace(&self, keys: Option<VerificationKeys>) {
        self.keys.store(keys.map(Arc::new));
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

    /// Waits for a token with an unknown key from now on. Only one task may wait.
    pub async fn wait_for_refresh_request(&self) {
        self.is_refresh_requested.store(false, Ordering::Release);
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
}

/// The trusted keys; never empty.
#[derive(Debug)]
pub struct VerificationKeys(Box<[VerificationKey]>);

#[derive(Debug)]
struct VerificationKey {
    /// Accepts tokens with this key id, or without one. `None` accepts any, because the key is the
    /// only one.
    key_id: Option<Option<String>>,
    /// The key itself, which its `Debug` output does not reveal.
    key: DecodingKey,
    /// The only algorithms that the key may be used with.
    algorithms: Vec<Algorithm>,
}

impl VerificationKeys {
    /// Creates a set of one shared secret. Returns it with warnings about the secret.
    pub fn from_secret(secret: &[u8]) -> (Self, Vec<String>) {
        let key = DecodingKey::from_secret(secret);
        let warning = short_secret_warning(&key).map(|warning| format!("the secret {warning}"));
        let trusted = VerificationKey {
            key_id: None,
            algorithms: key.family().algorithms().to_vec(),
            key,
        };
        (Self([trusted].into()), warning.into_iter().collect())
    }

    /// Parses the usable keys of a JWK set (RFC 7517). Also returns warnings, and the reasons for
    /// skipped keys. Skips secrets if everyone can read the set: with a public secret, everyone can
    /// sign tokens.
    ///
    /// # Errors
    /// Returns a message that reveals nothing of the text's content.
    pub fn from_jwks(text: &str, is_public: bool) -> Result<(Self, Vec<String>), String> {
        const EXPECTED: &str = "expected a JWK set such as {\"keys\": [{\"kty\": \"RSA\", …}]}";
        let mut set: Value = serde_json::from_str(text).map_err(|error| {
            format!(
                "invalid JSON at line {}, column {}; {EXPECTED}",
                error.line(),
                error.column()
            )
        })?;
        let Some(Value::Array(keys)) = set.get_mut("keys").map(Value::take) else {
            return Err(EXPECTED.to_owned());
        };
        if keys.len() > MAX_KEYS {
            return Err(format!(
                "it has {} keys; expected at most {MAX_KEYS}",
                keys.len()
            ));
        }
        let (mut trusted, mut warnings) = (Vec::new(), Vec::new());
        for (number, key) in (1..).zip(keys) {
            let is_private = key.get("d").is_some();
            if is_public && key.get("kty").and_then(Value::as_str) == Some("oct") {
                warnings.push(format!("key {number} is skipped: it is a secret"));
                continue;
            }
            match VerificationKey::from_jwk(key) {
                Ok(key) => {
                    let warning = short_secret_warning(&key.key);
                    warnings.extend(warning.map(|warning| format!("key {number} {warning}")));
                    trusted.push(key);
                }
                Err(Some(reason)) => warnings.push(format!("key {number} is skipped: {reason}")),
                Err(None) => {}
            }
            if is_private {
                warnings.push(format!(
                    "key {number} contains its private part: every reader of the file can sign tokens"
                ));
            }
        }
        if trusted.is_empty() {
            let why = warnings
                .first()
                .map_or_else(String::new, |warning| format!(" ({warning})"));
            return Err(format!("none of its keys can verify a token{why}"));
        }
        Ok((Self(trusted.into()), warnings))
    }

    /// Returns the claims of a token, if one of these keys has signed it.
    pub(super) fn verify_token(&self, token: &str) -> Result<Value, TokenError> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        // This also rejects unknown algorithms, such as "none".
        let header = jsonwebtoken::decode_header(token).map_err(|_broken| TokenError::Malformed)?;
        if header.crit.is_some() {
            // The `crit` extensions must be understood (RFC 7515, section 4.1.11), and none is
            // supported.
            return Err(TokenError::Malformed);
        }
        let is_candidate = |key: &&VerificationKey| {
            let is_key = |own: &_| header.kid.is_none() || *own == header.kid;
            key.algorithms.contains(&header.alg) && key.key_id.as_ref().is_none_or(is_key)
        };
        let mut error = TokenError::UnknownKey;
        for trusted in self.0.iter().filter(is_candidate).take(MAX_KEYS_TRIED) {
            // `jsonwebtoken::decode` would check dates by its own rules, and reject a `sub` that is
            // no string.
            if let Ok(true) =
                jsonwebtoken::crypto::verify(signature, signed.as_bytes(), &trusted.key, header.alg)
            {
                return decode_unverified_claims(token);
            }
            error = TokenError::InvalidSignature;
        }
        Err(error)
    }
}

/// Returns the claims of a token without verifying its signature.
pub(super) fn decode_unverified_claims(token: &str) -> Result<Value, TokenError> {
    if token.split('.').count() != 3 {
        return Err(TokenError::Malformed);
    }
    jsonwebtoken::dangerous::insecure_decode_claims(token).map_err(|_broken| TokenError::Malformed)
}

impl VerificationKey {
    /// Converts a key of a set.
    ///
    /// # Errors
    /// Returns the reason why the key is unusable, or `None` if it is clearly intended for another
    /// use.
    fn from_jwk(key: Value) -> Result<Self, Option<String>> {
        let unusable = |reason: &str| Some(reason.to_owned());
        // The library's error would repeat the key's content.
        let jwk: Jwk =
            serde_json::from_value(key).map_err(|_unread| unusable("it is not a valid JWK"))?;
        let is_for_other_use = match (&jwk.common.public_key_use, &jwk.common.key_operations) {
            (Some(used_for), _) if *used_for != PublicKeyUse::Signature => true,
            (_, Some(operations)) => !operations.contains(&KeyOperations::Verify),
            _ => false,
        };
        if is_for_other_use {
            return Err(None);
        }
        if let AlgorithmParameters::Other(_) = jwk.algorithm {
            return Err(unusable(
                "a parameter required by its kty is missing or not supported",
            ));
        }
        let key = DecodingKey::from_jwk(&jwk)
            .map_err(|_broken| unusable("its key data is not valid base64url"))?;
        let bytes = key_bytes(&key);
        let mut algorithms = key.family().algorithms().to_vec();
        let has_valid_size = match &jwk.algorithm {
            // Base64 encodes six bits per character, so 2048 bits have 342 characters.
            AlgorithmParameters::RSA(rsa) => rsa.n.len() >= 341,
            AlgorithmParameters::EllipticCurve(ec) => {
                let (algorithm, size) = match ec.curve {
                    EllipticCurve::P256 => (Algorithm::ES256, 65),
                    EllipticCurve::P384 => (Algorithm::ES384, 97),
                    _ => return Err(unusable("its curve is not supported")),
                };
                algorithms = vec![algorithm];
                bytes == size
            }
            AlgorithmParameters::OctetKeyPair(pair) => match pair.curve {
                EllipticCurve::Ed25519 => bytes == 32,
                _ => return Err(unusable("its curve is not supported")),
            },
            AlgorithmParameters::OctetKey(_) => bytes > 0,
            _ => return Err(unusable("its key type is not supported")),
        };
        if !has_valid_size {
            return Err(unusable("its size is invalid for its key type"));
        }
        match jwk.common.key_algorithm.map(Algorithm::try_from) {
            None => {}
            Some(Ok(declared)) => algorithms.retain(|known| *known == declared),
            Some(Err(_unsupported)) => return Err(None),
        }
        if algorithms.is_empty() {
            return Err(unusable("its alg and its kty contradict each other"));
        }
        Ok(Self {
            key_id: Some(jwk.common.key_id),
            key,
            algorithms,
        })
    }
}

/// The size of a key; 0 for RSA.
fn key_bytes(key: &DecodingKey) -> usize {
    key.try_get_as_bytes().map_or(0, <[u8]>::len)
}

fn short_secret_warning(key: &DecodingKey) -> Option<String> {
    let bytes = key_bytes(key);
    (key.family() == AlgorithmFamily::Hmac && bytes < MIN_SECRET_BYTES).then(|| {
        format!("has {bytes} bytes and may be guessed; expected {MIN_SECRET_BYTES} or more")
    })
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
