//! Recording of one request, and its conversion to spans.

use super::context::{SpanId, TRACEPARENT, TRACESTATE, TraceParent};
use super::{SharedTracer, Tracer};
use crate::telemetry::otlp::{int_attribute, standard_method_name, string_attribute};
use http::HeaderMap;
use http::Method;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use tokio::time::Instant;

/// Maximum length of `tracestate`, which is recorded completely or not at all.
const MAX_TRACESTATE_BYTES: usize = 512;
/// Span name of requests with a method that the semantic conventions do not list.
const UNKNOWN_METHOD_NAME: &str = "HTTP";

/// The recording of one request. Dropping the recording queues its spans for export, whatever the
/// request's result.
#[derive(Debug)]
pub struct RequestRecording {
    tracer: Tracer,
    spans: Option<RequestSpans>,
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

/// Data for the spans of one request. Times are in nanoseconds since the Unix epoch.
#[derive(Debug)]
pub(super) struct RequestSpans {
    context: TraceParent,
    parent: Option<SpanId>,
    tracestate: String,
    name: String,
    started_ns: u64,
    ended_ns: u64,
    attributes: Vec<KeyValue>,
    status: Option<u16>,
    /// Why the client did not receive the whole response.
    body_error: Option<&'static str>,
    /// Time of the decision.
    decided_ns: Option<u64>,
    source: Option<&'static str>,
    upstream: Option<UpstreamSpan>,
}

/// The forwarding of a request to the upstream.
#[derive(Debug)]
struct UpstreamSpan {
    context: TraceParent,
    server: String,
    started_ns: u64,
    ended_ns: Option<u64>,
    /// The response status, or the reason why there is none.
    result: Option<Result<u16, &'static str>>,
}

impl RequestRecording {
    /// Starts a recording. `caller` is the trace context of a sampled caller.
    pub(super) fn new(
        tracer: &Tracer,
        caller: Option<TraceParent>,
        headers: &HeaderMap,
        request: &TracedRequest<'_>,
        arrived: Instant,
    ) -> Self {
        let context = caller.map_or_else(TraceParent::new_root, TraceParent::new_child);
        let started_ns = tracer.to_unix_ns(arrived);
        // Without a valid `traceparent`, `tracestate` is ignored.
        let tracestate = caller
            .and_then(|_| read_tracestate(headers))
            .unwrap_or_default();
        let method = standard_method_name(request.method);
        let mut attributes = vec![
            string_attribute("http.request.method", method.unwrap_or("_OTHER")),
            string_attribute(
                "url.scheme",
                if request.is_https { "https" } else { "http" },
            ),
            string_attribute("url.path", request.path),
            string_attribute("server.address", request.host),
            string_attribute("client.address", &request.client.to_string()),
        ];
        if method.is_none() {
            attributes.push(string_attribute(
                "http.request.method_original",
                request.method.as_str(),
            ));
        }
        let spans = RequestSpans {
            context,
            parent: caller.map(|caller| caller.span),
            tracestate,
            name: method.unwrap_or(UNKNOWN_METHOD_NAME).to_owned(),
            started_ns,
            ended_ns: 0,
            attributes,
            status: None,
            body_error: None,
            decided_ns: None,
            source: None,
            upstream: None,
        };
        Self {
            tracer: tracer.clone(),
            spans: Some(spans),
        }
    }

    pub fn context(&self) -> Option<TraceParent> {
        self.spans.as_ref().map(|spans| spans.context)
    }

    /// Records the start of forwarding, and sets the new span as the parent in the forwarded
    /// headers. `server` is the authority of the upstream.
    pub fn start_upstream_span(&mut self, headers: &mut HeaderMap, server: &str) {
        let started_ns = self.tracer.to_unix_ns(Instant::now());
        let Some(spans) = &mut self.spans else {
            return;
        };
        let context = spans.context.new_child();
        if let Some(value) = context.to_header_value() {
            headers.insert(TRACEPARENT, value);
        }
        if spans.parent.is_none() {
            headers.remove(TRACESTATE);
        }
        let server = server.to_owned();
        spans.upstream = Some(UpstreamSpan {
            context,
            server,
            started_ns,
            ended_ns: None,
            result: None,
        });
    }

    /// Records the upstream's status, or the reason why it sent no response.
    pub fn finish_upstream_span(&mut self, result: Result<u16, &'static str>) {
        let ended_ns = self.tracer.to_unix_ns(Instant::now());
        if let Some(upstream) = self
            .spans
            .as_mut()
            .and_then(|spans| spans.upstream.as_mut())
        {
            (upstream.ended_ns, upstream.result) = (Some(ended_ns), Some(result));
        }
    }

    pub fn set_response(&mut self, response: &TracedResponse<'_>) {
        let decided = response
            .source
            .map(|(source, at)| (source, self.tracer.to_unix_ns(at)));
        let Some(spans) = &mut self.spans else {
            return;
        };
        spans.status = Some(response.status);
        (spans.source, spans.decided_ns) = decided.unzip();
        let attributes = &mut spans.attributes;
        attributes.push(string_attribute("tidegate.decision", response.decision));
        attributes.push(int_attribute(
            "http.response.status_code",
            response.status.into(),
        ));
        if response.status >= 500 {
            attributes.push(string_attribute("error.type", &response.status.to_string()));
        }
        if let Some(policy) = response.policy {
            attributes.push(string_attribute("tidegate.policy", policy));
        }
        if let Some((limit, key, remaining)) = response.limit {
            attributes.push(string_attribute("tidegate.limit", limit));
            attributes.push(string_attribute("tidegate.key", &format!("{key:032x}")));
            attributes.push(int_attribute(
                "tidegate.remaining",
                i64::try_from(remaining).unwrap_or(i64::MAX),
            ));
        }
    }
}

impl RequestRecording {
    /// Marks the response body as started. If the recording is dropped before
    /// [`RequestRecording::finish_body`], the client cancelled the request.
    pub fn mark_streaming(mut self: Box<Self>) -> Box<Self> {
        self.set_body_error(Some("cancelled"));
        self
    }

    /// Records the end of the body, or the reason why it is incomplete.
    pub fn finish_body(mut self: Box<Self>, result: Result<(), &'static str>) {
        self.set_body_error(result.err());
    }

    /// Sets why the client did not receive the whole body; `None` clears an earlier reason.
    fn set_body_error(&mut self, error: Option<&'static str>) {
        if let Some(spans) = &mut self.spans {
            spans.body_error = error;
        }
    }
}

impl Drop for RequestRecording {
    fn drop(&mut self) {
        let Some(mut spans) = self.spans.take() else {
            return;
        };
        spans.ended_ns = self.tracer.to_unix_ns(Instant::now());
        let SharedTracer {
            queue, counters, ..
        } = &*self.tracer.0;
        if let Err(full) = queue.try_send(spans) {
            counters
                .dropped
                .fetch_add(full.into_inner().span_count(), Ordering::Relaxed);
        }
    }
}

impl RequestSpans {
    /// The number of spans that [`RequestSpans::into_spans`] returns.
    fn span_count(&self) -> u64 {
        1 + u64::from(self.decided_ns.is_some()) + u64::from(self.upstream.is_some())
    }

    /// Converts the recording to a server span and, if they exist, spans of the decision and of the
    /// forwarding.
    pub(super) fn into_spans(mut self) -> impl Iterator<Item = Span> {
        let decision = self.decision_span();
        let upstream = self
            .upstream
            .take()
            .map(|upstream| self.upstream_span(upstream));
        [Some(self.into_server_span()), decision, upstream]
            .into_iter()
            .flatten()
    }

    fn into_server_span(mut self) -> Span {
        // Without a status, the client has disconnected or the process has stopped before the
        // response.
        let body_error = self
            .body_error
            .or_else(|| self.status.is_none().then_some("cancelled"));
        let is_server_error = self.status.is_some_and(|status| status >= 500);
        let error_type = body_error
            .filter(|_| !is_server_error)
            .map(|reason| string_attribute("error.type", reason));
        let status = (is_server_error || error_type.is_some()).then(error_status);
        let mut attributes = std::mem::take(&mut self.attributes);
        attributes.extend(error_type);
        Span {
            attributes,
            status,
            ..self.new_span(
                self.context,
                self.parent,
                self.name.clone(),
                SpanKind::Server,
            )
        }
    }

    fn decision_span(&self) -> Option<Span> {
        let (decided_ns, source) = self.decided_ns.zip(self.source)?;
        let kind = if source == "redis" {
            SpanKind::Client
        } else {
            SpanKind::Internal
        };
        Some(Span {
            end_time_unix_nano: decided_ns,
            attributes: vec![string_attribute("tidegate.source", source)],
            ..self.new_span(
                self.context.new_child(),
                Some(self.context.span),
                "decide".to_owned(),
                kind,
            )
        })
    }

    fn upstream_span(&self, upstream: UpstreamSpan) -> Span {
        let method = if self.name == UNKNOWN_METHOD_NAME {
            "_OTHER"
        } else {
            &self.name
        };
        let mut attributes = vec![
            string_attribute("server.address", &upstream.server),
            string_attribute("http.request.method", method),
        ];
        let status = match upstream.result.unwrap_or(Err("cancelled")) {
            Ok(status) => {
                attributes.push(int_attribute("http.response.status_code", status.into()));
                // By the semantic conventions, a client span counts 4xx as errors.
                (status >= 400).then(error_status)
            }
            Err(error) => {
                attributes.push(string_attribute("error.type", error));
                Some(error_status())
            }
        };
        Span {
            start_time_unix_nano: upstream.started_ns,
            end_time_unix_nano: upstream.ended_ns.unwrap_or(self.ended_ns),
            attributes,
            status,
            ..self.new_span(
                upstream.context,
                Some(self.context.span),
                self.name.clone(),
                SpanKind::Client,
            )
        }
    }

    fn new_span(
        &self,
        context: TraceParent,
        parent: Option<SpanId>,
        name: String,
        kind: SpanKind,
    ) -> Span {
        Span {
            trace_id: context.trace.0.to_be_bytes().to_vec(),
            span_id: context.span.0.to_be_bytes().to_vec(),
            parent_span_id: parent
                .map(|parent| parent.0.to_be_bytes().to_vec())
                .unwrap_or_default(),
            trace_state: self.tracestate.clone(),
            flags: context.otlp_flags(),
            name,
            kind: kind.into(),
            start_time_unix_nano: self.started_ns,
            end_time_unix_nano: self.ended_ns,
            ..Span::default()
        }
    }
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

impl fmt::Debug for SharedTracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedTracer")
            .field("sample_ratio", &self.sample_ratio)
            .finish_non_exhaustive()
    }
}

impl Tracer {
    fn to_unix_ns(&self, at: Instant) -> u64 {
        self.0
            .clock
            .instant_to_unix_us(at.into_std())
            .saturating_mul(1000)
    }
}
