//! Parses the fields that several log formats share.

use std::borrow::Cow;
use std::net::IpAddr;
use std::str::FromStr;

/// Splits `METHOD TARGET PROTOCOL` into method and target. Returns `None` for any other text.
pub(super) fn parse_request_line(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let method_end = memchr::memchr(b' ', text)?;
    let (method, rest) = text.split_at_checked(method_end)?;
    let rest = rest.get(1..)?;
    // HTTP/0.9 requests and some logs have no protocol. The target may contain spaces, because some
    // servers accept them.
    let target = match memchr::memrchr(b' ', rest) {
        Some(at) if rest.get(at + 1..)?.starts_with(b"HTTP/") => rest.get(..at)?,
        _ => rest,
    };
    let is_method = !method.is_empty()
        && method != b"-"
        && method
            .iter()
            .all(|byte| byte.is_ascii_uppercase() || *byte == b'-');
    (is_method && !target.is_empty()).then_some((method, target))
}

/// Method and target.
type RequestLine<'t> = (Cow<'t, [u8]>, Cow<'t, [u8]>);

/// Like [`parse_request_line`], for an unescaped text.
pub(super) fn split_request_line(text: Cow<'_, [u8]>) -> Option<RequestLine<'_>> {
    match text {
        Cow::Borrowed(text) => {
            let (method, target) = parse_request_line(text)?;
            Some((method.into(), target.into()))
        }
        Cow::Owned(text) => {
            let (method, target) = parse_request_line(&text)?;
            Some((method.to_vec().into(), target.to_vec().into()))
        }
    }
}

/// Parses an IP address with an optional port.
pub(super) fn parse_address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    let parsed = bare.parse().ok();
    parsed.or_else(|| {
        text.parse::<std::net::SocketAddr>()
            .ok()
            .map(|address| address.ip())
    })
}

/// Unescapes a quoted field: nginx writes `\xHH`; Apache writes `\"`, `\\`, `\n` and `\xhh`.
pub(super) fn unescape_field(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', text) else {
        return Cow::Borrowed(text);
    };
    let (plain, mut rest) = text.split_at_checked(first).unwrap_or((text, &[]));
    let mut out = plain.to_vec();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'\\' {
            out.push(*byte);
            continue;
        }
        let hex = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
        match tail {
            [b'x' | b'X', high, low, after @ ..] if hex(&[*high, *low]).is_some() => {
                out.extend(hex(&[*high, *low]));
                rest = after;
            }
            [sign, after @ ..] => {
                out.push(match sign {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                });
                rest = after;
            }
            [] => out.push(b'\\'),
        }
    }
    Cow::Owned(out)
}

/// Splits at the next quote that no backslash escapes. Returns the text before and after the quote.
pub(super) fn split_at_unescaped_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut from = 0;
    loop {
        let at = from + memchr::memchr(b'"', text.get(from..)?)?;
        let before = text.get(..at)?;
        let slashes = before
            .iter()
            .rev()
            .take_while(|byte| **byte == b'\\')
            .count();
        if slashes % 2 == 0 {
            return Some((before, text.get(at + 1..)?));
        }
        from = at + 1;
    }
}

/// Returns the text of a field, or `None` if it is empty or `-`.
pub(super) fn present_value(text: &[u8]) -> Option<&[u8]> {
    Some(text).filter(|text| !text.is_empty() && *text != b"-")
}

pub(super) fn parse_number<T: FromStr>(text: &[u8]) -> Option<T> {
    str::from_utf8(text).ok()?.parse().ok()
}

/// Splits `https://host:443/path?query` into host with port and target.
pub(super) fn split_url(url: &[u8]) -> Option<(&[u8], &[u8])> {
    let start = memchr::memmem::find(url, b"://")? + 3;
    let rest = url.get(start..)?;
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?'));
    let split = end.and_then(|end| rest.split_at_checked(end));
    Some(split.unwrap_or((rest, b"/")))
}

/// Splits at the next space.
pub(super) fn split_word(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b' ', text).and_then(|at| text.split_at_checked(at)) {
        Some((word, rest)) => (word, rest.get(1..).unwrap_or_default()),
        None => (text, &[]),
    }
}

/// Splits off the next field, quoted or not.
pub(super) fn split_field(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_start();
    match text.strip_prefix(b"\"") {
        Some(quoted) => split_at_unescaped_quote(quoted),
        None if text.is_empty() => None,
        None => Some(split_word(text)),
    }
}
