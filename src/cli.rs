//! The command line, one file per command. Results go to stdout, diagnostics to stderr.

mod admin_client;
mod check;
mod completions;
mod demo;
mod doctor;
mod drain;
mod explain;
mod flags;
mod health;
mod keys;
mod limit_status;
mod output;
mod overrides;
mod replay;
mod request;
mod run;
mod top;
mod why;

use crate::config;
use clap::{Parser, Subcommand};
use flags::{HiddenJsonFlag, OverrideFlags, SharedFlags};
use output::{CheckOptions, CommandError, CommandOutput, print_error, print_usage};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// A rate-limiting sidecar proxy with a stated and tested guarantee.
///
/// Without a command, tidegate runs the proxy.
#[derive(Parser, Debug)]
#[command(
    name = "tidegate",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  tidegate demo                                run a self-contained demo, with curl commands to try
  tidegate check my.toml                       validate a configuration and describe its policies
  tidegate run --config my.toml                run the proxy

Exit codes: 0 success; 1 failure, with the reason on stderr; 2 invalid command line."
)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    shared: SharedFlags,
    #[command(flatten)]
    overrides: OverrideFlags,
}

#[derive(Subcommand, Debug)]
enum CliCommand {
    /// Run the proxy.
    #[command(after_help = "\
Examples:
  tidegate run --config my.toml
  tidegate run --upstream http://127.0.0.1:3000 --listen 127.0.0.1:8080
  TIDEGATE_STORE__REDIS__URL=redis://redis:6379/0 tidegate run

Exit codes: 0 shut down on request; 1 invalid configuration, or an address is unavailable.")]
    Run(OverrideFlags),
    /// Run a sample upstream, the proxy and the memory store in one process.
    ///
    /// Prints curl commands to try.
    #[command(after_help = "\
Examples:
  tidegate demo
  tidegate demo --listen 127.0.0.1:18080 --config my.toml")]
    Demo(demo::DemoFlags),
    /// Validate configurations, and describe the store, the listeners and each policy in plain
    /// words.
    ///
    /// The descriptions go to stdout. Errors go to stderr, and so do warnings about settings that
    /// are valid but probably not intended. Reports all errors and exits with 1 if there are any.
    #[command(after_help = "\
Examples:
  tidegate check                               check $TIDEGATE_CONFIG or ./config.toml
  tidegate check my.toml --strict --no-files   for CI: warnings are errors, secrets are not read
  tidegate check base.toml canary.toml         check several, each on its own
  envsubst < my.tmpl | tidegate check -        check stdin
  tidegate check my.toml --json | jq .warnings

Exit codes: 0 valid; 1 errors, or warnings with --strict.")]
    Check {
        /// Configuration files to check, each on its own; - is stdin.
        #[arg(value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Treat warnings as errors: exit with 1.
        #[arg(long)]
        strict: bool,
        /// Do not read secrets, certificates and key sets, which may exist only where the proxy
        /// runs.
        #[arg(long)]
        no_files: bool,
        #[command(flatten)]
        overrides: OverrideFlags,
    },
    /// Print the JSON Schema of the configuration, for editors.
    #[command(after_help = "\
Examples:
  tidegate schema > config.schema.json

The first line of a configuration names the file for editors: #:schema ./config.schema.json")]
    Schema,
    /// Explain why a request is limited or not.
    ///
    /// Shows which policies match, which keys and limits the request uses, and their current state.
    #[command(after_help = "\
Examples:
  tidegate explain POST /api/login --ip 203.0.113.9
  tidegate explain GET http://shop.example/api/orders -H 'x-user-id: ann'
  tidegate explain --curl \"curl -X POST https://shop.example/api/login -H 'x-user-id: ann' -d x\"
  tidegate explain --json -- curl -sS https://shop.example/api/orders
  tidegate explain --har session.har --entry 3

No quota is consumed. The state of limits is shown if the configuration uses Redis.
Exit codes: 0 explained, whatever the outcome; 1 failure, with the reason on stderr.")]
    Explain(Box<request::RequestArguments>),
    /// Examine Redis for this use, and give advice.
    ///
    /// Connects as the proxy does, and reports version, topology, latency of decisions, eviction,
    /// persistence, replicas, clocks, missing permissions, memory by policy, and counters without
    /// an expiry. Charges no quota of a client.
    ///
    /// With --json, prints the object that GET /doctor of the admin API returns.
    #[command(after_help = "\
Examples:
  tidegate doctor
  tidegate doctor --config /etc/tidegate/config.toml --strict
  tidegate doctor --json | jq '.findings[] | select(.level != \"ok\")'

Exit codes: 0 no fault; 1 a fault, or a warning with --strict, or an invalid configuration;
3 no fault, but some checks have no result, because Redis answered too late.")]
    Doctor {
        /// Treat warnings as faults: exit with 1.
        #[arg(long)]
        strict: bool,
    },
    /// Check whether the proxy on this machine is alive.
    ///
    /// Exits with 0 if it is. For HEALTHCHECK and exec probes.
    #[command(after_help = "\
Examples:
  tidegate health
  tidegate health --config /etc/tidegate/config.toml --json
  HEALTHCHECK CMD [\"/tidegate\", \"health\"]     in a Dockerfile

Requests /livez on admin.probes, or on admin.address if admin.probes is not set.
Exit codes: 0 alive; 1 no response, or a status other than 200.")]
    Health,
    /// Shut down the proxy on this machine gracefully, as SIGTERM does, and wait for its exit.
    ///
    /// For preStop hooks. Exits with 0 when the proxy has exited, and with 1 if the admin port does
    /// not respond or the proxy still runs after the timeout.
    #[command(after_help = "\
Examples:
  tidegate drain
  tidegate drain --config /etc/tidegate/config.toml --timeout 25
  preStop: { exec: { command: [\"/tidegate\", \"drain\"] } }     in a pod

Readiness fails at once. New requests are served for shutdown.delay; requests in flight then get
shutdown.grace to finish.
Exit codes: 0 the proxy has exited; 1 no response, or the proxy still runs after the timeout.")]
    Drain {
        /// Seconds to wait [default: the maximum shutdown time that the proxy announces].
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Replay an access log against policies: which keys would have been limited, when, how much.
    Replay(Box<replay::ReplayArguments>),
    /// Watch the proxy on this machine: policies, most refused keys and paths, store, latency.
    ///
    /// Shows the data of the dashboard in a terminal.
    /// Keys: q quits, p pauses, s sorts, arrows scroll.
    #[command(after_help = "\
Examples:
  tidegate top
  tidegate top --once                          print a table once
  tidegate top --json | jq '.policies.policies[] | {name, rejected}'

Exit codes: 0 quit, or printed; 1 the admin port does not respond.")]
    Top(top::TopFlags),
    /// List, show and reset counters, in Redis or in the memory of the proxy on this machine.
    #[command(
        subcommand,
        after_help = "\
Examples:
  tidegate keys list --policy login
  tidegate keys show login 203.0.113.9
  tidegate keys show api ann --json
  tidegate keys reset login 203.0.113.9

With the memory store, the proxy's admin port is asked: list shows keys with rejected requests,
and reset needs admin.token_file.
Exit codes: 0 success; 1 unknown policy or key, or Redis or the proxy does not respond."
    )]
    Keys(keys::KeysCommand),
    /// Set, remove and list limits and blocks of single keys, in the store.
    ///
    /// Only for policies with dynamic = true. Applies from the next decision in Redis. Cached
    /// refusals last up to 1 s, leases up to their ttl.
    #[command(
        subcommand,
        after_help = "\
Examples:
  tidegate overrides set api ann --requests 5000 --expires 30d --note 'contract 17'
  tidegate overrides set api bot-7 --block --author ops@example.com
  tidegate overrides set api internal --unlimited
  tidegate overrides show api ann
  tidegate overrides list api --json
  tidegate overrides remove api ann

Exit codes: 0 success; 1 unknown policy or key, an invalid override, or the store does not respond."
    )]
    Overrides(overrides::OverridesCommand),
    /// Report when and why a client was limited, from the proxy's own log.
    ///
    /// Maps the client's key to its hash in the log. Shows how often which policy and limit refused
    /// it, and how long it had to wait.
    #[command(after_help = why::EXAMPLES_HELP_FOOTER)]
    Why(Box<why::WhyArguments>),
    /// Print a shell completion script.
    #[command(after_help = "\
Examples:
  tidegate completions bash > /etc/bash_completion.d/tidegate
  tidegate completions zsh > ~/.zfunc/_tidegate
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish")]
    Completions {
        shell: clap_complete::Shell,
        #[command(flatten)]
        hidden: HiddenJsonFlag,
    },
    /// Print the manual page for man(1).
    #[command(after_help = "\
Examples:
  tidegate man | man -l -
  tidegate man > /usr/local/share/man/man1/tidegate.1")]
    Man(HiddenJsonFlag),
}

/// Parses the arguments, runs the command and returns the process's exit code.
pub fn main() -> ExitCode {
    match CommandLine::try_parse() {
        Ok(command_line) => {
            let as_json = command_line.shared.json;
            match run_command(command_line) {
                Ok(output) => output.print(as_json),
                Err(error) => print_error(&error, as_json),
            }
        }
        Err(error) => print_usage(&error, std::env::args_os().any(|arg| arg == "--json")),
    }
}

fn run_command(command_line: CommandLine) -> Result<CommandOutput, CommandError> {
    let CommandLine {
        command,
        shared,
        overrides,
    } = command_line;
    let json = shared.json;
    let sources = || shared.to_sources_without_upstream();
    let with_policies = || shared.to_sources_with_policies();
    Ok(match command.unwrap_or(CliCommand::Run(overrides)) {
        CliCommand::Run(overrides) => run::run_proxy(shared.to_sources(overrides)?, |_| {})?.into(),
        CliCommand::Demo(flags) => demo::run(flags, &shared)?.into(),
        CliCommand::Check {
            files,
            strict,
            no_files,
            overrides,
        } => {
            let mut sources = shared.to_all_sources(&files, &overrides)?;
            for file in &mut sources {
                file.skips_key_files = no_files;
            }
            check::run(
                &sources,
                CheckOptions { json, strict },
                &mut std::io::stdout(),
                &mut std::io::stderr(),
            )
            .into()
        }
        CliCommand::Schema => config::json_schema().into(),
        CliCommand::Completions { shell, .. } => completions::generate_completions(shell).into(),
        CliCommand::Man(_) => completions::generate_manual()?.into(),
        CliCommand::Doctor { strict } => doctor::run(&sources()?, strict)?,
        CliCommand::Health => health::run(&sources()?, json)?,
        CliCommand::Drain { timeout } => {
            drain::run(&sources()?, timeout.map(Duration::from_secs), json)?.into()
        }
        CliCommand::Explain(request) => explain::explain_request(&sources()?, &request, json)?,
        CliCommand::Replay(arguments) => replay::run_replay(&with_policies()?, &arguments)?.into(),
        CliCommand::Why(arguments) => why::run(&with_policies()?, &arguments)?.into(),
        CliCommand::Top(flags) => top::run(&sources()?, &flags)?.into(),
        CliCommand::Keys(command) => keys::run(&sources()?, &command)?,
        CliCommand::Overrides(command) => overrides::run(&with_policies()?, &command)?,
    })
}
