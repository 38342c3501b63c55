//! The report as text for a terminal.

use super::{PolicyReport, PolicySetReport, ReplayReport, format_share, merged_policy_names};
use crate::config::format_duration;
use crate::replay::suggestions::LimitSuggestion;
use crate::text::{format_count, format_time, format_time_range, truncate_text, wrap_indented};
use std::time::Duration;

/// Maximum width of names; longer names are truncated.
const NAME_WIDTH: usize = 18;

impl ReplayReport {
    /// Renders the report for a terminal with `width` columns.
    pub fn render_text(&self, width: usize, is_bold: bool) -> String {
        let mut page = TextReportPage {
            report: self,
            text: String::new(),
            width: width.clamp(60, 200),
            is_bold,
        };
        page.push_header();
        page.push_list("CAVEATS", self.caveats());
        if let [first, second, ..] = self.sets.as_slice() {
            page.push_comparison([first, second]);
        }
        for set in &self.sets {
            if self.sets.len() > 1 {
                page.push_title(&format!("BY {}", set.config.escape_debug()));
            }
            page.push_outcomes(set);
            page.push_policy_table(set);
            page.push_chart(set);
            page.push_most_refused_keys(set);
            page.push_suggestions(set);
        }
        page.push_list("WARNINGS", self.other_warnings());
        page.text
    }
}

struct TextReportPage<'r> {
    report: &'r ReplayReport,
    text: String,
    width: usize,
    is_bold: bool,
}

impl TextReportPage<'_> {
    fn push_line(&mut self, text: &str) {
        self.text.push_str(text.trim_end());
        self.text.push('\n');
    }

    fn push_title(&mut self, text: &str) {
        self.text.push('\n');
        if self.is_bold {
            self.push_line(&format!("\u{1b}[1m{text}\u{1b}[0m"))
        } else {
            self.push_line(text)
        }
    }

    fn push_header(&mut self) {
        let report = self.report;
        let [requests, lines] = [report.requests, report.lines].map(format_count);
        let logs = report.logs.iter();
        let files = logs.map(|log| format!("{} ({})", log.name.escape_debug(), log.format));
        let files = files.collect::<Vec<_>>().join(", ");
        self.push_line(&format!("{requests} requests in {lines} lines of {files}"));
        if let Some(set) = report.sets.first().filter(|_| report.requests > 0) {
            let [first, last] = [set.first_request_us, set.last_request_us].map(format_time);
            self.push_line(&format!("from {first} to {last} UTC"));
        }
    }

    fn push_comparison(&mut self, sets: [&PolicySetReport; 2]) {
        self.push_title("SIDE BY SIDE");
        let mut push_row = |name: &str, [one, other]: [String; 2]| {
            let cell = NAME_WIDTH + 4;
            let name = truncate_text(name, cell, '…');
            self.push_line(&format!("{name:<cell$} {one:>24} {other:>24}"));
        };
        let names = sets.map(|set| set.config.escape_debug().to_string());
        push_row("", names.map(|name| truncate_text(&name, 24, '…')));
        let [first, second] = sets.map(PolicySetReport::outcome_counts);
        for ((label, one), (_, other)) in first.into_iter().zip(second) {
            if one + other > 0 {
                push_row(label, [one, other].map(format_count));
            }
        }
        for policy in merged_policy_names(sets) {
            push_row(policy, sets.map(|set| set.describe_refused(policy)));
        }
        let [by_second, by_first] = self.report.differences().map(format_count);
        self.push_line(&format!(
            "Refused by the second only: {by_second}. By the first only: {by_first}."
        ));
    }

    fn push_outcomes(&mut self, set: &PolicySetReport) {
        let counts = set.outcome_counts().into_iter();
        let parts = counts.filter(|(_, number)| *number > 0);
        let parts = parts.map(|(label, number)| {
            let share = format_share(number, set.field_coverage.requests);
            format!("{} {label} ({share})", format_count(number))
        });
        let parts = parts.collect::<Vec<_>>().join(", ");
        self.text.push('\n');
        self.text.push_str(&wrap_indented("", &parts, self.width));
        if let Some(sentence) = set.describe_left_out() {
            self.text
                .push_str(&wrap_indented("", &sentence, self.width));
        }
    }

    fn push_policy_table(&mut self, set: &PolicySetReport) {
        let row = |[name, matched, allowed, refused, share, keys, touched]: [&str; 7]| {
            format!(
                "{name:<NAME_WIDTH$} {matched:>11} {allowed:>11} {refused:>10} {share:>8} {keys:>8} {touched:>7}"
            )
        };
        self.push_title(&row([
            "POLICY", "MATCHED", "ALLOWED", "REJECTED", "SHARE", "KEYS", "TOUCHED",
        ]));
        for policy in &set.policies {
            let name = truncate_text(&policy.name, NAME_WIDTH, '…');
            let share = format_share(policy.refused, policy.matched);
            let [keys, touched] = policy.format_key_counts("-");
            let allowed = policy.allowed + policy.delayed + policy.exempt;
            let [matched, allowed, refused] =
                [policy.matched, allowed, policy.refused].map(format_count);
            self.push_line(&row([
                &name, &matched, &allowed, &refused, &share, &keys, &touched,
            ]));
            let notes = describe_policy(policy);
            if !notes.is_empty() {
                self.push_line(&format!("  {}", notes.join("; ")));
            }
        }
        if set.delayed > 0 {
            let longest_ms = set.max_delay_us / 1000;
            self.push_line(&format!("Longest delay: {longest_ms} ms."));
        }
    }

    fn push_chart(&mut self, set: &PolicySetReport) {
        if set.field_coverage.requests == 0 {
            return;
        }
        let max_columns = self.width.saturating_sub(NAME_WIDTH + 14);
        let all = self.report.plot(&set.series.counts, max_columns);
        let column_duration = format_duration(Duration::from_secs(all.step_seconds));
        self.push_title(&format!(
            "WHEN: one column is {column_duration}; the number is the maximum per column"
        ));
        let mut rows = vec![("requests", all.requests), ("refused", all.refused)];
        let columns = rows.first().map_or(0, |(_, counts)| counts.len());
        rows.extend(set.policies.iter().filter_map(|policy| {
            let refused = self.report.plot(&policy.series.counts, max_columns).refused;
            (policy.refused > 0).then_some((policy.name.as_str(), refused))
        }));
        for (name, counts) in rows {
            let name = truncate_text(name, NAME_WIDTH, '…');
            let (bars, most) = render_bars(&counts);
            let most = format_count(most);
            self.push_line(&format!("{name:<NAME_WIDTH$} {bars} {most:>10}"));
        }
        let [from, to] = self.report.time_texts();
        let gap = columns.saturating_sub(from.len() + to.len());
        if gap > 0 {
            self.push_line(&format!("{:NAME_WIDTH$} {from}{:gap$}{to}", "", ""));
        }
    }

    fn push_most_refused_keys(&mut self, set: &PolicySetReport) {
        if set.top.is_empty() {
            return;
        }
        // A wide terminal shows the times of the first and the last refusal, a narrow one only the
        // first.
        let is_wide = self.width >= 100;
        let times = set.top.iter().map(|key| {
            if is_wide {
                format_time_range(key.stats.first_refused_us, key.stats.last_refused_us, '…')
            } else {
                format_time(key.stats.first_refused_us)
            }
        });
        let times: Vec<String> = times.collect();
        let widest = times.iter().map(|times| times.chars().count()).max();
        let key_width = self
            .width
            .saturating_sub(NAME_WIDTH + 24 + widest.unwrap_or_default());
        let row = |[policy, key, refused, requests, times]: [&str; 5]| {
            format!("{policy:<NAME_WIDTH$} {key:<key_width$} {refused:>10} {requests:>9}  {times}")
        };
        let range = if is_wide { "FIRST … LAST" } else { "FIRST" };
        self.push_title(&row(["MOST LIMITED KEYS", "", "REJECTED", "OF", range]));
        for (key, times) in set.top.iter().zip(times) {
            let policy = truncate_text(&key.policy, NAME_WIDTH, '…');
            let name = truncate_text(&key.key, key_width, '…');
            let stats = &key.stats;
            let [refused, requests, error] =
                [stats.refused, stats.requests, stats.error].map(format_count);
            let error = match stats.error {
                0 => String::new(),
                _ => format!(" (or {error} more)"),
            };
            let times = times + &error;
            self.push_line(&row([&policy, &name, &refused, &requests, &times]));
        }
    }

    fn push_suggestions(&mut self, set: &PolicySetReport) {
        let mut suggestions = set.suggestions().peekable();
        if let Some(percent) = self.report.suggest_percent
            && suggestions.peek().is_some()
        {
            self.push_title(&format!(
                "SUGGESTED: limits that would have touched at most {percent} % of the keys"
            ));
            suggestions.for_each(|suggestion| self.push_suggestion(suggestion));
        }
    }

    fn push_suggestion(&mut self, suggestion: &LimitSuggestion) {
        let (name, per) = (&suggestion.title, &suggestion.period);
        let Some(proposal) = &suggestion.proposal else {
            let reason = suggestion.reason.as_deref().unwrap_or_default();
            return self.push_line(&format!("{name}: no suggestion: {reason}"));
        };
        let [suggested, current] = proposal.describe_touched_keys();
        let (requests, now) = (proposal.requests, suggestion.now);
        self.push_line(&format!(
            "{name}: requests = {requests}, per = \"{per}\" {suggested}"
        ));
        self.push_line(&format!("  the current limit is {now}, which {current}"));
        let quantiles = proposal.describe_peaks();
        self.text.push_str(&wrap_indented(
            "  ",
            &format!("peak demand per {per}: {quantiles}"),
            self.width,
        ));
        let counts: Vec<u64> = proposal.histogram.iter().map(|(_, count)| *count).collect();
        let (bars, _) = render_bars(&counts);
        let last = format_count(proposal.histogram.last().map_or(0, |(upto, _)| *upto));
        self.push_line(&format!(
            "  keys by peak demand: 1 {bars} {last} (each step doubles)"
        ));
        if proposal.one_key_in > 1 {
            self.push_line(&format!(
                "  sampled from one key in {}",
                proposal.one_key_in
            ));
        }
    }

    fn push_list(&mut self, title: &str, sentences: &[String]) {
        if !sentences.is_empty() {
            self.push_title(title);
        }
        for sentence in sentences {
            self.text
                .push_str(&wrap_indented("- ", sentence, self.width));
        }
    }
}

/// The notes below the counts of a policy.
fn describe_policy(policy: &PolicyReport) -> Vec<String> {
    let (mode, action) = (policy.mode, policy.action);
    let [delayed, blocked] = [policy.delayed, policy.blocked].map(format_count);
    let times = format_time_range(policy.first_refused_us, policy.last_refused_us, '…');
    let notes = [
        (
            policy.left_out,
            "left out: its key is not in the log".to_owned(),
        ),
        (mode != "enforce", format!("{mode}: not enforced")),
        (action != "limit", format!("action = \"{action}\"")),
        (policy.delayed > 0, format!("{delayed} delayed")),
        (
            policy.blocked > 0,
            format!("{blocked} of the rejected by block_for"),
        ),
        (policy.refused > 0, times),
    ];
    let notes = notes.into_iter().filter(|(applies, _)| *applies);
    notes.map(|(_, note)| note).collect()
}

/// Renders one bar per count and returns the maximum. A nonzero count is always visible.
fn render_bars(counts: &[u64]) -> (String, u64) {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = counts.iter().copied().max().unwrap_or_default();
    let bar = |count: &u64| {
        let step = (u128::from(*count) * 8).div_ceil(u128::from(most.max(1)));
        let step = usize::try_from(step).unwrap_or_default();
        BARS.get(step).copied().unwrap_or('█')
    };
    (counts.iter().map(bar).collect(), most)
}
