//! Logs with one JSON object per line.

use super::when::{ClfClock, epoch, rfc3339};
use super::{Headers, Line, Read, Wanted, address, request_line};
use serde_json::Value;
use std::borrow::Cow;

/// Where a program writes what. A field is a path of names with dots between; of several the first that is there counts.
#[derive(Debug)]
pub(super) struct Shape {
    /// The time, and whether it is that of the end.
    time: &'static [(&'static str, bool)],
    method: &'static [&'static str],
    target: &'static [&'static str],
    query: &'static [&'static str],
    /// `METHOD TARGET PROTOCOL`, if method and target stand nowhere else.
    request: &'static [&'static str],
    host: &'static [&'static str],
    peer: &'static [&'static str],
    status: &'static [&'static str],
    /// The duration, and how many microseconds its unit has.
    took: &'static [(&'static str, f64)],
    /// How a header's field is called.
    header: fn(&str) -> [String; 2],
    /// The last address in `X-Forwarded-For` is the peer's.
    forwarded_tells_peer: bool,
    /// What a record has to say to tell of a request.
    mark: Option<(&'static str, &'static str)>,
}

pub(super) static TIDEGATE: Shape = Shape {
    time: &[("timestamp", true)],
    method: &["method"],
    target: &["path"],
    query: &[],
    request: &[],
    host: &["host"],
    peer: &["client_ip"],
    status: &["status"],
    took: &[("head_ms", 1e3)],
    header: |name| [name.to_owned(), String::new()],
    forwarded_tells_peer: false,
    mark: Some(("target", "access")),
};

pub(super) static TRAEFIK: Shape = Shape {
    time: &[("StartUTC", false), ("StartLocal", false), ("time", true)],
    method: &["RequestMethod"],
    target: &["RequestPath"],
    query: &[],
    request: &[],
    host: &["RequestHost", "RequestAddr"],
    peer: &["ClientHost", "ClientAddr"],
    status: &["DownstreamStatus"],
    took: &[("Duration", 1e-3)],
    header: |name| [format!("request_{}", capitalized(name)), String::new()],
    forwarded_tells_peer: false,
    mark: None,
};

pub(super) static CADDY: Shape = Shape {
    time: &[("ts", true)],
    method: &["request.method"],
    target: &["request.uri"],
    query: &[],
    request: &[],
    host: &["request.host"],
    peer: &["request.remote_ip", "request.remote_addr"],
    status: &["status"],
    took: &[("duration", 1e6)],
    header: |name| {
        [
            format!("request.headers.{}", capitalized(name)),
            String::new(),
        ]
    },
    forwarded_tells_peer: false,
    mark: None,
};

pub(super) static ENVOY: Shape = Shape {
    time: &[("start_time", false)],
    method: &["method"],
    target: &["path", "x_envoy_original_path", "x-envoy-origin-path"],
    query: &[],
    request: &[],
    host: &["authority", ":authority"],
    peer: &[
        "downstream_direct_remote_address",
        "downstream_remote_address",
    ],
    status: &["response_code"],
    took: &[("duration", 1e3)],
    header: |name| [name.replace('-', "_"), name.to_owned()],
    forwarded_tells_peer: true,
    mark: None,
};

pub(super) static NGINX: Shape = Shape {
    time: &[
        ("msec", true),
        ("time_iso8601", true),
        ("time_local", true),
        ("time", true),
        ("timestamp", true),
        ("@timestamp", true),
        ("ts", true),
    ],
    method: &["request_method", "method"],
    target: &["request_uri", "uri", "path", "url"],
    query: &["args", "query_string"],
    request: &["request"],
    host: &["host", "http_host", "server_name"],
    peer: &["remote_addr", "remote_ip", "client_ip"],
    status: &["status"],
    took: &[("request_time", 1e6)],
    header: |name| [format!("http_{}", name.replace('-', "_")), name.to_owned()],
    forwarded_tells_peer: false,
    mark: None,
};

/// `x-user-id` as `X-User-Id`.
fn capitalized(name: &str) -> String {
    let mut starts = true;
    let letters = name.chars().map(|letter| {
        let letter = if starts {
            letter.to_ascii_uppercase()
        } else {
            letter
        };
        starts = letter == '-';
        letter
    });
    letters.collect()
}

#[derive(Debug)]
pub(in super::super) struct Parser {
    shape: &'static Shape,
    clock: ClfClock,
    /// Place of a header, and its fields.
    headers: Vec<(u16, Vec<Box<str>>)>,
    forwarded: Option<u16>,
}

impl Parser {
    pub(super) fn new(shape: &'static Shape, wanted: &Wanted) -> Self {
        let fields = |place: u16, name: &str| {
            let said = wanted
                .told
                .iter()
                .filter(|(at, _)| *at == place)
                .map(|(_, field)| field.clone());
            let said: Vec<Box<str>> = said.collect();
            let own = (shape.header)(name)
                .into_iter()
                .filter(|field| !field.is_empty());
            if said.is_empty() {
                own.map(Into::into).collect()
            } else {
                said
            }
        };
        let headers = (0..)
            .zip(&wanted.names)
            .map(|(place, name)| (place, fields(place, name.as_str())));
        Self {
            shape,
            clock: ClfClock::new(),
            headers: headers.collect(),
            forwarded: wanted.place("x-forwarded-for"),
        }
    }

    pub(super) fn read<'l>(&mut self, line: &'l [u8]) -> Read<'l> {
        let Ok(record) = serde_json::from_slice::<Value>(line) else {
            return Read::Broken;
        };
        match self.shape.mark {
            Some((field, wanted)) if text(&record, field).as_deref() != Some(wanted.as_bytes()) => {
                if record.is_object() {
                    Read::Other
                } else {
                    Read::Broken
                }
            }
            _ => self.request(&record).unwrap_or(Read::Broken),
        }
    }

    fn request<'l>(&mut self, record: &Value) -> Option<Read<'l>> {
        let shape = self.shape;
        let took_us = shape
            .took
            .iter()
            .find_map(|(field, unit)| Some(decimal(at(record, field)?)? * unit));
        let took_us = took_us.and_then(|us| {
            u64::try_from(
                std::time::Duration::try_from_secs_f64(us / 1e6)
                    .ok()?
                    .as_micros(),
            )
            .ok()
        });
        let (at_us, coarse, is_end) = shape.time.iter().find_map(|(field, is_end)| {
            let (at_us, coarse) = self.when(at(record, field)?)?;
            Some((at_us, coarse, *is_end))
        })?;
        // A whole second less a fraction is no more exact than before.
        let at_us = at_us.saturating_sub(took_us.filter(|_| is_end && !coarse).unwrap_or_default());
        let first = |fields: &[&str]| fields.iter().find_map(|field| text(record, field));
        let (method, mut target) = match (first(shape.method), first(shape.target)) {
            (Some(method), Some(target)) => (method, target),
            _ => {
                let request = first(shape.request)?;
                let (method, target) = match request_line(&request) {
                    Some((method, target)) => (method.to_vec(), target.to_vec()),
                    None => return Some(Read::Other),
                };
                (method.into(), target.into())
            }
        };
        if let Some(query) = first(shape.query).filter(|_| !target.contains(&b'?')) {
            target.to_mut().push(b'?');
            target.to_mut().extend_from_slice(&query);
        }
        let mut headers = Headers::new();
        for (place, fields) in &self.headers {
            if let Some(values) = fields.iter().find_map(|field| values(record, field)) {
                headers.extend(values.into_iter().map(|value| (*place, value)));
            }
        }
        let mut peer = first(shape.peer).and_then(|peer| address(&peer));
        if shape.forwarded_tells_peer && peer.is_none() {
            peer = self.peer_of(record, &mut headers);
        }
        let status = first(shape.status).and_then(|status| super::number(&status));
        Some(Read::Request(Line {
            at_us,
            coarse,
            took_us,
            peer,
            status: status
                .and_then(|status| u16::try_from(status).ok())
                .unwrap_or_default(),
            method,
            target,
            host: first(shape.host).unwrap_or_default(),
            headers,
        }))
    }

    fn when(&mut self, value: &Value) -> Option<(u64, bool)> {
        match value {
            Value::Number(seconds) => epoch(seconds.as_f64()?),
            Value::String(text) => rfc3339(text.as_bytes())
                .or_else(|| Some((self.clock.read(text.as_bytes())?, true)))
                .or_else(|| epoch(text.parse().ok()?)),
            _ => None,
        }
    }

    /// Takes the last address out of `X-Forwarded-For`.
    fn peer_of(&self, record: &Value, headers: &mut Headers<'_>) -> Option<std::net::IpAddr> {
        let forwarded =
            text(record, "x_forwarded_for").or_else(|| text(record, "x-forwarded-for"))?;
        let start = memchr::memrchr(b',', &forwarded).map_or(0, |comma| comma + 1);
        headers.retain(|(place, _)| Some(*place) != self.forwarded);
        if let (Some(place), Some(before @ [_, ..])) =
            (self.forwarded, forwarded.get(..start.saturating_sub(1)))
        {
            headers.push((place, before.to_vec().into()));
        }
        address(forwarded.get(start..)?.trim_ascii())
    }
}

/// The value at a path of names. A name may hold dots itself.
fn at<'v>(record: &'v Value, path: &str) -> Option<&'v Value> {
    record.get(path).or_else(|| {
        let mut dots = path.match_indices('.');
        dots.find_map(|(dot, _)| at(record.get(path.get(..dot)?)?, path.get(dot + 1..)?))
    })
}

/// A text, or a number in its digits; `None` for what is absent, empty or `-`.
fn text<'l>(record: &Value, path: &str) -> Option<Cow<'l, [u8]>> {
    plain(at(record, path)?)
}

fn plain<'l>(value: &Value) -> Option<Cow<'l, [u8]>> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    super::told(text.as_bytes())
        .is_some()
        .then(|| text.into_bytes().into())
}

/// A header's lines: one text, or a list of them.
fn values<'l>(record: &Value, path: &str) -> Option<Vec<Cow<'l, [u8]>>> {
    let values: Vec<_> = match at(record, path)? {
        Value::Array(lines) => lines.iter().filter_map(plain).collect(),
        line => plain(line).into_iter().collect(),
    };
    (!values.is_empty()).then_some(values)
}

fn decimal(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim_end_matches("ms").parse().ok(),
        _ => None,
    }
}
