//! The set of readings of a path.

use super::normalization::{
    ALL_SEPARATORS, BACKSLASH, DotSegmentResolution, ESCAPED_BACKSLASH, ESCAPED_SLASH,
    SegmentSeparators, decode_escape, normalize_forwarded_path, push_canonical_characters,
    resolve_dots_and_parameters,
};
use super::{EscapedDelimiters, EscapedSlashes, ForwardedPath, PathError, Settings};
use smallvec::{SmallVec, smallvec};

/// Cost of a candidate reading beside its bytes, in bytes.
const CANDIDATE_OVERHEAD: usize = 256;

/// The ways in which upstreams may interpret a path; usually one. Upstreams differ in
///
/// - whether `//host/a` is a path, or a URL with the path `/a`;
/// - whether `%3F`, `%23` or `;` ends the path;
/// - whether `%2F`, `\` and `%5C` separate segments;
/// - stripping parameters, and resolving dots.
///
/// All combinations are included. The most common interpretation, with more segments, comes first.
///
/// With `normalize`, each interpretation has one ASCII spelling: only necessary escapes, in upper
/// case. Two interpretations are thus equal exactly if they decode to the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathInterpretations {
    readings: SmallVec<[Box<str>; 2]>,
    /// Whether the path, decoded once, contains an escaped `.`, `/`, `\` or `%`. An app that
    /// decodes twice reads another path.
    pub(crate) has_nested_escape: bool,
    /// The part of the path that an upstream may read as the query, from its delimiter on.
    pub(crate) possible_query: Option<Box<str>>,
}

/// Returns the interpretation of the root path.
impl Default for PathInterpretations {
    fn default() -> Self {
        Self::from_single_reading("/")
    }
}

impl PathInterpretations {
    /// Interprets the path of a request target, without its query. `*` (as in `OPTIONS *`) is read
    /// as `/`, so that policies for every path apply to it too. With [`ForwardedPath::Normalized`],
    /// interprets the forwarded path.
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
            return Ok(Self::from_single_reading(path));
        }
        match settings.forward {
            ForwardedPath::Unchanged => Self::parse_ambiguous(path, settings),
            ForwardedPath::Normalized => {
                let forwarded = normalize_forwarded_path(path, settings);
                Self::parse_ambiguous(forwarded.as_deref().unwrap_or(path), settings)
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.readings.iter().map(AsRef::as_ref)
    }

    pub fn has_single_reading(&self) -> bool {
        self.readings.len() == 1
    }

    fn from_single_reading(path: &str) -> Self {
        Self {
            readings: smallvec![path.into()],
            has_nested_escape: false,
            possible_query: None,
        }
    }

    fn parse_ambiguous(path: &str, settings: &Settings) -> Result<Self, PathError> {
        let scan = PathScan::new(path);
        scan.check(path, settings)?;
        let mut collector = ReadingCollector {
            settings,
            readings: SmallVec::new(),
            // A single reading is never too large.
            remaining_size: settings
                .max_readings_size
                .saturating_add(path.len())
                .saturating_add(CANDIDATE_OVERHEAD),
        };
        collector.add_parts(path, &scan)?;
        for start in positions_after_authority(path, settings) {
            let part = path.get(start..).unwrap_or_default();
            collector.add_parts(part, &PathScan::new(part))?;
        }
        Ok(Self {
            readings: collector.readings,
            has_nested_escape: scan.has_nested_escape,
            possible_query: scan.possible_query(path, settings).map(Into::into),
        })
    }
}

/// Collects the readings of the parts of a path that an upstream may take for the path.
struct ReadingCollector<'s> {
    settings: &'s Settings,
    readings: SmallVec<[Box<str>; 2]>,
    /// Bytes of candidate readings that may still be examined.
    remaining_size: usize,
}

impl ReadingCollector<'_> {
    /// Adds the readings of a path and of its parts up to each possible end.
    fn add_parts(&mut self, path: &str, scan: &PathScan) -> Result<(), PathError> {
        self.add_readings(path, scan)?;
        for end in scan.possible_ends(self.settings) {
            let part = path.get(..end).unwrap_or_default();
            self.add_readings(part, &PathScan::new(part))?;
        }
        Ok(())
    }

    /// Adds the readings of a path whose first byte is a separator, or of an empty path.
    fn add_readings(&mut self, path: &str, scan: &PathScan) -> Result<(), PathError> {
        let rest = path.get(1..).unwrap_or_default();
        let strip_choices: &[bool] = match self.settings.strip_parameters {
            true if scan.semicolon.is_some() => &[true, false],
            true => &[true],
            false => &[false],
        };
        let separator_choices = self.separator_choices(scan);
        let texts = separator_choices.len();
        self.spend(rest, texts * strip_choices.len())?;
        let mut text = String::with_capacity(path.len());
        for separators in separator_choices {
            text.clear();
            text.push('/');
            push_canonical_characters(&mut text, rest, self.settings, separators);
            let has_ambiguous_segments = has_ambiguous_segments(&text);
            if !has_ambiguous_segments && scan.semicolon.is_none() {
                self.add_reading(without_insignificant_slash(&text, self.settings).into());
                continue;
            }
            let dot_resolutions: &[DotSegmentResolution] = if has_ambiguous_segments {
                &[
                    DotSegmentResolution::AfterNormalization,
                    DotSegmentResolution::BeforeNormalization,
                    DotSegmentResolution::Never,
                ]
            } else {
                &[DotSegmentResolution::AfterNormalization]
            };
            self.spend(rest, (dot_resolutions.len() - 1) * strip_choices.len())?;
            for dots in dot_resolutions {
                for strip_parameters in strip_choices {
                    self.add_reading(resolve_dots_and_parameters(
                        &text,
                        self.settings,
                        *dots,
                        *strip_parameters,
                    ));
                }
            }
        }
        Ok(())
    }

    fn add_reading(&mut self, reading: Box<str>) {
        if !self.readings.contains(&reading) {
            self.readings.push(reading);
        }
    }

    /// Bounds the work for candidate readings, before it is done.
    fn spend(&mut self, path: &str, candidates: usize) -> Result<(), PathError> {
        let size = candidates.saturating_mul(path.len().saturating_add(CANDIDATE_OVERHEAD));
        self.remaining_size = self
            .remaining_size
            .checked_sub(size)
            .ok_or(PathError::TooManyReadings)?;
        Ok(())
    }

    /// `%2F`, `\` and `%5C` may separate segments independently of each other.
    fn separator_choices(&self, scan: &PathScan) -> SmallVec<[SegmentSeparators; 8]> {
        let is_choice = |choice: &SegmentSeparators| match self.settings.escaped_slashes {
            EscapedSlashes::Both => choice & !scan.separators == 0,
            EscapedSlashes::Keep => *choice == 0,
            EscapedSlashes::Decode | EscapedSlashes::Reject => *choice == ALL_SEPARATORS,
        };
        (0..=ALL_SEPARATORS).rev().filter(is_choice).collect()
    }
}

/// Whether a path has segments that servers treat differently: segments of dots, empty segments, or
/// segments with only a parameter.
fn has_ambiguous_segments(text: &str) -> bool {
    text.as_bytes()
        .windows(2)
        .any(|pair| matches!(pair, [b'/', b'.' | b'/' | b';']))
}

fn without_insignificant_slash<'t>(text: &'t str, settings: &Settings) -> &'t str {
    match text.strip_suffix('/') {
        Some(shorter) if settings.ignore_trailing_slash && !shorter.is_empty() => shorter,
        _ => text,
    }
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

/// The ambiguous characters of a path or of a part of it.
#[derive(Clone, Debug, Default)]
struct PathScan {
    /// Those that the path contains.
    separators: SegmentSeparators,
    has_nul: bool,
    has_control_character: bool,
    has_non_ascii: bool,
    /// Whether a `%` that begins no escape begins one when the path is decoded, other than a
    /// nested one.
    has_completed_escape: bool,
    /// Whether the decoded path contains an escaped `.`, `/`, `\` or `%`.
    has_nested_escape: bool,
    /// Position of the first `;`.
    semicolon: Option<usize>,
    /// Position of the first character with a byte that is a space in Latin-1, at which Python's
    /// `http.server` ends the target.
    latin1_space: Option<usize>,
    /// Position of the first `%3F`.
    escaped_question_mark: Option<usize>,
    /// Position of the first `%23`.
    escaped_number_sign: Option<usize>,
}

impl PathScan {
    fn new(path: &str) -> Self {
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
    fn check(&self, path: &str, settings: &Settings) -> Result<(), PathError> {
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
    fn possible_query<'p>(&self, path: &'p str, settings: &Settings) -> Option<&'p str> {
        let [question_mark, _, semicolon] = self.readable_delimiters(settings);
        path.get(question_mark.into_iter().chain(semicolon).min()?..)
    }

    /// Positions at which an upstream may take the path to end.
    fn possible_ends(&self, settings: &Settings) -> SmallVec<[usize; 3]> {
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
fn positions_after_authority(path: &str, settings: &Settings) -> SmallVec<[usize; 2]> {
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
