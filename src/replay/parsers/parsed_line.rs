//! The result of parsing one log line.

use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;

/// Result of parsing one line.
#[derive(Debug)]
pub(in super::super) enum ParsedLine<'l> {
    Request(ParsedRequest<'l>),
    /// A record without a request: a connection that sent none, or another log event.
    Other,
    Broken,
}

/// The fields of a logged request.
#[derive(Debug)]
pub(in super::super) struct ParsedRequest<'l> {
    /// Arrival time in µs since the Unix epoch, as precise as the log records it.
    pub(in super::super) arrival_us: u64,
    /// Whether the logged time has no fraction of a second.
    pub(in super::super) has_whole_second_time: bool,
    /// Time from the arrival to the end of the response (µs).
    pub(in super::super) duration_us: Option<u64>,
    /// Address of the TCP peer.
    pub(in super::super) peer: Option<IpAddr>,
    /// Response status; 0 if the log has none.
    pub(in super::super) status: u16,
    pub(in super::super) method: Cow<'l, [u8]>,
    /// Path and query of the request.
    pub(in super::super) target: Cow<'l, [u8]>,
    /// Host as logged, possibly with a port; empty if the log has none.
    pub(in super::super) host: Cow<'l, [u8]>,
    /// The required headers that the line contains, by index in `RequiredHeaders`.
    pub(in super::super) headers: ParsedHeaders<'l>,
}

pub(in super::super) type ParsedHeaders<'l> = SmallVec<[(u16, Cow<'l, [u8]>); 2]>;
