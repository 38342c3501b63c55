//! What a request really took, read from its response while that passes by.
//!
//! Nothing is buffered or held back: every part of a body is looked at once, on its way to the client, in bounded
//! memory whatever the upstream sends.

mod scan;

use crate::enforcer::Estimate;
use crate::limiter::MAX_UNITS;
use crate::policy::{Actual, EstimateCost, Pointer, whole};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, header, response};
use http_body::Frame;
pub(super) use scan::Scan;
use std::sync::Arc;

/// What is still to be settled when the response has said it. Dropped before, the estimates stand, unless it has been
/// said already that they were too small: leaving early saves nothing.
#[derive(Debug)]
pub(super) struct Bill(Vec<(Meter, Estimate)>);

impl Bill {
    /// Settles at once what the head of the response tells; `None` if its body and trailers can't add to that.
    pub(super) fn open(estimates: Vec<Estimate>, response: &response::Parts) -> Option<Box<Self>> {
        let mut open = Vec::new();
        for estimate in estimates {
            let meter = Meter::new(Arc::clone(estimate.cost()), response);
            match meter.state {
                State::Known(Some(units)) => estimate.settle(units),
                State::Known(None) => {}
                State::Trailers | State::Body(_) => open.push((meter, estimate)),
            }
        }
        (!open.is_empty()).then(|| Box::new(Self(open)))
    }

    /// The next part of the body.
    pub(super) fn read(&mut self, frame: &Frame<Bytes>) {
        for (meter, _) in &mut self.0 {
            if let Some(bytes) = frame.data_ref() {
                meter.read(bytes);
            } else if let Some(fields) = frame.trailers_ref() {
                meter.trailers(fields);
            }
        }
    }

    /// The body has come to its proper end.
    pub(super) fn settle(mut self) {
        for (meter, estimate) in self.0.drain(..) {
            if let Some(units) = meter.end() {
                estimate.settle(units);
            }
        }
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        for (meter, estimate) in self.0.drain(..) {
            if let Some(units) = meter.so_far().filter(|units| *units > estimate.units()) {
                estimate.settle(units);
            }
        }
    }
}

/// Reads one response for one cost.
#[derive(Debug)]
struct Meter {
    cost: Arc<EstimateCost>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Whatever follows. `None`: the response doesn't say, or says no whole number.
    Known(Option<u64>),
    /// The head had no such field.
    Trailers,
    /// The body may hold it; boxed, as few responses are read.
    Body(Box<Reader>),
}

impl Meter {
    fn new(cost: Arc<EstimateCost>, response: &response::Parts) -> Self {
        let state = match &cost.actual {
            Actual::Header(name) if response.headers.contains_key(name) => {
                State::Known(field(&response.headers, name))
            }
            Actual::Header(_) => State::Trailers,
            Actual::Json(_) => Reader::of(response)
                .map_or(State::Known(None), |reader| State::Body(Box::new(reader))),
        };
        Self { cost, state }
    }

    /// The next bytes of the body.
    fn read(&mut self, bytes: &[u8]) {
        if let (State::Body(reader), Actual::Json(pointer)) = (&mut self.state, &self.cost.actual) {
            reader.read(bytes, pointer);
        }
    }

    /// The fields that end the body.
    fn trailers(&mut self, fields: &HeaderMap) {
        if let (State::Trailers, Actual::Header(name)) = (&self.state, &self.cost.actual) {
            self.state = State::Known(field(fields, name));
        }
    }

    /// What has been said for certain, whatever may follow.
    fn so_far(&self) -> Option<u64> {
        match &self.state {
            State::Known(units) => *units,
            State::Body(reader) => reader.last,
            State::Trailers => None,
        }
    }

    /// What the request took, at the proper end of the body; `None`: the estimate stands.
    fn end(self) -> Option<u64> {
        match self.state {
            State::Known(units) => units,
            State::Body(reader) => reader.end(),
            State::Trailers => None,
        }
    }
}

/// Whoever says it twice says nothing.
fn field(fields: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut values = fields.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    whole(value.as_bytes()).filter(|units| *units <= MAX_UNITS)
}

/// Reads a body for the last document in it that has the number.
#[derive(Debug, Default)]
struct Reader {
    form: Form,
    /// The document that is being read.
    scan: Scan,
    last: Option<u64>,
    /// How much of a byte order mark has come.
    mark: usize,
}

/// How JSON lies in a body.
#[derive(Debug, Default)]
enum Form {
    #[default]
    Document,
    /// One document per line.
    Lines,
    /// One per event.
    Events(Events),
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl Reader {
    /// `None` for a body that isn't JSON to us: of another type, encoded, or only a part.
    fn of(response: &response::Parts) -> Option<Self> {
        let fields = &response.headers;
        let mut codings = fields.get_all(header::CONTENT_ENCODING).iter();
        let is_plain = codings.all(|coding| {
            coding
                .as_bytes()
                .trim_ascii()
                .eq_ignore_ascii_case(b"identity")
        });
        if !is_plain || response.status == StatusCode::PARTIAL_CONTENT {
            return None;
        }
        let written = fields.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let media_type = written.split(';').next()?.trim().to_ascii_lowercase();
        let form = match media_type.as_str() {
            "text/event-stream" => Form::Events(Events::default()),
            "application/x-ndjson" | "application/ndjson" | "application/jsonl" => Form::Lines,
            "application/json" => Form::Document,
            other if other.ends_with("+json") => Form::Document,
            _ => return None,
        };
        Some(Self {
            form,
            ..Self::default()
        })
    }

    fn read(&mut self, bytes: &[u8], pointer: &Pointer) {
        let bytes = self.without_mark(bytes);
        match &mut self.form {
            Form::Document => self.scan.read(bytes, pointer),
            Form::Lines => {
                for part in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.scan.read(part, pointer);
                    if part.ends_with(b"\n") {
                        self.last = self.scan.finish().or(self.last);
                    }
                }
            }
            Form::Events(events) => events.read(bytes, |data| match data {
                Data::Part(part) => self.scan.read(part, pointer),
                Data::End => self.last = self.scan.finish().or(self.last),
            }),
        }
    }

    /// The end of the body ends its last document too.
    fn end(mut self) -> Option<u64> {
        self.scan.finish().or(self.last)
    }

    /// Some write one before their JSON, and an event stream may begin with one.
    fn without_mark<'b>(&mut self, mut bytes: &'b [u8]) -> &'b [u8] {
        while let (Some(expected), Some((byte, rest))) =
            (BYTE_ORDER_MARK.get(self.mark), bytes.split_first())
        {
            if byte != expected {
                self.mark = BYTE_ORDER_MARK.len();
                break;
            }
            self.mark += 1;
            bytes = rest;
        }
        bytes
    }
}

/// Takes the data out of an event stream (WHATWG HTML, 9.2.6), whatever the parts it comes in.
#[derive(Debug, Default)]
struct Events {
    line: Line,
    /// An LF that follows belongs to the same line end.
    after_cr: bool,
}

#[derive(Clone, Copy, Debug)]
enum Line {
    /// So many bytes, which are how `data:` begins.
    Name(usize),
    Data,
    /// Another field, or a comment.
    Other,
}

impl Default for Line {
    fn default() -> Self {
        Self::Name(0)
    }
}

/// What an event stream holds.
enum Data<'b> {
    /// Of the event that is being read.
    Part(&'b [u8]),
    /// An empty line ended the event.
    End,
}

impl Events {
    const NAME: &[u8] = b"data:";

    fn read(&mut self, mut bytes: &[u8], mut take: impl FnMut(Data<'_>)) {
        while let Some((&byte, rest)) = bytes.split_first() {
            let was_cr = std::mem::take(&mut self.after_cr);
            bytes = match (self.line, byte) {
                (_, b'\n') if was_cr => rest,
                (line, b'\r' | b'\n') => {
                    self.after_cr = byte == b'\r';
                    self.line = Line::default();
                    match line {
                        Line::Name(0) => take(Data::End),
                        // What comes before and after a line end is never one number.
                        Line::Data => take(Data::Part(b"\n")),
                        Line::Name(_) | Line::Other => {}
                    }
                    rest
                }
                (Line::Name(known), _) => {
                    self.line = match Self::NAME.get(known) {
                        Some(expected) if *expected != byte => Line::Other,
                        _ if known + 1 < Self::NAME.len() => Line::Name(known + 1),
                        _ => Line::Data,
                    };
                    rest
                }
                (Line::Data | Line::Other, _) => {
                    let end = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
                    let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                    if let Line::Data = self.line {
                        take(Data::Part(part));
                    }
                    rest
                }
            };
        }
    }
}

#[cfg(test)]
mod tests;
