//! Renders data as lines of text, for a terminal of any size and for a pipe.

use super::format::{format_latency, format_rate, format_share, format_short_duration};
use super::help::HELP;
use super::screen_line::{LineStyle, ScreenLine};
use super::snapshot::{
    AdminApiSnapshot, TopAlert, TopLatencyEntry, TopPolicyEntry, TopRankedEntry,
};
use super::sparkline::{SparklineGlyphs, render_sparkline};
use crate::text::{truncate_text, wrap_text};
use serde_json::Value;
use std::cmp::Reverse;
use std::fmt::Write as _;
use strum::Display;

/// Minimum screen width and height.
pub(super) const MIN_SCREEN_SIZE: (usize, usize) = (48, 10);

/// The data of a view.
pub(super) trait TopData {
    /// Replaces the data by that of a response, whose texts are escaped.
    fn update(&mut self, response: Value);

    /// Number of rows that can be scrolled.
    fn row_count(&self) -> usize {
        0
    }

    /// The keys of the terminal view that only this data needs.
    fn extra_keys(&self, _view: &ViewState) -> String {
        String::new()
    }

    /// Renders the data: what is important in `height` lines, or all of it.
    fn render_lines(
        &self,
        view: &ViewState,
        width: usize,
        height: Option<usize>,
    ) -> Vec<ScreenLine>;
}

/// Sort order of the policy table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display)]
#[strum(serialize_all = "lowercase")]
pub(super) enum PolicySortOrder {
    #[default]
    Refused,
    Requests,
    Name,
    /// The order in which the policies apply.
    #[strum(serialize = "order")]
    PolicyOrder,
}

/// Display state of the view, independent of the data.
#[derive(Clone, Debug, Default)]
pub(super) struct ViewState {
    pub(super) sort_order: PolicySortOrder,
    pub(super) glyphs: SparklineGlyphs,
    pub(super) is_paused: bool,
    /// Number of policies scrolled past at the top.
    pub(super) scroll_offset: usize,
    /// Address of the admin port.
    pub(super) address: String,
    /// Error of the latest fetch, if it failed; the displayed data is older than that fetch.
    pub(super) last_error: Option<String>,
    /// Whether the list of keys and columns is shown instead of the data.
    pub(super) shows_help: bool,
}

impl ViewState {
    /// The error of the latest fetch as a line.
    pub(super) fn error_line(&self) -> Option<ScreenLine> {
        let error = self.last_error.as_ref()?;
        Some(ScreenLine::new(LineStyle::Alert, format!("! {error}")))
    }
}

impl PolicySortOrder {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Refused => Self::Requests,
            Self::Requests => Self::Name,
            Self::Name => Self::PolicyOrder,
            Self::PolicyOrder => Self::Refused,
        }
    }
}

/// Maximum number of lines of a problem on a screen.
const MAX_ALERT_LINES: usize = 2;

/// Number of characters of a policy's name that a long key leaves visible.
const MIN_POLICY_WIDTH: usize = 8;

/// Renders all data as text for a pipe.
pub(super) fn render_plain_text(data: &dyn TopData, view: &ViewState, width: usize) -> String {
    let lines = data.render_lines(view, width, None).into_iter();
    lines
        .map(|line| line.text.trim_end().to_owned() + "\n")
        .collect()
}

/// Renders a screen of exactly `height` lines, none wider than `width`.
pub(super) fn render_screen(
    data: &dyn TopData,
    view: &ViewState,
    width: usize,
    height: usize,
) -> Vec<ScreenLine> {
    let (min_width, min_height) = MIN_SCREEN_SIZE;
    let mut lines = if width < min_width || height < min_height {
        let text = format!("too small: {width}x{height}, needs {min_width}x{min_height}");
        vec![ScreenLine::new(LineStyle::Alert, text)]
    } else {
        let mut lines = match view.shows_help {
            true => HELP
                .lines()
                .map(|line| ScreenLine::new(LineStyle::Plain, line))
                .collect(),
            false => data.render_lines(view, width, Some(height - 1)),
        };
        lines.resize(height - 1, ScreenLine::default());
        let pause = if view.is_paused { "resume" } else { "pause" };
        let keys = format!("q quit  ? help  p {pause}{}", data.extra_keys(view));
        lines.push(ScreenLine::new(LineStyle::Dim, keys));
        lines
    };
    lines.resize(height, ScreenLine::default());
    for line in &mut lines {
        line.text = truncate_text(&line.text, width, '~');
    }
    lines
}

impl TopData for AdminApiSnapshot {
    fn update(&mut self, response: Value) {
        *self = Self::from_json(&response, Some(self));
    }

    fn row_count(&self) -> usize {
        self.policies.len()
    }

    fn extra_keys(&self, view: &ViewState) -> String {
        format!("  s sort: {}  up/down scroll", view.sort_order)
    }

    fn render_lines(
        &self,
        view: &ViewState,
        width: usize,
        height: Option<usize>,
    ) -> Vec<ScreenLine> {
        let mut lines = header_lines(self, view, height.map(|_| width));
        let Some(height) = height else {
            lines.extend(policy_lines(self, view, usize::MAX, width));
            for (title, ranking) in titled_rankings(self) {
                lines.push(ScreenLine::default());
                lines.extend(ranking_lines(title, ranking, 10, width));
            }
            return lines;
        };
        // The header is cut so that a policy stays visible.
        lines.truncate(height.saturating_sub(3));
        let available_lines = height.saturating_sub(lines.len());
        let ranking_height = if available_lines >= 12 {
            available_lines / 3
        } else {
            0
        };
        lines.extend(policy_lines(
            self,
            view,
            available_lines - ranking_height,
            width,
        ));
        if ranking_height > 0 {
            lines.push(ScreenLine::default());
            let entries = ranking_height.saturating_sub(2);
            let half = width / 2;
            let [(keys_title, keys), (paths_title, paths)] = titled_rankings(self);
            match width >= 100 {
                true => lines.extend(join_side_by_side(
                    ranking_lines(keys_title, keys, entries, half.saturating_sub(2)),
                    ranking_lines(paths_title, paths, entries, width - half),
                    half,
                )),
                false => lines.extend(ranking_lines(keys_title, keys, entries, width)),
            }
        }
        lines
    }
}

/// The lines above the policies. `width` is that of a screen, on which problems are wrapped.
fn header_lines(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    width: Option<usize>,
) -> Vec<ScreenLine> {
    let state = match (&view.last_error, view.is_paused) {
        (Some(_), _) => "[NO ANSWER] ",
        (None, true) => "[paused] ",
        (None, false) => "",
    };
    let after = |word: &str, text: &str| match text {
        "" => String::new(),
        text => format!("  {word} {text}"),
    };
    let title = format!(
        "tidegate {}  {state}{}  instance {}{}  up {}  generation {}{}",
        snapshot.version,
        snapshot.status,
        // The first 8 characters are enough to distinguish instances.
        snapshot.instance.get(..8).unwrap_or(&snapshot.instance),
        after("on", &snapshot.host),
        format_short_duration(snapshot.uptime_s),
        snapshot.generation,
        after("at", &view.address),
    );
    let mut lines = vec![ScreenLine::new(LineStyle::Title, title)];
    lines.extend(view.error_line());
    for TopAlert { is_error, text } in &snapshot.alerts {
        let style = if *is_error {
            LineStyle::Alert
        } else {
            LineStyle::Warning
        };
        let width = width.unwrap_or(usize::MAX);
        let wrapped = wrap_text(text, width, ["! ", "  "], MAX_ALERT_LINES);
        lines.extend(wrapped.into_iter().map(|text| ScreenLine::new(style, text)));
    }
    let counts = format!(
        "requests {}/s  refused {}  (of {} in {})  connections {}/{}",
        format_rate(snapshot.requests_per_s),
        format_share(snapshot.refused, snapshot.requests),
        snapshot.requests,
        format_short_duration(snapshot.window_s),
        snapshot.connections.0,
        snapshot.connections.1
    );
    let instances = snapshot.instances.map(|count| count.to_string());
    let instances = after("instances", &instances.unwrap_or_default());
    let without_store = match snapshot.without_store {
        [0, 0] => String::new(),
        counts => {
            let [admitted, refused] = counts.map(|count| format_share(count, snapshot.requests));
            format!("  without it: admitted {admitted}, refused {refused}")
        }
    };
    let store_style = if snapshot.store_up {
        LineStyle::Good
    } else {
        LineStyle::Alert
    };
    lines.extend([
        ScreenLine::new(LineStyle::Plain, counts),
        ScreenLine::new(
            store_style,
            format!("store {}{instances}{without_store}", snapshot.store),
        ),
        ScreenLine::new(LineStyle::Plain, latency_line(&snapshot.latency)),
        ScreenLine::default(),
    ]);
    lines
}

fn latency_line(latency: &[TopLatencyEntry]) -> String {
    let mut text = "decisions in the last minute:".to_owned();
    if latency.is_empty() {
        text.push_str(" none");
    }
    for TopLatencyEntry {
        source,
        count,
        p50_s,
        p99_s,
    } in latency
    {
        write!(
            text,
            "  {source} {count}, 50% in {}, 99% in {}",
            format_latency(*p50_s),
            format_latency(*p99_s)
        )
        .expect("writing into a String never fails");
    }
    text
}

/// Width of the last column of the policy table.
const SPARKLINE_WIDTH: usize = 23;

/// Column layout of the policy table.
struct PolicyColumns {
    name_width: usize,
    has_rates: bool,
    has_sparkline: bool,
}

/// The policy table with its header, in at most `max_lines` lines.
fn policy_lines(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    max_lines: usize,
    width: usize,
) -> Vec<ScreenLine> {
    if snapshot.policies.is_empty() {
        let text = "No policies are configured: every request passes.";
        return vec![ScreenLine::new(LineStyle::Plain, text)];
    }
    let sorted = sort_policies(&snapshot.policies, view.sort_order);
    let columns = PolicyColumns::new(&sorted, width);
    let titles = columns.format_row(
        ["POLICY", ""],
        ["passed/s", "refused/s"],
        ["passed", "refused", "share"],
        "last hour, refused",
    );
    let mut lines = vec![ScreenLine::new(LineStyle::TableHeader, titles)];
    // The header of the table takes one line.
    let max_rows = max_lines.saturating_sub(1);
    let first_row = view
        .scroll_offset
        .min(sorted.len().saturating_sub(max_rows.max(1)));
    let remaining = sorted.len() - first_row;
    let rows = if remaining > max_rows {
        max_rows.saturating_sub(1)
    } else {
        remaining
    };
    for policy in sorted.iter().skip(first_row).take(rows) {
        let is_refusing = policy.minutes.iter().rev().take(2).any(|(_, n)| *n > 0);
        let style = if is_refusing {
            LineStyle::Warning
        } else {
            LineStyle::Plain
        };
        lines.push(ScreenLine::new(
            style,
            columns.policy_row(policy, view.glyphs),
        ));
    }
    let hidden = (remaining - rows) as u64 + snapshot.omitted_policies;
    if hidden > 0 {
        lines.push(ScreenLine::new(
            LineStyle::Dim,
            format!("... {hidden} more"),
        ));
    }
    lines
}

fn sort_policies(policies: &[TopPolicyEntry], order: PolicySortOrder) -> Vec<&TopPolicyEntry> {
    let mut sorted: Vec<&TopPolicyEntry> = policies.iter().collect();
    match order {
        PolicySortOrder::Refused => {
            sorted.sort_by_key(|policy| Reverse((policy.hour_refused, policy.hour_passed)))
        }
        PolicySortOrder::Requests => {
            sorted.sort_by_key(|policy| Reverse(policy.hour_refused + policy.hour_passed))
        }
        PolicySortOrder::Name => sorted.sort_by(|a, b| a.name.cmp(&b.name)),
        PolicySortOrder::PolicyOrder => {}
    }
    sorted
}

impl PolicyColumns {
    fn new(policies: &[&TopPolicyEntry], width: usize) -> Self {
        let has_rates = policies.iter().any(|policy| policy.rates_per_s.is_some());
        let longest_name = policies
            .iter()
            .map(|policy| policy.name.len())
            .max()
            .unwrap_or(6);
        let numbers_width = 35 + if has_rates { 19 } else { 0 };
        // Names are more important than the sparkline.
        let has_sparkline = width >= numbers_width + SPARKLINE_WIDTH + longest_name.clamp(6, 24);
        let fixed_width = numbers_width + if has_sparkline { SPARKLINE_WIDTH } else { 0 };
        Self {
            name_width: longest_name.clamp(6, width.saturating_sub(fixed_width).max(8)),
            has_rates,
            has_sparkline,
        }
    }

    fn format_row(
        &self,
        [name, kind]: [&str; 2],
        [passed_per_s, refused_per_s]: [&str; 2],
        [passed, refused, share]: [&str; 3],
        sparkline: &str,
    ) -> String {
        let name_width = self.name_width;
        let rates = match self.has_rates {
            true => format!("{passed_per_s:>9} {refused_per_s:>9}"),
            false => String::new(),
        };
        let sparkline = if self.has_sparkline { sparkline } else { "" };
        let row = format!(
            "{:<name_width$} {kind:<6} {rates}{passed:>9} {refused:>9} {share:>7} {sparkline}",
            truncate_text(name, name_width, '~')
        );
        row.trim_end().to_owned()
    }

    fn policy_row(&self, policy: &TopPolicyEntry, glyphs: SparklineGlyphs) -> String {
        let (passed, refused) = (policy.hour_passed, policy.hour_refused);
        let rates = match policy.rates_per_s {
            Some((passed, refused)) => [passed, refused].map(format_rate),
            None => ["-", "-"].map(str::to_owned),
        };
        let share = format_share(refused, passed + refused);
        self.format_row(
            [&policy.name, policy.kind],
            rates.each_ref().map(String::as_str),
            [&passed.to_string(), &refused.to_string(), &share],
            &render_sparkline(&policy.minutes, glyphs),
        )
    }
}

fn titled_rankings(snapshot: &AdminApiSnapshot) -> [(&'static str, &[TopRankedEntry]); 2] {
    [
        ("KEYS REFUSED MOST BY A LIMIT", &snapshot.keys),
        ("PATHS REFUSED MOST BY A POLICY", &snapshot.paths),
    ]
}

/// A ranking with its header and at most `max_entries` entries.
pub(super) fn ranking_lines(
    title: &str,
    ranking: &[TopRankedEntry],
    max_entries: usize,
    width: usize,
) -> Vec<ScreenLine> {
    let title = format!("{:>13} {title}", "refused");
    let mut lines = vec![ScreenLine::new(LineStyle::TableHeader, title)];
    if ranking.is_empty() {
        let text = format!("{:>13} none recently", "-");
        lines.push(ScreenLine::new(LineStyle::Dim, text));
    }
    for TopRankedEntry {
        policy,
        text,
        count,
        error,
    } in ranking.iter().take(max_entries)
    {
        let count = match error {
            0 => count.to_string(),
            _ => format!("{}-{count}", count.saturating_sub(*error)),
        };
        // A policy is recognizable by its beginning, a key is not.
        let width_for_policy = width.saturating_sub(16 + text.len()).max(MIN_POLICY_WIDTH);
        let policy = truncate_text(policy, width_for_policy, '~');
        let text = truncate_text(&format!("{count:>13} {policy}  {text}"), width, '~');
        lines.push(ScreenLine::new(LineStyle::Plain, text));
    }
    lines
}

/// Joins two blocks of lines side by side; the right block starts at column `at`.
fn join_side_by_side(left: Vec<ScreenLine>, right: Vec<ScreenLine>, at: usize) -> Vec<ScreenLine> {
    let count = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let rows = (0..count).map(|_| (left.next(), right.next()));
    rows.map(|(left, right)| {
        let (left, right) = (left.unwrap_or_default(), right.unwrap_or_default());
        let text = format!("{:<at$}{}", left.text, right.text);
        ScreenLine::new(left.style, text)
    })
    .collect()
}

#[cfg(test)]
mod tests;
