//! Merges the environment and flags with figment, and applies them to the values of the main file.
//! Later layers override earlier ones.

use super::diagnostic::DiagnosticSeverity;
use super::input::ConfigInput;
use super::schema::{self, LeafKey, ValueKind};
use super::schema_value::content_from_text;
use super::sources::FlagOverrides;
use super::value_tree::{ValueContent, ValueNode, ValueOrigin};
use crate::text::find_similar;
use figment::Figment;
use figment::providers::Serialized;

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
    fn layer<'a>(label: &'a str, path: &str, text: &'a str) -> Serialized<(&'a str, &'a str)> {
        Serialized::default(path, (label, text))
    }
    let mut layers = Figment::new();
    for (name, text) in env {
        if let Some(path) = parse_variable(input, name) {
            layers = layers.merge(layer(name, &path, text));
        }
    }
    for (label, path, text) in [
        ("--upstream", "upstream.url", &flags.upstream),
        ("--listen", "listen.address", &flags.listen),
    ] {
        if let Some(text) = text {
            layers = layers.merge(layer(label, path, text));
        }
    }
    let url = root.get("upstream").and_then(|table| table.get("url"));
    if flags.needs_no_upstream && url.is_none() {
        layers = layers.join(layer("default", "upstream.url", "http://127.0.0.1"));
    }
    for leaf in schema::leaf_keys() {
        if let Ok((label, text)) = layers.extract_inner::<(String, String)>(&leaf.path) {
            let content = content_from_text(&leaf.key.kind, &text);
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

/// The path of the key that an environment variable sets. Ignores names without a double
/// underscore, because Kubernetes sets some for a Service named tidegate.
fn parse_variable(input: &ConfigInput, name: &str) -> Option<String> {
    let rest = name
        .strip_prefix(VARIABLE_PREFIX)
        .filter(|rest| rest.contains(VARIABLE_SEPARATOR))?;
    let key = rest.replace(VARIABLE_SEPARATOR, ".").to_ascii_lowercase();
    let leaves = schema::leaf_keys();
    let is_around = |leaf: &LeafKey| {
        let rest = leaf.path.strip_prefix(&key);
        rest.is_some_and(|rest| rest.starts_with('.'))
    };
    let problem = match leaves.iter().find(|leaf| leaf.path == key) {
        _ if key.split('.').next() == Some("policy") => {
            "policies can't be set from the environment".to_owned()
        }
        Some(leaf) if !matches!(leaf.key.kind, ValueKind::TableList(_)) => return Some(key),
        None if !leaves.iter().any(is_around) => {
            format!("unknown key{}", suggest_variable(&leaves, &key))
        }
        _ => "is a table; set the keys in it".to_owned(),
    };
    input.report_error(ConfigInput::span_for_override(name), key, problem);
    None
}

fn suggest_variable(leaves: &[LeafKey], key: &str) -> String {
    let paths = leaves.iter().map(|leaf| &leaf.path);
    let best = find_similar(paths, key, 0.8);
    best.map_or_else(String::new, |path| {
        let name = path.replace('.', VARIABLE_SEPARATOR).to_ascii_uppercase();
        format!("; did you mean {VARIABLE_PREFIX}{name}?")
    })
}

/// Finds a Redis URL that is set and not empty, with its key.
pub(super) fn find_url(root: &ValueNode) -> Option<(&'static str, &ValueNode)> {
    let redis = root.get("store")?.get("redis")?;
    ["url", "urls"].into_iter().find_map(|key| {
        let value = redis.get(key)?;
        let is_empty = match &value.content {
            ValueContent::Text(text) => text.is_empty(),
            ValueContent::List(items) => items.is_empty(),
            _ => false,
        };
        (!is_empty).then_some((key, value))
    })
}

/// Sets `store.kind` to `"redis"` in the merged values if a Redis URL is given without a kind in
/// the same or a higher layer. Reports a kind and a URL that contradict each other. `file_has_url`
/// is without overrides.
pub(super) fn resolve_store_kind(input: &ConfigInput, file_has_url: bool, root: &mut ValueNode) {
    const KIND_PATH: &str = "store.kind";
    let Some((url_key, url)) = find_url(root) else {
        return;
    };
    let url_path = format!("store.redis.{url_key}");
    let warn = |at: &ValueNode, path: &str, problem| {
        let span = input.value_span(&at.origin);
        input.report(DiagnosticSeverity::Warning, span, path.to_owned(), problem);
    };
    if let Some(kind) = root.get("store").and_then(|store| store.get("kind")) {
        if kind.as_str() != Some("memory") {
            return;
        }
        match (&kind.origin, &url.origin) {
            (ValueOrigin::Override(label), ValueOrigin::Document { .. }) => {
                return warn(
                    url,
                    &url_path,
                    format!("without effect: {label} is \"memory\""),
                );
            }
            (ValueOrigin::Document { .. }, ValueOrigin::Override(label)) if !file_has_url => {
                let problem = format!("without effect: {label} is set, so the store is Redis");
                warn(kind, KIND_PATH, problem);
            }
            _ => {
                let problem = format!(
                    "\"memory\" beside {url_path} contradicts it; expected \"redis\", or no {url_path}"
                );
                let span = input.value_span(&kind.origin);
                return input.report_error(span, KIND_PATH.to_owned(), problem);
            }
        }
    }
    let implied = ValueContent::Text("redis".to_owned());
    let implied = ValueNode::new(implied, url.origin.clone());
    root.set_at_path(&["store", "kind"], implied);
}

#[cfg(test)]
mod tests {
    use crate::config::properties::load_with_environment;
    use crate::config::{Config, StoreSettings};

    const POLICY: &str =
        "[[policy]]\nname = 'a'\nkey = ['client_ip']\nlimit = { requests = 1, per = '1s' }\n";
    const URL: (&str, &str) = ("TIDEGATE_STORE__REDIS__URL", "redis://env:6379/1");
    const PREFIX: (&str, &str) = ("TIDEGATE_STORE__REDIS__KEY_PREFIX", "shop");

    fn store_kind(config: &Config) -> &'static str {
        match config.store {
            StoreSettings::Memory(_) => "memory",
            StoreSettings::Redis(_) => "redis",
        }
    }

    #[test]
    fn a_redis_url_means_redis_unless_a_higher_layer_says_otherwise() {
        let file_url = "[store.redis]\nurl = 'redis://file'\n";
        let file_urls = "[store.redis]\ntopology = 'cluster'\nurls = ['redis://file']\n";
        let memory = "[store]\nkind = 'memory'\n";
        let kind = |kind| ("TIDEGATE_STORE__KIND", kind);
        for (file, env, expected, warning) in [
            ("", vec![], "memory", ""),
            (file_url, vec![], "redis", ""),
            (file_urls, vec![], "redis", ""),
            ("", vec![URL], "redis", ""),
            (memory, vec![], "memory", ""),
            (
                memory,
                vec![URL],
                "redis",
                "TIDEGATE_STORE__REDIS__URL is set, so the store is Redis",
            ),
            (
                file_url,
                vec![kind("memory")],
                "memory",
                "TIDEGATE_STORE__KIND is \"memory\"",
            ),
            (file_url, vec![kind("redis")], "redis", ""),
            ("[store]\nkind = 'redis'\n", vec![], "redis", ""),
            (
                "[store.redis]\nurl = ''\n[store.redis.breaker]\nfailures = 3\n",
                vec![URL],
                "redis",
                "",
            ),
            (
                "[store.redis]\ntimeout = '20ms'\n",
                vec![],
                "memory",
                "not used",
            ),
            (
                "[store]\nkind = 'memory'\n[store.redis]\ntimeout = '20ms'\n",
                vec![],
                "memory",
                "",
            ),
        ] {
            let env: Vec<(&str, &str)> = env.into_iter().chain([PREFIX]).collect();
            let env = if expected == "redis" || file.contains("url") {
                env
            } else {
                Vec::new()
            };
            let config = load_with_environment(&format!("{file}{POLICY}"), &env).unwrap();
            assert_eq!(store_kind(&config), expected, "{file} {env:?}");
            let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
            let warnings = warnings.concat();
            assert_eq!(
                warnings.is_empty(),
                warning.is_empty(),
                "{file} {env:?}: {warnings}"
            );
            assert!(warnings.contains(warning), "{file} {env:?}: {warnings}");
            // The dashboard and the hash of the settings show the kind in effect.
            let json = config.effective_json(&config.restart_only_settings());
            assert!(json.contains(&format!("\"kind\":\"{expected}\"")), "{json}");
        }
    }

    #[test]
    fn memory_beside_a_url_in_one_layer_is_an_error() {
        for (file, env) in [
            (
                "[store]\nkind = 'memory'\n[store.redis]\nurl = 'redis://:hunter2@file'\n",
                vec![],
            ),
            (
                "[store]\nkind = 'memory'\n[store.redis]\nurl = 'redis://:hunter2@file'\n",
                vec![URL],
            ),
            ("", vec![URL, ("TIDEGATE_STORE__KIND", "memory")]),
        ] {
            let errors = load_with_environment(&format!("{file}{POLICY}"), &env).unwrap_err();
            let text = errors.to_string();
            assert!(
                text.contains("store.kind: \"memory\" beside store.redis.url contradicts it"),
                "{text}"
            );
            assert!(
                !text.contains("hunter2") && text.ends_with("1 error\n"),
                "{text}"
            );
        }
    }
}
