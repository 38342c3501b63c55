//! Heads that come before an answer (1xx), on their way from the upstream to the client of one request.
//!
//! hyper's server has no way to send one. By HTTP/1.1 it isn't needed: such a head is text of its own, and before the
//! answer has begun, and behind all that hyper has written so far, it may stand in the client's socket without hyper
//! knowing of it ([`ConnectionMonitor::tell`]).

use http::{HeaderMap, StatusCode, Version, response};
use std::rc::Rc;

use super::headers;
use crate::proxy::server::connection_timeouts::ConnectionMonitor;

/// Of all that an upstream says before one answer, so much is passed on, and no more.
pub(in crate::proxy) const MAX_INFORMATIONAL_RESPONSES: usize = 16;
const MAX_INFORMATIONAL_BYTES: usize = 16 * 1024;

/// The way for what comes before the answer to one request.
#[derive(Debug)]
pub struct InformationalForwarder {
    client: Option<Rc<ConnectionMonitor>>,
    remaining_responses: usize,
    remaining_bytes: usize,
}

impl InformationalForwarder {
    /// To a client who can read it: one of HTTP/1.0 would take it for the answer (RFC 9110, 15.2).
    pub(in crate::proxy) fn new(request_version: Version, client: &Rc<ConnectionMonitor>) -> Self {
        let client = (request_version == Version::HTTP_11).then(|| Rc::clone(client));
        Self {
            client,
            remaining_responses: MAX_INFORMATIONAL_RESPONSES,
            remaining_bytes: MAX_INFORMATIONAL_BYTES,
        }
    }

    /// Passes a head on, changed as an answer's would be. `version`: the upstream's.
    ///
    /// Not all are: `100 Continue` is an answer to an expectation that the upstream knows nothing of, ours; and what has
    /// no room, or would have to wait until the client has read earlier answers, is of no use to him any more.
    pub(in crate::proxy) fn forward(
        &mut self,
        status: StatusCode,
        fields: &HeaderMap,
        version: Version,
    ) {
        let Some(client) = &self.client else { return };
        let is_hop_by_hop = matches!(
            status,
            StatusCode::CONTINUE | StatusCode::SWITCHING_PROTOCOLS
        );
        if is_hop_by_hop || !status.is_informational() || self.remaining_responses == 0 {
            return;
        }
        let mut parts = response::Builder::new()
            .status(status)
            .version(version)
            .body(())
            .map(http::Response::into_parts);
        let Ok((head, ())) = &mut parts else { return };
        head.headers = fields.clone();
        headers::forward_informational_response(head);
        let text = encode_head(head);
        let Some(remaining) = self.remaining_bytes.checked_sub(text.len()) else {
            return;
        };
        (self.remaining_responses, self.remaining_bytes) =
            (self.remaining_responses - 1, remaining);
        client.queue_informational_head(&text);
    }
}

/// A head as HTTP/1.1 has it.
fn encode_head(head: &response::Parts) -> Vec<u8> {
    let mut text = Vec::with_capacity(256);
    let reason = head.status.canonical_reason().unwrap_or_default();
    for part in ["HTTP/1.1 ", head.status.as_str(), " ", reason, "\r\n"] {
        text.extend_from_slice(part.as_bytes());
    }
    for (name, value) in &head.headers {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            text.extend_from_slice(part);
        }
    }
    text.extend_from_slice(b"\r\n");
    text
}
