//! `tidegate why`: reads the proxy's own log and reports when and why a client was limited.

mod log_record;
mod refusal_history;
mod report_json;
mod report_text;
mod searched_policy;

use super::output::{CommandError, block_on};
use super::overrides::store_client::StoreClient;
use super::replay::new_log_progress_bar;
use crate::clock::{self, Clock};
use crate::config::{self, Config, ConfigSources, parse_duration};
use crate::replay::{AccessLogReader, RawLogLine, parse_rfc3339};
use crate::store::StoredOverride;
use crate::telemetry::{AccessLogFilter, LogSettings};
use crate::text::count_noun;
use log_record::{LogEvent, LogRecord, LoggedRequest, UNENFORCED_DECISIONS, parse_log_record};
use refusal_history::{MAX_SERIES, OTHER_DECISION, RefusalHistory, SeriesName};
use searched_policy::{SearchedPolicy, SkippedPolicy, select_policies};
use serde::Serialize;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Lines between two updates of the progress bar.
const LINES_PER_PROGRESS: u64 = 4096;

/// Maximum length of the quoted beginning of an unreadable line.
const MAX_QUOTED_CHARS: usize = 80;

pub(super) const EXAMPLES_HELP_FOOTER: &str = "\
LOG is tidegate's log as JSON, also gzip-compressed, or as kubectl and container runtimes store it.
Values that each line contains (client address, method, host, path segments) may be left out. Fewer
values than a key has match it at any position, in their order.

Examples:
  kubectl logs --since=24h deploy/shop -c tidegate | tidegate why --key acme
  tidegate why --key acme --policy api --since 24h tidegate.log.1.gz tidegate.log
  tidegate why --key 2001:db8::7 --plot tidegate.log
  tidegate why --key acme --json tidegate.log | jq .episodes

Exit codes: 0 a report was made, whatever it says; 1 no policy fits the key, a log cannot be read, or
it contains no line of tidegate.";

/// What to search for, and where.
#[derive(clap::Args, Debug)]
pub(super) struct WhyArguments {
    /// Logs in any order; `-` is stdin [default: stdin].
    #[arg(value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// Value of the client's key, e.g. a user id or an address. Repeat it for a key with several
    /// values, in the key's order; "" for an absent value.
    #[arg(long = "key", value_name = "VALUE", required = true)]
    key: Vec<String>,
    /// Only search for refusals by this policy.
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Skip older lines: a duration before now, or a time as in the log.
    #[arg(long, value_name = "24h", value_parser = parse_since)]
    since: Option<u64>,
    /// Print a plot by minute.
    #[arg(long, conflicts_with = "json")]
    plot: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

/// Everything that the report says.
struct WhyReport<'t> {
    values: &'t [String],
    searched: Vec<SearchedPolicy<'t>>,
    skipped: Vec<SkippedPolicy<'t>>,
    history: RefusalHistory,
    /// Keys of which the given values are only a part.
    partial_keys: BTreeMap<(Box<str>, u128), PartialKey>,
    /// Requests with the key that were not refused.
    admitted: u64,
    /// Refused requests that no line attributes to a key, by policy and decision.
    without_key: BTreeMap<(String, String), u64>,
    /// Refused requests that the access log left out, by policy.
    omitted: BTreeMap<String, u64>,
    /// Lines lost because stderr was read too slowly.
    dropped: u64,
    lines: LineCounts,
    log: LogSettings,
}

/// A key of which the given values are a part.
#[derive(Debug, Default)]
struct PartialKey {
    /// The positions of the given values.
    positions: Vec<usize>,
    refused: u64,
}

/// The lines that were read.
#[derive(Debug, Default, Serialize)]
struct LineCounts {
    #[serde(rename = "read")]
    total: u64,
    /// Lines of tidegate.
    #[serde(skip)]
    own: u64,
    requests: u64,
    /// Lines before `--since`.
    #[serde(rename = "before_since")]
    too_old: u64,
    unreadable: u64,
    first_unreadable: Option<UnreadableLine>,
    /// Errors that ended a log early.
    read_errors: Vec<String>,
    /// Times of the first and the last line that counts.
    #[serde(skip)]
    range_us: Option<(u64, u64)>,
}

/// Where an unreadable line is, and its beginning.
#[derive(Debug, Serialize)]
struct UnreadableLine {
    log: String,
    line: u64,
    text: String,
}

/// Reads the logs and returns the report to print.
///
/// # Errors
/// A message for the user if the configuration is invalid, no policy fits the key, or a log cannot
/// be read or is not tidegate's.
pub(super) fn run(
    sources: &ConfigSources,
    arguments: &WhyArguments,
) -> Result<String, CommandError> {
    let config = config::load(sources)?;
    let table = &config.policy_table;
    let (searched, skipped) = select_policies(table, arguments.policy.as_deref(), &arguments.key)?;
    let mut report = WhyReport {
        values: &arguments.key,
        searched,
        skipped,
        history: RefusalHistory::new(),
        partial_keys: BTreeMap::new(),
        admitted: 0,
        without_key: BTreeMap::new(),
        omitted: BTreeMap::new(),
        dropped: 0,
        lines: LineCounts::default(),
        log: config.log.clone(),
    };
    let since_us = arguments.since.unwrap_or(0);
    read_logs(&arguments.logs, since_us, &mut report)?;
    if report.lines.own == 0 {
        return Err(CommandError::Message(report.lines.describe_foreign_input()));
    }
    read_overrides(&config, &mut report.searched)?;
    Ok(if arguments.json {
        report_json::render_json(&report)
    } else if arguments.plot {
        report_text::render_plot(&report)
    } else {
        report_text::render_table(&report)
    })
}

/// Reads the present overrides of the searched keys from the store.
fn read_overrides(
    config: &Config,
    searched: &mut [SearchedPolicy<'_>],
) -> Result<(), CommandError> {
    let is_dynamic = |one: &&mut SearchedPolicy<'_>| one.quota.is_dynamic && one.resolved.is_some();
    let mut dynamic = searched.iter_mut().filter(is_dynamic).peekable();
    if dynamic.peek().is_none() {
        return Ok(());
    }
    block_on(async {
        let store = StoreClient::open(config).await;
        let now_us = Clock::system().now_us();
        for policy in dynamic {
            if let Some(key) = policy.key() {
                let stored = match &store {
                    Ok(store) => store.find(key).await.map_err(|error| error.cause()),
                    Err(error) => Err(error.cause()),
                };
                let is_current = |stored: &StoredOverride| !stored.is_expired(now_us);
                policy.stored = stored.map(|stored| stored.filter(is_current));
            }
        }
    })
}

fn read_logs(logs: &[PathBuf], since_us: u64, report: &mut WhyReport<'_>) -> Result<(), String> {
    let stdin = [PathBuf::from("-")];
    let logs = if logs.is_empty() { &stdin } else { logs };
    if logs.iter().any(|path| path == Path::new("-")) && io::stdin().is_terminal() {
        return Err(
            "stdin is a terminal; expected a LOG, or the log on stdin: kubectl logs … | tidegate why …"
                .to_owned(),
        );
    }
    let bar = new_log_progress_bar(logs);
    let bytes_read = Rc::new(Cell::new(0));
    for path in logs {
        let mut log = AccessLogReader::open(path, Rc::clone(&bytes_read))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let mut number = 0;
        loop {
            let record = match log.next_line() {
                RawLogLine::End => break,
                RawLogLine::Line(line) => parse_log_record(line).ok_or_else(|| quote_line(line)),
                RawLogLine::TooLong(start) => Err(quote_line(start)),
            };
            number += 1;
            match record {
                Ok(record) => report.add_record(&record, since_us),
                Err(quoted) => report.lines.add_unreadable(&log.name, number, quoted),
            }
            if number % LINES_PER_PROGRESS == 0 {
                bar.set_position(bytes_read.get());
            }
        }
        report.lines.total += number;
        let error = log.read_error.take();
        let message = error.map(|error| format!("{}: {error}", log.name));
        report.lines.read_errors.extend(message);
    }
    bar.finish_and_clear();
    Ok(())
}

impl WhyReport<'_> {
    fn add_record(&mut self, record: &LogRecord, since_us: u64) {
        let at_us = record.at_us;
        self.lines.own += 1;
        if at_us < since_us {
            self.lines.too_old += 1;
            return;
        }
        self.lines.range_us = Some(match self.lines.range_us {
            Some((first_us, last_us)) => (first_us.min(at_us), last_us.max(at_us)),
            None => (at_us, at_us),
        });
        match &record.event {
            LogEvent::Request(request) => self.add_request(at_us, request),
            LogEvent::RequestsOmitted { policy, lines } => {
                if self.find_searched(policy).is_some() {
                    let omitted = self.omitted.entry(policy.clone()).or_default();
                    *omitted = omitted.saturating_add(*lines);
                }
            }
            LogEvent::LinesDropped { lines } => {
                self.dropped = self.dropped.saturating_add(*lines);
            }
            LogEvent::Other => {}
        }
    }

    fn add_request(&mut self, at_us: u64, request: &LoggedRequest) {
        self.lines.requests += 1;
        let refusing = request.policy.as_deref();
        if let Some(name) = refusing {
            let Some(policy) = self.find_searched(name) else {
                return;
            };
            if policy.has_key_of(request) {
                let positions = policy.matched_positions(request);
                self.add_partial_key(name, positions, request);
                self.add_refusal(at_us, name, &request.decision, request);
            } else if policy.is_undecided(request) {
                self.add_without_key(name, &request.decision);
            }
            return;
        }
        let is_of_key = |policy: &SearchedPolicy<'_>| policy.has_key_of(request);
        if request.unenforced_rejections.is_empty() && self.searched.iter().any(is_of_key) {
            self.admitted += 1;
        }
        for (name, decision) in &request.unenforced_rejections {
            let Some(policy) = self.find_searched(name) else {
                continue;
            };
            match policy.is_shadow_refusal_of_key(request, &self.searched) {
                Some(true) => self.add_refusal(at_us, name, decision, request),
                Some(false) => {}
                None => self.add_without_key(name, decision),
            }
        }
    }

    fn add_partial_key(&mut self, policy: &str, at: Option<Vec<usize>>, request: &LoggedRequest) {
        let (Some(positions), Some(key_id)) = (at, request.key_id) else {
            return;
        };
        let name = (policy.into(), key_id);
        if self.partial_keys.len() < MAX_SERIES || self.partial_keys.contains_key(&name) {
            let found = self.partial_keys.entry(name).or_default();
            found.positions = positions;
            found.refused += 1;
        }
    }

    fn add_without_key(&mut self, policy: &str, decision: &str) {
        let mut name = (policy.to_owned(), decision.to_owned());
        if self.without_key.len() >= MAX_SERIES && !self.without_key.contains_key(&name) {
            name.1 = OTHER_DECISION.to_owned();
        }
        *self.without_key.entry(name).or_default() += 1;
    }

    fn add_refusal(&mut self, at_us: u64, policy: &str, decision: &str, request: &LoggedRequest) {
        // The limit of a line may be one that is enforced, so that of another policy is unknown.
        let is_enforced = !UNENFORCED_DECISIONS.contains(&decision);
        let series = SeriesName {
            policy: policy.into(),
            limit: request.limit.clone().filter(|_| is_enforced),
            decision: decision.to_owned(),
            in_effect: request.in_effect.filter(|_| is_enforced),
        };
        self.history.add(series, at_us, request);
    }

    fn find_searched(&self, name: &str) -> Option<&SearchedPolicy<'_>> {
        self.searched
            .iter()
            .find(|searched| *searched.policy.name == *name)
    }

    /// What the log leaves out, as sentences.
    fn describe_gaps(&self) -> Vec<String> {
        let mut gaps = Vec::new();
        for (policy, lines) in &self.omitted {
            gaps.push(format!(
                "{} refused by {policy}, not logged (too many per second), some perhaps with this key",
                count_noun(*lines, "request")
            ));
        }
        for ((policy, decision), count) in &self.without_key {
            gaps.push(format!(
                "{} refused by {policy} without a key in the log (decision {decision}), some perhaps of this client",
                count_noun(*count, "request")
            ));
        }
        if self.dropped > 0 {
            gaps.push(format!(
                "{} lost, because stderr was read too slowly",
                count_noun(self.dropped, "line")
            ));
        }
        if self.log.access == AccessLogFilter::Off {
            gaps.push(
                "log.access is \"off\" in the configuration: no request is logged".to_owned(),
            );
        }
        if self.log.access_sample < 1.0 {
            gaps.push(format!(
                "log.access_sample is {} in the configuration: the other requests are not logged",
                self.log.access_sample
            ));
        }
        gaps
    }
}

impl LineCounts {
    fn add_unreadable(&mut self, log: &str, line: u64, text: String) {
        self.unreadable += 1;
        let log = log.to_owned();
        self.first_unreadable
            .get_or_insert(UnreadableLine { log, line, text });
    }

    /// The error about input without a line of tidegate.
    fn describe_foreign_input(&self) -> String {
        match (&self.first_unreadable, self.read_errors.first()) {
            (Some(UnreadableLine { log, line, text }), _) => format!(
                "{log}:{line}: {text} is not a line of tidegate's JSON log; expected log.format = \"json\", and none of {} is one",
                count_noun(self.total, "line")
            ),
            (None, Some(error)) => error.clone(),
            (None, None) => "the log is empty; expected lines of tidegate's JSON log".to_owned(),
        }
    }
}

fn quote_line(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line.get(..4 * MAX_QUOTED_CHARS).unwrap_or(line));
    let quoted: String = text.chars().take(MAX_QUOTED_CHARS).collect();
    format!("{quoted:?}")
}

/// Parses a duration before now, such as `24h`, or a time as in the log. Returns microseconds.
fn parse_since(text: &str) -> Result<u64, String> {
    if let Some((at_us, _)) = parse_rfc3339(text.as_bytes()) {
        return Ok(at_us);
    }
    let before = parse_duration(text)
        .ok_or("expected a duration such as 24h, or a time such as 2026-11-22T09:00:00Z")?;
    let start_s = clock::unix_time_s().saturating_sub(before.as_secs());
    Ok(start_s.saturating_mul(1_000_000))
}
