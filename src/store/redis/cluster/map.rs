//! Which node of a cluster holds which slot.

use super::super::connect::Address;
use super::super::link::{Link, PROBE};
use crate::limiter::{Key, KeyBuilder};
use crate::store::redis::script::push_hex;
use redis::Value;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use tokio::time::Instant;

/// How many there are in every cluster.
const SLOTS: u16 = 16_384;

/// Names tried to find a counter in one of a node's slots: enough to find it in a single slot, as good as always.
const PROBES: u32 = 200_000;

/// Then the worker's requests have their turn: each name costs about a microsecond.
const PROBES_AT_ONCE: usize = 100;

/// A master, as far as this worker is concerned.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) link: Arc<Link>,
    /// Failures in a row, after which its connection has to prove itself anew: it is this node's breaker.
    pub(super) failures: AtomicU32,
    /// When it was first heard of.
    pub(super) since: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Map {
    pub(super) nodes: Vec<Arc<Node>>,
    /// For each slot the place of its node, where it has one.
    slots: Vec<Option<u16>>,
}

/// Slots from one to another, both included, and whose they are.
pub(super) type Range = (u16, u16, Address);

impl Map {
    pub(super) fn new(nodes: Vec<Arc<Node>>, ranges: &[Range]) -> Self {
        let mut slots = vec![None; usize::from(SLOTS)];
        for (first, last, address) in ranges {
            let place = nodes.iter().position(|node| node.address == *address);
            let place = place.and_then(|place| u16::try_from(place).ok());
            if let Some(slots) = slots.get_mut(usize::from(*first)..=usize::from(*last)) {
                slots.fill(place);
            }
        }
        Self { nodes, slots }
    }

    pub(super) fn of_slot(&self, slot: u16) -> Option<&Arc<Node>> {
        let place = self.slots.get(usize::from(slot)).copied().flatten()?;
        self.nodes.get(usize::from(place))
    }

    /// All slots but those of the nodes that are meant.
    pub(super) fn slots_without(&self, is_meant: impl Fn(&Node) -> bool) -> Vec<u16> {
        let meant: Vec<bool> = self.nodes.iter().map(|node| is_meant(node)).collect();
        if meant.iter().all(|is_meant| *is_meant)
            && self.slots.iter().all(Option::is_some)
            && !meant.is_empty()
        {
            return Vec::new();
        }
        let place = |slot: u16| self.slots.get(usize::from(slot)).copied().flatten();
        let is_meant = |place: u16| meant.get(usize::from(place)).copied().unwrap_or_default();
        (0..SLOTS)
            .filter(|slot| !place(*slot).is_some_and(is_meant))
            .collect()
    }

    pub(super) fn at(&self, address: &Address) -> Option<&Arc<Node>> {
        self.nodes.iter().find(|node| node.address == *address)
    }
}

/// Reads the answer to `CLUSTER SLOTS`: the masters' ranges. Where a node doesn't say its name, it has that of the one
/// who was asked. `None`: it isn't such an answer.
pub(super) fn ranges(reply: &Value, asked: &Address) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else {
        return None;
    };
    entries.iter().map(|entry| range(entry, asked)).collect()
}

fn range(entry: &Value, asked: &Address) -> Option<Range> {
    let Value::Array(entry) = entry else {
        return None;
    };
    let [
        Value::Int(first),
        Value::Int(last),
        Value::Array(master),
        ..,
    ] = entry.as_slice()
    else {
        return None;
    };
    let [host, Value::Int(port), ..] = master.as_slice() else {
        return None;
    };
    let host = match host {
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        Value::Nil => String::new(),
        _ => return None,
    };
    let slot = |number: i64| u16::try_from(number).ok().filter(|slot| *slot < SLOTS);
    let (first, last) = (slot(*first)?, slot(*last)?);
    let port = u16::try_from(*port).ok()?;
    (first <= last).then(|| (first, last, named(host, port, asked)))
}

/// An address as a node gives it, perhaps without its host.
pub(super) fn named(host: String, port: u16, asked: &Address) -> Address {
    match (host.as_str(), asked) {
        ("" | "?", Address::Tcp { host, .. }) => Address::Tcp {
            host: host.clone(),
            port,
        },
        _ => Address::Tcp { host, port },
    }
}

/// A counter that is in one of the slots of the node at an address: its own question about itself.
pub(super) async fn probe(ranges: &[Range], address: &Address) -> Key {
    let is_own = |slot: u16| {
        ranges
            .iter()
            .any(|(first, last, owner)| owner == address && (*first..=*last).contains(&slot))
    };
    let named = |number: u32| {
        let mut key = KeyBuilder::new(PROBE);
        key.part(Some(number.to_string().as_bytes()));
        key.finish()
    };
    let mut untried = (0..PROBES).map(named).peekable();
    while untried.peek().is_some() {
        if let Some(key) = untried
            .by_ref()
            .take(PROBES_AT_ONCE)
            .find(|key| is_own(slot_of(key)))
        {
            return key;
        }
        tokio::task::yield_now().await;
    }
    named(0)
}

/// The slot of everything that is kept for a key.
pub(in crate::store::redis) fn slot_of(key: &Key) -> u16 {
    let mut tag = String::with_capacity(32);
    push_hex(&mut tag, key.id());
    crc16(tag.as_bytes()) % SLOTS
}

/// The slot of a name in Redis: of what stands in its first braces, if anything does.
pub(in crate::store::redis) fn slot_of_name(name: &str) -> u16 {
    let tag = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    crc16(
        tag.map_or(name, |(tag, _)| if tag.is_empty() { name } else { tag })
            .as_bytes(),
    ) % SLOTS
}

/// CRC-16/XMODEM, which Redis Cluster prescribes.
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
    use std::pin::pin;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of_name("foo"), 12_182);
        assert_eq!(
            slot_of_name("{user1000}.following"),
            slot_of_name("user1000")
        );
        assert_eq!(slot_of_name("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        let key = KeyBuilder::new("p").finish();
        assert_eq!(
            slot_of(&key),
            slot_of_name(&format!("t:v1:{{{:032x}}}:sliding_log:1", key.id()))
        );
    }

    #[test]
    fn nodes_without_a_name_are_where_the_asked_one_is() {
        let node = |host, port| {
            Value::Array(vec![
                host,
                Value::Int(port),
                Value::BulkString(b"id".into()),
            ])
        };
        let range =
            |first, last, node| Value::Array(vec![Value::Int(first), Value::Int(last), node]);
        let reply = Value::Array(vec![
            range(0, 99, node(Value::Nil, 1)),
            range(100, 199, node(Value::BulkString(b"".into()), 2)),
            range(200, 16_383, node(Value::BulkString(b"c".into()), 3)),
        ]);
        let wanted = vec![
            (0, 99, tcp("a", 1)),
            (100, 199, tcp("a", 2)),
            (200, 16_383, tcp("c", 3)),
        ];
        assert_eq!(ranges(&reply, &tcp("a", 9)), Some(wanted));
        for lie in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(5, 4, node(Value::Nil, 1))]),
            Value::Array(vec![range(0, 16_384, node(Value::Nil, 1))]),
            Value::Array(vec![range(0, 1, node(Value::Nil, 65_536))]),
            Value::Array(vec![range(0, 1, Value::Array(Vec::new()))]),
        ] {
            assert_eq!(ranges(&lie, &tcp("a", 9)), None, "{lie:?}");
        }
    }

    #[tokio::test]
    async fn each_node_has_a_counter_of_its_own_and_others_go_on_while_it_is_looked_for() {
        let ranges = [
            (0, 99, tcp("a", 1)),
            (100, 16_382, tcp("b", 1)),
            (16_383, 16_383, tcp("c", 1)),
        ];
        for (first, last, address) in &ranges {
            let (mut probe, mut others) = (pin!(probe(&ranges, address)), 0);
            let key = loop {
                tokio::select! {
                    biased;
                    key = &mut probe => break key,
                    () = tokio::task::yield_now() => others += 1,
                }
            };
            assert!((*first..=*last).contains(&slot_of(&key)));
            assert!(others > 10 || first < last, "{others}");
        }
    }
}
