//! The credential that one instance sends to another instead of the token.
//!
//! Anyone who can write to Redis can add a heartbeat with an address of their own, so the token
//! itself is never sent. The credential is derived from the token and the id of the instance. It is
//! valid for that process only, and only for reading its summary.

use crate::admin::AdminToken;
use crate::text::SecretText;
use sha2::{Digest, Sha256};

/// Separates this use of the token from others.
const PURPOSE: &str = "tidegate fleet summary v1";

/// Bearer credential for the summary of one instance.
pub(crate) fn derive_instance_credential(token: &AdminToken, instance_id: &str) -> SecretText {
    let key = Sha256::digest(format!("{PURPOSE}\n{}", token.expose()));
    let mut digest = Sha256::new();
    digest.update(key);
    digest.update(instance_id);
    // The second digest makes it impossible to extend the id.
    let derived = Sha256::digest(digest.finalize());
    SecretText::new(derived.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_differ_by_token_and_instance_and_hide_the_token() {
        let credential =
            |token: &str, id| derive_instance_credential(&AdminToken::new(token.to_owned()), id);
        let one = credential("s3cret", "a");
        assert_eq!(one, credential("s3cret", "a"));
        assert_ne!(one, credential("s3cret", "b"));
        assert_ne!(one, credential("other", "a"));
        assert_eq!(one.expose().len(), 64);
        assert!(!one.expose().contains("s3cret") && format!("{one:?}") == "***");
    }
}
