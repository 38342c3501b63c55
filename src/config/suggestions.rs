//! Suggests the value that an invalid value probably means.

use super::schema::ValueKind;
use super::value_tree::ValueContent;
use super::values::format_duration;
use crate::limiter::time_zone_names;
use crate::text::find_similar;
use std::time::Duration;

/// Least similarity of a word to the suggested one.
const MIN_LIKENESS: f64 = 0.8;

/// Names of time zones share their beginnings, so they must be more similar.
const MIN_ZONE_LIKENESS: f64 = 0.9;

/// Words of other products, and the keyword of tidegate.
const KEYWORD_SYNONYMS: [(&str, &str); 12] = [
    ("gcra", "token_bucket"),
    ("generic_cell_rate", "token_bucket"),
    ("moving_window", "sliding_log"),
    ("rolling_window", "sliding_log"),
    ("sliding", "sliding_log"),
    ("connections", "concurrency"),
    ("deny", "reject"),
    ("block", "deny"),
    ("fail_open", "open"),
    ("fail_closed", "closed"),
    ("valkey", "redis"),
    ("disabled", "off"),
];

/// Formats the valid value of `kind` that `value` probably means: `; did you mean "1m"?`. Returns
/// an empty string if there is none.
pub(super) fn suggest_value(kind: &ValueKind, value: &ValueContent) -> String {
    let suggestion = find_suggestion(kind, value);
    suggestion.map_or_else(String::new, |found| format!("; did you mean {found}?"))
}

fn find_suggestion(kind: &ValueKind, value: &ValueContent) -> Option<String> {
    match kind {
        ValueKind::Either(first, _, second) => {
            find_suggestion(first, value).or_else(|| find_suggestion(second, value))
        }
        ValueKind::Keyword(words) => {
            let word = value
                .as_str()?
                .trim_start_matches(|c: char| !c.is_alphabetic());
            suggest_keyword(words, word)
        }
        ValueKind::Duration { min, max } => suggest_duration_text(value, *min, *max),
        ValueKind::ByteSize { min, max } => suggest_size(value)
            .filter(|(bytes, _)| (*min..=*max).contains(bytes))
            .map(|(_, text)| format!("\"{text}\"")),
        ValueKind::Bool => suggest_bool(value).map(str::to_owned),
        ValueKind::Integer { min, max } => suggest_integer(value)
            .filter(|number| (*min..=*max).contains(number))
            .map(|number| number.to_string()),
        _ => None,
    }
}

/// The word that is most like `text`, if any is like it.
pub(super) fn find_similar_word<'w>(words: &[&'w str], text: &str) -> Option<&'w str> {
    find_similar(words.iter().copied(), text, MIN_LIKENESS)
}

fn suggest_keyword(words: &[&str], text: &str) -> Option<String> {
    let plain = text.trim().to_ascii_lowercase().replace(['-', ' '], "_");
    let synonym = || {
        let is_known = |(other, word): &&(&str, &str)| *other == plain && words.contains(word);
        KEYWORD_SYNONYMS
            .iter()
            .find(is_known)
            .map(|(_, word)| *word)
    };
    let exact = words.iter().copied().find(|word| *word == plain);
    exact
        .or_else(synonym)
        .or_else(|| find_similar_word(words, &plain))
        .map(|word| format!("\"{word}\""))
}

/// Formats the time zone that `name` probably means, as [`suggest_value`] does: another case, a
/// city alone, or a misspelled name.
pub(super) fn suggest_time_zone(name: &str) -> String {
    let plain = |name: &str| name.trim().to_ascii_lowercase().replace([' ', '-'], "_");
    let (names, meant): (Vec<String>, String) = (time_zone_names().collect(), plain(name));
    let is_city = |name: &&String| {
        let city = name.rsplit('/').next();
        city.is_some_and(|city| plain(city) == meant)
    };
    let likeness = |name: &str| strsim::jaro_winkler(&plain(name), &meant);
    let similar = || {
        let most = names
            .iter()
            .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        most.filter(|name| likeness(name) > MIN_ZONE_LIKENESS)
    };
    let exact = names.iter().find(|name| plain(name) == meant);
    let found = exact
        .or_else(|| names.iter().find(is_city))
        .or_else(similar);
    found.map_or_else(String::new, |found| format!("; did you mean \"{found}\"?"))
}

fn suggest_duration_text(value: &ValueContent, min: Duration, max: Duration) -> Option<String> {
    let duration = suggest_duration(value).filter(|duration| (min..=max).contains(duration))?;
    Some(match value {
        ValueContent::Integer(seconds) => format!("\"{seconds}s\""),
        _ => format!("\"{}\"", format_duration(duration)),
    })
}

/// Reads a number as seconds, and text with other units, spaces or fractions.
fn suggest_duration(value: &ValueContent) -> Option<Duration> {
    let text = match value {
        ValueContent::Integer(seconds) => {
            return u64::try_from(*seconds).ok().map(Duration::from_secs);
        }
        ValueContent::Float(seconds) => return duration_from_ms(seconds * 1000.0),
        ValueContent::Text(text) => text.to_ascii_lowercase(),
        _ => return None,
    };
    let mut rest = text.trim();
    let mut total_ms = 0.0;
    while !rest.is_empty() {
        let (number, unit, after) = split_quantity(rest)?;
        total_ms += number * milliseconds_per_unit(unit)?;
        rest = after;
    }
    duration_from_ms(total_ms)
}

/// Splits `1.5 min 30s` into the number, its unit, and the rest.
fn split_quantity(text: &str) -> Option<(f64, &str, &str)> {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let unit_start = text.find(|c: char| !is_number(c)).unwrap_or(text.len());
    let (number, rest) = text.split_at_checked(unit_start)?;
    let rest = rest.trim_start();
    let unit_end = rest
        .find(|c: char| !c.is_ascii_alphabetic())
        .unwrap_or(rest.len());
    let (unit, after) = rest.split_at_checked(unit_end)?;
    Some((number.parse().ok()?, unit, after.trim_start()))
}

fn milliseconds_per_unit(unit: &str) -> Option<f64> {
    let unit = unit
        .strip_suffix('s')
        .filter(|unit| unit.len() > 1)
        .unwrap_or(unit);
    Some(match unit {
        "ms" | "msec" | "milli" | "milli_second" | "millisecond" => 1.0,
        "" | "s" | "sec" | "second" => 1000.0,
        "m" | "min" | "minute" => 60_000.0,
        "h" | "hr" | "hour" => 3_600_000.0,
        "d" | "day" => 86_400_000.0,
        "w" | "week" => 604_800_000.0,
        _ => return None,
    })
}

fn duration_from_ms(ms: f64) -> Option<Duration> {
    let duration = Duration::try_from_secs_f64(ms / 1000.0).ok()?;
    // Durations have whole milliseconds.
    let rounded = Duration::from_millis(u64::try_from(duration.as_millis()).ok()?);
    (duration.abs_diff(rounded) < Duration::from_micros(1)).then_some(rounded)
}

/// Reads `64KB`, `10 MiB` or a number of bytes. Returns the bytes and the valid text.
fn suggest_size(value: &ValueContent) -> Option<(u64, String)> {
    let text = match value {
        ValueContent::Integer(bytes) => {
            return u64::try_from(*bytes)
                .ok()
                .map(|bytes| (bytes, bytes.to_string()));
        }
        ValueContent::Text(text) => text.to_ascii_lowercase(),
        _ => return None,
    };
    let (number, unit, rest) = split_quantity(text.trim())?;
    let (shift, unit) = match unit {
        "" | "b" | "byte" | "bytes" => (0, ""),
        "k" | "kb" | "ki" | "kib" => (10, "KiB"),
        "m" | "mb" | "mi" | "mib" => (20, "MiB"),
        "g" | "gb" | "gi" | "gib" => (30, "GiB"),
        _ => return None,
    };
    let text = format!("{number}{unit}");
    let number: u64 = number.to_string().parse().ok()?;
    (rest.is_empty()).then_some((number.checked_mul(1 << shift)?, text))
}

fn suggest_bool(value: &ValueContent) -> Option<&'static str> {
    match value {
        ValueContent::Integer(0) => Some("false"),
        ValueContent::Integer(1) => Some("true"),
        ValueContent::Text(text) => match text.trim().to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" | "enabled" => Some("true"),
            "false" | "no" | "off" | "0" | "disabled" => Some("false"),
            _ => None,
        },
        _ => None,
    }
}

fn suggest_integer(value: &ValueContent) -> Option<i64> {
    match value {
        ValueContent::Text(text) => text.trim().replace(['_', ','], "").parse().ok(),
        ValueContent::Float(number) => number.to_string().parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl From<&str> for ValueContent {
        fn from(text: &str) -> Self {
            Self::Text(text.to_owned())
        }
    }

    impl From<i64> for ValueContent {
        fn from(number: i64) -> Self {
            Self::Integer(number)
        }
    }

    fn suggest(kind: &ValueKind, value: impl Into<ValueContent>) -> String {
        let text = suggest_value(kind, &value.into());
        text.trim_start_matches("; did you mean ")
            .trim_end_matches('?')
            .to_owned()
    }

    #[test]
    fn suggests_durations() {
        let kind = ValueKind::Duration {
            min: Duration::from_millis(1),
            max: Duration::from_secs(86_400 * 400),
        };
        for (text, meant) in [
            ("1min", "\"1m\""),
            ("5 minutes", "\"5m\""),
            ("1 s", "\"1s\""),
            ("1S", "\"1s\""),
            ("60", "\"1m\""),
            ("1.5s", "\"1500ms\""),
            ("1hr", "\"1h\""),
            ("1w", "\"7d\""),
            ("30m1h", "\"90m\""),
            ("1us", ""),
            ("soon", ""),
            ("", ""),
            ("500d", ""),
        ] {
            assert_eq!(suggest(&kind, text), meant, "{text}");
        }
        assert_eq!(suggest(&kind, 60_i64), "\"60s\"");
        assert_eq!(suggest(&kind, ValueContent::Float(0.5)), "\"500ms\"");
        assert_eq!(suggest(&kind, -1_i64), "");
    }

    #[test]
    fn suggests_keywords_numbers_and_sizes() {
        let algorithms = ValueKind::Keyword(&["sliding_log", "sliding_window", "token_bucket"]);
        for (text, meant) in [
            ("sliding-window", "\"sliding_window\""),
            ("Sliding Log", "\"sliding_log\""),
            ("gcra", "\"token_bucket\""),
            ("GCRA", "\"token_bucket\""),
            ("tokenbucket", "\"token_bucket\""),
            ("xyz", ""),
        ] {
            assert_eq!(suggest(&algorithms, text), meant, "{text}");
        }
        let actions = ValueKind::Keyword(&["limit", "allow", "deny"]);
        assert_eq!(suggest(&actions, "block"), "\"deny\"");
        let size = ValueKind::ByteSize {
            min: 1024,
            max: u64::MAX,
        };
        for (text, meant) in [
            ("64KB", "\"64KiB\""),
            ("10 mb", "\"10MiB\""),
            ("1.5GiB", ""),
            ("64KBit", ""),
            ("1b", ""),
        ] {
            assert_eq!(suggest(&size, text), meant, "{text}");
        }
        let number = ValueKind::Integer {
            min: 0,
            max: 10_000,
        };
        assert_eq!(suggest(&number, "1_000"), "1000");
        assert_eq!(suggest(&number, "many"), "");
        assert_eq!(suggest(&number, "20000"), "");
        assert_eq!(suggest(&ValueKind::Bool, "yes"), "true");
        assert_eq!(suggest(&ValueKind::Bool, "maybe"), "");
    }
}
