//! Finds one number in a JSON document that passes by in parts.
//!
//! A parser of the whole document would have to hold its strings, which nobody bounds. This one remembers where it is
//! (which braces are open, how far the way to the number has been gone) and, of all texts, only the key that it compares
//! and the number that it wants. It knows JSON's structure and takes nothing inside a string for it, but is no
//! validator: it lets words and numbers pass that are none.

use crate::limiter::MAX_UNITS;
use crate::policy::{Pointer, Token};

/// Containers inside each other. More is no document of people's.
const MAX_DEPTH: usize = 128;
/// A number in so many bytes has a value that nobody counts.
const MAX_NUMBER_BYTES: usize = 64;
/// `\u0041` for one byte is the longest way to write it.
const MAX_ESCAPE_BYTES: usize = 6;

/// Where it is in one document. Memory is bounded by the pointer's length.
#[derive(Debug, Default)]
pub(in crate::proxy) struct Scan {
    next: Next,
    depth: usize,
    /// A bit per open container, the innermost lowest: it is an object.
    objects: u128,
    /// So many containers, from the outermost on, are on the way to the number.
    along: usize,
    /// The place in the innermost array on the way.
    index: u64,
    /// The value that follows, or is being read, is the next on the way.
    is_next: bool,
    /// A key to compare or the number: one byte more than can be right, then no more.
    text: Vec<u8>,
    found: Option<u64>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Value,
    ElementOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// The rest of a text.
    Text(Role),
    /// What a backslash in it escapes.
    Escaped(Role),
    /// The rest of a number or word.
    Bare,
    /// The document is complete.
    Nothing,
    /// It is no JSON, or too deep.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Key,
    Value,
}

impl Scan {
    /// Takes the next bytes of the document.
    pub(in crate::proxy) fn read(&mut self, mut bytes: &[u8], pointer: &Pointer) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = match self.next {
                Next::Broken => return,
                Next::Text(role) => self.text(role, bytes, pointer),
                Next::Escaped(role) => {
                    self.keep_of_key(role, &[byte], pointer);
                    self.next = Next::Text(role);
                    rest
                }
                Next::Bare => self.bare(bytes, pointer),
                _ => {
                    self.step(byte, pointer);
                    rest
                }
            };
        }
    }

    /// Ends the document: the number if it was complete and had one. What follows is the next document.
    pub(in crate::proxy) fn finish(&mut self) -> Option<u64> {
        let ended = std::mem::take(self);
        ended.found.filter(|_| ended.next == Next::Nothing)
    }

    #[cfg(test)]
    pub(super) fn kept_bytes(&self) -> usize {
        self.text.capacity()
    }

    /// One byte between texts, numbers and words.
    fn step(&mut self, byte: u8, pointer: &Pointer) {
        let in_object = self.objects & 1 == 1;
        match (self.next, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => {}
            (Next::ElementOrEnd, b']') | (Next::KeyOrEnd, b'}') => self.close(pointer),
            (Next::CommaOrEnd, b'}') if in_object => self.close(pointer),
            (Next::CommaOrEnd, b']') if !in_object => self.close(pointer),
            (Next::CommaOrEnd, b',') if in_object => self.next = Next::Key,
            (Next::CommaOrEnd, b',') => {
                if self.is_along() {
                    self.index = self.index.saturating_add(1);
                }
                self.next = Next::Value;
            }
            (Next::Key | Next::KeyOrEnd, b'"') => {
                self.text.clear();
                self.next = Next::Text(Role::Key);
            }
            (Next::Colon, b':') => self.next = Next::Value,
            (Next::Value | Next::ElementOrEnd, _) => self.value(byte, pointer),
            _ => self.next = Next::Broken,
        }
    }

    /// The first byte of a value.
    fn value(&mut self, byte: u8, pointer: &Pointer) {
        if self.depth == 0 {
            self.is_next = true;
        } else if self.objects & 1 == 0 {
            let index = Some(self.index);
            self.meet(
                self.wanted(pointer)
                    .is_some_and(|token| token.index == index),
            );
        }
        match byte {
            b'{' | b'[' => self.open(byte == b'{', pointer),
            b'"' => self.next = Next::Text(Role::Value),
            _ if is_bare(byte) => {
                self.text.clear();
                self.text.push(byte);
                self.next = Next::Bare;
            }
            _ => self.next = Next::Broken,
        }
    }

    fn open(&mut self, object: bool, pointer: &Pointer) {
        if self.depth == MAX_DEPTH {
            self.next = Next::Broken;
            return;
        }
        let on_the_way = self.is_next && self.depth < pointer.tokens().len();
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(object);
        if on_the_way {
            self.along = self.depth;
            self.index = 0;
        }
        self.next = if object {
            Next::KeyOrEnd
        } else {
            Next::ElementOrEnd
        };
    }

    fn close(&mut self, pointer: &Pointer) {
        let was_along = self.is_along();
        self.depth = self.depth.saturating_sub(1);
        self.objects >>= 1;
        if was_along {
            self.along = self.depth;
            // It was the element on the way, if its parent is an array.
            self.index = self
                .wanted(pointer)
                .and_then(|token| token.index)
                .unwrap_or_default();
        }
        self.ended();
    }

    /// A value has come to its end.
    fn ended(&mut self) {
        self.next = if self.depth == 0 {
            Next::Nothing
        } else {
            Next::CommaOrEnd
        };
    }

    /// A text up to its end or a backslash, if that is among these bytes; returns what follows.
    fn text<'b>(&mut self, role: Role, bytes: &'b [u8], pointer: &Pointer) -> &'b [u8] {
        let end = bytes
            .iter()
            .position(|byte| matches!(byte, b'"' | b'\\' | ..b' '))
            .unwrap_or(bytes.len());
        let (part, rest) = bytes.split_at(end);
        self.keep_of_key(role, part, pointer);
        let Some((&byte, rest)) = rest.split_first() else {
            return rest;
        };
        match (byte, role) {
            (b'\\', _) => {
                self.keep_of_key(role, b"\\", pointer);
                self.next = Next::Escaped(role);
            }
            (b'"', Role::Value) => self.ended(),
            (b'"', Role::Key) => {
                let is_next = self
                    .wanted(pointer)
                    .is_some_and(|token| reads(&self.text, &token.name));
                self.meet(is_next);
                self.next = Next::Colon;
            }
            _ => self.next = Next::Broken,
        }
        rest
    }

    /// A number or word up to its end, if that is among these bytes; returns what follows.
    fn bare<'b>(&mut self, bytes: &'b [u8], pointer: &Pointer) -> &'b [u8] {
        let end = bytes.iter().position(|byte| !is_bare(*byte));
        let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        self.keep(part, MAX_NUMBER_BYTES);
        if end.is_some() {
            if self.is_next && self.depth == pointer.tokens().len() {
                self.found = units(&self.text);
            }
            self.ended();
        }
        rest
    }

    /// Of a name that an object has twice, the last counts, as it does for most who read JSON.
    fn meet(&mut self, is_next: bool) {
        self.is_next = is_next;
        if is_next {
            self.found = None;
        }
    }

    /// The innermost container is on the way.
    fn is_along(&self) -> bool {
        self.along == self.depth
    }

    /// What leads on from the innermost container; `None` if that isn't on the way.
    fn wanted<'p>(&self, pointer: &'p Pointer) -> Option<&'p Token> {
        let at = self.depth.checked_sub(1).filter(|_| self.is_along())?;
        pointer.tokens().get(at)
    }

    fn keep_of_key(&mut self, role: Role, part: &[u8], pointer: &Pointer) {
        if let (Role::Key, Some(token)) = (role, self.wanted(pointer)) {
            self.keep(part, token.name.len() * MAX_ESCAPE_BYTES);
        }
    }

    fn keep(&mut self, part: &[u8], most: usize) {
        let room = (most + 1).saturating_sub(self.text.len());
        self.text.extend(part.iter().take(room));
    }
}

/// Whether a key, as it stands between its quotes, is `name`.
fn reads(written: &[u8], name: &str) -> bool {
    if !written.contains(&b'\\') {
        return written == name.as_bytes();
    }
    let quoted = [b"\"", written, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).is_ok_and(|text| text == name)
}

/// `1.2e2` is a whole number too: JSON knows one kind of number, and some write all of them with a fraction.
fn units(written: &[u8]) -> Option<u64> {
    let number = Some(written).filter(|written| written.len() <= MAX_NUMBER_BYTES)?;
    let number: serde_json::Number = serde_json::from_slice(number).ok()?;
    // A double is written without exponent, and without point if it is whole.
    let units = number
        .as_u64()
        .or_else(|| number.as_f64()?.to_string().parse().ok())?;
    (units <= MAX_UNITS).then_some(units)
}

fn is_bare(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)
}
