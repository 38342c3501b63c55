//! Reads the start of a request's body for the policies that depend on it.

use http::request;

use super::ProxyService;
use super::request_summary::RequestContext;
use crate::policy::{BodyFacts, BodyFormat, Facts, read_body};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::{RequestBody, UpstreamError};

impl ProxyService {
    /// Reads what the policies need of the body, and keeps it for the upstream. A body that can't
    /// be read, or is longer than they read, is not waited for.
    ///
    /// # Errors
    /// Fails if the client does not send the body.
    pub(super) async fn read_body(
        &self,
        parts: &request::Parts,
        inbound: &InboundRequest,
        context: &RequestContext<'_>,
        body: &RequestBody,
    ) -> Result<Option<BodyFacts>, UpstreamError> {
        let table = context.table;
        let size = inbound.target.content_length;
        let unread = BodyFacts::unreadable(size);
        let facts = Facts {
            body: Some(&unread),
            ..inbound.facts(parts, context.peer.certificate_subject.as_ref())
        };
        let most = table.body_bytes_to_read(&facts);
        if most == 0 {
            return Ok(None);
        }
        let format = BodyFormat::from_headers(&parts.headers);
        let is_decided = size.is_some_and(|size| size > most || format.is_none());
        if is_decided || !body.may_be_read_ahead() {
            return Ok(Some(unread));
        }
        let whole = body.read_whole(most).await;
        let whole = whole.map_err(|error| body.client_error(&error))?;
        let read = |whole| {
            let checks = table.client.value_checks;
            read_body(whole, format, table.body_pointers(), checks)
        };
        Ok(Some(whole.as_deref().map_or(unread, read)))
    }
}
