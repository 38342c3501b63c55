//! Merges file, environment and flags with figment. Later layers override earlier ones.

use super::input::ConfigInput;
use super::schema::{self, ValueKind};
use super::sources::FlagOverrides;
use super::text_conversion;
use crate::text::find_similar;
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider, Source};
use std::path::PathBuf;

const VARIABLE_PREFIX: &str = "TIDEGATE_";
const VARIABLE_SEPARATOR: &str = "__";

/// The main file's values.
struct FileLayer<'a>(&'a Dict);

/// One value from the environment or from a flag.
struct OverrideLayer<'a> {
    /// Name of the variable or flag, for messages.
    label: &'a str,
    path: Vec<String>,
    value: Value,
}

/// Merges all layers and returns the values. `input` keeps the layers, which record the source of
/// each value. A variable with a double underscore that names no key is left out and reported
/// as an error.
pub(super) fn merge_layers(
    input: &mut ConfigInput,
    file: &Dict,
    env: &[(String, String)],
    flags: &FlagOverrides,
) -> Dict {
    let mut figment = Figment::new().merge(FileLayer(file));
    for (name, text) in env {
        if let Some(layer) = parse_env_override(input, name, text) {
            figment = figment.merge(layer);
        }
    }
    let given = [
        ("--upstream", "upstream.url", &flags.upstream),
        ("--listen", "listen.address", &flags.listen),
    ];
    for (label, path, text) in given {
        if let Some(text) = text {
            let path = path.split('.').map(str::to_owned).collect();
            figment = figment.merge(OverrideLayer {
                label,
                path,
                value: text.as_str().into(),
            });
        }
    }
    if flags.needs_no_upstream {
        figment = figment.join(OverrideLayer {
            label: "default",
            path: vec!["upstream".to_owned(), "url".to_owned()],
            value: "http://127.0.0.1".into(),
        });
    }
    let mut values = figment
        .data()
        .unwrap_or_default()
        .remove(&Profile::Default)
        .unwrap_or_default();
    let is_cleartext = |url: &String| url.starts_with("http://");
    if flags.upstream.as_ref().is_some_and(is_cleartext)
        && let Some(Value::Dict(_, upstream)) = values.get_mut("upstream")
    {
        // These settings are for the upstream that the flag replaces.
        upstream.remove("tls");
    }
    input.set_layers(figment);
    values
}

/// Parses an environment variable. Ignores names without a double underscore, because Kubernetes
/// sets some for a Service named tidegate.
fn parse_env_override<'a>(
    input: &ConfigInput,
    name: &'a str,
    text: &str,
) -> Option<OverrideLayer<'a>> {
    let rest = name
        .strip_prefix(VARIABLE_PREFIX)
        .filter(|rest| rest.contains(VARIABLE_SEPARATOR))?;
    let path: Vec<String> = rest
        .split(VARIABLE_SEPARATOR)
        .map(str::to_ascii_lowercase)
        .collect();
    let key = path.join(".");
    let problem = match schema::find_key_by_path(path.iter().map(String::as_str)) {
        _ if path.first().is_some_and(|first| first == "policy") => {
            "policies can't be set from the environment".to_owned()
        }
        Some(schema::SchemaKey {
            kind: ValueKind::Table(_) | ValueKind::TableList(_),
            ..
        }) => "is a table; set the keys in it".to_owned(),
        Some(found) => {
            return Some(OverrideLayer {
                label: name,
                value: text_conversion::value_from_text(&found.kind, text),
                path,
            });
        }
        None => format!("unknown key{}", suggest_variable(&key)),
    };
    input.report_error(ConfigInput::span_for_override(name), key, problem);
    None
}

fn suggest_variable(key: &str) -> String {
    let paths = schema::leaf_keys().into_iter().map(|leaf| leaf.path);
    let best = find_similar(paths, key, 0.8);
    best.map_or_else(String::new, |path| {
        format!(
            "; did you mean {VARIABLE_PREFIX}{}?",
            path.replace('.', VARIABLE_SEPARATOR).to_ascii_uppercase()
        )
    })
}

impl Provider for FileLayer<'_> {
    fn metadata(&self) -> Metadata {
        // Only a file layer has source text. Other layers have the name of their variable or flag.
        Metadata::from("file", Source::File(PathBuf::new()))
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

impl Provider for OverrideLayer<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.label.to_owned())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let nested = self
            .path
            .iter()
            .rev()
            .fold(self.value.clone(), |value, key| {
                Value::from(Dict::from([(key.clone(), value)]))
            });
        Ok(Profile::Default.collect(nested.into_dict().unwrap_or_default()))
    }
}
