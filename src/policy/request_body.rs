//! What policies read in the body of a request: values at JSON pointers, form fields, and its size.

use super::facts::query_values;
use super::json_scanner::{BodyValue, JsonPointerScanner};
use super::value_checks::is_query_ambiguous;
use super::{JsonPointer, MediaType, ValueChecks};
use http::{HeaderMap, header};
use serde::de::IgnoredAny;

/// The body of a request, as policies read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodyFacts {
    /// Bytes of the body; `None` if unknown.
    pub size: Option<u64>,
    /// The values at the pointers of all policies; `None` if the body could not be read.
    values: Option<Box<[(JsonPointer, BodyValue)]>>,
}

/// How the values of a body are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFormat {
    Json,
    /// `application/x-www-form-urlencoded`
    Form,
}

impl BodyFormat {
    /// The format of a request's body; `None` if it can't be read: another media type, a content
    /// coding, or a charset other than UTF-8.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let media_type = MediaType::from_headers(headers)?;
        let is_utf8 = |charset: &str| charset.eq_ignore_ascii_case("utf-8");
        if !media_type.charset.as_deref().is_none_or(is_utf8) {
            return None;
        }
        match &*media_type.name {
            "application/x-www-form-urlencoded" => Some(Self::Form),
            name => MediaType::is_json(name).then_some(Self::Json),
        }
    }
}

impl BodyFacts {
    /// A body that was not read.
    pub const fn unreadable(size: Option<u64>) -> Self {
        Self { size, values: None }
    }

    /// Reads a complete body. A body without a byte has no values. `checks` say which values apps
    /// may read differently.
    pub fn read<'p>(
        body: &[u8],
        format: Option<BodyFormat>,
        pointers: impl Iterator<Item = &'p JsonPointer>,
        checks: ValueChecks,
    ) -> Self {
        let size = u64::try_from(body.len()).ok();
        let read: Box<dyn Fn(&JsonPointer) -> BodyValue> = match format {
            _ if body.is_empty() => Box::new(|_| BodyValue::Absent),
            Some(BodyFormat::Json) => match valid_json(body) {
                Some(json) => Box::new(|pointer| JsonPointerScanner::read_request(json, pointer)),
                None => return Self::unreadable(size),
            },
            Some(BodyFormat::Form) => match std::str::from_utf8(body) {
                Ok(form) => Box::new(|pointer| read_form_field(form, pointer)),
                Err(_) => return Self::unreadable(size),
            },
            None => return Self::unreadable(size),
        };
        let values = pointers.map(|pointer| {
            let value = match read(pointer) {
                BodyValue::Text(text) if checks.rejects_value(text.as_bytes()) => {
                    BodyValue::Unreadable
                }
                value => value,
            };
            (pointer.clone(), value)
        });
        Self {
            size,
            values: Some(values.collect()),
        }
    }

    /// The value at a pointer of a policy.
    pub fn value(&self, pointer: &JsonPointer) -> &BodyValue {
        let values = self.values.as_deref();
        let found = values.and_then(|values| values.iter().find(|(known, _)| known == pointer));
        found.map_or(&BodyValue::Unreadable, |(_, value)| value)
    }

    /// The value at a pointer as keys and conditions compare it.
    pub(super) fn text(&self, pointer: &JsonPointer) -> Option<&str> {
        match self.value(pointer) {
            BodyValue::Text(text) | BodyValue::Number(text) => Some(text),
            BodyValue::Absent | BodyValue::Unreadable => None,
        }
    }
}

/// The document in a body without its byte order mark, if it is strictly valid (RFC 8259): what
/// lenient parsers read beside it can't be told.
fn valid_json(body: &[u8]) -> Option<&[u8]> {
    let json = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let text = std::str::from_utf8(json).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    Some(json)
}

/// The value of a form field, whose name is the only step of the pointer.
fn read_form_field(form: &str, pointer: &JsonPointer) -> BodyValue {
    let [token] = pointer.tokens() else {
        return BodyValue::Absent;
    };
    if is_query_ambiguous(Some(form), &token.name) {
        return BodyValue::Unreadable;
    }
    let mut values = query_values(Some(form), &token.name);
    match (values.next(), values.next()) {
        (None, _) => BodyValue::Absent,
        (Some(value), None) => match String::from_utf8(value.into_owned()) {
            Ok(text) => BodyValue::Text(text.into()),
            Err(_) => BodyValue::Unreadable,
        },
        (Some(_), Some(_)) => BodyValue::Unreadable,
    }
}

/// Whether a body has the identity coding.
pub(super) fn is_identity_coded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    codings.all(|coding| {
        coding
            .as_bytes()
            .trim_ascii()
            .eq_ignore_ascii_case(b"identity")
    })
}
