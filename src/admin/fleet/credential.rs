//! The credential that one instance sends to another instead of the token.
//!
//! Anyone who can write to Redis can add a heartbeat with an address of their own, so the token
//! itself is never sent. The credential is derived from the token and the id of the instance. It is
//! valid for that process only, and only for reading its summary.

use crate::admin::AdminToken;
use sha2::{Digest, Sha256};
use std::fmt::{self, Write as _};

/// Separates this use of the token from others.
const PURPOSE: &str = "tidegate fleet summary v1";

/// Bearer credential for the summary of one instance.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::admin) struct InstanceCredential(String);

impl InstanceCredential {
    pub(in crate::admin) fn new(token: &AdminToken, instance_id: &str) -> Self {
        let key = Sha256::digest(format!("{PURPOSE}\n{}", token.expose()));
        let mut digest = Sha256::new();
        digest.update(key);
        digest.update(instance_id);
        // The second digest makes it impossible to extend the id.
        let derived = Sha256::digest(digest.finalize());
        let mut text = String::with_capacity(64);
        for byte in derived {
            write!(text, "{byte:02x}").expect("a String takes everything");
        }
        Self(text)
    }

    pub(in crate::admin) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for InstanceCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_differ_by_token_and_instance_and_hide_the_token() {
        let credential =
            |token: &str, id| InstanceCredential::new(&AdminToken::new(token.to_owned()), id);
        let one = credential("s3cret", "a");
        assert_eq!(one, credential("s3cret", "a"));
        assert_ne!(one, credential("s3cret", "b"));
        assert_ne!(one, credential("other", "a"));
        assert_eq!(one.expose().len(), 64);
        assert!(!one.expose().contains("s3cret") && format!("{one:?}") == "***");
    }
}
