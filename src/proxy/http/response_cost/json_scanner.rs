//! Finds one number in a JSON document that passes by in parts.
//!
//! A parser of the whole document would have to hold its strings, which nobody bounds. This one remembers where it is
//! (which braces are open, how far the way to the number has been gone) and, of all texts, only the key that it compares
//! and the number that it wants. It knows JSON's structure and takes nothing inside a string for it, but is no
//! validator: it lets words and numbers pass that are none.

use crate::limiter::MAX_UNITS;
use crate::policy::{JsonPointer, JsonPointerToken};

/// Containers inside each other. More is no document of people's.
const MAX_DEPTH: usize = 128;
/// A number in so many bytes has a value that nobody counts.
const MAX_NUMBER_BYTES: usize = 64;
/// `\u0041` for one byte is the longest way to write it.
const MAX_ESCAPE_BYTES: usize = 6;

/// Where it is in one document. Memory is bounded by the pointer's length.
#[derive(Debug, Default)]
pub(in crate::proxy) struct JsonPointerScanner {
    state: JsonScanState,
    depth: usize,
    /// A bit per open container, the innermost lowest: it is an object.
    object_bits: u128,
    /// So many containers, from the outermost on, are on the way to the number.
    path_depth: usize,
    /// The place in the innermost array on the way.
    array_index: u64,
    /// The value that follows, or is being read, is the next on the way.
    is_value_on_path: bool,
    /// A key to compare or the number: one byte more than can be right, then no more.
    buffer: Vec<u8>,
    found_units: Option<u64>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonScanState {
    #[default]
    Value,
    ElementOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// The rest of a text.
    InString(JsonStringRole),
    /// What a backslash in it escapes.
    InStringEscape(JsonStringRole),
    /// The rest of a number or word.
    InLiteral,
    /// The document is complete.
    Done,
    /// It is no JSON, or too deep.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonStringRole {
    Key,
    Value,
}

impl JsonPointerScanner {
    /// Takes the next bytes of the document.
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

    /// Ends the document: the number if it was complete and had one. What follows is the next document.
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

    /// One byte between texts, numbers and words.
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

    /// The first byte of a value.
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
            // It was the element on the way, if its parent is an array.
            self.array_index = self
                .expected_token(pointer)
                .and_then(|token| token.index)
                .unwrap_or_default();
        }
        self.finish_value();
    }

    /// A value has come to its end.
    fn finish_value(&mut self) {
        self.state = if self.depth == 0 {
            JsonScanState::Done
        } else {
            JsonScanState::CommaOrEnd
        };
    }

    /// A text up to its end or a backslash, if that is among these bytes; returns what follows.
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

    /// A number or word up to its end, if that is among these bytes; returns what follows.
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

    /// Of a name that an object has twice, the last counts, as it does for most who read JSON.
    fn set_value_on_path(&mut self, is_on_path: bool) {
        self.is_value_on_path = is_on_path;
        if is_on_path {
            self.found_units = None;
        }
    }

    /// The innermost container is on the way.
    fn is_container_on_path(&self) -> bool {
        self.path_depth == self.depth
    }

    /// What leads on from the innermost container; `None` if that isn't on the way.
    fn expected_token<'p>(&self, pointer: &'p JsonPointer) -> Option<&'p JsonPointerToken> {
        let at = self
            .depth
            .checked_sub(1)
            .filter(|_| self.is_container_on_path())?;
        pointer.tokens().get(at)
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

/// Whether a key, as it stands between its quotes, is `name`.
fn key_matches(raw_key: &[u8], name: &str) -> bool {
    if !raw_key.contains(&b'\\') {
        return raw_key == name.as_bytes();
    }
    let quoted = [b"\"", raw_key, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).is_ok_and(|text| text == name)
}

/// `1.2e2` is a whole number too: JSON knows one kind of number, and some write all of them with a fraction.
fn parse_units(literal: &[u8]) -> Option<u64> {
    let number = Some(literal).filter(|written| written.len() <= MAX_NUMBER_BYTES)?;
    let number: serde_json::Number = serde_json::from_slice(number).ok()?;
    // A double is written without exponent, and without point if it is whole.
    let units = number
        .as_u64()
        .or_else(|| number.as_f64()?.to_string().parse().ok())?;
    (units <= MAX_UNITS).then_some(units)
}

fn is_literal_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)
}
