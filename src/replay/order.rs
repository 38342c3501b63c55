//! Requests in the order of their times.
//!
//! Most logs are written when a response has ended, by several workers: a little out of order. So requests wait until one
//! that is [`WINDOW_US`] younger was read, and are sorted. Several logs are merged by time, so rotated files may be named in
//! any order and the logs of several replicas told together.
//!
//! Most text logs know whole seconds only. The requests of one second are then spread over it evenly, in the order of the
//! log, which is nearer to what was than all of them at its start.

use super::input::{Got, Input};
use super::lines::{Line, Parser, Read};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::IpAddr;

/// How much too late a request may stand in a log and still be put into its place.
const WINDOW_US: u64 = 10_000_000;

/// Requests that wait at most, and the bytes of their texts: some 50 MiB together. Several logs share them. A log with more
/// than its share in [`WINDOW_US`] is sorted in parts.
const MAX_WAITING: usize = 1 << 18;
const MAX_TEXT: usize = 32 << 20;

/// Lines read before it is looked whether some may go.
const STRIDE: usize = 4096;

/// A request of the past.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) at_us: u64,
    pub(super) took_us: Option<u64>,
    pub(super) peer: Option<IpAddr>,
    pub(super) status: u16,
    pub(super) method: &'a [u8],
    pub(super) target: &'a [u8],
    pub(super) host: &'a [u8],
    headers: &'a [u8],
}

/// The same, without its texts.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at_us: u64,
    took_us: Option<u64>,
    peer: Option<IpAddr>,
    status: u16,
    coarse: bool,
    method: u16,
    target: u16,
    host: u16,
    /// Where its texts begin, and how long they are, headers included.
    start: u32,
    length: u32,
}

/// What was read of a log and isn't a request.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) lines: u64,
    pub(super) requests: u64,
    pub(super) other: u64,
    pub(super) broken: u64,
    /// The first broken lines: number and beginning.
    pub(super) examples: Vec<(u64, Vec<u8>)>,
}

/// Broken lines that are shown of each log, and how much of them.
const EXAMPLES: usize = 3;
const EXAMPLE_BYTES: usize = 120;

/// A log whose requests come in order.
pub(super) struct Source {
    pub(super) input: Input,
    pub(super) counts: Counts,
    parser: Parser,
    spreads: bool,
    /// How many logs there are.
    sharing: usize,
    waiting: Vec<Entry>,
    texts: Vec<u8>,
    newest_us: u64,
    /// So many of those that wait are sorted and may go, …
    ready: usize,
    /// … and these have gone.
    gone: usize,
    ended: bool,
}

impl Source {
    pub(super) fn new(input: Input, parser: Parser, spreads: bool, sharing: usize) -> Self {
        Self {
            input,
            counts: Counts::default(),
            parser,
            spreads,
            sharing: sharing.max(1),
            waiting: Vec::new(),
            texts: Vec::new(),
            newest_us: 0,
            ready: 0,
            gone: 0,
            ended: false,
        }
    }

    /// When the next request was; `None`: there is no more.
    fn next_at_us(&mut self) -> Option<u64> {
        while self.gone == self.ready {
            if self.ended && self.waiting.len() == self.ready {
                return None;
            }
            self.refill();
        }
        self.waiting.get(self.gone).map(|entry| entry.at_us)
    }

    fn next(&mut self) -> Option<Request<'_>> {
        let entry = self
            .waiting
            .get(self.gone)
            .filter(|_| self.gone < self.ready)?;
        self.gone += 1;
        let start = usize::try_from(entry.start).ok()?;
        let texts = self
            .texts
            .get(start..start + usize::try_from(entry.length).ok()?)?;
        let (method, texts) = texts.split_at_checked(entry.method.into())?;
        let (target, texts) = texts.split_at_checked(entry.target.into())?;
        let (host, headers) = texts.split_at_checked(entry.host.into())?;
        let Entry {
            at_us,
            took_us,
            peer,
            status,
            ..
        } = *entry;
        Some(Request {
            at_us,
            took_us,
            peer,
            status,
            method,
            target,
            host,
            headers,
        })
    }

    /// Reads until some may go.
    fn refill(&mut self) {
        self.forget_gone();
        while !self.ended {
            self.read(STRIDE);
            let oldest_us = self.waiting.first().map_or(u64::MAX, |entry| entry.at_us);
            // Twice the window, so that what stays is moved once or twice and not with every stride.
            if self.is_full() || self.newest_us.saturating_sub(oldest_us) > 2 * WINDOW_US {
                break;
            }
        }
        // Stable, and nearly nothing to do for a log that is in order.
        self.waiting.sort_by_key(|entry| entry.at_us);
        let until_us = if self.ended {
            u64::MAX
        } else {
            self.newest_us.saturating_sub(WINDOW_US)
        };
        self.ready = self
            .waiting
            .partition_point(|entry| entry.at_us <= until_us);
        if self.is_full() {
            self.ready = self.ready.max(self.waiting.len() / 2);
        }
        if self.spreads {
            spread(self.waiting.get_mut(..self.ready).unwrap_or_default());
        }
    }

    fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING / self.sharing
            || self.texts.len() >= MAX_TEXT / self.sharing
    }

    fn forget_gone(&mut self) {
        self.waiting.drain(..self.gone);
        (self.gone, self.ready) = (0, 0);
        let mut texts = Vec::with_capacity(self.texts.capacity());
        for entry in &mut self.waiting {
            let start = usize::try_from(entry.start).unwrap_or(usize::MAX);
            let length = usize::try_from(entry.length).unwrap_or(usize::MAX);
            entry.start = u32::try_from(texts.len()).unwrap_or(u32::MAX);
            texts.extend_from_slice(
                self.texts
                    .get(start..start.saturating_add(length))
                    .unwrap_or_default(),
            );
        }
        self.texts = texts;
    }

    fn read(&mut self, most: usize) {
        for _ in 0..most {
            let (line, read) = match self.input.next() {
                Got::End => {
                    self.ended = true;
                    return;
                }
                Got::TooLong(line) => (line, Read::Broken),
                Got::Line(line) => (line, self.parser.read(line)),
            };
            self.counts.lines += 1;
            match read {
                Read::Request(line) => {
                    self.counts.requests += 1;
                    self.newest_us = self.newest_us.max(line.at_us);
                    self.waiting.extend(entry(&line, &mut self.texts));
                }
                Read::Other => self.counts.other += 1,
                Read::Broken => self.counts.broken(line),
            }
        }
    }
}

impl Counts {
    fn broken(&mut self, line: &[u8]) {
        self.broken += 1;
        if self.examples.len() < EXAMPLES {
            let beginning = line.iter().copied().take(EXAMPLE_BYTES).collect();
            self.examples.push((self.lines, beginning));
        }
    }
}

/// Packs a line's texts. They are parts of one line of less than 64 KiB, so their lengths fit; should one ever not, the
/// request is none.
fn entry(line: &Line<'_>, texts: &mut Vec<u8>) -> Option<Entry> {
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
    for (place, value) in &line.headers {
        texts.extend_from_slice(&place.to_le_bytes());
        texts.extend_from_slice(&length(value).unwrap_or_default().to_le_bytes());
        texts.extend_from_slice(value.get(..usize::from(length(value).unwrap_or_default()))?);
    }
    Some(Entry {
        at_us: line.at_us,
        took_us: line.took_us,
        peer: line.peer,
        status: line.status,
        coarse: line.coarse,
        method,
        target,
        host,
        start: u32::try_from(start).ok()?,
        length: u32::try_from(texts.len() - start).ok()?,
    })
}

/// Puts the n requests of a second at n equal distances.
fn spread(entries: &mut [Entry]) {
    for second in entries.chunk_by_mut(|a, b| a.at_us == b.at_us && a.coarse && b.coarse) {
        let count = second.len() as u64;
        for (at, entry) in (0u64..).zip(second) {
            entry.at_us += at * 1_000_000 / count;
        }
    }
}

impl Request<'_> {
    /// The headers that the log tells, by their places in [`super::lines::Wanted`].
    pub(super) fn headers(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = self.headers;
        std::iter::from_fn(move || {
            let (place, after) = rest.split_first_chunk()?;
            let (length, after) = after.split_first_chunk()?;
            let (value, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
            rest = after;
            Some((u16::from_le_bytes(*place).into(), value))
        })
    }
}

/// Hands the requests of all logs to `judge`, in the order of their times, each with the place of its log. `beat` hears
/// every few thousand how many it were.
pub(super) fn merge(
    sources: &mut [Source],
    mut judge: impl FnMut(usize, &Request<'_>),
    mut beat: impl FnMut(u64),
) {
    let mut heads: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    for (at, source) in sources.iter_mut().enumerate() {
        heads.extend(source.next_at_us().map(|at_us| Reverse((at_us, at))));
    }
    let mut count = 0u64;
    while let Some(Reverse((_, at))) = heads.pop() {
        let others = heads.peek().map_or((u64::MAX, 0), |Reverse(head)| *head);
        let Some(source) = sources.get_mut(at) else {
            continue;
        };
        // For as long as it is ahead of the others.
        while let Some(at_us) = source.next_at_us() {
            if (at_us, at) > others {
                heads.push(Reverse((at_us, at)));
                break;
            }
            if let Some(request) = source.next() {
                judge(at, &request);
            }
            count += 1;
            if count.is_multiple_of(1 << 13) {
                beat(count);
            }
        }
    }
}
