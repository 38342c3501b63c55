//! What a client does and sees, and a page of metrics.

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

/// For what should come at once.
pub(crate) const PROMPT_TIMEOUT: Duration = Duration::from_secs(10);

/// What bytes go over.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// What became of a request.
#[derive(Clone, Debug)]
pub(crate) enum RequestOutcome {
    /// Came whole.
    Answered(u16),
    /// The head came, the rest didn't.
    Truncated(u16),
    /// Came whole, and belongs to another request or isn't what was sent.
    Mismatched(u16),
    /// The connection ended without an answer.
    #[allow(dead_code, reason = "why is shown by Debug")]
    NoAnswer(String),
    /// Neither, for longer than anything should take.
    TimedOut,
}

impl RequestOutcome {
    /// What comes within `patience`; the body of a 200 has to be `wanted`.
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
    // Its errors are those of the requests on it.
    tokio::spawn(async move { connection.await.unwrap_or_default() });
    Ok(sender)
}

/// Status and body, on a connection of its own.
///
/// # Errors
/// There is no answer.
pub(crate) async fn get(address: SocketAddr, path: &str) -> io::Result<(u16, Bytes)> {
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

/// A page of metrics.
#[derive(Debug)]
pub(crate) struct MetricsPage(String);

impl MetricsPage {
    pub(crate) async fn fetch(admin: SocketAddr) -> Self {
        let (_, page) = timeout(PROMPT_TIMEOUT, get(admin, "/metrics"))
            .await
            .expect("the admin port answers")
            .unwrap();
        Self(String::from_utf8(page.to_vec()).unwrap())
    }

    /// What stands behind this; 0 if nothing does.
    pub(crate) fn value(&self, series: &str) -> u64 {
        let value = self
            .0
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Each value of a counter, with its labels.
    pub(crate) fn labelled_values(&self, name: &str) -> impl Iterator<Item = (&str, u64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line
                .strip_prefix(name)?
                .strip_prefix('{')?
                .split_once("} ")?;
            Some((labels, value.parse().unwrap()))
        })
    }

    /// Responses by status.
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

/// What the environment says, if anything.
pub(crate) fn read_env_number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = text.parse().ok();
    assert!(
        value.is_some(),
        "{name}: a number is expected, not {text:?}"
    );
    value
}
