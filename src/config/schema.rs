//! Schema of the configuration: one row per key declares its description, name, kind, range and
//! default, when a change takes effect, and whether the value is secret.
//!
//! Unknown keys, defaults, ranges, the "expected …" part of messages, the effective configuration,
//! the JSON Schema and the lists of `docs/CONFIGURATION.md` all come from here, so they cannot
//! differ.

mod client;
mod key;
mod policy;
mod proxy;
mod store;

pub(super) use key::{
    ALGORITHMS, AppliedAt, KeyRequirement, PolicyActionKind, RedisTopologyKind, SchemaKey,
    ValueKind,
};
pub(super) use policy::{ACTUAL, COST, ESTIMATE, LIMIT, MATCH, VALUE_CONDITION};

use crate::telemetry::{AccessLogFilter, LogFormat};
use crate::text::find_similar;
use client::{CLIENT, SELF_SERVICE};
use key::*;
use policy::POLICY;
use proxy::{CHECK, LISTEN, PATH, RLS, UPSTREAM, UPSTREAM_TLS};
use std::time::Duration;
use store::STORE;
use strum::VariantNames;

schema_table! {
    /// Keys of the main file.
    pub(super) static ROOT {
        /// More files, relative to this file, with only [[policy]] tables. Their policies follow
        /// those of this file, sorted by file name. An unreadable path is an error.
        include: TextList("paths or globs such as \"policies/*.toml\""), default = "", reload;
        /// Where clients connect.
        listen: Table(&LISTEN), per_instance;
        /// The server that requests are forwarded to. May be absent if rls or check is set: then
        /// nothing listens at listen.address.
        upstream: Table(&UPSTREAM);
        /// Envoy's rate-limit service (gRPC); see docs/ENVOY.md. Absent: off.
        rls: Table(&RLS);
        /// Authorization service for nginx (auth_request), Traefik (forwardAuth) and Envoy
        /// (ext_authz); see docs/ENVOY.md. Absent: off.
        check: Table(&CHECK);
        /// How the client address is found.
        client: Table(&CLIENT), reload;
        /// How paths are normalized for matches and keys.
        path: Table(&PATH), reload;
        /// Where counters are stored.
        store: Table(&STORE);
        /// Defaults of policies.
        defaults: Table(&DEFAULTS), reload;
        /// Rate-limit fields of responses.
        response: Table(&RESPONSE), reload;
        /// Graceful shutdown.
        shutdown: Table(&SHUTDOWN), per_instance;
        /// A separate port for operators: health, metrics, policy statistics, keys, explanations.
        admin: Table(&ADMIN), per_instance;
        /// Logging to stderr.
        log: Table(&LOG), per_instance;
        /// Export of spans by OTLP. Absent: tidegate only forwards the client's traceparent.
        trace: Table(&TRACE), per_instance;
        /// Export of metrics by OTLP, beside the Prometheus page.
        metrics: Table(&METRICS), per_instance;
        /// The policies.
        policy: TableList(&POLICY);
        /// A path that answers a client with its own limits. Absent: off.
        self_service: Table(&SELF_SERVICE), reload;
    }

    /// Keys of an included file.
    pub(super) static INCLUDED_ROOT {
        /// The policies.
        policy: TableList(&POLICY);
    }

    static DEFAULTS {
        /// If the store fails: forward the request; reject it with 503 and Retry-After; or limit in
        /// this process, by its share of the limits.
        on_store_failure: ON_STORE_FAILURE, default = "open";
        /// How a limit counts.
        algorithm: ALGORITHM, default = "sliding_log";
        /// If a key part is absent or empty: one quota for all such requests; the policy does not
        /// apply, so clients can avoid it; 400.
        missing_key: MISSING_KEY, default = "shared";
        /// Request header to your app: the policies with mode "mark" whose limit the request
        /// exceeds. Removed from the requests of clients.
        mark_header: Text("the name of a header that starts with \"x-\""), default = "X-Tidegate-Over";
    }

    static RESPONSE_CORS {
        /// Origins with scripts that may read tidegate's own responses, such as a 429, and the
        /// rate-limit fields of your app's.
        allow_origins: TextList("origins such as \"https://app.example.com\", or \"*\""), default = "";
    }

    static RESPONSE {
        /// RateLimit and RateLimit-Policy with all applied limits; X-RateLimit-* with the tightest;
        /// both; none.
        headers: Keyword(&["standard", "legacy", "both", "none"]), default = "both";
        /// X-RateLimit-Reset in seconds from now, or as Unix time; absent if no wait helps.
        legacy_reset: Keyword(&["delta", "epoch"]), default = "delta";
        /// CORS of tidegate's own responses.
        cors: Table(&RESPONSE_CORS);
    }

    static SHUTDOWN {
        /// How long to keep serving after SIGTERM.
        delay: DURATION, default = "0s";
        /// How long requests in flight may then take to finish.
        grace: DURATION, default = "25s";
    }

    static ADMIN {
        /// Never expose it to clients. Outside loopback, token_file is required. A Unix socket has
        /// mode 0660.
        address: Text("an IP address and port such as \"127.0.0.1:9090\", or \"unix:/path\""),
            default = "127.0.0.1:9090";
        /// A second port with only /livez, /readyz and /metrics, for the kubelet and Prometheus.
        probes: Text("an IP address and port such as \"[::]:9091\""), default = "";
        /// Bearer token for commands that change state; without it they are disabled. Outside
        /// loopback, everything but health and metrics needs it.
        token_file: Text("the path of a file that holds the token"), default = "", credential;
        /// Address of this port for other instances, which query it for the fleet view. Empty:
        /// address; if that is 0.0.0.0 or [::], the environment variable POD_IP.
        advertise: Text("a host, and optionally a port, such as \"10.0.0.7\""), default = "";
        /// Names accepted in Host, besides localhost and IP addresses, against DNS rebinding.
        allowed_hosts: TextList("host names such as \"admin.internal\""), default = "";
    }

    static LOG {
        /// JSON lines or text.
        format: Keyword(LogFormat::VARIANTS), default = "json";
        /// Least severe level logged.
        level: LOG_LEVEL, default = "info";
        /// Requests that are logged.
        access: Keyword(AccessLogFilter::VARIANTS), default = "rejected";
        /// Fraction of those requests that are logged.
        access_sample: Fraction, default = "1.0";
    }

    static TRACE {
        /// Collector of spans. HTTP if the port is 4318 or the URL has a path, otherwise gRPC.
        otlp: Text("a collector such as \"http://127.0.0.1:4317\""), required;
        /// Header fields for every export, such as an API key. Lines that begin with # are
        /// comments.
        headers_file: Text("the path of a file with a \"name: value\" per line");
        /// TLS to an https collector.
        tls: Table(&UPSTREAM_TLS);
        /// Fraction of requests recorded. The sampled flag of a client's traceparent takes
        /// precedence.
        sample: Fraction, default = "0.01";
    }

    static METRICS {
        /// Collector of metrics, as in [trace].
        otlp: Text("a collector such as \"http://127.0.0.1:4317\""), required;
        /// As in [trace].
        headers_file: Text("the path of a file with a \"name: value\" per line");
        /// TLS to an https collector.
        tls: Table(&UPSTREAM_TLS);
        /// Interval of exports.
        interval: duration(Duration::from_secs(1), Duration::from_secs(3600)), default = "60s";
    }
}

const LOG_LEVEL: ValueKind = Text(
    "\"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", optionally with exceptions such as \"info,tidegate::proxy=debug\"",
);

/// A key outside policies that is no table.
pub(super) struct LeafKey {
    /// Dotted path from the root.
    pub path: String,
    pub key: &'static SchemaKey,
    /// When a change of the key, or of a table around it, takes effect.
    pub applied_at: AppliedAt,
}

/// Finds a key in a table.
pub(super) fn find_key(table: &'static [SchemaKey], name: &str) -> Option<&'static SchemaKey> {
    table.iter().find(|key| key.name == name)
}

/// Suggests a key for the unknown key `name` of `table`.
pub(super) fn suggest_key(table: &'static [SchemaKey], name: &str) -> String {
    let names = table.iter().map(|key| key.name);
    let best = find_similar(names, &name.to_ascii_lowercase(), 0.8);
    if let Some(key) = best.and_then(|name| find_key(table, name)) {
        let gist = key
            .doc
            .split_once(". ")
            .map_or(key.doc, |(first, _)| first)
            .trim_end_matches('.');
        return format!("did you mean \"{}\"? ({gist}.)", key.name);
    }
    if let Some(leaf) = leaf_keys().into_iter().find(|leaf| leaf.key.name == name) {
        return format!("did you mean {}?", leaf.path);
    }
    let known: Vec<&str> = table.iter().map(|key| key.name).collect();
    format!("expected {}", join_alternatives(&known))
}

/// All keys outside policies that are no tables.
pub(super) fn leaf_keys() -> Vec<LeafKey> {
    fn collect_leaves(
        table: &'static [SchemaKey],
        above: &str,
        above_applied_at: AppliedAt,
        leaves: &mut Vec<LeafKey>,
    ) {
        for key in table {
            let path = format!("{above}{}", key.name);
            let applied_at = key.applied_at.within(above_applied_at);
            match &key.kind {
                Table(inner) => collect_leaves(inner, &format!("{path}."), applied_at, leaves),
                TableList(_) if above.is_empty() => {}
                _ => leaves.push(LeafKey {
                    path,
                    key,
                    applied_at,
                }),
            }
        }
    }
    let mut leaves = Vec::new();
    collect_leaves(&ROOT, "", AppliedAt::Restart, &mut leaves);
    leaves
}
