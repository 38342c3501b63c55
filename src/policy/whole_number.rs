//! Whole numbers in headers and JSON pointers.

/// Parses a number that consists of digits only. Upstreams may interpret signs, fractions,
/// exponents and lists differently.
pub fn parse_whole_number(value: &[u8]) -> Option<u64> {
    let (first, rest) = value.split_first()?;
    rest.iter().try_fold(digit_value(first)?, |number, digit| {
        number.checked_mul(10)?.checked_add(digit_value(digit)?)
    })
}

fn digit_value(byte: &u8) -> Option<u64> {
    byte.is_ascii_digit().then(|| u64::from(byte - b'0'))
}

#[cfg(test)]
mod tests {
    use super::parse_whole_number;

    #[test]
    fn numbers_are_digits_within_64_bits() {
        assert_eq!(parse_whole_number(b"0"), Some(0));
        assert_eq!(parse_whole_number(b"00042"), Some(42));
        assert_eq!(parse_whole_number(b"18446744073709551615"), Some(u64::MAX));
        for invalid in [
            "",
            "+1",
            "-1",
            "1.0",
            "1e3",
            " 1",
            "1,1",
            "18446744073709551616",
            "\u{661}",
        ] {
            assert_eq!(parse_whole_number(invalid.as_bytes()), None, "{invalid:?}");
        }
    }
}
