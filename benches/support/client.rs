//! HTTP client operations with their results, and parsed metrics.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Timeout for operations that should complete immediately.
pub(crate) const PROMPT_TIMEOUT: Duration = Duration::from_secs(10);

/// A byte stream to the proxy.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// Result of a request.
#[derive(Clone, Debug)]
pub(crate) enum RequestOutcome {
    /// The response is complete.
    Answered(u16),
    /// The response head arrived, but the body did not.
    Truncated(u16),
    /// The response is complete, but belongs to another request or differs from the sent data.
    Mismatched(u16),
    /// The connection ended without a response.
    #[allow(dead_code, reason = "why is shown by Debug")]
    NoAnswer(String),
    /// No result within the timeout.
    TimedOut,
}

impl RequestOutcome {
    /// Waits up to `patience` for the response. The body of a 200 response must equal `wanted`.
    pub(crate) async fn from_response(
        response: impl Future<Output = hyper::Result<Response<Incoming>>>,
        wanted: &str,
        patience: Duration,
    ) -> Self {
        let whole = async {
            let response = match response.await {
                Ok(response) => response,
                Err(error) => return Self::NoAnswer(format!("{error:?}")),
            };
            let status = response.status().as_u16();
            match response
                .into_body()
                .collect()
                .await
                .map(http_body_util::Collected::to_bytes)
            {
                Ok(body) if status == 200 && body != wanted => Self::Mismatched(status),
                Ok(_) => Self::Answered(status),
                Err(_) => Self::Truncated(status),
            }
        };
        timeout(patience, whole).await.unwrap_or(Self::TimedOut)
    }
}

pub(crate) async fn handshake_http1(
    socket: impl ByteStream + 'static,
) -> io::Result<http1::SendRequest<Full<Bytes>>> {
    let (sender, connection) = http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    // Connection errors also appear as errors of its requests.
    tokio::spawn(async move { connection.await.unwrap_or_default() });
    Ok(sender)
}

/// Returns status and body of a request on a new connection.
///
/// # Errors
/// Returns an error if there is no response.
pub(crate) async fn http_get(address: SocketAddr, path: &str) -> io::Result<(u16, Bytes)> {
    let request = Request::get(path)
        .header("host", "localhost")
        .body(Full::<Bytes>::default())
        .unwrap();
    let mut sender = handshake_http1(TcpStream::connect(address).await?).await?;
    let response = sender
        .send_request(request)
        .await
        .map_err(io::Error::other)?;
    let status = response.status().as_u16();
    Ok((
        status,
        response
            .into_body()
            .collect()
            .await
            .map_err(io::Error::other)?
            .to_bytes(),
    ))
}

/// A metrics page.
#[derive(Debug)]
pub(crate) struct MetricsPage(String);

impl MetricsPage {
    pub(crate) async fn fetch(admin: SocketAddr) -> Self {
        let (_, page) = timeout(PROMPT_TIMEOUT, http_get(admin, "/metrics"))
            .await
            .expect("the admin port responds")
            .unwrap();
        Self(String::from_utf8(page.to_vec()).unwrap())
    }

    /// Returns the value of a series; 0 if it is absent.
    pub(crate) fn value(&self, series: &str) -> u64 {
        let value = self
            .0
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Returns each value of a counter with its labels.
    pub(crate) fn labelled_values(&self, name: &str) -> impl Iterator<Item = (&str, u64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line
                .strip_prefix(name)?
                .strip_prefix('{')?
                .split_once("} ")?;
            Some((labels, value.parse().unwrap()))
        })
    }

    /// Returns the number of responses by status.
    pub(crate) fn responses_by_status(&self) -> impl Iterator<Item = (u16, u64)> {
        self.labelled_values("tidegate_http_requests_total")
            .map(|(labels, count)| {
                let code = labels
                    .strip_prefix("code=\"")
                    .and_then(|code| code.strip_suffix('"'));
                (
                    code.and_then(|code| code.parse().ok()).expect("a status"),
                    count,
                )
            })
    }
}

/// Returns an environment variable, if it is set.
pub(crate) fn read_env_number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = text.parse().ok();
    assert!(
        value.is_some(),
        "{name}: a number is expected, not {text:?}"
    );
    value
}
