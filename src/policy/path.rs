//! The readings of a path: the paths that upstreams may understand by one request target.
//!
//! Matching and keys use normalized readings, so that no spelling of a path bypasses a policy.

mod interpretations;
mod normalization;
#[cfg(test)]
mod tests;

pub use interpretations::PathInterpretations;
pub use normalization::{canonicalize_segment, normalize_forwarded_path};

use strum::{EnumString, VariantNames};

/// How a path is normalized for matching and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether paths are normalized. If not, they are matched byte for byte as received.
    pub normalize: bool,
    pub forward: ForwardedPath,
    /// Treats `//` as `/`.
    pub merge_slashes: bool,
    /// Reads `//host/a` also as `/a`.
    pub reads_authority: bool,
    pub escaped_slashes: EscapedSlashes,
    pub escaped_delimiters: EscapedDelimiters,
    /// Rejects paths with `%01` to `%1F` or `%7F`.
    pub rejects_control_characters: bool,
    /// Rejects paths that do not decode to UTF-8.
    pub rejects_invalid_utf8: bool,
    /// Treats `/a/` as `/a`.
    pub ignore_trailing_slash: bool,
    /// Treats `/a;x=1` as `/a`.
    pub strip_parameters: bool,
    pub case_sensitive: bool,
    /// Rejects requests if a part of their key differs between the readings of the path.
    pub rejects_ambiguous_keys: bool,
    /// Most bytes of all candidate readings of a path with more than one.
    pub max_readings_size: usize,
}

impl Settings {
    /// The defaults of the configuration.
    pub const DEFAULT: Self = Self {
        normalize: true,
        forward: ForwardedPath::Unchanged,
        merge_slashes: true,
        reads_authority: true,
        escaped_slashes: EscapedSlashes::Both,
        escaped_delimiters: EscapedDelimiters::Both,
        rejects_control_characters: true,
        rejects_invalid_utf8: true,
        ignore_trailing_slash: true,
        strip_parameters: true,
        case_sensitive: true,
        rejects_ambiguous_keys: true,
        max_readings_size: 32 << 10,
    };
}

/// The path that the upstream receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ForwardedPath {
    /// The path as the client sent it.
    Unchanged,
    /// The path of [`normalize_forwarded_path`]. Policies read that path too.
    Normalized,
}

/// How `%2F`, `%5C` and `\` in a path are interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
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

/// How `%3F` and `%23` in a path are interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum EscapedDelimiters {
    /// Interpreted both as the end of the path and as part of their segment.
    Both,
    /// Requests with an escaped `?` or `#` are rejected.
    Reject,
    /// Interpreted as part of their segment.
    Keep,
}

/// Why a path cannot be matched safely. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error(
        "the path contains %2F, %5C or a backslash; expected plain slashes between segments (setting path.escaped_slashes)"
    )]
    EscapedSlash,
    #[error(
        "the path contains %3F or %23; expected a path without ? and # (setting path.escaped_delimiters)"
    )]
    EscapedDelimiter,
    #[error("the path contains an escaped NUL")]
    Nul,
    #[error(
        "the path contains a control character, %01 to %1F or %7F; expected printable characters (setting path.control_characters)"
    )]
    ControlCharacter,
    #[error(
        "the path is not UTF-8 when its escapes are decoded; expected for example %C3%A9 for é, not %E9 (setting path.invalid_utf8)"
    )]
    InvalidUtf8,
    #[error(
        "the path has a new escape when its escapes are decoded, as %6%31 becomes %61; expected %25 for a percent sign (setting path.invalid_utf8)"
    )]
    CompletedEscape,
    #[error(
        "the path can be read in too many ways; expected fewer escapes, dot segments and parameters (setting path.max_readings_size)"
    )]
    TooManyReadings,
    #[error("the path does not start with a slash")]
    NotAbsolute,
}
