//! Reads the lines of one log from a file or stdin, plain or gzip-compressed. Line length is
//! bounded, and a read error ends the log at that point.

use super::parsers::AccessLogFormat;
use flate2::bufread::MultiGzDecoder;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

/// Maximum line length in bytes; longer lines count as broken.
pub(super) const MAX_LINE_BYTES: usize = (64 << 10) - 1;

/// Read buffer size in bytes: at least twice [`MAX_LINE_BYTES`].
const BUFFER_BYTES: usize = 256 << 10;

/// Number of non-empty lines that format detection examines.
const DETECTION_LINES: usize = 50;

/// Buffered line reader of one access log.
pub(crate) struct AccessLogReader {
    /// Name for messages: the path, or `stdin`.
    pub(crate) name: String,
    reader: Box<dyn Read>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether the input has no more bytes.
    ended: bool,
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
        let (name, raw): (_, Box<dyn Read>) = if path.as_os_str() == "-" {
            ("stdin".to_owned(), Box::new(io::stdin().lock()))
        } else {
            let file = File::open(path)?;
            if file.metadata()?.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            (path.display().to_string(), Box::new(file))
        };
        let mut raw = BufReader::with_capacity(
            64 << 10,
            CountingReader {
                inner: raw,
                bytes_read,
            },
        );
        // A gzip file starts with these magic bytes (RFC 1952, section 2.3.1).
        let is_gzip = raw.fill_buf()?.starts_with(&[0x1f, 0x8b]);
        let reader: Box<dyn Read> = if is_gzip {
            Box::new(MultiGzDecoder::new(raw))
        } else {
            Box::new(raw)
        };
        Ok(Self {
            name,
            reader,
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            ended: false,
            read_error: None,
        })
    }

    /// Detects the format from the first lines without consuming them. Returns `None` if no known
    /// format matches.
    pub(super) fn detect_format(&mut self) -> Option<AccessLogFormat> {
        while !self.ended
            && self.end < self.buffer.len()
            && self.first_buffered_lines().count() <= DETECTION_LINES
        {
            self.fill_buffer();
        }
        AccessLogFormat::detect(self.first_buffered_lines())
    }

    fn first_buffered_lines(&self) -> impl Iterator<Item = &[u8]> + Clone {
        let head = self.buffer.get(self.start..self.end).unwrap_or_default();
        head.split(|byte| *byte == b'\n')
            .filter(|line| !line.trim_ascii().is_empty())
            .take(DETECTION_LINES)
    }

    /// Returns the next non-empty line, without its line ending.
    pub(crate) fn next_line(&mut self) -> RawLogLine<'_> {
        loop {
            let rest = self.buffer.get(self.start..self.end).unwrap_or_default();
            if let Some(length) = memchr::memchr(b'\n', rest) {
                let from = self.start;
                self.start += length + 1;
                let length = if rest.get(..length).is_some_and(|line| line.ends_with(b"\r")) {
                    length - 1
                } else {
                    length
                };
                match length {
                    0 => continue,
                    1..=MAX_LINE_BYTES => return RawLogLine::Line(self.buffer_slice(from, length)),
                    _ => return RawLogLine::TooLong(self.buffer_slice(from, MAX_LINE_BYTES)),
                }
            }
            if rest.len() > MAX_LINE_BYTES {
                return self.skip_oversized_line();
            }
            if self.ended {
                let (from, length) = (self.start, rest.len());
                self.start = self.end;
                return if length == 0 {
                    RawLogLine::End
                } else {
                    RawLogLine::Line(self.buffer_slice(from, length))
                };
            }
            self.fill_buffer();
        }
    }

    fn buffer_slice(&self, from: usize, length: usize) -> &[u8] {
        self.buffer.get(from..from + length).unwrap_or_default()
    }

    /// Skips the rest of an oversized line and returns its beginning.
    fn skip_oversized_line(&mut self) -> RawLogLine<'_> {
        // The beginning of the line stays at the front of the buffer; reads refill only the space
        // behind it.
        self.buffer.copy_within(self.start..self.end, 0);
        let mut end = self.end - self.start;
        loop {
            let newline = memchr::memchr(
                b'\n',
                self.buffer.get(MAX_LINE_BYTES..end).unwrap_or_default(),
            );
            if let Some(at) = newline {
                (self.start, self.end) = (MAX_LINE_BYTES + at + 1, end);
                break;
            }
            end = MAX_LINE_BYTES;
            match self.read_into_buffer(end) {
                0 => {
                    (self.start, self.end) = (0, 0);
                    break;
                }
                read => end += read,
            }
        }
        RawLogLine::TooLong(self.buffer_slice(0, MAX_LINE_BYTES))
    }

    fn fill_buffer(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let read = self.read_into_buffer(self.end);
        self.end += read;
    }

    /// Reads into the buffer from index `from`. Returns the number of bytes read: 0 at the end of
    /// the input or on an error.
    fn read_into_buffer(&mut self, from: usize) -> usize {
        loop {
            let read = self
                .reader
                .read(self.buffer.get_mut(from..).unwrap_or_default());
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(read @ 1..) => return read,
                Ok(_) => {
                    self.ended = true;
                    return 0;
                }
                Err(error) => {
                    self.ended = true;
                    self.read_error = Some(error);
                    return 0;
                }
            }
        }
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
