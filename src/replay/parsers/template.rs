//! The formats of text lines: those that are built in, and those of the user, written as nginx
//! (`log_format`) or Apache (`LogFormat`) writes them.
//!
//! A template is literal text with fields between. A field ends where the next literal text begins;
//! between quotes, escaped quotes are part of the field. Apache's directives are translated to the
//! names of nginx variables.

use super::RequiredHeaders;
use super::parsed_request::FieldKind::{
    self, AddedDuration, AlbConnectionType, ArrivalTime, ClientFields, Duration, EndTime,
    EnvoyCounts, ForwardedFor, Host, Method, Peer, Query, RequestLine, Status, Target,
    UrlRequestLine,
};

/// A parsed log format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineTemplate {
    pub(super) fields: Vec<TemplateField>,
    /// Text after the last field.
    pub(super) end: String,
    /// Position of a field that may contain the text after it. The fields after this one are matched
    /// from the end of the line.
    longest_field: Option<usize>,
    /// Fields after `end`, quoted or not, of which the line has at least `required_words`.
    pub(super) words: Vec<String>,
    pub(super) required_words: usize,
    /// Whether lines may end with a duration in milliseconds, as those of Traefik.
    pub(super) has_final_duration: bool,
    is_built_in: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TemplateField {
    /// Literal text before the field.
    pub(super) before: String,
    /// Name of an nginx variable, or an unknown Apache directive.
    pub(super) name: String,
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

    pub(super) fn field_kind(&self, name: &str) -> FieldKind {
        let built_in = find_by_name(&BUILT_IN_FIELD_KINDS, name).filter(|_| self.is_built_in);
        let kind = built_in.or_else(|| find_by_name(&FIELD_KINDS, name));
        let is_cookie = name.starts_with("cookie_");
        kind.unwrap_or(if is_cookie {
            FieldKind::Cookie
        } else {
            FieldKind::Other
        })
    }

    /// Returns the header that a field holds, unless `--header-from` says otherwise.
    pub(super) fn header_of_field<'r>(
        &self,
        name: &str,
        required_headers: &'r RequiredHeaders,
    ) -> Option<&'r str> {
        if self.is_built_in {
            return find_by_name(&BUILT_IN_HEADERS, name);
        }
        if name.starts_with("cookie_") {
            return Some("cookie");
        }
        let suffix = name.strip_prefix("http_")?;
        let mut names = required_headers.names.iter().map(|name| name.as_str());
        names.find(|name| name.replace('-', "_") == suffix)
    }

    /// Returns the number of fields that are matched from the beginning of the line.
    pub(super) fn forward_count(&self) -> usize {
        self.longest_field.unwrap_or(self.fields.len())
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
