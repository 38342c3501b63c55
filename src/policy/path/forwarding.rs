//! The normalized path that the upstream receives with `forward = "normalized"`.

use super::characters::{
    PathCharacter, push_escape, push_escaped_character, split_first_character,
};
use super::dot_segments::{DotSegmentResolution, resolve_dots_and_parameters};
use super::settings::{EscapedSlashes, Settings};

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
