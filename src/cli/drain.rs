//! `tidegate drain`: shuts the proxy on this machine down gracefully and waits for its exit.

use super::admin_client::{AdminClientResponse, admin_address, describe_failure, send_request};
use super::output::CommandError;
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use serde_json::json;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

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
    let settings = config::load_admin_settings(sources)?;
    let address = admin_address(&settings)?;
    let requested_at = Instant::now();
    let response = send_request(&address, "POST", "/drain", settings.token.as_ref())
        .map_err(|error| format!("error: {address}: {}\n", describe_failure(&error)))?;
    if response.status != 202 {
        return Err(CommandError::Message(response.describe_refusal(&address)));
    }
    let timeout = timeout
        .or_else(|| announced_drain_time(&response))
        .unwrap_or(TIMEOUT_MARGIN);
    while requested_at.elapsed() < timeout {
        if is_process_gone(&address) {
            let seconds = requested_at.elapsed().as_secs_f64();
            return Ok(if as_json {
                format!("{}\n", json!({ "drained": true, "seconds": seconds }))
            } else {
                format!("drained in {seconds:.1} s\n")
            });
        }
        sleep(POLL_INTERVAL);
    }
    Err(CommandError::Message(format!(
        "error: {address}: still running after {:.1} s\n",
        timeout.as_secs_f64()
    )))
}

/// Returns the maximum shutdown time from the response, plus [`TIMEOUT_MARGIN`].
fn announced_drain_time(response: &AdminClientResponse) -> Option<Duration> {
    let body = response.parse_json()?;
    let seconds = |name| body.get(name)?.as_f64();
    Duration::try_from_secs_f64(seconds("delay_s")? + seconds("grace_s")?)
        .ok()?
        .checked_add(TIMEOUT_MARGIN)
}

fn is_process_gone(address: &ListenAddress) -> bool {
    // `NotFound` means that the file of a Unix socket has been removed.
    let gone = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::NotFound,
    ];
    send_request(address, "GET", "/livez", None).is_err_and(|error| gone.contains(&error.kind()))
}
