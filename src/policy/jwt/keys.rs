//! Keys that tokens are verified by, and which algorithms go with each (RFC 7515, 7517, 8725).

use super::TokenFault;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::Value;

/// Of several keys that a token may be signed by, because it names none, so many are tried: a stranger's nonsense must
/// not cost a verification for every key of a large set.
const MAX_KEYS_TRIED: usize = 4;
/// What HMAC with SHA-256 needs at least (RFC 7518, 3.2).
const MIN_SECRET_BYTES: usize = 32;

/// Keys that are trusted; at least one.
#[derive(Debug)]
pub struct VerificationKeys(Box<[VerificationKey]>);

#[derive(Debug)]
struct VerificationKey {
    key_id: KeyIdRule,
    /// Shows nothing of itself.
    key: DecodingKey,
    /// Those that it may be used with, and no other.
    algorithms: &'static [Algorithm],
}

#[derive(Debug, PartialEq, Eq)]
enum KeyIdRule {
    /// The only key there is, whatever tokens call it.
    Any,
    /// As tokens call it, or not at all.
    Exact(Option<String>),
}

impl VerificationKeys {
    /// One secret shared with who signs. Returns what is doubtful about it, too.
    pub fn from_secret(secret: &[u8]) -> (Self, Vec<String>) {
        let warning = short_secret_warning(secret.len()).map(|doubt| format!("the secret {doubt}"));
        let trusted = VerificationKey {
            key_id: KeyIdRule::Any,
            key: DecodingKey::from_secret(secret),
            algorithms: &HMAC_ALGORITHMS,
        };
        (Self([trusted].into()), warning.into_iter().collect())
    }

    /// The usable keys of a JWK set (RFC 7517). Returns why others are left out, and what is doubtful, too.
    ///
    /// # Errors
    /// What is wrong, in words that tell nothing of what the text holds.
    pub fn from_jwks(text: &str) -> Result<(Self, Vec<String>), String> {
        const EXPECTED: &str = "expected a JWK set such as {\"keys\": [{\"kty\": \"RSA\", …}]}";
        let mut set: Value = serde_json::from_str(text).map_err(|error| {
            format!(
                "no JSON at line {}, column {}; {EXPECTED}",
                error.line(),
                error.column()
            )
        })?;
        let Some(Value::Array(keys)) = set.get_mut("keys").map(Value::take) else {
            return Err(EXPECTED.to_owned());
        };
        let (mut trusted, mut warnings) = (Vec::new(), Vec::new());
        for (number, key) in (1..).zip(keys) {
            let is_private = key.get("d").is_some();
            match VerificationKey::from_jwk(key) {
                Ok((key, doubt)) => {
                    warnings.extend(doubt.map(|doubt| format!("key {number} {doubt}")));
                    trusted.push(key);
                }
                Err(Some(reason)) => warnings.push(format!("key {number} is left out: {reason}")),
                Err(None) => {}
            }
            if is_private {
                warnings.push(format!(
                    "key {number} has its private part: whoever reads the file can sign tokens"
                ));
            }
        }
        if trusted.is_empty() {
            let why = warnings
                .first()
                .map_or_else(String::new, |doubt| format!(" ({doubt})"));
            return Err(format!("no key in it can verify a token{why}"));
        }
        Ok((Self(trusted.into()), warnings))
    }

    /// What the token says, if one of these keys has signed it.
    pub(super) fn verify_token(&self, token: &str) -> Result<Value, TokenFault> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenFault::Malformed)?;
        // Also what is signed by no algorithm that we know: "none".
        let header = jsonwebtoken::decode_header(token).map_err(|_broken| TokenFault::Malformed)?;
        if header.crit.is_some() {
            // What must be understood (RFC 7515, 4.1.11), and we know no extension.
            return Err(TokenFault::Malformed);
        }
        let is_candidate = |key: &&VerificationKey| {
            key.algorithms.contains(&header.alg) && key.key_id.accepts(header.kid.as_deref())
        };
        let mut fault = TokenFault::UnknownKey;
        for trusted in self.0.iter().filter(is_candidate).take(MAX_KEYS_TRIED) {
            // Not `decode`, which has ideas of its own about dates, and refuses a `sub` that is no text.
            if let Ok(true) =
                jsonwebtoken::crypto::verify(signature, signed.as_bytes(), &trusted.key, header.alg)
            {
                return decode_unverified(token);
            }
            fault = TokenFault::InvalidSignature;
        }
        Err(fault)
    }
}

/// What a token says, whoever wrote it.
pub(super) fn decode_unverified(token: &str) -> Result<Value, TokenFault> {
    if token.split('.').count() != 3 {
        return Err(TokenFault::Malformed);
    }
    jsonwebtoken::dangerous::insecure_decode_claims(token).map_err(|_broken| TokenFault::Malformed)
}

impl KeyIdRule {
    fn accepts(&self, kid: Option<&str>) -> bool {
        match (self, kid) {
            (Self::Any, _) | (_, None) => true,
            (Self::Exact(own), Some(kid)) => own.as_deref() == Some(kid),
        }
    }
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
    /// A key of a set, and what is doubtful about it.
    ///
    /// # Errors
    /// Why it can't be used; `None` if it is plainly meant for something else.
    fn from_jwk(key: Value) -> Result<(Self, Option<String>), Option<String>> {
        let unusable = |reason: &str| Some(reason.to_owned());
        // Its error would repeat what stands there.
        let jwk: Jwk = serde_json::from_value(key)
            .map_err(|_unread| unusable("it is not written as a key has to be"))?;
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
                "it lacks what its kty needs, or that is not supported",
            ));
        }
        let key =
            DecodingKey::from_jwk(&jwk).map_err(|_broken| unusable("it is not in base64url"))?;
        let bytes = key.try_get_as_bytes().map_or(0, <[u8]>::len);
        let (algorithms, has_valid_size): (&'static [Algorithm], _) = match &jwk.algorithm {
            // Six bits per sign; 2048 bits are 342 of them.
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
            _ => return Err(unusable("its kind is not supported")),
        };
        if !has_valid_size {
            return Err(unusable("it has not the size that its kind needs"));
        }
        let declared = jwk.common.key_algorithm.map(Algorithm::try_from);
        let algorithms = match declared {
            None => algorithms,
            Some(Ok(said)) => algorithms
                .iter()
                .position(|known| *known == said)
                .and_then(|index| algorithms.get(index..=index))
                .ok_or_else(|| unusable("its alg and its kty contradict each other"))?,
            Some(Err(_unsupported)) => return Err(None),
        };
        let is_secret = matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_));
        let warning = short_secret_warning(bytes).filter(|_| is_secret);
        Ok((
            Self {
                key_id: KeyIdRule::Exact(jwk.common.key_id),
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
