//! Escapes characters in the query of an HTTP/1 request line that `http::Uri` does not accept.
//!
//! Clients send `"`, `<` and `>` as they are, and other proxies accept them in a query. Browsers
//! escape them. See `docs/decisions/0014-ambiguous-paths.md`.

use memchr::{memchr, memchr3};
use std::borrow::Cow;

/// Scans the request lines of an HTTP/1 connection.
#[derive(Debug, Default)]
pub(crate) struct QueryEscaper {
    part: RequestLinePart,
}

/// Part of a request line at which the scan has arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RequestLinePart {
    Method,
    Path,
    Query,
    #[default]
    End,
}

impl QueryEscaper {
    /// Records that the next bytes begin a request line.
    pub(crate) fn start_line(&mut self) {
        self.part = RequestLinePart::Method;
    }

    /// Scans the next bytes. Returns whether other bytes must be passed on in their place, which
    /// are appended to `replacement`.
    pub(crate) fn scan(&mut self, bytes: &[u8], replacement: &mut Vec<u8>) -> bool {
        if self.part == RequestLinePart::End {
            return false;
        }
        let escapable = memchr3(b'"', b'<', b'>', bytes);
        let has_line = bytes.ends_with(b"\n");
        let end = match escapable {
            // Most requests arrive whole, without these characters.
            None if has_line => Some(0),
            _ => memchr(b'\n', bytes),
        };
        if end.is_some_and(|end| escapable.is_none_or(|at| at > end)) {
            self.part = RequestLinePart::End;
            return false;
        }
        let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        for byte in line {
            self.part = match (self.part, *byte) {
                (RequestLinePart::Method, b' ') => RequestLinePart::Path,
                (RequestLinePart::Path, b'?') => RequestLinePart::Query,
                (RequestLinePart::Path | RequestLinePart::Query, b' ') => RequestLinePart::End,
                (part, _) => part,
            };
            match escape_byte(*byte) {
                Some(escape) if self.part == RequestLinePart::Query => {
                    replacement.extend_from_slice(escape);
                }
                _ => replacement.push(*byte),
            }
        }
        if end.is_some() {
            self.part = RequestLinePart::End;
        }
        replacement.extend_from_slice(rest);
        true
    }
}

/// Escapes the query of a request target.
pub(crate) fn escape_query(target: &[u8]) -> Cow<'_, [u8]> {
    let mut escaper = QueryEscaper {
        part: RequestLinePart::Path,
    };
    let mut escaped = Vec::new();
    match memchr3(b'"', b'<', b'>', target).is_some() && escaper.scan(target, &mut escaped) {
        true => Cow::Owned(escaped),
        false => Cow::Borrowed(target),
    }
}

fn escape_byte(byte: u8) -> Option<&'static [u8]> {
    match byte {
        b'"' => Some(b"%22"),
        b'<' => Some(b"%3C"),
        b'>' => Some(b"%3E"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_query_of_a_request_line_is_escaped_however_the_bytes_are_split() {
        for (sent, expected) in [
            (
                "GET /q?a=\"<>\"&b=\"?\" HTTP/1.1\r\nX: \"<\"\r\n\r\n\"",
                "GET /q?a=%22%3C%3E%22&b=%22?%22 HTTP/1.1\r\nX: \"<\"\r\n\r\n\"",
            ),
            (
                "GET /<\"> HTTP/1.1\r\nX: ?<\r\n\r\n",
                "GET /<\"> HTTP/1.1\r\nX: ?<\r\n\r\n",
            ),
            (
                "GET http://a/?<\r\nX: ?<\r\n\r\n",
                "GET http://a/?%3C\r\nX: ?<\r\n\r\n",
            ),
            ("<?< /?<", "<?< /?%3C"),
            ("GET /?a b< HTTP/1.1\n", "GET /?a b< HTTP/1.1\n"),
        ] {
            for step in [1, 2, 3, 24, usize::MAX] {
                let (mut escaper, mut passed) = (QueryEscaper::default(), Vec::new());
                escaper.start_line();
                for part in sent.as_bytes().chunks(step.min(sent.len())) {
                    if !escaper.scan(part, &mut passed) {
                        passed.extend_from_slice(part);
                    }
                }
                assert_eq!(String::from_utf8_lossy(&passed), expected, "{step}");
            }
        }
        let mut passed = Vec::new();
        assert!(!QueryEscaper::default().scan(b"GET /?< HTTP/1.1\r\n", &mut passed));
        assert_eq!(&*escape_query(b"/<?\"a\""), b"/<?%22a%22");
        assert_eq!(&*escape_query(b"/a?b"), b"/a?b");
    }
}
