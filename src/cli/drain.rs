//! `tidegate drain`: shuts the proxy on this machine down gracefully and waits for its exit.

use super::admin_client::{AdminClient, IO_TIMEOUT};
use super::output::{CommandError, block_on};
use crate::admin::DrainDocument;
use crate::config::ConfigSources;
use http::StatusCode;
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Interval between checks whether the proxy still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Margin on the announced shutdown time, for the last writes to Redis and the process exit.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Requests a drain and waits until the admin port closes, which the proxy does last. Waits for
/// `timeout`, or for the announced shutdown time if `timeout` is `None`. With `as_json`, returns
/// `{"drained", "seconds"}`.
///
/// # Errors
/// A message for the user if the admin port does not accept the request, or the proxy still runs
/// after the timeout.
pub(super) fn run(
    sources: &ConfigSources,
    timeout: Option<Duration>,
    as_json: bool,
) -> Result<String, CommandError> {
    let client = AdminClient::from_sources(sources)?;
    let requested_at = Instant::now();
    block_on(async {
        let response = client
            .send(IO_TIMEOUT, "POST", "/drain", String::new())
            .await;
        let response = response.map_err(|error| client.describe_failure(&error))?;
        if response.status() != StatusCode::ACCEPTED {
            return Err(client.describe_refusal(&response));
        }
        // The maximum shutdown time of the response.
        let announced = || {
            let announced: DrainDocument = serde_json::from_slice(response.body()).ok()?;
            let duration = Duration::try_from_secs_f64(announced.delay_s + announced.grace_s);
            duration.ok()?.checked_add(TIMEOUT_MARGIN)
        };
        let timeout = timeout.or_else(announced).unwrap_or(TIMEOUT_MARGIN);
        while requested_at.elapsed() < timeout {
            if is_process_gone(&client).await {
                let seconds = requested_at.elapsed().as_secs_f64();
                return Ok(if as_json {
                    format!("{}\n", json!({ "drained": true, "seconds": seconds }))
                } else {
                    format!("drained in {seconds:.1} s\n")
                });
            }
            sleep(POLL_INTERVAL).await;
        }
        Err(CommandError::Message(format!(
            "{}: still running after {:.1} s",
            client.address(),
            timeout.as_secs_f64()
        )))
    })?
}

async fn is_process_gone(client: &AdminClient) -> bool {
    // `NotFound` means that the file of a Unix socket has been removed.
    let gone = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::NotFound,
    ];
    let answer = client
        .send(IO_TIMEOUT, "GET", "/livez", String::new())
        .await;
    answer.is_err_and(|error| gone.contains(&error.kind()))
}
