//! Whole numbers in headers and JSON pointers.

/// Parses a number that consists of digits only. Upstreams may interpret signs, fractions,
/// exponents and lists differently.
pub fn parse_whole_number(value: &[u8]) -> Option<u64> {
    let text = str::from_utf8(value).ok()?;
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}
