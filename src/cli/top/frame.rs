//! What is shown, as lines of text: the same for a terminal of any size and for a pipe.

use super::seen::{Policy, Ranked, Seen, Times};
use std::cmp::Reverse;
use std::fmt::Write as _;

/// Less than this shows nothing useful.
pub(super) const LEAST: (usize, usize) = (48, 10);
/// Minutes in one letter of a sparkline.
const GROUP: usize = 3;

/// How a line is shown, where colours can be. What it says is said in words too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    #[default]
    Plain,
    Title,
    Head,
    Bad,
    Quiet,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) style: Style,
    /// Printable, and each letter one column wide.
    pub(super) text: String,
}

/// What comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Refused,
    Requests,
    Name,
    /// As they apply.
    Applied,
}

/// Letters of a sparkline: no request, requests and none refused, then more and more refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Glyphs {
    #[default]
    Ascii,
    Blocks,
}

/// How it is looked at.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    pub(super) order: Order,
    pub(super) glyphs: Glyphs,
    pub(super) paused: bool,
    /// Policies that are scrolled away.
    pub(super) scrolled: usize,
    /// Where it was asked.
    pub(super) from: String,
    /// Why the newest look failed; what is shown is older.
    pub(super) trouble: Option<String>,
}

impl Order {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Refused => Self::Requests,
            Self::Requests => Self::Name,
            Self::Name => Self::Applied,
            Self::Applied => Self::Refused,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Requests => "requests",
            Self::Name => "name",
            Self::Applied => "order",
        }
    }
}

impl Glyphs {
    /// Blocks where letters beyond ASCII are expected.
    pub(super) fn of_this_terminal() -> Self {
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
pub(super) fn whole(seen: &Seen, look: &Look, width: usize) -> String {
    let mut lines = top(seen, look);
    lines.extend(policies(seen, look, usize::MAX, width));
    for (title, ranking) in rankings(seen) {
        lines.push(Line::plain(String::new()));
        lines.extend(ranks(title, ranking, 10, width));
    }
    lines.iter().fold(String::new(), |mut text, line| {
        text.push_str(line.text.trim_end());
        text.push('\n');
        text
    })
}

/// A screen: exactly `height` lines, none wider than `width`.
pub(super) fn screen(seen: &Seen, look: &Look, width: usize, height: usize) -> Vec<Line> {
    if width < LEAST.0 || height < LEAST.1 {
        let text = format!("too small: {width}x{height}, needs {}x{}", LEAST.0, LEAST.1);
        return fit(vec![Line::bad(text)], width, height);
    }
    let keys = format!(
        "q quit  p {}  s sort: {}  up/down scroll",
        if look.paused { "go on" } else { "pause" },
        look.order.word()
    );
    let mut lines = top(seen, look);
    // The last line is for the keys, and at least one policy is seen whatever else there is to say.
    lines.truncate(height.saturating_sub(4));
    let room = height.saturating_sub(lines.len() + 1);
    let ranked = if room >= 12 { room / 3 } else { 0 };
    lines.extend(policies(seen, look, room.saturating_sub(ranked), width));
    if ranked > 0 {
        lines.push(Line::plain(String::new()));
        let half = width / 2;
        let [(keys_title, keys), (paths_title, paths)] = rankings(seen);
        match width >= 100 {
            true => lines.extend(beside(
                ranks(
                    keys_title,
                    keys,
                    ranked.saturating_sub(2),
                    half.saturating_sub(2),
                ),
                ranks(paths_title, paths, ranked.saturating_sub(2), width - half),
                half,
            )),
            false => lines.extend(ranks(keys_title, keys, ranked.saturating_sub(2), width)),
        }
    }
    let mut lines = fit(lines, width, height - 1);
    lines.push(Line::quiet(cut(&keys, width)));
    lines
}

fn top(seen: &Seen, look: &Look) -> Vec<Line> {
    let state = match (&look.trouble, look.paused) {
        (Some(_), _) => "[NO ANSWER] ",
        (None, true) => "[paused] ",
        (None, false) => "",
    };
    let from = if look.from.is_empty() {
        String::new()
    } else {
        format!("  at {}", look.from)
    };
    let mut lines = vec![Line {
        style: Style::Title,
        text: format!(
            "tidegate {}  {state}{}  instance {}  up {}  generation {}{from}",
            seen.version,
            seen.status,
            // As much of it as tells instances apart.
            seen.instance.get(..8).unwrap_or(&seen.instance),
            lasting(seen.uptime_s),
            seen.generation
        ),
    }];
    lines.extend(look.trouble.iter().map(|why| Line::bad(format!("! {why}"))));
    lines.extend(
        seen.alerts
            .iter()
            .map(|alert| Line::bad(format!("! {alert}"))),
    );
    let fleet = seen.instances.map_or(String::new(), |instances| {
        format!("  instances {instances}")
    });
    lines.push(Line::plain(format!(
        "requests {}/s  refused {}  degraded {}  (of {} in {})  connections {}/{}",
        rate(seen.rate),
        share(seen.refused, seen.requests),
        share(seen.degraded, seen.requests),
        seen.requests,
        lasting(seen.window_s),
        seen.connections.0,
        seen.connections.1
    )));
    let style = if seen.store_up {
        Style::Plain
    } else {
        Style::Bad
    };
    lines.push(Line {
        style,
        text: format!("store {}{fleet}", seen.store),
    });
    lines.push(Line::plain(decisions(&seen.latency)));
    lines.push(Line::plain(String::new()));
    lines
}

fn decisions(latency: &[Times]) -> String {
    let mut text = "decisions in the last minute:".to_owned();
    if latency.is_empty() {
        text.push_str(" none");
    }
    for Times {
        source,
        count,
        p50_s,
        p99_s,
    } in latency
    {
        write!(
            text,
            "  {source} {count}, 50% in {}, 99% in {}",
            took(*p50_s),
            took(*p99_s)
        )
        .expect("a String takes everything");
    }
    text
}

/// A table with a head, `room` lines at most.
fn policies(seen: &Seen, look: &Look, room: usize, width: usize) -> Vec<Line> {
    if seen.policies.is_empty() {
        return vec![Line::plain(
            "There is no policy: every request passes.".to_owned(),
        )];
    }
    let mut shown: Vec<&Policy> = seen.policies.iter().collect();
    match look.order {
        Order::Refused => {
            shown.sort_by_key(|policy| Reverse((policy.hour_refused, policy.hour_passed)))
        }
        Order::Requests => {
            shown.sort_by_key(|policy| Reverse(policy.hour_refused + policy.hour_passed))
        }
        Order::Name => shown.sort_by(|a, b| a.name.cmp(&b.name)),
        Order::Applied => {}
    }
    let live = shown.iter().any(|policy| policy.rates.is_some());
    let has_spark = width >= 76;
    let spark = if has_spark { "last hour, refused" } else { "" };
    let rates = if live {
        format!("{:>9} {:>9}", "passed/s", "refused/s")
    } else {
        String::new()
    };
    let fixed = 34 + rates.len() + if has_spark { 23 } else { 0 };
    let names = shown
        .iter()
        .map(|policy| policy.name.len())
        .max()
        .unwrap_or(6);
    let name = names.clamp(6, width.saturating_sub(fixed).max(8));
    let head = format!(
        "{:<name$} {:<6} {rates}{:>9} {:>9} {:>7} {spark}",
        "POLICY", "", "passed", "refused", "share"
    );
    let mut lines = vec![Line {
        style: Style::Head,
        text: cut(&head, width),
    }];
    // One line is the head.
    let room = room.saturating_sub(1);
    let skipped = look.scrolled.min(shown.len().saturating_sub(room.max(1)));
    let left = shown.len() - skipped;
    let rows = if left > room {
        room.saturating_sub(1)
    } else {
        left
    };
    for policy in shown.iter().skip(skipped).take(rows) {
        let rates = match (live, policy.rates) {
            (true, Some((passed, refused))) => format!("{:>9} {:>9}", rate(passed), rate(refused)),
            (true, None) => format!("{:>9} {:>9}", "-", "-"),
            (false, _) => String::new(),
        };
        let all = policy.hour_passed + policy.hour_refused;
        let spark = if has_spark {
            sparkline(&policy.minutes, look.glyphs)
        } else {
            String::new()
        };
        let text = format!(
            "{:<name$} {:<6} {rates}{:>9} {:>9} {:>7} {spark}",
            cut(&policy.name, name),
            policy.kind,
            policy.hour_passed,
            policy.hour_refused,
            share(policy.hour_refused, all)
        );
        lines.push(Line::plain(cut(&text, width)));
    }
    let hidden = (left - rows) as u64 + seen.more_policies;
    if hidden > 0 {
        lines.push(Line::quiet(format!("... {hidden} more")));
    }
    lines
}

fn rankings(seen: &Seen) -> [(&'static str, &[Ranked]); 2] {
    [
        ("KEYS REFUSED MOST", &seen.keys),
        ("PATHS REFUSED MOST", &seen.paths),
    ]
}

/// A head, and `most` lines.
fn ranks(title: &str, ranking: &[Ranked], most: usize, width: usize) -> Vec<Line> {
    let mut lines = vec![Line {
        style: Style::Head,
        text: format!("{:>13} {title}", "refused"),
    }];
    if ranking.is_empty() {
        lines.push(Line::quiet(format!("{:>13} nobody lately", "-")));
    }
    for Ranked {
        policy,
        text,
        count,
        error,
    } in ranking.iter().take(most)
    {
        let count = match error {
            0 => count.to_string(),
            _ => format!("{}-{count}", count.saturating_sub(*error)),
        };
        lines.push(Line::plain(cut(
            &format!("{count:>13} {policy}  {text}"),
            width,
        )));
    }
    lines
}

/// Two columns, the right one from column `at` on.
fn beside(left: Vec<Line>, right: Vec<Line>, at: usize) -> Vec<Line> {
    let count = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let rows = (0..count).map(|_| (left.next(), right.next()));
    rows.map(|(left, right)| {
        let style = left
            .as_ref()
            .or(right.as_ref())
            .map_or(Style::Plain, |line| line.style);
        let text = |line: Option<Line>| line.map(|line| line.text).unwrap_or_default();
        Line {
            style,
            text: format!("{:<at$}{}", text(left), text(right)),
        }
    })
    .collect()
}

fn fit(mut lines: Vec<Line>, width: usize, height: usize) -> Vec<Line> {
    lines.resize(height, Line::plain(String::new()));
    for line in &mut lines {
        line.text = cut(&line.text, width);
    }
    lines
}

/// At most `width` letters, the last of them a `~` if there were more.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars()
        .take(width.saturating_sub(1))
        .chain(['~'])
        .take(width)
        .collect()
}

fn sparkline(minutes: &[(u64, u64)], glyphs: Glyphs) -> String {
    let groups: Vec<(u64, u64)> = minutes
        .chunks(GROUP)
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
fn rate(per_s: f64) -> String {
    match per_s {
        0.0 => "0".to_owned(),
        per_s if per_s < 9.95 => format!("{per_s:.1}"),
        per_s => format!("{per_s:.0}"),
    }
}

fn share(part: u64, all: u64) -> String {
    match (part, all) {
        (_, 0) => "-".to_owned(),
        (0, _) => "0%".to_owned(),
        _ => format!("{:.1}%", 100.0 * part as f64 / all as f64),
    }
}

fn took(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 0.001 => format!("{:.0}us", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1e3),
        Some(s) => format!("{s:.1}s"),
    }
}

fn lasting(s: u64) -> String {
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{}h", s / 86_400, s % 86_400 / 3600),
    }
}

impl Line {
    fn plain(text: String) -> Self {
        Self {
            style: Style::Plain,
            text,
        }
    }

    fn quiet(text: String) -> Self {
        Self {
            style: Style::Quiet,
            text,
        }
    }

    fn bad(text: String) -> Self {
        Self {
            style: Style::Bad,
            text,
        }
    }
}

#[cfg(test)]
mod tests;
