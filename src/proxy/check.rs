//! Whether a request may pass that somebody else forwards: nginx (`auth_request`), Traefik (`forwardAuth`), Envoy
//! (`ext_authz` by HTTP). The request is made again of what they tell, and then read and decided as if it had come here.
//!
//! Each tells it in its own way, and passes on what clients send in the others' ways: so the path that is asked says who
//! asks, and nothing is guessed.

use super::body::{RequestBody, ResponseBody};
use super::fields;
use super::replies::{self, Local, Style};
use super::server::Peer;
use super::service::{Service, answer};
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header, request,
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

/// Why a question can't be understood: whoever set up the proxy that asks has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Unclear {
    #[error("ask /check/nginx, /check/traefik or /check/envoy/PATH")]
    Path,
    #[error("the header {0} must be there, once")]
    Header(&'static str),
    #[error("the header {0} can't be read")]
    Value(&'static str),
}

impl Service {
    /// Answers 200 if the request may pass, else what the proxy itself would answer.
    pub(super) async fn check(&self, request: Request<RequestBody>, peer: &Peer) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (mut parts, body) = request.into_parts();
        body.discard();
        let rules = self.enforcer.rules();
        let table = &*rules.table;
        let style = Style::of(&parts, &table.cors);
        if let Err(unclear) = restore(&mut parts) {
            tracing::debug!(%unclear, peer = %peer.addr, "a question can't be understood");
            return misunderstood(unclear);
        }
        let inbound = match self.read(&mut parts, peer, table, style) {
            Ok(inbound) => inbound,
            Err(reply) => {
                let reply = self.turn_away(&parts, RequestBody::default(), peer, *reply, arrived);
                return self.as_asked(reply);
            }
        };
        let facts = inbound.facts(&parts, peer.certificate.as_ref());
        let verdict = self.enforcer.decide(&rules, &facts, arrived).await;
        let decided = verdict.at.unwrap_or(arrived);
        self.shard.answer(answer(&verdict));
        if inbound.token_fault().is_some() {
            self.shard.token_refused();
        }
        let (target, client) = inbound.into_rest();
        let mut reply = match replies::refusal(&verdict, table.fields, style) {
            Some(reply) => reply,
            // Its turn comes as it does in the proxy.
            None => match self.upstream.hold(verdict.delay, decided).await {
                Ok(_) => Response::default(),
                Err(_) => replies::local(Local::QueueFull, style),
            },
        };
        if reply.status() == StatusCode::OK {
            fields::write(&verdict, table.fields, reply.headers_mut());
        }
        let mut asked = self.asked(&parts, target, client, arrived);
        self.log(&mut asked, &verdict, reply.status(), Instant::now());
        self.shard.responded(reply.status().as_u16(), arrived.elapsed());
        self.as_asked(reply.map(ResponseBody::Full))
    }

    /// A refusal with the status that whoever asks understands.
    fn as_asked(&self, mut reply: Response<ResponseBody>) -> Response<ResponseBody> {
        if reply.status().is_success() {
            return reply;
        }
        let status = HeaderValue::from(reply.status().as_u16());
        reply.headers_mut().insert(&STATUS, status);
        if let Some(status) = self.refused_status {
            *reply.status_mut() = status;
        }
        reply
    }
}

fn misunderstood(unclear: Unclear) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::Full(Bytes::from(format!("{unclear}\n"))));
    *response.status_mut() =
        if unclear == Unclear::Path { StatusCode::NOT_FOUND } else { StatusCode::BAD_REQUEST };
    response
}

/// Makes of the head of a question that of the request which it is about.
fn restore(parts: &mut request::Parts) -> Result<(), Unclear> {
    let asked = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let (target, method) = match parts.uri.path() {
        NGINX => {
            let target = told(&parts.headers, "x-original-uri")?;
            (target, told(&parts.headers, "x-original-method").and_then(method("x-original-method"))?)
        }
        TRAEFIK => {
            let target = told(&parts.headers, "x-forwarded-uri")?;
            let host = told(&parts.headers, "x-forwarded-host")?;
            parts.headers.insert(header::HOST, host);
            (target, told(&parts.headers, "x-forwarded-method").and_then(method("x-forwarded-method"))?)
        }
        _ => match asked.strip_prefix(ENVOY) {
            Some(target) if target.starts_with('/') => {
                let target = HeaderValue::from_str(target).map_err(|_odd| Unclear::Path)?;
                (target, parts.method.clone())
            }
            _ => return Err(Unclear::Path),
        },
    };
    if !parts.headers.contains_key(header::HOST)
        && let Some(authority) = parts.uri.authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        parts.headers.insert(header::HOST, host);
    }
    // Like a request line: a path, or a URL.
    parts.uri = Uri::from_maybe_shared(Bytes::copy_from_slice(target.as_bytes()))
        .map_err(|_invalid| Unclear::Value("that tells the path"))?;
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
