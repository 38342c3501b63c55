//! Recording of one request as spans.

use super::Tracer;
use super::context::{TRACEPARENT, TRACESTATE, TraceParent};
use crate::telemetry::otlp::{int_attribute, standard_method_name, string_attribute};
use http::HeaderMap;
use http::Method;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use tokio::time::Instant;

/// Maximum length of `tracestate`, which is recorded completely or not at all.
const MAX_TRACESTATE_BYTES: usize = 512;
/// Span name of requests with a method that the semantic conventions do not list.
const UNKNOWN_METHOD_NAME: &str = "HTTP";

/// The recording of one request. Dropping the recording queues its spans for export, whatever the
/// request's result. Times are in nanoseconds since the Unix epoch.
#[derive(Debug)]
pub struct RequestRecording {
    tracer: Tracer,
    pub context: TraceParent,
    server: Span,
    decision: Option<Span>,
    /// The forwarding of the request to the upstream.
    upstream: Option<Span>,
    /// The status of the response, if there is one.
    status: Option<u16>,
    /// Why the client did not receive the whole response.
    body_error: Option<&'static str>,
}

/// The properties of a request, as policies see them.
#[derive(Clone, Copy, Debug)]
pub struct TracedRequest<'a> {
    pub method: &'a Method,
    pub host: &'a str,
    /// The path without the query, which may contain secrets.
    pub path: &'a str,
    pub client: IpAddr,
    pub is_https: bool,
}

/// The response to a request and its rate-limit decision.
#[derive(Clone, Copy, Debug)]
pub struct TracedResponse<'a> {
    pub status: u16,
    pub decision: &'static str,
    /// The policy that rejected the request.
    pub policy: Option<&'a str>,
    /// Name, key id and remaining units of the limit that rejected the request or is closest to
    /// doing so.
    pub limit: Option<(&'a str, u128, u64)>,
    /// The decision source, and the time of the decision.
    pub source: Option<(&'static str, Instant)>,
}

impl Tracer {
    /// Starts a recording of the request if it is sampled. `caller` is the trace context of its
    /// headers.
    pub fn start_recording_if_sampled(
        &self,
        caller: Option<TraceParent>,
        headers: &HeaderMap,
        request: &TracedRequest<'_>,
        arrived: Instant,
    ) -> Option<Box<RequestRecording>> {
        let is_sampled = match caller {
            Some(caller) => caller.is_sampled(),
            None => fastrand::f64() < self.0.sample_ratio,
        };
        if !is_sampled {
            return None;
        }
        let context = caller.map_or_else(TraceParent::new_root, TraceParent::new_child);
        // Without a valid `traceparent`, `tracestate` is ignored.
        let tracestate = caller.and_then(|_| read_tracestate(headers));
        let parent = caller.map(|caller| caller.span.0.to_be_bytes().to_vec());
        let method = standard_method_name(request.method);
        let scheme = if request.is_https { "https" } else { "http" };
        let mut attributes = vec![
            string_attribute("http.request.method", method.unwrap_or("_OTHER")),
            string_attribute("url.scheme", scheme),
            string_attribute("url.path", request.path),
            string_attribute("server.address", request.host),
            string_attribute("client.address", &request.client.to_string()),
        ];
        if method.is_none() {
            let original = request.method.as_str();
            attributes.push(string_attribute("http.request.method_original", original));
        }
        Some(Box::new(RequestRecording {
            tracer: self.clone(),
            context,
            server: Span {
                trace_id: context.trace.0.to_be_bytes().to_vec(),
                span_id: context.span.0.to_be_bytes().to_vec(),
                parent_span_id: parent.unwrap_or_default(),
                trace_state: tracestate.unwrap_or_default(),
                flags: context.flags.into(),
                name: method.unwrap_or(UNKNOWN_METHOD_NAME).to_owned(),
                kind: SpanKind::Server.into(),
                start_time_unix_nano: self.to_unix_ns(arrived),
                attributes,
                ..Span::default()
            },
            decision: None,
            upstream: None,
            status: None,
            body_error: None,
        }))
    }

    fn to_unix_ns(&self, at: Instant) -> u64 {
        self.0
            .clock
            .instant_to_unix_us(at.into_std())
            .saturating_mul(1000)
    }
}

impl RequestRecording {
    /// A span inside that of the request, and its context.
    fn new_child(&self, kind: SpanKind, name: &str, started_ns: u64) -> (TraceParent, Span) {
        let (context, server) = (self.context.new_child(), &self.server);
        let span = Span {
            trace_id: server.trace_id.clone(),
            span_id: context.span.0.to_be_bytes().to_vec(),
            parent_span_id: server.span_id.clone(),
            trace_state: server.trace_state.clone(),
            flags: server.flags,
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: started_ns,
            ..Span::default()
        };
        (context, span)
    }

    /// Records the start of forwarding, and sets the new span as the parent in the forwarded
    /// headers. `address` is the authority of the upstream.
    pub fn start_upstream_span(&mut self, headers: &mut HeaderMap, address: &str) {
        let started_ns = self.tracer.to_unix_ns(Instant::now());
        let (context, mut span) = self.new_child(SpanKind::Client, &self.server.name, started_ns);
        if let Some(value) = context.to_header_value() {
            headers.insert(TRACEPARENT, value);
        }
        if self.server.parent_span_id.is_empty() {
            headers.remove(TRACESTATE);
        }
        let method = match span.name.as_str() {
            UNKNOWN_METHOD_NAME => "_OTHER",
            method => method,
        };
        span.attributes = vec![
            string_attribute("server.address", address),
            string_attribute("http.request.method", method),
        ];
        self.upstream = Some(span);
    }

    /// Records the upstream's status, or the reason why it sent no response.
    pub fn finish_upstream_span(&mut self, result: Result<u16, &'static str>) {
        let ended_ns = self.tracer.to_unix_ns(Instant::now());
        if let Some(span) = &mut self.upstream {
            span.end_time_unix_nano = ended_ns;
            set_upstream_result(span, result);
        }
    }

    pub fn set_response(&mut self, response: &TracedResponse<'_>) {
        self.status = Some(response.status);
        self.decision = response.source.map(|(source, at)| {
            let kind = match source {
                "redis" => SpanKind::Client,
                _ => SpanKind::Internal,
            };
            let started_ns = self.server.start_time_unix_nano;
            Span {
                end_time_unix_nano: self.tracer.to_unix_ns(at),
                attributes: vec![string_attribute("tidegate.source", source)],
                ..self.new_child(kind, "decide", started_ns).1
            }
        });
        let attributes = &mut self.server.attributes;
        attributes.push(string_attribute("tidegate.decision", response.decision));
        attributes.push(status_attribute(response.status));
        if response.status >= 500 {
            attributes.push(string_attribute("error.type", &response.status.to_string()));
        }
        if let Some(policy) = response.policy {
            attributes.push(string_attribute("tidegate.policy", policy));
        }
        if let Some((limit, key, remaining)) = response.limit {
            let remaining = i64::try_from(remaining).unwrap_or(i64::MAX);
            attributes.push(string_attribute("tidegate.limit", limit));
            attributes.push(string_attribute("tidegate.key", &format!("{key:032x}")));
            attributes.push(int_attribute("tidegate.remaining", remaining));
        }
    }

    /// Marks the response body as started. If the recording is dropped before
    /// [`RequestRecording::finish_body`], the client cancelled the request.
    pub fn mark_streaming(mut self: Box<Self>) -> Box<Self> {
        self.body_error = Some("cancelled");
        self
    }

    /// Records the end of the body, or the reason why it is incomplete.
    pub fn finish_body(mut self: Box<Self>, result: Result<(), &'static str>) {
        self.body_error = result.err();
    }
}

impl Drop for RequestRecording {
    fn drop(&mut self) {
        let ended_ns = self.tracer.to_unix_ns(Instant::now());
        let mut server = std::mem::take(&mut self.server);
        server.end_time_unix_nano = ended_ns;
        let is_server_error = self.status.is_some_and(|status| status >= 500);
        // Without a status, the client has disconnected or the process has stopped before the
        // response.
        let cancelled = self.status.is_none().then_some("cancelled");
        let error = self.body_error.or(cancelled).filter(|_| !is_server_error);
        server.status = (is_server_error || error.is_some()).then(error_status);
        let error = error.map(|reason| string_attribute("error.type", reason));
        server.attributes.extend(error);
        let mut upstream = self.upstream.take();
        if let Some(span) = upstream
            .as_mut()
            .filter(|span| span.end_time_unix_nano == 0)
        {
            span.end_time_unix_nano = ended_ns;
            set_upstream_result(span, Err("cancelled"));
        }
        let spans = [Some(server), self.decision.take(), upstream];
        let spans: Vec<Span> = spans.into_iter().flatten().collect();
        if let Err(full) = self.tracer.0.queue.try_send(spans) {
            let dropped = u64::try_from(full.into_inner().len()).unwrap_or(u64::MAX);
            let counters = &self.tracer.0.counters;
            counters.dropped.fetch_add(dropped, Ordering::Relaxed);
        }
    }
}

/// Sets the upstream's status, or the reason why it sent no response.
fn set_upstream_result(span: &mut Span, result: Result<u16, &'static str>) {
    span.attributes.push(match result {
        Ok(status) => status_attribute(status),
        Err(error) => string_attribute("error.type", error),
    });
    // By the semantic conventions, a client span counts 4xx as errors.
    let is_ok = result.is_ok_and(|status| status < 400);
    span.status = (!is_ok).then(error_status);
}

fn status_attribute(status: u16) -> KeyValue {
    int_attribute("http.response.status_code", status.into())
}

fn error_status() -> Status {
    Status {
        code: StatusCode::Error.into(),
        ..Status::default()
    }
}

/// Reads the `tracestate` that is also forwarded, if it is valid text within the size limit.
fn read_tracestate(headers: &HeaderMap) -> Option<String> {
    let members: Option<Vec<&str>> = headers
        .get_all(TRACESTATE)
        .iter()
        .map(|value| value.to_str().ok())
        .collect();
    members
        .map(|members| members.join(","))
        .filter(|state| state.len() <= MAX_TRACESTATE_BYTES)
}
