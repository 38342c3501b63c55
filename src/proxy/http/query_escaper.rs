//! Escapes characters in the query of an HTTP/1 request line that `http::Uri` does not accept.
//!
//! Clients send `"`, `<` and `>` as they are, and other proxies accept them in a query. Browsers
//! escape them. See `docs/decisions/0014-ambiguous-paths.md`.

use memchr::{memchr, memchr3, memmem};
use std::borrow::Cow;

/// Empty line, with the end of the line before it: the end of a request head.
const EMPTY_LINE: &[u8; 4] = b"\r\n\r\n";

/// Scans the request lines of an HTTP/1 connection, and finds where they begin: bytes of a head or
/// body that arrive after others must never be taken for one.
#[derive(Debug)]
pub(crate) struct QueryEscaper {
    part: RequestLinePart,
    /// Bytes behind the head that begins at the last known request line. `None` within that head.
    bytes_after_head: Option<u64>,
    /// Last bytes of the input.
    tail: [u8; EMPTY_LINE.len()],
    /// Whether the last request rarely has a body: its method is not POST, PUT or PATCH.
    is_bodiless: bool,
}

/// What hyper has read of the input of an HTTP/1 connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParsedInput {
    /// Heads since the last known request line.
    pub(crate) heads: u32,
    /// Bytes of the body of the last request, without chunk framing.
    pub(crate) body_bytes: u64,
    /// Whether no request is active, so that hyper waits for the next head.
    pub(crate) is_idle: bool,
}

impl Default for QueryEscaper {
    fn default() -> Self {
        Self {
            part: RequestLinePart::default(),
            bytes_after_head: Some(0),
            tail: *EMPTY_LINE,
            is_bodiless: true,
        }
    }
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
    /// Whether the next bytes begin a request line, given that no body is expected.
    ///
    /// Either hyper has parsed one head since the last request line, and all bytes behind it are
    /// its body. Or hyper waits behind an empty line: it would have parsed a head that ends there,
    /// and the chunks of a body end there.
    pub(crate) fn is_at_request_line(&self, parsed: ParsedInput) -> bool {
        parsed.heads <= 1 && self.bytes_after_head == Some(parsed.body_bytes)
            || parsed.is_idle && self.tail == *EMPTY_LINE
    }

    /// Whether the input so far ends within a head.
    pub(crate) fn is_within_head(&self) -> bool {
        self.bytes_after_head.is_none()
    }

    /// Follows the next bytes, which begin with a request line if `is_request_line`. Returns the
    /// length of those that hyper may read now: what follows the head of a request that rarely has
    /// a body is the next request, which hyper must read by itself so that its line is found.
    pub(crate) fn follow(&mut self, bytes: &[u8], is_request_line: bool) -> usize {
        if is_request_line {
            (self.part, self.bytes_after_head) = (RequestLinePart::Method, None);
            self.is_bodiless = !bytes.starts_with(b"P");
            self.tail = [0; EMPTY_LINE.len()];
        }
        let [_, before @ ..] = self.tail;
        for byte in bytes.last_chunk::<4>().map_or(bytes, |last| last) {
            let [_, a, b, c] = self.tail;
            self.tail = [a, b, c, *byte];
        }
        if let Some(after) = &mut self.bytes_after_head {
            *after = after.saturating_add(bytes.len() as u64);
            return bytes.len();
        }
        let ends_with_head = self.tail == *EMPTY_LINE;
        let head = if ends_with_head {
            Some(bytes.len())
        } else {
            find_head_end(before, bytes)
        };
        let length = head.filter(|_| self.is_bodiless).unwrap_or(bytes.len());
        self.bytes_after_head = head.and_then(|head| u64::try_from(length - head).ok());
        if head == Some(length) {
            self.tail = *EMPTY_LINE;
        }
        length
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

/// End of the first head in `bytes`, which follow `before`.
fn find_head_end(before: [u8; 3], bytes: &[u8]) -> Option<usize> {
    let around = [before.as_slice(), bytes.get(..3).unwrap_or(bytes)].concat();
    let divided = memmem::find(&around, EMPTY_LINE).map(|start| start + 1);
    divided.or_else(|| Some(memmem::find(bytes, EMPTY_LINE)? + EMPTY_LINE.len()))
}

/// Escapes the query of a request target.
pub(crate) fn escape_query(target: &[u8]) -> Cow<'_, [u8]> {
    let mut escaper = QueryEscaper {
        part: RequestLinePart::Path,
        ..QueryEscaper::default()
    };
    let mut escaped = Vec::new();
    if memchr3(b'"', b'<', b'>', target).is_some() && escaper.scan(target, &mut escaped) {
        Cow::Owned(escaped)
    } else {
        Cow::Borrowed(target)
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

    /// What follows a complete head is left for the next read, unless it may be a body.
    #[test]
    fn request_lines_are_found_behind_heads_and_bodies() {
        let idle = |body_bytes| ParsedInput {
            heads: 1,
            body_bytes,
            is_idle: true,
        };
        let mut escaper = QueryEscaper::default();
        let head = b"GET / HTTP/1.1\r\n\r\n";
        assert_eq!(
            escaper.follow(&[head, &b"GET /?\"\r"[..]].concat(), true),
            head.len()
        );
        assert!(escaper.is_at_request_line(idle(0)));
        assert_eq!(escaper.follow(b"GET /\r\nX: ?", true), 11);
        assert!(!escaper.is_at_request_line(idle(0)), "within a head");
        assert_eq!(escaper.follow(b"\"\r\n\r\n", false), 5);
        assert!(escaper.is_at_request_line(idle(0)));
        let post = b"POST / HTTP/1.1\r\n\r\n12345";
        assert_eq!(escaper.follow(post, true), post.len());
        assert!(!escaper.is_at_request_line(idle(7)));
        escaper.follow(b"67", false);
        assert!(escaper.is_at_request_line(idle(7)));
        let two_heads = ParsedInput {
            heads: 2,
            ..idle(7)
        };
        assert!(!escaper.is_at_request_line(two_heads));
        escaper.follow(b"X: a", false);
        assert!(
            !escaper.is_at_request_line(idle(7)),
            "a part of the next head"
        );
        escaper.follow(b"\r\n\r\n", false);
        assert!(escaper.is_at_request_line(two_heads));
        // The empty line is divided.
        for divided in 1..4 {
            let (front, back) = head.split_at(head.len() - divided);
            assert_eq!(escaper.follow(front, true), front.len());
            let back = [back, &b"GET /?\"\r\n\r\nX"[..]].concat();
            assert_eq!(escaper.follow(&back, false), divided);
            assert!(escaper.is_at_request_line(idle(0)));
        }
    }

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
                let mut is_request_line = true;
                for part in sent.as_bytes().chunks(step.min(sent.len())) {
                    escaper.follow(part, is_request_line);
                    is_request_line = false;
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
