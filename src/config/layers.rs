//! Merges the environment and flags with figment, and applies them to the values of the main file.
//! Later layers override earlier ones.

use super::input::ConfigInput;
use super::schema::{self, ValueKind};
use super::sources::FlagOverrides;
use super::text_conversion;
use super::value_tree::{ValueNode, ValueOrigin};
use crate::text::find_similar;
use figment::providers::Serialized;
use figment::{Figment, Metadata, Provider};

const VARIABLE_PREFIX: &str = "TIDEGATE_";
const VARIABLE_SEPARATOR: &str = "__";

/// Overrides the values of the main file. A variable with a double underscore that names no key is
/// left out and reported as an error.
pub(super) fn apply_overrides(
    input: &ConfigInput,
    root: &mut ValueNode,
    env: &[(String, String)],
    flags: &FlagOverrides,
) {
    let mut layers = Figment::new();
    for (name, text) in env {
        if let Some(path) = parse_variable(input, name) {
            layers = layers.merge(OverrideLayer::new(name, &path, text));
        }
    }
    for (label, path, text) in [
        ("--upstream", "upstream.url", &flags.upstream),
        ("--listen", "listen.address", &flags.listen),
    ] {
        if let Some(text) = text {
            layers = layers.merge(OverrideLayer::new(label, path, text));
        }
    }
    let url = root.get("upstream").and_then(|table| table.get("url"));
    if flags.needs_no_upstream && url.is_none() {
        layers = layers.join(OverrideLayer::new(
            "default",
            "upstream.url",
            "http://127.0.0.1",
        ));
    }
    for leaf in schema::leaf_keys() {
        if let Ok(value) = layers.find_value(&leaf.path)
            && let Some(text) = value.as_str()
        {
            let label = layers.find_metadata(&leaf.path);
            let label = label.map_or("", |layer| &layer.name);
            let content = text_conversion::content_from_text(&leaf.key.kind, text);
            let value = ValueNode::new(content, ValueOrigin::Override(label.into()));
            root.set_at_path(&leaf.path.split('.').collect::<Vec<_>>(), value);
        }
    }
    let is_cleartext = |url: &String| url.starts_with("http://");
    if flags.upstream.as_ref().is_some_and(is_cleartext)
        && let Some(upstream) = root.table_mut().and_then(|root| root.get_mut("upstream"))
    {
        // These settings are for the upstream that the flag replaces.
        upstream.take("tls");
    }
}

/// The text of one key, from an environment variable or a flag.
struct OverrideLayer {
    /// Name of the variable or flag, for messages.
    label: String,
    value: Serialized<String>,
}

impl OverrideLayer {
    fn new(label: &str, path: &str, text: &str) -> Self {
        Self {
            label: label.to_owned(),
            value: Serialized::default(path, text.to_owned()),
        }
    }
}

impl Provider for OverrideLayer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.label.clone())
    }

    fn data(
        &self,
    ) -> Result<figment::value::Map<figment::Profile, figment::value::Dict>, figment::Error> {
        self.value.data()
    }
}

/// The path of the key that an environment variable sets. Ignores names without a double
/// underscore, because Kubernetes sets some for a Service named tidegate.
fn parse_variable(input: &ConfigInput, name: &str) -> Option<String> {
    let rest = name
        .strip_prefix(VARIABLE_PREFIX)
        .filter(|rest| rest.contains(VARIABLE_SEPARATOR))?;
    let key = rest.replace(VARIABLE_SEPARATOR, ".").to_ascii_lowercase();
    let problem = match schema::find_key_by_path(&key) {
        _ if key.split('.').next() == Some("policy") => {
            "policies can't be set from the environment".to_owned()
        }
        Some(found) if matches!(found.kind, ValueKind::Table(_) | ValueKind::TableList(_)) => {
            "is a table; set the keys in it".to_owned()
        }
        Some(_) => return Some(key),
        None => format!("unknown key{}", suggest_variable(&key)),
    };
    input.report_error(ConfigInput::span_for_override(name), key, problem);
    None
}

fn suggest_variable(key: &str) -> String {
    let paths = schema::leaf_keys().into_iter().map(|leaf| leaf.path);
    let best = find_similar(paths, key, 0.8);
    best.map_or_else(String::new, |path| {
        let name = path.replace('.', VARIABLE_SEPARATOR).to_ascii_uppercase();
        format!("; did you mean {VARIABLE_PREFIX}{name}?")
    })
}
