//! One TOML document: its text, and the conversion of its values.

use super::diagnostic::{QuotedLine, SourceSpan};
use super::sources::FileSource;
use super::value_tree::{ValueContent, ValueNode, ValueOrigin, ValueTable};
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::{fs, iter};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml_parser::Source;
use toml_parser::lexer::TokenKind;

/// Bytes per entry of [`TomlDocument::chars_before`].
const BLOCK_BYTES: usize = 256;

/// A parsed TOML document.
#[derive(Debug)]
pub(super) struct TomlDocument {
    name: String,
    text: String,
    /// Byte offset of each line's start.
    line_starts: Vec<usize>,
    /// Number of characters that start before each block of [`BLOCK_BYTES`].
    chars_before: Vec<usize>,
    /// The last line that a diagnostic quoted, for further ones in a long line.
    last_line: RefCell<Option<(usize, QuotedLine)>>,
    rank: usize,
    /// Whether errors quote lines: not those of a file that may hold something else, such as a
    /// secret.
    shows_source: bool,
}

/// Whether the name, and the file behind it if it is a link, end in `.toml`.
fn is_toml_file(name: &str) -> bool {
    let is_toml = |path: &Path| path.extension().is_some_and(|end| end == "toml");
    is_toml(Path::new(name)) && fs::canonicalize(name).map_or(true, |path| is_toml(&path))
}

impl TomlDocument {
    /// Parses TOML. Returns the document and its values, or the first syntax error as a span and a
    /// message. Others are often follow-up errors of the parser's recovery.
    pub(super) fn parse(
        name: String,
        text: String,
        rank: usize,
    ) -> (Self, Result<ValueNode, (SourceSpan, String)>) {
        let (table, errors) = DeTable::parse_recoverable(&text);
        let origin = convert_origin(rank, 0..0, 0..0);
        let root = ValueContent::Table(convert_table(table.get_ref(), rank));
        let root = ValueNode::new(root, origin);
        let blocks = text.as_bytes().chunks(BLOCK_BYTES);
        let chars_before = blocks.scan(0, |total, block| {
            let before = *total;
            *total += count_chars(block);
            Some(before)
        });
        let after_newlines = text.match_indices('\n').map(|(at, _)| at + 1);
        let document = Self {
            shows_source: name == FileSource::STDIN_NAME || is_toml_file(&name),
            name,
            line_starts: iter::once(0).chain(after_newlines).collect(),
            chars_before: chars_before.collect(),
            last_line: RefCell::default(),
            rank,
            text: String::new(),
        };
        let document = Self { text, ..document };
        let start = |error: &toml::de::Error| error.span().unwrap_or_default().start;
        let first = errors.iter().min_by_key(|error| start(error));
        let syntax_error = first.map(|error| document.describe_syntax_error(error));
        (document, syntax_error.map_or(Ok(root), Err))
    }

    /// The position and message of a syntax error, and the position of a bracket that is not
    /// closed.
    fn describe_syntax_error(&self, error: &toml::de::Error) -> (SourceSpan, String) {
        let span = error.span().unwrap_or_default();
        let message = error.message().replace('\n', " ");
        let unclosed = find_unclosed_bracket(&self.text, span.start).and_then(|offset| {
            let bracket = self.text.get(offset..=offset)?;
            let opened_at = self.source_span(offset..offset + 1);
            Some(format!("; the \"{bracket}\" at {opened_at} is not closed"))
        });
        let message = message + &unclosed.unwrap_or_default();
        (self.source_span(span), message)
    }

    /// Source text at a byte range.
    pub(super) fn source_text(&self, range: &Range<u32>) -> Option<&str> {
        self.text.get(to_usize(range))
    }

    /// Span of a byte range, or of the whole document if it is empty.
    pub(super) fn span(&self, range: &Range<u32>) -> SourceSpan {
        if range.is_empty() {
            SourceSpan::from_source(&self.name, self.rank)
        } else {
            self.source_span(to_usize(range))
        }
    }

    /// Number of characters that start before this byte.
    fn chars_before(&self, offset: usize) -> usize {
        let block = offset / BLOCK_BYTES;
        let rest = self.text.as_bytes().get(block * BLOCK_BYTES..offset);
        self.chars_before.get(block).copied().unwrap_or_default()
            + count_chars(rest.unwrap_or_default())
    }

    fn source_span(&self, span: Range<usize>) -> SourceSpan {
        let lines_up_to = self
            .line_starts
            .partition_point(|start| *start <= span.start);
        let line = lines_up_to.saturating_sub(1);
        let start = self.line_starts.get(line).copied().unwrap_or_default();
        let column = self.chars_before(span.start) - self.chars_before(start);
        let width = self.text.get(span).and_then(|text| text.lines().next());
        let width = width.map_or(0, |text| text.chars().count());
        let mut last_line = self.last_line.borrow_mut();
        if last_line.as_ref().is_none_or(|(last, _)| *last != line) {
            let end = self.line_starts.get(line + 1).copied();
            let source = self.text.get(start..end.unwrap_or(self.text.len()));
            let source = source.unwrap_or_default().trim_end_matches(['\n', '\r']);
            *last_line = Some((line, QuotedLine::new(source)));
        }
        let quoted = last_line.as_ref().map(|(_, quoted)| quoted);
        let quoted = quoted.filter(|_| self.shows_source);
        SourceSpan::from_source(&self.name, self.rank).with_position(line, column, quoted, width)
    }
}

/// Number of characters that start in these bytes of UTF-8.
fn count_chars(bytes: &[u8]) -> usize {
    let starts = bytes.iter().filter(|byte| **byte & 0xc0 != 0x80);
    starts.count()
}

fn to_usize(range: &Range<u32>) -> Range<usize> {
    let convert = |offset| usize::try_from(offset).unwrap_or(usize::MAX);
    convert(range.start)..convert(range.end)
}

/// Converts byte ranges. Files are too small for larger ones than `u32`.
fn convert_origin(document: usize, key: Range<usize>, value: Range<usize>) -> ValueOrigin {
    let convert = |offset| u32::try_from(offset).unwrap_or(u32::MAX);
    ValueOrigin::Document {
        document,
        key: convert(key.start)..convert(key.end),
        value: convert(value.start)..convert(value.end),
    }
}

fn convert_table(table: &DeTable<'_>, document: usize) -> ValueTable {
    let entries = table.iter().map(|(key, value)| {
        let name = key.get_ref().to_string();
        (name, convert_value(value, key.span(), document))
    });
    entries.collect()
}

/// Converts a value. Those that no key takes are unsupported, for which the key's reader reports
/// the expected type: dates, and integers beyond 64 bits.
fn convert_value(value: &Spanned<DeValue<'_>>, key: Range<usize>, document: usize) -> ValueNode {
    let content = match value.get_ref() {
        DeValue::String(text) => Some(ValueContent::Text(text.to_string())),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .ok()
            .map(ValueContent::Integer),
        DeValue::Float(number) => number.as_str().parse().ok().map(ValueContent::Float),
        DeValue::Boolean(flag) => Some(ValueContent::Bool(*flag)),
        DeValue::Datetime(_) => None,
        DeValue::Array(items) => {
            let items = items.iter().map(|item| convert_value(item, 0..0, document));
            Some(ValueContent::List(items.collect()))
        }
        DeValue::Table(table) => Some(ValueContent::Table(convert_table(table, document))),
    };
    ValueNode {
        content: content.unwrap_or(ValueContent::Unsupported),
        origin: convert_origin(document, key, value.span()),
    }
}

/// Byte offset of the last bracket or brace before `error_offset` that is never closed.
fn find_unclosed_bracket(text: &str, error_offset: usize) -> Option<usize> {
    let mut open: Vec<(usize, TokenKind)> = Vec::new();
    for token in Source::new(text).lex() {
        let closes = match token.kind() {
            opener @ (TokenKind::LeftSquareBracket | TokenKind::LeftCurlyBracket) => {
                open.push((token.span().start(), opener));
                continue;
            }
            TokenKind::RightSquareBracket => TokenKind::LeftSquareBracket,
            TokenKind::RightCurlyBracket => TokenKind::LeftCurlyBracket,
            _ => continue,
        };
        let (opened_at, opener) = open.pop()?;
        if opener != closes {
            return Some(opened_at).filter(|offset| *offset <= error_offset);
        }
    }
    let mut offsets = open.into_iter().map(|(offset, _)| offset);
    offsets.rfind(|offset| *offset <= error_offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_bracket_that_is_not_closed() {
        // `^` marks the bracket, `!` the position of the parser's error.
        for marked in [
            "key = ^[\"a\", \"b\"\n!limit = { requests = 1 }\n",
            "limits = [\n  ^{ requests = 5,\n!]\n",
            "limits = ^[\n  { requests = 5 },\n\n![[policy]]\nname = \"b\"\nkey = [\"x\"]\n",
            "a = \"[\" # [ {\nb = '{'\nc = ^[\n!d = 1\n",
            "a = \"\"\"\n[ \\\"\"\" { \"\"\"\nb = ^{ c = 1\n!d = 2\n",
            // Only the bracket of the first error.
            "a = ^[1\n!b = 2\nc = [3\nd = 4\n",
            "a = [[1, 2], ^[3\n!",
            "^[policy\n!name = 1\n",
        ] {
            let error_offset = marked.replace('^', "").find('!').unwrap();
            let opened_at = marked.find('^').unwrap();
            let text = marked.replace(['^', '!'], "");
            assert_eq!(
                find_unclosed_bracket(&text, error_offset),
                Some(opened_at),
                "{marked}"
            );
        }
        for closed in [
            "a = [1, 2]\nb = ]\n",
            "a = [GET]\n",
            "a = { b = [\"[\"] }\nc = = 1\n",
            "",
            "a = \"x",
        ] {
            assert_eq!(
                find_unclosed_bracket(closed, closed.len()),
                None,
                "{closed}"
            );
        }
    }
}
