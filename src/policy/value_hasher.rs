//! The hash of key values that are stored as digests, so that no API key is readable in the store,
//! in the log or on the dashboard.

use super::KeyPart;
use crate::limiter::{DIGEST_BYTES, format_digest};
use aws_lc_rs::hmac;
use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// Shortest secret. A digest with a secret that can be guessed protects no value.
const MIN_SECRET_BYTES: usize = 16;

/// The SHA-256 or HMAC-SHA-256 of a value.
type ValueDigest = [u8; DIGEST_BYTES];

/// Computes the digests of key values.
#[derive(Clone, Default)]
pub enum ValueHasher {
    /// Anyone can compute the digest of a guessed value.
    #[default]
    Sha256,
    /// Only the owner of the secret can.
    HmacSha256(Arc<hmac::Key>),
}

/// The digests of one request, so that each value is hashed once for all policies.
#[derive(Debug, Default)]
pub struct ValueDigests<'t>(SmallVec<[(&'t KeyPart, ValueDigest); 1]>);

impl ValueHasher {
    /// A hasher with a secret.
    ///
    /// # Errors
    /// Returns a message without the secret if it is too short.
    pub fn from_secret(secret: &[u8]) -> Result<Self, String> {
        if secret.len() < MIN_SECRET_BYTES {
            return Err(format!(
                "the secret has {} bytes; expected at least {MIN_SECRET_BYTES}, such as the output of openssl rand -hex 32",
                secret.len()
            ));
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        Ok(Self::HmacSha256(Arc::new(key)))
    }

    /// The digest of a value.
    pub fn digest(&self, value: &[u8]) -> ValueDigest {
        match self {
            Self::Sha256 => Sha256::digest(value).into(),
            Self::HmacSha256(key) => {
                let tag = hmac::sign(key, value);
                // The tag has as many bytes.
                *tag.as_ref().first_chunk().unwrap_or(&[0; DIGEST_BYTES])
            }
        }
    }

    /// Differs between secrets and reveals none. `None` without a secret.
    pub fn fingerprint(&self) -> Option<String> {
        matches!(self, Self::HmacSha256(_)).then(|| self.format_value(b"tidegate hash_secret_file"))
    }

    /// The digest of a value as keys show it.
    pub fn format_value(&self, value: &[u8]) -> String {
        format_digest(&self.digest(value))
    }
}

/// Equal if the secrets are.
impl PartialEq for ValueHasher {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }
}

impl Eq for ValueHasher {}

/// The debug output omits the secret.
impl fmt::Debug for ValueHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha256 => "Sha256",
            Self::HmacSha256(_) => "HmacSha256",
        })
    }
}

impl<'t> ValueDigests<'t> {
    /// The digest of a part's value, computed at most once.
    pub(super) fn digest(
        &mut self,
        hasher: &ValueHasher,
        part: &'t KeyPart,
        value: &[u8],
    ) -> ValueDigest {
        if let Some((_, digest)) = self.0.iter().find(|(known, _)| *known == part) {
            return *digest;
        }
        let digest = hasher.digest(value);
        self.0.push((part, digest));
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::path;

    /// Test case 1 of RFC 4231, and the SHA-256 of "abc" (FIPS 180-4).
    #[test]
    fn digests_are_those_of_the_standards() {
        let hex = |digest: ValueDigest| digest.map(|byte| format!("{byte:02x}")).concat();
        assert_eq!(
            hex(ValueHasher::Sha256.digest(b"abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        let hasher = ValueHasher::from_secret(&[0x0b; 20]).unwrap();
        assert_eq!(
            hex(hasher.digest(b"Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
        );
        assert!(ValueHasher::from_secret(b"short").is_err());
    }

    #[test]
    fn each_component_is_hashed_once() {
        let parse = |text| KeyPart::parse(text, &path::Settings::DEFAULT).unwrap();
        let (one, other) = (parse("header:x-api-key"), parse("query:token"));
        let (hasher, mut digests) = (ValueHasher::default(), ValueDigests::default());
        for _ in 0..2 {
            assert_eq!(digests.digest(&hasher, &one, b"a"), hasher.digest(b"a"));
            assert_eq!(digests.digest(&hasher, &other, b"b"), hasher.digest(b"b"));
        }
        assert_eq!(digests.0.len(), 2);
    }
}
