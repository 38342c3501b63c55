//! `tidegate run`: the proxy.

use crate::app;
use crate::config::{self, Sources};
use crate::telemetry;
use std::process::ExitCode;

#[allow(clippy::print_stderr, reason = "until the log is set up, stderr is all there is")]
pub(super) fn run(sources: Sources) -> ExitCode {
    let config = match config::load(&sources) {
        Ok(config) => config,
        Err(report) => {
            eprint!("{report}");
            return ExitCode::FAILURE;
        }
    };
    telemetry::init(&config.log);
    app::main(config, sources, |_| {})
}
