//! `[upstream]`: the server that requests are forwarded to.

use super::client_tls;
use crate::config::table_reader::{TableReader, read_settings};
use crate::config::values;
use crate::proxy::{UpstreamScheme, UpstreamSettings, UpstreamUrl};
use crate::tls::ClientTls;
use std::path::PathBuf;

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
