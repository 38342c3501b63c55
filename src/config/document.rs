//! One TOML document: its values for merging, and the position of each value.

use super::brackets::find_unclosed_bracket;
use super::diagnostic::{QuotedLine, SourceSpan};
use super::sources::FileSource;
use figment::value::{Dict, Empty, Tag, Value};
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::{fmt, fs, iter};
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

/// Bytes per entry of [`TomlDocument::chars_before`].
const BLOCK_BYTES: usize = 256;

/// A parsed TOML document.
#[derive(Debug)]
pub(super) struct TomlDocument {
    name: String,
    text: String,
    /// Byte offset of each line's start.
    line_starts: Vec<usize>,
    /// Number of characters that start before each block of [`BLOCK_BYTES`].
    chars_before: Vec<usize>,
    /// The last line that a diagnostic quoted, for further ones in a long line.
    last_line: RefCell<Option<(usize, QuotedLine)>>,
    rank: usize,
    /// Whether errors quote lines: not those of a file that may hold something else, such as a
    /// secret.
    shows_source: bool,
    values: Dict,
    spans: DocumentSpans,
}

/// Path of a value: table keys and list indexes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyPath(Vec<KeyPathStep>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum KeyPathStep {
    Key(String),
    Index(usize),
}

/// Byte ranges of keys and values, in the structure of the document.
#[derive(Debug, Default)]
struct DocumentSpans {
    key: Range<usize>,
    value: Range<usize>,
    /// By key, in order.
    children: Box<[(String, DocumentSpans)]>,
    items: Vec<DocumentSpans>,
}

/// Whether the name, and the file behind it if it is a link, end in `.toml`.
fn is_toml_file(name: &str) -> bool {
    let is_toml = |path: &Path| path.extension().is_some_and(|end| end == "toml");
    is_toml(Path::new(name)) && fs::canonicalize(name).map_or(true, |path| is_toml(&path))
}

impl TomlDocument {
    /// Parses TOML. Returns the document with the first syntax error as a span and a message.
    /// Others are often follow-up errors of the parser's recovery.
    pub(super) fn parse(
        name: String,
        text: String,
        rank: usize,
    ) -> (Self, Option<(SourceSpan, String)>) {
        let (table, errors) = DeTable::parse_recoverable(&text);
        let mut spans = DocumentSpans::default();
        let values = convert_table(table.get_ref(), &mut spans);
        let blocks = text.as_bytes().chunks(BLOCK_BYTES);
        let chars_before = blocks.scan(0, |total, block| {
            let before = *total;
            *total += count_chars(block);
            Some(before)
        });
        let after_newlines = text.match_indices('\n').map(|(at, _)| at + 1);
        let document = Self {
            shows_source: name == FileSource::STDIN_NAME || is_toml_file(&name),
            name,
            line_starts: iter::once(0).chain(after_newlines).collect(),
            chars_before: chars_before.collect(),
            last_line: RefCell::default(),
            rank,
            values,
            spans,
            text: String::new(),
        };
        let document = Self { text, ..document };
        let start = |error: &toml::de::Error| error.span().unwrap_or_default().start;
        let first = errors.iter().min_by_key(|error| start(error));
        let syntax_error = first.map(|error| document.describe_syntax_error(error));
        (document, syntax_error)
    }

    /// The position and message of a syntax error, and the position of a bracket that is not
    /// closed.
    fn describe_syntax_error(&self, error: &toml::de::Error) -> (SourceSpan, String) {
        let span = error.span().unwrap_or_default();
        let message = error.message().replace('\n', " ");
        let unclosed = find_unclosed_bracket(&self.text, span.start).and_then(|offset| {
            let bracket = self.text.get(offset..=offset)?;
            let opened_at = self.source_span(offset..offset + 1);
            Some(format!("; the \"{bracket}\" at {opened_at} is not closed"))
        });
        let message = message + &unclosed.unwrap_or_default();
        (self.source_span(span), message)
    }

    pub(super) fn values(&self) -> &Dict {
        &self.values
    }

    pub(super) fn take_values(&mut self) -> Dict {
        std::mem::take(&mut self.values)
    }

    /// Span of the value at `path`, or of the innermost enclosing table in the document.
    pub(super) fn value_span(&self, path: &KeyPath) -> SourceSpan {
        match self.find_deepest_existing_spans(path).0 {
            spans if spans.value.is_empty() => SourceSpan::from_source(&self.name, self.rank),
            spans => self.source_span(spans.value.clone()),
        }
    }

    /// Span of the key of the value at `path`.
    pub(super) fn key_span(&self, path: &KeyPath) -> SourceSpan {
        self.source_span(self.find_deepest_existing_spans(path).0.key.clone())
    }

    /// Source text of the value at `path`.
    pub(super) fn source_text(&self, path: &KeyPath) -> Option<&str> {
        match self.find_deepest_existing_spans(path) {
            (spans, true) => self.text.get(spans.value.clone()),
            _ => None,
        }
    }

    /// Spans of the innermost existing element of `path`, and whether all of `path` exists.
    fn find_deepest_existing_spans(&self, path: &KeyPath) -> (&DocumentSpans, bool) {
        let mut at = &self.spans;
        for step in &path.0 {
            let next = match step {
                KeyPathStep::Key(key) => at.find_child(key),
                KeyPathStep::Index(index) => at.items.get(*index),
            };
            match next {
                Some(next) => at = next,
                None => return (at, false),
            }
        }
        (at, true)
    }

    /// Index of the line that contains this byte.
    fn line_index(&self, offset: usize) -> usize {
        let lines_up_to = self.line_starts.partition_point(|start| *start <= offset);
        lines_up_to.saturating_sub(1)
    }

    /// Number of characters that start before this byte.
    fn chars_before(&self, offset: usize) -> usize {
        let block = offset / BLOCK_BYTES;
        let rest = self.text.as_bytes().get(block * BLOCK_BYTES..offset);
        self.chars_before.get(block).copied().unwrap_or_default()
            + count_chars(rest.unwrap_or_default())
    }

    fn source_span(&self, span: Range<usize>) -> SourceSpan {
        let line = self.line_index(span.start);
        let start = self.line_starts.get(line).copied().unwrap_or_default();
        let column = self.chars_before(span.start) - self.chars_before(start);
        let width = self
            .text
            .get(span)
            .and_then(|text| text.lines().next())
            .unwrap_or_default();
        let mut last_line = self.last_line.borrow_mut();
        if last_line.as_ref().is_none_or(|(last, _)| *last != line) {
            let end = self.line_starts.get(line + 1).copied();
            let source = self.text.get(start..end.unwrap_or(self.text.len()));
            let source = source.unwrap_or_default().trim_end_matches(['\n', '\r']);
            *last_line = Some((line, QuotedLine::new(source)));
        }
        let quoted = last_line.as_ref().map(|(_, quoted)| quoted);
        SourceSpan::from_position(
            &self.name,
            self.rank,
            line,
            column,
            quoted.filter(|_| self.shows_source),
            width.chars().count(),
        )
    }
}

/// Number of characters that start in these bytes of UTF-8.
fn count_chars(bytes: &[u8]) -> usize {
    let starts = bytes.iter().filter(|byte| **byte & 0xc0 != 0x80);
    starts.count()
}

impl KeyPath {
    pub(super) fn with_key(&self, key: &str) -> Self {
        self.with_step(KeyPathStep::Key(key.to_owned()))
    }

    pub(super) fn with_index(&self, index: usize) -> Self {
        self.with_step(KeyPathStep::Index(index))
    }

    fn with_step(&self, step: KeyPathStep) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.0.iter().enumerate() {
            match step {
                KeyPathStep::Key(key) if index == 0 => write!(f, "{}", key.escape_debug())?,
                KeyPathStep::Key(key) => write!(f, ".{}", key.escape_debug())?,
                KeyPathStep::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

fn convert_table(table: &DeTable<'_>, spans: &mut DocumentSpans) -> Dict {
    let entries = table.iter().map(|(key, value)| {
        let (converted, mut inner) = convert_value(value);
        inner.key = key.span();
        let name = key.get_ref().to_string();
        ((name.clone(), converted), (name, inner))
    });
    let (values, mut children): (Dict, Vec<_>) = entries.unzip();
    children.sort_by(|(one, _), (other, _)| one.cmp(other));
    spans.children = children.into();
    values
}

impl DocumentSpans {
    fn find_child(&self, key: &str) -> Option<&Self> {
        let found = self
            .children
            .binary_search_by(|(name, _)| (**name).cmp(key));
        found.ok().and_then(|at| Some(&self.children.get(at)?.1))
    }
}

fn convert_value(value: &Spanned<DeValue<'_>>) -> (Value, DocumentSpans) {
    let mut spans = DocumentSpans {
        value: value.span(),
        ..DocumentSpans::default()
    };
    let converted = match value.get_ref() {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(number) => convert_integer(number),
        DeValue::Float(number) => number
            .as_str()
            .parse::<f64>()
            .map_or_else(|_| empty_value(), Value::from),
        DeValue::Boolean(flag) => Value::from(*flag),
        // No key takes a date. The key's reader reports the expected type.
        DeValue::Datetime(_) => empty_value(),
        DeValue::Array(items) => {
            let (items, inner) = items
                .iter()
                .map(convert_value)
                .unzip::<_, _, Vec<Value>, Vec<DocumentSpans>>();
            spans.items = inner;
            Value::from(items)
        }
        DeValue::Table(table) => Value::from(convert_table(table, &mut spans)),
    };
    (converted, spans)
}

/// Converts an integer. One beyond 64 bits is outside the range of every key, and becomes empty.
fn convert_integer(number: &DeInteger<'_>) -> Value {
    i64::from_str_radix(number.as_str(), number.radix()).map_or_else(|_| empty_value(), Value::from)
}

fn empty_value() -> Value {
    Value::Empty(Tag::Default, Empty::Unit)
}
