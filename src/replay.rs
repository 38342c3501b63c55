//! `tidegate replay`: simulates policies over the requests of past access logs.
//!
//! [`parsers`] reads a line as a request, and [`log_merge`] sorts the requests of all logs by time.
//! [`simulator`] applies the enforcer's policy order and the limiter's algorithms, with counters in
//! memory and a clock set from the log. [`report`] renders the results.

mod log_merge;
mod log_reader;
mod missing_fields;
mod parsers;
mod report;
mod simulator;
mod statistics;
mod suggestions;

pub(crate) use log_reader::{AccessLogReader, RawLogLine};
pub(crate) use parsers::parse_rfc3339;
pub use parsers::{AccessLogFormat, LineTemplate};
pub use report::ReplayReport;

use crate::policy::PolicyTable;
use log_merge::{LogReport, LogSource};
use missing_fields::FieldCoverage;
use parsers::RequiredFields;
use serde::Serializer;
use simulator::PolicySimulator;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

/// Inputs and options of a replay.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Paths of the access logs; `-` is stdin.
    pub logs: Vec<PathBuf>,
    /// Log format; `None` detects the format of each log.
    pub format: Option<AccessLogFormat>,
    /// Headers by name, and sources such as `body:/model`, each with the log field that holds its
    /// value.
    pub field_mappings: Vec<(String, String)>,
    /// Spreads requests whose times are whole seconds evenly over their second.
    pub spread_within_second: bool,
    /// Maximum share of keys, in percent, that a suggested limit may affect. `None` disables
    /// suggestions.
    pub suggest_percent: Option<f64>,
    /// Maximum number of keys in the list of most limited keys.
    pub top_keys: usize,
}

/// Replays logs through one or more named policy sets. Calls `on_progress` every few thousand
/// requests, with the bytes read from all logs, before decompression, and the number of requests.
///
/// # Errors
/// Returns a message for the terminal if a log cannot be opened or its format is unknown, if the
/// logs have no request, or if no request has a mapped field.
pub fn replay_logs(
    settings: &Settings,
    sets: &[(String, &PolicyTable)],
    mut on_progress: impl FnMut(u64, u64),
) -> Result<ReplayReport, String> {
    let names = sets
        .iter()
        .flat_map(|(_, table)| table.referenced_headers());
    let required_fields = RequiredFields::new(names, &settings.field_mappings);
    let coverage = find_fields_of_keys(settings, sets, required_fields)?;
    let bytes_read = Rc::new(Cell::new(0));
    let paths = settings.logs.iter();
    let required_fields = &coverage.required_fields;
    let sources =
        paths.map(|path| open_log(path, settings, required_fields, Rc::clone(&bytes_read)));
    let mut sources: Vec<LogSource> = sources.collect::<Result<_, _>>()?;
    let with_suggestions = settings.suggest_percent.is_some();
    let mut simulators: Vec<PolicySimulator<'_>> = sets
        .iter()
        .map(|(name, table)| PolicySimulator::new(name, table, &coverage, with_suggestions))
        .collect();
    let (mut refused_by_first_only, mut refused_by_second_only) = (0, 0);
    log_merge::merge_by_time(
        &mut sources,
        |request| {
            let mut verdicts = simulators
                .iter_mut()
                .map(|simulator| simulator.evaluate_request(request));
            match (verdicts.next(), verdicts.next()) {
                (Some(true), Some(false)) => refused_by_second_only += 1,
                (Some(false), Some(true)) => refused_by_first_only += 1,
                _ => {}
            }
        },
        |requests| on_progress(bytes_read.get(), requests),
    );
    check_requests_and_mapped_fields(settings, &sources, &simulators)?;
    let simulators = simulators.into_iter();
    Ok(ReplayReport::new(
        sources.into_iter().map(LogSource::into_report).collect(),
        simulators
            .map(|simulator| simulator.into_report(settings))
            .collect(),
        [refused_by_first_only, refused_by_second_only],
        settings.suggest_percent,
    ))
}

/// Reads the logs up to the first requests that have the fields of all keys, so that a policy is
/// judged from the first request on. A log that cannot be read twice, such as stdin, is not read.
fn find_fields_of_keys(
    settings: &Settings,
    sets: &[(String, &PolicyTable)],
    required_fields: RequiredFields,
) -> Result<FieldCoverage, String> {
    let mut coverage = FieldCoverage::new(required_fields);
    let mut open: Vec<(&PolicyTable, usize)> = Vec::new();
    for (_, table) in sets {
        let check = coverage.check(table);
        open.extend(check.policies_without_key().map(|policy| (*table, policy)));
    }
    let is_file = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|found| found.is_file());
    for path in settings.logs.iter().filter(is_file) {
        if open.is_empty() {
            break;
        }
        let mut log = open_log(path, settings, &coverage.required_fields, Rc::default())?;
        log.read_requests_until(|request| {
            coverage.record_request(request, false);
            open.retain(|(table, policy)| coverage.check(table).lacks_key(*policy));
            open.is_empty()
        });
    }
    Ok(coverage)
}

/// Fails if a report would only look like a result.
fn check_requests_and_mapped_fields(
    settings: &Settings,
    sources: &[LogSource],
    simulators: &[PolicySimulator<'_>],
) -> Result<(), String> {
    if sources.iter().all(|source| source.report.requests == 0) {
        let errors = sources.iter().map(|source| {
            let LogReport { name, lines, broken, other, broken_examples, .. } = &source.report;
            let example = broken_examples.first().map_or_else(String::new, |(line, text)| {
                format!(", e.g. line {line}: {text}")
            });
            format!(
                "error: {}: no request in {lines} lines: {broken} are not in the format{example}; {other} are other records\n",
                name.escape_debug()
            )
        });
        return Err(errors.collect());
    }
    let Some(coverage) = simulators.first().map(|one| &one.report.field_coverage) else {
        return Ok(());
    };
    let errors = settings.field_mappings.iter().filter_map(|(name, field)| {
        let place = coverage.required_fields.names.iter().position(|known| known == name)?;
        let count = coverage.with_field.get(place)?;
        (*count == 0).then(|| {
            format!(
                "error: {}={}: no request in the log has this field; text formats have remote_user, \
                 referer, user_agent and extra1, extra2, … after them, JSON the fields of its lines, and custom formats \
                 their variables\n",
                missing_fields::mapping_option(name),
                field.escape_debug()
            )
        })
    });
    let errors: String = errors.collect();
    match errors.as_str() {
        "" => Ok(()),
        _ => Err(errors),
    }
}

fn open_log(
    path: &std::path::Path,
    settings: &Settings,
    required_fields: &RequiredFields,
    bytes_read: Rc<Cell<u64>>,
) -> Result<LogSource, String> {
    let path_text = path.display().to_string();
    let escaped_path = path_text.escape_debug();
    let mut input = AccessLogReader::open(path, bytes_read)
        .map_err(|error| format!("error: {escaped_path}: {error}\n"))?;
    let format = settings.format.clone().or_else(|| input.detect_format()).ok_or_else(|| {
        let names = AccessLogFormat::names();
        let detail = input.read_error.as_ref().map_or_else(String::new, |detail| format!(" ({detail})"));
        format!(
            "error: {escaped_path}: none of the first lines is a request in a known format{detail}; choose one with --format: {names}\n"
        )
    })?;
    Ok(LogSource::new(input, &format, required_fields, settings))
}

/// A time of the JSON report: seconds since the Unix epoch.
fn serialize_seconds<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    // Microseconds of this century are exact in a double.
    serializer.serialize_f64(*us as f64 / 1e6)
}

fn serialize_seconds_if_any<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    match us {
        0 => serializer.serialize_none(),
        us => serialize_seconds(us, serializer),
    }
}

#[cfg(test)]
mod tests;
