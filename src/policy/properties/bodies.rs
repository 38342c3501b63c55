//! Readings of request bodies, compared with all that parsers may read.

use crate::limiter::MAX_UNITS;
use crate::policy::json_scanner::{BodyValue, JsonPointerScanner, MAX_TEXT_BYTES};
use crate::policy::{BodyFormat, JsonPointer, JsonPointerToken, ValueChecks, read_body};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// A value that policies read is the only one that an app can read: the one of a full parser if
/// each name on the way occurs once. Otherwise the body is unreadable there. The first byte chooses
/// the format and the size of chunks; a pointer follows up to the end of the line, then the body.
pub fn assert_body_readings(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let mut lines = rest.splitn(2, |byte| *byte == b'\n');
    let (pointer, body) = (lines.next(), lines.next().unwrap_or_default());
    let pointer = pointer.and_then(|text| std::str::from_utf8(text).ok());
    let Some(Ok(pointer)) = pointer.map(JsonPointer::parse) else {
        return;
    };
    let format = match choice & 1 {
        0 => BodyFormat::Json,
        _ => BodyFormat::Form,
    };
    let read = |body, format| {
        let pointers = std::iter::once(&pointer);
        let facts = read_body(body, format, pointers, ValueChecks::ALL);
        facts.value(&pointer).clone()
    };
    let value = read(body, Some(format));
    let context = || format!("{value:?} at {pointer} in {}", body.escape_ascii());
    if body.is_empty() {
        return assert_eq!(value, BodyValue::Absent);
    }
    assert_eq!(read(body, None), BodyValue::Unreadable);
    if let BodyValue::Text(text) | BodyValue::Number(text) = &value {
        assert!(text.len() <= MAX_TEXT_BYTES, "{}", context());
    }
    let may_read = match format {
        BodyFormat::Json => {
            assert_bounded_memory(body, &pointer, usize::from(choice >> 1) + 1);
            read_json_naively(body, &pointer)
        }
        // The readings of real servers judge forms.
        BodyFormat::Form => NaiveReading::Lenient,
    };
    match may_read {
        NaiveReading::Invalid | NaiveReading::Ambiguous => {
            assert_eq!(value, BodyValue::Unreadable, "{}", context());
        }
        NaiveReading::Lenient => {}
        NaiveReading::Value(expected) if value != BodyValue::Unreadable => {
            assert_eq!(value, expected, "{}", context());
        }
        NaiveReading::Value(expected) => {
            let is_plain = match &expected {
                BodyValue::Text(text) => text.bytes().all(|byte| byte.is_ascii_alphanumeric()),
                BodyValue::Number(_) => true,
                BodyValue::Absent | BodyValue::Unreadable => false,
            };
            // An unreadable body is one that an app may read differently.
            let has_escapes = body.iter().any(|byte| b"\\%+;?".contains(byte));
            let is_short = body.len() < MAX_TEXT_BYTES;
            let is_expected = is_plain && is_short && !has_escapes && body.is_ascii();
            assert!(!is_expected, "{}", context());
        }
    }
}

/// What the apps behind may read.
enum NaiveReading {
    /// The body is not valid.
    Invalid,
    /// A name on the way occurs twice, or has another spelling.
    Ambiguous,
    /// Only a lenient parser reads the body.
    Lenient,
    Value(BodyValue),
}

/// The memory of a scan does not depend on the body.
fn assert_bounded_memory(body: &[u8], pointer: &JsonPointer, chunk_bytes: usize) {
    let mut scan = JsonPointerScanner::for_request();
    for part in body.chunks(chunk_bytes) {
        scan.read_chunk(part, pointer);
        // A vector grows to at most twice what it needs.
        assert!(scan.buffer_capacity() <= 2 * (MAX_TEXT_BYTES + 1));
    }
}

/// A JSON document that keeps all members of its objects.
enum JsonDocument {
    Object(Vec<(String, JsonDocument)>),
    List(Vec<JsonDocument>),
    Scalar(Value),
}

fn read_json_naively(body: &[u8], pointer: &JsonPointer) -> NaiveReading {
    let json = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    if serde_json::from_slice::<serde::de::IgnoredAny>(json).is_err() {
        return NaiveReading::Invalid;
    }
    let Ok(mut at) = serde_json::from_slice::<JsonDocument>(json) else {
        return NaiveReading::Lenient;
    };
    if let JsonDocument::List(_) = at {
        return NaiveReading::Lenient;
    }
    for token in pointer.tokens() {
        let next = match at {
            JsonDocument::Object(members) => {
                let mut named: Vec<_> = members
                    .into_iter()
                    .filter(|(name, _)| may_be_named(name, token))
                    .collect();
                match (named.pop(), named.pop()) {
                    (Some((name, value)), None) if *name == *token.name => Some(value),
                    (None, _) => None,
                    (Some(_), _) => return NaiveReading::Ambiguous,
                }
            }
            JsonDocument::List(items) => {
                let index = token.index.and_then(|index| usize::try_from(index).ok());
                index.and_then(|index| items.into_iter().nth(index))
            }
            JsonDocument::Scalar(_) => None,
        };
        match next {
            Some(value) => at = value,
            None => return NaiveReading::Value(BodyValue::Absent),
        }
    }
    NaiveReading::Value(match at {
        JsonDocument::Object(_) | JsonDocument::List(_) => BodyValue::Unreadable,
        JsonDocument::Scalar(Value::String(text)) => BodyValue::Text(text.into()),
        JsonDocument::Scalar(Value::Bool(flag)) => BodyValue::Text(flag.to_string().into()),
        JsonDocument::Scalar(Value::Number(number)) => {
            let plain = number
                .as_i64()
                .filter(|one| one.unsigned_abs() <= MAX_UNITS);
            plain.map_or(BodyValue::Unreadable, |number| {
                BodyValue::Number(number.to_string().into())
            })
        }
        JsonDocument::Scalar(_) => BodyValue::Absent,
    })
}

/// Whether a parser that ignores letter case, `_` and `-` may take a name for a step.
fn may_be_named(name: &str, token: &JsonPointerToken) -> bool {
    let bare = |text: &str| text.replace(['_', '-'], "");
    let (name_bare, token_bare) = (bare(name), bare(&token.name));
    let is_same_letters = name_bare.to_lowercase() == token_bare.to_lowercase()
        || name_bare.to_uppercase() == token_bare.to_uppercase();
    *name == *token.name || !token_bare.is_empty() && is_same_letters
}

impl<'de> Deserialize<'de> for JsonDocument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonDocumentVisitor)
    }
}

struct JsonDocumentVisitor;

impl<'de> Visitor<'de> for JsonDocumentVisitor {
    type Value = JsonDocument;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(Value::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<JsonDocument, E> {
        Ok(JsonDocument::Scalar(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<JsonDocument, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(JsonDocument::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<JsonDocument, A::Error> {
        let mut object = Vec::new();
        while let Some(member) = members.next_entry()? {
            object.push(member);
        }
        Ok(JsonDocument::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    const JSON: &str = r#"([\[\]{},:"]|"a":|"A":|"b_":|"b":|"\\u0061":|\{"a":|\{"b":|"x"|"\\ud800"|-?[0-9]{1,18}|1e2|-0| |true|null|\x{ef}|\x{feff}){0,14}"#;
    const FORM: &str = "(a|A|b|b_|=|&|&a=|%61|%zz|%ff|[+]|;|x|5|[?]|a%5Bb%5D){0,12}";

    proptest! {
        #[test]
        fn body_readings_hold_for_any_json(chunk in any::<u8>(), at in "/(a|b|a/b|b/0|a/0/b|_)", body in JSON) {
            super::assert_body_readings(&[&[chunk & !1], at.as_bytes(), b"\n", body.as_bytes()].concat());
            let member = format!("{{\"a\":{body},\"b\":\"x\"}}");
            super::assert_body_readings(&[&[chunk & !1], at.as_bytes(), b"\n", member.as_bytes()].concat());
        }

        #[test]
        fn body_readings_hold_for_any_form(at in "/(a|b|a/b|b_)", body in FORM) {
            super::assert_body_readings(&[b"\x01", at.as_bytes(), b"\n", body.as_bytes()].concat());
        }
    }
}
