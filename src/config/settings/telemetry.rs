//! `[trace]` and `[metrics]`: export by OTLP.

use super::client_tls;
use crate::config::key_files::{accept_content, read_text_file};
use crate::config::table_reader::TableReader;
use crate::telemetry::metrics::MetricExportSettings;
use crate::telemetry::otlp::{CollectorSettings, OtlpSignal};
use crate::telemetry::trace::TraceSettings;
use http::{HeaderMap, HeaderName, HeaderValue};

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
    if reader.get_nonempty_string(KEY).is_none() || !reader.input().reads_key_files() {
        return Some(HeaderMap::new());
    }
    let text = read_text_file(reader, KEY, "header field per line")?;
    accept_content(reader, KEY, parse_export_headers(&text))
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
