//! The merged values of a configuration, before they are interpreted.

use super::schema::{KeyRequirement, LeafKey};
use super::text_conversion;
use figment::value::{Dict, Value};
use std::fmt;

/// The merged values. They may hold a password, so `Debug` prints none of them.
#[derive(Clone, Default)]
pub(super) struct RawConfig(pub(super) Dict);

impl fmt::Debug for RawConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl RawConfig {
    /// Appends the policies of an included file.
    pub(super) fn add_policies(&mut self, mut included: Dict) {
        let Some(Value::Array(_, more)) = included.remove("policy") else {
            return;
        };
        let all = self
            .0
            .entry("policy".to_owned())
            .or_insert_with(|| Vec::<Value>::new().into());
        if let Value::Array(_, all) = all {
            all.extend(more);
        }
    }

    /// A copy without the policies.
    pub(super) fn clone_settings(&self) -> Self {
        let settings = self.0.iter().filter(|(key, _)| *key != "policy");
        Self(
            settings
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
        )
    }

    /// The value of a key, or its default.
    pub(super) fn value_or_default(&self, leaf: &LeafKey) -> Option<Value> {
        let (tables, name) = leaf.path.rsplit_once('.').unwrap_or(("", &leaf.path));
        let mut tables = tables.split_terminator('.');
        let table = tables.try_fold(&self.0, |table, name| table.get(name)?.as_dict());
        let value = table.and_then(|table| table.get(name).cloned());
        value.or_else(|| match leaf.key.requirement {
            KeyRequirement::Default(text) => {
                Some(text_conversion::value_from_text(&leaf.key.kind, text))
            }
            _ => None,
        })
    }
}
