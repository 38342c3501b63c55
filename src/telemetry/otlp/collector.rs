//! Client for a collector: OTLP over gRPC, or over HTTP with the same messages.
//!
//! The client sends one call at a time over one persistent connection. gRPC adds only five bytes
//! and two trailers to HTTP/2 (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>),
//! so no gRPC library is needed.

use crate::tls::{ClientTls, describe_tls_error};
use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

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
    pub url: CollectorUrl,
    /// Headers that are added to every export.
    pub headers: HeaderMap,
    /// TLS settings; present exactly if the URL's scheme is https.
    pub tls: Option<ClientTls>,
}

/// The address and protocol of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUrl {
    /// Host name or IP address, without brackets.
    host: String,
    port: u16,
    pub is_tls: bool,
    /// Path of OTLP over HTTP; `None` selects gRPC.
    http_path: Option<String>,
}

/// A collector and its connection.
pub(in crate::telemetry) struct CollectorClient {
    signal: OtlpSignal,
    settings: CollectorSettings,
    connection: Option<CollectorConnection>,
}

enum CollectorConnection {
    Grpc(http2::SendRequest<Full<Bytes>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

/// Why an export failed, for the log.
pub(in crate::telemetry) type ExportError = String;

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
}

impl CollectorUrl {
    /// Parses a URL with scheme `http` or `https`, host, and port (4317 if absent). Port 4318 or a
    /// path selects OTLP over HTTP; any other URL selects gRPC. `signal` selects the default path.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse(text: &str, signal: OtlpSignal) -> Result<Self, String> {
        let invalid = || "expected a collector such as \"http://127.0.0.1:4317\"".to_owned();
        let uri: Uri = text.parse().ok().ok_or_else(invalid)?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(invalid()),
        };
        let authority = uri.authority().ok_or_else(invalid)?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(
                "a collector URL must not contain credentials or a query; expected scheme, host, port and optionally a path"
                    .to_owned(),
            );
        }
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let port = match authority.port_u16() {
            Some(port @ 1..) => port,
            None if authority.as_str() == authority.host() => GRPC_PORT,
            _ => return Err(invalid()),
        };
        let path = match uri.path() {
            "" | "/" if port == HTTP_PORT => Some(signal.http_path().to_owned()),
            "" | "/" => None,
            path => Some(path.to_owned()),
        };
        if host.is_empty() {
            Err(invalid())
        } else {
            Ok(Self {
                host,
                port,
                is_tls,
                http_path: path,
            })
        }
    }

    /// The host name or IP address of the collector.
    pub fn host(&self) -> &str {
        &self.host
    }

    fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    }
}

impl CollectorClient {
    pub(in crate::telemetry) fn new(signal: OtlpSignal, settings: CollectorSettings) -> Self {
        Self {
            signal,
            settings,
            connection: None,
        }
    }

    /// Exports an encoded request of the client's signal, and returns the number of rejected spans
    /// or data points. A dropped or late export closes the connection.
    pub(in crate::telemetry) async fn export(
        &mut self,
        message: Bytes,
    ) -> Result<u64, ExportError> {
        timeout(EXPORT_TIMEOUT, self.export_without_timeout(message))
            .await
            .unwrap_or_else(|_elapsed| Err("export timed out".to_owned()))
    }

    async fn export_without_timeout(&mut self, message: Bytes) -> Result<u64, ExportError> {
        let mut connection = match self.connection.take() {
            Some(connection) if connection.is_open() => connection,
            _ => self.connect().await?,
        };
        let rejected = match &mut connection {
            CollectorConnection::Grpc(sender) => {
                call_grpc(sender, self.build_grpc_request(message)?).await
            }
            CollectorConnection::Http(sender) => {
                post_http(sender, self.build_http_request(message)?).await
            }
        };
        self.connection = Some(connection);
        rejected
    }

    async fn connect(&self) -> Result<CollectorConnection, ExportError> {
        let socket = TcpStream::connect((self.settings.url.host.as_str(), self.settings.url.port))
            .await
            .map_err(to_export_error)?;
        socket.set_nodelay(true).map_err(to_export_error)?;
        let Some(tls) = &self.settings.tls else {
            return self.http_handshake(socket).await;
        };
        let mut config = (**tls.config()).clone();
        let protocol: &[u8] = if self.settings.url.http_path.is_some() {
            b"http/1.1"
        } else {
            b"h2"
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = tls
            .server_name_for(&self.settings.url.host)
            .map_err(to_export_error)?;
        self.http_handshake(
            TlsConnector::from(Arc::new(config))
                .connect(name, socket)
                .await
                .map_err(|error| describe_tls_error(&error))?,
        )
        .await
    }

    async fn http_handshake(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<CollectorConnection, ExportError> {
        let stream = TokioIo::new(stream);
        Ok(match self.settings.url.http_path {
            None => {
                let (sender, driver) = http2::handshake(TokioExecutor::new(), stream)
                    .await
                    .map_err(to_export_error)?;
                tokio::spawn(driver);
                CollectorConnection::Grpc(sender)
            }
            Some(_) => {
                let (sender, driver) = http1::handshake(stream).await.map_err(to_export_error)?;
                tokio::spawn(driver);
                CollectorConnection::Http(sender)
            }
        })
    }

    fn build_grpc_request(&self, message: Bytes) -> Result<Request<Full<Bytes>>, ExportError> {
        let mut body = BytesMut::with_capacity(5 + message.len());
        body.put_u8(0);
        body.put_u32(u32::try_from(message.len()).map_err(to_export_error)?);
        body.put_slice(&message);
        let scheme = if self.settings.url.is_tls {
            "https"
        } else {
            "http"
        };
        let mut request = self.build_request(
            format!(
                "{scheme}://{}{}",
                self.settings.url.authority(),
                self.signal.grpc_path()
            ),
            body.freeze(),
        )?;
        request
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        request
            .headers_mut()
            .insert(TE, HeaderValue::from_static("trailers"));
        Ok(request)
    }

    fn build_http_request(&self, message: Bytes) -> Result<Request<Full<Bytes>>, ExportError> {
        let path = self.settings.url.http_path.clone().unwrap_or_default();
        let mut request = self.build_request(path, message)?;
        request.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-protobuf"),
        );
        request.headers_mut().insert(
            HOST,
            HeaderValue::try_from(self.settings.url.authority()).map_err(to_export_error)?,
        );
        Ok(request)
    }

    fn build_request(&self, uri: String, body: Bytes) -> Result<Request<Full<Bytes>>, ExportError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .body(Full::new(body));
        let mut request = request.map_err(to_export_error)?;
        *request.headers_mut() = self.settings.headers.clone();
        let agent = HeaderValue::from_static(concat!("tidegate/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(USER_AGENT, agent);
        Ok(request)
    }
}

impl CollectorConnection {
    fn is_open(&self) -> bool {
        match self {
            Self::Grpc(sender) => !sender.is_closed(),
            Self::Http(sender) => !sender.is_closed() && sender.is_ready(),
        }
    }
}

async fn call_grpc(
    sender: &mut http2::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<u64, ExportError> {
    let response = sender
        .send_request(request)
        .await
        .map_err(to_export_error)?;
    let (status, headers) = (response.status(), response.headers().clone());
    let (body, trailers) = read_response(response).await?;
    if status != StatusCode::OK {
        return Err(format!("HTTP status {status}"));
    }
    // If a call fails immediately, its response has no trailers, and the head contains the gRPC
    // status.
    let status_fields = trailers
        .as_ref()
        .filter(|fields| fields.contains_key("grpc-status"))
        .unwrap_or(&headers);
    match header_text(status_fields, "grpc-status") {
        "0" => Ok(count_rejected_items(body.get(5..).unwrap_or_default())),
        code => Err(format!(
            "gRPC status {code:?}: {}",
            header_text(status_fields, "grpc-message")
        )),
    }
}

async fn post_http(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<u64, ExportError> {
    let response = sender
        .send_request(request)
        .await
        .map_err(to_export_error)?;
    let status = response.status();
    let (body, _) = read_response(response).await?;
    if status.is_success() {
        Ok(count_rejected_items(&body))
    } else {
        Err(format!("HTTP status {status}"))
    }
}

async fn read_response(
    response: Response<Incoming>,
) -> Result<(Bytes, Option<HeaderMap>), ExportError> {
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
        .collect()
        .await
        .map_err(to_export_error)?;
    let trailers = body.trailers().cloned();
    Ok((body.to_bytes(), trailers))
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

fn to_export_error(error: impl fmt::Display) -> ExportError {
    error.to_string()
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(
            f,
            "{scheme}://{}{}",
            self.authority(),
            self.http_path.as_deref().unwrap_or_default()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{CollectorUrl, OtlpSignal};

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
            let url = CollectorUrl::parse(text, OtlpSignal::Traces).unwrap();
            assert_eq!(
                (url.to_string().as_str(), url.http_path.is_none()),
                (shown, is_grpc),
                "{text}"
            );
        }
    }

    #[test]
    fn signal_selects_the_default_path() {
        let url = CollectorUrl::parse("http://collector:4318", OtlpSignal::Metrics).unwrap();
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
                CollectorUrl::parse(text, OtlpSignal::Metrics).is_err(),
                "{text}"
            );
        }
    }
}
