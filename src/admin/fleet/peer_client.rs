//! HTTP client for the summaries of other instances.

use crate::http_client;
use crate::text::SecretText;
use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST};
use http::{Request, StatusCode};
use http_body_util::Full;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Timeout of one request, including the connection setup.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of entries in each ranking of a summary.
pub(super) const MAX_SUMMARY_ENTRIES: usize = 100;
/// Maximum size of a summary.
const MAX_SUMMARY_BYTES: usize = 256 << 10;

/// Maximum number of name lookups at a time. A lookup uses a blocking thread until the resolver
/// gives up, after the request has timed out. Reloads and `/metrics` need these threads, too.
pub(super) const MAX_CONCURRENT_LOOKUPS: usize = 4;

/// Fetches the summary of the instance at `address`, a host and a port.
///
/// # Errors
/// Returns the reason, as a sentence about the instance.
pub(super) async fn fetch_summary(
    lookup_permits: &Arc<Semaphore>,
    address: &str,
    credential: Option<&SecretText>,
) -> Result<Bytes, String> {
    let answer = async {
        let addresses = look_up(lookup_permits, address).await?;
        send_request(&addresses, credential).await
    };
    timeout(REQUEST_TIMEOUT, answer)
        .await
        .unwrap_or_else(|_elapsed| Err("it did not answer within 1 s".to_owned()))
}

/// Returns the socket addresses of a host and a port.
async fn look_up(permits: &Arc<Semaphore>, address: &str) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let permit = Arc::clone(permits).acquire_owned().await;
    let name = address.to_owned();
    // The lookup keeps its permit when the request has timed out.
    let lookup = tokio::spawn(async move {
        let _permit = permit;
        let found = lookup_host(name).await;
        found.map(|addresses| addresses.collect::<Vec<_>>())
    });
    lookup.await.map_err(to_reason)?.map_err(to_reason)
}

async fn send_request(
    addresses: &[SocketAddr],
    credential: Option<&SecretText>,
) -> Result<Bytes, String> {
    let socket = TcpStream::connect(addresses).await.map_err(to_reason)?;
    let mut request = Request::get(format!("/fleet/instance?n={MAX_SUMMARY_ENTRIES}"))
        // The endpoint accepts this name whatever its configuration.
        .header(HOST, "localhost");
    if let Some(credential) = credential {
        request = request.header(AUTHORIZATION, format!("Bearer {}", credential.expose()));
    }
    let request = request.body(Full::default()).map_err(to_reason)?;
    let response = http_client::fetch(socket, request, MAX_SUMMARY_BYTES, |status| {
        status == StatusCode::OK
    })
    .await;
    let response = response.map_err(to_reason)?;
    match response.status() {
        StatusCode::OK => Ok(response.into_body()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            Err("it refused the credential: its admin token differs".to_owned())
        }
        status => Err(format!("it answered {status}")),
    }
}

fn to_reason(error: impl fmt::Display) -> String {
    format!("its admin port failed: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lookups_are_bounded_and_addresses_need_none() {
        let permits = Arc::new(Semaphore::new(0));
        assert_eq!(
            fetch_summary(&permits, "localhost:1", None).await,
            Err("it did not answer within 1 s".to_owned())
        );
        let addresses = look_up(&permits, "127.0.0.1:1").await;
        assert_eq!(addresses, Ok(vec!["127.0.0.1:1".parse().unwrap()]));
    }
}
