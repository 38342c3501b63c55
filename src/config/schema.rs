//! Schema of the configuration: every key with its type, range, default and description.
//!
//! Unknown keys, defaults, ranges, the "expected …" part of messages and the tables of
//! `docs/CONFIGURATION.md` all come from here, so they cannot differ.

mod client;
mod key;
mod policy;
mod proxy;
mod store;

pub(super) use key::{KeyRequirement, SchemaKey, ValueKind};
pub(super) use policy::{COST, LIMIT, MATCH, VALUE_CONDITION};
pub(super) use store::{DEFAULT_KEY_PREFIX, DEFAULT_REDIS_URL};

use client::{CLIENT, SELF_SERVICE};
use key::*;
use policy::POLICY;
use proxy::{CHECK, LISTEN, PATH, RLS, UPSTREAM, UPSTREAM_TLS};
use std::time::Duration;
use store::STORE;

/// Keys of the main file.
pub(super) static ROOT: [SchemaKey; 17] = [
    key(
        "include",
        TextList("paths or globs such as \"policies/*.toml\""),
        Default(""),
        "More files, relative to this file. They may contain only [[policy]] tables. Their policies follow those of this file, sorted by file name. An unreadable path is an error.",
    ),
    table("listen", &LISTEN, "Where clients connect."),
    table(
        "upstream",
        &UPSTREAM,
        "The server that requests are forwarded to. May be absent if rls or check is set: then nothing listens at listen.address.",
    ),
    table(
        "rls",
        &RLS,
        "Envoy's rate-limit service (gRPC); see docs/ENVOY.md. Absent: off.",
    ),
    table(
        "check",
        &CHECK,
        "Authorization service for nginx (auth_request), Traefik (forwardAuth) and Envoy (ext_authz); see docs/ENVOY.md. Absent: off.",
    ),
    table("client", &CLIENT, "How the client address is found."),
    table(
        "path",
        &PATH,
        "How paths are normalized for matches and keys.",
    ),
    table("store", &STORE, "Where counters are stored."),
    table("defaults", &DEFAULTS, "Defaults of policies."),
    table("response", &RESPONSE, "Rate-limit fields of responses."),
    table("shutdown", &SHUTDOWN, "Graceful shutdown."),
    table(
        "admin",
        &ADMIN,
        "A separate port for operators: health, metrics, policy statistics, keys, explanations.",
    ),
    table("log", &LOG, "Logging to stderr."),
    table(
        "trace",
        &TRACE,
        "Export of spans by OTLP. Absent: tidegate only forwards the client's traceparent.",
    ),
    table(
        "metrics",
        &METRICS,
        "Export of metrics by OTLP, beside the Prometheus page.",
    ),
    optional("policy", TableList(&POLICY), "The policies."),
    table(
        "self_service",
        &SELF_SERVICE,
        "A path that answers a client with its own limits. Absent: off.",
    ),
];

/// Keys of an included file.
pub(super) static INCLUDED_ROOT: [SchemaKey; 1] =
    [optional("policy", TableList(&POLICY), "The policies.")];

static DEFAULTS: [SchemaKey; 4] = [
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
        "If a key part is absent or empty: one quota for all such requests; the policy does not apply, so clients can avoid it; reject with 400.",
    ),
    key(
        "mark_header",
        Text("the name of a header that starts with \"x-\""),
        Default("X-Tidegate-Over"),
        "Request header to your app: the policies with mode \"mark\" whose limit the request exceeds. tidegate removes this header from the requests of clients.",
    ),
];

static RESPONSE_CORS: [SchemaKey; 1] = [key(
    "allow_origins",
    TextList("origins such as \"https://app.example.com\", or \"*\""),
    Default(""),
    "Origins with scripts that may read tidegate's own responses, such as a 429, and the rate-limit fields of your app's. A first label \"*\" covers subdomains.",
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
    table("cors", &RESPONSE_CORS, "CORS of tidegate's own responses."),
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

static ADMIN: [SchemaKey; 5] = [
    key(
        "address",
        Text("an IP address and port such as \"127.0.0.1:9090\", or \"unix:/path\""),
        Default("127.0.0.1:9090"),
        "Never expose it to clients. Outside loopback, token_file is required. A Unix socket has mode 0660.",
    ),
    key(
        "probes",
        Text("an IP address and port such as \"[::]:9091\""),
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
        "advertise",
        Text("a host, and optionally a port, such as \"10.0.0.7\""),
        Default(""),
        "Address of this port for other instances, which query it for the fleet view. Empty: address; if that is 0.0.0.0 or [::], the environment variable POD_IP.",
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
    required(
        "otlp",
        Text("a collector such as \"http://127.0.0.1:4317\""),
        "Collector of spans. Uses HTTP if the port is 4318 or the URL has a path, otherwise gRPC.",
    ),
    optional(
        "headers_file",
        Text("the path of a file with a \"name: value\" per line"),
        "Header fields for every export, such as an API key. Lines that begin with # are comments.",
    ),
    table("tls", &UPSTREAM_TLS, "TLS to an https collector."),
    key(
        "sample",
        Fraction,
        Default("0.01"),
        "Fraction of requests recorded. The sampled flag of a client's traceparent takes precedence.",
    ),
];

static METRICS: [SchemaKey; 4] = [
    required(
        "otlp",
        Text("a collector such as \"http://127.0.0.1:4317\""),
        "Collector of metrics. Uses HTTP if the port is 4318 or the URL has a path, otherwise gRPC.",
    ),
    optional(
        "headers_file",
        Text("the path of a file with a \"name: value\" per line"),
        "As in [trace].",
    ),
    table("tls", &UPSTREAM_TLS, "TLS to an https collector."),
    key(
        "interval",
        duration(Duration::from_secs(1), Duration::from_secs(3600)),
        Default("60s"),
        "Interval of exports.",
    ),
];

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
