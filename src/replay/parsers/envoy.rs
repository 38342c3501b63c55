//! Envoy's default text format:
//!
//! `[START_TIME] "METHOD PATH PROTOCOL" CODE FLAGS RECEIVED SENT DURATION SERVICE_TIME
//! "X-FORWARDED-FOR" "USER-AGENT" "REQUEST-ID" "AUTHORITY" "UPSTREAM_HOST"`
//!
//! The format has no peer field. Envoy appends the peer address to `X-Forwarded-For` before it
//! writes the line, so the last address in this header is the peer.

use super::fields::{
    parse_address, parse_number, parse_request_line, present_value, push_header_values,
    split_at_unescaped_quote, unescape_field,
};
use super::parsed_line::{ParsedHeaders, ParsedLine, ParsedRequest};
use super::required_headers::RequiredHeaders;
use super::timestamps::parse_rfc3339;
use smallvec::SmallVec;

#[derive(Debug)]
pub(crate) struct EnvoyLineParser {
    forwarded_for_headers: SmallVec<[u16; 1]>,
    user_agent_headers: SmallVec<[u16; 1]>,
    request_id_headers: SmallVec<[u16; 1]>,
}

impl EnvoyLineParser {
    pub(super) fn new(required_headers: &RequiredHeaders) -> Self {
        Self {
            forwarded_for_headers: required_headers
                .indices_for_field("x_forwarded_for", Some("x-forwarded-for")),
            user_agent_headers: required_headers
                .indices_for_field("user_agent", Some("user-agent")),
            request_id_headers: required_headers
                .indices_for_field("request_id", Some("x-request-id")),
        }
    }

    pub(super) fn parse_line<'l>(&self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let rest = line.strip_prefix(b"[")?;
        let (time, rest) = rest.split_at_checked(memchr::memchr(b']', rest)?)?;
        let (at_us, has_whole_second_time) = parse_rfc3339(time)?;
        let (request, rest) = split_at_unescaped_quote(rest.strip_prefix(b"] \"")?)?;
        let Some((method, target)) = parse_request_line(request) else {
            return Some(ParsedLine::Other);
        };
        // Envoy escapes nothing, and clients control most fields of a line. Parsing the line from
        // both ends keeps quotes in the user agent from shifting other fields.
        let (words, rest) = rest.split_at_checked(memchr::memchr(b'"', rest)?)?;
        let (forwarded, rest) = split_at_unescaped_quote(rest.get(1..)?)?;
        let (rest, _upstream) = split_last_quoted(rest)?;
        let (rest, authority) = split_last_quoted(rest)?;
        let (rest, request_id) = split_last_quoted(rest)?;
        let agent = rest.trim_ascii().strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        let mut words = words
            .split(|byte| *byte == b' ')
            .filter(|word| !word.is_empty());
        let status = parse_number(words.next()?)?;
        let mut from_end = words.rev();
        let (_service_time, duration) = (from_end.next()?, from_end.next()?);
        let (before, peer) = match memchr::memrchr(b',', forwarded) {
            Some(at) => (forwarded.get(..at)?, forwarded.get(at + 1..)?),
            None => (&[][..], forwarded),
        };
        let mut headers = ParsedHeaders::new();
        push_header_values(&mut headers, &self.forwarded_for_headers, before);
        push_header_values(&mut headers, &self.user_agent_headers, agent);
        push_header_values(&mut headers, &self.request_id_headers, request_id);
        Some(ParsedLine::Request(ParsedRequest {
            arrival_us: at_us,
            has_whole_second_time,
            duration_us: parse_number(duration).map(|ms: u64| ms.saturating_mul(1000)),
            peer: parse_address(peer.trim_ascii()),
            status,
            method: method.into(),
            target: unescape_field(target),
            host: present_value(authority).unwrap_or_default().into(),
            headers,
        }))
    }
}

/// Returns the text before the last quoted field, and that field.
fn split_last_quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_end().strip_suffix(b"\"")?;
    let start = memchr::memrchr(b'"', text)?;
    Some((text.get(..start)?, text.get(start + 1..)?))
}
