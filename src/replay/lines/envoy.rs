//! Envoy's default text:
//!
//! `[START_TIME] "METHOD PATH PROTOCOL" CODE FLAGS RECEIVED SENT DURATION SERVICE_TIME "X-FORWARDED-FOR" "USER-AGENT"
//! "REQUEST-ID" "AUTHORITY" "UPSTREAM_HOST"`
//!
//! It names no peer. Envoy adds its own to `X-Forwarded-For` before it writes the line, so the last one there is it.

use super::when::rfc3339;
use super::{
    Headers, Line, Read, Wanted, address, number, request_line, to_quote, told, unescaped,
};
use smallvec::SmallVec;

#[derive(Debug)]
pub(in super::super) struct Parser {
    forwarded: SmallVec<[u16; 1]>,
    agent: SmallVec<[u16; 1]>,
    request_id: SmallVec<[u16; 1]>,
}

impl Parser {
    pub(super) fn new(wanted: &Wanted) -> Self {
        Self {
            forwarded: wanted.of_field("x_forwarded_for", Some("x-forwarded-for")),
            agent: wanted.of_field("user_agent", Some("user-agent")),
            request_id: wanted.of_field("request_id", Some("x-request-id")),
        }
    }

    pub(super) fn read<'l>(&mut self, line: &'l [u8]) -> Read<'l> {
        self.request(line).unwrap_or(Read::Broken)
    }

    fn request<'l>(&self, line: &'l [u8]) -> Option<Read<'l>> {
        let rest = line.strip_prefix(b"[")?;
        let (time, rest) = rest.split_at_checked(memchr::memchr(b']', rest)?)?;
        let (at_us, coarse) = rfc3339(time)?;
        let (request, rest) = to_quote(rest.strip_prefix(b"] \"")?)?;
        let Some((method, target)) = request_line(request) else {
            return Some(Read::Other);
        };
        // Nothing is escaped here, and clients choose most of it: an agent's quotes must not move the other fields.
        let (words, rest) = rest.split_at_checked(memchr::memchr(b'"', rest)?)?;
        let (forwarded, rest) = to_quote(rest.get(1..)?)?;
        let (rest, _upstream) = last_quoted(rest)?;
        let (rest, authority) = last_quoted(rest)?;
        let (rest, request_id) = last_quoted(rest)?;
        let agent = rest.trim_ascii().strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        let mut words = words
            .split(|byte| *byte == b' ')
            .filter(|word| !word.is_empty());
        let status = number(words.next()?)?;
        let mut from_end = words.rev();
        let (_service_time, duration) = (from_end.next()?, from_end.next()?);
        let (before, peer) = match memchr::memrchr(b',', forwarded) {
            Some(at) => (forwarded.get(..at)?, forwarded.get(at + 1..)?),
            None => (&[][..], forwarded),
        };
        let mut headers = Headers::new();
        for (places, text) in [
            (&self.forwarded, before),
            (&self.agent, agent),
            (&self.request_id, request_id),
        ] {
            if let Some(text) = told(text) {
                headers.extend(places.iter().map(|place| (*place, unescaped(text))));
            }
        }
        Some(Read::Request(Line {
            at_us,
            coarse,
            took_us: number(duration).map(|ms| ms.saturating_mul(1000)),
            peer: address(peer.trim_ascii()),
            status: u16::try_from(status).ok()?,
            method: method.into(),
            target: unescaped(target),
            host: told(authority).unwrap_or_default().into(),
            headers,
        }))
    }
}

/// What stands before the last quoted field, and that.
fn last_quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_end().strip_suffix(b"\"")?;
    let start = memchr::memrchr(b'"', text)?;
    Some((text.get(..start)?, text.get(start + 1..)?))
}
