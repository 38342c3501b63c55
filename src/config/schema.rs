//! Every key that exists: where it stands, what it takes, what holds without it, what it is for.
//!
//! Unknown keys, defaults, ranges and the words "expected …" all come from here, so that none of them
//! can differ from the others.

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
    /// Sentences for `docs/CONFIGURATION.md`; the first one goes into messages too.
    pub doc: &'static str,
}

/// What holds without the key.
#[derive(Debug)]
pub(super) enum KeyRequirement {
    Required,
    Optional,
    Default(&'static str),
}

/// What a key takes.
#[derive(Debug)]
pub(super) enum ValueKind {
    Bool,
    /// Both ends included.
    Integer {
        min: i64,
        max: i64,
    },
    /// A number as above, or a table that says where it comes from.
    IntegerOrTable {
        min: i64,
        max: i64,
        table: &'static [SchemaKey],
    },
    /// A word, or a table that says more.
    KeywordOrTable {
        keyword: &'static str,
        table: &'static [SchemaKey],
    },
    /// 0 to 1.
    Fraction,
    Duration {
        min: Duration,
        max: Duration,
    },
    /// Bytes.
    ByteSize {
        min: u64,
        max: u64,
    },
    Keyword(&'static [&'static str]),
    /// A text, and which.
    Text(&'static str),
    /// A text that no message repeats.
    Secret(&'static str),
    /// A list of texts, or one.
    TextList(&'static str),
    /// The same, of texts that no message repeats.
    SecretList(&'static str),
    Table(&'static [SchemaKey]),
    TableList(&'static [SchemaKey]),
    /// A table whose keys are names of the user's choice.
    Map(&'static str),
}

use KeyRequirement::{Default, Optional, Required};
use ValueKind::{
    Bool, Fraction, Keyword, Map, Secret, SecretList, Table, TableList, Text, TextList,
};

/// Largest integer that a double holds exactly, which Redis computes with.
const MAX_UNITS: i64 = 1 << 53;
const DAY: Duration = Duration::from_secs(86_400);
const MAX_WARM_UP: Duration = Duration::from_micros(crate::limiter::MAX_WARM_UP_US);
const MAX_PERIOD: Duration = Duration::from_secs(400 * 86_400);

/// At least a millisecond: 0 is no way to switch this off.
const POSITIVE_DURATION: ValueKind = ValueKind::Duration {
    min: Duration::from_millis(1),
    max: DAY,
};
const DURATION: ValueKind = ValueKind::Duration {
    min: Duration::ZERO,
    max: DAY,
};

/// The main file.
pub(super) static ROOT: [SchemaKey; 15] = [
    key(
        "include",
        TextList("paths or globs such as \"policies/*.toml\""),
        Default(""),
        "More files with [[policy]] tables, relative to this file. Nothing else may stand in them. This file's policies come first, then theirs by file name. A path that can't be read is an error.",
    ),
    key("listen", Table(&LISTEN), Optional, "Where clients connect."),
    key(
        "upstream",
        Table(&UPSTREAM),
        Optional,
        "What requests are forwarded to. It may be left out beside rls or check: then nothing listens at listen.address.",
    ),
    key(
        "rls",
        Table(&RLS),
        Optional,
        "Envoy's rate-limit service, by gRPC. docs/ENVOY.md tells how to use it. Absent: none.",
    ),
    key(
        "check",
        Table(&CHECK),
        Optional,
        "Where nginx (auth_request), Traefik (forwardAuth) and Envoy (ext_authz) may ask whether a request passes. docs/ENVOY.md tells how. Absent: nowhere.",
    ),
    key("client", Table(&CLIENT), Optional, "Who is the client?"),
    key(
        "path",
        Table(&PATH),
        Optional,
        "How a path is read for matching and keys. What is forwarded stays as it came.",
    ),
    key("store", Table(&STORE), Optional, "Where counters live."),
    key(
        "defaults",
        Table(&DEFAULTS),
        Optional,
        "What a policy does that doesn't say otherwise.",
    ),
    key(
        "response",
        Table(&RESPONSE),
        Optional,
        "What answers say about limits.",
    ),
    key("shutdown", Table(&SHUTDOWN), Optional, "How the end goes."),
    key(
        "admin",
        Table(&ADMIN),
        Optional,
        "A port of its own, for those who run it: health, metrics, what policies did, keys, explanations.",
    ),
    key("log", Table(&LOG), Optional, "What is logged, to stderr."),
    key(
        "trace",
        Table(&TRACE),
        Optional,
        "Spans by OTLP. Without this table, a client's traceparent is passed on as it came, and nothing else.",
    ),
    key("policy", TableList(&POLICY), Optional, "The policies."),
];

/// An included file.
pub(super) static INCLUDED_ROOT: [SchemaKey; 1] =
    [key("policy", TableList(&POLICY), Optional, "The policies.")];

static DEFAULTS: [SchemaKey; 3] = [
    key(
        "on_store_failure",
        ON_STORE_FAILURE,
        Default("open"),
        "When the store gives no answer: forward; answer 503 with Retry-After; or go on in this process, with its share of the limits.",
    ),
    key(
        "algorithm",
        ALGORITHM,
        Default("sliding_log"),
        "How the units of a limit come back.",
    ),
    key(
        "missing_key",
        MISSING_KEY,
        Default("shared"),
        "When a key part is absent or empty: one quota for all such requests; the policy doesn't apply, so dropping a header gets round it; 400.",
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
    "Whose scripts may read tidegate's own answers in a browser, such as a 429 and its Retry-After. What your app answers stays as it is.",
)];

static RESPONSE: [SchemaKey; 3] = [
    key(
        "headers",
        Keyword(&["standard", "legacy", "both", "none"]),
        Default("both"),
        "RateLimit and RateLimit-Policy with every limit that applied; X-RateLimit-* for the tightest; both; none.",
    ),
    key(
        "legacy_reset",
        Keyword(&["delta", "epoch"]),
        Default("delta"),
        "X-RateLimit-Reset: seconds from now, or since 1970.",
    ),
    key(
        "cors",
        Table(&RESPONSE_CORS),
        Optional,
        "Whose scripts may read answers in a browser.",
    ),
];

static SHUTDOWN: [SchemaKey; 2] = [
    key(
        "delay",
        DURATION,
        Default("0s"),
        "Keep serving this long after SIGTERM.",
    ),
    key(
        "grace",
        DURATION,
        Default("25s"),
        "Then let requests in flight finish this long.",
    ),
];

static ADMIN: [SchemaKey; 4] = [
    key(
        "address",
        Text("an IP address and port such as \"127.0.0.1:9090\", or \"unix:/path\""),
        Default("127.0.0.1:9090"),
        "Never the clients' port. Or a Unix socket, with mode 0660. An address that is not on loopback: token_file must be set.",
    ),
    key(
        "probes",
        Text("an IP address and port such as \"0.0.0.0:9091\""),
        Default(""),
        "A second port with /livez, /readyz and /metrics only, for kubelet and Prometheus. Empty: none.",
    ),
    key(
        "token_file",
        Text("the path of a file that holds the token"),
        Default(""),
        "Bearer token for what changes something: without one, nothing can be changed. With an address that is not on loopback it is asked for everything but health and metrics.",
    ),
    key(
        "allowed_hosts",
        TextList("host names such as \"admin.internal\""),
        Default(""),
        "Names in Host that are answered, besides localhost and addresses: other names may be DNS rebinding.",
    ),
];

static LOG: [SchemaKey; 4] = [
    key(
        "format",
        Keyword(&["json", "text"]),
        Default("json"),
        "One JSON object per line, or text.",
    ),
    key(
        "level",
        Text(
            "\"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", perhaps with exceptions as in \"info,tidegate::proxy=debug\"",
        ),
        Default("info"),
        "What is worth a line.",
    ),
    key(
        "access",
        Keyword(&["off", "rejected", "all"]),
        Default("rejected"),
        "Which requests get a line.",
    ),
    key(
        "access_sample",
        Fraction,
        Default("1.0"),
        "The share of those that does.",
    ),
];

static TRACE: [SchemaKey; 4] = [
    key(
        "otlp",
        Text("a collector such as \"http://127.0.0.1:4317\""),
        Required,
        "Where spans go: by gRPC, or by HTTP if the port is 4318 or there is a path.",
    ),
    key(
        "headers_file",
        Text("the path of a file with a \"name: value\" per line"),
        Optional,
        "Header fields that go with every export, such as the key that a hosted collector asks for. A file, as they are mostly secret; lines that begin with # are remarks.",
    ),
    key("tls", Table(&UPSTREAM_TLS), Optional, "For https."),
    key(
        "sample",
        Fraction,
        Default("0.01"),
        "The share of requests recorded, of those whose traceparent doesn't say whether they are to be: what it says holds.",
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

/// The key called `name` in a table.
pub(super) fn find_key(table: &'static [SchemaKey], name: &str) -> Option<&'static SchemaKey> {
    table.iter().find(|key| key.name == name)
}

/// The key at a dotted path below the root; not inside policies.
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

/// What a user who wrote `name` into `table` might have meant.
pub(super) fn suggest_key(table: &'static [SchemaKey], name: &str) -> String {
    let likeness = |key: &SchemaKey| strsim::jaro_winkler(key.name, &name.to_ascii_lowercase());
    let best = table
        .iter()
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    if let Some(key) = best.filter(|key| likeness(key) > 0.8) {
        // The first sentence says enough.
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

/// The dotted paths of all keys outside of policies that take a value.
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

/// What would be right: follows "expected".
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
            Text(what) | Secret(what) | Map(what) => f.write_str(what),
            TextList(what) | SecretList(what) => write!(f, "a list of {what}"),
            Table(_) => f.write_str("a table"),
            TableList(_) => f.write_str("a list of tables"),
        }
    }
}
