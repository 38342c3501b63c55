//! `[listen]`, `[rls]`, `[check]` and `[upstream]`: the listeners, and the server behind them.

use super::{client_tls, listen_tls};
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values;
use crate::proxy::{
    ExtAuthzSettings, ExtraListenerSettings, ListenSettings, ListenerKind, MAX_MESSAGE_BYTES,
    UpstreamScheme, UpstreamSettings, UpstreamUrl,
};
use crate::tls::ClientTls;
use http::StatusCode;
use ipnet::IpNet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) fn build_listen_settings(
    reader: &TableReader<'_>,
    http: &TableReader<'_>,
) -> Option<ListenSettings> {
    let assumes_https = reader.is_keyword("forwarded_proto", "https")?;
    report! { reader;
        Warning("forwarded_proto") if assumes_https && reader.contains_key("tls") => "without effect: with [listen.tls], all clients use https; expected \"auto\"";
    }
    Some(read_settings!(ListenSettings {
        reader: max_connections, max_connections_per_client, max_connection_age;
        http: header_timeout, idle_timeout, body_idle_timeout, min_upload_rate, max_header_bytes,
            max_headers, max_body_bytes, max_concurrent_streams;
        =>
        address: reader.get_parsed("address", values::parse_listen_address)?,
        proxy_protocol_from: read_proxy_protocol_networks(reader)?,
        assumes_https,
        max_memory: match reader.read("max_memory") {
            None => default_connection_memory(),
            Some(bytes) => bytes,
        },
        threads: match reader.read("threads")? {
            // `available_parallelism` respects CPU affinity and the cgroup quota.
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        },
    }))
}

/// Builds the listeners of `[rls]` and `[check]`. Returns `None` after an error.
pub(super) fn build_service_listeners(
    rls: Option<&TableReader<'_>>,
    check: Option<&TableReader<'_>>,
    proxy: Option<&ListenSettings>,
) -> Option<Vec<ExtraListenerSettings>> {
    let listeners: Vec<_> = [
        (ListenerKind::RateLimitService, rls),
        (ListenerKind::ExtAuthz, check),
    ]
    .into_iter()
    .filter_map(|(kind, reader)| Some(build_service_listener(kind, reader?, proxy)))
    .collect();
    listeners.into_iter().collect()
}

pub(super) fn read_ext_authz_settings(check: &TableReader<'_>) -> ExtAuthzSettings {
    let status = check.read("refused_status");
    ExtAuthzSettings {
        denied_status: status.and_then(|status| StatusCode::from_u16(status).ok()),
        // `None` after an error, which `check` has reported.
        accepts_joined_headers: check.is_keyword("joined_headers", "allow") == Some(true),
    }
}

/// Builds the listener of `[rls]` or `[check]`. `[listen.http]` sets its timeouts and head limits.
fn build_service_listener(
    kind: ListenerKind,
    reader: &TableReader<'_>,
    proxy: Option<&ListenSettings>,
) -> Option<ExtraListenerSettings> {
    let tls = reader.build_optional("tls", |tls| {
        report! { tls;
            Warning("client_cert_header") if tls.read("client_cert_header") == Some(true) => "without effect: only [listen] forwards requests; expected listen.tls.client_cert_header";
        }
        listen_tls::build_server_tls(tls)
    });
    let address = reader.get_parsed("address", values::parse_listen_address);
    let max_connections = reader.read("max_connections")?;
    let (max_concurrent_streams, max_body_bytes) = match kind {
        ListenerKind::RateLimitService => (
            reader.read("max_concurrent_streams")?,
            Some(MAX_MESSAGE_BYTES),
        ),
        _ => (proxy?.max_concurrent_streams, proxy?.max_body_bytes),
    };
    let listen = ListenSettings {
        address: address?,
        proxy_protocol_from: None,
        assumes_https: false,
        max_connections,
        max_connections_per_client: 0,
        max_body_bytes,
        max_concurrent_streams,
        ..proxy?.clone()
    };
    let tls = tls?.map(Arc::new);
    Some(ExtraListenerSettings { kind, listen, tls })
}

/// Reads the networks that may send a PROXY header. The inner `None` means that the PROXY protocol
/// is off.
fn read_proxy_protocol_networks(reader: &TableReader<'_>) -> Option<Option<Vec<IpNet>>> {
    let is_required = reader.is_keyword("proxy_protocol", "require")?;
    let networks = reader.get_list("proxy_protocol_from", values::parse_network);
    let has_no_networks = reader.get_items("proxy_protocol_from").is_empty();
    report! { reader;
        Error("proxy_protocol") if is_required && has_no_networks => "proxy_protocol = \"require\" needs proxy_protocol_from; expected the networks of your load balancers, or [\"0.0.0.0/0\", \"::/0\"] if only they can connect";
        Warning("proxy_protocol_from") if !is_required && !networks.is_empty() => "without effect: proxy_protocol is \"off\"; expected proxy_protocol = \"require\"";
    }
    Some(is_required.then_some(networks))
}

/// Builds the upstream settings. Without an upstream, `url` is an empty Unix path.
pub(super) fn build_upstream_settings(
    reader: &TableReader<'_>,
    http: &TableReader<'_>,
    has_upstream: bool,
) -> Option<UpstreamSettings> {
    let url = if has_upstream {
        reader.get_parsed("url", values::parse_upstream_url)
    } else {
        Some(UpstreamUrl::Unix(PathBuf::new()))
    };
    let tls = url.as_ref().and_then(|url| build_upstream_tls(reader, url));
    Some(read_settings!(UpstreamSettings {
        reader: connect_timeout, response_timeout, body_idle_timeout, pool_idle_timeout,
            pool_max_idle, preserve_host, max_connections, max_connections_per_client,
            max_tunnels_per_client, tunnel_idle_timeout, queue_timeout, retry_connect,
            retry_idempotent;
        http: max_requests_waiting;
        =>
        // Unwrapped last, so that errors in all keys are reported.
        url: url?,
        tls,
    }))
}

fn build_upstream_tls(reader: &TableReader<'_>, url: &UpstreamUrl) -> Option<ClientTls> {
    let host = match url {
        UpstreamUrl::Net {
            scheme: UpstreamScheme::Https,
            host,
            ..
        } => Some(host),
        _ => None,
    };
    let tls = reader.get_table("tls");
    let enabled_by = "https:// in upstream.url";
    let tls = client_tls::build_client_tls(&tls, host.is_some(), true, enabled_by)?;
    if tls.server_name_for(host?).is_err() {
        reader.report_error(
            "url",
            client_tls::unverifiable_host("upstream.tls.server_name"),
        );
    }
    Some(tls)
}

/// Share of the container's memory for client connections, in percent. The rest is for policies,
/// counters in memory, upstream connections and socket buffers of the kernel.
const CONNECTION_SHARE_PERCENT: u64 = 60;
/// cgroup v1 reports this limit or a larger one if there is none.
const MIN_UNLIMITED_BYTES: u64 = 1 << 60;

/// Default of `listen.max_memory`. `None` if the container has no memory limit.
fn default_connection_memory() -> Option<usize> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit_files(&own)
        .iter()
        .filter_map(|file| parse_limit(&fs::read_to_string(file).ok()?))
        .min()
        .and_then(|limit| usize::try_from(limit / 100 * CONNECTION_SHARE_PERCENT).ok())
}

/// Files that may contain a limit, of cgroup v2 and v1. `own` is the content of
/// `/proc/self/cgroup`; in a container its path is often not visible, and the limit is at the root.
fn limit_files(own: &str) -> Vec<String> {
    let mut files = vec![
        "/sys/fs/cgroup/memory.max".to_owned(),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned(),
    ];
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        if controllers.is_empty() {
            files.push(format!("/sys/fs/cgroup{path}/memory.max"));
        } else if controllers.split(',').any(|name| name == "memory") {
            files.push(format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"));
        }
    }
    files
}

fn parse_limit(text: &str) -> Option<u64> {
    text.trim()
        .parse()
        .ok()
        .filter(|bytes| *bytes < MIN_UNLIMITED_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_limits_of_both_cgroup_versions() {
        let own = "12:cpu,cpuacct:/a\n11:memory:/kubepods/x\n0::/system.slice/tidegate.service\nnonsense\n";
        assert_eq!(
            limit_files(own)[2..],
            [
                "/sys/fs/cgroup/memory/kubepods/x/memory.limit_in_bytes",
                "/sys/fs/cgroup/system.slice/tidegate.service/memory.max"
            ]
        );
        assert_eq!(parse_limit("268435456\n"), Some(256 << 20));
        for unlimited in ["max\n", "9223372036854771712", ""] {
            assert_eq!(parse_limit(unlimited), None);
        }
    }
}
