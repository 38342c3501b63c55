//! Keys that verify tokens, and the algorithms of each key (RFC 7515, 7517, 8725).

use super::TokenError;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::Value;

/// Maximum number of keys tried for one token. An invalid token without a key id must not cost one
/// verification per key of a large set.
const MAX_KEYS_TRIED: usize = 4;
/// Maximum number of keys in a set. Each one takes memory, and a log line if it cannot be used.
const MAX_KEYS: usize = 1000;
/// Minimum secret size for HMAC with SHA-256 (RFC 7518, section 3.2).
const MIN_SECRET_BYTES: usize = 32;

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
    algorithms: &'static [Algorithm],
}

impl VerificationKeys {
    /// Creates a set of one shared secret. Returns it with warnings about the secret.
    pub fn from_secret(secret: &[u8]) -> (Self, Vec<String>) {
        let warning =
            short_secret_warning(secret.len()).map(|warning| format!("the secret {warning}"));
        let trusted = VerificationKey {
            key_id: None,
            key: DecodingKey::from_secret(secret),
            algorithms: &HMAC_ALGORITHMS,
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
                Ok((key, warning)) => {
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

const HMAC_ALGORITHMS: [Algorithm; 3] = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
const RSA_ALGORITHMS: [Algorithm; 6] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];

impl VerificationKey {
    /// Converts a key of a set. Also returns a warning, if there is one.
    ///
    /// # Errors
    /// Returns the reason why the key is unusable, or `None` if it is clearly intended for another
    /// use.
    fn from_jwk(key: Value) -> Result<(Self, Option<String>), Option<String>> {
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
        let bytes = key.try_get_as_bytes().map_or(0, <[u8]>::len);
        let (algorithms, has_valid_size): (&'static [Algorithm], _) = match &jwk.algorithm {
            // Base64 encodes six bits per character, so 2048 bits have 342 characters.
            AlgorithmParameters::RSA(rsa) => (&RSA_ALGORITHMS, rsa.n.len() >= 341),
            AlgorithmParameters::EllipticCurve(ec) => match ec.curve {
                EllipticCurve::P256 => (&[Algorithm::ES256], bytes == 65),
                EllipticCurve::P384 => (&[Algorithm::ES384], bytes == 97),
                _ => return Err(unusable("its curve is not supported")),
            },
            AlgorithmParameters::OctetKeyPair(pair) => match pair.curve {
                EllipticCurve::Ed25519 => (&[Algorithm::EdDSA], bytes == 32),
                _ => return Err(unusable("its curve is not supported")),
            },
            AlgorithmParameters::OctetKey(_) => (&HMAC_ALGORITHMS, bytes > 0),
            _ => return Err(unusable("its key type is not supported")),
        };
        if !has_valid_size {
            return Err(unusable("its size is invalid for its key type"));
        }
        let declared = jwk.common.key_algorithm.map(Algorithm::try_from);
        let algorithms = match declared {
            None => algorithms,
            Some(Ok(declared)) => algorithms
                .iter()
                .position(|known| *known == declared)
                .and_then(|index| algorithms.get(index..=index))
                .ok_or_else(|| unusable("its alg and its kty contradict each other"))?,
            Some(Err(_unsupported)) => return Err(None),
        };
        let is_secret = matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_));
        let warning = short_secret_warning(bytes).filter(|_| is_secret);
        Ok((
            Self {
                key_id: Some(jwk.common.key_id),
                key,
                algorithms,
            },
            warning,
        ))
    }
}

fn short_secret_warning(bytes: usize) -> Option<String> {
    (bytes < MIN_SECRET_BYTES).then(|| {
        format!("has {bytes} bytes and may be guessed; expected {MIN_SECRET_BYTES} or more")
    })
}
