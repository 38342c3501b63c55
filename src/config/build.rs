//! From values to settings: one short function for the settings of each room.

use super::cursor::Cursor;
use super::diagnostic::Diagnostic;
use super::input::Input;
use super::policies::{self, Claims, Scope};
use super::{
    Config, FileSet, StoreSettings, Words, Written, doubts, listen_tls, matches, redis, tls, values,
};
use crate::admin::{AdminSettings, Token};
use crate::limiter::Algorithm;
use crate::listen::ListenAddress;
use crate::policy::path::EscapedSlashes;
use crate::policy::{Cors, Fields, MissingKey, OnStoreFailure, PolicyTable, client, jwt, path};
use crate::proxy::{
    Door, DoorSettings, ListenSettings, MAX_MESSAGE_BYTES, Scheme, ShutdownSettings,
    UpstreamSettings, UpstreamUrl,
};
use crate::store::MemorySettings;
use crate::store::redis::Topology;
use crate::telemetry::{self, Access, Format, LogSettings};
use crate::tls::{ClientTls, ServerTls};
use crate::trace::{CollectorUrl, TraceSettings};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ipnet::IpNet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything but what only the end of a load knows.
pub(super) struct Built {
    listen: ListenSettings,
    tls: Option<ServerTls>,
    upstream: UpstreamSettings,
    forwards: bool,
    doors: Vec<DoorSettings>,
    refused_status: Option<StatusCode>,
    table: PolicyTable,
    store: StoreSettings,
    shutdown: ShutdownSettings,
    admin: AdminSettings,
    log: LogSettings,
    trace: Option<TraceSettings>,
    words: Vec<Words>,
}

/// Builds all rooms' settings; `None` if a key without a default is absent or wrong.
pub(super) fn config(input: &Input, top: &Cursor<'_>, included: &[Cursor<'_>]) -> Option<Built> {
    let (listen_at, defaults) = (top.table("listen"), top.table("defaults"));
    let http = listen_at.table("http");
    let listen = listen(&listen_at, &http);
    let tls_at = listen_at.optional_table("tls");
    let tls = tls_at.as_ref().map(|at| listen_tls::server(input, at));
    let (rls, check) = (top.optional_table("rls"), top.optional_table("check"));
    let upstream_at = top.table("upstream");
    let forwards = upstream_at.has("url") || (rls.is_none() && check.is_none());
    let upstream = upstream(input, &upstream_at, &http, forwards);
    let doors: Vec<_> = [(Door::Rls, &rls), (Door::Check, &check)]
        .into_iter()
        .filter_map(|(kind, at)| Some(door(input, kind, at.as_ref()?, listen.as_ref())))
        .collect();
    let refused_status = check
        .as_ref()
        .and_then(|at| at.whole::<u16>("refused_status"));
    let store = store(input, &top.table("store"));
    let shutdown = shutdown(&top.table("shutdown"));
    let admin = admin(input, &top.table("admin"));
    let log = log(&top.table("log"));
    let trace = top.optional_table("trace").map(|at| trace(input, &at));
    let response = top.table("response");
    let (fields, cors) = (fields(&response), cors(&response.table("cors")));
    let is_cluster = |store: &StoreSettings| match store {
        StoreSettings::Redis(redis) => redis.topology == Topology::Cluster,
        StoreSettings::Memory(_) => false,
    };
    let client_at = top.table("client");
    let tokens_at = client_at.table("jwt");
    let claims = claims(&tokens_at);
    let tokens = claims.and_then(|claims| tokens(input, &tokens_at, claims));
    let scope = Scope {
        // What is wrong with the store is said by now.
        has_cluster: store.as_ref().is_none_or(is_cluster),
        client: client(&client_at)?,
        path: path(&top.table("path"))?,
        on_store_failure: defaults.word("on_store_failure", &ON_STORE_FAILURE)?,
        algorithm: defaults.word("algorithm", &ALGORITHM)?,
        missing_key: defaults.word("missing_key", &MISSING_KEY)?,
        asks_for_certificates: tls_at.as_ref().is_some_and(listen_tls::asks_clients),
        counts_in_memory: !matches!(store, Some(StoreSettings::Redis(_))),
        claims,
        is_checked: check.is_some(),
    };
    let sources = std::iter::once(top).chain(included);
    let (placed, words) = policies::all(sources.flat_map(|source| source.tables("policy")), &scope);
    // What is doubtful matters when nothing is wrong.
    if !input.has_errors()
        && let (Some(listen), Some(upstream), Some(store)) = (&listen, &upstream, &store)
    {
        let is_called = rls.is_some();
        doubts::tell(
            &placed,
            &doubts::Around {
                top,
                scope: &scope,
                listen,
                upstream,
                store,
                is_called,
            },
        );
    }
    let policies = placed.into_iter().map(|one| one.policy).collect();
    let table = PolicyTable::new(policies, scope.path, scope.client, fields?).with_cors(cors);
    let table = match tokens {
        Some(tokens) => table.with_tokens(tokens),
        None => table,
    };
    Some(Built {
        listen: listen?,
        tls: match tls {
            Some(tls) => Some(tls?),
            None => None,
        },
        upstream: upstream?,
        forwards,
        doors: doors.into_iter().collect::<Option<_>>()?,
        refused_status: refused_status.and_then(|code| StatusCode::from_u16(code).ok()),
        table,
        store: store?,
        shutdown: shutdown?,
        admin: admin?,
        log: log?,
        trace: match trace {
            Some(trace) => Some(trace?),
            None => None,
        },
        words,
    })
}

pub(super) fn complete(
    (built, written): (Built, Written),
    warnings: Vec<Diagnostic>,
    files: FileSet,
) -> Config {
    let Built {
        listen,
        tls,
        upstream,
        forwards,
        doors,
        refused_status,
        ..
    } = built;
    let Built {
        table,
        store,
        shutdown,
        admin,
        log,
        trace,
        words,
        ..
    } = built;
    let (table, tls) = (table.into(), tls.map(Arc::new));
    Config {
        listen,
        tls,
        upstream,
        forwards,
        doors,
        refused_status,
        table,
        store,
        shutdown,
        admin,
        log,
        trace,
        words,
        warnings,
        files,
        written,
    }
}

pub(super) const ON_STORE_FAILURE: [(&str, OnStoreFailure); 3] = [
    ("open", OnStoreFailure::Open),
    ("closed", OnStoreFailure::Closed),
    ("local", OnStoreFailure::Local),
];

pub(super) const MISSING_KEY: [(&str, MissingKey); 3] = [
    ("shared", MissingKey::Shared),
    ("skip", MissingKey::Skip),
    ("reject", MissingKey::Reject),
];

pub(super) const ALGORITHM: [(&str, Algorithm); 6] = [
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

fn listen(at: &Cursor<'_>, http: &Cursor<'_>) -> Option<ListenSettings> {
    Some(ListenSettings {
        address: at.parsed("address", values::listen_address)?,
        proxy_protocol_from: proxy_protocol_from(at)?,
        max_connections: at.whole("max_connections")?,
        threads: match at.whole("threads")? {
            // Knows CPU affinity and the cgroup's quota.
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        },
        header_timeout: http.duration("header_timeout")?,
        idle_timeout: http.duration("idle_timeout")?,
        body_idle_timeout: http.duration("body_idle_timeout")?,
        max_header_bytes: http.size("max_header_bytes")?,
        max_headers: http.whole("max_headers")?,
        max_body_bytes: http.size("max_body_bytes").filter(|size| *size > 0),
        max_concurrent_streams: http.whole("max_concurrent_streams")?,
    })
}

/// One more address: bounds of time and of heads are those of the proxy's.
fn door(
    input: &Input,
    door: Door,
    at: &Cursor<'_>,
    proxy: Option<&ListenSettings>,
) -> Option<DoorSettings> {
    let tls = at
        .optional_table("tls")
        .map(|tls| listen_tls::server(input, &tls));
    let address = at.parsed("address", values::listen_address);
    let max_connections = at.whole("max_connections")?;
    let is_rls = door == Door::Rls;
    let streams = if is_rls {
        at.whole("max_concurrent_streams")?
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
    Some(DoorSettings { door, listen, tls })
}

/// `None` inside: the protocol is off.
fn proxy_protocol_from(at: &Cursor<'_>) -> Option<Option<Vec<IpNet>>> {
    let is_required = at.word("proxy_protocol", &[("off", false), ("require", true)])?;
    let from = at.list("proxy_protocol_from", values::network);
    if is_required && at.items("proxy_protocol_from").is_empty() {
        at.fail(
            "proxy_protocol",
            "nobody may speak it; expected the networks of your load balancers in proxy_protocol_from, or \
             [\"0.0.0.0/0\", \"::/0\"] if nobody else can connect",
        );
    }
    if !is_required && !from.is_empty() {
        at.warn(
            "proxy_protocol_from",
            "nobody is asked for it; expected proxy_protocol = \"require\" beside it",
        );
    }
    Some(is_required.then_some(from))
}

/// The kubelet and Prometheus ask by TCP.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .ok()
        .ok_or_else(|| "expected an IP address and port such as \"0.0.0.0:9091\"".to_owned())
}

/// Where nothing is forwarded, `url` is nowhere.
fn upstream(
    input: &Input,
    at: &Cursor<'_>,
    http: &Cursor<'_>,
    forwards: bool,
) -> Option<UpstreamSettings> {
    let url = match forwards {
        true => at.parsed("url", values::upstream_url),
        false => Some(UpstreamUrl::Unix(PathBuf::new())),
    };
    let tls = url.as_ref().and_then(|url| upstream_tls(input, at, url));
    Some(UpstreamSettings {
        connect_timeout: at.duration("connect_timeout")?,
        response_timeout: at
            .duration("response_timeout")
            .filter(|time| !time.is_zero()),
        body_idle_timeout: at
            .duration("body_idle_timeout")
            .filter(|time| !time.is_zero()),
        pool_idle_timeout: at.duration("pool_idle_timeout")?,
        pool_max_idle: at.whole("pool_max_idle")?,
        preserve_host: at.flag("preserve_host")?,
        max_connections: at.whole("max_connections")?,
        queue_timeout: at.duration("queue_timeout")?,
        max_requests_waiting: http.whole("max_requests_waiting")?,
        retry_connect: at.whole("retry_connect")?,
        retry_idempotent: at.flag("retry_idempotent")?,
        // Last: without them, what is wrong with the others has been said by now.
        url: url?,
        tls,
    })
}

fn upstream_tls(input: &Input, at: &Cursor<'_>, url: &UpstreamUrl) -> Option<ClientTls> {
    let host = match url {
        UpstreamUrl::Net {
            scheme: Scheme::Https,
            host,
            ..
        } => Some(host),
        _ => None,
    };
    let wanted = tls::Wanted {
        is_tls: host.is_some(),
        is_used: true,
        by: "https:// in upstream.url",
    };
    let tls = tls::client(input, &at.table("tls"), wanted)?;
    if tls.name_of(host?).is_err() {
        at.fail("url", "the host is no name that a certificate can be checked against; expected one that is, or the certificate's name in upstream.tls.server_name")
    }
    Some(tls)
}

pub(super) fn present(text: &str, what: &str) -> Result<String, String> {
    if text.is_empty() {
        Err(format!("expected {what}"))
    } else {
        Ok(text.to_owned())
    }
}

fn client(at: &Cursor<'_>) -> Option<client::Settings> {
    Some(client::Settings {
        trusted_proxies: at.list("trusted_proxies", values::network),
        ip_header: at.parsed("ip_header", |text| {
            HeaderName::from_bytes(text.as_bytes())
                .ok()
                .ok_or_else(|| "expected the name of a header".to_owned())
        })?,
        ipv4_prefix: at.whole("ipv4_prefix")?,
        ipv6_prefix: at.whole("ipv6_prefix")?,
    })
}

const KEY_FILES: [&str; 2] = ["keys_file", "secret_file"];

fn is_given(at: &Cursor<'_>, key: &str) -> bool {
    at.text(key).is_some_and(|path| !path.is_empty())
}

/// Whose word a claim is; `None`: nobody's, as no key is given.
fn claims(at: &Cursor<'_>) -> Option<Claims> {
    match at.flag("verify") {
        Some(false) => Some(Claims::Unverified),
        _ if KEY_FILES.iter().any(|key| is_given(at, key)) => Some(Claims::Signed),
        _ => None,
    }
}

/// Whom to believe what a token says; what is doubtful about the keys is told.
fn tokens(input: &Input, at: &Cursor<'_>, claims: Claims) -> Option<jwt::Settings> {
    let header = at.parsed("header", matches::header_name)?;
    if claims == Claims::Unverified {
        at.warn(
            "verify",
            "unverified JWT: claims are believed whoever wrote the token",
        );
        for key in KEY_FILES.into_iter().filter(|key| is_given(at, key)) {
            at.warn(key, "not used, as verify = false");
        }
        return Some(jwt::Settings {
            header,
            trust: jwt::Trust::Anybody,
        });
    }
    let (key, (keys, doubts)) = match KEY_FILES.map(|key| is_given(at, key)) {
        [true, true] => {
            at.fail("secret_file", "beside keys_file; expected one of them");
            return None;
        }
        [true, false] => {
            let text = secret(input, at, "keys_file", "JWK set")?;
            match jwt::Keys::jwks(&text) {
                Ok(read) => ("keys_file", read),
                Err(reason) => {
                    at.fail("keys_file", &reason);
                    return None;
                }
            }
        }
        [false, _] => (
            "secret_file",
            jwt::Keys::secret(secret(input, at, "secret_file", "secret")?.as_bytes()),
        ),
    };
    for doubt in doubts {
        at.warn(key, &doubt);
    }
    Some(jwt::Settings {
        header,
        trust: jwt::Trust::Keys(keys),
    })
}

fn path(at: &Cursor<'_>) -> Option<path::Settings> {
    let escaped_slashes = [
        ("both", EscapedSlashes::Both),
        ("reject", EscapedSlashes::Reject),
        ("keep", EscapedSlashes::Keep),
        ("decode", EscapedSlashes::Decode),
    ];
    Some(path::Settings {
        normalize: at.flag("normalize")?,
        merge_slashes: at.flag("merge_slashes")?,
        escaped_slashes: at.word("escaped_slashes", &escaped_slashes)?,
        ignore_trailing_slash: at.word(
            "trailing_slash",
            &[("ignore", true), ("significant", false)],
        )?,
        strip_parameters: at.word("path_parameters", &[("strip", true), ("keep", false)])?,
        case_sensitive: at.flag("case_sensitive")?,
    })
}

fn fields(at: &Cursor<'_>) -> Option<Fields> {
    let kinds = [
        ("standard", (true, false)),
        ("legacy", (false, true)),
        ("both", (true, true)),
        ("none", (false, false)),
    ];
    let (standard, legacy) = at.word("headers", &kinds)?;
    let legacy_reset_epoch = at.word("legacy_reset", &[("delta", false), ("epoch", true)])?;
    Some(Fields {
        standard,
        legacy,
        legacy_reset_epoch,
    })
}

fn cors(at: &Cursor<'_>) -> Cors {
    let cors = Cors::new(at.list("allow_origins", Cors::origin));
    if cors.is_any() && at.items("allow_origins").len() > 1 {
        at.fail(
            "allow_origins",
            "\"*\" is any origin; expected nothing beside it",
        );
    }
    cors
}

fn store(input: &Input, at: &Cursor<'_>) -> Option<StoreSettings> {
    let use_redis = at.word("kind", &[("memory", false), ("redis", true)])?;
    let memory_at = at.table("memory");
    let memory = MemorySettings {
        max_keys: memory_at.whole("max_keys")?,
        max_bytes: memory_at.size("max_bytes")?,
    };
    // Checked even when it isn't used.
    let redis = redis::settings(input, &at.table("redis"), use_redis)?;
    Some(if use_redis {
        StoreSettings::Redis(Box::new(redis))
    } else {
        StoreSettings::Memory(memory)
    })
}

/// What the file holds that a key names, if it names one.
pub(super) fn secret(input: &Input, at: &Cursor<'_>, key: &str, what: &str) -> Option<String> {
    let path = at.text(key).filter(|path| !path.is_empty())?;
    match input.read(Path::new(&path)) {
        Ok(text) if text.trim_end().is_empty() => {
            at.fail(key, &format!("the file is empty; expected a {what}"));
            None
        }
        Ok(text) => Some(text.trim_end().to_owned()),
        Err(error) => {
            at.fail(key, &format!("the file {error}"));
            None
        }
    }
}

fn shutdown(at: &Cursor<'_>) -> Option<ShutdownSettings> {
    Some(ShutdownSettings {
        delay: at.duration("delay")?,
        grace: at.duration("grace")?,
    })
}

pub(super) fn admin(input: &Input, at: &Cursor<'_>) -> Option<AdminSettings> {
    let token = secret(input, at, "token_file", "token").map(Token::new);
    let address = at.parsed("address", values::admin_address)?;
    if !address.is_local() && at.text("token_file").is_none_or(|path| path.is_empty()) {
        at.fail(
            "address",
            "others than this machine can reach it; expected a loopback address such as \"127.0.0.1:9090\", or \
             a bearer token in admin.token_file (admin.probes is for what kubelet and Prometheus need)",
        );
    }
    let probes = at.parsed("probes", |text| match text {
        "" => Ok(None),
        text => socket_address(text).map(Some),
    })?;
    if probes.is_some_and(|probes| ListenAddress::Ip(probes) == address && probes.port() != 0) {
        at.fail("probes", "that is admin.address; expected another port");
    }
    Some(AdminSettings {
        address,
        probes,
        token,
        allowed_hosts: at.list("allowed_hosts", host_name),
    })
}

/// As it is compared: in lower case.
fn host_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if text.is_empty() || !text.chars().all(fits) {
        return Err("expected a host name without port such as \"admin.internal\"".to_owned());
    }
    Ok(text.to_ascii_lowercase())
}

fn trace(input: &Input, at: &Cursor<'_>) -> Option<TraceSettings> {
    let sample = at.fraction("sample");
    let headers = trace_headers(input, at);
    let collector = at.parsed("otlp", CollectorUrl::parse)?;
    let wanted = tls::Wanted {
        is_tls: collector.is_tls,
        is_used: true,
        by: "https:// in trace.otlp",
    };
    let tls = tls::client(input, &at.table("tls"), wanted);
    if collector.is_tls && tls.as_ref()?.name_of(collector.host()).is_err() {
        at.fail(
            "otlp",
            "the host is no name that a certificate can be checked against; expected one that is, or the \
             certificate's name in trace.tls.server_name",
        );
        return None;
    }
    Some(TraceSettings {
        collector,
        headers: headers?,
        tls,
        sample: sample?,
    })
}

/// What goes with every export. No message repeats what the file holds.
fn trace_headers(input: &Input, at: &Cursor<'_>) -> Option<HeaderMap> {
    const KEY: &str = "headers_file";
    if !is_given(at, KEY) {
        return Some(HeaderMap::new());
    }
    let text = secret(input, at, KEY, "header field per line")?;
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
            at.fail(
                KEY,
                &format!("in the file: line {number}: expected name: value"),
            );
            return None;
        };
        if TraceSettings::OWN_HEADERS.contains(&name.as_str()) {
            at.fail(
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

fn log(at: &Cursor<'_>) -> Option<LogSettings> {
    let access = [
        ("off", Access::Off),
        ("rejected", Access::Rejected),
        ("all", Access::All),
    ];
    Some(LogSettings {
        format: at.word("format", &[("json", Format::Json), ("text", Format::Text)])?,
        level: at.parsed("level", telemetry::Level::parse)?,
        access: at.word("access", &access)?,
        access_sample: at.fraction("access_sample")?,
    })
}
