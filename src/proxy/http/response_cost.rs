//! Actual cost of a request, read from its response while the response is forwarded.
//!
//! Each body frame is scanned once on its way to the client. The scan itself delays no frame, and
//! its memory is bounded whatever the upstream sends.

mod json_body;
#[cfg(any(test, fuzzing))]
pub(crate) mod properties;
mod stream_flow;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, response};
use http_body::Frame;
use serde_json::json;
use std::task::{Context, Poll, ready};

use json_body::JsonBodyReader;
use stream_flow::StreamFlow;

use crate::enforcer::{EstimatedCharge, SliceDecision};
use crate::limiter::MAX_UNITS;
use crate::policy::{ActualCost, ReportSource, parse_whole_number};

/// Estimated charges of one request that the response body or trailers will settle.
///
/// If the meter is dropped before the response ends, the estimate is the least that a request
/// costs: a client cannot reduce its cost by disconnecting.
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
            let flow = (estimate.slices.as_ref()).map(|_| StreamFlow::new(&estimate));
            let reported = reports.units_for(&estimate);
            if reports.may_report_more_for(&estimate) || flow.is_some() && reported.is_none() {
                let charge = estimate;
                charges.push(MeteredCharge { charge, flow });
            } else {
                let used = estimate.estimate;
                settle(estimate, reported, used);
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
        for MeteredCharge { charge, flow } in self.charges.drain(..) {
            let (reported, used) = (
                self.reports.units_for(&charge),
                used_units(&charge, flow.as_ref()),
            );
            settle_after_slice(charge, flow, move |charge| settle(charge, reported, used));
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

    /// Takes further units for so many bytes, which have arrived. Pending while all units are used
    /// and the store is asked for more.
    pub fn poll_flow(&mut self, bytes: usize, cx: &mut Context<'_>) -> Poll<ResponseFlow> {
        let mut allowance = usize::MAX;
        for MeteredCharge { charge, flow } in &mut self.charges {
            let Some(flow) = flow.as_mut().filter(|_| self.last_event.is_none()) else {
                continue;
            };
            match ready!(flow.poll_units(charge, bytes, cx)) {
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
            let reported = self.reports.units_for(&charge).unwrap_or_default();
            let units = used_units(&charge, flow.as_ref()).max(reported);
            settle_after_slice(charge, flow, move |charge| charge.settle(units));
        }
    }
}

/// Settles a charge, after the answer to a slice that the store is still asked for.
fn settle_after_slice(
    mut charge: EstimatedCharge,
    flow: Option<StreamFlow>,
    settle: impl FnOnce(EstimatedCharge) + Send + 'static,
) {
    let Some(pending) = flow.and_then(StreamFlow::into_pending) else {
        return settle(charge);
    };
    tokio::spawn(async move {
        let decision = pending.await;
        if let (Some(slices), SliceDecision::Charged(slice)) = (&mut charge.slices, decision) {
            slices.record(slice);
        }
        settle(charge);
    });
}

/// The units that a response has used as far as it was charged while it streamed; at least the
/// estimate.
fn used_units(charge: &EstimatedCharge, flow: Option<&StreamFlow>) -> u64 {
    let used = flow.map_or(0, |flow| flow.used(charge));
    used.max(charge.estimate)
}

/// Settles a charge after the response: by the reported cost, or else by what was used.
fn settle(charge: EstimatedCharge, reported: Option<u64>, used: u64) {
    if reported.is_none() {
        charge.record_unreported();
    }
    charge.settle(reported.unwrap_or(used));
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
        body.is_some_and(JsonBodyReader::is_event_stream)
    }

    /// Whether what was read of an event stream ends after a whole event.
    fn is_between_events(&self) -> bool {
        let body = self.body.as_ref();
        body.is_some_and(JsonBodyReader::is_between_events)
    }

    /// Whether the rest of the response may report a part of the cost.
    fn may_report_more_for(&self, charge: &EstimatedCharge) -> bool {
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
}

/// Parses the cost header. Returns `None` if it is absent, repeated or not a valid whole number.
fn parse_units_header(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    parse_whole_number(value.as_bytes()).filter(|units| *units <= MAX_UNITS)
}

#[cfg(test)]
mod tests;
