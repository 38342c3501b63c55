//! A log format of the user's own, written as nginx (`log_format`) or Apache (`LogFormat`) writes
//! it.
//!
//! A template is literal text with fields between. A field ends where the next literal text begins;
//! between quotes, escaped quotes are part of the field. Apache's directives are translated to the
//! names of nginx variables.

use super::fields::{
    parse_address, parse_number, present_value, split_at_unescaped_quote, unescape_field,
};
use super::logged_fields::LoggedFields;
use super::parsed_line::ParsedLine;
use super::required_headers::RequiredHeaders;
use super::timestamps::{ClfTimeParser, epoch_seconds_to_micros, parse_rfc3339, seconds_to_micros};
use smallvec::SmallVec;

/// A parsed log format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineTemplate {
    fields: Vec<TemplateField>,
    /// Text after the last field.
    end: Vec<u8>,
    /// Whether times are those of the arrival, as in Apache, or of the end of the response.
    has_arrival_time: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TemplateField {
    /// Literal text before the field.
    before: Vec<u8>,
    /// Name of an nginx variable, or an unknown Apache directive.
    name: String,
}

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldKind {
    ClfTime,
    IsoTime,
    /// Time since the Unix epoch, in this many parts of a second.
    EpochTime(u32),
    RequestLine,
    Method,
    Target,
    /// Query with or without its question mark.
    Query,
    Peer,
    Host,
    Status,
    /// Duration in this many parts of a second.
    Duration(u32),
    /// A cookie with the name after `cookie_`.
    Cookie,
    /// A header, or nothing that the replay needs.
    Other,
}

impl LineTemplate {
    /// Parses a format with nginx variables (`$remote_addr`) or Apache directives (`%h`).
    ///
    /// # Errors
    /// Returns what is wrong with the format.
    pub fn parse(format: &str) -> Result<Self, String> {
        // Apache's configuration file escapes quotes.
        let format = format.replace("\\\"", "\"").replace("\\t", "\t");
        let is_nginx = format.contains('$');
        let mut template = Self {
            fields: Vec::new(),
            end: Vec::new(),
            has_arrival_time: !is_nginx,
        };
        let mut rest = format.as_str();
        while let Some(letter) = rest.chars().next() {
            let (name, after) = match (is_nginx, letter) {
                (true, '$') => split_nginx_variable(rest)?,
                (false, '%') => split_apache_directive(rest)?,
                _ => {
                    let (text, after) = rest.split_at(letter.len_utf8());
                    template.end.extend_from_slice(text.as_bytes());
                    rest = after;
                    continue;
                }
            };
            rest = after;
            match name.as_str() {
                "%" => template.end.push(b'%'),
                // Apache writes the brackets itself.
                "[time_local]" => {
                    template.end.push(b'[');
                    template.push_field("time_local".to_owned())?;
                    template.end.push(b']');
                }
                _ => template.push_field(name)?,
            }
        }
        template.check_completeness()?;
        Ok(template)
    }

    fn push_field(&mut self, name: String) -> Result<(), String> {
        let before = std::mem::take(&mut self.end);
        if before.is_empty() && !self.fields.is_empty() {
            return Err(format!(
                "the field {name:?} needs text between it and the field before it"
            ));
        }
        self.fields.push(TemplateField { before, name });
        Ok(())
    }

    /// Returns whether the format has the query string.
    pub(super) fn records_query(&self) -> bool {
        self.fields.iter().any(|field| {
            matches!(field.kind(), FieldKind::RequestLine | FieldKind::Query)
                || field.name == "request_uri"
        })
    }

    fn check_completeness(&self) -> Result<(), String> {
        use FieldKind::{ClfTime, EpochTime, IsoTime, Method, RequestLine, Target};
        let has = |wanted: &[FieldKind]| {
            let mut fields = self.fields.iter();
            fields.any(|field| wanted.contains(&field.kind()))
        };
        let epochs = [1, 1000, 1_000_000].map(EpochTime);
        if !has(&[ClfTime, IsoTime]) && !has(&epochs) {
            return Err("the format has no time: $time_local, $time_iso8601, $msec or %t".into());
        }
        let has_request = has(&[RequestLine]) || has(&[Method]) && has(&[Target]);
        if !has_request {
            return Err(
                "the format has no request: $request or %r, or $request_method and $request_uri"
                    .into(),
            );
        }
        Ok(())
    }
}

impl TemplateField {
    fn kind(&self) -> FieldKind {
        match self.name.as_str() {
            "time_local" => FieldKind::ClfTime,
            "time_iso8601" => FieldKind::IsoTime,
            "msec" | "{sec}t" => FieldKind::EpochTime(1),
            "{msec}t" => FieldKind::EpochTime(1000),
            "{usec}t" => FieldKind::EpochTime(1_000_000),
            "request" => FieldKind::RequestLine,
            "request_method" => FieldKind::Method,
            "request_uri" | "uri" => FieldKind::Target,
            "args" | "query_string" => FieldKind::Query,
            "remote_addr" => FieldKind::Peer,
            "host" | "http_host" | "server_name" => FieldKind::Host,
            "status" => FieldKind::Status,
            "request_time" => FieldKind::Duration(1),
            "{ms}T" => FieldKind::Duration(1000),
            "D" | "{us}T" => FieldKind::Duration(1_000_000),
            name if name.starts_with("cookie_") => FieldKind::Cookie,
            _ => FieldKind::Other,
        }
    }

    /// The header that the field holds, if it is one of `required_headers`.
    fn default_header<'r>(&self, required_headers: &'r RequiredHeaders) -> Option<&'r str> {
        let suffix = self.name.strip_prefix("http_")?;
        let mut names = required_headers.names.iter().map(|name| name.as_str());
        names.find(|name| name.replace('-', "_") == suffix)
    }
}

/// Splits `$name` or `${name}` off the text.
fn split_nginx_variable(text: &str) -> Result<(String, &str), String> {
    let rest = text.get(1..).unwrap_or_default();
    let (name, after) = match rest.strip_prefix('{') {
        Some(braced) => braced
            .split_once('}')
            .ok_or_else(|| format!("{text:?} has no closing brace"))?,
        None => {
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
            let end = rest.find(|letter| !is_name(letter)).unwrap_or(rest.len());
            rest.split_at(end)
        }
    };
    match name {
        "" => Err(format!("{text:?} does not begin with a variable")),
        _ => Ok((name.to_owned(), after)),
    }
}

/// Splits an Apache directive off the text. Returns the nginx variable with the same meaning, or
/// the directive without `%` and modifiers.
fn split_apache_directive(text: &str) -> Result<(String, &str), String> {
    let is_modifier = |letter: char| letter.is_ascii_digit() || "!,<>".contains(letter);
    let rest = text.get(1..).unwrap_or_default();
    let rest = rest.trim_start_matches(is_modifier);
    let (argument, rest) = match rest.strip_prefix('{') {
        Some(braced) => {
            let (argument, after) = braced
                .split_once('}')
                .ok_or_else(|| format!("{text:?} has no closing brace"))?;
            (Some(argument), after.trim_start_matches(is_modifier))
        }
        None => (None, rest),
    };
    // `^ti` and `^to` are the only directives of more than one letter.
    let length = if rest.starts_with('^') { 3 } else { 1 };
    let (letter, after) = rest
        .split_at_checked(length)
        .ok_or_else(|| format!("{text:?} does not begin with a directive"))?;
    let name = match (argument, letter) {
        (None, "h" | "a") | (Some("c"), "a") => "remote_addr".to_owned(),
        (None, "u") => "remote_user".to_owned(),
        (None, "t") => "[time_local]".to_owned(),
        (None, "r") => "request".to_owned(),
        (None, "m") => "request_method".to_owned(),
        (None, "U") => "uri".to_owned(),
        (None, "q") => "args".to_owned(),
        (None, "s") => "status".to_owned(),
        (None, "v" | "V") => "host".to_owned(),
        (None, "T") | (Some("s"), "T") => "request_time".to_owned(),
        (Some(header), "i") => format!("http_{}", header.to_ascii_lowercase().replace('-', "_")),
        (Some(cookie), "C") => format!("cookie_{cookie}"),
        (Some(argument), letter) => format!("{{{argument}}}{letter}"),
        (None, letter) => letter.to_owned(),
    };
    Ok((name, after))
}

/// Parses lines by a [`LineTemplate`].
#[derive(Debug)]
pub(crate) struct TemplateLineParser {
    fields: Vec<BoundField>,
    end: Vec<u8>,
    has_arrival_time: bool,
    clf_time_parser: ClfTimeParser,
}

/// A field with the headers that it holds.
#[derive(Debug)]
struct BoundField {
    before: Vec<u8>,
    kind: FieldKind,
    name: String,
    headers: SmallVec<[u16; 1]>,
}

impl TemplateLineParser {
    pub(super) fn new(template: &LineTemplate, required_headers: &RequiredHeaders) -> Self {
        let bind = |field: &TemplateField| {
            let kind = field.kind();
            let default_header = match kind {
                FieldKind::Cookie => Some("cookie"),
                _ => field.default_header(required_headers),
            };
            BoundField {
                before: field.before.clone(),
                kind,
                name: field.name.clone(),
                headers: required_headers.indices_for_field(&field.name, default_header),
            }
        };
        Self {
            fields: template.fields.iter().map(bind).collect(),
            end: template.end.clone(),
            has_arrival_time: template.has_arrival_time,
            clf_time_parser: ClfTimeParser::new(),
        }
    }

    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let mut found = LoggedFields {
            // nginx writes the time of the end.
            is_end_time: !self.has_arrival_time,
            ..LoggedFields::default()
        };
        let mut rest = line;
        let ends = self.fields.iter().skip(1).map(|field| &field.before);
        for (field, end) in self.fields.iter().zip(ends.chain([&self.end])) {
            rest = rest.strip_prefix(field.before.as_slice())?;
            let is_quoted = field.before.ends_with(b"\"") && end.starts_with(b"\"");
            let length = match end.as_slice() {
                [] => rest.len(),
                _ if is_quoted => split_at_unescaped_quote(rest)?.0.len(),
                end => memchr::memmem::find(rest, end)?,
            };
            let (text, after) = rest.split_at_checked(length)?;
            rest = after;
            if let Some(text) = present_value(text) {
                field.read_into(&mut found, text, &mut self.clf_time_parser)?;
            }
        }
        found.into_request()
    }
}

impl BoundField {
    /// Reads the field. Returns `None` if a time or status is invalid.
    fn read_into<'l>(
        &self,
        found: &mut LoggedFields<'l>,
        text: &'l [u8],
        clf_time_parser: &mut ClfTimeParser,
    ) -> Option<()> {
        match self.kind {
            FieldKind::ClfTime => found.time = Some((clf_time_parser.parse(text)?, true)),
            FieldKind::IsoTime => found.time = Some(parse_rfc3339(text)?),
            FieldKind::EpochTime(parts) => {
                let seconds = parse_number::<f64>(text)? / f64::from(parts);
                let (at_us, is_whole) = epoch_seconds_to_micros(seconds)?;
                found.time = Some((at_us, is_whole && parts == 1));
            }
            FieldKind::Duration(parts) => {
                let seconds = parse_number::<f64>(text).unwrap_or_default() / f64::from(parts);
                found.duration_us = Some(seconds_to_micros(seconds).unwrap_or_default());
            }
            FieldKind::RequestLine => found.request_line = Some(unescape_field(text)),
            FieldKind::Method => found.method = Some(text.into()),
            FieldKind::Target => found.target = Some(unescape_field(text)),
            FieldKind::Query => found.query = Some(text.strip_prefix(b"?").unwrap_or(text).into()),
            FieldKind::Peer => found.peer = parse_address(text),
            FieldKind::Host => found.host = found.host.take().or(Some(text.into())),
            FieldKind::Status => found.status = Some(parse_number(text)?),
            FieldKind::Cookie | FieldKind::Other => {}
        }
        for place in &self.headers {
            let value = match self.name.strip_prefix("cookie_") {
                Some(cookie) => [cookie.as_bytes(), b"=", text].concat().into(),
                None => unescape_field(text),
            };
            found.headers.push((*place, value));
        }
        Some(())
    }
}
