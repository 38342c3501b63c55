//! The values of keys as text: escaped, and digests in base64url or hex.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::fmt::Write;

/// Length of a SHA-256 or HMAC-SHA-256 digest.
pub const DIGEST_BYTES: usize = 32;

/// A value of [`Key::append_full_text_to`](super::Key::append_full_text_to).
pub(super) enum KeyValueText {
    /// Empty if absent.
    Plain(Vec<u8>),
    Digest([u8; DIGEST_BYTES]),
}

pub(super) fn read_full_text_value(text: &str) -> Option<KeyValueText> {
    if text.starts_with('#') {
        return decode_digest(text).map(KeyValueText::Digest);
    }
    if text == "-" {
        return Some(KeyValueText::Plain(Vec::new()));
    }
    read_escaped_text(text).map(KeyValueText::Plain)
}

/// The bytes of a percent-escaped text that is not empty.
pub(super) fn read_escaped_text(text: &str) -> Option<Vec<u8>> {
    let is_escape_valid = |escape: &str| {
        escape
            .get(..2)
            .is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let is_valid = !text.is_empty() && text.split('%').skip(1).all(is_escape_valid);
    is_valid.then(|| percent_decode_str(text).collect())
}

/// A digest as operators and exports write it: `#` and all of it in base64url.
pub(super) fn encode_digest(digest: &[u8]) -> String {
    format!("#{}", URL_SAFE_NO_PAD.encode(digest))
}

fn decode_digest(text: &str) -> Option<[u8; DIGEST_BYTES]> {
    let digest = URL_SAFE_NO_PAD.decode(text.strip_prefix('#')?).ok()?;
    digest.try_into().ok()
}

/// A value of a key as operators and lists write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedValue<'t> {
    /// Empty if absent.
    Plain(&'t str),
    Digest([u8; DIGEST_BYTES]),
}

impl<'t> ListedValue<'t> {
    /// Reads a value: `#` and 43 characters of base64url are a digest. A plain value of that form
    /// has a further `#` in front.
    pub fn parse(text: &'t str) -> Self {
        match (decode_digest(text), text.strip_prefix('#')) {
            (Some(digest), _) => Self::Digest(digest),
            (None, Some(plain)) if is_like_digest(plain) => Self::Plain(plain),
            (None, _) => Self::Plain(text),
        }
    }
}

/// Whether a text is a digest behind any number of further `#`.
pub(super) fn is_like_digest(text: &str) -> bool {
    let start = text.bytes().take_while(|byte| *byte == b'#').count();
    let digest = start.checked_sub(1).and_then(|start| text.get(start..));
    digest.is_some_and(|digest| decode_digest(digest).is_some())
}

/// The digest of a value as readable keys show it: `#` and 64 bits in hex.
pub fn format_digest(digest: &[u8; DIGEST_BYTES]) -> String {
    let mut text = String::new();
    push_digest_text(&mut text, digest);
    text
}

pub(super) fn push_digest_text(text: &mut String, digest: &[u8]) {
    let start = digest
        .first_chunk()
        .map_or(0, |start| u64::from_be_bytes(*start));
    write!(text, "#{start:016X}").ok();
}

/// Bytes that could be taken for separators, or harm a terminal.
const ESCAPED_BYTES: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'@')
    .remove(b':');

pub(super) fn push_percent_escaped(text: &mut String, value: &[u8]) {
    match value {
        // A single "-" stands for an absent value.
        b"-" => text.push_str("%2D"),
        value => text.extend(percent_encode(value, ESCAPED_BYTES)),
    }
}
