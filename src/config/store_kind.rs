//! The kind of the store, if a Redis URL implies it.
//!
//! A URL without a kind means Redis. The kind of a higher layer (the environment) wins.

use super::input::ConfigInput;
use super::value_tree::{ValueContent, ValueNode, ValueOrigin};

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
        input.report_warning(input.value_span(&at.origin), path.to_owned(), problem);
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
