//! The report as text for a terminal.

use super::number_format::{format_key_counts, format_share, format_time, format_time_range};
use super::results::{
    PolicySetReport, ReplayReport, describe_peaks, describe_touched_keys, limit_title,
    merged_policy_names,
};
use crate::config::{format_duration, format_period};
use crate::policy::PolicyMode;
use crate::replay::statistics::RequestSeries;
use crate::replay::suggestions::LimitSuggestion;
use crate::text::{format_count, truncate_text, wrap_text};
use std::time::Duration;

/// Maximum width of names; longer names are truncated.
const NAME_WIDTH: usize = 18;

pub(super) fn render_text(report: &ReplayReport, width: usize, is_bold: bool) -> String {
    let mut page = TextReportPage {
        text: String::new(),
        width: width.clamp(60, 200),
        is_bold,
    };
    page.push_header(report);
    page.push_list("CAVEATS", &report.caveats());
    if report.sets.len() > 1 {
        page.push_comparison(report);
    }
    for set in &report.sets {
        if report.sets.len() > 1 {
            page.push_title(&format!("BY {}", set.name.escape_debug()));
        }
        page.push_outcomes(set);
        page.push_policy_table(set);
        page.push_chart(report, set);
        page.push_most_refused_keys(set);
        page.push_suggestions(set, report.suggest_percent);
    }
    page.push_list("WARNINGS", &report.warnings());
    page.text
}

struct TextReportPage {
    text: String,
    width: usize,
    is_bold: bool,
}

impl TextReportPage {
    fn push_line(&mut self, text: &str) {
        self.text.push_str(text.trim_end());
        self.text.push('\n');
    }

    fn push_title(&mut self, text: &str) {
        self.text.push('\n');
        let text = if self.is_bold {
            format!("\u{1b}[1m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        };
        self.push_line(&text);
    }

    fn push_header(&mut self, report: &ReplayReport) {
        let files: Vec<String> = report
            .logs
            .iter()
            .map(|log| format!("{} ({})", log.name.escape_debug(), log.format))
            .collect();
        let lines = format_count(report.line_count());
        self.push_line(&format!(
            "{} requests in {lines} lines of {}",
            format_count(report.request_count()),
            files.join(", ")
        ));
        if let Some(set) = report.sets.first().filter(|_| report.request_count() > 0) {
            let (first, last) = (
                format_time(set.stats.first_request_us),
                format_time(set.stats.last_request_us),
            );
            self.push_line(&format!("from {first} to {last} UTC"));
        }
    }

    fn push_comparison(&mut self, report: &ReplayReport) {
        let [first, second, ..] = report.sets.as_slice() else {
            return;
        };
        self.push_title("SIDE BY SIDE");
        let cell = NAME_WIDTH + 4;
        let row = |name: &str, one: String, other: String| {
            format!("{:<cell$} {one:>24} {other:>24}", shorten(name, cell))
        };
        let name = |set: &PolicySetReport| shorten(&set.name.escape_debug().to_string(), 24);
        self.push_line(&row("", name(first), name(second)));
        for ((label, one), (_, other)) in first
            .outcome_counts()
            .into_iter()
            .zip(second.outcome_counts())
        {
            if one + other > 0 {
                self.push_line(&row(label, format_count(one), format_count(other)));
            }
        }
        for policy in merged_policy_names(first, second) {
            let [one, two] = [first, second].map(|set| set.describe_refused(policy));
            self.push_line(&row(policy, one, two));
        }
        self.push_line(&format!(
            "Refused by the second only: {}. By the first only: {}.",
            format_count(report.differences.rejected_by_second_only),
            format_count(report.differences.rejected_by_first_only)
        ));
    }

    fn push_outcomes(&mut self, set: &PolicySetReport) {
        let stats = &set.stats;
        let all = stats.field_coverage.requests;
        let parts = set
            .outcome_counts()
            .into_iter()
            .filter(|(_, number)| *number > 0);
        let parts: Vec<String> = parts
            .map(|(label, number)| {
                format!(
                    "{} {label} ({})",
                    format_count(number),
                    format_share(number, all)
                )
            })
            .collect();
        self.text.push('\n');
        self.push_wrapped("", &parts.join(", "));
        if let Some(sentence) = set.describe_left_out() {
            self.push_wrapped("", &sentence);
        }
    }

    fn push_policy_table(&mut self, set: &PolicySetReport) {
        self.push_title(&format!(
            "{:<NAME_WIDTH$} {:>11} {:>11} {:>10} {:>8} {:>8} {:>7}",
            "POLICY", "MATCHED", "ALLOWED", "REJECTED", "SHARE", "KEYS", "TOUCHED"
        ));
        for (summary, stats) in set.policies.iter().zip(&set.stats.policies) {
            let (matched, refused) = (stats.matched_count(), stats.refused_count());
            let allowed = stats.allowed + stats.delayed + stats.exempt;
            let [keys, touched] = format_key_counts(stats, summary.action.is_none(), "-");
            self.push_line(&format!(
                "{:<NAME_WIDTH$} {:>11} {:>11} {:>10} {:>8} {keys:>8} {touched:>7}",
                shorten(&summary.name, NAME_WIDTH),
                format_count(matched),
                format_count(allowed),
                format_count(refused),
                format_share(refused, matched),
            ));
            let mut notes = Vec::new();
            if summary.is_left_out {
                notes.push("left out: its key is not in the log".to_owned());
            }
            if summary.mode != PolicyMode::Enforce {
                notes.push(format!("{}: not enforced", summary.mode.name()));
            }
            notes.extend(
                summary
                    .action
                    .map(|action| format!("action = \"{action}\"")),
            );
            for (number, label) in [
                (stats.delayed, "delayed"),
                (stats.blocked, "of the rejected by block_for"),
            ] {
                if number > 0 {
                    notes.push(format!("{} {label}", format_count(number)));
                }
            }
            if refused > 0 {
                notes.push(format_time_range(
                    stats.first_refused_us,
                    stats.last_refused_us,
                    '…',
                ));
            }
            if !notes.is_empty() {
                self.push_line(&format!("  {}", notes.join("; ")));
            }
        }
        if set.stats.delayed > 0 {
            let longest_ms = set.stats.max_delay_us / 1000;
            self.push_line(&format!("Longest delay: {longest_ms} ms."));
        }
    }

    fn push_chart(&mut self, report: &ReplayReport, set: &PolicySetReport) {
        let max_columns = self.width.saturating_sub(NAME_WIDTH + 14);
        let (width_s, columns) = report.time_grid(max_columns);
        if set.stats.field_coverage.requests == 0 {
            return;
        }
        let column_duration = format_duration(Duration::from_secs(width_s));
        self.push_title(&format!(
            "WHEN: one column is {column_duration}; the number is the maximum per column"
        ));
        let row = |name: &str, series: &RequestSeries, refused: bool| {
            let bins = report.resample_series(series, max_columns);
            let counts = bins
                .iter()
                .map(|bin| if refused { bin.refused } else { bin.requests });
            let (bars, most) = render_bars(&counts.collect::<Vec<_>>());
            format!(
                "{:<NAME_WIDTH$} {bars} {:>10}",
                shorten(name, NAME_WIDTH),
                format_count(most)
            )
        };
        self.push_line(&row("requests", &set.stats.series, false));
        self.push_line(&row("refused", &set.stats.series, true));
        for (summary, stats) in set
            .policies
            .iter()
            .zip(&set.stats.policies)
            .filter(|(_, stats)| stats.refused_count() > 0)
        {
            self.push_line(&row(&summary.name, &stats.series, true));
        }
        let [from, to] = report.time_texts();
        let gap = columns.saturating_sub(from.len() + to.len());
        if gap > 0 {
            self.push_line(&format!("{:NAME_WIDTH$} {from}{:gap$}{to}", "", ""));
        }
    }

    fn push_most_refused_keys(&mut self, set: &PolicySetReport) {
        if set.most_refused_keys.is_empty() {
            return;
        }
        // A wide terminal shows the times of the first and the last refusal, a narrow one only the
        // first.
        let is_wide = self.width >= 100;
        let times = set.most_refused_keys.iter().map(|top| match is_wide {
            true => format_time_range(top.stats.first_refused_us, top.stats.last_refused_us, '…'),
            false => format_time(top.stats.first_refused_us),
        });
        let times: Vec<String> = times.collect();
        let widest = times
            .iter()
            .map(|times| times.chars().count())
            .max()
            .unwrap_or_default();
        let key_width = self.width.saturating_sub(NAME_WIDTH + 24 + widest);
        self.push_title(&format!(
            "{:<NAME_WIDTH$} {:<key_width$} {:>10} {:>9}  {}",
            "MOST LIMITED KEYS",
            "",
            "REJECTED",
            "OF",
            if is_wide { "FIRST … LAST" } else { "FIRST" }
        ));
        for (key, times) in set.most_refused_keys.iter().zip(&times) {
            let error = if key.stats.error > 0 {
                format!(" (or {} more)", format_count(key.stats.error))
            } else {
                String::new()
            };
            self.push_line(&format!(
                "{:<NAME_WIDTH$} {:<key_width$} {:>10} {:>9}  {times}{error}",
                shorten(&key.policy, NAME_WIDTH),
                shorten(&key.key, key_width),
                format_count(key.stats.refused),
                format_count(key.stats.requests),
            ));
        }
    }

    fn push_suggestions(&mut self, set: &PolicySetReport, percent: Option<f64>) {
        let Some(percent) = percent.filter(|_| !set.suggestions.is_empty()) else {
            return;
        };
        self.push_title(&format!(
            "SUGGESTED: limits that would have touched at most {percent} % of the keys"
        ));
        for suggestion in &set.suggestions {
            self.push_suggestion(suggestion);
        }
    }

    fn push_suggestion(&mut self, suggestion: &LimitSuggestion) {
        let limit = &suggestion.limit.limit;
        let per = format_period(limit);
        let name = limit_title(suggestion);
        let proposal = match &suggestion.proposal {
            Ok(proposal) => proposal,
            Err(reason) => return self.push_line(&format!("{name}: no suggestion: {reason}")),
        };
        let [suggested, current] = describe_touched_keys(proposal);
        self.push_line(&format!(
            "{name}: requests = {}, per = \"{per}\" {suggested}",
            proposal.requests
        ));
        self.push_line(&format!(
            "  the current limit is {}, which {current}",
            limit.requests
        ));
        let quantiles = describe_peaks(proposal);
        self.push_wrapped("  ", &format!("peak demand per {per}: {quantiles}"));
        let counts: Vec<u64> = proposal.histogram.iter().map(|(_, count)| *count).collect();
        let last = proposal.histogram.last().map_or(0, |(upto, _)| *upto);
        self.push_line(&format!(
            "  keys by peak demand: 1 {} {} (each step doubles)",
            render_bars(&counts).0,
            format_count(last)
        ));
        if proposal.keys_per_sample > 1 {
            self.push_line(&format!(
                "  sampled from one key in {}",
                proposal.keys_per_sample
            ));
        }
    }

    fn push_list(&mut self, title: &str, sentences: &[String]) {
        if sentences.is_empty() {
            return;
        }
        self.push_title(title);
        for sentence in sentences {
            self.push_wrapped("- ", sentence);
        }
    }

    /// Wraps a text at spaces.
    fn push_wrapped(&mut self, bullet: &str, text: &str) {
        let indent = " ".repeat(bullet.len());
        for line in wrap_text(text, self.width, [bullet, &indent], usize::MAX) {
            self.push_line(&line);
        }
    }
}

/// Truncates a text to `width` characters.
fn shorten(text: &str, width: usize) -> String {
    truncate_text(text, width, '…')
}

/// Renders one bar per count and returns the maximum. A nonzero count is always visible.
fn render_bars(counts: &[u64]) -> (String, u64) {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = counts.iter().copied().max().unwrap_or_default();
    let bar = |count: &u64| match count {
        0 => ' ',
        count => {
            let step = (u128::from(*count) * 8)
                .div_ceil(u128::from(most.max(1)))
                .saturating_sub(1);
            BARS.get(usize::try_from(step).unwrap_or_default())
                .copied()
                .unwrap_or('█')
        }
    };
    (counts.iter().map(bar).collect(), most)
}
