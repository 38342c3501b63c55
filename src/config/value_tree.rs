//! The values of a configuration as a tree. Each value knows where it was written.

use serde::Serialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub(super) type ValueTable = BTreeMap<String, ValueNode>;

/// A value and where it was written. It may hold a password, so `Debug` prints none.
#[derive(Clone, Default, Serialize)]
#[serde(transparent)]
pub(super) struct ValueNode {
    pub(super) content: ValueContent,
    #[serde(skip)]
    pub(super) origin: ValueOrigin,
}

#[derive(Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum ValueContent {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<ValueNode>),
    Table(ValueTable),
    /// A value that no key takes, such as a date.
    Unsupported,
}

/// Where a value was written.
#[derive(Clone, Debug)]
pub(super) enum ValueOrigin {
    /// Byte ranges in a document. Both are empty for a whole document.
    Document {
        document: usize,
        key: Range<u32>,
        value: Range<u32>,
    },
    /// The name of a variable or flag.
    Override(Arc<str>),
}

impl ValueNode {
    /// A value, and the items in it if it is a list, with one origin.
    pub(super) fn new(mut content: ValueContent, origin: ValueOrigin) -> Self {
        if let ValueContent::List(items) = &mut content {
            items
                .iter_mut()
                .for_each(|item| item.origin = origin.clone());
        }
        Self { content, origin }
    }

    pub(super) fn from_text(text: &str) -> Self {
        let content = ValueContent::Text(text.to_owned());
        Self::new(content, ValueOrigin::default())
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        self.content.as_str()
    }

    pub(super) fn as_list(&self) -> Option<&[Self]> {
        match &self.content {
            ValueContent::List(items) => Some(items),
            _ => None,
        }
    }

    pub(super) fn as_table(&self) -> Option<&ValueTable> {
        match &self.content {
            ValueContent::Table(table) => Some(table),
            _ => None,
        }
    }

    /// The value of a key, if this is a table that has it.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        self.as_table()?.get(key)
    }

    pub(super) fn table_mut(&mut self) -> Option<&mut ValueTable> {
        match &mut self.content {
            ValueContent::Table(table) => Some(table),
            _ => None,
        }
    }

    /// Removes the value of a key, if this is a table that has it.
    pub(super) fn take(&mut self, key: &str) -> Option<Self> {
        self.table_mut()?.remove(key)
    }

    /// Sets the value at a path. New tables around it count as written where this one is.
    pub(super) fn set_at_path(&mut self, path: &[&str], value: Self) {
        let Some((key, rest)) = path.split_first() else {
            *self = value;
            return;
        };
        if self.as_table().is_none() {
            self.content = ValueContent::default();
        }
        let new_table = Self::new(ValueContent::default(), self.origin.clone());
        if let Some(table) = self.table_mut() {
            let inner = table.entry((*key).to_owned()).or_insert(new_table);
            inner.set_at_path(rest, value);
        }
    }

    /// Appends the policies of an included file.
    pub(super) fn add_policies(&mut self, mut included: Self) {
        let (Some(more), Some(table)) = (included.take("policy"), self.table_mut()) else {
            return;
        };
        let policies = table
            .entry("policy".to_owned())
            .or_insert_with(|| Self::new(ValueContent::List(Vec::new()), more.origin.clone()));
        if let (ValueContent::List(all), ValueContent::List(more)) =
            (&mut policies.content, more.content)
        {
            all.extend(more);
        }
    }

    /// A copy without the policies.
    pub(super) fn clone_settings(&self) -> Self {
        let settings = self.as_table().into_iter().flatten();
        let settings = settings.filter(|(key, _)| *key != "policy");
        let settings = settings.map(|(key, value)| (key.clone(), value.clone()));
        let settings = ValueContent::Table(settings.collect());
        Self::new(settings, self.origin.clone())
    }
}

/// Equal values may be written in different places.
impl PartialEq for ValueNode {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

impl fmt::Debug for ValueNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl ValueContent {
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn to_json(&self) -> Json {
        serde_json::to_value(self).unwrap_or_default()
    }
}

impl Default for ValueContent {
    fn default() -> Self {
        Self::Table(ValueTable::new())
    }
}

impl ValueOrigin {
    /// Where the key of the value was written.
    pub(super) fn of_key(&self) -> Self {
        match self {
            Self::Document { document, key, .. } => Self::Document {
                document: *document,
                key: key.clone(),
                value: key.clone(),
            },
            Self::Override(_) => self.clone(),
        }
    }
}

impl Default for ValueOrigin {
    fn default() -> Self {
        Self::Document {
            document: 0,
            key: 0..0,
            value: 0..0,
        }
    }
}
