//! Configuration errors and warnings: what is wrong, where, and what would be right.

use indexmap::IndexMap;
use regex::Regex;
use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

/// Longest quotation from the configuration in a message, in characters.
const MAX_QUOTED_CHARS: usize = 60;
/// Longest source line in a message, in characters.
const MAX_EXCERPT_CHARS: usize = 160;

/// One error or warning. Its text contains no secret and no control character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigDiagnostic {
    pub severity: DiagnosticSeverity,
    pub span: SourceSpan,
    /// Key path such as `upstream.url` or `policy[2].limit.per`. Empty for a whole file.
    pub key: String,
    /// The value found, and the value expected.
    pub problem: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagnosticSeverity {
    Error,
    /// The configuration is valid, but probably not as intended.
    Warning,
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpan {
    /// Name of a file, environment variable or flag.
    pub source: String,
    /// Position in the file. `None` for a whole file, a variable or a flag.
    pub position: Option<SourcePosition>,
    /// Sort order: files in the order read, then variables and flags.
    pub(super) rank: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcePosition {
    /// Line number, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Absent for a file whose name does not end in `.toml`, except stdin: it may hold a secret.
    excerpt: Option<SourceExcerpt>,
}

/// The source line without secrets and control characters, and its underlined part.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SourceExcerpt {
    text: String,
    underlined: Option<(usize, usize)>,
}

impl SourceSpan {
    /// `line` and `column` count from 0; `column` and `width` are in characters. Without `source`
    /// the line is not quoted.
    pub(super) fn with_position(
        self,
        line: usize,
        column: usize,
        source: Option<&QuotedLine>,
        width: usize,
    ) -> Self {
        let position = SourcePosition {
            line: line + 1,
            column: column + 1,
            excerpt: source.map(|line| line.underline(column, width)),
        };
        Self {
            position: Some(position),
            ..self
        }
    }

    pub(super) fn from_source(source: &str, rank: usize) -> Self {
        Self {
            source: replace_control_characters(source),
            position: None,
            rank,
        }
    }

    /// Sort key: source, line, column.
    pub(super) fn sort_key(&self) -> (usize, usize, usize) {
        let position = self.position.as_ref();
        let (line, column) = position.map_or((0, 0), |at| (at.line, at.column));
        (self.rank, line, column)
    }
}

/// A source line as messages quote it.
#[derive(Debug)]
pub(super) struct QuotedLine {
    /// At most [`MAX_EXCERPT_CHARS`] and `…`.
    text: String,
    /// Leading characters that are those of the source.
    unmasked_chars: usize,
}

impl QuotedLine {
    pub(super) fn new(source: &str) -> Self {
        let masked = mask_secrets(source);
        let same = source
            .chars()
            .zip(masked.chars())
            .take_while(|(a, b)| a == b);
        let unmasked_chars = if masked == source {
            usize::MAX
        } else {
            same.count()
        };
        let mut chars = masked.chars().map(|c| if c.is_control() { ' ' } else { c });
        let mut text: String = chars.by_ref().take(MAX_EXCERPT_CHARS).collect();
        if chars.next().is_some() {
            text.push('…');
        }
        Self {
            text,
            unmasked_chars,
        }
    }

    fn underline(&self, column: usize, width: usize) -> SourceExcerpt {
        let shown_chars = self.text.chars().count();
        let underlined = (column <= self.unmasked_chars && column <= shown_chars)
            .then(|| (column, width.min(shown_chars.saturating_sub(column)).max(1)));
        SourceExcerpt {
            text: self.text.clone(),
            underlined,
        }
    }
}

impl fmt::Display for SourceSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)?;
        match &self.position {
            Some(at) => write!(f, ":{}:{}", at.line, at.column),
            None => Ok(()),
        }
    }
}

/// Writes several lines, each ending with a newline.
impl fmt::Display for ConfigDiagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            DiagnosticSeverity::Error => "error",
            DiagnosticSeverity::Warning => "warning",
        };
        write!(f, "{severity}: {}: ", self.span)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        writeln!(f, "{}", self.problem)?;
        let position = self.span.position.as_ref();
        let Some((line, excerpt)) = position.and_then(|at| Some((at.line, at.excerpt.as_ref()?)))
        else {
            return Ok(());
        };
        writeln!(f, "{line:>5} | {}", excerpt.text)?;
        if let Some((column, width)) = excerpt.underlined {
            writeln!(f, "      | {:column$}{:^<width$}", "", "")?;
        }
        Ok(())
    }
}

impl ConfigDiagnostic {
    /// Formats the diagnostic as one line for the log.
    pub fn to_log_line(&self) -> String {
        let (span, problem) = (&self.span, &self.problem);
        match self.key.as_str() {
            "" => format!("{span}: {problem}"),
            key => format!("{span}: {key}: {problem}"),
        }
    }
}

/// Shortens text from the configuration for a message and removes secrets and control characters.
pub(super) fn quote_source(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    // Masked first: the characters that mark a secret may be beyond the limit.
    let masked = mask_secrets(line);
    let is_truncated =
        masked.chars().count() > MAX_QUOTED_CHARS || line.len() < text.trim_end().len();
    let short: String = masked.chars().take(MAX_QUOTED_CHARS).collect();
    let short = replace_control_characters(&short);
    if is_truncated { short + "…" } else { short }
}

pub(super) fn replace_control_characters(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Masks possible secrets in a line of TOML, which may be malformed. Prefers to mask too much.
fn mask_secrets(line: &str) -> Cow<'_, str> {
    static SECRET_KEY_PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        let names = r#"(?i)(?:password|passwd|secret|token|credential)[\w-]*["']?\s*="#;
        Regex::new(names).expect("a constant that the tests use")
    });
    static LOGIN_URL_PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(?i)((?:redis|valkey)s?:).*|([a-z0-9+.-]*:)//.*(@)")
            .expect("a constant that the tests use")
    });
    // A key with `_file` in its name holds a path, not a secret.
    let secret = SECRET_KEY_PATTERN
        .find_iter(line)
        .find(|name| !name.as_str().contains("_file"));
    let line = match secret.and_then(|name| line.get(..name.end())) {
        Some(shown) => Cow::Owned(format!("{shown} ***")),
        None => Cow::Borrowed(line),
    };
    let line = match LOGIN_URL_PATTERN.replace(&line, "$1$2//***$3") {
        Cow::Owned(hidden) => Cow::Owned(hidden),
        Cow::Borrowed(_) => line,
    };
    mask_login_without_scheme(line)
}

/// Masks what precedes `@` in a value without `//`, which may be a URL whose scheme is missing.
fn mask_login_without_scheme(line: Cow<'_, str>) -> Cow<'_, str> {
    let Some((login, host)) = line.rsplit_once('@') else {
        return line;
    };
    if login.ends_with("//***") {
        return line;
    }
    let key = login.split_inclusive('=').next().unwrap_or_default();
    let key = if key.ends_with('=') { key } else { "" };
    Cow::Owned(format!("{key} ***@{host}"))
}

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
    fn masks_secrets_even_in_invalid_toml() {
        for line in [
            r#"password = "hunter2""#,
            r#"redis = { password = "hunter2", port = 1 }"#,
            r#""password" = 'hunter2'"#,
            r#"password="hunter2"#,
            r#"Secret_key = "hunter2""#,
            r#"url = "redis://:hunter2@host"#,
            r#"url = "rediss://user:hunter2@host:port/""#,
            r#"url = "redis:hunter2""#,
            r#"url = "valkeys:hunter2""#,
            r#"url = "http://user:hunter2@h@host/""#,
            r#"url = "user:hunter2@host:6379""#,
            r#"'user:hunter2@host'"#,
        ] {
            let shown = mask_secrets(line);
            assert!(!shown.contains("hunter2"), "{shown}");
            assert!(!format!("{:?}", QuotedLine::new(line).underline(30, 100)).contains("hunter2"));
        }
        for line in [
            r#"password_file = "/run/secrets/redis""#,
            r#"url = "http://host:3000""#,
            r#"url = "http://***@host""#,
        ] {
            assert_eq!(mask_secrets(line), line);
        }
    }

    #[test]
    fn quoted_text_is_short_and_printable() {
        assert_eq!(quote_source("\u{1b}[31mred"), "\u{fffd}[31mred");
        assert_eq!(quote_source("one\ntwo"), "one…");
        assert_eq!(
            quote_source(&"x".repeat(100)).chars().count(),
            MAX_QUOTED_CHARS + 1
        );
    }

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
