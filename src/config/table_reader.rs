//! Reads values by the schema. Continues after an error, so that one load reports all errors.
//!
//! An invalid value is reported and replaced by its default. The result is discarded at the end,
//! but the remaining values are checked too.

use super::diagnostic::{DiagnosticSeverity, SourceSpan, quote_source};
use super::document::KeyPath;
use super::input::ConfigInput;
use super::schema::{self, KeyRequirement, SchemaKey, ValueKind};
use super::{suggestions, text_conversion, values};
use figment::value::{Dict, Num, Value};
use std::str::FromStr;
use std::time::Duration;

/// Reads the keys of one table.
#[derive(Clone, Debug)]
pub(super) struct TableReader<'a> {
    input: &'a ConfigInput,
    document: usize,
    keys: &'static [SchemaKey],
    /// `None` if the table is absent. Every key then has its default.
    values: Option<&'a Dict>,
    path: KeyPath,
}

/// A value with its position, for diagnostics.
#[derive(Clone, Debug)]
pub(super) struct ConfigValue<'a> {
    input: &'a ConfigInput,
    document: usize,
    pub(super) value: &'a Value,
    path: KeyPath,
    is_secret: bool,
}

impl<'a> TableReader<'a> {
    /// Opens the root table of a document or of the merged layers. Reports unknown keys.
    pub(super) fn from_document(
        input: &'a ConfigInput,
        document: usize,
        table: &'static [SchemaKey],
        values: &'a Dict,
    ) -> Self {
        Self::open_table(input, document, table, Some(values), KeyPath::default())
    }

    /// The input that the table is a part of.
    pub(super) fn input(&self) -> &'a ConfigInput {
        self.input
    }

    pub(super) fn contains_key(&self, name: &str) -> bool {
        self.values.is_some_and(|values| values.contains_key(name))
    }

    /// The keys of the schema that have a value.
    pub(super) fn present_keys(&self) -> impl Iterator<Item = &'static SchemaKey> {
        self.keys.iter().filter(|key| self.contains_key(key.name))
    }

    /// Whether the table or a table in it has a value.
    pub(super) fn has_any_value(&self) -> bool {
        fn has_value(values: &Dict) -> bool {
            values
                .values()
                .any(|value| value.as_dict().is_none_or(has_value))
        }
        self.values.is_some_and(has_value)
    }

    /// The value of a key, or `None` if it is absent.
    ///
    /// The typed getters below apply the default. They return `None` only for a key without a
    /// default that is absent or invalid.
    pub(super) fn get(&self, name: &str) -> Option<ConfigValue<'a>> {
        let value = self.values?.get(name)?;
        Some(ConfigValue {
            input: self.input,
            document: self.document,
            value,
            path: self.path.with_key(name),
            is_secret: self.schema_key(name).is_some_and(|key| key.is_secret),
        })
    }

    pub(super) fn get_bool(&self, name: &str) -> Option<bool> {
        self.read_value(name, |_, value| value.to_bool())
    }

    /// Reads an integer. The schema's range must fit into `T`.
    pub(super) fn get_integer<T: TryFrom<i64>>(&self, name: &str) -> Option<T> {
        self.read_value(name, |kind, value| match (kind.first(), value) {
            (ValueKind::Integer { min, max }, Value::Num(_, Num::I64(number)))
                if (min..=max).contains(&number) =>
            {
                T::try_from(*number).ok()
            }
            _ => None,
        })
    }

    pub(super) fn get_fraction(&self, name: &str) -> Option<f64> {
        self.read_value(name, |_, value| match value {
            Value::Num(_, Num::F64(number)) if (0.0..=1.0).contains(number) => Some(*number),
            Value::Num(_, Num::I64(0)) => Some(0.0),
            Value::Num(_, Num::I64(1)) => Some(1.0),
            _ => None,
        })
    }

    pub(super) fn get_duration(&self, name: &str) -> Option<Duration> {
        self.read_value(name, |kind, value| match kind.first() {
            ValueKind::Duration { min, max } => {
                let duration = values::parse_duration(value.as_str()?)?;
                (*min..=*max).contains(&duration).then_some(duration)
            }
            _ => None,
        })
    }

    /// Reads a duration of which zero means none.
    pub(super) fn get_nonzero_duration(&self, name: &str) -> Option<Duration> {
        self.get_duration(name).filter(|time| !time.is_zero())
    }

    /// Reads a size in bytes.
    pub(super) fn get_byte_size<T: TryFrom<u64>>(&self, name: &str) -> Option<T> {
        self.read_value(name, |kind, value| match kind {
            ValueKind::ByteSize { min, max } => {
                let size = values::parse_byte_size(value.as_str()?)?;
                let is_in_range = (*min..=*max).contains(&size);
                T::try_from(size).ok().filter(|_| is_in_range)
            }
            _ => None,
        })
    }

    /// Reads a keyword. The schema's keywords are the variants of `T`.
    pub(super) fn get_keyword<T: FromStr>(&self, name: &str) -> Option<T> {
        self.read_value(name, |_, value| value.as_str()?.parse().ok())
    }

    /// Whether the value is `keyword`, one of the schema's.
    pub(super) fn is_keyword(&self, name: &str, keyword: &str) -> Option<bool> {
        self.read_value(name, |kind, value| {
            let word = value.as_str()?;
            let is_known = matches!(kind, ValueKind::Keyword(words) if words.contains(&word));
            is_known.then_some(word == keyword)
        })
    }

    /// Reads a keyword. `meanings` maps every keyword of the schema to its value.
    pub(super) fn get_mapped_keyword<T: Copy>(
        &self,
        name: &str,
        meanings: &[(&str, T)],
    ) -> Option<T> {
        self.read_value(name, |_, value| {
            let word = value.as_str()?;
            let meaning = meanings.iter().find(|(known, _)| *known == word);
            meaning.map(|(_, meaning)| *meaning)
        })
    }

    /// Reads a string with `parse`. The error of `parse` follows "found …;" in the message.
    pub(super) fn get_parsed<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.read_result(name, |_, value| Some(parse(value.as_str()?)))
    }

    pub(super) fn get_string(&self, name: &str) -> Option<String> {
        self.get_parsed(name, |text| Ok(text.to_owned()))
    }

    /// Reads a string. Returns `None` if it is empty.
    pub(super) fn get_nonempty_string(&self, name: &str) -> Option<String> {
        self.get_string(name).filter(|text| !text.is_empty())
    }

    /// Whether the string is absent or the schema's default.
    pub(super) fn is_default(&self, name: &str) -> bool {
        let default = self.schema_key(name).map(|key| &key.requirement);
        self.get(name).is_none_or(|item| match default {
            Some(KeyRequirement::Default(text)) => item.value.as_str() == Some(*text),
            _ => false,
        })
    }

    /// Reads a list of strings with `parse`. Leaves out invalid items.
    pub(super) fn get_list<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let parse = |item: ConfigValue<'_>| match item.value.as_str().map(&parse) {
            Some(Ok(value)) => Some(value),
            Some(Err(reason)) => item.report_error(&reason),
            None => item.report_error(&self.expected_text(name)),
        };
        self.get_items(name).into_iter().filter_map(parse).collect()
    }

    /// The items of a list. A single string is a list of one.
    pub(super) fn get_items(&self, name: &str) -> Vec<ConfigValue<'a>> {
        let Some(item) = self.get(name) else {
            return Vec::new();
        };
        match item.value {
            Value::Array(_, values) => {
                let values = values.iter().enumerate();
                let child = |(index, value)| item.child(value, item.path.with_index(index));
                values.map(child).collect()
            }
            Value::String(..) => vec![item],
            _ => {
                item.report_error::<()>(&self.expected_text(name));
                Vec::new()
            }
        }
    }

    /// The entries of a table with user-defined keys.
    pub(super) fn get_entries(&self, name: &str) -> Vec<(&'a str, ConfigValue<'a>)> {
        let Some(item) = self.get(name) else {
            return Vec::new();
        };
        let Value::Dict(_, entries) = item.value else {
            item.report_error::<()>(&self.expected_text(name));
            return Vec::new();
        };
        let entry = |(name, value): (&'a String, &'a Value)| {
            (name.as_str(), item.child(value, item.path.with_key(name)))
        };
        entries.iter().map(entry).collect()
    }

    /// Opens a table in which every key has a default. An absent table is empty.
    pub(super) fn get_table(&self, name: &str) -> Self {
        self.get_optional_table(name).unwrap_or_else(|| {
            let table = self
                .schema_key(name)
                .map_or(&[] as &[SchemaKey], |key| key.kind.nested_keys());
            Self::open_table(
                self.input,
                self.document,
                table,
                None,
                self.path.with_key(name),
            )
        })
    }

    pub(super) fn get_optional_table(&self, name: &str) -> Option<Self> {
        let item = self.get(name)?;
        item.open_table(self.schema_key(name)?.kind.nested_keys())
            .or_else(|| item.report_error(&self.expected_text(name)))
    }

    /// Opens a list of tables. Reports and leaves out items that are not tables.
    pub(super) fn get_tables(&self, name: &str) -> Vec<Self> {
        let Some(key) = self.schema_key(name) else {
            return Vec::new();
        };
        let open = |item: ConfigValue<'a>| {
            item.open_table(key.kind.nested_keys())
                .or_else(|| item.report_error("expected a table"))
        };
        self.get_items(name).into_iter().filter_map(open).collect()
    }

    /// Reports an error at the value of a key, or at the table if the key is absent.
    pub(super) fn report_error(&self, name: &str, problem: &str) {
        self.report(DiagnosticSeverity::Error, name, problem);
    }

    /// Reports a warning at the value of a key, or at the table if the key is absent.
    pub(super) fn report_warning(&self, name: &str, problem: &str) {
        self.report(DiagnosticSeverity::Warning, name, problem);
    }

    /// Returns what was read for a key, or reports the problem at its value.
    pub(super) fn accept<T>(&self, name: &str, result: Result<T, String>) -> Option<T> {
        let result = result.map_err(|problem| self.report_error(name, &problem));
        result.ok()
    }

    fn report(&self, severity: DiagnosticSeverity, name: &str, problem: &str) {
        let value = self.values.and_then(|values| values.get(name));
        let path = self.path.with_key(name);
        let span = self.input.value_span(self.document, &path, value);
        self.input
            .report(severity, span, path.to_string(), problem.to_owned());
    }

    fn open_table(
        input: &'a ConfigInput,
        document: usize,
        table: &'static [SchemaKey],
        values: Option<&'a Dict>,
        path: KeyPath,
    ) -> Self {
        for (name, value) in values.into_iter().flatten() {
            if schema::find_key(table, name).is_none() {
                let path = path.with_key(name);
                let span = input.key_span(document, &path, value);
                input.report_error(
                    span,
                    path.to_string(),
                    format!("unknown key; {}", schema::suggest_key(table, name)),
                );
            }
        }
        Self {
            input,
            document,
            keys: table,
            values,
            path,
        }
    }

    /// Reads a value with `parse`, which returns `None` if it has not the type or range of the
    /// schema.
    fn read_value<T>(
        &self,
        name: &str,
        parse: impl Fn(&ValueKind, &Value) -> Option<T>,
    ) -> Option<T> {
        self.read_result(name, |kind, value| parse(kind, value).map(Ok))
    }

    /// Reads a value with `parse`, which may also return the reason why the value is invalid.
    fn read_result<T>(
        &self,
        name: &str,
        parse: impl Fn(&ValueKind, &Value) -> Option<Result<T, String>>,
    ) -> Option<T> {
        let key = self.schema_key(name)?;
        match (self.get(name), &key.requirement) {
            (Some(item), _) => match parse(&key.kind, item.value) {
                Some(Ok(value)) => return Some(value),
                Some(Err(reason)) => item.report_error(&reason),
                None => {
                    let suggestion = suggestions::suggest_value(&key.kind, item.value);
                    item.report_error(&(self.expected_text(name) + &suggestion))
                }
            },
            (None, KeyRequirement::Required) => {
                self.report_error(name, &format!("missing; {}", self.expected_text(name)));
                None
            }
            (None, _) => None,
        }
        .or_else(|| match key.requirement {
            KeyRequirement::Default(text) => {
                let default = text_conversion::value_from_text(&key.kind, text);
                parse(&key.kind, &default)?.ok()
            }
            KeyRequirement::Required | KeyRequirement::Optional => None,
        })
    }

    fn expected_text(&self, name: &str) -> String {
        self.schema_key(name)
            .map_or_else(String::new, |key| format!("expected {}", key.kind))
    }

    fn schema_key(&self, name: &str) -> Option<&'static SchemaKey> {
        let key = schema::find_key(self.keys, name);
        debug_assert!(
            key.is_some(),
            "the schema has no key {name:?} at {}",
            self.path
        );
        key
    }
}

impl<'a> ConfigValue<'a> {
    /// Opens the value as a table. Returns `None` if it is not a table.
    pub(super) fn open_table(&self, table: &'static [SchemaKey]) -> Option<TableReader<'a>> {
        let values = self.value.as_dict()?;
        Some(TableReader::open_table(
            self.input,
            self.document,
            table,
            Some(values),
            self.path.clone(),
        ))
    }

    fn child(&self, value: &'a Value, path: KeyPath) -> Self {
        Self {
            value,
            path,
            ..self.clone()
        }
    }

    /// Reports an error at the value. Returns `None`, for use in place of the parsed value.
    pub(super) fn report_error<T>(&self, problem: &str) -> Option<T> {
        let problem = match self.quote_value() {
            Some(found) => format!("found {found}; {problem}"),
            None => problem.to_owned(),
        };
        self.input
            .report_error(self.source_span(), self.path.to_string(), problem);
        None
    }

    /// Reports a warning at the value.
    pub(super) fn report_warning(&self, problem: &str) {
        self.input.report_warning(
            self.source_span(),
            self.path.to_string(),
            problem.to_owned(),
        );
    }

    /// Position of the value.
    pub(super) fn source_span(&self) -> SourceSpan {
        self.input
            .value_span(self.document, &self.path, Some(self.value))
    }

    fn quote_value(&self) -> Option<String> {
        if self.is_secret {
            return None;
        }
        match (
            self.input
                .source_text(self.document, &self.path, self.value),
            self.value,
        ) {
            (Some(source), _) => Some(quote_source(source)),
            (None, Value::String(_, text)) => Some(format!("\"{}\"", quote_source(text))),
            (None, Value::Num(_, Num::I64(number))) => Some(number.to_string()),
            (None, Value::Num(_, Num::F64(number))) => Some(number.to_string()),
            (None, Value::Bool(_, flag)) => Some(flag.to_string()),
            (None, _) => None,
        }
    }
}
