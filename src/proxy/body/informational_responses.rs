//! Forwarding of informational (1xx) responses from the upstream to the client of one request.
//!
//! hyper's server cannot send informational responses. An informational HTTP/1.1 head is written to
//! the socket directly, after hyper's earlier output and before the final response
//! ([`ConnectionOutput`](crate::proxy::client_connection::connection_output::ConnectionOutput)).

use http::{HeaderMap, Request, StatusCode, Version};
use parking_lot::Mutex;
use std::rc::Rc;
use std::sync::Arc;

use crate::proxy::client_connection::connection_monitor::ConnectionMonitor;
use crate::proxy::http::headers;

/// Maximum number of informational responses forwarded per request; further ones are dropped.
pub(crate) const MAX_INFORMATIONAL_RESPONSES: usize = 16;
/// Maximum number of informational responses received per request. An upstream that sends more
/// floods its worker.
const MAX_RECEIVED_RESPONSES: usize = 10_000;
/// Maximum bytes of informational responses forwarded per request.
const MAX_INFORMATIONAL_BYTES: usize = 16 * 1024;

/// Forwards the informational responses of one request to its client. The default drops them all.
#[derive(Debug, Default)]
pub struct InformationalForwarder {
    client: Option<Rc<ConnectionMonitor>>,
    remaining_responses: usize,
    remaining_bytes: usize,
    received_responses: usize,
}

impl InformationalForwarder {
    /// Creates a forwarder. If the request is not HTTP/1.1, it drops all informational responses.
    ///
    /// An HTTP/1.0 client would take an informational response for the final one (RFC 9110, 15.2).
    pub(crate) fn new(request_version: Version, client: &Rc<ConnectionMonitor>) -> Self {
        let client = (request_version == Version::HTTP_11).then(|| Rc::clone(client));
        Self {
            client,
            remaining_responses: MAX_INFORMATIONAL_RESPONSES,
            remaining_bytes: MAX_INFORMATIONAL_BYTES,
            received_responses: 0,
        }
    }

    /// Counts responses from the upstream, forwarded or not. Returns `false` if there are too many.
    pub(crate) fn count_received(&mut self, responses: usize) -> bool {
        self.received_responses += responses;
        self.received_responses <= MAX_RECEIVED_RESPONSES
    }

    /// Rewrites an informational response head and queues it to be sent to the client. `version` is
    /// the HTTP version of the upstream's response.
    ///
    /// Drops `100 Continue`, because the proxy answers `Expect` itself and does not forward it.
    /// Also drops heads above the limits, and heads that would have to wait for unread earlier
    /// responses.
    pub(crate) fn forward(&mut self, status: StatusCode, fields: &HeaderMap, version: Version) {
        let Some(client) = &self.client else { return };
        let is_hop_by_hop = matches!(
            status,
            StatusCode::CONTINUE | StatusCode::SWITCHING_PROTOCOLS
        );
        if is_hop_by_hop || !status.is_informational() || self.remaining_responses == 0 {
            return;
        }
        let mut fields = fields.clone();
        headers::rewrite_informational_headers(&mut fields, version);
        let text = encode_head(status, &fields);
        let Some(remaining) = self.remaining_bytes.checked_sub(text.len()) else {
            return;
        };
        (self.remaining_responses, self.remaining_bytes) =
            (self.remaining_responses - 1, remaining);
        client.output.queue_informational_head(&text);
    }
}

/// Encodes a response head as HTTP/1.1.
fn encode_head(status: StatusCode, fields: &HeaderMap) -> Vec<u8> {
    let mut text = Vec::with_capacity(256);
    let reason = status.canonical_reason().unwrap_or_default();
    for part in ["HTTP/1.1 ", status.as_str(), " ", reason, "\r\n"] {
        text.extend_from_slice(part.as_bytes());
    }
    for (name, value) in fields {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            text.extend_from_slice(part);
        }
    }
    text.extend_from_slice(b"\r\n");
    text
}

/// Queue of one connection's 1xx responses. The lock is never contended; it exists because hyper
/// requires its callback to be `Sync`.
#[derive(Debug, Default)]
pub(crate) struct InformationalResponseQueue(Mutex<InformationalQueueState>);

#[derive(Debug, Default)]
struct InformationalQueueState {
    heads: Vec<(StatusCode, HeaderMap)>,
    /// Responses received since the last forwarding, also those beyond the capacity of `heads`.
    received: usize,
}

impl InformationalResponseQueue {
    /// Registers the queue as hyper's callback for 1xx responses to `request`.
    pub(crate) fn attach_to_request<B>(self: &Arc<Self>, request: &mut Request<B>) {
        let queue = Arc::clone(self);
        hyper::ext::on_informational(request, move |head| {
            let mut state = queue.0.lock();
            state.received += 1;
            if state.heads.len() < MAX_INFORMATIONAL_RESPONSES {
                state.heads.push((head.status(), head.headers().clone()));
            }
        });
    }

    /// Forwards the queued 1xx responses to the client. Returns `false` if the upstream sent too
    /// many.
    pub(crate) fn forward_responses(&self, interim: &mut InformationalForwarder) -> bool {
        let mut state = self.0.lock();
        for (status, fields) in state.heads.drain(..) {
            interim.forward(status, &fields, Version::HTTP_11);
        }
        interim.count_received(std::mem::take(&mut state.received))
    }
}
