//! What is recorded of one request, and the spans that come of it.

use super::context::{SpanId, TRACEPARENT, TRACESTATE, TraceContext};
use super::{Tracer, TracerInner};
use http::HeaderMap;
use http::Method;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use tokio::time::Instant;

/// Longest text of a client's that is recorded: a request's head can hold more than a trace should.
const MAX_ATTRIBUTE_BYTES: usize = 256;
/// The same of `tracestate`, which is recorded as a whole or not at all.
const MAX_TRACESTATE_BYTES: usize = 512;
/// The name of spans of methods that conventions don't know.
const UNKNOWN_METHOD_NAME: &str = "HTTP";

/// A request that is recorded. Dropped, it goes to the collector, whatever has become of the request.
#[derive(Debug)]
pub struct RequestRecording {
    tracer: Tracer,
    spans: Option<RequestSpans>,
}

/// What a request asks for, as policies see it.
#[derive(Clone, Copy, Debug)]
pub struct TracedRequest<'a> {
    pub method: &'a Method,
    pub host: &'a str,
    /// Without the query, which may hold secrets.
    pub path: &'a str,
    pub client: IpAddr,
    pub is_tls: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub struct TracedResponse<'a> {
    pub status: u16,
    pub decision: &'static str,
    /// The policy that refused.
    pub policy: Option<&'a str>,
    /// The limit that refused, or that is nearest to refusing, whose quota it is, and what is left.
    pub limit: Option<(&'a str, u128, u64)>,
    /// Who decided, and when.
    pub source: Option<(&'static str, Instant)>,
}

/// Times in nanoseconds since the Unix epoch.
#[derive(Debug)]
pub(super) struct RequestSpans {
    context: TraceContext,
    parent: Option<SpanId>,
    tracestate: String,
    name: String,
    started_ns: u64,
    ended_ns: u64,
    attributes: Vec<KeyValue>,
    status: Option<u16>,
    /// Why its client did not get the whole answer.
    body_error: Option<&'static str>,
    /// When the store answered.
    decided_ns: Option<u64>,
    source: Option<&'static str>,
    upstream: Option<UpstreamSpan>,
}

/// A request's way to the upstream.
#[derive(Debug)]
struct UpstreamSpan {
    context: TraceContext,
    server: String,
    started_ns: u64,
    ended_ns: Option<u64>,
    /// The response's status, or why there is none.
    result: Option<Result<u16, &'static str>>,
}

impl RequestRecording {
    /// `caller`: who sent us the request in a trace that is recorded.
    pub(super) fn new(
        tracer: &Tracer,
        caller: Option<TraceContext>,
        headers: &HeaderMap,
        request: &TracedRequest<'_>,
        arrived: Instant,
    ) -> Self {
        let context = caller.map_or_else(TraceContext::new_root, TraceContext::new_child);
        let began_ns = tracer.to_unix_ns(arrived);
        // Of headers that are not believed nothing is taken.
        let tracestate = caller
            .and_then(|_| read_tracestate(headers))
            .unwrap_or_default();
        let method = known_method(request.method);
        let mut attributes = vec![
            string_attribute("http.request.method", method.unwrap_or("_OTHER")),
            string_attribute("url.scheme", if request.is_tls { "https" } else { "http" }),
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
            started_ns: began_ns,
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

    pub fn context(&self) -> Option<TraceContext> {
        self.spans.as_ref().map(|recorded| recorded.context)
    }

    /// The request goes to the upstream, which is told of a span of its own as its parent. `server` is an authority.
    pub fn start_upstream_span(&mut self, headers: &mut HeaderMap, server: &str) {
        let began_ns = self.tracer.to_unix_ns(Instant::now());
        let Some(recorded) = &mut self.spans else {
            return;
        };
        let context = recorded.context.new_child();
        if let Some(value) = context.to_header_value() {
            headers.insert(TRACEPARENT, value);
        }
        if recorded.parent.is_none() {
            headers.remove(TRACESTATE);
        }
        let server = server.to_owned();
        recorded.upstream = Some(UpstreamSpan {
            context,
            server,
            started_ns: began_ns,
            ended_ns: None,
            result: None,
        });
    }

    /// The upstream's status, or why it gave none.
    pub fn finish_upstream_span(&mut self, result: Result<u16, &'static str>) {
        let ended_ns = self.tracer.to_unix_ns(Instant::now());
        if let Some(forwarded) = self
            .spans
            .as_mut()
            .and_then(|recorded| recorded.upstream.as_mut())
        {
            (forwarded.ended_ns, forwarded.result) = (Some(ended_ns), Some(result));
        }
    }

    pub fn set_response(&mut self, answered: &TracedResponse<'_>) {
        let decided = answered
            .source
            .map(|(source, at)| (source, self.tracer.to_unix_ns(at)));
        let Some(recorded) = &mut self.spans else {
            return;
        };
        recorded.status = Some(answered.status);
        (recorded.source, recorded.decided_ns) = decided.unzip();
        let attributes = &mut recorded.attributes;
        attributes.push(string_attribute("tidegate.decision", answered.decision));
        attributes.push(int_attribute(
            "http.response.status_code",
            answered.status.into(),
        ));
        if answered.status >= 500 {
            attributes.push(string_attribute("error.type", &answered.status.to_string()));
        }
        if let Some(policy) = answered.policy {
            attributes.push(string_attribute("tidegate.policy", policy));
        }
        if let Some((limit, key, remaining)) = answered.limit {
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
    /// The answer's body is on its way. Dropped before [`RequestRecording::finish_body`], nobody wanted the rest of it.
    pub fn mark_streaming(mut self: Box<Self>) -> Box<Self> {
        self.set_body_error(Some("cancelled"));
        self
    }

    /// The body has come to its end, or why it has not.
    pub fn finish_body(mut self: Box<Self>, result: Result<(), &'static str>) {
        self.set_body_error(result.err());
    }

    fn set_body_error(&mut self, cut: Option<&'static str>) {
        if let Some(recorded) = &mut self.spans {
            recorded.body_error = cut;
        }
    }
}

impl Drop for RequestRecording {
    fn drop(&mut self) {
        let Some(mut recorded) = self.spans.take() else {
            return;
        };
        recorded.ended_ns = self.tracer.to_unix_ns(Instant::now());
        let TracerInner {
            queue,
            counters: counts,
            ..
        } = &*self.tracer.0;
        if let Err(full) = queue.try_send(recorded) {
            counts
                .dropped
                .fetch_add(full.into_inner().span_count(), Ordering::Relaxed);
        }
    }
}

impl RequestSpans {
    /// How many spans come of it.
    fn span_count(&self) -> u64 {
        1 + u64::from(self.decided_ns.is_some()) + u64::from(self.upstream.is_some())
    }

    pub(super) fn into_spans(self) -> impl Iterator<Item = Span> {
        let Self {
            context,
            parent,
            tracestate: state,
            name,
            started_ns: began_ns,
            ended_ns,
            ..
        } = self;
        let span =
            |context: TraceContext, parent: Option<SpanId>, name: String, kind: SpanKind| Span {
                trace_id: context.trace.0.to_be_bytes().to_vec(),
                span_id: context.span.0.to_be_bytes().to_vec(),
                parent_span_id: parent
                    .map(|parent| parent.0.to_be_bytes().to_vec())
                    .unwrap_or_default(),
                trace_state: state.clone(),
                flags: context.flags(),
                name,
                kind: kind.into(),
                start_time_unix_nano: began_ns,
                end_time_unix_nano: ended_ns,
                ..Span::default()
            };
        // Without a status its client has left, or the process has ended: nobody got an answer.
        let body_error = self
            .body_error
            .or_else(|| self.status.is_none().then_some("cancelled"));
        let is_server_error = self.status.is_some_and(|status| status >= 500);
        let cut = body_error
            .filter(|_| !is_server_error)
            .map(|why| string_attribute("error.type", why));
        let status = (is_server_error || cut.is_some()).then(error_status);
        let attributes = self.attributes.into_iter().chain(cut).collect();
        let own = Some(context.span);
        let decision = self
            .decided_ns
            .zip(self.source)
            .map(|(decided_ns, source)| {
                let attributes = vec![string_attribute("tidegate.source", source)];
                let kind = if source == "redis" {
                    SpanKind::Client
                } else {
                    SpanKind::Internal
                };
                let decide = span(context.new_child(), own, "decide".to_owned(), kind);
                Span {
                    end_time_unix_nano: decided_ns,
                    attributes,
                    ..decide
                }
            });
        let upstream = self.upstream.map(|forwarded| {
            let mut attributes = vec![string_attribute("server.address", &forwarded.server)];
            attributes.push(string_attribute(
                "http.request.method",
                if name == UNKNOWN_METHOD_NAME {
                    "_OTHER"
                } else {
                    &name
                },
            ));
            let status = match forwarded.result {
                Some(Ok(status)) => {
                    attributes.push(int_attribute("http.response.status_code", status.into()));
                    // By convention a client counts what it did wrong, too.
                    (status >= 400).then(error_status)
                }
                Some(Err(error)) => {
                    attributes.push(string_attribute("error.type", error));
                    Some(error_status())
                }
                None => {
                    attributes.push(string_attribute("error.type", "cancelled"));
                    Some(error_status())
                }
            };
            Span {
                start_time_unix_nano: forwarded.started_ns,
                end_time_unix_nano: forwarded.ended_ns.unwrap_or(ended_ns),
                attributes,
                status,
                ..span(forwarded.context, own, name.clone(), SpanKind::Client)
            }
        });
        let server = Span {
            attributes,
            status,
            ..span(context, parent, name.clone(), SpanKind::Server)
        };
        [Some(server), decision, upstream].into_iter().flatten()
    }
}

fn error_status() -> Status {
    Status {
        code: StatusCode::Error.into(),
        ..Status::default()
    }
}

/// What the upstream is told too, if it is one text of bearable length.
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

/// The methods that conventions know; any other could be made up without end.
fn known_method(method: &Method) -> Option<&'static str> {
    const KNOWN: [&str; 9] = [
        "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE",
    ];
    KNOWN.into_iter().find(|known| method.as_str() == *known)
}

pub(super) fn string_attribute(key: &str, value: &str) -> KeyValue {
    let end = value.floor_char_boundary(MAX_ATTRIBUTE_BYTES);
    let value = value.get(..end).unwrap_or_default().to_owned();
    key_value(key, any_value::Value::StringValue(value))
}

fn int_attribute(key: &str, value: i64) -> KeyValue {
    key_value(key, any_value::Value::IntValue(value))
}

fn key_value(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

impl fmt::Debug for TracerInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer")
            .field("sample", &self.sample_ratio)
            .finish_non_exhaustive()
    }
}

impl Tracer {
    fn to_unix_ns(&self, at: Instant) -> u64 {
        self.0.clock.time_at_us(at.into_std()).saturating_mul(1000)
    }
}
