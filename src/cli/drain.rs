//! `tidegate drain`: end the proxy on this machine in good order, and wait for it. For preStop hooks.

use super::admin_client::{AdminClientResponse, admin_address, send_request};
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use serde_json::Value;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often it is asked whether it is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Beside what the proxy says that it needs: for its last words to Redis, and for ending.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Asks for the end, and waits until the admin port is gone, which is the last thing to go: for `at_most`, or for as
/// long as the proxy says that it may take.
///
/// # Errors
/// A text for people, if nobody heard, or the proxy is still there.
pub(super) fn run(sources: &ConfigSources, timeout: Option<Duration>) -> Result<String, String> {
    let settings = config::load_admin_settings(sources).map_err(|report| report.to_string())?;
    let address = admin_address(&settings)?;
    let requested_at = Instant::now();
    let response = send_request(&address, "POST", "/drain", settings.token.as_ref())
        .map_err(|error| format!("error: {address}: {error}\n"))?;
    if response.status != 202 {
        return Err(format!(
            "error: {address}: answered {}{}\n",
            response.status,
            problem_detail(&response)
        ));
    }
    let timeout = timeout
        .or_else(|| announced_drain_time(&response))
        .unwrap_or(TIMEOUT_MARGIN);
    while requested_at.elapsed() < timeout {
        if is_gone(&address) {
            return Ok(format!(
                "drained in {:.1} s\n",
                requested_at.elapsed().as_secs_f64()
            ));
        }
        sleep(POLL_INTERVAL);
    }
    Err(format!(
        "error: {address}: still there after {:.1} s\n",
        timeout.as_secs_f64()
    ))
}

/// What a problem says.
fn problem_detail(response: &AdminClientResponse) -> String {
    let body: Option<Value> = serde_json::from_str(&response.body).ok();
    let detail = body.as_ref().and_then(|told| told.get("detail")?.as_str());
    detail.map_or_else(String::new, |detail| format!(": {}", detail.escape_debug()))
}

/// How long the proxy may take.
fn announced_drain_time(response: &AdminClientResponse) -> Option<Duration> {
    let body: Value = serde_json::from_str(&response.body).ok()?;
    let seconds = |name| body.get(name)?.as_f64();
    Duration::try_from_secs_f64(seconds("delay_s")? + seconds("grace_s")?)
        .ok()?
        .checked_add(TIMEOUT_MARGIN)
}

fn is_gone(address: &ListenAddress) -> bool {
    // Of a Unix socket, the file.
    let gone = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::NotFound,
    ];
    send_request(address, "GET", "/livez", None).is_err_and(|error| gone.contains(&error.kind()))
}
