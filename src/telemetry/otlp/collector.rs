//! Client for a collector: OTLP over gRPC, or over HTTP with the same messages.
//!
//! The client sends one call at a time over one persistent connection. gRPC adds only five bytes
//! and two trailers to HTTP/2 (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>),
//! so no gRPC library is needed.

use crate::http_client::{self, HttpUrl};
use crate::tls::ClientTls;
use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use std::fmt;
use std::time::Duration;
use tokio::time::timeout;

const GRPC_PORT: u16 = 4317;
const HTTP_PORT: u16 = 4318;
/// Timeout of one export, including the connection setup.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a response. Collectors send short responses.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// What is exported; each signal has paths of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpSignal {
    Traces,
    Metrics,
}

/// A collector, and how to reach it.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectorSettings {
    /// Its authority has a port. A path selects OTLP over HTTP, an empty path gRPC.
    pub url: HttpUrl,
    /// Headers that are added to every export.
    pub headers: HeaderMap,
    /// TLS settings; present exactly if the URL's scheme is https.
    pub tls: Option<ClientTls>,
}

/// A collector and its connection.
pub(crate) struct CollectorClient {
    signal: OtlpSignal,
    settings: CollectorSettings,
    connection: Option<CollectorConnection>,
    has_failed: bool,
}

enum CollectorConnection {
    Grpc(http2::SendRequest<Full<Bytes>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

impl OtlpSignal {
    fn grpc_path(self) -> &'static str {
        match self {
            Self::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            Self::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        }
    }

    /// The path of OTLP over HTTP, unless the URL of the collector has one.
    fn http_path(self) -> &'static str {
        match self {
            Self::Traces => "/v1/traces",
            Self::Metrics => "/v1/metrics",
        }
    }
}

impl CollectorSettings {
    /// Headers that configuration must not set: the message framing sets them, or HTTP/2 does not
    /// allow them.
    pub const RESERVED_HEADERS: [&str; 10] = [
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "keep-alive",
        "te",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    ];

    /// Parses the URL of a collector with scheme `http` or `https`, host, and port (4317 if
    /// absent). Port 4318 or a path selects OTLP over HTTP; any other URL selects gRPC. `signal`
    /// selects the default path.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse_url(text: &str, signal: OtlpSignal) -> Result<HttpUrl, String> {
        let mut endpoint = HttpUrl::parse(text, [GRPC_PORT, GRPC_PORT])
            .ok_or("expected a collector such as \"http://127.0.0.1:4317\"")?;
        if endpoint.has_credentials() || endpoint.path_and_query.contains('?') {
            return Err(
                "a collector URL must not contain credentials or a query; expected scheme, host, port and optionally a path"
                    .to_owned(),
            );
        }
        let port = format!(":{}", endpoint.port);
        if !endpoint.authority.ends_with(&port) {
            endpoint.authority.push_str(&port);
        }
        if endpoint.path_and_query == "/" {
            let is_http = endpoint.port == HTTP_PORT;
            let path = if is_http { signal.http_path() } else { "" };
            path.clone_into(&mut endpoint.path_and_query);
        }
        Ok(endpoint)
    }
}

fn is_grpc(url: &HttpUrl) -> bool {
    url.path_and_query.is_empty()
}

impl CollectorClient {
    pub(crate) fn new(signal: OtlpSignal, settings: CollectorSettings) -> Self {
        Self {
            signal,
            settings,
            connection: None,
            has_failed: false,
        }
    }

    /// Exports an encoded request of the client's signal, and returns the number of rejected spans
    /// or data points. A dropped or late export closes the connection.
    pub(crate) async fn export(&mut self, message: Bytes) -> Result<u64, String> {
        timeout(EXPORT_TIMEOUT, self.export_without_timeout(message))
            .await
            .unwrap_or_else(|_elapsed| Err("export timed out".to_owned()))
    }

    /// Logs the first of several failures, and the recovery. `error` is why an export failed.
    pub(crate) fn log_result(&mut self, error: Option<&str>) {
        let had_failed = std::mem::replace(&mut self.has_failed, error.is_some());
        match (error, self.signal) {
            (None, OtlpSignal::Traces) if had_failed => tracing::info!("span export recovered"),
            (None, OtlpSignal::Metrics) if had_failed => tracing::info!("metric export recovered"),
            (Some(error), OtlpSignal::Traces) if !had_failed => {
                tracing::warn!(error, "span export failed");
            }
            (Some(error), OtlpSignal::Metrics) if !had_failed => {
                tracing::warn!(error, "metric export failed");
            }
            _ => {}
        }
    }

    async fn export_without_timeout(&mut self, message: Bytes) -> Result<u64, String> {
        let mut connection = match self.connection.take() {
            Some(connection) if connection.is_open() => connection,
            _ => self.connect().await?,
        };
        let request = self.build_request(message)?;
        let rejected = call_collector(&mut connection, request).await;
        self.connection = Some(connection);
        rejected
    }

    async fn connect(&self) -> Result<CollectorConnection, String> {
        let CollectorSettings { url, tls, .. } = &self.settings;
        let is_grpc = is_grpc(url);
        let protocol = if is_grpc { "h2" } else { "http/1.1" };
        let stream = http_client::connect(url, tls.as_ref(), &[protocol]).await?;
        let stream = TokioIo::new(stream);
        if is_grpc {
            let connected = http2::handshake(TokioExecutor::new(), stream).await;
            let (sender, driver) = connected.map_err(to_export_error)?;
            tokio::spawn(driver);
            Ok(CollectorConnection::Grpc(sender))
        } else {
            let (sender, driver) = http1::handshake(stream).await.map_err(to_export_error)?;
            tokio::spawn(driver);
            Ok(CollectorConnection::Http(sender))
        }
    }

    fn build_request(&self, message: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let HttpUrl {
            authority,
            path_and_query,
            ..
        } = &self.settings.url;
        let (uri, content_type, (name, value), body) = if is_grpc(&self.settings.url) {
            let (scheme, path) = (self.settings.url.scheme(), self.signal.grpc_path());
            let uri = format!("{scheme}://{authority}{path}");
            let body = frame_grpc_message(&message)?;
            (uri, "application/grpc", (TE, "trailers"), body)
        } else {
            let host = (HOST, authority.as_str());
            let path = path_and_query.clone();
            (path, "application/x-protobuf", host, message)
        };
        let request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(CONTENT_TYPE, content_type)
            .header(name, value)
            .header(USER_AGENT, concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .body(Full::new(body));
        let mut request = request.map_err(to_export_error)?;
        request.headers_mut().extend(self.settings.headers.clone());
        Ok(request)
    }
}

/// The message with the prefix of gRPC: not compressed, and its length.
fn frame_grpc_message(message: &[u8]) -> Result<Bytes, String> {
    let mut body = BytesMut::with_capacity(5 + message.len());
    body.put_u8(0);
    body.put_u32(u32::try_from(message.len()).map_err(to_export_error)?);
    body.put_slice(message);
    Ok(body.freeze())
}

impl CollectorConnection {
    fn is_open(&self) -> bool {
        match self {
            Self::Grpc(sender) => !sender.is_closed(),
            Self::Http(sender) => !sender.is_closed() && sender.is_ready(),
        }
    }
}

/// Sends a request, and returns the number of rejected spans or data points.
async fn call_collector(
    connection: &mut CollectorConnection,
    request: Request<Full<Bytes>>,
) -> Result<u64, String> {
    let (is_grpc, response) = match connection {
        CollectorConnection::Grpc(sender) => (true, sender.send_request(request).await),
        CollectorConnection::Http(sender) => (false, sender.send_request(request).await),
    };
    let (head, body) = response.map_err(to_export_error)?.into_parts();
    let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
    let body = body.map_err(to_export_error)?;
    let trailers = body.trailers().cloned();
    let body = body.to_bytes();
    if !head.status.is_success() {
        return Err(format!("HTTP status {}", head.status));
    }
    if !is_grpc {
        return Ok(count_rejected_items(&body));
    }
    // If a call fails immediately, its response has no trailers, and the head contains the gRPC
    // status.
    let status_fields = trailers
        .as_ref()
        .filter(|fields| fields.contains_key("grpc-status"))
        .unwrap_or(&head.headers);
    match header_text(status_fields, "grpc-status") {
        "0" => Ok(count_rejected_items(body.get(5..).unwrap_or_default())),
        code => Err(format!(
            "gRPC status {code:?}: {}",
            header_text(status_fields, "grpc-message")
        )),
    }
}

/// The number of rejected spans or data points, or 0 if the response cannot be decoded. The
/// responses of both signals have the same fields with the same numbers.
fn count_rejected_items(message: &[u8]) -> u64 {
    let partial_success = ExportTraceServiceResponse::decode(message)
        .ok()
        .and_then(|response| response.partial_success);
    partial_success.map_or(0, |partly| {
        u64::try_from(partly.rejected_spans).unwrap_or(0)
    })
}

fn header_text<'h>(fields: &'h HeaderMap, name: &str) -> &'h str {
    fields
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

fn to_export_error(error: impl fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::{CollectorSettings, OtlpSignal};

    #[test]
    fn port_and_path_select_the_protocol() {
        for (text, shown, is_grpc) in [
            ("http://127.0.0.1:4317", "http://127.0.0.1:4317", true),
            ("http://127.0.0.1:4317/", "http://127.0.0.1:4317", true),
            ("https://collector", "https://collector:4317", true),
            ("http://collector:9999", "http://collector:9999", true),
            ("http://[::1]:4317", "http://[::1]:4317", true),
            ("http://[::1]", "http://[::1]:4317", true),
            (
                "http://collector:4318",
                "http://collector:4318/v1/traces",
                false,
            ),
            (
                "http://collector:80/otlp/v1/traces",
                "http://collector:80/otlp/v1/traces",
                false,
            ),
        ] {
            let url = CollectorSettings::parse_url(text, OtlpSignal::Traces).unwrap();
            assert_eq!(
                (url.to_string().as_str(), super::is_grpc(&url)),
                (shown, is_grpc),
                "{text}"
            );
        }
    }

    #[test]
    fn signal_selects_the_default_path() {
        let url =
            CollectorSettings::parse_url("http://collector:4318", OtlpSignal::Metrics).unwrap();
        assert_eq!(url.to_string(), "http://collector:4318/v1/metrics");
    }

    #[test]
    fn rejects_an_invalid_collector_url() {
        for text in [
            "",
            "127.0.0.1:4317",
            "grpc://a:4317",
            "http://",
            "http://a:0",
            "http://a:",
            "http://a:99999",
            "http://u:p@a",
            "http://a/?b=c",
        ] {
            assert!(
                CollectorSettings::parse_url(text, OtlpSignal::Metrics).is_err(),
                "{text}"
            );
        }
    }
}
