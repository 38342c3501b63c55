//! Reads the lines of one log from a file or stdin, plain or gzip-compressed. Line length is
//! bounded, and a read error ends the log at that point.

use super::parsers::AccessLogFormat;
use flate2::bufread::MultiGzDecoder;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::rc::Rc;

/// Maximum line length in bytes; longer lines count as broken.
const MAX_LINE_BYTES: usize = (64 << 10) - 1;

/// Read buffer size in bytes, and the most bytes that format detection reads ahead.
const BUFFER_BYTES: usize = 256 << 10;

/// Number of non-empty lines that format detection examines.
const DETECTION_LINES: usize = 50;

/// Buffered line reader of one access log.
pub(crate) struct AccessLogReader {
    /// Name for messages: the path, or `stdin`.
    pub(crate) name: String,
    reader: Box<dyn BufRead>,
    /// The last line read.
    line: Vec<u8>,
    /// Error that ended the log early.
    pub(crate) read_error: Option<io::Error>,
}

/// Result of reading the next line.
pub(crate) enum RawLogLine<'i> {
    Line(&'i [u8]),
    /// The beginning of a line longer than [`MAX_LINE_BYTES`].
    TooLong(&'i [u8]),
    End,
}

impl AccessLogReader {
    /// Opens a file, or stdin for `-`. Adds the bytes read, before decompression, to `bytes_read`.
    ///
    /// # Errors
    /// Returns an error if the log cannot be opened or its first bytes cannot be read.
    pub(crate) fn open(path: &Path, bytes_read: Rc<Cell<u64>>) -> io::Result<Self> {
        let (name, inner): (_, Box<dyn Read>) = if path.as_os_str() == "-" {
            ("stdin".to_owned(), Box::new(io::stdin().lock()))
        } else {
            let file = File::open(path)?;
            if file.metadata()?.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            (path.display().to_string(), Box::new(file))
        };
        let raw = CountingReader { inner, bytes_read };
        let mut raw = BufReader::with_capacity(BUFFER_BYTES, raw);
        // A gzip file starts with these magic bytes (RFC 1952, section 2.3.1).
        let is_gzip = raw.fill_buf()?.starts_with(&[0x1f, 0x8b]);
        let reader: Box<dyn BufRead> = if is_gzip {
            let decoder = MultiGzDecoder::new(raw);
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        } else {
            Box::new(raw)
        };
        Ok(Self {
            name,
            reader,
            line: Vec::new(),
            read_error: None,
        })
    }

    /// Detects the format from the first lines without consuming them. Returns `None` if no known
    /// format matches.
    pub(super) fn detect_format(&mut self) -> Option<AccessLogFormat> {
        let (mut head, mut lines) = (Vec::new(), 0);
        while lines < DETECTION_LINES && head.len() < BUFFER_BYTES {
            let start = head.len();
            if self.read_line_part(&mut head) == 0 {
                break;
            }
            let line = head.get(start..).unwrap_or_default();
            lines += usize::from(!line.trim_ascii().is_empty());
        }
        let lines = head.split(|byte| *byte == b'\n');
        let lines = lines.filter(|line| !line.trim_ascii().is_empty());
        let format = AccessLogFormat::detect(lines.take(DETECTION_LINES));
        let rest = std::mem::replace(&mut self.reader, Box::new(io::empty()));
        self.reader = Box::new(Cursor::new(head).chain(rest));
        format
    }

    /// Returns the next non-empty line, without its line ending.
    pub(crate) fn next_line(&mut self) -> RawLogLine<'_> {
        let mut line = std::mem::take(&mut self.line);
        loop {
            line.clear();
            self.read_line_part(&mut line);
            if line.ends_with(b"\n") {
                line.pop();
                line.pop_if(|end| *end == b'\r');
                if line.is_empty() {
                    continue;
                }
            } else if line.len() > MAX_LINE_BYTES {
                let skipped = self.reader.skip_until(b'\n');
                self.read_error = skipped.err().or(self.read_error.take());
            }
            break;
        }
        self.line = line;
        match self.line.get(..MAX_LINE_BYTES) {
            Some(start) if self.line.len() > MAX_LINE_BYTES => RawLogLine::TooLong(start),
            _ if self.line.is_empty() => RawLogLine::End,
            _ => RawLogLine::Line(&self.line),
        }
    }

    /// Appends a line with its line ending, or the beginning of an oversized line. Returns the
    /// number of bytes read: 0 at the end of the input. An error ends the input.
    fn read_line_part(&mut self, line: &mut Vec<u8>) -> usize {
        let start = line.len();
        let mut part = (&mut self.reader).take(MAX_LINE_BYTES as u64 + 2);
        if let Err(error) = part.read_until(b'\n', line) {
            self.read_error = Some(error);
            self.reader = Box::new(io::empty());
        }
        line.len() - start
    }
}

struct CountingReader<R> {
    inner: R,
    bytes_read: Rc<Cell<u64>>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.bytes_read.set(self.bytes_read.get() + read as u64);
        Ok(read)
    }
}
