//! `tidegate replay`: what policies would have done to the requests of a past access log.

use crate::config::{self, Config};
use crate::policy::PolicyTable;
use crate::replay::{self, AccessLogFormat, ReplayProgress, Settings};
use console::Term;
use http::HeaderName;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs;
use std::path::{Path, PathBuf};

const EXAMPLES_HELP: &str = "\
Counts in the log's own time, by the same rules as the proxy and with counters in memory: a day takes seconds.
The formats are found out by the first lines: nginx's and Apache's combined and common (with further fields behind
them), Envoy's text, and JSON by Envoy, Traefik, Caddy, nginx or tidegate itself. Files may be packed by gzip, be
several, and overlap. Lines that can't be read are counted and shown.

Examples:
  tidegate replay access.log
      Who would have been limited by config.toml, when, and how much.
  tidegate replay --config new.toml --suggest=1 /var/log/nginx/access.log*
      And which limits would have touched at most 1 % of the keys.
  tidegate replay --compare new.toml --html report.html access.log.1.gz
      Two sets of policies side by side, and a page with plots to hand around.
  kubectl logs deploy/shop -c tidegate | tidegate replay --format tidegate -
      The proxy's own log; it has all requests with log.access = \"all\".
  tidegate replay --header-from x-forwarded-for=extra1 --header-from x-user-id=remote_user access.log
      The first field after the user agent holds X-Forwarded-For; the user's name stands in for a header.
  tidegate replay --json access.log | jq '.sets[0].policies[] | {name, rejected, keys_touched}'

Exits with 0 once a report was made, whatever it says, and with 1 if a file can't be opened or understood.";

/// What to replay, and how to tell it.
#[derive(clap::Args, Debug)]
#[command(after_long_help = EXAMPLES_HELP)]
pub(super) struct ReplayArguments {
    /// Access logs, in any order; `-` is stdin.
    #[arg(required = true, value_name = "ACCESS_LOG")]
    logs: Vec<PathBuf>,
    /// How the logs are written: combined, envoy, tidegate, traefik-json, caddy, envoy-json, json.
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<AccessLogFormat>,
    /// A field of the log that holds a header: extra1, extra2, … are those after the user agent in text, remote_user is
    /// the user's name, and in JSON it is a field's path. May be given several times.
    #[arg(long, value_name = "HEADER=FIELD", value_parser = parse_header_mapping)]
    header_from: Vec<(HeaderName, String)>,
    /// A second configuration, shown side by side.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Propose limits that would have touched at most so many percent of the keys, and show what that is drawn from.
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = parse_percent)]
    suggest: Option<f64>,
    /// How many of the most limited keys are shown.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Leave requests of one second at its start, instead of spreading them over it.
    #[arg(long)]
    no_spread: bool,
    /// Print all figures as JSON instead.
    #[arg(long)]
    json: bool,
    /// Write a page with plots, which needs nothing else, to a file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Replays and returns what to print.
///
/// # Errors
/// A text for people, if the configuration is wrong or a file can't be read or written.
pub(super) fn run_replay(config: PathBuf, arguments: &ReplayArguments) -> Result<String, String> {
    let paths: Vec<PathBuf> = [Some(config), arguments.compare.clone()]
        .into_iter()
        .flatten()
        .collect();
    let load = |path: &PathBuf| {
        config::load(&super::sources_without_upstream(path.clone()))
            .map_err(|report| report.to_string())
    };
    let configs: Vec<Config> = paths.iter().map(load).collect::<Result<_, String>>()?;
    let sets: Vec<(String, &PolicyTable)> = paths
        .iter()
        .zip(&configs)
        .map(|(path, config)| (path.display().to_string(), &*config.policy_table))
        .collect();
    let settings = Settings {
        logs: arguments.logs.clone(),
        format: arguments.format,
        header_fields: arguments.header_from.clone(),
        spread_within_second: !arguments.no_spread,
        suggest_percent: arguments.suggest,
        top_keys: arguments.top.min(MAX_TOP_KEYS),
    };
    let bar = progress_bar(&arguments.logs);
    let report = replay::replay_logs(&settings, &sets, |ReplayProgress { bytes, requests }| {
        bar.set_position(bytes);
        bar.set_message(format!("{requests} requests"));
    });
    bar.finish_and_clear();
    let report = report?;
    if let Some(path) = &arguments.html {
        fs::write(path, report.render_html())
            .map_err(|error| format!("error: {}: {error}\n", path.display()))?;
    }
    if arguments.json {
        return Ok(report.render_json());
    }
    let terminal = Term::stdout();
    let width = if terminal.is_term() {
        usize::from(terminal.size().1)
    } else {
        DEFAULT_WIDTH
    };
    let is_bold =
        terminal.is_term() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    Ok(report.render_text(width, is_bold))
}

/// Nobody reads more.
const MAX_TOP_KEYS: usize = 10_000;

/// Of a report that goes into a file or a pipe.
const DEFAULT_WIDTH: usize = 100;

/// On stderr, if that is a terminal. How much there is isn't known of stdin.
fn progress_bar(logs: &[PathBuf]) -> ProgressBar {
    let size = |path: &PathBuf| Some(fs::metadata(path).ok().filter(fs::Metadata::is_file)?.len());
    let total: Option<u64> = logs.iter().map(size).sum();
    let is_stdin = logs.iter().any(|path| path == Path::new("-"));
    let (bar, template) = match total.filter(|_| !is_stdin) {
        Some(total) => (
            ProgressBar::new(total),
            "{bar:30} {percent:>3} %  {bytes} of {total_bytes}, {msg}, {eta} left",
        ),
        None => (
            ProgressBar::no_length(),
            "{spinner} {bytes}, {msg}, {elapsed}",
        ),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

fn parse_format(text: &str) -> Result<AccessLogFormat, String> {
    AccessLogFormat::ALL
        .into_iter()
        .find(|format| format.name() == text)
        .ok_or_else(|| {
            let names: Vec<&str> = AccessLogFormat::ALL
                .iter()
                .map(|format| format.name())
                .collect();
            format!("expected one of {}", names.join(", "))
        })
}

fn parse_header_mapping(text: &str) -> Result<(HeaderName, String), String> {
    let (name, field) = text
        .split_once('=')
        .ok_or("expected HEADER=FIELD, e.g. x-user-id=remote_user")?;
    let name: HeaderName = name
        .trim()
        .parse()
        .map_err(|error| format!("{name:?}: {error}"))?;
    Ok((name, field.trim().to_owned()))
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').trim().parse().ok();
    percent
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "expected a percentage, 0 to 100".to_owned())
}
