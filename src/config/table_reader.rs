//! Reads values by the schema. Continues after an error, so that one load reports all errors.
//!
//! An invalid value is reported and replaced by its default. The result is discarded at the end,
//! but the remaining values are checked too.

use super::diagnostic::{DiagnosticSeverity, SourceSpan, quote_source};
use super::input::ConfigInput;
use super::schema::{self, KeyRequirement, SchemaKey, ValueKind};
use super::schema_value::{SchemaValue, content_from_text};
use super::suggestions;
use super::value_tree::{ValueContent, ValueNode, ValueOrigin};
use std::path::{Path, PathBuf};

/// Reports by a table of rules: severity and key, the condition if there is one, and the message.
macro_rules! report {
    ($reader:expr; $severity:ident($key:expr) => $($message:expr),+;) => {
        report! { $reader; $severity($key) if true => $($message),+; }
    };
    ($reader:expr; $($severity:ident($key:expr) if $condition:expr => $($message:expr),+;)+) => {{$(
        if $condition {
            let severity = crate::config::DiagnosticSeverity::$severity;
            $reader.report(severity, $key, format_args!($($message),+).to_string());
        }
    )+}};
}

pub(super) use report;

/// Builds settings: fields that are read from the keys of their names, each after its table, and
/// after `=>` other fields.
macro_rules! read_settings {
    ($settings:ident { $($reader:ident: $($field:ident),+;)+ $(=> $($rest:tt)*)? }) => {
        $settings { $($($field: $reader.read(stringify!($field))?,)+)+ $($($rest)*)? }
    };
}

pub(super) use read_settings;

/// Reads the keys of one table.
#[derive(Clone, Debug)]
pub(super) struct TableReader<'a> {
    pub(super) input: &'a ConfigInput,
    keys: &'static [SchemaKey],
    /// `None` if the table is absent. Every key then has its default.
    table: Option<&'a ValueNode>,
    /// Where the table was written, or the one around it if it is absent.
    origin: &'a ValueOrigin,
    /// Path of the table such as `policy[2].limit`. Empty for the root.
    path: String,
}

/// A value with its position, for diagnostics.
#[derive(Clone, Debug)]
pub(super) struct ConfigValue<'a> {
    input: &'a ConfigInput,
    pub(super) value: &'a ValueNode,
    path: String,
    is_secret: bool,
}

impl<'a> TableReader<'a> {
    /// Opens the root table of a document or of the merged layers. Reports unknown keys.
    pub(super) fn from_root(
        input: &'a ConfigInput,
        keys: &'static [SchemaKey],
        root: &'a ValueNode,
    ) -> Self {
        Self::open_table(input, keys, root, String::new())
    }

    pub(super) fn contains_key(&self, name: &str) -> bool {
        self.node(name).is_some()
    }

    /// The keys of the schema that have a value.
    pub(super) fn present_keys(&self) -> impl Iterator<Item = &'static SchemaKey> {
        self.keys.iter().filter(|key| self.contains_key(key.name))
    }

    /// Whether the table or a table in it has a value.
    pub(super) fn has_any_value(&self) -> bool {
        fn has_value(node: &ValueNode) -> bool {
            let table = node.as_table();
            table.is_none_or(|table| table.values().any(has_value))
        }
        self.table.is_some_and(has_value)
    }

    /// The value of a key, or `None` if it is absent.
    ///
    /// The typed getters below apply the default. They return `None` only for a key without a
    /// default that is absent or invalid.
    pub(super) fn get(&self, name: &str) -> Option<ConfigValue<'a>> {
        Some(ConfigValue {
            input: self.input,
            value: self.node(name)?,
            path: join_path(&self.path, name),
            is_secret: self.schema_key(name).is_some_and(|key| key.is_secret),
        })
    }

    /// Reads a value of the type and in the range that the schema gives.
    pub(super) fn read<T: SchemaValue>(&self, name: &str) -> Option<T> {
        self.read_result(name, |kind, value| {
            T::from_content(kind.first(), value).map(Ok)
        })
    }

    /// Whether the value is `keyword`, one of the schema's.
    pub(super) fn is_keyword(&self, name: &str, keyword: &str) -> Option<bool> {
        self.read(name).map(|word: String| word == keyword)
    }

    /// Reads a string with `parse`. The error of `parse` follows "found …;" in the message.
    pub(super) fn get_parsed<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.read_result(name, |_, value| Some(parse(value.as_str()?)))
    }

    /// Reads a string with `parse`, which returns `None` for one that is not as the schema says.
    pub(super) fn get_text<T>(&self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.read_result(name, |_, value| parse(value.as_str()?).map(Ok))
    }

    /// Reads a string. Returns `None` if it is empty.
    pub(super) fn get_nonempty_string(&self, name: &str) -> Option<String> {
        self.read(name).filter(|text: &String| !text.is_empty())
    }

    /// Whether the string is absent or the schema's default.
    pub(super) fn is_default(&self, name: &str) -> bool {
        let Some(item) = self.get(name) else {
            return true;
        };
        let requirement = self.schema_key(name).map(|key| &key.requirement);
        matches!(requirement, Some(KeyRequirement::Default(text)) if item.value.as_str() == Some(*text))
    }

    /// Reads a list of strings with `parse`. Leaves out invalid items.
    pub(super) fn get_list<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let parse = |item: ConfigValue<'_>| match item.value.as_str().map(&parse) {
            Some(Ok(value)) => Some(value),
            Some(Err(reason)) => item.report_error(reason),
            None => item.report_error(self.expected_text(name)),
        };
        self.get_items(name).into_iter().filter_map(parse).collect()
    }

    /// The items of a list. A single string is a list of one.
    pub(super) fn get_items(&self, name: &str) -> Vec<ConfigValue<'a>> {
        let Some(item) = self.get(name) else {
            return Vec::new();
        };
        match &item.value.content {
            ValueContent::List(values) => {
                let values = values.iter().enumerate();
                let child = |(index, value)| item.child(value, format!("{}[{index}]", item.path));
                values.map(child).collect()
            }
            ValueContent::Text(_) => vec![item],
            _ => {
                item.report_error::<()>(self.expected_text(name));
                Vec::new()
            }
        }
    }

    /// The entries of a table with user-defined keys.
    pub(super) fn get_entries(&self, name: &str) -> Vec<(&'a str, ConfigValue<'a>)> {
        let Some(item) = self.get(name) else {
            return Vec::new();
        };
        let Some(entries) = item.value.as_table() else {
            item.report_error::<()>(self.expected_text(name));
            return Vec::new();
        };
        let entry = |(name, value): (&'a String, &'a ValueNode)| {
            (
                name.as_str(),
                item.child(value, join_path(&item.path, name)),
            )
        };
        entries.iter().map(entry).collect()
    }

    /// Opens a table in which every key has a default. An absent table is empty.
    pub(super) fn get_table(&self, name: &str) -> Self {
        self.get_optional_table(name).unwrap_or_else(|| Self {
            input: self.input,
            keys: self
                .schema_key(name)
                .map_or(&[], |key| key.kind.nested_keys()),
            table: None,
            origin: self.origin,
            path: join_path(&self.path, name),
        })
    }

    pub(super) fn get_optional_table(&self, name: &str) -> Option<Self> {
        let item = self.get(name)?;
        item.open_table(self.schema_key(name)?.kind.nested_keys())
            .or_else(|| item.report_error(self.expected_text(name)))
    }

    /// Builds settings from a table. The inner `None` means that the table is absent.
    pub(super) fn build_optional<T>(
        &self,
        name: &str,
        build: impl FnOnce(&Self) -> Option<T>,
    ) -> Option<Option<T>> {
        match self.get_optional_table(name) {
            None => Some(None),
            Some(table) => build(&table).map(Some),
        }
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

    /// The table or the tables of a key that may also be a plain value; empty for such a value.
    pub(super) fn get_nested_tables(&self, name: &str) -> Vec<Self> {
        match self.get(name).map(|item| &item.value.content) {
            Some(ValueContent::List(_)) => self.get_tables(name),
            Some(ValueContent::Table(_)) => self.get_optional_table(name).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    /// Reports an error at the value of a key, or at the table if the key is absent.
    pub(super) fn report_error(&self, name: &str, problem: impl Into<String>) {
        self.report(DiagnosticSeverity::Error, name, problem.into());
    }

    /// Reports a warning at the value of a key, or at the table if the key is absent.
    pub(super) fn report_warning(&self, name: &str, problem: impl Into<String>) {
        self.report(DiagnosticSeverity::Warning, name, problem.into());
    }

    /// Returns what was read for a key, or reports the problem at its value.
    pub(super) fn accept<T>(&self, name: &str, result: Result<T, String>) -> Option<T> {
        let result = result.map_err(|problem| self.report_error(name, problem));
        result.ok()
    }

    pub(super) fn report(&self, severity: DiagnosticSeverity, name: &str, problem: String) {
        let origin = self.node(name).map_or(self.origin, |value| &value.origin);
        let (span, path) = (self.input.value_span(origin), join_path(&self.path, name));
        self.input.report(severity, span, path, problem);
    }

    /// Reads the text file named by `key`. Returns `None` if the key is empty, after an error, or
    /// if no such file is read.
    pub(super) fn read_text_file(&self, key: &str, content: &str) -> Option<String> {
        let path = self.get_nonempty_string(key)?;
        if !self.input.reads_key_files() {
            return None;
        }
        let text = self.input.read_file(Path::new(&path));
        let text = self.accept(key, text.map_err(|error| format!("the file {error}")))?;
        let text = text.trim_end();
        if text.is_empty() {
            self.report_error(key, format!("the file is empty; expected a {content}"));
            return None;
        }
        Some(text.to_owned())
    }

    /// Reads the PEM file named by `key`. Returns `None` after an error.
    pub(super) fn read_pem_file(&self, key: &str) -> Option<Vec<u8>> {
        let path: String = self.read(key)?;
        if path.is_empty() {
            self.report_error(key, "expected the path of a PEM file");
            return None;
        }
        let pem = self.input.read_file_bytes(Path::new(&path));
        self.accept(key, pem.map_err(|error| format!("the file {error}")))
    }

    /// Returns what the file named by `key` contains, or reports what is wrong in it.
    pub(super) fn accept_content<T>(&self, key: &str, content: Result<T, String>) -> Option<T> {
        let content = content.map_err(|reason| format!("in the file: {reason}"));
        self.accept(key, content)
    }

    /// Reads the path of an existing directory. The inner `None`: the key is empty, or directories
    /// are not looked up.
    pub(super) fn read_directory(&self, key: &str, is_used: bool) -> Option<Option<PathBuf>> {
        let is_checked = is_used && self.input.reads_key_files();
        self.get_parsed(key, |path| match path {
            "" => Ok(None),
            path if is_checked && !Path::new(path).is_dir() => {
                Err("not a directory; expected an existing directory".to_owned())
            }
            path => Ok(Some(PathBuf::from(path))),
        })
    }

    fn open_table(
        input: &'a ConfigInput,
        keys: &'static [SchemaKey],
        table: &'a ValueNode,
        path: String,
    ) -> Self {
        for (name, value) in table.as_table().into_iter().flatten() {
            if schema::find_key(keys, name).is_none() {
                let span = input.value_span(&value.origin.of_key());
                let problem = format!("unknown key; {}", schema::suggest_key(keys, name));
                input.report_error(span, join_path(&path, name), problem);
            }
        }
        Self {
            input,
            keys,
            table: Some(table),
            origin: &table.origin,
            path,
        }
    }

    fn node(&self, name: &str) -> Option<&'a ValueNode> {
        self.table?.get(name)
    }

    /// Reads a value with `parse`, which returns `None` if it has not the type or range of the
    /// schema, or the reason why the value is invalid.
    fn read_result<T>(
        &self,
        name: &str,
        parse: impl Fn(&ValueKind, &ValueContent) -> Option<Result<T, String>>,
    ) -> Option<T> {
        let key = self.schema_key(name)?;
        match (self.get(name), &key.requirement) {
            (Some(item), _) => match parse(&key.kind, &item.value.content) {
                Some(Ok(value)) => return Some(value),
                Some(Err(reason)) => item.report_error(reason),
                None => {
                    let suggestion = suggestions::suggest_value(&key.kind, &item.value.content);
                    item.report_error(self.expected_text(name) + &suggestion)
                }
            },
            (None, KeyRequirement::Required) => {
                self.report_error(name, format!("missing; {}", self.expected_text(name)));
                None
            }
            (None, _) => None,
        }
        .or_else(|| match key.requirement {
            KeyRequirement::Default(text) => {
                let default = content_from_text(&key.kind, text);
                parse(&key.kind, &default)?.ok()
            }
            KeyRequirement::Required | KeyRequirement::Optional => None,
        })
    }

    /// The tables of the key `list`, or of `single`, which stands for a list of one.
    pub(super) fn get_one_or_more_tables(&self, single: &str, list: &str) -> Vec<Self> {
        if self.contains_key(single) {
            self.get_optional_table(single).into_iter().collect()
        } else {
            self.get_tables(list)
        }
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
    pub(super) fn open_table(&self, keys: &'static [SchemaKey]) -> Option<TableReader<'a>> {
        let path = self.path.clone();
        self.value.as_table()?;
        Some(TableReader::open_table(self.input, keys, self.value, path))
    }

    fn child(&self, value: &'a ValueNode, path: String) -> Self {
        Self {
            value,
            path,
            ..self.clone()
        }
    }

    /// Reports an error at the value. Returns `None`, for use in place of the parsed value.
    pub(super) fn report_error<T>(&self, problem: impl Into<String>) -> Option<T> {
        let problem = problem.into();
        let problem = match self.quote_value() {
            Some(found) => format!("found {found}; {problem}"),
            None => problem,
        };
        self.report(DiagnosticSeverity::Error, problem);
        None
    }

    /// Reports a warning at the value.
    pub(super) fn report_warning(&self, problem: impl Into<String>) {
        self.report(DiagnosticSeverity::Warning, problem.into());
    }

    fn report(&self, severity: DiagnosticSeverity, problem: String) {
        let (span, path) = (self.source_span(), self.path.clone());
        self.input.report(severity, span, path, problem);
    }

    /// Position of the value.
    pub(super) fn source_span(&self) -> SourceSpan {
        self.input.value_span(&self.value.origin)
    }

    fn quote_value(&self) -> Option<String> {
        if self.is_secret {
            return None;
        }
        if let Some(source) = self.input.source_text(&self.value.origin) {
            return Some(quote_source(source));
        }
        match &self.value.content {
            ValueContent::Text(text) => Some(format!("\"{}\"", quote_source(text))),
            ValueContent::Integer(number) => Some(number.to_string()),
            ValueContent::Float(number) => Some(number.to_string()),
            ValueContent::Bool(flag) => Some(flag.to_string()),
            _ => None,
        }
    }
}

fn join_path(table: &str, key: &str) -> String {
    let key = key.escape_debug();
    if table.is_empty() {
        key.to_string()
    } else {
        format!("{table}.{key}")
    }
}
