//! `tidegate replay`: applies policies to the requests of a past access log.

use super::flags::sources_without_upstream;
use super::output::{CommandError, has_colours, new_progress_bar};
use crate::config::{self, Config, ConfigSources};
use crate::policy::{JsonPointer, PolicyTable, ReportSource};
use crate::replay::{self, AccessLogFormat, LineTemplate, Settings};
use console::Term;
use http::HeaderName;
use indicatif::ProgressBar;
use std::fs;
use std::path::{Path, PathBuf};

const EXAMPLES_HELP_FOOTER: &str = "\
Replays in log time with the limiter of the proxy and counters in memory; a day of logs takes seconds.
The format is detected from the first lines: combined and common of nginx and Apache (with optional extra fields),
Envoy's text format, AWS Application Load Balancers, and JSON of Envoy, Traefik, Caddy, nginx or tidegate. Files may be
gzip-compressed and may overlap. Unreadable lines are counted and shown. A policy whose key is not in the log is left
out of the result.

Examples:
  tidegate replay access.log
      Shows which keys config.toml would have limited, when, and how much.
  tidegate replay --config new.toml --suggest=1 /var/log/nginx/access.log*
      Also suggests limits that would have affected at most 1 % of the keys.
  tidegate replay --compare new.toml --html report.html access.log.1.gz
      Compares two sets of policies and writes a self-contained HTML report with plots.
  kubectl logs deploy/shop -c tidegate | tidegate replay --format tidegate -
      Reads tidegate's access log, which contains all requests with log.access = \"all\".
  tidegate replay --format '$remote_addr [$time_local] \"$request\" $status $http_x_user_id' access.log
      Reads a format of your own, with the variables of nginx's log_format or the directives of Apache's LogFormat.
  tidegate replay --header-from x-forwarded-for=extra1 --header-from x-user-id=remote_user access.log
      Reads X-Forwarded-For from the first field after the user agent, and X-User-Id from the user name.
  tidegate replay --json access.log | jq '.sets[0].policies[] | {name, rejected, keys_touched}'

Exit codes: 0 a report was made, whatever it says; 1 a file can't be opened or parsed, no line is a request, or
no request has a field of --field-from.";

/// Input and output of a replay.
#[derive(clap::Args, Debug)]
#[command(after_long_help = EXAMPLES_HELP_FOOTER)]
pub(super) struct ReplayArguments {
    /// Access logs, in any order; `-` is stdin.
    #[arg(required = true, value_name = "ACCESS_LOG")]
    logs: Vec<PathBuf>,
    /// Log format: combined, envoy, alb, tidegate, traefik-json, caddy, envoy-json, json, or a
    /// format with nginx variables ($remote_addr …) or Apache directives (%h …).
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<AccessLogFormat>,
    /// Log field that holds a request header, a value of the request body (body:/POINTER), its size
    /// (request_bytes), or a cost that the response reports (response_json:/POINTER,
    /// response_header:NAME). In text formats, extra1, extra2, … are the fields
    /// after the user agent and remote_user is the user name. In JSON, a field path; in a format of
    /// your own, a variable without $. Repeatable.
    #[arg(long, visible_alias = "header-from", value_name = "SOURCE=FIELD", value_parser = parse_field_mapping)]
    field_from: Vec<(String, String)>,
    /// Second configuration to compare with.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Suggest limits with headroom that would have affected at most this percentage of the keys,
    /// with the data behind each suggestion. Needs 100 keys.
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = parse_percent)]
    suggest: Option<f64>,
    /// Number of most limited keys to show.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Place all requests of one second at its start instead of spreading them over the second.
    #[arg(long)]
    no_spread: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    /// Write a self-contained HTML report with plots to this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Replays the logs and returns the report to print.
///
/// # Errors
/// A message for the user if a configuration is invalid or a file can't be read or written.
pub(super) fn run_replay(
    sources: &ConfigSources,
    arguments: &ReplayArguments,
) -> Result<String, CommandError> {
    let mut sets = vec![sources.clone()];
    sets.extend(arguments.compare.as_deref().map(sources_without_upstream));
    let configs: Vec<Config> = sets.iter().map(config::load).collect::<Result<_, _>>()?;
    let sets: Vec<(String, &PolicyTable)> = sets
        .iter()
        .zip(&configs)
        .map(|(sources, config)| (sources.file.to_string(), &*config.policy_table))
        .collect();
    let settings = Settings {
        logs: arguments.logs.clone(),
        format: arguments.format.clone(),
        field_mappings: arguments.field_from.clone(),
        spread_within_second: !arguments.no_spread,
        suggest_percent: arguments.suggest,
        top_keys: arguments.top.min(MAX_TOP_KEYS),
    };
    let bar = new_log_progress_bar(&arguments.logs);
    let report = replay::replay_logs(&settings, &sets, |bytes, requests| {
        bar.set_position(bytes);
        bar.set_message(format!("{requests} requests"));
    });
    bar.finish_and_clear();
    let report = report?;
    if let Some(path) = &arguments.html {
        fs::write(path, report.render_html())
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if arguments.json {
        return Ok(report.render_json());
    }
    let terminal = Term::stdout();
    let is_terminal = terminal.is_term();
    let width = match is_terminal {
        true => terminal.size().1.into(),
        false => DEFAULT_WIDTH,
    };
    Ok(report.render_text(width, is_terminal && has_colours()))
}

/// Upper bound of `--top`, which bounds the size of the report.
const MAX_TOP_KEYS: usize = 10_000;

/// Report width in columns if stdout is not a terminal.
const DEFAULT_WIDTH: usize = 100;

/// Creates a progress bar for the bytes of logs. The total is unknown for stdin and other
/// non-regular files.
pub(super) fn new_log_progress_bar(logs: &[PathBuf]) -> ProgressBar {
    let size = |path: &PathBuf| Some(fs::metadata(path).ok().filter(fs::Metadata::is_file)?.len());
    let is_stdin = logs.iter().any(|path| path == Path::new("-"));
    let total: Option<u64> = logs.iter().map(size).sum();
    let total = total.filter(|_| !is_stdin);
    let template = match total {
        Some(_) => "{bar:30} {percent:>3} %  {bytes} of {total_bytes}, {msg}, {eta} left",
        None => "{spinner} {bytes}, {msg}, {elapsed}",
    };
    new_progress_bar(total, 10, template)
}

fn parse_format(text: &str) -> Result<AccessLogFormat, String> {
    if text.contains(['$', '%']) {
        return LineTemplate::parse(text).map(|template| AccessLogFormat::Custom(template.into()));
    }
    let mut formats = AccessLogFormat::ALL.into_iter();
    let format = formats.find(|format| format.into_str() == text);
    format.ok_or_else(|| {
        let names = AccessLogFormat::names();
        format!("expected one of {names}, or a format with nginx variables or Apache directives")
    })
}

fn parse_field_mapping(text: &str) -> Result<(String, String), String> {
    let (source, field) = text.split_once('=').ok_or(
        "expected HEADER=FIELD or SOURCE=FIELD, e.g. x-user-id=remote_user or body:/model=model",
    )?;
    let source = source.trim();
    let name = match source.split_once(':') {
        None => {
            let name: Result<HeaderName, _> = source.parse();
            name.map_err(|error| format!("{source:?}: {error}"))?
                .to_string()
        }
        Some(("body", pointer)) => JsonPointer::parse(pointer).map(|_| source.to_owned())?,
        Some(_) => ReportSource::parse(source)?.label(),
    };
    Ok((name, field.trim().to_owned()))
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').trim().parse().ok();
    percent
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "expected a percentage, 0 to 100".to_owned())
}
