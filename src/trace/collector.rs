//! The way to a collector: OTLP over gRPC, or over HTTP with the same messages.
//!
//! One call at a time over one connection, which is kept. gRPC's own part is five bytes and two trailers
//! (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>): no client of its kind is needed for that.

use super::TraceSettings;
use crate::tls::ClientTls;
use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use std::fmt;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const GRPC_PORT: u16 = 4317;
const HTTP_PORT: u16 = 4318;
const GRPC_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
const HTTP_PATH: &str = "/v1/traces";

/// What a collector answers is short.
const LARGEST_ANSWER: usize = 64 << 10;

/// Where spans go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUrl {
    /// Without brackets.
    host: String,
    port: u16,
    pub is_tls: bool,
    /// `None`: by gRPC.
    path: Option<String>,
}

/// A collector, and the connection to it.
pub(super) struct Collector {
    url: CollectorUrl,
    headers: HeaderMap,
    tls: Option<ClientTls>,
    connection: Option<Connection>,
}

enum Connection {
    Grpc(http2::SendRequest<Full<Bytes>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

/// Why spans were not taken, for people.
pub(super) type Refused = String;

impl CollectorUrl {
    /// `http` or `https`, host, port (4317 if absent). Port 4318 or a path: OTLP over HTTP; else gRPC.
    ///
    /// # Errors
    /// Words that say what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "expected a collector such as \"http://127.0.0.1:4317\"".to_owned();
        let uri: Uri = text.parse().ok().ok_or_else(wrong)?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let authority = uri.authority().ok_or_else(wrong)?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(
                "a collector is not logged in to by its URL; expected scheme, host, port and perhaps a path"
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
            _ => return Err(wrong()),
        };
        let path = match uri.path() {
            "" | "/" if port == HTTP_PORT => Some(HTTP_PATH.to_owned()),
            "" | "/" => None,
            path => Some(path.to_owned()),
        };
        if host.is_empty() {
            Err(wrong())
        } else {
            Ok(Self {
                host,
                port,
                is_tls,
                path,
            })
        }
    }

    /// A name or an address.
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

impl Collector {
    pub(super) fn new(settings: TraceSettings) -> Self {
        let TraceSettings {
            collector,
            headers,
            tls,
            ..
        } = settings;
        Self {
            url: collector,
            headers,
            tls,
            connection: None,
        }
    }

    /// Hands spans over. Returns how many of them the collector did not take. The caller sets the deadline; who
    /// gives up waiting drops the connection with it.
    pub(super) async fn export(
        &mut self,
        spans: &ExportTraceServiceRequest,
    ) -> Result<u64, Refused> {
        let mut connection = match self.connection.take() {
            Some(connection) if connection.is_open() => connection,
            _ => self.connect().await?,
        };
        let rejected = match &mut connection {
            Connection::Grpc(sender) => call(sender, self.grpc_request(spans)?).await,
            Connection::Http(sender) => post(sender, self.http_request(spans)?).await,
        };
        self.connection = Some(connection);
        rejected
    }

    async fn connect(&self) -> Result<Connection, Refused> {
        let socket = TcpStream::connect((self.url.host.as_str(), self.url.port))
            .await
            .map_err(told)?;
        socket.set_nodelay(true).map_err(told)?;
        let Some(tls) = &self.tls else {
            return self.begin(socket).await;
        };
        let mut config = (**tls.config()).clone();
        let protocol: &[u8] = if self.url.path.is_some() {
            b"http/1.1"
        } else {
            b"h2"
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = tls.name_of(&self.url.host).map_err(told)?;
        self.begin(
            TlsConnector::from(Arc::new(config))
                .connect(name, socket)
                .await
                .map_err(told)?,
        )
        .await
    }

    async fn begin(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<Connection, Refused> {
        let stream = TokioIo::new(stream);
        Ok(match self.url.path {
            None => {
                let (sender, driver) = http2::handshake(TokioExecutor::new(), stream)
                    .await
                    .map_err(told)?;
                tokio::spawn(driver);
                Connection::Grpc(sender)
            }
            Some(_) => {
                let (sender, driver) = http1::handshake(stream).await.map_err(told)?;
                tokio::spawn(driver);
                Connection::Http(sender)
            }
        })
    }

    fn grpc_request(
        &self,
        spans: &ExportTraceServiceRequest,
    ) -> Result<Request<Full<Bytes>>, Refused> {
        let length = spans.encoded_len();
        let mut body = BytesMut::with_capacity(5 + length);
        body.put_u8(0);
        body.put_u32(u32::try_from(length).map_err(told)?);
        spans.encode(&mut body).map_err(told)?;
        let scheme = if self.url.is_tls { "https" } else { "http" };
        let mut request = self.request(
            format!("{scheme}://{}{GRPC_PATH}", self.url.authority()),
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

    fn http_request(
        &self,
        spans: &ExportTraceServiceRequest,
    ) -> Result<Request<Full<Bytes>>, Refused> {
        let path = self.url.path.clone().unwrap_or_default();
        let mut request = self.request(path, spans.encode_to_vec().into())?;
        request.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-protobuf"),
        );
        request.headers_mut().insert(
            HOST,
            HeaderValue::try_from(self.url.authority()).map_err(told)?,
        );
        Ok(request)
    }

    fn request(&self, uri: String, body: Bytes) -> Result<Request<Full<Bytes>>, Refused> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .body(Full::new(body));
        let mut request = request.map_err(told)?;
        *request.headers_mut() = self.headers.clone();
        let agent = HeaderValue::from_static(concat!("tidegate/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(USER_AGENT, agent);
        Ok(request)
    }
}

impl Connection {
    fn is_open(&self) -> bool {
        match self {
            Self::Grpc(sender) => !sender.is_closed(),
            Self::Http(sender) => !sender.is_closed() && sender.is_ready(),
        }
    }
}

async fn call(
    sender: &mut http2::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<u64, Refused> {
    let answer = sender.send_request(request).await.map_err(told)?;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let (body, trailers) = whole(answer).await?;
    if status != StatusCode::OK {
        return Err(format!("HTTP status {status}"));
    }
    // A call that fails at once has no trailers: their fields are in the head.
    let said = trailers
        .as_ref()
        .filter(|fields| fields.contains_key("grpc-status"))
        .unwrap_or(&headers);
    match text(said, "grpc-status") {
        "0" => Ok(rejected(body.get(5..).unwrap_or_default())),
        code => Err(format!(
            "gRPC status {code:?}: {}",
            text(said, "grpc-message")
        )),
    }
}

async fn post(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<u64, Refused> {
    let answer = sender.send_request(request).await.map_err(told)?;
    let status = answer.status();
    let (body, _) = whole(answer).await?;
    if status.is_success() {
        Ok(rejected(&body))
    } else {
        Err(format!("HTTP status {status}"))
    }
}

async fn whole(answer: Response<Incoming>) -> Result<(Bytes, Option<HeaderMap>), Refused> {
    let body = Limited::new(answer.into_body(), LARGEST_ANSWER)
        .collect()
        .await
        .map_err(told)?;
    let trailers = body.trailers().cloned();
    Ok((body.to_bytes(), trailers))
}

/// How many spans were not taken; an answer that can't be read tells of none.
fn rejected(answer: &[u8]) -> u64 {
    let partly = ExportTraceServiceResponse::decode(answer)
        .ok()
        .and_then(|answer| answer.partial_success);
    partly.map_or(0, |partly| {
        u64::try_from(partly.rejected_spans).unwrap_or(0)
    })
}

fn text<'h>(fields: &'h HeaderMap, name: &str) -> &'h str {
    fields
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

fn told(error: impl fmt::Display) -> Refused {
    error.to_string()
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(
            f,
            "{scheme}://{}{}",
            self.authority(),
            self.path.as_deref().unwrap_or_default()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::CollectorUrl;

    #[test]
    fn port_and_path_say_how_it_is_spoken_to() {
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
            let url = CollectorUrl::parse(text).unwrap();
            assert_eq!(
                (url.to_string().as_str(), url.path.is_none()),
                (shown, is_grpc),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_collector_is_said_so() {
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
            assert!(CollectorUrl::parse(text).is_err(), "{text}");
        }
    }
}
