//! Canonical spelling of a path: its characters, dot segments and parameters, and the path that the
//! upstream receives with `forward = "normalized"`.

use super::{EscapedSlashes, Settings};
use smallvec::SmallVec;

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
fn push_segment(out: &mut String, segment: &str, settings: &Settings) {
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
enum PathCharacter {
    Plain(char),
    Escaped(u8),
}

fn split_first_character(text: &str) -> Option<(PathCharacter, &str)> {
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

fn push_escape(out: &mut String, byte: u8) {
    out.push_str(percent_encoding::percent_encode_byte(byte));
}

fn push_escaped_character(out: &mut String, character: char) {
    let mut bytes = [0; 4];
    for byte in character.encode_utf8(&mut bytes).bytes() {
        push_escape(out, byte);
    }
}

/// When `..` removes the segment before it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DotSegmentResolution {
    /// After parameters are stripped and slashes merged: `/a/..;x/b` and `/a//../b` are `/b`.
    AfterNormalization,
    /// Before parameters are stripped and slashes merged: `..;x` is an ordinary name, and `..` may
    /// remove an empty segment. `/a/..;x/b` and `/a//../b` are then below `/a`.
    BeforeNormalization,
    /// The application routes by the path as received: `/a/../b` is below `/a`.
    Never,
}

/// Resolves dot segments and parameters of a canonicalized path, for one interpretation.
pub(super) fn resolve_dots_and_parameters(
    text: &str,
    settings: &Settings,
    dots: DotSegmentResolution,
    strip_parameters: bool,
) -> Box<str> {
    let mut segments: SmallVec<[&str; 16]> = SmallVec::new();
    let mut ends_with_slash = false;
    for whole in text.split('/').skip(1) {
        let name = match whole.split_once(';') {
            Some((before, _)) if strip_parameters => before,
            _ => whole,
        };
        let is_dots = match dots {
            DotSegmentResolution::AfterNormalization => matches!(name, "." | ".."),
            DotSegmentResolution::BeforeNormalization => matches!(whole, "." | ".."),
            DotSegmentResolution::Never => false,
        };
        ends_with_slash = is_dots || name.is_empty();
        match name {
            "." if is_dots => {}
            ".." if is_dots => {
                segments.pop();
            }
            "" if settings.merge_slashes && dots != DotSegmentResolution::BeforeNormalization => {}
            name => segments.push(name),
        }
    }
    if settings.merge_slashes {
        segments.retain(|segment| !segment.is_empty());
    } else if segments.last() == Some(&"") {
        segments.pop();
    }
    let mut path = String::with_capacity(text.len());
    for segment in &segments {
        path.push('/');
        push_segment(&mut path, segment, settings);
    }
    if segments.is_empty() || (ends_with_slash && !settings.ignore_trailing_slash) {
        path.push('/');
    }
    path.into()
}

/// Normalizes a path for the upstream (RFC 3986, 6.2.2): unreserved characters are decoded, escapes
/// are in upper case, `.` and `..` segments are resolved, and `merge_slashes` applies. Escaped
/// slashes and backslashes separate segments with [`EscapedSlashes::Decode`] only. Parameters, case
/// and the final slash stay. Returns `None` if nothing changes.
pub fn normalize_forwarded_path(path: &str, settings: &Settings) -> Option<String> {
    if !settings.normalize || !path.starts_with('/') {
        return None;
    }
    let spelled = respell_characters(path, settings);
    // Parameters and the final slash are for the upstream to interpret.
    let settings = Settings {
        strip_parameters: false,
        ignore_trailing_slash: false,
        ..*settings
    };
    let dots = DotSegmentResolution::BeforeNormalization;
    let normalized = resolve_dots_and_parameters(&spelled, &settings, dots, false);
    (*normalized != *path).then(|| normalized.into())
}

fn respell_characters(path: &str, settings: &Settings) -> String {
    let decodes_slashes = settings.escaped_slashes == EscapedSlashes::Decode;
    let mut spelled = String::with_capacity(path.len());
    let mut rest = path;
    while let Some((character, tail)) = split_first_character(rest) {
        rest = tail;
        match character {
            PathCharacter::Escaped(b'/' | b'\\') | PathCharacter::Plain('\\')
                if decodes_slashes =>
            {
                spelled.push('/');
            }
            PathCharacter::Escaped(byte) if is_unreserved(byte) => spelled.push(char::from(byte)),
            PathCharacter::Escaped(byte) => push_escape(&mut spelled, byte),
            PathCharacter::Plain(plain) if needs_escape(plain) => {
                push_escaped_character(&mut spelled, plain);
            }
            PathCharacter::Plain(plain) => spelled.push(plain),
        }
    }
    spelled
}

/// Unreserved characters mean the same with and without escape (RFC 3986, section 2.3).
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Whether a character of a request target is not valid there without escape.
fn needs_escape(character: char) -> bool {
    !character.is_ascii_graphic()
        || matches!(
            character,
            '\\' | '%' | '"' | '<' | '>' | '`' | '^' | '{' | '|' | '}' | '?' | '#'
        )
}
