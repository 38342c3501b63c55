//! Builds the settings of every module from the configuration tables.

use super::diagnostic::ConfigDiagnostic;
use super::input::ConfigInput;
use super::policies::{self, ClaimTrust, PolicyContext};
use super::table_reader::TableReader;
use super::{
    Config, FileSet, PolicyDescription, RawConfig, StoreSettings, client_tls, lints, listen_tls,
    match_conditions, redis, values,
};
use crate::admin::{AdminSettings, AdminToken};
use crate::limiter::Algorithm;
use crate::listen::ListenAddress;
use crate::policy::path::EscapedSlashes;
use crate::policy::{
    CorsOrigins, MissingKeyAction, OnStoreFailure, PolicyTable, RateLimitHeaderSettings, client,
    jwt, path,
};
use crate::proxy::{
    ExtraListenerSettings, ListenSettings, ListenerKind, MAX_MESSAGE_BYTES, ShutdownSettings,
    UpstreamScheme, UpstreamSettings, UpstreamUrl,
};
use crate::store::MemorySettings;
use crate::store::redis::RedisTopology;
use crate::telemetry::trace::{CollectorUrl, TraceSettings};
use crate::telemetry::{self, AccessLogFilter, LogFormat, LogSettings};
use crate::tls::{ClientTls, ServerTls};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ipnet::IpNet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything but what only the end of a load knows.
pub(super) struct BuiltSettings {
    listen: ListenSettings,
    tls: Option<ServerTls>,
    upstream: UpstreamSettings,
    has_upstream: bool,
    service_listeners: Vec<ExtraListenerSettings>,
    ext_authz_denied_status: Option<StatusCode>,
    policy_table: PolicyTable,
    store: StoreSettings,
    shutdown: ShutdownSettings,
    admin: AdminSettings,
    log: LogSettings,
    trace: Option<TraceSettings>,
    policy_descriptions: Vec<PolicyDescription>,
}

/// Builds all rooms' settings; `None` if a key without a default is absent or wrong.
pub(super) fn build_settings(
    input: &ConfigInput,
    root: &TableReader<'_>,
    included: &[TableReader<'_>],
) -> Option<BuiltSettings> {
    let (listen_reader, defaults) = (root.get_table("listen"), root.get_table("defaults"));
    let http = listen_reader.get_table("http");
    let listen = build_listen_settings(&listen_reader, &http);
    let tls_reader = listen_reader.get_optional_table("tls");
    let tls = tls_reader
        .as_ref()
        .map(|at| listen_tls::build_server_tls(input, at));
    let (rls, check) = (
        root.get_optional_table("rls"),
        root.get_optional_table("check"),
    );
    let upstream_reader = root.get_table("upstream");
    let forwards = upstream_reader.contains_key("url") || (rls.is_none() && check.is_none());
    let upstream = build_upstream_settings(input, &upstream_reader, &http, forwards);
    let doors: Vec<_> = [
        (ListenerKind::RateLimitService, &rls),
        (ListenerKind::ExtAuthz, &check),
    ]
    .into_iter()
    .filter_map(|(kind, at)| {
        Some(build_service_listener(
            input,
            kind,
            at.as_ref()?,
            listen.as_ref(),
        ))
    })
    .collect();
    let refused_status = check
        .as_ref()
        .and_then(|at| at.get_integer::<u16>("refused_status"));
    let store = build_store_settings(input, &root.get_table("store"));
    let shutdown = build_shutdown_settings(&root.get_table("shutdown"));
    let admin = build_admin_settings(input, &root.get_table("admin"));
    let log = build_log_settings(&root.get_table("log"));
    let trace = root
        .get_optional_table("trace")
        .map(|at| build_trace_settings(input, &at));
    let response = root.get_table("response");
    let (fields, cors) = (
        build_header_settings(&response),
        build_cors(&response.get_table("cors")),
    );
    let is_cluster = |store: &StoreSettings| match store {
        StoreSettings::Redis(redis) => redis.topology == RedisTopology::Cluster,
        StoreSettings::Memory(_) => false,
    };
    let client_reader = root.get_table("client");
    let jwt_reader = client_reader.get_table("jwt");
    let claims = read_claim_trust(&jwt_reader);
    let tokens = claims.and_then(|claims| build_jwt_settings(input, &jwt_reader, claims));
    let scope = PolicyContext {
        // What is wrong with the store is said by now.
        uses_redis_cluster: store.as_ref().is_none_or(is_cluster),
        client: build_client_settings(&client_reader)?,
        path: build_path_settings(&root.get_table("path"))?,
        on_store_failure: defaults.get_keyword("on_store_failure", &ON_STORE_FAILURE_MODES)?,
        algorithm: defaults.get_keyword("algorithm", &ALGORITHMS)?,
        missing_key: defaults.get_keyword("missing_key", &MISSING_KEY_MODES)?,
        requests_client_certificates: tls_reader
            .as_ref()
            .is_some_and(listen_tls::requests_client_certificates),
        uses_memory_store: !matches!(store, Some(StoreSettings::Redis(_))),
        claim_trust: claims,
        has_ext_authz: check.is_some(),
    };
    let sources = std::iter::once(root).chain(included);
    let (spanned_policies, words) = policies::build_policies(
        sources.flat_map(|source| source.get_tables("policy")),
        &scope,
    );
    // What is doubtful matters when nothing is wrong.
    if !input.has_errors()
        && let (Some(listen), Some(upstream), Some(store)) = (&listen, &upstream, &store)
    {
        let has_rls = rls.is_some();
        lints::run_lints(
            &spanned_policies,
            &lints::LintContext {
                root,
                policy_context: &scope,
                listen,
                upstream,
                store,
                has_rls,
            },
        );
    }
    let policies = spanned_policies.into_iter().map(|one| one.policy).collect();
    let table = PolicyTable::new(policies, scope.path, scope.client, fields?).with_cors(cors);
    let table = match tokens {
        Some(tokens) => table.with_token_settings(tokens),
        None => table,
    };
    Some(BuiltSettings {
        listen: listen?,
        tls: match tls {
            Some(tls) => Some(tls?),
            None => None,
        },
        upstream: upstream?,
        has_upstream: forwards,
        service_listeners: doors.into_iter().collect::<Option<_>>()?,
        ext_authz_denied_status: refused_status.and_then(|code| StatusCode::from_u16(code).ok()),
        policy_table: table,
        store: store?,
        shutdown: shutdown?,
        admin: admin?,
        log: log?,
        trace: match trace {
            Some(trace) => Some(trace?),
            None => None,
        },
        policy_descriptions: words,
    })
}

pub(super) fn complete_config(
    (built, raw): (BuiltSettings, RawConfig),
    warnings: Vec<ConfigDiagnostic>,
    files: FileSet,
) -> Config {
    let BuiltSettings {
        listen,
        tls,
        upstream,
        has_upstream: forwards,
        service_listeners: doors,
        ext_authz_denied_status: refused_status,
        ..
    } = built;
    let BuiltSettings {
        policy_table: table,
        store,
        shutdown,
        admin,
        log,
        trace,
        policy_descriptions: words,
        ..
    } = built;
    let (table, tls) = (table.into(), tls.map(Arc::new));
    Config {
        listen,
        tls,
        upstream,
        has_upstream: forwards,
        service_listeners: doors,
        ext_authz_denied_status: refused_status,
        policy_table: table,
        store,
        shutdown,
        admin,
        log,
        trace,
        policy_descriptions: words,
        warnings,
        files,
        raw,
    }
}

pub(super) const ON_STORE_FAILURE_MODES: [(&str, OnStoreFailure); 3] = [
    ("open", OnStoreFailure::Open),
    ("closed", OnStoreFailure::Closed),
    ("local", OnStoreFailure::Local),
];

pub(super) const MISSING_KEY_MODES: [(&str, MissingKeyAction); 3] = [
    ("shared", MissingKeyAction::Shared),
    ("skip", MissingKeyAction::Skip),
    ("reject", MissingKeyAction::Reject),
];

pub(super) const ALGORITHMS: [(&str, Algorithm); 6] = [
    ("sliding_log", Algorithm::SlidingLog),
    ("sliding_window", Algorithm::SlidingWindow { buckets: 10 }),
    ("fixed_window", Algorithm::FixedWindow { offset_us: 0 }),
    (
        "token_bucket",
        Algorithm::TokenBucket {
            burst: 1,
            warm_up_us: 0,
        },
    ),
    (
        "leaky_bucket",
        Algorithm::LeakyBucket {
            max_delay_us: 1_000_000,
        },
    ),
    ("concurrency", Algorithm::Concurrency { max_duration_us: 0 }),
];

fn build_listen_settings(
    reader: &TableReader<'_>,
    http: &TableReader<'_>,
) -> Option<ListenSettings> {
    Some(ListenSettings {
        address: reader.get_parsed("address", values::parse_listen_address)?,
        proxy_protocol_from: read_proxy_protocol_networks(reader)?,
        max_connections: reader.get_integer("max_connections")?,
        threads: match reader.get_integer("threads")? {
            // Respects CPU affinity and the cgroup quota.
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        },
        header_timeout: http.get_duration("header_timeout")?,
        idle_timeout: http.get_duration("idle_timeout")?,
        body_idle_timeout: http.get_duration("body_idle_timeout")?,
        max_header_bytes: http.get_byte_size("max_header_bytes")?,
        max_headers: http.get_integer("max_headers")?,
        max_body_bytes: http
            .get_byte_size("max_body_bytes")
            .filter(|size| *size > 0),
        max_concurrent_streams: http.get_integer("max_concurrent_streams")?,
    })
}

/// Builds the listener of `[rls]` or `[check]`. Timeouts and head limits are those of `[listen.http]`.
fn build_service_listener(
    input: &ConfigInput,
    kind: ListenerKind,
    reader: &TableReader<'_>,
    proxy: Option<&ListenSettings>,
) -> Option<ExtraListenerSettings> {
    let tls = reader
        .get_optional_table("tls")
        .map(|tls| listen_tls::build_server_tls(input, &tls));
    let address = reader.get_parsed("address", values::parse_listen_address);
    let max_connections = reader.get_integer("max_connections")?;
    let is_rls = kind == ListenerKind::RateLimitService;
    let streams = if is_rls {
        reader.get_integer("max_concurrent_streams")?
    } else {
        proxy?.max_concurrent_streams
    };
    let listen = ListenSettings {
        address: address?,
        proxy_protocol_from: None,
        max_connections,
        max_body_bytes: if is_rls {
            Some(MAX_MESSAGE_BYTES)
        } else {
            proxy?.max_body_bytes
        },
        max_concurrent_streams: streams,
        ..proxy?.clone()
    };
    let tls = match tls {
        Some(tls) => Some(Arc::new(tls?)),
        None => None,
    };
    Some(ExtraListenerSettings { kind, listen, tls })
}

/// Reads the networks that may send a PROXY header. The inner `None` means that the protocol is off.
fn read_proxy_protocol_networks(reader: &TableReader<'_>) -> Option<Option<Vec<IpNet>>> {
    let is_required = reader.get_keyword("proxy_protocol", &[("off", false), ("require", true)])?;
    let networks = reader.get_list("proxy_protocol_from", values::parse_network);
    if is_required && reader.get_items("proxy_protocol_from").is_empty() {
        reader.report_error(
            "proxy_protocol",
            "proxy_protocol = \"require\" needs proxy_protocol_from; expected the networks of your load balancers, or \
             [\"0.0.0.0/0\", \"::/0\"] if only they can connect",
        );
    }
    if !is_required && !networks.is_empty() {
        reader.report_warning(
            "proxy_protocol_from",
            "without effect: proxy_protocol is \"off\"; expected proxy_protocol = \"require\"",
        );
    }
    Some(is_required.then_some(networks))
}

/// Parses the address of the probes listener. The kubelet and Prometheus connect by TCP only.
fn parse_socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .ok()
        .ok_or_else(|| "expected an IP address and port such as \"0.0.0.0:9091\"".to_owned())
}

/// Builds the upstream settings. Without an upstream, `url` is an empty Unix path.
fn build_upstream_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
    http: &TableReader<'_>,
    has_upstream: bool,
) -> Option<UpstreamSettings> {
    let url = match has_upstream {
        true => reader.get_parsed("url", values::parse_upstream_url),
        false => Some(UpstreamUrl::Unix(PathBuf::new())),
    };
    let tls = url
        .as_ref()
        .and_then(|url| build_upstream_tls(input, reader, url));
    Some(UpstreamSettings {
        connect_timeout: reader.get_duration("connect_timeout")?,
        response_timeout: reader
            .get_duration("response_timeout")
            .filter(|time| !time.is_zero()),
        body_idle_timeout: reader
            .get_duration("body_idle_timeout")
            .filter(|time| !time.is_zero()),
        pool_idle_timeout: reader.get_duration("pool_idle_timeout")?,
        pool_max_idle: reader.get_integer("pool_max_idle")?,
        preserve_host: reader.get_bool("preserve_host")?,
        max_connections: reader.get_integer("max_connections")?,
        queue_timeout: reader.get_duration("queue_timeout")?,
        max_requests_waiting: http.get_integer("max_requests_waiting")?,
        retry_connect: reader.get_integer("retry_connect")?,
        retry_idempotent: reader.get_bool("retry_idempotent")?,
        // Last, so that errors in the other keys are reported first.
        url: url?,
        tls,
    })
}

fn build_upstream_tls(
    input: &ConfigInput,
    reader: &TableReader<'_>,
    url: &UpstreamUrl,
) -> Option<ClientTls> {
    let host = match url {
        UpstreamUrl::Net {
            scheme: UpstreamScheme::Https,
            host,
            ..
        } => Some(host),
        _ => None,
    };
    let requirement = client_tls::TlsRequirement {
        is_tls: host.is_some(),
        is_used: true,
        enabled_by: "https:// in upstream.url",
    };
    let tls = client_tls::build_client_tls(input, &reader.get_table("tls"), requirement)?;
    if tls.server_name_for(host?).is_err() {
        reader.report_error("url", "the host is not a name that a certificate can be verified against; expected such a name, or the certificate's name in upstream.tls.server_name")
    }
    Some(tls)
}

pub(super) fn require_nonempty(text: &str, what: &str) -> Result<String, String> {
    if text.is_empty() {
        Err(format!("expected {what}"))
    } else {
        Ok(text.to_owned())
    }
}

fn build_client_settings(reader: &TableReader<'_>) -> Option<client::Settings> {
    Some(client::Settings {
        trusted_proxies: reader.get_list("trusted_proxies", values::parse_network),
        ip_header: reader.get_parsed("ip_header", |text| {
            HeaderName::from_bytes(text.as_bytes())
                .ok()
                .ok_or_else(|| "expected the name of a header".to_owned())
        })?,
        ipv4_prefix: reader.get_integer("ipv4_prefix")?,
        ipv6_prefix: reader.get_integer("ipv6_prefix")?,
    })
}

const JWT_KEY_FILES: [&str; 2] = ["keys_file", "secret_file"];

fn is_path_set(reader: &TableReader<'_>, key: &str) -> bool {
    reader.get_string(key).is_some_and(|path| !path.is_empty())
}

/// Returns how token claims are trusted. `None` if no key is configured.
fn read_claim_trust(reader: &TableReader<'_>) -> Option<ClaimTrust> {
    match reader.get_bool("verify") {
        Some(false) => Some(ClaimTrust::Unverified),
        _ if JWT_KEY_FILES.iter().any(|key| is_path_set(reader, key)) => Some(ClaimTrust::Signed),
        _ => None,
    }
}

/// Builds the token settings. Reports warnings about the keys.
fn build_jwt_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
    claims: ClaimTrust,
) -> Option<jwt::Settings> {
    let header = reader.get_parsed("header", match_conditions::parse_header_name)?;
    if claims == ClaimTrust::Unverified {
        reader.report_warning(
            "verify",
            "unverified JWT: claims are trusted without a signature check",
        );
        for key in JWT_KEY_FILES
            .into_iter()
            .filter(|key| is_path_set(reader, key))
        {
            reader.report_warning(key, "without effect: verify is false");
        }
        return Some(jwt::Settings {
            header,
            verification: jwt::SignatureVerification::Disabled,
        });
    }
    let (key, (keys, warnings)) = match JWT_KEY_FILES.map(|key| is_path_set(reader, key)) {
        [true, true] => {
            reader.report_error(
                "secret_file",
                "both keys_file and secret_file are set; expected one of them",
            );
            return None;
        }
        [true, false] => {
            let text = read_secret_file(input, reader, "keys_file", "JWK set")?;
            match jwt::VerificationKeys::from_jwks(&text) {
                Ok(read) => ("keys_file", read),
                Err(reason) => {
                    reader.report_error("keys_file", &reason);
                    return None;
                }
            }
        }
        [false, _] => (
            "secret_file",
            jwt::VerificationKeys::from_secret(
                read_secret_file(input, reader, "secret_file", "secret")?.as_bytes(),
            ),
        ),
    };
    for warning in warnings {
        reader.report_warning(key, &warning);
    }
    Some(jwt::Settings {
        header,
        verification: jwt::SignatureVerification::Keys(keys),
    })
}

fn build_path_settings(reader: &TableReader<'_>) -> Option<path::Settings> {
    let escaped_slashes = [
        ("both", EscapedSlashes::Both),
        ("reject", EscapedSlashes::Reject),
        ("keep", EscapedSlashes::Keep),
        ("decode", EscapedSlashes::Decode),
    ];
    Some(path::Settings {
        normalize: reader.get_bool("normalize")?,
        merge_slashes: reader.get_bool("merge_slashes")?,
        escaped_slashes: reader.get_keyword("escaped_slashes", &escaped_slashes)?,
        ignore_trailing_slash: reader.get_keyword(
            "trailing_slash",
            &[("ignore", true), ("significant", false)],
        )?,
        strip_parameters: reader
            .get_keyword("path_parameters", &[("strip", true), ("keep", false)])?,
        case_sensitive: reader.get_bool("case_sensitive")?,
    })
}

fn build_header_settings(reader: &TableReader<'_>) -> Option<RateLimitHeaderSettings> {
    let kinds = [
        ("standard", (true, false)),
        ("legacy", (false, true)),
        ("both", (true, true)),
        ("none", (false, false)),
    ];
    let (standard, legacy) = reader.get_keyword("headers", &kinds)?;
    let legacy_reset_epoch =
        reader.get_keyword("legacy_reset", &[("delta", false), ("epoch", true)])?;
    Some(RateLimitHeaderSettings {
        standard,
        legacy,
        legacy_reset_epoch,
    })
}

fn build_cors(reader: &TableReader<'_>) -> CorsOrigins {
    let cors = CorsOrigins::new(reader.get_list("allow_origins", CorsOrigins::parse_origin));
    if cors.allows_any_origin() && reader.get_items("allow_origins").len() > 1 {
        reader.report_error(
            "allow_origins",
            "\"*\" allows any origin; expected no other entries",
        );
    }
    cors
}

fn build_store_settings(input: &ConfigInput, reader: &TableReader<'_>) -> Option<StoreSettings> {
    let use_redis = reader.get_keyword("kind", &[("memory", false), ("redis", true)])?;
    let memory_reader = reader.get_table("memory");
    let memory = MemorySettings {
        max_keys: memory_reader.get_integer("max_keys")?,
        max_bytes: memory_reader.get_byte_size("max_bytes")?,
    };
    // Validated even if it is not used.
    let redis = redis::build_redis_settings(input, &reader.get_table("redis"), use_redis)?;
    Some(if use_redis {
        StoreSettings::Redis(Box::new(redis))
    } else {
        StoreSettings::Memory(memory)
    })
}

/// Reads the text file named by `key`. Returns `None` if the key is empty or after an error.
pub(super) fn read_secret_file(
    input: &ConfigInput,
    reader: &TableReader<'_>,
    key: &str,
    content: &str,
) -> Option<String> {
    let path = reader.get_string(key).filter(|path| !path.is_empty())?;
    match input.read_file(Path::new(&path)) {
        Ok(text) if text.trim_end().is_empty() => {
            reader.report_error(key, &format!("the file is empty; expected a {content}"));
            None
        }
        Ok(text) => Some(text.trim_end().to_owned()),
        Err(error) => {
            reader.report_error(key, &format!("the file {error}"));
            None
        }
    }
}

fn build_shutdown_settings(reader: &TableReader<'_>) -> Option<ShutdownSettings> {
    Some(ShutdownSettings {
        delay: reader.get_duration("delay")?,
        grace: reader.get_duration("grace")?,
    })
}

pub(super) fn build_admin_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
) -> Option<AdminSettings> {
    let token = read_secret_file(input, reader, "token_file", "token").map(AdminToken::new);
    let address = reader.get_parsed("address", values::parse_admin_address)?;
    if !address.is_local()
        && reader
            .get_string("token_file")
            .is_none_or(|path| path.is_empty())
    {
        reader.report_error(
            "address",
            "other machines can connect; expected a loopback address such as \"127.0.0.1:9090\", or \
             a bearer token in admin.token_file (admin.probes serves the kubelet and Prometheus)",
        );
    }
    let probes = reader.get_parsed("probes", |text| match text {
        "" => Ok(None),
        text => parse_socket_address(text).map(Some),
    })?;
    if probes.is_some_and(|probes| ListenAddress::Ip(probes) == address && probes.port() != 0) {
        reader.report_error("probes", "the same as admin.address; expected another port");
    }
    Some(AdminSettings {
        address,
        probes,
        token,
        allowed_hosts: reader.get_list("allowed_hosts", parse_host_name),
    })
}

/// Parses a host name. Returns it in lower case, for comparison.
fn parse_host_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if text.is_empty() || !text.chars().all(fits) {
        return Err("expected a host name without port such as \"admin.internal\"".to_owned());
    }
    Ok(text.to_ascii_lowercase())
}

fn build_trace_settings(input: &ConfigInput, reader: &TableReader<'_>) -> Option<TraceSettings> {
    let sample = reader.get_fraction("sample");
    let headers = read_trace_headers(input, reader);
    let collector = reader.get_parsed("otlp", CollectorUrl::parse)?;
    let requirement = client_tls::TlsRequirement {
        is_tls: collector.is_tls,
        is_used: true,
        enabled_by: "https:// in trace.otlp",
    };
    let tls = client_tls::build_client_tls(input, &reader.get_table("tls"), requirement);
    if collector.is_tls && tls.as_ref()?.server_name_for(collector.host()).is_err() {
        reader.report_error(
            "otlp",
            "the host is not a name that a certificate can be verified against; expected such a name, or the \
             certificate's name in trace.tls.server_name",
        );
        return None;
    }
    Some(TraceSettings {
        collector,
        headers: headers?,
        tls,
        sample_ratio: sample?,
    })
}

/// Reads the header fields of every export. No message quotes the file, which may hold secrets.
fn read_trace_headers(input: &ConfigInput, reader: &TableReader<'_>) -> Option<HeaderMap> {
    const KEY: &str = "headers_file";
    if !is_path_set(reader, KEY) {
        return Some(HeaderMap::new());
    }
    let text = read_secret_file(input, reader, KEY, "header field per line")?;
    let mut headers = HeaderMap::new();
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let field = line.split_once(':').and_then(|(name, value)| {
            let value = HeaderValue::from_str(value.trim())
                .ok()
                .filter(|value| !value.is_empty())?;
            Some((HeaderName::from_bytes(name.trim().as_bytes()).ok()?, value))
        });
        let Some((name, mut value)) = field else {
            reader.report_error(
                KEY,
                &format!("in the file: line {number}: expected name: value"),
            );
            return None;
        };
        if TraceSettings::RESERVED_HEADERS.contains(&name.as_str()) {
            reader.report_error(
                KEY,
                &format!("in the file: line {number}: {name} is set by tidegate"),
            );
            return None;
        }
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Some(headers)
}

fn build_log_settings(reader: &TableReader<'_>) -> Option<LogSettings> {
    let access = [
        ("off", AccessLogFilter::Off),
        ("rejected", AccessLogFilter::Rejected),
        ("all", AccessLogFilter::All),
    ];
    Some(LogSettings {
        format: reader.get_keyword(
            "format",
            &[("json", LogFormat::Json), ("text", LogFormat::Text)],
        )?,
        level: reader.get_parsed("level", telemetry::LogLevel::parse)?,
        access: reader.get_keyword("access", &access)?,
        access_sample: reader.get_fraction("access_sample")?,
    })
}
