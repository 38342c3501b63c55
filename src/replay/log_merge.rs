//! Requests in the order of their times.
//!
//! Most logs are written when a response has ended, by several workers: a little out of order. So requests wait until one
//! that is [`REORDER_WINDOW_US`] younger was read, and are sorted. Several logs are merged by time, so rotated files may be named in
//! any order and the logs of several replicas told together.
//!
//! Most text logs know whole seconds only. The requests of one second are then spread over it evenly, in the order of the
//! log, which is nearer to what was than all of them at its start.

use super::log_reader::{AccessLogReader, RawLogLine};
use super::parsers::{LineParser, ParsedLine, ParsedRequest};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::IpAddr;

/// How much too late a request may stand in a log and still be put into its place.
const REORDER_WINDOW_US: u64 = 10_000_000;

/// Requests that wait at most, and the bytes of their texts: some 50 MiB together. Several logs share them. A log with more
/// than its share in [`REORDER_WINDOW_US`] is sorted in parts.
const MAX_BUFFERED_REQUESTS: usize = 1 << 18;
const MAX_BUFFERED_TEXT_BYTES: usize = 32 << 20;

/// Lines read before it is looked whether some may go.
const LINES_PER_READ: usize = 4096;

/// A request of the past.
#[derive(Debug)]
pub(super) struct LoggedRequest<'a> {
    pub(super) arrival_us: u64,
    pub(super) duration_us: Option<u64>,
    pub(super) peer: Option<IpAddr>,
    pub(super) status: u16,
    pub(super) method: &'a [u8],
    pub(super) target: &'a [u8],
    pub(super) host: &'a [u8],
    headers: &'a [u8],
}

/// The same, without its texts.
#[derive(Clone, Copy, Debug)]
struct BufferedRequest {
    arrival_us: u64,
    duration_us: Option<u64>,
    peer: Option<IpAddr>,
    status: u16,
    has_whole_second_time: bool,
    method_length: u16,
    target_length: u16,
    host_length: u16,
    /// Where its texts begin, and how long they are, headers included.
    text_start: u32,
    text_length: u32,
}

/// What was read of a log and isn't a request.
#[derive(Debug, Default)]
pub(super) struct LineCounts {
    pub(super) lines: u64,
    pub(super) requests: u64,
    pub(super) other_records: u64,
    pub(super) broken_lines: u64,
    /// The first broken lines: number and beginning.
    pub(super) broken_examples: Vec<(u64, Vec<u8>)>,
}

/// Broken lines that are shown of each log, and how much of them.
const MAX_BROKEN_EXAMPLES: usize = 3;
const MAX_EXAMPLE_BYTES: usize = 120;

/// A log whose requests come in order.
pub(super) struct LogSource {
    pub(super) reader: AccessLogReader,
    pub(super) counts: LineCounts,
    parser: LineParser,
    spread_within_second: bool,
    /// How many logs there are.
    log_count: usize,
    buffered_requests: Vec<BufferedRequest>,
    buffered_text: Vec<u8>,
    newest_us: u64,
    /// So many of those that wait are sorted and may go, …
    ready_count: usize,
    /// … and these have gone.
    emitted_count: usize,
    ended: bool,
}

impl LogSource {
    pub(super) fn new(
        reader: AccessLogReader,
        parser: LineParser,
        spread_within_second: bool,
        log_count: usize,
    ) -> Self {
        Self {
            reader,
            counts: LineCounts::default(),
            parser,
            spread_within_second,
            log_count: log_count.max(1),
            buffered_requests: Vec::new(),
            buffered_text: Vec::new(),
            newest_us: 0,
            ready_count: 0,
            emitted_count: 0,
            ended: false,
        }
    }

    /// When the next request was; `None`: there is no more.
    fn peek_arrival_us(&mut self) -> Option<u64> {
        while self.emitted_count == self.ready_count {
            if self.ended && self.buffered_requests.len() == self.ready_count {
                return None;
            }
            self.refill_buffer();
        }
        self.buffered_requests
            .get(self.emitted_count)
            .map(|entry| entry.arrival_us)
    }

    fn next_request(&mut self) -> Option<LoggedRequest<'_>> {
        let entry = self
            .buffered_requests
            .get(self.emitted_count)
            .filter(|_| self.emitted_count < self.ready_count)?;
        self.emitted_count += 1;
        let start = usize::try_from(entry.text_start).ok()?;
        let texts = self
            .buffered_text
            .get(start..start + usize::try_from(entry.text_length).ok()?)?;
        let (method, texts) = texts.split_at_checked(entry.method_length.into())?;
        let (target, texts) = texts.split_at_checked(entry.target_length.into())?;
        let (host, headers) = texts.split_at_checked(entry.host_length.into())?;
        let BufferedRequest {
            arrival_us: at_us,
            duration_us: took_us,
            peer,
            status,
            ..
        } = *entry;
        Some(LoggedRequest {
            arrival_us: at_us,
            duration_us: took_us,
            peer,
            status,
            method,
            target,
            host,
            headers,
        })
    }

    /// Reads until some may go.
    fn refill_buffer(&mut self) {
        self.discard_emitted();
        while !self.ended {
            self.read_lines(LINES_PER_READ);
            let oldest_us = self
                .buffered_requests
                .first()
                .map_or(u64::MAX, |entry| entry.arrival_us);
            // Twice the window, so that what stays is moved once or twice and not with every stride.
            if self.is_full() || self.newest_us.saturating_sub(oldest_us) > 2 * REORDER_WINDOW_US {
                break;
            }
        }
        // Stable, and nearly nothing to do for a log that is in order.
        self.buffered_requests.sort_by_key(|entry| entry.arrival_us);
        let until_us = if self.ended {
            u64::MAX
        } else {
            self.newest_us.saturating_sub(REORDER_WINDOW_US)
        };
        self.ready_count = self
            .buffered_requests
            .partition_point(|entry| entry.arrival_us <= until_us);
        if self.is_full() {
            self.ready_count = self.ready_count.max(self.buffered_requests.len() / 2);
        }
        if self.spread_within_second {
            spread_within_seconds(
                self.buffered_requests
                    .get_mut(..self.ready_count)
                    .unwrap_or_default(),
            );
        }
    }

    fn is_full(&self) -> bool {
        self.buffered_requests.len() >= MAX_BUFFERED_REQUESTS / self.log_count
            || self.buffered_text.len() >= MAX_BUFFERED_TEXT_BYTES / self.log_count
    }

    fn discard_emitted(&mut self) {
        self.buffered_requests.drain(..self.emitted_count);
        (self.emitted_count, self.ready_count) = (0, 0);
        let mut texts = Vec::with_capacity(self.buffered_text.capacity());
        for entry in &mut self.buffered_requests {
            let start = usize::try_from(entry.text_start).unwrap_or(usize::MAX);
            let length = usize::try_from(entry.text_length).unwrap_or(usize::MAX);
            entry.text_start = u32::try_from(texts.len()).unwrap_or(u32::MAX);
            texts.extend_from_slice(
                self.buffered_text
                    .get(start..start.saturating_add(length))
                    .unwrap_or_default(),
            );
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
            self.counts.lines += 1;
            match parsed {
                ParsedLine::Request(line) => {
                    self.counts.requests += 1;
                    self.newest_us = self.newest_us.max(line.arrival_us);
                    self.buffered_requests
                        .extend(buffer_request(&line, &mut self.buffered_text));
                }
                ParsedLine::Other => self.counts.other_records += 1,
                ParsedLine::Broken => self.counts.record_broken_line(line),
            }
        }
    }
}

impl LineCounts {
    fn record_broken_line(&mut self, line: &[u8]) {
        self.broken_lines += 1;
        if self.broken_examples.len() < MAX_BROKEN_EXAMPLES {
            let beginning = line.iter().copied().take(MAX_EXAMPLE_BYTES).collect();
            self.broken_examples.push((self.lines, beginning));
        }
    }
}

/// Packs a line's texts. They are parts of one line of less than 64 KiB, so their lengths fit; should one ever not, the
/// request is none.
fn buffer_request(line: &ParsedRequest<'_>, texts: &mut Vec<u8>) -> Option<BufferedRequest> {
    let start = texts.len();
    let length = |text: &[u8]| u16::try_from(text.len()).ok();
    let (method, target, host) = (
        length(&line.method)?,
        length(&line.target)?,
        length(&line.host)?,
    );
    for text in [&line.method, &line.target, &line.host] {
        texts.extend_from_slice(text);
    }
    for (header_index, value) in &line.headers {
        texts.extend_from_slice(&header_index.to_le_bytes());
        texts.extend_from_slice(&length(value).unwrap_or_default().to_le_bytes());
        texts.extend_from_slice(value.get(..usize::from(length(value).unwrap_or_default()))?);
    }
    Some(BufferedRequest {
        arrival_us: line.arrival_us,
        duration_us: line.duration_us,
        peer: line.peer,
        status: line.status,
        has_whole_second_time: line.has_whole_second_time,
        method_length: method,
        target_length: target,
        host_length: host,
        text_start: u32::try_from(start).ok()?,
        text_length: u32::try_from(texts.len() - start).ok()?,
    })
}

/// Puts the n requests of a second at n equal distances.
fn spread_within_seconds(entries: &mut [BufferedRequest]) {
    for second in entries.chunk_by_mut(|a, b| {
        a.arrival_us == b.arrival_us && a.has_whole_second_time && b.has_whole_second_time
    }) {
        let count = second.len() as u64;
        for (at, entry) in (0u64..).zip(second) {
            entry.arrival_us += at * 1_000_000 / count;
        }
    }
}

impl LoggedRequest<'_> {
    /// The headers that the log tells, by their places in [`super::lines::Wanted`].
    pub(super) fn headers(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = self.headers;
        std::iter::from_fn(move || {
            let (header_index, after) = rest.split_first_chunk()?;
            let (length, after) = after.split_first_chunk()?;
            let (value, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
            rest = after;
            Some((u16::from_le_bytes(*header_index).into(), value))
        })
    }
}

/// Hands the requests of all logs to `judge`, in the order of their times, each with the place of its log. `beat` hears
/// every few thousand how many it were.
pub(super) fn merge_by_time(
    sources: &mut [LogSource],
    mut handle_request: impl FnMut(usize, &LoggedRequest<'_>),
    mut report_progress: impl FnMut(u64),
) {
    let mut heads: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    for (log_index, source) in sources.iter_mut().enumerate() {
        heads.extend(
            source
                .peek_arrival_us()
                .map(|at_us| Reverse((at_us, log_index))),
        );
    }
    let mut count = 0u64;
    while let Some(Reverse((_, log_index))) = heads.pop() {
        let next_other = heads.peek().map_or((u64::MAX, 0), |Reverse(head)| *head);
        let Some(source) = sources.get_mut(log_index) else {
            continue;
        };
        // For as long as it is ahead of the others.
        while let Some(at_us) = source.peek_arrival_us() {
            if (at_us, log_index) > next_other {
                heads.push(Reverse((at_us, log_index)));
                break;
            }
            if let Some(request) = source.next_request() {
                handle_request(log_index, &request);
            }
            count += 1;
            if count.is_multiple_of(1 << 13) {
                report_progress(count);
            }
        }
    }
}
