//! Actual cost of a request, read from its response while the response is forwarded.
//!
//! Each body frame is scanned once on its way to the client. The scan delays no frame, and its
//! memory is bounded whatever the upstream sends.

#[cfg(any(test, fuzzing))]
pub(crate) mod properties;
mod stream_flow;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, response};
use http_body::Frame;
use serde_json::json;
use std::task::{Context, Poll, ready};

use stream_flow::StreamFlow;

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
pub struct CostMeter {
    reports: ResponseReports,
    charges: Vec<MeteredCharge>,
    /// The last event of the stream, while the event before it ends.
    last_event: Option<LastEvent>,
}

/// A charge that the rest of the response settles.
#[derive(Debug)]
struct MeteredCharge {
    charge: EstimatedCharge,
    /// `None` if the response is charged at its end only.
    flow: Option<StreamFlow>,
}

/// The event that ends a stream whose key has nothing left.
#[derive(Debug)]
struct LastEvent {
    text: Bytes,
    /// Bytes of the event before that may still pass.
    bytes_left: usize,
}

/// What may pass of a response next.
#[derive(Debug)]
pub enum ResponseFlow {
    /// So many bytes of data.
    Bytes(usize),
    /// Nothing: an event stream ends with this event, another body fails.
    End(Option<Bytes>),
}

/// Maximum rest of an event that passes before the last event. A longer one is cut.
const MAX_EVENT_REST: usize = 64 * 1024;

impl CostMeter {
    /// Settles the charges that the response head determines and creates a meter for the others.
    /// Returns `None` if no charge depends on the body or the trailers.
    pub fn settle_head_and_create(
        estimates: Vec<EstimatedCharge>,
        response: &response::Parts,
    ) -> Option<Box<Self>> {
        if estimates.is_empty() {
            return None;
        }
        let sources = estimates.iter().flat_map(|one| one.cost.actual.sources());
        let cuts_off = estimates.iter().any(|one| one.slices.is_some());
        let reports = ResponseReports::from_head(sources, response, cuts_off);
        let mut charges = Vec::new();
        for estimate in estimates {
            if let ActualCost::Status(_) = estimate.cost.actual {
                estimate.settle_by_status(response.status);
                continue;
            }
            let slices = estimate.slices.as_deref();
            let flow = slices.map(|slices| StreamFlow::new(&estimate, slices));
            let is_pending = reports.await_cost_of(&estimate);
            if is_pending || flow.is_some() {
                let charge = estimate;
                charges.push(MeteredCharge { charge, flow });
            } else {
                reports.settle(estimate);
            }
        }
        (!charges.is_empty()).then(|| {
            Box::new(Self {
                reports,
                charges,
                last_event: None,
            })
        })
    }

    /// Reads costs from the next frame: body data or trailers.
    pub fn read_frame(&mut self, frame: &Frame<Bytes>) {
        if let Some(bytes) = frame.data_ref() {
            self.reports.read_body_chunk(bytes);
            for MeteredCharge { charge, flow } in &mut self.charges {
                if let Some(flow) = flow {
                    flow.note_bytes(bytes.len(), self.reports.units_for(charge));
                }
            }
            if let Some(last) = &mut self.last_event {
                last.bytes_left = last.bytes_left.saturating_sub(bytes.len());
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.reports.read_trailers(trailers);
        }
    }

    /// Settles all charges whose cost was found, after the complete body.
    pub fn settle(mut self) {
        self.reports.finish_body();
        for MeteredCharge { charge, .. } in self.charges.drain(..) {
            self.reports.settle(charge);
        }
    }

    /// Whether the response may be cut off.
    pub(crate) fn may_cut_off(&self) -> bool {
        self.charges.iter().any(|one| one.flow.is_some())
    }

    /// Whether a last event may follow what the upstream sends.
    pub(crate) fn may_add_event(&self) -> bool {
        self.may_cut_off() && self.reports.is_event_stream()
    }

    /// Takes further units for what passes next. Pending while all units are used and the store is
    /// asked for more.
    pub fn poll_flow(&mut self, cx: &mut Context<'_>) -> Poll<ResponseFlow> {
        let mut allowance = usize::MAX;
        for MeteredCharge { charge, flow } in &mut self.charges {
            let Some(flow) = flow.as_mut().filter(|_| self.last_event.is_none()) else {
                continue;
            };
            match ready!(flow.poll_units(charge, cx)) {
                Ok(()) => allowance = allowance.min(flow.allowance(charge)),
                Err(retry_after_s) => {
                    charge.record_cut_off();
                    if !self.reports.is_event_stream() {
                        return Poll::Ready(ResponseFlow::End(None));
                    }
                    self.last_event = Some(LastEvent {
                        text: format_last_event(charge, retry_after_s),
                        bytes_left: MAX_EVENT_REST,
                    });
                }
            }
        }
        Poll::Ready(match &self.last_event {
            None => ResponseFlow::Bytes(allowance.max(1)),
            Some(last) if self.reports.is_between_events() => {
                ResponseFlow::End(Some(last.text.clone()))
            }
            Some(LastEvent { bytes_left: 0, .. }) => ResponseFlow::End(None),
            // Byte by byte, so that the last event follows the end of this one.
            Some(_) => ResponseFlow::Bytes(1),
        })
    }
}

/// The event that ends a stream. Clients of language models read its fields as those of an error.
fn format_last_event(charge: &EstimatedCharge, retry_after_s: u64) -> Bytes {
    let policy = charge
        .slices
        .as_ref()
        .and_then(|slices| slices.reported_policy());
    let of_policy = policy.map_or_else(String::new, |name| format!(" of policy {name}"));
    let retry = match retry_after_s {
        0 => String::new(),
        seconds => format!(" Retry after {seconds} s."),
    };
    let message = format!("The quota{of_policy} is used up, so the response ends here.{retry}");
    let data = json!({
        "type": "error",
        "error": { "type": "rate_limit_error", "code": "rate_limit_exceeded", "message": message },
    });
    format!("event: error\ndata: {data}\n\n").into()
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        for MeteredCharge { charge, flow } in self.charges.drain(..) {
            let used = flow.map(|flow| flow.used(&charge));
            let units = used.or_else(|| self.reports.units_for(&charge));
            if let Some(units) = units.filter(|units| *units > charge.charged_units()) {
                charge.settle(units);
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
        cuts_off: bool,
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
            body: JsonBodyReader::from_response(response, pointers, cuts_off),
        }
    }

    fn is_event_stream(&self) -> bool {
        let body = self.body.as_ref();
        body.is_some_and(|body| matches!(body.format, JsonBodyFormat::EventStream(_)))
    }

    /// Whether what was read of an event stream ends after a whole event.
    fn is_between_events(&self) -> bool {
        match self.body.as_ref().map(|body| &body.format) {
            Some(JsonBodyFormat::EventStream(events)) => events.is_between_events,
            _ => false,
        }
    }

    /// Whether the rest of the response may report a part of the cost.
    fn await_cost_of(&self, charge: &EstimatedCharge) -> bool {
        charge.cost.actual.sources().any(|source| match source {
            ReportSource::Header(name) => {
                let mut headers = self.headers.iter();
                headers.any(|one| one.name == *name && !one.is_found)
            }
            ReportSource::Json(_) => self.body.is_some(),
        })
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
    /// type, a content coding or a partial response, and without a number to read, unless the
    /// response may be cut off.
    fn from_response(
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

#[cfg(test)]
mod tests;
