//! The text of the HTML report, and the escaping of untrusted text.

use super::ReplayReport;
use std::fmt::{self, Display, Write};

/// An HTML report that is being written.
pub(super) struct HtmlPage<'r> {
    pub(super) report: &'r ReplayReport,
    pub(super) text: String,
}

impl<'r> HtmlPage<'r> {
    pub(super) fn new(report: &'r ReplayReport) -> Self {
        Self {
            report,
            text: String::with_capacity(64 << 10),
        }
    }

    pub(super) fn push(&mut self, html: &str) {
        self.text.push_str(html);
    }

    /// Opens a table in its own section. Columns of numbers have a name that starts with `#`.
    pub(super) fn open_table(&mut self, title: &str, columns: &[&str]) {
        self.push(&format!(
            "<section>{title}<div class=\"scroll\"><table><thead><tr>"
        ));
        for column in columns {
            match column.strip_prefix('#') {
                Some(name) => self.push(&format!("<th scope=\"col\" class=\"n\">{name}</th>")),
                None => self.push(&format!("<th scope=\"col\">{column}</th>")),
            }
        }
        self.push("</tr></thead><tbody>");
    }
}

/// Text escaped for HTML content and quoted attributes. Control and formatting characters are
/// written as escapes.
pub(super) struct EscapedText<'a>(pub(super) &'a str);

impl Display for EscapedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // A backslash is harmless and stays single; `escape_debug` would double it.
                '\\' => f.write_char('\\')?,
                character => write!(f, "{}", character.escape_debug())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::EscapedText;

    #[test]
    fn escapes_markup_in_untrusted_text() {
        let hostile = "<script>alert('1')</script>\"&\u{202e}\u{1b}[31m\n\\x";
        assert_eq!(
            EscapedText(hostile).to_string(),
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;\\u{202e}\\u{1b}[31m\\n\\x"
        );
    }
}
