//! Incremental search for one number in a JSON document, by JSON pointer.
//!
//! A parser of the whole document would have to buffer strings of any length. This scanner keeps
//! only its position, the key to compare and the number. It follows the structure of JSON, but is
//! not a validator: it accepts malformed literals and numbers outside the path.

use crate::limiter::MAX_UNITS;
use crate::policy::{JsonPointer, JsonPointerToken};

/// Maximum nesting of containers, one bit each in `object_bits`. Real documents have fewer levels.
const MAX_DEPTH: usize = 128;
/// Maximum length of a number. Longer numbers are not valid costs.
const MAX_NUMBER_BYTES: usize = 64;
/// Longest JSON encoding of one byte of a key: `\u0041`.
const MAX_ESCAPE_BYTES: usize = 6;

/// Scan position in one document. The pointer's length bounds the memory.
#[derive(Debug, Default)]
pub(in crate::proxy) struct JsonPointerScanner {
    state: JsonScanState,
    depth: usize,
    /// One bit per open container, the innermost in the lowest bit; set for objects.
    object_bits: u128,
    /// Number of open containers, from the outermost, that are on the pointer's path.
    path_depth: usize,
    /// Index in the innermost array on the path.
    array_index: u64,
    /// The current or next value is the next one on the path.
    is_value_on_path: bool,
    /// Key to compare, or the number. Holds at most one byte more than the longest valid text.
    buffer: Vec<u8>,
    found_units: Option<u64>,
}

/// Expected next input.
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
    pub(in crate::proxy) fn read(&mut self, mut bytes: &[u8], pointer: &JsonPointer) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.state {
                JsonScanState::Invalid => return,
                JsonScanState::InString(role) => self.read_string(role, bytes, pointer),
                JsonScanState::InStringEscape(role) => {
                    self.buffer_key(role, &[byte], pointer);
                    self.state = JsonScanState::InString(role);
                    rest
                }
                JsonScanState::InLiteral => self.read_literal(bytes, pointer),
                _ => {
                    self.read_structural_byte(byte, pointer);
                    rest
                }
            };
        }
    }

    /// Ends the document and resets the scanner for the next one. Returns the number if the
    /// document is complete and has one.
    pub(in crate::proxy) fn finish(&mut self) -> Option<u64> {
        let finished = std::mem::take(self);
        finished
            .found_units
            .filter(|_| finished.state == JsonScanState::Done)
    }

    #[cfg(test)]
    pub(super) fn buffered_bytes(&self) -> usize {
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
            self.set_value_on_path(
                self.expected_token(pointer)
                    .is_some_and(|token| token.index == index),
            );
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
            // If the parent is an array, the closed container was the element on the path.
            self.array_index = self
                .expected_token(pointer)
                .and_then(|token| token.index)
                .unwrap_or_default();
        }
        self.finish_value();
    }

    /// Sets the state after a complete value.
    fn finish_value(&mut self) {
        self.state = if self.depth == 0 {
            JsonScanState::Done
        } else {
            JsonScanState::CommaOrEnd
        };
    }

    /// Reads a string up to its end or a backslash, and returns the unread bytes.
    fn read_string<'b>(
        &mut self,
        role: JsonStringRole,
        bytes: &'b [u8],
        pointer: &JsonPointer,
    ) -> &'b [u8] {
        let end = bytes
            .iter()
            .position(|byte| matches!(byte, b'"' | b'\\' | ..b' '))
            .unwrap_or(bytes.len());
        let (part, rest) = bytes.split_at(end);
        self.buffer_key(role, part, pointer);
        let Some((&byte, rest)) = rest.split_first() else {
            return rest;
        };
        match (byte, role) {
            (b'\\', _) => {
                self.buffer_key(role, b"\\", pointer);
                self.state = JsonScanState::InStringEscape(role);
            }
            (b'"', JsonStringRole::Value) => self.finish_value(),
            (b'"', JsonStringRole::Key) => {
                let is_on_path = self
                    .expected_token(pointer)
                    .is_some_and(|token| key_matches(&self.buffer, &token.name));
                self.set_value_on_path(is_on_path);
                self.state = JsonScanState::Colon;
            }
            _ => self.state = JsonScanState::Invalid,
        }
        rest
    }

    /// Reads a literal up to its end, and returns the unread bytes.
    fn read_literal<'b>(&mut self, bytes: &'b [u8], pointer: &JsonPointer) -> &'b [u8] {
        let end = bytes.iter().position(|byte| !is_literal_byte(*byte));
        let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        self.buffer_bytes(part, MAX_NUMBER_BYTES);
        if end.is_some() {
            if self.is_value_on_path && self.depth == pointer.tokens().len() {
                self.found_units = parse_units(&self.buffer);
            }
            self.finish_value();
        }
        rest
    }

    /// Records whether the next value is on the path. The last of repeated names counts, as in most
    /// JSON parsers.
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

    /// Returns the pointer token to match inside the innermost container, or `None` if that is not
    /// on the path.
    fn expected_token<'p>(&self, pointer: &'p JsonPointer) -> Option<&'p JsonPointerToken> {
        let index = self
            .depth
            .checked_sub(1)
            .filter(|_| self.is_container_on_path())?;
        pointer.tokens().get(index)
    }

    fn buffer_key(&mut self, role: JsonStringRole, part: &[u8], pointer: &JsonPointer) {
        if let (JsonStringRole::Key, Some(token)) = (role, self.expected_token(pointer)) {
            self.buffer_bytes(part, token.name.len() * MAX_ESCAPE_BYTES);
        }
    }

    fn buffer_bytes(&mut self, part: &[u8], max_bytes: usize) {
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

/// Parses a cost. Accepts whole numbers such as `1.2e2` or `120.0` too: JSON has one number type,
/// and some servers always write a fraction.
fn parse_units(literal: &[u8]) -> Option<u64> {
    let number = Some(literal).filter(|literal| literal.len() <= MAX_NUMBER_BYTES)?;
    let number: serde_json::Number = serde_json::from_slice(number).ok()?;
    // Rust prints an `f64` without exponent, and a whole one without a decimal point.
    let units = number
        .as_u64()
        .or_else(|| number.as_f64()?.to_string().parse().ok())?;
    (units <= MAX_UNITS).then_some(units)
}

fn is_literal_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)
}
