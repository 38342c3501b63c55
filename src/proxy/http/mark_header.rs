//! The request header that names the policies with `mode = "mark"` whose limit a request is over.

use http::{HeaderMap, HeaderValue};

use crate::enforcer::Verdict;
use crate::policy::{PolicyMode, PolicyTable};

/// Adds the header if the request is marked.
pub(crate) fn add_mark_header(headers: &mut HeaderMap, table: &PolicyTable, verdict: &Verdict<'_>) {
    if let Some(value) = build_mark_value(verdict) {
        headers.insert(&table.mark_header, value);
    }
}

/// Builds the value: the names of the policies. Returns `None` if the request is not marked.
pub(crate) fn build_mark_value(verdict: &Verdict<'_>) -> Option<HeaderValue> {
    if verdict.unenforced_rejections.is_empty() {
        return None;
    }
    let marked = verdict
        .unenforced_rejections
        .names_in_mode(PolicyMode::Mark);
    let names: Vec<&str> = marked.collect();
    // Names of policies are letters, digits, `_`, `.` and `-`.
    let value = HeaderValue::try_from(names.join(", ")).ok();
    value.filter(|_| !names.is_empty())
}
