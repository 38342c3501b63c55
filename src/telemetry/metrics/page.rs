//! The text that Prometheus reads.

use super::Summed;
use std::fmt::Write as _;

/// How a page is written; they differ in little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text format 0.0.4, which everybody reads.
    Classic,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A page that is being written.
pub(super) struct Page {
    format: Format,
    text: String,
}

/// One metric with all its samples, which stand together.
pub(super) struct Family<'p> {
    text: &'p mut String,
    name: &'static str,
    kind: Kind,
}

impl Format {
    /// By the `Accept` field: OpenMetrics if it is named there.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Classic
        }
    }

    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Page {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            text: String::with_capacity(16 << 10),
        }
    }

    /// Begins a metric. A counter's name comes without `_total`; `help` needs no escaping.
    pub(super) fn family(&mut self, kind: Kind, name: &'static str, help: &str) -> Family<'_> {
        let (kind_word, total) = match kind {
            // Before OpenMetrics, the ending belonged to the family's name too.
            Kind::Counter if self.format == Format::Classic => ("counter", "_total"),
            Kind::Counter => ("counter", ""),
            Kind::Gauge => ("gauge", ""),
            Kind::Histogram => ("histogram", ""),
        };
        push(
            &mut self.text,
            format_args!("# HELP {name}{total} {help}\n# TYPE {name}{total} {kind_word}\n"),
        );
        Family {
            text: &mut self.text,
            name,
            kind,
        }
    }

    pub(super) fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

impl Family<'_> {
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: u64) {
        let ending = if self.kind == Kind::Counter {
            "_total"
        } else {
            ""
        };
        self.line(ending, labels, format_args!("{value}"));
    }

    /// Microseconds, written as seconds.
    pub(super) fn micros(&mut self, value_us: i64) {
        let (sign, micros) = (if value_us < 0 { "-" } else { "" }, value_us.unsigned_abs());
        self.line(
            "",
            &[],
            format_args!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000),
        );
    }

    pub(super) fn histogram(&mut self, labels: &[(&str, &str)], summed: &Summed) {
        let ends = summed
            .buckets
            .iter()
            .copied()
            .chain([("+Inf", summed.count)]);
        for (end, count) in ends {
            let labels: Vec<(&str, &str)> = labels.iter().copied().chain([("le", end)]).collect();
            self.line("_bucket", &labels, format_args!("{count}"));
        }
        self.line("_sum", labels, format_args!("{}", summed.sum.as_secs_f64()));
        self.line("_count", labels, format_args!("{}", summed.count));
    }

    fn line(&mut self, ending: &str, labels: &[(&str, &str)], value: std::fmt::Arguments<'_>) {
        push(self.text, format_args!("{}{ending}", self.name));
        for (at, (label, text)) in labels.iter().enumerate() {
            push(
                self.text,
                format_args!("{}{label}=\"", if at == 0 { '{' } else { ',' }),
            );
            for letter in text.chars() {
                match letter {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    letter => self.text.push(letter),
                }
            }
            self.text.push('"');
        }
        push(
            self.text,
            format_args!("{} {value}\n", if labels.is_empty() { "" } else { "}" }),
        );
    }
}

fn push(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a String takes everything");
}
