//! What a request's JSON Web Token (RFC 7519) says of who sent it.
//!
//! A token is looked at when a policy first asks for a claim, and then once. One that is absent, cannot be verified or
//! does not hold now says nothing: its request is one without claims. We let nobody in by it, that is the upstream's
//! business; so issuer and audience are claims like others, to be matched by policies that care.

mod keys;

pub use keys::VerificationKeys;

use super::json_pointer::JsonPointer;
use foldhash::fast::RandomState;
use http::{HeaderMap, HeaderName};
use indexmap::IndexMap;
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Larger tokens say nothing. Few servers take a header field of this size.
pub const MAX_TOKEN_BYTES: usize = 16 << 10;
/// How far the clock of who issued a token may be from ours, in seconds.
pub const LEEWAY_S: u64 = 30;

/// Where tokens are found, and whom to believe.
#[derive(Debug)]
pub struct Settings {
    /// `authorization`, or a header that holds the token alone.
    pub header: HeaderName,
    pub verification: SignatureVerification,
}

/// Whose word a claim is.
#[derive(Debug)]
pub enum SignatureVerification {
    /// That of whoever has one of these keys.
    Keys(VerificationKeys),
    /// Anybody's: no signature is looked at.
    Disabled,
}

/// A claim that policies ask for: by its name, or by a JSON pointer (RFC 6901) if it begins with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimName(Box<str>);

/// What a token says of one claim.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClaimValue {
    /// Nothing, or `null`.
    Absent,
    /// A text, or a number or truth value as JSON writes it.
    Single(Box<str>),
    /// A list, of which only such values are kept.
    List(Box<[Box<str>]>),
    /// Something with a shape of its own.
    Object,
}

/// Reads tokens for the policies of one table.
#[derive(Debug)]
pub struct TokenReader {
    settings: Settings,
    /// Those that some policy asks for, each once; of the others nothing is kept.
    claim_names: Box<[ClaimName]>,
    cache: VerifiedTokenCache,
}

/// The token of one request, not looked at before somebody asks.
#[derive(Debug, Default)]
pub struct RequestToken {
    reader: Option<Arc<TokenReader>>,
    /// Seconds since the Unix epoch, by the wall clock.
    now_s: u64,
    claims_result: OnceLock<Result<Arc<TokenClaims>, TokenFault>>,
}

/// Why a token says nothing. Tells nothing of what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenFault {
    #[error("there is none")]
    Absent,
    #[error("it is no signed token in three parts")]
    Malformed,
    #[error("it is larger than {MAX_TOKEN_BYTES} bytes")]
    TooLarge,
    #[error("no key that is trusted has its key id and algorithm")]
    UnknownKey,
    #[error("its signature is not by a key that is trusted")]
    InvalidSignature,
    #[error("its exp or nbf is no number")]
    InvalidDates,
    #[error("it has expired")]
    Expired,
    #[error("it does not hold yet")]
    NotYetValid,
}

/// What a token that can be believed says.
#[derive(Debug)]
struct TokenClaims {
    /// In the order of [`Reader::claims`].
    claims: Box<[ClaimValue]>,
    /// Seconds since the Unix epoch; without one, the token has no end.
    expires_at_s: Option<u64>,
    not_before_s: Option<u64>,
}

impl ClaimName {
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("a claim has a name, such as \"sub\"".to_owned());
        }
        if text.starts_with('/') {
            JsonPointer::parse(text)?;
        }
        Ok(Self(text.into()))
    }

    fn find_in<'v>(&self, claims: &'v Value) -> Option<&'v Value> {
        if self.0.starts_with('/') {
            claims.pointer(&self.0)
        } else {
            claims.get(&*self.0)
        }
    }
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for ClaimName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl ClaimValue {
    fn from_json(value: Option<&Value>) -> Self {
        match value {
            None | Some(Value::Null) => Self::Absent,
            Some(Value::Object(_)) => Self::Object,
            Some(Value::Array(items)) => Self::List(items.iter().filter_map(scalar_text).collect()),
            Some(value) => scalar_text(value).map_or(Self::Absent, Self::Single),
        }
    }

    pub(super) fn is_present(&self) -> bool {
        *self != Self::Absent
    }

    /// All that a condition may be fulfilled by.
    pub(super) fn texts(&self) -> impl Iterator<Item = &[u8]> {
        let texts = match self {
            Self::Single(text) => std::slice::from_ref(text),
            Self::List(texts) => texts,
            Self::Absent | Self::Object => &[],
        };
        texts.iter().map(|text| text.as_bytes())
    }

    /// What a key takes: one value, also if it stands alone in a list (as `aud` may).
    pub(super) fn single_text(&self) -> Option<&[u8]> {
        let mut texts = self.texts();
        texts.next().filter(|_| texts.next().is_none())
    }
}

fn scalar_text(value: &Value) -> Option<Box<str>> {
    match value {
        Value::String(text) => Some(text.as_str().into()),
        Value::Number(number) => Some(number.to_string().into()),
        Value::Bool(flag) => Some(if *flag { "true" } else { "false" }.into()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

impl RequestToken {
    /// One to be read by `reader` at a time (seconds since the Unix epoch); without a reader, no token says anything.
    pub fn new(reader: Option<&Arc<TokenReader>>, now_s: u64) -> Self {
        Self {
            reader: reader.cloned(),
            now_s,
            claims_result: OnceLock::new(),
        }
    }

    /// For requests that are asked for none.
    pub fn none() -> &'static Self {
        static NONE: RequestToken = RequestToken {
            reader: None,
            now_s: 0,
            claims_result: OnceLock::new(),
        };
        &NONE
    }

    /// What the token in `headers`, always those of one request, says of a claim.
    pub(super) fn claim(&self, headers: &HeaderMap, name: &ClaimName) -> &ClaimValue {
        let Some(reader) = &self.reader else {
            return &ClaimValue::Absent;
        };
        let claims_result = self
            .claims_result
            .get_or_init(|| reader.read_claims(headers, self.now_s));
        let position = reader.claim_names.iter().position(|asked| asked == name);
        let claim = claims_result
            .as_ref()
            .ok()
            .and_then(|said| said.claims.get(position?));
        claim.unwrap_or(&ClaimValue::Absent)
    }

    /// Why the token was not believed, if there was one and somebody asked.
    pub fn fault(&self) -> Option<TokenFault> {
        self.claims_result
            .get()?
            .as_ref()
            .err()
            .copied()
            .filter(|fault| *fault != TokenFault::Absent)
    }
}

impl TokenReader {
    pub(super) fn new(settings: Settings, claims: Vec<ClaimName>) -> Self {
        Self {
            settings,
            claim_names: claims.into(),
            cache: VerifiedTokenCache::default(),
        }
    }

    /// Where tokens stand.
    pub fn header_name(&self) -> &HeaderName {
        &self.settings.header
    }

    /// Whether the header occurs more than once. Whoever reads one of two tokens may read another than the upstream.
    pub fn has_duplicate_header(&self, headers: &HeaderMap) -> bool {
        headers
            .get_all(&self.settings.header)
            .iter()
            .nth(1)
            .is_some()
    }

    fn read_claims(&self, headers: &HeaderMap, now_s: u64) -> Result<Arc<TokenClaims>, TokenFault> {
        let token = self.extract_token(headers)?;
        let keys = match &self.settings.verification {
            SignatureVerification::Keys(keys) => keys,
            SignatureVerification::Disabled => {
                let claims = TokenClaims::new(&keys::decode_unverified(token)?, &self.claim_names)?;
                return claims.check_dates(now_s).map(|()| Arc::new(claims));
            }
        };
        let id: [u8; 32] = Sha256::digest(token).into();
        if let Some(claims) = self.cache.get(&id) {
            return claims.check_dates(now_s).map(|()| claims);
        }
        let claims = Arc::new(TokenClaims::new(
            &keys.verify_token(token)?,
            &self.claim_names,
        )?);
        claims.check_dates(now_s)?;
        self.cache.insert(id, &claims);
        Ok(claims)
    }

    /// The one token, without what stands around it.
    fn extract_token<'h>(&self, headers: &'h HeaderMap) -> Result<&'h str, TokenFault> {
        let value = headers
            .get(&self.settings.header)
            .ok_or(TokenFault::Absent)?;
        let value = value
            .to_str()
            .map_err(|_not_ascii| TokenFault::Malformed)?
            .trim();
        let token = match value.split_once([' ', '\t']) {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim_start(),
            // Credentials of another kind.
            _ if self.settings.header == http::header::AUTHORIZATION => {
                return Err(TokenFault::Absent);
            }
            _ => value,
        };
        match token.len() {
            0 => Err(TokenFault::Absent),
            len if len > MAX_TOKEN_BYTES => Err(TokenFault::TooLarge),
            _ => Ok(token),
        }
    }
}

impl TokenClaims {
    fn new(claims: &Value, claim_names: &[ClaimName]) -> Result<Self, TokenFault> {
        if !claims.is_object() {
            return Err(TokenFault::Malformed);
        }
        Ok(Self {
            claims: claim_names
                .iter()
                .map(|name| ClaimValue::from_json(name.find_in(claims)))
                .collect(),
            expires_at_s: parse_numeric_date(claims, "exp")?,
            not_before_s: parse_numeric_date(claims, "nbf")?,
        })
    }

    fn check_dates(&self, now_s: u64) -> Result<(), TokenFault> {
        if self
            .expires_at_s
            .is_some_and(|end_s| now_s >= end_s.saturating_add(LEEWAY_S))
        {
            return Err(TokenFault::Expired);
        }
        if self
            .not_before_s
            .is_some_and(|start_s| start_s > now_s.saturating_add(LEEWAY_S))
        {
            return Err(TokenFault::NotYetValid);
        }
        Ok(())
    }

    /// Bytes of all texts.
    fn text_bytes(&self) -> usize {
        self.claims
            .iter()
            .flat_map(ClaimValue::texts)
            .map(<[u8]>::len)
            .sum()
    }
}

/// A date in whole seconds since the Unix epoch (RFC 7519, 2: it may have a fraction).
fn parse_numeric_date(claims: &Value, name: &str) -> Result<Option<u64>, TokenFault> {
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
        .ok_or(TokenFault::InvalidDates)
}

/// Tokens whose signatures have been verified, by their hashes: verifying costs as much as all else that is done for a
/// request, and clients send a token many times. A reader's keys never change, so nothing here is ever wrong; what is
/// expired is found so when it is asked for.
#[derive(Debug, Default)]
struct VerifiedTokenCache([Mutex<TokenCacheShard>; CACHE_SHARDS]);

type TokenCacheShard = IndexMap<[u8; 32], Arc<TokenClaims>, RandomState>;

/// Workers look up at the same time, and shall not wait for each other.
const CACHE_SHARDS: usize = 16;
/// Makes 4096 tokens, a few hundred bytes each.
const MAX_TOKENS_PER_SHARD: usize = 256;
/// What says more is verified every time, so that memory is bounded whatever issuers write.
const MAX_CACHED_CLAIM_BYTES: usize = 1 << 10;

impl VerifiedTokenCache {
    fn shard(&self, id: &[u8; 32]) -> Option<&Mutex<TokenCacheShard>> {
        self.0.get(usize::from(id[0]) % CACHE_SHARDS)
    }

    fn get(&self, id: &[u8; 32]) -> Option<Arc<TokenClaims>> {
        self.shard(id)?.lock().get(id).cloned()
    }

    fn insert(&self, id: [u8; 32], claims: &Arc<TokenClaims>) {
        if claims.text_bytes() > MAX_CACHED_CLAIM_BYTES {
            return;
        }
        let Some(shard) = self.shard(&id) else { return };
        let mut shard = shard.lock();
        if shard.len() >= MAX_TOKENS_PER_SHARD {
            // Any: nobody gains by it, and it needs no order to be kept.
            let index = fastrand::usize(..shard.len());
            shard.swap_remove_index(index);
        }
        shard.insert(id, Arc::clone(claims));
    }
}

#[cfg(test)]
mod tests;
