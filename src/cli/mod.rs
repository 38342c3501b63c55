//! The command line: one file per command. Data goes to stdout, talk to stderr.

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
#[command(name = "tidegate", version, args_conflicts_with_subcommands = true, after_help = GENERAL_HELP)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    run: RunFlags,
}

#[derive(Subcommand, Debug)]
enum CliCommand {
    /// Run the proxy.
    #[command(after_help = RUN_HELP)]
    Run(RunFlags),
    #[command(after_help = DEMO_HELP)]
    /// Run everything in one process: a sample upstream, the proxy, the memory store. Prints curl lines to try.
    Demo {
        /// Where the proxy listens.
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
        listen: String,
        /// Policies of your own instead of the built-in ones.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Validate a configuration and say what each policy means. Exits with 1 and all errors if it is wrong.
    ///
    /// Policies in words go to stdout; errors, and warnings of what is legal but surely not meant, to stderr.
    #[command(after_help = CHECK_HELP)]
    Check {
        /// The file to check.
        #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
        file: PathBuf,
        /// One JSON object on stdout, errors and warnings in it.
        #[arg(long)]
        json: bool,
        /// Warnings count as errors: exit with 1.
        #[arg(long)]
        strict: bool,
    },
    /// Tell why a request is limited, or not: which policies match, which keys and limits it would use, and where they stand.
    #[command(after_help = EXPLAIN_HELP)]
    Explain {
        #[command(flatten)]
        config: ConfigFlag,
        /// One JSON object, as POST /explain of the admin port answers.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        request: Box<request::RequestArguments>,
    },
    /// Ask the proxy on this machine whether it lives. Exits with 0 if so, for HEALTHCHECK and exec probes.
    #[command(after_help = HEALTH_HELP)]
    Health {
        #[command(flatten)]
        config: ConfigFlag,
        /// One JSON object on stdout, whether it lives or not: {"healthy", "address", "status" or "error"}.
        #[arg(long)]
        json: bool,
    },
    /// End the proxy on this machine in good order, as SIGTERM does, and wait until it is gone. For preStop hooks.
    ///
    /// Exits with 0 when it is gone, and with 1 if nobody heard or it is still there after the time.
    #[command(after_help = DRAIN_HELP)]
    Drain {
        #[command(flatten)]
        config: ConfigFlag,
        /// How many seconds to wait; as long as the proxy says that it may take when left out.
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Try policies on a past access log: who would have been limited, when, how much.
    Replay {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(flatten)]
        arguments: Box<replay::ReplayArguments>,
    },
    /// Watch the proxy on this machine: what policies do, who is refused most, how its store is.
    ///
    /// The same as the dashboard on the admin port shows, for a terminal. Keys: q quits, p pauses, s sorts, arrows scroll.
    #[command(after_help = TOP_HELP)]
    Top {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(flatten)]
        flags: top::TopFlags,
    },
    /// Look at the counters in Redis, and reset them.
    #[command(after_help = KEYS_HELP)]
    Keys {
        #[command(flatten)]
        config: ConfigFlag,
        /// One JSON object.
        #[arg(long, global = true)]
        json: bool,
        #[command(subcommand)]
        command: keys::KeysCommand,
    },
    /// Print what a shell needs to complete tidegate's commands.
    #[command(after_help = COMPLETIONS_HELP)]
    Completions { shell: clap_complete::Shell },
    /// Print the manual, for man(1).
    #[command(after_help = MAN_HELP)]
    Man,
}

const GENERAL_HELP: &str = "\
Examples:
  tidegate demo                                everything in one process, with curl lines to try
  tidegate check my.toml                       is it right, and what does it mean?
  tidegate run --config my.toml                run it

Exit codes: 0 done; 1 what was asked for failed, and stderr says why; 2 the command line is wrong.";
const RUN_HELP: &str = "\
Examples:
  tidegate run --config my.toml
  tidegate run --upstream http://127.0.0.1:3000 --listen 127.0.0.1:8080
  TIDEGATE_STORE__REDIS__URL=redis://redis:6379/0 tidegate run

Exit codes: 0 ended as asked; 1 the configuration is wrong, or an address can't be taken.";
const DEMO_HELP: &str = "\
Examples:
  tidegate demo
  tidegate demo --listen 127.0.0.1:18080 --config my.toml";
const CHECK_HELP: &str = "\
Examples:
  tidegate check                               config.toml here
  tidegate check my.toml --strict              for CI: warnings fail too
  tidegate check my.toml --json | jq .warnings

Exit codes: 0 right; 1 wrong, or with --strict doubtful.";
const EXPLAIN_HELP: &str = "\
Examples:
  tidegate explain POST /api/login --ip 203.0.113.9
  tidegate explain GET http://shop.example/api/orders -H 'x-user-id: ann'
  tidegate explain --curl \"curl -X POST https://shop.example/api/login -H 'x-user-id: ann' -d x\"
  tidegate explain --json -- curl -sS https://shop.example/api/orders
  tidegate explain --har session.har --entry 3

Nothing is charged. Where limits stand is told if the configuration names a Redis.
Exit codes: 0 explained, whatever the request would get; 1 it can't be, and stderr says why.";
const HEALTH_HELP: &str = "\
Examples:
  tidegate health
  tidegate health --config /etc/tidegate/config.toml --json
  HEALTHCHECK CMD [\"/tidegate\", \"health\"]     in a Dockerfile

It asks /livez of admin.probes, or else of admin.address.
Exit codes: 0 it lives; 1 it gives no answer, or another one.";
const DRAIN_HELP: &str = "\
Examples:
  tidegate drain
  tidegate drain --config /etc/tidegate/config.toml --timeout 25
  preStop: { exec: { command: [\"/tidegate\", \"drain\"] } }     in a pod

Readiness fails at once; requests are served for shutdown.delay and those in flight get shutdown.grace.
Exit codes: 0 it is gone; 1 nobody heard, or it is still there after the time.";
const TOP_HELP: &str = "\
Examples:
  tidegate top
  tidegate top --once                          a table, for a pipe or a mail
  tidegate top --json | jq '.policies.policies[] | {name, rejected}'

Exit codes: 0 somebody quit, or it was printed; 1 nobody answers.";
const KEYS_HELP: &str = "\
Examples:
  tidegate keys list --policy login
  tidegate keys show login 203.0.113.9
  tidegate keys show api ann --json
  tidegate keys reset login 203.0.113.9

Exit codes: 0 done; 1 there is no such policy or key, or Redis is away.";
const COMPLETIONS_HELP: &str = "\
Examples:
  tidegate completions bash > /etc/bash_completion.d/tidegate
  tidegate completions zsh > ~/.zfunc/_tidegate
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish";
const MAN_HELP: &str = "\
Examples:
  tidegate man | man -l -
  tidegate man > /usr/local/share/man/man1/tidegate.1";

#[derive(Args, Debug)]
struct ConfigFlag {
    /// The proxy's configuration.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG, global = true)]
    config: PathBuf,
}

/// Flags override environment variables (`TIDEGATE_UPSTREAM__URL`), which override the file.
#[derive(Args, Debug, Default)]
struct RunFlags {
    /// The configuration; `config.toml` here, if there is one, when left out.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What to forward to, e.g. http://127.0.0.1:3000.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Where to listen, e.g. 0.0.0.0:8080.
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
            request: asked,
        } => print_result(explain::explain_request(
            &config.into_sources(),
            &asked,
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
        CliCommand::Replay {
            config,
            arguments: asked,
        } => print_result(replay::run_replay(config.config, &asked)),
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
    /// The proxy's own sources, but for the upstream, which plays no part.
    fn into_sources(self) -> ConfigSources {
        sources_without_upstream(self.config)
    }
}

fn sources_without_upstream(config: PathBuf) -> ConfigSources {
    let upstream = Some("http://127.0.0.1".to_owned());
    sources_with_environment(
        FileSource::Path(config),
        FlagOverrides {
            upstream,
            listen: None,
        },
    )
}

/// Data to stdout, trouble to stderr.
#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "commands talk to people"
)]
fn print_result(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            // Whoever closed the pipe has read enough.
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
    // Anybody's variable may hold bytes that are no text. In one of ours, they become an error like others.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let env = std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .collect();
    ConfigSources { file, env, flags }
}
