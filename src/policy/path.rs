//! Path normalization for matching and keys.
//!
//! Paths are normalized the way upstreams read them, so that no spelling of a path bypasses a
//! policy. The forwarded path stays unchanged.

use smallvec::{SmallVec, smallvec};

/// How a path is normalized for matching and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether paths are normalized. If not, they are matched byte for byte as received.
    pub normalize: bool,
    /// Treats `//` as `/`.
    pub merge_slashes: bool,
    pub escaped_slashes: EscapedSlashes,
    /// Treats `/a/` as `/a`.
    pub ignore_trailing_slash: bool,
    /// Treats `/a;x=1` as `/a`.
    pub strip_parameters: bool,
    pub case_sensitive: bool,
}

#[cfg(test)]
impl Settings {
    /// The defaults of the configuration.
    pub(crate) const DEFAULT: Self = Self {
        normalize: true,
        merge_slashes: true,
        escaped_slashes: EscapedSlashes::Both,
        ignore_trailing_slash: true,
        strip_parameters: true,
        case_sensitive: true,
    };
}

/// How `%2F`, `%5C` and `\` in a path are interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapedSlashes {
    /// Interpreted both as separators and as part of their segment, because upstreams differ.
    Both,
    /// Requests with an escaped slash or a backslash are rejected.
    Reject,
    /// Interpreted as part of their segment.
    Keep,
    /// Interpreted as separators.
    Decode,
}

/// The ways in which upstreams may interpret a path; usually one. Upstreams differ in whether `%2F`
/// and `\` separate segments, in stripping parameters, and in resolving dots. All combinations are
/// included. The most common interpretation, with more segments, comes first.
///
/// With `normalize`, each interpretation has one ASCII spelling: only necessary escapes, in upper
/// case. Two interpretations are thus equal exactly if they decode to the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathInterpretations(SmallVec<[Box<str>; 2]>);

/// Why a path cannot be matched safely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("the path contains an escaped slash or a backslash")]
    EscapedSlash,
    #[error("the path contains an escaped NUL")]
    Nul,
    #[error("the path does not start with a slash")]
    NotAbsolute,
}

/// Returns the interpretation of the root path.
impl Default for PathInterpretations {
    fn default() -> Self {
        Self(smallvec!["/".into()])
    }
}

impl PathInterpretations {
    /// Interprets the path of a request target, without its query. `*` (as in `OPTIONS *`) is read
    /// as `/`, so that policies for every path apply to it too.
    ///
    /// # Errors
    /// Returns a [`PathError`] if the path is invalid or the settings reject it.
    pub fn parse(path: &str, settings: &Settings) -> Result<Self, PathError> {
        if path == "*" {
            return Ok(Self::default());
        }
        if !path.starts_with('/') {
            return Err(PathError::NotAbsolute);
        }
        if !settings.normalize || is_already_normalized(path, settings) {
            return Ok(Self(smallvec![path.into()]));
        }
        if decode_escapes(path).any(|byte| byte == 0) {
            return Err(PathError::Nul);
        }
        let escaped_slash = decode_escapes(path).any(|byte| byte == b'/');
        let backslash = path.contains('\\') || decode_escapes(path).any(|byte| byte == b'\\');
        if settings.escaped_slashes == EscapedSlashes::Reject && (escaped_slash || backslash) {
            return Err(PathError::EscapedSlash);
        }
        // Escaped slashes and backslashes may separate segments independently of each other.
        let separator_choices = |is_present: bool| -> &[bool] {
            match settings.escaped_slashes {
                EscapedSlashes::Both if is_present => &[true, false],
                EscapedSlashes::Keep => &[false],
                _ => &[true],
            }
        };
        let strip_choices: &[bool] = match settings.strip_parameters {
            true if path.contains(';') => &[true, false],
            strips => &[strips],
        };
        let mut texts: SmallVec<[String; 4]> = SmallVec::new();
        for escaped_slash in separator_choices(escaped_slash) {
            for backslash in separator_choices(backslash) {
                let separators = SegmentSeparators {
                    escaped_slash: *escaped_slash,
                    backslash: *backslash,
                };
                texts.push(canonicalize_characters(path, settings, separators));
            }
        }
        let dot_resolutions: &[DotSegmentResolution] =
            match texts.iter().any(|text| has_ambiguous_segments(text)) {
                true => &[
                    DotSegmentResolution::AfterNormalization,
                    DotSegmentResolution::BeforeNormalization,
                    DotSegmentResolution::Never,
                ],
                false => &[DotSegmentResolution::AfterNormalization],
            };
        let mut readings: SmallVec<[Box<str>; 2]> = SmallVec::new();
        for dots in dot_resolutions {
            for strip_parameters in strip_choices {
                for text in &texts {
                    let reading =
                        resolve_dots_and_parameters(text, settings, *dots, *strip_parameters);
                    if !readings.contains(&reading) {
                        readings.push(reading);
                    }
                }
            }
        }
        Ok(Self(readings))
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }
}

/// Normalizes one literal segment of a pattern to the spelling of [`PathInterpretations`].
pub(super) fn canonicalize_segment(segment: &str, settings: &Settings) -> Box<str> {
    if !settings.normalize {
        return segment.into();
    }
    let separators = SegmentSeparators {
        escaped_slash: false,
        backslash: false,
    };
    let text = canonicalize_characters(segment, settings, separators);
    let mut name = String::with_capacity(text.len());
    push_segment(&mut name, &text, settings);
    name.into()
}

/// Characters that separate segments, in addition to a slash.
#[derive(Clone, Copy)]
struct SegmentSeparators {
    /// `%2F`.
    escaped_slash: bool,
    /// `\` and `%5C`.
    backslash: bool,
}

/// When `..` removes the segment before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DotSegmentResolution {
    /// After parameters are stripped and slashes merged: `/a/..;x/b` and `/a//../b` are `/b`.
    AfterNormalization,
    /// Before parameters are stripped and slashes merged: `..;x` is an ordinary name, and `..` may
    /// remove an empty segment. `/a/..;x/b` and `/a//../b` are then below `/a`.
    BeforeNormalization,
    /// The application routes by the path as received: `/a/../b` is below `/a`.
    Never,
}

/// Whether normalization would not change the path. For most paths this one pass is all.
fn is_already_normalized(path: &str, settings: &Settings) -> bool {
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

/// Whether a path has segments that servers treat differently: segments of dots, empty segments, or
/// segments with only a parameter.
fn has_ambiguous_segments(text: &str) -> bool {
    ["/.", "//", "/;"].iter().any(|odd| text.contains(odd))
}

/// Resolves dot segments and parameters of a canonicalized path, for one interpretation.
fn resolve_dots_and_parameters(
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

/// Appends a literal segment. Its semicolons are escaped where they would otherwise start
/// parameters.
fn push_segment(out: &mut String, segment: &str, settings: &Settings) {
    for (index, part) in segment.split(';').enumerate() {
        match settings.strip_parameters {
            _ if index == 0 => {}
            true if settings.case_sensitive => out.push_str("%3B"),
            true => out.push_str("%3b"),
            false => out.push(';'),
        }
        out.push_str(part);
    }
}

/// Decodes a path or segment once. Bytes that need an escape keep it, in upper case. Semicolons
/// that may start parameters stay plain.
fn canonicalize_characters(
    text: &str,
    settings: &Settings,
    separators: SegmentSeparators,
) -> String {
    let mut out = String::with_capacity(text.len());
    push_canonical_characters(&mut out, text, settings, separators);
    if !settings.case_sensitive {
        out.make_ascii_lowercase();
    }
    out
}

fn push_canonical_characters(
    out: &mut String,
    text: &str,
    settings: &Settings,
    separators: SegmentSeparators,
) {
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let (byte, escaped, tail) = match decode_escape(rest) {
            Some(byte) => (byte, true, tail.get(2..).unwrap_or_default()),
            None => (*first, false, tail),
        };
        rest = tail;
        match byte {
            b'/' if !escaped => out.push('/'),
            b'/' if separators.escaped_slash => out.push('/'),
            b'\\' if separators.backslash => out.push('/'),
            // An escaped semicolon starts no parameter.
            b';' if escaped && settings.strip_parameters => push_escape(out, byte),
            b'/' | b'\\' | b'%' => push_escape(out, byte),
            0x21..=0x7e => out.push(char::from(byte)),
            byte => push_escape(out, byte),
        }
    }
}

/// The byte encoded by a `%XX` at the start of `text`.
fn decode_escape(text: &[u8]) -> Option<u8> {
    match text {
        [b'%', high, low, ..] => Some(parse_hex_digit(*high)? << 4 | parse_hex_digit(*low)?),
        _ => None,
    }
}

fn decode_escapes(text: &str) -> impl Iterator<Item = u8> {
    text.as_bytes().windows(3).filter_map(decode_escape)
}

fn parse_hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

fn push_escape(out: &mut String, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.push('%');
    for nibble in [byte >> 4, byte & 15] {
        out.extend(
            DIGITS
                .get(usize::from(nibble))
                .map(|digit| char::from(*digit)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT_SETTINGS: Settings = Settings::DEFAULT;

    fn interpret(path: &str, settings: Settings) -> Vec<String> {
        PathInterpretations::parse(path, &settings)
            .unwrap()
            .iter()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn trap_24_equivalent_path_spellings_normalize_equally() {
        for path in [
            "/api/login",
            "/api/login/",
            "//api///login",
            "/./api/./login",
            "/api/x/../login",
            "/api/%2e%2E/api/login",
            "/../../api/login",
            "/%61pi/l%6Fgin",
            "/api;x=1/login;jsessionid=2",
            "/api/login/.",
            "/api/login/x/..",
        ] {
            assert_eq!(interpret(path, DEFAULT_SETTINGS)[0], "/api/login", "{path}");
        }
    }

    #[test]
    fn an_escaped_slash_has_both_interpretations() {
        assert_eq!(interpret("/a%2Fb", DEFAULT_SETTINGS), ["/a/b", "/a%2Fb"]);
        assert_eq!(interpret("/a%5cb", DEFAULT_SETTINGS), ["/a/b", "/a%5Cb"]);
        assert_eq!(interpret("/a\\b", DEFAULT_SETTINGS), ["/a/b", "/a%5Cb"]);
        assert_eq!(
            interpret("/public/..%2fapi", DEFAULT_SETTINGS),
            ["/api", "/public/..%2Fapi", "/public/../api"]
        );
        assert_eq!(
            interpret(
                "/a%2Fb",
                Settings {
                    escaped_slashes: EscapedSlashes::Decode,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a/b"]
        );
        assert_eq!(
            interpret(
                "/a%2fb",
                Settings {
                    escaped_slashes: EscapedSlashes::Keep,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a%2Fb"]
        );
        let rejected = PathInterpretations::parse(
            "/a%2fb",
            &Settings {
                escaped_slashes: EscapedSlashes::Reject,
                ..DEFAULT_SETTINGS
            },
        );
        assert_eq!(rejected, Err(PathError::EscapedSlash));
    }

    #[test]
    fn ambiguous_paths_have_every_interpretation() {
        assert_eq!(interpret("/a/../b", DEFAULT_SETTINGS), ["/b", "/a/../b"]);
        assert_eq!(interpret("/a/./b", DEFAULT_SETTINGS), ["/a/b", "/a/./b"]);
        assert_eq!(
            interpret("/a/..;x/b", DEFAULT_SETTINGS),
            ["/b", "/a/..%3Bx/b", "/a/../b"]
        );
        assert_eq!(
            interpret("/a/.;x/b", DEFAULT_SETTINGS),
            ["/a/b", "/a/.%3Bx/b", "/a/./b"]
        );
        assert_eq!(
            interpret("/a//../b", DEFAULT_SETTINGS),
            ["/b", "/a/b", "/a/../b"]
        );
        assert_eq!(
            interpret("/a//b;x/c", DEFAULT_SETTINGS),
            ["/a/b/c", "/a/b%3Bx/c"]
        );
        assert_eq!(interpret("/a/;x", DEFAULT_SETTINGS), ["/a", "/a/%3Bx"]);
        assert_eq!(
            interpret(
                "/a//../b",
                Settings {
                    merge_slashes: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a/b", "/a//../b"]
        );
        let kept = Settings {
            strip_parameters: false,
            ..DEFAULT_SETTINGS
        };
        assert_eq!(interpret("/a/..;x/b", kept), ["/a/..;x/b"]);
        // Escaped slashes and backslashes separate independently of each other.
        assert_eq!(
            interpret("/a%2Fb%5C..", DEFAULT_SETTINGS),
            [
                "/a",
                "/a/b%5C..",
                "/",
                "/a%2Fb%5C..",
                "/a/b/..",
                "/a%2Fb/.."
            ]
        );
    }

    #[test]
    fn a_path_is_decoded_exactly_once() {
        assert_eq!(
            interpret("/%252e%252e/a", DEFAULT_SETTINGS),
            ["/%252e%252e/a"]
        );
        assert_eq!(interpret("/a%zz", DEFAULT_SETTINGS), ["/a%25zz"]);
        assert_eq!(interpret("/%c3%a9", DEFAULT_SETTINGS), ["/%C3%A9"]);
        assert_eq!(interpret("/é", DEFAULT_SETTINGS), ["/%C3%A9"]);
        assert_eq!(interpret("/a%3Bb", DEFAULT_SETTINGS), ["/a%3Bb"]);
    }

    #[test]
    fn each_setting_has_its_documented_effect() {
        let off = Settings {
            normalize: false,
            ..DEFAULT_SETTINGS
        };
        assert_eq!(interpret("/A//b/../%61/", off), ["/A//b/../%61/"]);
        assert_eq!(
            interpret(
                "/a//b",
                Settings {
                    merge_slashes: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a//b"]
        );
        assert_eq!(
            interpret(
                "/a/b/",
                Settings {
                    ignore_trailing_slash: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a/b/"]
        );
        assert_eq!(
            interpret(
                "/a/b/..",
                Settings {
                    ignore_trailing_slash: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a/", "/a/b/.."]
        );
        assert_eq!(
            interpret(
                "/a;x/b",
                Settings {
                    strip_parameters: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a;x/b"]
        );
        assert_eq!(
            interpret(
                "/a%3bx",
                Settings {
                    strip_parameters: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/a;x"]
        );
        assert_eq!(
            interpret(
                "/API",
                Settings {
                    case_sensitive: false,
                    ..DEFAULT_SETTINGS
                }
            ),
            ["/api"]
        );
    }

    #[test]
    fn rejects_invalid_paths() {
        assert_eq!(
            PathInterpretations::parse("/a%00b", &DEFAULT_SETTINGS),
            Err(PathError::Nul)
        );
        assert_eq!(
            PathInterpretations::parse("foo", &DEFAULT_SETTINGS),
            Err(PathError::NotAbsolute)
        );
        assert_eq!(
            PathInterpretations::parse("", &DEFAULT_SETTINGS),
            Err(PathError::NotAbsolute)
        );
        assert_eq!(interpret("*", DEFAULT_SETTINGS), ["/"]);
        assert_eq!(interpret("/", DEFAULT_SETTINGS), ["/"]);
        assert_eq!(interpret("//", DEFAULT_SETTINGS), ["/"]);
    }

    proptest::proptest! {
        #[test]
        fn normalization_is_idempotent(path in "/[a-b%.;/\\\\2fF5cC0-9A]{0,24}") {
            let settings = Settings { escaped_slashes: EscapedSlashes::Decode, ..DEFAULT_SETTINGS };
            if let Ok(first) = PathInterpretations::parse(&path, &settings) {
                for reading in first.iter() {
                    let again = PathInterpretations::parse(reading, &settings).unwrap();
                    proptest::prop_assert!(again.iter().any(|same| same == reading), "{} {:?}", reading, again);
                    proptest::prop_assert!(!reading.contains("//"));
                }
            }
        }
    }
}
