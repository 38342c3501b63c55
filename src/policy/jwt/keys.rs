//! Keys that tokens are verified by, and which algorithms go with each (RFC 7515, 7517, 8725).

use super::TokenFault;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::Value;

/// Of several keys that a token may be signed by, because it names none, so many are tried: a stranger's nonsense must
/// not cost a verification for every key of a large set.
const MOST_TRIED: usize = 4;
/// What HMAC with SHA-256 needs at least (RFC 7518, 3.2).
const LEAST_SECRET_BYTES: usize = 32;

/// Keys that are trusted; at least one.
#[derive(Debug)]
pub struct Keys(Box<[Trusted]>);

#[derive(Debug)]
struct Trusted {
    named: Named,
    /// Shows nothing of itself.
    key: DecodingKey,
    /// Those that it may be used with, and no other.
    algorithms: &'static [Algorithm],
}

#[derive(Debug, PartialEq, Eq)]
enum Named {
    /// The only key there is, whatever tokens call it.
    Anyhow,
    /// As tokens call it, or not at all.
    By(Option<String>),
}

impl Keys {
    /// One secret shared with who signs. Returns what is doubtful about it, too.
    pub fn secret(secret: &[u8]) -> (Self, Vec<String>) {
        let doubts = doubt_short(secret.len()).map(|doubt| format!("the secret {doubt}"));
        let trusted = Trusted {
            named: Named::Anyhow,
            key: DecodingKey::from_secret(secret),
            algorithms: &HMAC,
        };
        (Self([trusted].into()), doubts.into_iter().collect())
    }

    /// The usable keys of a JWK set (RFC 7517). Returns why others are left out, and what is doubtful, too.
    ///
    /// # Errors
    /// What is wrong, in words that tell nothing of what the text holds.
    pub fn jwks(text: &str) -> Result<(Self, Vec<String>), String> {
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
        let (mut trusted, mut doubts) = (Vec::new(), Vec::new());
        for (number, key) in (1..).zip(keys) {
            let is_private = key.get("d").is_some();
            match Trusted::read(key) {
                Ok((key, doubt)) => {
                    doubts.extend(doubt.map(|doubt| format!("key {number} {doubt}")));
                    trusted.push(key);
                }
                Err(Some(reason)) => doubts.push(format!("key {number} is left out: {reason}")),
                Err(None) => {}
            }
            if is_private {
                doubts.push(format!(
                    "key {number} has its private part: whoever reads the file can sign tokens"
                ));
            }
        }
        if trusted.is_empty() {
            let why = doubts
                .first()
                .map_or_else(String::new, |doubt| format!(" ({doubt})"));
            return Err(format!("no key in it can verify a token{why}"));
        }
        Ok((Self(trusted.into()), doubts))
    }

    /// What the token says, if one of these keys has signed it.
    pub(super) fn verify(&self, token: &str) -> Result<Value, TokenFault> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenFault::Malformed)?;
        // Also what is signed by no algorithm that we know: "none".
        let header = jsonwebtoken::decode_header(token).map_err(|_broken| TokenFault::Malformed)?;
        if header.crit.is_some() {
            // What must be understood (RFC 7515, 4.1.11), and we know no extension.
            return Err(TokenFault::Malformed);
        }
        let fits = |key: &&Trusted| {
            key.algorithms.contains(&header.alg) && key.named.may_be(header.kid.as_deref())
        };
        let mut fault = TokenFault::UnknownKey;
        for trusted in self.0.iter().filter(fits).take(MOST_TRIED) {
            // Not `decode`, which has ideas of its own about dates, and refuses a `sub` that is no text.
            if let Ok(true) =
                jsonwebtoken::crypto::verify(signature, signed.as_bytes(), &trusted.key, header.alg)
            {
                return unverified(token);
            }
            fault = TokenFault::Signature;
        }
        Err(fault)
    }
}

/// What a token says, whoever wrote it.
pub(super) fn unverified(token: &str) -> Result<Value, TokenFault> {
    if token.split('.').count() != 3 {
        return Err(TokenFault::Malformed);
    }
    jsonwebtoken::dangerous::insecure_decode_claims(token).map_err(|_broken| TokenFault::Malformed)
}

impl Named {
    fn may_be(&self, kid: Option<&str>) -> bool {
        match (self, kid) {
            (Self::Anyhow, _) | (_, None) => true,
            (Self::By(own), Some(kid)) => own.as_deref() == Some(kid),
        }
    }
}

const HMAC: [Algorithm; 3] = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
const RSA: [Algorithm; 6] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];

impl Trusted {
    /// A key of a set, and what is doubtful about it.
    ///
    /// # Errors
    /// Why it can't be used; `None` if it is plainly meant for something else.
    fn read(key: Value) -> Result<(Self, Option<String>), Option<String>> {
        let wrong = |reason: &str| Some(reason.to_owned());
        // Its error would repeat what stands there.
        let jwk: Jwk = serde_json::from_value(key)
            .map_err(|_unread| wrong("it is not written as a key has to be"))?;
        let is_for_others = match (&jwk.common.public_key_use, &jwk.common.key_operations) {
            (Some(used_for), _) if *used_for != PublicKeyUse::Signature => true,
            (_, Some(operations)) => !operations.contains(&KeyOperations::Verify),
            _ => false,
        };
        if is_for_others {
            return Err(None);
        }
        if let AlgorithmParameters::Other(_) = jwk.algorithm {
            return Err(wrong(
                "it lacks what its kty needs, or that is not supported",
            ));
        }
        let key = DecodingKey::from_jwk(&jwk).map_err(|_broken| wrong("it is not in base64url"))?;
        let bytes = key.try_get_as_bytes().map_or(0, <[u8]>::len);
        let (algorithms, fits): (&'static [Algorithm], _) = match &jwk.algorithm {
            // Six bits per sign; 2048 bits are 342 of them.
            AlgorithmParameters::RSA(rsa) => (&RSA, rsa.n.len() >= 341),
            AlgorithmParameters::EllipticCurve(ec) => match ec.curve {
                EllipticCurve::P256 => (&[Algorithm::ES256], bytes == 65),
                EllipticCurve::P384 => (&[Algorithm::ES384], bytes == 97),
                _ => return Err(wrong("its curve is not supported")),
            },
            AlgorithmParameters::OctetKeyPair(pair) => match pair.curve {
                EllipticCurve::Ed25519 => (&[Algorithm::EdDSA], bytes == 32),
                _ => return Err(wrong("its curve is not supported")),
            },
            AlgorithmParameters::OctetKey(_) => (&HMAC, bytes > 0),
            _ => return Err(wrong("its kind is not supported")),
        };
        if !fits {
            return Err(wrong("it has not the size that its kind needs"));
        }
        let said = jwk.common.key_algorithm.map(Algorithm::try_from);
        let algorithms = match said {
            None => algorithms,
            Some(Ok(said)) => algorithms
                .iter()
                .position(|known| *known == said)
                .and_then(|place| algorithms.get(place..=place))
                .ok_or_else(|| wrong("its alg and its kty contradict each other"))?,
            Some(Err(_unsupported)) => return Err(None),
        };
        let is_secret = matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_));
        let doubt = doubt_short(bytes).filter(|_| is_secret);
        Ok((
            Self {
                named: Named::By(jwk.common.key_id),
                key,
                algorithms,
            },
            doubt,
        ))
    }
}

fn doubt_short(bytes: usize) -> Option<String> {
    (bytes < LEAST_SECRET_BYTES).then(|| {
        format!("has {bytes} bytes and may be guessed; expected {LEAST_SECRET_BYTES} or more")
    })
}
