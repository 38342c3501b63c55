//! `[store.redis]`: servers, credentials, TLS and timeouts of Redis.

use super::client_tls;
use crate::config::key_files::read_text_file;
use crate::config::table_reader::TableReader;
use crate::config::values::{self, RedisUrl};
use crate::store::MemorySettings;
use crate::store::redis::{
    RedisAddress, RedisCredentials, RedisDialer, RedisPassword, RedisSettings, RedisTopology,
};
use strum::EnumString;

/// Builds the Redis settings. Reads files only if `is_used`.
pub(crate) fn build_redis_settings(
    reader: &TableReader<'_>,
    is_used: bool,
    instance_counter_bounds: MemorySettings,
) -> Option<RedisSettings> {
    let breaker = reader.get_table("breaker");
    let kind = reader.get_keyword("topology")?;
    let urls = if kind == RedisTopologyKind::Standalone {
        read_single_url(reader)
    } else {
        read_node_urls(reader, kind)
    };
    let first = urls.first()?;
    let topology = match kind {
        RedisTopologyKind::Standalone => RedisTopology::Standalone,
        RedisTopologyKind::Cluster => RedisTopology::Cluster,
        RedisTopologyKind::Sentinel => RedisTopology::Sentinel {
            master: reader.get_parsed("sentinel_master", |text| match text {
                "" => Err("expected the name of a master".to_owned()),
                name => Ok(name.to_owned()),
            })?,
            credentials: build_login(reader, is_used, "sentinel_", RedisCredentials::default()),
        },
    };
    if kind != RedisTopologyKind::Sentinel {
        let keys = reader.present_keys().map(|key| key.name);
        for key in keys.filter(|key| key.starts_with("sentinel_") && !reader.is_default(key)) {
            reader.report_error(key, "is for topology = \"sentinel\" only");
        }
    }
    if is_used && reader.is_default("key_prefix") {
        reader.report_warning(
            "key_prefix",
            "the default, so services that share this Redis share counters; expected a prefix per service",
        );
    }
    Some(RedisSettings {
        topology,
        database: first.database,
        credentials: build_login(reader, is_used, "", first.login.clone()),
        tls: client_tls::build_client_tls(
            reader,
            client_tls::TlsRequirement {
                is_tls: first.is_tls,
                is_used,
                enabled_by: "rediss:// in the URL",
            },
        ),
        servers: urls.iter().map(|url| url.address.clone()).collect(),
        key_prefix: reader.get_parsed("key_prefix", parse_key_prefix)?,
        initial_instances: reader.read("instances")?,
        timeout: reader.read("timeout")?,
        connect_timeout: reader.read("connect_timeout")?,
        breaker_failures: breaker.read("failures")?,
        probe_interval: breaker.read("probe_interval")?,
        instance_counter_bounds,
        state_dir: None,
        dialer: RedisDialer::Network,
    })
}

#[derive(Clone, Copy, PartialEq, Eq, EnumString)]
#[strum(serialize_all = "snake_case")]
enum RedisTopologyKind {
    Standalone,
    Sentinel,
    Cluster,
}

fn read_single_url(reader: &TableReader<'_>) -> Vec<RedisUrl> {
    if !reader.get_items("urls").is_empty() {
        reader.report_error(
            "urls",
            "not for topology = \"standalone\"; expected url, or topology = \"sentinel\" or \"cluster\"",
        );
    }
    reader
        .get_parsed("url", values::parse_redis_url)
        .into_iter()
        .collect()
}

/// Reads the URLs of sentinels or cluster nodes. They may differ only in host and port.
fn read_node_urls(reader: &TableReader<'_>, kind: RedisTopologyKind) -> Vec<RedisUrl> {
    if !reader.is_default("url") {
        reader.report_error(
            "url",
            "is for topology = \"standalone\" only; expected urls",
        );
    }
    let urls = reader.get_list("urls", values::parse_redis_url);
    let Some(first) = urls.first() else {
        if reader.get_items("urls").is_empty() {
            reader.report_error(
                "urls",
                "expected at least one URL such as \"redis://host:port\"",
            );
        }
        return urls;
    };
    let shared_parts = |url: &RedisUrl| (url.is_tls, url.database, url.login.clone());
    if urls
        .iter()
        .any(|url| shared_parts(url) != shared_parts(first))
    {
        reader.report_error(
            "urls",
            "the URLs differ in more than host and port; expected the same scheme, login and database",
        );
    }
    if urls
        .iter()
        .any(|url| matches!(url.address, RedisAddress::Unix(_)))
    {
        reader.report_error(
            "urls",
            "a Unix socket is only one server; expected \"redis://host:port\" or \"rediss://host:port\"",
        );
    }
    if kind == RedisTopologyKind::Cluster && first.database != 0 {
        reader.report_error(
            "urls",
            "a Redis Cluster has only database 0; expected nothing after the port",
        );
    }
    if kind == RedisTopologyKind::Sentinel && first.login != RedisCredentials::default() {
        reader.report_error(
            "urls",
            "these URLs are for sentinels; expected their login in sentinel_username and sentinel_password_file, that of the master in username and password_file",
        );
    }
    urls
}

/// Reads the name of an ACL user from `key`, or from the file named by `key` with `_file`.
fn read_username(reader: &TableReader<'_>, is_used: bool, key: &str) -> Option<String> {
    let file_key = format!("{key}_file");
    let username = reader.get_nonempty_string(key);
    if reader.get_nonempty_string(&file_key).is_none() {
        return username;
    }
    if username.is_some() {
        reader.report_error(&file_key, format!("{key} is set too; expected one of them"));
    }
    is_used
        .then(|| read_text_file(reader, &file_key, "name"))
        .flatten()
}

/// Reads the user and the password of a server; their keys begin with `prefix`. Those of its URL
/// apply if there are none.
fn build_login(
    reader: &TableReader<'_>,
    is_used: bool,
    prefix: &str,
    url: RedisCredentials,
) -> RedisCredentials {
    let (user_key, password_key) = (
        format!("{prefix}username"),
        format!("{prefix}password_file"),
    );
    let username = read_username(reader, is_used, &user_key);
    if username.is_some() && url.username.is_some() {
        reader.report_error(&user_key, "the URL holds a user too; expected one of them");
    }
    let password = is_used.then(|| read_text_file(reader, &password_key, "password"));
    let password = password.flatten().map(RedisPassword::new);
    if password.is_some() && url.password.is_some() {
        reader.report_error(
            &password_key,
            "the URL holds a password too; expected one of them",
        );
    }
    RedisCredentials {
        username: username.or(url.username),
        password: password.or(url.password),
    }
}

/// Parses a key prefix. Braces are invalid because they would change the cluster hash tag of all
/// keys. Other characters are restricted so that operators can type the prefix.
fn parse_key_prefix(text: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-:/".contains(&byte);
    if (1..=64).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(text.to_owned());
    }
    Err("expected 1 to 64 letters, digits, \"_\", \".\", \"-\", \":\" or \"/\"".to_owned())
}
