//! Parses logs with one JSON object per line.

use super::RequiredFields;
use super::fields::present_value;
use super::parsed_request::FieldKind::{
    self, ArrivalTime, Duration, EndTime, Host, Method, Peer, Query, RequestLine, Status, Target,
};
use super::parsed_request::{ParsedLine, ParsedRequest};
use super::timestamps::LogTimeParser;
use serde_json::Value;
use std::borrow::Cow;

/// Field names of one JSON log format. A field is a path of names separated by dots.
#[derive(Debug)]
pub(super) struct JsonLogSchema {
    /// The fields of each kind, separated by spaces. The first that is present and valid is used.
    /// Of two entries of one kind, the later takes precedence.
    fields: &'static [(FieldKind, &'static str)],
    /// Fields of a header, with its name as `{name}`, `{Name}` (words in upper case) or `{na_me}`.
    header_fields: &'static [&'static str],
    /// Whether the last address in `X-Forwarded-For` is the peer address.
    peer_from_forwarded_for: bool,
    /// Field and value that mark a record as a request.
    record_marker: Option<(&'static str, &'static str)>,
}

const NO_FIELDS: JsonLogSchema = JsonLogSchema {
    fields: &[],
    header_fields: &[],
    peer_from_forwarded_for: false,
    record_marker: None,
};

pub(super) static TIDEGATE_SCHEMA: JsonLogSchema = JsonLogSchema {
    fields: &[
        (EndTime(1), "timestamp"),
        (Method, "method"),
        (Target, "path"),
        (Host, "host"),
        (Peer, "client_ip"),
        (Status, "status"),
        (Duration(1000), "head_ms"),
    ],
    header_fields: &["{name}"],
    record_marker: Some(("target", "access")),
    ..NO_FIELDS
};

pub(super) static TRAEFIK_SCHEMA: JsonLogSchema = JsonLogSchema {
    fields: &[
        (EndTime(1), "time"),
        (ArrivalTime(1), "StartUTC StartLocal"),
        (Method, "RequestMethod"),
        (Target, "RequestPath"),
        (Host, "RequestHost RequestAddr"),
        (Peer, "ClientHost ClientAddr"),
        (Status, "DownstreamStatus"),
        (Duration(1_000_000_000), "Duration"),
    ],
    header_fields: &["request_{Name}"],
    ..NO_FIELDS
};

pub(super) static CADDY_SCHEMA: JsonLogSchema = JsonLogSchema {
    fields: &[
        (EndTime(1), "ts"),
        (Method, "request.method"),
        (Target, "request.uri"),
        (Host, "request.host"),
        (Peer, "request.remote_ip request.remote_addr"),
        (Status, "status"),
        (Duration(1), "duration"),
    ],
    header_fields: &["request.headers.{Name}"],
    ..NO_FIELDS
};

pub(super) static ENVOY_SCHEMA: JsonLogSchema = JsonLogSchema {
    fields: &[
        (ArrivalTime(1), "start_time"),
        (Method, "method"),
        (Target, "path x_envoy_original_path x-envoy-origin-path"),
        (Host, "authority :authority"),
        (
            Peer,
            "downstream_direct_remote_address downstream_remote_address",
        ),
        (Status, "response_code"),
        (Duration(1000), "duration"),
    ],
    header_fields: &["{na_me}", "{name}"],
    peer_from_forwarded_for: true,
    ..NO_FIELDS
};

pub(super) static GENERIC_SCHEMA: JsonLogSchema = JsonLogSchema {
    fields: &[
        (
            EndTime(1),
            "msec time_iso8601 time_local time timestamp @timestamp ts",
        ),
        (Method, "request_method method"),
        (Target, "request_uri uri path url"),
        (Query, "args query_string"),
        (RequestLine, "request"),
        (Host, "host http_host server_name"),
        (Peer, "remote_addr remote_ip client_ip"),
        (Status, "status"),
        (Duration(1), "request_time"),
    ],
    header_fields: &["http_{na_me}", "{name}"],
    ..NO_FIELDS
};

/// Returns `X-User-Id` for `x-user-id`.
fn capitalize_header_name(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let (first, rest) = word.split_at_checked(1).unwrap_or_default();
        first.to_ascii_uppercase() + rest
    });
    words.collect::<Vec<_>>().join("-")
}

#[derive(Debug)]
pub(crate) struct JsonLineParser {
    schema: &'static JsonLogSchema,
    times: LogTimeParser,
    /// Indices of headers and mapped sources, each with its fields.
    headers: Vec<(u16, Vec<Box<str>>)>,
    forwarded_for_index: Option<u16>,
}

impl JsonLineParser {
    pub(super) fn new(schema: &'static JsonLogSchema, required_fields: &RequiredFields) -> Self {
        let fields_of_header = |place: u16, name: &str| {
            let mappings = required_fields.field_mappings.iter();
            let mapped = mappings.filter(|(at, _)| *at == place);
            let mapped: Vec<Box<str>> = mapped.map(|(_, field)| field.clone()).collect();
            if !mapped.is_empty() {
                return mapped;
            }
            let own = schema.header_fields.iter().map(|field| {
                let field = field.replace("{name}", name);
                let field = field.replace("{na_me}", &name.replace('-', "_"));
                field
                    .replace("{Name}", &capitalize_header_name(name))
                    .into()
            });
            own.collect()
        };
        let headers = (0..)
            .zip(&required_fields.names)
            .map(|(place, name)| (place, fields_of_header(place, name)));
        Self {
            schema,
            times: LogTimeParser::default(),
            headers: headers.collect(),
            forwarded_for_index: required_fields.header_index("x-forwarded-for"),
        }
    }

    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let record: Value = serde_json::from_slice(line).ok()?;
        let text_at = |path: &str| value_at(&record, path).and_then(present_scalar_text);
        if let Some((field, expected)) = self.schema.record_marker
            && text_at(field).as_deref() != Some(expected.as_bytes())
        {
            return record.is_object().then_some(ParsedLine::Other);
        }
        let mut request = ParsedRequest::default();
        for (kind, names) in self.schema.fields {
            let mut texts = names.split(' ').filter_map(text_at);
            texts.find_map(|text| request.read_field(*kind, text, &mut self.times));
        }
        for (place, fields) in &self.headers {
            let values = fields
                .iter()
                .find_map(|field| header_values(&record, field));
            let values = values.into_iter().flatten();
            request.headers.extend(values.map(|value| (*place, value)));
        }
        if self.schema.peer_from_forwarded_for
            && request.facts.peer.is_none()
            && let Some(addresses) =
                text_at("x_forwarded_for").or_else(|| text_at("x-forwarded-for"))
        {
            request.read_forwarded_peer(&addresses, self.forwarded_for_index);
        }
        request.finish()
    }
}

/// Returns the value at a path of names. A name may itself contain dots.
fn value_at<'v>(record: &'v Value, path: &str) -> Option<&'v Value> {
    record.get(path).or_else(|| {
        let mut dots = path.match_indices('.');
        dots.find_map(|(dot, _)| value_at(record.get(path.get(..dot)?)?, path.get(dot + 1..)?))
    })
}

/// Returns a string, number or boolean as text; `None` if it is absent, empty or `-`.
fn present_scalar_text<'l>(value: &Value) -> Option<Cow<'l, [u8]>> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
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
