//! Reads the records of a CSV or JSON Lines file, with the lines that each of them covers.

use std::fmt;
use std::io::{self, BufRead, Read};

/// Maximum length of a record, in bytes.
const MAX_RECORD_BYTES: usize = 64 << 10;

/// The lines of a file that one record covers. Numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LineRange {
    pub(super) first: u64,
    pub(super) last: u64,
}

impl fmt::Display for LineRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(formatter, "line {}", self.first)
        } else {
            write!(formatter, "lines {} to {}", self.first, self.last)
        }
    }
}

/// The values of a record, or what is wrong with it.
pub(super) type CsvRecord = (LineRange, Result<Vec<String>, String>);

/// Reads records one by one. Blank lines are left out.
pub(super) struct RecordReader<R> {
    input: R,
    /// Whether each line is a record with one value.
    is_lines: bool,
    next_line: u64,
}

impl<R: BufRead> RecordReader<R> {
    pub(super) fn new(input: R, is_lines: bool) -> Self {
        Self {
            input,
            is_lines,
            next_line: 1,
        }
    }

    /// The next record, or `None` at the end of the file.
    ///
    /// # Errors
    /// If the file can't be read.
    pub(super) fn read_record(&mut self) -> io::Result<Option<CsvRecord>> {
        loop {
            let mut record = RecordParser {
                is_line: self.is_lines,
                ..RecordParser::default()
            };
            let first = self.next_line;
            if !self.parse_into(&mut record)? {
                return Ok(None);
            }
            let lines = LineRange {
                first,
                last: self.next_line.saturating_sub(1),
            };
            let is_blank = record.values.is_empty()
                && record.value.trim_ascii().is_empty()
                && record.state != QuoteState::Quoted
                && record.len <= MAX_RECORD_BYTES;
            if !is_blank {
                return Ok(Some((lines, record.finish(lines))));
            }
        }
    }

    /// Parses until the end of a record. Returns false at the end of the file.
    fn parse_into(&mut self, record: &mut RecordParser) -> io::Result<bool> {
        let mut last_byte = None;
        for byte in self.input.by_ref().bytes() {
            let byte = byte?;
            self.next_line += u64::from(byte == b'\n');
            if record.push(byte) {
                return Ok(true);
            }
            last_byte = Some(byte);
        }
        // The last line may have no line feed.
        self.next_line += u64::from(last_byte.is_some_and(|byte| byte != b'\n'));
        Ok(last_byte.is_some())
    }
}

/// Where in a value the parser is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum QuoteState {
    #[default]
    Start,
    Unquoted,
    Quoted,
    /// After a quote in a quoted value: the end of the value, or half of an escaped quote.
    QuoteInQuoted,
    /// After the closing quote.
    Closed,
}

#[derive(Debug, Default)]
struct RecordParser {
    /// Whether quotes and commas are part of the value.
    is_line: bool,
    state: QuoteState,
    /// The values before the one that is being read.
    values: Vec<Vec<u8>>,
    value: Vec<u8>,
    len: usize,
    has_text_after_quote: bool,
}

impl RecordParser {
    /// Parses one byte. Returns whether the record ends with it.
    fn push(&mut self, byte: u8) -> bool {
        if byte == b'\n' && self.state != QuoteState::Quoted {
            return true;
        }
        self.len = self.len.saturating_add(1);
        self.state = match (self.state, byte) {
            _ if self.is_line => {
                self.push_to_value(byte);
                QuoteState::Unquoted
            }
            (QuoteState::Quoted, b'"') => QuoteState::QuoteInQuoted,
            (QuoteState::QuoteInQuoted, b'"') | (QuoteState::Quoted, _) => {
                self.push_to_value(byte);
                QuoteState::Quoted
            }
            (_, b',') => {
                if self.len <= MAX_RECORD_BYTES {
                    self.values.push(std::mem::take(&mut self.value));
                }
                QuoteState::Start
            }
            (QuoteState::Start, b'"') => QuoteState::Quoted,
            (QuoteState::Start | QuoteState::Unquoted, _) => {
                self.push_to_value(byte);
                QuoteState::Unquoted
            }
            (QuoteState::QuoteInQuoted | QuoteState::Closed, _) => {
                self.has_text_after_quote |= !byte.is_ascii_whitespace();
                QuoteState::Closed
            }
        };
        false
    }

    /// Bytes beyond the maximum are dropped, so that an open quote takes no memory.
    fn push_to_value(&mut self, byte: u8) {
        if self.len <= MAX_RECORD_BYTES {
            self.value.push(byte);
        }
    }

    fn finish(mut self, lines: LineRange) -> Result<Vec<String>, String> {
        let missing_quote = "the closing \" is missing";
        if self.len > MAX_RECORD_BYTES {
            let mut why = format!("longer than {MAX_RECORD_BYTES} bytes");
            if lines.first != lines.last {
                why.push_str("; perhaps ");
                why.push_str(missing_quote);
            }
            return Err(why);
        }
        if self.state == QuoteState::Quoted {
            return Err(missing_quote.to_owned());
        }
        if self.has_text_after_quote {
            return Err("text after a closing \"; expected a comma or the end of the line, and \"\" for a quote in a value".to_owned());
        }
        // The carriage return of CRLF.
        if self.state == QuoteState::Unquoted && self.value.last() == Some(&b'\r') {
            self.value.pop();
        }
        self.values.push(self.value);
        let values = self.values.into_iter().map(String::from_utf8);
        let values = values.collect::<Result<_, _>>();
        values.map_err(|_other| "invalid UTF-8".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type ReadRecord = (u64, u64, Result<Vec<String>, String>);

    /// Reads with a buffer of `capacity` bytes.
    fn read_all(text: &[u8], capacity: usize) -> Vec<ReadRecord> {
        let mut reader = RecordReader::new(io::BufReader::with_capacity(capacity, text), false);
        std::iter::from_fn(|| reader.read_record().unwrap())
            .map(|(lines, values)| (lines.first, lines.last, values))
            .collect()
    }

    fn values(first: u64, last: u64, values: &[&str]) -> ReadRecord {
        let values = values.iter().map(|value| (*value).to_owned());
        (first, last, Ok(values.collect()))
    }

    #[test]
    fn records_are_read_with_their_lines() {
        let text =
            b"a,b\r\n\r\n\n\"x, \"\"y\"\"\", z\" \n\"two\nlines\",\"\" \r\n,\n5\" pipe,\"end\"";
        let expected = [
            values(1, 1, &["a", "b"]),
            values(4, 4, &["x, \"y\"", " z\" "]),
            values(5, 6, &["two\nlines", ""]),
            values(7, 7, &["", ""]),
            values(8, 8, &["5\" pipe", "end"]),
        ];
        for capacity in [1, 7, 4096] {
            assert_eq!(read_all(text, capacity), expected);
        }
        assert_eq!(read_all(b"", 8), []);
        assert_eq!(read_all(b" \r\n", 8), []);
    }

    #[test]
    fn a_wrong_record_is_reported_with_its_lines_and_the_next_one_is_read() {
        let too_long = vec![b'x'; MAX_RECORD_BYTES + 1];
        let text = [
            b"\"a\nb\"c\n\xff\n\"".as_slice(),
            &too_long,
            b"\n\"\nlast\n\"open\n",
        ]
        .concat();
        let read = read_all(&text, 4096);
        let errors: Vec<(u64, u64, &str)> = read
            .iter()
            .filter_map(|(first, last, values)| Some((*first, *last, &**values.as_ref().err()?)))
            .collect();
        let [after_quote, not_text, long, open] = errors[..] else {
            panic!("{errors:?}")
        };
        assert!(after_quote.2.starts_with("text after a closing \""));
        assert_eq!((after_quote.0, after_quote.1), (1, 2));
        assert_eq!(not_text, (3, 3, "invalid UTF-8"));
        assert_eq!((long.0, long.1), (4, 5));
        assert!(long.2.starts_with("longer than 65536 bytes"));
        assert_eq!(open, (7, 7, "the closing \" is missing"));
        assert!(read.contains(&values(6, 6, &["last"])));
    }

    #[test]
    fn a_record_of_the_maximum_length_is_read() {
        let longest = "x".repeat(MAX_RECORD_BYTES);
        assert_eq!(
            read_all(longest.as_bytes(), 4096),
            [values(1, 1, &[&longest])]
        );
    }
}
