//! What a request really took, read from its response while that passes by.
//!
//! Nothing is buffered or held back: every part of a body is looked at once, on its way to the client, in bounded
//! memory whatever the upstream sends.

mod json_scanner;

use crate::enforcer::EstimatedCharge;
use crate::limiter::MAX_UNITS;
use crate::policy::{ActualCostSource, EstimateCost, JsonPointer, parse_whole_number};
pub(in crate::proxy) use crate::proxy::http::response_cost::json_scanner::JsonPointerScanner;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, header, response};
use http_body::Frame;
use std::sync::Arc;

/// What is still to be settled when the response has said it. Dropped before, the estimates stand, unless it has been
/// said already that they were too small: leaving early saves nothing.
#[derive(Debug)]
pub(in crate::proxy) struct CostMeter(Vec<(ResponseCostReader, EstimatedCharge)>);

impl CostMeter {
    /// Settles at once what the head of the response tells; `None` if its body and trailers can't add to that.
    pub(in crate::proxy) fn from_response_head(
        estimates: Vec<EstimatedCharge>,
        response: &response::Parts,
    ) -> Option<Box<Self>> {
        let mut pending = Vec::new();
        for estimate in estimates {
            let meter = ResponseCostReader::new(Arc::clone(estimate.cost()), response);
            match meter.state {
                ResponseCostState::Known(Some(units)) => estimate.settle(units),
                ResponseCostState::Known(None) => {}
                ResponseCostState::AwaitingTrailers | ResponseCostState::ReadingBody(_) => {
                    pending.push((meter, estimate))
                }
            }
        }
        (!pending.is_empty()).then(|| Box::new(Self(pending)))
    }

    /// The next part of the body.
    pub(in crate::proxy) fn read_frame(&mut self, frame: &Frame<Bytes>) {
        for (meter, _) in &mut self.0 {
            if let Some(bytes) = frame.data_ref() {
                meter.read_body(bytes);
            } else if let Some(fields) = frame.trailers_ref() {
                meter.read_trailers(fields);
            }
        }
    }

    /// The body has come to its proper end.
    pub(in crate::proxy) fn settle(mut self) {
        for (meter, estimate) in self.0.drain(..) {
            if let Some(units) = meter.finish() {
                estimate.settle(units);
            }
        }
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        for (meter, estimate) in self.0.drain(..) {
            if let Some(units) = meter
                .known_units()
                .filter(|units| *units > estimate.estimated_units())
            {
                estimate.settle(units);
            }
        }
    }
}

/// Reads one response for one cost.
#[derive(Debug)]
struct ResponseCostReader {
    cost: Arc<EstimateCost>,
    state: ResponseCostState,
}

#[derive(Debug)]
enum ResponseCostState {
    /// Whatever follows. `None`: the response doesn't say, or says no whole number.
    Known(Option<u64>),
    /// The head had no such field.
    AwaitingTrailers,
    /// The body may hold it; boxed, as few responses are read.
    ReadingBody(Box<JsonBodyReader>),
}

impl ResponseCostReader {
    fn new(cost: Arc<EstimateCost>, response: &response::Parts) -> Self {
        let state = match &cost.actual_source {
            ActualCostSource::Header(name) if response.headers.contains_key(name) => {
                ResponseCostState::Known(parse_units_header(&response.headers, name))
            }
            ActualCostSource::Header(_) => ResponseCostState::AwaitingTrailers,
            ActualCostSource::Json(_) => JsonBodyReader::from_response(response)
                .map_or(ResponseCostState::Known(None), |reader| {
                    ResponseCostState::ReadingBody(Box::new(reader))
                }),
        };
        Self { cost, state }
    }

    /// The next bytes of the body.
    fn read_body(&mut self, bytes: &[u8]) {
        if let (ResponseCostState::ReadingBody(reader), ActualCostSource::Json(pointer)) =
            (&mut self.state, &self.cost.actual_source)
        {
            reader.read(bytes, pointer);
        }
    }

    /// The fields that end the body.
    fn read_trailers(&mut self, fields: &HeaderMap) {
        if let (ResponseCostState::AwaitingTrailers, ActualCostSource::Header(name)) =
            (&self.state, &self.cost.actual_source)
        {
            self.state = ResponseCostState::Known(parse_units_header(fields, name));
        }
    }

    /// What has been said for certain, whatever may follow.
    fn known_units(&self) -> Option<u64> {
        match &self.state {
            ResponseCostState::Known(units) => *units,
            ResponseCostState::ReadingBody(reader) => reader.last_units,
            ResponseCostState::AwaitingTrailers => None,
        }
    }

    /// What the request took, at the proper end of the body; `None`: the estimate stands.
    fn finish(self) -> Option<u64> {
        match self.state {
            ResponseCostState::Known(units) => units,
            ResponseCostState::ReadingBody(reader) => reader.finish(),
            ResponseCostState::AwaitingTrailers => None,
        }
    }
}

/// Whoever says it twice says nothing.
fn parse_units_header(fields: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut values = fields.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    parse_whole_number(value.as_bytes()).filter(|units| *units <= MAX_UNITS)
}

/// Reads a body for the last document in it that has the number.
#[derive(Debug, Default)]
struct JsonBodyReader {
    format: JsonBodyFormat,
    /// The document that is being read.
    scanner: JsonPointerScanner,
    last_units: Option<u64>,
    /// How much of a byte order mark has come.
    bom_bytes_read: usize,
}

/// How JSON lies in a body.
#[derive(Debug, Default)]
enum JsonBodyFormat {
    #[default]
    Document,
    /// One document per line.
    Lines,
    /// One per event.
    EventStream(EventStreamParser),
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl JsonBodyReader {
    /// `None` for a body that isn't JSON to us: of another type, encoded, or only a part.
    fn from_response(response: &response::Parts) -> Option<Self> {
        let fields = &response.headers;
        let mut codings = fields.get_all(header::CONTENT_ENCODING).iter();
        let is_unencoded = codings.all(|coding| {
            coding
                .as_bytes()
                .trim_ascii()
                .eq_ignore_ascii_case(b"identity")
        });
        if !is_unencoded || response.status == StatusCode::PARTIAL_CONTENT {
            return None;
        }
        let content_type = fields.get(header::CONTENT_TYPE)?.to_str().ok()?;
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

    fn read(&mut self, bytes: &[u8], pointer: &JsonPointer) {
        let bytes = self.skip_byte_order_mark(bytes);
        match &mut self.format {
            JsonBodyFormat::Document => self.scanner.read(bytes, pointer),
            JsonBodyFormat::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.scanner.read(part, pointer);
                    if part.ends_with(b"\n") {
                        self.last_units = self.scanner.finish().or(self.last_units);
                    }
                }
            }
            JsonBodyFormat::EventStream(events) => events.parse(bytes, |data| match data {
                EventStreamItem::DataChunk(part) => self.scanner.read(part, pointer),
                EventStreamItem::EventEnd => {
                    self.last_units = self.scanner.finish().or(self.last_units)
                }
            }),
        }
    }

    /// The end of the body ends its last document too.
    fn finish(mut self) -> Option<u64> {
        self.scanner.finish().or(self.last_units)
    }

    /// Some write one before their JSON, and an event stream may begin with one.
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

/// Takes the data out of an event stream (WHATWG HTML, 9.2.6), whatever the parts it comes in.
#[derive(Debug, Default)]
struct EventStreamParser {
    line: EventStreamLine,
    /// An LF that follows belongs to the same line end.
    after_cr: bool,
}

#[derive(Clone, Copy, Debug)]
enum EventStreamLine {
    /// So many bytes, which are how `data:` begins.
    FieldPrefix(usize),
    Data,
    /// Another field, or a comment.
    Other,
}

impl Default for EventStreamLine {
    fn default() -> Self {
        Self::FieldPrefix(0)
    }
}

/// What an event stream holds.
enum EventStreamItem<'b> {
    /// Of the event that is being read.
    DataChunk(&'b [u8]),
    /// An empty line ended the event.
    EventEnd,
}

impl EventStreamParser {
    const DATA_FIELD: &[u8] = b"data:";

    fn parse(&mut self, mut bytes: &[u8], mut on_item: impl FnMut(EventStreamItem<'_>)) {
        while let Some((&byte, rest)) = bytes.split_first() {
            let was_cr = std::mem::take(&mut self.after_cr);
            bytes = match (self.line, byte) {
                (_, b'\n') if was_cr => rest,
                (line, b'\r' | b'\n') => {
                    self.after_cr = byte == b'\r';
                    self.line = EventStreamLine::default();
                    match line {
                        EventStreamLine::FieldPrefix(0) => on_item(EventStreamItem::EventEnd),
                        // What comes before and after a line end is never one number.
                        EventStreamLine::Data => on_item(EventStreamItem::DataChunk(b"\n")),
                        EventStreamLine::FieldPrefix(_) | EventStreamLine::Other => {}
                    }
                    rest
                }
                (EventStreamLine::FieldPrefix(matched), _) => {
                    self.line = match Self::DATA_FIELD.get(matched) {
                        Some(expected) if *expected != byte => EventStreamLine::Other,
                        _ if matched + 1 < Self::DATA_FIELD.len() => {
                            EventStreamLine::FieldPrefix(matched + 1)
                        }
                        _ => EventStreamLine::Data,
                    };
                    rest
                }
                (EventStreamLine::Data | EventStreamLine::Other, _) => {
                    let end = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
                    let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    if let EventStreamLine::Data = self.line {
                        on_item(EventStreamItem::DataChunk(part));
                    }
                    rest
                }
            };
        }
    }
}

#[cfg(test)]
mod tests;
