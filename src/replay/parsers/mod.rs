//! Parses one line of an access log into a request.
//!
//! A [`LineParser`] is created once per log for the headers that the policies need, and borrows
//! from the line where possible.

mod clf;
mod envoy;
mod json;
mod timestamps;

use http::HeaderName;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

/// Access log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLogFormat {
    /// `combined`, `common` and `vhost_combined` of nginx and Apache, and the text format of
    /// Traefik. More quoted fields may follow.
    Combined,
    /// Envoy's default text format.
    Envoy,
    EnvoyJson,
    TraefikJson,
    Caddy,
    Tidegate,
    /// Any other JSON with one object per line. Field names are those of nginx variables, or common
    /// alternatives.
    Json,
}

/// Result of parsing one line.
#[derive(Debug)]
pub(super) enum ParsedLine<'l> {
    Request(ParsedRequest<'l>),
    /// A record without a request: a connection that sent none, or another log event.
    Other,
    Broken,
}

/// The fields of a logged request.
#[derive(Debug)]
pub(super) struct ParsedRequest<'l> {
    /// Arrival time in µs since the Unix epoch, as precise as the log records it.
    pub(super) arrival_us: u64,
    /// The logged time has no fraction of a second.
    pub(super) has_whole_second_time: bool,
    /// Time from the arrival to the end of the response (µs).
    pub(super) duration_us: Option<u64>,
    /// Address of the TCP peer.
    pub(super) peer: Option<IpAddr>,
    /// Response status; 0 if the log has none.
    pub(super) status: u16,
    pub(super) method: Cow<'l, [u8]>,
    /// Path and query.
    pub(super) target: Cow<'l, [u8]>,
    /// Host as logged, possibly with a port; empty if the log has none.
    pub(super) host: Cow<'l, [u8]>,
    /// The required headers that the line contains, by index in [`RequiredHeaders`].
    pub(super) headers: ParsedHeaders<'l>,
}

pub(super) type ParsedHeaders<'l> = SmallVec<[(u16, Cow<'l, [u8]>); 2]>;

/// The headers that the policies read, and the log fields mapped to them.
#[derive(Clone, Debug, Default)]
pub(super) struct RequiredHeaders {
    names: Vec<HeaderName>,
    /// Index in `names`, and the log field.
    field_mappings: Vec<(u16, Box<str>)>,
}

impl RequiredHeaders {
    /// `field_mappings` are pairs of a header and the log field that holds its value.
    pub(super) fn new<'n>(
        names: impl Iterator<Item = &'n HeaderName>,
        field_mappings: &'n [(HeaderName, String)],
    ) -> Self {
        let mut required = Self::default();
        for name in names.chain(field_mappings.iter().map(|(name, _)| name)) {
            if !required.names.contains(name) {
                required.names.push(name.clone());
            }
        }
        // Sorted, because the policy table has no stable order and reports must be reproducible.
        required.names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        required.names.truncate(usize::from(u16::MAX));
        required.field_mappings = field_mappings
            .iter()
            .filter_map(|(name, field)| {
                Some((required.header_index(name.as_str())?, field.as_str().into()))
            })
            .collect();
        required
    }

    pub(super) fn names(&self) -> &[HeaderName] {
        &self.names
    }

    fn header_index(&self, name: &str) -> Option<u16> {
        let at = self
            .names
            .iter()
            .position(|required| required.as_str() == name)?;
        u16::try_from(at).ok()
    }

    /// Returns the headers that are mapped to `field`. Adds `default_header` unless that header is
    /// mapped to another field.
    fn indices_for_field(&self, field: &str, default_header: Option<&str>) -> SmallVec<[u16; 1]> {
        let mapped = self
            .field_mappings
            .iter()
            .filter(|(_, mapped_field)| **mapped_field == *field)
            .map(|(place, _)| *place);
        let default_index = default_header.and_then(|own| self.header_index(own));
        let default_index =
            default_index.filter(|own| !self.field_mappings.iter().any(|(place, _)| place == own));
        mapped.chain(default_index).collect()
    }
}

/// Parses the lines of one log.
#[derive(Debug)]
pub(super) enum LineParser {
    Combined(clf::ClfLineParser),
    Envoy(envoy::EnvoyLineParser),
    Json(json::JsonLineParser),
}

impl LineParser {
    pub(super) fn new(format: AccessLogFormat, required_headers: &RequiredHeaders) -> Self {
        match format {
            AccessLogFormat::Combined => Self::Combined(clf::ClfLineParser::new(required_headers)),
            AccessLogFormat::Envoy => Self::Envoy(envoy::EnvoyLineParser::new(required_headers)),
            AccessLogFormat::EnvoyJson => Self::Json(json::JsonLineParser::new(
                &json::ENVOY_SCHEMA,
                required_headers,
            )),
            AccessLogFormat::TraefikJson => Self::Json(json::JsonLineParser::new(
                &json::TRAEFIK_SCHEMA,
                required_headers,
            )),
            AccessLogFormat::Caddy => Self::Json(json::JsonLineParser::new(
                &json::CADDY_SCHEMA,
                required_headers,
            )),
            AccessLogFormat::Tidegate => Self::Json(json::JsonLineParser::new(
                &json::TIDEGATE_SCHEMA,
                required_headers,
            )),
            AccessLogFormat::Json => Self::Json(json::JsonLineParser::new(
                &json::NGINX_SCHEMA,
                required_headers,
            )),
        }
    }

    /// Parses a line without its line ending.
    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> ParsedLine<'l> {
        match self {
            Self::Combined(parser) => parser.parse_line(line),
            Self::Envoy(parser) => parser.parse_line(line),
            Self::Json(parser) => parser.parse_line(line),
        }
    }
}

impl AccessLogFormat {
    pub const ALL: [Self; 7] = [
        Self::Combined,
        Self::Envoy,
        Self::Tidegate,
        Self::TraefikJson,
        Self::Caddy,
        Self::EnvoyJson,
        Self::Json,
    ];

    /// Returns the name used by `--format`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Combined => "combined",
            Self::Envoy => "envoy",
            Self::EnvoyJson => "envoy-json",
            Self::TraefikJson => "traefik-json",
            Self::Caddy => "caddy",
            Self::Tidegate => "tidegate",
            Self::Json => "json",
        }
    }

    /// Returns whether the format records the query string.
    pub fn records_query(self) -> bool {
        self != Self::Tidegate
    }

    /// Returns the format that parses the most lines as requests. Among equals, the first in
    /// [`Self::ALL`], which lists strict formats first, wins. Returns `None` if no format parses
    /// any line.
    pub(super) fn detect<'l>(lines: impl Iterator<Item = &'l [u8]> + Clone) -> Option<Self> {
        let count_requests = |format: Self| {
            let mut parser = LineParser::new(format, &RequiredHeaders::default());
            lines
                .clone()
                .filter(|line| matches!(parser.parse_line(line), ParsedLine::Request(_)))
                .count()
        };
        let counted = Self::ALL
            .into_iter()
            .map(|format| (count_requests(format), format));
        // `max_by_key` returns the last of equal elements.
        let (count, format) = counted.rev().max_by_key(|(count, _)| *count)?;
        (count > 0).then_some(format)
    }
}

impl fmt::Display for AccessLogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Splits `METHOD TARGET PROTOCOL` into method and target. Returns `None` for any other text.
fn parse_request_line(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let method_end = memchr::memchr(b' ', text)?;
    let (method, rest) = text.split_at_checked(method_end)?;
    let rest = rest.get(1..)?;
    // HTTP/0.9 requests and some logs have no protocol. The target may contain spaces, because some
    // servers accept them.
    let target = match memchr::memrchr(b' ', rest) {
        Some(at) if rest.get(at + 1..)?.starts_with(b"HTTP/") => rest.get(..at)?,
        _ => rest,
    };
    let is_method = !method.is_empty()
        && method
            .iter()
            .all(|byte| byte.is_ascii_uppercase() || *byte == b'-');
    (is_method && !target.is_empty()).then_some((method, target))
}

/// Parses an IP address with an optional port.
fn parse_address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    let parsed = bare.parse().ok();
    parsed.or_else(|| {
        text.parse::<std::net::SocketAddr>()
            .ok()
            .map(|address| address.ip())
    })
}

/// Unescapes a quoted field: nginx writes `\xHH`; Apache writes `\"`, `\\`, `\n` and `\xhh`.
fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr::memchr(b'\\', text) else {
        return Cow::Borrowed(text);
    };
    let (plain, mut rest) = text.split_at_checked(first).unwrap_or((text, &[]));
    let mut out = plain.to_vec();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'\\' {
            out.push(*byte);
            continue;
        }
        let hex = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
        match tail {
            [b'x' | b'X', high, low, after @ ..] if hex(&[*high, *low]).is_some() => {
                out.extend(hex(&[*high, *low]));
                rest = after;
            }
            [sign, after @ ..] => {
                out.push(match sign {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                });
                rest = after;
            }
            [] => out.push(b'\\'),
        }
    }
    Cow::Owned(out)
}

/// Splits at the next quote that no backslash escapes. Returns the text before and after the quote.
fn split_at_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut from = 0;
    loop {
        let at = from + memchr::memchr(b'"', text.get(from..)?)?;
        let before = text.get(..at)?;
        let slashes = before
            .iter()
            .rev()
            .take_while(|byte| **byte == b'\\')
            .count();
        if slashes % 2 == 0 {
            return Some((before, text.get(at + 1..)?));
        }
        from = at + 1;
    }
}

/// Returns `None` for an empty field or `-`.
fn present_value(text: &[u8]) -> Option<&[u8]> {
    Some(text).filter(|text| !text.is_empty() && *text != b"-")
}

fn parse_number(text: &[u8]) -> Option<u64> {
    str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests;
