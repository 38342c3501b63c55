//! `tidegate run`: runs the proxy.

use super::output::CommandError;
use crate::app::{self, ListeningAddresses};
use crate::config::{self, ConfigSources};
use crate::telemetry;
use std::process::ExitCode;
use std::time::Duration;

/// Most time at exit to write the last log lines.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the proxy with the configuration of `sources` until shutdown. Calls `on_listening` with the
/// bound addresses once clients can connect.
///
/// # Errors
/// The errors of the configuration.
pub(super) fn run_proxy(
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> Result<ExitCode, CommandError> {
    let config = config::load(&sources)?;
    telemetry::init_logging(&config.log);
    let code = app::main(config, sources, on_listening);
    telemetry::flush_log(LOG_FLUSH_TIMEOUT);
    Ok(code)
}
