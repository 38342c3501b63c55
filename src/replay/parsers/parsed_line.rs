//! The result of parsing one log line.

use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;

/// Result of parsing one line.
#[derive(Debug)]
pub(crate) enum ParsedLine<'l> {
    Request(ParsedRequest<'l>),
    /// A record without a request: a connection that sent none, or another log event.
    Other,
    Broken,
}

/// The fields of a logged request.
#[derive(Debug)]
pub(crate) struct ParsedRequest<'l> {
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
    pub(crate) method: Cow<'l, [u8]>,
    /// Path and query of the request.
    pub(crate) target: Cow<'l, [u8]>,
    /// Host as logged, possibly with a port; empty if the log has none.
    pub(crate) host: Cow<'l, [u8]>,
    /// The required headers that the line contains, by index in `RequiredHeaders`.
    pub(crate) headers: ParsedHeaders<'l>,
}

pub(crate) type ParsedHeaders<'l> = SmallVec<[(u16, Cow<'l, [u8]>); 2]>;
