//! `tidegate replay`: what policies would have done to the requests of a past access log.
//!
//! [`lines`] reads a line as a request, [`order`] puts requests in the order of their times, [`run`] has them judged by the
//! enforcer's own walk and the limiter's own rules, with counters in memory and a clock that the log moves. [`report`] tells
//! what came of it.

mod input;
mod lacks;
mod lines;
mod order;
mod report;
mod run;
mod suggest;
mod tally;

pub use lines::Format;
pub use report::Report;

use crate::policy::PolicyTable;
use http::HeaderName;
use input::Input;
use lines::{Parser, Wanted};
use order::Source;
use report::{Log, Set};
use run::Judge;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

/// What is to be replayed, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `-` is stdin.
    pub logs: Vec<PathBuf>,
    /// `None`: found out for each log.
    pub format: Option<Format>,
    /// Headers, and the fields of the log that hold them.
    pub told: Vec<(HeaderName, String)>,
    /// Whether requests of one second are spread over it.
    pub spreads: bool,
    /// The share of keys, in percent, that a suggested limit may touch.
    pub suggest: Option<f64>,
    /// How many of the most limited keys are told.
    pub top: usize,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes read of all logs, as they are on the disk.
    pub bytes: u64,
    pub requests: u64,
}

/// Replays logs by one set of policies, or by several side by side, each with its name. `on_progress` hears every few
/// thousand requests how far it is.
///
/// # Errors
/// A text for people, if a log can't be opened, or is none.
pub fn run(
    settings: &Settings,
    sets: &[(String, &PolicyTable)],
    mut on_progress: impl FnMut(Progress),
) -> Result<Report, String> {
    let names = sets.iter().flat_map(|(_, table)| table.headers_read());
    let wanted = Wanted::new(names, &settings.told);
    let bytes = Rc::new(Cell::new(0));
    let mut formats = Vec::new();
    let mut sources = Vec::new();
    for path in &settings.logs {
        let (source, format) = open(path, settings, &wanted, Rc::clone(&bytes))?;
        formats.push(format);
        sources.push(source);
    }
    let suggests = settings.suggest.is_some();
    let mut judges: Vec<Judge<'_>> = sets
        .iter()
        .map(|(_, table)| Judge::new(table, &wanted, suggests))
        .collect();
    let mut parted = [0u64; 2];
    order::merge(
        &mut sources,
        |at, request| {
            let tells_query = formats.get(at).is_some_and(|format| format.tells_query());
            let mut forwards = judges
                .iter_mut()
                .map(|judge| judge.judge(request, tells_query));
            match (forwards.next(), forwards.next()) {
                (Some(true), Some(false)) => parted[0] += 1,
                (Some(false), Some(true)) => parted[1] += 1,
                _ => {}
            }
        },
        |requests| {
            on_progress(Progress {
                bytes: bytes.get(),
                requests,
            })
        },
    );
    let logs = sources
        .into_iter()
        .zip(formats)
        .map(|(source, format)| Log::of(source, format))
        .collect();
    let sets = sets
        .iter()
        .zip(judges)
        .map(|((name, _), judge)| Set::of(name.clone(), judge, &wanted, settings));
    Ok(Report::new(logs, sets.collect(), parted, settings))
}

fn open(
    path: &std::path::Path,
    settings: &Settings,
    wanted: &Wanted,
    bytes: Rc<Cell<u64>>,
) -> Result<(Source, Format), String> {
    let shown = path.display().to_string();
    let shown = shown.escape_debug();
    let mut input =
        Input::open(path, bytes).map_err(|error| format!("error: {shown}: {error}\n"))?;
    let format = settings.format.or_else(|| input.detect()).ok_or_else(|| {
        let names: Vec<&str> = Format::ALL.iter().map(|format| format.name()).collect();
        let fault = input.fault.as_ref().map_or_else(String::new, |fault| format!(" ({fault})"));
        format!(
            "error: {shown}: none of the first lines is a request in a format that is known{fault}; there are {} \
             (--format)\n",
            names.join(", ")
        )
    })?;
    let parser = Parser::new(format, wanted);
    Ok((
        Source::new(input, parser, settings.spreads, settings.logs.len()),
        format,
    ))
}

#[cfg(test)]
mod tests;
