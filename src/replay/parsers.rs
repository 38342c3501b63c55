//! Parses one line of an access log into a request.
//!
//! A [`LineParser`] is created once per log for the values that the policies need, and borrows
//! from the line where possible.

mod fields;
mod json;
mod parsed_request;
mod text_lines;
mod timestamps;

pub(super) use parsed_request::{ParsedLine, ParsedRequest, RequestFacts};
pub(crate) use timestamps::parse_rfc3339;

pub use text_lines::LineTemplate;

use http::HeaderName;
use json::JsonLineParser;
use smallvec::SmallVec;
use std::sync::Arc;
use strum::{Display, IntoStaticStr};
use text_lines::TextLineParser;

/// Access log format. The names are those of `--format`.
#[derive(Clone, Debug, PartialEq, Eq, Display, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum AccessLogFormat {
    /// `combined`, `common` and `vhost_combined` of nginx and Apache, and the text format of
    /// Traefik. Lines may end with more quoted fields.
    Combined,
    /// Envoy's default text format.
    Envoy,
    /// AWS Application Load Balancer.
    Alb,
    EnvoyJson,
    TraefikJson,
    Caddy,
    Tidegate,
    /// Any other JSON with one object per line. Field names are those of nginx variables, or common
    /// alternatives.
    Json,
    /// A format that the user describes.
    Custom(Arc<LineTemplate>),
}

/// The headers that the policies read, and the sources to which log fields are mapped.
#[derive(Clone, Debug, Default)]
pub(super) struct RequiredFields {
    /// Names of headers, and sources as `--field-from` names them. Only these contain a colon.
    pub(super) names: Vec<String>,
    /// Mapped log fields, each with the index of its source in `names`.
    field_mappings: Vec<(u16, Box<str>)>,
}

impl RequiredFields {
    /// `field_mappings` are pairs of a header or source and the log field that holds its value.
    pub(super) fn new<'n>(
        names: impl Iterator<Item = &'n HeaderName>,
        field_mappings: &'n [(String, String)],
    ) -> Self {
        let mut required = Self::default();
        let mapped = field_mappings.iter().map(|(name, _)| name.clone());
        required.names = names.map(ToString::to_string).chain(mapped).collect();
        // The names are sorted, because the policy table has no stable order and reports must be
        // reproducible.
        required.names.sort_unstable();
        required.names.dedup();
        required.names.truncate(usize::from(u16::MAX));
        required.field_mappings = field_mappings
            .iter()
            .filter_map(|(name, field)| Some((required.header_index(name)?, field.as_str().into())))
            .collect();
        required
    }

    /// Whether a log field is mapped to the source with this index.
    pub(super) fn is_mapped(&self, header_index: usize) -> bool {
        let mut mapped = self.field_mappings.iter();
        mapped.any(|(index, _)| usize::from(*index) == header_index)
    }

    fn header_index(&self, name: &str) -> Option<u16> {
        let mut names = self.names.iter();
        let index = names.position(|required| required == name)?;
        u16::try_from(index).ok()
    }

    /// Returns the indices of the sources that are mapped to `field`. Adds that of
    /// `default_header`, unless this header is mapped to another field.
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
    Text(TextLineParser),
    Json(JsonLineParser),
}

impl LineParser {
    pub(super) fn new(format: &AccessLogFormat, required_fields: &RequiredFields) -> Self {
        let text =
            |template: &LineTemplate| Self::Text(TextLineParser::new(template, required_fields));
        let json = |schema| Self::Json(JsonLineParser::new(schema, required_fields));
        match format {
            AccessLogFormat::Combined => text(&text_lines::combined()),
            AccessLogFormat::Envoy => text(&text_lines::envoy()),
            AccessLogFormat::Alb => text(&text_lines::alb()),
            AccessLogFormat::Custom(template) => text(template),
            AccessLogFormat::EnvoyJson => json(&json::ENVOY_SCHEMA),
            AccessLogFormat::TraefikJson => json(&json::TRAEFIK_SCHEMA),
            AccessLogFormat::Caddy => json(&json::CADDY_SCHEMA),
            AccessLogFormat::Tidegate => json(&json::TIDEGATE_SCHEMA),
            AccessLogFormat::Json => json(&json::GENERIC_SCHEMA),
        }
    }

    /// Parses a line without its line ending.
    pub(super) fn parse_line<'l>(&mut self, line: &'l [u8]) -> ParsedLine<'l> {
        let parsed = match self {
            Self::Text(parser) => parser.parse_line(line),
            Self::Json(parser) => parser.parse_line(line),
        };
        parsed.unwrap_or(ParsedLine::Broken)
    }
}

impl AccessLogFormat {
    /// All formats that have a name.
    pub const ALL: [Self; 8] = [
        Self::Combined,
        Self::Envoy,
        Self::Alb,
        Self::Tidegate,
        Self::TraefikJson,
        Self::Caddy,
        Self::EnvoyJson,
        Self::Json,
    ];

    /// The names of all formats, for messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(|format| format.into_str()).join(", ")
    }

    /// Returns whether the format records the query string.
    pub fn records_query(&self) -> bool {
        match self {
            Self::Tidegate => false,
            Self::Custom(template) => template.records_query(),
            _ => true,
        }
    }

    /// Returns the format that parses the most lines as requests. Among equals, the first in
    /// [`Self::ALL`], which lists strict formats first, wins. Returns `None` if no format parses
    /// any line.
    pub(super) fn detect<'l>(lines: impl Iterator<Item = &'l [u8]> + Clone) -> Option<Self> {
        let count_requests = |format: &Self| {
            let mut parser = LineParser::new(format, &RequiredFields::default());
            lines
                .clone()
                .filter(|line| matches!(parser.parse_line(line), ParsedLine::Request(_)))
                .count()
        };
        let counted = Self::ALL
            .into_iter()
            .map(|format| (count_requests(&format), format));
        // The order is reversed, because `max_by_key` returns the last of equal elements.
        let (count, format) = counted.rev().max_by_key(|(count, _)| *count)?;
        (count > 0).then_some(format)
    }
}

#[cfg(test)]
mod tests;
