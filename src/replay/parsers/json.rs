//! Parses logs with one JSON object per line.

use super::fields::{parse_address, parse_number, present_value};
use super::logged_fields::LoggedFields;
use super::parsed_line::{ParsedHeaders, ParsedLine};
use super::required_headers::RequiredHeaders;
use super::timestamps::{ClfTimeParser, epoch_seconds_to_micros, parse_rfc3339, seconds_to_micros};
use serde_json::Value;
use std::borrow::Cow;

/// Field names of one JSON log format. A field is a path of names separated by dots. Of several
/// alternative fields, the first that is present is used.
#[derive(Debug)]
pub(super) struct JsonLogSchema {
    /// Time fields, and whether each is the time of the end of the request.
    time: &'static [(&'static str, bool)],
    method: &'static [&'static str],
    target: &'static [&'static str],
    query: &'static [&'static str],
    /// `METHOD TARGET PROTOCOL`, used if the record has no separate method and target.
    request: &'static [&'static str],
    host: &'static [&'static str],
    peer: &'static [&'static str],
    status: &'static [&'static str],
    /// Duration fields, each with its unit in microseconds.
    duration: &'static [(&'static str, f64)],
    /// Returns the field names of a header.
    header_fields: fn(&str) -> Vec<String>,
    /// Whether the last address in `X-Forwarded-For` is the peer address.
    peer_from_forwarded_for: bool,
    /// Field and value that mark a record as a request.
    record_marker: Option<(&'static str, &'static str)>,
}

/// The access log of tidegate. The other formats are described by what differs.
const TIDEGATE: JsonLogSchema = JsonLogSchema {
    time: &[("timestamp", true)],
    method: &["method"],
    target: &["path"],
    query: &[],
    request: &[],
    host: &["host"],
    peer: &["client_ip"],
    status: &["status"],
    duration: &[("head_ms", 1e3)],
    header_fields: |name| vec![name.to_owned()],
    peer_from_forwarded_for: false,
    record_marker: None,
};

pub(super) static TIDEGATE_SCHEMA: JsonLogSchema = JsonLogSchema {
    record_marker: Some(("target", "access")),
    ..TIDEGATE
};

pub(super) static TRAEFIK_SCHEMA: JsonLogSchema = JsonLogSchema {
    time: &[("StartUTC", false), ("StartLocal", false), ("time", true)],
    method: &["RequestMethod"],
    target: &["RequestPath"],
    host: &["RequestHost", "RequestAddr"],
    peer: &["ClientHost", "ClientAddr"],
    status: &["DownstreamStatus"],
    duration: &[("Duration", 1e-3)],
    header_fields: |name| vec![format!("request_{}", capitalize_header_name(name))],
    ..TIDEGATE
};

pub(super) static CADDY_SCHEMA: JsonLogSchema = JsonLogSchema {
    time: &[("ts", true)],
    method: &["request.method"],
    target: &["request.uri"],
    host: &["request.host"],
    peer: &["request.remote_ip", "request.remote_addr"],
    duration: &[("duration", 1e6)],
    header_fields: |name| vec![format!("request.headers.{}", capitalize_header_name(name))],
    ..TIDEGATE
};

pub(super) static ENVOY_SCHEMA: JsonLogSchema = JsonLogSchema {
    time: &[("start_time", false)],
    target: &["path", "x_envoy_original_path", "x-envoy-origin-path"],
    host: &["authority", ":authority"],
    peer: &[
        "downstream_direct_remote_address",
        "downstream_remote_address",
    ],
    status: &["response_code"],
    duration: &[("duration", 1e3)],
    header_fields: |name| vec![name.replace('-', "_"), name.to_owned()],
    peer_from_forwarded_for: true,
    ..TIDEGATE
};

pub(super) static GENERIC_SCHEMA: JsonLogSchema = JsonLogSchema {
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
    duration: &[("request_time", 1e6)],
    header_fields: |name| vec![format!("http_{}", name.replace('-', "_")), name.to_owned()],
    ..TIDEGATE
};

/// Returns `X-User-Id` for `x-user-id`.
fn capitalize_header_name(name: &str) -> String {
    let mut starts_word = true;
    let letters = name.chars().map(|letter| {
        let letter = if starts_word {
            letter.to_ascii_uppercase()
        } else {
            letter
        };
        starts_word = letter == '-';
        letter
    });
    letters.collect()
}

#[derive(Debug)]
pub(crate) struct JsonLineParser {
    schema: &'static JsonLogSchema,
    clf_time_parser: ClfTimeParser,
    /// Header indices, each with the fields of that header.
    headers: Vec<(u16, Vec<Box<str>>)>,
    forwarded_for_index: Option<u16>,
}

impl JsonLineParser {
    pub(super) fn new(schema: &'static JsonLogSchema, required_headers: &RequiredHeaders) -> Self {
        let fields_of_header = |place: u16, name: &str| {
            let mappings = required_headers.field_mappings.iter();
            let mapped = mappings.filter(|(at, _)| *at == place);
            let mapped: Vec<Box<str>> = mapped.map(|(_, field)| field.clone()).collect();
            match mapped.is_empty() {
                true => (schema.header_fields)(name)
                    .into_iter()
                    .map(Into::into)
                    .collect(),
                false => mapped,
            }
        };
        let headers = (0..)
            .zip(&required_headers.names)
            .map(|(place, name)| (place, fields_of_header(place, name.as_str())));
        Self {
            schema,
            clf_time_parser: ClfTimeParser::new(),
            headers: headers.collect(),
            forwarded_for_index: required_headers.header_index("x-forwarded-for"),
        }
    }

    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let record: Value = serde_json::from_slice(line).ok()?;
        match self.schema.record_marker {
            Some((field, expected))
                if text_at(&record, field).as_deref() != Some(expected.as_bytes()) =>
            {
                record.is_object().then_some(ParsedLine::Other)
            }
            _ => self.parse_request(&record),
        }
    }

    fn parse_request<'l>(&mut self, record: &Value) -> Option<ParsedLine<'l>> {
        let schema = self.schema;
        let duration_us = schema
            .duration
            .iter()
            .find_map(|(field, unit)| Some(parse_duration_value(value_at(record, field)?)? * unit));
        let (time, is_end_time) = schema.time.iter().find_map(|(field, is_end)| {
            let time = self.parse_time(value_at(record, field)?)?;
            Some((time, *is_end))
        })?;
        let first_text = |fields: &[&str]| fields.iter().find_map(|field| text_at(record, field));
        let mut headers = ParsedHeaders::new();
        for (place, fields) in &self.headers {
            if let Some(values) = fields.iter().find_map(|field| header_values(record, field)) {
                headers.extend(values.into_iter().map(|value| (*place, value)));
            }
        }
        let mut peer = first_text(schema.peer).and_then(|peer| parse_address(&peer));
        if schema.peer_from_forwarded_for && peer.is_none() {
            peer = self.take_peer_from_forwarded_for(record, &mut headers);
        }
        let fields = LoggedFields {
            time: Some(time),
            is_end_time,
            duration_us: duration_us.and_then(|us| seconds_to_micros(us / 1e6)),
            request_line: first_text(schema.request),
            method: first_text(schema.method),
            target: first_text(schema.target),
            query: first_text(schema.query),
            peer,
            host: first_text(schema.host),
            status: first_text(schema.status).and_then(|status| parse_number(&status)),
            headers,
        };
        fields.into_request()
    }

    fn parse_time(&mut self, value: &Value) -> Option<(u64, bool)> {
        match value {
            Value::Number(seconds) => epoch_seconds_to_micros(seconds.as_f64()?),
            Value::String(text) => parse_rfc3339(text.as_bytes())
                .or_else(|| Some((self.clf_time_parser.parse(text.as_bytes())?, true)))
                .or_else(|| epoch_seconds_to_micros(text.parse().ok()?)),
            _ => None,
        }
    }

    /// Removes the last address from `X-Forwarded-For` and returns it.
    fn take_peer_from_forwarded_for(
        &self,
        record: &Value,
        headers: &mut ParsedHeaders<'_>,
    ) -> Option<std::net::IpAddr> {
        let forwarded =
            text_at(record, "x_forwarded_for").or_else(|| text_at(record, "x-forwarded-for"))?;
        let start = memchr::memrchr(b',', &forwarded).map_or(0, |comma| comma + 1);
        headers.retain(|(place, _)| Some(*place) != self.forwarded_for_index);
        if let (Some(place), Some(before @ [_, ..])) = (
            self.forwarded_for_index,
            forwarded.get(..start.saturating_sub(1)),
        ) {
            headers.push((place, before.to_vec().into()));
        }
        parse_address(forwarded.get(start..)?.trim_ascii())
    }
}

/// Returns the value at a path of names. A name may itself contain dots.
fn value_at<'v>(record: &'v Value, path: &str) -> Option<&'v Value> {
    record.get(path).or_else(|| {
        let mut dots = path.match_indices('.');
        dots.find_map(|(dot, _)| value_at(record.get(path.get(..dot)?)?, path.get(dot + 1..)?))
    })
}

/// Returns the string or number at a path as text; `None` if the value is absent, empty or `-`.
fn text_at<'l>(record: &Value, path: &str) -> Option<Cow<'l, [u8]>> {
    present_scalar_text(value_at(record, path)?)
}

fn present_scalar_text<'l>(value: &Value) -> Option<Cow<'l, [u8]>> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    present_value(text.as_bytes())
        .is_some()
        .then(|| text.into_bytes().into())
}

/// Returns the values of a header: one text, or a list of texts.
fn header_values<'l>(record: &Value, path: &str) -> Option<Vec<Cow<'l, [u8]>>> {
    let values: Vec<_> = match value_at(record, path)? {
        Value::Array(lines) => lines.iter().filter_map(present_scalar_text).collect(),
        line => present_scalar_text(line).into_iter().collect(),
    };
    (!values.is_empty()).then_some(values)
}

fn parse_duration_value(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim_end_matches("ms").parse().ok(),
        _ => None,
    }
}
