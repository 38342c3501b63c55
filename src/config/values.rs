//! Parsers for values in strings: durations, sizes, addresses, URLs.

use crate::limiter::{Algorithm, Limit};
use crate::listen::ListenAddress;
use crate::proxy::{UpstreamScheme, UpstreamUrl};
use crate::store::redis::{RedisAddress, RedisCredentials, RedisPassword};
use http::HeaderName;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use regex::{Regex, RegexBuilder};
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Largest compiled size of a regular expression, in bytes. Ample for paths and headers.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Units of durations in milliseconds, in the order in which a duration may combine them.
const DURATION_UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1000),
    ("ms", 1),
];

/// Parses a duration such as `"250ms"`, `"1s"`, `"5m"`, `"1h30m"`, `"1d"` or `"0"`.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut units, mut total_ms) = (text, DURATION_UNITS.as_slice(), 0_u64);
    loop {
        let (number, after) = split_unit(rest)?;
        let unit_end = after.find(|c: char| !c.is_ascii_alphabetic());
        let (unit, after) = after.split_at_checked(unit_end.unwrap_or(after.len()))?;
        let position = units.iter().position(|(name, _)| *name == unit)?;
        let (_, ms) = units.get(position)?;
        total_ms = total_ms.checked_add(number.checked_mul(*ms)?)?;
        (rest, units) = (after, units.get(position + 1..)?);
        if rest.is_empty() {
            return Some(Duration::from_millis(total_ms));
        }
    }
}

/// Parses a size such as `"512"`, `"64KiB"`, `"1MiB"` or `"2GiB"`. Returns bytes.
pub(super) fn parse_byte_size(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text)?;
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, unit))
}

/// Longest path of a Unix socket: `sun_path` has 108 bytes, including a final NUL (unix(7)).
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Parses `address:port` or `unix:/path`.
pub(super) fn parse_listen_address(text: &str) -> Result<ListenAddress, String> {
    parse_ip_or_unix_address(text, "[::]:8080", "/run/tidegate.sock")
}

/// Parses the address of the admin listener.
pub(super) fn parse_admin_address(text: &str) -> Result<ListenAddress, String> {
    parse_ip_or_unix_address(text, "127.0.0.1:9090", "/run/tidegate/admin.sock")
}

fn parse_ip_or_unix_address(text: &str, port: &str, path: &str) -> Result<ListenAddress, String> {
    if let Some(rest) = text.strip_prefix("unix:") {
        return parse_socket_path(rest).map(ListenAddress::Unix);
    }
    let expected =
        format!("expected an IP address and port such as \"{port}\", or \"unix:{path}\"");
    text.parse()
        .map(ListenAddress::Ip)
        .map_err(|_invalid| expected)
}

/// Parses a network or a single address.
pub(super) fn parse_network(text: &str) -> Result<IpNet, String> {
    let net: Result<IpNet, _> = text.parse();
    let net = net.or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    net.map(|net| canonicalize_network(net.trunc()))
        .map_err(|_invalid| "expected an address or a network such as \"10.0.0.0/8\"".to_owned())
}

/// An IPv4-mapped network as IPv4, as addresses of clients are.
fn canonicalize_network(net: IpNet) -> IpNet {
    let prefix = net.prefix_len().checked_sub(96);
    let mapped = prefix.and_then(|prefix| IpNet::new(net.addr().to_canonical(), prefix).ok());
    let mapped = mapped.filter(|mapped| matches!(mapped, IpNet::V4(_)));
    mapped.unwrap_or(net)
}

/// Parses a regular expression. Letter case has no meaning if it `is_caseless`.
pub(super) fn parse_regex(text: &str, is_caseless: bool) -> Result<Regex, String> {
    let mut builder = RegexBuilder::new(text);
    let regex = builder
        .case_insensitive(is_caseless)
        .size_limit(MAX_REGEX_BYTES)
        .build();
    regex.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "the regular expression is too large".to_owned(),
        error => {
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default();
            let reason = reason.trim_start_matches("error: ");
            format!("not a regular expression: {reason}")
        }
    })
}

/// Parses the upstream URL: `http://host:port`, `https://…`, `h2c://…` or `unix:/path`.
pub(super) fn parse_upstream_url(text: &str) -> Result<UpstreamUrl, String> {
    const EXPECTED: &str = "expected \"http://host:port\", \"https://host:port\", \"h2c://host:port\" or \"unix:/path\"";
    let (scheme, rest) = text.split_once(':').ok_or(EXPECTED)?;
    if scheme == "unix" {
        return parse_socket_path(rest).map(UpstreamUrl::Unix);
    }
    let rest = rest.strip_prefix("//").ok_or(EXPECTED)?;
    let (scheme, default_port) = match scheme {
        "http" => (UpstreamScheme::Http, 80),
        "https" => (UpstreamScheme::Https, 443),
        "h2c" => (UpstreamScheme::H2c, 80),
        _ => return Err(EXPECTED.to_owned()),
    };
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    for (is_found, problem) in [
        (
            rest.contains('@'),
            "a user or password is not supported here",
        ),
        (
            rest.contains(['?', '#']),
            "a query or fragment is not supported here",
        ),
        (
            authority.contains('/'),
            "a path is not supported here: request paths are forwarded unchanged",
        ),
    ] {
        if is_found {
            return Err(format!("{problem}; {EXPECTED}"));
        }
    }
    let (host, port) = parse_host_and_port(authority, default_port)?;
    Ok(UpstreamUrl::Net { scheme, host, port })
}

/// Parses the absolute path of a Unix socket, with or without `//` before it.
fn parse_socket_path(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("//").unwrap_or(text);
    if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
        return Err(
            "expected the absolute path of a socket such as \"unix:/run/app.sock\"".to_owned(),
        );
    }
    if path.len() > MAX_SOCKET_PATH_BYTES {
        return Err(format!(
            "the path has {} bytes; expected a socket path of at most {MAX_SOCKET_PATH_BYTES} bytes",
            path.len()
        ));
    }
    Ok(path.into())
}

/// The parts of a Redis URL.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RedisUrl {
    pub is_tls: bool,
    pub address: RedisAddress,
    pub database: i64,
    pub login: RedisCredentials,
}

/// Parses `redis://[user]:[password]@host:port/database`, `rediss://` for TLS, the same with
/// `valkey`, or `unix:///path?db=0&user=..&pass=..`. Errors do not quote the text, which may hold a
/// password.
pub(super) fn parse_redis_url(text: &str) -> Result<RedisUrl, String> {
    const EXPECTED: &str =
        "expected \"redis://host:port/database\", \"rediss://…\" for TLS, or \"unix:///path\"";
    let (scheme, rest) = text.split_once(':').ok_or(EXPECTED)?;
    let rest = rest.strip_prefix("//").ok_or(EXPECTED)?;
    let is_tls = match scheme {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        "unix" | "redis+unix" | "valkey+unix" => return parse_redis_unix_url(rest),
        _ => return Err(EXPECTED.to_owned()),
    };
    let (login, server) = rest.rsplit_once('@').unwrap_or(("", rest));
    if server.contains(['?', '#']) {
        return Err(format!("parameters are not supported here; {EXPECTED}"));
    }
    let (authority, number) = server.split_once('/').unwrap_or((server, ""));
    let database = parse_database(number)
        .ok_or_else(|| format!("the part after the slash is not a database number; {EXPECTED}"))?;
    let (host, port) = parse_host_and_port(authority, 6379)?;
    let (username, password) = login.split_once(':').unwrap_or((login, ""));
    let login = RedisCredentials {
        username: decode_percent(username)?,
        password: decode_percent(password)?.map(RedisPassword::new),
    };
    Ok(RedisUrl {
        is_tls,
        address: RedisAddress::Tcp { host, port },
        database,
        login,
    })
}

/// Parses the part of a Redis URL after `unix://`.
fn parse_redis_unix_url(text: &str) -> Result<RedisUrl, String> {
    const EXPECTED: &str =
        "expected \"unix:///path\", optionally followed by \"?db=0&user=name&pass=password\"";
    let (path, parameters) = text.split_once('?').unwrap_or((text, ""));
    let path = decode_percent(path)?
        .filter(|path| path.starts_with('/'))
        .ok_or(EXPECTED)?;
    let (mut login, mut number) = (RedisCredentials::default(), 0);
    for parameter in parameters.split('&').filter(|one| !one.is_empty()) {
        match parameter.split_once('=') {
            Some(("db", text)) => {
                number = parse_database(text)
                    .ok_or("db is not a database number; expected 0 to 65535")?
            }
            Some(("user", name)) => login.username = decode_percent(name)?,
            Some(("pass", password)) => {
                login.password = decode_percent(password)?.map(RedisPassword::new)
            }
            _ => return Err(EXPECTED.to_owned()),
        }
    }
    Ok(RedisUrl {
        is_tls: false,
        address: RedisAddress::Unix(path.into()),
        database: number,
        login,
    })
}

/// Parses a database number. Empty text is database 0.
fn parse_database(text: &str) -> Option<i64> {
    match text {
        "" => Some(0),
        text => text.parse::<u16>().ok().map(i64::from),
    }
}

/// Decodes percent-encoded text. Empty text is `None`.
fn decode_percent(text: &str) -> Result<Option<String>, String> {
    let text = percent_decode_str(text).decode_utf8();
    let text = text.map_err(|_invalid| "user, password and path must be percent-encoded UTF-8")?;
    Ok(Some(text.into_owned()).filter(|text| !text.is_empty()))
}

/// Parses a name, an IPv4 address or a bracketed IPv6 address, with an optional port.
fn parse_host_and_port(authority: &str, default_port: u16) -> Result<(String, u16), String> {
    let bracketed = authority
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'));
    let (host, port) = match (bracketed, authority.split_once(':')) {
        (Some((address, rest)), _) => {
            let parsed = address.parse::<Ipv6Addr>();
            parsed.map_err(|_invalid| "expected an IPv6 address between the brackets")?;
            let port = rest.strip_prefix(':');
            if !rest.is_empty() && port.is_none() {
                return Err("expected nothing or \":port\" after the bracket".to_owned());
            }
            (address, port)
        }
        (None, Some((host, port))) => (host, Some(port)),
        (None, None) => (authority, None),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || (bracketed.is_none() && !host.chars().all(is_name)) {
        return Err("expected a host: a name or an address (IPv6 in brackets)".to_owned());
    }
    let port = match port {
        None => Some(default_port),
        Some(port) => {
            let number = port.parse().ok().filter(|number| *number > 0);
            number.filter(|_| !port.starts_with('+'))
        }
    };
    Ok((
        host.to_owned(),
        port.ok_or("expected a port from 1 to 65535")?,
    ))
}

/// Whether a text has 1 to `max_length` letters, digits and characters of `others`.
pub(super) fn is_word(text: &str, others: &[u8], max_length: usize) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    (1..=max_length).contains(&text.len()) && text.bytes().all(fits)
}

/// Parses a name: `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`.
pub(super) fn parse_name(text: &str) -> Option<String> {
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    (starts_well && is_word(text, b"_.-", 63)).then(|| text.to_owned())
}

/// Parses the name of a header.
pub(super) fn parse_header_name(text: &str) -> Result<HeaderName, String> {
    let name = HeaderName::from_bytes(text.as_bytes());
    name.map_err(|_invalid| format!("{text:?} is not a header name"))
}

/// Converts a duration to microseconds. The schema bounds durations to 400 days.
pub(super) fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Rejects an empty name.
pub(super) fn parse_nonempty(text: &str) -> Result<Box<str>, String> {
    if text.is_empty() {
        Err("the name is empty".to_owned())
    } else {
        Ok(text.into())
    }
}

/// Formats a duration in the largest unit that represents it exactly.
pub fn format_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    let mut units = DURATION_UNITS
        .iter()
        .map(|(unit, size)| (unit, u128::from(*size)));
    match units.find(|(_, size)| ms > 0 && ms.is_multiple_of(*size)) {
        Some((unit, size)) => format!("{}{unit}", ms / size),
        None => format!("{ms}ms"),
    }
}

/// Formats the period of a limit: `1m`, or `month Europe/Berlin`.
pub fn format_period(limit: &Limit) -> String {
    match limit.algorithm {
        Algorithm::CalendarWindow { calendar } => calendar.to_string(),
        _ => format_duration(Duration::from_micros(limit.per_us)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_combine_units_from_large_to_small() {
        assert_eq!(parse_duration("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(parse_duration("1d"), Some(Duration::from_secs(86_400)));
        assert_eq!(parse_duration("0"), Some(Duration::ZERO));
        assert_eq!(parse_duration("1h30m"), Some(Duration::from_secs(5400)));
        assert_eq!(
            parse_duration("1d2h3m4s5ms"),
            Some(Duration::from_millis(93_784_005))
        );
        for wrong in [
            "",
            "5",
            "s",
            "1.5s",
            "-1s",
            "1 s",
            "30m1h",
            "1m1m",
            "1h30",
            "1h 30m",
            "1S",
            "00",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
        for text in ["250ms", "1s", "5m", "36h", "400d", "90s"] {
            assert_eq!(format_duration(parse_duration(text).unwrap()), text);
        }
    }

    #[test]
    fn sizes_are_in_binary_units() {
        assert_eq!(parse_byte_size("64KiB"), Some(65_536));
        assert_eq!(parse_byte_size("512"), Some(512));
        for wrong in ["", "64KB", "KiB", "1.5MiB", "99999999999GiB"] {
            assert_eq!(parse_byte_size(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_upstream_is_a_scheme_and_an_authority() {
        let url = |scheme, host: &str, port| {
            Ok(UpstreamUrl::Net {
                scheme,
                host: host.to_owned(),
                port,
            })
        };
        assert_eq!(
            parse_upstream_url("http://app"),
            url(UpstreamScheme::Http, "app", 80)
        );
        assert_eq!(
            parse_upstream_url("https://app.internal:8443/"),
            url(UpstreamScheme::Https, "app.internal", 8443)
        );
        assert_eq!(
            parse_upstream_url("h2c://[::1]:3000"),
            url(UpstreamScheme::H2c, "::1", 3000)
        );
        assert_eq!(
            parse_upstream_url("h2c://app"),
            url(UpstreamScheme::H2c, "app", 80)
        );
        for text in ["unix:/run/app.sock", "unix:///run/app.sock"] {
            assert_eq!(
                parse_upstream_url(text),
                Ok(UpstreamUrl::Unix("/run/app.sock".into()))
            );
        }
        let longest = format!("unix:/{}", "s".repeat(106));
        assert!(parse_upstream_url(&longest).is_ok());
        assert!(
            parse_upstream_url(&format!("{longest}s"))
                .unwrap_err()
                .contains("108 bytes")
        );
        for (wrong, reason) in [
            ("app:3000", "expected"),
            ("app", "expected"),
            ("ftp://app", "expected"),
            ("http:app", "expected"),
            ("unix:run/app.sock", "absolute"),
            ("unix:", "absolute"),
            ("unix:/run/", "absolute"),
            ("http://app/path", "path"),
            ("http://app?x", "query"),
            ("http://u:p@app", "user"),
            ("http://", "host"),
            ("http://:80", "host"),
            ("http://a b", "host"),
            ("http://::1", "host"),
            ("http://[::1", "host"),
            ("http://[app]", "IPv6"),
            ("http://app:0", "port"),
            ("http://app:", "port"),
            ("http://app:+80", "port"),
            ("http://app:65536", "port"),
        ] {
            let error = parse_upstream_url(wrong).unwrap_err();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }

    #[test]
    fn listen_addresses_are_ip_addresses_or_unix_sockets() {
        let shown = |text: &str| parse_listen_address(text).map(|address| address.to_string());
        for (written, read) in [
            ("[::]:80", "[::]:80"),
            ("unix:/run/t.sock", "unix:/run/t.sock"),
            ("unix:///run/t.sock", "unix:/run/t.sock"),
        ] {
            assert_eq!(shown(written).as_deref(), Ok(read));
        }
        let long = format!("unix:/{}", "x".repeat(107));
        for wrong in ["8080", "localhost:80"] {
            assert!(
                shown(wrong).unwrap_err().contains("expected an IP"),
                "{wrong}"
            );
        }
        for wrong in [
            "unix:",
            "unix:run/t.sock",
            "unix://run/t",
            "unix:/run/",
            &long,
        ] {
            assert!(shown(wrong).unwrap_err().contains("a socket"), "{wrong}");
        }
    }

    #[test]
    fn a_redis_url_may_hold_a_login() {
        let tcp = |host: &str, port| RedisAddress::Tcp {
            host: host.to_owned(),
            port,
        };
        let url = parse_redis_url("redis://ann:p%40s%2Fs@redis.internal:6380/3").unwrap();
        assert_eq!(
            (url.address, url.database, url.is_tls),
            (tcp("redis.internal", 6380), 3, false)
        );
        assert_eq!(url.login.username.as_deref(), Some("ann"));
        assert_eq!(url.login.password.unwrap().expose(), "p@s/s");
        let url = parse_redis_url("rediss://:pw@[::1]").unwrap();
        assert_eq!(
            (url.address, url.login.username, url.is_tls),
            (tcp("::1", 6379), None, true)
        );
        for (valkey, redis) in [
            ("valkey://ann:pw@host:1/3", "redis://ann:pw@host:1/3"),
            ("valkeys://host", "rediss://host"),
            ("valkey+unix:///a", "unix:///a"),
        ] {
            assert_eq!(parse_redis_url(valkey), parse_redis_url(redis), "{valkey}");
        }
        let url = parse_redis_url("unix:///run/redis.sock?db=2&user=ann&pass=p%26w").unwrap();
        assert_eq!(
            (url.address, url.database),
            (RedisAddress::Unix("/run/redis.sock".into()), 2)
        );
        assert_eq!(url.login.password.unwrap().expose(), "p&w");
        assert_eq!(
            parse_redis_url("redis+unix:///a%20b").unwrap().address,
            RedisAddress::Unix("/a b".into())
        );
        for (wrong, reason) in [
            ("http://host", "expected"),
            ("redis:host", "expected"),
            ("valkey:hunter2", "expected"),
            ("valkeyss://host", "expected"),
            ("redis://host/x", "database"),
            ("redis://host?protocol=3", "parameters"),
            ("rediss://host/#insecure", "parameters"),
            ("redis://:hunter2@host:port", "port"),
            ("redis://:hunter2", "host"),
            ("redis://:%ff@host", "UTF-8"),
            ("unix:/run/redis.sock", "expected"),
            ("unix://run/redis.sock", "expected"),
            ("unix:///run/redis.sock?db=x", "db"),
            ("unix:///run/redis.sock?pass=hunter2&dbs=1", "expected"),
        ] {
            let error = parse_redis_url(wrong).unwrap_err();
            assert!(
                error.contains(reason) && !error.contains("hunter2"),
                "{wrong}: {error}"
            );
        }
    }
}
