//! Whether a request may pass that somebody else forwards: nginx (`auth_request`), Traefik (`forwardAuth`), Envoy
//! (`ext_authz` by HTTP). The request is made again of what they tell, and then read and decided as if it had come here.
//!
//! Each tells it in its own way, and passes on what clients send in the others' ways: so the path that is asked says who
//! asks, and nothing is guessed.

use super::body::{RequestBody, ResponseBody};
use super::fields;
use super::gate::GateFault;
use super::replies::{self, Local, Style};
use super::server::Peer;
use super::service::{Service, answer};
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header, request,
};
use tokio::time::Instant;

/// The status that a refusal would have from the proxy itself.
static STATUS: HeaderName = HeaderName::from_static("x-tidegate-status");

const NGINX: &str = "/check/nginx";
const TRAEFIK: &str = "/check/traefik";
/// The path of the request stands behind it.
const ENVOY: &str = "/check/envoy";

/// They are about the question, not about the request that it is about.
static OF_THE_QUESTION: [HeaderName; 8] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    Nginx,
    Traefik,
    Envoy,
}

/// Why a question can't be understood: whoever set up the proxy that asks has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Unclear {
    #[error("ask /check/nginx, /check/traefik or /check/envoy/PATH")]
    Path,
    #[error("the header {0} must be there, once")]
    Header(&'static str),
    #[error("the header {0} can't be read")]
    Value(&'static str),
    #[error("the header host differs from the host that is asked")]
    Host,
    /// What the client has sent, and the proxy let through.
    #[error("the target can't be read")]
    Target,
}

impl Service {
    /// Answers 200 if the request may pass, else what the proxy itself would answer.
    pub(super) async fn check(
        &self,
        request: Request<RequestBody>,
        peer: &Peer,
    ) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (mut parts, body) = request.into_parts();
        body.discard();
        let rules = self.enforcer.rules();
        let table = &*rules.table;
        let style = Style::of(&parts, &table.cors).by_status();
        let asker = match Asker::of(parts.uri.path()) {
            Ok(asker) => asker,
            Err(unclear) => return misunderstood(unclear, peer),
        };
        let inbound = match restore(&mut parts, asker) {
            Ok(()) => self.read(&mut parts, peer, table, style),
            Err(Unclear::Target) => {
                Err(replies::inbound_fault(GateFault::Target.into(), style).into())
            }
            Err(unclear) => return misunderstood(unclear, peer),
        };
        let inbound = match inbound {
            Ok(inbound) => inbound,
            Err(reply) => {
                let reply = self.turn_away(&parts, RequestBody::default(), peer, *reply, arrived);
                return self.as_asked(reply, asker);
            }
        };
        // The peer's certificate is that of the proxy that asks.
        let facts = inbound.facts(&parts, None);
        let verdict = self.enforcer.decide(&rules, &facts, arrived).await;
        let decided = verdict.at.unwrap_or(arrived);
        self.shard.answer(answer(&verdict));
        if inbound.token_fault().is_some() {
            self.shard.token_refused();
        }
        let (target, client) = inbound.into_rest();
        let refusal = match replies::refusal(&verdict, table.fields, style) {
            Some(refusal) => Some(refusal),
            // Its turn comes as it does in the proxy.
            None => {
                let turn = self.upstream.hold(verdict.delay, decided).await;
                turn.err()
                    .map(|_full| replies::local(Local::QueueFull, style))
            }
        };
        let status = refusal.as_ref().map_or(StatusCode::OK, Response::status);
        let mut asked = self.asked(&parts, target, client, arrived);
        self.log(&mut asked, &verdict, status, Instant::now());
        self.shard.responded(status.as_u16(), arrived.elapsed());
        match refusal {
            Some(refusal) => self.as_asked(refusal.map(ResponseBody::Full), asker),
            None => {
                let mut passes = Response::new(ResponseBody::Empty);
                fields::write(&verdict, table.fields, passes.headers_mut());
                passes
            }
        }
    }

    /// A refusal with the status that whoever asks understands.
    fn as_asked(
        &self,
        mut refusal: Response<ResponseBody>,
        asker: Asker,
    ) -> Response<ResponseBody> {
        let status = refusal.status();
        refusal
            .headers_mut()
            .insert(&STATUS, HeaderValue::from(status.as_u16()));
        let understood = self.refused_status.or(match asker {
            // To Envoy, these mean that it wasn't told: `failure_mode_allow` would let pass what is refused. Both say
            // that it may be tried again.
            Asker::Envoy if status.is_server_error() => Some(StatusCode::TOO_MANY_REQUESTS),
            Asker::Nginx | Asker::Traefik | Asker::Envoy => None,
        });
        *refusal.status_mut() = understood.unwrap_or(status);
        refusal
    }
}

fn misunderstood(unclear: Unclear, peer: &Peer) -> Response<ResponseBody> {
    /// Once is enough: it is all of them, or none.
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        tracing::warn!(%unclear, peer = %peer.addr, "a question can't be understood: is the proxy in front set up as docs/ENVOY.md says?");
    });
    let mut response = Response::new(ResponseBody::Full(Bytes::from(format!("{unclear}\n"))));
    *response.status_mut() = if unclear == Unclear::Path {
        StatusCode::NOT_FOUND
    } else {
        StatusCode::BAD_REQUEST
    };
    response
}

impl Asker {
    fn of(path: &str) -> Result<Self, Unclear> {
        match path {
            NGINX => Ok(Self::Nginx),
            TRAEFIK => Ok(Self::Traefik),
            _ => {
                let rest = path
                    .strip_prefix(ENVOY)
                    .filter(|rest| rest.starts_with('/'));
                rest.map(|_| Self::Envoy).ok_or(Unclear::Path)
            }
        }
    }
}

/// Makes of the head of a question that of the request which it is about.
fn restore(parts: &mut request::Parts, asker: Asker) -> Result<(), Unclear> {
    if let Some(authority) = parts.uri.authority() {
        match parts.headers.get(header::HOST) {
            Some(host)
                if !host
                    .as_bytes()
                    .eq_ignore_ascii_case(authority.as_str().as_bytes()) =>
            {
                return Err(Unclear::Host);
            }
            Some(_) => {}
            None => {
                let host =
                    HeaderValue::from_str(authority.as_str()).map_err(|_odd| Unclear::Host)?;
                parts.headers.insert(header::HOST, host);
            }
        }
    }
    let (target, method) = match asker {
        Asker::Nginx => {
            let target = told(&parts.headers, "x-original-uri")?;
            (
                target,
                told(&parts.headers, "x-original-method").and_then(method("x-original-method"))?,
            )
        }
        Asker::Traefik => {
            let target = told(&parts.headers, "x-forwarded-uri")?;
            let host = told(&parts.headers, "x-forwarded-host")?;
            parts.headers.insert(header::HOST, host);
            (
                target,
                told(&parts.headers, "x-forwarded-method")
                    .and_then(method("x-forwarded-method"))?,
            )
        }
        Asker::Envoy => {
            let asked = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
            let target = asked.strip_prefix(ENVOY).unwrap_or_default();
            let target =
                HeaderValue::from_bytes(target.as_bytes()).map_err(|_odd| Unclear::Target)?;
            (target, parts.method.clone())
        }
    };
    // Its begin would be the path here, and all of it to an app that knows no fragments.
    if target.as_bytes().contains(&b'#') {
        return Err(Unclear::Target);
    }
    // Like a request line: a path, or a URL.
    parts.uri = Uri::from_maybe_shared(Bytes::copy_from_slice(target.as_bytes()))
        .map_err(|_invalid| Unclear::Target)?;
    parts.method = method;
    parts.version = Version::HTTP_11;
    for name in &OF_THE_QUESTION {
        parts.headers.remove(name);
    }
    Ok(())
}

fn told(headers: &HeaderMap, name: &'static str) -> Result<HeaderValue, Unclear> {
    let mut values = headers.get_all(name).into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value.clone()),
        _ => Err(Unclear::Header(name)),
    }
}

fn method(name: &'static str) -> impl Fn(HeaderValue) -> Result<Method, Unclear> {
    move |value| Method::from_bytes(value.as_bytes()).map_err(|_invalid| Unclear::Value(name))
}
