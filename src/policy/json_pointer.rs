//! JSON Pointers (RFC 6901), and the whole numbers in them and in headers.

use std::borrow::Cow;
use std::fmt;

/// The location of a value in a JSON document (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JsonPointer {
    text: Box<str>,
    tokens: Box<[JsonPointerToken]>,
}

/// One step of a [`JsonPointer`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JsonPointerToken {
    /// The expected key, if the parent is an object.
    pub name: Box<str>,
    /// The name in the form in which names that look alike are compared ([`fold_name`]).
    pub(super) folded: Box<str>,
    /// The expected index from 0, if the parent is an array. `None` matches no array element.
    pub index: Option<u64>,
}

impl JsonPointer {
    /// Longer pointers are surely mistakes. The limit also bounds the memory that each response
    /// needs to find the value.
    const MAX_BYTES: usize = 256;

    /// Parses a JSON Pointer.
    ///
    /// # Errors
    /// Returns a message that can follow "found …;".
    pub fn parse(text: &str) -> Result<Self, String> {
        let steps = text
            .strip_prefix('/')
            .ok_or("expected a pointer that begins with \"/\", such as /usage/total_tokens")?;
        if text.len() > Self::MAX_BYTES {
            return Err(format!(
                "expected a pointer of at most {} bytes",
                Self::MAX_BYTES
            ));
        }
        let tokens = steps.split('/').map(JsonPointerToken::parse);
        Ok(Self {
            tokens: tokens.collect::<Result<_, _>>()?,
            text: text.into(),
        })
    }

    /// The pointer as the configuration writes it.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The steps; never empty.
    pub fn tokens(&self) -> &[JsonPointerToken] {
        &self.tokens
    }
}

impl fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl JsonPointerToken {
    fn parse(text: &str) -> Result<Self, String> {
        let mut escapes = text.split('~').skip(1);
        if !escapes.all(|rest| rest.starts_with(['0', '1'])) {
            return Err(
                "expected 0 or 1 after \"~\": \"~0\" is \"~\" and \"~1\" is \"/\" inside a name"
                    .to_owned(),
            );
        }
        let is_index = text == "0" || !text.starts_with('0');
        let index = parse_whole_number(text.as_bytes()).filter(|_| is_index);
        let name = text.replace("~1", "/").replace("~0", "~");
        Ok(Self {
            folded: fold_name(&name).into(),
            name: name.into(),
            index,
        })
    }
}

/// A name without what some parsers ignore: letter case, `_` and `-` (Go and .NET ignore case,
/// protobuf and Fastjson also the signs).
pub(super) fn fold_name(name: &str) -> Cow<'_, str> {
    let is_folded = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if name.bytes().all(is_folded) {
        return name.into();
    }
    // Both ways, as U+1E9E is a capital of U+00DF, U+212A one of "k" and U+017F a small letter of
    // "S". U+0307 is left of a capital I with a dot.
    let folded = name.to_lowercase().to_uppercase().to_lowercase();
    folded.replace(['_', '-', '\u{307}'], "").into()
}

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
