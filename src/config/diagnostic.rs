//! What is wrong with a configuration, where, and what would be right.

use super::FileSet;
use regex::Regex;
use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

/// Longest piece of somebody's text that a message repeats, in characters.
const MAX_QUOTED_CHARS: usize = 60;
/// Longest source line that is shown, in characters.
const MAX_EXCERPT_CHARS: usize = 160;

/// One finding. Its text holds no secret and no control character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigDiagnostic {
    pub severity: DiagnosticSeverity,
    pub span: SourceSpan,
    /// As in `upstream.connect_timeout` or `policy[2].limit.per`; empty for a whole file.
    pub key: String,
    /// What was found and what would be right.
    pub problem: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagnosticSeverity {
    Error,
    /// The configuration works, but perhaps not as its owner thinks.
    Warning,
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpan {
    /// A file, an environment variable or a flag.
    pub source: String,
    /// In a file, if the finding is not about all of it.
    pub position: Option<SourcePosition>,
    /// Files in the order read, then what overrides them.
    pub(super) rank: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcePosition {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    excerpt: SourceExcerpt,
}

/// The line, fit for a terminal, and what to underline.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SourceExcerpt {
    text: String,
    underlined: Option<(usize, usize)>,
}

/// Everything that is wrong, in the order of the files.
#[derive(Debug)]
pub struct ConfigErrors {
    pub diagnostics: Vec<ConfigDiagnostic>,
    /// What was read until then: when it changes, loading again may succeed.
    pub files: FileSet,
}

impl SourceSpan {
    /// `line`, `column` and `width` in characters, the first two from 0.
    pub(super) fn from_position(
        name: &str,
        rank: usize,
        line: usize,
        column: usize,
        source: &str,
        width: usize,
    ) -> Self {
        let excerpt = SourceExcerpt::from_line(source, column, width);
        let position = SourcePosition {
            line: line + 1,
            column: column + 1,
            excerpt,
        };
        Self {
            source: replace_control_characters(name),
            position: Some(position),
            rank,
        }
    }

    pub(super) fn from_source(source: &str, rank: usize) -> Self {
        Self {
            source: replace_control_characters(source),
            position: None,
            rank,
        }
    }

    /// What sorts findings by where they are.
    pub(super) fn sort_key(&self) -> (usize, usize, usize) {
        let (line, column) = self
            .position
            .as_ref()
            .map_or((0, 0), |at| (at.line, at.column));
        (self.rank, line, column)
    }
}

impl SourceExcerpt {
    fn from_line(source: &str, column: usize, width: usize) -> Self {
        let masked = mask_secrets(source);
        let unmasked_prefix_chars = source
            .chars()
            .zip(masked.chars())
            .take_while(|(a, b)| a == b)
            .count();
        let is_column_unmasked = masked == source || column <= unmasked_prefix_chars;
        let mut text: String = masked
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if text.chars().count() > MAX_EXCERPT_CHARS {
            text = text.chars().take(MAX_EXCERPT_CHARS).chain(['…']).collect();
        }
        let shown_chars = text.chars().count();
        let underlined = (is_column_unmasked && column <= shown_chars)
            .then(|| (column, width.min(shown_chars.saturating_sub(column)).max(1)));
        Self { text, underlined }
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

/// Several lines, each ended.
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
        let Some(SourcePosition { line, excerpt, .. }) = &self.span.position else {
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
    /// The finding in one line, for the log.
    pub fn to_line(&self) -> String {
        let Self {
            span: place,
            key,
            problem,
            ..
        } = self;
        if key.is_empty() {
            format!("{place}: {problem}")
        } else {
            format!("{place}: {key}: {problem}")
        }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for diagnostic in &self.diagnostics {
            write!(f, "{diagnostic}")?;
        }
        match self.diagnostics.len() {
            1 => writeln!(f, "1 error"),
            n => writeln!(f, "{n} errors"),
        }
    }
}

impl std::error::Error for ConfigErrors {}

/// Somebody's text as a message may repeat it: short, printable, and without secrets.
pub(super) fn quote_source(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let is_truncated =
        line.chars().count() > MAX_QUOTED_CHARS || line.len() < text.trim_end().len();
    let short: String = line.chars().take(MAX_QUOTED_CHARS).collect();
    let short = replace_control_characters(&mask_secrets(&short));
    if is_truncated {
        format!("{short}…")
    } else {
        short
    }
}

fn replace_control_characters(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Hides what may be a secret in a line of TOML, well-formed or not. It rather hides too much.
fn mask_secrets(line: &str) -> Cow<'_, str> {
    static SECRET_KEY_PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        let names = r#"(?i)(?:password|passwd|secret|token|credential)[\w-]*["']?\s*="#;
        Regex::new(names).expect("a constant that the tests use")
    });
    static LOGIN_URL_PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(?i)(rediss?:).*|([a-z0-9+.-]*:)//.*(@)")
            .expect("a constant that the tests use")
    });
    // A key that names a file holds no secret.
    let secret = SECRET_KEY_PATTERN
        .find_iter(line)
        .find(|name| !name.as_str().contains("_file"));
    let line = match secret.and_then(|name| line.get(..name.end())) {
        Some(shown) => Cow::Owned(format!("{shown} ***")),
        None => Cow::Borrowed(line),
    };
    match LOGIN_URL_PATTERN.replace(&line, "$1$2//***$3") {
        Cow::Owned(hidden) => Cow::Owned(hidden),
        Cow::Borrowed(_) => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            r#"url = "http://user:hunter2@h@host/""#,
        ] {
            let shown = mask_secrets(line);
            assert!(!shown.contains("hunter2"), "{shown}");
            assert!(!format!("{:?}", SourceExcerpt::from_line(line, 30, 100)).contains("hunter2"));
        }
        for line in [
            r#"password_file = "/run/secrets/redis""#,
            r#"url = "http://host:3000""#,
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
}
