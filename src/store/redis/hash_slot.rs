//! Hash slots: the parts into which Redis Cluster divides keys.

use super::scripts::push_hex_id;
use crate::limiter::Key;

/// Number of hash slots of every Redis Cluster.
pub(super) const HASH_SLOT_COUNT: u16 = 16_384;

/// The slot of all counters of a key.
pub(super) fn hash_slot_for_key(key: &Key) -> u16 {
    let mut tag = String::with_capacity(32);
    push_hex_id(&mut tag, key.quota_id());
    crc16(tag.as_bytes()) % HASH_SLOT_COUNT
}

/// The slot of a Redis key: the hash of the text in its first braces, or of the whole key without
/// one.
pub(super) fn hash_slot_for_name(name: &str) -> u16 {
    let braces = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    let tag = braces.map(|(tag, _)| tag).filter(|tag| !tag.is_empty());
    crc16(tag.unwrap_or(name).as_bytes()) % HASH_SLOT_COUNT
}

/// Groups items by their slot. Items of one slot stay in order.
pub(super) fn group_by_hash_slot<T>(
    items: impl IntoIterator<Item = T>,
    hash_slot_of: impl Fn(&T) -> u16,
) -> Vec<(u16, Vec<T>)> {
    let mut groups: Vec<(u16, Vec<T>)> = Vec::new();
    for item in items {
        let hash_slot = hash_slot_of(&item);
        match groups.iter_mut().find(|(other, _)| *other == hash_slot) {
            Some((_, group)) => group.push(item),
            None => groups.push((hash_slot, vec![item])),
        }
    }
    groups
}

/// CRC-16/XMODEM, as Redis Cluster requires.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            (crc << 1) ^ ((crc >> 15) * 0x1021)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    #[test]
    fn computes_slots_as_the_redis_cluster_specification_does() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(hash_slot_for_name("foo"), 12_182);
        assert_eq!(
            hash_slot_for_name("{user1000}.following"),
            hash_slot_for_name("user1000")
        );
        assert_eq!(
            hash_slot_for_name("foo{}{bar}"),
            crc16(b"foo{}{bar}") % HASH_SLOT_COUNT
        );
        let key = KeyBuilder::new("p").finish();
        assert_eq!(
            hash_slot_for_key(&key),
            hash_slot_for_name(&format!("t:v1:{{{:032x}}}:sliding_log:1", key.id()))
        );
    }
}
