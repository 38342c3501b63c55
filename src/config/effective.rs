//! What is in effect, for people who look: every key with its value, and the policies as they were written.

use super::schema::{self, Kind};
use super::{Config, Fixed, is_live};
use figment::value::Value;
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};

/// Where replicas may well differ: addresses of a pod, a level of the log that somebody has turned.
const OF_ONE_INSTANCE: [&str; 5] = ["listen", "admin", "log", "trace", "shutdown"];

impl Config {
    /// This configuration as JSON where a reload brought it into effect, and `running` everywhere else. Holds no
    /// secret: not even a user's name in a URL.
    pub fn effective(&self, running: &Fixed) -> String {
        Json::Object(self.shown(running)).to_string()
    }

    fn shown(&self, running: &Fixed) -> Map<String, Json> {
        let mut top = Map::new();
        for path in schema::paths() {
            let written = if is_live(&path) {
                &self.written
            } else {
                &running.written
            };
            let Some(value) = written.value(&path) else {
                continue;
            };
            let shown = match (
                schema::find_path(path.split('.')).map(|key| &key.kind),
                &value,
            ) {
                (Some(Kind::Secrets(_)), Value::Array(_, urls)) => {
                    urls.iter().map(without_login).collect()
                }
                (Some(Kind::Secret(_) | Kind::Secrets(_)), url) => without_login(url),
                _ => json(&value),
            };
            put(&mut top, &path, shown);
        }
        top.insert(
            "policy".into(),
            self.written
                .0
                .get("policy")
                .map_or(Json::Array(Vec::new()), json),
        );
        top
    }

    /// A number for what replicas of one service should have alike: what is in effect, as shown, without the tables that
    /// are about one instance. 48 bits, so that a double holds it.
    pub fn hash(&self, running: &Fixed) -> u64 {
        let mut top = self.shown(running);
        top.retain(|table, _| !OF_ONE_INSTANCE.contains(&table.as_str()));
        let hash = Sha256::digest(Json::Object(top).to_string());
        hash.iter()
            .take(6)
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

fn put(top: &mut Map<String, Json>, path: &str, value: Json) {
    let Some((table, rest)) = path.split_once('.') else {
        top.insert(path.to_owned(), value);
        return;
    };
    let inner = top.entry(table).or_insert_with(|| Json::Object(Map::new()));
    if let Json::Object(inner) = inner {
        put(inner, rest, value);
    }
}

fn json(value: &Value) -> Json {
    serde_json::to_value(value).unwrap_or(Json::Null)
}

/// A URL without user and password; anything else shows nothing.
fn without_login(url: &Value) -> Json {
    let shown = url.as_str().and_then(|text| {
        let (scheme, rest) = text.split_once("://")?;
        let server = match (
            scheme.ends_with("unix"),
            rest.split_once('?'),
            rest.rsplit_once('@'),
        ) {
            // A socket's parameters may hold both.
            (true, Some((path, _)), _) => format!("{path}?***"),
            (false, _, Some((_, server))) => format!("***@{server}"),
            _ => rest.to_owned(),
        };
        Some(format!("{scheme}://{server}"))
    });
    shown.unwrap_or_else(|| "***".to_owned()).into()
}

#[cfg(test)]
mod tests {
    use super::super::{FileSource, Sources, load};
    use super::*;

    fn config(text: &str) -> Config {
        let file = FileSource::Text {
            name: "t.toml".into(),
            text: text.into(),
        };
        load(&Sources {
            file,
            ..Sources::default()
        })
        .unwrap()
    }

    #[test]
    fn a_hash_tells_configurations_apart_and_not_instances() {
        let hash = |text: &str| {
            let config = config(&format!("upstream.url = 'http://a'\n{text}"));
            config.hash(&config.fixed())
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
    fn what_a_restart_would_change_shows_what_runs() {
        let start = config("upstream.url = \"http://a\"\nresponse.headers = \"none\"\n");
        let newer = config(
            "upstream.url = \"http://b\"\nresponse.headers = \"legacy\"\n[[policy]]\nname = \"p\"\naction = \"deny\"\n",
        );
        let shown: Json = serde_json::from_str(&newer.effective(&start.fixed())).unwrap();
        assert_eq!(shown["upstream"]["url"], "http://a");
        assert_eq!(shown["response"]["headers"], "legacy");
        assert_eq!(shown["listen"]["http"]["max_headers"], 100);
        assert_eq!(
            shown["policy"],
            serde_json::json!([{ "name": "p", "action": "deny" }])
        );
    }

    #[test]
    fn secrets_are_hidden() {
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
            let config = config(&format!(
                "upstream.url = \"http://a\"\nstore.redis.url = \"{url}\"\n"
            ));
            let text = config.effective(&config.fixed());
            let json: Json = serde_json::from_str(&text).unwrap();
            assert_eq!(json["store"]["redis"]["url"], shown);
            assert!(!text.contains("hunter2") && !text.contains("ann"), "{text}");
        }
        let config = config(
            "upstream.url = \"http://a\"\nstore.redis.topology = \"cluster\"\n\
             store.redis.urls = [\"redis://ann:hunter2@a\", \"redis://ann:hunter2@b:1\"]\n",
        );
        let json: Json = serde_json::from_str(&config.effective(&config.fixed())).unwrap();
        assert_eq!(
            json["store"]["redis"]["urls"],
            serde_json::json!(["redis://***@a", "redis://***@b:1"])
        );
    }
}
