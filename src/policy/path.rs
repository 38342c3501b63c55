//! The path that policies see: normalized the way that upstreams read paths, so that no spelling of a
//! path gets round a policy. What is forwarded stays as it came.

use smallvec::{SmallVec, smallvec};

/// How a path is read for matching and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Off: the path is matched byte for byte as it came.
    pub normalize: bool,
    /// `//` is `/`.
    pub merge_slashes: bool,
    pub escaped_slashes: EscapedSlashes,
    /// `/a/` is `/a`.
    pub ignore_trailing_slash: bool,
    /// `/a;x=1` is `/a`.
    pub strip_parameters: bool,
    pub case_sensitive: bool,
}

#[cfg(test)]
impl Settings {
    /// The defaults of the configuration.
    pub(crate) const USUAL: Self = Self {
        normalize: true,
        merge_slashes: true,
        escaped_slashes: EscapedSlashes::Both,
        ignore_trailing_slash: true,
        strip_parameters: true,
        case_sensitive: true,
    };
}

/// What `%2F`, `%5C` and `\` in a path are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapedSlashes {
    /// Upstreams differ, so both readings are matched.
    Both,
    /// A request that has one is refused.
    Reject,
    /// Part of their segment.
    Keep,
    /// Separators.
    Decode,
}

/// The ways in which upstreams read a path: mostly one, where they differ up to four. The one that most of them agree on,
/// with more segments, comes first.
///
/// With `normalize` a reading is ASCII in one spelling: what can be written plainly is, everything else is
/// percent-encoded in upper case, so that two readings are equal exactly if they decode to the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readings(SmallVec<[Box<str>; 2]>);

/// Why a path cannot be matched safely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathFault {
    #[error("the path holds an escaped slash or a backslash")]
    EscapedSlash,
    #[error("the path holds an escaped NUL")]
    Nul,
    #[error("the path does not begin with a slash")]
    NotAbsolute,
}

impl Readings {
    /// Reads the path of a request target (no query). `*` (of `OPTIONS *`) reads as `/`, so that policies
    /// for every path hold for it too.
    ///
    /// # Errors
    /// A [`PathFault`] for a path that the client should not have sent.
    pub fn of(path: &str, settings: &Settings) -> Result<Self, PathFault> {
        if path == "*" {
            return Ok(Self(smallvec!["/".into()]));
        }
        if !path.starts_with('/') {
            return Err(PathFault::NotAbsolute);
        }
        if !settings.normalize || is_plain(path, settings) {
            return Ok(Self(smallvec![path.into()]));
        }
        if escapes(path).any(|byte| byte == 0) {
            return Err(PathFault::Nul);
        }
        let ambiguous = path.contains('\\') || escapes(path).any(|byte| matches!(byte, b'/' | b'\\'));
        let slashes: &[Slash] = match settings.escaped_slashes {
            EscapedSlashes::Reject if ambiguous => return Err(PathFault::EscapedSlash),
            EscapedSlashes::Both if ambiguous => &[Slash::Separates, Slash::Stays],
            EscapedSlashes::Keep => &[Slash::Stays],
            _ => &[Slash::Separates],
        };
        let mut readings: SmallVec<[Box<str>; 2]> = SmallVec::new();
        for dots in [Dots::AfterAll, Dots::BeforeAll] {
            for slash in slashes {
                let reading = normalize(path, settings, *slash, dots);
                if !readings.contains(&reading) {
                    readings.push(reading);
                }
            }
        }
        Ok(Self(readings))
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }
}

/// One literal segment of a pattern in the spelling that readings have.
pub(super) fn canonical_segment(segment: &str, settings: &Settings) -> Box<str> {
    if !settings.normalize {
        return segment.into();
    }
    let mut text = String::with_capacity(segment.len());
    push_canonical(&mut text, segment, settings, Slash::Stays);
    fold_case(text, settings).into()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Slash {
    Separates,
    Stays,
}

/// When `..` takes a segment away. Servers differ, and a path that is no different by that is the usual one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dots {
    /// When parameters are gone and slashes merged: `/a/..;x/b` and `/a//../b` are `/b`.
    AfterAll,
    /// Before: `..;x` is a name like others, and an empty segment one that `..` takes away. Both are below `/a`.
    BeforeAll,
}

/// Whether normalizing would change nothing: the usual case, decided in one pass.
fn is_plain(path: &str, settings: &Settings) -> bool {
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

fn normalize(path: &str, settings: &Settings, slash: Slash, dots: Dots) -> Box<str> {
    let mut text = String::with_capacity(path.len());
    push_canonical(&mut text, path, settings, slash);
    let text = fold_case(text, settings);

    let mut segments: SmallVec<[&str; 16]> = SmallVec::new();
    let mut ends_open = false;
    for segment in text.split('/').skip(1) {
        // Parameters go first: some servers read `/..;x/` as `/../`.
        let segment = match segment.split_once(';') {
            Some(("." | "..", _)) if dots == Dots::BeforeAll => segment,
            Some((before, _)) if settings.strip_parameters => before,
            _ => segment,
        };
        ends_open = matches!(segment, "" | "." | "..");
        match segment {
            "." => {}
            ".." => {
                segments.pop();
            }
            "" if settings.merge_slashes && dots == Dots::AfterAll => {}
            segment => segments.push(segment),
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
        path.push_str(segment);
    }
    if segments.is_empty() || (ends_open && !settings.ignore_trailing_slash) {
        path.push('/');
    }
    path.into()
}

/// Appends `text` in canonical spelling: decoded once where that is plain, else escaped in upper case.
fn push_canonical(out: &mut String, text: &str, settings: &Settings, slash: Slash) {
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let (byte, escaped, tail) = match escape(rest) {
            Some(byte) => (byte, true, tail.get(2..).unwrap_or_default()),
            None => (*first, false, tail),
        };
        rest = tail;
        match byte {
            b'/' if !escaped => out.push('/'),
            b'/' | b'\\' if slash == Slash::Separates => out.push('/'),
            // An escaped semicolon begins no parameter.
            b';' if escaped && settings.strip_parameters => push_escape(out, byte),
            b'/' | b'\\' | b'%' => push_escape(out, byte),
            0x21..=0x7e => out.push(char::from(byte)),
            byte => push_escape(out, byte),
        }
    }
}

fn fold_case(mut text: String, settings: &Settings) -> String {
    if !settings.case_sensitive {
        text.make_ascii_lowercase();
    }
    text
}

/// The byte that a `%XX` at the beginning of `text` stands for.
fn escape(text: &[u8]) -> Option<u8> {
    match text {
        [b'%', high, low, ..] => Some(hex(*high)? << 4 | hex(*low)?),
        _ => None,
    }
}

fn escapes(text: &str) -> impl Iterator<Item = u8> {
    text.as_bytes().windows(3).filter_map(escape)
}

fn hex(digit: u8) -> Option<u8> {
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
        out.extend(DIGITS.get(usize::from(nibble)).map(|digit| char::from(*digit)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Settings = Settings::USUAL;

    fn read(path: &str, settings: Settings) -> Vec<String> {
        Readings::of(path, &settings).unwrap().iter().map(str::to_owned).collect()
    }

    #[test]
    fn trap_24_every_spelling_of_a_path_reads_alike() {
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
            assert_eq!(read(path, USUAL), ["/api/login"], "{path}");
        }
    }

    #[test]
    fn an_escaped_slash_is_read_both_ways() {
        assert_eq!(read("/a%2Fb", USUAL), ["/a/b", "/a%2Fb"]);
        assert_eq!(read("/a%5cb", USUAL), ["/a/b", "/a%5Cb"]);
        assert_eq!(read("/a\\b", USUAL), ["/a/b", "/a%5Cb"]);
        assert_eq!(read("/public/..%2fapi", USUAL), ["/api", "/public/..%2Fapi"]);
        assert_eq!(read("/a%2Fb", Settings { escaped_slashes: EscapedSlashes::Decode, ..USUAL }), ["/a/b"]);
        assert_eq!(read("/a%2fb", Settings { escaped_slashes: EscapedSlashes::Keep, ..USUAL }), ["/a%2Fb"]);
        let refused = Readings::of("/a%2fb", &Settings { escaped_slashes: EscapedSlashes::Reject, ..USUAL });
        assert_eq!(refused, Err(PathFault::EscapedSlash));
    }

    #[test]
    fn where_servers_differ_on_dots_both_readings_count() {
        assert_eq!(read("/a/..;x/b", USUAL), ["/b", "/a/..;x/b"]);
        assert_eq!(read("/a/%2e%2E;/b", USUAL), ["/b", "/a/..;/b"]);
        assert_eq!(read("/a/.;x/b", USUAL), ["/a/b", "/a/.;x/b"]);
        assert_eq!(read("/a//../b", USUAL), ["/b", "/a/b"]);
        assert_eq!(read("/a/;x/../b", USUAL), ["/b", "/a/b"]);
        assert_eq!(read("/a//b;x/c", USUAL), ["/a/b/c"]);
        assert_eq!(read("/a/..%2f..;/b", USUAL), ["/b", "/a/..%2F../b", "/..;/b"]);
        assert_eq!(read("/a//../b", Settings { merge_slashes: false, ..USUAL }), ["/a/b"]);
        assert_eq!(read("/a/..;x/b", Settings { strip_parameters: false, ..USUAL }), ["/a/..;x/b"]);
    }

    #[test]
    fn a_path_is_decoded_once_and_only_once() {
        assert_eq!(read("/%252e%252e/a", USUAL), ["/%252e%252e/a"]);
        assert_eq!(read("/a%zz", USUAL), ["/a%25zz"]);
        assert_eq!(read("/%c3%a9", USUAL), ["/%C3%A9"]);
        assert_eq!(read("/é", USUAL), ["/%C3%A9"]);
        assert_eq!(read("/a%3Bb", USUAL), ["/a%3Bb"]);
    }

    #[test]
    fn each_setting_does_what_it_says() {
        let off = Settings { normalize: false, ..USUAL };
        assert_eq!(read("/A//b/../%61/", off), ["/A//b/../%61/"]);
        assert_eq!(read("/a//b", Settings { merge_slashes: false, ..USUAL }), ["/a//b"]);
        assert_eq!(read("/a/b/", Settings { ignore_trailing_slash: false, ..USUAL }), ["/a/b/"]);
        assert_eq!(read("/a/b/..", Settings { ignore_trailing_slash: false, ..USUAL }), ["/a/"]);
        assert_eq!(read("/a;x/b", Settings { strip_parameters: false, ..USUAL }), ["/a;x/b"]);
        assert_eq!(read("/a%3bx", Settings { strip_parameters: false, ..USUAL }), ["/a;x"]);
        assert_eq!(read("/API", Settings { case_sensitive: false, ..USUAL }), ["/api"]);
    }

    #[test]
    fn what_cannot_be_a_path_is_refused() {
        assert_eq!(Readings::of("/a%00b", &USUAL), Err(PathFault::Nul));
        assert_eq!(Readings::of("foo", &USUAL), Err(PathFault::NotAbsolute));
        assert_eq!(Readings::of("", &USUAL), Err(PathFault::NotAbsolute));
        assert_eq!(read("*", USUAL), ["/"]);
        assert_eq!(read("/", USUAL), ["/"]);
        assert_eq!(read("//", USUAL), ["/"]);
    }

    proptest::proptest! {
        #[test]
        fn reading_a_reading_changes_nothing(path in "/[a-b%.;/\\\\2fF5cC0-9A]{0,24}") {
            let settings = Settings { escaped_slashes: EscapedSlashes::Decode, ..USUAL };
            if let Ok(first) = Readings::of(&path, &settings) {
                for reading in first.iter() {
                    let again = Readings::of(reading, &settings).unwrap();
                    proptest::prop_assert!(again.iter().any(|same| same == reading), "{} {:?}", reading, again);
                    proptest::prop_assert!(!reading.contains("//") && !reading.contains("/../"));
                }
            }
        }
    }
}
