//! The command line, one file per command. Results go to stdout, diagnostics to stderr.

mod admin_client;
mod check;
mod completions;
mod demo;
mod drain;
mod explain;
mod health;
mod keys;
mod limit_status;
mod replay;
mod request;
mod run;
mod top;

use crate::config::{ConfigSources, FileSource, FlagOverrides};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// A rate-limiting sidecar proxy with a stated and tested guarantee.
///
/// Without a command, tidegate runs the proxy.
#[derive(Parser, Debug)]
#[command(name = "tidegate", version, args_conflicts_with_subcommands = true, after_help = GENERAL_HELP_FOOTER)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    run: RunFlags,
}

#[derive(Subcommand, Debug)]
enum CliCommand {
    /// Run the proxy.
    #[command(after_help = RUN_HELP_FOOTER)]
    Run(RunFlags),
    /// Run a sample upstream, the proxy and the memory store in one process.
    ///
    /// Prints curl commands to try.
    #[command(after_help = DEMO_HELP_FOOTER)]
    Demo {
        /// Listen address of the proxy.
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
        listen: String,
        /// Configuration to use instead of the built-in one.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Validate a configuration and describe each policy in plain words.
    ///
    /// The descriptions go to stdout. Errors go to stderr, and so do warnings about settings that
    /// are valid but probably not intended. Reports all errors and exits with 1 if there are any.
    #[command(after_help = CHECK_HELP_FOOTER)]
    Check {
        /// Configuration file to check.
        #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
        file: PathBuf,
        /// Print one JSON object on stdout, including errors and warnings.
        #[arg(long)]
        json: bool,
        /// Treat warnings as errors: exit with 1.
        #[arg(long)]
        strict: bool,
    },
    /// Explain why a request is limited or not.
    ///
    /// Shows which policies match, which keys and limits the request uses, and their current state.
    #[command(after_help = EXPLAIN_HELP_FOOTER)]
    Explain {
        #[command(flatten)]
        config: ConfigFlag,
        /// Print the JSON object that POST /explain of the admin API returns.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        request: Box<request::RequestArguments>,
    },
    /// Check whether the proxy on this machine is alive.
    ///
    /// Exits with 0 if it is. For HEALTHCHECK and exec probes.
    #[command(after_help = HEALTH_HELP_FOOTER)]
    Health {
        #[command(flatten)]
        config: ConfigFlag,
        /// Print one JSON object on stdout: {"healthy", "address", "status", "error"}.
        #[arg(long)]
        json: bool,
    },
    /// Shut down the proxy on this machine gracefully, as SIGTERM does, and wait for its exit.
    ///
    /// For preStop hooks. Exits with 0 when the proxy has exited, and with 1 if the admin port does
    /// not respond or the proxy still runs after the timeout.
    #[command(after_help = DRAIN_HELP_FOOTER)]
    Drain {
        #[command(flatten)]
        config: ConfigFlag,
        /// Seconds to wait [default: the maximum shutdown time that the proxy announces].
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Replay an access log against policies: which keys would have been limited, when, how much.
    Replay {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(flatten)]
        arguments: Box<replay::ReplayArguments>,
    },
    /// Watch the proxy on this machine: policies, most refused keys and paths, store, latency.
    ///
    /// Shows the data of the dashboard in a terminal.
    /// Keys: q quits, p pauses, s sorts, arrows scroll.
    #[command(after_help = TOP_HELP_FOOTER)]
    Top {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(flatten)]
        flags: top::TopFlags,
    },
    /// List, show and reset the counters in Redis.
    #[command(after_help = KEYS_HELP_FOOTER)]
    Keys {
        #[command(flatten)]
        config: ConfigFlag,
        /// Print one JSON object.
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: keys::KeysCommand,
    },
    /// Print a shell completion script.
    #[command(after_help = COMPLETIONS_HELP_FOOTER)]
    Completions { shell: clap_complete::Shell },
    /// Print the manual page for man(1).
    #[command(after_help = MAN_HELP_FOOTER)]
    Man,
}

const GENERAL_HELP_FOOTER: &str = "\
Examples:
  tidegate demo                                run a self-contained demo, with curl commands to try
  tidegate check my.toml                       validate a configuration and describe its policies
  tidegate run --config my.toml                run the proxy

Exit codes: 0 success; 1 failure, with the reason on stderr; 2 invalid command line.";
const RUN_HELP_FOOTER: &str = "\
Examples:
  tidegate run --config my.toml
  tidegate run --upstream http://127.0.0.1:3000 --listen 127.0.0.1:8080
  TIDEGATE_STORE__REDIS__URL=redis://redis:6379/0 tidegate run

Exit codes: 0 shut down on request; 1 invalid configuration, or an address is unavailable.";
const DEMO_HELP_FOOTER: &str = "\
Examples:
  tidegate demo
  tidegate demo --listen 127.0.0.1:18080 --config my.toml";
const CHECK_HELP_FOOTER: &str = "\
Examples:
  tidegate check                               check ./config.toml
  tidegate check my.toml --strict              for CI: warnings are errors
  tidegate check my.toml --json | jq .warnings

Exit codes: 0 valid; 1 errors, or warnings with --strict.";
const EXPLAIN_HELP_FOOTER: &str = "\
Examples:
  tidegate explain POST /api/login --ip 203.0.113.9
  tidegate explain GET http://shop.example/api/orders -H 'x-user-id: ann'
  tidegate explain --curl \"curl -X POST https://shop.example/api/login -H 'x-user-id: ann' -d x\"
  tidegate explain --json -- curl -sS https://shop.example/api/orders
  tidegate explain --har session.har --entry 3

No quota is consumed. The state of limits is shown if the configuration uses Redis.
Exit codes: 0 explained, whatever the outcome; 1 failure, with the reason on stderr.";
const HEALTH_HELP_FOOTER: &str = "\
Examples:
  tidegate health
  tidegate health --config /etc/tidegate/config.toml --json
  HEALTHCHECK CMD [\"/tidegate\", \"health\"]     in a Dockerfile

Requests /livez on admin.probes, or on admin.address if admin.probes is not set.
Exit codes: 0 alive; 1 no response, or a status other than 200.";
const DRAIN_HELP_FOOTER: &str = "\
Examples:
  tidegate drain
  tidegate drain --config /etc/tidegate/config.toml --timeout 25
  preStop: { exec: { command: [\"/tidegate\", \"drain\"] } }     in a pod

Readiness fails at once. New requests are served for shutdown.delay; requests in flight then get
shutdown.grace to finish.
Exit codes: 0 the proxy has exited; 1 no response, or the proxy still runs after the timeout.";
const TOP_HELP_FOOTER: &str = "\
Examples:
  tidegate top
  tidegate top --once                          print a table once
  tidegate top --json | jq '.policies.policies[] | {name, rejected}'

Exit codes: 0 quit, or printed; 1 the admin port does not respond.";
const KEYS_HELP_FOOTER: &str = "\
Examples:
  tidegate keys list --policy login
  tidegate keys show login 203.0.113.9
  tidegate keys show api ann --json
  tidegate keys reset login 203.0.113.9

Exit codes: 0 success; 1 unknown policy or key, or Redis is unavailable.";
const COMPLETIONS_HELP_FOOTER: &str = "\
Examples:
  tidegate completions bash > /etc/bash_completion.d/tidegate
  tidegate completions zsh > ~/.zfunc/_tidegate
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish";
const MAN_HELP_FOOTER: &str = "\
Examples:
  tidegate man | man -l -
  tidegate man > /usr/local/share/man/man1/tidegate.1";

#[derive(Args, Debug)]
struct ConfigFlag {
    /// Configuration file of the proxy.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG, global = true)]
    config: PathBuf,
}

/// Flags override environment variables (`TIDEGATE_UPSTREAM__URL`), which override the file.
#[derive(Args, Debug, Default)]
struct RunFlags {
    /// Configuration file [default: ./config.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Upstream URL, e.g. http://127.0.0.1:3000.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Listen address, e.g. 0.0.0.0:8080.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
}

const DEFAULT_CONFIG: &str = "config.toml";

/// Parses the arguments, runs the command and returns the process's exit code.
pub fn main() -> ExitCode {
    let cli = CommandLine::parse();
    match cli.command.unwrap_or(CliCommand::Run(cli.run)) {
        CliCommand::Run(flags) => run::run_proxy(flags.into_sources(), |_| {}),
        CliCommand::Demo { listen, config } => demo::run(listen, config),
        CliCommand::Explain {
            config,
            json,
            request,
        } => print_result(explain::explain_request(
            &config.into_sources(),
            &request,
            json,
        )),
        CliCommand::Completions { shell } => {
            print_result(Ok(completions::generate_completions(shell)))
        }
        CliCommand::Man => print_result(completions::generate_manual()),
        CliCommand::Health { config, json } => health::run(&config.into_sources(), json),
        CliCommand::Drain { config, timeout } => print_result(drain::run(
            &config.into_sources(),
            timeout.map(Duration::from_secs),
        )),
        CliCommand::Replay { config, arguments } => {
            print_result(replay::run_replay(config.config, &arguments))
        }
        CliCommand::Top { config, flags } => print_result(top::run(&config.into_sources(), &flags)),
        CliCommand::Keys {
            config,
            json,
            command,
        } => print_result(keys::run(&config.into_sources(), &command, json)),
        CliCommand::Check { file, json, strict } => check::run(
            &sources_with_environment(FileSource::Path(file), FlagOverrides::default()),
            check::CheckOptions { json, strict },
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        ),
    }
}

impl ConfigFlag {
    /// Returns the configuration sources with a placeholder upstream. Commands with this flag never
    /// connect to the upstream, so its URL may be absent from the file.
    fn into_sources(self) -> ConfigSources {
        sources_with_placeholder_upstream(self.config)
    }
}

fn sources_with_placeholder_upstream(config: PathBuf) -> ConfigSources {
    let upstream = Some("http://127.0.0.1".to_owned());
    sources_with_environment(
        FileSource::Path(config),
        FlagOverrides {
            upstream,
            listen: None,
        },
    )
}

/// Prints a result to stdout or an error to stderr, and returns the exit code.
#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "commands print their results and errors"
)]
fn print_result(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            // A closed pipe fails without a message, as with other Unix tools.
            match std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        Err(text) => {
            eprint!("{text}");
            ExitCode::FAILURE
        }
    }
}

impl RunFlags {
    fn into_sources(self) -> ConfigSources {
        let file = match self.config {
            Some(path) => FileSource::Path(path),
            None if Path::new(DEFAULT_CONFIG).exists() => FileSource::Path(DEFAULT_CONFIG.into()),
            None => FileSource::None,
        };
        sources_with_environment(
            file,
            FlagOverrides {
                upstream: self.upstream,
                listen: self.listen,
            },
        )
    }
}

fn sources_with_environment(file: FileSource, flags: FlagOverrides) -> ConfigSources {
    // Invalid UTF-8 is replaced, because unrelated variables may hold it. In a TIDEGATE_ variable,
    // the replacement characters lead to an ordinary configuration error.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let env = std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .collect();
    ConfigSources { file, env, flags }
}
