//! The trusted issuers of tokens, and the keys of each.

use super::TokenError;
use super::fetched_keys::FetchedKeys;
use super::keys::{self, VerificationKeys};
use serde_json::Value;

/// An issuer of tokens.
#[derive(Debug)]
pub struct TokenIssuer {
    /// The `iss` of its tokens. `None` accepts any; then it is the only issuer.
    pub name: Option<Box<str>>,
    /// A token must be for one of these audiences (`aud`). Empty accepts any.
    pub audiences: Vec<String>,
    pub keys: IssuerKeys,
}

/// Where the keys of an issuer come from.
#[derive(Debug)]
pub enum IssuerKeys {
    /// Keys from a file. They never change.
    Fixed(VerificationKeys),
    /// Keys from a URL.
    Fetched(Box<FetchedKeys>),
}

/// The keys that a token was verified with: the position of the issuer, and the version of its
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyGeneration {
    issuer: usize,
    version: u64,
}

impl KeyGeneration {
    /// Whether the keys that a token was verified with are still those of its issuer.
    pub(super) fn is_current(self, issuers: &[TokenIssuer]) -> bool {
        let issuer = issuers.get(self.issuer);
        issuer.is_some_and(|issuer| issuer.keys.version() == self.version)
    }
}

/// Returns the claims of a token that a trusted issuer has signed for an expected audience.
pub(super) fn verify_token(
    issuers: &[TokenIssuer],
    token: &str,
) -> Result<(Value, KeyGeneration), TokenError> {
    let (position, issuer) = find_issuer(issuers, token)?;
    // Read first, so that keys replaced during the verification make the result outdated.
    let version = issuer.keys.version();
    let claims = match &issuer.keys {
        IssuerKeys::Fixed(keys) => keys.verify_token(token)?,
        IssuerKeys::Fetched(keys) => keys.verify_token(token)?,
    };
    if !issuer.accepts_audience(&claims) {
        return Err(TokenError::WrongAudience);
    }
    let generation = KeyGeneration {
        issuer: position,
        version,
    };
    Ok((claims, generation))
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
    let claims = keys::decode_unverified_claims(token)?;
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

impl IssuerKeys {
    fn version(&self) -> u64 {
        match self {
            Self::Fixed(_) => 0,
            Self::Fetched(keys) => keys.version(),
        }
    }
}
