//! The identity of a counter: the name of a policy and the key values.
//!
//! Values come from clients. Each value is framed by its length before it is hashed, so two
//! different lists of values never have the same encoding. A long value is hashed, so the key stays
//! small.

use super::key_text::{
    DIGEST_BYTES, KeyValueText, encode_digest, is_like_digest, push_digest_text,
    push_percent_escaped, read_escaped_text, read_full_text_value,
};
use foldhash::fast::RandomState;
use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt::{self, Write};
use std::hash::BuildHasher;
use strum::{EnumString, IntoStaticStr, VariantNames};

/// A key value longer than this many bytes is stored as its hash. No value is truncated.
const MAX_VERBATIM_BYTES: usize = 64;

/// The policy name and key values that identify a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    id: u128,
    encoded_values: SmallVec<[u8; 96]>,
}

/// Where the counters of a policy are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum CounterScope {
    /// In the store, shared by all instances.
    #[default]
    Shared,
    /// In the memory of this process, also if the store is Redis.
    Instance,
}

impl CounterScope {
    /// The name in the configuration and in reports.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// Collects the values of a [`Key`] in order.
#[derive(Debug, Default)]
pub struct KeyBuilder {
    encoded_values: SmallVec<[u8; 96]>,
}

const ABSENT_TAG: u8 = 0;
const VERBATIM_TAG: u8 = 1;
const HASHED_TAG: u8 = 2;
const SHARD_TAG: u8 = 3;
/// The first byte of the key of a response counter. Every other key starts with its policy's name,
/// so with another tag.
const COUNTED_TAG: u8 = 4;

/// The bit that distinguishes the ids of a key and of its response counter.
const COUNTED_ID_BIT: u128 = 1 << 127;

const SOURCES_DIGEST_TAG: u8 = 5;
const SOURCE_LABEL_TAG: u8 = 6;
/// Precedes the policy name of a key of [`CounterScope::Instance`].
const INSTANCE_TAG: u8 = 7;
/// The first byte of a notification key. The hash of what is notified follows.
const NOTIFICATION_TAG: u8 = 8;
const NOTIFICATION_HASH_BYTES: usize = 16;

/// Length of a [`KeyBuilder::push_sources`] digest.
pub const SOURCES_BYTES: usize = 4;

impl KeyBuilder {
    pub fn new(policy: &str) -> Self {
        Self::with_scope(policy, CounterScope::Shared)
    }

    pub fn with_scope(policy: &str, scope: CounterScope) -> Self {
        let mut builder = Self::default();
        if scope == CounterScope::Instance {
            builder.encoded_values.push(INSTANCE_TAG);
        }
        builder.push_encoded_value(policy.as_bytes());
        builder
    }

    /// Adds the digest of where the values come from, before the first value. So values from
    /// another source never have the same key.
    pub fn push_sources(&mut self, sources: [u8; SOURCES_BYTES]) {
        self.encoded_values.push(SOURCES_DIGEST_TAG);
        self.encoded_values.extend_from_slice(&sources);
    }

    /// Adds the source of the next value, for a key part with alternatives. The label has at most
    /// 255 bytes.
    pub fn push_source_label(&mut self, label: &[u8]) {
        let len = u8::try_from(label.len()).unwrap_or(u8::MAX);
        self.encoded_values
            .extend_from_slice(&[SOURCE_LABEL_TAG, len]);
        self.encoded_values
            .extend(label.iter().copied().take(usize::from(len)));
    }

    /// Adds one value. An absent value equals an empty one and differs from every other value.
    pub fn push_key_value(&mut self, value: Option<&[u8]>) {
        match value {
            None | Some([]) => self.encoded_values.push(ABSENT_TAG),
            Some(value) => self.push_encoded_value(value),
        }
    }

    /// Adds the digest of a value instead of the value. A digest differs from every value.
    pub fn push_digest(&mut self, digest: &[u8; DIGEST_BYTES]) {
        self.encoded_values.push(HASHED_TAG);
        self.encoded_values.extend_from_slice(digest);
    }

    pub fn finish(self) -> Key {
        Key::from_encoding(self.encoded_values)
    }

    fn push_encoded_value(&mut self, value: &[u8]) {
        match u8::try_from(value.len()) {
            Ok(len) if value.len() <= MAX_VERBATIM_BYTES => {
                self.encoded_values.push(VERBATIM_TAG);
                self.encoded_values.push(len);
                self.encoded_values.extend_from_slice(value);
            }
            _ => self.push_digest(&Sha256::digest(value).into()),
        }
    }
}

impl Key {
    /// The key with these [`Key::encoded_values`].
    pub fn from_encoded_values(encoded_values: &[u8]) -> Self {
        Self::from_encoding(encoded_values.into())
    }

    /// The framed name and values, from which the key can be made again.
    pub fn encoded_values(&self) -> &[u8] {
        &self.encoded_values
    }

    fn from_encoding(encoded_values: SmallVec<[u8; 96]>) -> Self {
        let (is_counted, values) = match encoded_values.split_first() {
            Some((&COUNTED_TAG, values)) => (true, values),
            _ => (false, encoded_values.as_slice()),
        };
        let counted_bit = if is_counted { COUNTED_ID_BIT } else { 0 };
        let id = recall_quota_id(values) ^ counted_bit;
        Self { id, encoded_values }
    }

    /// The key of the response counter (`count_when` with `block_for`), in the same slot.
    #[must_use]
    pub fn to_response_counter_key(&self) -> Self {
        let mut encoded_values = self.encoded_values.clone();
        encoded_values.insert(0, COUNTED_TAG);
        Self {
            id: self.id ^ COUNTED_ID_BIT,
            encoded_values,
        }
    }

    /// Whether this is the key of a response counter.
    pub fn is_response_counter_key(&self) -> bool {
        self.encoded_values.first() == Some(&COUNTED_TAG)
    }

    /// The id of the quota: the same for the key of a response counter.
    pub fn quota_id(&self) -> u128 {
        if self.is_response_counter_key() {
            self.id ^ COUNTED_ID_BIT
        } else {
            self.id
        }
    }

    /// The key of the request counter, for the key of a response counter.
    #[must_use]
    pub fn to_request_counter_key(&self) -> Self {
        Self {
            id: self.quota_id(),
            encoded_values: self.quota_values().into(),
        }
    }

    /// The key of a counter that admits one notification about the quota. `subject` states what is
    /// notified.
    #[must_use]
    pub fn to_notification_key(&self, subject: &str) -> Self {
        let mut encoded_values = SmallVec::from_slice(&[NOTIFICATION_TAG]);
        encoded_values.extend_from_slice(&hash_values(subject.as_bytes()).to_be_bytes());
        encoded_values.extend_from_slice(&self.encoded_values);
        Self {
            id: hash_values(&encoded_values),
            encoded_values,
        }
    }

    /// Whether this is a notification key.
    pub fn is_notification_key(&self) -> bool {
        self.encoded_values.first() == Some(&NOTIFICATION_TAG)
    }

    /// The framed name and values without the tag of a response counter or a notification.
    fn quota_values(&self) -> &[u8] {
        match self.encoded_values.split_first() {
            Some((&COUNTED_TAG, values)) => values,
            Some((&NOTIFICATION_TAG, rest)) => split_front(rest, NOTIFICATION_HASH_BYTES).1,
            _ => &self.encoded_values,
        }
    }

    /// The key of one of the shards over which a quota is spread.
    pub fn shard_key(&self, number: u16) -> Self {
        let mut encoded_values = self.encoded_values.clone();
        encoded_values.push(SHARD_TAG);
        encoded_values.extend_from_slice(&number.to_be_bytes());
        Self::from_encoding(encoded_values)
    }

    /// 128 bits of SHA-256 over the framed values: the same in every process and version.
    pub fn id(&self) -> u128 {
        self.id
    }

    /// Where the counters are.
    pub fn scope(&self) -> CounterScope {
        if self.is_instance_scoped() {
            CounterScope::Instance
        } else {
            CounterScope::Shared
        }
    }

    /// Whether the counters are in the memory of this process, whatever the store is.
    pub fn is_instance_scoped(&self) -> bool {
        self.quota_values().first() == Some(&INSTANCE_TAG)
    }

    /// The policy's name, framed, with its scope.
    pub fn encoded_policy_name(&self) -> &[u8] {
        let values = self.quota_values();
        let len = match values {
            [VERBATIM_TAG, len, ..] => 2 + usize::from(*len),
            [INSTANCE_TAG, VERBATIM_TAG, len, ..] => 3 + usize::from(*len),
            _ => 1 + DIGEST_BYTES,
        };
        values.get(..len).unwrap_or(values)
    }

    /// The policy's name and the values as readable text: `policy/value/value`. Bytes that could be
    /// taken for separators or harm a terminal are percent-escaped. An absent value is `-`, a
    /// hashed one `#` and hex, a shard `+` and its number. A value of a part with alternatives is
    /// `source=value`.
    pub fn to_readable_string(&self) -> String {
        let mut text = String::with_capacity(self.encoded_values.len());
        self.append_readable_to(&mut text);
        text
    }

    /// Appends [`Key::to_readable_string`] with whole digests, from which [`Key::from_full_text`]
    /// makes the key again.
    pub fn append_full_text_to(&self, text: &mut String) {
        self.append_text_to(
            text,
            |text, digest| text.push_str(&encode_digest(digest)),
            |text, sources| {
                let sources = sources
                    .first_chunk()
                    .map_or(0, |sources| u32::from_be_bytes(*sources));
                write!(text, "/={sources:08X}").ok();
            },
        );
    }

    /// The key with this text of [`Key::append_full_text_to`]. `None` if it is no such text.
    pub fn from_full_text(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let mut builder = KeyBuilder::default();
        match read_full_text_value(parts.next()?)? {
            KeyValueText::Plain(name) if !name.is_empty() => builder.push_encoded_value(&name),
            _ => return None,
        }
        for part in parts {
            let value = match part.split_once('=') {
                Some(("", sources)) => {
                    let sources = u32::from_str_radix(sources, 16).ok()?;
                    builder.push_sources(sources.to_be_bytes());
                    continue;
                }
                Some((label, value)) => {
                    builder.push_source_label(&read_escaped_text(label)?);
                    value
                }
                None => part,
            };
            match read_full_text_value(value)? {
                KeyValueText::Plain(value) => builder.push_key_value(Some(&value)),
                KeyValueText::Digest(digest) => builder.push_digest(&digest),
            }
        }
        Some(builder.finish())
    }

    /// The values in order, as [`ListedValue::parse`] reads them.
    pub fn value_texts(&self) -> Vec<String> {
        let mut text = String::new();
        self.append_full_text_to(&mut text);
        let values = text.split('/').skip(1);
        let values = values.filter(|part| !part.starts_with('='));
        let read_value = |text: &str| match read_full_text_value(text) {
            Some(KeyValueText::Plain(value)) => {
                let value = String::from_utf8_lossy(&value);
                if is_like_digest(&value) {
                    format!("#{value}")
                } else {
                    value.into_owned()
                }
            }
            Some(KeyValueText::Digest(_)) | None => text.to_owned(),
        };
        let values = values.map(|part| match part.split_once('=') {
            Some((label, value)) => {
                let label = read_escaped_text(label).unwrap_or_default();
                format!("{}={}", String::from_utf8_lossy(&label), read_value(value))
            }
            None => read_value(part),
        });
        values.collect()
    }

    /// 64 bits of SHA-256 over each value, with its position and the policy's name: log lines have
    /// them, so that one value of a key can be searched for.
    pub fn value_ids(&self) -> Vec<u64> {
        let mut text = String::new();
        self.append_full_text_to(&mut text);
        let mut parts = text.split('/').filter(|part| !part.starts_with('='));
        let name = parts.next().unwrap_or_default();
        let id = |(position, value): (usize, &str)| {
            let digest = Sha256::digest(format!("{name}/{position}/{value}"));
            digest
                .first_chunk()
                .map_or(0, |start| u64::from_be_bytes(*start))
        };
        parts.enumerate().map(id).collect()
    }

    /// [`Key::value_ids`] as log lines have them.
    pub fn format_value_ids(&self) -> String {
        let ids = self.value_ids();
        let ids: Vec<String> = ids.iter().map(|id| format!("{id:016x}")).collect();
        ids.join(",")
    }

    /// The policy's name.
    pub fn policy_name(&self) -> &str {
        let name = match self.encoded_policy_name() {
            [INSTANCE_TAG, _, _, name @ ..] | [_, _, name @ ..] => name,
            _ => &[],
        };
        std::str::from_utf8(name).unwrap_or_default()
    }

    /// Appends [`Key::to_readable_string`] to a text.
    pub fn append_readable_to(&self, text: &mut String) {
        self.append_text_to(text, push_digest_text, |_, _| ());
    }

    fn append_text_to(
        &self,
        text: &mut String,
        push_digest: impl Fn(&mut String, &[u8]),
        push_sources: impl Fn(&mut String, &[u8]),
    ) {
        let (start, mut rest) = (text.len(), self.quota_values());
        let mut is_labeled = false;
        while let Some((kind, tail)) = rest.split_first() {
            if *kind == SOURCES_DIGEST_TAG {
                let (sources, tail) = split_front(tail, SOURCES_BYTES);
                push_sources(text, sources);
                rest = tail;
                continue;
            }
            if text.len() > start && !is_labeled {
                text.push('/');
            }
            is_labeled = *kind == SOURCE_LABEL_TAG;
            rest = match *kind {
                INSTANCE_TAG => tail,
                VERBATIM_TAG | SOURCE_LABEL_TAG => {
                    let (len, tail) = tail.split_first().unwrap_or((&0, &[]));
                    let (value, tail) = split_front(tail, usize::from(*len));
                    push_percent_escaped(text, value);
                    if is_labeled {
                        text.push('=');
                    }
                    tail
                }
                HASHED_TAG => {
                    let (hash, tail) = split_front(tail, DIGEST_BYTES);
                    push_digest(text, hash);
                    tail
                }
                SHARD_TAG => {
                    let (number, tail) = split_front(tail, 2);
                    let number = number
                        .first_chunk()
                        .map_or(0, |bytes| u16::from_be_bytes(*bytes));
                    write!(text, "+{number}").ok();
                    tail
                }
                _ => {
                    text.push('-');
                    tail
                }
            };
        }
    }
}

/// Longer values are not remembered, so that they take no further memory.
const MAX_REMEMBERED_BYTES: usize = 96;

/// How many quotas each thread remembers.
const RECENT_QUOTAS: u16 = 64;

thread_local! {
    /// Recent quotas, each at the index of a fast hash of its values.
    static RECENT: RefCell<(RandomState, Vec<Key>)> = {
        let (id, encoded_values) = (hash_values(&[]), SmallVec::new());
        RefCell::new((RandomState::default(), vec![Key { id, encoded_values }; RECENT_QUOTAS.into()]))
    };
}

/// [`hash_values`] in a tenth of its time for a quota that the thread remembers.
fn recall_quota_id(values: &[u8]) -> u128 {
    if values.len() > MAX_REMEMBERED_BYTES {
        return hash_values(values);
    }
    RECENT.with_borrow_mut(|(hasher, recent)| {
        let index =
            usize::try_from(hasher.hash_one(values) % u64::from(RECENT_QUOTAS)).unwrap_or(0);
        let Some(recent) = recent.get_mut(index) else {
            return hash_values(values);
        };
        if *recent.encoded_values != *values {
            let (id, encoded_values) = (hash_values(values), values.into());
            *recent = Key { id, encoded_values };
        }
        recent.id
    })
}

/// 128 bits of SHA-256 over framed values.
fn hash_values(values: &[u8]) -> u128 {
    let digest = Sha256::digest(values);
    let start = digest.first_chunk();
    start.map_or(0, |start| u128::from_be_bytes(*start))
}

/// The first bytes, or all if there are fewer, and the rest.
fn split_front(bytes: &[u8], len: usize) -> (&[u8], &[u8]) {
    bytes.split_at_checked(len).unwrap_or((bytes, &[]))
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_readable_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::ListedValue;

    fn make_key(policy: &str, parts: &[Option<&str>]) -> Key {
        let mut builder = KeyBuilder::new(policy);
        for part in parts {
            builder.push_key_value(part.map(str::as_bytes));
        }
        builder.finish()
    }

    #[test]
    fn values_cannot_be_shifted_between_positions() {
        assert_ne!(
            make_key("p", &[Some("a:b"), Some("c")]).id(),
            make_key("p", &[Some("a"), Some("b:c")]).id()
        );
        assert_ne!(
            make_key("p", &[Some("ab")]).id(),
            make_key("p", &[Some("a"), Some("b")]).id()
        );
        assert_ne!(
            make_key("p", &[Some("a/b")]).to_readable_string(),
            make_key("p", &[Some("a"), Some("b")]).to_readable_string()
        );
        assert_ne!(make_key("pa", &[]).id(), make_key("p", &[Some("a")]).id());
    }

    #[test]
    fn absent_equals_empty_and_differs_from_every_value() {
        assert_eq!(make_key("p", &[None]).id(), make_key("p", &[Some("")]).id());
        assert_ne!(
            make_key("p", &[None]).id(),
            make_key("p", &[Some("-")]).id()
        );
        assert_ne!(
            make_key("p", &[None]).to_readable_string(),
            make_key("p", &[Some("-")]).to_readable_string()
        );
        assert_ne!(
            make_key("p", &[None, Some("x")]).id(),
            make_key("p", &[Some("x"), None]).id()
        );
    }

    #[test]
    fn a_remembered_id_is_that_of_the_values() {
        for number in (0..500).chain(0..500) {
            // The second time, the thread remembers the quota.
            for _ in 0..2 {
                let key = make_key("p", &[Some(&number.to_string())]);
                assert_eq!(key.id(), hash_values(key.encoded_values()));
                assert_ne!(key.to_response_counter_key().id(), key.id());
            }
        }
        assert_eq!(recall_quota_id(&[]), hash_values(&[]));
    }

    #[test]
    fn long_values_are_hashed_and_never_cut() {
        let long = "x".repeat(1 << 20);
        let longer = format!("{long}y");
        let (a, b) = (
            make_key("p", &[Some(&long)]),
            make_key("p", &[Some(&longer)]),
        );
        assert_ne!(a.id(), b.id());
        assert!(a.to_readable_string().len() < 64, "{a}");
    }

    #[test]
    fn keys_of_different_scopes_differ_and_read_the_same() {
        let make = |scope| {
            let mut builder = KeyBuilder::with_scope("p", scope);
            builder.push_key_value(Some(b"x"));
            builder.finish()
        };
        let (shared, instance) = (make(CounterScope::Shared), make(CounterScope::Instance));
        assert_ne!(shared.id(), instance.id());
        assert_eq!(
            (shared.is_instance_scoped(), instance.is_instance_scoped()),
            (false, true)
        );
        for key in [shared, instance] {
            assert_eq!((key.policy_name(), &*key.to_string()), ("p", "p/x"));
            let derived = [
                key.to_response_counter_key(),
                key.to_notification_key("p@0.8"),
            ];
            for derived in derived {
                assert_eq!(derived.is_instance_scoped(), key.is_instance_scoped());
                assert_eq!(derived.to_string(), key.to_string());
                assert_eq!(derived.encoded_policy_name(), key.encoded_policy_name());
                assert_ne!(derived.id(), key.id());
                let restored = Key::from_encoded_values(derived.encoded_values());
                assert_eq!(restored, derived);
            }
        }
    }

    #[test]
    fn sources_and_labels_keep_keys_apart_and_are_read_again() {
        let make_key = |sources: Option<u32>, label: Option<&str>, value: Option<&str>| {
            let mut builder = KeyBuilder::new("p");
            if let Some(sources) = sources {
                builder.push_sources(sources.to_be_bytes());
            }
            if let Some(label) = label {
                builder.push_source_label(label.as_bytes());
            }
            builder.push_key_value(value.map(str::as_bytes));
            builder.finish()
        };
        let keys = [
            make_key(None, None, Some("a")),
            make_key(Some(1), None, Some("a")),
            make_key(Some(2), None, Some("a")),
            make_key(None, Some("jwt:sub"), Some("a")),
            make_key(None, Some("jwt:/a=b"), Some("a")),
            make_key(None, None, Some("jwt:sub=a")),
            make_key(None, None, Some("=00000001")),
            make_key(Some(1), Some("jwt:sub"), None),
            make_key(None, Some("jwt:sub"), Some(&"x".repeat(65))),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].iter().any(|other| other.id() == key.id()));
            let mut text = String::new();
            key.append_full_text_to(&mut text);
            assert_eq!(Key::from_full_text(&text).as_ref(), Some(key), "{text}");
        }
        let texts = keys.map(|key| (key.to_readable_string(), key.value_texts()));
        assert_eq!(texts[0], texts[1], "only the identity has the sources");
        assert_eq!(
            texts[3],
            ("p/jwt:sub=a".to_owned(), vec!["jwt:sub=a".to_owned()])
        );
        assert_eq!(texts[5].0, "p/jwt:sub%3Da");
    }

    #[test]
    fn readable_string_escapes_control_characters_and_braces() {
        let text = make_key("p", &[Some("{x}\u{1b}[31m\n")]).to_readable_string();
        assert_eq!(text, "p/%7Bx%7D%1B%5B31m%0A");
    }

    #[test]
    fn the_key_of_counted_responses_belongs_to_the_quota_of_the_requests() {
        let mut builder = KeyBuilder::new("login");
        builder.push_key_value(Some(b"\x04ann"));
        let key = builder.finish();
        let counted = key.to_response_counter_key();
        assert_ne!(counted.id(), key.id());
        assert_eq!(
            (counted.quota_id(), counted.encoded_policy_name()),
            (key.id(), key.encoded_policy_name())
        );
        assert_eq!(counted.to_readable_string(), key.to_readable_string());
        assert_eq!(counted.to_request_counter_key(), key);
        let restored = Key::from_encoded_values(counted.encoded_values());
        assert_eq!(restored, counted);
        assert!(counted.is_response_counter_key() && !key.is_response_counter_key());
    }

    #[test]
    fn a_listed_value_is_read_as_it_was_written() {
        let digest = encode_digest(&[7; DIGEST_BYTES]);
        for value in [
            "ann",
            "#ann",
            "##",
            "-",
            &digest,
            &format!("#{digest}"),
            &format!("##{digest}"),
        ] {
            let mut builder = KeyBuilder::new("api");
            builder.push_key_value(Some(value.as_bytes()));
            let texts = builder.finish().value_texts();
            assert_eq!(ListedValue::parse(&texts[0]), ListedValue::Plain(value));
        }
        let mut builder = KeyBuilder::new("api");
        builder.push_digest(&[7; DIGEST_BYTES]);
        let texts = builder.finish().value_texts();
        assert_eq!(texts, [digest]);
        assert_eq!(
            ListedValue::parse(&texts[0]),
            ListedValue::Digest([7; DIGEST_BYTES])
        );
    }
}
