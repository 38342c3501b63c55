//! `tidegate run`: the proxy.

use crate::app::{self, Addresses};
use crate::config::{self, Sources};
use crate::telemetry;
use std::process::ExitCode;

/// Runs the proxy as `sources` say, until it is told to stop. `on_listening` hears where, once clients can connect.
#[allow(
    clippy::print_stderr,
    reason = "until the log is set up, stderr is all there is"
)]
pub(super) fn run(sources: Sources, on_listening: impl FnOnce(Addresses)) -> ExitCode {
    let config = match config::load(&sources) {
        Ok(config) => config,
        Err(report) => {
            eprint!("{report}");
            return ExitCode::FAILURE;
        }
    };
    telemetry::init(&config.log);
    app::main(config, sources, on_listening)
}
