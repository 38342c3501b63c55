//! `[listen]`, `[rls]` and `[check]`: the listeners.

use super::{container_memory, listen_tls};
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values;
use crate::proxy::{
    ExtAuthzSettings, ExtraListenerSettings, ListenSettings, ListenerKind, MAX_MESSAGE_BYTES,
};
use http::StatusCode;
use ipnet::IpNet;
use std::sync::Arc;

pub(super) fn build_listen_settings(
    reader: &TableReader<'_>,
    http: &TableReader<'_>,
) -> Option<ListenSettings> {
    Some(read_settings!(ListenSettings {
        reader: max_connections, max_connections_per_client, max_connection_age;
        http: header_timeout, idle_timeout, body_idle_timeout, min_upload_rate, max_header_bytes,
            max_headers, max_body_bytes, max_concurrent_streams;
        =>
        address: reader.get_parsed("address", values::parse_listen_address)?,
        proxy_protocol_from: read_proxy_protocol_networks(reader)?,
        assumes_https: read_forwarded_proto(reader)?,
        max_memory: match reader.read("max_memory") {
            None => container_memory::default_connection_memory(),
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

/// Reads whether clients use TLS to a load balancer that does not say so.
fn read_forwarded_proto(reader: &TableReader<'_>) -> Option<bool> {
    let assumes_https = reader.is_keyword("forwarded_proto", "https")?;
    report! { reader;
        Warning("forwarded_proto") if assumes_https && reader.contains_key("tls") => "without effect: with [listen.tls], all clients use https; expected \"auto\"";
    }
    Some(assumes_https)
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
