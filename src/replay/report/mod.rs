//! What came of a replay: the figures, and three ways to tell them.

mod html;
mod json;
mod text;

use super::Settings;
use super::lacks::lacks;
use super::lines::{Format, Wanted};
use super::order::Source;
use super::run::{Books, Judge, PolicyBook};
use super::suggest::{Peaks, Suggestion};
use super::tally::{Bin, Series};
use crate::policy::Action;
use time::OffsetDateTime;
use time::macros::format_description;

/// All figures of one replay.
#[derive(Debug)]
pub struct Report {
    logs: Vec<Log>,
    /// One set of policies, or several that were compared.
    sets: Vec<Set>,
    /// Forwarded by the first set and not by the second, and the other way round.
    parted: [u64; 2],
    percent: Option<f64>,
    /// Bounds of the chart's time (s).
    from_s: u64,
    to_s: u64,
}

/// What was read of one log.
#[derive(Debug)]
pub(super) struct Log {
    name: String,
    format: Format,
    lines: u64,
    requests: u64,
    other: u64,
    broken: u64,
    /// Number and beginning of broken lines, shown so that no terminal obeys them.
    examples: Vec<(u64, String)>,
    /// Why it ended too early.
    fault: Option<String>,
}

/// What one set of policies did.
#[derive(Debug)]
pub(super) struct Set {
    name: String,
    books: Books,
    policies: Vec<PolicyWords>,
    top: Vec<Top>,
    suggestions: Vec<(usize, Vec<Suggestion>)>,
    /// What couldn't be judged.
    lacks: Vec<String>,
    evicted: u64,
}

/// What a policy is, for people.
#[derive(Debug)]
struct PolicyWords {
    name: String,
    shadow: bool,
    /// It has no limits.
    action: Option<&'static str>,
}

/// One of the keys that were refused most.
#[derive(Debug)]
struct Top {
    policy: String,
    shadow: bool,
    key: String,
    requests: u64,
    refused: u64,
    error: u64,
    first_us: u64,
    last_us: u64,
}

impl Report {
    pub(super) fn new(
        logs: Vec<Log>,
        sets: Vec<Set>,
        parted: [u64; 2],
        settings: &Settings,
    ) -> Self {
        let from_s = sets
            .iter()
            .map(|set| set.books.first_us / 1_000_000)
            .min()
            .unwrap_or_default();
        let to_s = sets
            .iter()
            .map(|set| set.books.last_us / 1_000_000 + 1)
            .max()
            .unwrap_or_default();
        Self {
            logs,
            sets,
            parted,
            percent: settings.suggest,
            from_s,
            to_s,
        }
    }

    /// For a terminal so many columns wide.
    pub fn text(&self, width: usize, is_bold: bool) -> String {
        text::write(self, width, is_bold)
    }

    /// For scripts.
    pub fn json(&self) -> String {
        json::write(self)
    }

    /// A page that needs nothing else.
    pub fn html(&self) -> String {
        html::write(self)
    }

    fn requests(&self) -> u64 {
        self.logs.iter().map(|log| log.requests).sum()
    }

    fn lines(&self) -> u64 {
        self.logs.iter().map(|log| log.lines).sum()
    }

    /// How a plot of at most so many steps divides the time: the width of one in seconds, and how many there are. None is
    /// wider than another, or steady traffic would look like a comb.
    fn grid(&self, most: usize) -> (u64, usize) {
        let span_s = self.to_s.saturating_sub(self.from_s).max(1);
        let counted_s = self
            .sets
            .iter()
            .map(|set| set.books.series.width_s())
            .max()
            .unwrap_or(1);
        let width_s = span_s
            .div_ceil((most as u64).max(1))
            .next_multiple_of(counted_s.max(1));
        (
            width_s,
            usize::try_from(span_s.div_ceil(width_s))
                .unwrap_or(most)
                .clamp(1, most.max(1)),
        )
    }

    fn bins(&self, series: &Series, most: usize) -> Vec<Bin> {
        let (width_s, count) = self.grid(most);
        series.over(self.from_s, width_s, count)
    }

    /// What the reader should know before he believes the figures.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for log in &self.logs {
            let name = log.name.escape_debug();
            if let Some(fault) = &log.fault {
                warnings.push(format!(
                    "{name}: it ended too early ({fault}): what was read until then is reported"
                ));
            }
            if log.broken > 0 {
                warnings.push(format!(
                    "{name}: {} of {} lines are broken",
                    count(log.broken),
                    count(log.lines)
                ));
                warnings.extend(
                    log.examples
                        .iter()
                        .map(|(line, text)| format!("{name}: line {line}: {text}")),
                );
            }
            if log.other > 0 {
                warnings.push(format!(
                    "{name}: {} lines tell of no request",
                    count(log.other)
                ));
            }
        }
        for set in &self.sets {
            let of_set = if self.sets.len() > 1 {
                format!("{}: ", set.name.escape_debug())
            } else {
                String::new()
            };
            warnings.extend(
                set.lacks
                    .iter()
                    .map(|sentence| format!("{of_set}{sentence}")),
            );
            if set.evicted > 0 {
                warnings.push(format!(
                    "{of_set}{} counters were given up for want of memory: figures may be too low",
                    count(set.evicted)
                ));
            }
        }
        // These are the same for all sets.
        if let Some(refused) = self
            .sets
            .first()
            .map(|set| set.books.told.refused_then)
            .filter(|then| *then > 0)
        {
            warnings.push(format!(
                "{} requests were answered 429 then; they are judged like the others",
                count(refused)
            ));
        }
        if let Some(late) = self
            .sets
            .first()
            .map(|set| set.books.late)
            .filter(|late| *late > 0)
        {
            warnings.push(format!(
                "{} requests stand more than 10 s too late in the log: they were judged when they were read",
                count(late)
            ));
        }
        warnings
    }
}

impl Log {
    pub(super) fn of(source: Source, format: Format) -> Self {
        let Source { input, counts, .. } = source;
        let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).escape_debug().to_string();
        Self {
            name: input.name,
            format,
            lines: counts.lines,
            requests: counts.requests,
            other: counts.other,
            broken: counts.broken,
            examples: counts
                .examples
                .iter()
                .map(|(line, text)| (*line, shown(text)))
                .collect(),
            fault: input.fault.map(|fault| fault.to_string()),
        }
    }
}

impl Set {
    pub(super) fn of(name: String, judge: Judge<'_>, wanted: &Wanted, settings: &Settings) -> Self {
        let policies = judge.table.policies();
        let mut top = Vec::new();
        let mut suggestions = Vec::new();
        for (at, (policy, book)) in policies.iter().zip(&judge.books.policies).enumerate() {
            top.extend(book.keys.top(settings.top).into_iter().map(|seen| {
                Top {
                    policy: policy.name.to_string(),
                    shadow: policy.shadow,
                    // The policy's name stands beside it.
                    key: seen
                        .name
                        .split_once('/')
                        .map_or("(everybody)", |(_, values)| values)
                        .to_owned(),
                    requests: seen.requests,
                    refused: seen.refused,
                    error: seen.error,
                    first_us: seen.first_us,
                    last_us: seen.last_us,
                }
            }));
            let drawn = judge.peaks.as_ref().zip(settings.suggest);
            if let (Action::Limit(quota), Some((peaks, percent))) = (&policy.action, drawn) {
                suggestions.push((at, Peaks::suggest(peaks, at, &quota.limits, percent)));
            }
        }
        top.sort_by_key(|top| std::cmp::Reverse(top.refused));
        top.truncate(settings.top);
        let words = policies.iter().map(|policy| PolicyWords {
            name: policy.name.to_string(),
            shadow: policy.shadow,
            action: match policy.action {
                Action::Limit(_) => None,
                Action::Allow => Some("allow"),
                Action::Deny => Some("deny"),
            },
        });
        Self {
            name,
            policies: words.collect(),
            top,
            suggestions,
            lacks: lacks(judge.table, &judge.books.told, wanted),
            evicted: judge.evicted(),
            books: judge.books,
        }
    }
}

impl Set {
    /// What became of the requests.
    fn outcomes(&self) -> [(&'static str, u64); 6] {
        let books = &self.books;
        [
            ("forwarded", books.forwarded),
            ("of them held back", books.delayed),
            ("rejected (429)", books.limited),
            ("denied (403)", books.denied),
            ("without a key (400)", books.bad_key),
            ("malformed (400)", books.malformed),
        ]
    }

    /// What a policy did, if there is one of that name.
    fn book(&self, policy: &str) -> Option<&PolicyBook> {
        let at = self
            .policies
            .iter()
            .position(|words| words.name == policy)?;
        self.books.policies.get(at)
    }
}

/// The policies of two sets, each once.
fn names<'s>(first: &'s Set, second: &'s Set) -> Vec<&'s str> {
    let mut names: Vec<&str> = Vec::new();
    for policy in first.policies.iter().chain(&second.policies) {
        if !names.contains(&policy.name.as_str()) {
            names.push(&policy.name);
        }
    }
    names
}

/// `1,234,567`.
fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `2026-11-19 13:55:36`, in UTC.
fn moment(at_us: u64) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let at = i64::try_from(at_us / 1_000_000)
        .ok()
        .and_then(|at_s| OffsetDateTime::from_unix_timestamp(at_s).ok());
    at.and_then(|at| at.format(&format).ok())
        .unwrap_or_default()
}

/// From one moment to another; a day that both have is said once.
fn span(from_us: u64, to_us: u64) -> String {
    let (from, to) = (moment(from_us), moment(to_us));
    let time = match (from.get(..10), to.split_once(' ')) {
        (Some(from_day), Some((day, time))) if day == from_day => time,
        _ => &to,
    };
    format!("{from} … {time}")
}

#[allow(clippy::cast_precision_loss, reason = "shares are for people")]
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 * 100.0 / whole as f64
    }
}

/// `12.3 %`; what is little isn't nothing.
fn share(part: u64, whole: u64) -> String {
    match percent(part, whole) {
        _ if part == 0 => "0 %".to_owned(),
        share if share < 0.01 => "<0.01 %".to_owned(),
        share if share < 10.0 => format!("{share:.2} %"),
        share => format!("{share:.1} %"),
    }
}

/// `at least 5` where some are forgotten.
fn keys(book: &PolicyBook) -> String {
    let (keys, exact) = book.keys.count();
    format!("{}{}", if exact { "" } else { ">" }, count(keys))
}

#[cfg(test)]
mod tests {
    use super::span;

    #[test]
    fn a_day_is_said_once_and_another_one_too() {
        let from_us = 1_795_000_000_000_000;
        let to = |seconds: u64| span(from_us, from_us + seconds * 1_000_000);
        assert_eq!(to(60), "2026-11-18 11:06:40 … 11:07:40");
        assert_eq!(to(86_460), "2026-11-18 11:06:40 … 2026-11-19 11:07:40");
    }
}
