//! Incremental search for one number in a JSON document, by JSON pointer.
//!
//! A parser of the whole document would have to buffer strings of any length. This scanner keeps
//! only its position, the key to compare and the number. The scanner follows the structure of JSON,
//! but does not validate it fully: malformed literals outside the path are accepted.

use crate::limiter::MAX_UNITS;
use crate::policy::{JsonPointer, JsonPointerToken};

/// Maximum nesting depth of objects and arrays, one bit each in `object_bits`.
const MAX_DEPTH: usize = 128;
/// Maximum length of a number, in bytes. Longer numbers are not valid costs.
const MAX_NUMBER_BYTES: usize = 64;
/// Length of the longest JSON encoding of one byte of a key, such as `\u0041`.
const MAX_JSON_BYTES_PER_KEY_BYTE: usize = 6;

/// Scanner of one JSON document for the number at a pointer. The pointer's length bounds the
/// memory.
#[derive(Debug, Default)]
pub(crate) struct JsonPointerScanner {
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
    /// Text of the key to compare or of the number: at most one byte more than the longest valid
    /// one.
    buffer: Vec<u8>,
    found_units: Option<u64>,
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
    /// Scans the next bytes of the document.
    pub(crate) fn read_chunk(&mut self, mut bytes: &[u8], pointer: &JsonPointer) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.state {
                JsonScanState::Invalid => return,
                JsonScanState::InString(role) => self.read_string_part(role, bytes, pointer),
                JsonScanState::InStringEscape(role) => {
                    self.buffer_key_part(role, &[byte], pointer);
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
    /// pointer if the document is complete and has one.
    pub(crate) fn finish(&mut self) -> Option<u64> {
        let Self {
            found_units, state, ..
        } = std::mem::take(self);
        found_units.filter(|_| state == JsonScanState::Done)
    }

    #[cfg(test)]
    pub(super) fn buffer_capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// Processes one byte outside strings and literals.
    fn read_structural_byte(&mut self, byte: u8, pointer: &JsonPointer) {
        let is_in_object = self.object_bits & 1 == 1;
        match (self.state, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => {}
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
        match byte {
            b'{' | b'[' => self.open_container(byte == b'{', pointer),
            b'"' => self.state = JsonScanState::InString(JsonStringRole::Value),
            _ if is_literal_byte(byte) => {
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
            // Restores the index in a parent array: the closed container was its element on the
            // path.
            let token = self.expected_token(pointer);
            self.array_index = token.and_then(|token| token.index).unwrap_or_default();
        }
        self.finish_value();
    }

    /// Sets the state that follows a complete value.
    fn finish_value(&mut self) {
        self.state = if self.depth == 0 {
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
        self.buffer_key_part(role, part, pointer);
        let Some((&byte, rest)) = rest.split_first() else {
            return rest;
        };
        match (byte, role) {
            (b'\\', _) => {
                self.buffer_key_part(role, b"\\", pointer);
                self.state = JsonScanState::InStringEscape(role);
            }
            (b'"', JsonStringRole::Value) => self.finish_value(),
            (b'"', JsonStringRole::Key) => {
                let token = self.expected_token(pointer);
                let matches = |token: &JsonPointerToken| key_matches(&self.buffer, &token.name);
                let is_on_path = token.is_some_and(matches);
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
            if self.is_value_on_path && self.depth == pointer.tokens().len() {
                self.found_units = parse_units(&self.buffer);
            }
            self.finish_value();
        }
        rest
    }

    /// Records whether the next value is on the path. A value on the path discards a number already
    /// found: of repeated names the last counts, as in most JSON parsers.
    fn set_value_on_path(&mut self, is_on_path: bool) {
        self.is_value_on_path = is_on_path;
        if is_on_path {
            self.found_units = None;
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

    fn buffer_key_part(&mut self, role: JsonStringRole, part: &[u8], pointer: &JsonPointer) {
        if let (JsonStringRole::Key, Some(token)) = (role, self.expected_token(pointer)) {
            self.buffer_bytes_up_to(part, token.name.len() * MAX_JSON_BYTES_PER_KEY_BYTE);
        }
    }

    fn buffer_bytes_up_to(&mut self, part: &[u8], max_bytes: usize) {
        let capacity_left = (max_bytes + 1).saturating_sub(self.buffer.len());
        self.buffer.extend(part.iter().take(capacity_left));
    }
}

/// Whether a key, as written between its quotes, equals `name`.
fn key_matches(raw_key: &[u8], name: &str) -> bool {
    if !raw_key.contains(&b'\\') {
        return raw_key == name.as_bytes();
    }
    let quoted = [b"\"", raw_key, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).is_ok_and(|text| text == name)
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
