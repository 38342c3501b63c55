//! The command line: one file per command. Data goes to stdout, talk to stderr.

mod check;
mod demo;
mod explain;
mod health;
mod keys;
mod run;
mod standing;

use crate::config::{FileSource, Flags, Sources};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A rate-limiting sidecar proxy with a stated and tested guarantee.
///
/// Without a command, tidegate runs the proxy.
#[derive(Parser, Debug)]
#[command(name = "tidegate", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunFlags,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the proxy.
    Run(RunFlags),
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
    Check {
        /// The file to check.
        #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
        file: PathBuf,
    },
    /// Tell which policies match a request, which keys and limits it would use, and where they stand.
    Explain {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(flatten)]
        asked: explain::Asked,
    },
    /// Ask the proxy on this machine whether it lives. Exits with 0 if so, for HEALTHCHECK and exec probes.
    Health {
        #[command(flatten)]
        config: ConfigFlag,
    },
    /// Look at the counters in Redis, and reset them.
    Keys {
        #[command(flatten)]
        config: ConfigFlag,
        #[command(subcommand)]
        command: keys::Command,
    },
}

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
    let cli = Cli::parse();
    match cli.command.unwrap_or(Command::Run(cli.run)) {
        Command::Run(flags) => run::run(flags.into_sources(), |_| {}),
        Command::Demo { listen, config } => demo::run(listen, config),
        Command::Explain { config, asked } => print(explain::explain(&config.into_sources(), &asked)),
        Command::Health { config } => print(health::run(&config.into_sources())),
        Command::Keys { config, command } => print(keys::run(&config.into_sources(), &command)),
        Command::Check { file } => check::run(
            &sources(FileSource::Path(file), Flags::default()),
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        ),
    }
}

impl ConfigFlag {
    /// The proxy's own sources, but for the upstream, which plays no part.
    fn into_sources(self) -> Sources {
        let upstream = Some("http://127.0.0.1".to_owned());
        sources(FileSource::Path(self.config), Flags { upstream, listen: None })
    }
}

/// Data to stdout, trouble to stderr.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "commands talk to people")]
fn print(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprint!("{text}");
            ExitCode::FAILURE
        }
    }
}

impl RunFlags {
    fn into_sources(self) -> Sources {
        let file = match self.config {
            Some(path) => FileSource::Path(path),
            None if Path::new(DEFAULT_CONFIG).exists() => FileSource::Path(DEFAULT_CONFIG.into()),
            None => FileSource::None,
        };
        sources(file, Flags { upstream: self.upstream, listen: self.listen })
    }
}

fn sources(file: FileSource, flags: Flags) -> Sources {
    // Anybody's variable may hold bytes that are no text. In one of ours, they become an error like others.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let env = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
    Sources { file, env, flags }
}
