//! Where the values of a key come from.

use super::key_component::KeyComponent;
use super::key_part::KeyPart;
use crate::limiter::SOURCES_BYTES;
use sha2::{Digest, Sha256};

pub(super) fn missing_source_error(part: &KeyPart, text: &str) -> String {
    let labels = part.alternatives();
    let labels: Vec<String> = labels
        .map(|one| format!("{}=VALUE", one.source_label()))
        .collect();
    format!(
        "{text:?} does not name its source; expected {}",
        labels.join(" or ")
    )
}

pub(super) fn digest_sources(components: &[KeyComponent]) -> Option<[u8; SOURCES_BYTES]> {
    let parts = components.iter().map(|one| &one.part);
    let has_own_label =
        |part: &KeyPart| matches!(part, KeyPart::ClientIp | KeyPart::Alternatives(_));
    if parts.clone().all(has_own_label) {
        return None;
    }
    let mut hash = Sha256::new();
    for part in parts {
        let label = part.source_label();
        hash.update(label.len().to_be_bytes());
        hash.update(label.as_bytes());
    }
    hash.finalize().first_chunk().copied()
}
