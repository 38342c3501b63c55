//! `tidegate drain`: end the proxy on this machine in good order, and wait for it. For preStop hooks.

use super::ask::{Answer, admin, ask};
use crate::config::{self, Sources};
use crate::listen::ListenAddress;
use serde_json::Value;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often it is asked whether it is still there.
const PAUSE: Duration = Duration::from_millis(50);
/// Beside what the proxy says that it needs: for its last words to Redis, and for ending.
const MARGIN: Duration = Duration::from_secs(5);

/// Asks for the end, and waits until the admin port is gone, which is the last thing to go: for `at_most`, or for as
/// long as the proxy says that it may take.
///
/// # Errors
/// A text for people, if nobody heard, or the proxy is still there.
pub(super) fn run(sources: &Sources, at_most: Option<Duration>) -> Result<String, String> {
    let settings = config::load_admin(sources).map_err(|report| report.to_string())?;
    let address = admin(&settings)?;
    let asked = Instant::now();
    let answer = ask(&address, "POST", "/drain", settings.token.as_ref())
        .map_err(|error| format!("error: {address}: {error}\n"))?;
    if answer.status != 202 {
        return Err(format!(
            "error: {address}: answered {}{}\n",
            answer.status,
            detail(&answer)
        ));
    }
    let at_most = at_most.or_else(|| needs(&answer)).unwrap_or(MARGIN);
    while asked.elapsed() < at_most {
        if is_gone(&address) {
            return Ok(format!(
                "drained in {:.1} s\n",
                asked.elapsed().as_secs_f64()
            ));
        }
        sleep(PAUSE);
    }
    Err(format!(
        "error: {address}: still there after {:.1} s\n",
        at_most.as_secs_f64()
    ))
}

/// What a problem says.
fn detail(answer: &Answer) -> String {
    let told: Option<Value> = serde_json::from_str(&answer.body).ok();
    let detail = told.as_ref().and_then(|told| told.get("detail")?.as_str());
    detail.map_or_else(String::new, |detail| format!(": {}", detail.escape_debug()))
}

/// How long the proxy may take.
fn needs(answer: &Answer) -> Option<Duration> {
    let told: Value = serde_json::from_str(&answer.body).ok()?;
    let seconds = |name| told.get(name)?.as_f64();
    Duration::try_from_secs_f64(seconds("delay_s")? + seconds("grace_s")?)
        .ok()?
        .checked_add(MARGIN)
}

fn is_gone(address: &ListenAddress) -> bool {
    // Of a Unix socket, the file.
    let gone = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::NotFound,
    ];
    ask(address, "GET", "/livez", None).is_err_and(|error| gone.contains(&error.kind()))
}
