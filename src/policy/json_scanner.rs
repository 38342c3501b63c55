//! Incremental search for one value in a JSON document, by JSON pointer: of responses as they pass,
//! and of request bodies that were read whole.
//!
//! A parser of the whole document would have to buffer strings of any length. This scanner keeps
//! only its position, the key to compare and the value. The scanner follows the structure of JSON,
//! but does not validate it fully: malformed literals outside the path are accepted.

use super::json_pointer::fold_name;
use super::{JsonPointer, JsonPointerToken};
use crate::limiter::MAX_UNITS;
use std::borrow::Cow;

/// Maximum nesting depth of objects and arrays, one bit each in `object_bits`.
const MAX_DEPTH: usize = 128;
/// Maximum length of a number, in bytes. Longer numbers are not valid costs.
const MAX_NUMBER_BYTES: usize = 64;
/// Length of the longest JSON encoding of one byte of a key, such as `\u0041`.
const MAX_JSON_BYTES_PER_KEY_BYTE: usize = 6;
/// Maximum length of a string or key of a request that is read, as written.
pub(super) const MAX_TEXT_BYTES: usize = 1024;

/// Scanner of one JSON document for the value at a pointer. The memory is bounded by the pointer's
/// length, or in a request by [`MAX_TEXT_BYTES`].
#[derive(Debug, Default)]
pub(crate) struct JsonPointerScanner {
    purpose: ScanPurpose,
    state: JsonScanState,
    depth: usize,
    /// One bit per open container, the innermost in the lowest bit: 1 for an object, 0 for an
    /// array.
    object_bits: u128,
    /// Number of open containers, from the outermost, that are on the pointer's path.
    path_depth: usize,
    /// Index of the current element in the innermost array on the path.
    array_index: u64,
    /// Whether the current or next value is on the pointer's path.
    is_value_on_path: bool,
    /// Text of the key to compare or of the value: at most one byte more than the longest valid
    /// one.
    buffer: Vec<u8>,
    found: FoundValue,
    /// Whether the root is a list of documents, and the current value one of them.
    is_root_list: bool,
    /// The number in the last complete document of such a list that had one.
    list_units: Option<u64>,
    /// One bit per container on the path: 1 if it had the name that the path goes through.
    named_bits: u128,
    /// Whether parsers may disagree on the value: see [`ScanPurpose::Request`].
    is_ambiguous: bool,
}

/// What the value is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ScanPurpose {
    /// A number that the app reports. Of repeated names the last counts, as in most JSON parsers,
    /// and of a list of documents the last one that has the number.
    #[default]
    Response,
    /// A value that the client chose. What parsers may read differently is ambiguous: a name on the
    /// path that occurs twice or in another spelling, and a root that is no object.
    Request,
}

/// What is at the pointer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum FoundValue {
    #[default]
    Nothing,
    /// A string as written between its quotes.
    Text(Vec<u8>),
    /// A number, `true`, `false` or `null`.
    Literal(Vec<u8>),
    /// An object or a list.
    Container,
}

/// A value of a request body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BodyValue {
    /// There is none, or it is `null`.
    #[default]
    Absent,
    /// A string, or `true` or `false`.
    Text(Box<str>),
    /// A whole number of at most 2^53, without a fraction or exponent.
    Number(Box<str>),
    /// Apps may read different values, or it is not a single value.
    Unreadable,
}

/// What the scanner expects next, or what it is inside of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonScanState {
    #[default]
    Value,
    ElementOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// Inside a string.
    InString(JsonStringRole),
    /// After a backslash inside a string.
    InStringEscape(JsonStringRole),
    /// Inside a number, `true`, `false` or `null`.
    InLiteral,
    /// The document is complete.
    Done,
    /// The input is not JSON, or nested too deeply.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonStringRole {
    Key,
    Value,
}

impl JsonPointerScanner {
    /// Creates a scanner of a body of a client.
    pub(super) fn for_request() -> Self {
        Self {
            purpose: ScanPurpose::Request,
            ..Self::default()
        }
    }

    /// Reads the value in a body of a client that is valid JSON.
    pub(super) fn read_request(body: &[u8], pointer: &JsonPointer) -> BodyValue {
        let mut scan = Self::for_request();
        scan.read_chunk(body, pointer);
        // A literal may be the whole document.
        scan.read_chunk(b"\n", pointer);
        if scan.state != JsonScanState::Done || scan.is_ambiguous {
            return BodyValue::Unreadable;
        }
        scan.found.into_body_value()
    }

    /// Scans the next bytes of the document.
    pub(crate) fn read_chunk(&mut self, mut bytes: &[u8], pointer: &JsonPointer) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.state {
                JsonScanState::Invalid => return,
                JsonScanState::InString(role) => self.read_string_part(role, bytes, pointer),
                JsonScanState::InStringEscape(role) => {
                    self.buffer_string_part(role, &[byte], pointer);
                    self.state = JsonScanState::InString(role);
                    rest
                }
                JsonScanState::InLiteral => self.read_literal_part(bytes, pointer),
                _ => {
                    self.read_structural_byte(byte, pointer);
                    rest
                }
            };
        }
    }

    /// Ends the document and resets the scanner for the next document. Returns the number at the
    /// pointer if the document is complete and has one, or the last complete one of a list.
    pub(crate) fn finish(&mut self) -> Option<u64> {
        let scan = std::mem::take(self);
        let is_done = scan.state == JsonScanState::Done && !scan.is_root_list;
        let units = is_done.then(|| scan.found.as_units());
        units.flatten().or(scan.list_units)
    }

    /// The number in the last complete document, if the root is a list of documents.
    pub(crate) fn list_units(&self) -> Option<u64> {
        self.list_units
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn buffer_capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Processes one byte outside strings and literals.
    fn read_structural_byte(&mut self, byte: u8, pointer: &JsonPointer) {
        let is_in_object = self.object_bits & 1 == 1;
        match (self.state, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => {}
            (JsonScanState::CommaOrEnd | JsonScanState::ElementOrEnd, b']')
                if self.is_root_list && self.depth == 0 =>
            {
                self.state = JsonScanState::Done;
            }
            (JsonScanState::ElementOrEnd, b']') | (JsonScanState::KeyOrEnd, b'}') => {
                self.close_container(pointer)
            }
            (JsonScanState::CommaOrEnd, b'}') if is_in_object => self.close_container(pointer),
            (JsonScanState::CommaOrEnd, b']') if !is_in_object => self.close_container(pointer),
            (JsonScanState::CommaOrEnd, b',') if is_in_object => self.state = JsonScanState::Key,
            (JsonScanState::CommaOrEnd, b',') => {
                if self.is_container_on_path() {
                    self.array_index = self.array_index.saturating_add(1);
                }
                self.state = JsonScanState::Value;
            }
            (JsonScanState::Key | JsonScanState::KeyOrEnd, b'"') => {
                self.buffer.clear();
                self.state = JsonScanState::InString(JsonStringRole::Key);
            }
            (JsonScanState::Colon, b':') => self.state = JsonScanState::Value,
            (JsonScanState::Value | JsonScanState::ElementOrEnd, _) => {
                self.begin_value(byte, pointer)
            }
            _ => self.state = JsonScanState::Invalid,
        }
    }

    /// Processes the first byte of a value.
    fn begin_value(&mut self, byte: u8, pointer: &JsonPointer) {
        if self.depth == 0 {
            self.is_value_on_path = true;
        } else if self.object_bits & 1 == 0 {
            let index = Some(self.array_index);
            let token = self.expected_token(pointer);
            self.set_value_on_path(token.is_some_and(|token| token.index == index));
        }
        let is_document_list = byte == b'['
            && self.depth == 0
            && !self.is_root_list
            && (pointer.tokens().first()).is_some_and(|token| token.index.is_none());
        if is_document_list {
            self.is_root_list = true;
            self.is_ambiguous = true;
            self.state = JsonScanState::ElementOrEnd;
            return;
        }
        match byte {
            b'{' | b'[' => {
                if self.is_at_pointer(pointer) {
                    self.found = FoundValue::Container;
                }
                self.open_container(byte == b'{', pointer);
            }
            b'"' => {
                self.is_ambiguous |= self.depth == 0;
                self.buffer.clear();
                self.state = JsonScanState::InString(JsonStringRole::Value);
            }
            _ if is_literal_byte(byte) => {
                self.is_ambiguous |= self.depth == 0;
                self.buffer.clear();
                self.buffer.push(byte);
                self.state = JsonScanState::InLiteral;
            }
            _ => self.state = JsonScanState::Invalid,
        }
    }

    fn open_container(&mut self, is_object: bool, pointer: &JsonPointer) {
        if self.depth == MAX_DEPTH {
            self.state = JsonScanState::Invalid;
            return;
        }
        let is_on_path = self.is_value_on_path && self.depth < pointer.tokens().len();
        self.depth += 1;
        self.object_bits = self.object_bits << 1 | u128::from(is_object);
        if is_on_path {
            self.path_depth = self.depth;
            self.array_index = 0;
            self.named_bits <<= 1;
        }
        self.state = if is_object {
            JsonScanState::KeyOrEnd
        } else {
            JsonScanState::ElementOrEnd
        };
    }

    fn close_container(&mut self, pointer: &JsonPointer) {
        let was_on_path = self.is_container_on_path();
        self.depth = self.depth.saturating_sub(1);
        self.object_bits >>= 1;
        if was_on_path {
            self.path_depth = self.depth;
            self.named_bits >>= 1;
            // Restores the index in a parent array: the closed container was its element on the
            // path.
            let token = self.expected_token(pointer);
            self.array_index = token.and_then(|token| token.index).unwrap_or_default();
        }
        self.finish_value();
    }

    /// Sets the state that follows a complete value.
    fn finish_value(&mut self) {
        if self.depth == 0 && self.is_root_list {
            let found = std::mem::take(&mut self.found);
            self.list_units = found.as_units().or(self.list_units);
        }
        self.state = if self.depth == 0 && !self.is_root_list {
            JsonScanState::Done
        } else {
            JsonScanState::CommaOrEnd
        };
    }

    /// Reads a string up to its end or a backslash, and returns the bytes after that.
    fn read_string_part<'b>(
        &mut self,
        role: JsonStringRole,
        bytes: &'b [u8],
        pointer: &JsonPointer,
    ) -> &'b [u8] {
        let is_end = |byte: &u8| matches!(byte, b'"' | b'\\' | ..b' ');
        let end = bytes.iter().position(is_end);
        let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        self.buffer_string_part(role, part, pointer);
        let Some((&byte, rest)) = rest.split_first() else {
            return rest;
        };
        match (byte, role) {
            (b'\\', _) => {
                self.buffer_string_part(role, b"\\", pointer);
                self.state = JsonScanState::InStringEscape(role);
            }
            (b'"', JsonStringRole::Value) => {
                if self.is_at_pointer(pointer) {
                    self.found = FoundValue::Text(std::mem::take(&mut self.buffer));
                }
                self.finish_value();
            }
            (b'"', JsonStringRole::Key) => {
                let token = self.expected_token(pointer);
                let matches = |token: &JsonPointerToken| key_matches(&self.buffer, &token.name);
                let is_on_path = token.is_some_and(matches);
                self.note_name(token, is_on_path);
                self.set_value_on_path(is_on_path);
                self.state = JsonScanState::Colon;
            }
            _ => self.state = JsonScanState::Invalid,
        }
        rest
    }

    /// Reads a number or other literal up to its end, and returns the bytes after it.
    fn read_literal_part<'b>(&mut self, bytes: &'b [u8], pointer: &JsonPointer) -> &'b [u8] {
        let end = bytes.iter().position(|byte| !is_literal_byte(*byte));
        let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        self.buffer_bytes_up_to(part, MAX_NUMBER_BYTES);
        if end.is_some() {
            if self.is_at_pointer(pointer) {
                self.found = FoundValue::Literal(std::mem::take(&mut self.buffer));
            }
            self.finish_value();
        }
        rest
    }

    /// Records whether the next value is on the path. A value on the path discards one already
    /// found: of repeated names the last counts, as in most JSON parsers.
    fn set_value_on_path(&mut self, is_on_path: bool) {
        self.is_value_on_path = is_on_path;
        if is_on_path {
            self.found = FoundValue::Nothing;
        }
    }

    /// Whether the current value is the one that the pointer names.
    fn is_at_pointer(&self, pointer: &JsonPointer) -> bool {
        self.is_value_on_path && self.depth == pointer.tokens().len()
    }

    /// Notes that an object of a request has the expected name twice, or a look-alike of it.
    fn note_name(&mut self, expected: Option<&JsonPointerToken>, is_on_path: bool) {
        let (ScanPurpose::Request, Some(expected)) = (self.purpose, expected) else {
            return;
        };
        if is_on_path {
            self.is_ambiguous |= self.named_bits & 1 == 1;
            self.named_bits |= 1;
        } else {
            let is_long = self.buffer.len() > MAX_TEXT_BYTES;
            self.is_ambiguous |= is_long || is_look_alike(&self.buffer, expected);
        }
    }

    /// Whether the innermost container is on the path.
    fn is_container_on_path(&self) -> bool {
        self.path_depth == self.depth
    }

    /// Returns the pointer token to match inside the innermost container, or `None` if that
    /// container is not on the path.
    fn expected_token<'p>(&self, pointer: &'p JsonPointer) -> Option<&'p JsonPointerToken> {
        let index = self
            .depth
            .checked_sub(1)
            .filter(|_| self.is_container_on_path());
        pointer.tokens().get(index?)
    }

    /// Buffers a part of a key to compare, or of the value at the pointer.
    fn buffer_string_part(&mut self, role: JsonStringRole, part: &[u8], pointer: &JsonPointer) {
        let is_request = self.purpose == ScanPurpose::Request;
        let most = match (role, self.expected_token(pointer)) {
            (JsonStringRole::Key, Some(_)) if is_request => MAX_TEXT_BYTES,
            (JsonStringRole::Key, Some(token)) => token.name.len() * MAX_JSON_BYTES_PER_KEY_BYTE,
            (JsonStringRole::Value, _) if is_request && self.is_at_pointer(pointer) => {
                MAX_TEXT_BYTES
            }
            _ => return,
        };
        self.buffer_bytes_up_to(part, most);
    }

    fn buffer_bytes_up_to(&mut self, part: &[u8], max_bytes: usize) {
        let capacity_left = (max_bytes + 1).saturating_sub(self.buffer.len());
        self.buffer.extend(part.iter().take(capacity_left));
    }
}

impl FoundValue {
    fn as_units(&self) -> Option<u64> {
        match self {
            Self::Literal(literal) => parse_units(literal),
            _ => None,
        }
    }

    fn into_body_value(self) -> BodyValue {
        let value = match &self {
            Self::Nothing => Some(BodyValue::Absent),
            Self::Text(raw) if raw.len() > MAX_TEXT_BYTES => None,
            Self::Text(raw) => decode_string(raw).map(|text| BodyValue::Text(text.into())),
            Self::Literal(literal) => match literal.as_slice() {
                b"null" => Some(BodyValue::Absent),
                b"true" => Some(BodyValue::Text("true".into())),
                b"false" => Some(BodyValue::Text("false".into())),
                number => plain_number(number).map(BodyValue::Number),
            },
            Self::Container => None,
        };
        value.unwrap_or(BodyValue::Unreadable)
    }
}

/// Decodes a string, as written between its quotes. `None` if it is not valid Unicode.
fn decode_string(raw: &[u8]) -> Option<Cow<'_, str>> {
    if !raw.contains(&b'\\') {
        return std::str::from_utf8(raw).ok().map(Cow::Borrowed);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    serde_json::from_slice(&quoted).ok().map(Cow::Owned)
}

/// Whether a key, as written between its quotes, equals `name`.
fn key_matches(raw_key: &[u8], name: &str) -> bool {
    if !raw_key.contains(&b'\\') {
        return raw_key == name.as_bytes();
    }
    decode_string(raw_key).is_some_and(|text| text == name)
}

/// Whether some parser may take a key, as written between its quotes, for the name of a token: they
/// differ only in what [`fold_name`] leaves out, or the key is not valid Unicode.
fn is_look_alike(raw_key: &[u8], expected: &JsonPointerToken) -> bool {
    let Some(key) = decode_string(raw_key) else {
        return true;
    };
    !expected.folded.is_empty() && fold_name(&key) == *expected.folded
}

/// The text of a whole number that all parsers read as the same one. Apps may keep the text of
/// others, such as `5.0`, `5e0` and `-0`.
fn plain_number(literal: &[u8]) -> Option<Box<str>> {
    let text = std::str::from_utf8(literal).ok()?;
    let number: i64 = text.parse().ok()?;
    let is_plain = number.unsigned_abs() <= MAX_UNITS && number.to_string() == text;
    is_plain.then(|| text.into())
}

/// Parses a cost from a JSON number. Also accepts whole numbers written as `1.2e2` or `120.0`,
/// since some servers always write a fraction.
fn parse_units(literal: &[u8]) -> Option<u64> {
    let number = Some(literal).filter(|literal| literal.len() <= MAX_NUMBER_BYTES)?;
    let number: serde_json::Number = serde_json::from_slice(number).ok()?;
    // Rust prints a whole `f64` without exponent and decimal point, so it parses as an integer.
    let units = number
        .as_u64()
        .or_else(|| number.as_f64()?.to_string().parse().ok())?;
    (units <= MAX_UNITS).then_some(units)
}

fn is_literal_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)
}
