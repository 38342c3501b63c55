//! Credentials in `Authorization` that lenient parsers read alike.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use smallvec::SmallVec;
use std::borrow::Cow;

type CredentialValues<'a> = SmallVec<[Cow<'a, [u8]>; 1]>;

/// The credentials of an `Authorization` field: one value, or several if parsers disagree which
/// they take. Basic and Bearer credentials are written in one way. Of other schemes, the letter
/// case of the scheme and the space after it are; the rest stays as sent.
pub(super) fn read_credentials(field: &[u8]) -> CredentialValues<'_> {
    let mut words = field
        .split(is_lenient_space)
        .filter(|word| !word.is_empty());
    let (scheme, first) = (words.next().unwrap_or_default(), words.next());
    let is_basic = scheme.eq_ignore_ascii_case(b"basic");
    let Some(first) = first else {
        return SmallVec::from_iter([Cow::Borrowed(scheme)]);
    };
    if !is_basic && !scheme.eq_ignore_ascii_case(b"bearer") {
        return SmallVec::from_iter([Cow::Owned(fold_scheme(trim_lenient_spaces(field)))]);
    }
    let credentials = match is_basic {
        // Node reads `-` and `_` as digits, Python and PHP drop them.
        true if first.iter().any(|byte| matches!(byte, b'-' | b'_')) => None,
        true if has_data_after_end(first) => None,
        true => {
            fold_base64(first).map(|folded| format!("Basic {}", STANDARD.encode(folded)).into())
        }
        false => fold_token(first).map(|folded| [b"Bearer ", &*folded].concat()),
    };
    match credentials {
        Some(credentials) if words.next().is_none() => {
            SmallVec::from_iter([Cow::Owned(credentials)])
        }
        _ => SmallVec::from_iter([Cow::Borrowed(scheme), Cow::Borrowed(first)]),
    }
}

/// Writes a scheme as `Scheme`, followed by one space and the credentials as sent.
fn fold_scheme(field: &[u8]) -> Vec<u8> {
    let mut words = field.splitn(2, is_lenient_space);
    let mut scheme = words.next().unwrap_or_default().to_ascii_lowercase();
    if let Some(first) = scheme.first_mut() {
        first.make_ascii_uppercase();
    }
    [
        &scheme,
        &b" "[..],
        trim_lenient_spaces(words.next().unwrap_or_default()),
    ]
    .concat()
}

fn trim_lenient_spaces(mut text: &[u8]) -> &[u8] {
    loop {
        text = match text {
            [byte, rest @ ..] | [rest @ .., byte] if is_lenient_space(byte) => rest,
            _ => return text,
        };
    }
}

/// Python also separates words at the Latin-1 characters NEL and no-break space.
pub(super) fn is_lenient_space(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | 0x85 | 0xa0)
}

/// The last bits of a JWT's signature may be unused, so it has several spellings.
fn fold_token(token: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut parts = token.rsplitn(3, |byte| *byte == b'.');
    let (signature, signed) = (parts.next()?, parts.next().and(parts.next()));
    if !token.starts_with(b"eyJ") || signed.is_none_or(|signed| signed.contains(&b'.')) {
        return Some(Cow::Borrowed(token));
    }
    let signed = token.get(..token.len() - signature.len())?;
    let signature = URL_SAFE_NO_PAD.encode(fold_base64(signature)?);
    Some(Cow::Owned([signed, signature.as_bytes()].concat()))
}

/// Whether data follows a character outside of base64. Node and PHP skip such a character, Apache
/// httpd ends there.
fn has_data_after_end(text: &[u8]) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/-_".contains(byte);
    let mut rest = text.iter().skip_while(|byte| is_digit(byte));
    rest.any(is_digit)
}

/// Decodes base64 as lenient parsers do: both alphabets, without other characters and unused bits.
/// Returns `None` if data follows the padding, which some parsers ignore.
pub(super) fn fold_base64(text: &[u8]) -> Option<Vec<u8>> {
    let (mut bytes, mut bits, mut bit_count, mut is_padded) = (Vec::new(), 0_u32, 0_u32, false);
    for byte in text {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            byte => {
                is_padded |= *byte == b'=';
                continue;
            }
        };
        if is_padded {
            return None;
        }
        (bits, bit_count) = (bits << 6 | u32::from(digit), bit_count + 6);
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.extend(u8::try_from(bits >> bit_count & 0xff));
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_one(field: &[u8]) -> Option<String> {
        let values = read_credentials(field);
        match &*values {
            [one] => Some(String::from_utf8_lossy(one).into_owned()),
            _ => None,
        }
    }

    #[test]
    fn spellings_of_one_credential_have_one_value() {
        for (spelling, value) in [
            (&b"Bearer alice"[..], "Bearer alice"),
            (b"bEaReR \t alice", "Bearer alice"),
            (b"Bearer\xa0alice", "Bearer alice"),
            (b"Bearer 1|a.b=c", "Bearer 1|a.b=c"),
            (
                b"bearer eyJhbGciOiJub25lIn0.e30.AB",
                "Bearer eyJhbGciOiJub25lIn0.e30.AA",
            ),
            (
                b"Bearer eyJhbGciOiJub25lIn0.e30.AA==",
                "Bearer eyJhbGciOiJub25lIn0.e30.AA",
            ),
            (b"Basic YWxpY2U6c2VjcmV0", "Basic YWxpY2U6c2VjcmV0"),
            (b"basic  YWxpY2U6c2VjcmV0*==;", "Basic YWxpY2U6c2VjcmV0"),
            (b"Basic YTpi", "Basic YTpi"),
            (b"Basic YTo+", "Basic YTo+"),
            (b"Basic YTp=", "Basic YTo="),
            (b"Bearer", "Bearer"),
            (b"Token  a  b", "Token a  b"),
            (b"tOKEN\tstolen", "Token stolen"),
            (b"aws4-HMAC-SHA256 A=b, C=d", "Aws4-hmac-sha256 A=b, C=d"),
            (b"alice", "alice"),
            (b"\x85alice\xa0", "alice"),
            (b"", ""),
        ] {
            assert_eq!(
                read_one(spelling).as_deref(),
                Some(value),
                "{}",
                spelling.escape_ascii()
            );
        }
    }

    #[test]
    fn credentials_of_which_parsers_take_different_parts_have_several_values() {
        for spelling in [
            &b"Bearer alice bob"[..],
            b"Bearer alice\x85bob",
            b"Basic YWxpY2U6 c2VjcmV0",
            b"Basic YTo=YTpi",
            b"Basic -YWxpY2U6c2VjcmV0",
            b"Basic YTo_",
            b"Basic YWxp*Y2U6c2VjcmV0",
            b"Basic YWxpY2U6c2VjcmV0,bob",
            b"Basic \"YWxpY2U6c2VjcmV0y\";x,",
        ] {
            assert_eq!(read_one(spelling), None, "{}", spelling.escape_ascii());
        }
    }
}
