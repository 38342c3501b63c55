//! Resolves dot segments, empty segments and parameters of a path.

use super::characters::push_segment;
use super::settings::Settings;
use smallvec::SmallVec;

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
