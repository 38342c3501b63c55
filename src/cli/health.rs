//! `tidegate health`: does the proxy on this machine live?

use super::ask::{ask, reachable};
use crate::config::{self, Sources};

/// Asks `/livez` of the address that is configured for probes, or else of the admin port.
///
/// # Errors
/// A text for people, if there is no answer or another one.
pub(super) fn run(sources: &Sources) -> Result<String, String> {
    let admin = config::load_admin(sources).map_err(|report| report.to_string())?;
    let address = match admin.probes {
        Some(probes) => reachable(probes, "admin.probes")?,
        None => reachable(admin.address, "admin.address")?,
    };
    match ask(address, "GET", "/livez", None) {
        Ok(answer) if answer.status == 200 => Ok("ok\n".to_owned()),
        Ok(answer) => Err(format!("error: {address}: answered {}\n", answer.status)),
        Err(error) => Err(format!("error: {address}: {error}\n")),
    }
}
