//! `[store]`: memory, or the servers, credentials, TLS and timeouts of Redis.

use super::client_tls;
use crate::config::loaded_config::StoreSettings;
use crate::config::schema::RedisTopologyKind;
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values::{self, RedisUrl};
use crate::store::MemorySettings;
use crate::store::redis::{
    RedisAddress, RedisCredentials, RedisDialer, RedisPassword, RedisSettings, RedisTopology,
};
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

pub(super) fn build_store_settings(reader: &TableReader<'_>) -> Option<StoreSettings> {
    let use_redis = reader.is_keyword("kind", "redis")?;
    let memory = build_memory_settings(&reader.get_table("memory"))?;
    // `[store.redis]` is validated even if it is not used.
    let redis = build_redis_settings(&reader.get_table("redis"), use_redis, memory)?;
    let state_dir = reader.read_directory("state_dir", use_redis)?;
    if use_redis && reader.input.reads_key_files() {
        state_dir
            .iter()
            .for_each(|path| warn_if_not_writable(reader, path));
    }
    report! { reader;
        Warning("state_dir") if state_dir.is_some() && !use_redis => "the memory store does not use it; expected kind = \"redis\", or no state_dir";
    }
    Some(if use_redis {
        StoreSettings::Redis(Box::new(RedisSettings { state_dir, ..redis }))
    } else {
        StoreSettings::Memory(memory)
    })
}

/// Builds the bounds of counters in memory: of the memory store, and of `scope = "instance"`.
pub(crate) fn build_memory_settings(reader: &TableReader<'_>) -> Option<MemorySettings> {
    Some(read_settings!(MemorySettings { reader: max_keys, max_bytes; }))
}

/// Warns if no file can be created in the directory. A full disk must neither stop the process from
/// serving nor reject new policies.
fn warn_if_not_writable(reader: &TableReader<'_>, directory: &Path) {
    let probe = directory.join(format!("tidegate-check-{}.tmp", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)
        .and_then(|mut file| file.write_all(b"probe"));
    drop(fs::remove_file(&probe));
    if let Err(error) = written {
        reader.report_warning(
            "state_dir",
            format!("can't be written: {error}; a restart during an outage of Redis loses usage; expected a writable directory with free space"),
        );
    }
}

/// Builds the Redis settings. Reads files only if `is_used`.
pub(crate) fn build_redis_settings(
    reader: &TableReader<'_>,
    is_used: bool,
    instance_counter_bounds: MemorySettings,
) -> Option<RedisSettings> {
    let breaker = reader.get_table("breaker");
    let kind = reader.read("topology")?;
    let urls = read_urls(reader, kind);
    let first = urls.first()?;
    let topology = match kind {
        RedisTopologyKind::Standalone => RedisTopology::Standalone,
        RedisTopologyKind::Cluster => RedisTopology::Cluster,
        RedisTopologyKind::Sentinel => RedisTopology::Sentinel {
            master: reader.get_text("sentinel_master", |name| {
                (!name.is_empty()).then(|| name.to_owned())
            })?,
            credentials: build_login(reader, is_used, "sentinel_", RedisCredentials::default()),
        },
    };
    for key in reader.present_keys().map(|key| key.name) {
        let is_foreign = kind != RedisTopologyKind::Sentinel && key.starts_with("sentinel_");
        report! { reader;
            Error(key) if is_foreign && !reader.is_default(key) => "is for topology = \"sentinel\" only";
        }
    }
    report! { reader;
        Warning("key_prefix") if is_used && reader.is_default("key_prefix") => "the default, so services that share this Redis share counters; expected a prefix per service";
    }
    let enabled_by = "rediss:// in the URL";
    let tls = client_tls::build_client_tls(reader, first.is_tls, is_used, enabled_by);
    Some(read_settings!(RedisSettings {
        reader: timeout, connect_timeout;
        breaker: probe_interval;
        =>
        topology,
        database: first.database,
        credentials: build_login(reader, is_used, "", first.login.clone()),
        tls,
        servers: urls.iter().map(|url| url.address.clone()).collect(),
        // Braces would change the cluster hash tag of all keys. Operators can type the others.
        key_prefix: reader.get_text("key_prefix", |prefix| {
            values::is_word(prefix, b"_.-:/", 64).then(|| prefix.to_owned())
        })?,
        initial_instances: reader.read("instances")?,
        breaker_failures: breaker.read("failures")?,
        instance_counter_bounds,
        state_dir: None,
        dialer: RedisDialer::Network,
    }))
}

/// Reads the URL of a server, or those of sentinels or cluster nodes, which may differ only in host
/// and port.
fn read_urls(reader: &TableReader<'_>, kind: RedisTopologyKind) -> Vec<RedisUrl> {
    let has_urls = !reader.get_items("urls").is_empty();
    let is_single = kind == RedisTopologyKind::Standalone;
    report! { reader;
        Error("urls") if is_single && has_urls => "not for topology = \"standalone\"; expected url, or topology = \"sentinel\" or \"cluster\"";
        Error("url") if !is_single && !reader.is_default("url") => "is for topology = \"standalone\" only; expected urls";
        Error("urls") if !is_single && !has_urls => "expected at least one URL such as \"redis://host:port\"";
    }
    if is_single {
        let url = reader.get_parsed("url", values::parse_redis_url);
        return url.into_iter().collect();
    }
    let urls = reader.get_list("urls", values::parse_redis_url);
    if let Some(first) = urls.first() {
        let shared_parts = |url: &RedisUrl| (url.is_tls, url.database, url.login.clone());
        let differs = urls
            .iter()
            .any(|url| shared_parts(url) != shared_parts(first));
        let is_socket = |url: &RedisUrl| matches!(url.address, RedisAddress::Unix(_));
        let has_login = first.login != RedisCredentials::default();
        report! { reader;
            Error("urls") if differs => "the URLs differ in more than host and port; expected the same scheme, login and database";
            Error("urls") if urls.iter().any(is_socket) => "a Unix socket is only one server; expected \"redis://host:port\" or \"rediss://host:port\"";
            Error("urls") if kind == RedisTopologyKind::Cluster && first.database != 0 => "a Redis Cluster has only database 0; expected nothing after the port";
            Error("urls") if kind == RedisTopologyKind::Sentinel && has_login => "these URLs are for sentinels; expected their login in sentinel_username and sentinel_password_file, that of the master in username and password_file";
        }
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
    report! { reader;
        Error(&file_key) if username.is_some() => "{key} is set too; expected one of them";
    }
    let name = is_used.then(|| reader.read_text_file(&file_key, "name"));
    name.flatten()
}

/// Reads the user and the password of a server; their keys begin with `prefix`. Those of its URL
/// apply if there are none.
fn build_login(
    reader: &TableReader<'_>,
    is_used: bool,
    prefix: &str,
    url: RedisCredentials,
) -> RedisCredentials {
    let [user_key, password_key] =
        ["username", "password_file"].map(|key| format!("{prefix}{key}"));
    let username = read_username(reader, is_used, &user_key);
    let password = is_used.then(|| reader.read_text_file(&password_key, "password"));
    let password = password.flatten().map(RedisPassword::new);
    let (has_both_users, has_both_passwords) = (
        username.is_some() && url.username.is_some(),
        password.is_some() && url.password.is_some(),
    );
    report! { reader;
        Error(&user_key) if has_both_users => "the URL holds a user too; expected one of them";
        Error(&password_key) if has_both_passwords => "the URL holds a password too; expected one of them";
    }
    RedisCredentials {
        username: username.or(url.username),
        password: password.or(url.password),
    }
}
