//! One request, top to bottom. The order is the documentation.

use super::access::{AccessLog, Entry};
use super::entrance::EntryFault;
use super::gate::Target;
use super::headers::{self, Hop};
use super::inbound::Inbound;
use super::interim::Interim;
use super::meter::Bill;
use super::replies::{self, Local, Style};
use super::server::{Door, Handler, Peer, Stop};
use super::upgrade::Wanted;
use super::upstream::{Upstream, UpstreamError, UpstreamErrorKind};
use super::{ListenSettings, RequestBody, ResponseBody, fields};
use crate::enforcer::{Enforcer, Estimate, Hold, Outcome, Reported, Verdict};
use crate::policy::PolicyTable;
use crate::policy::client::Client;
use crate::telemetry::LogSettings;
use crate::telemetry::metrics::{Answer, Shard, Source};
use crate::trace::{self, Context, Recording, TraceId, Tracer};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request};
use ipnet::IpNet;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// Answers requests: asks the enforcer, then forwards or refuses. One per worker, with its counts.
#[derive(Debug)]
pub struct Service {
    pub(super) enforcer: Enforcer,
    pub(super) upstream: Upstream,
    max_headers: usize,
    max_body_bytes: Option<u64>,
    pub(super) access: AccessLog,
    pub(super) shard: Arc<Shard>,
    tracer: Option<Tracer>,
    /// Of all refusals by [`Service::check`]; `None`: their own.
    pub(super) refused_status: Option<StatusCode>,
    /// `None`: it runs for ever.
    stop: Option<watch::Receiver<Stop>>,
}

impl Service {
    pub fn new(
        enforcer: Enforcer,
        upstream: Upstream,
        listen: &ListenSettings,
        log: &LogSettings,
        shard: Arc<Shard>,
    ) -> Self {
        Self {
            enforcer,
            upstream,
            max_headers: listen.max_headers,
            max_body_bytes: listen.max_body_bytes,
            access: AccessLog::new(log),
            shard,
            tracer: None,
            refused_status: None,
            stop: None,
        }
    }

    /// The same, and who only asks whether a request may pass is told so by this status if not.
    pub fn refusing_with(self, status: Option<StatusCode>) -> Self {
        Self {
            refused_status: status,
            ..self
        }
    }

    /// The same, and who asks for its health is told that it is about to end.
    pub fn stopped_by(self, stop: watch::Receiver<Stop>) -> Self {
        Self {
            stop: Some(stop),
            ..self
        }
    }

    /// Whether it was asked to end, and so serves for a little while only.
    pub(super) fn is_ending(&self) -> bool {
        self.stop
            .as_ref()
            .is_some_and(|stop| *stop.borrow() > Stop::Run)
    }

    /// The same, and some requests are recorded.
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    async fn answer(
        &self,
        request: Request<RequestBody>,
        peer: &Peer,
        interim: &mut Interim,
    ) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (mut parts, body) = request.into_parts();
        let version_in = parts.version;
        let rules = self.enforcer.rules();
        let table = &*rules.table;
        let style = Style::of(&parts, &table.cors);

        // 1. Only what front and back read alike gets further.
        let inbound = match self.read(&mut parts, peer, table, style) {
            Ok(inbound) => inbound,
            Err(reply) => return self.turn_away(&parts, body, peer, *reply, arrived),
        };

        let said = Context::of(&parts.headers);
        let recording = self.record(said, &parts, &inbound, peer, arrived);

        // 2. One question, one verdict.
        let mut verdict = self
            .enforcer
            .decide(
                &rules,
                &inbound.facts(&parts, peer.certificate.as_ref()),
                arrived,
            )
            .await;
        let decided = verdict.at.unwrap_or(arrived);
        self.shard.answer(answer(&verdict));
        if let Some(fault) = inbound.token_fault() {
            self.shard.token_refused();
            tracing::debug!(%fault, peer = %peer.addr, "a request's token is not believed");
        }
        let trace = recording
            .as_ref()
            .and_then(|recording| recording.context())
            .or(said)
            .map(|context| context.trace);
        let (target, client) = inbound.into_rest();
        let mut asked = Asked {
            method: parts.method.clone(),
            target,
            client,
            arrived,
            trace,
            recording,
        };
        if let Some(reply) = replies::refusal(&verdict, table.fields, style) {
            self.log(&mut asked, &verdict, reply.status(), decided);
            return self.refuse(body, reply, decided - arrived);
        }

        // What it holds is given back when its response has ended, or this future is dropped.
        let hold = verdict.hold.take();
        let estimates = std::mem::take(&mut verdict.estimates);
        let ends_at = hold.as_ref().and_then(Hold::ends_at);

        // 3. Its turn comes; a client that leaves before ends this future, and his place in the line stays taken.
        let turn = pin!(self.upstream.hold(verdict.delay, decided));
        let ready = match before(ends_at, turn).await {
            Some(Ok(ready)) => ready,
            not_ready => {
                body.discard();
                let response = match not_ready {
                    Some(Err(error)) => self.not_forwarded(&error, estimates, style),
                    _ => replies::local(Local::Overlong, style).map(ResponseBody::Full),
                };
                return self.done(response, &mut asked, &verdict, table);
            }
        };

        // 4. Forward, and say how much is left.
        let hop = Hop {
            peer: &peer.text,
            client: asked.client,
            https: peer.tls,
            version_in,
            ip_header: &table.client.ip_header,
            has_body: !body.is_empty(),
            preserve_host: self.upstream.settings().preserve_host,
            upstream_authority: self.upstream.authority(),
        };
        headers::forward_request(&mut parts, &asked.target, &hop);
        if estimates.iter().any(Estimate::reads_body) {
            headers::ask_for_plain_body(&mut parts.headers);
        }
        if let Some(recording) = &mut asked.recording {
            recording.forward(
                &mut parts.headers,
                self.upstream.authority().to_str().unwrap_or_default(),
            );
        }
        let rest = body.another();
        let send = pin!(
            self.upstream
                .send(Request::from_parts(parts, body), ready, interim)
        );
        let wanted = asked.target.wanted.as_ref();
        let answer = before(ends_at, send).await;
        if let Some(recording) = &mut asked.recording {
            recording.forwarded(match &answer {
                Some(Ok(response)) => Ok(response.status().as_u16()),
                Some(Err(error)) => Err(error.kind.name()),
                None => Err("overlong"),
            });
        }
        let mut response = match answer {
            Some(Ok(response)) => {
                rest.outrun();
                self.pass_on(response, estimates, version_in, wanted, style)
            }
            Some(Err(error)) => {
                if error.kind.is_unsent() {
                    rest.discard();
                } else {
                    rest.outrun();
                }
                self.not_forwarded(&error, estimates, style)
            }
            None => {
                rest.outrun();
                replies::local(Local::Overlong, style).map(ResponseBody::Full)
            }
        };
        match response.body_mut() {
            ResponseBody::Upstream(body) => body.keep(hold),
            ResponseBody::Tunnel(tunnel) => tunnel.keep(hold),
            ResponseBody::Empty | ResponseBody::Full(_) | ResponseBody::Message(..) => {}
        }
        let mut response = self.done(response, &mut asked, &verdict, table);
        match response.body_mut() {
            ResponseBody::Upstream(body) => body.record(asked.recording.take()),
            ResponseBody::Tunnel(tunnel) => tunnel.record(asked.recording.take()),
            ResponseBody::Empty | ResponseBody::Full(_) | ResponseBody::Message(..) => {}
        }
        response
    }

    /// Lets a request through the gate, or says what to answer.
    pub(super) fn read(
        &self,
        parts: &mut request::Parts,
        peer: &Peer,
        table: &PolicyTable,
        style: Style<'_>,
    ) -> Result<Inbound, Box<Response<Bytes>>> {
        if has_more_headers(&parts.headers, self.max_headers) {
            return Err(replies::local(Local::TooManyHeaders, style).into());
        }
        let inbound = Inbound::read(parts, peer.addr.ip(), table).map_err(|fault| {
            tracing::debug!(%fault, peer = %peer.addr, "request refused at the gate");
            replies::inbound_fault(fault, style)
        })?;
        if self
            .max_body_bytes
            .is_some_and(|most| inbound.target.content_length > Some(most))
        {
            return Err(replies::local(Local::BodyTooLarge, style).into());
        }
        if table.overhears(&inbound.client, &parts.headers) {
            self.shard
                .forwarding_not_trusted(peer.addr.ip().to_canonical());
            hint_at_trusted_proxies(peer, table);
        }
        Ok(inbound)
    }

    fn not_forwarded(
        &self,
        error: &UpstreamError,
        estimates: Vec<Estimate>,
        style: Style<'_>,
    ) -> Response<ResponseBody> {
        if error.kind.is_unsent() {
            estimates
                .into_iter()
                .for_each(|estimate| estimate.settle(0));
        }
        self.shard.upstream_error(error.kind as usize);
        self.upstream.tell(error);
        failed(error, style)
    }

    /// Says how much is left, and writes down what became of an admitted request.
    fn done(
        &self,
        mut response: Response<ResponseBody>,
        asked: &mut Asked,
        verdict: &Verdict<'_>,
        table: &PolicyTable,
    ) -> Response<ResponseBody> {
        fields::write(verdict, table.fields, response.headers_mut());
        let responded = Instant::now();
        self.log(asked, verdict, response.status(), responded);
        self.shard
            .responded(response.status().as_u16(), responded - asked.arrived);
        response
    }

    fn pass_on(
        &self,
        response: Response<ResponseBody>,
        estimates: Vec<Estimate>,
        version_in: http::Version,
        wanted: Option<&Wanted>,
        style: Style<'_>,
    ) -> Response<ResponseBody> {
        let (mut parts, mut body) = response.into_parts();
        match headers::forward_response(&mut parts, version_in, wanted) {
            Ok(()) => {
                let bill = Bill::open(estimates, &parts);
                if let ResponseBody::Upstream(body) = &mut body {
                    body.meter(bill);
                }
                Response::from_parts(parts, body)
            }
            Err(fault) => {
                self.shard
                    .upstream_error(UpstreamErrorKind::Protocol as usize);
                tracing::warn!(%fault, "upstream response refused");
                replies::local(Local::Protocol, style).map(ResponseBody::Full)
            }
        }
    }

    /// Answers a request that no policy gets to see.
    pub(super) fn turn_away(
        &self,
        parts: &request::Parts,
        body: RequestBody,
        peer: &Peer,
        reply: Response<Bytes>,
        arrived: Instant,
    ) -> Response<ResponseBody> {
        let took = arrived.elapsed();
        self.shard.answer(Answer::Malformed);
        self.access.write(&Entry {
            method: parts.method.as_str(),
            host: parts
                .headers
                .get(header::HOST)
                .and_then(|host| host.to_str().ok())
                .unwrap_or_default(),
            path: parts.uri.path(),
            head: took,
            trace: Context::of(&parts.headers).map(|context| context.trace),
            ..Entry::unread(peer.addr.ip(), reply.status())
        });
        self.refuse(body, reply, took)
    }

    /// Answers without the upstream; what the client still sends of its body is nobody's business.
    fn refuse(
        &self,
        body: RequestBody,
        reply: Response<Bytes>,
        took: Duration,
    ) -> Response<ResponseBody> {
        body.discard();
        self.shard.responded(reply.status().as_u16(), took);
        reply.map(ResponseBody::Full)
    }

    pub(super) fn log(
        &self,
        asked: &mut Asked,
        verdict: &Verdict<'_>,
        status: StatusCode,
        responded: Instant,
    ) {
        let policy = match &verdict.outcome {
            Outcome::Forward => None,
            Outcome::Limited(limited) => Some(limited.policy),
            Outcome::Denied { policy, .. }
            | Outcome::BadKey { policy, .. }
            | Outcome::Unavailable { policy, .. } => Some(*policy),
        };
        let is_rejected = policy.is_some() || !verdict.shadow_rejected.is_empty();
        if asked.recording.is_none() && !self.access.wants(is_rejected) {
            return;
        }
        let entry = Entry {
            method: asked.method.as_str(),
            host: asked.target.host(),
            path: asked.target.path(),
            client_ip: asked.client.ip,
            status,
            head: responded - asked.arrived,
            decision: answer(verdict).word(),
            policy,
            shadow_rejected: &verdict.shadow_rejected,
            limits: &verdict.limits,
            source: verdict.source,
            decided: verdict.at.map(|at| at - asked.arrived),
            trace: asked.trace,
        };
        self.access.write(&entry);
        if let Some(recording) = &mut asked.recording {
            let tightest = Reported::tightest(&verdict.limits);
            recording.answered(&trace::Answered {
                status: status.as_u16(),
                decision: entry.decision,
                policy,
                limit: tightest.map(|one| (&*one.limit.name, one.key, one.standing.remaining)),
                source: verdict.source.map(Source::word).zip(verdict.at),
            });
        }
    }

    /// A request of which no more is wanted.
    pub(super) fn asked(
        &self,
        parts: &request::Parts,
        target: Target,
        client: Client,
        arrived: Instant,
    ) -> Asked {
        let trace = Context::of(&parts.headers).map(|context| context.trace);
        Asked {
            method: parts.method.clone(),
            target,
            client,
            arrived,
            trace,
            recording: None,
        }
    }

    /// A recording of the request, if there is to be one.
    fn record(
        &self,
        said: Option<Context>,
        parts: &request::Parts,
        inbound: &Inbound,
        peer: &Peer,
        arrived: Instant,
    ) -> Option<Box<Recording>> {
        let tracer = self.tracer.as_ref()?;
        let asked = trace::Asked {
            method: &parts.method,
            host: inbound.target.host(),
            path: inbound.target.path(),
            client: inbound.client.ip,
            is_tls: peer.tls,
        };
        tracer.begin(said, &parts.headers, &asked, arrived)
    }
}

impl Handler for Service {
    async fn handle(
        self: Rc<Self>,
        request: Request<RequestBody>,
        peer: Arc<Peer>,
        mut interim: Interim,
    ) -> Response<ResponseBody> {
        match peer.door {
            Door::Proxy => self.answer(request, &peer, &mut interim).await,
            // Boxed, or every request would have room for them.
            Door::Rls => Box::pin(self.rls(request, &peer)).await,
            Door::Check => Box::pin(self.check(request, &peer)).await,
        }
    }

    fn not_entered(&self, fault: EntryFault) {
        match fault {
            EntryFault::ProxyHeader(fault) => self.shard.proxy_header_fault(fault as usize),
            EntryFault::Tls(fault) => self.shard.tls_fault(fault as usize),
        }
    }

    fn unread(&self, status: StatusCode, peer: &Peer) {
        self.shard.answered(status.as_u16());
        self.shard.answer(Answer::Malformed);
        self.access.write(&Entry::unread(peer.addr.ip(), status));
    }

    fn counts(&self) -> Option<Arc<Shard>> {
        Some(Arc::clone(&self.shard))
    }

    async fn finish(&self) {
        self.enforcer.finish().await;
    }
}

/// What comes of `future` if it comes before `ends_at`.
///
/// Taken where it stays: as a value it would take its room three times, once per way through here.
async fn before<F: Future>(ends_at: Option<Instant>, future: Pin<&mut F>) -> Option<F::Output> {
    match ends_at {
        None => Some(future.await),
        // What is late already is not even begun.
        Some(ends_at) if ends_at <= Instant::now() => None,
        Some(ends_at) => timeout_at(ends_at, future).await.ok(),
    }
}

/// What became of a request, in one word.
pub(super) fn answer(verdict: &Verdict<'_>) -> Answer {
    match &verdict.outcome {
        Outcome::Forward if verdict.degraded => Answer::Degraded,
        Outcome::Forward if !verdict.delay.is_zero() => Answer::Delayed,
        Outcome::Forward => Answer::Allowed,
        Outcome::Limited(limited) if limited.blocked => Answer::Blocked,
        Outcome::Limited(_) => Answer::Rejected,
        Outcome::Denied { .. } => Answer::Denied,
        Outcome::BadKey { .. } => Answer::Malformed,
        Outcome::Unavailable { .. } => Answer::Unavailable,
    }
}

/// hyper counts for HTTP/1 only. HTTP/2 clients may send a line per cookie; together these count as one.
fn has_more_headers(headers: &HeaderMap, max: usize) -> bool {
    let cookies = || {
        headers
            .get_all(header::COOKIE)
            .iter()
            .count()
            .saturating_sub(1)
    };
    headers.len() > max && headers.len() - cookies() > max
}

/// Once is enough: after that it would only fill the log.
fn hint_at_trusted_proxies(peer: &Peer, table: &PolicyTable) {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        let ip = peer.addr.ip().to_canonical();
        tracing::warn!(
            peer = %ip,
            header = %table.client.ip_header,
            write = format!("[\"{}\"]", IpNet::from(ip)),
            "a peer that isn't in client.trusted_proxies names a client; the client's address is taken to be \
             the peer's. If the peer is your ingress, list it there, or its network, or everybody shares one quota",
        );
    });
}

/// What is still wanted of a request that is given away.
pub(super) struct Asked {
    method: Method,
    target: Target,
    client: Client,
    arrived: Instant,
    trace: Option<TraceId>,
    recording: Option<Box<Recording>>,
}

/// The answer when the upstream gave none.
fn failed(error: &UpstreamError, style: Style<'_>) -> Response<ResponseBody> {
    use UpstreamErrorKind as Kind;
    let what = match error.kind {
        Kind::ConnectRefused | Kind::ConnectFailed => Local::ConnectRefused,
        Kind::ConnectTimeout => Local::ConnectTimeout,
        Kind::Dns => Local::Dns,
        Kind::Tls => Local::Tls,
        Kind::QueueFull | Kind::QueueTimeout => Local::QueueFull,
        Kind::ResponseTimeout => Local::ResponseTimeout,
        Kind::Terminated | Kind::Reset => Local::Terminated,
        Kind::Upgrade => Local::Upgrade,
        Kind::Protocol => Local::Protocol,
        Kind::RequestBodyTooLarge => Local::BodyTooLarge,
        Kind::RequestBodyTimeout => Local::BodyTimeout,
        // A client that left reads no answer; one that sent nonsense does.
        Kind::ClientGone => Local::BodyBroken,
    };
    replies::local(what, style).map(ResponseBody::Full)
}

#[cfg(test)]
mod tests {
    use super::{Handler, Service};

    /// Each connection keeps room for a request, and each request moves through it.
    #[test]
    fn a_request_takes_little_room() {
        fn room<A, B, C, D, F>(_handle: impl FnOnce(A, B, C, D) -> F) -> usize {
            size_of::<F>()
        }
        let bytes = room(<Service as Handler>::handle);
        assert!(
            bytes <= 4_608,
            "{bytes}: is something rare awaited without a box?"
        );
    }
}
