//! Parses logs of text lines by the templates of their formats: those that are built in, and those
//! of the user, written as nginx (`log_format`) or Apache (`LogFormat`) writes them.
//!
//! A template is literal text with fields between. A field ends where the next literal text begins;
//! between quotes, escaped quotes are part of the field. Apache's directives are translated to the
//! names of nginx variables.

use super::RequiredFields;
use super::fields::{present_value, split_at_unescaped_quote, split_field, unescape_field};
use super::parsed_request::FieldKind::{
    self, AddedDuration, AlbConnectionType, ArrivalTime, ClientFields, Cookie, Duration, EndTime,
    EnvoyCounts, ForwardedFor, Host, Method, Other, Peer, Query, RequestLine, Status, Target,
    UrlRequestLine,
};
use super::parsed_request::{ParsedLine, ParsedRequest};
use super::timestamps::LogTimeParser;
use smallvec::SmallVec;

/// A parsed log format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineTemplate {
    fields: Vec<TemplateField>,
    /// Text after the last field.
    end: String,
    /// Position of a field that may contain the text after it. The fields after this one are
    /// matched from the end of the line.
    longest_field: Option<usize>,
    /// Fields after `end`, quoted or not, of which the line has at least `required_words`.
    words: Vec<String>,
    required_words: usize,
    /// Whether lines may end with a duration in milliseconds, as those of Traefik.
    has_final_duration: bool,
    is_built_in: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct TemplateField {
    /// Literal text before the field.
    before: String,
    /// Name of an nginx variable, or an unknown Apache directive.
    name: String,
}

/// The nginx and Apache text formats and their derivatives. Fields after the user agent are
/// `extra1`, `extra2`, …; lines of Traefik end with a duration.
pub(super) fn combined() -> LineTemplate {
    LineTemplate {
        required_words: 1,
        has_final_duration: true,
        ..built_in(
            "$remote_user[$time_local] \"$request\"",
            "status body_bytes_sent referer user_agent",
        )
    }
}

/// Envoy's default text format. It has no peer field, but Envoy appends the peer address to
/// `X-Forwarded-For` before it writes the line. Envoy escapes nothing, and clients control most
/// fields, so quotes in the user agent must not shift other fields.
pub(super) fn envoy() -> LineTemplate {
    LineTemplate {
        // The user agent.
        longest_field: Some(5),
        ..built_in(
            "[$start_time] \"$request\" $status $envoy_counts\"$x_forwarded_for\" \"$user_agent\" \
             \"$request_id\" \"$host\" \"$upstream_host\"",
            "",
        )
    }
}

/// AWS Application Load Balancer. `time` is the end of the response, and newer lines have the time
/// of the arrival too.
pub(super) fn alb() -> LineTemplate {
    LineTemplate {
        required_words: 18,
        ..built_in(
            "",
            "type time elb client target request_processing_time target_processing_time \
             response_processing_time elb_status_code target_status_code received_bytes sent_bytes \
             url_request user_agent ssl_cipher ssl_protocol target_group_arn trace_id domain_name \
             chosen_cert_arn matched_rule_priority request_creation_time",
        )
    }
}

/// Creates a built-in format from a template that is valid, and the names of the words after it.
fn built_in(template: &str, words: &str) -> LineTemplate {
    let mut words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
    if !words.is_empty() {
        words.extend((1..=MAX_EXTRA_FIELDS).map(|number| format!("extra{number}")));
    }
    LineTemplate {
        words,
        is_built_in: true,
        ..LineTemplate::split(template).unwrap_or_default()
    }
}

/// Maximum number of fields after the known ones that are read.
const MAX_EXTRA_FIELDS: usize = 32;

/// The variables of nginx and the directives of Apache with a meaning, separated by spaces.
const FIELD_KINDS: [(&str, FieldKind); 14] = [
    ("time_local time_iso8601 msec", EndTime(1)),
    ("{sec}t", ArrivalTime(1)),
    ("{msec}t", ArrivalTime(1000)),
    ("{usec}t", ArrivalTime(1_000_000)),
    ("request", RequestLine),
    ("request_method", Method),
    ("request_uri uri", Target),
    ("args query_string", Query),
    ("remote_addr", Peer),
    ("host http_host server_name", Host),
    ("status", Status),
    ("request_time", Duration(1)),
    ("{ms}T", Duration(1000)),
    ("D {us}T", Duration(1_000_000)),
];

/// Fields with a meaning in the built-in formats only.
const BUILT_IN_FIELD_KINDS: [(&str, FieldKind); 11] = [
    ("remote_user", ClientFields),
    ("start_time request_creation_time", ArrivalTime(1)),
    ("envoy_counts", EnvoyCounts),
    ("x_forwarded_for", ForwardedFor),
    ("type", AlbConnectionType),
    ("time", EndTime(1)),
    ("client", Peer),
    ("request_processing_time", Duration(1)),
    (
        "target_processing_time response_processing_time",
        AddedDuration(1),
    ),
    ("elb_status_code", Status),
    ("url_request", UrlRequestLine),
];

/// The headers in fields of the built-in formats.
const BUILT_IN_HEADERS: [(&str, &str); 5] = [
    ("referer", "referer"),
    ("user_agent", "user-agent"),
    ("x_forwarded_for", "x-forwarded-for"),
    ("request_id", "x-request-id"),
    ("trace_id", "x-amzn-trace-id"),
];

fn find_by_name<V: Copy>(table: &[(&str, V)], name: &str) -> Option<V> {
    let mut table = table.iter();
    let found = table.find(|(known, _)| known.split(' ').any(|known| known == name));
    found.map(|(_, value)| *value)
}

impl LineTemplate {
    /// Parses a format with nginx variables (`$remote_addr`) or Apache directives (`%h`).
    ///
    /// # Errors
    /// Returns what is wrong with the format.
    pub fn parse(format: &str) -> Result<Self, String> {
        // Apache's configuration file escapes quotes.
        let template = Self::split(&format.replace("\\\"", "\"").replace("\\t", "\t"))?;
        template.check_completeness()?;
        Ok(template)
    }

    /// Splits a format into its fields and the text between.
    fn split(format: &str) -> Result<Self, String> {
        let is_nginx = format.contains('$');
        let mut template = Self::default();
        let mut rest = format;
        while let Some(letter) = rest.chars().next() {
            let (name, after) = match (is_nginx, letter) {
                (true, '$') => split_nginx_variable(rest)?,
                (false, '%') => split_apache_directive(rest)?,
                _ => {
                    template.end.push(letter);
                    rest = rest.get(letter.len_utf8()..).unwrap_or_default();
                    continue;
                }
            };
            rest = after;
            match name.as_str() {
                "%" => template.end.push('%'),
                // Apache writes the brackets itself.
                "[time_local]" => {
                    template.end.push('[');
                    template.push_field("time_local".to_owned())?;
                    template.end.push(']');
                }
                _ => template.push_field(name)?,
            }
        }
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

    fn check_completeness(&self) -> Result<(), String> {
        let kinds = self.fields.iter().map(|field| self.field_kind(&field.name));
        let has = |wanted: FieldKind| kinds.clone().any(|kind| kind == wanted);
        let mut times = kinds.clone();
        if !times.any(|kind| matches!(kind, EndTime(_) | ArrivalTime(_))) {
            return Err("the format has no time: $time_local, $time_iso8601, $msec or %t".into());
        }
        let has_request = has(RequestLine) || (has(Method) && has(Target));
        if !has_request {
            return Err(
                "the format has no request: $request or %r, or $request_method and $request_uri"
                    .into(),
            );
        }
        Ok(())
    }

    /// Returns whether the format has the query string.
    pub(super) fn records_query(&self) -> bool {
        self.fields.iter().any(|field| {
            let kind = self.field_kind(&field.name);
            matches!(kind, RequestLine | Query) || field.name == "request_uri"
        })
    }

    fn field_kind(&self, name: &str) -> FieldKind {
        let built_in = find_by_name(&BUILT_IN_FIELD_KINDS, name).filter(|_| self.is_built_in);
        let kind = built_in.or_else(|| find_by_name(&FIELD_KINDS, name));
        let is_cookie = name.starts_with("cookie_");
        kind.unwrap_or(if is_cookie { Cookie } else { Other })
    }

    /// Returns the header that a field holds, unless an option maps it to another field.
    fn header_of_field<'r>(
        &self,
        name: &str,
        required_fields: &'r RequiredFields,
    ) -> Option<&'r str> {
        if self.is_built_in {
            return find_by_name(&BUILT_IN_HEADERS, name);
        }
        if name.starts_with("cookie_") {
            return Some("cookie");
        }
        let suffix = name.strip_prefix("http_")?;
        let mut names = required_fields.names.iter().map(String::as_str);
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

#[derive(Debug)]
pub(crate) struct TextLineParser {
    template: LineTemplate,
    fields: Vec<BoundField>,
    words: Vec<BoundField>,
    times: LogTimeParser,
}

/// A field with the headers and mapped sources that it holds.
#[derive(Debug)]
struct BoundField {
    before: Vec<u8>,
    kind: FieldKind,
    /// Text before the value of its headers: the name of a cookie.
    header_prefix: Vec<u8>,
    headers: SmallVec<[u16; 1]>,
}

impl TextLineParser {
    pub(super) fn new(template: &LineTemplate, required_fields: &RequiredFields) -> Self {
        let bind = |before: &str, name: &str| {
            let default_header = template.header_of_field(name, required_fields);
            let cookie = name.strip_prefix("cookie_");
            BoundField {
                before: before.into(),
                kind: template.field_kind(name),
                header_prefix: cookie
                    .map_or_else(String::new, |name| format!("{name}="))
                    .into(),
                headers: required_fields.indices_for_field(name, default_header),
            }
        };
        let fields = template.fields.iter();
        let words = template.words.iter();
        let mut words: Vec<_> = words.map(|name| bind("", name)).collect();
        let is_needless = |word: &mut BoundField| word.kind == Other && word.headers.is_empty();
        while words.len() > template.required_words && words.pop_if(is_needless).is_some() {}
        Self {
            fields: fields
                .map(|field| bind(&field.before, &field.name))
                .collect(),
            words,
            template: template.clone(),
            times: LogTimeParser::default(),
        }
    }

    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> Option<ParsedLine<'l>> {
        let mut request = ParsedRequest::default();
        let times = &mut self.times;
        let line_end = self.template.end.as_bytes();
        let forward_count = self.template.longest_field.unwrap_or(self.fields.len());
        let (forward, backward) = self.fields.split_at_checked(forward_count)?;
        let mut rest = line;
        let ends = self.fields.iter().skip(1).map(|field| &*field.before);
        for (field, end) in forward.iter().zip(ends.chain([line_end])) {
            rest = rest.strip_prefix(field.before.as_slice())?;
            let length = field.find_end(rest, end, times)?;
            let (text, after) = rest.split_at_checked(length)?;
            field.read_into(&mut request, text, times)?;
            rest = after;
        }
        if let Some((longest, later)) = backward.split_first() {
            let text = rest.strip_prefix(longest.before.as_slice())?;
            let mut text = text.trim_ascii_end().strip_suffix(line_end)?;
            for field in later.iter().rev() {
                let start = memchr::memmem::rfind(text, &field.before)?;
                let (before, value) = text.split_at_checked(start)?;
                field.read_into(&mut request, value.get(field.before.len()..)?, times)?;
                text = before;
            }
            longest.read_into(&mut request, text, times)?;
        } else if !self.words.is_empty() {
            rest = rest.strip_prefix(line_end)?;
            for (index, word) in self.words.iter().enumerate() {
                let Some((text, after)) = split_field(rest) else {
                    if index < self.template.required_words {
                        return None;
                    }
                    break;
                };
                word.read_into(&mut request, text, times)?;
                rest = after;
            }
            if self.template.has_final_duration {
                request.read_final_duration(rest);
            }
        }
        request.finish()
    }
}

impl BoundField {
    /// Returns the length of the field at the beginning of `rest`, before the text `end`.
    fn find_end(&self, rest: &[u8], end: &[u8], times: &mut LogTimeParser) -> Option<usize> {
        let (first, _) = match end.split_first() {
            Some(split) => split,
            None => return Some(rest.len()),
        };
        let is_quoted = self.before.ends_with(b"\"") && *first == b'"';
        if is_quoted {
            return Some(split_at_unescaped_quote(rest)?.0.len());
        }
        let mut places = memchr::memchr_iter(*first, rest);
        places.find(|place| {
            let after = rest.get(*place..).and_then(|found| found.strip_prefix(end));
            after.is_some_and(|after| {
                // The user name may contain brackets too, so only a valid time ends it.
                self.kind != ClientFields || times.starts_with_clf_time(after)
            })
        })
    }

    fn read_into<'l>(
        &self,
        request: &mut ParsedRequest<'l>,
        text: &'l [u8],
        times: &mut LogTimeParser,
    ) -> Option<()> {
        // A client that sent no request has `-` in its place.
        let may_be_absent = !matches!(self.kind, RequestLine | UrlRequestLine | ClientFields);
        if may_be_absent && present_value(text).is_none() {
            return Some(());
        }
        let value = request.read_text(self.kind, text, times)?;
        for index in self
            .headers
            .iter()
            .filter(|_| present_value(value).is_some())
        {
            let value = match self.header_prefix.as_slice() {
                [] => unescape_field(value),
                prefix => [prefix, value].concat().into(),
            };
            request.headers.push((*index, value));
        }
        Some(())
    }
}
