//! The set of readings of a path.

use super::characters::{ALL_SEPARATORS, SegmentSeparators, push_canonical_characters};
use super::dot_segments::{DotSegmentResolution, resolve_dots_and_parameters};
use super::forwarding::normalize_forwarded_path;
use super::path_scan::{PathScan, is_already_normalized, positions_after_authority};
use super::settings::{EscapedSlashes, ForwardedPath, PathError, Settings};
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
    has_nested_escape: bool,
    possible_query: Option<Box<str>>,
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

    /// Whether the path, decoded once, contains an escaped `.`, `/`, `\` or `%`. An app that
    /// decodes twice reads another path.
    pub fn has_nested_escape(&self) -> bool {
        self.has_nested_escape
    }

    /// The part of the path that an upstream may read as the query, from its delimiter on.
    pub(crate) fn possible_query(&self) -> Option<&str> {
        self.possible_query.as_deref()
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
