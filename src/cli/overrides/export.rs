//! `tidegate overrides export`: writes all overrides in a form that `import` reads.

use super::store_client::StoreClient;
use crate::app::overrides::describe_stored_override;
use crate::cli::output::CommandError;
use crate::config::Config;
use crate::policy::PolicyAction;
use crate::store::StoredOverride;
use serde_json::json;
use std::io::{self, Write};

#[derive(clap::Args, Debug)]
pub(crate) struct ExportArguments {
    /// Only export overrides of this policy.
    pub(super) policy: Option<String>,
    /// Format of the lines.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = ExportFormat::Jsonl)]
    format: ExportFormat,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum ExportFormat {
    Csv,
    Jsonl,
}

/// Writes overrides to stdout, one per line, in no order.
///
/// # Errors
/// A message for the user if the store fails, or stdout is closed.
pub(super) async fn export_overrides(
    store: &StoreClient,
    config: &Config,
    arguments: &ExportArguments,
) -> Result<(), CommandError> {
    let width = max_value_count(config);
    let to_line = |stored: &StoredOverride| match arguments.format {
        ExportFormat::Jsonl => Ok(format!("{}\n", json!(describe_stored_override(stored))).into()),
        ExportFormat::Csv => csv_line(csv_record(stored, width)),
    };
    let mut output = io::BufWriter::new(io::stdout().lock());
    let mut written = match arguments.format {
        ExportFormat::Jsonl => Ok(()),
        ExportFormat::Csv => csv_line(csv_header(width)).and_then(|line| output.write_all(&line)),
    };
    let visited = store.visit(arguments.policy.as_deref(), |stored| {
        if written.is_ok() {
            written = to_line(&stored).and_then(|line| output.write_all(&line));
        }
        written.is_ok()
    });
    visited.await?;
    let flushed = written.and_then(|()| output.flush());
    Ok(flushed.map_err(|error| format!("stdout: {error}"))?)
}

fn csv_line(values: Vec<String>) -> io::Result<Vec<u8>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(values)?;
    writer
        .into_inner()
        .map_err(|error| io::Error::other(error.error().to_string()))
}

/// The most values of a key of a policy with overrides.
fn max_value_count(config: &Config) -> usize {
    let policies = config.policy_table.policies().iter();
    let counts = policies.map(|policy| match &policy.action {
        PolicyAction::Limit(quota) if quota.is_dynamic => quota.key.value_count(),
        _ => 1,
    });
    counts.max().unwrap_or(1).max(1)
}

/// The fields after the key.
const CSV_FIELDS: [&str; 6] = [
    "limits",
    "unlimited",
    "blocked",
    "expires_at",
    "note",
    "author",
];

fn csv_header(width: usize) -> Vec<String> {
    let keys = (2..=width).map(|position| format!("key{position}"));
    let names = ["policy", "key"].map(str::to_owned).into_iter();
    let names = names.chain(keys).chain(CSV_FIELDS.map(str::to_owned));
    names.collect()
}

fn csv_record(stored: &StoredOverride, width: usize) -> Vec<String> {
    let document = describe_stored_override(stored);
    let mut record = vec![document.policy];
    record.extend(document.key);
    record.resize(record.len().max(width + 1), String::new());
    let flag = |is_set: bool| is_set.then(|| "true".to_owned());
    let fields: [Option<String>; CSV_FIELDS.len()] = [
        document.limits.map(|_| stored.format_rule()),
        flag(document.unlimited),
        flag(document.blocked),
        document.expires_at,
        document.note,
        document.author,
    ];
    record.extend(fields.map(Option::unwrap_or_default));
    record
}
