//! The nginx and Apache text formats and their derivatives:
//!
//! `[vhost:port ]peer ident user [time] "request" status bytes[ "referer" "user agent"[ further…]]`
//!
//! Further fields, quoted or not, are named `extra1`, `extra2`, …. Traefik lines end with a quoted
//! router and service and a duration in milliseconds.

use super::fields::{
    parse_address, parse_number, push_header_values, split_at_unescaped_quote, split_field,
    split_request_line, split_word, unescape_field,
};
use super::parsed_line::{ParsedHeaders, ParsedLine, ParsedRequest};
use super::required_headers::RequiredHeaders;
use super::timestamps::{CLF_TIME_LEN, ClfTimeParser};
use smallvec::SmallVec;
use std::borrow::Cow;

#[derive(Debug)]
pub(crate) struct ClfLineParser {
    time_parser: ClfTimeParser,
    user_headers: SmallVec<[u16; 1]>,
    referer_headers: SmallVec<[u16; 1]>,
    user_agent_headers: SmallVec<[u16; 1]>,
    /// Headers read from each extra field, by the field's position.
    extra_headers: Vec<SmallVec<[u16; 1]>>,
}

/// Maximum number of fields after the user agent that the parser reads.
const MAX_EXTRA_FIELDS: usize = 32;

impl ClfLineParser {
    pub(super) fn new(required_headers: &RequiredHeaders) -> Self {
        let mut extra_headers: Vec<_> = (1..=MAX_EXTRA_FIELDS)
            .map(|number| required_headers.indices_for_field(&format!("extra{number}"), None))
            .collect();
        while extra_headers.pop_if(|places| places.is_empty()).is_some() {}
        Self {
            time_parser: ClfTimeParser::new(),
            user_headers: required_headers.indices_for_field("remote_user", None),
            referer_headers: required_headers.indices_for_field("referer", Some("referer")),
            user_agent_headers: required_headers
                .indices_for_field("user_agent", Some("user-agent")),
            extra_headers,
        }
    }

    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let (head, at_us, rest) = self.split_at_timestamp(line)?;
        let (request, rest) = split_at_unescaped_quote(rest.strip_prefix(b" \"")?)?;
        let (status, rest) = split_word(rest.strip_prefix(b" ")?);
        let (_bytes, rest) = split_word(rest);
        let status = parse_number(status)?;
        let request = unescape_field(request);
        // Without a request line, the client sent no HTTP request: TLS bytes, for example, or
        // nothing.
        let Some((method, target)) = split_request_line(request) else {
            return Some(ParsedLine::Other);
        };
        let (host, peer, user) = split_client_fields(head)?;
        let mut headers = ParsedHeaders::new();
        push_header_values(&mut headers, &self.user_headers, user);
        let duration_us = self.parse_trailing_fields(&mut headers, rest);
        let host = Cow::Borrowed(host);
        Some(ParsedLine::Request(ParsedRequest {
            arrival_us: at_us,
            has_whole_second_time: true,
            duration_us,
            peer: parse_address(peer),
            status,
            method,
            target,
            host,
            headers,
        }))
    }

    /// Returns the text before the time, the time, and the text after the time. The time is the
    /// first valid one in brackets, because the user name may contain brackets too.
    fn split_at_timestamp<'l>(&mut self, line: &'l [u8]) -> Option<(&'l [u8], u64, &'l [u8])> {
        let mut from = 0;
        loop {
            let at = from + memchr::memchr(b'[', line.get(from..)?)?;
            let text = line.get(at + 1..)?;
            if let Some(at_us) = text
                .get(..CLF_TIME_LEN)
                .and_then(|text| self.time_parser.parse(text))
                && text.get(CLF_TIME_LEN) == Some(&b']')
            {
                return Some((line.get(..at)?, at_us, text.get(CLF_TIME_LEN + 1..)?));
            }
            from = at + 1;
        }
    }

    /// Adds the headers in the fields after the response size. Returns the duration at the end of a
    /// Traefik line.
    fn parse_trailing_fields<'l>(
        &self,
        headers: &mut ParsedHeaders<'l>,
        rest: &'l [u8],
    ) -> Option<u64> {
        let has_no_mappings = self.referer_headers.is_empty()
            && self.user_agent_headers.is_empty()
            && self.extra_headers.is_empty();
        if !has_no_mappings {
            let mut rest = rest;
            for header_indices in [&self.referer_headers, &self.user_agent_headers]
                .into_iter()
                .chain(&self.extra_headers)
            {
                let Some((field, after)) = split_field(rest) else {
                    break;
                };
                push_header_values(headers, header_indices, field);
                rest = after;
            }
        }
        let digits = rest.strip_suffix(b"ms")?;
        let start = memchr::memrchr(b' ', digits)? + 1;
        parse_number::<u64>(digits.get(start..)?)?.checked_mul(1000)
    }
}

/// Splits the text before the time into virtual host, peer and user.
fn split_client_fields(head: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (first, rest) = split_word(head);
    let (second, after) = split_word(rest);
    // A line starts with a virtual host if only the second word is an address. Most lines start
    // with the peer address.
    let is_virtual_host = parse_address(first).is_none() && parse_address(second).is_some();
    let (host, peer, rest) = if is_virtual_host {
        (first, second, after)
    } else {
        (&[][..], first, rest)
    };
    let (_ident, user) = split_word(rest);
    (!peer.is_empty()).then_some((host, peer, user.trim_ascii_end()))
}
