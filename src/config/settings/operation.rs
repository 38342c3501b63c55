//! `[admin]`, `[log]`, `[trace]` and `[shutdown]`: settings for operators.

use super::client_tls;
use crate::admin::{AdminSettings, AdminToken};
use crate::config::input::ConfigInput;
use crate::config::key_files::{is_path_set, read_text_file};
use crate::config::table_reader::TableReader;
use crate::config::values;
use crate::listen::ListenAddress;
use crate::proxy::ShutdownSettings;
use crate::telemetry::trace::{CollectorUrl, TraceSettings};
use crate::telemetry::{AccessLogFilter, LogFormat, LogLevel, LogSettings};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::net::SocketAddr;

pub(super) fn build_shutdown_settings(reader: &TableReader<'_>) -> Option<ShutdownSettings> {
    Some(ShutdownSettings {
        delay: reader.get_duration("delay")?,
        grace: reader.get_duration("grace")?,
    })
}

pub(in crate::config) fn build_admin_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
) -> Option<AdminSettings> {
    let token = read_text_file(input, reader, "token_file", "token").map(AdminToken::new);
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
        text => parse_probes_address(text).map(Some),
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

/// Parses the address of the probes listener. The kubelet and Prometheus connect by TCP only.
fn parse_probes_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .ok()
        .ok_or_else(|| "expected an IP address and port such as \"0.0.0.0:9091\"".to_owned())
}

/// Parses a host name. Returns it in lower case, for comparison.
fn parse_host_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if text.is_empty() || !text.chars().all(fits) {
        return Err("expected a host name without port such as \"admin.internal\"".to_owned());
    }
    Ok(text.to_ascii_lowercase())
}

/// Builds the trace settings. The inner `Retry` means that tracing is off.
pub(super) fn build_trace_settings(
    input: &ConfigInput,
    root: &TableReader<'_>,
) -> Option<Option<TraceSettings>> {
    let Some(reader) = root.get_optional_table("trace") else {
        return Some(None);
    };
    let sample = reader.get_fraction("sample");
    let headers = read_trace_headers(input, &reader);
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
    Some(Some(TraceSettings {
        collector,
        headers: headers?,
        tls,
        sample_ratio: sample?,
    }))
}

/// Reads the header fields of every export. No message quotes the file, which may hold secrets.
fn read_trace_headers(input: &ConfigInput, reader: &TableReader<'_>) -> Option<HeaderMap> {
    const KEY: &str = "headers_file";
    if !is_path_set(reader, KEY) {
        return Some(HeaderMap::new());
    }
    let text = read_text_file(input, reader, KEY, "header field per line")?;
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

pub(super) fn build_log_settings(reader: &TableReader<'_>) -> Option<LogSettings> {
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
        level: reader.get_parsed("level", LogLevel::parse)?,
        access: reader.get_keyword("access", &access)?,
        access_sample: reader.get_fraction("access_sample")?,
    })
}
