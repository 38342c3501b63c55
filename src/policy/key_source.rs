//! Where the values of a key come from.

use super::key_part::KeyPart;
use crate::limiter::SOURCES_BYTES;
use sha2::{Digest, Sha256};

/// One value of a key: its source, whether it is stored as a digest, and the value itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueSource<'v, 't> {
    pub part: &'t KeyPart,
    pub is_hashed: bool,
    pub value: &'v [u8],
}

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

/// Splits a value of a part with alternatives into the alternative and its own value. `None` if it
/// has no label of the part.
pub(super) fn resolve_source<'v, 't>(
    part: &'t KeyPart,
    is_hashed: bool,
    value: &'v [u8],
) -> Option<KeyValueSource<'v, 't>> {
    let KeyPart::Alternatives(alternatives) = part else {
        return Some(KeyValueSource {
            part,
            is_hashed,
            value,
        });
    };
    let end = value.iter().position(|byte| *byte == b'=')?;
    let (label, value) = (value.get(..end)?, value.get(end + 1..)?);
    let mut alternatives = alternatives.iter();
    let found = alternatives.find(|one| one.part.source_label().as_bytes() == label)?;
    Some(KeyValueSource {
        part: &found.part,
        is_hashed: found.is_hashed,
        value,
    })
}

pub(super) fn digest_sources(parts: &[KeyPart]) -> Option<[u8; SOURCES_BYTES]> {
    let has_own_label =
        |part: &KeyPart| matches!(part, KeyPart::ClientIp | KeyPart::Alternatives(_));
    if parts.iter().all(has_own_label) {
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
