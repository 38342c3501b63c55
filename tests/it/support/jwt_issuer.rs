//! Token issuers and their tokens.

use super::prelude::*;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PKCS_RSA_SHA256};

/// An issuer with a signing key.
pub struct TokenIssuer {
    kid: String,
    alg: Algorithm,
    key: EncodingKey,
}

impl TokenIssuer {
    /// Creates an issuer with a new key, named `kid`.
    pub fn new(kid: &str, alg: Algorithm) -> Self {
        let kind = match alg {
            Algorithm::ES256 => &PKCS_ECDSA_P256_SHA256,
            Algorithm::EdDSA => &PKCS_ED25519,
            _ => &PKCS_RSA_SHA256,
        };
        let pair = KeyPair::generate_for(kind).unwrap();
        let der = pair.serialize_der();
        let key = match alg {
            Algorithm::ES256 => EncodingKey::from_ec_der(&der),
            // Without the public half, which jsonwebtoken does not expect (RFC 5208).
            Algorithm::EdDSA => {
                let frame = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";
                EncodingKey::from_ed_der(&[&frame[..], &der[16..48]].concat())
            }
            // The inner key of PKCS #8, after a header of 26 bytes.
            _ => EncodingKey::from_rsa_der(&der[26..]),
        };
        Self {
            kid: kid.to_owned(),
            alg,
            key,
        }
    }

    pub fn with_secret(secret: &str) -> Self {
        Self {
            kid: "any".into(),
            alg: Algorithm::HS256,
            key: EncodingKey::from_secret(secret.as_bytes()),
        }
    }

    /// The value of `authorization` with a token that has these `claims`.
    pub fn bearer(&self, claims: &Value) -> String {
        let header = Header {
            kid: Some(self.kid.clone()),
            ..Header::new(self.alg)
        };
        format!(
            "Bearer {}",
            jsonwebtoken::encode(&header, claims, &self.key).unwrap()
        )
    }

    /// A token for the subject `sub`, valid for an hour.
    pub fn bearer_for_subject(&self, sub: &str) -> String {
        self.bearer(&json!({ "sub": sub, "exp": unix_s() + 3600 }))
    }
}

/// Writes the public keys of issuers.
pub fn write_jwks(path: &Path, issuers: &[&TokenIssuer]) {
    fs::write(path, jwks_text(issuers)).unwrap();
}

/// The public keys of issuers as a JWK set.
pub fn jwks_text(issuers: &[&TokenIssuer]) -> String {
    let key = |issuer: &&TokenIssuer| {
        let mut jwk = Jwk::from_encoding_key(&issuer.key, issuer.alg).unwrap();
        jwk.common.key_id = Some(issuer.kid.clone());
        serde_json::to_value(jwk).unwrap()
    };
    let keys: Vec<Value> = issuers.iter().map(key).collect();
    json!({ "keys": keys }).to_string()
}
