//! Numbers in JSON bodies, read as the bodies pass: one document, lines, or the events of a stream.

use http::{StatusCode, response};

use crate::policy::{JsonPointer, JsonPointerScanner, MediaType};

/// Scans a body for numbers: each in the last JSON document that has it.
#[derive(Debug)]
pub(super) struct JsonBodyReader {
    format: JsonBodyFormat,
    pub(super) numbers: Vec<NumberInBody>,
    /// Number of matched bytes of a leading byte order mark; the mark's full length after the
    /// check.
    bom_bytes_read: usize,
}

/// A number in the body.
#[derive(Debug)]
pub(super) struct NumberInBody {
    pointer: JsonPointer,
    /// Scanner of the current document.
    pub(super) scanner: JsonPointerScanner,
    /// The number in the last complete document that had one.
    last_units: Option<u64>,
}

impl NumberInBody {
    fn finish_document(&mut self) {
        self.last_units = self.scanner.finish().or(self.last_units);
    }
}

/// Layout of JSON documents in a body.
#[derive(Debug)]
enum JsonBodyFormat {
    Document,
    /// One document per line.
    Lines,
    /// One document per event.
    EventStream(EventStreamParser),
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl JsonBodyReader {
    pub(super) fn is_event_stream(&self) -> bool {
        matches!(self.format, JsonBodyFormat::EventStream(_))
    }

    /// Whether what was read of an event stream ends after a whole event.
    pub(super) fn is_between_events(&self) -> bool {
        match &self.format {
            JsonBodyFormat::EventStream(events) => events.is_between_events,
            _ => false,
        }
    }

    /// Creates the reader for a JSON, NDJSON or event-stream body. Returns `None` for another media
    /// type, a content coding or a partial response, and without a number to read, unless the
    /// response may be cut off.
    pub(super) fn from_response(
        response: &response::Parts,
        pointers: Vec<JsonPointer>,
        cuts_off: bool,
    ) -> Option<Self> {
        if pointers.is_empty() && !cuts_off || response.status == StatusCode::PARTIAL_CONTENT {
            return None;
        }
        let media_type = MediaType::from_headers(&response.headers)?;
        let format = match &*media_type.name {
            "text/event-stream" => JsonBodyFormat::EventStream(EventStreamParser::default()),
            "application/x-ndjson" | "application/ndjson" | "application/jsonl" => {
                JsonBodyFormat::Lines
            }
            other => MediaType::is_json(other).then_some(JsonBodyFormat::Document)?,
        };
        let numbers = pointers.into_iter().map(|pointer| NumberInBody {
            pointer,
            scanner: JsonPointerScanner::default(),
            last_units: None,
        });
        Some(Self {
            format,
            numbers: numbers.collect(),
            bom_bytes_read: 0,
        })
    }

    pub(super) fn read_chunk(&mut self, bytes: &[u8]) {
        let bytes = self.skip_byte_order_mark(bytes);
        let numbers = &mut self.numbers;
        let mut read_part = |part: Option<&[u8]>| {
            for number in numbers.iter_mut() {
                match part {
                    Some(part) => number.scanner.read_chunk(part, &number.pointer),
                    None => number.finish_document(),
                }
            }
        };
        match &mut self.format {
            JsonBodyFormat::Document => read_part(Some(bytes)),
            JsonBodyFormat::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    read_part(Some(part));
                    if part.ends_with(b"\n") {
                        read_part(None);
                    }
                }
            }
            JsonBodyFormat::EventStream(events) => events.parse(bytes, read_part),
        }
    }

    pub(super) fn finish_document(&mut self) {
        self.numbers
            .iter_mut()
            .for_each(NumberInBody::finish_document);
    }

    /// The number in the last complete document that had one.
    pub(super) fn units_at(&self, pointer: &JsonPointer) -> Option<u64> {
        let mut numbers = self.numbers.iter();
        let number = numbers.find(|one| one.pointer == *pointer)?;
        number.scanner.list_units().or(number.last_units)
    }

    /// Skips a byte order mark at the start of the body, which some JSON bodies and event streams
    /// have.
    fn skip_byte_order_mark<'b>(&mut self, mut bytes: &'b [u8]) -> &'b [u8] {
        while let (Some(expected), Some((byte, rest))) = (
            BYTE_ORDER_MARK.get(self.bom_bytes_read),
            bytes.split_first(),
        ) {
            if byte != expected {
                self.bom_bytes_read = BYTE_ORDER_MARK.len();
                break;
            }
            self.bom_bytes_read += 1;
            bytes = rest;
        }
        bytes
    }
}

/// Incremental parser for the data of an event stream (WHATWG HTML, 9.2.6).
#[derive(Debug)]
struct EventStreamParser {
    line: EventStreamLineState,
    /// Whether nothing was read since the end of an event, or at all.
    is_between_events: bool,
    /// Whether the last byte was CR; a following LF belongs to the same line end.
    after_cr: bool,
}

impl Default for EventStreamParser {
    fn default() -> Self {
        Self {
            line: EventStreamLineState::default(),
            is_between_events: true,
            after_cr: false,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum EventStreamLineState {
    /// The bytes read of the line are the first n bytes of `data:`.
    FieldPrefix(usize),
    Data,
    /// The line is a comment or has a field other than `data`.
    Other,
}

impl Default for EventStreamLineState {
    fn default() -> Self {
        Self::FieldPrefix(0)
    }
}

impl EventStreamParser {
    const DATA_FIELD: &[u8] = b"data:";

    /// Passes the data of events to `on_data`, in parts, and `None` for the end of an event: an
    /// empty line.
    fn parse(&mut self, mut bytes: &[u8], mut on_data: impl FnMut(Option<&[u8]>)) {
        while let Some((&byte, rest)) = bytes.split_first() {
            let was_cr = std::mem::take(&mut self.after_cr);
            self.is_between_events &= was_cr && byte == b'\n';
            bytes = match (self.line, byte) {
                (_, b'\n') if was_cr => rest,
                (line, b'\r' | b'\n') => {
                    self.after_cr = byte == b'\r';
                    self.line = EventStreamLineState::default();
                    match line {
                        EventStreamLineState::FieldPrefix(0) => {
                            self.is_between_events = true;
                            on_data(None);
                        }
                        // The line end is passed on: a number cannot continue across it.
                        EventStreamLineState::Data => on_data(Some(b"\n")),
                        EventStreamLineState::FieldPrefix(_) | EventStreamLineState::Other => {}
                    }
                    rest
                }
                (EventStreamLineState::FieldPrefix(matched), _) => {
                    self.line = match Self::DATA_FIELD.get(matched) {
                        Some(expected) if *expected != byte => EventStreamLineState::Other,
                        _ if matched + 1 < Self::DATA_FIELD.len() => {
                            EventStreamLineState::FieldPrefix(matched + 1)
                        }
                        _ => EventStreamLineState::Data,
                    };
                    rest
                }
                (EventStreamLineState::Data | EventStreamLineState::Other, _) => {
                    let end = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
                    let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    if let EventStreamLineState::Data = self.line {
                        on_data(Some(part));
                    }
                    rest
                }
            };
        }
    }
}
