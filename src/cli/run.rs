//! `tidegate run`: the proxy.

use crate::app::{self, ListeningAddresses};
use crate::config::{self, ConfigSources};
use crate::telemetry;
use std::process::ExitCode;

/// Runs the proxy as `sources` say, until it is told to stop. `on_listening` hears where, once clients can connect.
#[allow(
    clippy::print_stderr,
    reason = "until the log is set up, stderr is all there is"
)]
pub(super) fn run_proxy(
    sources: ConfigSources,
    on_listening: impl FnOnce(ListeningAddresses),
) -> ExitCode {
    let config = match config::load(&sources) {
        Ok(config) => config,
        Err(report) => {
            eprint!("{report}");
            return ExitCode::FAILURE;
        }
    };
    telemetry::init_logging(&config.log);
    app::main(config, sources, on_listening)
}
