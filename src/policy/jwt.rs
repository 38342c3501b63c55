//! Claims of a request's JSON Web Token (RFC 7519).
//!
//! A token is verified when a policy first reads a claim, and only once per request. A request with
//! an absent, invalid or expired token counts as a request without claims. Authentication stays
//! with the upstream: a token never grants access here.

mod claim_name;
mod keys;
mod token_header;

pub use claim_name::ClaimName;
pub use keys::{IssuerKeys, KeyCell, KeySource, TokenIssuer, VerificationKeys, parse_key_url};

use foldhash::fast::RandomState;
use http::{HeaderMap, HeaderName, HeaderValue};
use indexmap::{IndexMap, IndexSet};
use keys::UsedKeys;
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use token_header::{TokenField, read_token_field};

/// Maximum token size. Few servers accept a header field of this size; larger tokens are rejected.
pub const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Tolerated clock difference between the token's issuer and this process, in seconds.
pub const LEEWAY_S: u64 = 30;

/// Where tokens are found, and how they are verified.
#[derive(Debug)]
pub struct Settings {
    /// `authorization`, or a header that contains the token alone.
    pub header: HeaderName,
    /// A token must be signed with a key of one of these. `None`: signatures are not checked, and
    /// every token is accepted.
    pub issuers: Option<Vec<TokenIssuer>>,
}

/// The texts of a claim that conditions are tested against: a string, or a number or boolean in its
/// JSON notation. Those of a list; none of an object. `None` if the claim is missing or `null`.
type ClaimTexts = Option<Vec<Box<str>>>;

/// Reads tokens for the policies of one policy table.
#[derive(Debug)]
pub struct TokenReader {
    pub settings: Settings,
    /// The claims that some policy reads, without duplicates. All other claims are dropped.
    claim_names: IndexSet<ClaimName>,
    cache: VerifiedTokenCache,
}

/// The token of one request, verified on first use.
#[derive(Debug, Default)]
pub struct RequestToken {
    reader: Option<Arc<TokenReader>>,
    /// The current wall-clock time in seconds since the Unix epoch.
    now_s: u64,
    claims_result: OnceLock<Result<Arc<TokenClaims>, TokenError>>,
}

/// Why a token is rejected. No message reveals the token's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is absent")]
    Absent,
    #[error("the token is not a signed JWT with three parts")]
    Malformed,
    #[error("the token is larger than {MAX_TOKEN_BYTES} bytes")]
    TooLarge,
    #[error("no trusted key has the token's key id and algorithm")]
    UnknownKey,
    #[error("the signature matches no trusted key")]
    InvalidSignature,
    #[error("exp or nbf is not a number")]
    InvalidDates,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYetValid,
    #[error("the iss of the token is none of the configured issuers")]
    UnknownIssuer,
    #[error("the aud of the token is none of the configured audiences")]
    WrongAudience,
    #[error("the keys of the token's issuer have not been fetched")]
    KeysUnavailable,
}

/// The claims of an accepted token.
#[derive(Debug)]
struct TokenClaims {
    /// In the order of [`TokenReader::claim_names`].
    claims: Box<[ClaimTexts]>,
    /// Seconds since the Unix epoch; a token without this date does not expire.
    expires_at_s: Option<u64>,
    not_before_s: Option<u64>,
}

impl Settings {
    /// The trusted issuers if there are several; empty otherwise.
    pub fn several_issuers(&self) -> Arc<[Box<str>]> {
        match self.issuers.as_deref() {
            Some(issuers @ [_, _, ..]) => {
                let names = issuers.iter().filter_map(|issuer| issuer.name.clone());
                names.collect()
            }
            _ => Arc::default(),
        }
    }
}

impl RequestToken {
    /// Creates an unread token. `now_s` is in seconds since the Unix epoch. Without a reader, every
    /// claim is absent.
    pub fn new(reader: Option<&Arc<TokenReader>>, now_s: u64) -> Self {
        Self {
            reader: reader.cloned(),
            now_s,
            claims_result: OnceLock::new(),
        }
    }

    /// An empty token, for requests without a token reader.
    pub fn without_token_reader() -> &'static Self {
        static NONE: RequestToken = RequestToken {
            reader: None,
            now_s: 0,
            claims_result: OnceLock::new(),
        };
        &NONE
    }

    /// The texts of a claim, or `None` if it is absent. Every call must pass the headers of the
    /// same request.
    pub(super) fn claim(&self, headers: &HeaderMap, name: &ClaimName) -> Option<&[Box<str>]> {
        let reader = self.reader.as_ref()?;
        let claims_result = self
            .claims_result
            .get_or_init(|| reader.read_claims(headers, self.now_s));
        let position = reader.claim_names.get_index_of(name)?;
        claims_result
            .as_ref()
            .ok()?
            .claims
            .get(position)?
            .as_deref()
    }

    /// Why the token was rejected. `None` if there is no token, or no policy has read a claim yet.
    pub fn error(&self) -> Option<TokenError> {
        self.claims_result
            .get()?
            .as_ref()
            .err()
            .copied()
            .filter(|error| *error != TokenError::Absent)
    }
}

impl TokenReader {
    pub(super) fn new(settings: Settings, claim_names: IndexSet<ClaimName>) -> Self {
        Self {
            settings,
            claim_names,
            cache: VerifiedTokenCache::default(),
        }
    }

    /// The keys of the issuers.
    pub fn issuer_keys(&self) -> impl Iterator<Item = &IssuerKeys> {
        let issuers = self.settings.issuers.iter().flatten();
        issuers.map(|issuer| &issuer.keys)
    }

    /// Whether the header occurs more than once. If so, the upstream could read another token than
    /// tidegate.
    pub fn has_duplicate_header(&self, headers: &HeaderMap) -> bool {
        headers
            .get_all(&self.settings.header)
            .iter()
            .nth(1)
            .is_some()
    }

    /// Whether the header occurs more than once, or has a token among several words or elements. If
    /// so, the upstream could read another token than tidegate, or none.
    pub fn has_ambiguous_token(&self, headers: &HeaderMap) -> bool {
        let field = headers.get(&self.settings.header);
        let is_ambiguous =
            |field: &HeaderValue| self.read_field(field.as_bytes()) == TokenField::Ambiguous;
        self.has_duplicate_header(headers) || field.is_some_and(is_ambiguous)
    }

    fn read_field<'h>(&self, field: &'h [u8]) -> TokenField<'h> {
        read_token_field(field, self.settings.header == http::header::AUTHORIZATION)
    }

    fn read_claims(&self, headers: &HeaderMap, now_s: u64) -> Result<Arc<TokenClaims>, TokenError> {
        let token = self.extract_token(headers)?;
        let Some(issuers) = &self.settings.issuers else {
            let claims = keys::decode_unverified_claims(token)?;
            let claims = TokenClaims::new(&claims, &self.claim_names)?;
            return claims.check_dates(now_s).map(|()| Arc::new(claims));
        };
        let id: [u8; 32] = Sha256::digest(token).into();
        if let Some(cached) = self.cache.get(&id)
            && cached.used_keys.are_current(issuers)
        {
            return cached.claims.check_dates(now_s).map(|()| cached.claims);
        }
        let (claims, used_keys) = keys::verify_token(issuers, token)?;
        let claims = Arc::new(TokenClaims::new(&claims, &self.claim_names)?);
        claims.check_dates(now_s)?;
        self.cache.insert(id, &claims, used_keys);
        Ok(claims)
    }

    /// Extracts the token from its header, whatever its authentication scheme.
    fn extract_token<'h>(&self, headers: &'h HeaderMap) -> Result<&'h str, TokenError> {
        let field = headers
            .get(&self.settings.header)
            .ok_or(TokenError::Absent)?;
        let token = match self.read_field(field.as_bytes()) {
            TokenField::Token(token) => token,
            TokenField::Absent => return Err(TokenError::Absent),
            TokenField::Malformed | TokenField::Ambiguous => return Err(TokenError::Malformed),
        };
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::TooLarge);
        }
        std::str::from_utf8(token).map_err(|_not_text| TokenError::Malformed)
    }
}

impl TokenClaims {
    fn new(claims: &Value, claim_names: &IndexSet<ClaimName>) -> Result<Self, TokenError> {
        if !claims.is_object() {
            return Err(TokenError::Malformed);
        }
        Ok(Self {
            claims: claim_names
                .iter()
                .map(|name| name.read_value(claims))
                .collect(),
            expires_at_s: parse_numeric_date(claims, "exp")?,
            not_before_s: parse_numeric_date(claims, "nbf")?,
        })
    }

    fn check_dates(&self, now_s: u64) -> Result<(), TokenError> {
        match (self.expires_at_s, self.not_before_s) {
            (Some(end_s), _) if now_s >= end_s.saturating_add(LEEWAY_S) => Err(TokenError::Expired),
            (_, Some(start_s)) if start_s > now_s.saturating_add(LEEWAY_S) => {
                Err(TokenError::NotYetValid)
            }
            _ => Ok(()),
        }
    }

    /// Memory of all texts in bytes. A list of empty texts takes memory too.
    fn memory_bytes(&self) -> usize {
        self.claims
            .iter()
            .flatten()
            .flatten()
            .map(|text| size_of::<Box<str>>() + text.len())
            .sum()
    }
}

/// Parses a date into whole seconds since the Unix epoch. RFC 7519, section 2, allows fractions.
fn parse_numeric_date(claims: &Value, name: &str) -> Result<Option<u64>, TokenError> {
    let Some(value) = claims.get(name) else {
        return Ok(None);
    };
    let fraction = || {
        Duration::try_from_secs_f64(value.as_f64()?)
            .ok()
            .map(|time| time.as_secs())
    };
    value
        .as_u64()
        .or_else(fraction)
        .map(Some)
        .ok_or(TokenError::InvalidDates)
}

/// Cache of verified tokens, by their hashes. A verification costs as much as the rest of a
/// request's processing, and clients send the same token many times.
///
/// The caller checks the dates of each cached token, and whether the keys that verified it are
/// still in use. The cache is process-wide, in shards with one lock each.
#[derive(Debug, Default)]
struct VerifiedTokenCache([Mutex<TokenCacheShard>; CACHE_SHARD_COUNT]);

type TokenCacheShard = IndexMap<[u8; 32], VerifiedToken, RandomState>;

/// The claims of a verified token, and the keys that verified it.
#[derive(Clone, Debug)]
struct VerifiedToken {
    claims: Arc<TokenClaims>,
    used_keys: UsedKeys,
}

/// Number of cache shards: enough that workers rarely wait for each other.
const CACHE_SHARD_COUNT: usize = 16;
/// Maximum tokens per shard: 4096 in total, of a few hundred bytes each.
const MAX_TOKENS_PER_SHARD: usize = 256;
/// Tokens with more claim data are verified every time, which bounds the cache's memory.
const MAX_CACHED_CLAIM_BYTES: usize = 2 << 10;

impl VerifiedTokenCache {
    fn shard(&self, id: &[u8; 32]) -> Option<&Mutex<TokenCacheShard>> {
        self.0.get(usize::from(id[0]) % CACHE_SHARD_COUNT)
    }

    fn get(&self, id: &[u8; 32]) -> Option<VerifiedToken> {
        self.shard(id)?.lock().get(id).cloned()
    }

    fn insert(&self, id: [u8; 32], claims: &Arc<TokenClaims>, used_keys: UsedKeys) {
        if claims.memory_bytes() > MAX_CACHED_CLAIM_BYTES {
            return;
        }
        let Some(shard) = self.shard(&id) else { return };
        let mut shard = shard.lock();
        if shard.len() >= MAX_TOKENS_PER_SHARD {
            // Evicts a random entry: no client profits from it, and no access order must be kept.
            let index = fastrand::usize(..shard.len());
            shard.swap_remove_index(index);
        }
        let claims = Arc::clone(claims);
        shard.insert(id, VerifiedToken { claims, used_keys });
    }
}

#[cfg(test)]
mod tests;
