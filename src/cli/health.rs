//! `tidegate health`: liveness check of the proxy on this machine.

use super::admin_client::{describe_failure, reachable_address, send_request};
use super::output::{CommandError, print_result};
use crate::admin::escape_json_for_display;
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use serde_json::json;
use std::process::ExitCode;

/// Requests `/livez` on `admin.probes`, or on `admin.address` if `admin.probes` is not set. With
/// `as_json`, prints `{"healthy", "address", "status", "error"}`, also if the proxy is not alive.
///
/// # Errors
/// The errors of the configuration.
pub(super) fn run(sources: &ConfigSources, as_json: bool) -> Result<ExitCode, CommandError> {
    let address = probe_or_admin_address(sources)?;
    let (status, error) = match send_request(&address, "GET", "/livez", None) {
        Ok(response) => (
            Some(response.status),
            (response.status != 200).then(|| format!("answered {}", response.status)),
        ),
        Err(error) => (None, Some(describe_failure(&error))),
    };
    if !as_json {
        let result = match error {
            None => Ok("ok\n".to_owned()),
            Some(error) => Err(format!("error: {address}: {error}\n")),
        };
        return Ok(print_result(result, false));
    }
    let result = json!({ "healthy": error.is_none(), "address": address.to_string(), "status": status, "error": error });
    let text = escape_json_for_display(&format!("{result}\n"));
    let printed = print_result(Ok::<_, CommandError>(text), true);
    Ok(if error.is_none() {
        printed
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the address of the probe port, or of the admin port if there is none.
fn probe_or_admin_address(sources: &ConfigSources) -> Result<ListenAddress, CommandError> {
    let admin = config::load_admin_settings(sources)?;
    let address = match admin.probes {
        Some(probes) => reachable_address(&ListenAddress::Ip(probes), "admin.probes"),
        None => reachable_address(&admin.address, "admin.address"),
    };
    Ok(address?)
}
