//! The effective configuration as JSON: every key with its value, and the policies as written.

use super::loaded_config::{Config, RestartOnlySettings};
use super::schema::{self, AppliedAt};
use super::schema_value::content_or_default;
use super::value_tree::{ValueContent, ValueNode, ValueOrigin};
use crate::policy::{KeyComponent, KeyTemplate};
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};

impl Config {
    /// The effective configuration as JSON: reloadable keys from `self`, all others from `running`.
    /// Contains no secret and no user name of a URL.
    pub fn effective_json(&self, running: &RestartOnlySettings) -> String {
        Json::Object(self.effective_values(running)).to_string()
    }

    fn effective_values(&self, running: &RestartOnlySettings) -> Map<String, Json> {
        let mut top = ValueNode::default();
        for leaf in schema::leaf_keys() {
            let source = match leaf.applied_at {
                AppliedAt::Restart => &running.raw,
                AppliedAt::Reload | AppliedAt::CredentialReload => &self.raw,
            };
            let shown = match content_or_default(source, &leaf) {
                None => continue,
                Some(content) if !leaf.key.is_secret => content,
                Some(ValueContent::List(urls)) => {
                    let urls = urls.iter().map(|url| mask_login(url.as_str()));
                    ValueContent::List(urls.map(|url| ValueNode::from_text(&url)).collect())
                }
                Some(url) => ValueContent::Text(mask_login(url.as_str())),
            };
            let path: Vec<&str> = leaf.path.split('.').collect();
            top.set_at_path(&path, ValueNode::new(shown, ValueOrigin::default()));
        }
        let mut top = match top.content.to_json() {
            Json::Object(top) => top,
            _ => Map::new(),
        };
        let policies = self.raw.get("policy");
        let mut policies = policies.map_or(Json::Array(Vec::new()), |all| all.content.to_json());
        for policy in policies.as_array_mut().into_iter().flatten() {
            self.mask_hashed_values(policy);
        }
        top.insert("policy".into(), policies);
        top
    }

    /// Replaces the values of hashed key parts in overrides by their digests.
    fn mask_hashed_values(&self, policy: &mut Json) {
        let parts = text_items(policy.get("key"));
        let path = &self.policy_table.path;
        let components = parts.filter_map(|text| KeyComponent::parse(text, path).ok());
        let key = KeyTemplate::from_components(components.collect(), self.value_hasher.clone());
        let overrides = policy.get_mut("override").and_then(Json::as_array_mut);
        for entry in overrides.into_iter().flatten() {
            let values = entry.get_mut("key").and_then(Json::as_array_mut);
            for (position, value) in values.into_iter().flatten().enumerate() {
                let is_exact = |text: &&str| !text.replace("\\*", "").contains('*');
                if let Some(text) = value.as_str().filter(is_exact) {
                    *value = key.format_value(position, text).into();
                }
            }
        }
    }

    /// Hash of the effective settings that all instances of a service should share. Leaves out the
    /// tables in which instances may differ, such as pod addresses or a changed log level. The hash
    /// has 48 bits, so that a double represents it exactly.
    pub fn shared_settings_hash(&self, running: &RestartOnlySettings) -> u64 {
        let mut top = self.effective_values(running);
        top.retain(|table, _| {
            schema::find_key(&schema::ROOT, table).is_none_or(|table| !table.is_per_instance)
        });
        // Instances with different secrets have different counters.
        if let Some(fingerprint) = self.value_hasher.fingerprint() {
            top.insert("hash_secret".to_owned(), fingerprint.into());
        }
        let hash = Sha256::digest(Json::Object(top).to_string());
        hash.iter()
            .take(6)
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// The texts of a list, or one text.
fn text_items(value: Option<&Json>) -> impl Iterator<Item = &str> {
    let list = value.and_then(Json::as_array).into_iter().flatten();
    list.chain(value).filter_map(Json::as_str)
}

/// Masks user and password of a URL. Masks all of a value that is not a URL.
fn mask_login(url: Option<&str>) -> String {
    let Some((scheme, rest)) = url.and_then(|text| text.split_once("://")) else {
        return "***".to_owned();
    };
    match (rest.split_once('?'), rest.rsplit_once('@')) {
        // Parameters of a Unix socket URL may hold user and password.
        (Some((path, _)), _) if scheme.ends_with("unix") => format!("{scheme}://{path}?***"),
        (_, Some((_, server))) if !scheme.ends_with("unix") => format!("{scheme}://***@{server}"),
        _ => format!("{scheme}://{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ConfigSources, FileSource, load};
    use super::*;

    fn load_config(text: &str) -> Config {
        let file = FileSource::Text {
            name: "t.toml".into(),
            text: text.into(),
        };
        load(&ConfigSources {
            file,
            ..ConfigSources::default()
        })
        .unwrap()
    }

    #[test]
    fn hash_covers_shared_settings_and_ignores_per_instance_ones() {
        let hash = |text: &str| {
            let config = load_config(&format!("upstream.url = 'http://a'\n{text}"));
            config.shared_settings_hash(&config.restart_only_settings())
        };
        let policy = "[[policy]]\nname = \"p\"\nlimit = { requests = 5, per = \"1s\" }\n";
        let first = hash(policy);
        assert_eq!(
            first,
            hash(&format!(
                "log.level = 'warn'\nlisten.address = '10.0.0.7:80'\n{policy}"
            ))
        );
        assert_ne!(first, hash(&policy.replace('5', "6")));
        assert_ne!(first, hash(&format!("client.ipv4_prefix = 24\n{policy}")));
        assert!(first < 1 << 48);
    }

    #[test]
    fn restart_only_keys_show_the_running_value() {
        let start = load_config("upstream.url = \"http://a\"\nresponse.headers = \"none\"\n");
        let newer = load_config(
            "upstream.url = \"http://b\"\nresponse.headers = \"legacy\"\n[[policy]]\nname = \"p\"\naction = \"deny\"\n",
        );
        let shown: Json =
            serde_json::from_str(&newer.effective_json(&start.restart_only_settings())).unwrap();
        assert_eq!(shown["upstream"]["url"], "http://a");
        assert_eq!(shown["response"]["headers"], "legacy");
        assert_eq!(shown["listen"]["http"]["max_headers"], 100);
        assert_eq!(
            shown["policy"],
            serde_json::json!([{ "name": "p", "action": "deny" }])
        );
    }

    #[test]
    fn masks_logins_in_urls() {
        for (url, shown) in [
            (
                "redis://ann:hunter2@redis:6380/3",
                "redis://***@redis:6380/3",
            ),
            ("redis://redis:6380/3", "redis://redis:6380/3"),
            (
                "unix:///run/redis.sock?user=ann&pass=hunter2@",
                "unix:///run/redis.sock?***",
            ),
            ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ] {
            let config = load_config(&format!(
                "upstream.url = \"http://a\"\nstore.redis.url = \"{url}\"\n"
            ));
            let text = config.effective_json(&config.restart_only_settings());
            let json: Json = serde_json::from_str(&text).unwrap();
            assert_eq!(json["store"]["redis"]["url"], shown);
            assert!(!text.contains("hunter2") && !text.contains("ann"), "{text}");
        }
        let config = load_config(
            "upstream.url = \"http://a\"\nstore.redis.topology = \"cluster\"\n\
             store.redis.urls = [\"redis://ann:hunter2@a\", \"redis://ann:hunter2@b:1\"]\n",
        );
        let json: Json =
            serde_json::from_str(&config.effective_json(&config.restart_only_settings())).unwrap();
        assert_eq!(
            json["store"]["redis"]["urls"],
            serde_json::json!(["redis://***@a", "redis://***@b:1"])
        );
    }
}
