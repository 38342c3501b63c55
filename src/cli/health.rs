//! `tidegate health`: liveness check of the proxy on this machine.

use super::admin_client::{AdminClient, IO_TIMEOUT, describe_failure};
use super::output::{CommandError, CommandOutput};
use crate::admin::escape_json_for_display;
use crate::config::ConfigSources;
use serde_json::json;
use std::process::ExitCode;

/// Requests `/livez` on `admin.probes`, or on `admin.address` if `admin.probes` is not set. With
/// `as_json`, prints `{"healthy", "address", "status", "error"}`, also if the proxy is not alive.
///
/// # Errors
/// The errors of the configuration, or without `as_json` that the proxy is not alive.
pub(super) fn run(sources: &ConfigSources, as_json: bool) -> Result<CommandOutput, CommandError> {
    let client = AdminClient::for_probes(sources)?;
    let address = client.address().to_string();
    let (status, error) = match client.send(IO_TIMEOUT, "GET", "/livez", "") {
        Ok(response) => (
            Some(response.status),
            (response.status != 200).then(|| format!("answered {}", response.status)),
        ),
        Err(error) => (None, Some(describe_failure(&error))),
    };
    if as_json {
        let result = json!({ "healthy": error.is_none(), "address": address, "status": status, "error": error });
        return Ok(CommandOutput {
            text: escape_json_for_display(&format!("{result}\n")),
            code: match error {
                None => ExitCode::SUCCESS,
                Some(_) => ExitCode::FAILURE,
            },
        });
    }
    match error {
        None => Ok("ok\n".to_owned().into()),
        Some(error) => Err(CommandError::Message(format!("{address}: {error}"))),
    }
}
