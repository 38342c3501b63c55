//! `[store.redis]`: which Redis, and how to speak to it.

use super::build::{present, secret};
use super::cursor::Cursor;
use super::input::Input;
use super::schema;
use super::tls;
use super::values::{self, RedisUrl};
use crate::store::redis::{Address, Login, Password, RedisSettings, Topology};

/// All settings of Redis. Files are read only if it `is_used`.
pub(super) fn settings(input: &Input, at: &Cursor<'_>, is_used: bool) -> Option<RedisSettings> {
    let breaker = at.table("breaker");
    let kind = at.word(
        "topology",
        &[
            ("standalone", Kind::Standalone),
            ("sentinel", Kind::Sentinel),
            ("cluster", Kind::Cluster),
        ],
    )?;
    let urls = if kind == Kind::Standalone {
        one(at)
    } else {
        several(at, kind)
    };
    let first = urls.first()?;
    let topology = match kind {
        Kind::Standalone => Topology::Standalone,
        Kind::Cluster => Topology::Cluster,
        Kind::Sentinel => Topology::Sentinel {
            master: at.parsed("sentinel_master", |text| {
                present(text, "the name of a master")
            })?,
            login: sentinel_login(input, at, is_used),
        },
    };
    let of_sentinels = [
        ("sentinel_master", "mymaster"),
        ("sentinel_username", ""),
        ("sentinel_password_file", ""),
    ];
    for (key, default) in of_sentinels {
        if kind != Kind::Sentinel && at.text(key).is_some_and(|text| text != default) {
            at.fail(key, "is for topology = \"sentinel\" only");
        }
    }
    if is_used
        && at
            .text("key_prefix")
            .is_some_and(|prefix| prefix == schema::DEFAULT_KEY_PREFIX)
    {
        at.warn(
            "key_prefix",
            "the default: services that share this Redis would share counters; give each a prefix of its own",
        );
    }
    Some(RedisSettings {
        topology,
        database: first.database,
        login: login(input, at, first, is_used),
        tls: tls::client(
            input,
            at,
            tls::Wanted {
                is_tls: first.tls,
                is_used,
                by: "rediss:// in the URL",
            },
        ),
        servers: urls.iter().map(|url| url.address.clone()).collect(),
        key_prefix: at.parsed("key_prefix", key_prefix)?,
        instances: at.whole("instances")?,
        timeout: at.duration("timeout")?,
        connect_timeout: at.duration("connect_timeout")?,
        breaker_failures: breaker.whole("failures")?,
        probe_interval: breaker.duration("probe_interval")?,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Standalone,
    Sentinel,
    Cluster,
}

fn one(at: &Cursor<'_>) -> Vec<RedisUrl> {
    if !at.items("urls").is_empty() {
        at.fail(
            "urls",
            "one server has one address; expected url, or topology = \"sentinel\" or \"cluster\"",
        );
    }
    at.parsed("url", values::redis_url).into_iter().collect()
}

/// All that is told beside the addresses holds for all of them.
fn several(at: &Cursor<'_>, kind: Kind) -> Vec<RedisUrl> {
    if at
        .text("url")
        .is_some_and(|url| url != schema::DEFAULT_REDIS_URL)
    {
        at.fail(
            "url",
            "is for topology = \"standalone\" only; expected urls",
        );
    }
    let urls = at.list("urls", values::redis_url);
    let Some(first) = urls.first() else {
        if at.items("urls").is_empty() {
            at.fail(
                "urls",
                "expected at least one URL such as \"redis://host:port\"",
            );
        }
        return urls;
    };
    let beside = |url: &RedisUrl| (url.tls, url.database, url.login.clone());
    if urls.iter().any(|url| beside(url) != beside(first)) {
        at.fail(
            "urls",
            "they differ in more than host and port; expected the same of everything else",
        );
    }
    if urls
        .iter()
        .any(|url| matches!(url.address, Address::Unix(_)))
    {
        at.fail(
            "urls",
            "a Unix socket is one server; expected \"redis://host:port\" or \"rediss://host:port\"",
        );
    }
    if kind == Kind::Cluster && first.database != 0 {
        at.fail(
            "urls",
            "a cluster has no databases but 0; expected nothing behind the port",
        );
    }
    if kind == Kind::Sentinel && first.login != Login::default() {
        at.fail(
            "urls",
            "they name sentinels; expected their user in sentinel_username and sentinel_password_file, the master's in username and password_file",
        );
    }
    urls
}

fn sentinel_login(input: &Input, at: &Cursor<'_>, is_used: bool) -> Login {
    let username = at.text("sentinel_username").filter(|name| !name.is_empty());
    let password = is_used
        .then(|| secret(input, at, "sentinel_password_file", "password"))
        .flatten();
    Login {
        username,
        password: password.map(Password::new),
    }
}

fn login(input: &Input, at: &Cursor<'_>, url: &RedisUrl, is_used: bool) -> Login {
    let username = at.text("username").filter(|name| !name.is_empty());
    if username.is_some() && url.login.username.is_some() {
        at.fail("username", "the URL holds a user too; expected one of them");
    }
    let password = is_used
        .then(|| secret(input, at, "password_file", "password"))
        .flatten()
        .map(Password::new);
    if password.is_some() && url.login.password.is_some() {
        at.fail(
            "password_file",
            "the URL holds a password too; expected one of them",
        );
    }
    let Login {
        username: in_url,
        password: with_it,
    } = url.login.clone();
    Login {
        username: username.or(in_url),
        password: password.or(with_it),
    }
}

/// Braces would move the hash tag of all keys, and people have to read and type it.
fn key_prefix(text: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-:/".contains(&byte);
    if (1..=64).contains(&text.len()) && text.bytes().all(fits) {
        return Ok(text.to_owned());
    }
    Err("expected 1 to 64 letters, digits, \"_\", \".\", \"-\", \":\" or \"/\"".to_owned())
}
