//! The report for a terminal.

use super::super::suggest::{Drawn, Suggestion};
use super::super::tally::Series;
use super::{Report, Set, count, keys, moment, names, share, span};
use crate::config::duration_words;
use std::fmt::Write;
use std::time::Duration;

/// Names longer than that are cut.
const NAME: usize = 18;

pub(super) fn write(report: &Report, width: usize, is_bold: bool) -> String {
    let mut page = Page {
        text: String::new(),
        width: width.clamp(60, 200),
        is_bold,
    };
    page.head(report);
    if report.sets.len() > 1 {
        page.compare(report);
    }
    for set in &report.sets {
        if report.sets.len() > 1 {
            page.title(&format!("BY {}", set.name.escape_debug()));
        }
        page.outcomes(set);
        page.policies(set);
        page.chart(report, set);
        page.top(set);
        page.suggestions(set, report.percent);
    }
    page.warnings(report);
    page.text
}

struct Page {
    text: String,
    width: usize,
    is_bold: bool,
}

impl Page {
    fn line(&mut self, text: &str) {
        self.text.push_str(text.trim_end());
        self.text.push('\n');
    }

    fn title(&mut self, text: &str) {
        self.text.push('\n');
        let text = if self.is_bold {
            format!("\u{1b}[1m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        };
        self.line(&text);
    }

    fn head(&mut self, report: &Report) {
        let files: Vec<String> = report
            .logs
            .iter()
            .map(|log| format!("{} ({})", log.name.escape_debug(), log.format))
            .collect();
        let lines = count(report.lines());
        self.line(&format!(
            "{} requests in {lines} lines of {}",
            count(report.requests()),
            files.join(", ")
        ));
        if let Some(set) = report.sets.first().filter(|_| report.requests() > 0) {
            let (first, last) = (moment(set.books.first_us), moment(set.books.last_us));
            self.line(&format!("from {first} to {last} UTC"));
        }
    }

    fn compare(&mut self, report: &Report) {
        let [first, second, ..] = report.sets.as_slice() else {
            return;
        };
        self.title("SIDE BY SIDE");
        let cell = NAME + 4;
        let row = |name: &str, one: String, other: String| {
            format!("{:<cell$} {one:>24} {other:>24}", cut(name, cell))
        };
        let name = |set: &Set| cut(&set.name.escape_debug().to_string(), 24);
        self.line(&row("", name(first), name(second)));
        for ((label, one), (_, other)) in first.outcomes().into_iter().zip(second.outcomes()) {
            if one + other > 0 {
                self.line(&row(label, count(one), count(other)));
            }
        }
        for policy in names(first, second) {
            let refused = |set: &Set| {
                set.book(policy).map_or("-".to_owned(), |book| {
                    format!("{} of {}", count(book.refused()), count(book.matched()))
                })
            };
            self.line(&row(policy, refused(first), refused(second)));
        }
        let [gained, lost] = report.parted;
        self.line(&format!(
            "Refused by the second only: {}. By the first only: {}.",
            count(gained),
            count(lost)
        ));
    }

    fn outcomes(&mut self, set: &Set) {
        let books = &set.books;
        let all = books.told.requests;
        let parts = set.outcomes().into_iter().filter(|(_, number)| *number > 0);
        let parts: Vec<String> = parts
            .map(|(label, number)| format!("{} {label} ({})", count(number), share(number, all)))
            .collect();
        self.text.push('\n');
        self.wrapped("", &parts.join(", "));
    }

    fn policies(&mut self, set: &Set) {
        self.title(&format!(
            "{:<NAME$} {:>11} {:>11} {:>10} {:>8} {:>8} {:>7}",
            "POLICY", "MATCHED", "ALLOWED", "REJECTED", "SHARE", "KEYS", "TOUCHED"
        ));
        for (words, book) in set.policies.iter().zip(&set.books.policies) {
            let (matched, refused) = (book.matched(), book.refused());
            let allowed = book.allowed + book.delayed + book.exempt;
            let has_keys = words.action.is_none();
            let keys = if has_keys { keys(book) } else { "-".to_owned() };
            let touched = if has_keys {
                count(book.keys.touched())
            } else {
                "-".to_owned()
            };
            self.line(&format!(
                "{:<NAME$} {:>11} {:>11} {:>10} {:>8} {keys:>8} {touched:>7}",
                cut(&words.name, NAME),
                count(matched),
                count(allowed),
                count(refused),
                share(refused, matched),
            ));
            let mut notes = Vec::new();
            if words.shadow {
                notes.push("shadow: refuses nobody yet".to_owned());
            }
            notes.extend(words.action.map(|action| format!("action = \"{action}\"")));
            for (number, label) in [
                (book.delayed, "held back"),
                (book.blocked, "of them by block_for"),
            ] {
                if number > 0 {
                    notes.push(format!("{} {label}", count(number)));
                }
            }
            if refused > 0 {
                notes.push(span(book.first_refused_us, book.last_refused_us));
            }
            if !notes.is_empty() {
                self.line(&format!("  {}", notes.join("; ")));
            }
        }
        if set.books.delayed > 0 {
            let longest_ms = set.books.longest_delay_us / 1000;
            self.line(&format!("Held back for {longest_ms} ms at most."));
        }
    }

    fn chart(&mut self, report: &Report, set: &Set) {
        let most = self.width.saturating_sub(NAME + 14);
        let (width_s, columns) = report.grid(most);
        if set.books.told.requests == 0 {
            return;
        }
        let each = about(width_s);
        self.title(&format!(
            "WHEN: one column is {each}; the number is that of the highest"
        ));
        let row = |name: &str, series: &Series, refused: bool| {
            let bins = report.bins(series, most);
            let counts = bins
                .iter()
                .map(|bin| if refused { bin.refused } else { bin.all });
            let (bars, most) = bars(&counts.collect::<Vec<_>>());
            format!("{:<NAME$} {bars} {:>10}", cut(name, NAME), count(most))
        };
        self.line(&row("requests", &set.books.series, false));
        self.line(&row("refused", &set.books.series, true));
        for (words, book) in set
            .policies
            .iter()
            .zip(&set.books.policies)
            .filter(|(_, book)| book.refused() > 0)
        {
            self.line(&row(&words.name, &book.series, true));
        }
        let (from, to) = (
            moment(report.from_s * 1_000_000),
            moment(report.to_s * 1_000_000),
        );
        let gap = columns.saturating_sub(from.len() + to.len());
        if gap > 0 {
            self.line(&format!("{:NAME$} {from}{:gap$}{to}", "", ""));
        }
    }

    fn top(&mut self, set: &Set) {
        if set.top.is_empty() {
            return;
        }
        // Both times where there is room for them.
        let is_wide = self.width >= 100;
        let times = set.top.iter().map(|top| match is_wide {
            true => span(top.first_us, top.last_us),
            false => moment(top.first_us),
        });
        let times: Vec<String> = times.collect();
        let widest = times
            .iter()
            .map(|times| times.chars().count())
            .max()
            .unwrap_or_default();
        let room = self.width.saturating_sub(NAME + 24 + widest);
        self.title(&format!(
            "{:<NAME$} {:<room$} {:>10} {:>9}  {}",
            "MOST LIMITED KEYS",
            "",
            "REJECTED",
            "OF",
            if is_wide { "FIRST … LAST" } else { "FIRST" }
        ));
        for (top, times) in set.top.iter().zip(&times) {
            let error = if top.error > 0 {
                format!(" (or {} more)", count(top.error))
            } else {
                String::new()
            };
            self.line(&format!(
                "{:<NAME$} {:<room$} {:>10} {:>9}  {times}{error}",
                cut(&top.policy, NAME),
                cut(&top.key, room),
                count(top.refused),
                count(top.requests),
            ));
        }
    }

    fn suggestions(&mut self, set: &Set, percent: Option<f64>) {
        let Some(percent) = percent.filter(|_| !set.suggestions.is_empty()) else {
            return;
        };
        self.title(&format!(
            "SUGGESTED: limits that would have touched at most {percent} % of the keys"
        ));
        for (at, suggestions) in &set.suggestions {
            let name = set.policies.get(*at).map_or("", |words| &words.name);
            for suggestion in suggestions {
                self.suggestion(name, suggestion);
            }
        }
    }

    fn suggestion(&mut self, policy: &str, suggestion: &Suggestion) {
        let limit = &suggestion.limit.limit;
        let per = duration_words(Duration::from_micros(limit.per_us));
        let name = if *suggestion.limit.name == *policy {
            policy.to_owned()
        } else {
            format!("{policy} / {}", suggestion.limit.name)
        };
        let Some(drawn) = &suggestion.drawn else {
            self.line(&format!("{name}: nothing to draw from"));
            return;
        };
        let Drawn {
            requests,
            touched,
            touched_now,
            keys,
            ..
        } = drawn;
        self.line(&format!(
            "{name}: requests = {requests}, per = \"{per}\" touches {} of {} keys ({})",
            count(*touched),
            count(*keys),
            share(*touched, *keys),
        ));
        self.line(&format!(
            "  now it is {}, which touches {} ({}) at most",
            limit.requests,
            count(*touched_now),
            share(*touched_now, *keys),
        ));
        let quantiles = drawn.quantiles.iter().map(|(of_1000, peak)| match of_1000 {
            1000 => format!("the busiest {}", count(*peak)),
            _ => format!("{} % up to {}", f64::from(*of_1000) / 10.0, count(*peak)),
        });
        let quantiles = quantiles.collect::<Vec<_>>().join(", ");
        self.wrapped(
            "  ",
            &format!("at its busiest a key asked, per {per}: {quantiles}"),
        );
        let counts: Vec<u64> = drawn.histogram.iter().map(|(_, count)| *count).collect();
        let last = drawn.histogram.last().map_or(0, |(upto, _)| *upto);
        self.line(&format!(
            "  keys by their peak: 1 {} {} (each step doubles)",
            bars(&counts).0,
            count(last)
        ));
        if drawn.one_in > 1 {
            self.line(&format!("  drawn from one key in {}", drawn.one_in));
        }
    }

    fn warnings(&mut self, report: &Report) {
        let warnings = report.warnings();
        if warnings.is_empty() {
            return;
        }
        self.title("TO BE KNOWN");
        for warning in warnings {
            self.wrapped("- ", &warning);
        }
    }

    /// Breaks a text at blanks.
    fn wrapped(&mut self, mark: &str, text: &str) {
        let mut line = mark.to_owned();
        let indent = " ".repeat(mark.chars().count());
        let mut length = indent.len();
        for word in text.split(' ') {
            let word_length = word.chars().count();
            if length > indent.len() && length + 1 + word_length > self.width {
                self.line(&line);
                line.clone_from(&indent);
                length = indent.len();
            }
            if length > indent.len() {
                line.push(' ');
                length += 1;
            }
            let _written = write!(line, "{word}");
            length += word_length;
        }
        self.line(&line);
    }
}

/// A time in one round number.
fn about(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{} s", seconds.max(1)),
        120..7200 => format!("{} min", (seconds + 30) / 60),
        7200..172_800 => format!("{} h", (seconds + 1800) / 3600),
        _ => format!("{} d", (seconds + 43_200) / 86_400),
    }
}

/// At most so many signs of it.
fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars()
        .take(most.saturating_sub(1))
        .chain(['…'])
        .collect()
}

/// A bar for each number, and the largest. What is little is still seen.
fn bars(counts: &[u64]) -> (String, u64) {
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
