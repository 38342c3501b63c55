//! The line counts of one log.

use crate::text::{count_noun, format_count};
use serde::Serialize;

/// Line counts of one log.
#[derive(Debug, Default, Serialize)]
pub(super) struct LogReport {
    pub(super) name: String,
    pub(super) format: &'static str,
    pub(super) lines: u64,
    pub(super) requests: u64,
    /// Records without a request.
    pub(super) other: u64,
    pub(super) broken: u64,
    /// Line numbers and beginnings of the first broken lines.
    #[serde(skip)]
    pub(super) broken_examples: Vec<(u64, String)>,
    /// Error that ended the log early.
    pub(super) fault: Option<String>,
}

impl LogReport {
    pub(super) fn find_warnings(&self) -> Vec<String> {
        let name = self.name.escape_debug();
        let mut warnings = Vec::new();
        if let Some(error) = &self.fault {
            warnings.push(format!(
                "{name}: the log ended early ({error}); the report covers the lines before that"
            ));
        }
        if self.broken > 0 {
            let (broken, lines) = (count_noun(self.broken, "line"), format_count(self.lines));
            warnings.push(format!("{name}: {broken} broken, of {lines}"));
            let examples = self.broken_examples.iter();
            warnings.extend(examples.map(|(line, text)| format!("{name}: line {line}: {text}")));
        }
        if self.other > 0 {
            let other = count_noun(self.other, "line");
            warnings.push(format!("{name}: {other} without a request"));
        }
        warnings
    }
}
