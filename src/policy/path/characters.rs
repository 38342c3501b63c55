//! Decoding and canonical spelling of the characters of a path.

use super::settings::Settings;

/// Characters that separate segments, in addition to a slash: a set of the bits below.
pub(super) type SegmentSeparators = u8;

/// `%2F`.
pub(super) const ESCAPED_SLASH: SegmentSeparators = 4;
/// `\`.
pub(super) const BACKSLASH: SegmentSeparators = 2;
/// `%5C`.
pub(super) const ESCAPED_BACKSLASH: SegmentSeparators = 1;
pub(super) const ALL_SEPARATORS: SegmentSeparators = ESCAPED_SLASH | BACKSLASH | ESCAPED_BACKSLASH;

/// Normalizes one literal segment of a pattern to the spelling of
/// [`super::PathInterpretations`].
pub fn canonicalize_segment(segment: &str, settings: &Settings) -> Box<str> {
    if !settings.normalize {
        return segment.into();
    }
    let mut text = String::with_capacity(segment.len());
    push_canonical_characters(&mut text, segment, settings, 0);
    let mut name = String::with_capacity(text.len());
    push_segment(&mut name, &text, settings);
    name.into()
}

/// Appends a canonicalized segment. Its semicolons are escaped where they would otherwise start
/// parameters.
pub(super) fn push_segment(out: &mut String, segment: &str, settings: &Settings) {
    if !settings.strip_parameters {
        out.push_str(segment);
        return;
    }
    for (index, part) in segment.split(';').enumerate() {
        match index {
            0 => {}
            _ if settings.case_sensitive => out.push_str("%3B"),
            _ => out.push_str("%3b"),
        }
        out.push_str(part);
    }
}

/// Decodes a path or segment once. Bytes that need an escape keep it, in upper case. Semicolons
/// that may start parameters stay plain.
pub(super) fn push_canonical_characters(
    out: &mut String,
    text: &str,
    settings: &Settings,
    separators: SegmentSeparators,
) {
    let start = out.len();
    let mut rest = text;
    while !rest.is_empty() {
        let is_plain = |byte: &u8| matches!(byte, 0x21..=0x7e) && !matches!(byte, b'%' | b'\\');
        let plain_length = rest.bytes().take_while(is_plain).count();
        let (plain, tail) = rest.split_at_checked(plain_length).unwrap_or((rest, ""));
        out.push_str(plain);
        let Some((character, tail)) = split_first_character(tail) else {
            break;
        };
        rest = tail;
        match character {
            PathCharacter::Escaped(byte) => push_decoded_byte(out, byte, settings, separators),
            PathCharacter::Plain('\\') if separators & BACKSLASH != 0 => out.push('/'),
            PathCharacter::Plain(plain) => push_escaped_character(out, plain),
        }
    }
    if let (false, Some(added)) = (settings.case_sensitive, out.get_mut(start..)) {
        added.make_ascii_lowercase();
    }
}

/// Appends a byte that was escaped.
fn push_decoded_byte(
    out: &mut String,
    byte: u8,
    settings: &Settings,
    separators: SegmentSeparators,
) {
    match byte {
        b'/' if separators & ESCAPED_SLASH != 0 => out.push('/'),
        b'\\' if separators & ESCAPED_BACKSLASH != 0 => out.push('/'),
        // An escaped semicolon starts no parameter.
        b';' if settings.strip_parameters => push_escape(out, byte),
        b'/' | b'\\' | b'%' => push_escape(out, byte),
        0x21..=0x7e => out.push(char::from(byte)),
        byte => push_escape(out, byte),
    }
}

/// A character as written, or the byte of an escape.
#[derive(Clone, Copy, Debug)]
pub(super) enum PathCharacter {
    Plain(char),
    Escaped(u8),
}

pub(super) fn split_first_character(text: &str) -> Option<(PathCharacter, &str)> {
    match decode_escape(text.as_bytes()) {
        Some(byte) => Some((PathCharacter::Escaped(byte), text.get(3..)?)),
        None => {
            let mut characters = text.chars();
            let plain = characters.next()?;
            Some((PathCharacter::Plain(plain), characters.as_str()))
        }
    }
}

/// The byte encoded by a `%XX` at the start of `text`.
pub(super) fn decode_escape(text: &[u8]) -> Option<u8> {
    match text {
        [b'%', high, low, ..] => Some(parse_hex_digit(*high)? << 4 | parse_hex_digit(*low)?),
        _ => None,
    }
}

fn parse_hex_digit(digit: u8) -> Option<u8> {
    u8::try_from(char::from(digit).to_digit(16)?).ok()
}

pub(super) fn push_escape(out: &mut String, byte: u8) {
    out.push_str(percent_encoding::percent_encode_byte(byte));
}

pub(super) fn push_escaped_character(out: &mut String, character: char) {
    let mut bytes = [0; 4];
    for byte in character.encode_utf8(&mut bytes).bytes() {
        push_escape(out, byte);
    }
}
