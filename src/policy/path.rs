//! The readings of a path: the paths that upstreams may understand by one request target.
//!
//! Matching and keys use normalized readings, so that no spelling of a path bypasses a policy.

mod characters;
mod dot_segments;
mod forwarding;
mod interpretations;
mod path_scan;
mod settings;
#[cfg(test)]
mod tests;

pub use characters::canonicalize_segment;
pub use forwarding::normalize_forwarded_path;
pub use interpretations::PathInterpretations;
pub use settings::{EscapedDelimiters, EscapedSlashes, ForwardedPath, PathError, Settings};
