//! The fields of a line by name, as JSON and templates have them, and the request that they make.

use super::fields::split_request_line;
use super::parsed_line::{ParsedHeaders, ParsedLine, ParsedRequest};
use std::borrow::Cow;
use std::net::IpAddr;

/// The fields of one line.
#[derive(Debug, Default)]
pub(super) struct LoggedFields<'l> {
    /// Time in µs since the Unix epoch, and whether it has no fraction of a second.
    pub(super) time: Option<(u64, bool)>,
    /// Whether the time is that of the end of the response.
    pub(super) is_end_time: bool,
    pub(super) duration_us: Option<u64>,
    /// `METHOD TARGET PROTOCOL`, used without a separate method and target.
    pub(super) request_line: Option<Cow<'l, [u8]>>,
    pub(super) method: Option<Cow<'l, [u8]>>,
    pub(super) target: Option<Cow<'l, [u8]>>,
    /// The query, without its question mark.
    pub(super) query: Option<Cow<'l, [u8]>>,
    pub(super) peer: Option<IpAddr>,
    pub(super) host: Option<Cow<'l, [u8]>>,
    pub(super) status: Option<u16>,
    pub(super) headers: ParsedHeaders<'l>,
}

impl<'l> LoggedFields<'l> {
    /// Returns the request; `None` if the time or the request is missing.
    pub(super) fn into_request(self) -> Option<ParsedLine<'l>> {
        let (time_us, has_whole_second_time) = self.time?;
        let (method, mut target) = match (self.method, self.target) {
            (Some(method), Some(target)) => (method, target),
            _ => match split_request_line(self.request_line?) {
                Some(split) => split,
                None => return Some(ParsedLine::Other),
            },
        };
        if let Some(query) = self.query.filter(|_| !target.contains(&b'?')) {
            target.to_mut().push(b'?');
            target.to_mut().extend_from_slice(&query);
        }
        // The arrival is the end minus the duration. An end in whole seconds is used unchanged,
        // because subtracting would not make it more precise.
        let is_exact_end = self.is_end_time && !has_whole_second_time;
        let elapsed_us = self.duration_us.filter(|_| is_exact_end);
        Some(ParsedLine::Request(ParsedRequest {
            arrival_us: time_us.saturating_sub(elapsed_us.unwrap_or_default()),
            has_whole_second_time,
            duration_us: self.duration_us,
            peer: self.peer,
            status: self.status.unwrap_or_default(),
            method,
            target,
            host: self.host.unwrap_or_default(),
            headers: self.headers,
        }))
    }
}
