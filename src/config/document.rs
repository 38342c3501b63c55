//! One TOML file: its values for merging, and where each of them stands.

use super::diagnostic::Place;
use figment::value::{Dict, Empty, Tag, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

/// A file as read.
#[derive(Debug)]
pub(super) struct Document {
    name: String,
    text: String,
    rank: usize,
    values: Dict,
    spans: Spans,
}

/// A way to a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyPath(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Byte ranges in the shape of the document.
#[derive(Debug, Default)]
struct Spans {
    key: Range<usize>,
    value: Range<usize>,
    children: BTreeMap<String, Spans>,
    items: Vec<Spans>,
}

impl Document {
    /// Reads TOML; with it come all syntax errors, as places and messages.
    pub(super) fn parse(name: String, text: String, rank: usize) -> (Self, Vec<(Place, String)>) {
        let (table, errors) = DeTable::parse_recoverable(&text);
        let mut spans = Spans::default();
        let values = convert_table(table.get_ref(), &mut spans);
        let document = Self {
            name,
            rank,
            values,
            spans,
            text: String::new(),
        };
        let document = Self { text, ..document };
        // Recovery after one error may stumble again in the same line: only the first says something.
        let mut faults: Vec<(Place, String)> = Vec::new();
        for error in errors {
            let place = document.place(error.span().unwrap_or_default());
            if faults
                .last()
                .is_none_or(|(last, _)| last.order().1 != place.order().1)
            {
                faults.push((place, error.message().replace('\n', " ")));
            }
        }
        (document, faults)
    }

    pub(super) fn values(&self) -> &Dict {
        &self.values
    }

    /// The value at `path`, or the innermost table above it that was written.
    pub(super) fn place_of_value(&self, path: &KeyPath) -> Place {
        match self.walk(path).0 {
            spans if spans.value.is_empty() => Place::whole(&self.name, self.rank),
            spans => self.place(spans.value.clone()),
        }
    }

    /// The name before the value at `path`.
    pub(super) fn place_of_key(&self, path: &KeyPath) -> Place {
        self.place(self.walk(path).0.key.clone())
    }

    /// The value at `path` as written.
    pub(super) fn source(&self, path: &KeyPath) -> Option<&str> {
        match self.walk(path) {
            (spans, true) => self.text.get(spans.value.clone()),
            _ => None,
        }
    }

    /// The innermost spans on the way, and whether the way was walked to its end.
    fn walk(&self, path: &KeyPath) -> (&Spans, bool) {
        let mut at = &self.spans;
        for step in &path.0 {
            let next = match step {
                Step::Key(key) => at.children.get(key),
                Step::Index(index) => at.items.get(*index),
            };
            match next {
                Some(next) => at = next,
                None => return (at, false),
            }
        }
        (at, true)
    }

    fn place(&self, span: Range<usize>) -> Place {
        let before = self.text.get(..span.start).unwrap_or(&self.text);
        let line = before.matches('\n').count();
        let column = before
            .rsplit('\n')
            .next()
            .unwrap_or_default()
            .chars()
            .count();
        let source = self
            .text
            .split('\n')
            .nth(line)
            .unwrap_or_default()
            .trim_end_matches('\r');
        let width = self
            .text
            .get(span)
            .and_then(|text| text.lines().next())
            .unwrap_or_default();
        Place::in_file(
            &self.name,
            self.rank,
            line,
            column,
            source,
            width.chars().count(),
        )
    }
}

impl KeyPath {
    pub(super) fn key(&self, key: &str) -> Self {
        self.with(Step::Key(key.to_owned()))
    }

    pub(super) fn index(&self, index: usize) -> Self {
        self.with(Step::Index(index))
    }

    fn with(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if at == 0 => write!(f, "{}", key.escape_debug())?,
                Step::Key(key) => write!(f, ".{}", key.escape_debug())?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

fn convert_table(table: &DeTable<'_>, spans: &mut Spans) -> Dict {
    let entries = table.iter().map(|(key, value)| {
        let (converted, mut inner) = convert(value);
        inner.key = key.span();
        spans.children.insert(key.get_ref().to_string(), inner);
        (key.get_ref().to_string(), converted)
    });
    entries.collect()
}

fn convert(value: &Spanned<DeValue<'_>>) -> (Value, Spans) {
    let mut spans = Spans {
        value: value.span(),
        ..Spans::default()
    };
    let converted = match value.get_ref() {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(number) => integer(number),
        DeValue::Float(number) => number
            .as_str()
            .parse::<f64>()
            .map_or_else(|_| nothing(), Value::from),
        DeValue::Boolean(flag) => Value::from(*flag),
        // No key takes a date: whatever reads this says what it expected instead.
        DeValue::Datetime(_) => nothing(),
        DeValue::Array(items) => {
            let (items, inner) = items
                .iter()
                .map(convert)
                .unzip::<_, _, Vec<Value>, Vec<Spans>>();
            spans.items = inner;
            Value::from(items)
        }
        DeValue::Table(table) => Value::from(convert_table(table, &mut spans)),
    };
    (converted, spans)
}

/// An integer beyond 64 bits is beyond the range of every key, and so is `nothing`.
fn integer(number: &DeInteger<'_>) -> Value {
    i64::from_str_radix(number.as_str(), number.radix()).map_or_else(|_| nothing(), Value::from)
}

fn nothing() -> Value {
    Value::Empty(Tag::Default, Empty::Unit)
}
