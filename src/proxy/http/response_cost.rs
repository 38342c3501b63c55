//! Actual cost of a request, read from its response while the response is forwarded.
//!
//! Each body frame is scanned once on its way to the client. The scan delays no frame, and its
//! memory is bounded whatever the upstream sends.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, response};
use http_body::Frame;

use crate::enforcer::EstimatedCharge;
use crate::limiter::MAX_UNITS;
use crate::policy::{
    ActualCost, JsonPointer, JsonPointerScanner, MediaType, ReportSource, parse_whole_number,
};

/// Estimated charges of one request that the response body or trailers will settle.
///
/// If the meter is dropped before the response ends, a charge is settled only if the cost read by
/// then exceeds the estimate: a client cannot reduce its cost by disconnecting.
#[derive(Debug)]
pub(crate) struct CostMeter {
    reports: ResponseReports,
    charges: Vec<EstimatedCharge>,
}

impl CostMeter {
    /// Settles the charges that the response head determines and creates a meter for the others.
    /// Returns `None` if no charge depends on the body or the trailers.
    pub(crate) fn settle_head_and_create(
        estimates: Vec<EstimatedCharge>,
        response: &response::Parts,
    ) -> Option<Box<Self>> {
        if estimates.is_empty() {
            return None;
        }
        let sources = estimates.iter().flat_map(|one| one.cost.actual.sources());
        let reports = ResponseReports::from_head(sources, response);
        let mut charges = Vec::new();
        for estimate in estimates {
            if let ActualCost::Status(_) = estimate.cost.actual {
                estimate.settle_by_status(response.status);
            } else if estimate
                .cost
                .actual
                .sources()
                .any(|one| reports.awaits(one))
            {
                charges.push(estimate);
            } else {
                reports.settle(estimate);
            }
        }
        (!charges.is_empty()).then(|| Box::new(Self { reports, charges }))
    }

    /// Reads costs from the next frame: body data or trailers.
    pub(crate) fn read_frame(&mut self, frame: &Frame<Bytes>) {
        if let Some(bytes) = frame.data_ref() {
            self.reports.read_body_chunk(bytes);
        } else if let Some(trailers) = frame.trailers_ref() {
            self.reports.read_trailers(trailers);
        }
    }

    /// Settles all charges whose cost was found, after the complete body.
    pub(crate) fn settle(mut self) {
        self.reports.finish_body();
        for estimate in self.charges.drain(..) {
            self.reports.settle(estimate);
        }
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        for estimate in self.charges.drain(..) {
            let units = self.reports.units_for(&estimate);
            if let Some(units) = units.filter(|units| *units > estimate.estimate) {
                estimate.settle(units);
            }
        }
    }
}

/// The numbers that one response reports.
#[derive(Debug)]
struct ResponseReports {
    headers: Vec<HeaderReport>,
    /// `None` if no number is in the body, or if the body can't be read.
    body: Option<JsonBodyReader>,
}

/// A number in a header or trailer.
#[derive(Debug)]
struct HeaderReport {
    name: HeaderName,
    /// Whether the response has the header. Otherwise the trailers may have it.
    is_found: bool,
    /// `None` also if the header is repeated or not a whole number.
    units: Option<u64>,
}

impl ResponseReports {
    fn from_head<'c>(
        sources: impl Iterator<Item = &'c ReportSource>,
        response: &response::Parts,
    ) -> Self {
        let (mut headers, mut pointers) = (Vec::new(), Vec::new());
        for source in sources {
            match source {
                ReportSource::Header(name) => headers.push(HeaderReport {
                    name: name.clone(),
                    is_found: response.headers.contains_key(name),
                    units: parse_units_header(&response.headers, name),
                }),
                ReportSource::Json(pointer) if !pointers.contains(pointer) => {
                    pointers.push(pointer.clone());
                }
                ReportSource::Json(_) => {}
            }
        }
        Self {
            headers,
            body: JsonBodyReader::from_response(response, pointers),
        }
    }

    /// Whether the rest of the response may report the number.
    fn awaits(&self, source: &ReportSource) -> bool {
        match source {
            ReportSource::Header(name) => {
                let mut headers = self.headers.iter();
                headers.any(|one| one.name == *name && !one.is_found)
            }
            ReportSource::Json(_) => self.body.is_some(),
        }
    }

    /// Scans the next bytes of the body.
    fn read_body_chunk(&mut self, bytes: &[u8]) {
        if let Some(body) = &mut self.body {
            body.read_chunk(bytes);
        }
    }

    /// Reads the headers that the response head did not have.
    fn read_trailers(&mut self, trailers: &HeaderMap) {
        for header in self.headers.iter_mut().filter(|one| !one.is_found) {
            header.units = parse_units_header(trailers, &header.name);
        }
    }

    /// Ends the last document in the body.
    fn finish_body(&mut self) {
        if let Some(body) = &mut self.body {
            body.finish_document();
        }
    }

    /// The actual cost as far as it is reported.
    fn units_for(&self, charge: &EstimatedCharge) -> Option<u64> {
        charge.reported_units(|source| self.units_at(source))
    }

    /// The number at a source.
    fn units_at(&self, source: &ReportSource) -> Option<u64> {
        match source {
            ReportSource::Header(name) => {
                let mut headers = self.headers.iter();
                headers.find(|one| one.name == *name)?.units
            }
            ReportSource::Json(pointer) => self.body.as_ref()?.units_at(pointer),
        }
    }

    /// Settles a charge after the response. If no cost was reported, the estimate stands.
    fn settle(&self, charge: EstimatedCharge) {
        match self.units_for(&charge) {
            Some(units) => charge.settle(units),
            None => charge.keep_unreported(),
        }
    }
}

/// Parses the cost header. Returns `None` if it is absent, repeated or not a valid whole number.
fn parse_units_header(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    parse_whole_number(value.as_bytes()).filter(|units| *units <= MAX_UNITS)
}

/// Scans a body for numbers: each in the last JSON document that has it.
#[derive(Debug)]
struct JsonBodyReader {
    format: JsonBodyFormat,
    numbers: Vec<NumberInBody>,
    /// Number of matched bytes of a leading byte order mark; the mark's full length after the
    /// check.
    bom_bytes_read: usize,
}

/// A number in the body.
#[derive(Debug)]
struct NumberInBody {
    pointer: JsonPointer,
    /// Scanner of the current document.
    scanner: JsonPointerScanner,
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
    /// Creates the reader for a JSON, NDJSON or event-stream body. Returns `None` for another media
    /// type, a content coding or a partial response, and without a number to read.
    fn from_response(response: &response::Parts, pointers: Vec<JsonPointer>) -> Option<Self> {
        if pointers.is_empty() || response.status == StatusCode::PARTIAL_CONTENT {
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

    fn read_chunk(&mut self, bytes: &[u8]) {
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

    fn finish_document(&mut self) {
        self.numbers
            .iter_mut()
            .for_each(NumberInBody::finish_document);
    }

    /// The number in the last complete document that had one.
    fn units_at(&self, pointer: &JsonPointer) -> Option<u64> {
        let mut numbers = self.numbers.iter();
        numbers.find(|one| one.pointer == *pointer)?.last_units
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
