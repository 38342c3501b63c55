//! Reads values by the schema, and goes on after an error, so that one load finds all of them.
//!
//! A value that is wrong is reported, and its default stands in for it: whatever is built from it is
//! thrown away at the end, but what else is wrong comes to light.

use super::diagnostic::{Place, quotable};
use super::document::KeyPath;
use super::input::Input;
use super::schema::{self, Key, Kind, Need};
use super::values;
use figment::value::{Dict, Num, Value};
use std::time::Duration;

/// A table that is being read.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    input: &'a Input,
    document: usize,
    table: &'static [Key],
    /// `None`: not written, so everything has its default.
    values: Option<&'a Dict>,
    path: KeyPath,
}

/// A value that is being read.
#[derive(Clone, Debug)]
pub(super) struct Item<'a> {
    input: &'a Input,
    document: usize,
    pub(super) value: &'a Value,
    path: KeyPath,
    secret: bool,
}

/// What is wrong with a value.
enum Wrong {
    /// It is none of what the schema says.
    Unexpected,
    /// This.
    Because(String),
}

impl From<String> for Wrong {
    fn from(reason: String) -> Self {
        Self::Because(reason)
    }
}

impl<'a> Cursor<'a> {
    /// The top of a document, or of the layers merged over it. Unknown keys are reported.
    pub(super) fn top(
        input: &'a Input,
        document: usize,
        table: &'static [Key],
        values: &'a Dict,
    ) -> Self {
        Self::open(input, document, table, Some(values), KeyPath::default())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.values.is_some_and(|values| values.contains_key(name))
    }

    /// `None` for a key that isn't written. So it is with all readers below: a key with a default
    /// always has a value, and only where the schema says otherwise `None` is absent or wrong.
    pub(super) fn item(&self, name: &str) -> Option<Item<'a>> {
        let value = self.values?.get(name)?;
        let secret = self
            .key(name)
            .is_some_and(|key| matches!(key.kind, Kind::Secret(_) | Kind::Secrets(_)));
        Some(Item {
            input: self.input,
            document: self.document,
            value,
            path: self.path.key(name),
            secret,
        })
    }

    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        self.read(name, |_, value| value.to_bool().ok_or(Wrong::Unexpected))
    }

    /// The schema's range has to fit into `T`.
    pub(super) fn whole<T: TryFrom<i64>>(&self, name: &str) -> Option<T> {
        self.read(name, |kind, value| match (kind, value) {
            (
                Kind::Whole { min, max } | Kind::WholeOrTable { min, max, .. },
                Value::Num(_, Num::I64(number)),
            ) if (min..=max).contains(&number) => {
                T::try_from(*number).ok().ok_or(Wrong::Unexpected)
            }
            _ => Err(Wrong::Unexpected),
        })
    }

    pub(super) fn fraction(&self, name: &str) -> Option<f64> {
        self.read(name, |_, value| match value {
            Value::Num(_, Num::F64(number)) if (0.0..=1.0).contains(number) => Ok(*number),
            Value::Num(_, Num::I64(0)) => Ok(0.0),
            Value::Num(_, Num::I64(1)) => Ok(1.0),
            _ => Err(Wrong::Unexpected),
        })
    }

    pub(super) fn duration(&self, name: &str) -> Option<Duration> {
        self.read(name, |kind, value| {
            match (kind, value.as_str().and_then(values::duration)) {
                (Kind::Duration { min, max }, Some(duration))
                    if (*min..=*max).contains(&duration) =>
                {
                    Ok(duration)
                }
                _ => Err(Wrong::Unexpected),
            }
        })
    }

    /// Bytes.
    pub(super) fn size<T: TryFrom<u64>>(&self, name: &str) -> Option<T> {
        self.read(name, |kind, value| {
            match (kind, value.as_str().and_then(values::size)) {
                (Kind::Size { min, max }, Some(size)) if (*min..=*max).contains(&size) => {
                    T::try_from(size).ok().ok_or(Wrong::Unexpected)
                }
                _ => Err(Wrong::Unexpected),
            }
        })
    }

    /// What one of the schema's words means. `meanings` lists all of them.
    pub(super) fn word<T: Copy>(&self, name: &str, meanings: &[(&str, T)]) -> Option<T> {
        self.read(name, |_, value| {
            let meaning = meanings
                .iter()
                .find(|(word, _)| value.as_str() == Some(word));
            meaning
                .map(|(_, meaning)| *meaning)
                .ok_or(Wrong::Unexpected)
        })
    }

    /// What a text means to `parse`, whose errors are words that follow "found …;".
    pub(super) fn parsed<T>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.read(name, |_, value| {
            Ok(parse(value.as_str().ok_or(Wrong::Unexpected)?)?)
        })
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.parsed(name, |text| Ok(text.to_owned()))
    }

    /// What each text of a list means to `parse`; those that are wrong are left out.
    pub(super) fn list<T>(&self, name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
        let parse = |item: Item<'_>| match item.value.as_str().map(&parse) {
            Some(Ok(value)) => Some(value),
            Some(Err(reason)) => item.fail(&reason),
            None => item.fail(&self.expected(name)),
        };
        self.items(name).into_iter().filter_map(parse).collect()
    }

    /// The items of a list. A lone text is a list of one.
    pub(super) fn items(&self, name: &str) -> Vec<Item<'a>> {
        match self.item(name) {
            None => Vec::new(),
            Some(Item {
                value: Value::Array(_, values),
                path,
                secret,
                ..
            }) => values
                .iter()
                .enumerate()
                .map(|(at, value)| Item {
                    input: self.input,
                    document: self.document,
                    value,
                    path: path.index(at),
                    secret,
                })
                .collect(),
            Some(item) if item.value.as_str().is_some() => vec![item],
            Some(item) => {
                item.fail::<()>(&self.expected(name));
                Vec::new()
            }
        }
    }

    /// The entries of a table whose keys are names of the user's choice.
    pub(super) fn entries(&self, name: &str) -> Vec<(&'a str, Item<'a>)> {
        let Some(item) = self.item(name) else {
            return Vec::new();
        };
        let Value::Dict(_, entries) = item.value else {
            item.fail::<()>(&self.expected(name));
            return Vec::new();
        };
        let entry = |(name, value): (&'a String, &'a Value)| {
            let path = item.path.key(name);
            (
                name.as_str(),
                Item {
                    value,
                    path,
                    ..item.clone()
                },
            )
        };
        entries.iter().map(entry).collect()
    }

    /// A table in which every key has a default, so that it makes no difference whether it is written.
    pub(super) fn table(&self, name: &str) -> Self {
        self.optional_table(name).unwrap_or_else(|| {
            let table = self
                .key(name)
                .map_or(&[] as &[Key], |key| table_of(&key.kind));
            Self::open(self.input, self.document, table, None, self.path.key(name))
        })
    }

    pub(super) fn optional_table(&self, name: &str) -> Option<Self> {
        let item = self.item(name)?;
        item.table(table_of(&self.key(name)?.kind))
            .or_else(|| item.fail(&self.expected(name)))
    }

    /// A list of tables; items that are none are reported and left out.
    pub(super) fn tables(&self, name: &str) -> Vec<Self> {
        let Some(key) = self.key(name) else {
            return Vec::new();
        };
        let open = |item: Item<'a>| {
            item.table(table_of(&key.kind))
                .or_else(|| item.fail("expected a table"))
        };
        self.items(name).into_iter().filter_map(open).collect()
    }

    /// Reports the value of a key, or the table if the key isn't written.
    pub(super) fn fail(&self, name: &str, problem: &str) {
        let value = self.values.and_then(|values| values.get(name));
        let path = self.path.key(name);
        self.input.error(
            self.input.place(self.document, &path, value),
            path.to_string(),
            problem.to_owned(),
        );
    }

    /// The same, of what works but may not be meant.
    pub(super) fn warn(&self, name: &str, problem: &str) {
        let value = self.values.and_then(|values| values.get(name));
        let path = self.path.key(name);
        self.input.warning(
            self.input.place(self.document, &path, value),
            path.to_string(),
            problem.to_owned(),
        );
    }

    fn open(
        input: &'a Input,
        document: usize,
        table: &'static [Key],
        values: Option<&'a Dict>,
        path: KeyPath,
    ) -> Self {
        for (name, value) in values.into_iter().flatten() {
            if schema::find(table, name).is_none() {
                let path = path.key(name);
                let place = input.place_of_key(document, &path, value);
                input.error(
                    place,
                    path.to_string(),
                    format!("unknown key; {}", schema::advice(table, name)),
                );
            }
        }
        Self {
            input,
            document,
            table,
            values,
            path,
        }
    }

    fn read<T>(&self, name: &str, parse: impl Fn(&Kind, &Value) -> Result<T, Wrong>) -> Option<T> {
        let key = self.key(name)?;
        match (self.item(name), &key.need) {
            (Some(item), _) => match parse(&key.kind, item.value) {
                Ok(value) => return Some(value),
                Err(Wrong::Unexpected) => item.fail(&self.expected(name)),
                Err(Wrong::Because(reason)) => item.fail(&reason),
            },
            (None, Need::Required) => {
                self.fail(name, &format!("missing; {}", self.expected(name)));
                None
            }
            (None, _) => None,
        }
        .or_else(|| match key.need {
            Need::Default(text) => parse(&key.kind, &values::from_text(&key.kind, text)).ok(),
            Need::Required | Need::Optional => None,
        })
    }

    fn expected(&self, name: &str) -> String {
        self.key(name)
            .map_or_else(String::new, |key| format!("expected {}", key.kind))
    }

    fn key(&self, name: &str) -> Option<&'static Key> {
        let key = schema::find(self.table, name);
        debug_assert!(
            key.is_some(),
            "the schema has no key {name:?} at {}",
            self.path
        );
        key
    }
}

fn table_of(kind: &Kind) -> &'static [Key] {
    match kind {
        Kind::Table(table)
        | Kind::Tables(table)
        | Kind::WholeOrTable { table, .. }
        | Kind::WordOrTable { table, .. } => table,
        _ => &[],
    }
}

impl<'a> Item<'a> {
    /// `None` if the value is no table.
    pub(super) fn table(&self, table: &'static [Key]) -> Option<Cursor<'a>> {
        let values = self.value.as_dict()?;
        Some(Cursor::open(
            self.input,
            self.document,
            table,
            Some(values),
            self.path.clone(),
        ))
    }

    /// Reports the value with what would be right, and is `None`, for use in place of what it should be.
    pub(super) fn fail<T>(&self, problem: &str) -> Option<T> {
        let problem = match self.found() {
            Some(found) => format!("found {found}; {problem}"),
            None => problem.to_owned(),
        };
        self.input
            .error(self.place(), self.path.to_string(), problem);
        None
    }

    /// Reports the value, of what works but may not be meant.
    pub(super) fn warn(&self, problem: &str) {
        self.input
            .warning(self.place(), self.path.to_string(), problem.to_owned());
    }

    /// Where the value was written.
    pub(super) fn place(&self) -> Place {
        self.input
            .place(self.document, &self.path, Some(self.value))
    }

    fn found(&self) -> Option<String> {
        if self.secret {
            return None;
        }
        match (
            self.input.source(self.document, &self.path, self.value),
            self.value,
        ) {
            (Some(source), _) => Some(quotable(source)),
            (None, Value::String(_, text)) => Some(format!("\"{}\"", quotable(text))),
            (None, Value::Num(_, Num::I64(number))) => Some(number.to_string()),
            (None, Value::Num(_, Num::F64(number))) => Some(number.to_string()),
            (None, Value::Bool(_, flag)) => Some(flag.to_string()),
            (None, _) => None,
        }
    }
}
