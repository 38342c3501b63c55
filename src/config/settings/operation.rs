//! `[admin]`, `[log]` and `[shutdown]`: settings for operators.

use crate::admin::{AdminSettings, AdminToken, AdvertisedAddress};
use crate::config::key_files::read_text_file;
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values;
use crate::listen::ListenAddress;
use crate::proxy::ShutdownSettings;
use crate::telemetry::{LogLevel, LogSettings};
use std::net::SocketAddr;

pub(super) fn build_shutdown_settings(reader: &TableReader<'_>) -> Option<ShutdownSettings> {
    Some(read_settings!(ShutdownSettings { reader: delay, grace; }))
}

pub(crate) fn build_admin_settings(reader: &TableReader<'_>) -> Option<AdminSettings> {
    let token = read_text_file(reader, "token_file", "token").map(AdminToken::new);
    let address = reader.get_parsed("address", values::parse_admin_address)?;
    let has_token = reader.get_nonempty_string("token_file").is_some();
    let probes: Option<SocketAddr> = reader.get_text("probes", |text| match text {
        "" => Some(None),
        text => text.parse().ok().map(Some),
    })?;
    let advertise = reader.get_parsed("advertise", |text| match text {
        "" => Ok(None),
        text => AdvertisedAddress::parse(text).map(Some),
    })?;
    let is_loopback = matches!(address, ListenAddress::Ip(ip) if ip.ip().is_loopback());
    let is_socket = matches!(address, ListenAddress::Unix(_));
    let is_same = |probes: SocketAddr| ListenAddress::Ip(probes) == address && probes.port() != 0;
    let host = advertise.as_ref();
    report! { reader;
        Error("address") if !address.is_local() && !has_token => "other machines can connect; expected a loopback address such as \"127.0.0.1:9090\", or a bearer token in admin.token_file (admin.probes serves the kubelet and Prometheus)";
        Error("probes") if probes.is_some_and(is_same) => "the same as admin.address; expected another port";
        Error("advertise") if is_socket && host.is_some_and(|host| !host.has_port()) => "admin.address is a Unix socket; expected a port too";
        Warning("advertise") if is_loopback && host.is_some_and(|host| !host.is_loopback()) => "admin.address is a loopback address, so other instances cannot connect; expected an address such as \"[::]:9090\" there";
    }
    Some(AdminSettings {
        address,
        probes,
        token,
        advertise,
        allowed_hosts: reader.get_list("allowed_hosts", parse_host_name),
    })
}

/// Parses a host name. Returns it in lower case, for comparison.
fn parse_host_name(text: &str) -> Result<String, String> {
    if values::is_word(text, b".-_", usize::MAX) {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("expected a host name without port such as \"admin.internal\"".to_owned())
    }
}

pub(super) fn build_log_settings(reader: &TableReader<'_>) -> Option<LogSettings> {
    let level = reader.get_parsed("level", LogLevel::parse)?;
    Some(read_settings!(LogSettings { reader: format, access, access_sample; => level }))
}
