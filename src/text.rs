//! Texts for people: truncated, wrapped, and safe for terminals.

use indicatif::HumanCount;
use serde::de::IgnoredAny;
use std::error::Error;
use std::fmt;
use time::OffsetDateTime;
use time::macros::format_description;

/// A secret; its `Debug` text is masked.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretText(String);

impl SecretText {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Whether a text is one valid JSON document (RFC 8259).
pub fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Formats an error and its sources on one line.
pub fn format_error_chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(Some(error), |&cause| cause.source());
    let texts: Vec<_> = causes.map(ToString::to_string).collect();
    texts.join(": ")
}

/// The word that is most like `text` by Jaro-Winkler similarity (0 to 1), if that is above
/// `min_likeness`.
pub fn find_similar<W: AsRef<str>>(
    words: impl IntoIterator<Item = W>,
    text: &str,
    min_likeness: f64,
) -> Option<W> {
    let likeness = |word: &W| strsim::jaro_winkler(word.as_ref(), text);
    let words = words.into_iter();
    let best = words.max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    best.filter(|word| likeness(word) > min_likeness)
}

/// A number as `1,234,567`.
pub fn format_count(number: u64) -> String {
    HumanCount(number).to_string()
}

/// A number of things, such as `1 line` and `1,234 lines`. `noun` is the singular.
pub fn count_noun(count: u64, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", format_count(count))
}

/// Formats a rate per second: `0`, `0.4`, `12`, `12000`.
pub fn format_rate(per_s: f64) -> String {
    match per_s {
        0.0 => "0".to_owned(),
        per_s if per_s < 9.95 => format!("{per_s:.1}"),
        per_s => format!("{per_s:.0}"),
    }
}

/// Formats a ratio in percent: `-`, `0%`, `5.5%`.
pub fn format_share(part: u64, all: u64) -> String {
    match (part, all) {
        (_, 0) => "-".to_owned(),
        (0, _) => "0%".to_owned(),
        _ => format!("{:.1}%", 100.0 * part as f64 / all as f64),
    }
}

/// Formats a latency: `-`, `400us`, `12.5ms`, `1.5s`.
pub fn format_latency(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 0.001 => format!("{:.0}us", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1e3),
        Some(s) => format!("{s:.1}s"),
    }
}

/// The two largest units of a duration of a minute or more: `(3, "m", 5, "s")`.
fn largest_units(s: u64) -> (u64, &'static str, u64, &'static str) {
    match s {
        0..3600 => (s / 60, "m", s % 60, "s"),
        3600..86_400 => (s / 3600, "h", s % 3600 / 60, "m"),
        _ => (s / 86_400, "d", s % 86_400 / 3600, "h"),
    }
}

/// Formats a duration in at most two units: `5s`, `3m5s`, `1h2m`, `2d4h`.
pub fn format_short_duration(s: u64) -> String {
    match largest_units(s) {
        _ if s < 60 => format!("{s}s"),
        (many, unit, few, lower_unit) => format!("{many}{unit}{few}{lower_unit}"),
    }
}

/// Formats a duration in at most two units: `1.5 s`, `12 m 30 s`, `3 h 5 m`.
pub fn format_wait(us: u64) -> String {
    let s = us.div_ceil(1_000_000);
    match largest_units(s) {
        _ if s < 60 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        (many, unit, few, lower_unit) => format!("{many} {unit} {few} {lower_unit}"),
    }
}

/// Formats a time as `2026-11-19 13:55:36` in UTC.
pub fn format_time(at_us: u64) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let at = i64::try_from(at_us / 1_000_000)
        .ok()
        .and_then(|at_s| OffsetDateTime::from_unix_timestamp(at_s).ok());
    at.and_then(|at| at.format(&format).ok())
        .unwrap_or_default()
}

/// Formats a time as `2026-11-22T09:14:03Z`.
pub fn format_rfc3339(at_us: u64) -> String {
    format_time(at_us).replace(' ', "T") + "Z"
}

/// Formats a time range. The date appears once if both times have the same date.
pub fn format_time_range(from_us: u64, to_us: u64, dash: char) -> String {
    let (from, to) = (format_time(from_us), format_time(to_us));
    let time = match (from.get(..10), to.split_once(' ')) {
        (Some(from_day), Some((day, time))) if day == from_day => time,
        _ => &to,
    };
    format!("{from} {dash} {time}")
}

/// Truncates a text to `width` characters. The last one is `mark` if the text was longer.
pub fn truncate_text(text: &str, width: usize, mark: char) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept = text.chars().take(width.saturating_sub(1));
    kept.chain([mark]).take(width).collect()
}

/// Wraps a text at spaces into at most `max_lines` lines of `width` characters. The first line
/// starts with `first`, the others with `next`. A long word, or the last line, may be longer.
pub fn wrap_text(
    text: &str,
    width: usize,
    [first, next]: [&str; 2],
    max_lines: usize,
) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), first.to_owned());
    let mut length = first.chars().count();
    let mut is_line_start = true;
    for word in text.split(' ') {
        let word_length = word.chars().count();
        if !is_line_start && length + 1 + word_length > width && lines.len() + 1 < max_lines {
            lines.push(std::mem::replace(&mut line, next.to_owned()));
            length = next.chars().count();
            is_line_start = true;
        }
        if !is_line_start {
            line.push(' ');
            length += 1;
        }
        line.push_str(word);
        length += word_length;
        is_line_start = false;
    }
    lines.push(line);
    lines
}

/// Wraps a text at spaces into lines of `width` characters, without spaces at their ends. The first
/// line starts with `start`, the others are indented by its width.
pub fn wrap_indented(start: &str, text: &str, width: usize) -> String {
    let indent = " ".repeat(start.len());
    let lines = wrap_text(text, width, [start, &indent], usize::MAX);
    lines
        .iter()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// Escapes characters that a terminal would not show as themselves. Quotes stay.
pub fn escape_unprintable(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '"' | '\'' => escaped.push(letter),
            _ => escaped.extend(letter.escape_debug()),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_range_repeats_the_date_only_if_it_differs() {
        let from_us = 1_795_000_000_000_000;
        let to = |seconds: u64| format_time_range(from_us, from_us + seconds * 1_000_000, '…');
        assert_eq!(to(60), "2026-11-18 11:06:40 … 11:07:40");
        assert_eq!(to(86_460), "2026-11-18 11:06:40 … 2026-11-19 11:07:40");
    }
}
