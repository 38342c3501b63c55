//! What is recorded of one request, and the spans that come of it.

use super::context::{Context, SpanId, TRACEPARENT, TRACESTATE};
use super::{Inner, Tracer};
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
const LONGEST_TEXT: usize = 256;
/// The same of `tracestate`, which is recorded as a whole or not at all.
const LONGEST_STATE: usize = 512;
/// The name of spans of methods that conventions don't know.
const UNKNOWN: &str = "HTTP";

/// A request that is recorded. Dropped, it goes to the collector, whatever has become of the request.
#[derive(Debug)]
pub struct Recording {
    tracer: Tracer,
    recorded: Option<Recorded>,
}

/// What a request asks for, as policies see it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub method: &'a Method,
    pub host: &'a str,
    /// Without the query, which may hold secrets.
    pub path: &'a str,
    pub client: IpAddr,
    pub is_tls: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
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
pub(super) struct Recorded {
    context: Context,
    parent: Option<SpanId>,
    state: String,
    name: String,
    began_ns: u64,
    ended_ns: u64,
    attributes: Vec<KeyValue>,
    status: Option<u16>,
    /// Why its client did not get the whole answer.
    cut: Option<&'static str>,
    /// When the store answered.
    decided_ns: Option<u64>,
    source: Option<&'static str>,
    forwarded: Option<Forwarded>,
}

/// A request's way to the upstream.
#[derive(Debug)]
struct Forwarded {
    context: Context,
    server: String,
    began_ns: u64,
    ended_ns: Option<u64>,
    /// The response's status, or why there is none.
    result: Option<Result<u16, &'static str>>,
}

impl Recording {
    /// `caller`: who sent us the request in a trace that is recorded.
    pub(super) fn begin(
        tracer: &Tracer,
        caller: Option<Context>,
        headers: &HeaderMap,
        asked: &Asked<'_>,
        arrived: Instant,
    ) -> Self {
        let context = caller.map_or_else(Context::begin, Context::child);
        let began_ns = tracer.ns(arrived);
        // Of headers that are not believed nothing is taken.
        let state = caller.and_then(|_| state_of(headers)).unwrap_or_default();
        let method = known(asked.method);
        let mut attributes = vec![
            text("http.request.method", method.unwrap_or("_OTHER")),
            text("url.scheme", if asked.is_tls { "https" } else { "http" }),
            text("url.path", asked.path),
            text("server.address", asked.host),
            text("client.address", &asked.client.to_string()),
        ];
        if method.is_none() {
            attributes.push(text("http.request.method_original", asked.method.as_str()));
        }
        let recorded = Recorded {
            context,
            parent: caller.map(|caller| caller.span),
            state,
            name: method.unwrap_or(UNKNOWN).to_owned(),
            began_ns,
            ended_ns: 0,
            attributes,
            status: None,
            cut: None,
            decided_ns: None,
            source: None,
            forwarded: None,
        };
        Self {
            tracer: tracer.clone(),
            recorded: Some(recorded),
        }
    }

    pub fn context(&self) -> Option<Context> {
        self.recorded.as_ref().map(|recorded| recorded.context)
    }

    /// The request goes to the upstream, which is told of a span of its own as its parent. `server` is an authority.
    pub fn forward(&mut self, headers: &mut HeaderMap, server: &str) {
        let began_ns = self.tracer.ns(Instant::now());
        let Some(recorded) = &mut self.recorded else {
            return;
        };
        let context = recorded.context.child();
        if let Some(value) = context.header() {
            headers.insert(TRACEPARENT, value);
        }
        if recorded.parent.is_none() {
            headers.remove(TRACESTATE);
        }
        let server = server.to_owned();
        recorded.forwarded = Some(Forwarded {
            context,
            server,
            began_ns,
            ended_ns: None,
            result: None,
        });
    }

    /// The upstream's status, or why it gave none.
    pub fn forwarded(&mut self, result: Result<u16, &'static str>) {
        let ended_ns = self.tracer.ns(Instant::now());
        if let Some(forwarded) = self
            .recorded
            .as_mut()
            .and_then(|recorded| recorded.forwarded.as_mut())
        {
            (forwarded.ended_ns, forwarded.result) = (Some(ended_ns), Some(result));
        }
    }

    pub fn answered(&mut self, answered: &Answered<'_>) {
        let decided = answered
            .source
            .map(|(source, at)| (source, self.tracer.ns(at)));
        let Some(recorded) = &mut self.recorded else {
            return;
        };
        recorded.status = Some(answered.status);
        (recorded.source, recorded.decided_ns) = decided.unzip();
        let attributes = &mut recorded.attributes;
        attributes.push(text("tidegate.decision", answered.decision));
        attributes.push(number("http.response.status_code", answered.status.into()));
        if answered.status >= 500 {
            attributes.push(text("error.type", &answered.status.to_string()));
        }
        if let Some(policy) = answered.policy {
            attributes.push(text("tidegate.policy", policy));
        }
        if let Some((limit, key, remaining)) = answered.limit {
            attributes.push(text("tidegate.limit", limit));
            attributes.push(text("tidegate.key", &format!("{key:032x}")));
            attributes.push(number(
                "tidegate.remaining",
                i64::try_from(remaining).unwrap_or(i64::MAX),
            ));
        }
    }
}

impl Recording {
    /// The answer's body is on its way. Dropped before [`Recording::streamed`], nobody wanted the rest of it.
    pub fn streaming(mut self: Box<Self>) -> Box<Self> {
        self.cut(Some("cancelled"));
        self
    }

    /// The body has come to its end, or why it has not.
    pub fn streamed(mut self: Box<Self>, result: Result<(), &'static str>) {
        self.cut(result.err());
    }

    fn cut(&mut self, cut: Option<&'static str>) {
        if let Some(recorded) = &mut self.recorded {
            recorded.cut = cut;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(mut recorded) = self.recorded.take() else {
            return;
        };
        recorded.ended_ns = self.tracer.ns(Instant::now());
        let Inner { queue, counts, .. } = &*self.tracer.0;
        if let Err(full) = queue.try_send(recorded) {
            counts
                .dropped
                .fetch_add(full.into_inner().number(), Ordering::Relaxed);
        }
    }
}

impl Recorded {
    /// How many spans come of it.
    fn number(&self) -> u64 {
        1 + u64::from(self.decided_ns.is_some()) + u64::from(self.forwarded.is_some())
    }

    pub(super) fn into_spans(self) -> impl Iterator<Item = Span> {
        let Self {
            context,
            parent,
            state,
            name,
            began_ns,
            ended_ns,
            ..
        } = self;
        let span = |context: Context, parent: Option<SpanId>, name: String, kind: SpanKind| Span {
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
        let cut = self
            .cut
            .or_else(|| self.status.is_none().then_some("cancelled"));
        let is_told = self.status.is_some_and(|status| status >= 500);
        let cut = cut.filter(|_| !is_told).map(|why| text("error.type", why));
        let status = (is_told || cut.is_some()).then(failed);
        let attributes = self.attributes.into_iter().chain(cut).collect();
        let own = Some(context.span);
        let decision = self
            .decided_ns
            .zip(self.source)
            .map(|(decided_ns, source)| {
                let attributes = vec![text("tidegate.source", source)];
                let kind = if source == "redis" {
                    SpanKind::Client
                } else {
                    SpanKind::Internal
                };
                let decide = span(context.child(), own, "decide".to_owned(), kind);
                Span {
                    end_time_unix_nano: decided_ns,
                    attributes,
                    ..decide
                }
            });
        let upstream = self.forwarded.map(|forwarded| {
            let mut attributes = vec![text("server.address", &forwarded.server)];
            attributes.push(text(
                "http.request.method",
                if name == UNKNOWN { "_OTHER" } else { &name },
            ));
            let status = match forwarded.result {
                Some(Ok(status)) => {
                    attributes.push(number("http.response.status_code", status.into()));
                    // By convention a client counts what it did wrong, too.
                    (status >= 400).then(failed)
                }
                Some(Err(error)) => {
                    attributes.push(text("error.type", error));
                    Some(failed())
                }
                None => {
                    attributes.push(text("error.type", "cancelled"));
                    Some(failed())
                }
            };
            Span {
                start_time_unix_nano: forwarded.began_ns,
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

fn failed() -> Status {
    Status {
        code: StatusCode::Error.into(),
        ..Status::default()
    }
}

/// What the upstream is told too, if it is one text of bearable length.
fn state_of(headers: &HeaderMap) -> Option<String> {
    let members: Option<Vec<&str>> = headers
        .get_all(TRACESTATE)
        .iter()
        .map(|value| value.to_str().ok())
        .collect();
    members
        .map(|members| members.join(","))
        .filter(|state| state.len() <= LONGEST_STATE)
}

/// The methods that conventions know; any other could be made up without end.
fn known(method: &Method) -> Option<&'static str> {
    const KNOWN: [&str; 9] = [
        "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE",
    ];
    KNOWN.into_iter().find(|known| method.as_str() == *known)
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    let end = value.floor_char_boundary(LONGEST_TEXT);
    let value = value.get(..end).unwrap_or_default().to_owned();
    attribute(key, any_value::Value::StringValue(value))
}

fn number(key: &str, value: i64) -> KeyValue {
    attribute(key, any_value::Value::IntValue(value))
}

fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer")
            .field("sample", &self.sample)
            .finish_non_exhaustive()
    }
}

impl Tracer {
    fn ns(&self, at: Instant) -> u64 {
        self.0.clock.at_us(at.into_std()).saturating_mul(1000)
    }
}
