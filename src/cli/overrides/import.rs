//! `tidegate overrides import`: sets many overrides from a CSV or JSON Lines file.
//!
//! Each record is one whole override: it is set, or it is reported with its lines and nothing of it
//! is set. A run that a store failure stops prints the line to continue from; setting an override
//! twice changes nothing.

use super::csv_records::{CsvRecord, LineRange, RecordReader};
use super::store_client::StoreClient;
use crate::app::key_status::find_limiting_policy;
use crate::app::overrides::{
    FIELD_NAMES, OverrideInput, amounts_by_limit, override_from_json, resolve_override,
};
use crate::cli::output::{CommandError, CommandOutput, new_progress_bar};
use crate::clock::Clock;
use crate::config::Config;
use crate::limiter::{KeyOverride, MAX_UNITS};
use crate::policy::PolicyTable;
use crate::store::{StoredOverride, parse_override_rule};
use crate::text::{count_noun, escape_unprintable};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Overrides that are set at once.
const CHUNK_LEN: usize = 1024;

#[derive(clap::Args, Debug)]
pub(crate) struct ImportArguments {
    /// A file with one override per line: JSON Lines if it ends in .jsonl, else CSV with a header.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Start at this line, after a run that stopped there.
    #[arg(long, value_name = "N", default_value_t = 1)]
    from_line: u64,
    /// Only check the file.
    #[arg(long)]
    dry_run: bool,
}

/// An override as read from a record, or why it can't be.
type ParsedRecord = (LineRange, Result<OverrideInput, String>);

/// Sets the overrides of a file, and returns the text to print. Each wrong record is an error on
/// stderr, and the command fails after all records.
///
/// # Errors
/// A message for the user if the file can't be read, a record is wrong, or the store fails.
#[allow(clippy::print_stderr, reason = "errors appear while the import runs")]
pub(super) async fn import_overrides(
    store: &StoreClient,
    config: &Config,
    arguments: &ImportArguments,
) -> Result<CommandOutput, CommandError> {
    let now_us = Clock::system().now_us();
    let records = open_records(&arguments.file, now_us)?;
    let progress = new_progress_bar(None, 4, "{spinner} {human_pos} set, {per_sec}, {elapsed}");
    let (mut set_count, mut error_count) = (0, 0_u64);
    let mut chunk: Vec<(u64, StoredOverride)> = Vec::with_capacity(CHUNK_LEN);
    for record in records {
        let (lines, input) = record?;
        if lines.first < arguments.from_line {
            continue;
        }
        let resolved = input.and_then(|mut input| {
            drop_unused_columns(&config.policy_table, &mut input);
            resolve_override(&config.policy_table, &input, now_us)
                .map_err(|error| error.to_string())
        });
        match resolved {
            Ok(stored) => chunk.push((lines.first, stored)),
            Err(why) => {
                error_count += 1;
                progress.suspend(|| eprintln!("{lines}: {}", escape_unprintable(&why)));
            }
        }
        if chunk.len() == CHUNK_LEN {
            set_count += set_chunk(store, arguments, &mut chunk, &progress).await?;
            progress.set_position(set_count);
        }
    }
    set_count += set_chunk(store, arguments, &mut chunk, &progress).await?;
    progress.finish_and_clear();
    if error_count > 0 {
        let wrong = match error_count {
            1 => "1 line is wrong and was not set".to_owned(),
            many => format!("{many} lines are wrong and were not set"),
        };
        let set = match set_count {
            1 => "1 override was set".to_owned(),
            many => format!("{many} overrides were set"),
        };
        return Err(CommandError::Message(format!("{wrong}; {set}")));
    }
    let text = format!("{} set\n", count_noun(set_count, "override"));
    Ok(CommandOutput::new(&json!({ "set": set_count }), text))
}

/// Drops empty values beyond the key of the policy: their columns belong to other policies.
fn drop_unused_columns(table: &PolicyTable, input: &mut OverrideInput) {
    if let Ok((_, quota)) = find_limiting_policy(table, &input.policy) {
        let width = quota.key.value_count();
        while input.values.len() > width && input.values.last().is_some_and(String::is_empty) {
            input.values.pop();
        }
    }
}

async fn set_chunk(
    store: &StoreClient,
    arguments: &ImportArguments,
    chunk: &mut Vec<(u64, StoredOverride)>,
    progress: &ProgressBar,
) -> Result<u64, CommandError> {
    let (numbers, overrides): (Vec<u64>, Vec<StoredOverride>) = chunk.drain(..).unzip();
    if !arguments.dry_run {
        let results = store.set_many(&overrides, progress).await;
        for (number, result) in numbers.iter().zip(results) {
            result.map_err(|error| {
                let (file, why) = (arguments.file.display(), error.cause());
                format!(
                    "{file}: stopped at line {number}: {why}; continue with --from-line {number}"
                )
            })?;
        }
    }
    Ok(overrides.len() as u64)
}

/// JSON Lines if the name ends in `.jsonl`, else CSV.
fn open_records(
    path: &Path,
    now_us: u64,
) -> Result<impl Iterator<Item = Result<ParsedRecord, String>>, String> {
    let describe = |error: io::Error| format!("{}: {error}", path.display());
    let mut file = BufReader::new(File::open(path).map_err(describe)?);
    let is_json = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
    let byte_order_mark = "\u{feff}".as_bytes();
    let start = file.fill_buf().map_err(describe)?;
    if !is_json && start.starts_with(byte_order_mark) {
        file.consume(byte_order_mark.len());
    }
    let mut reader = RecordReader::new(file, is_json);
    let columns = if is_json {
        None
    } else {
        let header = reader.read_record().map_err(describe)?;
        let columns = parse_header(header);
        Some(columns.map_err(|why| format!("{}: {why}", path.display()))?)
    };
    Ok(std::iter::from_fn(move || {
        let record = reader.read_record().map_err(|error| error.to_string());
        let parse = |values: Vec<String>| match &columns {
            Some(columns) => read_record(&values, columns, now_us),
            None => match serde_json::from_str(&values.concat()) {
                Ok(Value::Object(object)) => override_from_json(&object, now_us),
                Ok(_) => Err("expected a JSON object".to_owned()),
                Err(error) => Err(format!("invalid JSON: {error}")),
            },
        };
        let record = record.transpose()?;
        Some(record.map(|(lines, values)| (lines, values.and_then(parse))))
    }))
}

/// The meaning of a CSV column.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CsvColumn {
    /// A field of [`FIELD_NAMES`].
    Field(&'static str),
    /// The value of the key at a position.
    Key(usize),
}

impl CsvColumn {
    /// `key` is the first value of the key, `key2` the second one.
    fn parse(name: &str) -> Option<Self> {
        let number = match name.strip_prefix("key") {
            Some("") => Some(1),
            number => number.and_then(|number| number.parse().ok()),
        };
        match number {
            Some(number @ 1..=64) => Some(Self::Key(number - 1)),
            _ => {
                let mut fields = FIELD_NAMES.into_iter();
                fields.find(|field| *field == name).map(Self::Field)
            }
        }
    }
}

fn parse_header(header: Option<CsvRecord>) -> Result<Vec<CsvColumn>, String> {
    let header = match header {
        Some((lines, values)) => values.map_err(|why| format!("{lines}: {why}"))?,
        None => Vec::new(),
    };
    let mut columns = Vec::new();
    for name in &header {
        let name = name.trim();
        let column = CsvColumn::parse(name).ok_or_else(|| {
            let fields = FIELD_NAMES.join(", ");
            format!("line 1: unknown column {name:?}; expected {fields}, and key2 to key64")
        })?;
        if columns.contains(&column) {
            return Err(format!("line 1: the column {name:?} occurs twice"));
        }
        columns.push(column);
    }
    for needed in [CsvColumn::Field("policy"), CsvColumn::Key(0)] {
        if !columns.contains(&needed) {
            return Err("line 1: expected a header with at least policy and key".to_owned());
        }
    }
    Ok(columns)
}

fn read_record(
    record: &[String],
    columns: &[CsvColumn],
    now_us: u64,
) -> Result<OverrideInput, String> {
    if record.len() != columns.len() {
        return Err(format!(
            "{} columns; expected {}, as in the header",
            record.len(),
            columns.len()
        ));
    }
    let (mut object, mut key) = (Map::new(), Vec::new());
    for (column, text) in columns.iter().zip(record) {
        let name = match column {
            CsvColumn::Field(name) => *name,
            // Empty columns at the end belong to policies with more values.
            CsvColumn::Key(position) => {
                key.resize(key.len().max(position + 1), "");
                if let Some(value) = key.get_mut(*position) {
                    *value = text;
                }
                continue;
            }
        };
        let text = text.trim();
        let value = match name {
            _ if text.is_empty() => continue,
            "unlimited" | "blocked" => match text {
                "false" | "0" | "no" => json!(false),
                "true" | "1" | "yes" => json!(true),
                _ => return Err(format!("{name}: {text:?}; expected true or false")),
            },
            "requests" | "burst" => {
                let amount = text
                    .parse::<u64>()
                    .ok()
                    .filter(|amount| *amount <= MAX_UNITS);
                json!(amount.ok_or_else(|| format!(
                    "{name}: {text:?}; expected an integer from 0 to {MAX_UNITS}"
                ))?)
            }
            "limits" => match parse_override_rule(text) {
                Some(KeyOverride::Limits(amounts)) => {
                    let by_name = amounts_by_limit(&amounts);
                    if by_name.len() != amounts.len() {
                        return Err(format!("limits: {text:?}; expected each limit once"));
                    }
                    json!(by_name)
                }
                _ => {
                    return Err(format!(
                        "limits: {text:?}; expected NAME=REQUESTS[+BURST],.."
                    ));
                }
            },
            _ => json!(text),
        };
        object.insert(name.to_owned(), value);
    }
    object.insert("key".to_owned(), json!(key));
    override_from_json(&object, now_us)
}
