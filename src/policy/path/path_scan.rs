//! One pass over a path: the characters that upstreams read differently.

use super::characters::{
    BACKSLASH, ESCAPED_BACKSLASH, ESCAPED_SLASH, SegmentSeparators, decode_escape,
};
use super::settings::{EscapedDelimiters, EscapedSlashes, PathError, Settings};
use smallvec::SmallVec;

/// Whether normalization would not change the path. For most paths this one pass is all.
pub(super) fn is_already_normalized(path: &str, settings: &Settings) -> bool {
    let mut previous = 0;
    for byte in path.bytes() {
        match byte {
            b'%' | b'\\' | b';' => return false,
            b'/' | b'.' if previous == b'/' => return false,
            b'A'..=b'Z' if !settings.case_sensitive => return false,
            0x21..=0x7e => previous = byte,
            _ => return false,
        }
    }
    previous != b'/' || path.len() == 1
}

/// The ambiguous characters of a path or of a part of it.
#[derive(Clone, Debug, Default)]
pub(super) struct PathScan {
    /// Those that the path contains.
    pub(super) separators: SegmentSeparators,
    has_nul: bool,
    has_control_character: bool,
    has_non_ascii: bool,
    /// Whether a `%` that begins no escape begins one when the path is decoded, other than a
    /// nested one.
    has_completed_escape: bool,
    /// Whether the decoded path contains an escaped `.`, `/`, `\` or `%`.
    pub(super) has_nested_escape: bool,
    /// Position of the first `;`.
    pub(super) semicolon: Option<usize>,
    /// Position of the first character with a byte that is a space in Latin-1, at which Python's
    /// `http.server` ends the target.
    latin1_space: Option<usize>,
    /// Position of the first `%3F`.
    pub(super) escaped_question_mark: Option<usize>,
    /// Position of the first `%23`.
    pub(super) escaped_number_sign: Option<usize>,
}

impl PathScan {
    pub(super) fn new(path: &str) -> Self {
        let mut scan = Self::default();
        // The last three decoded bytes.
        let mut window = [0; 3];
        // Decoded digits since a `%` that begins no escape.
        let mut digits = None;
        let mut rest = path.as_bytes();
        while let [first, tail @ ..] = rest {
            let position = path.len() - rest.len();
            let escaped = decode_escape(rest);
            let byte = escaped.unwrap_or(*first);
            rest = match escaped {
                Some(_) => tail.get(2..).unwrap_or_default(),
                None => tail,
            };
            match (byte, escaped.is_some()) {
                (b'a'..=b'z' | b'-' | b'_' | b'0'..=b'9', _) => {}
                (b'/', true) => scan.separators |= ESCAPED_SLASH,
                (b'\\', true) => scan.separators |= ESCAPED_BACKSLASH,
                (b'\\', false) => scan.separators |= BACKSLASH,
                (b';', false) => {
                    scan.semicolon.get_or_insert(position);
                }
                (b'?', true) => {
                    scan.escaped_question_mark.get_or_insert(position);
                }
                (b'#', true) => {
                    scan.escaped_number_sign.get_or_insert(position);
                }
                (0, _) => scan.has_nul = true,
                (0x01..=0x1f | 0x7f, _) => scan.has_control_character = true,
                (0x80.., _) => {
                    scan.has_non_ascii = true;
                    if escaped.is_none() && matches!(byte, 0x85 | 0xa0) {
                        let start = path.floor_char_boundary(position);
                        scan.latin1_space.get_or_insert(start);
                    }
                }
                _ => {}
            }
            digits = match (byte, digits) {
                (b'%', _) if escaped.is_none() => Some(0),
                (byte, Some(digits)) if byte.is_ascii_hexdigit() => Some(digits + 1),
                _ => None,
            };
            let [_, second, third] = window;
            window = [second, third, byte];
            let is_path_character = is_escape_of_path_character(window);
            scan.has_nested_escape |= is_path_character;
            scan.has_completed_escape |= digits == Some(2) && !is_path_character;
        }
        scan
    }

    /// Rejects paths that cannot be matched safely.
    pub(super) fn check(&self, path: &str, settings: &Settings) -> Result<(), PathError> {
        let is_utf8 = || {
            let decoded = percent_encoding::percent_decode_str(path);
            !self.has_non_ascii || decoded.decode_utf8().is_ok()
        };
        let has_delimiter =
            self.escaped_question_mark.is_some() || self.escaped_number_sign.is_some();
        Err(match settings {
            _ if self.has_nul => PathError::Nul,
            one if one.rejects_control_characters && self.has_control_character => {
                PathError::ControlCharacter
            }
            one if one.rejects_invalid_utf8 && !is_utf8() => PathError::InvalidUtf8,
            one if one.rejects_invalid_utf8 && self.has_completed_escape => {
                PathError::CompletedEscape
            }
            one if one.escaped_slashes == EscapedSlashes::Reject && self.separators != 0 => {
                PathError::EscapedSlash
            }
            one if one.escaped_delimiters == EscapedDelimiters::Reject && has_delimiter => {
                PathError::EscapedDelimiter
            }
            _ => return Ok(()),
        })
    }

    /// What follows the first `%3F` or semicolon, if an upstream may read it as the query.
    pub(super) fn possible_query<'p>(&self, path: &'p str, settings: &Settings) -> Option<&'p str> {
        let [question_mark, _, semicolon] = self.readable_delimiters(settings);
        path.get(question_mark.into_iter().chain(semicolon).min()?..)
    }

    /// Positions at which an upstream may take the path to end.
    pub(super) fn possible_ends(&self, settings: &Settings) -> SmallVec<[usize; 3]> {
        let delimiters = self.readable_delimiters(settings).into_iter().flatten();
        delimiters.chain(self.latin1_space).collect()
    }

    /// The first `%3F`, `%23` and semicolon, if an upstream may take them for the end of the path.
    /// Some routers start the query at a semicolon.
    fn readable_delimiters(&self, settings: &Settings) -> [Option<usize>; 3] {
        let reads_escaped = settings.escaped_delimiters == EscapedDelimiters::Both;
        [
            self.escaped_question_mark.filter(|_| reads_escaped),
            self.escaped_number_sign.filter(|_| reads_escaped),
            self.semicolon.filter(|_| settings.strip_parameters),
        ]
    }
}

/// Whether decoded bytes are the escape of a character that is special in paths.
fn is_escape_of_path_character(window: [u8; 3]) -> bool {
    matches!(
        window,
        [b'%', b'2', b'e' | b'E' | b'f' | b'F' | b'5'] | [b'%', b'5', b'c' | b'C']
    )
}

/// Positions of the slash or backslash after a `//host`, as the upstreams read it that take the
/// path for a URL without a scheme.
pub(super) fn positions_after_authority(path: &str, settings: &Settings) -> SmallVec<[usize; 2]> {
    let mut positions = SmallVec::new();
    if !settings.reads_authority {
        return positions;
    }
    // The WHATWG URL parser skips any number of slashes, and backslashes are slashes.
    let backslash_separates = settings.escaped_slashes != EscapedSlashes::Keep;
    let is_separator = |byte: u8| byte == b'/' || (byte == b'\\' && backslash_separates);
    let separators = path.bytes().take_while(|byte| is_separator(*byte)).count();
    if separators >= 2 {
        let host = path.bytes().skip(separators);
        let host_length = host.take_while(|byte| !is_separator(*byte)).count();
        positions.push(separators + host_length);
    }
    // RFC 3986: the authority is between `//` and the next slash, and may be empty.
    if let Some(rest) = path.strip_prefix("//") {
        let position = 2 + rest.find('/').unwrap_or(rest.len());
        if !positions.contains(&position) {
            positions.push(position);
        }
    }
    positions
}
