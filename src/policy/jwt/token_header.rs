//! Finds the token in its header.
//!
//! Some apps take the second word of `Authorization` for the token whatever its scheme, accept a
//! bare token, or split the field at commas.

use crate::policy::authorization::{fold_base64, is_lenient_space};

/// What a header field has for a token.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TokenField<'h> {
    Absent,
    Token(&'h [u8]),
    /// Words of which none is a token, or too many words.
    Malformed,
    /// Upstreams may take different words for the token.
    Ambiguous,
}

/// Reads the field of `Authorization`, or of a header that contains the token alone.
pub(super) fn read_token_field(field: &[u8], is_authorization: bool) -> TokenField<'_> {
    let mut words = field
        .split(is_lenient_separator)
        .filter(|word| !word.is_empty());
    let has_comma = field.contains(&b',');
    let is_bearer = |scheme: &[u8]| scheme.eq_ignore_ascii_case(b"bearer");
    match (words.next(), words.next(), words.next()) {
        (None, ..) => TokenField::Absent,
        (Some(word), None, _) if !has_comma => match !is_authorization || is_signed_token(word) {
            true => TokenField::Token(word),
            // A scheme without credentials, or credentials of another kind.
            false => TokenField::Absent,
        },
        (Some(scheme), Some(word), None)
            if !has_comma && (is_bearer(scheme) || !is_signed_token(scheme)) =>
        {
            match (is_bearer(scheme) || is_signed_token(word), is_authorization) {
                (true, _) => TokenField::Token(word),
                (false, true) => TokenField::Absent,
                (false, false) => TokenField::Malformed,
            }
        }
        (Some(scheme), ..) => {
            let mut words = field.split(is_lenient_separator);
            if words.any(is_signed_token) {
                TokenField::Ambiguous
            } else if is_authorization && !is_bearer(scheme) {
                TokenField::Absent
            } else {
                TokenField::Malformed
            }
        }
    }
}

fn is_lenient_separator(byte: &u8) -> bool {
    *byte == b',' || is_lenient_space(byte)
}

/// Whether a word has the form of a signed JWT: three parts, of which the first is a JSON object in
/// base64.
fn is_signed_token(word: &[u8]) -> bool {
    let mut parts = word.split(|byte| *byte == b'.');
    let (header, count) = (parts.next().unwrap_or_default(), parts.count());
    let starts_object = |json: Vec<u8>| json.trim_ascii_start().first() == Some(&b'{');
    count == 2 && fold_base64(header).is_some_and(starts_object)
}

#[cfg(test)]
mod tests {
    use super::{TokenField, read_token_field};

    const TOKEN: &str = "eyJhbGciOiJub25lIn0.e30.AB";

    fn read_authorization(spelling: &str) -> (TokenField<'static>, Vec<u8>) {
        let field: Vec<u8> = spelling
            .replace("TOKEN", TOKEN)
            .chars()
            .map(|character| u8::try_from(u32::from(character)).unwrap())
            .collect();
        match read_token_field(&field, true) {
            TokenField::Token(token) => (TokenField::Token(b""), token.to_vec()),
            TokenField::Absent => (TokenField::Absent, vec![]),
            TokenField::Malformed => (TokenField::Malformed, vec![]),
            TokenField::Ambiguous => (TokenField::Ambiguous, vec![]),
        }
    }

    #[test]
    fn a_token_is_found_whatever_its_scheme() {
        for spelling in [
            "Bearer TOKEN",
            "bearer \t TOKEN ",
            "Bearer\u{a0}TOKEN",
            "Bearer\u{85}TOKEN",
            "x TOKEN",
            "JWT TOKEN",
            "Basic TOKEN",
            "TOKEN",
            " TOKEN ",
        ] {
            let read = (TokenField::Token(b""), TOKEN.as_bytes().to_vec());
            assert_eq!(read_authorization(spelling), read, "{spelling}");
        }
        let opaque = (TokenField::Token(b""), b"opaque".to_vec());
        assert_eq!(read_authorization("Bearer opaque"), opaque);
    }

    #[test]
    fn several_words_with_a_token_are_ambiguous() {
        for spelling in [
            "Basic x, Bearer TOKEN",
            "Bearer TOKEN, Basic x",
            "Bearer TOKEN,",
            ",TOKEN",
            "Bearer,TOKEN",
            "Bearer x TOKEN",
            "Bearer TOKEN x",
            "TOKEN TOKEN",
            "TOKEN x",
        ] {
            let (read, _) = read_authorization(spelling);
            assert_eq!(read, TokenField::Ambiguous, "{spelling}");
        }
    }

    #[test]
    fn other_credentials_are_no_tokens() {
        for spelling in [
            "",
            "Bearer",
            "Basic YWxpY2U6c2VjcmV0",
            "Digest username=\"a\", realm=\"a.b.c\", uri=\"/a.b.c\"",
            "AWS4-HMAC-SHA256 Credential=A/20261123/eu/s3/aws4_request, Signature=a.b.c",
            "a.b.c",
        ] {
            let (read, _) = read_authorization(spelling);
            assert_eq!(read, TokenField::Absent, "{spelling}");
        }
        assert_eq!(read_authorization("Bearer a b").0, TokenField::Malformed);
        assert_eq!(read_token_field(b"x y", false), TokenField::Malformed);
        assert_eq!(read_token_field(b"x", false), TokenField::Token(b"x"));
    }
}
