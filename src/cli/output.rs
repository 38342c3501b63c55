//! Results and errors of commands: text, or one JSON object on stdout with `--json`.

use crate::admin::{add_fields, escape_json_for_display};
use crate::app::overrides::format_time_ms;
use crate::clock::Clock;
use crate::config::{ConfigDiagnostic, ConfigErrors};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::process::ExitCode;
use tokio::runtime::Builder;

/// Options of `tidegate check` and `tidegate doctor`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckOptions {
    pub(super) json: bool,
    /// Warnings fail the command.
    pub(super) strict: bool,
}

/// Why a command fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// A message for the user: `error: …` with a newline.
    #[error("{0}")]
    Message(String),
}

impl From<String> for CommandError {
    fn from(message: String) -> Self {
        Self::Message(message)
    }
}

impl CommandError {
    fn to_json(&self) -> Value {
        let errors: Vec<Value> = match self {
            Self::Config(errors) => errors.diagnostics.iter().map(diagnostic_to_json).collect(),
            Self::Message(message) => vec![message_to_json(message)],
        };
        json!({ "ok": false, "errors": errors })
    }
}

/// Runs the asynchronous part of a command on this thread.
///
/// # Errors
/// A message for the user if the system has no resources for a runtime.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> Result<T, CommandError> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("error: {error}\n"))?;
    Ok(runtime.block_on(future))
}

/// The result of a command as JSON on several lines.
pub(super) fn format_json(result: &Value) -> String {
    format!("{result:#}\n")
}

/// The result of a command: as JSON, and as text.
pub(super) type CommandAnswer = (Value, String);

/// The form of a result that the user asked for.
pub(super) fn format_answer((json, text): CommandAnswer, as_json: bool) -> String {
    match as_json {
        true => escape_json_for_display(&format_json(&json)),
        false => text,
    }
}

/// Prints a result to stdout and returns the exit code. An error goes to stderr, or with `as_json`
/// to stdout as `{"ok": false, "errors": […]}`.
pub(super) fn print_result<E: Into<CommandError>>(
    result: Result<String, E>,
    as_json: bool,
) -> ExitCode {
    match result.map_err(Into::into) {
        // A closed pipe fails without a message, as with other Unix tools.
        Ok(text) => match io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => print_error(&error, as_json),
    }
}

/// Prints an error and returns the exit code 1.
#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "commands print their errors"
)]
pub(super) fn print_error(error: &CommandError, as_json: bool) -> ExitCode {
    if as_json {
        println!("{:#}", error.to_json());
    } else {
        eprint!("{error}");
    }
    ExitCode::FAILURE
}

/// Prints help, the version, or an error in the command line, and returns the exit code.
#[allow(clippy::print_stdout, reason = "commands print their errors")]
pub(super) fn print_usage(error: &clap::Error, as_json: bool) -> ExitCode {
    if as_json && error.use_stderr() {
        let text = error.to_string();
        let errors = [message_to_json(text.lines().next().unwrap_or_default())];
        println!("{:#}", json!({ "ok": false, "errors": errors }));
    } else if error.print().is_err() {
        return ExitCode::FAILURE;
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Prints what a command has changed in Redis itself, in the form of the proxy's JSON log. A change
/// by the admin port is in the log of the proxy.
#[allow(clippy::print_stderr, reason = "data is on stdout")]
pub(super) fn print_audit_line(change: Value) {
    let mut line = json!({
        "timestamp": format_time_ms(Clock::system().now_us() / 1000),
        "level": "INFO",
        "user": std::env::var("USER").ok(),
        "target": "audit",
    });
    add_fields(&mut line, change);
    eprintln!("{}", escape_json_for_display(&line.to_string()));
}

/// The cause in a message for the user.
pub(super) fn describe_cause(message: &str) -> &str {
    message
        .strip_prefix("error: ")
        .unwrap_or(message)
        .trim_end()
}

/// The JSON of one error or warning of a configuration.
pub(super) fn diagnostic_to_json(diagnostic: &ConfigDiagnostic) -> Value {
    let position = diagnostic.span.position.as_ref();
    json!({
        "source": diagnostic.span.source,
        "line": position.map(|at| at.line),
        "column": position.map(|at| at.column),
        "key": diagnostic.key,
        "problem": diagnostic.problem,
    })
}

/// An error that is not about a configuration has the fields of [`diagnostic_to_json`] too.
fn message_to_json(message: &str) -> Value {
    let problem = describe_cause(message);
    json!({ "source": null, "line": null, "column": null, "key": "", "problem": problem })
}
