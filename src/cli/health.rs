//! `tidegate health`: liveness check of the proxy on this machine.

use super::admin_client::{AdminClient, IO_TIMEOUT, explain_failure};
use super::output::{CommandError, CommandOutput, block_on};
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
    let answer = block_on(client.send(IO_TIMEOUT, "GET", "/livez", String::new()))?;
    let status = answer
        .as_ref()
        .ok()
        .map(|response| response.status().as_u16());
    let error = match (answer, status) {
        (Err(error), _) => Some(explain_failure(&error)),
        (Ok(_), Some(status)) if status != 200 => Some(format!("answered {status}")),
        (Ok(_), _) => None,
    };
    if as_json {
        let result = json!({ "healthy": error.is_none(), "address": address, "status": status, "error": error });
        return Ok(CommandOutput {
            code: ExitCode::from(u8::from(error.is_some())),
            ..escape_json_for_display(&format!("{result}\n")).into()
        });
    }
    match error {
        None => Ok("ok\n".to_owned().into()),
        Some(error) => Err(CommandError::Message(format!("{address}: {error}"))),
    }
}
