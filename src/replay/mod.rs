//! `tidegate replay`: what policies would have done to the requests of a past access log.
//!
//! [`lines`] reads a line as a request, [`order`] puts requests in the order of their times, [`run`] has them judged by the
//! enforcer's own walk and the limiter's own rules, with counters in memory and a clock that the log moves. [`report`] tells
//! what came of it.

mod log_merge;
mod log_reader;
mod missing_fields;
mod parsers;
mod report;
mod simulator;
mod statistics;
mod suggestions;

pub use parsers::AccessLogFormat;
pub use report::ReplayReport;

use crate::policy::PolicyTable;
use http::HeaderName;
use log_merge::LogSource;
use log_reader::AccessLogReader;
use parsers::{LineParser, RequiredHeaders};
use report::{LogSummary, PolicySetReport};
use simulator::PolicySimulator;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

/// What is to be replayed, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `-` is stdin.
    pub logs: Vec<PathBuf>,
    /// `None`: found out for each log.
    pub format: Option<AccessLogFormat>,
    /// Headers, and the fields of the log that hold them.
    pub header_fields: Vec<(HeaderName, String)>,
    /// Whether requests of one second are spread over it.
    pub spread_within_second: bool,
    /// The share of keys, in percent, that a suggested limit may touch.
    pub suggest_percent: Option<f64>,
    /// How many of the most limited keys are told.
    pub top_keys: usize,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct ReplayProgress {
    /// Bytes read of all logs, as they are on the disk.
    pub bytes: u64,
    pub requests: u64,
}

/// Replays logs by one set of policies, or by several side by side, each with its name. `on_progress` hears every few
/// thousand requests how far it is.
///
/// # Errors
/// A text for people, if a log can't be opened, or is none.
pub fn replay_logs(
    settings: &Settings,
    sets: &[(String, &PolicyTable)],
    mut on_progress: impl FnMut(ReplayProgress),
) -> Result<ReplayReport, String> {
    let names = sets
        .iter()
        .flat_map(|(_, table)| table.referenced_headers());
    let required_headers = RequiredHeaders::new(names, &settings.header_fields);
    let bytes_read = Rc::new(Cell::new(0));
    let mut formats = Vec::new();
    let mut sources = Vec::new();
    for path in &settings.logs {
        let (source, format) = open_log(path, settings, &required_headers, Rc::clone(&bytes_read))?;
        formats.push(format);
        sources.push(source);
    }
    let with_suggestions = settings.suggest_percent.is_some();
    let mut simulators: Vec<PolicySimulator<'_>> = sets
        .iter()
        .map(|(_, table)| PolicySimulator::new(table, &required_headers, with_suggestions))
        .collect();
    let mut refused_by_one_set = [0u64; 2];
    log_merge::merge_by_time(
        &mut sources,
        |log_index, request| {
            let log_has_query = formats
                .get(log_index)
                .is_some_and(|format| format.records_query());
            let mut verdicts = simulators
                .iter_mut()
                .map(|judge| judge.evaluate_request(request, log_has_query));
            match (verdicts.next(), verdicts.next()) {
                (Some(true), Some(false)) => refused_by_one_set[0] += 1,
                (Some(false), Some(true)) => refused_by_one_set[1] += 1,
                _ => {}
            }
        },
        |requests| {
            on_progress(ReplayProgress {
                bytes: bytes_read.get(),
                requests,
            })
        },
    );
    let logs = sources
        .into_iter()
        .zip(formats)
        .map(|(source, format)| LogSummary::from_source(source, format))
        .collect();
    let sets = sets.iter().zip(simulators).map(|((name, _), judge)| {
        PolicySetReport::from_simulator(name.clone(), judge, &required_headers, settings)
    });
    Ok(ReplayReport::new(
        logs,
        sets.collect(),
        refused_by_one_set,
        settings,
    ))
}

fn open_log(
    path: &std::path::Path,
    settings: &Settings,
    required_headers: &RequiredHeaders,
    bytes_read: Rc<Cell<u64>>,
) -> Result<(LogSource, AccessLogFormat), String> {
    let path_text = path.display().to_string();
    let escaped_path = path_text.escape_debug();
    let mut input = AccessLogReader::open(path, bytes_read)
        .map_err(|error| format!("error: {escaped_path}: {error}\n"))?;
    let format = settings.format.or_else(|| input.detect_format()).ok_or_else(|| {
        let names: Vec<&str> = AccessLogFormat::ALL.iter().map(|format| format.name()).collect();
        let fault = input.read_error.as_ref().map_or_else(String::new, |fault| format!(" ({fault})"));
        format!(
            "error: {escaped_path}: none of the first lines is a request in a format that is known{fault}; there are {} \
             (--format)\n",
            names.join(", ")
        )
    })?;
    let parser = LineParser::new(format, required_headers);
    Ok((
        LogSource::new(
            input,
            parser,
            settings.spread_within_second,
            settings.logs.len(),
        ),
        format,
    ))
}

#[cfg(test)]
mod tests;
