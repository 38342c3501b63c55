//! Orders the requests of all logs by time.
//!
//! Most servers log a request when its response ends, from several workers, so lines are slightly
//! out of order. Each log buffers requests for [`REORDER_WINDOW_US`] of log time and sorts them.
//! The logs are then merged by time, so rotated files and the logs of several replicas may be given
//! in any order.
//!
//! Most text formats record whole seconds only, so the requests of one second are spread evenly
//! over it, in log order. Even spacing is closer to the real arrivals than a burst at the start of
//! the second.

use super::Settings;
use super::log_reader::{AccessLogReader, RawLogLine};
use super::parsers::{
    AccessLogFormat, LineParser, ParsedLine, ParsedRequest, RequestFacts, RequiredFields,
};
use crate::text::{count_noun, format_count};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Maximum delay of a line, in log time, for which its request is still sorted into place.
const REORDER_WINDOW_US: u64 = 10_000_000;

/// Limits of buffered requests and their text bytes, shared by all logs: about 50 MiB in total. A
/// log that exceeds its share within [`REORDER_WINDOW_US`] is sorted in parts.
const MAX_BUFFERED_REQUESTS: usize = 1 << 18;
const MAX_BUFFERED_TEXT_BYTES: usize = 32 << 20;

/// Number of lines to read between two checks whether requests can be released.
const LINES_PER_READ: usize = 4096;

/// A request read from a log, with borrowed texts.
#[derive(Debug)]
pub(super) struct ReplayRequest<'a> {
    pub(super) facts: RequestFacts,
    pub(super) method: &'a [u8],
    pub(super) target: &'a [u8],
    pub(super) host: &'a [u8],
    /// Whether the log records the query string.
    pub(super) log_has_query: bool,
    headers: &'a [u8],
}

/// A buffered request; its texts are in [`LogSource::buffered_text`].
#[derive(Debug)]
struct BufferedRequest {
    facts: RequestFacts,
    /// Place of its packed texts in the text buffer: method, target, host and headers.
    texts: Range<usize>,
}

/// Maximum number of broken lines shown for each log, and of bytes shown of each line.
const MAX_BROKEN_EXAMPLES: usize = 3;
const MAX_EXAMPLE_BYTES: usize = 120;

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

/// One log as a source of requests in time order.
pub(crate) struct LogSource {
    pub(super) reader: AccessLogReader,
    pub(super) report: LogReport,
    has_query: bool,
    parser: LineParser,
    spread_within_second: bool,
    /// Number of logs that share the buffer limits.
    log_count: usize,
    buffered_requests: Vec<BufferedRequest>,
    buffered_text: Vec<u8>,
    newest_us: u64,
    /// Number of buffered requests that are sorted and can be released.
    ready_count: usize,
    /// Number of released requests that the caller has already taken.
    emitted_count: usize,
    ended: bool,
}

impl LogSource {
    pub(super) fn new(
        reader: AccessLogReader,
        format: &AccessLogFormat,
        required_fields: &RequiredFields,
        settings: &Settings,
    ) -> Self {
        Self {
            report: LogReport {
                name: reader.name.clone(),
                format: format.into_str(),
                ..LogReport::default()
            },
            reader,
            has_query: format.records_query(),
            parser: LineParser::new(format, required_fields),
            spread_within_second: settings.spread_within_second,
            log_count: settings.logs.len().max(1),
            buffered_requests: Vec::new(),
            buffered_text: Vec::new(),
            newest_us: 0,
            ready_count: 0,
            emitted_count: 0,
            ended: false,
        }
    }

    /// Reads requests until `is_last` returns true.
    pub(super) fn read_requests_until(
        &mut self,
        mut is_last: impl FnMut(&ReplayRequest<'_>) -> bool,
    ) {
        while self.peek_arrival_us().is_some() {
            if self.next_request().is_none_or(|request| is_last(&request)) {
                return;
            }
        }
    }

    /// Returns the time of the next request, or `None` at the end of the log.
    fn peek_arrival_us(&mut self) -> Option<u64> {
        while self.emitted_count == self.ready_count {
            if self.ended && self.buffered_requests.len() == self.ready_count {
                return None;
            }
            self.refill_and_sort_buffer();
        }
        self.buffered_requests
            .get(self.emitted_count)
            .map(|entry| entry.facts.arrival_us)
    }

    fn next_request(&mut self) -> Option<ReplayRequest<'_>> {
        let entry = self
            .buffered_requests
            .get(self.emitted_count)
            .filter(|_| self.emitted_count < self.ready_count)?;
        self.emitted_count += 1;
        let texts = self.buffered_text.get(entry.texts.clone())?;
        let (_, method, texts) = split_packed_text(texts)?;
        let (_, target, texts) = split_packed_text(texts)?;
        let (_, host, headers) = split_packed_text(texts)?;
        Some(ReplayRequest {
            facts: entry.facts,
            method,
            target,
            host,
            log_has_query: self.has_query,
            headers,
        })
    }

    /// Reads lines until some requests can be released, and sorts the buffered requests.
    fn refill_and_sort_buffer(&mut self) {
        self.discard_emitted_requests();
        while !self.ended {
            self.read_lines(LINES_PER_READ);
            let oldest_us = self
                .buffered_requests
                .first()
                .map_or(u64::MAX, |entry| entry.facts.arrival_us);
            // Reads until the buffer covers twice the window, so that a request that stays in the
            // buffer is moved once or twice, not on every read.
            if self.is_buffer_full()
                || self.newest_us.saturating_sub(oldest_us) > 2 * REORDER_WINDOW_US
            {
                break;
            }
        }
        // The sort is stable, and cheap for a log that is nearly in order.
        self.buffered_requests
            .sort_by_key(|entry| entry.facts.arrival_us);
        let until_us = if self.ended {
            u64::MAX
        } else {
            self.newest_us.saturating_sub(REORDER_WINDOW_US)
        };
        self.ready_count = self
            .buffered_requests
            .partition_point(|entry| entry.facts.arrival_us <= until_us);
        if self.is_buffer_full() {
            self.ready_count = self.ready_count.max(self.buffered_requests.len() / 2);
        }
        let ready = self.buffered_requests.get_mut(..self.ready_count);
        if let Some(ready) = ready.filter(|_| self.spread_within_second) {
            spread_within_seconds(ready);
        }
    }

    fn is_buffer_full(&self) -> bool {
        self.buffered_requests.len() >= MAX_BUFFERED_REQUESTS / self.log_count
            || self.buffered_text.len() >= MAX_BUFFERED_TEXT_BYTES / self.log_count
    }

    fn discard_emitted_requests(&mut self) {
        self.buffered_requests.drain(..self.emitted_count);
        (self.emitted_count, self.ready_count) = (0, 0);
        let mut texts = Vec::with_capacity(self.buffered_text.capacity());
        for entry in &mut self.buffered_requests {
            let old = self.buffered_text.get(entry.texts.clone());
            let start = texts.len();
            texts.extend_from_slice(old.unwrap_or_default());
            entry.texts = start..texts.len();
        }
        self.buffered_text = texts;
    }

    fn read_lines(&mut self, max_lines: usize) {
        for _ in 0..max_lines {
            let (line, parsed) = match self.reader.next_line() {
                RawLogLine::End => {
                    self.ended = true;
                    return;
                }
                RawLogLine::TooLong(line) => (line, ParsedLine::Broken),
                RawLogLine::Line(line) => (line, self.parser.parse_line(line)),
            };
            let report = &mut self.report;
            report.lines += 1;
            match parsed {
                ParsedLine::Request(line) => {
                    report.requests += 1;
                    self.newest_us = self.newest_us.max(line.facts.arrival_us);
                    self.buffered_requests
                        .extend(buffer_request(&line, &mut self.buffered_text));
                }
                ParsedLine::Other => report.other += 1,
                ParsedLine::Broken => {
                    report.broken += 1;
                    if report.broken_examples.len() < MAX_BROKEN_EXAMPLES {
                        let start = line.get(..MAX_EXAMPLE_BYTES).unwrap_or(line);
                        let text = String::from_utf8_lossy(start).escape_debug().to_string();
                        report.broken_examples.push((report.lines, text));
                    }
                }
            }
        }
    }

    /// Returns what was read.
    pub(super) fn into_report(self) -> LogReport {
        LogReport {
            fault: self.reader.read_error.map(|error| error.to_string()),
            ..self.report
        }
    }
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

/// Packs the texts of a request into the text buffer, each after its header index and length. The
/// texts come from one line shorter than 64 KiB, so their lengths fit into 16 bits; a request whose
/// lengths do not fit is dropped.
fn buffer_request(line: &ParsedRequest<'_>, texts: &mut Vec<u8>) -> Option<BufferedRequest> {
    let start = texts.len();
    let headers = line.headers.iter().map(|(index, value)| (*index, value));
    let others = [&line.method, &line.target, &line.host].map(|text| (0, text));
    for (header_index, text) in others.into_iter().chain(headers) {
        let length = u16::try_from(text.len()).ok()?;
        texts.extend_from_slice(&header_index.to_le_bytes());
        texts.extend_from_slice(&length.to_le_bytes());
        texts.extend_from_slice(text);
    }
    Some(BufferedRequest {
        facts: line.facts,
        texts: start..texts.len(),
    })
}

/// Returns the next packed text with its header index, and the texts after it.
fn split_packed_text(texts: &[u8]) -> Option<(usize, &[u8], &[u8])> {
    let (header_index, rest) = texts.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (text, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
    Some((u16::from_le_bytes(*header_index).into(), text, rest))
}

/// Spreads the requests with the same whole-second time evenly over that second.
fn spread_within_seconds(entries: &mut [BufferedRequest]) {
    for second in entries.chunk_by_mut(|a, b| {
        let (a, b) = (a.facts, b.facts);
        a.arrival_us == b.arrival_us && a.has_whole_second_time && b.has_whole_second_time
    }) {
        let count = second.len() as u64;
        for (at, entry) in (0u64..).zip(second) {
            entry.facts.arrival_us += at * 1_000_000 / count;
        }
    }
}

impl ReplayRequest<'_> {
    /// Returns the logged values, by their index in [`super::parsers::RequiredFields`].
    pub(super) fn field_values(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = self.headers;
        std::iter::from_fn(move || {
            let (header_index, value, after) = split_packed_text(rest)?;
            rest = after;
            Some((header_index, value))
        })
    }
}

/// Passes the requests of all logs, in time order, to `handle_request`.
/// Calls `report_progress` with the request count every few thousand requests.
pub(super) fn merge_by_time(
    sources: &mut [LogSource],
    mut handle_request: impl FnMut(&ReplayRequest<'_>),
    mut report_progress: impl FnMut(u64),
) {
    let heads = sources
        .iter_mut()
        .enumerate()
        .filter_map(|(log_index, source)| Some(Reverse((source.peek_arrival_us()?, log_index))));
    let mut heads: BinaryHeap<Reverse<(u64, usize)>> = heads.collect();
    let mut count = 0u64;
    while let Some(Reverse((_, log_index))) = heads.pop() {
        let next_other = heads.peek().map_or((u64::MAX, 0), |Reverse(head)| *head);
        let Some(source) = sources.get_mut(log_index) else {
            continue;
        };
        // Continue with this log while its next request is the earliest.
        while let Some(at_us) = source.peek_arrival_us() {
            if (at_us, log_index) > next_other {
                heads.push(Reverse((at_us, log_index)));
                break;
            }
            if let Some(request) = source.next_request() {
                handle_request(&request);
            }
            count += 1;
            if count.is_multiple_of(1 << 13) {
                report_progress(count);
            }
        }
    }
}
