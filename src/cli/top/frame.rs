//! Renders a snapshot as lines of text, for a terminal of any size and for a pipe.

use super::format::{
    format_latency, format_rate, format_share, format_short_duration, truncate_text, wrap_text,
};
use super::help::HELP;
use super::screen_line::{LineStyle, ScreenLine};
use super::snapshot::{
    AdminApiSnapshot, TopAlert, TopLatencyEntry, TopPolicyEntry, TopRankedEntry,
};
use super::sparkline::{SparklineGlyphs, render_sparkline};
use std::cmp::Reverse;
use std::fmt::Write as _;

/// Minimum screen width and height.
pub(super) const MIN_SCREEN_SIZE: (usize, usize) = (48, 10);

/// Sort order of the policy table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PolicySortOrder {
    #[default]
    Refused,
    Requests,
    Name,
    /// The order in which the policies apply.
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

impl PolicySortOrder {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Refused => Self::Requests,
            Self::Requests => Self::Name,
            Self::Name => Self::PolicyOrder,
            Self::PolicyOrder => Self::Refused,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Requests => "requests",
            Self::Name => "name",
            Self::PolicyOrder => "order",
        }
    }
}

/// Maximum number of lines of a problem on a screen.
const MAX_ALERT_LINES: usize = 2;

/// Number of characters of a policy's name that a long key leaves visible.
const MIN_POLICY_WIDTH: usize = 8;

/// Renders all data as text for a pipe.
pub(super) fn render_plain_text(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    width: usize,
) -> String {
    let mut lines = header_lines(snapshot, view, None);
    lines.extend(policy_lines(snapshot, view, usize::MAX, width));
    for (title, ranking) in titled_rankings(snapshot) {
        lines.push(ScreenLine::plain(String::new()));
        lines.extend(ranking_lines(title, ranking, 10, width));
    }
    lines.iter().fold(String::new(), |mut text, line| {
        text.push_str(line.text.trim_end());
        text.push('\n');
        text
    })
}

/// Renders a screen of exactly `height` lines, none wider than `width`.
pub(super) fn render_screen(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    width: usize,
    height: usize,
) -> Vec<ScreenLine> {
    if width < MIN_SCREEN_SIZE.0 || height < MIN_SCREEN_SIZE.1 {
        let text = format!(
            "too small: {width}x{height}, needs {}x{}",
            MIN_SCREEN_SIZE.0, MIN_SCREEN_SIZE.1
        );
        return fit_to_screen(vec![ScreenLine::alert(text)], width, height);
    }
    let keys = format!(
        "q quit  ? help  p {}  s sort: {}  up/down scroll",
        if view.is_paused { "resume" } else { "pause" },
        view.sort_order.label()
    );
    if view.shows_help {
        let help = HELP.lines().map(|line| ScreenLine::plain(line.to_owned()));
        let mut lines = fit_to_screen(help.collect(), width, height - 1);
        lines.push(ScreenLine::dim(truncate_text(&keys, width)));
        return lines;
    }
    let mut lines = header_lines(snapshot, view, Some(width));
    // The header is cut so that a policy and the last line, which lists the keys, stay visible.
    lines.truncate(height.saturating_sub(4));
    let available_lines = height.saturating_sub(lines.len() + 1);
    let ranking_height = if available_lines >= 12 {
        available_lines / 3
    } else {
        0
    };
    lines.extend(policy_lines(
        snapshot,
        view,
        available_lines.saturating_sub(ranking_height),
        width,
    ));
    if ranking_height > 0 {
        lines.push(ScreenLine::plain(String::new()));
        let half = width / 2;
        let [(keys_title, keys), (paths_title, paths)] = titled_rankings(snapshot);
        match width >= 100 {
            true => lines.extend(join_side_by_side(
                ranking_lines(
                    keys_title,
                    keys,
                    ranking_height.saturating_sub(2),
                    half.saturating_sub(2),
                ),
                ranking_lines(
                    paths_title,
                    paths,
                    ranking_height.saturating_sub(2),
                    width - half,
                ),
                half,
            )),
            false => lines.extend(ranking_lines(
                keys_title,
                keys,
                ranking_height.saturating_sub(2),
                width,
            )),
        }
    }
    let mut lines = fit_to_screen(lines, width, height - 1);
    lines.push(ScreenLine::dim(truncate_text(&keys, width)));
    lines
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
    let from = if view.address.is_empty() {
        String::new()
    } else {
        format!("  at {}", view.address)
    };
    let host = match snapshot.host.as_str() {
        "" => String::new(),
        host => format!("  on {host}"),
    };
    let mut lines = vec![ScreenLine {
        style: LineStyle::Title,
        text: format!(
            "tidegate {}  {state}{}  instance {}{host}  up {}  generation {}{from}",
            snapshot.version,
            snapshot.status,
            // The first 8 characters are enough to distinguish instances.
            snapshot.instance.get(..8).unwrap_or(&snapshot.instance),
            format_short_duration(snapshot.uptime_s),
            snapshot.generation
        ),
    }];
    lines.extend(
        view.last_error
            .iter()
            .map(|error| ScreenLine::alert(format!("! {error}"))),
    );
    for TopAlert { is_error, text } in &snapshot.alerts {
        let style = if *is_error {
            LineStyle::Alert
        } else {
            LineStyle::Warning
        };
        let wrapped = match width {
            Some(width) => wrap_text(&format!("! {text}"), width, MAX_ALERT_LINES),
            None => vec![format!("! {text}")],
        };
        lines.extend(wrapped.into_iter().map(|text| ScreenLine { style, text }));
    }
    let instances = snapshot.instances.map_or(String::new(), |instances| {
        format!("  instances {instances}")
    });
    lines.push(ScreenLine::plain(format!(
        "requests {}/s  refused {}  degraded {}  (of {} in {})  connections {}/{}",
        format_rate(snapshot.requests_per_s),
        format_share(snapshot.refused, snapshot.requests),
        format_share(snapshot.degraded, snapshot.requests),
        snapshot.requests,
        format_short_duration(snapshot.window_s),
        snapshot.connections.0,
        snapshot.connections.1
    )));
    let style = if snapshot.store_up {
        LineStyle::Good
    } else {
        LineStyle::Alert
    };
    lines.push(ScreenLine {
        style,
        text: format!("store {}{instances}", snapshot.store),
    });
    lines.push(ScreenLine::plain(latency_line(&snapshot.latency)));
    lines.push(ScreenLine::plain(String::new()));
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
        return vec![ScreenLine::plain(
            "No policies are configured: every request passes.".to_owned(),
        )];
    }
    let sorted = sort_policies(&snapshot.policies, view.sort_order);
    let columns = PolicyColumns::new(&sorted, width);
    let mut lines = vec![ScreenLine {
        style: LineStyle::TableHeader,
        text: truncate_text(columns.header().trim_end(), width),
    }];
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
        let text = columns.row(policy, view.glyphs);
        let is_refusing = policy.minutes.iter().rev().take(2).any(|(_, n)| *n > 0);
        let style = if is_refusing {
            LineStyle::Warning
        } else {
            LineStyle::Plain
        };
        lines.push(ScreenLine {
            style,
            text: truncate_text(text.trim_end(), width),
        });
    }
    let hidden = (remaining - rows) as u64 + snapshot.omitted_policies;
    if hidden > 0 {
        lines.push(ScreenLine::dim(format!("... {hidden} more")));
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

    fn header(&self) -> String {
        let name_width = self.name_width;
        let rates = if self.has_rates {
            format!("{:>9} {:>9}", "passed/s", "refused/s")
        } else {
            String::new()
        };
        let sparkline = if self.has_sparkline {
            "last hour, refused"
        } else {
            ""
        };
        format!(
            "{:<name_width$} {:<6} {rates}{:>9} {:>9} {:>7} {sparkline}",
            "POLICY", "", "passed", "refused", "share"
        )
    }

    fn row(&self, policy: &TopPolicyEntry, glyphs: SparklineGlyphs) -> String {
        let name_width = self.name_width;
        let rates = match (self.has_rates, policy.rates_per_s) {
            (true, Some((passed, refused))) => {
                format!("{:>9} {:>9}", format_rate(passed), format_rate(refused))
            }
            (true, None) => format!("{:>9} {:>9}", "-", "-"),
            (false, _) => String::new(),
        };
        let all = policy.hour_passed + policy.hour_refused;
        let sparkline = if self.has_sparkline {
            render_sparkline(&policy.minutes, glyphs)
        } else {
            String::new()
        };
        format!(
            "{:<name_width$} {:<6} {rates}{:>9} {:>9} {:>7} {sparkline}",
            truncate_text(&policy.name, name_width),
            policy.kind,
            policy.hour_passed,
            policy.hour_refused,
            format_share(policy.hour_refused, all)
        )
    }
}

fn titled_rankings(snapshot: &AdminApiSnapshot) -> [(&'static str, &[TopRankedEntry]); 2] {
    [
        ("KEYS REFUSED MOST", &snapshot.keys),
        ("PATHS REFUSED MOST", &snapshot.paths),
    ]
}

/// A ranking with its header and at most `max_entries` entries.
pub(super) fn ranking_lines(
    title: &str,
    ranking: &[TopRankedEntry],
    max_entries: usize,
    width: usize,
) -> Vec<ScreenLine> {
    let mut lines = vec![ScreenLine {
        style: LineStyle::TableHeader,
        text: format!("{:>13} {title}", "refused"),
    }];
    if ranking.is_empty() {
        lines.push(ScreenLine::dim(format!("{:>13} none recently", "-")));
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
        let policy = truncate_text(policy, width_for_policy);
        lines.push(ScreenLine::plain(truncate_text(
            &format!("{count:>13} {policy}  {text}"),
            width,
        )));
    }
    lines
}

/// Joins two blocks of lines side by side; the right block starts at column `at`.
fn join_side_by_side(left: Vec<ScreenLine>, right: Vec<ScreenLine>, at: usize) -> Vec<ScreenLine> {
    let count = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let rows = (0..count).map(|_| (left.next(), right.next()));
    rows.map(|(left, right)| {
        let style = left
            .as_ref()
            .or(right.as_ref())
            .map_or(LineStyle::Plain, |line| line.style);
        let text = |line: Option<ScreenLine>| line.map(|line| line.text).unwrap_or_default();
        ScreenLine {
            style,
            text: format!("{:<at$}{}", text(left), text(right)),
        }
    })
    .collect()
}

pub(super) fn fit_to_screen(
    mut lines: Vec<ScreenLine>,
    width: usize,
    height: usize,
) -> Vec<ScreenLine> {
    lines.resize(height, ScreenLine::plain(String::new()));
    for line in &mut lines {
        line.text = truncate_text(&line.text, width);
    }
    lines
}

#[cfg(test)]
mod tests;
