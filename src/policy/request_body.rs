//! What policies read in the body of a request: values at JSON pointers, form fields, and its size.

use super::facts::query_values;
use super::json_pointer::parse_whole_number;
use super::json_scanner::{BodyValue, JsonPointerScanner, MAX_TEXT_BYTES};
use super::value_checks::{is_query_ambiguous, names_parameter};
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
            Some(BodyFormat::Form) => match valid_form(body) {
                Some(form) => Box::new(|pointer| read_form_field(form, pointer)),
                None => return Self::unreadable(size),
            },
            None => return Self::unreadable(size),
        };
        let values = pointers.map(|pointer| {
            let value = match read(pointer) {
                BodyValue::Text(text)
                    if text.len() > MAX_TEXT_BYTES || checks.rejects_value(text.as_bytes()) =>
                {
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

    /// The values of a body in a log, at the pointers of all policies. Digits are a number.
    pub fn from_texts<'t>(
        size: Option<u64>,
        texts: impl Iterator<Item = (JsonPointer, Option<&'t str>)>,
    ) -> Self {
        let value = |text: &str| match parse_whole_number(text.as_bytes()) {
            Some(_) => BodyValue::Number(text.into()),
            None => BodyValue::Text(text.into()),
        };
        let values = texts.map(|(pointer, text)| (pointer, text.map_or(BodyValue::Absent, value)));
        let values = Some(values.collect());
        Self { size, values }
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

/// The fields in a body without octets that encoders of forms escape. An app that ignores the media
/// type may take a body with others for JSON.
fn valid_form(body: &[u8]) -> Option<&str> {
    let is_expected = |byte: &u8| byte.is_ascii_graphic() && !b"\"<>[]\\^`{|}".contains(byte);
    let form = std::str::from_utf8(body).ok()?;
    body.iter().all(is_expected).then_some(form)
}

/// The value of a form field, whose name is the only step of the pointer. Fields such as `a[b]` or
/// `a.b`, which some apps read as the value at `/a/b`, make it unreadable.
fn read_form_field(form: &str, pointer: &JsonPointer) -> BodyValue {
    let token = match pointer.tokens() {
        [token] => token,
        [first, ..] if names_parameter(form, &first.name) => return BodyValue::Unreadable,
        _ => return BodyValue::Absent,
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

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;
    use serde_json::Value;

    /// The readings of real parsers and frameworks, recorded by `make spellings`.
    const FIXTURE: &str = include_str!("../../tests/fixtures/json_bodies.json");
    const FIELDS: [(&str, &str); 4] = [
        ("model", "/model"),
        ("method", "/method"),
        ("max_tokens", "/max_tokens"),
        ("name", "/params/name"),
    ];

    fn pointer(text: &str) -> JsonPointer {
        JsonPointer::parse(text).unwrap()
    }

    fn read_json(body: &[u8], at: &str) -> BodyValue {
        let pointers = [pointer(at)];
        let format = Some(BodyFormat::Json);
        let facts = BodyFacts::read(body, format, pointers.iter(), ValueChecks::ALL);
        facts.value(&pointers[0]).clone()
    }

    /// A part is a text whose characters are bytes, or a text and how often it is repeated.
    fn build_body(parts: &Value) -> Vec<u8> {
        let bytes = |text: &str| -> Vec<u8> {
            let bytes = text
                .chars()
                .map(|one| u8::try_from(u32::from(one)).unwrap());
            bytes.collect()
        };
        let part = |part: &Value| match part {
            Value::String(text) => bytes(text),
            part => {
                let count = usize::try_from(part[1].as_u64().unwrap()).unwrap();
                bytes(part[0].as_str().unwrap()).repeat(count)
            }
        };
        parts.as_array().unwrap().iter().flat_map(part).collect()
    }

    /// Every reader that accepts a body reads the same value as the policies, or they find it
    /// unreadable.
    #[test]
    fn no_spelling_of_a_body_has_another_value_for_the_app() {
        let fixture: Value = serde_json::from_str(FIXTURE).unwrap();
        let (mut compared, mut unreadable) = (0, 0);
        let mut wrong = Vec::new();
        for one in fixture["bodies"].as_array().unwrap() {
            let mut headers = HeaderMap::new();
            let lines = one["headers"].as_array().into_iter().flatten();
            let lines = lines.map(|line| (line[0].as_str().unwrap(), line[1].as_str().unwrap()));
            let content_type = one["type"].as_str().map(|name| ("content-type", name));
            for (name, value) in content_type.into_iter().chain(lines) {
                let name: http::HeaderName = name.parse().unwrap();
                headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            let body = build_body(&one["body"]);
            let format = BodyFormat::from_headers(&headers).filter(|_| body.len() <= 65_536);
            let pointers = FIELDS.map(|(_, at)| pointer(at));
            let facts = BodyFacts::read(&body, format, pointers.iter(), ValueChecks::ALL);
            for ((field, _), at) in FIELDS.iter().zip(&pointers) {
                for reading in one["readings"].as_array().unwrap() {
                    let read = &reading[*field];
                    let is_same = match facts.value(at) {
                        BodyValue::Unreadable => {
                            unreadable += 1;
                            continue;
                        }
                        BodyValue::Absent => read.is_null(),
                        // Apps with typed fields may read the number in a text.
                        BodyValue::Text(text) => {
                            let is_number = read["n"].is_string();
                            let is_flag = match read {
                                Value::Bool(true) => &**text == "true",
                                Value::Bool(false) => &**text == "false",
                                _ => false,
                            };
                            *read == **text || is_flag || is_number
                        }
                        BodyValue::Number(text) => read["n"] == **text || *read == **text,
                    };
                    compared += 1;
                    // An app that reads no value gives the client no other one.
                    if !is_same && !read.is_null() {
                        let name = &one["name"];
                        wrong.push(format!(
                            "{name} {field}: {:?} but {reading}",
                            facts.value(at)
                        ));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
        assert!(
            compared > 500 && unreadable > 1000,
            "{compared} {unreadable}"
        );
    }

    #[test]
    fn values_of_each_type_are_read() {
        for (body, value) in [
            (r#"{"a":"x"}"#, BodyValue::Text("x".into())),
            (r#"{"a":true}"#, BodyValue::Text("true".into())),
            (r#"{"a":-7}"#, BodyValue::Number("-7".into())),
            (
                r#"{"a":9007199254740992}"#,
                BodyValue::Number("9007199254740992".into()),
            ),
            (r#"{"a":9007199254740993}"#, BodyValue::Unreadable),
            (r#"{"a":null}"#, BodyValue::Absent),
            (r#"{"b":"x"}"#, BodyValue::Absent),
            (r#"{"a":[]}"#, BodyValue::Unreadable),
            ("5", BodyValue::Absent),
            ("", BodyValue::Absent),
        ] {
            assert_eq!(read_json(body.as_bytes(), "/a"), value, "{body}");
        }
        let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(1025));
        assert_eq!(read_json(long.as_bytes(), "/a"), BodyValue::Unreadable);
        let long_name = format!(r#"{{"{}":1,"a":2}}"#, "x".repeat(1025));
        assert_eq!(read_json(long_name.as_bytes(), "/a"), BodyValue::Unreadable);
    }

    /// Documents with names that are often equal, at most three deep.
    fn json_documents() -> impl Strategy<Value = String> {
        let names = prop::sample::select(vec!["a", "b", "A", "\\u0061", "a_", "c"]);
        let scalars = prop::sample::select(vec!["1", "-0", "1e2", "\"x\"", "\"\\u0078\"", "null"]);
        let leaf = scalars.prop_map(str::to_owned);
        leaf.prop_recursive(3, 24, 4, move |inner| {
            let members = prop::collection::vec((names.clone(), inner.clone()), 0..4);
            let object = members.prop_map(|members| {
                let members = members
                    .iter()
                    .map(|(name, value)| format!("\"{name}\":{value}"));
                format!("{{{}}}", members.collect::<Vec<_>>().join(","))
            });
            let items = prop::collection::vec(inner, 0..3);
            prop_oneof![
                object,
                items.prop_map(|items| format!("[{}]", items.join(",")))
            ]
        })
    }

    proptest! {
        /// A value that is read is the one of a parser that keeps the last of equal names.
        #[test]
        fn readings_agree_with_a_parser(document in json_documents()) {
            for at in ["/a", "/a/b", "/b/0/a"] {
                let parsed: Value = serde_json::from_str(&document).unwrap();
                let expected = parsed.pointer(at).unwrap_or(&Value::Null);
                match read_json(document.as_bytes(), at) {
                    BodyValue::Unreadable => {}
                    BodyValue::Absent => prop_assert!(expected.is_null(), "{}", document),
                    BodyValue::Text(text) => prop_assert_eq!(expected.as_str(), Some(&*text)),
                    BodyValue::Number(text) => prop_assert_eq!(expected.to_string(), &*text),
                }
            }
        }

        #[test]
        fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..64)) {
            read_json(&body, "/a/0");
        }
    }
}
