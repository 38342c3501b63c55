//! The slots of a cluster: owners, and slots that are migrating.

use crate::sim::resp::Reply;
use std::collections::BTreeMap;

pub(crate) const SLOTS: u16 = 16_384;

#[derive(Clone, Debug)]
pub(crate) struct ClusterState {
    /// The addresses of all servers, by index.
    pub(crate) addresses: Vec<String>,
    /// The index of the server of each slot.
    pub(crate) owners: Vec<usize>,
    /// Slots that migrate to the server with this index.
    pub(crate) migrating: BTreeMap<u16, usize>,
}

impl ClusterState {
    /// Divides all slots evenly among the first `masters` servers.
    pub(crate) fn new(addresses: Vec<String>, masters: usize) -> Self {
        let owner = |slot: u16| usize::from(slot) * masters / usize::from(SLOTS);
        Self {
            addresses,
            owners: (0..SLOTS).map(owner).collect(),
            migrating: BTreeMap::new(),
        }
    }

    /// Checks whether the server at `index` may run a command, by the rules of Redis 7.
    ///
    /// # Errors
    /// The redirection, or another error of the cluster.
    pub(crate) fn check(
        &self,
        index: usize,
        keys: &[Vec<u8>],
        is_asking: bool,
        exists: impl Fn(&[u8]) -> bool,
    ) -> Result<(), String> {
        let Some(slot) = keys.first().map(|key| slot_of(key)) else {
            return Ok(());
        };
        if keys.iter().any(|key| slot_of(key) != slot) {
            return Err("CROSSSLOT Keys in request don't hash to the same slot".to_owned());
        }
        let owner = self.owners[usize::from(slot)];
        let existing = keys.iter().filter(|key| exists(key)).count();
        let is_missing_some = existing < keys.len();
        let try_again =
            || Err("TRYAGAIN Multiple keys request during rehashing of slot".to_owned());
        match self.migrating.get(&slot) {
            Some(target) if owner == index && is_missing_some => match existing {
                0 => Err(format!("ASK {slot} {}", self.addresses[*target])),
                _ => try_again(),
            },
            Some(target) if *target == index && is_asking => {
                match keys.len() > 1 && is_missing_some {
                    true => try_again(),
                    false => Ok(()),
                }
            }
            _ if owner == index => Ok(()),
            _ => Err(format!("MOVED {slot} {}", self.addresses[owner])),
        }
    }

    pub(crate) fn slots_reply(&self) -> Reply {
        let mut ranges: Vec<(u16, u16, usize)> = Vec::new();
        for (slot, owner) in (0..SLOTS).zip(&self.owners) {
            match ranges.last_mut() {
                Some((_, last, of)) if of == owner => *last = slot,
                _ => ranges.push((slot, slot, *owner)),
            }
        }
        let range = |(first, last, owner): &(u16, u16, usize)| {
            let (host, port) = self.addresses[*owner]
                .split_once(':')
                .expect("an address with a port");
            let node = vec![
                Reply::text(host),
                Reply::Int(port.parse().unwrap()),
                Reply::text("id"),
            ];
            Reply::Array(vec![
                Reply::Int(i64::from(*first)),
                Reply::Int(i64::from(*last)),
                Reply::Array(node),
            ])
        };
        Reply::Array(ranges.iter().map(range).collect())
    }
}

/// The slot of a key: that of the text in its first braces, if not empty.
pub(crate) fn slot_of(key: &[u8]) -> u16 {
    let open = key.iter().position(|byte| *byte == b'{');
    let tag = open.and_then(|open| {
        let rest = &key[open + 1..];
        let end = rest.iter().position(|byte| *byte == b'}')?;
        Some(&rest[..end]).filter(|tag| !tag.is_empty())
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            (crc << 1) ^ ((crc >> 15) * 0x1021)
        })
    })
}
