//! Groups warnings that differ only in their position, so that 200 policies give one warning.

use super::diagnostic::ConfigDiagnostic;
use indexmap::IndexMap;
use std::fmt;

/// Positions that a group lists after the first.
const MAX_LISTED_POSITIONS: usize = 3;

/// Diagnostics with the same problem in different places.
#[derive(Clone, Debug)]
pub struct DiagnosticGroup<'a> {
    first: &'a ConfigDiagnostic,
    others: Vec<&'a ConfigDiagnostic>,
}

/// Groups diagnostics in the order of their first position.
pub fn group_diagnostics(diagnostics: &[ConfigDiagnostic]) -> Vec<DiagnosticGroup<'_>> {
    let mut groups: IndexMap<(String, &str), DiagnosticGroup<'_>> = IndexMap::new();
    for diagnostic in diagnostics {
        let kind = (
            key_without_indexes(&diagnostic.key),
            diagnostic.problem.as_str(),
        );
        let new_group = DiagnosticGroup {
            first: diagnostic,
            others: Vec::new(),
        };
        match groups.get_mut(&kind) {
            Some(group) => group.others.push(diagnostic),
            None => _ = groups.insert(kind, new_group),
        }
    }
    groups.into_values().collect()
}

impl DiagnosticGroup<'_> {
    /// Formats the group as one line for the log.
    pub fn to_log_line(&self) -> String {
        let line = self.first.to_log_line();
        if self.others.is_empty() {
            line
        } else {
            format!("{line} ({})", self.format_others())
        }
    }

    /// Formats the other positions: `and 2 more: config.toml:14:7, config.toml:23:7`.
    fn format_others(&self) -> String {
        let listed = self.others.iter().take(MAX_LISTED_POSITIONS);
        let listed: Vec<String> = listed.map(|one| one.span.to_string()).collect();
        let rest = if self.others.len() > MAX_LISTED_POSITIONS {
            ", …"
        } else {
            ""
        };
        format!(
            "and {} more: {}{rest}",
            self.others.len(),
            listed.join(", ")
        )
    }
}

/// Writes the first diagnostic, and a line with the other positions.
impl fmt::Display for DiagnosticGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.fmt(f)?;
        if self.others.is_empty() {
            return Ok(());
        }
        writeln!(f, "      = {}", self.format_others())
    }
}

/// The key with `[*]` for each index: `policy[*].key`.
fn key_without_indexes(key: &str) -> String {
    let mut parts = key.split('[');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let after = part.split_once(']').map_or("", |(_, after)| after);
        text + "[*]" + after
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::properties::load_text;
    use std::fmt::Write;

    #[test]
    fn two_hundred_policies_with_one_mistake_give_one_warning() {
        let mut text = String::new();
        for number in 0..200 {
            writeln!(
                text,
                "[[policy]]\nname = \"p{number}\"\nkey = [\"header:x-user-id\"]\nmatch = {{ path = \"/p{number}\" }}\nlimit = {{ requests = 1, per = \"1s\" }}"
            )
            .unwrap();
        }
        let config = load_text(&text).unwrap();
        assert_eq!(config.warnings.len(), 200);
        let groups = group_diagnostics(&config.warnings);
        assert_eq!(groups.len(), 1);
        let shown = groups[0].to_string();
        assert_eq!(shown.lines().count(), 4, "{shown}");
        assert!(
            shown.starts_with("warning: config.toml:3:7: policy[0].key: ")
                && shown.ends_with(
                    "      = and 199 more: config.toml:8:7, config.toml:13:7, config.toml:18:7, …\n"
                ),
            "{shown}"
        );
        assert!(groups[0].to_log_line().ends_with("config.toml:18:7, …)"));
    }

    #[test]
    fn different_keys_and_problems_are_not_grouped() {
        let text = "[[policy]]\nname = 'a'\nlimit = { requests = 0, per = '1s' }\n[[policy]]\nname = 'b'\ncost = 0\nlimit = { requests = 0, per = '1s' }\n";
        let config = load_text(text).unwrap();
        let lines: Vec<String> = group_diagnostics(&config.warnings)
            .iter()
            .map(DiagnosticGroup::to_log_line)
            .collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[0].contains("0 rejects") && lines[0].ends_with("(and 1 more: config.toml:7:22)"),
            "{lines:?}"
        );
    }
}
