//! Results and errors of commands: text, or one JSON object on stdout with `--json`.

use crate::admin::{AdminError, add_fields, escape_json_for_display};
use crate::app::overrides::format_time_ms;
use crate::clock::Clock;
use crate::config::{ConfigDiagnostic, ConfigErrors};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
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
    /// The cause, as a message for the user.
    #[error("error: {0}\n")]
    Message(String),
}

/// A message, or one that has the prefix `error: ` and ends with a newline.
impl From<String> for CommandError {
    fn from(message: String) -> Self {
        Self::Message(strip_error_prefix(&message).to_owned())
    }
}

impl From<&str> for CommandError {
    fn from(message: &str) -> Self {
        message.to_owned().into()
    }
}

impl From<AdminError> for CommandError {
    fn from(error: AdminError) -> Self {
        Self::Message(error.to_string())
    }
}

impl CommandError {
    /// The message without its prefix.
    pub(super) fn cause(&self) -> String {
        strip_error_prefix(&self.to_string()).to_owned()
    }

    fn to_json(&self) -> Value {
        let errors: Vec<Value> = match self {
            Self::Config(errors) => errors.diagnostics.iter().map(diagnostic_to_json).collect(),
            // It has the fields of an error in a configuration.
            Self::Message(message) => {
                let problem = strip_error_prefix(message);
                vec![
                    json!({ "source": null, "line": null, "column": null, "key": "", "problem": problem }),
                ]
            }
        };
        json!({ "ok": false, "errors": errors })
    }
}

fn strip_error_prefix(message: &str) -> &str {
    message
        .strip_prefix("error: ")
        .unwrap_or(message)
        .trim_end()
}

/// What a command prints to stdout, and its exit code.
#[derive(Debug)]
pub(super) struct CommandOutput {
    pub(super) text: String,
    /// The same for `--json`; `None` if the text counts there too.
    pub(super) json: Option<Value>,
    pub(super) code: ExitCode,
}

impl From<String> for CommandOutput {
    fn from(text: String) -> Self {
        Self {
            text,
            json: None,
            code: ExitCode::SUCCESS,
        }
    }
}

/// A command that has printed everything itself.
impl From<ExitCode> for CommandOutput {
    fn from(code: ExitCode) -> Self {
        Self {
            code,
            ..String::new().into()
        }
    }
}

impl CommandOutput {
    /// The answer of a command: as a document, and as text.
    pub(super) fn new(document: &impl Serialize, text: String) -> Self {
        Self {
            json: Some(json!(document)),
            ..text.into()
        }
    }

    /// Prints the text, or the document as JSON on several lines, and returns the exit code.
    pub(super) fn print(self, as_json: bool) -> ExitCode {
        let text = match self.json {
            Some(json) if as_json => escape_json_for_display(&format!("{json:#}\n")),
            _ => self.text,
        };
        // A closed pipe fails without a message, as with other Unix tools.
        match io::stdout().write_all(text.as_bytes()) {
            Ok(()) => self.code,
            Err(_) => ExitCode::FAILURE,
        }
    }
}

/// Whether the user wants colours. https://no-color.org: any value but an empty one turns them off.
pub(super) fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Runs the asynchronous part of a command on this thread.
///
/// # Errors
/// A message for the user if the system has no resources for a runtime.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> Result<T, CommandError> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    Ok(runtime.block_on(future))
}

/// Creates a progress bar that is drawn `hertz` times per second, and only if stderr is a terminal.
pub(super) fn new_progress_bar(total: Option<u64>, hertz: u8, template: &str) -> ProgressBar {
    let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(hertz));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
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
        let first_line = text.lines().next().unwrap_or_default();
        println!("{:#}", CommandError::from(first_line).to_json());
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
