//! `tidegate health`: liveness check of the proxy on this machine.

use super::admin_client::{reachable_address, send_request};
use super::print_result;
use crate::admin::escape_json_for_display;
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use serde_json::json;
use std::process::ExitCode;

/// Requests `/livez` on `admin.probes`, or on `admin.address` if `admin.probes` is not set. With
/// `as_json`, prints failures on stdout too.
pub(super) fn run(sources: &ConfigSources, as_json: bool) -> ExitCode {
    let address = match probe_or_admin_address(sources) {
        Ok(address) => address,
        Err(report) => return print_result(Err(report)),
    };
    let (status, error) = match send_request(&address, "GET", "/livez", None) {
        Ok(response) => (
            Some(response.status),
            (response.status != 200).then(|| format!("answered {}", response.status)),
        ),
        Err(error) => (None, Some(error.to_string())),
    };
    if !as_json {
        return print_result(match error {
            None => Ok("ok\n".to_owned()),
            Some(error) => Err(format!("error: {address}: {error}\n")),
        });
    }
    let result = json!({ "healthy": error.is_none(), "address": address.to_string(), "status": status, "error": error });
    let printed = print_result(Ok(escape_json_for_display(&format!("{result}\n"))));
    if error.is_none() {
        printed
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the address of the probe port, or of the admin port if there is none.
fn probe_or_admin_address(sources: &ConfigSources) -> Result<ListenAddress, String> {
    let admin = config::load_admin_settings(sources).map_err(|report| report.to_string())?;
    match admin.probes {
        Some(probes) => reachable_address(&ListenAddress::Ip(probes), "admin.probes"),
        None => reachable_address(&admin.address, "admin.address"),
    }
}
