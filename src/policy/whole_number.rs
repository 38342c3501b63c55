//! Whole numbers in headers and JSON pointers.

/// Digits only: an upstream may read signs, fractions, exponents and lists in more than one way.
pub fn parse_whole_number(value: &[u8]) -> Option<u64> {
    let text = str::from_utf8(value).ok()?;
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}
