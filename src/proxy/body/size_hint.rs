//! Size hints of bodies whose first bytes were read already.

use http_body::SizeHint;

/// The hint of a body that starts with `bytes` more.
pub(crate) fn add_to_size_hint(mut hint: SizeHint, bytes: usize) -> SizeHint {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    if let Some(upper) = hint.upper() {
        hint.set_upper(upper.saturating_add(bytes));
    }
    hint.set_lower(hint.lower().saturating_add(bytes));
    hint
}
