//! Actual cost of a request, read from its response while the response is forwarded.
//!
//! Each body frame is scanned once on its way to the client. The scan delays no frame, and its
//! memory is bounded whatever the upstream sends.

mod json_scanner;

pub(crate) use json_scanner::JsonPointerScanner;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, header, response};
use http_body::Frame;
use std::sync::Arc;

use crate::enforcer::EstimatedCharge;
use crate::limiter::MAX_UNITS;
use crate::policy::{ActualCostSource, EstimateCost, JsonPointer, parse_whole_number};

/// Estimated charges of one request that the response body or trailers will settle.
///
/// If the meter is dropped before the response ends, a charge is settled only if the cost read by
/// then exceeds the estimate: a client cannot reduce its cost by disconnecting.
#[derive(Debug)]
pub(crate) struct CostMeter(Vec<(ResponseCostReader, EstimatedCharge)>);

impl CostMeter {
    /// Settles the charges that the response head determines and creates a meter for the others.
    /// Returns `None` if no charge depends on the body or the trailers.
    pub(crate) fn settle_head_and_create(
        estimates: Vec<EstimatedCharge>,
        response: &response::Parts,
    ) -> Option<Box<Self>> {
        let mut pending = Vec::new();
        for estimate in estimates {
            let reader = ResponseCostReader::new(Arc::clone(&estimate.cost), response);
            match reader.state {
                ResponseCostState::Known(Some(units)) => estimate.settle(units),
                ResponseCostState::Known(None) => {}
                ResponseCostState::AwaitingTrailers | ResponseCostState::ReadingBody(_) => {
                    pending.push((reader, estimate))
                }
            }
        }
        (!pending.is_empty()).then(|| Box::new(Self(pending)))
    }

    /// Reads costs from the next frame: body data or trailers.
    pub(crate) fn read_frame(&mut self, frame: &Frame<Bytes>) {
        for (reader, _) in &mut self.0 {
            if let Some(bytes) = frame.data_ref() {
                reader.read_body_chunk(bytes);
            } else if let Some(trailers) = frame.trailers_ref() {
                reader.read_trailers(trailers);
            }
        }
    }

    /// Settles all charges whose cost was found, after the complete body.
    pub(crate) fn settle(mut self) {
        for (reader, estimate) in self.0.drain(..) {
            if let Some(units) = reader.finish() {
                estimate.settle(units);
            }
        }
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        for (reader, estimate) in self.0.drain(..) {
            let is_more = |units: &u64| *units > estimate.cost.estimate;
            if let Some(units) = reader.known_units().filter(is_more) {
                estimate.settle(units);
            }
        }
    }
}

/// Reads the actual units of one cost from one response.
#[derive(Debug)]
struct ResponseCostReader {
    cost: Arc<EstimateCost>,
    state: ResponseCostState,
}

#[derive(Debug)]
enum ResponseCostState {
    /// The final cost; `None` if the response has no cost or the cost is not a valid whole number.
    Known(Option<u64>),
    /// The response head does not have the cost header; the trailers may have it.
    AwaitingTrailers,
    /// The body may contain the cost. The reader is boxed because few responses are scanned.
    ReadingBody(Box<JsonBodyReader>),
}

impl ResponseCostReader {
    fn new(cost: Arc<EstimateCost>, response: &response::Parts) -> Self {
        let state = match &cost.actual_source {
            ActualCostSource::Header(name) if response.headers.contains_key(name) => {
                ResponseCostState::Known(parse_units_header(&response.headers, name))
            }
            ActualCostSource::Header(_) => ResponseCostState::AwaitingTrailers,
            ActualCostSource::Status(_) => {
                ResponseCostState::Known(cost.units_of_status(response.status))
            }
            ActualCostSource::Json(_) => match JsonBodyReader::from_response(response) {
                Some(reader) => ResponseCostState::ReadingBody(Box::new(reader)),
                None => ResponseCostState::Known(None),
            },
        };
        Self { cost, state }
    }

    /// Scans the next bytes of the body.
    fn read_body_chunk(&mut self, bytes: &[u8]) {
        if let (ResponseCostState::ReadingBody(reader), ActualCostSource::Json(pointer)) =
            (&mut self.state, &self.cost.actual_source)
        {
            reader.read_chunk(bytes, pointer);
        }
    }

    /// Reads the cost header from the trailers if the response head did not have it.
    fn read_trailers(&mut self, trailers: &HeaderMap) {
        if let (ResponseCostState::AwaitingTrailers, ActualCostSource::Header(name)) =
            (&self.state, &self.cost.actual_source)
        {
            self.state = ResponseCostState::Known(parse_units_header(trailers, name));
        }
    }

    /// Returns the cost already read, even if the body is incomplete.
    fn known_units(&self) -> Option<u64> {
        match &self.state {
            ResponseCostState::Known(units) => *units,
            ResponseCostState::ReadingBody(reader) => reader.last_units,
            ResponseCostState::AwaitingTrailers => None,
        }
    }

    /// Returns the actual cost after the complete body, or `None` if the estimate stands.
    fn finish(self) -> Option<u64> {
        match self.state {
            ResponseCostState::ReadingBody(reader) => reader.finish(),
            _ => self.known_units(),
        }
    }
}

/// Parses the cost header. Returns `None` if it is repeated or not a valid whole number.
fn parse_units_header(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    parse_whole_number(value.as_bytes()).filter(|units| *units <= MAX_UNITS)
}

/// Scans a body for the last JSON document that has a value at the pointer.
#[derive(Debug, Default)]
struct JsonBodyReader {
    format: JsonBodyFormat,
    /// Scanner of the current document.
    scanner: JsonPointerScanner,
    /// The cost in the last complete document that had one.
    last_units: Option<u64>,
    /// Number of matched bytes of a leading byte order mark; the mark's full length after the
    /// check.
    bom_bytes_read: usize,
}

/// Layout of JSON documents in a body.
#[derive(Debug, Default)]
enum JsonBodyFormat {
    #[default]
    Document,
    /// One document per line.
    Lines,
    /// One document per event.
    EventStream(EventStreamParser),
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl JsonBodyReader {
    /// Creates the reader for a JSON, NDJSON or event-stream body. Returns `None` for another media
    /// type, a content coding or a partial response.
    fn from_response(response: &response::Parts) -> Option<Self> {
        let headers = &response.headers;
        let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
        let is_identity = |coding: &[u8]| coding.trim_ascii().eq_ignore_ascii_case(b"identity");
        let is_unencoded = codings.all(|coding| is_identity(coding.as_bytes()));
        if !is_unencoded || response.status == StatusCode::PARTIAL_CONTENT {
            return None;
        }
        let content_type = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let media_type = content_type.split(';').next()?.trim().to_ascii_lowercase();
        let format = match media_type.as_str() {
            "text/event-stream" => JsonBodyFormat::EventStream(EventStreamParser::default()),
            "application/x-ndjson" | "application/ndjson" | "application/jsonl" => {
                JsonBodyFormat::Lines
            }
            "application/json" => JsonBodyFormat::Document,
            other if other.ends_with("+json") => JsonBodyFormat::Document,
            _ => return None,
        };
        Some(Self {
            format,
            ..Self::default()
        })
    }

    fn read_chunk(&mut self, bytes: &[u8], pointer: &JsonPointer) {
        let bytes = self.skip_byte_order_mark(bytes);
        match &mut self.format {
            JsonBodyFormat::Document => self.scanner.read_chunk(bytes, pointer),
            JsonBodyFormat::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.scanner.read_chunk(part, pointer);
                    if part.ends_with(b"\n") {
                        self.last_units = self.scanner.finish().or(self.last_units);
                    }
                }
            }
            JsonBodyFormat::EventStream(events) => events.parse(bytes, |data| match data {
                Some(part) => self.scanner.read_chunk(part, pointer),
                None => self.last_units = self.scanner.finish().or(self.last_units),
            }),
        }
    }

    /// Ends the last document at the end of the body and returns the last cost found.
    fn finish(mut self) -> Option<u64> {
        self.scanner.finish().or(self.last_units)
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
#[derive(Debug, Default)]
struct EventStreamParser {
    line: EventStreamLineState,
    /// Whether the last byte was CR; a following LF belongs to the same line end.
    after_cr: bool,
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
            bytes = match (self.line, byte) {
                (_, b'\n') if was_cr => rest,
                (line, b'\r' | b'\n') => {
                    self.after_cr = byte == b'\r';
                    self.line = EventStreamLineState::default();
                    match line {
                        EventStreamLineState::FieldPrefix(0) => on_data(None),
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

#[cfg(test)]
mod tests;
