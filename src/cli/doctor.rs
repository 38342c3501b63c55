//! `tidegate doctor`: examines Redis for this use, and gives advice.

use super::output::{CommandError, CommandOutput, block_on};
use crate::admin::{DoctorReport, ExaminedStore};
use crate::app::doctor::{self, format_bytes};
use crate::config::{self, ConfigSources, StoreSettings};
use crate::proxy::ListenerKind;
use crate::text::{count_noun, escape_unprintable, wrap_indented};
use std::process::ExitCode;

/// Width of the texts of findings.
const TEXT_WIDTH: usize = 84;

/// Exit code if no fault was found, but some checks have no result.
const INCOMPLETE_EXIT_CODE: u8 = 3;

/// Examines the store of a configuration and returns the report. Fails on faults, and on warnings
/// if `strict` is set. Checks without a result have an exit code of their own.
///
/// # Errors
/// A message for the user if the configuration is invalid.
pub(super) fn run(sources: &ConfigSources, strict: bool) -> Result<CommandOutput, CommandError> {
    let config = config::load(sources)?;
    let redis = match &config.store {
        StoreSettings::Memory(_) => None,
        StoreSettings::Redis(settings) => Some(&**settings),
    };
    let mut listeners = config.service_listeners.iter();
    let serves_rate_limit_service =
        listeners.any(|settings| settings.kind == ListenerKind::RateLimitService);
    let examined = doctor::examine_store(redis, &config.policy_table, serves_rate_limit_service);
    let report = block_on(examined)?;
    Ok(CommandOutput {
        code: if report.faults > 0 || strict && report.warnings > 0 {
            ExitCode::FAILURE
        } else if report.unknown > 0 {
            ExitCode::from(INCOMPLETE_EXIT_CODE)
        } else {
            ExitCode::SUCCESS
        },
        ..CommandOutput::new(&report, render_text(&report))
    })
}

fn render_text(report: &DoctorReport) -> String {
    let mut text = match &report.store {
        ExaminedStore::Memory => String::new(),
        ExaminedStore::Redis {
            address,
            key_prefix,
        } => format!("{address}, keys {key_prefix}:*\n"),
    };
    let mut server = None;
    for finding in &report.findings {
        if finding.server != server {
            server.clone_from(&finding.server);
            text.push_str(&format!(
                "\n{}\n",
                server.as_deref().unwrap_or("All servers")
            ));
        }
        let start = format!("  {:<8} {:<12} ", finding.level.into_str(), finding.check);
        let indent = format!("  {:<8} {:<12} -> ", "", "");
        let found = escape_unprintable(&finding.found);
        let advice = finding
            .advice
            .iter()
            .map(|advice| (indent.as_str(), advice));
        for (start, words) in std::iter::once((start.as_str(), &found)).chain(advice) {
            text.push_str(&wrap_indented(start, words, start.len() + TEXT_WIDTH));
        }
    }
    if !report.policies.is_empty() {
        text.push_str(&format!(
            "\n{:<24} {:>12} {:>12}\n",
            "POLICY", "COUNTERS", "MEMORY"
        ));
        for memory in &report.policies {
            let name = memory.policy.as_deref().map(str::escape_debug);
            let name = name.map_or_else(|| "(long keys)".to_owned(), |name| name.to_string());
            let bytes = format_bytes(memory.bytes);
            text.push_str(&format!("{name:<24} {:>12} {bytes:>12}\n", memory.counters));
        }
    }
    text.push_str(&summarize(report));
    text
}

fn summarize(report: &DoctorReport) -> String {
    let (faults, warnings, unknown) = (report.faults, report.warnings, report.unknown);
    let problems = match (faults, warnings) {
        (0, 0) => "No problem was found".to_owned(),
        _ => format!(
            "{}, {}",
            count_noun(faults as u64, "fault"),
            count_noun(warnings as u64, "warning")
        ),
    };
    match unknown {
        0 => format!("\n{problems}.\n"),
        _ => format!(
            "\n{problems}. Incomplete: {} without a result.\n",
            count_noun(unknown as u64, "check")
        ),
    }
}
