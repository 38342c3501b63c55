//! What is shown, as lines of text: the same for a terminal of any size and for a pipe.

use super::snapshot::{AdminApiSnapshot, TopLatencyEntry, TopPolicyEntry, TopRankedEntry};
use std::cmp::Reverse;
use std::fmt::Write as _;

/// Less than this shows nothing useful.
pub(super) const MIN_SIZE: (usize, usize) = (48, 10);
/// Minutes in one letter of a sparkline.
const MINUTES_PER_GLYPH: usize = 3;

/// How a line is shown, where colours can be. What it says is said in words too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LineStyle {
    #[default]
    Plain,
    Title,
    TableHeader,
    Alert,
    Dim,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScreenLine {
    pub(super) style: LineStyle,
    /// Printable, and each letter one column wide.
    pub(super) text: String,
}

/// What comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PolicySortOrder {
    #[default]
    Refused,
    Requests,
    Name,
    /// As they apply.
    PolicyOrder,
}

/// Letters of a sparkline: no request, requests and none refused, then more and more refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SparklineGlyphs {
    #[default]
    Ascii,
    Blocks,
}

/// How it is looked at.
#[derive(Clone, Debug, Default)]
pub(super) struct ViewState {
    pub(super) sort_order: PolicySortOrder,
    pub(super) glyphs: SparklineGlyphs,
    pub(super) is_paused: bool,
    /// Policies that are scrolled away.
    pub(super) scroll_offset: usize,
    /// Where it was asked.
    pub(super) address: String,
    /// Why the newest look failed; what is shown is older.
    pub(super) last_error: Option<String>,
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

impl SparklineGlyphs {
    /// Blocks where letters beyond ASCII are expected.
    pub(super) fn from_locale() -> Self {
        let named = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .filter_map(|name| std::env::var(name).ok());
        let locale = named
            .into_iter()
            .find(|value| !value.is_empty())
            .unwrap_or_default()
            .to_ascii_lowercase();
        match locale.contains("utf-8") || locale.contains("utf8") {
            true => Self::Blocks,
            false => Self::Ascii,
        }
    }

    fn ramp(self) -> [char; 9] {
        match self {
            Self::Ascii => [' ', '.', ':', '-', '=', '+', '*', '#', '@'],
            Self::Blocks => [' ', '·', '▁', '▂', '▃', '▄', '▅', '▆', '█'],
        }
    }
}

/// All of it, for a pipe.
pub(super) fn render_table(snapshot: &AdminApiSnapshot, view: &ViewState, width: usize) -> String {
    let mut lines = header_lines(snapshot, view);
    lines.extend(policy_lines(snapshot, view, usize::MAX, width));
    for (title, ranking) in rankings(snapshot) {
        lines.push(ScreenLine::plain(String::new()));
        lines.extend(ranking_lines(title, ranking, 10, width));
    }
    lines.iter().fold(String::new(), |mut text, line| {
        text.push_str(line.text.trim_end());
        text.push('\n');
        text
    })
}

/// A screen: exactly `height` lines, none wider than `width`.
pub(super) fn render_screen(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    width: usize,
    height: usize,
) -> Vec<ScreenLine> {
    if width < MIN_SIZE.0 || height < MIN_SIZE.1 {
        let text = format!(
            "too small: {width}x{height}, needs {}x{}",
            MIN_SIZE.0, MIN_SIZE.1
        );
        return fit_to_screen(vec![ScreenLine::alert(text)], width, height);
    }
    let keys = format!(
        "q quit  p {}  s sort: {}  up/down scroll",
        if view.is_paused { "go on" } else { "pause" },
        view.sort_order.label()
    );
    let mut lines = header_lines(snapshot, view);
    // The last line is for the keys, and at least one policy is seen whatever else there is to say.
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
        let [(keys_title, keys), (paths_title, paths)] = rankings(snapshot);
        match width >= 100 {
            true => lines.extend(join_columns(
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

fn header_lines(snapshot: &AdminApiSnapshot, view: &ViewState) -> Vec<ScreenLine> {
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
    let mut lines = vec![ScreenLine {
        style: LineStyle::Title,
        text: format!(
            "tidegate {}  {state}{}  instance {}  up {}  generation {}{from}",
            snapshot.version,
            snapshot.status,
            // As much of it as tells instances apart.
            snapshot.instance.get(..8).unwrap_or(&snapshot.instance),
            format_uptime(snapshot.uptime_s),
            snapshot.generation
        ),
    }];
    lines.extend(
        view.last_error
            .iter()
            .map(|why| ScreenLine::alert(format!("! {why}"))),
    );
    lines.extend(
        snapshot
            .alerts
            .iter()
            .map(|alert| ScreenLine::alert(format!("! {alert}"))),
    );
    let instances = snapshot.instances.map_or(String::new(), |instances| {
        format!("  instances {instances}")
    });
    lines.push(ScreenLine::plain(format!(
        "requests {}/s  refused {}  degraded {}  (of {} in {})  connections {}/{}",
        format_rate(snapshot.requests_per_s),
        format_share(snapshot.refused, snapshot.requests),
        format_share(snapshot.degraded, snapshot.requests),
        snapshot.requests,
        format_uptime(snapshot.window_s),
        snapshot.connections.0,
        snapshot.connections.1
    )));
    let style = if snapshot.store_up {
        LineStyle::Plain
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
        .expect("a String takes everything");
    }
    text
}

/// A table with a head, `room` lines at most.
fn policy_lines(
    snapshot: &AdminApiSnapshot,
    view: &ViewState,
    max_lines: usize,
    width: usize,
) -> Vec<ScreenLine> {
    if snapshot.policies.is_empty() {
        return vec![ScreenLine::plain(
            "There is no policy: every request passes.".to_owned(),
        )];
    }
    let mut sorted: Vec<&TopPolicyEntry> = snapshot.policies.iter().collect();
    match view.sort_order {
        PolicySortOrder::Refused => {
            sorted.sort_by_key(|policy| Reverse((policy.hour_refused, policy.hour_passed)))
        }
        PolicySortOrder::Requests => {
            sorted.sort_by_key(|policy| Reverse(policy.hour_refused + policy.hour_passed))
        }
        PolicySortOrder::Name => sorted.sort_by(|a, b| a.name.cmp(&b.name)),
        PolicySortOrder::PolicyOrder => {}
    }
    let has_rates = sorted.iter().any(|policy| policy.rates_per_s.is_some());
    let has_spark = width >= 76;
    let spark = if has_spark { "last hour, refused" } else { "" };
    let rates = if has_rates {
        format!("{:>9} {:>9}", "passed/s", "refused/s")
    } else {
        String::new()
    };
    let fixed = 34 + rates.len() + if has_spark { 23 } else { 0 };
    let names = sorted
        .iter()
        .map(|policy| policy.name.len())
        .max()
        .unwrap_or(6);
    let name_width = names.clamp(6, width.saturating_sub(fixed).max(8));
    let head = format!(
        "{:<name_width$} {:<6} {rates}{:>9} {:>9} {:>7} {spark}",
        "POLICY", "", "passed", "refused", "share"
    );
    let mut lines = vec![ScreenLine {
        style: LineStyle::TableHeader,
        text: truncate_text(&head, width),
    }];
    // One line is the head.
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
        let rates = match (has_rates, policy.rates_per_s) {
            (true, Some((passed, refused))) => {
                format!("{:>9} {:>9}", format_rate(passed), format_rate(refused))
            }
            (true, None) => format!("{:>9} {:>9}", "-", "-"),
            (false, _) => String::new(),
        };
        let all = policy.hour_passed + policy.hour_refused;
        let spark = if has_spark {
            render_sparkline(&policy.minutes, view.glyphs)
        } else {
            String::new()
        };
        let text = format!(
            "{:<name_width$} {:<6} {rates}{:>9} {:>9} {:>7} {spark}",
            truncate_text(&policy.name, name_width),
            policy.kind,
            policy.hour_passed,
            policy.hour_refused,
            format_share(policy.hour_refused, all)
        );
        lines.push(ScreenLine::plain(truncate_text(&text, width)));
    }
    let hidden = (remaining - rows) as u64 + snapshot.omitted_policies;
    if hidden > 0 {
        lines.push(ScreenLine::dim(format!("... {hidden} more")));
    }
    lines
}

fn rankings(snapshot: &AdminApiSnapshot) -> [(&'static str, &[TopRankedEntry]); 2] {
    [
        ("KEYS REFUSED MOST", &snapshot.keys),
        ("PATHS REFUSED MOST", &snapshot.paths),
    ]
}

/// A head, and `most` lines.
fn ranking_lines(
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
        lines.push(ScreenLine::dim(format!("{:>13} nobody lately", "-")));
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
        lines.push(ScreenLine::plain(truncate_text(
            &format!("{count:>13} {policy}  {text}"),
            width,
        )));
    }
    lines
}

/// Two columns, the right one from column `at` on.
fn join_columns(left: Vec<ScreenLine>, right: Vec<ScreenLine>, at: usize) -> Vec<ScreenLine> {
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

fn fit_to_screen(mut lines: Vec<ScreenLine>, width: usize, height: usize) -> Vec<ScreenLine> {
    lines.resize(height, ScreenLine::plain(String::new()));
    for line in &mut lines {
        line.text = truncate_text(&line.text, width);
    }
    lines
}

/// At most `width` letters, the last of them a `~` if there were more.
fn truncate_text(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars()
        .take(width.saturating_sub(1))
        .chain(['~'])
        .take(width)
        .collect()
}

fn render_sparkline(minutes: &[(u64, u64)], glyphs: SparklineGlyphs) -> String {
    let groups: Vec<(u64, u64)> = minutes
        .chunks(MINUTES_PER_GLYPH)
        .map(|group| {
            group.iter().fold((0, 0), |(all, bad), (more, refused)| {
                (all + more, bad + refused)
            })
        })
        .collect();
    let most = groups
        .iter()
        .map(|(_, refused)| *refused)
        .max()
        .unwrap_or_default()
        .max(1);
    let ramp = glyphs.ramp();
    let heights = ramp.len() as u64 - 2;
    let letter = |(all, refused): &(u64, u64)| {
        let at = match (all, refused) {
            (0, _) => 0,
            (_, 0) => 1,
            _ => 1 + (refused * heights).div_ceil(most),
        };
        usize::try_from(at)
            .ok()
            .and_then(|at| ramp.get(at))
            .copied()
            .unwrap_or(' ')
    };
    groups.iter().map(letter).collect()
}

/// `0`, `0.4`, `12`, `12000`.
fn format_rate(per_s: f64) -> String {
    match per_s {
        0.0 => "0".to_owned(),
        per_s if per_s < 9.95 => format!("{per_s:.1}"),
        per_s => format!("{per_s:.0}"),
    }
}

fn format_share(part: u64, all: u64) -> String {
    match (part, all) {
        (_, 0) => "-".to_owned(),
        (0, _) => "0%".to_owned(),
        _ => format!("{:.1}%", 100.0 * part as f64 / all as f64),
    }
}

fn format_latency(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 0.001 => format!("{:.0}us", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1e3),
        Some(s) => format!("{s:.1}s"),
    }
}

fn format_uptime(s: u64) -> String {
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{}h", s / 86_400, s % 86_400 / 3600),
    }
}

impl ScreenLine {
    fn plain(text: String) -> Self {
        Self {
            style: LineStyle::Plain,
            text,
        }
    }

    fn dim(text: String) -> Self {
        Self {
            style: LineStyle::Dim,
            text,
        }
    }

    fn alert(text: String) -> Self {
        Self {
            style: LineStyle::Alert,
            text,
        }
    }
}

#[cfg(test)]
mod tests;
