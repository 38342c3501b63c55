//! Access logs of an AWS Application Load Balancer:
//!
//! `type time elb client:port target:port request_time target_time response_time status
//! target_status received sent "request" "user agent" cipher protocol target_group "trace id"
//! "domain" "certificate" priority creation_time …`
//!
//! The request has its target in absolute form. `time` is the end of the response, and
//! `creation_time` the arrival of the request.

use super::fields::{
    parse_address, parse_number, parse_request_line, push_header_values, split_at_unescaped_quote,
    split_field, unescape_field,
};
use super::parsed_line::{ParsedHeaders, ParsedLine, ParsedRequest};
use super::required_headers::RequiredHeaders;
use super::timestamps::{parse_rfc3339, seconds_to_micros};
use smallvec::SmallVec;

const CONNECTION_TYPES: [&[u8]; 6] = [b"http", b"https", b"h2", b"grpcs", b"ws", b"wss"];

#[derive(Debug)]
pub(crate) struct AlbLineParser {
    user_agent_headers: SmallVec<[u16; 1]>,
    trace_id_headers: SmallVec<[u16; 1]>,
}

impl AlbLineParser {
    pub(super) fn new(required_headers: &RequiredHeaders) -> Self {
        let indices = |field, header| required_headers.indices_for_field(field, Some(header));
        Self {
            user_agent_headers: indices("user_agent", "user-agent"),
            trace_id_headers: indices("trace_id", "x-amzn-trace-id"),
        }
    }

    pub(super) fn parse_line<'l>(&self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let mut words = line.splitn(13, |byte| *byte == b' ');
        let kind = words.next().filter(|kind| CONNECTION_TYPES.contains(kind));
        let (_kind, end_time, _elb, client, _target) = (
            kind?,
            words.next()?,
            words.next()?,
            words.next()?,
            words.next()?,
        );
        let times = [words.next()?, words.next()?, words.next()?];
        let status = words.next()?;
        let (_target_status, _received, _sent) = (words.next()?, words.next()?, words.next()?);
        let (request, rest) = split_at_unescaped_quote(words.next()?.strip_prefix(b"\"")?)?;
        let (user_agent, rest) = split_field(rest)?;
        let (_cipher, rest) = split_field(rest)?;
        let (_protocol, rest) = split_field(rest)?;
        let (_target_group, rest) = split_field(rest)?;
        let (trace_id, rest) = split_field(rest)?;
        // The domain, the certificate and the priority of the rule precede the time.
        let rest = (0..3).try_fold(rest, |rest, _| Some(split_field(rest)?.1));
        let creation_time = rest.and_then(|rest| Some(split_field(rest)?.0));
        let duration_us = parse_duration_us(times);
        let (end_us, has_whole_second_time) = parse_rfc3339(end_time)?;
        let arrival_us = creation_time
            .and_then(parse_rfc3339)
            .map(|(at_us, _)| at_us)
            .unwrap_or_else(|| end_us.saturating_sub(duration_us.unwrap_or_default()));
        let Some((method, url)) = parse_request_line(request).filter(|(name, _)| *name != b"-")
        else {
            return Some(ParsedLine::Other);
        };
        let (host, target) = split_url(url)?;
        let mut headers = ParsedHeaders::new();
        push_header_values(&mut headers, &self.user_agent_headers, user_agent);
        push_header_values(&mut headers, &self.trace_id_headers, trace_id);
        Some(ParsedLine::Request(ParsedRequest {
            arrival_us,
            has_whole_second_time,
            duration_us,
            peer: parse_address(client),
            status: parse_number(status).unwrap_or_default(),
            method: method.into(),
            target: unescape_field(target),
            host: host.into(),
            headers,
        }))
    }
}

/// Sums the three durations in seconds. A duration of -1 means that the request did not get so far.
fn parse_duration_us(times: [&[u8]; 3]) -> Option<u64> {
    let seconds = times
        .into_iter()
        .map(parse_number::<f64>)
        .sum::<Option<f64>>()?;
    seconds_to_micros(seconds)
}

/// Splits `https://host:443/path?query` into host with port and target.
fn split_url(url: &[u8]) -> Option<(&[u8], &[u8])> {
    let start = memchr::memmem::find(url, b"://")? + 3;
    let rest = url.get(start..)?;
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?'));
    match end.and_then(|end| rest.split_at_checked(end)) {
        Some((host, target)) => Some((host, target)),
        None => Some((rest, b"/")),
    }
}
