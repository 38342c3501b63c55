//! `[admin]`, `[log]`, `[trace]`, `[metrics]` and `[shutdown]`: settings for operators.

use super::client_tls;
use crate::admin::{AdminSettings, AdminToken, AdvertisedAddress};
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values;
use crate::listen::ListenAddress;
use crate::proxy::ShutdownSettings;
use crate::telemetry::metrics::MetricExportSettings;
use crate::telemetry::otlp::{CollectorSettings, OtlpSignal};
use crate::telemetry::trace::TraceSettings;
use crate::telemetry::{LogLevel, LogSettings};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::net::SocketAddr;

pub(super) fn build_shutdown_settings(reader: &TableReader<'_>) -> Option<ShutdownSettings> {
    Some(read_settings!(ShutdownSettings { reader: delay, grace; }))
}

pub(crate) fn build_admin_settings(reader: &TableReader<'_>) -> Option<AdminSettings> {
    let token = reader
        .read_text_file("token_file", "token")
        .map(AdminToken::new);
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

pub(super) fn build_trace_settings(reader: &TableReader<'_>) -> Option<TraceSettings> {
    let sample = reader.read("sample");
    let collector = build_collector_settings(reader, "trace", OtlpSignal::Traces);
    Some(TraceSettings {
        collector: collector?,
        sample_ratio: sample?,
    })
}

pub(super) fn build_metric_export_settings(
    reader: &TableReader<'_>,
) -> Option<MetricExportSettings> {
    let interval = reader.read("interval");
    let collector = build_collector_settings(reader, "metrics", OtlpSignal::Metrics);
    Some(MetricExportSettings {
        collector: collector?,
        interval: interval?,
    })
}

/// Builds the settings that both signals have. `table` is the name of the table.
fn build_collector_settings(
    reader: &TableReader<'_>,
    table: &str,
    signal: OtlpSignal,
) -> Option<CollectorSettings> {
    let headers = read_export_headers(reader);
    let url = reader.get_parsed("otlp", |text| CollectorSettings::parse_url(text, signal))?;
    let enabled_by = format!("https:// in {table}.otlp");
    let tls = reader.get_table("tls");
    let tls = client_tls::build_client_tls(&tls, url.is_tls, true, &enabled_by);
    if url.is_tls && tls.as_ref()?.server_name_for(&url.host).is_err() {
        let key = format!("{table}.tls.server_name");
        reader.report_error("otlp", client_tls::unverifiable_host(&key));
        return None;
    }
    Some(CollectorSettings {
        url,
        headers: headers?,
        tls,
    })
}

/// Reads the header fields of every export. No message quotes the file, which may hold secrets.
fn read_export_headers(reader: &TableReader<'_>) -> Option<HeaderMap> {
    const KEY: &str = "headers_file";
    if reader.get_nonempty_string(KEY).is_none() || !reader.input.reads_key_files() {
        return Some(HeaderMap::new());
    }
    let text = reader.read_text_file(KEY, "header field per line")?;
    reader.accept_content(KEY, parse_export_headers(&text))
}

fn parse_export_headers(text: &str) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let field = line.split_once(':').and_then(|(name, value)| {
            let value = Some(value.trim()).filter(|value| !value.is_empty())?;
            let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
            Some((name, HeaderValue::from_str(value).ok()?))
        });
        let (name, mut value) =
            field.ok_or_else(|| format!("line {number}: expected name: value"))?;
        if CollectorSettings::RESERVED_HEADERS.contains(&name.as_str()) {
            return Err(format!("line {number}: {name} is set by tidegate"));
        }
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(headers)
}
