//! Schema of the configuration: every key with its type, range, default and description.
//!
//! Detection of unknown keys, defaults, ranges, the "expected …" part of messages and the tables of
//! `docs/CONFIGURATION.md` all come from here, so they cannot differ.

mod policy;
mod proxy;
mod store;

pub(super) use policy::VALUE_TEST;
pub(super) use store::{DEFAULT_KEY_PREFIX, DEFAULT_REDIS_URL};

use super::values::format_duration;
use policy::POLICY;
use proxy::{CHECK, CLIENT, LISTEN, PATH, RLS, UPSTREAM, UPSTREAM_TLS};
use std::fmt;
use std::time::Duration;
use store::STORE;

/// One key of a table.
#[derive(Debug)]
pub(super) struct SchemaKey {
    pub name: &'static str,
    pub kind: ValueKind,
    pub requirement: KeyRequirement,
    /// Description for `docs/CONFIGURATION.md`. Messages quote its first sentence.
    pub doc: &'static str,
}

/// Whether a key must be present, and its default.
#[derive(Debug)]
pub(super) enum KeyRequirement {
    Required,
    Optional,
    Default(&'static str),
}

/// Type and range of a value.
#[derive(Debug)]
pub(super) enum ValueKind {
    Bool,
    /// An integer from `min` to `max`, both included.
    Integer {
        min: i64,
        max: i64,
    },
    /// An integer, or a table that defines where the number comes from.
    IntegerOrTable {
        min: i64,
        max: i64,
        table: &'static [SchemaKey],
    },
    /// A keyword, or a table with details.
    KeywordOrTable {
        keyword: &'static str,
        table: &'static [SchemaKey],
    },
    /// A number from 0 to 1.
    Fraction,
    Duration {
        min: Duration,
        max: Duration,
    },
    /// A size in bytes.
    ByteSize {
        min: u64,
        max: u64,
    },
    Keyword(&'static [&'static str]),
    /// A string, with its description.
    Text(&'static str),
    /// A string that no message quotes.
    Secret(&'static str),
    /// A list of strings, or one string.
    TextList(&'static str),
    /// A list of strings that no message quotes.
    SecretList(&'static str),
    Table(&'static [SchemaKey]),
    TableList(&'static [SchemaKey]),
    /// A table with user-defined keys.
    Map(&'static str),
}

use KeyRequirement::{Default, Optional, Required};
use ValueKind::{
    Bool, Fraction, Keyword, Map, Secret, SecretList, Table, TableList, Text, TextList,
};

/// Largest integer that a double represents exactly. Redis scripts compute with doubles.
const MAX_UNITS: i64 = 1 << 53;
const DAY: Duration = Duration::from_secs(86_400);
const MAX_WARM_UP: Duration = Duration::from_micros(crate::limiter::MAX_WARM_UP_US);
const MAX_PERIOD: Duration = Duration::from_secs(400 * 86_400);

/// At least a millisecond, because 0 does not disable the setting.
const POSITIVE_DURATION: ValueKind = ValueKind::Duration {
    min: Duration::from_millis(1),
    max: DAY,
};
const DURATION: ValueKind = ValueKind::Duration {
    min: Duration::ZERO,
    max: DAY,
};

/// Keys of the main file.
pub(super) static ROOT: [SchemaKey; 15] = [
    key(
        "include",
        TextList("paths or globs such as \"policies/*.toml\""),
        Default(""),
        "More files, relative to this file. They may contain only [[policy]] tables. Their policies follow those of this file, sorted by file name. An unreadable path is an error.",
    ),
    key("listen", Table(&LISTEN), Optional, "Where clients connect."),
    key(
        "upstream",
        Table(&UPSTREAM),
        Optional,
        "The server that requests are forwarded to. May be absent if rls or check is set: then nothing listens at listen.address.",
    ),
    key(
        "rls",
        Table(&RLS),
        Optional,
        "Envoy's rate-limit service (gRPC); see docs/ENVOY.md. Absent: off.",
    ),
    key(
        "check",
        Table(&CHECK),
        Optional,
        "Authorization service for nginx (auth_request), Traefik (forwardAuth) and Envoy (ext_authz); see docs/ENVOY.md. Absent: off.",
    ),
    key(
        "client",
        Table(&CLIENT),
        Optional,
        "How the client address is found.",
    ),
    key(
        "path",
        Table(&PATH),
        Optional,
        "How paths are normalized for matches and keys. The forwarded path is unchanged.",
    ),
    key(
        "store",
        Table(&STORE),
        Optional,
        "Where counters are stored.",
    ),
    key(
        "defaults",
        Table(&DEFAULTS),
        Optional,
        "Defaults of policies.",
    ),
    key(
        "response",
        Table(&RESPONSE),
        Optional,
        "Rate-limit fields of responses.",
    ),
    key("shutdown", Table(&SHUTDOWN), Optional, "Graceful shutdown."),
    key(
        "admin",
        Table(&ADMIN),
        Optional,
        "A separate port for operators: health, metrics, policy statistics, keys, explanations.",
    ),
    key("log", Table(&LOG), Optional, "Logging to stderr."),
    key(
        "trace",
        Table(&TRACE),
        Optional,
        "Export of spans by OTLP. Absent: tidegate only forwards the client's traceparent.",
    ),
    key("policy", TableList(&POLICY), Optional, "The policies."),
];

/// Keys of an included file.
pub(super) static INCLUDED_ROOT: [SchemaKey; 1] =
    [key("policy", TableList(&POLICY), Optional, "The policies.")];

static DEFAULTS: [SchemaKey; 3] = [
    key(
        "on_store_failure",
        ON_STORE_FAILURE,
        Default("open"),
        "If the store fails: forward the request; reject it with 503 and Retry-After; or limit in this process, by its share of the limits.",
    ),
    key(
        "algorithm",
        ALGORITHM,
        Default("sliding_log"),
        "How a limit counts; see ALGORITHMS.",
    ),
    key(
        "missing_key",
        MISSING_KEY,
        Default("shared"),
        "If a key part is absent or empty: all such requests share one quota; the policy does not apply, so clients can avoid it by omitting a header; reject with 400.",
    ),
];

const ON_STORE_FAILURE: ValueKind = Keyword(&["open", "closed", "local"]);
const ALGORITHM: ValueKind = Keyword(&[
    "sliding_log",
    "sliding_window",
    "fixed_window",
    "token_bucket",
    "leaky_bucket",
    "concurrency",
]);
const MISSING_KEY: ValueKind = Keyword(&["shared", "skip", "reject"]);

static RESPONSE_CORS: [SchemaKey; 1] = [key(
    "allow_origins",
    TextList("origins such as \"https://app.example.com\", or \"*\""),
    Default(""),
    "Origins whose scripts may read tidegate's own responses, such as a 429. Responses of your app are unchanged.",
)];

static RESPONSE: [SchemaKey; 3] = [
    key(
        "headers",
        Keyword(&["standard", "legacy", "both", "none"]),
        Default("both"),
        "RateLimit and RateLimit-Policy with all applied limits; X-RateLimit-* with the tightest; both; none.",
    ),
    key(
        "legacy_reset",
        Keyword(&["delta", "epoch"]),
        Default("delta"),
        "X-RateLimit-Reset in seconds from now, or as Unix time.",
    ),
    key(
        "cors",
        Table(&RESPONSE_CORS),
        Optional,
        "CORS of tidegate's own responses.",
    ),
];

static SHUTDOWN: [SchemaKey; 2] = [
    key(
        "delay",
        DURATION,
        Default("0s"),
        "How long to keep serving after SIGTERM.",
    ),
    key(
        "grace",
        DURATION,
        Default("25s"),
        "How long requests in flight may then take to finish.",
    ),
];

static ADMIN: [SchemaKey; 4] = [
    key(
        "address",
        Text("an IP address and port such as \"127.0.0.1:9090\", or \"unix:/path\""),
        Default("127.0.0.1:9090"),
        "IP address and port, or a Unix socket with mode 0660. Outside loopback, token_file is required. Never expose it to clients.",
    ),
    key(
        "probes",
        Text("an IP address and port such as \"0.0.0.0:9091\""),
        Default(""),
        "A second port with only /livez, /readyz and /metrics, for the kubelet and Prometheus. Empty: none.",
    ),
    key(
        "token_file",
        Text("the path of a file that holds the token"),
        Default(""),
        "Bearer token for commands that change state; without it they are disabled. Outside loopback, everything but health and metrics needs it.",
    ),
    key(
        "allowed_hosts",
        TextList("host names such as \"admin.internal\""),
        Default(""),
        "Accepted names in Host, besides localhost and IP addresses. Protects against DNS rebinding.",
    ),
];

static LOG: [SchemaKey; 4] = [
    key(
        "format",
        Keyword(&["json", "text"]),
        Default("json"),
        "JSON lines or text.",
    ),
    key(
        "level",
        Text(
            "\"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", optionally with exceptions such as \"info,tidegate::proxy=debug\"",
        ),
        Default("info"),
        "Least severe level logged.",
    ),
    key(
        "access",
        Keyword(&["off", "rejected", "all"]),
        Default("rejected"),
        "Requests that are logged.",
    ),
    key(
        "access_sample",
        Fraction,
        Default("1.0"),
        "Fraction of those requests that are logged.",
    ),
];

static TRACE: [SchemaKey; 4] = [
    key(
        "otlp",
        Text("a collector such as \"http://127.0.0.1:4317\""),
        Required,
        "Collector of spans. Uses HTTP if the port is 4318 or the URL has a path, otherwise gRPC.",
    ),
    key(
        "headers_file",
        Text("the path of a file with a \"name: value\" per line"),
        Optional,
        "Header fields for every export, such as an API key. Lines that begin with # are comments.",
    ),
    key(
        "tls",
        Table(&UPSTREAM_TLS),
        Optional,
        "TLS to an https collector.",
    ),
    key(
        "sample",
        Fraction,
        Default("0.01"),
        "Fraction of requests recorded. The sampled flag of a client's traceparent takes precedence.",
    ),
];

const fn key(
    name: &'static str,
    kind: ValueKind,
    requirement: KeyRequirement,
    doc: &'static str,
) -> SchemaKey {
    SchemaKey {
        name,
        kind,
        requirement,
        doc,
    }
}

const fn integer(min: i64, max: i64) -> ValueKind {
    ValueKind::Integer { min, max }
}

const fn byte_size(min: u64, max: u64) -> ValueKind {
    ValueKind::ByteSize { min, max }
}

/// Finds a key in a table.
pub(super) fn find_key(table: &'static [SchemaKey], name: &str) -> Option<&'static SchemaKey> {
    table.iter().find(|key| key.name == name)
}

/// Finds the key at a path from the root. Does not look inside policies.
pub(super) fn find_key_by_path<'p>(
    path: impl IntoIterator<Item = &'p str>,
) -> Option<&'static SchemaKey> {
    let mut table: &'static [SchemaKey] = &ROOT;
    let mut found = None;
    for name in path {
        let key = find_key(table, name)?;
        table = if let Table(inner) = &key.kind {
            inner
        } else {
            &[]
        };
        found = Some(key);
    }
    found
}

/// Suggests a key for the unknown key `name` of `table`.
pub(super) fn suggest_key(table: &'static [SchemaKey], name: &str) -> String {
    let likeness = |key: &SchemaKey| strsim::jaro_winkler(key.name, &name.to_ascii_lowercase());
    let best = table
        .iter()
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    if let Some(key) = best.filter(|key| likeness(key) > 0.8) {
        let gist = key
            .doc
            .split_once(". ")
            .map_or(key.doc, |(first, _)| first)
            .trim_end_matches('.');
        return format!("did you mean \"{}\"? ({gist}.)", key.name);
    }
    if let Some(path) = key_paths()
        .into_iter()
        .find(|path| path.rsplit('.').next() == Some(name))
    {
        return format!("did you mean {path}?");
    }
    let known: Vec<&str> = table.iter().map(|key| key.name).collect();
    format!("expected {}", join_alternatives(&known))
}

/// Dotted paths of all keys outside policies, without tables.
pub(super) fn key_paths() -> Vec<String> {
    fn collect_paths(table: &'static [SchemaKey], above: &str, paths: &mut Vec<String>) {
        for key in table {
            match &key.kind {
                Table(inner) => collect_paths(inner, &format!("{above}{}.", key.name), paths),
                TableList(_) if above.is_empty() => {}
                _ => paths.push(format!("{above}{}", key.name)),
            }
        }
    }
    let mut paths = Vec::new();
    collect_paths(&ROOT, "", &mut paths);
    paths
}

fn join_alternatives(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// Formats the expected value, to follow the word "expected".
impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bool => f.write_str("true or false"),
            ValueKind::Integer {
                min: i64::MIN,
                max: i64::MAX,
            } => f.write_str("a whole number"),
            ValueKind::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            ValueKind::IntegerOrTable { min, max, .. } => {
                write!(
                    f,
                    "a whole number from {min} to {max}, or a table such as {{ header = \"x-cost\", max = 100 }}"
                )
            }
            ValueKind::KeywordOrTable { keyword: word, .. } => {
                write!(
                    f,
                    "\"{word}\", or a table such as {{ size = 50, ttl = \"100ms\" }}"
                )
            }
            Fraction => f.write_str("a number from 0 to 1"),
            ValueKind::Duration { min, max } => {
                write!(f, "a duration such as \"250ms\", \"1s\", \"5m\"")?;
                match min.is_zero() {
                    true => write!(f, ", at most {}", format_duration(*max)),
                    false => write!(
                        f,
                        ", from {} to {}",
                        format_duration(*min),
                        format_duration(*max)
                    ),
                }
            }
            ValueKind::ByteSize { min, max } => {
                write!(f, "a size such as \"64KiB\", \"1MiB\"")?;
                if *min > 0 {
                    write!(f, ", at least {min} bytes")?;
                }
                if *max < u64::MAX {
                    write!(f, ", at most {max} bytes")
                } else {
                    Ok(())
                }
            }
            Keyword(words) => f.write_str(&join_alternatives(words)),
            Text(description) | Secret(description) | Map(description) => f.write_str(description),
            TextList(description) | SecretList(description) => write!(f, "a list of {description}"),
            Table(_) => f.write_str("a table"),
            TableList(_) => f.write_str("a list of tables"),
        }
    }
}
