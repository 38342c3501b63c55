//! The request that the fields of one line make.

use super::fields::{
    parse_address, parse_number, parse_request_line, split_request_line, split_url, split_word,
    unescape_field,
};
use super::timestamps::{LogTimeParser, seconds_to_micros};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;

/// Result of parsing one line.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "most lines are requests, and a box allocates"
)]
pub(crate) enum ParsedLine<'l> {
    Request(ParsedRequest<'l>),
    /// A record without a request: a connection that sent none, or another log event.
    Other,
    Broken,
}

/// What a log says about a request, beside its texts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestFacts {
    /// Arrival time in µs since the Unix epoch, as precise as the log records it.
    pub(crate) arrival_us: u64,
    /// Whether the logged time has no fraction of a second.
    pub(crate) has_whole_second_time: bool,
    /// Time from the arrival to the end of the response (µs).
    pub(crate) duration_us: Option<u64>,
    /// Address of the TCP peer.
    pub(crate) peer: Option<IpAddr>,
    /// Response status; 0 if the log has none.
    pub(crate) status: u16,
}

/// A logged request. Absent texts are empty.
#[derive(Debug, Default)]
pub(crate) struct ParsedRequest<'l> {
    pub(crate) facts: RequestFacts,
    pub(crate) method: Cow<'l, [u8]>,
    /// Path and query of the request.
    pub(crate) target: Cow<'l, [u8]>,
    /// Host as logged, possibly with a port.
    pub(crate) host: Cow<'l, [u8]>,
    /// The values of required fields, mostly headers, by index in `RequiredFields`.
    pub(crate) headers: ParsedHeaders<'l>,
    /// Time in µs since the Unix epoch, and whether it has no fraction of a second.
    time: Option<(u64, bool)>,
    /// Whether the time is that of the end of the response.
    is_end_time: bool,
    duration_s: Option<f64>,
    /// `METHOD TARGET PROTOCOL`, used without a separate method and target.
    request_line: Option<Cow<'l, [u8]>>,
    /// The query, without its question mark.
    query: Cow<'l, [u8]>,
}

pub(crate) type ParsedHeaders<'l> = SmallVec<[(u16, Cow<'l, [u8]>); 2]>;

/// What a field of a log holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldKind {
    /// Time of the arrival or of the end of the response. A number is the time since the Unix
    /// epoch, in this many parts of a second.
    ArrivalTime(u32),
    EndTime(u32),
    RequestLine,
    /// A request line with a URL as target, which contains the host.
    UrlRequestLine,
    Method,
    Target,
    /// Query with or without its question mark.
    Query,
    Peer,
    Host,
    Status,
    /// Duration in this many parts of a second.
    Duration(u32),
    /// Duration that is added to the one before. A negative sum means that there is none.
    AddedDuration(u32),
    /// `[vhost:port ]peer ident user`. Its headers hold the user.
    ClientFields,
    /// A list of addresses that ends with the peer. Its headers hold those before.
    ForwardedFor,
    /// Words, the next to last of which is a duration in milliseconds.
    EnvoyCounts,
    /// A type of connection, as the first word of every line of an AWS load balancer.
    AlbConnectionType,
    /// A cookie with the name after `cookie_`.
    Cookie,
    /// A header, or nothing that the replay needs.
    Other,
}

const ALB_CONNECTION_TYPES: [&[u8]; 6] = [b"http", b"https", b"h2", b"grpcs", b"ws", b"wss"];

impl<'l> ParsedRequest<'l> {
    /// Reads a field of a text line, with its escapes. Returns the value for its headers, or `None`
    /// if the line is invalid.
    pub(super) fn read_text(
        &mut self,
        kind: FieldKind,
        text: &'l [u8],
        times: &mut LogTimeParser,
    ) -> Option<&'l [u8]> {
        match kind {
            FieldKind::ClientFields => {
                let (host, peer, user) = split_client_fields(text)?;
                (self.host, self.facts.peer) = (host.into(), parse_address(peer));
                return Some(user);
            }
            FieldKind::ForwardedFor => {
                let (before, peer) = split_last_address(text);
                self.facts.peer = peer;
                return Some(before);
            }
            FieldKind::UrlRequestLine => match parse_request_line(text) {
                Some((method, url)) => {
                    let (host, target) = split_url(url)?;
                    (self.method, self.host) = (method.into(), host.into());
                    self.target = unescape_field(target);
                }
                None => self.request_line = Some(text.into()),
            },
            FieldKind::Other | FieldKind::Cookie => {}
            _ => self.read_field(kind, unescape_field(text), times)?,
        }
        Some(text)
    }

    /// Reads a field without escapes. Returns `None` if a time or status is invalid.
    pub(super) fn read_field(
        &mut self,
        kind: FieldKind,
        text: Cow<'l, [u8]>,
        times: &mut LogTimeParser,
    ) -> Option<()> {
        let seconds = |parts: u32| {
            let digits = text.strip_suffix(b"ms").unwrap_or(&text);
            parse_number::<f64>(digits).map(|number| number / f64::from(parts))
        };
        match kind {
            FieldKind::ArrivalTime(parts) | FieldKind::EndTime(parts) => {
                self.time = Some(times.parse(&text, parts)?);
                self.is_end_time = matches!(kind, FieldKind::EndTime(_));
            }
            FieldKind::Duration(parts) => self.duration_s = seconds(parts),
            FieldKind::AddedDuration(parts) => {
                self.duration_s = self
                    .duration_s
                    .zip(seconds(parts))
                    .map(|(sum, more)| sum + more);
            }
            FieldKind::EnvoyCounts => {
                let words = text.split(|byte| *byte == b' ');
                let mut from_end = words.filter(|word| !word.is_empty()).rev();
                let duration_ms = from_end.nth(1)?;
                self.duration_s = parse_number(duration_ms).map(|ms: f64| ms / 1e3);
            }
            FieldKind::RequestLine | FieldKind::UrlRequestLine => self.request_line = Some(text),
            FieldKind::Method => self.method = text,
            FieldKind::Target => self.target = text,
            FieldKind::Query => self.query = text,
            FieldKind::Peer => self.facts.peer = parse_address(&text),
            FieldKind::Host if self.host.is_empty() => self.host = text,
            FieldKind::Status => self.facts.status = parse_number(&text)?,
            FieldKind::AlbConnectionType if !ALB_CONNECTION_TYPES.contains(&&*text) => return None,
            _ => {}
        }
        Some(())
    }

    /// Reads the duration at the end of a text, such as `"…" 37ms`.
    pub(super) fn read_final_duration(&mut self, rest: &[u8]) {
        let digits = rest.strip_suffix(b"ms").unwrap_or_default();
        let start = memchr::memrchr(b' ', digits).map_or(digits.len(), |space| space + 1);
        let duration_ms = digits.get(start..).and_then(parse_number::<u32>);
        self.duration_s = duration_ms.map(|ms| f64::from(ms) / 1e3);
    }

    /// Takes the last address of `forwarded_for` as the peer.
    pub(super) fn read_forwarded_peer(&mut self, forwarded_for: &[u8], header_index: Option<u16>) {
        let (before, peer) = split_last_address(forwarded_for);
        self.facts.peer = peer;
        self.headers
            .retain(|(index, _)| Some(*index) != header_index);
        if let Some(index) = header_index.filter(|_| !before.is_empty()) {
            self.headers.push((index, before.to_vec().into()));
        }
    }

    /// Completes the request from its fields; `None` if the time or the request is missing.
    pub(super) fn finish(mut self) -> Option<ParsedLine<'l>> {
        let (time_us, has_whole_second_time) = self.time?;
        if self.method.is_empty() || self.target.is_empty() {
            match split_request_line(self.request_line.take()?) {
                Some(split) => (self.method, self.target) = split,
                None => return Some(ParsedLine::Other),
            }
        }
        let query = self.query.strip_prefix(b"?").unwrap_or(&self.query);
        if !query.is_empty() && !self.target.contains(&b'?') {
            self.target.to_mut().push(b'?');
            self.target.to_mut().extend_from_slice(query);
        }
        self.facts.has_whole_second_time = has_whole_second_time;
        self.facts.duration_us = self.duration_s.and_then(seconds_to_micros);
        // The arrival is the end minus the duration. An end in whole seconds is used unchanged,
        // because subtracting would not make it more precise.
        let is_exact_end = self.is_end_time && !has_whole_second_time;
        let elapsed_us = self.facts.duration_us.filter(|_| is_exact_end);
        self.facts.arrival_us = time_us.saturating_sub(elapsed_us.unwrap_or_default());
        Some(ParsedLine::Request(self))
    }
}

/// Splits a list of addresses at its last comma. The last address is that of the peer.
fn split_last_address(forwarded_for: &[u8]) -> (&[u8], Option<IpAddr>) {
    let comma = memchr::memrchr(b',', forwarded_for);
    let (before, peer) = match comma.and_then(|at| forwarded_for.split_at_checked(at)) {
        Some((before, peer)) => (before, peer.get(1..).unwrap_or_default()),
        None => (&[][..], forwarded_for),
    };
    (before, parse_address(peer.trim_ascii()))
}

/// Splits the text before the time into virtual host, peer and user.
fn split_client_fields(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (first, rest) = split_word(text);
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
