//! The HTTP request for a JWK set.

use crate::policy::jwt::KeySource;
use crate::tls::describe_tls_error;
use bytes::Bytes;
use http::header::{ACCEPT, AGE, CACHE_CONTROL, CONNECTION, HOST, USER_AGENT};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Timeout of a fetch, with name resolution, connection and body.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a JWK set. Sets of large issuers have some ten KiB.
const MAX_KEY_SET_BYTES: usize = 1 << 20;
/// Maximum size of the response head.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// A JWK set and how long it may be used without another fetch.
#[derive(Debug)]
pub(super) struct FetchedKeySet {
    pub(super) text: String,
    /// `None` if the response does not say.
    pub(super) max_age: Option<Duration>,
}

/// Fetches the JWK set of a source.
///
/// # Errors
/// Returns a message without any content of the response.
pub(super) async fn fetch_key_set(source: &KeySource) -> Result<FetchedKeySet, String> {
    let fetched = timeout(FETCH_TIMEOUT, connect_and_fetch(source)).await;
    fetched.unwrap_or_else(|_elapsed| Err("no complete response within 5 s".to_owned()))
}

async fn connect_and_fetch(source: &KeySource) -> Result<FetchedKeySet, String> {
    let url = &source.url;
    let socket = TcpStream::connect((url.host.as_str(), url.port)).await;
    let socket = socket.map_err(|error| format!("connection failed: {error}"))?;
    let Some(tls) = &source.tls else {
        return send_request(source, socket).await;
    };
    let name = tls
        .server_name_for(&url.host)
        .map_err(|error| format!("{}: {error}", url.host))?;
    let stream = TlsConnector::from(Arc::clone(tls.config()))
        .connect(name, socket)
        .await;
    send_request(
        source,
        stream.map_err(|error| format!("TLS failed: {}", describe_tls_error(&error)))?,
    )
    .await
}

async fn send_request(
    source: &KeySource,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<FetchedKeySet, String> {
    let failed = |error: hyper::Error| format!("request failed: {error}");
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(failed)?;
    let request = Request::get(&source.url.path_and_query)
        .header(HOST, &source.url.authority)
        .header(ACCEPT, "application/jwk-set+json, application/json")
        .header(USER_AGENT, concat!("tidegate/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(failed)?;
        let (head, body) = response.into_parts();
        match head.status {
            StatusCode::OK => {}
            status if status.is_redirection() => {
                return Err(format!("status {status}: redirections are not followed"));
            }
            status => return Err(format!("status {status}")),
        }
        let body = Limited::new(body, MAX_KEY_SET_BYTES).collect().await;
        let body = body.map_err(|error| format!("body: {error}"))?;
        let text = String::from_utf8(body.to_bytes().into())
            .map_err(|_invalid| "the body is not UTF-8".to_owned())?;
        Ok(FetchedKeySet {
            text,
            max_age: read_max_age(&head.headers),
        })
    };
    // The connection is driven here, so that it ends with this future.
    let mut connection = std::pin::pin!(connection);
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        fetched = &mut exchange => fetched,
        // The last bytes of a body may be in the channel when the connection ends.
        _closed = &mut connection => exchange.await,
    }
}

/// The remaining freshness by `Cache-Control` and `Age`. `no-store` and `no-cache` are a freshness
/// of zero.
fn read_max_age(headers: &HeaderMap) -> Option<Duration> {
    let values = headers.get_all(CACHE_CONTROL).iter();
    let directives: Vec<String> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|directive| directive.trim().to_ascii_lowercase())
        .collect();
    if directives.iter().any(|directive| {
        let name = directive.split('=').next().unwrap_or_default();
        matches!(name.trim(), "no-store" | "no-cache")
    }) {
        return Some(Duration::ZERO);
    }
    let seconds = directives.iter().find_map(|directive| {
        let (name, value) = directive.split_once('=')?;
        (name.trim() == "max-age").then_some(())?;
        value.trim().trim_matches('"').parse::<u64>().ok()
    })?;
    let age = headers
        .get(AGE)
        .and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Some(Duration::from_secs(
        seconds.saturating_sub(age.unwrap_or(0)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    #[test]
    fn reads_the_remaining_freshness() {
        let max_age_s = |lines: &[(HeaderName, &str)]| {
            let headers: HeaderMap = lines
                .iter()
                .map(|(name, value)| (name.clone(), value.parse().unwrap()))
                .collect();
            read_max_age(&headers).map(|age| age.as_secs())
        };
        let control = |value: &'static str| (CACHE_CONTROL, value);
        assert_eq!(max_age_s(&[]), None);
        assert_eq!(max_age_s(&[control("public")]), None);
        assert_eq!(max_age_s(&[control("public, Max-Age=300")]), Some(300));
        assert_eq!(
            max_age_s(&[control("public"), control("max-age=\"7\"")]),
            Some(7)
        );
        assert_eq!(
            max_age_s(&[control("max-age=300"), (AGE, "100")]),
            Some(200)
        );
        assert_eq!(max_age_s(&[control("max-age=300"), (AGE, "900")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=300, no-store")]), Some(0));
        assert_eq!(max_age_s(&[control("no-cache")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=x")]), None);
        assert_eq!(max_age_s(&[control("s-maxage=5")]), None);
    }
}
