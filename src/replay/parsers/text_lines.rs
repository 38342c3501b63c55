//! Parses logs of text lines by a [`LineTemplate`].

use super::RequiredHeaders;
use super::fields::{present_value, split_at_unescaped_quote, split_field, unescape_field};
use super::parsed_request::{FieldKind, ParsedLine, ParsedRequest};
use super::template::LineTemplate;
use super::timestamps::LogTimeParser;
use smallvec::SmallVec;

#[derive(Debug)]
pub(crate) struct TextLineParser {
    template: LineTemplate,
    fields: Vec<BoundField>,
    words: Vec<BoundField>,
    times: LogTimeParser,
}

/// A field with the headers that it holds.
#[derive(Debug)]
struct BoundField {
    before: Vec<u8>,
    kind: FieldKind,
    /// Text before the value of its headers: the name of a cookie.
    header_prefix: Vec<u8>,
    headers: SmallVec<[u16; 1]>,
}

impl TextLineParser {
    pub(super) fn new(template: &LineTemplate, required_headers: &RequiredHeaders) -> Self {
        let bind = |before: &str, name: &str| {
            let default_header = template.header_of_field(name, required_headers);
            let cookie = name.strip_prefix("cookie_");
            BoundField {
                before: before.into(),
                kind: template.field_kind(name),
                header_prefix: cookie
                    .map_or_else(String::new, |name| format!("{name}="))
                    .into(),
                headers: required_headers.indices_for_field(name, default_header),
            }
        };
        let fields = template.fields.iter();
        let words = template.words.iter();
        let mut words: Vec<_> = words.map(|name| bind("", name)).collect();
        let is_needless =
            |word: &mut BoundField| word.kind == FieldKind::Other && word.headers.is_empty();
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
        let forward_count = self.template.forward_count();
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
                self.kind != FieldKind::ClientFields || times.starts_with_clf_time(after)
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
        let may_be_absent = !matches!(
            self.kind,
            FieldKind::RequestLine | FieldKind::UrlRequestLine | FieldKind::ClientFields
        );
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
