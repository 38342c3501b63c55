//! Reads the start of a request's body for the policies that depend on it.

use http::request;
use tokio::time::Instant;

use super::ProxyService;
use super::request_summary::RequestContext;
use crate::policy::{BodyFacts, BodyFormat, read_body};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::{RequestBody, UpstreamError};

impl ProxyService {
    /// Reads what the policies need of the body, and keeps it for the upstream. A body of another
    /// format, or with a larger `Content-Length`, is not waited for.
    ///
    /// If the client does not send the body, the request is not admitted. Returns the time too.
    pub(super) async fn read_body<T>(
        &self,
        (parts, inbound): (&request::Parts, &InboundRequest),
        context: &RequestContext<'_>,
        body: &RequestBody,
        admission: &mut Result<T, Box<UpstreamError>>,
    ) -> (Option<Box<BodyFacts>>, Instant) {
        let table = context.table;
        let size = inbound.target.content_length;
        let mut read = BodyFacts::unreadable(size);
        let certificate = context.peer.certificate_subject.as_ref();
        let most = table.body_bytes_to_read(&inbound.facts(parts, certificate, Some(&read)));
        if most == 0 {
            return (None, context.arrived_at);
        }
        let format = BodyFormat::from_headers(&parts.headers);
        let is_known_unreadable = format.is_none() || size.is_some_and(|size| size > most);
        if !is_known_unreadable && body.may_be_read_ahead() {
            match body.read_whole(most).await {
                Ok(None) => {}
                Ok(Some(whole)) => {
                    let checks = table.client.value_checks;
                    read = read_body(&whole, format, table.body_pointers(), checks);
                }
                Err(error) => *admission = Err(Box::new(body.client_error(&error))),
            }
        }
        (Some(Box::new(read)), Instant::now())
    }
}
